"""Affine parameters of normalisations: layer, RMS, group, instance norm, batch norm in eval mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..batch_axis.calls import Call, bind
from ..batch_axis.layout import Layout
from ..batch_axis.propagate import layouts_of
from ..errors import SampleMixingError
from ..ops.common import accumulate
from .broadcast import uses_of_broadcast
from .captured_call import FEW, Captured, Context, Given, capture
from .forward_pass import ForwardPass
from .linear import lies_in_order, steps_by_sample
from .parameter_use import ParameterUse
from .rules import attributed, by_sample, made_of_data, sample_layout, use_rule


class _Norm(Captured):
    """out = xhat * weight + bias: `normalise(x, weight, bias)` with either None gives xhat."""

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout, view: tuple[int, ...],
                 normalise: Callable[..., Tensor]) -> None:  # fmt: skip
        super().__init__(forward_pass, name, layout)
        self.view, self.normalise = view, normalise

    def run(self, ctx: Context, *data: Tensor) -> Tensor:
        return self.normalise(data[0], *ctx.values)

    def saved(self, ctx: Context, *data: Tensor) -> tuple[Tensor, ...]:
        return data if ctx.learned[0] else ()

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        g = accumulate(grads[0])
        if ctx.learned[0]:
            ctx.forward_pass.record(
                self._use(ctx.operands[0], self.normalise(accumulate(saved[0]), None, None).mul_(g))
            )
        if ctx.learned[1]:
            ctx.forward_pass.record(self._use(ctx.operands[1], g))

    def _use(self, operand: Tensor, full: Tensor) -> ParameterUse:
        """full: the gradient of the broadcast operand; channels lie as `view` says."""
        rows = by_sample(full, self.layout)
        if len(self.view or operand.shape) == operand.dim():
            return uses_of_broadcast(operand, rows, self.layout, full.dim(), self.name)
        over = tuple(d for d in range(1, rows.dim()) if d != 2)  # channels in dimension 1: sum over the rest
        return uses_of_broadcast(operand, rows.sum(over).unsqueeze(1), Layout(self.batch), 2, self.name)


class _RMSNorm(_Norm):
    """RMS norm over the last dimensions, `along`: the weight's gradients in one pass over x and g, without copies."""

    along: tuple[int, ...] = ()
    eps = 0.0

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        operand, lead = ctx.operands[0], saved[0].dim() - len(self.along)
        x, g = (by_sample(t.flatten(lead), self.layout).flatten(1, -2) for t in (saved[0], grads[0]))  # [B, T, d]
        rows = ops.rms_affine_per_sample(x, g, ops.norm.rms_rstd(x, self.eps))
        rows = rows.view(rows.size(0), *operand.shape)
        ctx.forward_pass.record(uses_of_broadcast(operand, rows, None, operand.dim(), self.name))


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """F.layer_norm, with its statistics: (out, mean, rstd)."""
    return torch.native_layer_norm(x, list(shape), weight, bias, eps)


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """F.group_norm, with its statistics: (out, mean, rstd)."""
    positions = 1
    for size in x.shape[2:]:  # symbols perhaps, of which torch traces no math.prod
        positions = positions * size
    return torch.native_group_norm(x, weight, bias, x.size(0), x.size(1), positions, groups, eps)


_LAYER_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
_GROUP_BACKWARD = torch.ops.aten.native_group_norm_backward.default


