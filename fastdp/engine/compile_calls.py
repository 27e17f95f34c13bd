"""Captured calls that a compiled graph repeats: what is kept of the first one, and how it is made anew.

A graph's first run is interpreted under the engine, where every captured call is an object of its rule. Of it stays a
template without tensors; each later step fills in the pass, the operands, what was saved and the output gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layouts.layout import Layout
from ..layouts.nests import map_leaves, tensors_in
from ..ops.common import exactly
from ..uses.broadcast import _Cat, _Elementwise
from ..uses.captured import Captured, Operand
from ..uses.conv import _Conv
from ..uses.embedding import _Embedding, _RowIndex
from ..uses.forward_pass import ForwardPass
from ..uses.linear import _Left, _Linear, _Right
from ..uses.norm import _GroupNorm, _LayerNorm, _Norm

_PLAIN: tuple[type[Captured], ...] = (_Linear, _Right, _Left, _Conv, _Embedding, _RowIndex, _Elementwise, _Cat, _Norm)
_OF_ONE_STEP = frozenset(("forward_pass", "inner", "value", "statistics"))


class _Slot:
    """Stands for an operand in a template."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Data:
    """Stands for data in a template."""


class NotRepeatable(Exception):
    """The call holds something that may differ from step to step."""


def layer_norm(input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """F.layer_norm, with its statistics: (out, mean, rstd)."""
    return torch.native_layer_norm(input, list(normalized_shape), weight, bias, eps)


def group_norm(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """F.group_norm, with its statistics: (out, mean, rstd)."""
    inner = 1
    for size in input.shape[2:]:
        inner = inner * size
    return torch.native_group_norm(input, weight, bias, input.size(0), input.size(1), inner, num_groups, eps)


def with_statistics(call: Captured) -> Callable[..., Any] | None:
    """For norms: the function that also returns what `record_uses` needs of the forward."""
    return {_LayerNorm: layer_norm, _GroupNorm: group_norm}.get(type(call))  # type: ignore[arg-type, return-value]


def template_of(call: Captured, operands: Sequence[Tensor]) -> Captured:
    """The call without tensors, its operands replaced by their numbers. Raises NotRepeatable."""
    if type(call) not in _PLAIN and with_statistics(call) is None:
        raise NotRepeatable(f"{call.name}: no compiled form of this rule")

    def strip(value: Any) -> Any:
        if isinstance(value, Operand):
            for number, operand in enumerate(operands):
                if operand is value.tensor:
                    return _Slot(number)
            raise NotRepeatable(f"{call.name}: an operand that is no argument")
        if isinstance(value, Layout):
            if value.owner is not None or value.mixed:
                raise NotRepeatable(f"{call.name}: rows whose order depends on the data")
            return value
        if isinstance(value, Tensor):
            return _Data()
        if isinstance(value, tuple | list):
            items = [strip(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if callable(value):
            cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
            if any(True for _ in tensors_in(cells)):
                raise NotRepeatable(f"{call.name}: a function that holds tensors")
        return value

    template = copy.copy(call)
    for name, value in vars(call).items():
        setattr(template, name, None if name in _OF_ONE_STEP else strip(value))
    return template


def _filled(value: Any, operands: Sequence[Operand], data: Tensor) -> Any:
    if isinstance(value, Layout):  # a tuple, but whole
        return value

    def leaf(item: Any) -> Any:
        return operands[item.number] if isinstance(item, _Slot) else data if isinstance(item, _Data) else item

    return map_leaves(value, leaf)


class Repeated(NamedTuple):
    """One captured call of a graph: its template, and the module in whose forward it stands."""

    template: Captured
    path: str
    shape: torch.Size  # of the result
    dtype: torch.dtype
    device: torch.device
    learned: tuple[bool, ...]  # which operands are parameters or derived from them

    def record(
        self, forward_pass: ForwardPass, operands: Sequence[Tensor], saved: Sequence[Tensor], grad: Tensor
    ) -> None:
        """The call's backward: record its uses. saved: of the data, then statistics of the forward."""
        call = copy.copy(self.template)
        made = [Operand.of(tensor) for tensor in operands]
        nothing = grad.new_empty(0)
        for name, value in vars(self.template).items():
            setattr(call, name, _filled(value, made, nothing))
        call.forward_pass, call.path = forward_pass, self.path
        if with_statistics(call) is not None:
            *saved, mean, rstd = saved
            call.statistics = (mean, rstd)  # type: ignore[attr-defined]
        forward_pass.begin_record(self.path)
        with exactly():
            call.record_uses(tuple(saved), (grad,))
