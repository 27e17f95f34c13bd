"""Loaders for correlated noise: how far apart the steps are that a record takes part in is known, or drawn in secret.

>>> loader = cyclic_poisson_loader(range(100), batch_size=5, cycle=4)
>>> loader.participation.period, loader.participation.rate, len(loader)
(4, 0.2, 20)
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

from ..accounting.participation import Participation
from ..data.empty_batches import fetching, source_of
from ..data.loader import PoissonLoader, share
from ..data.streams import StreamRecords
from ..distributed.fingerprints import mark, mark_of_records
from ..distributed.world import dealing_world
from ..errors import AccountingError, StepError
from ..utils.keyword_arguments import parameters_of, refuse_unknown
from ..utils.number_checks import check_whole
from .cycle_samplers import BallsInBins, CycleSampler, CyclicPoisson, FixedOrder, Numbers


class CycleLoader(PoissonLoader):
    """An iterable over batches in which a record takes part once in a cycle at most: `participation` says what holds.

    Made by `fixed_order_loader`, `cyclic_poisson_loader` and `balls_in_bins_loader`; its interface is PoissonLoader's.
    """

    sampler: CycleSampler

    def __init__(self, loader: DataLoader[Any], sampler: CycleSampler, made_by: str) -> None:
        super().__init__(loader, sampler, sampler.batch_size)
        self.made_by = made_by

    @property
    def participation(self) -> Participation:
        """When a record can take part, as correlated noise is accounted by."""
        return self.sampler.participation

    @property
    def sample_rate(self) -> float:
        """Raises AccountingError: the whole dataset is not sampled."""
        raise AccountingError(
            f"a {self.made_by} takes no Poisson samples of the dataset, so there is no sample rate, and no "
            "amplification by it: an optimizer with noise=fastdp.mechanisms.Bisr(4), say, accounts for what the "
            "loader's participation says, and tree_epsilon and tree_noise_multiplier for DPFTRL on a fixed order"
        )

    def ahead(self, mine: int) -> Iterator[tuple[Any, Callable[[], None]]]:
        """As of a PoissonLoader. Records that are others than before, or in another order, take part otherwise."""
        if self.sampler.records is not None and (now := _mark_of(self.dataset)) != self.sampler.records:
            self.sampler.of(now)
            warnings.warn(
                f"the records of this {self.made_by} are others than before, or in another order: correlated noise "
                "begins anew with them. Leave the data as they are",
                stacklevel=4,
            )
        return super().ahead(mine)

    def state_dict(self, *, secret: bool = False) -> dict[str, Any]:
        """The same as of a PoissonLoader, and a mark of the order or deal, by which `load_state_dict` tells another."""
        return {**super().state_dict(secret=secret), "participation": self.participation.mark.partition("|")[0]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As of a PoissonLoader; also raises StepError if the state is of another order or deal than the loader's."""
        then = copy.copy(self.sampler)
        if isinstance(state, Mapping):
            then.key = state.get("key", then.key)
            own = then.participation.mark.partition("|")[0]
            if state.get("participation", own) != own:
                secret = " and load its state_dict(secret=True), which holds the key" * isinstance(then, BallsInBins)
                raise StepError(
                    f"the state is of another order or deal of the records than this {self.made_by}'s, and how far "
                    "apart a record's steps are would not be known: make the loader with the arguments of the one "
                    f"that was saved{secret}"
                )
        super().load_state_dict(state)

    def __repr__(self) -> str:
        of, never = self.sampler, self.sampler.size - round(self.sampler.batch_size * self.sampler.steps)
        left = f"; {never} of {of.size} records are in none" if isinstance(of, FixedOrder) else ""
        return (
            f"<{self.made_by}: {of.steps} batches of {of.batch_size:g} records{'' if left else ' in expectation'}, "
            f"{of.kind} in cycles of {of.period}{left}>"
        )


