"""Finds a result's batch dimension by running the function on meta tensors of a larger batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..utils.cache import Answers
from ..utils.pytree import map_tensors, signature, tensors_in
from .calls import Call, Inputs
from .layout import Layout
from .operator_table import VIEWS

Answer = tuple[list[list[tuple[int, int]]] | None, bool]
_CACHE = Answers()


def cached_trial(call: Call, inputs: Inputs) -> Answer:
    """What grew in each result, and whether constants of the batch's size had to grow along."""
    try:
        key = (call.func, call.batch, key_of(call))
        if key in _CACHE:
            return _CACHE[key]
    except TypeError:  # an argument without a hash
        key = None
    answer: Answer = (None, False)
    for grow in (_constants_as_they_are, _constants_aligned, _constants_first):
        answer = (_trial(call, inputs, grow), grow is not _constants_as_they_are)
        if answer[0] is not None:
            break
    if key is not None:
        _CACHE[key] = answer
    return answer


def key_of(call: Call) -> Any:
    """Of a call's arguments: shapes, types and layouts of tensors, values of others."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            layout = call.layout(value)
            where = layout and (layout.dim, layout.outer, layout.inner, layout.owner is None, bool(layout.mixed))
            return (tuple(value.shape), value.dtype, where)
        if isinstance(value, slice):
            return (slice, value.start, value.stop, value.step)
        hash(value)
        return (type(value), value)

    return signature((call.args, call.kwargs), leaf)


Grow = Callable[[Tensor, int, Inputs], list[int]]


def _constants_as_they_are(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    return list(tensor.shape)


def _constants_aligned(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    """A constant made for this batch (a mask), lying as the data lies."""
    shape = list(tensor.shape)
    for source, layout in inputs:
        dim = layout.dim - source.dim() + tensor.dim()
        if not layout.mixed and 0 <= dim < tensor.dim() and tensor.size(dim) == layout.rows:
            shape[dim] = _grown_rows(layout)
            break
    return shape


def _constants_first(tensor: Tensor, batch: int, inputs: Inputs) -> list[int]:
    """A constant made for this batch, samples first."""
    shape = list(tensor.shape)
    if shape and shape[0] == batch:
        shape[0] += 1
    return shape


def _grown_rows(layout: Layout) -> int:
    return layout.rows + (1 if layout.owner is not None else layout.outer * layout.inner)


def _trial(call: Call, inputs: Inputs, grow: Grow) -> list[list[tuple[int, int]]] | None:
    def to_meta(tensor: Tensor) -> Tensor:
        layout = call.layout(tensor)
        if layout is None:
            shape = grow(tensor, call.batch, inputs)
        else:
            shape = list(tensor.shape)
            if not (layout.mixed and (layout.dim >= len(shape) or shape[layout.dim] != layout.rows)):
                shape[layout.dim] = _grown_rows(layout)
        if call.name in VIEWS:  # costs nothing, where the first use of meta tensors imports half of torch
            return torch.empty((), dtype=tensor.dtype).expand(shape)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    try:
        with torch.no_grad():
            result = call.func(*map_tensors(call.args, to_meta), **map_tensors(call.kwargs, to_meta))
    except Exception:  # noqa: BLE001  (any failure means only that the question has no answer)
        return None
    answer = []
    for tensor, larger in zip(call.results(), tensors_in(result), strict=False):
        if tensor.dim() != larger.dim():
            return None
        pairs = enumerate(zip(tensor.shape, larger.shape, strict=True))
        answer.append([(dim, new - old) for dim, (old, new) in pairs if new != old])
    return answer
