"""The physical batch that a loader has handed out last; the engine and the optimizer read it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from .row_groups import People


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
    fixed: int = 0  # the steps of a pass, if every pass has the same batches; 0: they are Poisson samples


_MOMENTS = itertools.count()
TELL: list[Callable[[Any, int], None]] = []
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


def tell_of_batches(function: Callable[[Any, int], None]) -> None:
    """Call a function with every batch that a loop over a loader is handed, and its number of records."""
    TELL.append(function)


def now() -> int:
    """A moment, later than all before."""
    return next(_MOMENTS)
