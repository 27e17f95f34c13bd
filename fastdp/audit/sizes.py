"""Is the noise sigma C at every sigma and every C, and whatever the samples' gradients are?

Noise multipliers here are no round numbers, and C lies far below the samples' gradients, among them and far above: a
sigma that is rounded, a floor, and noise that follows the gradients instead of C show.
"""

from __future__ import annotations

import numpy as np

from .known import ordinary_norm
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
