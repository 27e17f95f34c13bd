"""Tests that the accountant counts every noised step at its noise and rate, and that an empty batch is a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .finding import Finding, Result, audit_test
from .measure import Probe
from .noise_record import settings
from .statistics import distances
from .trainable import AuditError, Batch, optional, pick

WHEN = (
    "A Poisson sample is empty now and then: the step must be noise alone, and counted. (Where no batch ever is empty: "
    "--skip empty_batch.)"
)


@audit_test
def accountant(probe: Probe, *, steps: int = 21) -> Finding:
    """Examines the accountant's history after a number of steps: its steps, noise multipliers and sample rate.

    statistic: steps counted over steps made. Needs history(model) of the trainable.
    """
    history = optional(probe.trainable, "history", "to see what the accountant counted")
    sigma, claimed = settings(probe)[1], getattr(probe.trainable, "sample_rate", None)
    entries = _counted(probe, history, [probe.data(1, 83 + k % 5) for k in range(steps)])
    counted, result = sum(number for _, _, number in entries), Result(history=entries, sigma=sigma, steps=steps)
    if counted != steps:
        less = "epsilon is stated too small" if counted < steps else "epsilon is stated too large"
        text = f"The accountant counted {counted} steps of {steps} noised ones: {less}."
        return result.bug(text, counted / steps, None, 1.0)
    for noise, rate, _ in entries:
        if abs(noise / sigma - 1) > 1e-3:
            text = f"The accountant was told of noise multiplier {noise:.4g}; the step was given {sigma:.4g}."
            return result.bug(text, noise / sigma, None, 1.0)
        if claimed is not None and rate is not None and abs(rate / claimed - 1) > 1e-3:
            text = f"The accountant was told of sample rate {rate:.4g}; the loader's is {claimed:.4g}."
            return result.bug(text, rate / claimed, None, 1.0)
    text = f"The accountant counted all {steps} steps, at the noise that they were given."
    return result.passed(text, counted / steps, None, 1.0)


def _counted(probe: Probe, history: Any, batches: list[Batch]) -> list[tuple[float, float | None, int]]:
    """What the accountant counts of a run on the batches."""
    model = probe.trainable.build(probe.seed)
    probe.run(model, batches, *settings(probe), 1)
    try:
        return [
            (float(noise), None if rate is None else float(rate), int(steps))
            for noise, rate, steps, *_ in history(model)
        ]
    except (TypeError, ValueError):
        raise AuditError("history(model) must give [(noise multiplier, sample rate, steps)]") from None


@audit_test
def empty_batch(probe: Probe) -> Finding:
    """Tests that a step on an empty Poisson sample is noise alone, and is counted.

    statistic: the size of the noise on an empty batch over that on a batch of one sample.
    """
    norm, sigma = settings(probe)
    full, result, seeds = probe.data(4, 89), Result(), range(7001, 7001 + probe.repeats(2, 200))
    nothing = pick(full, np.zeros(0, int))

    def noise(batch: Batch) -> float:
        return float(np.mean(distances([probe.change([batch], norm, sigma, seed) for seed in seeds])))

    try:
        empty = noise(nothing)
    except AuditError:
        raise
    except Exception as problem:  # noqa: BLE001  (the script's own refusal)
        return result.bug(
            f"The script stops at an empty batch ({type(problem).__name__}: {str(problem)[:120]}). {WHEN}"
        )
    if not math.isfinite(empty):
        text = f"An empty batch makes the parameters NaN or infinite: a mean over no samples, perhaps. {WHEN}"
        return result.bug(text, empty)
    ratio = empty / max(noise(pick(full, [0])), probe.resolution)
    if empty <= 10 * probe.resolution:
        return result.bug(
            "An empty batch makes no step: whoever sees the steps sees that nobody was drawn. It must be a step of "
            "noise alone, and counted.", ratio, None, 0.0,
        )  # fmt: skip
    if not 0.7 < ratio < 1.4:
        return result.bug(
            f"The noise of an empty batch is {ratio:.3g} times that of a batch of one sample: it must be the same, "
            "sigma * C on the sum, whatever was drawn. Look for noise that is scaled with the size of the batch, and "
            "for a divisor of its own for empty batches.", ratio, None, 1.0,
        )  # fmt: skip
    history = getattr(probe.trainable, "history", None)
    counted = 3 if history is None else sum(k for *_, k in _counted(probe, history, [full, nothing, full]))
    if counted != 3:
        text = f"Of three steps, the second on an empty batch, the accountant counted {counted}."
        return result.bug(text, float(counted), None, 3.0)
    return result.passed("An empty batch is a step of noise.", ratio)
