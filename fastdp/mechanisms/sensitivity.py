"""How far one record can move what a strategy encodes: the largest norm of C u over what a record may contribute.

A record takes part in the steps of a pattern w, with a vector u_t of norm at most 1 at each step t of it. With
X = C^T C, the squared norm of C u is the sum of X_ij <u_i, u_j> over i, j in w. This is at most the sum of |X_ij|, and
is equal to it for some u where no X_ij is negative. Which patterns there are, a `Participation` says.

Source: Choquette-Choo et al. 2023 (arXiv 2211.06530 and 2306.08153); Kalinin and Lampert 2024 (arXiv 2405.13763).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..accounting.participation import Participation
from .strategies import Strategy, Toeplitz, TreeAggregation, whole


def sensitivity(strategy: Strategy, steps: int, participation: Participation, first: int | None = None) -> float:
    """Return the sensitivity of a block of noise: it is exact, or an upper bound, but never too small.

    Exact are: Toeplitz encoders whose coefficients are not negative and do not increase, if steps that a record takes
    part in are at least one period apart ("separated" with another separation: a bound, since not all pairs of steps
    can be as near as some can); a fixed order with an encoder that is not negative; encoders without negative entries
    in X and without others at a distance of `separation` or more. Other Toeplitz encoders are bounded by the one with
    the coefficients max(|c_k|, |c_k+1|, ...), whose entries are at least as large; others by |X_ij|, where each step of
    a pattern is given the worst pattern around it.

    Args:
        strategy: of the block.
        steps: of the block, at least 1.
        participation: what the loader promises. That of "cyclic Poisson" and "balls in bins" is the fixed order of the
            worst place.
        first: the step of a cycle at which the block began, of which it depends how many cycles a record of kind
            "separated" takes part in. None: the worst one.

    Raises:
        ValueError: if steps is no whole number of at least 1.
        StepError: if the strategy has fewer steps.
    """
    whole("steps", steps)
    period, separation = participation.period, participation.separation
    if participation.kind != "separated":
        separation, first = period, 0
    if separation >= period:  # then it says it all: cycles add nothing
        period, first = separation, 0
    return _sensitivity(strategy, steps, period, separation, period - 1 if first is None else first % period)


@functools.lru_cache(maxsize=4096)
def _sensitivity(strategy: Strategy, steps: int, period: int, separation: int, first: int) -> float:
    return float(np.linalg.norm(strategy.encoder(steps)))
