"""Per-sample gradient operators. Each is defined by plain PyTorch that works on any device.

In the shapes, B is the number of samples, T the number of positions of a sample, I the number of inputs, O the number
of outputs, V the number of rows of a table, and d the number of columns. Operators accumulate in float32, or in float64
if the inputs are float64.
"""

from .clip import clip_factors
from .conv import conv_clipped_sum, conv_norm_sq, conv_per_sample
from .embedding import embedding_clipped_sum, embedding_norm_sq, embedding_per_sample, tied_cross_term
from .linear import linear_clipped_sum, linear_norm_sq, linear_per_sample
from .noise import Noise, noise_
from .norm import group_affine_per_sample, norm_affine_per_sample, rms_affine_per_sample
from .routed import routed_clipped_sum, routed_norm_sq, routed_per_sample
from .rows import square_sum, weighted_sum
from .step import noisy_adamw_step_, noisy_sgd_step_
from .user_kernels import check_kernel, register_kernel, remove_kernel

__all__ = [
    "Noise",
    "check_kernel",
    "clip_factors",
    "conv_clipped_sum",
    "conv_norm_sq",
    "conv_per_sample",
    "embedding_clipped_sum",
    "embedding_norm_sq",
    "embedding_per_sample",
    "group_affine_per_sample",
    "linear_clipped_sum",
    "linear_norm_sq",
    "linear_per_sample",
    "noise_",
    "noisy_adamw_step_",
    "noisy_sgd_step_",
    "norm_affine_per_sample",
    "register_kernel",
    "remove_kernel",
    "rms_affine_per_sample",
    "routed_clipped_sum",
    "routed_norm_sq",
    "routed_per_sample",
    "square_sum",
    "tied_cross_term",
    "weighted_sum",
]
