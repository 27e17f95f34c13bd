"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.dp_multihead_attention import compute_sequence_bias_grad_sample

__all__ = ["compute_sequence_bias_grad_sample"]
