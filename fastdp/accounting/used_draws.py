"""The draws of Poisson loaders that runs have stepped on, and those among them that were stepped on again.

A second step on the same sample of records, under noise of its own, is no second sample. All steps on one sample, of
one optimizer or of several, are together one release of it, with the noise multiplier (sum over the steps of
1 / sigma^2)^(-1/2), and are accounted so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from . import History, truncation_in

BY_SEED = "by seed: "  # at the front of what a loader draws by
IN_ORDER = "in order: "  # the same, of a loader that draws nothing in secret: its batches are no samples
Place = tuple[str, int, int]  # what a loader draws by; pass, and step of the pass
Kind = tuple[float, float | None, float]  # of a step: noise multiplier, sample rate, truncation
_Steps = list[list[Any]]  # [first, the one after the last, kind] of steps in a row


class UsedDraws:
    """Which steps of which passes over which loaders were made."""

    def __init__(self, state: Any = None) -> None:
        """state: what `state` gave of others. Raises TypeError, ValueError or KeyError if it is none."""
        self._made: dict[tuple[str, int], _Steps] = {}  # by pass
        self._again: dict[Place, list[Kind]] = {}  # the kinds of all steps on a draw that had several
        made, again = ((), ()) if state is None else (state["made"], state["again"])
        for mark, first, last, steps in made:
            for number in range(first, last + 1):
                self._made[str(mark), number] = [[int(begin), int(end), _kind(*kind)] for begin, end, kind in steps]
        for mark, number, step, kinds in again:
            self._again[str(mark), int(number), int(step)] = [_kind(*kind) for kind in kinds]

    def __bool__(self) -> bool:
        return bool(self._made)

    def state(self) -> dict[str, Any]:
        """All of them, to be saved: passes in a row of the same steps as one."""
        made: list[list[Any]] = []
        for (mark, number), steps in self._made.items():
            if made and made[-1][0] == mark and made[-1][2] + 1 == number and made[-1][3] == steps:
                made[-1][2] = number
            else:
                made.append([mark, number, number, [list(run) for run in steps]])
        return {"made": made, "again": [[*place, list(kinds)] for place, kinds in self._again.items()]}

    @property
    def marks(self) -> set[str]:
        """What the loaders draw by; not those with a seed, as many experiments draw by one seed."""
        return {mark for mark, _ in self._made if not mark.startswith(BY_SEED)}

    def take_up(self, others: UsedDraws) -> None:
        """These steps were made, too."""
        for (mark, number), steps in others._made.items():
            for begin, end, kind in steps:
                for place in ((mark, number, step) for step in range(begin, end)):
                    if not self.holds(place):
                        self.add(place, kind)
        for place, kinds in others._again.items():
            if len(kinds) > len(self._again.get(place, ())):
                self._again[place] = list(kinds)

    @property
    def by_seed(self) -> bool:
        """Whether a loader among them draws by a seed."""
        return any(mark.startswith(BY_SEED) for mark, _ in self._made)

    @property
    def steps(self) -> int:
        """How many steps were made on draws of loaders without a seed."""
        first = sum(run[1] - run[0] for (mark, _), made in self._made.items() if mark in self.marks for run in made)
        return first + sum(len(kinds) - 1 for (mark, _, _), kinds in self._again.items() if mark in self.marks)

    def holds(self, place: Place) -> bool:
        """Whether a step was made on this draw."""
        return any(run[0] <= place[2] < run[1] for run in self._made.get(place[:2], ()))

    def add(self, place: Place, kind: Kind) -> bool:
        """A step was made on this draw. Returns whether it was not the first. (Of an order: no.)"""
        mark, number, step = place
        if mark.startswith(IN_ORDER):
            return False
        made = self._made.setdefault((mark, number), [])
        before = next((run[2] for run in made if run[0] <= step < run[1]), None)
        if before is not None:
            self._again.setdefault(place, [before]).append(kind)
            return True
        if made and made[-1][1:] == [step, kind]:
            made[-1][1] += 1
        else:
            made.append([step, step + 1, kind])
        return False

    def with_others(self, others: Iterable[UsedDraws]) -> UsedDraws:
        """All of these, each step of each."""
        found = UsedDraws()
        for draws in (self, *others):
            for (mark, number), steps in draws._made.items():
                for begin, end, kind in steps:
                    for place in ((mark, number, step) for step in range(begin, end)):
                        for each in draws._again.get(place, [kind]):
                            found.add(place, each)
        return found

    def accounted(self, history: History) -> History:
        """The history, with steps on one draw as the one release that they are."""
        apart, together = Counter[Kind](), Counter[Kind]()
        for kinds in self._again.values():
            if all(sigma for sigma, _, _ in kinds):  # (else epsilon is infinite as it is)
                apart.update(kinds)
                _, rate, truncation = kinds[0]
                together[1 / math.sqrt(sum(1 / sigma**2 for sigma, _, _ in kinds)), rate, truncation] += 1
        found: History = []
        for run in history:
            kind, steps = (run[0], run[1], truncation_in(run)), run[2]
            less = min(steps, apart[kind])
            apart[kind] -= less
            found += [run if not less else (*run[:2], steps - less, kind[2])] if less < steps else []
        return found + [(sigma, rate, steps, truncation) for (sigma, rate, truncation), steps in together.items()]


def _kind(sigma: Any, rate: Any, truncation: Any) -> Kind:
    return float(sigma), None if rate is None else float(rate), float(truncation)
