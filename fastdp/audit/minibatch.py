"""Is each sample clipped, or only their mean? The answer of a step to the size of the batch around one sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .finding import BUG, OK, Finding, not_tested
from .measure import Probe, copies
from .statistics import Slope, slope
from .trainable import Lacking, pick

NAME = "minibatch_clipping"
SIZES = (1, 2, 3, 5, 8, 13, 20, 32, 50, 75, 100)
WHERE = (
    "The sum or mean of the batch is clipped, not every sample by itself: C bounds the batch, and one sample can be "
    "all of it. Clip per-sample gradients (micro-batches of one, or an engine for them), then add."
)


def minibatch_clipping(
    trainable: Any, *, seed: int = 0, sizes: Sequence[int] = SIZES, norm: float | None = None
) -> Finding:
    """Measures the change of one step without noise against the batch size B.

    If the sum is divided by the size of the batch, and outputs can be predicted, a batch has B - 1 samples with zero
    gradient and one with a huge gradient. The change falls as 1/B if samples are clipped, and stays if their mean is.
    If the divisor is fixed, a batch has B copies of the huge sample; the change grows as B, or stays. Otherwise (and
    for Adam, for which the smallest gradients count as much as large ones), batches of ordinary samples are compared
    with the sum of their separate steps.

    statistic: the slope of log(change) against log(B) (in the last case, against the logarithm of the sum of single
    samples), which is -1 or 1 if samples are clipped and 0 if batches are; p_value: of slope 0.
    """
    probe = Probe.of(trainable, seed)
    try:
        chosen = norm if norm is not None else probe.clipped_norm("needs a gradient that is clipped")
        if probe.regime.kind == "switched" and norm is None:
            return _switched(probe, chosen)
        if not probe.follows_batch:
            return _verdict(probe, "copies", sizes, [(copies(probe.strong, size)) for size in sizes], chosen, +1)
        if probe.optimizer == "sgd":
            chosen = norm if norm is not None else _below_the_mean(probe, chosen, max(sizes))
            try:
                batches = _zeros_and_one(probe, sizes, chosen)
            except Lacking:
                return _against_singles(probe, chosen)
            return _verdict(probe, "one of B", sizes, batches, chosen, -1)
        return _against_singles(probe, chosen)
    except Lacking as problem:
        return not_tested(NAME, str(problem))


def _below_the_mean(probe: Probe, norm: float, most: int) -> float:
    """A smaller C, which the mean of the largest batch exceeds too: or else clipping that mean would do nothing."""
    seen = 100 * probe.resolution * most / float(np.linalg.norm(probe.summed(probe.strong, norm)))
    return norm * max(1 / most, min(1.0, seen))


def _zeros_and_one(probe: Probe, sizes: Sequence[int], norm: float) -> list[Any]:
    """Batches of B - 1 samples without gradient and the strong one. Raises Lacking where they have a gradient."""
    most = max(sizes)
    zeros = probe.without_gradient(max(most - 1, 1), 3)
    try:
        still = np.linalg.norm(probe.summed(zeros, norm))
        whole = np.linalg.norm(probe.summed(probe.strong, norm))
        batches = [probe.together([pick(zeros, slice(0, size - 1)), probe.strong]) for size in sizes]
    except (TypeError, ValueError, RuntimeError, IndexError) as problem:
        raise Lacking(f"the script takes no such labels: {str(problem)[:100]}") from None
    if not still <= 0.05 * whole + most * probe.resolution:
        raise Lacking("samples whose labels are what predict() says still have a gradient: do predict and loss agree?")
    return batches


def _verdict(
    probe: Probe, design: str, sizes: Sequence[int], batches: Sequence[Any], norm: float, expected: int
) -> Finding:
    outcomes = [probe.outcome([batch], norm) for batch in batches]
    changes = [float(np.linalg.norm(o.parameters - probe.start - probe.drift)) for o in outcomes]
    line = slope(np.log(sizes), np.log(np.maximum(changes, probe.resolution)))
    data = {"design": design, "sizes": list(sizes), "changes": changes, "losses": [o.loss for o in outcomes],
            "norm": norm, "expected": expected}  # fmt: skip
    return _judged(line, line.slope / expected, f"B^{expected}", data)


def _judged(line: Slope, share: float, law: str, data: dict[str, Any]) -> Finding:
    null = "the change does not depend on what else is in the batch"
    if share < 0.5:
        sentence = (
            f"The change of a step goes with slope {line.slope:.2g} where per-sample clipping gives {law}. {WHERE}"
        )
        return Finding(NAME, BUG, sentence, line.slope, line.p_value, 0.5, null, data)
    sentence = f"Samples are clipped one by one: the change goes as {law} (slope {line.slope:.2f})."
    return Finding(NAME, OK, sentence, line.slope, line.p_value, 0.5, null, data)


def _against_singles(probe: Probe, norm: float) -> Finding:
    """Ordinary samples together, against their steps alone: of one input with all its labels they nearly cancel."""
    x, y = probe.data(16, 5)
    single = [probe.summed(pick((x, y), [k]), norm) for k in range(16)]
    together, apart = [], []
    for size in (1, 2, 3, 4, 6, 8, 12, 16):
        chosen = _cancelling(single, size)
        apart.append(float(np.linalg.norm(np.sum([single[k] for k in chosen], 0))) / size)
        together.append(float(np.linalg.norm(probe.summed(pick((x, y), chosen), norm))) / size)
    logs = np.log(np.maximum(apart, probe.resolution))
    if np.std(logs) < 0.15:
        return not_tested(NAME, "needs predict() and loss_kind: the gradients of make_batch()'s samples are all alike")
    line = slope(logs, np.log(np.maximum(together, probe.resolution)))
    data = {"design": "singles", "alone": apart, "changes": together, "norm": norm, "expected": 1}
    return _judged(line, line.slope, "the sum of single samples' steps", data)


def _cancelling(single: list[Any], size: int) -> list[int]:
    """So many samples whose steps add up to little, greedily."""
    chosen, total = [0], single[0]
    while len(chosen) < size:
        rest = [k for k in range(len(single)) if k not in chosen]
        best = min(rest, key=lambda k: float(np.linalg.norm(total + single[k])))
        chosen, total = [*chosen, best], total + single[best]
    return chosen


def _switched(probe: Probe, norm: float) -> Finding:
    """Clipping that counts a sample whole or not at all: at a norm it exceeds, it must not count in any company."""
    sizes = (1, 2, 4, 8, 16, 32)
    follows = probe.follows_batch
    zeros = probe.without_gradient(31, 3) if follows else None
    changes = []
    for size in sizes:
        batch = (
            copies(probe.strong, size)
            if zeros is None
            else probe.together([pick(zeros, slice(0, size - 1)), probe.strong])
        )
        changes.append(float(np.linalg.norm(probe.summed(batch, norm))))
    share = max(changes) / max(probe.regime.changes)
    data = {"design": "switched", "sizes": list(sizes), "changes": changes, "norm": norm}
    if share > 0.05:
        return Finding(NAME, BUG, f"A sample beyond C counts when others are in its batch. {WHERE}", share, None, 0.05,
                       data=data)  # fmt: skip
    return Finding(NAME, OK, "A sample whose gradient exceeds C counts nothing, in batches of every size (global "
                   "clipping).", share, None, 0.05, data=data)  # fmt: skip
