"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.functorch import (
    ft_compute_per_sample_gradient,
    make_functional,
    prepare_layer,
)

__all__ = ["ft_compute_per_sample_gradient", "make_functional", "prepare_layer"]
