"""Does the accountant count what was done: every noised step, at its noise and rate; and is an empty batch a step?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .finding import BUG, OK, Finding
from .measure import Probe
from .noise import settings
from .statistics import mean_distance
from .trainable import AuditError, check_outcome, optional, pick


def accountant(trainable: Any, *, seed: int = 0, steps: int = 21) -> Finding:
    """Examines the accountant's history after a number of steps: its steps, noise multipliers and sample rate.

    statistic: steps counted over steps made. Needs history(model) of the trainable.
    """
    name = "accountant"
    probe = Probe.of(trainable, seed)
    history = optional(probe.trainable, "history", "to see what the accountant counted")
    norm, sigma = settings(probe)
    model = probe.trainable.build(seed)
    batches = [probe.data(1, 83 + k % 5) for k in range(steps)]
    check_outcome(probe.trainable.run(model, batches, clipping_norm=norm, noise_multiplier=sigma, seed=1))
    entries = _entries(history(model))
    counted = sum(number for _, _, number in entries)
    data = {"history": entries, "sigma": sigma, "steps": steps}
    if counted != steps:
        less = "epsilon is stated too small" if counted < steps else "epsilon is stated too large"
        text = f"The accountant counted {counted} steps of {steps} noised ones: {less}."
        return Finding(name, BUG, text, counted / steps, None, 1.0, data=data)
    for noise, rate, _ in entries:
        if abs(noise / sigma - 1) > 1e-3:
            text = f"The accountant was told of noise multiplier {noise:.4g}; the step was given {sigma:.4g}."
            return Finding(name, BUG, text, noise / sigma, None, 1.0, data=data)
        claimed = getattr(probe.trainable, "sample_rate", None)
        if claimed is not None and rate is not None and abs(rate / claimed - 1) > 1e-3:
            text = f"The accountant was told of sample rate {rate:.4g}; the loader's is {claimed:.4g}."
            return Finding(name, BUG, text, rate / claimed, None, 1.0, data=data)
    text = f"The accountant counted all {steps} steps, at the noise that they were given."
    return Finding(name, OK, text, counted / steps, None, 1.0, data=data)


def _entries(found: Any) -> list[tuple[float, float | None, int]]:
    try:
        return [(float(noise), None if rate is None else float(rate), int(steps)) for noise, rate, steps, *_ in found]
    except (TypeError, ValueError):
        raise AuditError("history(model) must give [(noise multiplier, sample rate, steps)]") from None


WHEN = (
    "A Poisson sample is empty now and then: the step must be noise alone, and counted. (Where no batch ever is empty: "
    "--skip empty_batch.)"
)


def empty_batch(trainable: Any, *, seed: int = 0) -> Finding:
    """Tests that a step on an empty Poisson sample is noise alone, and is counted.

    statistic: the size of the noise on an empty batch over that on a batch of one sample.
    """
    name = "empty_batch"
    probe = Probe.of(trainable, seed)
    norm, sigma = settings(probe)
    full = probe.data(4, 89)
    nothing = pick(full, np.zeros(0, int))

    def noise(batch: Any) -> float:
        with np.errstate(all="ignore"):
            return mean_distance([probe.change([batch], norm, sigma, 7001 + k) for k in range(probe.repeats(2, 200))])

    try:
        empty = noise(nothing)
    except AuditError:
        raise
    except Exception as problem:  # noqa: BLE001  (the script's own refusal)
        text = f"The script stops at an empty batch ({type(problem).__name__}: {str(problem)[:120]}). {WHEN}"
        return Finding(name, BUG, text, None)
    if not math.isfinite(empty):
        text = f"An empty batch makes the parameters NaN or infinite: a mean over no samples, perhaps. {WHEN}"
        return Finding(name, BUG, text, empty)
    ordinary = noise(pick(full, [0]))
    ratio = empty / max(ordinary, probe.resolution)
    if empty <= 10 * probe.resolution:
        text = (
            "An empty batch makes no step: whoever sees the steps sees that nobody was drawn. It must be a step of "
            "noise alone, and counted."
        )
        return Finding(name, BUG, text, ratio, None, 0.0)
    if not 0.7 < ratio < 1.4:
        text = (
            f"The noise of an empty batch is {ratio:.3g} times that of a batch of one sample: it must be the same, "
            "sigma * C on the sum, whatever was drawn. Look for noise that is scaled with the size of the batch, and "
            "for a divisor of its own for empty batches."
        )
        return Finding(name, BUG, text, ratio, None, 1.0)
    history = getattr(probe.trainable, "history", None)
    if history is not None:
        model = probe.trainable.build(seed)
        probe.trainable.run(model, [full, nothing, full], clipping_norm=norm, noise_multiplier=sigma, seed=5)
        counted = sum(number for _, _, number in _entries(history(model)))
        if counted != 3:
            text = f"Of three steps, the second on an empty batch, the accountant counted {counted}."
            return Finding(name, BUG, text, float(counted), None, 3.0)
    return Finding(name, OK, "An empty batch is a step of noise.", ratio, None)
