"""The tests of clipping of "Finding private bugs" as the paper describes them: by the change in loss of one step.

Their verdicts are "ok", "bug" and "undecided". `no_clipping` and `minibatch_clipping` are fastdp's tests for the same
bugs, by the change of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .finding import BUG, OK, UNDECIDED, Finding, not_tested
from .measure import Probe
from .paper_searches import clipping_norm
from .paper_steps import (
    WRONG,
    change_in_loss,
    judged,
    p_of_slope,
    positive,
    rounding,
    synthesized,
    warm_batches,
    warm_up_of,
)
from .trainable import AuditError, Batch, Lacking, pick

NORMS = tuple(10.0**k for k in range(-2, 6))  # eight; the paper names none
SIZES = tuple(range(1, 101))
ALPHA = 10.0
FLAT, VARIES = 1e-3, 0.1  # (largest - smallest change in loss) over the largest


def paper_no_clipping(
    trainable: Any, *, seed: int = 0, norms: Sequence[float] = NORMS, warm_up: int | None = None
) -> Finding:
    """Takes one step on one sample, without noise, at 8 values of C, and compares the changes in loss (the paper's).

    Without clipping they are equal; with clipping they vary until C exceeds the gradient's norm. For Adam, five warm-up
    steps come first.

    statistic: the range of the changes over the largest of them; p_value: of slope 0 against log C (the paper gives
    none here, so the verdict does not use it). ok: above 0.1; bug: below 0.001; undecided between, or if rounding of
    the loss hides the changes.
    """
    name, probe = "paper_no_clipping", Probe.of(trainable, seed)
    chosen, begun = sorted(positive("norms", norms, 3)), probe.steps
    warm = warm_batches(probe, warm_up_of(probe, warm_up, 0), 1)
    found = [change_in_loss(probe, probe.data(1, 17), norm, warm=warm) for norm in chosen]
    changes = [change for change, _ in found]
    data = {"norms": chosen, "losses": changes, "warm_up": len(warm), "steps": probe.steps - begun}
    if not np.isfinite(changes).all():
        return not_tested(name, "the loss becomes infinite or NaN at some of the values of C", **data)
    largest, least = float(np.abs(changes).max()), rounding(probe, found[0][1])
    spread = float(np.ptp(changes)) / largest if largest else 0.0
    p = p_of_slope(np.log10(chosen), changes)[1]
    null = "the change in loss does not depend on log C"
    if largest <= 10 * least:
        return Finding(name, UNDECIDED, f"The loss changes by {largest:.1e} at most, which rounding alone can do.",
                       spread, p, FLAT, null, data)  # fmt: skip
    if spread <= FLAT + 2 * least / largest:
        return Finding(name, BUG, f"The change in loss is the same at every C from {chosen[0]:g} to {chosen[-1]:g}: "
                       "nothing is clipped, or gradients are smaller than all of these.", spread, p, FLAT, null,
                       data)  # fmt: skip
    verdict = OK if spread > VARIES else UNDECIDED
    text = f"The change in loss varies with C by {100 * spread:.3g} % of its largest value."
    return Finding(name, verdict, text, spread, p, VARIES, null, data)


def paper_minibatch_clipping(
    trainable: Any, *, seed: int = 0, sizes: Sequence[int] = SIZES, alpha: float = ALPHA, norm: float | None = None,
    warm_up: int | None = None,
) -> Finding:  # fmt: skip
    """Takes one step at 100 batch sizes B on one sample of a large gradient among B - 1 without (the paper's).

    The changes in loss, on the large sample, fall with B if samples are clipped, and stay if their mean is. C is below
    the norm of the mean of the largest batch: C* of the large sample over 10 times the largest B. For Adam, five
    warm-up steps come first.

    statistic: the slope of the change in loss against B; p_value: of slope 0 (t-test, no floor). ok: p < 0.01; bug:
    p > 0.99; undecided between.
    """
    name, probe = "paper_minibatch_clipping", Probe.of(trainable, seed)
    chosen = sorted({int(size) for size in positive("sizes", sizes, 3)})
    if not math.isfinite(alpha) or alpha <= 1:
        raise AuditError(f"alpha must be finite and above 1, not {alpha!r}")
    if norm is not None:
        positive("norm", [norm], 1)
    if not probe.follows_batch:
        return not_tested(name, "needs a sum that is divided by the size of the batch: with expected_batch_size, the "
                          "change of a right step does not depend on B (fastdp's own test takes copies)")  # fmt: skip
    begun = probe.steps
    warm = warm_batches(probe, warm_up_of(probe, warm_up, 0), 1)
    zeros, strong = synthesized(probe, chosen[-1], alpha, warm)
    if norm is None:
        found = clipping_norm(probe, batch=strong, size=1, warm_up=len(warm))
        norm = found.value / (10 * chosen[-1])  # C* is less than 10 times the norm of the gradient
    searched = probe.steps - begun
    try:
        batches = [_one_among(probe, zeros, strong, size) for size in chosen]
        seen = [change_in_loss(probe, batch, norm, warm=warm, on=strong) for batch in batches]
    except (TypeError, ValueError, RuntimeError, IndexError) as problem:
        raise Lacking(f"the script takes no such labels: {str(problem)[:100]}") from None
    changes, least = [change for change, _ in seen], rounding(probe, seen[0][1])
    data = {"sizes": chosen, "losses": changes, "norm": norm, "warm_up": len(warm), "alpha": alpha,
            "search_steps": searched, "steps": probe.steps - begun}  # fmt: skip
    if not np.isfinite(changes).all():
        return not_tested(name, "the loss becomes infinite or NaN", **data)
    slope, p = p_of_slope([float(size) for size in chosen], changes)
    if float(np.abs(changes).max()) <= least:
        text = f"The loss hardly changes at C = {norm:.3g}, by no more than its rounding, or the sample does not count."
        return Finding(name, UNDECIDED, text, slope, p, WRONG, "", data)
    return Finding(name, *judged(p, "the change in loss", "B", "the sum or mean of the batch is clipped, not every "
                   "sample by itself"), slope, p, WRONG, "the change in loss does not depend on B", data)  # fmt: skip


def _one_among(probe: Probe, zeros: Batch, strong: Batch, size: int) -> Batch:
    return probe.together([pick(zeros, slice(0, size - 1)), strong]) if size > 1 else strong
