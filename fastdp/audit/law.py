"""Are these draws of N(0, 1), independent of each other? Tests of noise [steps, P] that was divided by its size.

Each gives a Doubt: the p-value of "they are", corrected for everything that the test tried, and what was seen. Right
noise is doubted with probability p at most; callers act below LEVEL, so that an audit's forty tests do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from .trainable import Array

LEVEL = 2e-6
TAILS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0)
BIN = 2e-3  # width of a bin, for values that come too often
PAIRS = 1024  # coordinates, or steps, of which every pair is compared


class Doubt(NamedTuple):
    """p_value of "these are as they should be", and what is not."""

    p_value: float
    what: str


def worst(doubts: Sequence[Doubt]) -> Doubt:
    return min(doubts, key=lambda doubt: doubt.p_value, default=Doubt(1.0, ""))


def shape(z: Array, rounding: float = 0.0) -> Iterator[Doubt]:
    """All draws together: the distribution function, moments, tails, and single values that come too often.

    rounding: of the draws, which must not be taken for values that come too often.
    """
    values = np.sort(z.ravel())
    n = values.size
    if n >= 100:
        yield Doubt(float(stats.kstest(values, "norm").pvalue), "their distribution function is not the normal one")
    if n >= 2000:
        yield Doubt(_two_sided(float(values.mean()) * math.sqrt(n)), f"their mean is {values.mean():.2g}, not 0")
        yield Doubt(float(stats.skewtest(values).pvalue), f"they are skewed ({stats.skew(values):.2g})")
        excess = float(stats.kurtosis(values))
        kind = "light (a sum of a few uniform numbers, or cut off?)" if excess < 0 else "heavy (Laplace, Student?)"
        yield Doubt(
            float(stats.kurtosistest(values).pvalue), f"their tails are too {kind}: excess kurtosis {excess:.2g}"
        )
    for side, sorted_values in (("above", values), ("below -", -values[::-1])):
        for edge in TAILS:
            share, found = float(stats.norm.sf(edge)), n - int(np.searchsorted(sorted_values, edge))
            p_value = 2 * len(TAILS) * 2 * min(_binomial(found, n, share), 0.5)
            yield Doubt(p_value, f"{found} of {n} values are {side} {edge:g} standard deviations".replace("- ", "-")
                        + f"; {share * n:.3g} of a normal distribution are")  # fmt: skip
    yield from _atoms(values, max(BIN, 50 * rounding))


def _binomial(found: int, n: int, share: float) -> float:
    """The smaller tail's probability."""
    return float(min(stats.binom.cdf(found, n, share), stats.binom.sf(found - 1, n, share)))


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
    if n >= 2000 and width == BIN:
        size = np.sort(np.abs(values))
        for kind, shown in (("", values), ("", -values[::-1]), ("absolute ", size)):
            for most in (3, 5):
                # the gaps between the largest of n are near exponential, of rates z, 2 z, 3 z, ...
                low, gap = float(shown[-most]), float(shown[-1] - shown[-most])
                near = (max(gap, 1e-12) * low) ** (most - 1) if low > 1 else 1.0
                yield Doubt(min(1.0, 6 * near), f"the {most} largest {kind}values agree to {gap:.1g}: cut off there")


def groups(z: Array, blocks: Sequence[tuple[str, slice]]) -> Iterator[Doubt]:
    """Coordinates and stretches of them: the same size of noise on all, and on their sums (noise that was centred)."""
    steps, size = z.shape
    squares, total = (z**2).sum(0), float((z**2).sum())
    if steps < 8:
        return
    named = [(f"parameter {name}", where) for name, where in blocks if 0 < _length(where, size) < size]
    if named:
        starts = np.array([where.start for _, where in named])
        ends = np.array([min(where.stop, size) for _, where in named])
        yield _sizes(squares, total, steps, starts, ends, [name for name, _ in named])
    widths = [width for width in (1, 4, 16, 64) if width < size]
    for width in widths:
        starts = np.arange(0, size - width + 1, max(1, width // 2))
        yield _sizes(squares, total, steps, starts, starts + width, None)
    sums = np.concatenate([np.zeros((steps, 1)), np.cumsum(z, 1)], 1)
    for width in (*widths[1:], size):
        starts = np.arange(0, size - width + 1, max(1, width // 2))
        yield _sums(sums, starts, starts + width, None)
    if named:
        starts = np.array([where.start for _, where in named])
        ends = np.array([min(where.stop, size) for _, where in named])
        yield _sums(sums, starts, ends, [name for name, _ in named])


def _length(where: slice, size: int) -> int:
    return len(range(*where.indices(size)))


def _sizes(squares: Array, total: float, steps: int, starts: Array, ends: Array, names: list[str] | None) -> Doubt:
    """Mean squares of stretches against those of all else (F-test), the least p-value times their number."""
    before = np.concatenate([[0.0], np.cumsum(squares)])
    inside = before[ends] - before[starts]
    count = (ends - starts) * steps
    ratio, p_values = _ratios(inside, count, total, squares.size * steps)
    k = int(np.argmin(p_values))
    where = names[k] if names else _stretch(int(starts[k]), int(ends[k]))
    return Doubt(
        float(p_values[k]), f"on {where} its standard deviation is {math.sqrt(ratio[k]):.3g} times that of all"
    )


def _ratios(inside: Array, count: Array, total: float, number: int) -> tuple[Array, Array]:
    """Mean squares of parts over those of all else, and p-values of "they are equal", times the parts' number."""
    ratio = inside / count / np.maximum((total - inside) / (number - count), 1e-300)
    tails = np.minimum(stats.f.sf(ratio, count, number - count), stats.f.cdf(ratio, count, number - count))
    return ratio, 2 * len(count) * tails


def _sums(sums: Array, starts: Array, ends: Array, names: list[str] | None) -> Doubt:
    """Sums over stretches have the variance of so many independent draws."""
    steps = sums.shape[0]
    found = ((sums[:, ends] - sums[:, starts]) ** 2).sum(0) / (ends - starts)
    p_values = 2 * len(starts) * np.minimum(stats.chi2.sf(found, steps), stats.chi2.cdf(found, steps))
    k = int(np.argmin(p_values))
    where = names[k] if names else _stretch(int(starts[k]), int(ends[k]))
    size = math.sqrt(found[k] / steps)
    return Doubt(float(p_values[k]), f"the sum of it over {where} has {size:.3g} times the standard deviation of "
                 "independent draws")  # fmt: skip


def _stretch(start: int, end: int) -> str:
    return f"coordinate {start}" if end == start + 1 else f"coordinates {start} to {end - 1}"


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
    ratio, p_values = _ratios(inside, count, float(squares.sum()), steps * size)
    k = int(np.argmin(p_values))
    yield Doubt(float(p_values[k]), f"{chosen[k][1]} its standard deviation is {math.sqrt(ratio[k]):.3g} times that of "
                "the others")  # fmt: skip
    if size >= 30 and steps >= 30:
        spread = float(((squares - size) ** 2).sum() / (2 * size)) / (1 + 6 / size)  # of a square of chi-square
        p_value = 2 * min(float(stats.chi2.sf(spread, steps)), float(stats.chi2.cdf(spread, steps)))
        yield Doubt(p_value if spread < steps else 1.0, "its norm is nearly the same at every step: noise on a sphere")


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
            yield Doubt(130 * _two_sided(found), f"the noise of a step follows that of {lag} steps before (correlation "
                        f"{found / math.sqrt((steps - lag) * size):.2g})")  # fmt: skip
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


def _two_sided(z: float) -> float:
    return float(2 * stats.norm.sf(abs(z)))
