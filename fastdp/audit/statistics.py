"""Statistics that several tests share: regressions on C or B, intervals of a standard deviation, p-values of noise.

A step without noise is repeated exactly, and a residual of zero would make every slope significant, rounding's too: a
slope therefore has a floor under its standard error. The paper's tests have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from .trainable import Array


class Slope(NamedTuple):
    """The slope of a regression line, and the p-value of "it is 0"."""

    slope: float
    p_value: float


def slope(x: Sequence[float] | Array, y: Sequence[float] | Array, floor: float = 1e-3) -> Slope:
    """Regression of y on x, with a two-sided t-test.

    floor: standard error that the slope has at least, in units of y by x: what cannot be told from rounding. With
    floor=0, values that are all equal have slope 0 and p = 1.
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    if np.ptp(b) == 0:
        return Slope(0.0, 1.0)
    found = stats.linregress(a, b)
    if not floor:
        return Slope(float(found.slope), float(found.pvalue))
    error = math.hypot(float(np.nan_to_num(found.stderr, posinf=0.0)), floor)
    return Slope(float(found.slope), float(2 * stats.t.sf(abs(float(found.slope)) / error, len(a) - 2)))


def deviation(noise: Array) -> float:
    """Standard deviation of noise, whose mean is 0."""
    return float(np.sqrt(np.mean(noise**2)))


def scale_interval(values: Array, confidence: float) -> tuple[float, float]:
    """Confidence interval of the standard deviation of normal values of mean 0."""
    n, total = values.size, float(np.sum(values.astype(float) ** 2))
    tail = (1 - confidence) / 2
    return math.sqrt(total / stats.chi2.isf(tail, n)), math.sqrt(total / stats.chi2.isf(1 - tail, n))


def distances(points: Sequence[Array]) -> list[float]:
    """Distances of all pairs of points."""
    return [float(np.linalg.norm(a - b)) for a, b in combinations(points, 2)]


def two_tails(law: Any, found: Any, *parameters: Any) -> Any:
    """Two-sided p-values of numbers of a distribution of scipy.stats: twice the smaller tail, both with the number."""
    below = found - 1 if isinstance(law, stats.rv_discrete) else found
    return np.minimum(1.0, 2 * np.minimum(law.cdf(found, *parameters), law.sf(below, *parameters)))