class _Native(Captured):
    """Layer and group norm by torch's own kernels, whose statistics give the affine gradients in one pass.

    along: the shape that a layer norm goes over; the number of groups.
    """

    by_shapes = fresh = native = by_rows = True
    with_made: Callable[..., Any]  # the function, as (result, *the two of `made`)

    def __init__(self, forward_pass: ForwardPass, name: str, layout: Layout, along: Any, eps: float) -> None:
        super().__init__(forward_pass, name, layout)
        self.along, self.eps = along, eps

    def forward(self, ctx: Context, *data: Tensor) -> Any:
        if ctx.wanted[0]:
            ctx.keep(ctx.values[0])
        out, *statistics = self.with_made(data[0], self.along, *ctx.values, self.eps)
        ctx.made = tuple(statistics)
        return out

    def run_native(self, ctx: Context, x: Tensor) -> Tensor:
        out: Tensor
        out, mean, rstd = self.with_made(x, self.along, *ctx.values, self.eps)
        ctx.made = mean.detach(), rstd.detach()  # (not with their node, which holds the context)
        return out

    def _by_sample(self, saved: Sequence[Tensor], g: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """The data, the output gradient, mean and rstd, each with the samples in front."""
        raise NotImplementedError

    def _affine(self, x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        """Per-sample gradients of weight and bias, [B, d] each, of what `_by_sample` gives."""
        raise NotImplementedError

    def rows(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self._rows_of(ctx, self._affine(*self._by_sample(saved, grads[0], self.layout)))

    @staticmethod
    def _rows_of(ctx: Context, found: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Per-sample gradients [B, d] of those that are learned, in their shapes."""
        rows = zip(found, ctx.operands, ctx.learned, strict=True)
        return tuple(
            each if operand.dim() == 1 else each.view(each.size(0), *operand.shape)
            for each, operand, learned in rows
            if learned
        )

    def together(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Any:
        x = saved[0]
        if x.numel() > FEW:
            return None
        along = tuple(self.along) if isinstance(self.along, list) else self.along
        return type(self), tuple(ctx.learned), self.layout, along, x.shape, x.dtype, x.device

    def rows_together(self, given: Sequence[Given]) -> list[tuple[Tensor, ...]]:
        if lies_in_order(self.layout) and given[0][1][0].dim() > 1:
            saved, gs = zip(*(own[1] for own in given), strict=True), [own[2][0] for own in given]
            layout = self.layout._replace(batch=len(given) * self.layout.batch)
            whole = self._by_sample([torch.cat(each) for each in saved], torch.cat(gs), layout)
        else:
            each = [self._by_sample(saved, grads[0], self.layout) for _, saved, grads in given]
            whole = tuple(map(torch.cat, zip(*each, strict=True)))
        found = self._affine(*whole)
        rows = zip(*(t.unflatten(0, (len(given), -1)).unbind(0) for t in found), strict=True)
        return [self._rows_of(ctx, own) for (ctx, _, _), own in zip(given, rows, strict=True)]

    def record_rows(self, ctx: Context, rows: tuple[Tensor, ...]) -> None:
        learned = [operand for operand, learned in zip(ctx.operands, ctx.learned, strict=True) if learned]
        for operand, grads in zip(learned, rows, strict=True):
            ctx.forward_pass.record(uses_of_broadcast(operand, grads, None, operand.dim(), self.name))


class _LayerNorm(_Native):
    with_made = staticmethod(_layer_norm)

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not ctx.wanted[0]:
            return []
        return [_LAYER_BACKWARD(grads[0], saved[0], self.along, *saved[1:], *ctx.values, [True, False, False])[0]]

    def _by_sample(self, saved: Sequence[Tensor], g: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """x [B, T, d], g [B, T, d], mean [B, T] and rstd [B, T]."""
        if len(self.along) == 1 and lies_in_order(layout) and saved[0].dim() > 1:
            x, g = (steps_by_sample(t, layout) for t in (saved[0], g))
            return x, g, *(t.reshape(x.shape[:2]) for t in saved[1:])
        lead = saved[0].dim() - len(self.along)
        x, g = (by_sample(t.flatten(lead), layout).flatten(1, -2) for t in (saved[0], g))
        return x, g, *(by_sample(t.flatten(lead), layout).flatten(1) for t in saved[1:])

    def _affine(self, x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        return ops.norm_affine_per_sample(x, g, mean, rstd)


class _GroupNorm(_Native):
    """at_once: on the CPU one pass over the data, if there are many, gives the gradients of the input as well."""

    with_made = staticmethod(_group_norm)

    def __init__(self, forward_pass: ForwardPass, layout: Layout, groups: int, eps: float, x: Tensor) -> None:
        super().__init__(forward_pass, "group_norm", layout, groups, eps)
        self.at_once = x.numel() > FEW and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
        self.native = self.by_rows = not self.at_once

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.size(0), x.size(1), math.prod(x.shape[2:]), self.along

    def input_grads(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not ctx.wanted[0]:
            return []
        (x, mean, rstd), g = saved, grads[0].contiguous()
        return [_GROUP_BACKWARD(g, x, mean, rstd, ctx.values[0], *self._sizes(x), [True, False, False])[0]]

    def _by_sample(self, saved: Sequence[Tensor], g: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """x, g [B, F, C, *], mean and rstd [B, F, groups]."""
        x, mean, rstd = saved
        return tuple(by_sample(t, layout) for t in (x, g, mean, rstd))

    def _affine(self, x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
        batch, images = x.shape[:2]
        x, g, mean, rstd = (t.flatten(0, 1) for t in (x, g, mean, rstd))
        weight, bias = ops.group_affine_per_sample(x, g, mean, rstd, self.along)
        if images == 1:
            return weight, bias
        return weight.unflatten(0, (batch, images)).sum(1), bias.unflatten(0, (batch, images)).sum(1)

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        if self.at_once:
            self._back_at_once(ctx, saved, grads[0].contiguous())
        else:
            super().record_uses(ctx, saved, grads)

    def _back_at_once(self, ctx: Context, saved: tuple[Tensor, ...], g: Tensor) -> None:
        """Affine gradients of each row [N, C] by the pass that computes the input's gradient: the N rows of C channels
        are given to torch as one row of N C channels, each with a weight of its own. (Not for 16 bits, to which torch
        would round the results.)"""
        x, *statistics = saved
        rows, channels, positions, groups = self._sizes(x)
        weight, one = ctx.values[0], (1, rows * channels, positions)
        wanted = any(ctx.wanted)
        dx, *found = _GROUP_BACKWARD(
            g.view(one), x.view(one), *(t.view(1, -1) for t in statistics),
            None if weight is None else weight.repeat(rows), 1, rows * channels, positions, rows * groups,
            [wanted, *ctx.learned],
        )  # fmt: skip
        ctx.found = [dx.view_as(x)] if wanted else None
        each = [by_sample(t.view(rows, channels), self.layout) for t, learned in zip(found, ctx.learned, strict=True)
                if learned]  # [B, F, C]  # fmt: skip
        self.record_rows(ctx, tuple(t.sum(1) if t.size(1) > 1 else t.squeeze(1) for t in each))


def _native_takes(forward_pass: ForwardPass, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """One type throughout, and no autocast, which treats the composed functions in ways of its own."""
    tensors = [t for t in (weight, bias) if t is not None]
    plain = x.is_contiguous() and x.numel() > 0 and not torch.is_autocast_enabled(x.device.type)
    learned = any(forward_pass.is_parameter(t) for t in tensors)
    if made_of_data(forward_pass, *tensors):
        return False
    return plain and learned and all(t.dtype == x.dtype and t.device == x.device for t in tensors)


def _capture(forward_pass: ForwardPass, func: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
             view: tuple[int, ...], normalise: Callable[..., Tensor]) -> Any:  # fmt: skip
    if not made_of_data(forward_pass, x) or made_of_data(forward_pass, weight, bias):
        return NotImplemented
    layout = sample_layout(forward_pass, x, func.__name__)
    if view and layout.batch > 1 and layout.dim != 0:
        raise SampleMixingError(
            f"{forward_pass.place(func.__name__)}: takes dimension {layout.dim}, which holds the samples, for "
            "channels: transpose the input"
        )
    call = _Norm(forward_pass, func.__name__, layout, view, normalise)
    return capture(call, Context(forward_pass, weight, bias), x)


@use_rule(F.layer_norm)
def capture_layer_norm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With and without weight or bias."""
    x, shape, weight, bias, eps = bind(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    if made_of_data(forward_pass, x):
        _refuse_mixing(forward_pass, func, x, shape)
    if made_of_data(forward_pass, x) and _native_takes(forward_pass, x, weight, bias):
        layout = sample_layout(forward_pass, x, func.__name__)
        call = _LayerNorm(forward_pass, func.__name__, layout, list(shape), eps)
        return capture(call, Context(forward_pass, weight, bias), x)
    return _capture(forward_pass, func, x, weight, bias, (), lambda x, w, b: F.layer_norm(x, shape, w, b, eps))


@use_rule(F.rms_norm)
def capture_rms_norm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own RMS norm; hand-written ones are products."""
    x, shape, weight, eps = bind(args, kwargs, "input", "normalized_shape", "weight", "eps")
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    if made_of_data(forward_pass, x):
        _refuse_mixing(forward_pass, func, x, shape)
    normalise = lambda x, w, b: F.rms_norm(x, shape, w, eps)
    if made_of_data(forward_pass, x) and _rms_takes(forward_pass, x, weight, shape):
        call = _RMSNorm(forward_pass, func.__name__, sample_layout(forward_pass, x, func.__name__), (), normalise)
        call.along, call.eps = tuple(shape), eps
        return capture(call, Context(forward_pass, weight, None), x)
    return _capture(forward_pass, func, x, weight, None, (), normalise)


def _rms_takes(forward_pass: ForwardPass, x: Tensor, weight: Tensor | None, shape: Sequence[int]) -> bool:
    """A trained weight of its own shape over the last dimensions of real numbers, of which there are some."""
    if weight is None or not forward_pass.is_parameter(weight) or tuple(weight.shape) != tuple(shape):
        return False
    return x.is_floating_point() and x.numel() > 0 and x.dim() > len(shape) and x.shape[-len(shape) :] == weight.shape


def _refuse_mixing(forward_pass: ForwardPass, func: Any, x: Tensor, *beside: Any) -> None:
    """Normalising over the batch dimension: the layout rule says so."""
    layout = layouts_of(Call(func, (x, *beside), {}, forward_pass.batch, forward_pass.path, x))[0][1]
    if forward_pass.batch > 1 and forward_pass.is_data(x):
        attributed(forward_pass, x, layout, func.__name__)


@use_rule(F.group_norm)
def capture_group_norm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Channels in dimension 1."""
    x, groups, weight, bias, eps = bind(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    if made_of_data(forward_pass, x) and _native_takes(forward_pass, x, weight, bias):
        layout = sample_layout(forward_pass, x, func.__name__)
        if layout.batch <= 1 or layout.dim == 0:
            call = _GroupNorm(forward_pass, layout, groups, eps, x)
            return capture(call, Context(forward_pass, weight, bias), x)
    return _capture(forward_pass, func, x, weight, bias, (1, -1), lambda x, w, b: F.group_norm(x, groups, w, b, eps))


@use_rule(F.instance_norm, F.batch_norm)
def capture_channel_norm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Instance norm without running statistics, and batch norm with fixed ones; else refused."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "flag", "momentum", "eps")
    x, mean, var, weight, bias, flag, _, eps = bind(args, kwargs, *names)
    instance = func is F.instance_norm
    if flag is None:
        flag = kwargs.get("use_input_stats" if instance else "training", instance)
    eps = 1e-5 if eps is None else eps
    if made_of_data(forward_pass, mean, var) and forward_pass.batch <= 1:
        return NotImplemented
    _refuse_mixing(forward_pass, func, x, mean, var, None, None, flag)
    if instance and flag:
        return _capture(
            forward_pass, func, x, weight, bias, (1, -1), lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=eps)
        )
    return _capture(
        forward_pass, func, x, weight, bias, (1, -1), lambda x, w, b: F.batch_norm(x, mean, var, w, b, False, 0.0, eps)
    )
