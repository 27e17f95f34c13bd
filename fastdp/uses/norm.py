"""Affine parameters of normalisations: layer, RMS, group, instance norm, batch norm in eval mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..errors import SampleMixingError
from ..layouts.calls import Call, bind
from ..layouts.layout import Layout
from ..layouts.propagate import propagate
from ..ops.common import accumulate
from .broadcast import uses_of_broadcast
from .captured import Captured, Operand, capture
from .forward_pass import ForwardPass
from .rules import by_sample, sample_layout, use_rule


class _Norm(Captured):
    """out = xhat * weight + bias: `normalise(x, weight, bias)` with either None gives xhat."""

    def __init__(self, forward_pass: ForwardPass, name: str, weight: Tensor | None, bias: Tensor | None,
                 view: tuple[int, ...], normalise: Callable[..., Tensor], layout: Layout) -> None:  # fmt: skip
        super().__init__(forward_pass, name, forward_pass.path)
        self.weight = None if weight is None else Operand.of(weight)
        self.bias = None if bias is None else Operand.of(bias)
        self.learns = [t is not None and forward_pass.is_parameter(t) for t in (weight, bias)]
        self.view, self.normalise, self.layout = view, normalise, layout

    def run(self, *data: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.value
        return self.normalise(data[0], weight, None if self.bias is None else self.bias.value)

    def saved(self, *data: Tensor) -> tuple[Tensor, ...]:
        return data if self.learns[0] else ()

    def record_uses(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        g = accumulate(grads[0])
        if self.weight is not None and self.learns[0]:
            self._record(self.weight, self.normalise(accumulate(saved[0]), None, None).mul_(g))
        if self.bias is not None and self.learns[1]:
            self._record(self.bias, g)

    def _record(self, operand: Operand, full: Tensor) -> None:
        """full: the gradient of the broadcast operand; channels lie as `view` says."""
        rows = by_sample(full, self.layout)
        shape = self.view or operand.value.shape
        if len(shape) == operand.value.dim():
            use = uses_of_broadcast(operand.tensor, rows, self.layout, full.dim(), self.name)
        else:  # channels in dimension 1: sum over the rest
            over = tuple(d for d in range(1, rows.dim()) if d != 2)
            use = uses_of_broadcast(operand.tensor, rows.sum(over).unsqueeze(1), Layout(self.batch), 2, self.name)
        self.forward_pass.record(use)


class _Native(Captured):
    """Layer and group norm by torch's own kernels, whose statistics give the affine gradients in one pass."""

    def __init__(self, forward_pass: ForwardPass, name: str, weight: Tensor | None, bias: Tensor | None,
                 layout: Layout) -> None:  # fmt: skip
        super().__init__(forward_pass, name, forward_pass.path)
        self.weight = None if weight is None else Operand.of(weight)
        self.bias = None if bias is None else Operand.of(bias)
        self.learns = [t is not None and forward_pass.is_parameter(t) for t in (weight, bias)]
        self.layout, self.wants_input = layout, False
        self.statistics: tuple[Tensor, Tensor]

    def values(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            None if self.weight is None else self.weight.value,
            None if self.bias is None else self.bias.value,
        )

    def _record(self, rows: Sequence[Tensor | None]) -> None:
        """Per-sample gradients of weight and bias, [B, d] each."""
        for operand, learns, grads in zip((self.weight, self.bias), self.learns, rows, strict=True):
            if operand is not None and learns and grads is not None:
                shaped = grads.view(grads.size(0), 1, *operand.value.shape)
                ndim = 1 + operand.value.dim()
                self.forward_pass.record(uses_of_broadcast(operand.tensor, shaped, Layout(self.batch), ndim, self.name))


