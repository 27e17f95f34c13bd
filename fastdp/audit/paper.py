"""The tests of "Finding private bugs" as the paper describes them, with verdicts "ok", "bug" and "undecided".

`no_clipping`, `minibatch_clipping` and `uncalibrated_noise` are fastdp's tests for the same bugs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from .finding import OK, UNDECIDED, Finding, Result, audit_test
from .measure import Probe
from .minibatch import REFUSED, one_among
from .noise import INFINITE
from .paper_losses import RIGHT, WRONG, change_in_loss, judged, positive, rounding, synthesized, warm_batches
from .paper_searches import TRIALS, clipping_norm, noise_multiplier
from .statistics import Slope, deviation, distances, slope
from .trainable import Array, AuditError, Lacking

NORMS = tuple(10.0**k for k in range(-2, 6))  # eight; the paper names none
SIZES = tuple(range(1, 101))
ALPHA = 10.0
FLAT, VARIES = 1e-3, 0.1  # (largest - smallest change in loss) over the largest
COUNT, WIDTH = 10, 10.0  # values of C, evenly from C* to 10 C*
CONTROL = 2  # models at sigma = 0 for each C: they are equal, unless chance moves them


@audit_test
def paper_no_clipping(probe: Probe, *, norms: Sequence[float] = NORMS, warm_up: int | None = None) -> Finding:
    """Takes one step on one sample, without noise, at 8 values of C, and compares the changes in loss (the paper's).

    Without clipping they are equal; with clipping they vary until C exceeds the gradient's norm. For Adam, five warm-up
    steps come first.

    statistic: the range of the changes over the largest of them; p_value: of slope 0 against log C (the paper gives
    none here, so the verdict does not use it). ok: above 0.1; bug: below 0.001; undecided between, or if rounding of
    the loss hides the changes.
    """
    chosen = positive("norms", norms, 3)
    warm = warm_batches(probe, warm_up, 0, 1)
    found = [change_in_loss(probe, probe.data(1, 17), norm, warm=warm) for norm in chosen]
    changes = [change for change, _ in found]
    result = Result("the change in loss does not depend on log C", norms=chosen, losses=changes, warm_up=len(warm))
    if not np.isfinite(changes).all():
        raise Lacking("the loss becomes infinite or NaN at some of the values of C")
    largest, least = float(np.abs(changes).max()), rounding(probe, found[0][1])
    spread = float(np.ptp(changes)) / largest if largest else 0.0
    p = slope(np.log10(chosen), changes, 0).p_value
    if largest <= 10 * least:
        text = f"The loss changes by {largest:.1e} at most, which rounding alone can do."
        return result.finding(UNDECIDED, text, spread, p, FLAT)
    if spread <= FLAT + 2 * least / largest:
        return result.bug(f"The change in loss is the same at every C from {chosen[0]:g} to {chosen[-1]:g}: nothing "
                          "is clipped, or gradients are smaller than all of these.", spread, p, FLAT)  # fmt: skip
    text = f"The change in loss varies with C by {100 * spread:.3g} % of its largest value."
    return result.finding(OK if spread > VARIES else UNDECIDED, text, spread, p, VARIES)


@audit_test
def paper_minibatch_clipping(
    probe: Probe, *, sizes: Sequence[int] = SIZES, alpha: float = ALPHA, norm: float | None = None,
    warm_up: int | None = None,
) -> Finding:  # fmt: skip
    """Takes one step at 100 batch sizes B on one sample of a large gradient among B - 1 without (the paper's).

    The changes in loss, on the large sample, fall with B if samples are clipped, and stay if their mean is. C is below
    the norm of the mean of the largest batch: C* of the large sample over 10 times the largest B. For Adam, five
    warm-up steps come first.

    statistic: the slope of the change in loss against B; p_value: of slope 0 (t-test, no floor). ok: p < 0.01; bug:
    p > 0.99; undecided between.
    """
    chosen = [int(size) for size in positive("sizes", sizes, 3)]
    if probe.expected_batch_size is not None:
        raise Lacking("needs a sum that is divided by the size of the batch: with expected_batch_size, the change of a "
                      "right step does not depend on B (fastdp's own test takes copies)")  # fmt: skip
    begun, warm = probe.steps, warm_batches(probe, warm_up, 0, 1)
    zeros, strong = synthesized(probe, chosen[-1], alpha, warm)
    if norm is None:  # C* is less than 10 times the norm of the gradient
        norm = clipping_norm(probe, batch=strong, size=1, warm_up=len(warm)) / (10 * chosen[-1])
    searched = probe.steps - begun
    try:
        batches = one_among(probe, zeros, strong, chosen)
        seen = [change_in_loss(probe, batch, norm, warm=warm, on=strong) for batch in batches]
    except REFUSED as problem:
        raise Lacking(f"the script takes no such labels: {str(problem)[:100]}") from None
    changes = [change for change, _ in seen]
    result = Result("the change in loss does not depend on B", sizes=chosen, losses=changes, norm=norm,
                    warm_up=len(warm), alpha=alpha, search_steps=searched)  # fmt: skip
    if not np.isfinite(changes).all():
        raise Lacking("the loss becomes infinite or NaN")
    line = slope(chosen, changes, 0)
    verdict, text = judged(line.p_value, "the change in loss", "B", "the sum or mean of the batch is clipped, not "
                           "every sample by itself")  # fmt: skip
    if float(np.abs(changes).max()) <= rounding(probe, seen[0][1]):
        verdict = UNDECIDED
        text = f"The loss hardly changes at C = {norm:.3g}, by no more than rounding, or the sample does not count."
    return result.finding(verdict, text, *line, WRONG)


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
    if models < 2 or steps < 1:
        raise AuditError(f"models must be 2 or more and steps 1 or more, not {models} and {steps}")
    begun, searches = probe.steps, {"size": size, "warm_up": warm_up, "trials": trials}
    norm = clipping_norm(probe, **searches) if norm is None else norm  # type: ignore[arg-type]
    if sigma is None:  # 1 where no noise is to be seen, which the distances then say
        sigma = noise_multiplier(probe, norm, **searches) or 1.0  # type: ignore[arg-type]
    searched, norms = probe.steps - begun, np.linspace(norm, WIDTH * norm, COUNT).tolist()
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
        without_noise=float(np.mean(control)), clipped=clipped, search_steps=searched, p_of_control=quiet.p_value,
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
    rate, begun = probe.rate, probe.steps
    c = 3 * clipping_norm(probe, size=size, warm_up=0) if norm is None else norm
    searched, batch = probe.steps - begun, [probe.data(size, 67)]
    noise = probe.change(batch, c, sigma, 971) - probe.change(batch, c, 0.0, 971)
    expected = rate * c * sigma / probe.divisor(size)
    result = Result("the noise is (eta / B) N(0, (C sigma)^2)", norm=c, sigma=sigma, expected=expected,
                    search_steps=searched)  # fmt: skip
    if not np.isfinite(noise).all():
        raise Lacking(INFINITE)
    ratio, p = deviation(noise) / expected, float(stats.kstest(noise / expected, "norm").pvalue)
    if 100 * probe.resolution > expected * math.sqrt(noise.size):
        text = "The rounding of the parameters hides the noise: give a larger norm=."
        return result.finding(UNDECIDED, text, ratio, None, RIGHT)
    if p < RIGHT:
        text = f"The noise is not (eta / B) N(0, (C sigma)^2) (p = {p:.2g}); its size is {ratio:.4g} times that."
        return result.bug(text, ratio, p, RIGHT)
    return result.passed(f"The noise is as (eta / B) N(0, (C sigma)^2) (p = {p:.2g}).", ratio, p, RIGHT)
