"""The smallest noise multiplier that keeps to an epsilon, in few tries: each may take seconds."""

from __future__ import annotations

import math
from collections.abc import Callable


def smallest_noise(
    spent: Callable[[float], float], target: float, *, start: float, precision: float, nearest: float, most: float
) -> float | None:
    """Return a noise multiplier whose epsilon is at most `target`; None if none up to about `most` has it.

    Args:
        spent: the epsilon of a noise multiplier, which falls with it.
        target: positive.
        start: where to begin.
        precision: the epsilon of what is found may be so much less than `target`,
        nearest: or what is found is above the smallest one by so much of it.
        most: the noise multiplier beyond which nobody looks.
    """
    low, high, below = 0.0, start, math.inf
    while (above := spent(high)) > target:
        low, high, below = high, high * 2, above
        if high > most:
            return None
    while high - low > nearest * high and target - above >= precision:
        middle = _between(low, high, below, above, target - precision / 2)
        epsilon = spent(middle)
        if epsilon > target:
            low, below = middle, epsilon
        else:
            high, above = middle, epsilon
    return high


def _between(low: float, high: float, below: float, above: float, wanted: float) -> float:
    """Where epsilon may be as wanted: on the line through the ends, in logarithms, but well within them.

    Args: epsilon is `below` at the noise multiplier `low` and `above` at `high`; infinite if unknown.
    """
    if not (above > 0 and wanted > 0):
        return (low + high) / 2
    slope = 1.0
    if low > 0 and below < math.inf:
        slope = math.log(below / above) / math.log(high / low)
    guess = high * (above / wanted) ** (1 / max(slope, 0.1))
    margin = (high - low) / 50
    return min(max(guess, low + margin), high - margin) if low > 0 else max(guess, high / 4)