class _LayerNorm(_Native):
    def __init__(self, forward_pass: ForwardPass, name: str, weight: Tensor | None, bias: Tensor | None, layout: Layout,
                 shape: Sequence[int], eps: float) -> None:  # fmt: skip
        super().__init__(forward_pass, name, weight, bias, layout)
        self.shape, self.eps = list(shape), eps

    def forward(self, *data: Tensor) -> Tensor:
        self.wants_input = data[0].requires_grad
        if self.wants_input:
            self.keep(self.values()[0])
        out, *statistics = torch.native_layer_norm(data[0], self.shape, *self.values(), self.eps)
        self.statistics = (statistics[0], statistics[1])
        return out

    def input_grads(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not self.wants_input:
            return []
        backward = torch.ops.aten.native_layer_norm_backward
        return [backward(grads[0], saved[0], self.shape, *self.statistics, *self.values(), [True, False, False])[0]]

    def record_uses(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        lead = saved[0].dim() - len(self.shape)
        x, g = (by_sample(t.flatten(lead), self.layout).flatten(1, -2) for t in (saved[0], grads[0]))  # [B, T, d]
        mean, rstd = (by_sample(t.flatten(lead), self.layout).flatten(1) for t in self.statistics)  # [B, T]
        self._record(ops.norm_affine_per_sample(x, g, mean, rstd))


class _GroupNorm(_Native):
    def __init__(self, forward_pass: ForwardPass, name: str, weight: Tensor | None, bias: Tensor | None, layout: Layout,
                 groups: int, eps: float) -> None:  # fmt: skip
        super().__init__(forward_pass, name, weight, bias, layout)
        self.groups, self.eps = groups, eps
        self.input_grad: Tensor | None = None

    def _sizes(self, x: Tensor) -> tuple[int, int, int, int]:
        return x.size(0), x.size(1), math.prod(x.shape[2:]), self.groups

    def forward(self, *data: Tensor) -> Tensor:
        self.wants_input = data[0].requires_grad
        if self.wants_input:
            self.keep(self.values()[0])
        x = data[0]
        out, *statistics = torch.native_group_norm(x, *self.values(), *self._sizes(x), self.eps)
        self.statistics = (statistics[0], statistics[1])
        return out

    def input_grads(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> list[Tensor | None]:
        if not self.wants_input:
            return []
        if self.input_grad is not None:
            found, self.input_grad = self.input_grad, None
            return [found]
        x, backward = saved[0], torch.ops.aten.native_group_norm_backward
        g = grads[0].contiguous()
        return [backward(g, x, *self.statistics, self.values()[0], *self._sizes(x), [True, False, False])[0]]

    def record_uses(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        if saved[0].device.type == "cpu" and saved[0].dtype in (torch.float32, torch.float64):
            self._back_at_once(saved[0], grads[0].contiguous())
            return
        x, g = (by_sample(t, self.layout) for t in (saved[0], grads[0]))  # [B, F, C, *]
        mean, rstd = (by_sample(t, self.layout) for t in self.statistics)  # [B, F, groups]
        batch, images = x.shape[:2]
        x, g, mean, rstd = (t.flatten(0, 1) for t in (x, g, mean, rstd))
        rows = ops.group_affine_per_sample(x, g, mean, rstd, self.groups)
        self._record([t.unflatten(0, (batch, images)).sum(1) if images > 1 else t for t in rows])

    def _back_at_once(self, x: Tensor, g: Tensor) -> None:
        """Affine gradients of each row [N, C] by the pass that computes the input's gradient: the N rows of C channels
        are given to torch as one row of N C channels, each with a weight of its own. (Not for 16 bits, to which torch
        would round the results.)"""
        rows, channels, positions, groups = self._sizes(x)
        weight, one = self.values()[0], (1, rows * channels, positions)
        wanted = [self.wants_input, self.learns[0], self.learns[1]]
        dx, *found = torch.ops.aten.native_group_norm_backward(
            g.view(one), x.view(one), *(t.view(1, -1) for t in self.statistics),
            None if weight is None else weight.repeat(rows), 1, rows * channels, positions, rows * groups, wanted,
        )  # fmt: skip
        self.input_grad = dx.view_as(x) if self.wants_input else None
        learned = zip(found, self.learns, strict=True)
        each = [
            by_sample(t.view(rows, channels), self.layout) if learns else None for t, learns in learned
        ]  # [B, F, C]
        self._record([t if t is None else t.sum(1) if t.size(1) > 1 else t.squeeze(1) for t in each])


def _native_takes(forward_pass: ForwardPass, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """One type throughout, and no autocast, which treats the composed functions in ways of its own."""
    tensors = [t for t in (weight, bias) if t is not None]
    plain = x.is_contiguous() and x.numel() > 0 and not torch.is_autocast_enabled(x.device.type)
    learned = any(forward_pass.is_parameter(t) for t in tensors)
    if _made_of_data(forward_pass, *tensors):
        return False
    return plain and learned and all(t.dtype == x.dtype and t.device == x.device for t in tensors)


def _made_of_data(forward_pass: ForwardPass, *tensors: Tensor | None) -> bool:
    """Whether the affine map is itself computed from samples: then these rules, which detach it, do not apply."""
    return any(t is not None and forward_pass.is_data(t) and not forward_pass.is_parameter(t) for t in tensors)


def _capture(forward_pass: ForwardPass, func: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
             view: tuple[int, ...], normalise: Callable[..., Tensor]) -> Any:  # fmt: skip
    if forward_pass.is_parameter(x) or not forward_pass.is_data(x) or _made_of_data(forward_pass, weight, bias):
        return NotImplemented
    layout = sample_layout(forward_pass, x, func.__name__)
    if view and layout.batch > 1 and layout.dim != 0:
        raise SampleMixingError(
            f"{forward_pass.place(func.__name__)}: takes the batch, in dimension {layout.dim}, for channels"
        )
    return capture(_Norm(forward_pass, func.__name__, weight, bias, view, normalise, layout), x, layout=layout)


@use_rule(F.layer_norm)
def capture_layer_norm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With and without weight or bias."""
    x, shape, weight, bias, eps = bind(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    _refuse_mixing(forward_pass, func, x, shape)
    if not forward_pass.is_parameter(x) and forward_pass.is_data(x) and _native_takes(forward_pass, x, weight, bias):
        layout = sample_layout(forward_pass, x, func.__name__)
        return capture(_LayerNorm(forward_pass, func.__name__, weight, bias, layout, shape, eps), x, layout=layout)
    return _capture(forward_pass, func, x, weight, bias, (), lambda x, w, b: F.layer_norm(x, shape, w, b, eps))


@use_rule(F.rms_norm)
def capture_rms_norm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own RMS norm; hand-written ones are products."""
    x, shape, weight, eps = bind(args, kwargs, "input", "normalized_shape", "weight", "eps")
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    _refuse_mixing(forward_pass, func, x, shape)
    return _capture(forward_pass, func, x, weight, None, (), lambda x, w, b: F.rms_norm(x, shape, w, eps))


def _refuse_mixing(forward_pass: ForwardPass, func: Any, x: Tensor, shape: Any) -> None:
    """Normalising over the batch dimension: let propagation say so."""
    if forward_pass.is_data(x) and not forward_pass.is_parameter(x):
        probe = x.detach()
        propagate(Call(func, (x, shape), {}, probe, forward_pass.batch, forward_pass.path))
        if forward_pass.batch > 1:
            sample_layout(forward_pass, probe, func.__name__)


@use_rule(F.group_norm)
def capture_group_norm(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Channels in dimension 1."""
    x, groups, weight, bias, eps = bind(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    if not forward_pass.is_parameter(x) and forward_pass.is_data(x) and _native_takes(forward_pass, x, weight, bias):
        layout = sample_layout(forward_pass, x, func.__name__)
        if layout.batch <= 1 or layout.dim == 0:
            return capture(_GroupNorm(forward_pass, func.__name__, weight, bias, layout, groups, eps), x, layout=layout)
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
    if _made_of_data(forward_pass, mean, var) and forward_pass.batch <= 1:
        return NotImplemented
    probe = x.detach()
    propagate(Call(func, (x, mean, var, None, None, flag), {}, probe, forward_pass.batch, forward_pass.path))
    if forward_pass.batch > 1 and forward_pass.is_data(x):
        sample_layout(forward_pass, probe, func.__name__)
    if instance and flag:
        return _capture(
            forward_pass, func, x, weight, bias, (1, -1), lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=eps)
        )
    return _capture(
        forward_pass, func, x, weight, bias, (1, -1), lambda x, w, b: F.batch_norm(x, mean, var, w, b, False, 0.0, eps)
    )
