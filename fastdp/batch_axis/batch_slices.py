"""Parts of the batch cut out by position: `h[: len(h) // 2]`, `h.chunk(2)`, `h[::2]`.

Which sample stands where must not matter: if one is removed, the others move. A batch may be cut to work on it in
parts, if the same is done to all of them; so a part remembers what was done to it, and parts may only be put together
again, or added up, if all samples are among them and they have the same past.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.common import bytes_of
from ..utils.code_location import place_of, users
from ..utils.pytree import tensors_in
from . import operator_table, tensor_notes
from .batch_positions import is_fixed, made_in_sight
from .calls import Call
from .host_values import in_some_order, on_host
from .layout import Layout, layout_on, owner_of, tag, tag_of
from .own_numbers import OWN_NUMBERS

BESIDE: set[int] = set()  # single samples whose terms were added to one over all samples, since a forward began
NOTED: list[str] = []  # what single samples of a loop went through, where it differs: to be warned of
# by memory that single samples' rows were written to, in this forward or loss: what was written to each's rows, as
# parts, and the place of the first write
WRITTEN: dict[int, tuple[dict[int, list[Any]], str]] = {}
_CUT_ONCE: list[bool] = []  # filled once any batch was cut: till then there is nothing to look for
_CUTS = itertools.count(1)
_ASSIGNING = frozenset({"__setitem__", "index_put", "index_put_", "index_copy", "index_copy_"})
_MANY = 6  # samples whose own lengths do not count up by chance

BY_POSITION = (
    "treats samples by their place in the batch: parts of it, cut by position, have not all gone the same way. If one "
    "sample is removed, the others move to other places. Do the same to every sample, or choose by the sample's data "
    "(by a mask)"
)


class Piece(NamedTuple):
    """source: of which tensor it is a part (or of parts of it, joined); past: what was done to it; counts, whole: how
    many rows of each sample are in it, and in that tensor; rows: tells these rows from others.

    Of one sample, numbers: by which it was indexed since; with_own: its past, and the same with its own numbers in it,
    which the past leaves out; of several, one_by_one: whether a loop joined them.
    """

    source: int
    past: int
    counts: tuple[int, ...]
    whole: tuple[int, ...]
    rows: int
    numbers: tuple[int, ...] = ()
    one_by_one: bool = False
    with_own: tuple[int, int] = (0, 0)

    @property
    def full_past(self) -> int:
        return self.with_own[1] if self.with_own[0] == self.past else self.past

    @property
    def samples(self) -> list[int]:
        return [number for number, count in enumerate(self.counts) if count]


def cut(source: Tensor, layout: Layout, found: Layout, rows: Tensor, by: Any = (), named: bool = False) -> Layout:
    """The layout of rows of a tensor picked by constants; a piece, if it holds not all samples alike.

    rows: which of the source's rows each is; by: what else picked of these rows; named: one by one, so that how many
    each sample has its own data may have told (the boxes of images).
    """
    if found.mixed or found.order is not None or layout.order is not None or layout.batch <= 1:
        return found
    rows = rows[tuple(slice(0, None if step else 1) for step in rows.stride())]
    counts, before = _rows_of_each(found, rows.numel()), _rows_of_each(layout)
    if counts == before or (layout.owner is None and len(set(counts)) == 1) or (named and 0 not in counts):
        return found._replace(piece=layout.piece)
    known = on_host(rows)
    key = hash(tuple(counts)) if known is None else hash(bytes_of(known.contiguous()))
    if layout.piece is not None:  # of memory to which parts were assigned, other samples' rows may be no one's
        there = tuple(map(min, counts, layout.piece.counts))
        return found._replace(piece=layout.piece._replace(counts=there, rows=hash((layout.piece.rows, key))))
    note = source.__dict__.get(tensor_notes.CUT)
    if not _CUT_ONCE:
        _CUT_ONCE.append(True)
    if note is None or note[1] != tensor_notes.version_of(source):
        note = source.__dict__[tensor_notes.CUT] = (next(_CUTS), tensor_notes.version_of(source))
    piece = Piece(note[0], 0, tuple(counts), tuple(before), key)
    if len(piece.samples) == 1:
        return found._replace(piece=piece._replace(numbers=tuple(_integers(by))))
    what: list[Any] = []
    _describe(by, what, True)
    return found._replace(piece=piece._replace(past=hash(tuple(what)) if what else 0))


def _rows_of_each(layout: Layout, rows: int = 0) -> list[int]:
    """How many rows each sample has; rows: of a tensor of one sample."""
    if layout.alone >= 0:
        return [rows * (number == layout.alone) for number in range(layout.batch)]
    if layout.owner is None:
        return [layout.outer * layout.inner] * layout.batch
    return torch.bincount(in_some_order(layout.owner), minlength=layout.batch).tolist()


def stamped(pieces: Sequence[Piece], call: Call) -> Piece:
    """The piece after a call on pieces of the same samples: its past is one call longer."""
    first = next((piece for piece in pieces if not piece.samples), pieces[0])  # (rows that were assigned nothing)
    if call.name in operator_table.ADDING and len({(p.past, p.counts) for p in pieces}) == 1 < len(set(pieces)):
        return first  # parts of a sample, each made in the same way, added up by a loop
    what: list[Any] = [call.name, torch.is_grad_enabled()]
    if call.name == "__getitem__" and len(first.samples) > 1 and isinstance(call.args[1], tuple):
        _describe(call.args[1][1:], what, True)  # (of the rows themselves, other samples' chunks have other numbers)
    # (numbers of an index may be each sample's own length, unless they count up with the samples: `_count_up`)
    _describe(
        call.given,
        what,
        call.name == "roll" or call.name in operator_table.COMPUTING or call.name in operator_table.ELEMENTWISE,
    )
    if len(first.samples) != 1:
        return first._replace(past=_longer([piece.past for piece in pieces], what, call))
    rest = [each for each in what if not OWN_NUMBERS.is_own(first.samples[0], each)]
    past = _longer([piece.past for piece in pieces], rest, call)
    full = _longer([piece.full_past for piece in pieces], what, call)
    return first._replace(past=past, with_own=(past, full), numbers=(*first.numbers, *_integers(call.given)))


def _longer(pasts: list[int], what: list[Any], call: Call) -> int:
    return hash((tuple(sorted(pasts) if call.name in operator_table.COMMUTING else pasts), tuple(what)))


def stamp(call: Call) -> None:
    """Note on the results of a call what was done to the parts of the batch among its arguments."""
    batch = call.batch
    if not _CUT_ONCE or batch <= 1 or _begins_a_sum(call):
        return
    if call.in_place:
        _note_write(call)
    found = [layout for tensor in call.tensors if (layout := tag_of(tensor, batch)) is not None]
    pieces = [layout.piece for layout in found if layout.piece is not None]
    if not pieces or any(layout.total for layout in found):
        return  # sums over the samples look at theirs themselves
    if call.name in _ASSIGNING and any(source.piece for _, source in call.beside_first()) and not _by_number(call):
        return  # its rule has looked (`assigned_part`)
    if call.name in operator_table.COMPARING_PARTS:
        if len(pieces) < 2 or len({piece.rows for piece in pieces}) > 1:
            return  # their rules look at the parts; here it is what lies side by side of the same samples
        piece = pieces[0]._replace(past=hash((call.name, *(piece.past for piece in pieces))))
    else:
        piece = stamped(pieces, call)
    target = _target(call) if call.in_place else call.kwargs.get("out")
    if isinstance(target, Tensor):
        _write(target, batch)
    in_parts = any(layout.piece is not None and not layout.parted for layout in found)  # see `assigned_part`
    whole = target._base if isinstance(target, Tensor) and target._is_view() else None  # of one sample, perhaps
    for tensor in tensors_in((call.out, target, whole)):
        layout = tag_of(tensor, batch)
        if tensor is whole and (layout is None or layout.alone < 0):
            continue
        if layout is not None and layout.total and all(known.alone >= 0 for known in found):
            continue  # single samples added up
        if layout is not None and (layout.total or (not layout.mixed and (layout.parted or in_parts))):
            own = layout.piece
            if own is None or own in pieces:
                none = own is None or not piece.samples
                new = piece if none else own._replace(past=piece.past, numbers=piece.numbers, with_own=piece.with_own)
            else:  # the function's rule has noted something of its own
                new = own._replace(past=hash((piece.past, own.past)))
            tag(tensor, layout._replace(piece=new))


def assigned_part(before: Layout | None, part: Piece, index: Any, found: Layout) -> tuple[Layout, str]:
    """The layout of memory to which a part of several samples was assigned, `out[:4] = f(h[:4])`, beside the parts
    before; or why they must not stand beside each other. index: to which of their elements."""
    what: list[Any] = [torch.is_grad_enabled(), *(id(t) for t in tensors_in(index) if not made_in_sight(t))]
    _describe(index, what, True)
    part = part._replace(past=hash((part.past, *what)))
    known = [] if before is None or before.piece is None else [before.piece]
    piece, problem = joined([*known, part])
    return found._replace(piece=settled(piece)), problem


def _by_number(call: Call) -> bool:
    """Whether an assignment names a row by one of Python's numbers: out[i] = ..."""
    index = call.args[1] if call.name == "__setitem__" else None
    return any(type(item) is int for item in (index if isinstance(index, tuple) else (index,)))


