"""A convolution as its kernels take it: shapes checked, one to three dimensions taken as three, channels laid out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastdp.ops.geometry import Sizes as Size
from fastdp.ops.geometry import geometry_of

from . import common
from .common import VECTOR, is_half


class Geometry(NamedTuple):
    """Kernel, stride, padding and dilation along depth, height and width."""

    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]


class Problem(NamedTuple):
    """A convolution as the kernels take it: x [B,C,D,H,W], g [B,O,P], and the weight's shape."""

    x: Tensor
    g: Tensor
    out: tuple[int, int]  # height and width of the output
    geometry: Geometry
    groups: int
    weight: tuple[int, ...]
    last: bool = False  # channels are the inner elements of patches: `wide`

    @property
    def inputs(self) -> int:
        """Elements of a patch in one group."""
        return math.prod(self.weight[1:])

    def sizes(self) -> tuple[int, ...]:
        return (
            self.g.size(2),
            self.inputs,
            self.weight[1],
            self.weight[0] // self.groups,
            *self.x.shape[2:],
            *self.out,
            -(-(1 << 31) // max(self.out[1], 1)),
        )

    def strides(self) -> tuple[int, ...]:
        x, g = self.x.stride(), self.g.stride()
        channels, outputs = self.weight[1], self.weight[0] // self.groups
        return (x[0], x[1] * channels, *x[1:], g[0], g[1] * outputs, *g[1:])

    def constants(self) -> dict[str, tuple[int, ...] | bool]:
        """LAST; FAST: positions are divided by a multiplication; DEEP: over depth, too; FAR: offsets exceed 32 bits."""
        deep = self.x.size(2) > 1 or self.geometry.kernel[0] > 1 or self.geometry.padding[0] > 0
        reach = [(size + 2 * (k + pad) * d) * stride for size, stride, k, pad, d in zip(
            self.x.shape[2:], self.x.stride()[2:], self.geometry.kernel, self.geometry.padding, self.geometry.dilation,
            strict=True)]  # fmt: skip
        far = max(sum(reach) + self.x.size(1) * self.x.stride(1), (self.g.size(2) + 256) * self.g.stride(2)) >= 1 << 31
        fast = 1 < self.out[1] and (self.g.size(2) + 256) * self.out[1] < 1 << 31
        names = {name.upper(): values for name, values in self.geometry._asdict().items()}
        return names | {"LAST": self.last, "FAST": fast, "DEEP": deep, "FAR": far}

    def copied(self) -> tuple[bool, bool]:
        """Whether `wide` copies x, and g."""
        if not is_half(self.x) or self.weight[1] % VECTOR:
            return False, False
        g = self.g
        vectors = g.stride(1) == 1 or (g.stride(2) == 1 and g.size(2) % VECTOR == 0)
        return not channels_last(self.x), g.size(1) // self.groups % VECTOR == 0 and not vectors

    def wide(self) -> Problem:
        """With 16-bit numbers as they are loaded 16 bytes at a time, where channels come in whole vectors: both sides
        with channels last, copied once unless they lie so. A number is gathered some ten times or more."""
        if not is_half(self.x) or self.weight[1] % VECTOR:
            return self
        (of_x, of_g), x, g = self.copied(), self.x, self.g
        if of_x:
            x = x.contiguous(memory_format=torch.channels_last_3d)
        return self._replace(x=x, g=g.mT.contiguous().mT if of_g else g, last=True)


def _three(values: tuple[int, ...], default: int) -> tuple[int, int, int]:
    return (default,) * (3 - len(values)) + values  # type: ignore[return-value]


def problem(x: Tensor, g: Tensor, kernel_size: Size, stride: Size, padding: Size, dilation: Size,
            groups: int) -> Problem:  # fmt: skip
    """Checks shapes and takes one or two dimensions as three; raises ValueError."""
    own = geometry_of(x, g, kernel_size, stride, padding, dilation, groups)
    geometry = Geometry(_three(own.weight[2:], 1), _three(own.stride, 1), _three(own.padding, 0),
                        _three(own.dilation, 1))  # fmt: skip
    x, g = common.same_type(x, g)
    size = _three(tuple(x.shape[2:]), 1)
    height, width = _three(tuple(g.shape[2:]), 1)[1:]
    return Problem(x.view(*x.shape[:2], *size), g.flatten(2), (height, width), geometry, groups, own.weight)


def channels_last(x: Tensor) -> bool:
    """Whether channels are neighbours, and all else whole vectors apart."""
    rest = [stride for d, stride in enumerate(x.stride()) if d != 1 and x.size(d) > 1]
    return x.stride(1) == 1 and all(stride % VECTOR == 0 for stride in rest) and x.storage_offset() % VECTOR == 0
