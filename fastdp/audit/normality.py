"""Normality and independence tests for recorded noise [steps, P] that was divided by its size.

Each gives a Doubt: the p-value of "they are", corrected for everything that the test tried, and what was seen. Right
noise is doubted with probability p at most; callers act below LEVEL, so that an audit's forty tests do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from .statistics import two_tails
from .trainable import Array

LEVEL = 2e-6
QUESTIONS = 5  # of `shape`, with all tails as one: what its least p-value is multiplied by, where nothing is wrong
TAILS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
MIDDLE = 0.02  # values nearer to 0 are those that got no noise
GRID = 1 / 64  # noise may be rounded to multiples of this, or of less: a grid that no data moves tells nothing
PAIRS = 1024  # coordinates, or steps, of which every pair is compared
LAGS = 130


class Doubt(NamedTuple):
    """p_value of "these are as they should be", and what is not."""

    p_value: float
    what: str


def worst(doubts: Iterable[Doubt]) -> Doubt:
    """The doubt of the least p-value; none is Doubt(1.0, "")."""
    return min(doubts, key=lambda doubt: doubt.p_value, default=Doubt(1.0, ""))


def shape(z: Array) -> Iterator[Doubt]:
    """All draws together: the distribution function, moments, tails, and values without noise; blurred by a grid."""
    values, n = z.ravel() + np.random.default_rng(0).uniform(-GRID, GRID, z.size), z.size
    if n >= 100:
        yield Doubt(float(stats.kstest(values, "norm").pvalue), "their distribution function is not the normal one")
    if n >= 2000:
        mean = float(values.mean())
        yield Doubt(float(two_tails(stats.norm, mean * math.sqrt(n))), f"their mean is {mean:.2g}, not 0")
        yield Doubt(float(stats.skewtest(values).pvalue), f"they are skewed ({stats.skew(values):.2g})")
        excess = float(stats.kurtosis(values))
        kind = "light (a sum of a few uniform numbers, or cut off?)" if excess < 0 else "heavy (Laplace, Student?)"
        yield Doubt(
            float(stats.kurtosistest(values).pvalue), f"their tails are too {kind}: excess kurtosis {excess:.2g}"
        )
    counted = [(f"above {t:g}", values > t, stats.norm.sf(t)) for t in TAILS]
    counted += [(f"below -{t:g}", values < -t, stats.norm.sf(t)) for t in TAILS]
    counted.append((f"within {MIDDLE:g}", np.abs(values) < MIDDLE, 1 - 2 * stats.norm.sf(MIDDLE)))
    for where, there, share in counted:
        found = int(there.sum())
        p_value = float(len(counted) * two_tails(stats.binom, found, n, share))
        yield Doubt(p_value, f"{found} of {n} values are {where} standard deviations; {share * n:.3g} of a normal "
                    "distribution are")  # fmt: skip


def groups(z: Array, blocks: Sequence[tuple[str, slice]]) -> Iterator[Doubt]:
    """Coordinates and parameters: the same size of noise on all, and on their sums (noise that was centred)."""
    steps, size = z.shape
    if steps < 8:
        return
    named = [(f"parameter {name}", z[:, where]) for name, where in blocks if 0 < z[:, where].shape[1] < size]
    squares = (z**2).sum(0)
    for names, inside, number in (
        ([name for name, _ in named], [float((part**2).sum()) for _, part in named], [part.size for _, part in named]),
        ([f"coordinate {k}" for k in range(size)], squares, [steps] * size),
    ):
        if len(names) > 1:
            yield _ratio(np.array(inside), np.array(number), z, [f"on {name}" for name in names])
    for name, part in [("all coordinates", z), *named]:
        found = float((part.sum(1) ** 2).sum()) / part.shape[1]  # of so many independent draws
        p_value = (len(named) + 1) * float(two_tails(stats.chi2, found, steps))
        yield Doubt(p_value, f"the sum of it over {name} has {math.sqrt(found / steps):.3g} times the standard "
                    "deviation of independent draws")  # fmt: skip


def _ratio(inside: Array, count: Array, z: Array, where: Sequence[str]) -> Doubt:
    """Mean squares of parts over those of all else (F-test): the least p-value times their number."""
    others = np.maximum(float((z**2).sum()) - inside, 1e-300) / (z.size - count)
    ratio = inside / count / others
    p_values = len(count) * two_tails(stats.f, ratio, count, z.size - count)
    k = int(np.argmin(p_values))
    return Doubt(
        float(p_values[k]), f"{where[k]} its standard deviation is {math.sqrt(ratio[k]):.3g} times all others'"
    )


def over_steps(z: Array) -> Iterator[Doubt]:
    """Steps: the same size of noise at each, at every k-th and in the first half."""
    steps, size = z.shape
    if steps < 8:
        return
    squares, numbers = (z**2).sum(1), np.arange(steps)
    chosen = [(numbers[k : k + 1], f"at step {k + 1}") for k in numbers]
    chosen.append((numbers[: steps // 2], f"in the first {steps // 2} steps"))
    chosen += [(numbers[k::period], f"at every step k with k % {period} = {(k + 1) % period}")
               for period in range(2, min(steps // 3, 33) + 1) for k in range(period)]  # fmt: skip
    inside = np.array([squares[which].sum() for which, _ in chosen])
    yield _ratio(inside, np.array([len(which) * size for which, _ in chosen]), z, [words for _, words in chosen])


def pairs(z: Array) -> Iterator[Doubt]:
    """No two steps and no two coordinates have noise in common; none follows an earlier step's."""
    steps, size = z.shape
    for values, what in ((z, "steps {} and {} have"), (z.T, "coordinates {} and {} have")):
        if values.shape[1] >= 8:
            yield _alike(values[:PAIRS], what)
    for lag in range(1, min(steps - 4, LAGS) if steps >= 30 else 1):
        found = float((z[lag:] * z[:-lag]).sum()) / math.sqrt((steps - lag) * size)
        correlation = found / math.sqrt((steps - lag) * size)
        yield Doubt(LAGS * float(two_tails(stats.norm, found)), f"the noise of a step follows that of {lag} steps "
                    f"before (correlation {correlation:.2g})")  # fmt: skip


def _alike(values: Array, what: str) -> Doubt:
    """Largest correlation between two rows; exact for normal values."""
    count, length = values.shape
    unit = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-300)
    table = np.abs(np.triu(unit @ unit.T, 1))
    k, other = np.unravel_index(int(np.argmax(table)), table.shape)
    r = min(float(table[k, other]), 1 - 1e-12)
    t = r * math.sqrt((length - 1) / (1 - r * r))
    p_value = 2 * float(stats.t.sf(t, length - 1)) * count * (count - 1) / 2
    return Doubt(p_value, f"{what.format(int(k) + 1, int(other) + 1)} nearly the same noise (correlation {r:.2g})")
