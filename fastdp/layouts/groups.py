"""Whose the samples of a batch are, where a person has several: all of a person's records are clipped as one.

The gradient of a person is the sum of the gradients of his records, as that of a parameter is the sum over its uses;
norms, clip factors and the sensitivity are then those of persons.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor


class People:
    """The persons of a batch of records, numbered in the order in which they first appear.

    owner: int64 [records], the person of each; keys: of persons, where they are known beyond the batch;
    problem: why a backward with these must be refused.
    """

    def __init__(self, owner: Tensor, keys: Sequence[Hashable] = (), problem: str = "") -> None:
        self.records, self.keys, self.problem = len(owner), keys, problem
        self._owner = {owner.device: owner}
        self.counts = torch.bincount(owner)  # records of each person
        self.count = len(self.counts)
        in_order = not bool((owner[1:] < owner[:-1]).any())
        # records by person, where those of a person do not follow one another
        self._order = None if in_order else torch.argsort(owner, stable=True)
        self.starts = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])  # of each person, in that order
        same = self.count > 0 and bool((self.counts == self.counts[0]).all())
        self.each = int(self.counts[0]) if same else 0  # records a person, if all have equally many

    @staticmethod
    def of_counts(counts: Sequence[int]) -> People:
        """Persons with so many records each, one person after the other."""
        return People(torch.repeat_interleave(torch.tensor(counts, dtype=torch.long)))

    def owner(self, device: torch.device) -> Tensor:
        """Person of each record."""
        if device not in self._owner:
            self._owner[device] = next(iter(self._owner.values())).to(device)
        return self._owner[device]

    @functools.cached_property
    def order(self) -> Tensor:
        """The records by person."""
        return torch.arange(self.records) if self._order is None else self._order

    def by_person(self, rows: Tensor) -> Tensor:
        """Rows [records, ...] in the order of persons; the tensor itself where they are."""
        return rows if self._order is None else rows[self._order.to(rows.device)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, People) or self.records != other.records:
            return False
        ours, theirs = (next(iter(p._owner.values())).cpu() for p in (self, other))
        return self.keys == other.keys and torch.equal(ours, theirs)

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        most = int(self.counts.max()) if self.count else 0
        return f"a sample is a group of records: {self.count} groups of {self.records} records, at most {most} each"


def numbers_of(keys: Any, name: str = "group_by") -> tuple[list[int], list[Hashable]]:
    """A number for each key, counted in the order of first appearance, and the keys by number.

    Raises ValueError on a key that is missing (None, NaN) or cannot be told from others.
    """
    values = keys.tolist() if hasattr(keys, "tolist") else list(keys)
    known: dict[Hashable, int] = {}
    found = []
    for place, key in enumerate(values):
        if isinstance(key, Tensor) and key.dim() == 0:
            key = key.item()
        if key is None or key != key:
            raise ValueError(f"{name}: record {place} has no key ({key!r}): leave it out, or give it one of its own")
        try:
            found.append(known.setdefault(key, len(known)))
        except TypeError:
            raise ValueError(
                f"{name}: the key of record {place} is a {type(key).__name__}, which cannot be compared: give a number "
                "or a string for each record"
            ) from None
    return found, list(known)
