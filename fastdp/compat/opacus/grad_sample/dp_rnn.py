"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.dp_rnn import compute_rnn_linear_grad_sample

__all__ = ["compute_rnn_linear_grad_sample"]
