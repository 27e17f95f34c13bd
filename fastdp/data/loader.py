"""Poisson sampling: every record (or person) joins a batch independently, with the accounted probability.

A logical batch (one step) is cut into physical batches that fit into memory. The loader notes which of them it handed
out last (`fastdp.batch_axis.current_batch`), so that the optimizer knows when a logical batch is complete.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from ..accounting import steps_per_epoch
from ..accounting.participation import Participation
from ..batch_axis.current_batch import ACTIVE, LAST, WAITING, PhysicalBatch, now, tell
from ..batch_axis.row_groups import People
from ..distributed.failure_signal import signals_failure
from ..distributed.fingerprints import mark_of_records
from ..distributed.world import World, dealing_world
from ..errors import StepError
from ..utils.keyword_arguments import parameters_of, refuse_unknown
from .empty_batches import fetching, source_of
from .grouping import Grouping
from .sample_rates import rate_and_size
from .sampler import PoissonSampler
from .skipped_batches import LoaderUsers, PassWatch, SkippedBatches, mark_of_key
from .streams import StreamRecords
from .truncation import max_batch_size_for, truncation

_LOGICAL = itertools.count()  # numbers of logical batches, of all loaders
_WATCHED: dict[int, PassWatch] = {}  # by running iterator, as the batches in hand are


def train(batch: PhysicalBatch, missed: SkippedBatches, stepped: bool = False) -> None:
    """Note that an optimizer has made a backward, or a step, on this batch."""
    for key, active in ACTIVE.items():
        if (active.logical, active.physical) == (batch.logical, batch.physical):
            _WATCHED[key].train(missed, stepped, batch.final)
            ACTIVE[key] = active._replace(taken=active.taken or stepped)
        elif active.loader == batch.loader:
            _WATCHED[key].supersede()


class PoissonLoader:
    """An iterable over batches of Poisson samples of a dataset; `poisson_loader` makes it.

    Attributes:
        loader: the DataLoader that fetches the batches.
        sampler: the PoissonSampler that draws them.
        expected_batch_size: the expected number of samples in a logical batch.
    """

    made_by = "poisson_loader"

    def __init__(self, loader: DataLoader[Any], sampler: PoissonSampler, expected_batch_size: float) -> None:
        self.loader, self.sampler = loader, sampler
        self.expected_batch_size = expected_batch_size
        self._place = (0, 0)  # pass, and its logical batches handed out whole
        self._trainers = LoaderUsers.of(loader.dataset)

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything except the optimizers: a copy is another loader, and no optimizer has trained on it."""
        return {name: value for name, value in vars(self).items() if name != "_trainers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _trainers=LoaderUsers())

    def state_dict(self, *, secret: bool = False) -> dict[str, Any]:
        """Return the position of the loader: {"pass", "step"}. After a `step()`, it is where the next step begins.

        Args:
            secret: also include the key of the sampling. The key must stay as secret as the data: a loader that loads
                such a state hands out exactly the batches that this loader would have handed out.
        """
        place, step = self._place
        state = {"pass": place, "step": step}
        return {**state, "key": self.sampler.key} if secret else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration resume the pass where the state was saved. It ends where that pass ends.

        Raises StepError if the state is not a state of this loader.
        """
        try:
            place, step, key = state["pass"], state["step"], state.get("key", self.sampler.key)
        except (AttributeError, KeyError, TypeError) as problem:
            raise StepError(f"this is no state of a {self.made_by}, or of another version: {problem!r}") from None
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (place, step, key)):
            raise StepError(f"this is no state of a {self.made_by}: pass, step and key are whole numbers from 0 on")
        if step > self.sampler.steps:
            raise StepError(f"the state is of step {step}; a pass of this loader has {self.sampler.steps}")
        if step == self.sampler.steps:
            place, step = place + 1, 0
        self.sampler.key, self.sampler.passes, self.sampler.first = key, place, step
        self._place = (place, step)
        for missed in self._trainers:
            missed.redo(mark_of_key(key), self._place)

    @property
    def dataset(self) -> Any:
        """The dataset that is sampled."""
        return self.loader.dataset

    @property
    def sample_rate(self) -> float:
        """The probability that a record (or person) is in a logical batch."""
        return self.sampler.sample_rate

    @property
    def truncation(self) -> float:
        """The probability that a logical batch is cut to max_batch_size; 0 without one."""
        sampler = self.sampler
        return 0.0 if sampler.largest is None else truncation(sampler.size, sampler.sample_rate, sampler.largest)

    @property
    def participation(self) -> Participation | None:
        """When a record can take part, as correlated noise is accounted by; None: in each step, by a Poisson sample."""
        return self.sampler.participation

    @property
    def steps_per_epoch(self) -> int:
        """The number of logical batches in one pass over the loader."""
        return self.sampler.steps

    @property
    def grouping(self) -> Grouping | None:
        """The assignment of records to persons if a sample is a group of records, else None."""
        return self.sampler.grouping

    def __repr__(self) -> str:
        kind, of = "records", ""
        if self.grouping is not None:
            kind, of = "groups", f" of {len(self.dataset)} records (at most {self.grouping.most} each a step)"
        return (
            f"<poisson_loader: each of {self.sampler.size} {kind}{of} with probability {self.sample_rate:.6g} in each "
            f"of {self.sampler.steps} steps; epsilon is of one of the {kind} added or removed>"
        )

    def __len__(self) -> int:
        """The number of logical batches.

        With max_physical_batch_size, the loop body may run more often.
        """
        return self.sampler.steps

    def __iter__(self) -> Iterator[Any]:
        mine, end = new_pass(), leave  # at the interpreter's end only names within are left
        try:
            for batch, begin in self.ahead(mine):
                begin()
                tell(batch, ACTIVE[mine].size, id(self))
                _WATCHED[mine].give(batch, ACTIVE[mine].size, ACTIVE[mine].place)
                yield batch
            finish(mine)
        finally:
            end(mine)

    def ahead(self, mine: int) -> Iterator[tuple[Any, Callable[[], None]]]:
        """Yield the batches of this pass, each with a function to call before training on it, however late."""
        batches = signals_failure(iter(self.loader))
        watch = _WATCHED[mine] = PassWatch(id(self), self._trainers, self.sampler.sample_rate)
        chance = self.truncation
        pending: deque[tuple[int, bool, People | None, int]] | None = None
        promise: Participation | None = None
        logical, physical, place, step, draws = next(_LOGICAL), 0, 0, 0, ""
        for batch in batches:
            if pending is None:
                pending = self.sampler.pending
                place, step = self.sampler.running
                draws, promise = self.sampler.mark, self.sampler.participation
                watch.begin(mark_of_key(self.sampler.key), (place, step))
            size, final, people, whole = pending.popleft()
            step += final
            note = PhysicalBatch(
                id(self), logical, physical, size, final, self.sampler.sample_rate, self.expected_batch_size, people,
                truncation=chance, share=self.sampler.share, place=(draws, place, step - final),
                whole=whole, seeded=self.sampler.seeded, participation=promise,
            )  # fmt: skip
            yield batch, functools.partial(self._begin, mine, note, (place, step))
            logical, physical = (next(_LOGICAL), 0) if final else (logical, physical + 1)

    def finish(self) -> None:
        """End the running passes over this loader.

        Raises StepError if the batch in hand had no step.
        """
        for watch in [watch for watch in _WATCHED.values() if watch.loader == id(self)]:
            watch.end()

    def _begin(self, mine: int, note: PhysicalBatch, place: tuple[int, int]) -> None:
        _WATCHED[mine].hand((place[0], place[1] + (not note.final)))
        self._place, LAST[0] = place, id(self)
        before = ACTIVE.pop(mine, None)  # to the end: it advanced last
        ACTIVE[mine] = note._replace(skipped=before is not None and not before.taken, moment=now())


_PASSES = itertools.count()


def new_pass() -> int:
    """Return the number of a pass that begins."""
    return next(_PASSES)


def wait(mine: int, loader: PoissonLoader) -> None:
    """Say that batches of this pass are being fetched, and that none is in hand until the pass says which."""
    nothing = PhysicalBatch(id(loader), -1, WAITING, -1, False, loader.sampler.sample_rate, loader.expected_batch_size)
    ACTIVE[mine] = nothing._replace(skipped=True, taken=True, moment=now())


def finish(mine: int) -> None:
    """End the pass with that number, which has no more batches.

    Raises StepError if its last batch had no step.
    """
    if mine in _WATCHED:
        _WATCHED[mine].end()


def leave(mine: int, active: dict[int, PhysicalBatch] = ACTIVE, watched: dict[int, PassWatch] = _WATCHED) -> None:
    """Forget the pass with that number, which is over or was left."""
    active.pop(mine, None)
    watch = watched.pop(mine, None)
    if watch is not None:
        watch.leave()


def poisson_loader(
    data: Dataset[Any] | DataLoader[Any] | Any,
    *,
    sample_rate: float | None = None,
    expected_batch_size: float | None = None,
    max_physical_batch_size: int | None = None,
    max_batch_size: int | None = None,
    steps: int | None = None,
    seed: int | None = None,
    group_by: Any = None,
    max_records_per_group: int | None = None,
    augmentations: int = 1,
    process_group: Any = None,
    mesh: Any = None,
    **loader_options: Any,
) -> PoissonLoader:
    """Make a loader that samples every record independently with probability `sample_rate` at each step.

    An empty sample is handed out as a batch without rows. If several processes train together (torch.distributed), all
    draw the same sample and each hands out its part, in equally many physical batches. Sizes and rates count the whole.

    Args:
        data: a map-style dataset, or a DataLoader, whose dataset, collate_fn, workers and batch_size are used.
        sample_rate: the probability, in (0, 1]. Give either sample_rate or expected_batch_size.
        expected_batch_size: sample_rate * len(dataset). It defaults to the batch_size of a DataLoader.
        max_physical_batch_size: the largest number of records in a physical batch. Logical batches are cut into
            physical batches, and the optimizer accumulates until the last one.
        max_batch_size: the largest number of samples in a logical batch: of larger ones so many are kept at random,
            which costs epsilon (`fastdp.sampling.max_batch_size_for`). For steps of a fixed size (`optimizer.graphed`).
        steps: the number of logical batches in a pass. By default, it is ceil(1 / sample_rate), so that a pass samples
            each record once in expectation.
        seed: a whole number that makes sampling reproducible, for experiments only: sampling must be secret. By
            default, the key comes from the operating system.
        group_by: who each record belongs to, for privacy of persons with several records: the name of a column, a key
            for each record, or a function from a record to its key. The loader then samples persons, with all of their
            records, and the engine clips each person as one sample. sample_rate and expected_batch_size then count
            persons, and max_physical_batch_size counts records. See docs/people.md.
        max_records_per_group: the largest number of records of a person in a step, drawn anew at each step.
        augmentations: K, to take each record of a batch K times out of the dataset, whose random transforms make
            another view of it each time. The K rows of a record come one after the other, and the optimizer must have
            augmentations=K. Sizes and rates count records, max_physical_batch_size too.
        process_group: the process group of the training, and
        mesh: instead, its device mesh, of one dimension. By default, all processes of torch.distributed. The loader
            must be made on all of them, with equal arguments, and of the same data in the same order.
        loader_options: options of torch's DataLoader, if data is a dataset. Its collate_fn is tried with other records
            at the batches 1, 2, 4, ..., and SampleMixingError is raised if it makes rows of several.

    Returns:
        A PoissonLoader.

    Raises:
        ValueError: if a size or rate is out of range, or the dataset is empty.
        TypeError: if an option is unknown; the error names the nearest, or what to do instead.
        StepError: if the data cannot be sampled by index, the DataLoader has a custom sampler, or processes differ.
    """
    world = dealing_world(process_group, mesh)
    with world.deciding():
        refuse_unknown("poisson_loader", loader_options, parameters_of(DataLoader) | parameters_of(poisson_loader))
        if own := sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & loader_options.keys()):
            raise TypeError(
                f"poisson_loader: {', '.join(f'{name}=' for name in own)}: the loader draws each batch at random, by "
                "itself: leave it out, and give expected_batch_size= or sample_rate="
            )
        found = _loader_of(
            data, sample_rate, expected_batch_size, max_physical_batch_size, max_batch_size, steps, seed, group_by,
            max_records_per_group, augmentations, dict(loader_options),
        )  # fmt: skip
        _share(found, world)
    return found


def share(loader: PoissonLoader, world: World | None = None) -> None:
    """Share a loader that was made before torch.distributed began. All processes call this, before they iterate.

    world: those who train, if it is known."""
    world = dealing_world(None, None) if world is None else world
    if not loader.sampler.dealt:
        with world.deciding():
            _share(loader, world)


def _share(loader: PoissonLoader, world: World) -> None:
    """Let the loaders of several processes draw one sample, and hand out a part each."""
    if world.size == 1:
        return
    sampler, dataset, making = loader.sampler, loader.dataset, f"a {loader.made_by}"
    seed = sampler.seed
    # of a stream the first record must do: the last one lies at its end
    records = mark_of_records([dataset[0]] if isinstance(dataset, StreamRecords) else dataset)
    if records is None:
        warnings.warn(
            "whether all processes have the same dataset cannot be told, since its records are not the same when they "
            "are read twice. Make sure of it: in another order on some rank, a record would count twice in a step.",
            stacklevel=4,
        )
    sizes = {"steps": sampler.steps, "max_physical_batch_size": sampler.limit}
    world.agree({"making": making, "seed": seed, "draws": sampler.settings, **sizes})
    # of those who can tell, all must hold the same records in the same order
    told = world.agree({"making": making, "telling": "its records"}, int(records is not None))
    if told == world.size:
        world.agree({"making": making, "first, last and other records of the dataset": records})
    if seed is None:
        sampler.key = int.from_bytes(world.from_first(sampler.key.to_bytes(32, "big")), "big")
    sampler.share, sampler.dealt = world.share, True


def _loader_of(
    data: Any,
    sample_rate: float | None,
    expected_batch_size: float | None,
    max_physical_batch_size: int | None,
    max_batch_size: int | None,
    steps: int | None,
    seed: int | None,
    group_by: Any,
    max_records_per_group: int | None,
    views: int,
    options: dict[str, Any],
) -> PoissonLoader:
    """The loader of `poisson_loader`'s arguments, as a process makes it that trains alone."""
    dataset, options, of_loader = source_of(data, options, (SequentialSampler, RandomSampler), _SAMPLED)
    if sample_rate is None and expected_batch_size is None and isinstance(data, DataLoader):
        if of_loader is None:
            raise ValueError("the DataLoader has no batch_size: give expected_batch_size= or sample_rate=")
        expected_batch_size = of_loader
    else:
        of_loader = None
    grouping = None if group_by is None else Grouping.of(dataset, group_by)
    size = len(dataset) if grouping is None else grouping.groups
    if size == 0:
        raise ValueError("the dataset is empty")
    if (sample_rate is None) == (expected_batch_size is None):
        raise ValueError("give either sample_rate= or expected_batch_size=")
    if of_loader is not None:
        expected_batch_size = min(of_loader, size)
    sample_rate, expected_batch_size = rate_and_size(sample_rate, expected_batch_size, size, grouping is not None)
    steps = steps if steps is not None else steps_per_epoch(sample_rate)
    for name, value in (("max_physical_batch_size", max_physical_batch_size), ("max_batch_size", max_batch_size),
                        ("max_records_per_group", max_records_per_group), ("steps", steps),
                        ("augmentations", views)):  # fmt: skip
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    if grouping is not None and views > 1:
        raise ValueError("augmentations= with group_by=: views of persons' records are not supported")
    if options.get("in_order") is False:
        raise ValueError("in_order=False would mix up physical batches")
    if max_records_per_group is not None and grouping is None:
        raise ValueError("max_records_per_group= needs group_by=, which says whose the records are")
    if grouping is not None:
        grouping.limit_to(max_records_per_group, max_physical_batch_size)
    if max_batch_size is not None and max_batch_size <= expected_batch_size < size:
        raise ValueError(
            f"max_batch_size={max_batch_size} would cut about every other batch of {expected_batch_size:g} samples in "
            "expectation, and no epsilon holds for that. fastdp.sampling.max_batch_size_for finds a size that costs "
            f"little: {max_batch_size_for(size, sample_rate, steps, 0.1 / size)} here, for delta = {0.1 / size:.2g}"
        )
    sampler = PoissonSampler(size, sample_rate, steps, max_physical_batch_size, seed, grouping, max_batch_size)
    sampler.views = views
    loader = fetching(dataset, sampler, options, views if grouping is None else None)
    return PoissonLoader(loader, sampler, expected_batch_size)


_SAMPLED = (
    "Poisson sampling takes its place. Give one without a sampler; for a part of the data, a Subset; for rare classes, "
    "weight[y] times the losses."
)
