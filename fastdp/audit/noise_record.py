"""The noise of steps as the parameters show it: of single steps, and of hundreds of steps of one model.

A step of a few hundred parameters shows a few hundred draws; a tail that was cut at three standard deviations, or one
step in ten without noise, shows in a hundred thousand of them only. So a model is trained for hundreds of steps with
noise that is far above what samples contribute, and read after every step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .later_steps import memory, moves, without_memory
from .measure import NORMS, Probe
from .reference_samples import taken_or_not
from .statistics import deviation
from .trainable import Array, Batch, Lacking, optional, pick

HANDED_ON = "is noise_multiplier handed on, and the noise added before the optimizer (Adam) divides?"
FRESH = "needs a step with noise that leaves the parameters finite"
VALUES = 130_000  # draws of noise: Irwin and Hall's sum of twelve is then seven standard errors away
MOST, LEAST, FEW = 560, 64, 24  # steps; of large models, whose steps cost more
EMPTY = 0.85  # of the steps are on no sample, which is cheaper
LOUD = 97.3  # noise multiplier: what a sample contributes is a hundredth of the noise's standard deviation
QUIET = 1 / 8  # of the weights' typical size: the noise of a step, so that hundreds of them leave an ordinary model


def settings(probe: Probe) -> tuple[float, float]:
    """(C, sigma) at which noise is seen well and the optimizer answers in proportion to it.

    SGD: where samples are clipped, and sigma = 1. Adam: where C is so far below its eps that a step is linear, and
    noise that moves a parameter about as far as a sample does, over the 8 samples of a batch. Where a fixed number
    divides, C is less, for the sums of 8, but not the noise, which rounding would hide.
    """
    if probe.optimizer == "adam":
        norm = probe.clipped_norm("needs a step in which Adam is linear")
        return norm / 4, 8 * probe.regime.norm / norm / math.sqrt(probe.start.size)
    return probe.usual_norm, 1.0


def draws(probe: Probe, norm: float, sigma: float, seeds: int, batches: Sequence[Batch], first: int) -> Array:
    """Noise [seeds, P] of steps on the batches, as the parameters show it: changes with noise less those without."""
    still = probe.change(batches, norm, 0.0)
    found = np.stack([probe.change(batches, norm, sigma, first + k) - still for k in range(seeds)])
    if not np.isfinite(found).all():
        raise Lacking(FRESH)
    return found


class Record(NamedTuple):
    """Noise of single steps [steps, P], in units of the parameters, a momentum taken off; their C and sigma.

    in_turn: the steps are one run's; else each is of a new model.
    """

    noise: Array
    norm: float
    sigma: float
    in_turn: bool


@functools.lru_cache(maxsize=4)
def recorded(probe: Probe) -> Record:
    """Hundreds of steps of noise. Raises Lacking where parameters become infinite."""
    least = LEAST if probe.start.size < 300_000 else FEW
    number = min(MOST, max(least, -(-VALUES // probe.start.size)))
    lags = memory(probe) if probe.precision < 1e-4 else None
    norm, sigma = _loud(probe)
    if lags is None:
        return _of_fresh_models(probe, norm, sigma, max(LEAST, min(number // 3, MOST // 4)))
    batches = _batches(probe, norm, sigma, min(number, 200) if len(lags) else number)
    noise = moves(probe, batches, norm, sigma, 2101)
    if np.any(probe.drift):
        noise = noise - moves(probe, batches, norm, 0.0, 2101)
    if not len(noise) or not np.isfinite(noise).all():
        raise Lacking(FRESH)
    return Record(without_memory(probe, noise, lags), norm, sigma, True)


def _loud(probe: Probe) -> tuple[float, float]:
    """(C, sigma): noise far above every contribution, and a little below the weights' typical size.

    With Adam the settings of one step, since its answer bends with the noise.
    """
    norm, sigma = settings(probe)
    if probe.optimizer == "adam":
        return norm, sigma
    batch = [probe.data(1, 211)]
    seen = float(np.std(np.stack([probe.change(batch, norm, LOUD, 2801 + k) for k in range(probe.repeats(1, 100))])))
    share = QUIET * deviation(probe.start) / seen if seen > 10 * probe.resolution / probe.start.size**0.5 else 0.0
    return norm * (share or 1.0), LOUD


def _batches(probe: Probe, norm: float, sigma: float, number: int) -> list[Batch]:
    """One sample a step; none in most, where steps on none have the same noise."""
    kinds = [probe.data(1, 261 + k) for k in range(8)]
    nothing, trial, empty = pick(kinds[0], np.zeros(0, int)), probe.repeats(1, 1000), np.zeros(number, bool)
    with taken_or_not():  # else its own test says so
        none, one = (deviation(moves(probe, [b] * trial, norm, sigma, 2301)) for b in (nothing, kinds[0]))
        empty = (abs(none / one - 1) < 0.3) & (np.random.default_rng(probe.seed + 271).random(number) < EMPTY)
    return [nothing if empty[k] else kinds[k % 8] for k in range(number if empty.any() else min(number, MOST // 2))]


def _of_fresh_models(probe: Probe, norm: float, sigma: float, number: int) -> Record:
    batch = [probe.data(1, 211)]
    found = draws(probe, norm, sigma, number, batch, 2101)
    if probe.optimizer == "adam":
        still = probe.change(batch, norm)
        found = _straightened(probe, found + still) - _straightened(probe, still)
    return Record(found, norm, sigma, False)


def _straightened(probe: Probe, change: Array) -> Array:
    """The first step of Adam, u = rate * g / (|g| + eps), as rate * g / eps: as though it were linear.

    RMSprop's is bent less, u = rate * g / (a |g| + eps): what a huge gradient does tells a.
    """
    rate = optional(probe.trainable, "learning_rate", "for noise that Adam bends")
    farthest = float(np.abs(probe.change([probe.strong], max(NORMS)) - probe.drift).max())
    farthest = farthest if np.isfinite(farthest) and farthest > 0.5 * rate else rate
    return change / np.maximum(1 - np.abs(change) / farthest, 1e-3)  # type: ignore[no-any-return]
