"""Allows a maximum of the whole batch to be subtracted from scores before a softmax, which cancels it.

The number is the same for all, and softmax does not see it; nor does any difference of two such scores. Until then
the scores are mixed (`Layout.mixed`), and `Layout.shifted` remembers whose rows they are but for that number. What
is not listed here makes them mixed for good.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import operator_table
from .calls import Call, Inputs, Tags
from .layout import Layout

_NUMBERS = itertools.count(1)
Ask = Callable[[Call], Tags]


class Shift(NamedTuple):
    """The layout of scores but for one number, and which number that was."""

    layout: Layout
    number: int


def begins(call: Call) -> Tags | None:
    """scores - number, the number made of several samples; None for any other call."""
    if call.name not in operator_table.SUBTRACTING or len(call.args) != 2 or call.kwargs:
        return None
    scores, number = call.args
    if not isinstance(scores, Tensor) or not isinstance(number, Tensor) or number.dim() or not call.out.dim():
        return None
    layout, by = call.layout(scores), call.layout(number)
    if layout is None or layout.mixed or layout.is_row_index or layout.alone >= 0 or by is None or not by.mixed:
        return None
    if (
        by.shifted is not None
        or by.is_row_index
        or scores.dtype not in (torch.float32, torch.float64)
        or number.dtype != scores.dtype
    ):
        return None  # in 16 bits what the number's own gradient is rounded to, instead of zero, would count
    if not bool(number.isfinite()):  # infinity less infinity
        return None
    return [(call.out, layout._replace(mixed=by.mixed, shifted=Shift(layout, next(_NUMBERS))))]


def follow(call: Call, ask: Ask) -> Tags | None:
    """Where an argument is shifted: shifted again, free of the number, or mixed for good; None of any other call."""
    inputs = call.inputs()
    shifts = [layout.shifted for _, layout in inputs if layout.shifted is not None]
    if not shifts:
        return None
    free = _frees(call, inputs, shifts)
    if not free and not _keeps(call):
        return ask(call.supposing({id(tensor): layout._replace(shifted=None) for tensor, layout in inputs}))
    mixed = next(layout.mixed for _, layout in inputs if layout.shifted is not None)
    found = ask(call.supposing({id(t): layout.shifted.layout for t, layout in inputs if layout.shifted is not None}))
    if free:
        return found
    return [(tensor, _again(tensor, layout, mixed, shifts[0].number)) for tensor, layout in found]


def _again(tensor: Tensor, layout: Layout | None, mixed: str, number: int) -> Layout | None:
    if layout is None or layout.mixed or not tensor.is_floating_point():
        return layout
    return layout._replace(mixed=mixed, shifted=Shift(layout, number))


def _frees(call: Call, inputs: Inputs, shifts: list[Shift]) -> bool:
    """Whether the number makes no difference to the result."""
    if call.name in ("softmax", "log_softmax"):
        return len(inputs) == 1
    if call.name not in operator_table.SUBTRACTING or len(call.args) != 2 or call.kwargs:
        return False
    return len(shifts) == 2 == len(inputs) and shifts[0].number == shifts[1].number


def _keeps(call: Call) -> bool:
    """Whether the result is what it would be without the number, less the number."""
    others = call.beside_first()
    if any(layout.shifted is not None for _, layout in others):
        return False
    if call.name in operator_table.KEEPING_SCORES:
        return True
    if call.name in ("masked_fill", "masked_fill_"):  # by what has no weight in a softmax, shifted or not
        value = call.argument(2, "value")
        return not isinstance(value, Tensor) and value <= torch.finfo(call.out.dtype).min / 2
    if call.name in ("clamp", "clip"):  # where it does nothing
        return not others and torch.equal(call.out, call.args[0])
    return (
        call.name in operator_table.EXTREMES and not others and isinstance(call.argument(1, "dim"), int | tuple | list)
    )
