"""Tests that fresh noise is drawn at every step and for every parameter: reused noise can be subtracted."""

from __future__ import annotations

import math

import numpy as np
from scipy import signal, stats

from .finding import Finding, Result, audit_test
from .later_steps import of_schedule
from .measure import Probe
from .noise_record import draws, recorded, settings
from .normality import LEVEL, over_steps, pairs, worst
from .reference_samples import steady
from .statistics import deviation, scale_interval
from .trainable import Array

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
    constant, expected = whole / first if first > 0 else float(steps), _growth_of_contributions(probe, steps)
    growth = deviation(many) / noise
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
    record = recorded(probe)
    z = record.noise / max(deviation(record.noise), 1e-300)
    result.data |= {"followed": len(z), "in_turn": record.in_turn}
    odd = worst(doubt for questions in (over_steps, pairs) for doubt in questions(z))
    if odd.p_value < LEVEL:
        result.null = "noise of all steps is independent and alike"
        return result.bug(
            f"The noise of {len(z)} steps is not fresh and alike: {odd.what} (p = {odd.p_value:.1e}). Look "
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
        f"Noise is fresh at every step (grows {growth:.2f} times over {steps}; {len(z)} steps one by one) and "
        "for every parameter."
    )
    return result.passed(text + of_schedule(probe), share, p_value, significance)


def _growth_of_contributions(probe: Probe, steps: int) -> float | None:
    """What independent contributions to each step add up to after the last, over one of a single step.

    sqrt(steps) for plain SGD. None where contributions are not proportional to C.
    """
    if not probe.answers_to_norm:
        return None
    norm, rest = steady(probe, 0.1 if probe.optimizer == "sgd" else 0.25)
    sample = probe.data(1, 241)
    base = probe.change([rest] * steps, norm)
    places = [[sample if k == place else rest for k in range(steps)] for place in range(steps)]
    apart = np.stack([probe.change(batches, norm) - base for batches in places])
    single = probe.change([sample], norm) - probe.change([rest], norm)
    size = float(single @ single)
    if not np.isfinite(apart).all() or size <= (100 * probe.resolution) ** 2:
        return None
    return float(np.linalg.norm(apart @ single / size))


def repetition(noise: Array) -> tuple[float, int]:
    """Smallest p-value of "x_i and x_(i + lag) are uncorrelated", times the number of lags, and that lag.

    noise: [seeds, P]; seeds are independent, so their correlations add up.
    """
    values = noise[:, :LONGEST]
    seeds, length = values.shape

    def correlation(x: Array) -> Array:
        return sum(signal.correlate(row, row, method="fft")[length : 2 * length - 2] for row in x)  # lags from 1 on

    enough = seeds * np.arange(length - 1, 1, -1) >= 30  # terms: where a sum of products is near normal
    if not enough.any():
        return 1.0, 0
    z = np.abs(correlation(values)) / np.sqrt(np.maximum(correlation(values**2), 1e-300)) * enough
    lag = int(np.argmax(z))
    return min(1.0, float(2 * stats.norm.sf(z[lag])) * int(enough.sum())), lag + 1
