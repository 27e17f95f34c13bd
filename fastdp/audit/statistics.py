"""The few statistics that the tests need, with a floor under their precision: a step without noise is repeated exactly,
and a residual of zero would make every slope significant, rounding's too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from .trainable import Array


class Slope(NamedTuple):
    """A regression line, and the p-value of "its slope is 0"."""

    slope: float
    intercept: float
    error: float
    p_value: float


def slope(x: Sequence[float] | Array, y: Sequence[float] | Array, floor: float = 1e-3) -> Slope:
    """Least squares of y on x; two-sided t-test of slope 0.

    floor: standard error that the slope has at least, in units of y by x: what cannot be told from rounding.
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    if len(a) < 3 or np.ptp(a) == 0:
        raise ValueError("a slope needs three points at different places")
    found = stats.linregress(a, b)
    spread = float(found.stderr)
    error = math.hypot(spread if math.isfinite(spread) else 0.0, floor)
    t = abs(float(found.slope)) / error
    return Slope(float(found.slope), float(found.intercept), error, float(2 * stats.t.sf(t, len(a) - 2)))


def normality(values: Array) -> float:
    """p-value of "these are independent draws of N(0, 1)": Kolmogorov and Smirnov's test."""
    return float(stats.kstest(values, "norm").pvalue)


def scale_interval(values: Array, confidence: float) -> tuple[float, float]:
    """Confidence interval of the standard deviation of normal values of mean 0."""
    n, total = values.size, float(np.sum(values.astype(float) ** 2))
    tail = (1 - confidence) / 2
    return math.sqrt(total / stats.chi2.isf(tail, n)), math.sqrt(total / stats.chi2.isf(1 - tail, n))


def mean_distance(points: Sequence[Array]) -> float:
    """Mean of the distances between all pairs of points."""
    pairs = [float(np.linalg.norm(a - b)) for k, a in enumerate(points) for b in points[:k]]
    return float(np.mean(pairs))
