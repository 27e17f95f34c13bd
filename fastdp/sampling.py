"""Poisson sampling: every record joins a batch independently, with the accounted probability.

A logical batch (one step) is cut into physical ones that fit the memory. The loader notes which of them it
handed out last, so that the optimizer knows when a logical batch is complete; see `current`.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from .accounting import steps_per_epoch
from .errors import StepError


class PhysicalBatch(NamedTuple):
    """What the optimizer must know of the batch in hand."""

    size: int
    final: bool  # the last of its logical batch
    sample_rate: float
    expected_batch_size: float


_CURRENT: PhysicalBatch | None = None


def current() -> PhysicalBatch | None:
    """The physical batch that a Poisson loader handed out last and whose loop body is running, if any."""
    return _CURRENT


def _set_current(batch: PhysicalBatch | None) -> None:
    global _CURRENT
    _CURRENT = batch


class PoissonSampler(Sampler[list[int]]):
    """Lists of indices, one a physical batch; `finals` tells in order which of them end a logical batch."""

    def __init__(
        self, size: int, sample_rate: float, steps: int, max_physical_batch_size: int | None, generator: Any
    ) -> None:
        self.size, self.sample_rate, self.steps = size, sample_rate, steps
        self.limit, self.generator = max_physical_batch_size, generator
        self.pending: deque[tuple[int, bool]] = deque()

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        self.pending.clear()
        for _ in range(self.steps):
            draw = torch.rand(self.size, generator=self.generator, dtype=torch.float64) < self.sample_rate
            chosen = torch.nonzero(draw).flatten().tolist()
            limit = self.limit or max(len(chosen), 1)
            parts = [chosen[i : i + limit] for i in range(0, len(chosen), limit)] or [[]]
            for number, part in enumerate(parts):
                self.pending.append((len(part), number == len(parts) - 1))
                yield part


class _CollateWithEmpty:
    """Collate, and for an empty batch the same structure with no rows."""

    def __init__(self, collate: Any, dataset: Any) -> None:
        self.collate, self.dataset = collate, dataset

    def __call__(self, items: list[Any]) -> Any:
        return self.collate(items) if items else _no_rows(self.collate([self.dataset[0]]))


def _no_rows(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[_no_rows(item) for item in batch])
    if isinstance(batch, tuple | list):
        if batch and not isinstance(batch[0], Tensor | tuple | list | dict):
            return type(batch)()
        return type(batch)(_no_rows(item) for item in batch)
    if hasattr(batch, "items"):
        return type(batch)({key: _no_rows(value) for key, value in batch.items()})
    return batch


class PoissonLoader:
    """Batches of a Poisson sample of the dataset; see `poisson_loader`."""

    def __init__(self, loader: DataLoader[Any], sampler: PoissonSampler, expected_batch_size: float) -> None:
        self.loader, self.sampler = loader, sampler
        self.expected_batch_size = expected_batch_size

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def sample_rate(self) -> float:
        return self.sampler.sample_rate

    @property
    def steps_per_epoch(self) -> int:
        """Logical batches in one pass over the loader."""
        return self.sampler.steps

    def __len__(self) -> int:
        """Logical batches; with max_physical_batch_size the loop body may run more often."""
        return self.sampler.steps

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch in self.loader:
                size, final = self.sampler.pending.popleft()
                _set_current(PhysicalBatch(size, final, self.sample_rate, self.expected_batch_size))
                yield batch
        finally:
            _set_current(None)


def poisson_loader(
    data: Dataset[Any] | DataLoader[Any] | Any,
    *,
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    max_physical_batch_size: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    **loader_options: Any,
) -> PoissonLoader:
    """A loader that samples every record independently with probability sample_rate at each step.

    Args:
        data: a map-style dataset, or a DataLoader whose dataset, collate_fn, workers and batch_size are used.
        sample_rate: in (0, 1]; or
        expected_batch_size: sample_rate * len(dataset). Default: the DataLoader's batch_size.
        max_physical_batch_size: logical batches are cut into physical ones of at most this size; the optimizer
            accumulates until the last. An empty sample is handed out as a batch with no rows.
        steps: logical batches in a pass (default: ceil(1 / sample_rate), each record once in expectation).
        seed: for reproducible experiments; default: from the operating system. Sampling must be secret.
        loader_options: of torch's DataLoader, for a dataset.

    Raises ValueError or StepError on data that cannot be sampled or sizes that make no sense.
    """
    options = dict(loader_options)
    dataset: Any = data
    if isinstance(data, DataLoader):
        dataset = data.dataset
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
                     "persistent_workers", "multiprocessing_context"):  # fmt: skip
            options.setdefault(name, getattr(data, name))
        if sample_rate is None and expected_batch_size is None:
            if data.batch_size is None:
                raise ValueError("the DataLoader has no batch_size: give expected_batch_size= or sample_rate=")
            expected_batch_size = data.batch_size
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise StepError(
            "Poisson sampling needs a dataset with a length and access by index; an iterable one cannot be sampled. "
            "Load it into a map-style dataset (a list will do)."
        )
    size = len(dataset)
    if size == 0:
        raise ValueError("the dataset is empty")
    if (sample_rate is None) == (expected_batch_size is None):
        raise ValueError("give either sample_rate= or expected_batch_size=")
    if sample_rate is None:
        assert expected_batch_size is not None
        if not 0 < expected_batch_size <= size:
            raise ValueError(
                f"expected_batch_size must lie in (0, {size}], the size of the data; got {expected_batch_size}"
            )
        sample_rate = expected_batch_size / size
        steps = steps if steps is not None else math.ceil(size / expected_batch_size)
    else:
        steps = steps if steps is not None else steps_per_epoch(sample_rate)
        expected_batch_size = sample_rate * size
    if max_physical_batch_size is not None and max_physical_batch_size < 1:
        raise ValueError(f"max_physical_batch_size must be at least 1, not {max_physical_batch_size}")
    generator = torch.Generator().manual_seed(secrets.randbits(63) if seed is None else seed)
    sampler = PoissonSampler(size, sample_rate, steps, max_physical_batch_size, generator)
    collate = options.pop("collate_fn", None) or torch.utils.data.default_collate
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=_CollateWithEmpty(collate, dataset), **options
    )
    return PoissonLoader(loader, sampler, expected_batch_size)
