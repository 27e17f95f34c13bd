"""Affine parameters of normalisations: layer, RMS, group, instance norm, batch norm in eval mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SampleMixingError
from ..layouts.calls import Call, bind
from ..layouts.layout import Layout
from ..layouts.propagate import propagate
from ..ops.common import accumulate
from ..recorder import Recorder
from .base import Captured, Operand, capture, cut, rule, sample_layout
from .broadcast import uses_of_broadcast


class _Norm(Captured):
    """out = xhat * weight + bias: `normalise(x, weight, bias)` with either None gives xhat."""

    def __init__(self, recorder: Recorder, name: str, weight: Tensor | None, bias: Tensor | None, view: tuple[int, ...],
                 normalise: Callable[..., Tensor], layout: Layout) -> None:  # fmt: skip
        super().__init__(recorder, name, recorder.path)
        self.weight = None if weight is None else Operand.of(weight)
        self.bias = None if bias is None else Operand.of(bias)
        self.learns = [t is not None and recorder.is_parameter(t) for t in (weight, bias)]
        self.view, self.normalise, self.layout = view, normalise, layout

    def run(self, *data: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.value
        return self.normalise(data[0], weight, None if self.bias is None else self.bias.value)

    def saved(self, *data: Tensor) -> tuple[Tensor, ...]:
        return data if self.learns[0] else ()

    def back(self, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        g = accumulate(grads[0])
        if self.weight is not None and self.learns[0]:
            self._record(self.weight, self.normalise(accumulate(saved[0]), None, None).mul_(g))
        if self.bias is not None and self.learns[1]:
            self._record(self.bias, g)

    def _record(self, operand: Operand, full: Tensor) -> None:
        """full: the gradient of the broadcast operand; channels lie as `view` says."""
        rows = cut(full, self.layout)
        shape = self.view or operand.value.shape
        if len(shape) == operand.value.dim():
            use = uses_of_broadcast(operand.tensor, rows, self.layout, full.dim(), self.name)
        else:  # channels in dimension 1: sum over the rest
            over = tuple(d for d in range(1, rows.dim()) if d != 2)
            use = uses_of_broadcast(operand.tensor, rows.sum(over).unsqueeze(1), Layout(self.batch), 2, self.name)
        self.recorder.record(use)


def _capture(recorder: Recorder, func: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None,
             view: tuple[int, ...], normalise: Callable[..., Tensor]) -> Any:  # fmt: skip
    if recorder.is_parameter(x) or not recorder.is_data(x):
        return NotImplemented
    layout = sample_layout(recorder, x, func.__name__)
    if view and layout.batch > 1 and layout.dim != 0:
        raise SampleMixingError(
            f"{recorder.place(func.__name__)}: takes the batch, in dimension {layout.dim}, for channels"
        )
    return capture(_Norm(recorder, func.__name__, weight, bias, view, normalise, layout), x, layout=layout)


@rule(F.layer_norm)
def capture_layer_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With and without weight or bias."""
    x, shape, weight, bias, eps = bind(args, kwargs, "input", "normalized_shape", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    _refuse_mixing(recorder, func, x, shape)
    return _capture(recorder, func, x, weight, bias, (), lambda x, w, b: F.layer_norm(x, shape, w, b, eps))


@rule(F.rms_norm)
def capture_rms_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own RMS norm; hand-written ones are products."""
    x, shape, weight, eps = bind(args, kwargs, "input", "normalized_shape", "weight", "eps")
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    _refuse_mixing(recorder, func, x, shape)
    return _capture(recorder, func, x, weight, None, (), lambda x, w, b: F.rms_norm(x, shape, w, eps))


def _refuse_mixing(recorder: Recorder, func: Any, x: Tensor, shape: Any) -> None:
    """Normalising over the batch dimension: let propagation say so."""
    if recorder.is_data(x) and not recorder.is_parameter(x):
        probe = x.detach()
        propagate(Call(func, (x, shape), {}, probe, recorder.batch, recorder.path))
        if recorder.batch > 1:
            sample_layout(recorder, probe, func.__name__)


@rule(F.group_norm)
def capture_group_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Channels in dimension 1."""
    x, groups, weight, bias, eps = bind(args, kwargs, "input", "num_groups", "weight", "bias", "eps")
    eps = 1e-5 if eps is None else eps
    return _capture(recorder, func, x, weight, bias, (1, -1), lambda x, w, b: F.group_norm(x, groups, w, b, eps))


@rule(F.instance_norm, F.batch_norm)
def capture_channel_norm(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Instance norm without running statistics, and batch norm with fixed ones; else refused."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "flag", "momentum", "eps")
    x, mean, var, weight, bias, flag, _, eps = bind(args, kwargs, *names)
    instance = func is F.instance_norm
    if flag is None:
        flag = kwargs.get("use_input_stats" if instance else "training", instance)
    eps = 1e-5 if eps is None else eps
    propagate(Call(func, (x, mean, var, None, None, flag), {}, x.detach(), recorder.batch, recorder.path))
    if instance and flag:
        return _capture(
            recorder, func, x, weight, bias, (1, -1), lambda x, w, b: F.instance_norm(x, None, None, w, b, eps=eps)
        )
    return _capture(
        recorder, func, x, weight, bias, (1, -1), lambda x, w, b: F.batch_norm(x, mean, var, w, b, False, 0.0, eps)
    )
