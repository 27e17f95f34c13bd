"""Per-sample gradients of one layer as Opacus computes them: its own functions, for who calls them. fastdp's engine does not."""

from opacus.grad_sample.layer_norm import (
    compute_layer_norm_grad_sample,
)

__all__ = [
    "compute_layer_norm_grad_sample",
]
