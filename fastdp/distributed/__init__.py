"""Several processes that train one model together, by torch.distributed: who they are, what they say and sum."""
