"""The physical batch that a loader has handed out last, and whose its records are (groups of records)."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import StepError
from .row_groups import People, numbers_of

if TYPE_CHECKING:
    from ..accounting.participation import Participation


class PhysicalBatch(NamedTuple):
    """What the optimizer must know of the batch in hand. `logical` and `physical` number it, once and for all."""

    loader: int  # id of the loader
    logical: int
    physical: int
    size: int  # records; -1: none is in hand yet
    final: bool  # the last of its logical batch
    sample_rate: float
    expected_batch_size: float  # of samples: of groups, where records are grouped
    people: People | None = None  # whose the records are, where a sample is a group of them
    taken: bool = False  # a private optimizer has stepped on it
    skipped: bool = False  # on the batch before it in this iteration, none has
    moment: int = 0  # when it was handed out
    truncation: float = 0.0  # the probability that its logical batch was cut to a largest size
    share: tuple[int, int] = (0, 1)  # which part of the logical batch it is of, and of how many: those of processes
    place: tuple[str, int, int] = ("", 0, 0)  # what the loader draws by, and of the logical batch its pass and step
    whole: int = 0  # records of the logical batch, of all processes
    seeded: bool = False  # sampled by a seed: whoever knows it knows which records are in the batch
    participation: Participation | None = None  # when a record can be in a batch; None: in each, by a Poisson sample


_MOMENTS = itertools.count()
TELL: list[Callable[[Any, int, int], None]] = []
LAST = [0]  # the id of the loader of which a batch was handed out last
WAITING = -1  # the number of a batch that is none, as nothing is in hand yet; one less each time it is asked for
ACTIVE: dict[int, PhysicalBatch] = {}  # by running iterator, the one that advanced last at the end


def current(loader: int | None = None) -> PhysicalBatch | None:
    """Return the physical batch that a loop is working on, or None if no loop over a Poisson loader runs.

    Args:
        loader: the id of a PoissonLoader. By default, the loader that advanced last is meant.
    """
    found = [(key, batch) for key, batch in ACTIVE.items() if loader is None or batch.loader == loader]
    if found and found[-1][1].physical < 0:
        key, batch = found[-1]
        asked = -batch.physical
        ACTIVE[key] = batch._replace(physical=batch.physical - 1)
        if asked & (asked - 1) == 0:  # the first, second, fourth ... time
            gc.collect()  # a pass that an error has ended, perhaps, which only its traceback's cycle keeps
            found = [(key, batch) for key, batch in found if key in ACTIVE]
    return found[-1][1] if found else None


def active_loaders(since: int = -1) -> int:
    """How many Poisson loaders are being iterated, and have handed out a batch since that moment."""
    return len({batch.loader for batch in ACTIVE.values() if batch.moment > since})


def tell_of_batches(function: Callable[[Any, int, int], None]) -> None:
    """Call a function with every batch that a loop over a loader is handed, its number of records, and the loader's id,
    0 of loaders that are not asked for their batch."""
    TELL.append(function)


def tell(batch: Any, records: int, loader: int = 0) -> None:
    """A loader hands out a batch."""
    for function in TELL:
        function(batch, records, loader)


def now() -> int:
    """A moment, later than all before."""
    return next(_MOMENTS)


class SampleGroups:
    """Whose the records of a batch are: as a loader tells, or as the user said of the coming batch."""

    def __init__(self) -> None:
        self.batch_in_hand: Callable[[], PhysicalBatch | None] = current
        self.in_hand: int | None = None  # when a loader handed out the batch of the last forward
        self._loaders = set[int]()  # of which the inputs of forwards were since the last backward; 0: not shown
        self._said: People | None = None
        self._used = False  # what was said, by a backward
        self._ended = False  # a backward has come since the last forward

    def say(self, keys: Any) -> None:
        """One key a record of the coming batch; None: from now on a sample is a record again."""
        if keys is None:
            self._said = None
            return
        numbers, known = numbers_of(keys)
        self._said, self._used = People(torch.tensor(numbers, dtype=torch.long), known), False

    def given(self, loader: int) -> None:
        """A forward begins, on inputs of the loader with this id; 0: they do not show one."""
        self._loaders = {loader} if self._ended else self._loaders | {loader}
        self._ended = False

    @property
    def given_by(self) -> int:
        """The id of the loader of which the inputs are that the coming backward, or the last one, goes through."""
        return next(iter(self._loaders)) if len(self._loaders) == 1 else 0

    def grouped(self) -> bool:
        """Whether the records of the batch in hand, or of the coming one, are of persons."""
        current = self.batch_in_hand()
        return self._said is not None or (current is not None and current.people is not None)

    def use(self, people: People | None) -> None:
        """A backward has taken them: they are of no other batch. Raises StepError where they came after its forward."""
        if self._said is not None and not self._used and people is None:
            raise StepError(
                "group_by() was called between a forward and its backward, so this batch was taken for records, not "
                "groups of them: call group_by() with the keys of a batch before the model sees it"
            )
        self._used, self._ended = self._used or people is self._said, True

    def of_batch(self, batch: int) -> People | None:
        """The persons of a batch of so many records; None: a sample is a record."""
        self.in_hand = None
        try:
            current = self.batch_in_hand()
            self.in_hand = None if current is None else current.moment
        except StepError as problem:
            return _unknown(str(problem)) if self._said is not None else None
        told = None if current is None else current.people
        if self._said is None:
            if told is not None and told.records != batch:
                return _unknown(f"the loader handed out {told.records} records, the model was given {batch}")
            return told
        if current is not None:
            how = "tells whose its records are: leave group_by() out" if told else "samples records, not persons: "
            give = "give it group_by=" if current.participation is None else "take poisson_loader(group_by=)"
            return _unknown(f"group_by() was called, but the loader {how}{'' if told else give}")
        if self._used:
            return _unknown(
                "group_by() was called for the previous batch, not for this one: call it before every forward, or once "
                "with None to go back to samples of one record"
            )
        if self._said.records != batch:
            return _unknown(f"group_by() was given {self._said.records} keys for a batch of {batch} records")
        return self._said


def _unknown(problem: str) -> People:
    return People(torch.zeros(0, dtype=torch.long), problem=problem)


class Unit:
    """What a sample of a run is, which its epsilon protects: the same in every batch, and in one backward of a step."""

    def __init__(self) -> None:
        self.grouped: bool | None = None  # whether it is a group of records; None: no batch yet
        self._keys: set[Hashable] = set()  # of the groups in backwards since the last call of step

    def take(self, people: People | None, begun: bool) -> None:
        """The samples of one more backward; begun: there were others. Raises StepError where they cannot be added."""
        grouped = people is not None
        if begun and self.grouped not in (None, grouped):
            now, before = ("groups of records", "records") if grouped else ("records", "groups of records")
            raise StepError(
                f"the samples of this batch are {now}, those of the steps so far were {before}: no one epsilon holds "
                "for both. Call group_by() for every batch, or train with poisson_loader(group_by=); to change for "
                "good make a new optimizer."
            )
        keys = set() if people is None else set(people.keys)
        if again := len(keys & self._keys):
            raise StepError(
                f"{again} of {len(keys)} groups have records in a backward before, of the same step: each part would "
                "be clipped on its own, so one group could contribute twice the clipping norm. Put all records of a "
                "group into one batch, as fastdp.poisson_loader(group_by=) does."
            )
        self.grouped = grouped
        self._keys |= keys

    def forget(self) -> None:
        """A step was made, or its gradients dropped."""
        self._keys = set()
