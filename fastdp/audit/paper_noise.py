"""The tests of noise of "Finding private bugs" as the paper describes them: distances of models after ten steps, and
Kolmogorov and Smirnov's test of one step of SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .finding import BUG, OK, UNDECIDED, Finding, not_tested
from .measure import Probe
from .paper_searches import TRIALS, clipping_norm, noise_multiplier
from .paper_steps import RIGHT, WRONG, judged, p_of_slope, positive
from .statistics import normality
from .trainable import Array, AuditError, Lacking, optional

COUNT, WIDTH = 10, 10.0  # values of C, evenly from C* to 10 C*
CONTROL = 2  # models at sigma = 0 for each C: they are equal, unless chance moves them


def paper_uncalibrated_noise(
    trainable: Any, *, seed: int = 0, norm: float | None = None, sigma: float | None = None, models: int = 5,
    steps: int = 10, size: int = 8, warm_up: int | None = None, trials: int = TRIALS,
) -> Finding:  # fmt: skip
    """Measures all distances between 5 models after 10 steps, at 10 values of C from C* to 10 C* (the paper's).

    C* and sigma* are found as in the paper's Appendix B, unless norm= and sigma= are given. The models have one start
    and the same batches. The same steps without noise are the control.

    statistic: the slope of the distance against C; p_value: of slope 0 (t-test over all pairs). ok: p < 0.01; bug:
    p > 0.99; undecided between, if the control's distances depend on C, or if C changes a step without noise, because
    then gradients are clipped.
    """
    name, probe = "paper_uncalibrated_noise", Probe.of(trainable, seed)
    for what, value, least in (("models", models, 2), ("steps", steps, 1), ("size", size, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise AuditError(f"{what} must be a whole number of at least {least}, not {value!r}")
    begun = probe.steps
    start = positive("norm", [norm], 1)[0] if norm is not None else clipping_norm(
        probe, size=size, warm_up=warm_up, trials=trials).value  # fmt: skip
    if sigma is None:
        sigma, found = _sigma(probe, start, size, warm_up, trials)
        if found is not None:
            return found
    else:
        sigma = positive("sigma", [sigma], 1)[0]
    searched = probe.steps - begun
    norms = [float(value) for value in np.linspace(start, WIDTH * start, COUNT)]
    batches = [probe.data(size, 11 + k) for k in range(steps)]

    def ends(c: float, s: float, many: int, first: int) -> list[Array]:
        return [probe.change(batches, c, s, first + k) for k in range(many)]

    still = [ends(c, 0.0, CONTROL, 601 + 10 * k) for k, c in enumerate(norms)]
    distances = [_pairs(ends(c, sigma, models, 801 + 10 * k)) for k, c in enumerate(norms)]
    control = [_pairs(moved) for moved in still]
    clipped = max(float(np.linalg.norm(moved[0] - still[-1][0])) for moved in still)
    means = [float(np.mean(pairs)) for pairs in distances]
    quiet = [float(np.mean(pairs)) for pairs in control]
    data = {
        "norms": norms, "distances": means, "pairs": distances, "sigma": sigma, "control": quiet,
        "without_noise": float(np.mean(quiet)), "clipped": clipped, "search_steps": searched,
        "steps": probe.steps - begun,
    }  # fmt: skip
    if not np.isfinite([*means, clipped, *quiet]).all():
        return not_tested(name, "the parameters become infinite with noise: give norm= or sigma= smaller", **data)
    slope, p = _slope(norms, distances)
    data["p_of_means"] = p_of_slope(norms, means)[1]
    data["p_of_control"] = p_control = _slope(norms, control)[1]
    null = "the distance does not depend on C"
    moved = float(np.linalg.norm(still[-1][0]))
    if clipped > 1e-4 * moved + 10 * probe.resolution:
        text = (
            f"Without noise, models at C from {norms[0]:.3g} to {norms[-1]:.3g} end {clipped / moved:.2g} of their way "
            "apart: gradients are clipped, and the distance may depend on C by that. Give a larger norm=."
        )
        return Finding(name, UNDECIDED, text, slope, p, WRONG, null, data)
    if p_control < RIGHT:
        text = f"The distance depends on C without noise, too (p = {p_control:.2g}): chance or clipping moves models."
        return Finding(name, UNDECIDED, text, slope, p, WRONG, null, data)
    verdict, text = judged(p, "the distance between models", "C", "the noise does not follow the clipping norm, or "
                            "there is none")  # fmt: skip
    if verdict == OK and slope < 0:
        verdict, text = UNDECIDED, f"The distance between models falls with C (p = {p:.2g}), as no noise should."
    return Finding(name, verdict, text, slope, p, WRONG, null, data)


def _sigma(probe: Probe, norm: float, size: int, warm_up: int | None, trials: int) -> tuple[float, Finding | None]:
    """sigma*; 1 where there is no noise to be seen, which the distances then say."""
    try:
        return noise_multiplier(probe, norm, size=size, warm_up=warm_up, trials=trials).value, None
    except Lacking as problem:
        if "no difference" in str(problem):
            return 1.0, None
        return 1.0, not_tested("paper_uncalibrated_noise", str(problem))


def _pairs(points: Sequence[Array]) -> list[float]:
    """Distances of all pairs."""
    return [float(np.linalg.norm(a - b)) for k, a in enumerate(points) for b in points[:k]]


def _slope(norms: Sequence[float], distances: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The regression of all pairs' distances on C."""
    where = [norm for norm, pairs in zip(norms, distances, strict=True) for _ in pairs]
    return p_of_slope(where, [distance for pairs in distances for distance in pairs])


def paper_noise_distribution(
    trainable: Any, *, seed: int = 0, norm: float | None = None, sigma: float = 1.0, size: int = 8
) -> Finding:
    """Tests a step with noise less the step without it against (eta / B) N(0, (C sigma)^2), by Kolmogorov and Smirnov.

    This is the paper's Appendix C, which is for plain SGD only. C is 3 C*, unless norm= is given: at C = 1, which C*
    may be, noise that does not follow C is right by chance.

    statistic: the standard deviation over what it must be; p_value: of that distribution. bug: p < 0.01 (the paper
    names no level), so one right step in a hundred is called a bug.
    """
    name, probe = "paper_noise_distribution", Probe.of(trainable, seed)
    sigma = positive("sigma", [sigma], 1)[0]
    if probe.optimizer != "sgd":
        return not_tested(name, "is for SGD only: Adam divides its step, noise and all, by its own size")
    optional(probe.trainable, "learning_rate", "for the noise that a step must have")
    begun = probe.steps
    c = positive("norm", [norm], 1)[0] if norm is not None else 3 * clipping_norm(probe, size=size, warm_up=0).value
    searched, batch = probe.steps - begun, [probe.data(size, 67)]
    noise = probe.change(batch, c, sigma, 971) - probe.change(batch, c, 0.0, 971)
    steps = probe.steps - begun
    expected = probe.gain * c * sigma / probe.divisor(size)
    data = {"norm": c, "sigma": sigma, "expected": expected, "search_steps": searched, "steps": steps}
    if not np.isfinite(noise).all():
        return not_tested(name, "the parameters become infinite with noise: give norm= or sigma= smaller", **data)
    ratio = float(np.sqrt(np.mean(noise**2))) / expected
    if 100 * probe.resolution > expected * math.sqrt(noise.size):
        return Finding(name, UNDECIDED, "The rounding of the parameters hides the noise: give a larger norm=.", ratio,
                       None, RIGHT, "", data)  # fmt: skip
    p, null = normality(noise / expected), "the noise is (eta / B) N(0, (C sigma)^2)"
    if p < RIGHT:
        text = f"The noise is not (eta / B) N(0, (C sigma)^2) (p = {p:.2g}); its size is {ratio:.4g} times that."
        return Finding(name, BUG, text, ratio, p, RIGHT, null, data)
    return Finding(name, OK, f"The noise is as (eta / B) N(0, (C sigma)^2) (p = {p:.2g}).", ratio, p, RIGHT, null, data)
