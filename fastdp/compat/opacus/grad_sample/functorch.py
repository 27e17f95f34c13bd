"""Per-sample gradients of one layer as Opacus computes them: its own functions, for who calls them. fastdp's engine does not."""

from opacus.grad_sample.functorch import (
    ft_compute_per_sample_gradient,
    make_functional,
    prepare_layer,
)

__all__ = [
    "ft_compute_per_sample_gradient",
    "make_functional",
    "prepare_layer",
]
