"""Is the noise sigma C at every sigma and every C, and whatever the samples' gradients are?

Noise multipliers here are no round numbers, and C lies far below the samples' gradients, among them and far above: a
sigma that is rounded, a floor, and noise that follows the gradients instead of C show.
"""

from __future__ import annotations

import numpy as np

from .law import LEVEL
from .measure import Probe
from .noise import draws, settings
from .path import noise_path
from .statistics import scale_interval
from .trainable import Batch, count

DRAWS = 1400  # of each size: a standard error of 1.9 %
MARGIN = 0.01
SHARES = ((0.073, 0.349), (0.73, 1.19))  # C over the audit's own norm; sigma
ABOVE = ((0.87, 4.49), (13.0, 0.0149), (1300.0, 1.19))  # C over an ordinary gradient's norm; sigma


def wrong_size(probe: Probe) -> str:
    """What is wrong with the noise at one of these settings; empty where nothing is. Plain words, for a sentence."""
    path = noise_path(probe)
    unit = path.std / path.norm / path.sigma * probe.divisor(1)
    found = []
    for number, (norm, sigma, batch) in enumerate(_settings(probe)):
        size = count(batch[1])
        expected = unit * norm * sigma / probe.divisor(size)
        if expected < 100 * probe.precision * float(np.sqrt(np.mean(probe.start**2))):
            continue  # rounding of the parameters would blur it
        noise = draws(probe, norm, sigma, probe.repeats(2, DRAWS), size, 3501 + 100 * number, batch)
        low, high = scale_interval(noise, 1 - LEVEL)
        if low > (1 + MARGIN) * expected or high < (1 - MARGIN) * expected:
            share = float(np.sqrt(np.mean(noise**2))) / expected
            found.append((abs(share - 1), f"at sigma = {sigma:g} and C = {norm:.3g} it is {share:.3g} times what it is "
                          f"for sigma = {path.sigma:.3g} and C = {path.norm:.3g}, in proportion"))  # fmt: skip
    return max(found)[1] if found else ""


def ordinary_norm(probe: Probe) -> float | None:
    """Norm of an ordinary sample's gradient, from where its step stops growing with C; None where it does not."""
    if "ordinary" not in probe.memo:
        probe.memo["ordinary"] = gradient_norm(probe, probe.data(1, 17))
    return probe.memo["ordinary"]  # type: ignore[no-any-return]


def gradient_norm(probe: Probe, sample: Batch) -> float | None:
    """Norm of a sample's gradient, or None: with normalised clipping, or no clipping, no C exceeds it visibly."""
    if probe.optimizer != "sgd" or probe.regime.kind not in ("linear", "switched"):
        return None
    top, higher = (float(np.linalg.norm(probe.summed(sample, norm))) for norm in (1e6, 1e8))
    if not np.isfinite(higher) or top <= 10 * probe.resolution or abs(higher / top - 1) > 0.01:
        return None
    return top / per_norm(probe)


def per_norm(probe: Probe) -> float:
    """Change of the parameters by a gradient of norm 1, times the divisor: the learning rate, or else measured."""
    regime, rate = probe.regime, getattr(probe.trainable, "learning_rate", None)
    if rate is None and regime.kind == "linear":
        return regime.changes[regime.norms.index(regime.norm)] * probe.divisor(1) / regime.norm
    return float(rate or 1.0)


def _settings(probe: Probe) -> list[tuple[float, float, Batch]]:
    norm, sigma = settings(probe)
    many, few = probe.data(8, 281), probe.data(3, 283)
    if probe.optimizer == "adam":  # whose step is linear in small gradients only
        return [(norm / 4.3, 0.349 * sigma, many), (norm * 0.73, 1.19 * sigma, few)]
    chosen = [(norm * share, sigma, many) for share, sigma in SHARES]
    typical = ordinary_norm(probe)
    if typical is not None:
        chosen += [(typical * share, sigma, few if share > 100 else many) for share, sigma in ABOVE]
    return chosen


__all__ = ["gradient_norm", "ordinary_norm", "per_norm", "wrong_size"]