def fixed_order_loader(
    data: Any,
    *,
    batch_size: int | None = None,
    order: Sequence[int] | None = None,
    shuffle_within: int = 1,
    seed: int | None = None,
    records: int | None = None,
    max_physical_batch_size: int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    **loader_options: Any,
) -> CycleLoader:
    """Make the loader for correlated noise, or `DPFTRL`: no sampling, and a fixed order of batches of equal size.

    Every record is in at most one batch of a pass. Records that fill no whole batch at the end are in none. Several
    processes share the batches, as of `poisson_loader`.

    Args:
        data: a dataset, or a DataLoader, whose dataset, collate_fn, workers and batch_size are used. One that
            shuffles is refused, since it draws another order for every pass. A number must mean the same record in
            every pass and every process: of a map-style dataset, each pass looks at a few records. An
            IterableDataset is read in its order, from its beginning in each pass, without workers.
        batch_size: the number of records of a batch. It defaults to the batch_size of a DataLoader.
        order: the numbers of the records in the order of training, each at most once. By default, that of the dataset.
            It must not be chosen by what is in the records; `torch.randperm(len(data))` is a good choice, if the
            dataset is sorted.
        shuffle_within: G, to deal the records of each G batches in a row anew among these batches in every pass. Two
            steps that a record takes part in are then at least (steps of a pass) - G + 1 apart. DPFTRL refuses it.
        seed: a whole number by which these deals differ from others; 0 by default. They need not be secret.
        records: how many records to read of an IterableDataset in a pass: by default its length, if it has one. It
            must not be chosen by what is in them.
        max_physical_batch_size: the largest number of records in a physical batch, as of `poisson_loader`.
        process_group: the process group of the training, and
        mesh: instead, its device mesh, as of `poisson_loader`.
        loader_options: options of torch's DataLoader, if data is a dataset.

    Returns:
        A CycleLoader, with the interface of a PoissonLoader: `state_dict` says where it is.

    Raises:
        ValueError: if a size is out of range, or the order is not one.
        TypeError: if an option is unknown; the error names the nearest, or what to do instead.
        StepError: if the data have no length, the DataLoader shuffles, or processes differ. In a pass: if a stream ends
            too soon.
    """

    def read(dataset: Any, size: int | None) -> CycleSampler:
        check_whole(batch_size=size, shuffle_within=shuffle_within)
        assert size is not None
        if isinstance(dataset, StreamRecords):
            if order is not None or shuffle_within > 1:
                raise ValueError("order= or shuffle_within= with an IterableDataset: it is read in its own order")
        elif records is not None:
            raise ValueError("records= is of an IterableDataset; of other data, give a part of the numbers as order=")
        if seed is not None and shuffle_within == 1:
            raise ValueError("seed= is of shuffle_within=; to shuffle once, give order=torch.randperm(len(dataset))")
        places = _order(dataset, order)
        if size > len(places):
            raise ValueError(f"batch_size={size} is more than the {len(places)} records")
        if shuffle_within > len(places) // size:
            raise ValueError(f"shuffle_within={shuffle_within} is more than the {len(places) // size} steps of a pass")
        if left := len(places) % size:
            warnings.warn(
                f"{left} record(s) at the end of the order fill no batch of {size}: they are never trained on",
                stacklevel=4,
            )
        return FixedOrder(places, size, max_physical_batch_size, shuffle_within, seed or 0)

    return _made(
        fixed_order_loader, data, batch_size, seed, max_physical_batch_size, (process_group, mesh), loader_options,
        read, (SequentialSampler,), _ORDERED, lambda stream: StreamRecords.of(stream, records),
    )  # fmt: skip


