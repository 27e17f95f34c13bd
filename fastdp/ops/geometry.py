"""The geometry of a convolution, and what follows from it: patches, output positions, PyTorch's weight gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import full_float32

Sizes = int | Sequence[int]


class Geometry(NamedTuple):
    """Everything about a convolution but its data. `weight` is the shape of the weight."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


def spatial(value: Sizes, n: int) -> tuple[int, ...]:
    """One number for all spatial dimensions, or one for each."""
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


def geometry_of(x: Tensor, g: Tensor, kernel_size: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes,
              groups: int) -> Geometry:  # fmt: skip
    """Of the operators' arguments: x [B,C,*], g [B,O,*]. Raises ValueError where they do not fit together."""
    n = x.dim() - 2
    if n not in (1, 2, 3) or g.dim() != x.dim() or x.size(0) != g.size(0):
        raise ValueError(f"expected x [B,C,*] and g [B,O,*] of 1 to 3 dimensions; got {x.shape} and {g.shape}")
    if groups < 1 or x.size(1) % groups or g.size(1) % groups:
        raise ValueError(f"{groups} groups do not divide {x.size(1)} and {g.size(1)} channels")
    sizes = [spatial(value, n) for value in (kernel_size, stride, padding, dilation)]
    if any(len(value) != n for value in sizes):
        raise ValueError(f"expected one number or {n} for kernel_size, stride, padding, dilation; got {sizes}")
    kernel, strides, paddings, dilations = sizes
    if min(*kernel, *strides, *dilations) < 1 or min(paddings) < 0:
        raise ValueError(f"kernel_size, stride and dilation must be 1 or more, padding 0 or more; got {sizes}")
    expected = [
        (x.size(2 + d) + 2 * paddings[d] - dilations[d] * (kernel[d] - 1) - 1) // strides[d] + 1 for d in range(n)
    ]
    if list(g.shape[2:]) != expected:
        raise ValueError(f"expected g [B,O,{','.join(map(str, expected))}] for x {x.shape}; got {g.shape}")
    return Geometry((g.size(1), x.size(1) // groups, *kernel), strides, paddings, dilations, groups)


def weight_gradient(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """The weight gradient summed over the batch, by PyTorch's own convolution."""
    weight = x.new_zeros(1).expand(geometry.weight)
    n = x.dim() - 2
    with full_float32(x):
        found: Tensor = torch.ops.aten.convolution_backward(
            g, x, weight, None, list(geometry.stride), list(geometry.padding), list(geometry.dilation),
            geometry.transposed, list(geometry.output_padding or (0,) * n), geometry.groups, [False, True, False],
        )[1]  # fmt: skip
    return found


def patches_of(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
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


def is_dense(geometry: Geometry) -> bool:
    """A matrix product over patches: no groups, not transposed."""
    return geometry.groups == 1 and not geometry.transposed


def positions_of(g: Tensor, geometry: Geometry) -> int:
    """Terms of a sum that makes one element of a sample's gradient; g [B,F,O,*]."""
    sizes = list(g.shape[3:])
    if geometry.transposed:  # those of x
        for d, pads in enumerate(geometry.output_padding or (0,) * len(sizes)):
            reach = geometry.dilation[d] * (geometry.weight[2 + d] - 1) + 1 + pads - 2 * geometry.padding[d]
            sizes[d] = (sizes[d] - reach) // geometry.stride[d] + 1
    return math.prod(sizes) * g.size(1)
