"""Caches the layouts of a call's results by its signature: a forward repeats the same calls step after step.

A call is known by its function, the shapes, types and layouts of its tensors, and its other arguments. Only
calls whose layouts follow from these are kept: no parameter among the arguments, nothing written in place,
no rows in an order of their own, nothing mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch_axis import operator_table
from ..batch_axis.aliasing import is_apart, look, shares
from ..batch_axis.batch_positions import made_in_sight, may_matter
from ..batch_axis.calls import Call, rule_of
from ..batch_axis.layout import Layout, tag, tag_of
from ..batch_axis.operator_table import function_name, is_in_place
from ..batch_axis.python_reads import GIVING
from ..batch_axis.python_sizes import Sizes
from ..batch_axis.tensor_notes import NUMBER, NUMBER_OF, UNTRACKED
from ..grad_sample.attention import COMPOSITES
from ..grad_sample.parameter_links import link_of
from ..grad_sample.routed_rows import PRODUCTS, gathered_of
from ..grad_sample.rules import USE_RULES
from ..utils.cache import Answers
from ..utils.pytree import tensors_in
from .known_calls import Form, Known, KnownCapture, form_of, known_calls, note_kind, one_object

_KINDS = Answers()
# what they do beside their result, each time: numbers and memory leave torch, or a tensor comes to other memory
_TELLING = GIVING | operator_table.READING | {Tensor.data.__set__}  # type: ignore[attr-defined]
_BY_NUMBERS = operator_table.BY_LENGTHS | {"tensor_split"}  # (of a tensor of places, which may be a constant)


def inquires(func: Any) -> bool:
    """Whether the function only tells a tensor's shape, type or place."""
    return _kind(func) == "asks"


def _kind(func: Any) -> str:
    """How the layouts of its results are known: "asks"; "repeats": by shapes; "elementwise": so too, number by number;
    "checked": by shapes, unless values may matter; "depends"; "where"."""
    found = _KINDS.get(func)
    if found is None:
        found = _KINDS[func] = _classify(func)
        note_kind(func, found)
    return found


def _classify(func: Any) -> str:
    name = function_name(func)
    getter = getattr(func, "__name__", "") == "__get__"
    if name in (operator_table.ASKING_PROPERTIES if getter else operator_table.ASKING):
        return "asks"
    if func in _TELLING or name in operator_table.OF_A_NUMBER:
        return "depends"
    rule = rule_of(func)
    if rule.by_value or rule.refuses or is_in_place(name) or func in COMPOSITES or name in _BY_NUMBERS:
        return "depends"
    drawing = name in operator_table.DRAWING and not (
        func in operator_table.UNCHECKED and name in operator_table.ELEMENTWISE
    )  # (dropout: of data)
    if name in operator_table.NUMBERING or drawing or name in operator_table.FILLING:
        return "depends"
    if name == "where":
        return "where"
    if func in operator_table.UNCHECKED and name in operator_table.ELEMENTWISE:
        return "elementwise"
    return "repeats" if func in operator_table.UNCHECKED or name in operator_table.VIEWS else "checked"


class Memo:
    """What was found for calls, by signature."""

    def __init__(self) -> None:
        self._known = Answers()
        self.captures = Answers()  # `known_calls.KnownCapture` by signature, by these rules
        self._rules: dict[Any, Any] = {}

    def signature(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int, tracked: dict[int, str]
    ) -> Any:
        """What the layouts follow from; None where they depend on more."""
        kind = _kind(func)
        if kind == "depends" or batch <= 1 or "out" in kwargs or (kind == "where" and len(args) == 1):
            return None
        if any(id(value) in tracked for value in args):
            return None  # a parameter: captured anew in every forward
        if func in PRODUCTS and any(gathered_of(tensor) is not None for tensor in args):
            return None
        by_index = func is torch.Tensor.__getitem__
        # ids, and constants that may be made for this batch, count by value where the function is asked by example
        known = _Described(batch, tracked, kind, view=by_index)
        known.parts += (func, batch, torch.is_grad_enabled())
        try:
            known.add(args if not by_index else args[:1])
            if by_index:
                _describe_index(args[1], known.parts)
            for name, value in kwargs.items():
                known.parts.append(name)
                known.add((value,))
        except _Depends:
            return None
        if not known.data:
            return None  # how constants are made of others is noted
        if known.elementwise and known.may_meet_by_place():
            return None
        if known.rows is not None and any(not known.rows.isdisjoint(shape) for shape in known.constants):
            return None
        return tuple(known.parts)

    def layouts(self, signature: Any) -> tuple[Layout | None, ...] | None:
        if signature is None:
            return None
        try:
            known: Known | None = self._known.get(signature)
        except TypeError:  # an argument without a hash
            return None
        return known and known.layouts

    def calls_of(self, batch: int, tracked: dict[int, str], stack: list[str], sizes: Sizes) -> Any:
        """The calls of a pass that are known, as the extension serves them; None without it."""
        if self._rules != USE_RULES:
            self._rules = dict(USE_RULES)
            self.captures.clear()
        return known_calls(self._known, self.captures, batch, tracked, stack, sizes)

    def learn(self, signature: Any, call: Call) -> None:
        """Keep the layouts of the results, if they are plain."""
        found: list[Layout | None] = []
        had_data = any(isinstance(part, Form) and part.layout is not None for part in signature)
        for tensor in call.results():
            layout = tag_of(tensor, call.batch)
            if layout is not None and (layout.mixed or layout.owner is not None):
                return
            if (layout is None and had_data) or made_in_sight(tensor):
                return  # of unknown rows: looked at every time
            found.append(layout and one_object(layout))
        try:
            self._known[signature] = Known(tuple(found), [None for _ in 2 * found])
        except TypeError:
            return

    def learn_capture(self, signature: Any, known: KnownCapture) -> None:
        """Keep a captured call."""
        known.call.layout = one_object(known.call.layout)
        self.captures[signature] = known


