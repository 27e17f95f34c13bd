"""Checks of a sample rate: against the batch size, the first batch, and the DataLoader that hands it out."""

from __future__ import annotations

import gc
import sys
import time
import warnings
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, SequentialSampler, SubsetRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from .weighted_samplers import REMEDY, sampler_of, uneven

# References to the classes of iterators when there were none of them, and when that was: looking takes 20 to 60 ms, and
# programs that make hundreds of optimizers (fastdp.audit) need not wait for that while there are as many references.
_WITHOUT: dict[tuple[int, ...], float] = {}
_SECONDS = 10.0  # as other references to a class may be gone by then


class _Open(NamedTuple):
    """An iteration over a DataLoader that has begun."""

    records: int  # 0: a stream, whose records cannot be counted
    fits: bool  # its batches are as large as the one at hand
    uneven: str  # why some of its records are drawn more often than others
    ordered: bool  # it draws nothing: the order is that of a dataset or stream


_ORDERED = (
    "the DataLoader draws nothing (shuffle=False, or an IterableDataset), and the sample rate is below 1: epsilon "
    "counts on batches that are drawn at random and secret, and will be too small. Train with fastdp.poisson_loader, "
    "or, if records must be read in one order, with fastdp.mechanisms.DPFTRL and ftrl_loader."
)


class RateCheck:
    """Warns, once, where a sample rate below 1 is given and nothing is drawn, and where it is far below what the first
    batch shows. Where none was given, what it shows is kept for the rate that `epsilon` will be given.

    Records can be counted where an ordinary DataLoader is being iterated. Where several are, those whose batches are of
    the size at hand are believed, and of these the one with the most records.
    """

    def __init__(self) -> None:
        self._looked = False
        self.low = False  # whether it has warned of a low rate
        self.told: list[str] = []  # what it has warned of
        self._seen = (0, 0)  # samples of the first batch, and records, if no rate was given: 0 if they are not known
        self._before: list[tuple[int, int]] = []  # the same, of optimizers whose steps this one counts
        self._ordered = False  # whether nothing was drawn, and no rate was given

    def check(self, rate: float | None, batch: int, expected: float | None) -> None:
        """Look, at a backward that no Poisson loader tells of.

        Args: batch: samples of this backward; expected: the expected batch size that was given with the rate.
        """
        if self._looked or self.check_size(rate, batch, expected):
            return
        self._looked = True
        found = _iterated(batch)
        chosen = [item for item in found if item.fits] or found
        if not chosen:
            return
        if why := chosen[0].uneven:
            self._tell(f"{why}: no sample rate is that of every record, and epsilon will be too small. {REMEDY}.", 3)
        ordered = all(item.fits and item.ordered for item in chosen)
        self._ordered = rate is None and ordered
        if rate is not None and rate < 1 and ordered:
            self._tell(_ORDERED, 3)
        records = max(item.records for item in chosen) if all(item.records for item in chosen) else 0
        if rate is None:
            self._seen = (batch, records)
        elif _is_low(rate, batch, records):
            self._warn(rate, f"the first batch has {_share(batch, records)}")

    @property
    def seen_text(self) -> str:
        """What the first batch shows of a rate that was not given, or nothing."""
        batch, records = self._seen
        return f" The first batch has {_share(batch, records)}." if records else ""

    def compare(self, rate: float | None) -> None:
        """Warn if a rate that `epsilon` is given is far below what the first batch showed, or nothing was drawn."""
        if rate is not None and rate < 1 and self._ordered and _ORDERED not in self.told:
            self._tell(_ORDERED, 5)
        low = [] if rate is None else [seen for seen in (*self._before, self._seen) if _is_low(rate, *seen)]
        if rate is not None and low:
            self._warn(rate, f"the first batch had {_share(*low[0])}", stacklevel=5)

    def continue_from(self, other: RateCheck) -> None:
        """The steps of the optimizer that this one takes the place of are asked for with its own."""
        self._before, self.low = [*other._before, other._seen], self.low or other.low
        self.told, self._ordered = self.told + other.told, self._ordered or other._ordered

    def check_size(self, rate: float | None, batch: int, expected: float | None) -> bool:
        """Warn if the first batch has far more samples than expected; returns whether it has."""
        if rate is None or expected is None or batch <= 2 * expected + 10:  # more than chance makes of it
            return False
        self._warn(rate, f"expected_batch_size={expected:g} was given with it, and the first batch has {batch} samples")
        return True

    def _warn(self, rate: float, seen: str, stacklevel: int = 2) -> None:
        self._looked = self.low = True
        self._tell(
            f"sample_rate={rate:g} is far below what is sampled: {seen}. epsilon grows with the rate, and what is said "
            "of it would be too small: give batch / records, or train with fastdp.poisson_loader, which tells it.",
            stacklevel + 1,
        )

    def _tell(self, text: str, stacklevel: int) -> None:
        self.told.append(text)
        warnings.warn(text, stacklevel=stacklevel)


