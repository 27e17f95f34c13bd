"""One batch that is followed from the model's outputs to its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..batch_axis.generations import Generation
from ..batch_axis.labels import Labels
from ..batch_axis.layout import Layout
from .backward import Arrival
from .capture import Pass
from .state import Engine


class TrackedLoss:
    """A batch to be followed up to its backward.

    batch: its size; moment: its identity; mixed: layouts of the model's outputs that several samples made; arrivals:
    what waits in the graph for the gradients of these outputs, as long as the graph is there. token: see `Generation`.
    forward: its pass of capture, which sees what the loss makes of parameters. gone: told if the graph is gone,
    perhaps with all that could call backward.
    """

    def __init__(
        self,
        batch: int,
        moment: Generation,
        engine: Engine,
        mixed: list[Layout],
        arrivals: Sequence[Arrival] = (),
        forward: Pass | None = None,
    ) -> None:
        self.batch, self.moment, self.mixed = batch, moment, mixed
        self.forward = (lambda: None) if forward is None else weakref.ref(forward)  # the graph has it
        self.read = "" if forward is None else forward.read
        self.filled: int | None = None if forward is None else forward.filled
        me = weakref.ref(self)
        self.memo, self.sizes = engine.memo, engine.sizes
        self.labels = Labels(batch, moment.number)
        self.engine = weakref.ref(engine, lambda _: _is_gone(me))
        self.gone: Callable[[], Callable[[TrackedLoss], None] | None] = lambda: None  # of the mode that follows it
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


def _is_gone(known: weakref.ref[TrackedLoss]) -> None:
    """The graph behind an output of the model, or all that was made of outputs: perhaps no backward can come now."""
    what = known()
    tell = None if what is None else what.gone()
    if what is not None and tell is not None:
        tell(what)
