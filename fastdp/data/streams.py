"""An iterable dataset whose number of records is known, as one that is read by index."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from ..errors import StepError


class StreamRecords:
    """The records of an iterable dataset by number, as it yields them. A smaller number begins it anew."""

    def __init__(self, stream: IterableDataset[Any], size: int) -> None:
        self.stream, self.size = stream, size
        self._rest: Iterator[Any] = iter(())  # of the iteration under way
        self._read = 0  # records of it that were read

    @classmethod
    def of(cls, stream: Any, records: int | None) -> StreamRecords:
        """records: their number, None for the stream's length. Raises ValueError if that is not known."""
        try:
            size = operator.index(len(stream) if records is None else records)
        except (TypeError, NotImplementedError):
            given = "an IterableDataset without a length" if records is None else f"records={records!r}"
            raise ValueError(f"{given}: give records=, the whole number of records to read in a pass") from None
        if size < 1 or isinstance(records, bool):
            raise ValueError(f"records must be at least 1, not {records!r}")
        return cls(stream, size)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> Any:
        """Raises StepError if the stream ends before."""
        if number < self._read or not self._read:
            self._rest, self._read = iter(self.stream), 0
        for record in itertools.islice(self._rest, number - self._read, None):
            self._read = number + 1
            return record
        raise StepError(
            f"the stream has no record {number}, and should have {self.size}: give records= as many as it yields in "
            "each pass. The steps that were made stay counted"
        )
