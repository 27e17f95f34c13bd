"""The tests of noise of "Finding private bugs" as the paper describes them: distances of models after ten steps, and
Kolmogorov and Smirnov's test of one step of SGD."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .finding import OK, UNDECIDED, Finding, Result, audit_test
from .measure import Probe
from .noise import INFINITE, deviation
from .paper_losses import RIGHT, WRONG, judged, positive
from .paper_searches import TRIALS, Unseen, clipping_norm, noise_multiplier
from .statistics import Slope, distances, kolmogorov, slope
from .trainable import Array, AuditError, Lacking, optional

COUNT, WIDTH = 10, 10.0  # values of C, evenly from C* to 10 C*
CONTROL = 2  # models at sigma = 0 for each C: they are equal, unless chance moves them


@audit_test
def paper_uncalibrated_noise(
    probe: Probe, *, norm: float | None = None, sigma: float | None = None, models: int = 5, steps: int = 10,
    size: int = 8, warm_up: int | None = None, trials: int = TRIALS,
) -> Finding:  # fmt: skip
    """Measures all distances between 5 models after 10 steps, at 10 values of C from C* to 10 C* (the paper's).

    C* and sigma* are found as in the paper's Appendix B, unless norm= and sigma= are given. The models have one start
    and the same batches. The same steps without noise are the control.

    statistic: the slope of the distance against C; p_value: of slope 0 (t-test over all pairs). ok: p < 0.01; bug:
    p > 0.99; undecided between, if the control's distances depend on C, or if C changes a step without noise, because
    then gradients are clipped.
    """
    for what, value, least in (("models", models, 2), ("steps", steps, 1), ("size", size, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise AuditError(f"{what} must be a whole number of at least {least}, not {value!r}")
    begun, searches = probe.steps, {"size": size, "warm_up": warm_up, "trials": trials}
    start = clipping_norm(probe, **searches).value if norm is None else norm  # type: ignore[arg-type]
    start = positive("norm", [start], 1)[0]
    try:
        sigma = noise_multiplier(probe, start, **searches).value if sigma is None else sigma  # type: ignore[arg-type]
    except Unseen:
        sigma = 1.0  # no noise is to be seen, which the distances then say
    sigma, searched = positive("sigma", [sigma], 1)[0], probe.steps - begun
    norms = [float(value) for value in np.linspace(start, WIDTH * start, COUNT)]
    batches = [probe.data(size, 11 + k) for k in range(steps)]

    def ends(c: float, s: float, many: int, first: int) -> list[Array]:
        return [probe.change(batches, c, s, first + k) for k in range(many)]

    still = [ends(c, 0.0, CONTROL, 601 + 10 * k) for k, c in enumerate(norms)]
    pairs = [distances(ends(c, sigma, models, 801 + 10 * k)) for k, c in enumerate(norms)]
    control = [distances(moved) for moved in still]
    moved, clipped = float(np.linalg.norm(still[-1][0])), max(distances([ends_at[0] for ends_at in still]))
    means = [float(np.mean(found)) for found in pairs]
    if not np.isfinite([*means, clipped, *np.ravel(control)]).all():
        raise Lacking(INFINITE)
    line, quiet = _over_pairs(norms, pairs), _over_pairs(norms, control)
    result = Result(
        "the distance does not depend on C", norms=norms, distances=means, pairs=pairs, sigma=sigma,
        control=[float(np.mean(found)) for found in control], without_noise=float(np.mean(control)), clipped=clipped,
        search_steps=searched, p_of_means=slope(norms, means, 0).p_value, p_of_control=quiet.p_value,
    )  # fmt: skip
    verdict, text = judged(line.p_value, "the distance between models", "C", "the noise does not follow the clipping "
                            "norm, or there is none")  # fmt: skip
    odd = ""
    if clipped > 1e-4 * moved + 10 * probe.resolution:
        odd = (
            f"Without noise, models at C from {norms[0]:.3g} to {norms[-1]:.3g} end {clipped / moved:.2g} of their way "
            "apart: gradients are clipped, and the distance may depend on C by that. Give a larger norm=."
        )
    elif quiet.p_value < RIGHT:
        odd = f"The distance depends on C without noise, too (p = {quiet.p_value:.2g}): chance or clipping acts."
    elif verdict == OK and line.slope < 0:
        odd = f"The distance between models falls with C (p = {line.p_value:.2g}), as no noise should."
    return result.finding(UNDECIDED if odd else verdict, odd or text, *line, WRONG)


def _over_pairs(norms: Sequence[float], found: Sequence[Sequence[float]]) -> Slope:
    """The regression of all pairs' distances on C."""
    return slope(np.repeat(norms, len(found[0])), np.ravel(found), 0)


@audit_test
def paper_noise_distribution(probe: Probe, *, norm: float | None = None, sigma: float = 1.0, size: int = 8) -> Finding:
    """Tests a step with noise less the step without it against (eta / B) N(0, (C sigma)^2), by Kolmogorov and Smirnov.

    This is the paper's Appendix C, which is for plain SGD only. C is 3 C*, unless norm= is given: at C = 1, which C*
    may be, noise that does not follow C is right by chance.

    statistic: the standard deviation over what it must be; p_value: of that distribution. bug: p < 0.01 (the paper
    names no level), so one right step in a hundred is called a bug.
    """
    sigma = positive("sigma", [sigma], 1)[0]
    if probe.optimizer != "sgd":
        raise Lacking("is for SGD only: Adam divides its step, noise and all, by its own size")
    optional(probe.trainable, "learning_rate", "for the noise that a step must have")
    begun = probe.steps
    c = 3 * clipping_norm(probe, size=size, warm_up=0).value if norm is None else positive("norm", [norm], 1)[0]
    searched, batch = probe.steps - begun, [probe.data(size, 67)]
    noise = probe.change(batch, c, sigma, 971) - probe.change(batch, c, 0.0, 971)
    expected = probe.gain * c * sigma / probe.divisor(size)
    result = Result("the noise is (eta / B) N(0, (C sigma)^2)", norm=c, sigma=sigma, expected=expected,
                    search_steps=searched)  # fmt: skip
    if not np.isfinite(noise).all():
        raise Lacking(INFINITE)
    ratio, p = deviation(noise) / expected, kolmogorov(noise / expected)
    if 100 * probe.resolution > expected * math.sqrt(noise.size):
        text = "The rounding of the parameters hides the noise: give a larger norm=."
        return result.finding(UNDECIDED, text, ratio, None, RIGHT)
    if p < RIGHT:
        text = f"The noise is not (eta / B) N(0, (C sigma)^2) (p = {p:.2g}); its size is {ratio:.4g} times that."
        return result.bug(text, ratio, p, RIGHT)
    return result.passed(f"The noise is as (eta / B) N(0, (C sigma)^2) (p = {p:.2g}).", ratio, p, RIGHT)
