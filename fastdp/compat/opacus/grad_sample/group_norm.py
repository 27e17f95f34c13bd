"""Per-sample gradients of one layer by Opacus's own functions, for who calls them: fastdp does not."""

from opacus.grad_sample.group_norm import (
    compute_group_norm_grad_sample,
)

__all__ = [
    "compute_group_norm_grad_sample",
]
