"""The records of a dataset by person, and how a sample of persons is cut into physical batches.

A person's contribution to a step is bounded whatever function of his own records it is made of, so any cap on them
that looks at no other person's keeps the guarantee.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from ..batch_axis.row_groups import numbers_of


class Grouping:
    """Which records of a dataset belong to one person: persons are numbered as they first appear."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._of = np.asarray(numbers, dtype=np.int64)
        counts = np.bincount(self._of) if len(self._of) else np.zeros(0, dtype=np.int64)
        self._records = np.split(np.argsort(self._of, kind="stable"), np.cumsum(counts)[:-1]) if len(counts) else []
        self.groups = len(counts)
        self.largest = int(counts.max()) if len(counts) else 0
        self.cap: int | None = None

    @staticmethod
    def of(dataset: Any, group_by: Any) -> Grouping:
        """group_by: a column's name, a key for each record, or a function from a record to its key.

        Raises ValueError where there are not as many keys as records, a key is missing, or there is no such column.
        """
        keys = _keys(dataset, group_by)
        numbers, _ = numbers_of(keys)
        if len(numbers) != len(dataset):
            raise ValueError(f"group_by gives {len(numbers)} keys for {len(dataset)} records")
        return Grouping(numbers)

    @property
    def most(self) -> int:
        """The most records that a person has in a step."""
        return self.largest if self.cap is None else min(self.cap, self.largest)

    def limit_to(self, cap: int | None, batch: int | None) -> None:
        """At most `cap` records of a person in a step. Raises ValueError where a physical batch holds fewer."""
        self.cap = cap
        if batch is not None and self.most > batch:
            raise ValueError(
                f"a group has {self.largest} records, of which a step takes {self.most}, and they must be in one "
                f"physical batch, which holds max_physical_batch_size={batch}: give max_records_per_group={batch} or "
                "fewer (drawn anew at each step), or a larger max_physical_batch_size"
            )

    @property
    def mark(self) -> str:
        """A short name of who owns which record."""
        return hashlib.sha256(self._of.tobytes()).hexdigest()[:16]

    def records(self, chosen: Sequence[int], draw: np.random.Generator) -> list[list[int]]:
        """The records of each of these persons, of which a cap keeps as many as it says, at random."""
        found = []
        for group in chosen:
            records = self._records[group]
            if self.cap is not None and len(records) > self.cap:
                records = np.sort(draw.choice(records, self.cap, replace=False))
            found.append(records.tolist())
        return found

    @staticmethod
    def shares(persons: Sequence[list[int]], ranks: int) -> list[list[list[int]]]:
        """Divide persons among processes, each person whole: the next one goes where the fewest records are."""
        shares: list[list[list[int]]] = [[] for _ in range(ranks)]
        sizes = [0] * ranks
        for records in persons:
            rank = sizes.index(min(sizes))
            shares[rank].append(records)
            sizes[rank] += len(records)
        return shares

    @staticmethod
    def parts(persons: Sequence[list[int]], limit: int | None) -> list[list[list[int]]]:
        """Physical batches, of at most `limit` records: the records of each of their persons. At least one batch."""
        parts: list[list[list[int]]] = [[]]
        size = 0
        for records in persons:
            if limit is not None and size + len(records) > limit:
                parts.append([])
                size = 0
            parts[-1].append(records)
            size += len(records)
        return parts


def _keys(dataset: Any, group_by: Any) -> Any:
    """A key for each record."""
    if isinstance(group_by, str):
        return column(dataset, group_by)
    if callable(group_by):
        return [group_by(dataset[place]) for place in range(len(dataset))]
    if isinstance(group_by, Mapping | bytes) or not hasattr(group_by, "__len__"):
        raise ValueError(
            f"group_by must be a column's name, a key for each record or a function, not {type(group_by).__name__}"
        )
    if getattr(group_by, "ndim", 1) != 1:
        raise ValueError(f"group_by has shape {tuple(group_by.shape)}: give one key for each record")
    return group_by


def column(dataset: Any, name: str) -> Any:
    """A column of a dataset: of one that has columns without reading the records, else record by record."""
    if isinstance(dataset, Subset):
        keys = column(dataset.dataset, name)
        return [keys[place] for place in dataset.indices]
    names = getattr(dataset, "column_names", None)  # of Hugging Face's datasets
    if names is not None:
        if name not in names:
            raise ValueError(f"group_by={name!r}: the dataset has no such column, but {', '.join(map(str, names))}")
        plain: Callable[[Any], Any] | None = getattr(dataset, "with_format", None)
        return list((dataset if plain is None else plain(None))[name])
    if not len(dataset):
        return []
    first = dataset[0]
    if not _has(first, name):
        known = list(first) if isinstance(first, Mapping) else getattr(first, "_fields", ())
        raise ValueError(
            f"group_by={name!r}: the records have no such column"
            + (f", but {', '.join(map(str, known))}" if known else "s")
            + "; a key for each record, or a function from a record to its key, will do as well"
        )
    return [_field(dataset[place], name, place) for place in range(len(dataset))]


def _has(record: Any, name: str) -> bool:
    if isinstance(record, Mapping):
        return name in record
    return not isinstance(record, Tensor | np.ndarray) and hasattr(record, name) and not callable(getattr(record, name))


def _field(record: Any, name: str, place: int) -> Any:
    if not _has(record, name):
        raise ValueError(f"group_by={name!r}: record {place} has no such column")
    return record[name] if isinstance(record, Mapping) else getattr(record, name)
