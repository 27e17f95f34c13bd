"""The privacy of a search over settings that releases its best run alone, the number of runs being random and secret.

A run draws one of the settings at random, trains with it, and yields a model and a score. The search makes K such runs,
one after the other and all alike, and releases the best. If K is a fixed number, each run counts in full. If K is drawn
at random and stays secret, the whole search costs little more than two or three runs, however many there are:

    K from a truncated negative binomial distribution (eta > -1, 0 < gamma < 1), theorem 2 of the paper:
        e(a) + (1 + eta) ((1 - 1/b) e(b) + log(1 / gamma) / b) + log(E[K]) / (a - 1)      for every b >= 1
    K from a Poisson distribution of mean m, theorem 6 with the case K = 0 counted:
        log(exp(-m) + m exp((a - 1) (e(a) + m d))) / (a - 1),   d: of the run at epsilon log(1 + 1 / (a - 1))

Each is the search's RDP of the order a > 1, and e is that of a run: of every order the largest among the settings. The
score must be a part of what is private about the run, in which e includes it.

Source: Papernot and Steinke 2022, Hyperparameter tuning with Renyi differential privacy (arXiv 2110.03620).
"""

from __future__ import annotations

import math
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..accounting import History, rdp_of_step, truncation_in
from ..errors import AccountingError

# up to 64 as Opacus's, and beyond, where little noise is spent
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 65), 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 1024)
_MOST_RUNS = 1e6


class Runs:
    """How the number of runs is drawn."""

    mean: float

    def probabilities(self) -> Iterator[tuple[int, float]]:
        """Each number of runs, and its probability, from the smallest on."""
        raise NotImplementedError

    def rdp(self, orders: Sequence[float], of_run: Sequence[float]) -> list[float]:
        """The search's RDP at these orders, of a run's."""
        raise NotImplementedError

    def draw(self) -> int:
        """Draw a number by the operating system's generator. It must stay secret, and never be drawn again."""
        left = (secrets.randbits(64) + 0.5) / 2**64
        count = 0
        for count, chance in self.probabilities():
            left -= chance
            if left <= 0 or (chance < 1e-30 and count > self.mean):
                break
        return count


@dataclass(frozen=True)
class NegativeBinomialRuns(Runs):
    """A truncated negative binomial distribution: 1, 2, 3, ... runs.

    Args:
        mean: the expected number of runs, above 1.
        eta: the shape, above -1. 0 is logarithmic: a single run is the most likely, and some searches are long. 1 is
            geometric. Larger ones make numbers far from the mean rarer, and cost more privacy.

    Raises:
        AccountingError: if one is out of range.
    """

    mean: float
    eta: float = 0.0
    gamma: float = field(init=False)

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        if isinstance(self.eta, bool) or not isinstance(self.eta, int | float) or not -1 < self.eta <= 100:
            raise AccountingError(f"eta must lie above -1, and be 100 at most, not {self.eta!r}")
        low, high = -700.0, -1e-9  # of log(gamma): the mean falls as gamma rises
        if _mean_of(self.eta, low) < self.mean:
            raise AccountingError(
                f"eta={self.eta:g} is too near to -1 for {self.mean:g} expected runs (nearly all searches would have "
                "one): give a larger eta, such as 0, or fewer runs"
            )
        while high - low > 1e-13 * abs(low):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean_of(self.eta, middle) > self.mean else (low, middle)
        # the smaller gamma: of no less than this mean, at no less cost
        object.__setattr__(self, "gamma", math.exp(low))

    def probabilities(self) -> Iterator[tuple[int, float]]:
        spread = -math.log(self.gamma)
        if self.eta == 0:
            log_ratio = -math.log(spread)
        else:  # of eta / (gamma^-eta - 1), which may be too small for a number
            log_ratio = math.log(self.eta / -math.expm1(-self.eta * spread)) - self.eta * spread
        log_chance, count = math.log1p(-self.gamma) + log_ratio, 1
        while log_chance < -650:
            yield count, 0.0
            log_chance += math.log1p(-self.gamma) + math.log((count + self.eta) / (count + 1))
            count += 1
        chance = math.exp(log_chance)
        while True:
            yield count, chance
            chance *= (1 - self.gamma) * (count + self.eta) / (count + 1)
            count += 1

    def rdp(self, orders: Sequence[float], of_run: Sequence[float]) -> list[float]:
        spread, mean = -math.log(self.gamma), math.exp(_log_mean_of(self.eta, math.log(self.gamma)))
        others = [(1 - 1 / b) * e + spread / b for b, e in zip(orders, of_run, strict=True)]
        least = (1 + self.eta) * min([spread, *others])  # of b = 1, too
        return [e + least + math.log(mean) / (a - 1) for a, e in zip(orders, of_run, strict=True)]


@dataclass(frozen=True)
class PoissonRuns(Runs):
    """A Poisson distribution: 0, 1, 2, ... runs. Where there is none, nothing is released, and the budget is spent.

    Args:
        mean: the expected number of runs, above 1.

    Raises:
        AccountingError: if it is out of range.
    """

    mean: float

    def __post_init__(self) -> None:
        _check_mean(self.mean)
        if self.mean > 700:
            raise AccountingError("at most 700 runs can be expected of a Poisson distribution")

    def probabilities(self) -> Iterator[tuple[int, float]]:
        chance, count = math.exp(-self.mean), 0
        while True:
            yield count, chance
            count += 1
            chance *= self.mean / count

    def rdp(self, orders: Sequence[float], of_run: Sequence[float]) -> list[float]:
        found = []
        for a, e in zip(orders, of_run, strict=True):
            delta = delta_of(orders, of_run, math.log1p(1 / (a - 1)))
            exponent = (a - 1) * (e + self.mean * delta) + math.log(self.mean)
            found.append(float(np.logaddexp(exponent, -self.mean)) / (a - 1))
        return found


