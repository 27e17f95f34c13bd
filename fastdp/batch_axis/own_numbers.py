"""Which of Python's numbers a loop over the samples may go by: each sample's own, and numbers that were drawn.

`mask[i, : lengths[i]] = 1` and `x[i, a : a + 2] = 0` with a = random.randint(0, 5) treat samples by themselves, where
`x[i, :i] = 0` treats them by their place in the batch. Python's numbers cannot be followed, so they are told by value:
what was read of a sample's tensors, or stands at its place in a list; and by whether a generator has moved on.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..ops.common import bytes_of
from ..utils.code_location import users
from .layout import Layout

_SEVERAL = 5  # samples whose drawn numbers do not count up by chance
_OFTEN = 5  # forwards in a row in which chance does not choose the same part of the batch


class OwnNumbers:
    """Which numbers of each sample Python has, in this forward and its loss: it has read them of tensors, or was given
    a list with some for each (lengths, tags). True once it has read one of every sample."""

    def __init__(self) -> None:
        self._read: dict[int, set[float]] = {}
        self._given: dict[int, set[float]] = {}
        self._loaded: dict[int, set[float]] = {}
        self._batch = 1

    def of(self, layout: Layout, read: Any = None) -> None:
        """Python reads numbers that are laid out like this."""
        self._batch = layout.batch
        _note(self._read, layout, read)

    def given(self, lists: Sequence[Any]) -> None:
        """A model is given lists with numbers of each sample."""
        for numbers in lists:
            _note(self._given, Layout(len(numbers)), numbers)

    def loaded(self, lists: Sequence[Any]) -> None:
        """A loader hands out a batch with such lists, or without."""
        self._loaded = {}
        for numbers in lists:
            _note(self._loaded, Layout(len(numbers)), numbers)

    def has(self, sample: int, number: float) -> bool:
        """Whether this is one of the sample's numbers."""
        return any(number in numbers.get(sample, ()) for numbers in (self._read, self._given, self._loaded))

    def row_of(self, index: Any, value: Any, shape: Sequence[int]) -> int:
        """The sample i of which memory[i, :n] = value writes as much as one of its numbers says; else -1.

        n may be what is left of the dimension, too; value: the same for all samples, or its own number.
        """
        items = list(index) if isinstance(index, tuple) else []
        place = next((place for place, item in enumerate(items) if type(item) is int), -1)
        if place < 0 or not self._is_common(items[place], value):
            return -1
        sample, own = items[place], list[bool]()
        for item, size in zip(items[:place] + items[place + 1 :], (*shape[:place], *shape[place + 1 :]), strict=False):
            whole = isinstance(item, slice) and item.step in (None, 1)
            for n in (item.start, item.stop) if whole else item if isinstance(item, list) else (item,):
                if n is None:
                    continue
                if type(n) is not int:
                    return -1
                if any(self.has(sample, each) for each in (n, -n, size - n)):
                    own.append(True)
                elif not whole or n not in (0, size):
                    return -1
        return sample if own else -1

    def _is_common(self, sample: int, value: Any) -> bool:
        """Whether a value that is written may be the same for all samples, or one of this one's numbers."""
        if isinstance(value, Tensor) or not isinstance(value, float) or not math.isfinite(value) or value == int(value):
            return True
        return self.is_own(sample, value)

    def is_own(self, sample: int, value: Any) -> bool:
        """Whether this is one of the sample's numbers, or its inverse."""
        if type(value) not in (int, float) or not math.isfinite(value) or not value:
            return False
        inverse = round(1 / value) if abs(value) > 2**-40 else 0
        return self.has(sample, value) or (self.has(sample, inverse) and math.isclose(inverse * value, 1))

    def __bool__(self) -> bool:
        return len(self._read) >= self._batch

    def clear(self) -> None:
        self._read, self._given = {}, {}


def _note(numbers: dict[int, set[float]], layout: Layout, read: Any) -> None:
    """Note whose the numbers are that were read."""
    for sample in range(layout.batch) if layout.alone < 0 else (layout.alone,):
        known = numbers.setdefault(sample, set())
        if layout.alone >= 0 or layout.batch == 1:
            own = read
        elif isinstance(read, list | tuple) and len(read) == layout.batch and layout.dim == 0 and layout.owner is None:
            own = read[sample]
        else:
            continue  # each sample's, but not in an order that is known here
        known.update(number for number in tree_leaves(own) if isinstance(number, int | float))


class _Writes:
    """Writes of constants to single samples' rows in one memory: (sample, what, whether a generator had moved on)."""

    def __init__(self, line: Any, data: bool) -> None:
        self.line, self.data, self.state = line, data, ()  # data: or a constant, of which others tell (`by_place`)
        self.rows: list[tuple[int, tuple[Any, ...], bool]] = []

    def add(self, sample: int, what: tuple[Any, ...], state: Any) -> bool | None:
        moved = (state != self.state or sample == self.rows[-1][0]) if self.rows else None
        self.state = state
        self.rows.append((sample, what, moved is not False))
        return moved


