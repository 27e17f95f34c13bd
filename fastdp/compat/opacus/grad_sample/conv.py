"""Per-sample gradients of one layer by Opacus's own functions, for who calls them: fastdp does not."""

from opacus.grad_sample.conv import (
    compute_conv_grad_sample,
    convolution2d_backward_as_a_convolution,
)

__all__ = [
    "compute_conv_grad_sample",
    "convolution2d_backward_as_a_convolution",
]
