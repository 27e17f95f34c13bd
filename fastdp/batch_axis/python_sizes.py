"""Detects computation with sizes that depend on the batch: `h * len(h)`, `h / mask.nonzero().shape[0]`.

The number of samples, or of rows that the data of several samples chose, is made by all samples; as a size it does no
harm, as a factor it makes each sample's gradient depend on the others. Python's numbers cannot be followed, so they are
told by value: a factor that equals such a number, in code that has asked for sizes, is warned of; where it follows it
from batch to batch, refused. A number that is written in the code, or is an attribute of the module, may equal a size
by chance: nothing is said until it follows the size. A factor that grows or shrinks with the sizes is warned of.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..utils.code_location import FASTDP, frames, is_librarys, users
from . import operator_table, tensor_notes
from .batch_positions import is_random, made_in_sight
from .calls import Call
from .code_lines import (
    assigned,
    has_name,
    is_named_square,
    is_number,
    is_product,
    is_size,
    is_written,
    lines_of_call,
    literal_in_code,
    may_be_of,
    shape_dims,
)
from .layout import Layout, layout_on
from .totals import share_of

T = torch.Tensor
_AGAIN = 4  # sizes in a row that a number must equal to follow them, once it has equalled none
_ENOUGH = 6  # sizes: 6 numbers of a schedule rise or fall with them by chance in one run of 360
_BATCH = -1  # among the sizes that a line has told: that of the batch, too
_ELEMENTS, _OF_SHAPE = "the number of elements in the batch", "the product of the batch's shape"
_LIBRARY = ("/torch/_tensor.py", "/torch/overrides.py")


class _Followed:
    """The sizes that the numbers at a place have followed: by forward, of several in a row, with the number."""

    def __init__(self) -> None:
        self.sizes: dict[int, tuple[float, float]] = {}
        self.missed = 0  # the last forward with a number that is no size, of which the place may have several
        self.enough = 2

    def take(self, forward: int, size: float, number: float, follows: bool) -> bool:
        """Whether it is certain by now that the numbers follow."""
        if self.missed not in (0, forward, *self.sizes):  # that forward had no other: no size is computed with here
            self.sizes, self.missed, self.enough = {}, 0, _AGAIN
        if not follows:
            self.missed = forward
            return False
        self.sizes[forward] = (size, number)
        return all(len(set(each)) >= self.enough for each in zip(*self.sizes.values(), strict=True))


class Sizes:
    """What one engine's forwards were told by sizes, and where they computed with it."""

    def __init__(self) -> None:
        self._batch = 0
        # by id, as to hash code takes long (known_calls.cpp reads both): what asked for sizes, in this forward; torch's
        # and fastdp's that were met
        self.codes, self.librarys = dict[int, CodeType](), dict[int, CodeType]()
        self._lines: dict[tuple[CodeType, int], set[int]] = {}  # that asked for sizes: those told but the batch's
        self._dims: dict[tuple[CodeType, int], int] = {}  # where in a shape that a line took the batch's size stands
        self._told: dict[float, str] = {}  # numbers that several samples' data made, in this forward
        # (sizes told, number); None: cleared
        self._series: dict[Any, list[tuple[tuple[float, ...], float]] | None] = {}
        # number told first, and number computed with; None: cleared
        self._places: dict[Any, tuple[float, float] | None] = {}
        self._followed: dict[Any, _Followed] = {}  # by place
        self._divisors: dict[Any, tuple[int, set[float]]] = {}  # of sums, by place: in its first forward
        self._beside: set[int] = set()  # sizes told in this forward that are of another dimension
        # by place and shape: what was told in this forward, and whether the batch's size was
        self.asked_before: dict[Any, tuple[Any, bool]] = {}
        self._forwards = 0

    def begin(self) -> None:
        """A forward begins."""
        self._forwards += 1
        self.codes.clear()
        self._told.clear()
        self._beside.clear()
        self.asked_before.clear()

    def asked(self, tensor: Any, found: Any, batch: int, dim: int | None = None) -> None:
        """Python asked for the size of a tensor. dim: of one dimension."""
        layout = layout_on(tensor) if isinstance(tensor, Tensor) else None
        if layout is None or batch <= 1:
            return
        self._batch = batch
        frame: Any = sys._getframe(1)
        while frame.f_back is not None and _is_ours(frame.f_code.co_filename):
            frame = frame.f_back
        if tensor_notes.COUNTED in tensor.__dict__:
            tells = self._note_asked(tensor, layout, found, dim, frame)
        else:
            key = (id(frame.f_code), frame.f_lasti, id(layout), tensor.shape, found, dim)
            if key not in self.asked_before:  # (what has these ids stays there)
                tells = self._note_asked(tensor, layout, found, dim, frame)
                self.asked_before[key] = (frame.f_code, layout), tells
            tells = self.asked_before[key][1]
        while tells and frame is not None:  # (asked for hundreds of times in a forward)
            code = frame.f_code  # and whoever asks by functions of his own
            if id(code) not in self.codes:
                if is_librarys(code.co_filename):
                    self.librarys[id(code)] = code
                    return
                self.codes[id(code)] = code
            frame = frame.f_back

    def _note_asked(self, tensor: Tensor, layout: Layout, found: Any, dim: int | None, frame: Any) -> bool:
        """What the line at which a frame is was told. Returns whether it was told the batch's size, perhaps."""
        batch, line = self._batch, (frame.f_code, frame.f_lineno)
        others = self._lines.setdefault(line, set())
        dims: Sequence[int] = [dim] if dim is not None else ()
        if isinstance(found, tuple):
            dims = shape_dims(*line)
            self._dims[line] = layout.dim
            beside = {size for place, size in enumerate(found) if place != layout.dim}
        else:
            beside = {found} if found % batch or (dim is not None and dim % tensor.dim() != layout.dim) else set()
            if dim is None and found == tensor.numel() > 0 and tensor.dim():  # numel(): the size, times others
                beside = beside | {found // tensor.size(layout.dim)}
        if layout.alone >= 0:  # of one sample
            beside = beside | set(found if isinstance(found, tuple) else (found,))
        others.update(() if tuple(dims) == (layout.dim,) and layout.alone < 0 else beside)  # x.shape[0] takes none
        self._beside.update(beside)
        apart = dims and tensor.dim() and all(asked % tensor.dim() != layout.dim for asked in dims)
        if apart and not layout.mixed and tensor_notes.COUNTED not in tensor.__dict__:
            self._told.setdefault(tensor.numel(), _OF_SHAPE)
            return False  # sizes of other dimensions tell nothing of the batch, by themselves
        others.add(_BATCH)
        if tensor_notes.COUNTED in tensor.__dict__:
            self._told[tensor.__dict__[tensor_notes.COUNTED]] = "the largest label in the batch"
        if layout.order is not None or (layout.is_row_index and layout.mixed) or (layout.mixed and not layout.total):
            numbers = found if isinstance(found, tuple) else (found,)
            for number in numbers:
                if number >= 0:
                    self._told[number] = "the number of rows that several samples' data made"
        elif (elements := tensor.numel()) > batch and (isinstance(found, tuple) or found == elements):
            self._told[elements] = self._told.get(elements, _OF_SHAPE) if isinstance(found, tuple) else _ELEMENTS
        return True

    def note_number(self, call: Call) -> None:
        """A constant is made of a number."""
        (args, kwargs), name, out = call.given, call.name, call.out
        if not isinstance(out, Tensor) or layout_on(out) is not None:
            return
        number, fills = None, name.endswith(("full", "full_like", "fill_"))
        if not fills and out.numel() == 1 and args and isinstance(args[0], Tensor) and args[0] is not out:
            number = args[0].__dict__.get(tensor_notes.NUMBER)
            given = [t.__dict__ for t in args if isinstance(t, Tensor)]
            origins = [notes[tensor_notes.NUMBER_OF] for notes in given if tensor_notes.NUMBER_OF in notes]
            if origins:
                out.__dict__[tensor_notes.NUMBER_OF] = origins[0]
            if out.device.type == "cpu" and (number is not None or (made_in_sight(args[0]) and not is_random(args[0]))):
                number = out.item()  # of a range or of ones as many as there are samples, perhaps
        elif fills or name in operator_table.COMPUTING or (name in operator_table.OF_A_NUMBER and out.numel() == 1):
            number = next((v for v in reversed(tree_leaves((args, kwargs))) if is_number(v)), None)
        if number is None:
            return
        out.__dict__[tensor_notes.NUMBER] = number
        if self.codes and name not in operator_table.COMPUTING and tensor_notes.NUMBER_OF not in out.__dict__:
            found = next((what for told, what in self._sources(self._batch) if is_size(float(number), told)), None)
            if found is not None and (number in self._told or not is_written(number, self.codes.values())):
                out.__dict__[tensor_notes.NUMBER_OF] = found

    def has_told(self, number: float) -> bool:
        """Whether the code that calls now has asked for sizes of the batch, and this number is most likely one: it is
        neither written down there as a constant, nor a fraction, which no size is."""
        if self.codes and number != int(number):
            return self._is_inverse("inverse", self._batch, number)
        if number in self._beside or (number != self._batch and is_product(int(number), self._beside)):
            return False  # as likely of other dimensions
        for frame in frames(sys._getframe(2)) if self.codes else ():
            if not _is_ours(frame.f_code.co_filename) and (
                literal_in_code(frame, number, self.codes.values()) or is_named_square(frame, number, self._batch)
            ):
                return False
            if id(frame.f_code) in self.codes:
                return True
        return False

    def is_batch(self, certain: bool) -> bool:
        """Whether a size that equals the batch's is, by the code that calls now, most likely that: neither written down
        nor taken from elsewhere. certain: it was told as that, where it stands or its variable was assigned."""
        calling = [frame for frame in frames(sys._getframe(1)) if not _is_ours(frame.f_code.co_filename)]
        asking = max((place for place, frame in enumerate(calling, 1) if id(frame.f_code) in self.codes), default=0)
        for frame in calling[:asking]:
            if literal_in_code(frame, self._batch, self.codes.values()):
                return False
            if (told := self._told_at(frame)) is not None:
                return told
        return bool(asking) and not certain

    def _told_at(self, frame: Any) -> bool | None:
        """Whether the batch's size, as a frame's line reads it, was told as that; None if this is not known."""
        code, lines = frame.f_code, lines_of_call(frame)
        if any(_BATCH in (at := self._lines.get((code, line), ())) and self._batch not in at for line in lines):
            return True
        places = assigned(frame, self._batch, lines)
        if places is None or (not places and id(code) not in self.codes):
            return None  # given to this code, or of a library's own making
        found: set[bool | None] = set()
        for line, place in places:
            told, dim = self._lines.get((code, line), ()), self._dims.get((code, line), place)
            if _BATCH not in told:
                found.add(False)
            elif place >= 0:  # B, T = x.shape
                found.add(place == dim)
            else:
                found.add(True if len(told) == 1 or shape_dims(code, line) == (dim,) else None)
        return found.pop() if len(found) == 1 else False if not found else None

    def _is_else(self, frame: Any, number: float) -> bool:
        """Whether a number is, most likely, one that the line names, or follows from, or a product of other sizes."""
        named = any(has_name(frame, one) for one in (number, number - 1, 1 - number) if one)
        whole = number == int(number) and number > 0
        return (
            named
            or is_named_square(frame, number, self._batch)
            or (whole and number != self._batch and is_product(int(number), self._beside))
        )

    def _is_inverse(self, what: str, batch: int, number: float) -> bool:
        """Whether a number at this line has gone, from a batch of another size to this one, as one by the sizes."""
        if (frame := users(sys._getframe(1))) is None:
            return False
        place = (what, frame.f_code, frame.f_lineno)
        before = self._places.setdefault(place, (batch, number))
        if before is None or before[0] == batch:
            return False
        return math.isclose(number / before[1], before[0] / batch)

    def problem(self, call: Call) -> tuple[str, bool]:
        """What a call computes with that sizes told ('' if nothing), and whether that is certain."""
        if call.batch <= 1 or call.name not in operator_table.COMPUTING or not self.codes:
            return "", False
        if any((layout := call.layout(t)) is not None and layout.total for t in call.args):
            return "", False  # a sum over the samples may be divided by their number
        for value in (*call.args, *call.kwargs.values()):
            notes = value.__dict__ if isinstance(value, Tensor) else {}
            number: Any = notes.get(tensor_notes.NUMBER) if isinstance(value, Tensor) else value
            doubtful = isinstance(value, Tensor) and tensor_notes.NUMBER_OF not in notes
            if is_number(number) and (found := self._of(call, float(number), doubtful))[0]:
                return found
            if number is not None and (origin := notes.get(tensor_notes.NUMBER_OF)):
                return f"{call.mixed()} computes with {number:g}, made of {origin}", False
        return "", False

    def problem_of_loss(self, call: Call) -> tuple[str, bool]:
        """What a loss is scaled by that sizes told ('' if nothing), and whether that is certain.

        A sum over the samples may be divided by their number, and so may each of its terms (`totals.by_size`). Other
        numbers are told by the line that both asks for a size and scales, if they have no name in it, or by what they
        do from batch to batch.
        """
        inputs = call.inputs()
        total = any(layout.total for _, layout in inputs)
        if inputs and all(layout.mixed and not tensor.requires_grad for tensor, layout in inputs):
            return "", False  # a metric: no loss may take it, whatever it is divided by
        if (
            call.batch <= 1
            or call.name not in (operator_table.SCALING if total else operator_table.COMPUTING)
            or not self._lines
        ):
            return "", False
        given = [number for value in (*call.args, *call.kwargs.values()) if (number := _number_in(value)) is not None]
        number = next((float(found) for found in given if found), 0.0)
        share = share_of(number, call) if number and call.name in operator_table.SCALING else 0
        if not number or (share and total and not self._grows(call, number)):
            return "", False
        why, certain = self._of(call, number)
        if share and total:
            return f"{call.mixed()} computes with {number:g}, made of a power of the number of samples", True
        if share < 0:
            call.out.__dict__[tensor_notes.SHARE] = (tensor_notes.version_of(call.out), certain)
            return "", False
        frame: Any = users(sys._getframe(1))
        others = None if frame is None else self._lines.get((frame.f_code, frame.f_lineno))
        asks = others is not None and _BATCH in others and may_be_of(number, call.batch)
        asks = asks and not any(is_size(number, size) for size in others or ()) and not self._is_else(frame, number)
        if not (asks or certain or "with a size" in why):
            return "", False  # equal by chance, perhaps
        return why or f"{call.mixed()} computes with {number:g}, made of a size of the batch", certain

    def changing_divisor(self, call: Call) -> str:
        """Of a sum over the samples that the same code has divided by another whole number in an earlier batch, and by
        no multiple of the number of samples: how many labels count, perhaps ('' of any other call)."""
        first = call.args[0] if call.args and "div" in call.name else None
        layout = call.layout(first)
        divided = layout is not None and layout.total and call.args[0].requires_grad and len(call.args) > 1
        number = _number_in(call.args[1]) if divided else None
        frame = None if number is None or number < 1 or number % 1 else users(sys._getframe(1))
        if frame is None or number is None or not number % call.batch:
            return ""
        forward, numbers = self._divisors.setdefault((frame.f_code, frame.f_lineno), (self._forwards, {number}))
        if forward == self._forwards:
            numbers.add(number)
        if number in numbers:
            return ""
        return (
            f"{call.mixed()} divides the loss by {number:g}, and by {min(numbers):g} in another batch: if that is how "
            "many labels, boxes or tokens several samples have, each sample's weight depends on the others"
        )

    def follows_read(self, call: Call, number: float, read: bool) -> bool:
        """Whether a batch is scaled by a whole number that Python has read of it, here and in batches before."""
        frame = users(sys._getframe(1)) if call.name in operator_table.SCALING else None
        if frame is None or any(is_size(number, size) for size in (call.batch, *self._beside, *self._told)):
            return False
        followed = self._followed.setdefault(("read", call.name, frame.f_code, frame.f_lineno), _Followed())
        return followed.take(self._forwards, number, number, read)

    def _grows(self, call: Call, number: float) -> bool:
        """Whether what a total is divided by is a multiple of the number of samples that grows with it: a power."""
        size = abs(number) if abs(number) >= 1 else 1 / abs(number)
        if any(is_size(size / call.batch, other) for other in self._beside if other > 1):
            return False  # the number of samples, times another size
        return self._is_inverse(f"power {call.name}", call.batch, call.batch / size)

    def _of(self, call: Call, number: float, doubtful: bool = False) -> tuple[str, bool]:
        """doubtful: nothing is said until it follows a size; so is a number in code that has not asked for one."""
        frame: Any = next((each for each in frames(sys._getframe(2)) if id(each.f_code) in self.codes), None)
        if frame is None:
            frame, doubtful = users(sys._getframe(2)), True
        if frame is None:
            return "", False
        place = (call.path, call.name, frame.f_code, frame.f_lineno)
        sources = self._sources(call.batch)
        matching = ((told, what) for told, what in sources if is_size(number, told, what != _OF_SHAPE))
        source, what = next(matching, (float(call.batch), ""))
        if not what and (following := self._follows(place, call.batch, number)):
            return f"{call.mixed()} computes with {number:g}, {following}", False
        before = self._places.setdefault(place, (source, number))
        if before is None:
            return "", False
        if before[1] == number and before[0] != source:
            self._places[place] = None  # the same number beside another size: a constant
            return "", False
        if source == call.batch and any(is_size(number, size) for size in self._beside):
            return "", False  # as likely of another dimension
        followed = self._followed.setdefault(place, _Followed())
        certain = followed.take(self._forwards, source, number, bool(what))
        doubtful = doubtful or followed.enough > 2 or is_written(number, self.codes.values())
        if not what or (doubtful and not certain):
            return "", False
        return f"{call.mixed()} computes with {number:g}, made of {what}", certain

    def _follows(self, place: Any, batch: int, number: float) -> str:
        """Whether the numbers computed with at a place grow or shrink with a size, over _ENOUGH sizes; '' if not."""
        seen = self._series.setdefault(place, [])
        if seen is None:
            return ""
        sizes = (batch, *self._told)
        if any((before == number) != (known == sizes) for known, before in seen):
            self._series[place] = None  # a constant, or a schedule
            return ""
        if (sizes, number) not in seen:
            seen.append((sizes, number))
        if len(seen) < _ENOUGH:
            return ""
        self._series[place] = None
        for k in range(min(len(known) for known, _ in seen)):
            series = sorted((known[k], value) for known, value in seen)
            steps = list(zip(series, series[1:], strict=False))
            rising = {later[1] > earlier[1] for earlier, later in steps}
            if len(rising) == 1 and all(later[0] > earlier[0] for earlier, later in steps):
                return f"which {'grows' if rising.pop() else 'shrinks'} with a size of the batch"
        return ""

    def _sources(self, batch: int) -> list[tuple[float, str]]:
        return [*self._told.items(), (batch, f"the number of samples ({batch})")]


@functools.lru_cache(maxsize=1024)
def _is_ours(name: str) -> bool:
    return name.endswith(_LIBRARY) or name.startswith(FASTDP)


def _number_in(value: Any) -> float | None:
    """A number of Python, or the one that a constant tensor was made of."""
    found = value.__dict__.get(tensor_notes.NUMBER) if isinstance(value, Tensor) else value
    return found if is_number(found) else None
