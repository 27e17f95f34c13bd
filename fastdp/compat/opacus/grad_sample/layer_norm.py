"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.layer_norm import compute_layer_norm_grad_sample

__all__ = ["compute_layer_norm_grad_sample"]
