"""A privacy budget: the epsilon that all steps of a run may spend, and no step beyond it."""

from __future__ import annotations

import math
from typing import Any

from ..errors import AccountingError, StepError
from . import History, epsilon_by, noise_multiplier_for
from .runs import Kind, entry, kind_of, steps_in, steps_within


class Budget:
    """What may be spent: target_epsilon at delta, by the accountant; `steps` steps of the planned kind spend it."""

    def __init__(self, target_epsilon: float, delta: float, accountant: str, kind: Kind, steps: int) -> None:
        self.target_epsilon, self.delta, self.accountant = target_epsilon, delta, accountant
        self.kind, self.steps = kind, steps
        self.plan = [target_epsilon, delta, accountant, steps]  # as a saved state tells it
        self._limits: dict[Any, int] = {}  # how many steps there may be in all, by all but the last run of equal ones

    def for_the_rest(self, history: History, noise_multiplier: float) -> tuple[float, str]:
        """With which noise a run that began under another plan goes on, so that all of its steps keep the budget.

        noise_multiplier: that of the other plan, which stays where nothing else can be had: then the budget ends early.
        Returns it, and what to say of it.
        """
        rest, (_, rate, truncation) = self.steps - steps_in(history), self.kind
        begin = (
            f"the loaded run has made {steps_in(history)} steps by another plan (noise multiplier "
            f"{noise_multiplier:.4g}, for {self.steps} steps it is {self.kind[0]:.4g})"
        )
        try:
            if rest < 1 or rate is None:
                raise AccountingError(f"{max(rest, 0)} of {self.steps} steps are left")
            found = noise_multiplier_for(
                target_epsilon=self.target_epsilon, delta=self.delta, sample_rate=rate, steps=rest,
                accountant=self.accountant, truncation=truncation, history=history,
            )  # fmt: skip
        except AccountingError as problem:
            return noise_multiplier, f"{begin}. Its noise stays, and steps end where the budget does: {problem}"
        return found, f"{begin}. The {rest} steps left get {found:.4g}, so that all together keep the budget."

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
