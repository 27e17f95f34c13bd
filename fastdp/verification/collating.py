"""Batches made anew for every choice of records, by the program's own collate_fn.

A batch that is padded to its longest record gives a record as much padding as the others make it. So records that are
collated once, and taken out of that batch, hide padding that counts: every batch that is looked at is made by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..batch_axis.inputs import mark_of, nested_tensors
from ..data.batched_datasets import copied
from ..data.collate_mixing import FAILS, refuse_mixing
from ..utils.random_generators import RandomNumbers, generators_of, kept_by
from .records import Records, moved, records_of, size_of


@dataclass(frozen=True)
class Collates:
    """Records as a data set gives them, and what makes batches of them."""

    items: list[Any]
    collate: Callable[[list[Any]], Any]
    device: torch.device

    def __call__(self, places: Sequence[int]) -> Any:
        return moved(self.collate([copied(self.items[place]) for place in places]), self.device)


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
    """Whether a batch holds what may have been padded: ids [B, T], or rows [B, T, F]."""
    leaves = [t for t in nested_tensors(pool.batch) if mark_of(t) is None and not t.is_nested and t.dim() in (2, 3)]
    return any(
        t.size(0) == len(pool.numbers) and t.size(1) > 1 and (t.dim() == 3 or not t.is_floating_point()) for t in leaves
    )


def _equal(one: Any, other: Any) -> bool:
    """Whether two batches hold equal tensors."""
    pairs = list(zip(nested_tensors(one), nested_tensors(other), strict=False))
    return len(nested_tensors(one)) == len(nested_tensors(other)) and all(
        a.is_nested or a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs
    )


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else ""
