"""Private training in several processes: agreement, sums and errors over torch.distributed."""
