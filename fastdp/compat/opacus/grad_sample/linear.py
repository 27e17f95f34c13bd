"""Per-sample gradients of one layer by Opacus's own functions, for who calls them: fastdp does not."""

from opacus.grad_sample.linear import (
    compute_linear_grad_sample,
    compute_linear_norm_sample,
)

__all__ = [
    "compute_linear_grad_sample",
    "compute_linear_norm_sample",
]
