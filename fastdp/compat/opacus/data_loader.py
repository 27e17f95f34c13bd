"""opacus.data_loader: Poisson samples of a dataset, empty ones included."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, default_collate

from ...data.batched_datasets import nothing
from ...data.collate_mixing import Trials
from ...data.empty_batches import options_of
from ...data.weighted_samplers import EVEN, sampler_of, says_its_rate
from .utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler

logger = logging.getLogger("opacus.data_loader")  # the name that users know


class SecureGenerator(torch.Generator):
    """A torch.Generator with a state of the operating system's: 19937 bits that nobody knows.

    Poisson sampling by a DPDataLoader that is given one draws from the operating system itself.
    """

    def __new__(cls) -> SecureGenerator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        state = made.get_state().numpy().copy()
        state[24 : 24 + 8 * 624].view(np.uint64)[:] = np.frombuffer(os.urandom(4 * 624), np.uint32)  # the twister's
        made.set_state(torch.from_numpy(state))
        return made


class SecureUniformSampler(UniformWithReplacementSampler):
    """Poisson samples by random numbers of the operating system."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            draws = np.frombuffer(os.urandom(8 * self.num_samples), np.uint64) >> 11
            yield np.flatnonzero(draws < self.sample_rate * 2**53).tolist()


class CollateFnWithEmpty:
    """A collate function that makes of no samples a batch like the first one it saw, without rows.

    collator_fn: None hands samples on as a list. rand_on_empty: instead of no rows, one of random zeros and ones.
    sample_empty_shapes, dtypes: of the tensors to give before any batch was seen. Raises TypeError where the first
    batch holds what is no tensor, mapping, list or tuple: it would be handed out again as if it had been sampled.
    """

    def __init__(
        self,
        collator_fn: Any,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        sample_empty_shapes: Sequence[tuple[Any, ...]] | None = None,
        dtypes: Sequence[Any] | None = None,
    ) -> None:
        self.wrapped_collator_fn = collator_fn
        self.batch_first = batch_first
        self.rand_on_empty = rand_on_empty
        self.sample_empty_shapes = sample_empty_shapes
        self.dtypes = dtypes
        self.first_batch: Any = None
        self.trials = Trials()
        self.dataset: Any = None  # of the loader that this is of

    def __call__(self, batch: Any) -> Any:
        if not nothing(batch):
            if self.wrapped_collator_fn:
                self.trials.before(self.wrapped_collator_fn, batch, dataset=self.dataset)
            output = self.wrapped_collator_fn(batch) if self.wrapped_collator_fn else batch
            if self.first_batch is None:
                self.first_batch = copy.deepcopy(output)
            return output
        if self.first_batch is not None:
            return self._make_empty_batch(self.first_batch)
        if self.sample_empty_shapes is None or self.dtypes is None:
            logger.warning("First batch is empty, and what a batch looks like is not known: it is an empty list.")
            return []
        logger.warning("First batch is empty: it is a list of tensors without rows, of the first record's shapes.")
        return [torch.zeros(s, dtype=d) for s, d in zip(self.sample_empty_shapes, self.dtypes, strict=False)]

    def _make_empty_batch(self, sample: Any) -> Any:
        if torch.is_tensor(sample):
            return self._empty_like(sample)
        if isinstance(sample, Mapping):
            return {key: self._make_empty_batch(value) for key, value in sample.items()}
        if isinstance(sample, tuple) and hasattr(sample, "_fields"):
            return type(sample)(*[self._make_empty_batch(value) for value in sample])
        if isinstance(sample, list | tuple):
            return type(sample)([self._make_empty_batch(value) for value in sample])
        raise TypeError(
            f"Unsupported batch type: {type(sample).__name__}. An empty batch is made of tensors, mappings, lists and "
            "tuples only: let the collate function return these."
        )

    def _empty_like(self, sample: torch.Tensor) -> torch.Tensor:
        shape, dim = list(sample.shape), 0 if self.batch_first else 1
        shape[dim] = 1 if self.rand_on_empty else 0
        if self.rand_on_empty:
            return torch.randint(0, 2, shape, dtype=sample.dtype, device=sample.device)
        return torch.empty(shape, dtype=sample.dtype, device=sample.device)


