"""How loaders fetch: of which dataset, and by a collate function that takes empty batches and is tried for mixing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from ..errors import StepError
from .batched_datasets import nothing, without_rows
from .collate_mixing import Trials
from .weighted_samplers import sampler_of


class CollateWithEmpty:
    """Collate, and for an empty batch the same structure with no rows.

    Raises SampleMixingError if a trial shows that the function makes rows of some samples out of others. views: so many
    items in turn are of one sample; None: it is not known whose they are (the records of a person may be mixed), and
    nothing is tried.
    """

    def __init__(self, collate: Any, dataset: Any, views: int | None = 1) -> None:
        self.collate, self.dataset, self.views, self.trials = collate, dataset, views, Trials()

    def __call__(self, items: Any) -> Any:
        if self.views is not None:
            self.trials.before(self.collate, items, self.views, self.dataset)
        if not nothing(items):
            return self.collate(items)
        return without_rows(*(self.collate([self.dataset[0] for _ in range(count)]) for count in (1, 2)))


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader fetches its batches, for another one that draws them otherwise."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
             "persistent_workers", "multiprocessing_context")  # fmt: skip
    return {name: getattr(loader, name) for name in names}


def source_of(
    data: Any,
    options: dict[str, Any],
    drawn_by: tuple[type, ...],
    refusal: str,
    of_stream: Callable[[IterableDataset[Any]], Any] | None = None,
) -> tuple[Any, dict[str, Any], int | None]:
    """The dataset of a DataLoader, or the one given; how it is fetched; and the DataLoader's batch size.

    drawn_by: the kinds of samplers that another one may take the place of; refusal: what is said of others.
    of_stream: makes a map-style dataset of an iterable one, which is refused without it.
    """
    dataset, batch_size = data, None
    if isinstance(data, DataLoader):
        dataset, options, batch_size = data.dataset, {**options_of(data), **options}, data.batch_size
    stream = isinstance(dataset, IterableDataset)
    if isinstance(data, DataLoader) and not stream:  # (of a stream, torch's sampler draws nothing)
        kind = type(sampler_of(data))
        if kind not in drawn_by or not getattr(data, "in_order", True):
            raise StepError(f"the DataLoader draws by {kind.__name__}, or out of order: {refusal}")
    if stream and of_stream is not None:
        return of_stream(dataset), options, batch_size
    if stream or not hasattr(dataset, "__len__"):
        raise StepError(
            "a map-style dataset is needed (a length, access by index): load an iterable one into a list, or train in "
            "its order, with fastdp.mechanisms.ftrl_loader(data, records=...) and DPFTRL"
        )
    return dataset, options, batch_size


def fetching(
    dataset: Any, sampler: Sampler[list[int]], options: dict[str, Any], views: int | None = 1
) -> DataLoader[Any]:
    """A DataLoader of the batches that a sampler draws. views: as of `CollateWithEmpty`."""
    collate = options.pop("collate_fn", None) or torch.utils.data.default_collate
    return DataLoader(
        dataset, batch_sampler=sampler, collate_fn=CollateWithEmpty(collate, dataset, views), **options
    )  # fmt: skip
