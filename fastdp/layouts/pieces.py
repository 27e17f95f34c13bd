"""Parts of the batch cut out by position: `h[: len(h) // 2]`, `h.chunk(2)`, `h[::2]`.

Which sample stands where must not matter: if one is removed, the others move. A batch may be cut to work on it in
parts, if the same is done to all of them; so a part remembers what was done to it, and parts may only be put together
again, or added up, if all samples are among them and they have the same past.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .calls import function_name, is_in_place, tensors_in
from .layout import ATTRIBUTE, Layout, tag, tag_of

_CUTS = itertools.count(1)
_SOURCE = "_fastdp_cut"  # on a tensor that was cut: the number of its parts, and the version

_ARITHMETIC = frozenset(
    f"{r}{i}{name}"
    for r in ("", "r")
    for i in ("", "i")
    for name in "add sub mul div truediv pow multiply subtract divide true_divide floordiv maximum clamp".split()
)

BY_POSITION = (
    "treats samples by their place in the batch: parts of it, cut by position, have not all gone the same way. If one "
    "sample is removed, the others move to other places. Do the same to every sample, or choose by the sample's data"
)


class Piece(NamedTuple):
    """source: of which tensor it is a part (or of parts of it, joined); past: what was done to it; samples: in it."""

    source: int
    past: int
    samples: frozenset[int]


def cut(source: Tensor, layout: Layout, found: Layout) -> Layout:
    """The layout of rows of a tensor picked by constants; a piece, if it holds not all samples alike."""
    if found.mixed or found.order is not None or layout.order is not None or layout.batch <= 1:
        return found
    if found.alone >= 0:
        samples = frozenset((found.alone,))
    else:
        if found.owner is None:
            return found._replace(piece=layout.piece)
        counts = torch.bincount(found.owner, minlength=layout.batch).tolist()
        before = None if layout.owner is None else torch.bincount(layout.owner, minlength=layout.batch).tolist()
        if before is None:
            if len(set(counts)) == 1:
                return found._replace(piece=layout.piece)
        elif counts == before:
            return found
        samples = frozenset(number for number, count in enumerate(counts) if count)
    if layout.piece is not None:
        return found._replace(piece=layout.piece._replace(samples=samples))
    note = source.__dict__.get(_SOURCE)
    if note is None or note[1] != source._version:
        note = source.__dict__[_SOURCE] = (next(_CUTS), source._version)
    return found._replace(piece=Piece(note[0], 0, samples))


def stamped(pieces: Sequence[Piece], func: Any, args: Any, kwargs: Any) -> Piece:
    """The piece after a call on pieces of the same samples: its past is one call longer."""
    first = pieces[0]
    name = function_name(func)
    what: list[Any] = [name]
    _describe((args, kwargs), what, name.strip("_") in _ARITHMETIC)
    past = hash((tuple(sorted(piece.past for piece in pieces)), tuple(what)))
    return first._replace(past=past)


def stamp(func: Any, args: Any, kwargs: Any, out: Any, batch: int) -> None:
    """Note on the results of a call what was done to the parts of the batch among its arguments."""
    if batch <= 1 or is_joining(func):
        return
    found = [layout for tensor in tensors_in((args, kwargs)) if (layout := tag_of(tensor, batch)) is not None]
    pieces = [layout.piece for layout in found if layout.piece is not None]
    if not pieces or any(layout.total for layout in found):
        return  # sums over the samples look at theirs themselves
    piece = stamped(pieces, func, args, kwargs)
    for tensor in tensors_in((out, args[:1] if is_in_place(function_name(func)) else ())):
        layout = tag_of(tensor, batch)
        if layout is not None and (layout.total or (not layout.mixed and layout.parted)):
            own = piece if layout.piece is None else layout.piece
            tag(tensor, layout._replace(piece=own._replace(past=hash((piece.past, own.past)))))


def _describe(value: Any, into: list[Any], numbers: bool) -> None:
    """What tells one call from another, whatever the data: parameters, small constants, numbers (but sizes)."""
    if isinstance(value, Tensor):
        if value.is_leaf and value.requires_grad:
            into.append(id(value))
        elif ATTRIBUTE not in value.__dict__ and value.numel() <= 16 and value.device.type == "cpu":
            into.append(tuple(value.detach().flatten().tolist()))
    elif isinstance(value, tuple | list):
        for item in value:
            _describe(item, into, numbers)
    elif isinstance(value, dict):
        for item in value.values():
            _describe(item, into, numbers)
    elif isinstance(value, float | bool | str) or (numbers and isinstance(value, int)):
        into.append(value)


def is_joining(func: Any) -> bool:
    """Whether the function puts tensors together, whose past `joined` compares."""
    return function_name(func) in ("cat", "concat", "concatenate", "stack")


def joined_rows(layouts: Sequence[Layout]) -> tuple[Piece | None, str]:
    """The same for rows: single samples of a loop may differ, as their own data may say."""
    if all(layout.alone >= 0 for layout in layouts) or all(layout.piece is None for layout in layouts):
        return None, ""
    piece, problem = joined([layout.piece for layout in layouts])
    return settled(piece, layouts[0].batch), problem


def joined(pieces: Sequence[Piece | None]) -> tuple[Piece | None, str]:
    """The piece that these make together (None: all samples), or why they must not be put together."""
    known = [piece for piece in pieces if piece is not None]
    if not known:
        return None, ""
    if len(known) < len(pieces):
        return None, BY_POSITION
    if len({(piece.source, piece.past) for piece in known}) > 1:
        same = len({piece.samples for piece in known}) == 1
        return (known[0]._replace(past=hash(tuple(known))), "") if same else (None, BY_POSITION)
    samples = frozenset().union(*(piece.samples for piece in known))
    return known[0]._replace(samples=samples), ""


def settled(piece: Piece | None, batch: int) -> Piece | None:
    """None once all samples are in it."""
    return None if piece is None or len(piece.samples) == batch else piece
