"""A privacy budget: the epsilon that all steps of a run may spend, and no step beyond it."""

from __future__ import annotations

from typing import Any

from ..errors import StepError
from . import History
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
            raise StepError(
                f"the budget is spent: epsilon {self.target_epsilon:g} at delta {self.delta:g} allows {count} steps "
                f"({self.steps} were planned at noise multiplier {self.kind[0]:.4g} and sample rate {self.kind[1]:g}), "
                "and one more would exceed it. No step was made. Stop here, or make a new optimizer with a larger "
                "target_epsilon=, which counts the steps so far"
            )

    def _limit(self, history: History, before: History, kind: Kind) -> int:
        if not before and kind == self.kind:
            return self.steps
        if kind[1] is None:
            raise StepError(
                "the budget cannot be kept: the sample rate of this batch is not known. Train on fastdp.poisson_loader"
            )
        planned = entry(kind, self.steps)
        return steps_in(history) + steps_within(self.target_epsilon, history, planned, self.delta, self.accountant)
