"""Is fresh noise drawn at every step and for every parameter? Reused noise can be subtracted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from .distribution import draws
from .finding import BUG, OK, Finding
from .measure import Probe
from .noise import settings
from .statistics import scale_interval
from .trainable import Array

NAME = "noise_independence"
LONGEST = 1 << 18  # coordinates that are looked at for repetitions


def noise_independence(
    trainable: Any, *, seed: int = 0, steps: int = 4, seeds: int = 8, significance: float = 1e-3
) -> Finding:
    """Noise of several steps adds up as independent noise does, and no stretch of one step's noise recurs.

    Over k steps independent noise grows as sqrt(k), reused noise as k (that is, as a constant gradient does, which is
    measured: momentum changes both). Within a step the noise is correlated with itself at every distance between
    coordinates, so that parameters that got the same numbers are found wherever they are.

    statistic: growth of the noise over that of a constant gradient; p_value: of "no two stretches are alike".
    """
    probe = Probe.of(trainable, seed)
    norm, sigma = settings(probe)
    batch = probe.data(8, 67)
    seeds = probe.repeats(seeds, 2000)
    one = draws(probe, norm, sigma, seeds, first=4001)
    noise = float(np.sqrt(np.mean(one**2)))
    if noise == 0:
        return Finding(NAME, BUG, "There is no noise (see uncalibrated_noise).", 0.0, None, None)
    first = float(np.linalg.norm(probe.change([batch], norm)))
    constant = float(np.linalg.norm(probe.change([batch] * steps, norm))) / first if first > 0 else float(steps)
    still = probe.change([batch] * steps, norm)
    many = np.stack([probe.change([batch] * steps, norm, sigma, 4201 + k) - still for k in range(seeds)])
    growth = float(np.sqrt(np.mean(many**2))) / noise
    share = growth / constant
    data: dict[str, Any] = {"steps": steps, "growth": growth, "constant": constant, "norm": norm, "sigma": sigma}
    plain = probe.optimizer == "sgd" and abs(constant / steps - 1) < 0.05
    low, high = scale_interval(many, 1 - significance)
    margin = 1 + 4 / math.sqrt(one.size)
    expected = noise * math.sqrt(steps)
    if share > 0.9 or (plain and (low > 1.05 * margin * expected or high < 0.95 * expected / margin)):
        text = (
            f"Over {steps} steps the noise grows {growth:.2f} times; fresh noise at each step gives "
            f"{math.sqrt(steps):.2f}, the same noise again {constant:.2f}. Look for a generator that is seeded within "
            "the loop, noise drawn once outside it, or steps without noise."
        )
        return Finding(NAME, BUG, text, share, None, 0.9, "", data)
    p_value, lag = _repetition(one)
    data |= {"lag": lag}
    if p_value < significance:
        text = (
            f"The noise repeats itself {lag} coordinates on (p = {p_value:.1e}): parameters share their noise. Look "
            "for a generator that is seeded anew for each parameter, or one draw that is used for several."
        )
        return Finding(NAME, BUG, text, share, p_value, significance, "no two stretches of the noise are alike", data)
    text = f"Noise is fresh at every step (grows {growth:.2f} times over {steps}) and for every parameter."
    return Finding(NAME, OK, text, share, p_value, significance, "no two stretches of the noise are alike", data)


def _repetition(noise: Array) -> tuple[float, int]:
    """Smallest p-value of "x_i and x_(i + lag) are uncorrelated", times the number of lags, and that lag.

    noise: [seeds, P]; seeds are independent, so their correlations add up.
    """
    values = noise[:, :LONGEST]
    length = values.shape[1]
    width = 1 << (2 * length - 1).bit_length()

    def correlation(x: Array) -> Array:
        spectrum = np.fft.rfft(x, width, axis=1)
        return np.fft.irfft((spectrum * spectrum.conj()).sum(0), width)[1 : length - 1]  # type: ignore[no-any-return]

    products, squares = correlation(values), correlation(values**2)
    seeds = values.shape[0]
    terms = seeds * np.arange(length - 1, 1, -1)
    enough = terms >= 30  # where a sum of products is near normal
    z = np.where(enough, np.abs(products) / np.sqrt(np.maximum(squares, 1e-300)), 0.0)
    if not enough.any():
        return 1.0, 0
    lag = int(np.argmax(z))
    return min(1.0, float(2 * stats.norm.sf(z[lag])) * int(enough.sum())), lag + 1