def _target(call: Call) -> Any:
    """What a call in place, or an assignment by index, writes to."""
    return call.args[0] if call.args else call.kwargs.get("tensor")


def _note_write(call: Call) -> None:
    """A sample's rows are written into memory that holds other samples', too: so must be those of all, or none."""
    target, batch, assigns = _target(call), call.batch, call.name == "__setitem__"
    base = target._base if isinstance(target, Tensor) and target._is_view() else target
    source = call.args[2] if assigns else target
    layout = tag_of(source, batch) if isinstance(source, Tensor) else None
    if constant := layout is None and isinstance(base, Tensor) and base is not target:  # h[i][:n] = 0
        layout = tag_of(target, batch)
    if layout is None or not isinstance(base, Tensor) or (not assigns and base is target):
        return
    if assigns and not constant and base is target and not _by_number(call):
        return  # one of several chunks, perhaps (`assigned_part`)
    whole, piece = tag_of(base, batch), layout.piece
    if (sample := owner_of(layout)) < 0 or (whole is not None and owner_of(whole) >= 0):
        return
    if piece is not None and (constant or not assigns):  # (else the index holds the sample's own number)
        piece = stamped([piece], call)
    note_write_of_one(base, sample, piece)


def note_write_of_one(memory: Tensor, sample: int, piece: Piece | None) -> None:
    """A sample's rows in this memory were written to, with this part of it."""
    number = memory.__dict__.setdefault(tensor_notes.WRITTEN, next(_CUTS))
    samples, _ = WRITTEN.setdefault(number, ({}, place_of(users(sys._getframe(1)))))
    samples.setdefault(sample, []).append(piece)


