"""Tracks batches of a Poisson loader that no private optimizer stepped on.

To leave a batch out for what is in it (its size, its loss) is no Poisson sampling, and no accountant covers it. What is
certain is refused by the loader, at the next batch or at the end of the pass; what may be innocent (a loop that ends
with a batch in hand, a pass for another purpose) is kept for the optimizers that train on the loader, which warn of it.
"""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..accounting.runs import whole
from ..engine.unused_batches import Stepped, Taken, turns_passed_over
from ..errors import StepError
from . import loop_checks

Place = tuple[int, int]  # pass, and its logical batches handed out, the one in hand counted
Event = tuple[str, Place]  # the mark of what a loader samples by, and the place


def mark_of_key(key: int) -> str:
    """Tells whether batches are those of another loader, and of its secret key nothing."""
    return hashlib.sha256(f"fastdp {key}".encode()).hexdigest()[:16]


class SkippedBatches:
    """Batches that an optimizer should have stepped on, and did not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.over = False  # detached: what is handed out now is not for it
        self.refused: Callable[[BaseException], None] = lambda error: None  # told of what a loader raises
        self.skipped = 0
        self.left: list[Event] = []  # of passes left before the step in hand
        self.cut: list[Event] = []  # the same, where some physical batches of the logical one had a step
        self.passes = 0  # without a step
        self.turns: list[bytearray] = []  # of passes that are over: 1 for each batch that had a step, 0 where another's
        self.stepped = Stepped()  # of batches that were taken out of the loader before
        self._evaluates = False  # whether it trains with the model in the mode of evaluation
        self._before = 0  # chosen among, as a state that was loaded says
        self._told: tuple[int, ...] = (0,) * 5

    @property
    def training(self) -> bool:
        """Whether the model is there, in the mode that it is trained in."""
        model = self._model()
        return model is not None and (model.training or self._evaluates) and not self.over

    @property
    def chosen(self) -> int:
        """Batches passed over where others were chosen for a step."""
        return self._before + self.stepped.passed_over + turns_passed_over(self.turns)

    def train(self) -> None:
        """A backward or step on a batch of a loader."""
        model = self._model()
        self._evaluates = model is not None and not model.training

    @property
    def counts(self) -> tuple[int, ...]:
        """Of each kind, what was missed."""
        return (self.skipped, self.chosen, len(self.left), len(self.cut), self.passes)

    def take(self, known: tuple[Taken, int]) -> None:
        """A step was made on a batch that was taken out of its loader before."""
        taken = known[0]
        if self.stepped.add(known):
            self.passes -= self in taken.told
            taken.told.discard(self)
            trainers = None if taken.loader is None else taken.loader()
            if trainers is not None:
                self.train()
                trainers.add(self)
            self.warn(again=False, stacklevel=6)

    def warn(self, again: bool = True, stacklevel: int = 3) -> None:
        """Say what was missed; not again: unless it was said before."""
        count = self.counts
        if any(count) if again else any(now > was for now, was in zip(count, self._told, strict=True)):
            texts = (loop_checks.PASSED_OVER, loop_checks.CHOSEN, loop_checks.LEFT, loop_checks.CUT, loop_checks.UNUSED)
            found = " ".join(text.format(n=n) for n, text in zip(count, texts, strict=True) if n)
            warnings.warn(f"epsilon may not hold: {found} {loop_checks.EVERY_BATCH}.", stacklevel=stacklevel)
        self._told = count

    def redo(self, mark: str, place: Place) -> None:
        """A loader hands out (again) what follows this place."""
        for events in (self.left, self.cut):
            events[:] = [(of, where) for of, where in events if of != mark or where <= place]

    def state_dict(self) -> dict[str, Any]:
        """What another optimizer that goes on must know."""
        state: dict[str, Any] = {"skipped": self.skipped, "chosen": self.chosen, "passes": self.passes}
        state["left"] = [(mark, *place) for mark, place in self.left]
        state["cut"] = [(mark, *place) for mark, place in self.cut]
        return {name: value for name, value in state.items() if value}

    def read(self, state: dict[str, Any]) -> Callable[[], None]:
        """Read what was missed before; the result takes it up. What is known already counts once.

        Raises KeyError and the like if it is no state.
        """
        skipped, chosen, passes = (whole(state.get(name, 0)) for name in ("skipped", "chosen", "passes"))
        events = [[(str(mark), (int(a), int(b))) for mark, a, b in state.get(name, ())] for name in ("left", "cut")]

        def take_up() -> None:
            self.skipped, self.passes = max(self.skipped, skipped), max(self.passes, passes)
            self._before += max(0, chosen - self.chosen)
            for mine, more in zip((self.left, self.cut), events, strict=True):
                mine += [event for event in more if event not in mine]

        return take_up


class LoaderUsers(weakref.WeakSet[SkippedBatches]):
    """What the optimizers have skipped that train, or have trained, on loaders of one dataset. (A loader made anew over
    it counts as the same.)"""

    @classmethod
    def of(cls, dataset: Any) -> LoaderUsers:
        """The set that all loaders of this dataset share; a new one for a dataset that cannot be looked up."""
        try:
            return _OF_DATA.setdefault(dataset, cls())
        except TypeError:  # a list, say
            return cls()

    def __init__(self) -> None:
        super().__init__()
        self.taken: deque[Taken] = deque(maxlen=4)  # the last passes in which nobody trained


_OF_DATA: weakref.WeakKeyDictionary[Any, LoaderUsers] = weakref.WeakKeyDictionary()


class PassWatch:
    """One pass over a loader: who trains on it, and whether every batch is stepped on."""

    def __init__(self, loader: int, known: LoaderUsers, rate: float) -> None:
        self.loader, self._known, self._rate = loader, known, rate
        self._mark, self._first = "", (0, 0)
        # of each that trains on this pass, 1 or 0 for each batch: whether it stepped
        self._trainers: weakref.WeakKeyDictionary[SkippedBatches, bytearray] = weakref.WeakKeyDictionary()
        self._trained = self._closed = self._looked = False
        self._place = (0, 0)  # of the batch in hand
        self._handed = 0  # batches so far
        self._due = self._open = False  # whether it has had no step; whether its logical batch has not ended by one
        self._waits = False  # whether it has had a backward
        self._taken: Taken | None = None  # the batches so far, where none was trained on

    def begin(self, mark: str, place: Place) -> None:
        """The pass begins at this place."""
        self._mark, self._first = mark, place

    def train(self, missed: SkippedBatches, taken: bool = False, final: bool = False) -> None:
        """A backward on the batch in hand, or a step (taken), which ends the logical batch (final)."""
        if missed not in self._trainers:
            missed.train()
            missed.redo(self._mark, self._first)
            self._trainers[missed] = bytearray(self._handed)  # none of those before
        if not self._trained:
            missed.warn(again=False, stacklevel=6)
        self._trained = self._waits = True
        self._taken = None
        self._known.add(missed)
        if taken:
            self._trainers[missed][-1] = 1
            self._due, self._open = False, not final

    def hand(self, place: Place) -> None:
        """The next batch. Raises StepError where none has stepped on the one in hand."""
        self._look()
        self._check(f"{loop_checks.UNSTEPPED} {loop_checks.EVERY_BATCH}." if self._waits else loop_checks.SKIPPED)
        for steps in self._trainers.values():
            steps.append(0)
        self._handed += 1
        self._place, self._due, self._open, self._waits = place, True, True, False

    def give(self, batch: Any, size: int, place: tuple[str, int, int]) -> None:
        """What the batch in hand is, to know it again after the pass."""
        if not self._trained:
            self._taken = self._taken or Taken(self._rate)
            self._taken.add(batch, size, place)

    def end(self) -> None:
        """No batch follows. Raises StepError where none has stepped on the last."""
        self._look()
        self._check(loop_checks.LAST_SKIPPED)
        self.leave()

    def leave(self) -> None:
        """The pass is over, or was left; said once."""
        if self._closed:
            return
        self._closed = True
        if not self._trained:
            self._unused()
            return
        living = _living(self._trainers)
        for missed in living:
            steps = self._trainers[missed]
            missed.turns.append(steps[:-1] if self._due else steps)  # without one on which nobody has stepped
        if self._open:
            for missed in living:
                (missed.left if self._due else missed.cut).append((self._mark, self._place))

    def supersede(self) -> None:
        """Another pass of the loader is trained on."""
        if self._trained:
            self.leave()

    def _unused(self) -> None:
        """Nobody has trained on the pass."""
        # what a framework fetched ahead, and gave to nobody, is no pass
        known = [] if self._looked or not self._handed else _living(self._known)
        for missed in known:
            missed.passes += 1
        if self._taken is not None:
            self._taken.looked, self._taken.loader = self._looked, weakref.ref(self._known)
            self._taken.told.update(known)
            self._taken.close()
            self._known.taken.append(self._taken)

    def _check(self, text: str) -> None:
        if not self._due or self._closed:
            return
        living = _living(self._trainers)
        if living:
            self._closed = True
            error = StepError(text)
            for missed in living:
                missed.skipped += 1
                missed.refused(error)
            raise error

    def _look(self) -> None:
        """Whether the pass is for looking only: without gradients, or while no model of the loader's is trained."""
        trains = not self._known or any(missed.training for missed in self._known)
        self._looked = self._looked or not torch.is_grad_enabled() or not trains


def _living(found: Iterable[SkippedBatches]) -> list[SkippedBatches]:
    return [missed for missed in found if not missed.over]
