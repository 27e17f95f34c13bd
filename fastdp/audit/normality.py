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

from .statistics import kolmogorov, two_tails
from .trainable import Array

LEVEL = 2e-6
TAILS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
BIN = 2e-3  # width of a bin, for values that come too often
PAIRS = 1024  # coordinates, or steps, of which every pair is compared


class Doubt(NamedTuple):
    """p_value of "these are as they should be", and what is not."""

    p_value: float
    what: str


def worst(doubts: Iterable[Doubt]) -> Doubt:
    return min(doubts, key=lambda doubt: doubt.p_value, default=Doubt(1.0, ""))


def shape(z: Array, rounding: float = 0.0) -> Iterator[Doubt]:
    """All draws together: the distribution function, moments, tails, and single values that come too often.

    rounding: of the draws, which must not be taken for values that come too often.
    """
    values = np.sort(z.ravel())
    n = values.size
    if n >= 100:
        yield Doubt(kolmogorov(values), "their distribution function is not the normal one")
    if n >= 2000:
        mean = float(values.mean())
        yield Doubt(float(two_tails(stats.norm, mean * math.sqrt(n))), f"their mean is {mean:.2g}, not 0")
        yield Doubt(float(stats.skewtest(values).pvalue), f"they are skewed ({stats.skew(values):.2g})")
        excess = float(stats.kurtosis(values))
        kind = "light (a sum of a few uniform numbers, or cut off?)" if excess < 0 else "heavy (Laplace, Student?)"
        yield Doubt(
            float(stats.kurtosistest(values).pvalue), f"their tails are too {kind}: excess kurtosis {excess:.2g}"
        )
    for side, ordered in (("above ", values), ("below -", -values[::-1])):
        found, share = n - np.searchsorted(ordered, TAILS), stats.norm.sf(TAILS)
        p_values = 2 * len(TAILS) * two_tails(stats.binom, found, n, share)
        k = int(np.argmin(p_values))
        yield Doubt(float(p_values[k]), f"{found[k]} of {n} values are {side}{TAILS[k]:g} standard deviations; "
                    f"{share[k] * n:.3g} of a normal distribution are")  # fmt: skip
    yield from _atoms(values, max(BIN, 50 * rounding))


def _atoms(values: Array, width: float) -> Iterator[Doubt]:
    """One value that many draws have: 0, where noise is left out; the edge, where it is cut off there."""
    n = values.size
    for kind, shown, least in (("", values, -4.5), ("+-", np.abs(values), 0.0)):
        edges = np.arange(least, 4.5 + width, width) - width / 2
        found = np.histogram(shown, edges)[0]
        sides = 2 if kind else 1
        expected = np.maximum(sides * np.diff(stats.norm.cdf(np.maximum(edges, least))) * n, 1e-3)
        p_values = 2 * len(found) * stats.poisson.sf(found - 1, expected * 1.02)  # 1.02: the size is an estimate
        k = int(np.argmin(p_values))
        yield Doubt(float(p_values[k]), f"{found[k]} of {n} values are {kind}{edges[k] + width / 2:.3f} standard "
                    f"deviations, {expected[k]:.3g} of a normal distribution are")  # fmt: skip
    if n < 2000 or width > BIN:
        return
    for kind, shown in (("", values), ("", -values[::-1]), ("absolute ", np.sort(np.abs(values)))):
        for most in (3, 5):
            # the gaps between the largest of n are near exponential, of rates z, 2 z, 3 z, ...
            low, gap = float(shown[-most]), float(shown[-1] - shown[-most])
            near = (max(gap, 1e-12) * low) ** (most - 1) if low > 1 else 1.0
            yield Doubt(min(1.0, 6 * near), f"the {most} largest {kind}values agree to {gap:.1g}: cut off there")


def groups(z: Array, blocks: Sequence[tuple[str, slice]]) -> Iterator[Doubt]:
    """Coordinates and stretches of them: the same size of noise on all, and on their sums (noise that was centred)."""
    steps, size = z.shape
    if steps < 8:
        return
    places = [(f"parameter {name}", *where.indices(size)[:2]) for name, where in blocks]
    named = [place for place in places if 0 < place[2] - place[1] < size]
    widths = [width for width in (1, 4, 16, 64) if width < size]
    stretches = [_stretches(width, size) for width in widths]
    squares = np.concatenate([[0.0], np.cumsum((z**2).sum(0))])
    for chosen in [named, *stretches]:
        starts, ends = _edges(chosen)
        if len(starts):
            yield _ratio(squares[ends] - squares[starts], (ends - starts) * steps, float(squares[-1]), size * steps,
                         [f"on {name}" for name, _, _ in chosen], "all")  # fmt: skip
    sums = np.concatenate([np.zeros((steps, 1)), np.cumsum(z, 1)], 1)
    for chosen in [*stretches[1:], _stretches(size, size), named]:
        starts, ends = _edges(chosen)
        if not len(starts):
            continue
        found = ((sums[:, ends] - sums[:, starts]) ** 2).sum(0) / (ends - starts)  # of so many independent draws
        p_values = len(starts) * two_tails(stats.chi2, found, steps)
        k = int(np.argmin(p_values))
        yield Doubt(float(p_values[k]), f"the sum of it over {chosen[k][0]} has {math.sqrt(found[k] / steps):.3g} "
                    "times the standard deviation of independent draws")  # fmt: skip


