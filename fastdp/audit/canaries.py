"""A lower bound on epsilon from one run with canaries (Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1)
training run"): samples that are each in the batch or not by a coin of their own, and guesses which, from the model.

An (epsilon, delta)-private mechanism makes guesses hard: of r guesses, v or more are right with at most the probability
of their Theorem 5.2. Guesses that are better than that for every epsilon below some number refute those.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, stats

from .finding import Finding, Result, audit_test
from .measure import Probe
from .noise_record import FRESH
from .statistics import deviation
from .trainable import Array, Lacking, batch_of, pick


def guess_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Largest probability that an (epsilon, delta)-private mechanism lets `right` of `guesses` be right, or more.

    canaries: m, each in or out with probability 1/2; the guesser abstains on m - guesses of them. With W the number of
    right guesses of randomized response, Binomial(r, e^eps / (1 + e^eps)), it is
    P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i.
    """
    if not 0 <= right <= guesses <= canaries:
        raise ValueError("needs 0 <= right <= guesses <= canaries")
    if right == 0:
        return 1.0
    chance = 1 / (1 + math.exp(-epsilon))
    found = float(stats.binom.sf(right - 1, guesses, chance))
    if delta > 0:
        back = np.arange(1, right + 1)
        below = stats.binom.cdf(right - 1, guesses, chance) - stats.binom.cdf(right - 1 - back, guesses, chance)
        found += 2 * canaries * delta * float(np.max(below / back))
    return min(found, 1.0)


def epsilon_lower_bound(canaries: int, guesses: int, right: int, delta: float = 0.0, confidence: float = 0.95) -> float:
    """The largest epsilon that the guesses refute at that confidence; 0 where they refute none."""
    level = 1 - confidence

    def excess(epsilon: float) -> float:
        return guess_p_value(canaries, guesses, right, epsilon, delta) - level

    if excess(0.0) >= 0:
        return 0.0
    high = 1.0
    while excess(high) < 0 and high < 100:
        high *= 2
    return high if excess(high) < 0 else float(optimize.brentq(excess, 0.0, high, xtol=1e-6))


def gaussian_delta(epsilon: float, sigma: float) -> float:
    """delta at epsilon of one Gaussian mechanism of that noise multiplier (Balle and Wang 2018)."""
    a, b = 1 / (2 * sigma), epsilon * sigma
    return float(stats.norm.cdf(a - b) - math.exp(epsilon + stats.norm.logcdf(-a - b)))


def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The noise multiplier at which one Gaussian mechanism is (epsilon, delta)-private."""
    return float(optimize.brentq(lambda sigma: gaussian_delta(epsilon, sigma) - delta, 0.05, 1e4, xtol=1e-8))


@audit_test
def epsilon_bound(
    probe: Probe, *, epsilon: float = 2.0, delta: float = 1e-5, canaries: int = 64, runs: int = 4, abstain: float = 0.5,
    significance: float = 1e-3,
) -> Finding:  # fmt: skip
    """Attacks a step with noise for (epsilon, delta), and compares the refuted epsilon with the claimed one.

    Each of `runs` steps has separate coins; a coin takes part in one run only, so all runs together are as private as
    one run. The attacker knows what each canary contributes without noise, and solves by least squares for the canaries
    that were there; it abstains on the given share of canaries, those of which it is least sure. The attack sees gross
    faults (no noise, or ten times too little); noise_distribution and sensitivity measure exact constants.

    statistic: the lower bound at confidence 1 - significance; bound: the claimed epsilon; data["lower_95"]: the lower
    bound at 95 %.
    """
    sigma, base, pool = gaussian_sigma(epsilon, delta), probe.data(4, 97), probe.data(canaries, 101)
    norm = probe.usual_norm * (1.5 if probe.regime.kind == "switched" else 1.0)
    if probe.regime.kind == "flat":  # not clipped: a norm that ordinary samples exceed
        some = [probe.contribution(pick(pool, [k]), norm) for k in range(5)]
        norm = float(np.median(some)) / probe.rate / 20
    single = np.stack([probe.summed(pick(pool, [k]), norm) for k in range(canaries)])  # [m, P]
    sizes = np.linalg.norm(single, axis=1)
    if not np.isfinite(sizes).all() or sizes.max() <= 10 * probe.resolution:
        raise Lacking("needs samples with a finite contribution at the clipping norm tried")
    draw = np.random.default_rng(12345)
    inside = draw.random((runs, canaries)) < 0.5
    batches = [batch_of([base, pick(pool, np.flatnonzero(there))]) for there in inside]
    seen = [probe.change([batch], norm, sigma, 6101 + run) * probe.divisor(4 + int(inside[run].sum()))
            for run, batch in enumerate(batches)]  # fmt: skip
    if not np.isfinite(seen).all():
        raise Lacking(FRESH)
    score = _scores(single, np.stack(seen) - probe.summed(base, norm), _seen_noise(probe, norm, sigma)).ravel()
    truth = inside.ravel()
    total, guesses = len(score), max(1, round((1 - abstain) * len(score)))
    sure = np.argsort(-np.abs(score), kind="stable")[:guesses]
    right = int(((score[sure] > 0) == truth[sure]).sum())
    lower, lower_95 = (epsilon_lower_bound(total, guesses, right, delta, c) for c in (1 - significance, 0.95))
    result = Result(
        "the step is as private as it claims", canaries=total, guesses=guesses, right=right, delta=delta,
        claimed=epsilon, sigma=sigma, norm=norm, lower_95=lower_95, scores_in=score[truth].tolist(),
        scores_out=score[~truth].tolist(),
    )  # fmt: skip
    p_value = guess_p_value(total, guesses, right, epsilon, delta)
    shown = f"{right} of {guesses} guesses which canaries were there are right: epsilon is at least {lower:.2f}"
    if lower > epsilon:
        return result.bug(
            f"{shown}, but noise for {epsilon:g} at delta {delta:g} was asked for (sigma = {sigma:.3g}). The other "
            "tests say what is wrong; if they do not, look for a channel beside the gradient.", lower, p_value, epsilon,
        )  # fmt: skip
    text = f"{shown} (95 %: {lower_95:.2f}); claimed {epsilon:g} at delta {delta:g}."
    return result.passed(text, lower, p_value, epsilon)


def _seen_noise(probe: Probe, norm: float, sigma: float) -> float:
    """Standard deviation of what hides the sum: the noise that is really there, and the parameters' rounding."""
    batch = [probe.data(8, 103)]
    noise = probe.change(batch, norm, sigma, 6001) - probe.change(batch, norm, sigma, 6002)
    rounding = 2 * probe.resolution / np.sqrt(noise.size)
    return float(np.sqrt(deviation(noise) ** 2 / 2 + rounding**2)) * probe.divisor(8)


def _scores(single: Array, seen: Array, noise: float) -> Array:
    """From what each step shows a score of each canary, above 0 for "was there": least squares with a prior."""
    inner = single @ single.T
    least = 1e-10 * float(np.trace(inner)) / len(inner)
    solved = np.linalg.solve(inner + (4 * noise**2 + least) * np.eye(len(inner)), single)  # [m, P]
    return (seen - single.sum(0) / 2) @ solved.T  # type: ignore[no-any-return]
