"""Detects a loss computed with numbers that Python or numpy has read from several samples.

Reading alone is logging. It matters if the loss is computed with the very number, or with a tensor that was made of
Python's or numpy's numbers since: of these nobody knows whether they hold what was read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis import operator_table, tensor_notes
from ..batch_axis.calls import Call
from ..batch_axis.code_lines import literal_in_code
from ..batch_axis.layout import tag_of
from ..batch_axis.python_sizes import Sizes
from ..batch_axis.tensor_notes import is_new_foreign
from ..utils.code_location import users

T = torch.Tensor
_READING = operator_table.GIVING_NUMBERS | {T.__int__, T.__index__}
_MOST = 16  # numbers that are looked for in the code


class NumbersRead:
    """Of one batch, between its loader and its forward, or between forward and backward.

    before: what was read of its loader's tensors, since when labels may be made of them.
    """

    def __init__(self, batch: int, before: NumbersRead | None = None) -> None:
        self._batch, self._before = batch, "" if before is None else before.read
        self._numbers: dict[float, str] = {} if before is None else {**before._numbers}  # and what combined the samples
        self._why = self._before  # what read numbers of several samples

    def __bool__(self) -> bool:
        return bool(self._why)

    def after(self, call: Call) -> None:
        """A call on data was made, which gives numbers away, perhaps."""
        if call.func not in _READING:
            return
        layout = tag_of(call.args[0], self._batch)
        if layout is None or layout.alone >= 0:
            return
        self._why = self._why or layout.mixed or f"{call.name}() gives numbers of several samples to Python"
        if tensor_notes.LOADED in call.args[0].__dict__:
            self._before = self._before or self._why
        if type(call.out) in (float, int) and layout.mixed:
            self._numbers[call.out] = layout.mixed

    def made(self, call: Call) -> None:
        """A call without data was made: of numbers that stand in the code, or of others, which may have been read."""
        given = [tensor.__dict__ for tensor in call.tensors]
        note = tensor_notes.WRITTEN_DOWN if given and all(tensor_notes.WRITTEN_DOWN in known for known in given) else ""
        if not given and call.func in operator_table.OF_PYTHONS_NUMBERS and call.args:
            note = (
                (tensor_notes.OF_READ if self._why else "") if _is_unknown(call.args[0]) else tensor_notes.WRITTEN_DOWN
            )
        elif any(tensor_notes.OF_READ in known for known in given):
            note = tensor_notes.OF_READ
        for tensor in call.results() if note else ():
            tensor.__dict__[note] = True

    def meets(self, call: Call, sizes: Sizes) -> str:
        """What data meets in this call that was made of such numbers, perhaps; '' if nothing."""
        values = (*call.args, *call.kwargs.values())
        for value in values if self._numbers else ():
            if type(value) not in (int, float):
                continue
            found = next((n for n in (value, value - 1, round(value, 3)) if n in self._numbers), None)  # 1 or 1e-6 more
            certain = found == value and value * 1024 % 1  # (round ones may be others by chance)
            if (certain or sizes.follows_read(call, value, found is not None)) and found is not None:
                return f"{self._numbers[found]}; the loss is computed with that number"
        if self._numbers and call.func is T.__getitem__ and (found := self._bound(call.args[1])) is not None:
            return f"{self._numbers[found]}; the loss takes so many rows or columns"
        if self._why and any(self._is_made_of_read(tensor) for tensor in call.tensors):
            return f"{self._why}; the loss is computed with a tensor that was made of numbers afterwards"
        return ""

    def in_inputs(self, tensors: Sequence[Tensor]) -> str:
        """What the model is given that was made of such numbers, perhaps; '' if nothing."""
        unknown = (t for t in tensors if tensor_notes.LOADED not in t.__dict__ and tag_of(t, self._batch) is None)
        for tensor in unknown if self._why else ():
            if tensor_notes.OF_READ in tensor.__dict__ or (tensor.is_floating_point() and is_new_foreign(tensor)):
                return f"{self._why}; the model is given a tensor that was made of numbers afterwards"
        return ""

    @property
    def read(self) -> str:
        """What has read numbers of several samples; '' if nothing."""
        return self._why

    def _is_made_of_read(self, tensor: Tensor) -> bool:
        if tensor_notes.OF_READ in tensor.__dict__ or self._is_of_numpy(tensor):
            return True
        return bool(self._before) and tensor_notes.LOADED not in tensor.__dict__ and is_new_foreign(tensor)

    def _bound(self, index: Any) -> float | None:
        """A number that bounds a slice, or one less than it."""
        items = index if isinstance(index, tuple) else (index,)
        bounds = [bound for item in items if isinstance(item, slice) for bound in (item.start, item.stop)]
        return next((b - k for b in bounds if isinstance(b, int) for k in (0, 1) if b - k in self._numbers), None)

    def _is_of_numpy(self, tensor: Tensor) -> bool:
        """Whether a tensor came out of numpy, and not as labels do."""
        labels = bool(tensor.dim()) and tensor.size(0) == self._batch
        return tensor.is_floating_point() and not labels and not tensor.requires_grad and is_new_foreign(tensor)


def _is_unknown(numbers: Any) -> bool:
    """Whether some of these numbers stand neither in the code that makes a tensor of them, nor in what it names."""
    if hasattr(numbers, "__array__"):
        return True
    found = _flat(numbers)
    frame = users(sys._getframe(2))
    return frame is None or len(found) > _MOST or not all(literal_in_code(frame, number, ()) for number in found)


def _flat(numbers: Any) -> list[float]:
    if isinstance(numbers, Sequence) and not isinstance(numbers, str):
        return [number for item in numbers for number in _flat(item)]
    return [float(numbers)] if isinstance(numbers, int | float) and not isinstance(numbers, bool) else []
