"""Opacus's own functions for one layer at a time, by their path; fastdp's engine does not call them."""

from opacus.grad_sample.conv import (
    compute_conv_grad_sample,
    convolution2d_backward_as_a_convolution,
)

__all__ = ["compute_conv_grad_sample", "convolution2d_backward_as_a_convolution"]