def wrap_collate_with_empty(
    *,
    collate_fn: Any,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    sample_empty_shapes: Sequence[tuple[Any, ...]] | None = None,
    dtypes: Sequence[Any] | None = None,
) -> CollateFnWithEmpty:
    """`CollateFnWithEmpty` around a collate function."""
    return CollateFnWithEmpty(
        collate_fn, batch_first=batch_first, rand_on_empty=rand_on_empty, sample_empty_shapes=sample_empty_shapes,
        dtypes=dtypes,
    )  # fmt: skip


def shape_safe(x: Any) -> tuple[Any, ...]:
    """x.shape, or ()."""
    return getattr(x, "shape", ())


def dtype_safe(x: Any) -> Any:
    """x.dtype, or x's type."""
    return getattr(x, "dtype", type(x))


class DPDataLoader(DataLoader[Any]):
    """A DataLoader of Poisson samples: every record joins each batch independently, with probability sample_rate.

    Batches vary in size and may be empty (see `CollateFnWithEmpty`). drop_last is ignored, with a warning in the log.
    Other arguments are torch's; distributed: each process samples its share.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        sample_rate: float,
        collate_fn: Any = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        distributed: bool = False,
        batch_first: bool = True,
        rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> None:
        self.sample_rate = sample_rate
        self.distributed = distributed
        data: Any = dataset
        sampler: Any
        if distributed:
            sampler = DistributedUniformWithReplacementSampler(
                total_size=len(data), sample_rate=sample_rate, generator=generator
            )
        else:
            kind = SecureUniformSampler if isinstance(generator, SecureGenerator) else UniformWithReplacementSampler
            sampler = kind(num_samples=len(data), sample_rate=sample_rate, generator=generator)
        if drop_last:
            logger.warning("Ignoring drop_last as it is not compatible with DPDataLoader.")
        first = _fields(data[0])
        collate = wrap_collate_with_empty(
            collate_fn=default_collate if collate_fn is None else collate_fn,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            sample_empty_shapes=[(0, *shape_safe(x)) for x in first],
            dtypes=[dtype_safe(x) for x in first],
        )
        collate.dataset = dataset
        super().__init__(dataset=dataset, batch_sampler=sampler, collate_fn=collate, generator=generator, **kwargs)

    @classmethod
    def from_data_loader(
        cls,
        data_loader: DataLoader[Any],
        *,
        distributed: bool = False,
        generator: torch.Generator | None = None,
        batch_first: bool = True,
        rand_on_empty: bool = False,
    ) -> DPDataLoader:
        """A DPDataLoader like this loader, at the rate 1 / len(loader). Raises ValueError for an IterableDataset."""
        if isinstance(data_loader.dataset, IterableDataset):
            raise ValueError("Uniform sampling is not supported for IterableDataset")
        if type(sampler := sampler_of(data_loader)) not in EVEN and not says_its_rate(sampler):
            warnings.warn(
                f"Poisson sampling takes the place of the loader's {type(sampler).__name__}: from here on, every "
                "record of the dataset is drawn with the same probability. For a part of the records give the loader a "
                "torch.utils.data.Subset; weights of classes belong into the loss.",
                stacklevel=2,
            )
        return cls(
            dataset=data_loader.dataset,
            sample_rate=1 / len(data_loader),
            drop_last=data_loader.drop_last,
            generator=generator if generator else data_loader.generator,
            distributed=distributed,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            **options_of(data_loader),
        )


def _fields(record: Any) -> list[Any]:
    """What a record holds, where it is a sequence; of a mapping its values."""
    if isinstance(record, Mapping):
        return list(record.values())
    return list(record) if isinstance(record, list | tuple) or torch.is_tensor(record) else [record]


def switch_generator(*, data_loader: DataLoader[Any], generator: Any) -> DataLoader[Any]:
    """The same loader with another source of randomness. Raises ValueError where its sampler has none to switch."""
    batch_sampler: Any = data_loader.batch_sampler
    known = BatchSampler | UniformWithReplacementSampler | DistributedUniformWithReplacementSampler
    if batch_sampler is None or not isinstance(batch_sampler, known):
        raise ValueError("Non-batch processing is not supported: the loader must draw batches of samples")
    target = batch_sampler.sampler if isinstance(batch_sampler, BatchSampler) else batch_sampler
    if not hasattr(target, "generator"):
        raise ValueError("Target sampler doesn't have generator attribute: nothing to switch")
    target.generator = generator
    drop_last, options = data_loader.drop_last, options_of(data_loader)
    return DataLoader(
        data_loader.dataset, batch_sampler=batch_sampler, drop_last=drop_last, generator=generator, **options
    )
