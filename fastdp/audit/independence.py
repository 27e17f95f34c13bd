"""Is fresh noise drawn at every step and for every parameter? Reused noise can be subtracted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from .finding import BUG, OK, Finding
from .law import LEVEL, Doubt, over_steps, pairs, worst
from .measure import Probe
from .noise import draws, settings
from .path import Path, noise_path, prefixes
from .statistics import scale_interval
from .trainable import Array
from .update import echo, update

NAME = "noise_independence"
LONGEST = 1 << 18  # coordinates that are looked at for repetitions


def noise_independence(
    trainable: Any, *, seed: int = 0, steps: int = 4, seeds: int = 8, significance: float = 1e-3
) -> Finding:
    """Tests that the noise is fresh at each of many steps, of one size, and on every parameter.

    It looks at four steps and at hundreds. Over k steps, independent noise grows as sqrt(k) and reused noise as k. A
    momentum changes both, so the growth is compared with the final effect of one sample's contribution to one of the
    steps: noise that does not pass through what contributions pass through (a momentum over sums without noise) is too
    small. Then the test examines every step's noise by itself, pairs of steps and of coordinates, and the correlation
    of a step's noise with itself at every distance between coordinates, which finds parameters with the same numbers
    wherever they are.

    statistic: the growth of the noise over that of a constant gradient; p_value: of "no two stretches are alike".
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
    still = probe.change([batch] * steps, norm)
    constant = float(np.linalg.norm(still)) / first if first > 0 else float(steps)
    many = np.stack([probe.change([batch] * steps, norm, sigma, 4201 + k) - still for k in range(seeds)])
    growth = float(np.sqrt(np.mean(many**2))) / noise
    share = growth / constant
    left = echo(probe, steps)
    expected = math.sqrt(float(np.sum(left**2))) if left is not None else None
    data: dict[str, Any] = {"steps": steps, "growth": growth, "constant": constant, "norm": norm, "sigma": sigma,
                            "expected": expected}  # fmt: skip
    low, high = scale_interval(many, 1 - significance)
    margin = 1 + 4 / math.sqrt(one.size)
    if share > 0.9 or (
        expected is not None and (low > 1.05 * margin * expected * noise or high < 0.95 * expected * noise / margin)
    ):
        fresh = math.sqrt(steps) if expected is None else expected
        text = (
            f"Over {steps} steps the noise grows {growth:.2f} times; fresh noise at each step that goes the way of the "
            f"samples' contributions gives {fresh:.2f}, the same noise again {constant:.2f}. Look for a generator that "
            "is seeded within the loop, noise drawn once outside it, steps without noise, and for sums of earlier "
            "steps (a momentum) that are used again without theirs."
        )
        return Finding(NAME, BUG, text, share, None, 0.9, "", data)
    path = noise_path(probe)
    data |= {"followed": len(path.noise), "read": path.way}
    odd = _over_steps(probe, path)
    if odd.p_value < LEVEL:
        text = (
            f"The noise of {len(path.noise)} steps is not fresh and alike: {odd.what} (p = {odd.p_value:.1e}). Look "
            "for steps without noise or with less, noise that is used again, and generators that are seeded anew."
        )
        return Finding(NAME, BUG, text, share, odd.p_value, LEVEL, "noise of all steps is independent and alike", data)
    p_value, lag = _repetition(one)
    data |= {"lag": lag}
    if p_value < significance:
        text = (
            f"The noise repeats itself {lag} coordinates on (p = {p_value:.1e}): parameters share their noise. Look "
            "for a generator that is seeded anew for each parameter, or one draw that is used for several."
        )
        return Finding(NAME, BUG, text, share, p_value, significance, "no two stretches of the noise are alike", data)
    text = (
        f"Noise is fresh at every step (grows {growth:.2f} times over {steps}; {len(path.noise)} steps one by one) and "
        "for every parameter."
    )
    return Finding(NAME, OK, text, share, p_value, significance, "no two stretches of the noise are alike", data)


def _over_steps(probe: Probe, path: Path) -> Doubt:
    """Doubts of the path's noise, and of that of one run's steps where the path is of several runs."""
    if path.std == 0:
        return Doubt(0.0, "later steps have no noise")
    z = path.noise / path.std
    doubts = [*over_steps(z), *pairs(z)]
    known = update(probe)
    if path.way != "trajectory" and probe.optimizer == "sgd" and known.kind != "unknown":
        noise, stride = prefixes(probe, path.norm, path.sigma)
        if stride == 1 or known.kind == "plain":
            noise = known.undone(noise)
            std = float(np.sqrt(np.mean(noise**2)))
            doubts += [*over_steps(noise / std), *pairs(noise / std)] if std > 0 else [Doubt(0.0, "no noise")]
    return worst(doubts)


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
