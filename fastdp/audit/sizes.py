"""Is the noise sigma C at every sigma and every C, for batches of every size, and whatever the samples' gradients are?

Noise multipliers here are no round numbers, and C lies far below the samples' gradients, among them and far above: a
sigma that is rounded, a floor, and noise that follows the gradients instead of C show. Batches have from no sample to
151, and sums that are huge, ordinary and nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .known import ordinary_norm, weak
from .law import LEVEL
from .measure import Probe
from .noise import draws, settings
from .path import noise_path
from .statistics import scale_interval
from .trainable import AuditError, Batch, count, pick

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
    path = noise_path(probe)
    unit = path.std / path.norm / path.sigma * probe.divisor(1)
    chosen, found = list(_settings(probe)), []
    for number, (norm, sigma, batch, values, what) in enumerate(chosen):
        size = count(batch[1])
        expected = unit * norm * sigma / probe.divisor(size)
        if expected < 100 * probe.precision * float(np.sqrt(np.mean(probe.start**2))):
            continue  # rounding of the parameters would blur it
        try:
            noise = draws(probe, norm, sigma, probe.repeats(2, values), size, 3501 + 100 * number, batch)
        except AuditError:
            raise
        except Exception:  # noqa: BLE001  (a batch that the script does not take: of no sample, or soft labels)
            continue
        low, high = scale_interval(noise, 1 - LEVEL / len(chosen))
        if low > (1 + MARGIN) * expected or high < (1 - MARGIN) * expected:
            share = float(np.sqrt(np.mean(noise**2))) / expected
            found.append((abs(share - 1), f"at sigma = {sigma:g} and C = {norm:.3g}, on {what}, it is {share:.3g} "
                          f"times what it is for sigma = {path.sigma:.3g} and C = {path.norm:.3g} on one sample, in "
                          "proportion"))  # fmt: skip
    return max(found)[1] if found else ""


def _settings(probe: Probe) -> Iterator[Setting]:
    norm, sigma = settings(probe)
    many, few = probe.data(8, 281), probe.data(3, 283)
    if probe.optimizer == "adam":  # whose step is linear in small gradients only
        yield Setting(norm / 4.3, 0.349 * sigma, many, DRAWS, "8 samples")
        yield Setting(norm * 0.73, 1.19 * sigma, few, DRAWS, "3 samples")
    else:
        for share, sigma in SHARES:
            yield Setting(norm * share, sigma, many, DRAWS, "8 samples")
        typical = ordinary_norm(probe)
        for share, sigma in ABOVE if typical is not None else ():
            assert typical is not None
            batch, what = (few, "3 samples") if share > 100 else (many, "8 samples")
            yield Setting(typical * share, sigma, batch, DRAWS, what)
    yield from _of_sizes(probe)


def _of_sizes(probe: Probe) -> Iterator[Setting]:
    """Batches of many sizes, and single samples whose sum is nothing and huge."""
    norm, sigma = settings(probe)
    most = probe.data(max(SIZES), 285)
    for size in SIZES:
        loud = sigma * max(1.0, size / 4)  # as large on the mean as with few samples
        yield Setting(norm, loud, pick(most, np.arange(size)), FEWER, f"{size or 'no'} samples")
    with contextlib.suppress(Exception):  # no labels of no gradient can be had
        yield Setting(norm, sigma, weak(probe, 0.0, 287), FEWER, "a sample without gradient")
    yield Setting(norm, sigma, probe.strong, FEWER, "a sample of a huge gradient")
