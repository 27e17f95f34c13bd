"""Batches without a record, with the structure of the others, and how a loader makes batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..errors import StepError
from .batched_datasets import nothing
from .collate_mixing import Trials


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
        return _no_rows(self.collate([self.dataset[0]])) if nothing(items) else self.collate(items)


def _no_rows(batch: Any) -> Any:
    """The same structure without a row: lists of things that are no tensors hold one a record."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch[:0] if batch.ndim else batch
    if isinstance(batch, nn.utils.rnn.PackedSequence):
        raise StepError("an empty batch cannot be packed: collate padded tensors, and pack in the model")
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[_no_rows(item) for item in batch])
    if isinstance(batch, tuple):
        return tuple(_no_rows(item) for item in batch)
    if isinstance(batch, list):
        nested = bool(batch) and isinstance(batch[0], Tensor | np.ndarray | tuple | list | Mapping)
        return [_no_rows(item) for item in batch] if nested else []
    if isinstance(batch, Mapping):
        empty = copy.copy(batch)
        for key, value in batch.items():
            empty[key] = _no_rows(value)  # type: ignore[index]
        return empty
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: _no_rows(getattr(batch, f.name)) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader fetches its batches, for another one that draws them otherwise."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
             "persistent_workers", "multiprocessing_context")  # fmt: skip
    return {name: getattr(loader, name) for name in names}
