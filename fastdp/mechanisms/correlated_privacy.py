"""The privacy of runs with correlated noise: each block of it is a Gaussian mechanism on what the strategy encodes.

Without sampling ("fixed order", "separated") a block is one Gaussian mechanism, whose noise multiplier is the step's
over the sensitivity of the encoder. Blocks have independent noise, so they compose. In blocks of one order, whose first
steps are known, a record is at the same place of every cycle: the place counts that has the most in all of them.
The neighbouring relation is that a record's gradients are left out (its place in its batches stays empty).

With cyclic Poisson sampling and an encoder of at most as many bands as a cycle has steps, a record's contributions to
several cycles do not meet: each cycle is a Gaussian mechanism of the largest norm of a column, sampled at the record's
rate (Choquette-Choo et al. 2023, arXiv 2306.08153, theorem 4). With balls in bins, see `bins`.

Of an encoder C + E that is not quite of this kind, let P be the run with the record, Q without it, and P' with the
record encoded by C alone. In whichever steps it takes part, it is in k of them at most, so P and P' are apart by a
shift of norm at most |E| sqrt(k): they are as near as a Gaussian mechanism of that sensitivity, P <= e^e2 P' + d2 and
the reverse, and a mixture over the steps is as near. From P' <= e^e1 Q + d1 and the reverse follow

    P <= e^(e1 + e2) Q + e^e2 d1 + d2,    Q <= e^(e1 + e2) P + d1 + e^e1 d2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from ..accounting import History, epsilon_by, epsilon_of
from ..accounting.noise_search import smallest_noise
from ..accounting.participation import Block, Participation, check_participation
from ..accounting.runs import finite
from ..errors import AccountingError
from .bins import SAMPLES, epsilon_of_bins
from .encoders import Encoder, Toeplitz
from .sensitivity import by_place, participations, sensitivity

_ROUNDS = 20
_ROUNDING = 1e-12  # what is computed for coefficients that are 0 sums to less
_NEGATIVE = 2.0**-10  # the norm of negative entries of C, over its largest, that balls in bins put up with


def epsilon_of_blocks(strategy: Encoder, blocks: Iterable[Block], delta: float, accountant: str = "prv") -> float:
    """Compute the epsilon at delta of blocks of correlated noise.

    Args:
        strategy: of all blocks.
        blocks: of the run. Without blocks, epsilon is 0; one without noise makes it infinite.
        delta: in (0, 1).
        accountant: "prv", "rdp" or "gdp", as of `fastdp.accounting.epsilon_of`. What is not sampled is one Gaussian
            mechanism, whose epsilon is exact but with "rdp". Balls in bins are estimated with a confidence of 1 -
            `bins.FAILURE` whichever it is.

    Raises:
        AccountingError: if an argument is invalid, the encoder does not fit a participation that is amplified by
            sampling, or cyclic Poisson sampling and balls in bins are in one run.
    """
    epsilon_by([], delta, accountant)  # checks them
    found = [block for block in blocks if block.steps]
    if not found or not all(finite(block.noise_multiplier) for block in found):
        return math.inf if found else 0.0
    return composed(strategy, found).epsilon(delta, accountant)


class Composed(NamedTuple):
    """What blocks with noise are together.

    Attributes:
        plain: the square of the sensitivity over the noise of all that is not sampled: one Gaussian mechanism.
        sampled: of cyclic Poisson samples, as a history.
        grams: of balls in bins, as `epsilon_of_bins` takes them.
        apart: the square of how far what is encoded is off this, over the noise.
    """

    plain: float
    sampled: History
    grams: list[np.ndarray]
    apart: float

    def epsilon(self, delta: float, accountant: str, samples: int = SAMPLES) -> float:
        """At delta. samples: of balls in bins."""
        if self.grams:
            grams = [*self.grams, *([np.array([[self.plain]])] if self.plain else [])]
            return _with_rest(lambda part: epsilon_of_bins(grams, part, samples), delta, math.sqrt(self.apart))
        if not self.sampled and accountant != "rdp":
            return gaussian_epsilon(math.sqrt(self.plain), delta)
        history = [*self.sampled, *([(1 / math.sqrt(self.plain), 1.0, 1)] if self.plain else [])]
        return _with_rest(lambda part: epsilon_of(history, part, accountant), delta, math.sqrt(self.apart))


def composed(strategy: Encoder, blocks: list[Block]) -> Composed:
    """Add up blocks that have steps, and noise. The errors are those of `epsilon_of_blocks`."""
    for part in {block.participation for block in blocks}:
        check_participation(part)
    orders, rounds = _Places(), _Places()
    bins, plain, apart = [], 0.0, 0.0  # the squares of sensitivities over noise
    for block in blocks:
        _, sigma, steps, part, first = block
        if part.kind == "cyclic Poisson":
            column, rest = amplified(strategy, steps, part.period)
            apart += participations(steps, part) * (rest / sigma) ** 2
            times = -(-(steps - np.arange(min(part.period, steps))) // part.period)
            rounds.add(block, times, (sigma / column, part.rate))
        elif part.kind == "balls in bins":
            bins.append(block)
        elif part.kind == "fixed order":
            orders.add(block, by_place(strategy, steps, part.period) / sigma**2)
        else:
            plain += (sensitivity(strategy, steps, part, first) / sigma) ** 2
    plain += sum(float(most) for _, most in orders.most())
    sampled: Counter[tuple[float, float]] = Counter()
    for kind, most in rounds.most():
        sampled[kind] += int(most)
    if bins and sampled:
        raise AccountingError("cyclic Poisson sampling and balls in bins in one run: there is no accounting for both")
    grams: list[np.ndarray] = []
    if bins:
        grams, apart = _grams(strategy, bins)
    return Composed(plain, [(sigma, rate, times) for (sigma, rate), times in sampled.items()], grams, apart)


def check(strategy: Encoder, participation: Participation) -> None:
    """Raises AccountingError if a run with this participation has no accounting, as far as its first steps show."""
    if participation.kind == "cyclic Poisson":
        amplified(strategy, 1, participation.period)
    elif participation.kind == "balls in bins":
        _grams(strategy, [Block("", 1.0, strategy.known_steps, participation, 0)])


class _Places:
    """What blocks add up to at each place of a cycle, where a record is known to be at one place in all of them."""

    def __init__(self) -> None:
        self.sums: dict[Any, np.ndarray] = {}

    def add(self, block: Block, values: np.ndarray, kind: Any = None) -> None:
        """Add values, from the block's first step on; those of other kinds are apart."""
        _, _, _, part, first = block
        known = (part.mark, part.period) if part.mark and first is not None else len(self.sums)
        total = self.sums.setdefault((kind, known), np.zeros(part.period))
        np.add.at(total, ((first or 0) + np.arange(len(values))) % part.period, values)

    def most(self) -> Iterator[tuple[Any, float]]:
        """The largest value of each, with its kind."""
        for (kind, _), total in self.sums.items():
            yield kind, total.max()