def tuning_epsilon(candidates: Iterable[History], delta: float, runs: Runs) -> float:
    """Compute the epsilon at delta of a search over settings which releases its best run, and its score, alone.

    It holds if each run draws its setting uniformly at random among the candidates (with replacement), `runs.draw()` is
    called once, the number of runs stays secret, and nothing of the other runs is shown or kept: no score, no time, no
    message. The score must be computed from what the run may release and from data that are not protected.

    Args:
        candidates: the history of a run with each setting, of (noise multiplier, sample rate, steps), as
            `optimizer.history` has it. It must be known before the search, and no run may spend more.
        delta: in (0, 1).
        runs: the distribution of the number of runs, `NegativeBinomialRuns` or `PoissonRuns`.

    Returns:
        The epsilon, an upper bound by RDP. It is infinite if a candidate has no noise.

    Raises:
        AccountingError: if an argument is invalid, a sample rate is missing, or a step's samples were cut to a largest
            size, which this bound does not cover.

    >>> history = [(1.0, 0.01, 1000)]
    >>> round(tuning_epsilon([history], 1e-5, NegativeBinomialRuns(mean=20, eta=0)), 1)
    3.8
    """
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise AccountingError(f"delta must lie in (0, 1), not {delta!r}")
    if not isinstance(runs, Runs):
        raise AccountingError(f"runs must be NegativeBinomialRuns or PoissonRuns, not {type(runs).__name__}")
    of_run = rdp_of(candidates)
    kept = [place for place, e in enumerate(of_run) if math.isfinite(e)]
    if not kept:
        return math.inf
    orders = [ORDERS[place] for place in kept]
    return epsilon_at(orders, runs.rdp(orders, [of_run[place] for place in kept]), delta)


def rdp_of(candidates: Iterable[History], orders: Sequence[float] = ORDERS) -> list[float]:
    """The RDP of a run whose setting is drawn among candidates of these histories, at these orders: the largest."""
    every = [list(history) for history in candidates]
    if not every or not all(every):
        raise AccountingError("give the history of each candidate: a list of (noise multiplier, sample rate, steps)")
    found = [0.0] * len(orders)
    for history in every:
        of_this = [0.0] * len(orders)
        for run in history:
            sigma, rate, steps = _run_of(run)
            if steps:
                of_this = [a + steps * b for a, b in zip(of_this, _of_step(sigma, rate, tuple(orders)), strict=True)]
        found = [max(a, b) for a, b in zip(found, of_this, strict=True)]
    return found


def _of_step(sigma: float, rate: float, orders: tuple[float, ...]) -> tuple[float, ...]:
    """Of one step; infinite where there is no number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rdp_of_step(sigma, rate, orders)
    # Opacus leaves out terms of fractional orders, and rounds: by 1.3e-13 of the log moment, MEASURED against 40 digits
    more = 0.0 if rate == 1 else 1e-12
    return tuple(float(e) + more / (a - 1) if e == e else math.inf for a, e in zip(orders, found, strict=True))


def epsilon_at(orders: Sequence[float], rdp: Sequence[float], delta: float) -> float:
    """The epsilon at delta that follows from RDP at these orders (Canonne, Kamath, Steinke 2020, proposition 12)."""
    found = (
        e + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a, e in zip(orders, rdp, strict=True)
    )
    return max(0.0, min(found))


def delta_of(orders: Sequence[float], rdp: Sequence[float], epsilon: float) -> float:
    """The delta at epsilon that follows from RDP at these orders, by the same proposition."""
    logs = (
        (a - 1) * (e - epsilon) - math.log(a - 1) + a * math.log1p(-1 / a) for a, e in zip(orders, rdp, strict=True)
    )
    return math.exp(min(0.0, *logs))


def _run_of(run: Any) -> tuple[float, float, int]:
    try:
        sigma, rate, steps = run[:3]
        cut = truncation_in(run)
        valid = sigma >= 0 and rate is not None and 0 < rate <= 1 and int(steps) == steps >= 0
    except (TypeError, ValueError, KeyError):
        raise AccountingError(
            f"{run!r} is no run of (noise multiplier, sample rate, steps); give a list of histories, one a candidate"
        ) from None
    if not valid:
        raise AccountingError(f"{run!r}: the noise multiplier must be 0 or larger, the sample rate in (0, 1]")
    if cut:
        raise AccountingError("samples cut to a largest size (max_batch_size=) are not covered: leave it out")
    return float(sigma), float(rate), int(steps)


def _check_mean(mean: Any) -> None:
    if isinstance(mean, bool) or not isinstance(mean, int | float) or not 1 < mean <= _MOST_RUNS:
        raise AccountingError(
            f"the expected number of runs must lie above 1, and be a million at most, not {mean!r}. (One run is "
            "no search.)"
        )


def _log_mean_of(eta: float, log_gamma: float) -> float:
    """log(eta (1 - gamma) / (gamma (1 - gamma^eta))), and its limit at eta = 0."""
    share = -1 / log_gamma if eta == 0 else eta / -math.expm1(eta * log_gamma)
    return math.log(-math.expm1(log_gamma)) - log_gamma + math.log(share)


def _mean_of(eta: float, log_gamma: float) -> float:
    found = _log_mean_of(eta, log_gamma)
    return math.exp(found) if found < 700 else math.inf