def only_writer(memory: Tensor) -> int:
    """The one sample whose rows were written to a constant so far, which is a table of its own then; else -1."""
    samples, _ = WRITTEN.get(memory.__dict__.get(tensor_notes.WRITTEN, -1), ({}, ""))
    if len(samples) != 1 or memory._is_view():
        return -1
    WRITTEN.pop(memory.__dict__[tensor_notes.WRITTEN])
    return next(iter(samples))


def unequally_written(batch: int) -> tuple[str, str]:
    """What is to be warned of, and where, if some samples' rows were written to, and not all of them alike."""
    found = "", ""
    for samples, place in WRITTEN.values():
        ways = [[piece and piece.past for piece in pieces] for pieces in samples.values()]
        full = [[piece and piece.full_past for piece in pieces] for pieces in samples.values()]
        alike = any(all(way == each[0] for way in each) for each in (ways, full))
        counted = any(_count_up([p for p in pieces if p]) for pieces in zip(*samples.values(), strict=False))
        if not OWN_NUMBERS and (len(ways) < batch or counted or not alike):
            found = f"a write to a single sample's rows {BY_POSITION}", place
    WRITTEN.clear()
    return found


def _begins_a_sum(call: Call) -> bool:
    """Whether this is 0 + the first, as Python's sum begins."""
    return call.name.strip("_") in ("add", "radd") and any(type(item) is int and item == 0 for item in call.args)


def _write(part: Tensor, batch: int) -> None:
    """A part of the batch was changed where it lies, so that the batch's parts have gone different ways."""
    layout, base = tag_of(part, batch), part._base if part._is_view() else None
    if layout is None or layout.piece is None or layout.mixed:
        return
    if base is None:  # a detached alias, if the memory has more than this
        storage = tensor_notes.storage_of(part)
        if storage is None or storage.nbytes() <= part.numel() * part.element_size():
            return
    elif tag_of(base, batch) is None:
        return
    if len(layout.piece.samples) > 1 and not layout.piece.one_by_one:
        mixed = Layout(batch, mixed=f"a write in place {BY_POSITION}")
        tag(part if base is None else base, mixed)
        if base is None:
            tensor_notes.written(part, mixed, layout)
    elif base is None:  # (else `_note_write` has)
        NOTED.append(f"a single sample {BY_POSITION}")