def amplified(strategy: Encoder, steps: int, period: int) -> tuple[float, float]:
    """Return the largest norm of a column of the banded encoder, and a bound of the norm of the rest of the encoder.

    Raises AccountingError if it has more bands than a cycle has steps.
    """
    if strategy.bands is None or strategy.bands > period:
        bands = "no bounded number of" if strategy.bands is None else f"{strategy.bands}"
        raise AccountingError(
            f"{strategy!r} has {bands} bands, and cyclic Poisson sampling amplifies encoders of at most as many as a "
            f"cycle has steps, {period}: take fastdp.mechanisms.Banded with bands={period} or fewer, longer cycles, "
            "or a loader without sampling"
        )
    if isinstance(strategy, Toeplitz):
        column = strategy.coefficients(steps)
        rest = float(np.abs(column[strategy.bands :]).sum())
        return float(np.linalg.norm(column[: strategy.bands])), rest if rest > _ROUNDING else 0.0
    return float(np.linalg.norm(strategy.encoder(steps), axis=0).max()), 0.0


def _grams(strategy: Encoder, blocks: list[Block]) -> tuple[list[np.ndarray], float]:
    """The Gram matrices of each draw of places, over the variance of noise, and the square of what negative entries do.

    Blocks of one draw have a record at the same place, so their matrices add up.
    """
    grams: dict[tuple[str, int], np.ndarray] = {}
    apart = 0.0
    marks = [block.participation.mark.partition("|")[0] for block in blocks]  # of records that cannot be told: the same
    often = Counter(marks)
    for block, mark in zip(blocks, marks, strict=True):
        period = block.participation.period
        draw = mark, period
        if often[mark] > 1 and (block.first is None or not mark):
            what = "at which step they began" if mark else "whether they are: give Participation(mark=)"
            raise AccountingError(f"blocks of one draw of balls in bins, and it is not known {what}")
        shifts, norm, most = _shifts(strategy, block.steps, period)
        if norm > _NEGATIVE * most:
            raise AccountingError(
                f"{strategy!r} has an encoder with negative entries, and balls in bins are accounted for without such "
                "ones: take fastdp.mechanisms.Bisr or Lambda, or a loader without sampling"
            )
        if norm > _ROUNDING:
            apart += participations(block.steps, block.participation) * (norm / block.noise_multiplier) ** 2
        shifts = np.roll(shifts, block.first or 0, axis=1)
        gram = shifts.T @ shifts / block.noise_multiplier**2
        grams[draw] = grams[draw] + gram if draw in grams else gram
    return list(grams.values()), apart


