"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.linear import (
    compute_linear_grad_sample,
    compute_linear_norm_sample,
)

__all__ = ["compute_linear_grad_sample", "compute_linear_norm_sample"]
