"""A batch that is followed from the model's outputs to its backward, and what following needs of an engine."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ..errors import SampleMixingError
from ..layouts.labels import Labels
from ..layouts.layout import Layout
from ..layouts.moments import Moment
from ..layouts.reads import Reads
from ..layouts.sizes import Sizes
from .backward import Arrival
from .hook_watch import Owner
from .layout_cache import Memo
from .mode_stack import moving, remove_over

if TYPE_CHECKING:
    from .following import Following


class Engine(Protocol):
    """What following needs of an engine (`fastdp.engine.forward.Forward`)."""

    memo: Memo
    sizes: Sizes
    reads: Reads
    owner: Owner

    @property
    def grouped(self) -> bool:
        """Whether a sample is a group of records."""

    def backward_begins(self, problem: SampleMixingError | Warning | None, roots: list[Tensor], batch: int) -> None:
        """Backward is called on these, with this problem: to be raised, or warned of, if they are of the engine."""

    def backward_was_reached(self) -> bool:
        """Whether the backward that has just ended was of the engine."""

    def judge_writes(self) -> None:
        """Warn if rows of some samples were written to, and not those of all alike."""

    def backwards(self) -> int:
        """How many there were."""

    @property
    def takes_rows(self) -> bool:
        """Whether inputs have one row for each sample, along their first dimension."""

    @property
    def mean(self) -> bool:
        """Whether the loss is to be a mean over the samples, else a sum."""


ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()  # that are attached to a model


def parameters() -> set[int]:
    """Ids of the parameters of all models that have an engine."""
    return {key for engine in ENGINES for key in engine.backward.tracked.current()}


class Followed:
    """A batch to be followed up to its backward.

    batch: its size; moment: its identity; mixed: layouts of the model's outputs that several samples made; arrivals:
    what waits in the graph for the gradients of these outputs, as long as the graph is there. token: see `Moment`.
    """

    def __init__(
        self, batch: int, moment: Moment, engine: Engine, mixed: list[Layout], arrivals: Sequence[Arrival] = ()
    ) -> None:
        self.batch, self.moment, self.mixed = batch, moment, mixed
        me = weakref.ref(self)
        self.memo, self.sizes = engine.memo, engine.sizes
        self.labels = Labels(batch, moment.number)
        self.engine = weakref.ref(engine, lambda _: _is_gone(me))
        self.mode: weakref.ref[Following] | None = None  # that follows it
        self.passed = 0  # backwards of others meanwhile
        self._ending: list[Any] = [weakref.ref(arrival, lambda _: _is_gone(me)) for arrival in arrivals]
        self.token = None if moment.token is None else weakref.ref(moment.token, lambda _: _is_gone(me))
        self._ending += [] if self.token is None else [self.token]
        moment.token = None

    def waits(self) -> bool:
        """Whether a backward may come yet."""
        if self.engine() is None or not self.moment.alive or self.moment.reached:
            return False
        return not self._ending or any(known() is not None for known in self._ending)


class Evaluation:
    """A forward of the model without gradients, whose inputs are known: what else it takes is no label."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        labels.paused += 1

    def end(self) -> None:
        """The forward ends."""
        self._labels.paused -= 1


def _is_gone(known: weakref.ref[Followed]) -> None:
    """The graph behind an output of the model, or all that was made of outputs: perhaps no backward can come now."""
    what = known()
    mode = what.mode() if what is not None and what.mode is not None else None
    if what is None or mode is None or mode.what is not what or what.waits() or any(w.waits() for w in mode.waiting):
        return
    mode.finish()
    if mode.thread == threading.get_ident() and not moving():
        remove_over()
