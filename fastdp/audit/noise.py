"""Does the noise follow C and sigma? Distances between models that differ only in the seed of their noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .finding import BUG, OK, Finding, not_tested
from .measure import Probe
from .statistics import mean_distance, slope
from .trainable import Array, Batch, Lacking

NAME = "uncalibrated_noise"
NULL = "the distance does not depend on C"


def settings(probe: Probe) -> tuple[float, float]:
    """(C, sigma) at which noise is seen well and the optimizer answers in proportion to it.

    SGD: where samples are clipped, and sigma = 1. Adam: where C is so far below its eps that a step is linear, and
    noise that moves a parameter about as far as a sample does, over the 8 samples of a batch.
    """
    size = probe.start.size
    if probe.optimizer == "adam":
        return probe.clipped_norm("needs a step in which Adam is linear") / 4, 8 / math.sqrt(size)
    regime = probe.regime
    return (regime.norm if regime.kind in ("linear", "switched") else 1.0), 1.0


def draws(
    probe: Probe, norm: float, sigma: float, seeds: int, size: int = 8, first: int = 3001, data: Batch | None = None
) -> Array:
    """Noise [seeds, P] of one step, as the parameters show it: a step with noise less the same step without."""
    batch = [data if data is not None else probe.data(size, 67)]
    still = probe.change(batch, norm, 0.0)
    found = np.stack([probe.change(batch, norm, sigma, first + k) - still for k in range(seeds)])
    if not np.isfinite(found).all():
        raise Lacking("needs a step with noise that leaves the parameters finite")
    return found


def uncalibrated_noise(
    trainable: Any,
    *,
    seed: int = 0,
    norms: Sequence[float] | None = None,
    sigma: float | None = None,
    seeds: int = 4,
    size: int = 8,
    steps: int = 1,
    significance: float = 0.01,
) -> Finding:
    """Measures the mean distance between models of one start and several noise seeds, against C and against sigma.

    Calibrated noise has a standard deviation proportional to C sigma, so the distance grows linearly with both. Without
    noise (sigma = 0), the seeds must make no difference.

    norms: clipping norms (default: six, over a factor of 32); steps: batches of `size` samples each. statistic: the
    slope of log(distance) against log(C), which is 1 if the noise is calibrated; p_value: of "the distance does not
    depend on C" (regression of the distance on C).
    """
    probe = Probe.of(trainable, seed)
    try:
        norm, multiplier = settings(probe)
    except Lacking as problem:
        return not_tested(NAME, str(problem))
    multiplier = sigma if sigma is not None else multiplier
    chosen = list(norms) if norms is not None else [norm * 2.0**k for k in range(-3, 3)]
    batches = [probe.data(size, 11 + k) for k in range(steps)]
    seeds = probe.repeats(seeds, 500)

    def distance(c: float, s: float, first: int = 1) -> float:
        return mean_distance([probe.change(batches, c, s, 100 * first + k) for k in range(seeds)])

    still = distance(chosen[-1], 0.0)
    distances = [distance(c, multiplier, 2 + k) for k, c in enumerate(chosen)]
    tripled = distance(chosen[len(chosen) // 2], 3 * multiplier, 20)
    data = {"norms": chosen, "distances": distances, "sigma": multiplier, "without_noise": still, "tripled": tripled}
    if not np.isfinite([still, tripled, *distances]).all():
        return not_tested(NAME, "the parameters become infinite with noise: give norms= or sigma= smaller", **data)
    least = probe.resolution
    if max(distances) <= 10 * least:
        same = np.linalg.norm(probe.change(batches, chosen[-1], multiplier) - probe.change(batches, chosen[-1], 0.0))
        if same <= 10 * least:
            text = f"At sigma = {multiplier:.3g} there is no noise at all: is noise_multiplier handed on?"
        else:
            text = (
                "The noise is the same whatever its seed: the generator is seeded with a constant, and whoever knows "
                "the code can take the noise off."
            )
        return Finding(NAME, BUG, text, 0.0, 1.0, 0.5, NULL, data)
    if still > 0.05 * min(distances) + 10 * least:
        text = (
            "Without noise (sigma = 0) models of different seeds differ: dropout, data order or another source of "
            "chance moves them, or noise is added whatever sigma is. Turn the former off for the audit."
        )
        return Finding(NAME, BUG, text, still / max(distances), None, 0.05, "", data)
    line = slope(np.log(chosen), np.log(np.maximum(distances, least)))
    p_value = slope(np.asarray(chosen) / chosen[-1], np.asarray(distances) / max(distances)).p_value
    growth = tripled / distances[len(chosen) // 2]
    if p_value > significance or not 0.7 < line.slope < 1.3:
        text = (
            f"Over a factor {chosen[-1] / chosen[0]:.3g} of C the distance between models goes as C^{line.slope:.2f}, "
            "not as C: the noise is not scaled with the clipping norm. Its standard deviation on the sum must be "
            "sigma * C."
        )
        return Finding(NAME, BUG, text, line.slope, p_value, 0.7, NULL, data)
    if not 2 < growth < 4:
        text = (
            f"Three times sigma gives {growth:.2f} times the distance: the noise does not follow the noise multiplier. "
            "Look for a sigma that is fixed, squared, or under a root."
        )
        return Finding(NAME, BUG, text, growth, p_value, 3.0, NULL, data)
    text = (
        f"Distances between models grow in proportion to C (C^{line.slope:.2f}) and to sigma; without noise they are 0."
    )
    return Finding(NAME, OK, text, line.slope, p_value, 0.7, NULL, data)
