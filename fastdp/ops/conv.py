"""Weight gradients of convolutions per sample, in 1, 2 and 3 dimensions, also transposed.

A convolution is a matrix product over its patches; source: Bu et al. 2022, arXiv 2205.10683.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import linear
from .common import CHUNK_BYTES, accumulate, chunks, scaled, square_sum, without_dropped

IM2COL_POSITIONS = 320  # below this many output positions patches + matmul beat a convolution a sample


class Geometry(NamedTuple):
    """Everything about a convolution but its data. `weight` is the shape of the weight."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


def spatial(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """One number for all spatial dimensions, or one for each."""
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


def _geometry(x: Tensor, g: Tensor, kernel_size: int | Sequence[int], stride: int | Sequence[int],
              padding: int | Sequence[int], dilation: int | Sequence[int], groups: int) -> Geometry:  # fmt: skip
    n = x.dim() - 2
    weight = (g.size(1), x.size(1) // groups, *spatial(kernel_size, n))
    return Geometry(weight, spatial(stride, n), spatial(padding, n), spatial(dilation, n), groups)


def weight_gradient(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The weight gradient summed over the batch, by PyTorch's own convolution."""
    weight = x.new_empty(1).expand(geometry.weight)
    n = x.dim() - 2
    return torch.ops.aten.convolution_backward(
        g, x, weight, None, list(geometry.stride), list(geometry.padding), list(geometry.dilation),
        geometry.transposed, list(geometry.output_padding or (0,) * n), geometry.groups, [False, True, False],
    )[1]  # fmt: skip


def _patches(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """im2col: [B,C,*spatial] -> [B, C * kernel, positions]."""
    n = x.dim() - 2
    padded = F.pad(x, [p for size in reversed(geometry.padding) for p in (size, size)])
    kernel, positions = geometry.weight[2:], g.shape[2:]
    strides = padded.stride()
    view = padded.as_strided(
        (*padded.shape[:2], *kernel, *positions),
        (*strides[:2], *[strides[2 + d] * geometry.dilation[d] for d in range(n)],
         *[strides[2 + d] * geometry.stride[d] for d in range(n)]),
    )  # fmt: skip
    return view.reshape(x.size(0), x.size(1) * math.prod(kernel), math.prod(positions))


def per_sample(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The weight gradient of each sample, [B, *weight]. x [B,F,C,*], g [B,F,O,*]: F images a sample."""
    x, g = accumulate(x), accumulate(g)
    batch, images = x.shape[:2]
    if batch == 0 or images == 0:
        return x.new_zeros((batch, *geometry.weight))
    if is_dense(geometry) and (math.prod(geometry.weight[2:]) == 1 or math.prod(g.shape[3:]) <= IM2COL_POSITIONS):
        patches = _patches(x.flatten(0, 1), g.flatten(0, 1), geometry)
        rows = torch.bmm(g.flatten(0, 1).flatten(2), patches.mT).unflatten(0, (batch, images))
        return (rows.squeeze(1) if images == 1 else rows.sum(1)).view(batch, *geometry.weight)
    return torch.stack([weight_gradient(x[b], g[b], geometry) for b in range(batch)])


def is_dense(geometry: Geometry) -> bool:
    """A matrix product over patches: no groups, not transposed."""
    return geometry.groups == 1 and not geometry.transposed


def gram_is_cheaper(g: Tensor, geometry: Geometry) -> bool:
    """Whether few output positions make the gram route the cheaper one; g [B,F,O,*]."""
    positions = math.prod(g.shape[3:]) * g.size(1)
    return is_dense(geometry) and linear.gram_is_cheaper(positions, math.prod(geometry.weight[1:]), g.size(2))


def norm_sq(x: Tensor, g: Tensor, geometry: Geometry, method: str = "auto") -> Tensor:
    """Squared norm of each sample's weight gradient, [B]; formed in chunks, not stored."""
    x, g = accumulate(x), accumulate(g)
    batch, images = x.shape[:2]
    inputs, positions = math.prod(geometry.weight[1:]), math.prod(g.shape[3:]) * images
    gram = gram_is_cheaper(g, geometry) if method == "auto" else method == "gram"
    size = inputs * positions + (0 if gram else math.prod(geometry.weight))
    parts = []
    for low, high in chunks(batch, 4 * size, CHUNK_BYTES // 4):
        if gram:
            a = _patches(x[low:high].flatten(0, 1), g[low:high].flatten(0, 1), geometry).mT  # [b F, P, I]
            rows = g[low:high].flatten(3).mT.flatten(1, 2)  # [b, F P, O]
            parts.append(linear.linear_norm_sq(a.reshape(high - low, positions, inputs), rows, "gram"))
        else:
            parts.append(square_sum(per_sample(x[low:high], g[low:high], geometry)))
    return torch.cat(parts) if parts else x.new_zeros(0, dtype=torch.float64)


def clipped_sum(x: Tensor, g: Tensor, c: Tensor, geometry: Geometry) -> Tensor:
    """sum_b c_b (weight gradient of sample b), by one convolution over scaled output gradients."""
    x, g = without_dropped(accumulate(x), c), scaled(accumulate(g), c)
    if x.size(0) * x.size(1) == 0:
        return x.new_zeros(geometry.weight)
    return weight_gradient(x.flatten(0, 1), g.flatten(0, 1), geometry)


def conv_per_sample(x: Tensor, g: Tensor, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                    padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1,
                    groups: int = 1) -> Tensor:  # fmt: skip
    """The weight gradient of each sample: x [B,C,*], g [B,O,*] -> [B, O, C / groups, *kernel_size]."""
    geometry = _geometry(x, g, kernel_size, stride, padding, dilation, groups)
    return per_sample(x.unsqueeze(1), g.unsqueeze(1), geometry)


def conv_norm_sq(x: Tensor, g: Tensor, kernel_size: int | Sequence[int], stride: int | Sequence[int] = 1,
                 padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
                 method: str = "auto", dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """Squared norm of each sample's weight gradient, [B]; x [B,C,*], g [B,O,*], 1 to 3 dimensions."""
    geometry = _geometry(x, g, kernel_size, stride, padding, dilation, groups)
    return norm_sq(x.unsqueeze(1), g.unsqueeze(1), geometry, method)


def conv_clipped_sum(x: Tensor, g: Tensor, c: Tensor, kernel_size: int | Sequence[int],
                     stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
                     dilation: int | Sequence[int] = 1, groups: int = 1,
                     out: Tensor | None = None) -> Tensor:  # fmt: skip
    """sum_b c_b (weight gradient of sample b), of the weight's shape; added to `out` if given."""
    geometry = _geometry(x, g, kernel_size, stride, padding, dilation, groups)
    total = clipped_sum(x.unsqueeze(1), g.unsqueeze(1), c, geometry)
    return total if out is None else out.add_(total)
