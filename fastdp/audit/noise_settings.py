"""Tests the noise's standard deviation at many sigma and C, for batches of many sizes, and for small and huge sums.

Noise multipliers here are no round numbers, and C lies far below the samples' gradients, among them and far above: a
sigma that is rounded, a floor, and noise that follows the gradients instead of C show. Batches have from no sample to
151, and sums that are huge, ordinary and nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .measure import Probe
from .noise import deviation, draws, settings
from .noise_trajectory import noise_trajectory
from .normality import LEVEL
from .reference_samples import ordinary_norm, taken_or_not, weak
from .statistics import scale_interval
from .trainable import Batch, count, pick

DRAWS, FEWER = 1400, 500  # of each setting: standard errors of 1.9 and 3.2 %; FEWER for those of SIZES
MARGIN = 0.01
SHARES = ((0.073, 0.349), (0.73, 1.19))  # C over the audit's own norm; sigma
ABOVE = ((0.87, 4.49), (13.0, 0.0149), (1300.0, 1.19))  # C over an ordinary gradient's norm; sigma
SIZES = (0, 2, 4, 5, 12, 16, 31, 64, 151)  # samples; 1, 3 and 8 elsewhere


class Setting(NamedTuple):
    norm: float
    sigma: float
    batch: Batch
    values: int
    what: str  # of the batch, for a sentence


def wrong_size(probe: Probe) -> str:
    """What is wrong with the noise at one of these settings; empty where nothing is. Plain words, for a sentence."""
    path = noise_trajectory(probe)
    unit = path.std / path.norm / path.sigma * probe.divisor(1)
    chosen, worst, found = list(_settings(probe)), 0.0, ""
    for number, (norm, sigma, batch, values, what) in enumerate(chosen):
        expected, noise = unit * norm * sigma / probe.divisor(count(batch[1])), None
        if expected < 100 * probe.precision * deviation(probe.start):
            continue  # rounding of the parameters would blur it
        with taken_or_not():
            noise = draws(probe, norm, sigma, probe.repeats(2, values), [batch], 3501 + 100 * number)
        if noise is None:
            continue
        low, high = scale_interval(noise, 1 - LEVEL / len(chosen))
        share = deviation(noise) / expected
        if not (low > (1 + MARGIN) * expected or high < (1 - MARGIN) * expected) or abs(share - 1) < worst:
            continue
        worst = abs(share - 1)
        found = (
            f"at sigma = {sigma:g} and C = {norm:.3g}, on {what}, it is {share:.3g} times what it is for sigma = "
            f"{path.sigma:.3g} and C = {path.norm:.3g} on one sample, in proportion"
        )
    return found


def _settings(probe: Probe) -> Iterator[Setting]:
    norm, sigma = settings(probe)
    many, few = (probe.data(8, 281), "8 samples"), (probe.data(3, 283), "3 samples")
    if probe.optimizer == "adam":  # whose step is linear in small gradients only
        yield Setting(norm / 4.3, 0.349 * sigma, many[0], DRAWS, many[1])
        yield Setting(norm * 0.73, 1.19 * sigma, few[0], DRAWS, few[1])
    else:
        typical = ordinary_norm(probe)
        pairs = [(norm * share, sigma) for share, sigma in SHARES]
        pairs += [(typical * share, sigma) for share, sigma in ABOVE if typical is not None]
        for number, pair in enumerate(pairs):
            batch, what = few if number == 4 else many
            yield Setting(*pair, batch, DRAWS, what)
    most = probe.data(max(SIZES), 285)
    for size in SIZES:  # sigma: as large on the mean as with few samples
        loud = sigma * max(1.0, size / 4)
        yield Setting(norm, loud, pick(most, np.arange(size)), FEWER, f"{size or 'no'} samples")
    with contextlib.suppress(Exception):  # no labels of no gradient can be had
        yield Setting(norm, sigma, weak(probe, 0.0, 287), FEWER, "a sample without gradient")
    yield Setting(norm, sigma, probe.strong, FEWER, "a sample of a huge gradient")