def _stretches(width: int, size: int) -> list[tuple[str, int, int]]:
    """(words, start, end) of overlapping stretches of so many coordinates."""
    starts = range(0, size - width + 1, max(1, width // 2))
    return [(f"coordinate {k}" if width == 1 else f"coordinates {k} to {k + width - 1}", k, k + width) for k in starts]


def _edges(places: Sequence[tuple[str, int, int]]) -> tuple[Array, Array]:
    return np.array([start for _, start, _ in places], int), np.array([end for _, _, end in places], int)


def _ratio(inside: Array, count: Array, total: float, number: int, where: Sequence[str], others: str) -> Doubt:
    """Mean squares of parts over those of all else (F-test): the least p-value times their number."""
    ratio = inside / count / np.maximum((total - inside) / (number - count), 1e-300)
    p_values = len(count) * two_tails(stats.f, ratio, count, number - count)
    k = int(np.argmin(p_values))
    words = f"{where[k]} its standard deviation is {math.sqrt(ratio[k]):.3g} times that of {others}"
    return Doubt(float(p_values[k]), words)


def over_steps(z: Array) -> Iterator[Doubt]:
    """Steps: the same size of noise at each, at every k-th and in every stretch; sizes that vary as they should."""
    steps, size = z.shape
    if steps < 8:
        return
    squares, numbers = (z**2).sum(1), np.arange(steps)
    chosen = [(numbers[k : k + 1], f"at step {k + 1}") for k in numbers]
    chosen += [(numbers[k : k + length], f"at steps {k + 1} to {k + length}")
               for length in (4, 16, 64) for k in range(0, steps - length, length)]  # fmt: skip
    chosen.append((numbers[: steps // 2], f"in the first {steps // 2} steps"))
    chosen += [(numbers[k::period], f"at every step k with k % {period} = {(k + 1) % period}")
               for period in range(2, min(steps // 3, 33) + 1) for k in range(period)]  # fmt: skip
    inside = np.array([squares[which].sum() for which, _ in chosen])
    count = np.array([len(which) * size for which, _ in chosen])
    yield _ratio(inside, count, float(squares.sum()), steps * size, [words for _, words in chosen], "the others")
    if size >= 30 and steps >= 30:
        spread = float(((squares - size) ** 2).sum() / (2 * size)) / (1 + 6 / size)  # of a square of chi-square
        p_value = float(two_tails(stats.chi2, spread, steps)) if spread < steps else 1.0
        yield Doubt(p_value, "its norm is nearly the same at every step: noise on a sphere")


def pairs(z: Array) -> Iterator[Doubt]:
    """No two steps, no two coordinates and no direction have noise in common; none follows an earlier step's."""
    steps, size = z.shape
    for values, what in ((z, "steps {} and {} have"), (z.T, "coordinates {} and {} have")):
        length = values.shape[1]
        if length >= 8:
            yield _alike(values[:PAIRS], what)
    if steps >= 30:
        for lag in range(1, min(steps - 4, 130)):
            found = float((z[lag:] * z[:-lag]).sum()) / math.sqrt((steps - lag) * size)
            correlation = found / math.sqrt((steps - lag) * size)
            yield Doubt(130 * float(two_tails(stats.norm, found)), f"the noise of a step follows that of {lag} steps "
                        f"before (correlation {correlation:.2g})")  # fmt: skip
    if min(steps, size) >= 30 and max(steps, size) >= 60:
        yield _common(z)


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


def _common(z: Array) -> Doubt:
    """Largest eigenvalue of the covariance: a part of the noise that many coordinates share (Tracy and Widom's law)."""
    small = z if z.shape[0] <= z.shape[1] else z.T
    n, p = max(z.shape), min(z.shape)
    largest = float(np.linalg.eigvalsh(small @ small.T)[-1])
    root = math.sqrt(n - 0.5) + math.sqrt(p - 0.5)
    scale = root * (1 / math.sqrt(n - 0.5) + 1 / math.sqrt(p - 0.5)) ** (1 / 3)
    s = (largest - root**2) / scale
    p_value = 1.0 if s < 2 else math.exp(-2 / 3 * s**1.5)  # the tail of the law, which is below for s > 1
    return Doubt(p_value, "coordinates share a part of their noise")
