"""DPDataLoader: Poisson samples of a dataset, empty ones included."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from opacus import data_loader as theirs
from opacus.data_loader import dtype_safe, logger, shape_safe, switch_generator
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ...batch_axis import current_batch
from ...data.batched_datasets import nothing
from ...data.collate_mixing import Trials
from ...data.empty_batches import options_of
from ...data.weighted_samplers import EVEN, sampler_of, says_its_rate
from .utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    SecureGenerator,
    UniformWithReplacementSampler,
)

__all__ = [
    "CollateFnWithEmpty",
    "DPDataLoader",
    "SecureGenerator",
    "dtype_safe",
    "shape_safe",
    "switch_generator",
    "wrap_collate_with_empty",
]


class CollateFnWithEmpty(theirs.CollateFnWithEmpty):  # type: ignore[misc]
    """A collate function that makes of no samples a batch like the first one it saw, without rows; see Opacus.

    In a DPDataLoader, an empty batch before any other looks like that of the first record. Raises SampleMixingError if
    a trial shows that the function makes rows of some samples out of others.
    """

    dataset: Any = None  # of the loader that this is of
    first_batch: Any

    def __init__(self, collator_fn: Any, *positional: Any, **named: Any) -> None:
        super().__init__(collator_fn, *positional, **named)
        self.trials = Trials()

    def __call__(self, batch: Any) -> Any:
        if not nothing(batch) and self.wrapped_collator_fn:
            self.trials.before(self.wrapped_collator_fn, batch, dataset=self.dataset)
        elif nothing(batch) and self.first_batch is None and self.dataset is not None:
            self.first_batch = self.wrapped_collator_fn([self.dataset[0]])
        return super().__call__(batch)


def wrap_collate_with_empty(*, collate_fn: Any, **options: Any) -> CollateFnWithEmpty:
    """`CollateFnWithEmpty` around a collate function."""
    return CollateFnWithEmpty(collate_fn, **options)


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
        self.sample_rate, self.distributed = sample_rate, distributed
        size: int = len(dataset)  # type: ignore[arg-type]
        sampler: Any
        if distributed:
            sampler = DistributedUniformWithReplacementSampler(
                total_size=size, sample_rate=sample_rate, generator=generator
            )
        else:
            sampler = UniformWithReplacementSampler(num_samples=size, sample_rate=sample_rate, generator=generator)
        if drop_last:
            logger.warning("Ignoring drop_last as it is not compatible with DPDataLoader.")
        collate = CollateFnWithEmpty(collate_fn or default_collate, batch_first, rand_on_empty)
        collate.dataset = dataset
        super().__init__(dataset=dataset, batch_sampler=sampler, collate_fn=collate, generator=generator, **kwargs)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """What a loop makes of a batch is followed: the sampler notes how many records it is of."""
        sizes: deque[int] | None = None
        for batch in super().__iter__():
            if sizes is None:  # a sampler of another kind notes nothing
                sizes = getattr(self.batch_sampler, "sizes", deque())
            if sizes:
                current_batch.tell(batch, sizes.popleft())
            yield batch

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
