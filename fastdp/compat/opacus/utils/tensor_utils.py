"""Helpers over tensors: Opacus's own."""

from opacus.utils.tensor_utils import (
    calc_sample_norms,
    calc_sample_norms_one_layer,
    filter_dilated_rows,
    sum_over_all_but_batch_and_last_n,
    unfold2d,
    unfold3d,
)

__all__ = [
    "calc_sample_norms",
    "calc_sample_norms_one_layer",
    "filter_dilated_rows",
    "sum_over_all_but_batch_and_last_n",
    "unfold2d",
    "unfold3d",
]