def cyclic_poisson_loader(
    data: Any,
    *,
    cycle: int,
    batch_size: float | None = None,
    order: Sequence[int] | None = None,
    steps: int | None = None,
    seed: int | None = None,
    max_physical_batch_size: int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    **loader_options: Any,
) -> CycleLoader:
    """Make a loader that takes Poisson samples of one part of the records after the other.

    There are `cycle` parts, of sizes that differ by at most 1: record number i of the order is of part i mod cycle.
    Step t samples each record of part t mod cycle independently, with probability batch_size * cycle / records. Several
    processes share the batches, as of `poisson_loader`, and an empty sample is a batch without rows.

    Args:
        data: a map-style dataset, or a DataLoader, whose dataset, collate_fn, workers and batch_size are used.
        cycle: the number of parts, and so the steps between two that a record can be in. With 1, the whole dataset is
            sampled at every step.
        batch_size: the expected number of records in a batch. It defaults to the batch_size of a DataLoader.
        order: the numbers of the records in an order, each at most once, as of `fixed_order_loader`.
        steps: the number of batches in a pass, a multiple of cycle. By default, as many as it takes to sample each
            record once in expectation, rounded up to such a multiple.
        seed: a whole number that makes sampling reproducible, for experiments only: sampling must be secret. By
            default, the key comes from the operating system.
        max_physical_batch_size: the largest number of records in a physical batch, as of `poisson_loader`.
        process_group: the process group of the training, and
        mesh: instead, its device mesh, as of `poisson_loader`.
        loader_options: options of torch's DataLoader, if data is a dataset.

    Returns:
        A CycleLoader, with the interface of a PoissonLoader. A run may go on by a `state_dict` without the key.

    Raises:
        ValueError: if a size is out of range, or the order is not one.
        TypeError: if an option is unknown; the error names the nearest, or what to do instead.
        StepError: if the data cannot be read by index, the DataLoader has a custom sampler, or processes differ.
    """

    def read(dataset: Any, size: float | None) -> CycleSampler:
        check_whole(cycle=cycle, **({} if steps is None else {"steps": steps}))
        places = _order(dataset, order)
        size = _expected(size, len(places))
        if (rate := size * cycle / len(places)) > 1 + 1e-9:
            raise ValueError(
                f"batch_size={size:g} and cycle={cycle}: a part of the {len(places)} records has about "
                f"{len(places) / cycle:.4g}, each of which would be sampled with probability {rate:.4g}. Take cycle="
                f"{int(len(places) / size * (1 + 1e-9))} or less, or a smaller batch"
            )
        if steps is not None and steps % cycle:
            raise ValueError(
                f"steps={steps} of a pass are no multiple of cycle={cycle}: take {steps + -steps % cycle}, say"
            )
        return CyclicPoisson(places, size, cycle, steps, max_physical_batch_size, seed)

    return _made(
        cyclic_poisson_loader, data, batch_size, seed, max_physical_batch_size, (process_group, mesh), loader_options,
        read, (SequentialSampler, RandomSampler), _SAMPLED,
    )  # fmt: skip


def balls_in_bins_loader(
    data: Any,
    *,
    batch_size: float | None = None,
    seed: int | None = None,
    max_physical_batch_size: int | None = None,
    process_group: Any = None,
    mesh: Any = None,
    **loader_options: Any,
) -> CycleLoader:
    """Make a loader whose batches are drawn once: each record is in one of them, uniformly and in secret.

    There are round(records / batch_size) batches, of sizes that vary (possibly empty), the same in every pass. Several
    processes share them, as of `poisson_loader`.

    Args:
        data: a map-style dataset, or a DataLoader, whose dataset, collate_fn, workers and batch_size are used.
        batch_size: about how many records a batch has in expectation. It defaults to the batch_size of a DataLoader.
            `expected_batch_size` of the loader is records / batches.
        seed: a whole number that makes the draw reproducible, for experiments only: it must be secret. By default, the
            key comes from the operating system.
        max_physical_batch_size: the largest number of records in a physical batch, as of `poisson_loader`.
        process_group: the process group of the training, and
        mesh: instead, its device mesh, as of `poisson_loader`.
        loader_options: options of torch's DataLoader, if data is a dataset.

    Returns:
        A CycleLoader, with the interface of a PoissonLoader. In a new process, a run goes on only by a
        `state_dict(secret=True)`, as another key would draw other batches.

    Raises:
        ValueError: if a size is out of range, or the dataset is empty.
        TypeError: if an option is unknown; the error names the nearest, or what to do instead.
        StepError: if the data cannot be read by index, the DataLoader has a custom sampler, or processes differ.
    """

    def read(dataset: Any, size: float | None) -> CycleSampler:
        places = _order(dataset, None)
        bins = round(len(places) / _expected(size, len(places)))
        return BallsInBins(places, bins, max_physical_batch_size, seed)

    return _made(
        balls_in_bins_loader, data, batch_size, seed, max_physical_batch_size, (process_group, mesh), loader_options,
        read, (SequentialSampler, RandomSampler), _SAMPLED,
    )  # fmt: skip


