"""Per-sample gradients of one layer by Opacus's own functions, for who calls them: fastdp does not."""

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
