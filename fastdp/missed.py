"""Batches that a Poisson loader handed out and no private optimizer stepped on.

To leave a batch out for what is in it (its size, its loss) is no Poisson sampling, and no accountant covers it. What is
certain is refused by the loader, at the next batch or at the end of the pass; what may be innocent (a loop that ends
with a batch in hand, a pass for another purpose) is kept for the optimizers that train on the loader, which warn of it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from . import loops
from .errors import StepError

Place = tuple[int, int]  # pass, and its logical batches handed out whole


class Missed:
    """Batches that an optimizer should have stepped on, and did not."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.over = False  # detached: what is handed out now is not for it
        self.skipped = 0
        self.left: list[tuple[int, Place]] = []  # of passes left before the step in hand: the loader, and its place
        self.cut: list[tuple[int, Place]] = []  # the same, where some physical batches of the logical one had a step
        self.passes = 0  # without a step
        self.asked = False  # for epsilon, since a batch was handed out
        self._told = (0, 0, 0, 0)

    @property
    def training(self) -> bool:
        """Whether the model is there, in the mode of training."""
        model = self._model()
        return model is not None and model.training and not self.over

    def warn(self, again: bool = True, stacklevel: int = 3) -> None:
        """Say what was missed; not again: unless it was said before (what was cut is said by the next step)."""
        count = (self.skipped, len(self.left), len(self.cut), self.passes)
        if any(count) if again else any(now > was for now, was in zip(count, self._told, strict=True)):
            texts = (loops.PASSED_OVER, loops.LEFT, loops.CUT, loops.UNUSED)
            found = " ".join(text.format(n=n) for n, text in zip(count, texts, strict=True) if n)
            warnings.warn(f"epsilon may not hold: {found} {loops.EVERY_BATCH}.", stacklevel=stacklevel)
        self._told = count

    def silent(self) -> None:
        """The last of `cut` will be said by the next step of a batch, if there is one."""
        self._told = (*self._told[:2], self._told[2] + 1, self._told[3])

    def redo(self, loader: int, place: Place) -> None:
        """The loader hands out again what follows this place."""
        for events in (self.left, self.cut):
            events[:] = [(of, where) for of, where in events if of != loader or where < place]


class Watch:
    """One pass over a loader: who trains on it, and whether every batch is stepped on."""

    def __init__(self, loader: int, known: weakref.WeakSet[Missed]) -> None:
        self.loader, self._known = loader, known  # known: those that train, or have trained, on the loader
        self._trainers: weakref.WeakSet[Missed] = weakref.WeakSet()
        self._trained = self._closed = self._looked = False
        self._place = (0, 0)  # of the batch in hand
        self._due = self._open = False  # whether it has had no step; whether its logical batch has not ended by one
        self._waits = False  # whether it has had a backward

    def train(self, missed: Missed, taken: bool = False, final: bool = False) -> None:
        """A backward on the batch in hand, or a step (taken), which ends the logical batch (final)."""
        if not self._trained:
            missed.warn(again=False, stacklevel=6)
        self._trained = self._waits = True
        self._trainers.add(missed)
        self._known.add(missed)
        if taken:
            self._due, self._open = False, not final

    def hand(self, place: Place) -> None:
        """The next batch. Raises StepError where none has stepped on the one in hand."""
        self._look()
        self._check(f"{loops.UNSTEPPED} {loops.EVERY_BATCH}." if self._waits else loops.SKIPPED)
        for missed in self._trainers:
            missed.asked = False
        self._place, self._due, self._open, self._waits = place, True, True, False

    def end(self) -> None:
        """No batch follows. Raises StepError where none has stepped on the last."""
        self._look()
        self._check(loops.LAST_SKIPPED)
        self.leave()

    def leave(self) -> None:
        """The pass is over, or was left; said once."""
        if self._closed:
            return
        self._closed = True
        if not self._trained:
            if not self._looked:
                for missed in _living(self._known):
                    missed.passes += 1
        elif self._open:
            for missed in _living(self._trainers):
                (missed.left if self._due else missed.cut).append((self.loader, self._place))
                if missed.asked:
                    missed.warn(again=False, stacklevel=2)
                elif not self._due:
                    missed.silent()

    def supersede(self) -> None:
        """Another pass of the loader is trained on."""
        if self._trained:
            self.leave()

    def _check(self, text: str) -> None:
        living = _living(self._trainers)
        if self._due and living and not self._closed:
            self._closed = True
            for missed in living:
                missed.skipped += 1
            raise StepError(text)

    def _look(self) -> None:
        """Whether the pass is for looking only: without gradients, or while no model of the loader's is trained."""
        self._looked = self._looked or not torch.is_grad_enabled() or not any(m.training for m in self._known)


def _living(found: Iterable[Missed]) -> list[Missed]:
    return [missed for missed in found if not missed.over]
