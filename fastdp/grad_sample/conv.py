"""Convolutions, plain and transposed, in 1, 2 and 3 dimensions, with every option of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch_axis.calls import bind
from ..batch_axis.layout import Layout
from ..batch_axis.row_groups import Groups
from ..ops import conv as conv_ops
from ..ops.common import sum_over
from ..ops.geometry import Geometry, spatial
from .captured_call import Captured, Context, capture
from .cost_model import Shape
from .forward_pass import ForwardPass, stored_if_planned
from .linear import Many, as_autocast, by_address, computed, is_short
from .parameter_use import ParameterUse, Positioned, Regrouped, Stored
from .planner import Planner
from .rules import by_sample, made_of_data, sample_layout, use_rule


class Conv(Positioned):
    """x [B,F,C,*], g [B,F,O,*]: F images of each sample."""

    route = "auto"
    # MEASURED on one core, 24 uses taken together: 12 times as fast at 1,600 numbers, 1.4 times at 35,000, and as fast
    # as one by one at 42,000.
    abreast_limit = 1 << 15

    def __init__(self, operand: Tensor, x: Tensor, g: Tensor, geometry: Geometry, name: str) -> None:
        super().__init__(operand, x.size(0), name)
        self.x, self.g, self.geometry = x, g, geometry
        self.shape: Shape = shape_of(x, g, geometry)

    def plan(self, planner: Planner) -> None:
        route = planner.norm_route(self.shape, self.x.device, is_short(self.x))
        dense = conv_ops.is_dense(self.geometry)
        self.route = "gram" if dense and route in ("gram", "T=1") else "direct"

    def sides(self) -> tuple[Tensor, Tensor]:
        return self.x, self.g

    def of(self, first: Tensor, second: Tensor, name: str) -> Conv:
        return Conv(self.operand, first, second, self.geometry, name)

    def is_like(self, other: Conv) -> bool:
        sizes = (self.x.shape[2:], self.g.shape[2:], self.geometry)
        return sizes == (other.x.shape[2:], other.g.shape[2:], other.geometry)

    def regroup(self, groups: Groups) -> ParameterUse:
        """Images of a group one after the other, unless more than half of them would be padding."""
        few = groups.most * groups.count <= 2 * groups.records
        return super().regroup(groups) if few else Regrouped(self, groups)

    def per_sample(self, low: int, high: int) -> Tensor:
        return conv_ops.per_sample(self.x[low:high], self.g[low:high], self.geometry)

    def alike(self) -> Any:
        if (pair := self.product()) is not None:
            a, g = pair
            return Many, a.shape, g.shape, a.stride(), g.stride(), a.dtype, a.device, self.operand.shape, self.route
        return None if self.geometry.transposed else super().alike()

    def abreast(self, others: Sequence[Any]) -> Any:
        return super().abreast(others) if self.product() is None else Many([self, *others])

    def product(self) -> tuple[Tensor, Tensor] | None:
        """Of a convolution of 1 x 1 its rows, where kernels find them by their addresses."""
        pair = None if self.operand.dtype == torch.float64 else conv_ops.product_of(self.x, self.g, self.geometry)
        return pair if pair is not None and by_address(*pair) else None

    @property
    def whole(self) -> tuple[Tensor, Tensor]:
        """What kernels are given of a convolution that is a matrix product."""
        pair = self.product()
        assert pair is not None
        return pair

    def sums_abreast(self, count: int, factors: Tensor) -> Tensor:
        return conv_ops.clipped_sums(self.x, self.g, factors, self.geometry, count)

    def norm_sq(self) -> Tensor:
        return conv_ops.bounded_norm_sq(self.x, self.g, self.geometry, self.route)

    def rounding(self) -> Tensor | None:
        return conv_ops.rounding(self.x, self.g, self.geometry)

    def clipped_sum(self, factors: Tensor, into: Tensor | None = None) -> Tensor:
        return conv_ops.clipped_sum(self.x, self.g, factors, self.geometry)


def shape_of(x: Tensor, g: Tensor, geometry: Geometry) -> Shape:
    """A convolution as a matrix product over its output positions (of a transposed one: its input positions)."""
    side = x if geometry.transposed else g
    t = side.size(1) * math.prod(side.shape[3:])
    o = geometry.weight[0]
    groups = geometry.groups if not geometry.transposed else max(geometry.groups, 2)  # either way no gram
    return Shape("conv", x.size(0), t, math.prod(geometry.weight) // max(o, 1), o, groups)


class _Conv(Captured):
    by_shapes = fresh = native = by_rows = True

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout, geometry: Geometry) -> None:
        super().__init__(forward_pass, name, layout)
        self.geometry = geometry

    def forward(self, ctx: Context, *data: Tensor) -> Tensor:
        x = as_autocast(ctx, data[0])
        (weight, bias), geo = ctx.values, self.geometry
        return torch.convolution(
            x, weight, bias, list(geo.stride), list(geo.padding), list(geo.dilation), geo.transposed,
            list(geo.output_padding), geo.groups,
        )  # fmt: skip

    def as_computed(self, x: Tensor) -> Tensor:
        return computed(x)

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        return (self.as_computed(data[0]),)

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not ctx.wanted[0]:
            return []
        geo = self.geometry
        return [
            torch.ops.aten.convolution_backward(
                grads[0], saved[0], ctx.values[0], None, list(geo.stride), list(geo.padding), list(geo.dilation),
                geo.transposed, list(geo.output_padding), geo.groups, [True, False, False],
            )[0]
        ]  # fmt: skip

    def rows(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, g = (by_sample(t, self.layout) for t in (saved[0], grads[0]))
        sums = (sum_over(g, [d for d in range(1, g.dim()) if d != 2]),) if ctx.learned[1] else ()
        return (*conv_ops.laid_out(x, g, self.geometry), *sums) if ctx.learned[0] else sums

    def record_rows(self, ctx: Context, rows: tuple[Tensor, ...]) -> None:
        (weight, bias), forward_pass = ctx.operands, ctx.forward_pass
        if ctx.learned[0]:
            x, g = rows[:2]
            use: ParameterUse = forward_pass.regrouped(Conv(weight, x, g, self.geometry, self.name))
            assert use.shape is not None
            forward_pass.record(stored_if_planned(forward_pass, use, use.shape, x, g))
        if ctx.learned[1]:
            forward_pass.record(Stored(bias, rows[-1], self.name))


_DIMENSIONS = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_TRANSPOSED = {F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3}


@use_rule(*_DIMENSIONS)
def capture_conv(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.conv1d, conv2d, conv3d: stride, padding (numbers, 'valid', 'same'), dilation, groups."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight, bias, stride, padding, dilation, groups = bind(args, kwargs, *names)
    n = _DIMENSIONS[func]
    stride, dilation = spatial(_or(stride, 1), n), spatial(_or(dilation, 1), n)
    padding = _or(padding, 0)
    if padding == "valid":
        padding = 0
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(size % 2 for size in total):  # torch pads one more at the end
            pads = [p for size in reversed(total) for p in (size // 2, size - size // 2)]
            x, padding = forward_pass.traced(F.pad, x, pads), 0
        else:
            padding = [size // 2 for size in total]
    geometry = Geometry(tuple(weight.shape), stride, spatial(padding, n), dilation, _or(groups, 1), False, (0,) * n)
    return _capture(forward_pass, func.__name__, x, weight, bias, geometry)


@use_rule(*_TRANSPOSED)
def capture_conv_transpose(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """F.conv_transpose1d, 2d, 3d."""
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    x, weight, bias, stride, padding, output_padding, groups, dilation = bind(args, kwargs, *names)
    n = _TRANSPOSED[func]
    sizes = [spatial(_or(v, d), n) for v, d in ((stride, 1), (padding, 0), (dilation, 1), (output_padding, 0))]
    geometry = Geometry(tuple(weight.shape), sizes[0], sizes[1], sizes[2], _or(groups, 1), True, sizes[3])
    return _capture(forward_pass, func.__name__, x, weight, bias, geometry)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _capture(
    forward_pass: ForwardPass, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
) -> Any:
    if not made_of_data(forward_pass, x) or math.prod(x.shape[1:]) == 0 or made_of_data(forward_pass, weight, bias):
        return NotImplemented
    layout = sample_layout(forward_pass, x, name)
    if x.dim() != weight.dim() or (layout.batch > 1 and layout.dim != 0):
        return NotImplemented  # an image without a batch dimension
    return capture(_Conv(forward_pass, name, layout, geometry), Context(forward_pass, weight, bias), x)
