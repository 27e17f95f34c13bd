"""Tests that the noise follows C and sigma, by distances between models that differ only in the seed of their noise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .finding import Finding, Result, audit_test
from .measure import Probe
from .noise_record import HANDED_ON, settings
from .statistics import distances, slope
from .trainable import Lacking

INFINITE = "the parameters become infinite with noise: give norm(s)= or sigma= smaller"


@audit_test
def uncalibrated_noise(
    probe: Probe, *, norms: Sequence[float] | None = None, sigma: float | None = None, seeds: int = 4, size: int = 8,
    steps: int = 1, significance: float = 0.01,
) -> Finding:  # fmt: skip
    """Measures the mean distance between models of one start and several noise seeds, against C and against sigma.

    Calibrated noise has a standard deviation proportional to C sigma, so the distance grows linearly with both. Without
    noise (sigma = 0), the seeds must make no difference.

    norms: clipping norms (default: six, over a factor of 32); steps: batches of `size` samples each. statistic: the
    slope of log(distance) against log(C), which is 1 if the noise is calibrated; p_value: of "the distance does not
    depend on C" (regression of the distance on C).
    """
    norm, multiplier = settings(probe)
    multiplier = sigma if sigma is not None else multiplier
    chosen = list(norms) if norms is not None else [norm * 2.0**k for k in range(-3, 3)]
    batches, seeds = [probe.data(size, 11 + k) for k in range(steps)], probe.repeats(seeds, 500)

    def distance(c: float, s: float, first: int = 1) -> float:
        return float(np.mean(distances([probe.change(batches, c, s, 100 * first + k) for k in range(seeds)])))

    still = distance(chosen[-1], 0.0)
    found = [distance(c, multiplier, 2 + k) for k, c in enumerate(chosen)]
    tripled = distance(chosen[len(chosen) // 2], 3 * multiplier, 20)
    result = Result("the distance does not depend on C", norms=chosen, distances=found, sigma=multiplier,
                    without_noise=still, tripled=tripled)  # fmt: skip
    if not np.isfinite([still, tripled, *found]).all():
        raise Lacking(INFINITE)
    least = probe.resolution
    if max(found) <= 10 * least:
        text = (
            "The noise is the same whatever its seed: the generator is seeded with a constant, and whoever knows "
            "the code can take the noise off."
        )
        same = np.linalg.norm(probe.change(batches, chosen[-1], multiplier) - probe.change(batches, chosen[-1], 0.0))
        none = f"At sigma = {multiplier:.3g} there is no noise at all: {HANDED_ON}"
        return result.bug(none if same <= 10 * least else text, 0.0, 1.0, 0.5)
    if still > 0.05 * min(found) + 10 * least:
        return result.bug(
            "Without noise (sigma = 0) models of different seeds differ: dropout, data order or another source of "
            "chance moves them, or noise is added whatever sigma is. Turn the former off for the audit.",
            still / max(found), None, 0.05,
        )  # fmt: skip
    line = slope(np.log(chosen), np.log(np.maximum(found, least)))
    p_value = slope(np.asarray(chosen) / chosen[-1], np.asarray(found) / max(found)).p_value
    growth = tripled / found[len(chosen) // 2]
    if p_value > significance or not 0.7 < line.slope < 1.3:
        return result.bug(
            f"Over a factor {chosen[-1] / chosen[0]:.3g} of C the distance between models goes as C^{line.slope:.2f}, "
            "not as C: the noise is not scaled with the clipping norm. Its standard deviation on the sum must be "
            "sigma * C.",
            line.slope, p_value, 0.7,
        )  # fmt: skip
    if not 2 < growth < 4:
        return result.bug(
            f"Three times sigma gives {growth:.2f} times the distance: the noise does not follow the noise multiplier. "
            "Look for a sigma that is fixed, squared, or under a root.",
            growth, p_value, 3.0,
        )  # fmt: skip
    return result.passed(
        f"Distances between models grow in proportion to C (C^{line.slope:.2f}) and to sigma; without noise they are "
        "0.", line.slope, p_value, 0.7,
    )  # fmt: skip