def tag_results(out: Any, known: Sequence[Layout | None]) -> Any:
    """The results of a known call, with their layouts."""
    for tensor, layout in zip(tensors_in(out), known, strict=True):
        if layout is not None:
            tag(tensor, layout)
        elif tensor.requires_grad and not tensor.is_leaf:
            tensor.__dict__[UNTRACKED] = True
    return out


class _Depends(Exception):
    """The call's layouts do not follow from its signature."""


class _Described:
    """The parts of a signature, collected in one pass over the arguments."""

    __slots__ = ("batch", "tracked", "elementwise", "rows", "view", "parts", "constants", "made", "data")

    def __init__(self, batch: int, tracked: dict[int, str], kind: str, view: bool) -> None:
        self.batch, self.tracked, self.view = batch, tracked, view
        self.elementwise, self.rows = kind == "elementwise", {batch} if kind == "checked" else None
        self.parts: list[Any] = []
        self.constants: list[torch.Size] = []
        self.made: list[torch.Size] = []  # of constants that were made in sight
        self.data: list[tuple[int, int]] = []  # where the samples lie, counted from the last dimension; rows

    def add(self, values: Any) -> None:
        parts = self.parts
        for value in values:
            if isinstance(value, Tensor):
                needs_grad = value.requires_grad
                if value.is_nested or needs_grad and (id(value) in self.tracked or link_of(value) is not None):
                    raise _Depends
                layout, shape = look(value, tag_of(value, self.batch), self.batch), value.shape
                if layout is None:
                    if is_apart(value) and shares(value):
                        raise _Depends  # its views must be known for constants too
                    if needs_grad and not value.is_leaf:
                        raise _Depends  # of unseen origin, perhaps
                    if made_in_sight(value):
                        if not self.elementwise and may_matter(value, self.batch):
                            raise _Depends
                        self.made.append(shape)
                    if NUMBER in value.__dict__ or NUMBER_OF in value.__dict__:
                        raise _Depends  # a size of the batch, perhaps
                    self.constants.append(shape)
                else:
                    self.data.append((layout.dim - len(shape), layout.rows))
                    if layout.mixed or layout.owner is not None or layout.piece is not None:
                        raise _Depends
                    if self.rows is not None:
                        # of ids a slice is known by its bounds; what other functions do depends on the ids
                        if not value.is_floating_point() and (layout.is_row_index or not self.view):
                            raise _Depends
                        self.rows.add(layout.rows)
                parts.append(form_of((shape, value.dtype, needs_grad, layout)))
            elif isinstance(value, tuple | list):
                parts += (type(value), len(value))
                self.add(value)
            elif isinstance(value, dict):
                raise _Depends
            else:
                parts += (type(value), value)

    def may_meet_by_place(self) -> bool:
        """Whether a constant made in sight may have a number for each row of data (`propagate.meets_places`)."""
        return any(
            shape[dim] == rows
            for shape in self.made
            for beside, rows in self.data
            for dim in {0, len(shape) + beside}
            if 0 <= dim < len(shape)
        )


def _describe_index(index: Any, parts: list[Any]) -> None:
    for item in index if isinstance(index, tuple) else (index,):
        if isinstance(item, slice):
            if not all(bound is None or type(bound) is int for bound in (item.start, item.stop, item.step)):
                raise _Depends  # a tensor's value may change
            parts += (slice, item.start, item.stop, item.step)
        elif item is None or item is Ellipsis or type(item) is int:
            parts += (type(item), item)
        else:
            raise _Depends
    parts.append(isinstance(index, tuple))