class DrawnPlaces:
    """Which part of each sample a loop writes to, `x[i, a : a + 2] = 0`, as numbers drawn at random say."""

    def __init__(self) -> None:
        self._writes: dict[int, _Writes] = {}  # by memory, since the forward or loss began
        self._partly: dict[Any, Counter[str]] = {}  # by line: in how many forwards in a row it wrote to these alone

    def note(self, target: Tensor, index: Any, value: Any, data: bool = False) -> bool | None:
        """Note such a write. Returns whether a generator of Python, NumPy or torch has moved on since the one before;
        None of a first one."""
        items = index if isinstance(index, tuple) else (index,)
        sample = next((item for item in items if type(item) is int), -1)
        cuts = [(item.start, item.stop) for item in items if isinstance(item, slice)]
        widths = [b - a for a, b in cuts if type(a) is int and type(b) is int]
        numbers = [n for cut in cuts for n in cut if type(n) is int]
        what = (*numbers, *widths, value if isinstance(value, int | float) else 0)
        kind, keys, place, *_ = numpy.random.get_state()
        state = (random.getstate(), kind, int(keys[0]), place, bytes_of(torch.get_rng_state()))
        return self._of(target, data).add(sample, what, state)

    def forget(self, target: Tensor) -> None:
        """What was written there goes by no drawn numbers, and is judged otherwise."""
        self._writes.pop(id(target if target._base is None else target._base), None)

    def note_own(self, target: Tensor, sample: int) -> None:
        """Note such a write by one of the sample's own numbers."""
        writes = self._of(target, True)
        writes.rows.append((sample, (), True))

    def _of(self, target: Tensor, data: bool) -> _Writes:
        memory = id(target if target._base is None else target._base)
        if memory not in self._writes:
            frame = users(sys._getframe(2))
            self._writes[memory] = _Writes(frame and (frame.f_code, frame.f_lineno), data)
        return self._writes[memory]

    def clear(self) -> None:
        """What was written before was of another batch."""
        self._writes = {}

    def judge(self, batch: int) -> tuple[bool, bool]:
        """Whether any of these writes goes by places in the batch, and whether one perhaps does."""
        found = [self._judged(writes, batch) for writes in self._writes.values()]
        self._writes = {}
        return True in found, None in found

    def _judged(self, writes: _Writes, batch: int) -> bool | None:
        first = {sample % batch: what for sample, what, _ in reversed(writes.rows)}
        samples = sorted(first)
        if len(samples) == batch and len({what for _, what, _ in writes.rows}) == 1:
            return False  # all alike
        if not writes.data and len(writes.rows) == 1:
            return False
        if not all(moved for _, _, moved in writes.rows):
            return True
        columns = zip(*(first[sample] for sample in samples), strict=False)
        if len(samples) >= _SEVERAL and any(_counts_up(samples, column) for column in columns):
            return True
        before, found = self._partly.get(writes.line, Counter[str]()), _parts(samples, batch)
        now = self._partly[writes.line] = Counter({part: before[part] + 1 for part in found})
        if len(samples) == 1 < batch and not before and first[samples[0]]:
            return None  # one that was drawn, or always the same
        often = max(now.values(), default=0)
        return often >= _OFTEN or (None if often >= _OFTEN - 2 else False)


def _parts(samples: Sequence[int], batch: int) -> list[str]:
    """Which part of the batch these are, if their places tell: one, a half, every second one, all but one."""
    half = {"first": range(batch // 2), "second": range(batch - batch // 2, batch), "rest": range(batch // 2, batch)}
    steps = {"even": range(0, batch, 2), "odd": range(1, batch, 2)}
    most = {"but the first": range(1, batch), "but the last": range(batch - 1), f"only {samples[0]}": samples[:1]}
    return [name for name, part in (half | steps | most).items() if list(part) == list(samples)]


def _counts_up(samples: Sequence[int], numbers: Sequence[float]) -> bool:
    """Whether numbers grow or shrink with the samples' places, evenly."""
    step = (numbers[1] - numbers[0]) / (samples[1] - samples[0])
    pairs = zip(samples, numbers, strict=True)
    return step != 0 and all(n - numbers[0] == step * (sample - samples[0]) for sample, n in pairs)


def cuts_a_row(index: Any) -> bool:
    """Whether an index is [i, :n], of Python's numbers."""
    items = index if isinstance(index, tuple) else ()
    ends = [end for item in items if isinstance(item, slice) for end in (item.start, item.stop)]
    return any(type(item) is int for item in items) and any(type(end) is int for end in ends)


OWN_NUMBERS = OwnNumbers()
DRAWN = DrawnPlaces()
