"""How far one record can move what a strategy encodes: the largest norm of C u over what a record may contribute.

A record takes part in the steps of a pattern w, with a vector u_t of norm at most 1 at each step t of it. With
X = C^T C, the squared norm of C u is the sum of X_ij <u_i, u_j> over i, j in w. This is at most the sum of |X_ij|, and
is equal to it for some u where no X_ij is negative. Which patterns there are, a `Participation` says.

A record of kind "separated" takes part for the time number j (from 0) no earlier than at step
T(j) = max(j separation, j period - first), and two of its steps with m - 1 others between them are at least
G(m) = max(m separation, (m - 1) period + 1) apart. For a Toeplitz C whose coefficients c are not negative and do not
increase, X_ij falls with the later of both steps and with their distance. So X at T and G bounds the sum, and if
T(j) = j separation and G(m) = m separation, as of a fixed order, there is a pattern that attains it.

Source: Choquette-Choo et al. 2023 (arXiv 2211.06530 and 2306.08153); Kalinin and Lampert 2024 (arXiv 2405.13763).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..accounting.participation import Participation, check_participation
from .encoders import Encoder, Toeplitz, whole


def sensitivity(strategy: Encoder, steps: int, participation: Participation, first: int | None = None) -> float:
    """Return the sensitivity of a block of noise: it is exact, or an upper bound, but never too small.

    It is exact if no entry of C is negative and the order is fixed, or C is Toeplitz with coefficients that do not
    increase and `separation` is at least `period`; also if bands of C are no more than such a separation. Else it is an
    upper bound. With a `separation` below the period, not all pairs of steps can be as near, and as early, as some can.
    Toeplitz coefficients that are negative or increase are bounded by max(|c_k|, |c_k+1|, ...). Negative entries in X
    of other encoders are taken for positive ones, and each step of a pattern may have the worst pattern around it.

    Args:
        strategy: of the block.
        steps: of the block, at least 1.
        participation: what the loader promises. For "cyclic Poisson" and "balls in bins" this is the sensitivity
            without amplification, of the worst place.
        first: the step of a cycle at which the block began, on which depends how often a record of kind "separated"
            takes part. None: the worst one.

    Raises:
        ValueError: if steps is no whole number of at least 1.
        AccountingError: if the participation is none.
        StepError: if the strategy has fewer steps.
    """
    whole("steps", steps)
    check_participation(participation)
    period, separation = participation.period, participation.separation
    fixed = participation.kind != "separated"
    if fixed or separation >= period:  # cycles add nothing
        period = separation = period if fixed else separation
        first = 0
    return _sensitivity(strategy, steps, period, separation, period - 1 if first is None else first % period, fixed)


def participations(steps: int, participation: Participation, first: int | None = None) -> int:
    """Return how often a record takes part in so many steps at most; the arguments are those of `sensitivity`."""
    period, separation = participation.period, participation.separation
    if participation.kind != "separated" or separation >= period:
        return -(-steps // max(period, separation))
    return len(_times(steps, period, separation, period - 1 if first is None else first % period))


@functools.lru_cache(maxsize=256)
def by_place(strategy: Encoder, steps: int, period: int) -> np.ndarray:
    """Return the squares of the sensitivity of each place of a fixed order: of steps i, i + period, ... of a block.

    They are exact or bounds, as of `sensitivity`, for i below the period and the steps.
    """
    places = np.arange(min(period, steps))
    if isinstance(strategy, Toeplitz):  # place i has the rows of place 0, but for the last i
        most = sensitivity(strategy, steps, Participation("fixed order", period, period)) ** 2
        return np.minimum(
            np.cumsum(_moved(np.abs(strategy.coefficients(steps)), period) ** 2)[steps - 1 - places], most
        )
    if strategy.tree:
        return np.array([_of_tree_at(steps, period, int(place))[-1] for place in places])
    encoder = strategy.encoder(steps)
    gram = np.abs(encoder.T @ encoder)
    return np.array([gram[place::period, place::period].sum() for place in places])


def _moved(c: np.ndarray, period: int) -> np.ndarray:
    """C u for u of the steps 0, period, 2 period, ..."""
    return np.pad(c, (0, -len(c) % period)).reshape(-1, period).cumsum(axis=0).ravel()[: len(c)]


@functools.lru_cache(maxsize=4096)
def _sensitivity(strategy: Encoder, steps: int, period: int, separation: int, first: int, fixed: bool) -> float:
    times = _times(steps, period, separation, first)
    if isinstance(strategy, Toeplitz):
        gaps = _times(steps, period, separation, period - 1)
        return _of_toeplitz(strategy.coefficients(steps), times, gaps, separation, fixed)
    if fixed and strategy.tree:
        return math.sqrt(_of_trees(1 << (steps - 1).bit_length(), period)[steps - 1])
    if strategy.tree:
        return math.sqrt(_of_tree(steps, separation, len(times)))
    if fixed:
        return math.sqrt(by_place(strategy, steps, period).max())
    encoder = strategy.encoder(steps)
    gram = np.abs(encoder.T @ encoder)
    near = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps))) < separation
    around = _best(np.where(near, 0.0, gram), separation, len(times) - 1)
    return math.sqrt(float(_best(np.diagonal(gram) + around, separation, len(times))))


def _times(steps: int, period: int, separation: int, first: int) -> np.ndarray:
    """T(0), T(1), ... below steps; with first = period - 1, G(0), G(1), ..."""
    number = np.arange(-(-steps // separation))
    times = np.maximum(number * separation, number * period - first)
    return times[times < steps]


def _of_toeplitz(c: np.ndarray, times: np.ndarray, gaps: np.ndarray, separation: int, fixed: bool) -> float:
    """The smaller of two bounds. A record's steps are no earlier than `times`, and no nearer than `gaps`."""
    steps = len(c)
    energy = np.cumsum(c[:separation] ** 2)  # of a column that is cut to `separation` rows: two such are orthogonal
    alone = energy[np.minimum(steps - times, len(energy)) - 1].sum()
    orthogonal = math.sqrt(alone) + float(np.abs(c[separation:]).sum()) * math.sqrt(len(times))
    c = np.abs(c)
    if not fixed:
        c = np.maximum.accumulate(c[::-1])[::-1]
    if len(times) == -(-steps // separation) and (times == separation * np.arange(len(times))).all():
        return min(orthogonal, float(np.linalg.norm(_moved(c, separation))))
    total = 0.0
    for number, gap in enumerate(gaps[: len(times)].tolist()):
        pairs = np.cumsum(c[gap:] * c[: steps - gap])
        total += (2 if number else 1) * pairs[steps - 1 - times[number:]].sum()
    return min(orthogonal, math.sqrt(total))


@functools.lru_cache(maxsize=16)
def _of_trees(size: int, period: int) -> np.ndarray:
    """The squared sensitivity in a fixed order of 1, ..., size steps of one tree."""
    return functools.reduce(np.maximum, (_of_tree_at(size, period, place) for place in range(min(period, size))))


def _of_tree_at(size: int, period: int, place: int) -> np.ndarray:
    """The same of one place: each step adds a row to C, the number of a record's steps under its node."""
    number = np.arange(1, size + 1)
    taken = np.zeros(size + 1)
    taken[1 + place :: period] = 1
    taken = taken.cumsum()
    return np.cumsum((taken[number] - taken[number - (number & -number)]) ** 2)


def _of_tree(steps: int, separation: int, times: int) -> float:
    """A bound of the squared sensitivity: a node of k steps has at most ceil(k / separation) of a record's steps.

    The sum over nodes of the square of what a node has is at most the sum over a record's steps of the most that the
    nodes over that step may have.
    """
    number = np.arange(1, steps + 1)
    most = np.minimum(-(-(number & -number) // separation), times)
    change = np.zeros(steps + 1)
    np.add.at(change, number - (number & -number), most)
    np.add.at(change, number, -most)
    return float(_best(change.cumsum()[:steps], separation, times))


def _best(values: np.ndarray, separation: int, times: int) -> np.ndarray:
    """The largest sum, along the last axis, of at most so many values that are at least `separation` apart.

    Source: Choquette-Choo et al. 2023 (arXiv 2306.08153), algorithm 3.
    """
    steps = values.shape[-1]
    found = np.zeros((*values.shape[:-1], steps + separation))  # of the values from each place on
    for _ in range(times):
        found[..., :steps] = values + found[..., separation:]
        found = np.maximum.accumulate(found[..., ::-1], axis=-1)[..., ::-1]
    return found[..., 0]
