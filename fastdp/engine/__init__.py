"""Turns one ordinary backward into norms and clipped sums of per-sample gradients."""
