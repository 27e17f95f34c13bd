"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.rms_norm import compute_rms_norm_grad_sample

__all__ = ["compute_rms_norm_grad_sample"]
