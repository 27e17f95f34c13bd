"""Tests that a logical batch in parts (micro-batches, or workers' shares) has one sum and one noise."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from .finding import Finding, Result, audit_test
from .measure import Probe
from .noise_record import settings
from .statistics import two_tails
from .trainable import check_outcome, optional, pick

PARTS = (slice(0, 6), slice(6, 10), slice(10, 12))


@audit_test
def noise_once(probe: Probe, *, seeds: int = 4, significance: float = 1e-3) -> Finding:
    """Compares the step on 12 samples at once with the step on parts of 6, 4 and 2 of them in one logical batch.

    Without noise, both must be equal: a difference means that a part was dropped, counted twice, or clipped as a whole.
    With noise, both must have the same noise: more means that noise is added for each part.

    statistic: the standard deviation of the noise in parts over that at once; p_value: of "they are equal" (F-test).
    Needs run_parts.
    """
    run_parts = optional(probe.trainable, "run_parts", "to give a logical batch in parts")
    norm, sigma = settings(probe)
    seeds, batch = probe.repeats(seeds, 1000), probe.data(12, 79)
    parts = [pick(batch, part) for part in PARTS]

    def in_parts(multiplier: float, number: int) -> Any:
        model, seed = probe.trainable.build(probe.seed), probe.noise_seed(number)
        found = run_parts(model, [parts], clipping_norm=norm, noise_multiplier=multiplier, seed=seed)
        return check_outcome(found).parameters - probe.start

    whole, split = probe.change([batch], norm), in_parts(0.0, 1)
    size = max(float(np.linalg.norm(whole)), probe.resolution)
    error = max(float(np.linalg.norm(split - whole)) - 2 * probe.resolution, 0.0) / size
    result = Result("the noise is the same in parts and at once", norm=norm, sigma=sigma, error=error)
    if not error <= 0.01:
        share = float(np.linalg.norm(split)) / size
        return result.bug(
            f"A logical batch in three parts moves the parameters otherwise than at once (by {100 * error:.3g} %; "
            f"{share:.3g} times as far). Look for parts whose gradients are overwritten, clipped after they were added "
            "up, or each divided by its own size.", error, None, 0.01,
        )  # fmt: skip
    once = np.stack([probe.change([batch], norm, sigma, 5001 + k) - whole for k in range(seeds)])
    apart = np.stack([in_parts(sigma, 5201 + k) - split for k in range(seeds)])
    if not np.any(once):
        return result.bug("There is no noise (see uncalibrated_noise).", 0.0)
    ratio = float(np.mean(apart**2) / np.mean(once**2))
    p_value, factor = float(two_tails(stats.f, ratio, once.size, once.size)), ratio**0.5
    if p_value < significance and not 0.95 < factor < 1.05:
        return result.bug(
            f"In three parts the noise of a logical batch is {factor:.3g} times that at once (sqrt(3) = 1.73 if every "
            "part gets its own). Noise belongs to the sum of the whole batch: once, by one worker or one share each.",
            factor, p_value, significance,
        )  # fmt: skip
    text = f"A logical batch in parts is summed exactly, and gets its noise once ({factor:.2f} times that at once)."
    return result.passed(text, factor, p_value, significance)
