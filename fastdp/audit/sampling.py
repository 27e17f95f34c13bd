"""Are batches drawn as the accountant assumes: every record by itself, with the accounted probability?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

from .finding import BUG, OK, Finding
from .measure import Probe
from .trainable import Array, AuditError, optional

NAME = "poisson_sampling"
NULL = "every record joins every batch independently, with the accounted probability"


def poisson_sampling(
    trainable: Any, *, seed: int = 0, records: int = 240, steps: int = 120, significance: float = 1e-3
) -> Finding:
    """The batches that the script's loader draws from so many records, over so many steps.

    Looked at: how many records are drawn in all (the rate), how the sizes of batches vary (not at all, where their
    size is fixed), how often each record is drawn (equally often, where an epoch shuffles), records that are twice in
    a batch, and whether another seed draws otherwise.

    statistic: the rate over the accounted one; p_value: the smallest of the tests', times their number. Needs sample
    and sample_rate of the trainable.
    """
    trainable = Probe.of(trainable, seed).trainable
    sample = optional(trainable, "sample", "to draw batches as the script does")
    rate = float(optional(trainable, "sample_rate", "the rate that is accounted"))
    if not 0 < rate <= 1:
        raise AuditError(f"sample_rate must lie in (0, 1], not {rate!r}")
    drawn = _checked(sample(records, steps, 2 * seed + 1), records, steps)
    again = _checked(sample(records, steps, 2 * seed + 2), records, steps)
    sizes = np.array([len(batch) for batch in drawn], float)
    times = np.bincount(np.concatenate(drawn).astype(int), minlength=records).astype(float)
    found = sizes.sum() / records / steps
    data: dict[str, Any] = {"rate": found, "accounted": rate, "sizes": sizes.astype(int).tolist()}
    twice = sum(len(np.unique(batch)) < len(batch) for batch in drawn)
    if twice:
        return _bug(
            f"{twice} of {steps} batches hold a record more than once: records are drawn with replacement, and one "
            "contributes several times C.", found / rate, None, data,
        )  # fmt: skip
    if rate < 1 and all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True)):
        return _bug(
            "Another seed draws the same batches: sampling must be random, and secret.", found / rate, None, data
        )
    if rate == 1:
        everything = bool((sizes == records).all())
        text = (
            "Every record is in every batch, as accounted."
            if everything
            else "The accounted rate is 1, but batches leave records out."
        )
        return Finding(NAME, OK if everything else BUG, text, found, None, None, NULL, data)
    spread = rate * (1 - rate)
    checks = {
        "rate": _two_sided(stats.norm.sf, (sizes.sum() - records * steps * rate) / math.sqrt(records * steps * spread)),
        "sizes": _dispersion(sizes, records * rate, records * spread),
        "records": _dispersion(times, steps * rate, steps * spread),
    }
    p_value = min(1.0, min(checks.values()) * len(checks))
    data["p_values"] = checks
    if p_value >= significance:
        text = f"Batches look like Poisson samples at the accounted rate {rate:.4g} (drawn: {found:.4g})."
        return Finding(NAME, OK, text, found / rate, p_value, significance, NULL, data)
    if checks["rate"] * len(checks) < significance:
        text = f"Records are drawn with probability {found:.4g}, but {rate:.4g} is accounted."
    elif np.ptp(sizes) <= 1:
        text = (
            f"All batches have {int(sizes.max())} records: the loader shuffles or draws a fixed number, and is no "
            "Poisson sampler. The accountant's amplification is of Poisson sampling; others need other "
            "accountants, or have none."
        )
    else:
        text = (
            "Batches are no Poisson sample: their sizes, or how often records are drawn, vary too little or too much."
        )
    return _bug(text, found / rate, p_value, data)


def _bug(text: str, statistic: float, p_value: float | None, data: dict[str, Any]) -> Finding:
    return Finding(NAME, BUG, text, statistic, p_value, None, NULL, data)


def _checked(drawn: Sequence[Any], records: int, steps: int) -> list[Array]:
    found = [np.asarray(batch, dtype=int).ravel() for batch in drawn]
    if len(found) != steps:
        raise AuditError(f"sample({records}, {steps}, seed) gave {len(found)} batches, not {steps}")
    if any(batch.size and (batch.min() < 0 or batch.max() >= records) for batch in found):
        raise AuditError(f"sample({records}, ...) gave indices outside of 0 to {records - 1}")
    return found


def _two_sided(tail: Any, z: float) -> float:
    return float(2 * tail(abs(z)))


def _dispersion(counts: Array, mean: float, variance: float) -> float:
    """p-value of "these counts are independent and binomial": their squared deviations against chi-square."""
    total = float(((counts - mean) ** 2).sum() / variance)
    return float(min(1.0, 2 * min(stats.chi2.sf(total, len(counts)), stats.chi2.cdf(total, len(counts)))))
