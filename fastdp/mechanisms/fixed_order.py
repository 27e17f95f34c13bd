"""A loader without sampling: every pass has the same batches of one size, in the same order."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, SequentialSampler, Subset

from ..accounting.participation import Participation
from ..data.empty_batches import fetching, source_of
from ..data.loader import PoissonLoader
from ..data.sampler import PoissonSampler
from ..data.streams import StreamRecords
from ..distributed.fingerprints import mark
from ..errors import AccountingError
from ..utils.keyword_arguments import parameters_of, refuse_unknown


class FixedOrder(PoissonSampler):
    """Lists of indices, one per physical batch, as of a PoissonSampler, but the same in every pass."""

    secret = False

    def __init__(self, order: Sequence[int], batch_size: int, max_physical_batch_size: int | None) -> None:
        size, steps = len(order), len(order) // batch_size
        super().__init__(size, batch_size / size, steps, max_physical_batch_size, seed=0)
        self.order, self.batch_size = np.asarray(order, dtype=np.int64), batch_size

    @property
    def settings(self) -> str:
        """A mark of the batches."""
        return mark("fixed order", self.order.tobytes(), self.batch_size)

    @property
    def mark(self) -> str:
        """The same: there is no key."""
        return self.settings

    @property
    def participation(self) -> Participation:
        """A record is at the same place of every pass."""
        return Participation("fixed order", self.steps, self.steps, mark=self.mark)

    def __iter__(self) -> Iterator[list[int]]:
        pending = self.pending = deque()
        _, first = self.running = (self.passes, self.first)
        self.passes, self.first = self.passes + 1, 0
        for step in range(first, self.steps):
            whole = self.order[step * self.batch_size : (step + 1) * self.batch_size].tolist()
            limit = self.limit or self.batch_size
            for begin in range(0, self.batch_size, limit):
                part = whole[begin : begin + limit]
                pending.append((len(part), begin + limit >= self.batch_size, None, len(whole)))
                yield part


class FixedOrderLoader(PoissonLoader):
    """An iterable over the batches of a dataset in a fixed order; `ftrl_loader` makes it."""

    @property
    def sample_rate(self) -> float:
        """Raises AccountingError: nothing is sampled."""
        raise AccountingError(
            "an ftrl_loader samples nothing, so there is no sample rate and no amplification by sampling: "
            "fastdp.mechanisms.tree_epsilon and tree_noise_multiplier account for a fixed order"
        )

    def __repr__(self) -> str:
        order: Any = self.sampler
        return (
            f"<ftrl_loader: {order.steps} batches of {order.batch_size} records, the same in every pass; "
            f"{order.size - order.steps * order.batch_size} of {order.size} records are in none>"
        )


def ftrl_loader(
    data: Any,
    *,
    batch_size: int | None = None,
    order: Sequence[int] | None = None,
    records: int | None = None,
    max_physical_batch_size: int | None = None,
    **loader_options: Any,
) -> FixedOrderLoader:
    """Make the loader that `DPFTRL` needs: no sampling, and a fixed order of batches of equal size.

    Every record is in at most one batch of a pass. Records that fill no whole batch at the end are in none.

    Args:
        data: a dataset, or a DataLoader, whose dataset, collate_fn, workers and batch_size are used. One that
            shuffles is refused, since it draws another order for every pass. A number must mean the same record in
            every pass and every process: that the dataset itself is shuffled in between is not seen. An
            IterableDataset is read in its order, from its beginning in each pass, without workers.
        batch_size: the number of records of a batch. It defaults to the batch_size of a DataLoader.
        order: the numbers of the records in the order of training, each at most once. By default, that of the dataset.
            It must not be chosen by what is in the records; `torch.randperm(len(data))` is a good choice, if the
            dataset is sorted.
        records: how many records to read of an IterableDataset in a pass: by default its length, if it has one. It
            must not be chosen by what is in them.
        max_physical_batch_size: the largest number of records in a physical batch, as of `poisson_loader`.
        loader_options: options of torch's DataLoader, if data is a dataset.

    Returns:
        A FixedOrderLoader, with the interface of a PoissonLoader: `state_dict` says where it is.

    Raises:
        ValueError: if a size is out of range, or the order is not one.
        TypeError: if an option is unknown; the error names the nearest, or what to do instead.
        StepError: if the data have no length, or the DataLoader shuffles. In a pass: if a stream ends too soon.
    """
    refuse_unknown("ftrl_loader", loader_options, parameters_of(DataLoader) | parameters_of(ftrl_loader))
    dataset, loader_options, of_loader = source_of(
        data, loader_options, (SequentialSampler,), _ORDERED, lambda stream: StreamRecords.of(stream, records)
    )
    if isinstance(dataset, StreamRecords):
        if order is not None or loader_options.get("num_workers"):
            raise ValueError("order= or num_workers= with an IterableDataset: it is read in its own order, here")
    elif records is not None:
        raise ValueError("records= is of an IterableDataset; of other data, give a part of the numbers as order=")
    batch_size = of_loader if batch_size is None else batch_size
    refused = {"shuffle", "sampler", "batch_sampler", "drop_last"} & loader_options.keys()
    if refused or loader_options.get("in_order") is False:
        raise ValueError(f"{', '.join(sorted(refused)) or 'in_order=False'}: the order is order=, and it is fixed")
    places = _order(dataset, order)
    for name, value in (("batch_size", batch_size), ("max_physical_batch_size", max_physical_batch_size)):
        required = name == "batch_size"
        if (required or value is not None) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    assert batch_size is not None
    if batch_size > len(places):
        raise ValueError(f"batch_size={batch_size} is more than the {len(places)} records")
    if left := len(places) % batch_size:
        warnings.warn(
            f"{left} record(s) at the end of the order fill no batch of {batch_size}: they are never trained on",
            stacklevel=2,
        )
    sampler = FixedOrder(places, batch_size, max_physical_batch_size)
    return FixedOrderLoader(fetching(dataset, sampler, loader_options), sampler, batch_size)


_ORDERED = (
    "DP-FTRL needs an order that is known, and the same in every pass. Give a loader with shuffle=False; to shuffle "
    "once, give order=torch.randperm(len(dataset))"
)


def _order(dataset: Any, order: Any) -> list[int]:
    """Raises ValueError unless each number is that of a record, and none is there twice."""
    size = len(dataset)
    places = list(range(size)) if order is None else [int(place) for place in order]
    if not places:
        raise ValueError("the dataset is empty, or the order is")
    if len(set(places)) < len(places):
        twice = next(place for place, times in zip(*np.unique(places, return_counts=True), strict=True) if times > 1)
        raise ValueError(f"record {twice} is in the order twice: in one tree it may take part only once")
    seen: Any = dataset
    numbers = places
    while isinstance(seen, Subset) and min(numbers) >= 0 and max(numbers) < len(seen.indices):
        seen, numbers = seen.dataset, [int(seen.indices[number]) for number in numbers]
        if len(set(numbers)) < len(numbers):
            raise ValueError("a Subset of the dataset holds a record twice: in one tree it may take part only once")
    if min(places) < 0 or max(places) >= size:
        raise ValueError(f"the order holds {min(places)} to {max(places)}; the dataset has records 0 to {size - 1}")
    return places
