"""A privacy budget: the epsilon that all steps of a run may spend, and no step beyond it."""

from __future__ import annotations

import math
from typing import Any

from ..errors import StepError
from . import History, epsilon_by
from .runs import Kind, entry, kind_of, steps_in, steps_within


class Budget:
    """What may be spent: target_epsilon at delta, by the accountant; `steps` steps of the planned kind spend it."""

    def __init__(self, target_epsilon: float, delta: float, accountant: str, kind: Kind, steps: int) -> None:
        self.target_epsilon, self.delta, self.accountant = target_epsilon, delta, accountant
        self.kind, self.steps = kind, steps
        self._limits: dict[Any, int] = {}  # how many steps there may be in all, by all but the last run of equal ones

    def check(self, history: History, kind: Kind) -> None:
        """A step of this kind is to follow this history. Raises StepError if it would exceed the budget."""
        before = list(history)
        if before and kind_of(before[-1]) == kind:
            before.pop()
        key, count = (tuple(before), kind), steps_in(history)
        if count >= self._limits.get(key, 0):
            self._limits = {key: self._limit(history, before, kind)}
        if count >= self._limits[key]:
            raise self._spent(history, kind)

    def check_whole(self, history: History, kind: Kind) -> None:
        """Raises StepError if this history, whose last step is of this kind and not made yet, exceeds the budget."""
        if epsilon_by(history, self.delta, self.accountant) > self.target_epsilon:
            raise self._spent(history, kind)

    def _spent(self, history: History, kind: Kind) -> StepError:
        epsilon = epsilon_by(history, self.delta, self.accountant)
        if not kind[0] or epsilon == math.inf:
            return StepError("the budget cannot be kept: a step without noise, of this run or before, has no epsilon")
        return StepError(
            f"the budget is spent: a step more with noise multiplier {kind[0]:.4g} would exceed epsilon "
            f"{self.target_epsilon:g} at delta {self.delta:g} ({self.steps} steps were planned, of one draw of the "
            f"loader each; the accountant's epsilon here is {epsilon:.4g}). No step was made. Stop here, or make a new "
            "optimizer with a larger target_epsilon=, which counts the steps so far"
        )

    def _limit(self, history: History, before: History, kind: Kind) -> int:
        if not before and kind == self.kind:
            return self.steps
        if None in (kind[1], *(run[1] for run in history)):
            raise StepError(
                "the budget cannot be kept: the sample rate of this batch, or of steps so far, is not known. Train on "
                "batches as fastdp.poisson_loader hands them out, or give sample_rate=, to earlier optimizers too"
            )
        planned = entry(kind, self.steps)
        return steps_in(history) + steps_within(self.target_epsilon, history, planned, self.delta, self.accountant)
