"""Batches made anew for every choice of records: by the program's own collate_fn, or by cutting off padding.

A batch that is padded to its longest record gives a record as much padding as the others make it. So records that are
collated once, and taken out of that batch, hide padding that counts: every batch that is looked at is made by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import mark_of, nested_tensors
from ..data.batched_datasets import copied
from ..data.collate_mixing import FAILS, refuse_mixing
from ..data.random_generators import RandomNumbers, generators_of, kept_by
from .records import Records, mapped, moved, records_of, rows_of, size_of


@dataclass(frozen=True)
class Collates:
    """Records as a data set gives them, and what makes batches of them."""

    items: list[Any]
    collate: Callable[[list[Any]], Any]
    device: torch.device

    def __call__(self, places: Sequence[int]) -> Any:
        return moved(self.collate([copied(self.items[place]) for place in places]), self.device)


@dataclass(frozen=True)
class Trims:
    """A padded batch and its records' own lengths: makes batches that are as long as the longest of their records."""

    whole: Any
    lengths: list[int]
    padded: int

    def __call__(self, places: Sequence[int]) -> Any:
        size, length = len(self.lengths), max((self.lengths[place] for place in places), default=self.padded)

        def cut(leaf: Tensor) -> Tensor:
            if leaf.dim() > 1 and leaf.size(0) == len(places) and leaf.size(1) == self.padded and mark_of(leaf) is None:
                return leaf.detach()[:, :length].contiguous().requires_grad_(leaf.requires_grad)
            return leaf

        return mapped(rows_of(self.whole, places, size), cut)


def collated(items: list[Any], collate: Callable[[list[Any]], Any], numbers: list[int] | None, grouped: bool,
             device: torch.device, rows: int = 1) -> tuple[Records, str]:  # fmt: skip
    """The records in one batch, which know how to make others; and in words why collate_fn is run no more, if so.

    rows: so many records in turn are of one sample. Raises SampleMixingError if collate makes the rows of some samples
    out of others.
    """
    makes = Collates(items, collate, device)
    generators = generators_of(nn.Module(), collate) + kept_by(collate)
    before = RandomNumbers(set(), generators)
    try:
        whole = makes(range(len(items)))
        drew = not RandomNumbers(set(), generators).torchs_equal(before)
        drew = drew or bool(RandomNumbers(set(), generators).others_moved(before))
        pool = records_of(whole, numbers, grouped)
        if len(items) < 2 or size_of(whole) != len(items):
            return pool, ""  # a record of the data set makes several
        if drew or not _equal(makes(range(len(items))), whole):
            before.put_back()
            if not grouped:
                refuse_mixing(collate, items, rows)
            return pool, "draws random numbers"
        try:
            sizes = [size_of(makes([0])), size_of(makes([0, 1]))]
        except FAILS as error:
            return pool, f"takes no single record ({type(error).__name__}: {first_line(error)})"
        if sizes != [1, 2]:
            return pool, f"makes batches of {sizes[0]} and {sizes[1]} rows of 1 and 2 records"
    finally:
        before.put_back()
    return pool.made_by(makes), ""


def may_be_padded(pool: Records) -> bool:
    """Whether a batch holds what may have been padded."""
    return any(_may_be_padded(t, len(pool.numbers)) for t in nested_tensors(pool.batch))


def trimmed(pool: Records) -> tuple[Records, list[int]] | None:
    """The records of a padded batch with lengths of their own, and these; None where no padding can be told.

    Padding: along dimension 1 of ids [B, T] or rows [B, T, F], where one record is as long as the batch is, and others
    end in one and the same value. A record is as long as it is in the longest of its tensors.
    """
    size = len(pool.numbers)
    leaves = [t for t in nested_tensors(pool.batch) if _may_be_padded(t, size)]
    if size < 2 or not leaves or len({leaf.size(1) for leaf in leaves}) != 1:
        return None
    padded = leaves[0].size(1)
    found = [own for leaf in leaves if (own := _lengths(leaf)) is not None]
    if not found:
        return None
    lengths: list[int] = torch.stack(found).amax(0).tolist()
    if max(lengths) < padded or min(lengths) == padded:
        return None  # of a length that is none of these records': it does not depend on them
    return pool.made_by(Trims(pool.batch, lengths, padded)), lengths


def _may_be_padded(leaf: Tensor, size: int) -> bool:
    if leaf.dim() not in (2, 3) or leaf.size(0) != size or leaf.size(1) < 2 or mark_of(leaf) is not None:
        return False
    return not leaf.is_nested and (leaf.dim() == 3 or not leaf.is_floating_point())


def _lengths(leaf: Tensor) -> Tensor | None:
    """Lengths [B] without the value that fills the ends, the whole one where there is none; None: of a tensor that is
    the same in all of its places.

    What fills ends stands nowhere else, and twice at one end at least: else it may be what records happen to end in.
    """
    leaf = leaf.detach().cpu()
    rows = leaf if leaf.dim() == 3 else leaf[..., None]
    even = (rows == rows[..., :1]).all(-1)
    steady = (rows[:, 1:] == rows[:, :-1]).all(-1).all(1)  # one value from end to end
    ends = rows[~steady & even[:, -1], -1, 0]
    whole = torch.full((len(leaf),), leaf.size(1))
    if not len(ends):
        return None if bool(steady.all()) else whole
    values, counts = ends.unique(return_counts=True)
    filled = even & (rows[..., 0] == values[counts.argmax()])
    places = torch.arange(1, leaf.size(1) + 1)
    lengths = (~filled * places).amax(1)
    within = filled & (places <= lengths[:, None])
    if bool(within.any()) or int(lengths[~steady].min()) > leaf.size(1) - 2:
        return whole
    return lengths.clamp(min=1)


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches hold equal tensors."""
    pairs = list(zip(nested_tensors(one), nested_tensors(other), strict=False))
    return len(nested_tensors(one)) == len(nested_tensors(other)) and all(
        a.is_nested or a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""
