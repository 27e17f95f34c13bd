"""Runs of equal noised steps: their arithmetic, and what a saved state may hold of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import AccountingError
from . import History, check_options, epsilon_by, truncation_in
from . import Run as Entry

UNSAID = ""  # the maker of steps of a history that does not tell who made them


class Run(NamedTuple):
    """Steps in a row of one optimizer, with the same settings: its steps `first`, `first` + 1, ..."""

    maker: str
    first: int
    noise_multiplier: float
    sample_rate: float | None
    steps: int
    truncation: float = 0.0

    @property
    def kind(self) -> tuple[float, float | None, float]:
        """What the steps have in common."""
        return self.noise_multiplier, self.sample_rate, self.truncation


Runs = list[Run]
Kind = tuple[float, float | None, float]  # what steps have in common: noise multiplier, sample rate, truncation


def beyond(history: History, known: History) -> History:
    """The runs of a history after what it has in common with the beginning of another."""
    for place, run in enumerate(history):
        same, steps = place < len(known) and kind_of(known[place]) == kind_of(run), run[2]
        if not same or known[place][2] != steps:
            rest = steps - min(steps, known[place][2]) if same else steps
            return [entry(kind_of(run), rest)] * (rest > 0) + history[place + 1 :]
    return []


def kind_of(run: Entry) -> Kind:
    """What the steps of a run in a history have in common."""
    return run[0], run[1], truncation_in(run)


def entry(kind: Kind, steps: int) -> Entry:
    """So many steps of a kind, as a history has them."""
    sigma, rate, truncation = kind
    return (sigma, rate, steps, truncation) if truncation else (sigma, rate, steps)


def steps_within(target: float, history: History, planned: Entry, delta: float, accountant: str) -> int:
    """How many steps of a planned run may follow this history before epsilon exceeds the target."""
    kind, most = kind_of(planned), planned[2]

    def fits(steps: int) -> bool:
        return epsilon_by([*history, entry(kind, steps)], delta, accountant) <= target

    return most_within(most, fits)


def most_within(most: int, fits: Callable[[int], bool]) -> int:
    """How many steps, up to `most`, keep to a budget, as `fits` tells of a number of them."""
    if most <= 0 or fits(most):
        return max(most, 0)
    low, high = 0, most  # low fits (or is nothing), high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def sampled_at(history: History, sample_rate: float | None) -> History:
    """The history, with a sample rate where none is known. Raises AccountingError where all are known, and others."""
    if sample_rate is None:
        return history
    check_options(0.0, None, sample_rate, 0.0)
    known = [run[1] for run in history if run[1] is not None]
    others = sorted({rate for rate in known if abs(rate - sample_rate) > 1e-9})
    if others and len(known) == len(history):
        raise AccountingError(
            f"sample_rate={sample_rate:g} was given, and steps were sampled at {', '.join(f'{r:g}' for r in others)}: "
            "leave it out, the rate of all steps is known"
        )
    return [entry((run[0], sample_rate if run[1] is None else run[1], truncation_in(run)), run[2]) for run in history]


def steps_in(history: History) -> int:
    """The steps of a history."""
    return sum(run[2] for run in history)


def unsaid(history: History, first: int = 0) -> Runs:
    """The runs of a history that does not say who made them."""
    found = []
    for run in history:
        found.append(Run(UNSAID, first, run[0], run[1], run[2], truncation_in(run)))
        first += run[2]
    return found


def count_steps(runs: Iterable[Run]) -> int:
    return sum(run.steps for run in runs)


def lengthen(runs: Runs, run: Run) -> None:
    """Append steps to runs: to the last one, if they go on from it."""
    last = runs[-1] if runs else None
    if last is not None and (last.maker, last.first + last.steps, last.kind) == (run.maker, run.first, run.kind):
        runs[-1] = last._replace(steps=last.steps + run.steps)
    else:
        runs.append(run)


def merged(runs: Iterable[Run]) -> History:
    """The history that these runs are."""
    found: History = []
    for run in runs:
        if found and kind_of(found[-1]) == run.kind:
            found[-1] = entry(run.kind, found[-1][2] + run.steps)
        else:
            found.append(entry(run.kind, run.steps))
    return found


def without(runs: Runs, known: Runs) -> Runs:
    """The steps of these runs that are not among the known ones."""
    met: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for run in known:
        met.setdefault((run.maker, run.kind), []).append((run.first, run.first + run.steps))
    found = []
    for run in runs:
        place, end = run.first, run.first + run.steps
        for begin, until in sorted(met.get((run.maker, run.kind), ())):
            if until <= place or begin >= end:
                continue
            if begin > place:
                found.append(run._replace(first=place, steps=begin - place))
            place = until
        if place < end:
            found.append(run._replace(first=place, steps=end - place))
    return found


def finite(noise_multiplier: float) -> float:
    """The noise multiplier. Raises ValueError unless it is 0 or larger, and finite."""
    if not 0 <= noise_multiplier < float("inf"):
        raise ValueError(f"noise_multiplier must be 0 or larger and finite, not {noise_multiplier!r}")
    return float(noise_multiplier)


def whole(count: Any) -> int:
    """A number of things. Raises TypeError or ValueError unless it is 0, 1, 2, ..."""
    number = operator.index(count)
    if number < 0:
        raise ValueError(f"{number} is no number of steps or samples")
    return number


def checked_run(maker: Any, first: Any, *run: Any) -> Run:
    """A run that a state has. Raises TypeError or ValueError if it is none."""
    if not isinstance(maker, str):
        raise TypeError(f"{maker!r} is no maker of steps")
    run_of(*run)
    return Run(maker, operator.index(first), *run)


def run_of(sigma: Any, rate: Any, steps: Any, truncation: Any = 0.0) -> Entry:
    """A run of equal steps in a saved history. Raises ValueError if no steps can have been so."""
    run = entry((finite(float(sigma)), None if rate is None else float(rate), float(truncation)), whole(steps))
    if not (run[1] is None or 0 < run[1] <= 1) or not 0 <= truncation <= 1:
        raise ValueError(f"{run[2]} steps at a sample rate of {run[1]}, with a truncation of {truncation}")
    return run