def _describe(value: Any, into: list[Any], numbers: bool) -> None:
    """What tells one call from another, whatever the data: parameters, constants, numbers (but sizes)."""
    if isinstance(value, Tensor):
        if layout_on(value) is not None:
            return  # (a part cut without gradients is a leaf, too)
        if value.is_leaf and value.requires_grad:
            whole = value if value._base is None else value._base  # a part of a parameter may be cut anew for each
            into.append((id(whole), value.storage_offset()))  # (how much of it, its own length may say)
        elif is_fixed(value) and value.device.type == "cpu" and value.layout == torch.strided:  # else perhaps its own
            into.append((value.dtype, value.shape, hash(bytes_of(value))))
    elif isinstance(value, tuple | list):
        for item in value:
            _describe(item, into, numbers)
    elif isinstance(value, dict):
        for item in value.values():
            _describe(item, into, numbers)
    elif isinstance(value, slice) and numbers:
        into.append((value.start, value.stop, value.step))
    elif isinstance(value, float | bool | str) or (numbers and isinstance(value, int)):
        into.append(value)


def _integers(value: Any) -> Iterator[int]:
    """The integers in nested arguments, slices among them."""
    if type(value) is int:
        yield value
    elif isinstance(value, slice):
        yield from _integers((value.start, value.stop, value.step))
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


def _count_up(pieces: Sequence[Piece]) -> bool:
    """Whether single samples were indexed by numbers that count up with them: `h[i, i]`, `h[i, : i + 1]`."""
    singles = sorted((min(piece.samples), piece.numbers) for piece in pieces if len(piece.samples) == 1)
    if len(singles) < _MANY or len({len(numbers) for _, numbers in singles}) > 1:
        return False
    samples = [sample for sample, _ in singles]
    columns = [[number - column[0] for number in column] for column in zip(*(n for _, n in singles), strict=True)]
    first, second = samples[0], samples[1]
    return any(
        column[1] and all(n * (second - first) == column[1] * (s - first) for n, s in zip(column, samples, strict=True))
        for column in columns
    )


def joined_rows(layouts: Sequence[Layout]) -> tuple[Piece | None, str]:
    """The same for rows, where some may be of no part."""
    if all(layout.piece is None for layout in layouts):
        return None, ""
    if all(layout.alone >= 0 for layout in layouts):
        pieces = [layout.piece for layout in layouts if layout.piece is not None]
        if len({piece.rows for piece in pieces}) == 1:
            return None, ""  # `stamp` notes what lies side by side
        if not all(piece.samples for piece in pieces):
            return joined(pieces)
        piece, _ = joined(pieces)
        return settled(piece and piece._replace(one_by_one=True, numbers=())), ""
    piece, problem = joined([layout.piece for layout in layouts])
    return settled(piece), problem


def joined(pieces: Sequence[Piece | None]) -> tuple[Piece | None, str]:
    """The piece that these, one at least, make together (None: all samples), or why they must not be put together."""
    known = [piece for piece in pieces if piece is not None]
    if not all(piece.samples for piece in known):  # rows that were assigned nothing
        return None, BY_POSITION
    if len(known) < len(pieces):
        if not all(piece.one_by_one for piece in known):
            return None, BY_POSITION
        if not OWN_NUMBERS:  # a loop's sum over some samples, beside one over all
            NOTED.append(f"a single sample {BY_POSITION}")
        return None, ""
    parts = {piece.rows: piece for piece in known}
    rows, past = next(iter(parts)), hash(tuple(known))
    counts = known[0].counts
    if len(parts) > 1:
        rows = hash(frozenset(parts))
        counts = tuple(map(sum, zip(*(piece.counts for piece in parts.values()), strict=True)))
    first = max(known, key=lambda piece: len(piece.samples))._replace(counts=counts, rows=rows)
    different = [piece for piece in known if (piece.source, piece.past) != (first.source, first.past)]
    if not different or len({(piece.source, piece.full_past) for piece in known}) == 1:
        if not OWN_NUMBERS and _count_up(known):
            NOTED.append(f"a single sample {BY_POSITION}")
        return first, ""
    if len(parts) == 1:  # side by side
        return first._replace(past=past), ""
    if any(len(piece.samples) > 1 and not piece.one_by_one for piece in different):
        return None, BY_POSITION
    if not OWN_NUMBERS:  # else its own data may have said so
        NOTED.append(f"a single sample {BY_POSITION}")
    return first, ""


def settled(piece: Piece | None) -> Piece | None:
    """None once all samples are in it alike, or by a loop, as much of each as its data says perhaps."""
    if piece is None or 0 in piece.counts:
        return piece
    alike = piece.one_by_one or len(set(piece.counts)) == 1 or piece.counts == piece.whole
    return None if alike else piece
