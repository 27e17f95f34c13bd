"""Tests that samples are clipped one by one, and not their mean: the change of a step against the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .finding import Finding, Result, audit_test
from .measure import Probe, copies
from .statistics import slope
from .trainable import Batch, Lacking, pick

SIZES = (1, 2, 3, 5, 8, 13, 20, 32, 50, 75, 100)
NULL = "the change does not depend on what else is in the batch"
WHERE = (
    "The sum or mean of the batch is clipped, not every sample by itself: C bounds the batch, and one sample can be "
    "all of it. Clip per-sample gradients (micro-batches of one, or an engine for them), then add."
)
REFUSED = (TypeError, ValueError, RuntimeError, IndexError)  # of a script that takes no such labels


@audit_test
def minibatch_clipping(probe: Probe, *, sizes: Sequence[int] = SIZES, norm: float | None = None) -> Finding:
    """Measures the change of one step without noise against the batch size B.

    If the sum is divided by the size of the batch, and outputs can be predicted, a batch has B - 1 samples with zero
    gradient and one with a huge gradient. The change falls as 1/B if samples are clipped, and stays if their mean is.
    If the divisor is fixed, a batch has B copies of the huge sample; the change grows as B, or stays. Otherwise (and
    for Adam, for which the smallest gradients count as much as large ones), batches of ordinary samples are compared
    with the sum of their separate steps.

    statistic: the slope of log(change) against log(B) (in the last case, against the logarithm of the sum of single
    samples), which is -1 or 1 if samples are clipped and 0 if batches are; p_value: of slope 0.
    """
    chosen = norm if norm is not None else probe.clipped_norm("needs a gradient that is clipped")
    if probe.regime.kind == "switched" and norm is None:
        return _switched(probe, chosen)
    if probe.expected_batch_size is not None:
        return _over_sizes(probe, "copies", sizes, [copies(probe.strong, size) for size in sizes], chosen, +1)
    if probe.optimizer == "adam":
        return _against_singles(probe, chosen)
    if norm is None:  # below the mean of the largest batch, too: or else clipping that mean would do nothing
        seen = 100 * probe.resolution * max(sizes) / probe.contribution(probe.strong, chosen)
        chosen *= max(1 / max(sizes), min(1.0, seen))
    try:
        zeros = probe.without_gradient(max(sizes) - 1, 3)
        still, whole = (probe.contribution(batch, chosen) for batch in (zeros, probe.strong))
        batches = one_among(probe, zeros, probe.strong, sizes)
    except (Lacking, *REFUSED):
        return _against_singles(probe, chosen)
    if not still <= 0.05 * whole + max(sizes) * probe.resolution:
        return _against_singles(probe, chosen)  # predict() and the loss do not agree
    return _over_sizes(probe, "one of B", sizes, batches, chosen, -1)


def one_among(probe: Probe, zeros: Batch, strong: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Batches of B - 1 samples without gradient and the strong one."""
    return [probe.together([pick(zeros, slice(0, size - 1)), strong]) if size > 1 else strong for size in sizes]


def _over_sizes(
    probe: Probe, design: str, sizes: Sequence[int], batches: Sequence[Batch], norm: float, expected: int
) -> Finding:
    outcomes = [probe.outcome([batch], norm) for batch in batches]
    changes = [float(np.linalg.norm(o.parameters - probe.start - probe.drift)) for o in outcomes]
    result = Result(NULL, design=design, sizes=list(sizes), changes=changes, losses=[o.loss for o in outcomes],
                    norm=norm, expected=expected)  # fmt: skip
    return _judged(result, probe, np.log(sizes), changes, f"B^{expected}")


def _judged(result: Result, probe: Probe, x: Any, changes: Sequence[float], law: str) -> Finding:
    line = slope(x, np.log(np.maximum(changes, probe.resolution)))
    if line.slope / result.data["expected"] < 0.5:
        return result.bug(
            f"The change of a step goes with slope {line.slope:.2g} where per-sample clipping gives {law}. {WHERE}",
            line.slope, line.p_value, 0.5,
        )  # fmt: skip
    return result.passed(f"Samples are clipped one by one: the change goes as {law} (slope {line.slope:.2f}).",
                         line.slope, line.p_value, 0.5)  # fmt: skip


def _against_singles(probe: Probe, norm: float) -> Finding:
    """Ordinary samples together, against their steps alone: of one input with all its labels they nearly cancel."""
    batch = probe.data(16, 5)
    single = [probe.summed(pick(batch, [k]), norm) for k in range(16)]
    order, total = [0], single[0]
    while len(order) < 16:  # those first that add up to little
        rest = [k for k in range(16) if k not in order]
        order.append(min(rest, key=lambda k: float(np.linalg.norm(total + single[k]))))
        total = total + single[order[-1]]
    chosen = [order[:size] for size in (1, 2, 3, 4, 6, 8, 12, 16)]
    alone = [float(np.linalg.norm(np.sum([single[k] for k in some], 0))) / len(some) for some in chosen]
    together = [probe.contribution(pick(batch, some), norm) / len(some) for some in chosen]
    logs = np.log(np.maximum(alone, probe.resolution))
    if np.std(logs) < 0.15:
        raise Lacking("needs predict() and loss_kind: the gradients of make_batch()'s samples are all alike")
    result = Result(NULL, design="singles", alone=alone, changes=together, norm=norm, expected=1)
    return _judged(result, probe, logs, together, "the sum of single samples' steps")


def _switched(probe: Probe, norm: float) -> Finding:
    """Clipping that counts a sample whole or not at all: at a norm it exceeds, it must not count in any company."""
    sizes = (1, 2, 4, 8, 16, 32)
    if probe.expected_batch_size is None:
        batches = one_among(probe, probe.without_gradient(31, 3), probe.strong, sizes)
    else:
        batches = [copies(probe.strong, size) for size in sizes]
    changes = [probe.contribution(batch, norm) for batch in batches]
    share = max(changes) / max(probe.regime.changes)
    result = Result(design="switched", sizes=list(sizes), changes=changes, norm=norm)
    if share > 0.05:
        return result.bug(f"A sample beyond C counts when others are in its batch. {WHERE}", share, None, 0.05)
    return result.passed("A sample whose gradient exceeds C counts nothing, in batches of every size (global "
                         "clipping).", share, None, 0.05)  # fmt: skip
