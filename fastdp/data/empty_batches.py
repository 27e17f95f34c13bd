"""The collate function of loaders: empty batches have the structure of the others, and mixing is looked for."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from .batched_datasets import nothing, rows_of
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
        return rows_of(self.collate([self.dataset[0]]), [], 1) if nothing(items) else self.collate(items)


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a loader fetches its batches, for another one that draws them otherwise."""
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor",
             "persistent_workers", "multiprocessing_context")  # fmt: skip
    return {name: getattr(loader, name) for name in names}