_ORDERED = (
    "the order must be known, and the same in every pass. Give a loader with shuffle=False; to shuffle "
    "once, give order=torch.randperm(len(dataset))"
)
_SAMPLED = "the loader's own draw takes its place. Give one without a sampler; for a part of the data, a Subset"


def _made(
    function: Callable[..., Any],
    data: Any,
    batch_size: Any,
    seed: int | None,
    limit: int | None,
    processes: tuple[Any, Any],
    options: dict[str, Any],
    sampler_for: Callable[[Any, Any], CycleSampler],
    drawn_by: tuple[type, ...],
    refusal: str,
    of_stream: Callable[[Any], Any] | None = None,
) -> CycleLoader:
    """The loader of a function's arguments. sampler_for: of a dataset and a batch size; others: as of `source_of`."""
    name, world = function.__name__, dealing_world(*processes)
    with world.deciding():
        refuse_unknown(name, options, parameters_of(DataLoader) | inspect.signature(function).parameters.keys())
        refused = {"shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys()
        if refused or options.get("in_order") is False:
            what = ", ".join(sorted(refused)) or "in_order=False"
            raise ValueError(f"{what}: {name} says itself which records a batch has: the order is order=, or drawn")
        dataset, options, of_loader = source_of(data, options, drawn_by, refusal, of_stream)
        if isinstance(dataset, StreamRecords) and options.get("num_workers"):
            raise ValueError("num_workers= with an IterableDataset: it is read in its own order, here")
        check_whole(**({} if limit is None else {"max_physical_batch_size": limit}))
        check_whole(0, **({} if seed is None else {"seed": seed}))
        sampler = sampler_for(dataset, of_loader if batch_size is None else batch_size)
        sampler.of(_mark_of(dataset))
        found = CycleLoader(fetching(dataset, sampler, options), sampler, name)
    share(found, world)
    return found


def _mark_of(dataset: Any) -> str | None:
    """Of its records: numbers within subsets, and a few of them. None if they cannot be told."""
    if isinstance(dataset, StreamRecords) or (found := mark_of_records(dataset)) is None:
        return None
    parts = []
    while isinstance(dataset, Subset):
        parts.append(np.fromiter(map(int, dataset.indices), np.int64).tobytes())
        dataset = dataset.dataset
    return mark(found, *parts)


def _expected(size: Any, records: int) -> float:
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size <= records:
        raise ValueError(f"batch_size must be a number in (0, {records}], the records; got {size!r}")
    return size


def _order(dataset: Any, order: Any) -> Numbers:
    """Raises ValueError unless each number is that of a record, and none is there twice."""
    size = len(dataset)
    places = np.arange(size) if order is None else np.fromiter(map(int, order), np.int64)
    if not len(places):
        raise ValueError("the dataset is empty, or the order is")
    if (twice := _twice(places)) is not None:
        raise ValueError(f"record {twice} is in the order twice: in one cycle it may take part only once")
    if places.min() < 0 or places.max() >= size:
        raise ValueError(f"the order holds {places.min()} to {places.max()}; the dataset has records 0 to {size - 1}")
    seen: Any = dataset
    numbers = places
    while isinstance(seen, Subset) and numbers.min() >= 0 and numbers.max() < len(seen.indices):
        numbers, seen = np.fromiter(map(int, seen.indices), np.int64)[numbers], seen.dataset
        if _twice(numbers) is not None:
            raise ValueError("a Subset of the dataset holds a record twice: in one cycle it may take part only once")
    return places


def _twice(numbers: Numbers) -> int | None:
    """A number that is there more than once."""
    ordered = np.sort(numbers)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(again[0]) if len(again) else None


ftrl_loader = fixed_order_loader  # the same, by its name for DP-FTRL
