"""How much one sample can change: never more than C, alone, in company, and after other steps."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from .finding import BUG, OK, Finding, not_tested
from .measure import Probe
from .trainable import Batch, pick, rows

NAME = "sensitivity"
TOLERANCE = 1e-3
COMPANY = 7


def sensitivity(trainable: Any, *, seed: int = 0, tolerance: float = TOLERANCE) -> Finding:
    """The largest contribution of one sample to the sum over C, over samples that try to exceed it.

    Samples: ordinary ones, large labels, wrong labels, inputs scaled by 10 to 1000 and down to 0. Each is measured as a
    batch of its own, as the difference that it makes to a batch of seven others, and (SGD) in a second step.
    Several clipping norms, as far as the rounding of the parameters lets a contribution be seen to `tolerance`.

    statistic: the largest contribution over C; bound: 1 and the tolerance. Needs learning_rate.
    """
    probe = Probe.of(trainable, seed)
    gain = probe.gain
    tolerance = max(tolerance, 0.02) if probe.optimizer == "adam" else tolerance  # its small steps round more
    company = probe.data(COMPANY, 23)
    norms = _norms(probe, gain)
    if not any(_slack(probe, gain, norm) <= 2 * tolerance for norm in norms):
        return not_tested(NAME, "contributions are too small beside the rounding of the parameters: take a larger "
                          "learning rate for the audit, or float64")  # fmt: skip
    found: list[tuple[float, str, float]] = []  # contribution over C less what rounding can do, how, C
    adversaries, first, other = _adversaries(probe), probe.data(1, 31), probe.data(1, 137)
    for norm in norms:
        slack = _slack(probe, gain, norm)
        seen = slack <= 2 * tolerance
        base = probe.summed(company, norm)
        after = probe.change([first, other], norm)
        for how, sample in adversaries:
            moved = {f"{how}, alone": probe.summed(sample, norm)}
            if seen:
                together = probe.together([company, sample])
                moved[f"{how}, with {COMPANY} others"] = probe.summed(together, norm) - base
            if seen and probe.optimizer == "sgd":  # half of what it makes to take the place of another, at most C too;
                # what the first step left in a momentum is the same in both
                moved[f"{how}, in the second step"] = (
                    (probe.change([first, sample], norm) - after) * probe.divisor(1) / 2
                )
            for label, change in moved.items():
                with np.errstate(all="ignore"):
                    size = float(np.linalg.norm(change)) / gain / norm
                if math.isfinite(size):
                    found.append((size - slack, label, norm))
    if not found:
        return not_tested(NAME, "every contribution is infinite or NaN, even of ordinary samples")
    worst, label, norm = max(found)
    data = {"norms": norms, "worst": worst, "sample": label, "norm": norm, "measured": len(found)}
    if worst > 1 + tolerance:
        return Finding(
            NAME, BUG,
            f"One sample changes the sum by {worst:.4g} C at C = {norm:.3g} ({label}): noise for C does not hide it. "
            "Look at the norm (of all parameters together? of all uses of a tied weight? in which precision?), at the "
            "factor's shape and sense, and at samples that are counted more than once.",
            worst, None, 1 + tolerance, data=data,
        )  # fmt: skip
    text = f"No sample changes the sum by more than C: at most {worst:.4g} C in {len(found)} trials."
    return Finding(NAME, OK, text, worst, None, 1 + tolerance, data=data)


def _slack(probe: Probe, gain: float, norm: float) -> float:
    """What rounding of the parameters can add to a contribution over C."""
    return 2 * probe.resolution * probe.divisor(COMPANY + 1) / gain / norm


def _norms(probe: Probe, gain: float) -> list[float]:
    regime = probe.regime
    middle = regime.norm if regime.kind in ("linear", "switched") else max(regime.changes) / gain / 10
    return [
        middle * k for k in ((1e-3, 0.1, 1.0) if probe.optimizer == "adam" else (1e-4, 0.01, 0.1, 1.0, 10.0, 100.0))
    ]


def _adversaries(probe: Probe) -> list[tuple[str, Batch]]:
    x, y = probe.data(4, 29)
    found = [(f"ordinary sample {k}", pick((x, y), [k])) for k in range(2)]
    found.append(("the sample with the largest label", probe.strong))
    with contextlib.suppress(Exception):  # no labels can be had
        found.append(("a wrong label", probe.by_wrong_label()))
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        for scale in (0.0, 10.0, 1000.0):
            sample = rows(x, [3]) * np.asarray(scale, x.dtype), rows(y, [3])
            found.append((f"inputs times {scale:g}" if scale else "inputs of zeros", sample))
    return found