def _share(batch: int, records: int) -> str:
    return f"{batch} of the {records} records of its DataLoader, a rate of {batch / records:.3g}"


def _is_low(rate: float, batch: int, records: int) -> bool:
    """Whether the rate is far below the batch's, if that is known."""
    return bool(records) and rate < batch / records / 2


def _iterated(batch: int) -> list[_Open]:
    """The iterations over DataLoaders that are under way in this process, as the garbage collector knows them."""
    kinds: list[type] = [_BaseDataLoaderIter, *_BaseDataLoaderIter.__subclasses__()]
    now = time.monotonic()
    if now - _WITHOUT.get(_references(kinds), -_SECONDS) < _SECONDS:
        return []
    iterators = [item for item in gc.get_referrers(*kinds) if isinstance(item, _BaseDataLoaderIter)]
    if not iterators:
        _WITHOUT.clear()
        _WITHOUT[_references(kinds)] = now
    return [_open(item, batch) for item in iterators if getattr(item, "_num_yielded", 0)]


def _references(kinds: list[type]) -> tuple[int, ...]:
    return tuple([sys.getrefcount(kind) for kind in kinds])  # counted in the same way each time


def _open(iterator: Any, batch: int) -> _Open:
    batches = getattr(iterator, "_index_sampler", None)
    source: Any = getattr(batches, "sampler", None)
    if not isinstance(source, SubsetRandomSampler):
        source = getattr(iterator, "_dataset", None)
    size = getattr(batches, "batch_size", None)
    try:
        count = len(source)
    except (TypeError, NotImplementedError):
        count = 0
    if not getattr(iterator, "_auto_collation", True):  # each item is a batch
        count, size = count * batch, batch
    why = uneven(sampler_of(batches), count) if count else ""
    whole = getattr(iterator, "_auto_collation", True)  # else the dataset makes batches, and may draw them
    return _Open(count, size == batch, why, whole and (isinstance(source, IterableDataset) or _in_order(batches)))


def _in_order(batches: Any) -> bool:
    sampler = sampler_of(batches)
    return type(sampler) in (SequentialSampler, range) or (type(sampler) is DistributedSampler and not sampler.shuffle)


def rate_and_size(
    sample_rate: float | None, expected_batch_size: float | None, size: int, grouped: bool
) -> tuple[float, float]:
    """Both, of the one that was given, for this many samples. Raises ValueError if the size is out of range."""
    if sample_rate is None:
        assert expected_batch_size is not None
        if not 0 < expected_batch_size <= size:
            raise ValueError(
                f"expected_batch_size must lie in (0, {size}], the size of the data"
                f"{' in groups' if grouped else ''}; got {expected_batch_size}"
            )
        return expected_batch_size / size, expected_batch_size
    expected_batch_size = sample_rate * size
    if abs(expected_batch_size - round(expected_batch_size)) < 1e-9 * size:
        expected_batch_size = round(expected_batch_size)
    return sample_rate, expected_batch_size
