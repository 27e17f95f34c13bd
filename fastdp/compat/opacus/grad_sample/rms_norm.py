"""Per-sample gradients of one layer as Opacus computes them: its own functions, for who calls them. fastdp's engine does not."""

from opacus.grad_sample.rms_norm import (
    compute_rms_norm_grad_sample,
)

__all__ = [
    "compute_rms_norm_grad_sample",
]
