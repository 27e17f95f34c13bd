"""Tests that fresh noise is drawn at every step and for every parameter: reused noise can be subtracted."""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from .finding import Finding, Result, audit_test
from .measure import Probe
from .noise import deviation, draws, settings
from .noise_trajectory import Trajectory, noise_trajectory, prefixes
from .normality import LEVEL, Doubt, over_steps, pairs, worst
from .statistics import scale_interval
from .trainable import Array
from .update import echo, update

LONGEST = 1 << 18  # coordinates that are looked at for repetitions


@audit_test
def noise_independence(probe: Probe, *, steps: int = 4, seeds: int = 8, significance: float = 1e-3) -> Finding:
    """Tests that the noise is fresh at each of many steps, of one size, and on every parameter.

    It looks at four steps and at hundreds. Over k steps, independent noise grows as sqrt(k) and reused noise as k. A
    momentum changes both, so the growth is compared with the final effect of one sample's contribution to one of the
    steps: noise that does not pass through what contributions pass through (a momentum over sums without noise) is too
    small. Then the test examines every step's noise by itself, pairs of steps and of coordinates, and the correlation
    of a step's noise with itself at every distance between coordinates, which finds parameters with the same numbers
    wherever they are.

    statistic: the growth of the noise over that of a constant gradient; p_value: of "no two stretches are alike".
    """
    norm, sigma = settings(probe)
    batch, seeds = probe.data(8, 67), probe.repeats(seeds, 2000)
    one = draws(probe, norm, sigma, seeds, [batch], 4001)
    noise = deviation(one)
    if noise == 0:
        return Result().bug("There is no noise (see uncalibrated_noise).", 0.0)
    many = draws(probe, norm, sigma, seeds, [batch] * steps, 4201)
    first, whole = (float(np.linalg.norm(probe.change([batch] * k, norm))) for k in (1, steps))
    constant, left = whole / first if first > 0 else float(steps), echo(probe, steps)
    growth, expected = deviation(many) / noise, float(np.linalg.norm(left)) if left is not None else None
    share = growth / constant
    result = Result("no two stretches of the noise are alike", steps=steps, growth=growth, constant=constant,
                    norm=norm, sigma=sigma, expected=expected)  # fmt: skip
    low, high = (end / noise for end in scale_interval(many, 1 - significance))
    margin = 1 + 4 / math.sqrt(one.size)
    if share > 0.9 or (expected and (low > 1.05 * margin * expected or high < 0.95 * expected / margin)):
        return result.bug(
            f"Over {steps} steps the noise grows {growth:.2f} times; fresh noise at each step that goes the way of the "
            f"samples' contributions gives {expected or math.sqrt(steps):.2f}, the same noise again {constant:.2f}. "
            "Look for a generator that is seeded within the loop, noise drawn once outside it, steps without noise, "
            "and for sums of earlier steps (a momentum) that are used again without theirs.", share, None, 0.9,
        )  # fmt: skip
    path = noise_trajectory(probe)
    result.data |= {"followed": len(path.noise), "read": path.way}
    odd = _over_steps(probe, path)
    if odd.p_value < LEVEL:
        result.null = "noise of all steps is independent and alike"
        return result.bug(
            f"The noise of {len(path.noise)} steps is not fresh and alike: {odd.what} (p = {odd.p_value:.1e}). Look "
            "for steps without noise or with less, noise that is used again, and generators that are seeded anew.",
            share, odd.p_value, LEVEL,
        )  # fmt: skip
    p_value, result.data["lag"] = repetition(one)
    if p_value < significance:
        return result.bug(
            f"The noise repeats itself {result.data['lag']} coordinates on (p = {p_value:.1e}): parameters share their "
            "noise. Look for a generator that is seeded anew for each parameter, or one draw that is used for several.",
            share, p_value, significance,
        )  # fmt: skip
    text = (
        f"Noise is fresh at every step (grows {growth:.2f} times over {steps}; {len(path.noise)} steps one by one) and "
        "for every parameter."
    )
    return result.passed(text, share, p_value, significance)


def _over_steps(probe: Probe, path: Trajectory) -> Doubt:
    """Doubts of the trajectory's noise, and of that of one run's steps where the trajectory is of several runs."""
    known, noises = update(probe), [path.noise]
    if path.way != "trajectory" and probe.optimizer == "sgd" and known.kind != "unknown":
        moves, stride = prefixes(probe, path)
        noises += [known.undone(moves)] if stride == 1 or known.kind == "plain" else []
    if not all(map(deviation, noises)):
        return Doubt(0.0, "later steps have no noise")
    units = [noise / deviation(noise) for noise in noises]
    return worst(doubt for z in units for doubt in (*over_steps(z), *pairs(z)))


def repetition(noise: Array) -> tuple[float, int]:
    """Smallest p-value of "x_i and x_(i + lag) are uncorrelated", times the number of lags, and that lag.

    noise: [seeds, P]; seeds are independent, so their correlations add up.
    """
    values = noise[:, :LONGEST]
    seeds, length = values.shape
    width = 1 << (2 * length - 1).bit_length()

    def correlation(x: Array) -> Array:
        spectrum = np.fft.rfft(x, width, axis=1)
        return np.fft.irfft((spectrum * spectrum.conj()).sum(0), width)[1 : length - 1]  # type: ignore[no-any-return]

    products, squares = correlation(values), correlation(values**2)
    enough = seeds * np.arange(length - 1, 1, -1) >= 30  # terms: where a sum of products is near normal
    z = np.where(enough, np.abs(products) / np.sqrt(np.maximum(squares, 1e-300)), 0.0)
    if not enough.any():
        return 1.0, 0
    lag = int(np.argmax(z))
    return min(1.0, float(2 * stats.norm.sf(z[lag])) * int(enough.sum())), lag + 1