def _shifts(strategy: Encoder, steps: int, period: int) -> tuple[np.ndarray, float, float]:
    """How a record at each place moves what is encoded, [steps, period], without negative entries of C; the norm of
    these entries, and the largest one."""
    if isinstance(strategy, Toeplitz):
        c = strategy.coefficients(steps)
        again = np.pad(np.maximum(c, 0), (0, -steps % period)).reshape(-1, period).cumsum(axis=0).ravel()[:steps]
        later = np.arange(steps)[:, None] - np.arange(period)
        return np.where(later >= 0, again[np.maximum(later, 0)], 0.0), float(-np.minimum(c, 0).sum()), float(c.max())
    encoder = strategy.encoder(steps)
    negative = -np.minimum(encoder, 0)
    places = np.pad(np.maximum(encoder, 0), ((0, 0), (0, -steps % period))).reshape(steps, -1, period).sum(axis=1)
    return places, math.sqrt(float(negative.sum(axis=0).max() * negative.sum(axis=1).max())), float(encoder.max())


def _with_rest(core: Callable[[float], float], delta: float, apart: float) -> float:
    """The epsilon at delta of mechanisms whose own is `core`, if what they encode is off by so much."""
    guess = core(delta)
    if not apart:
        return guess
    for _ in range(_ROUNDS):
        guess += 0.01
        if guess > 300:
            return math.inf
        part = delta / 1000 * math.exp(-guess)
        more = gaussian_epsilon(apart, part)
        found = core(min((delta - part) * math.exp(-more), delta - math.exp(guess) * part))
        if found <= guess:
            return found + more
        guess = found
    return math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon at delta of a Gaussian mechanism whose sensitivity over noise is mu.

    Source: Balle and Wang 2018 (arXiv 1805.06530), theorem 8.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """

    def excess(epsilon: float) -> float:
        inside, outside = log_ndtr(mu / 2 - epsilon / mu), log_ndtr(-mu / 2 - epsilon / mu)
        return float(inside + np.log(-np.expm1(min(epsilon + outside - inside, -1e-300)))) - math.log(delta)

    if mu > 1e20:
        return math.inf
    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    high = mu * (mu / 2 + math.sqrt(-2 * math.log(delta)))  # Chernoff's bound
    return float(brentq(excess, 0.0, high + 1e-9, xtol=1e-12 * high, rtol=1e-12))


def noise_multiplier_for_strategy(
    strategy: Encoder,
    *,
    target_epsilon: float,
    delta: float,
    steps: int,
    participation: Participation,
    accountant: str = "prv",
    before: Iterable[Block] = (),
) -> float:
    """Find the smallest noise multiplier with which a block, begun at the beginning of a cycle, spends target_epsilon.

    The other arguments are those of `Block` and `epsilon_of_blocks`. before: blocks that were made and count, too.

    Returns:
        The noise multiplier. Its epsilon is at most target_epsilon, and less by no more than 0.2 %, or 1 % for balls in
        bins, which take some seconds for each try.

    Raises:
        AccountingError: if an argument is invalid, or no multiplier below 1e6 suffices.
    """
    if not isinstance(target_epsilon, Real) or not 0 < target_epsilon < math.inf:
        raise AccountingError(f"target_epsilon must be positive and finite, not {target_epsilon!r}")

    made = list(before)

    def spent(sigma: float) -> float:
        block = Block("", sigma, steps, participation, 0)
        return epsilon_of_blocks(strategy, [*made, block], delta, accountant)

    precision = target_epsilon * (1e-2 if participation.kind == "balls in bins" else 2e-3)
    if made and (gone := epsilon_of_blocks(strategy, made, delta, accountant)) > target_epsilon - precision:
        raise AccountingError(
            f"the budget is spent: the steps so far have epsilon {gone:.4g} at delta {delta:g}, which leaves next to "
            f"nothing of target_epsilon={target_epsilon:g} for {steps} more: take a larger one"
        )
    start = max(1.0, sensitivity(strategy, steps, participation, 0))
    found = smallest_noise(spent, target_epsilon, start=start, precision=precision, nearest=1e-6, most=1e6)
    if found is None:
        raise AccountingError(
            f"no noise multiplier below 1e6 keeps to epsilon {target_epsilon:g} at delta {delta:g}: take a larger "
            "epsilon or delta, or fewer steps"
        )
    return found
