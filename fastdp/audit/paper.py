"""The tests of clipping of "Finding private bugs" as the paper describes them: by the change in loss of one step.

Their verdicts are "ok", "bug" and "undecided". `no_clipping` and `minibatch_clipping` are fastdp's tests for the same
bugs, by the change of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .finding import OK, UNDECIDED, Finding, Result, audit_test
from .measure import Probe
from .minibatch import one_among
from .paper_losses import WRONG, change_in_loss, judged, positive, rounding, synthesized, warm_batches
from .paper_searches import clipping_norm
from .statistics import slope
from .trainable import AuditError, Lacking

NORMS = tuple(10.0**k for k in range(-2, 6))  # eight; the paper names none
SIZES = tuple(range(1, 101))
ALPHA = 10.0
FLAT, VARIES = 1e-3, 0.1  # (largest - smallest change in loss) over the largest


@audit_test
def paper_no_clipping(probe: Probe, *, norms: Sequence[float] = NORMS, warm_up: int | None = None) -> Finding:
    """Takes one step on one sample, without noise, at 8 values of C, and compares the changes in loss (the paper's).

    Without clipping they are equal; with clipping they vary until C exceeds the gradient's norm. For Adam, five warm-up
    steps come first.

    statistic: the range of the changes over the largest of them; p_value: of slope 0 against log C (the paper gives
    none here, so the verdict does not use it). ok: above 0.1; bug: below 0.001; undecided between, or if rounding of
    the loss hides the changes.
    """
    chosen = sorted(positive("norms", norms, 3))
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
    chosen = sorted({int(size) for size in positive("sizes", sizes, 3)})
    if not math.isfinite(alpha) or alpha <= 1:
        raise AuditError(f"alpha must be finite and above 1, not {alpha!r}")
    if not probe.follows_batch:
        raise Lacking("needs a sum that is divided by the size of the batch: with expected_batch_size, the change of a "
                      "right step does not depend on B (fastdp's own test takes copies)")  # fmt: skip
    begun, warm = probe.steps, warm_batches(probe, warm_up, 0, 1)
    zeros, strong = synthesized(probe, chosen[-1], alpha, warm)
    if norm is None:  # C* is less than 10 times the norm of the gradient
        norm = clipping_norm(probe, batch=strong, size=1, warm_up=len(warm)).value / (10 * chosen[-1])
    c, searched = positive("norm", [norm], 1)[0], probe.steps - begun
    try:
        batches = one_among(probe, zeros, strong, chosen)
        seen = [change_in_loss(probe, batch, c, warm=warm, on=strong) for batch in batches]
    except (TypeError, ValueError, RuntimeError, IndexError) as problem:
        raise Lacking(f"the script takes no such labels: {str(problem)[:100]}") from None
    changes = [change for change, _ in seen]
    result = Result("the change in loss does not depend on B", sizes=chosen, losses=changes, norm=c,
                    warm_up=len(warm), alpha=alpha, search_steps=searched)  # fmt: skip
    if not np.isfinite(changes).all():
        raise Lacking("the loss becomes infinite or NaN")
    line = slope(chosen, changes, 0)
    verdict, text = judged(line.p_value, "the change in loss", "B", "the sum or mean of the batch is clipped, not "
                           "every sample by itself")  # fmt: skip
    if float(np.abs(changes).max()) <= rounding(probe, seen[0][1]):
        verdict = UNDECIDED
        text = f"The loss hardly changes at C = {c:.3g}, by no more than its rounding, or the sample does not count."
    return result.finding(verdict, text, *line, WRONG)
