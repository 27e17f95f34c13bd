"""Groups of rows: the records of one person, or the positions of one sample.

Where a person has several records, all of them are clipped as one. The gradient of a person is the sum of the
gradients of the person's records, as that of a parameter is the sum over its uses; norms, clip factors and the
sensitivity are then those of persons.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.routed import padded


class Groups:
    """The group of each of several records: int64 [records], counted from 0. A group may be empty.

    count: how many groups there are, if more than the records name.
    """

    def __init__(self, owner: Tensor, count: int = 0) -> None:
        self.records = len(owner)
        self._owner = {owner.device: owner}
        self._least = count

    def owner(self, device: torch.device) -> Tensor:
        """The group of each record."""
        if device not in self._owner:
            self._owner[device] = self.own.to(device)
        return self._owner[device]

    @property
    def own(self) -> Tensor:
        """The group of each record, where they were counted."""
        return next(iter(self._owner.values()))

    @functools.cached_property
    def counts(self) -> Tensor:
        """The number of records of each group."""
        return torch.bincount(self.own, minlength=self._least)

    @property
    def count(self) -> int:
        """The number of groups."""
        return self._least or len(self.counts)

    @functools.cached_property
    def each(self) -> int:
        """The number of records of every group; 0 if they differ."""
        same = self.count > 0 and bool((self.counts == self.counts[0]).all())
        return int(self.counts[0]) if same else 0

    @functools.cached_property
    def most(self) -> int:
        """The number of records of the largest group."""
        return int(self.counts.max()) if self.count else 0

    @functools.cached_property
    def starts(self) -> Tensor:
        """The first record of each group in `order`, and their number at the end."""
        return torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)])

    @functools.cached_property
    def _order(self) -> Tensor | None:
        """The records by group; None if they lie that way."""
        in_order = not bool((self.own[1:] < self.own[:-1]).any())
        return None if in_order else torch.argsort(self.own, stable=True)

    @property
    def order(self) -> Tensor:
        """The records by group."""
        return torch.arange(self.records) if self._order is None else self._order

    def by_group(self, rows: Tensor) -> Tensor:
        """Rows [records, ...] in the order of groups; the tensor itself if they are."""
        return rows if self._order is None else rows[self._order.to(rows.device)]

    def join(self, rows: Tensor) -> Tensor:
        """[records, K, ...] -> [groups, K of each of a group's records, ...], with zeros behind."""
        rows = self.by_group(rows)
        if self.each:
            return rows.reshape(self.count, self.each * rows.size(1), *rows.shape[2:])
        return padded(rows, self.counts.to(rows.device)).flatten(1, 2)

    def sum(self, rows: Tensor) -> Tensor:
        """[records, ...] -> sums by group, [groups, ...]."""
        if self.each:
            return self.by_group(rows).unflatten(0, (self.count, self.each)).sum(1)
        if rows.device.type == "cpu":
            return rows.new_zeros((self.count, *rows.shape[1:])).index_add_(0, self.owner(rows.device), rows)
        # there index_add adds in any order: not the same bits each time
        return padded(self.by_group(rows), self.counts.to(rows.device)).sum(1)


class People(Groups):
    """The persons of a batch of records, numbered in the order in which they first appear.

    keys: of persons, where they are known beyond the batch; problem: why a backward with these must be refused.
    """

    def __init__(self, owner: Tensor, keys: Sequence[Hashable] = (), problem: str = "") -> None:
        super().__init__(owner)
        self.keys, self.problem = keys, problem

    @staticmethod
    def of_counts(counts: Sequence[int]) -> People:
        """Persons with so many records each, one person after the other."""
        return People(torch.repeat_interleave(torch.tensor(counts, dtype=torch.long)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, People) or self.records != other.records:
            return False
        return self.keys == other.keys and torch.equal(self.own.cpu(), other.own.cpu())

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return (
            f"a sample is a group of records: {self.count} groups of {self.records} records, at most {self.most} each"
        )


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
