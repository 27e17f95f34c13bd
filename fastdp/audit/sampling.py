"""Tests that batches are Poisson samples: every record by itself, with the accounted probability."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import stats

from .finding import Finding, Result, audit_test
from .measure import Probe
from .statistics import two_tails
from .trainable import Array, AuditError, optional

LAGS = 8  # steps back, of which a record's draws must tell nothing


@audit_test
def poisson_sampling(probe: Probe, *, records: int = 240, steps: int = 240, significance: float = 1e-3) -> Finding:
    """Examines the batches that the script's loader draws from a number of records, over a number of steps.

    The test looks at the number of records drawn in all (the rate); the variation of the sizes of batches (none, if the
    size is fixed; too much, if records are drawn in groups), and the largest and the smallest (cut, filled up); how
    often each record is drawn (equally often, if an epoch shuffles; never, if the last is forgotten); whether a
    record's draw tells of its next eight; batches without a record, of few records; records that are twice in a batch;
    batches that recur; and whether another seed draws other batches.

    statistic: the rate over the accounted rate; p_value: the smallest of the tests', times their number. Needs sample
    and sample_rate of the trainable.
    """
    sample = optional(probe.trainable, "sample", "to draw batches as the script does")
    rate = float(optional(probe.trainable, "sample_rate", "the rate that is accounted"))
    if not 0 < rate <= 1:
        raise AuditError(f"sample_rate must lie in (0, 1], not {rate!r}")
    drawn, again = (_checked(sample(records, steps, seed), records, steps) for seed in (1, 2))
    sizes = np.array([len(batch) for batch in drawn], float)
    found = sizes.sum() / records / steps
    result = Result("every record joins every batch independently, with the accounted probability", rate=found,
                    accounted=rate, sizes=sizes.astype(int).tolist())  # fmt: skip
    if wrong := _certain(drawn, again, rate):
        return result.bug(wrong, found / rate)
    if rate == 1:
        if (sizes == records).all():
            return result.passed("Every record is in every batch, as accounted.", found)
        return result.bug("The accounted rate is 1, but batches leave records out.", found)
    few = max(2, round(1 / rate))  # records, of which many batches are empty
    empty = sum(not len(batch) for batch in _checked(sample(few, steps, 3), few, steps))
    checks = [*_checks(drawn, sizes, records, rate), (
        "empty batches", float(two_tails(stats.binom, empty, steps, (1 - rate) ** few)),
        "Of few records, batches without any come too seldom or too often: an empty batch is a batch, too.",
    )]  # fmt: skip
    result.data["p_values"] = {name: p_value for name, p_value, _ in checks}
    p_value = min(1.0, min(p for _, p, _ in checks) * len(checks))
    if p_value >= significance:
        text = f"Batches look like Poisson samples at the accounted rate {rate:.4g} (drawn: {found:.4g})."
        return result.passed(text, found / rate, p_value, significance)
    words = next(text for _, p, text in checks if p * len(checks) < significance)
    return result.bug(words, found / rate, p_value)


def _certain(drawn: Sequence[Array], again: Sequence[Array], rate: float) -> str:
    """What no chance makes, in words."""
    twice = sum(len(np.unique(batch)) < len(batch) for batch in drawn)
    kept = [batch.tobytes() for batch in map(np.sort, drawn) if len(batch) > 8]
    if twice:
        return (
            f"{twice} of {len(drawn)} batches hold a record more than once: records are drawn with replacement, and "
            "one contributes several times C."
        )
    if rate < 1 and all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=True)):
        return "Another seed draws the same batches: sampling must be random, and secret."
    if rate < 0.9 and len(set(kept)) < len(kept):
        return "A batch of more than 8 records is drawn twice: batches are used again."
    return ""


def _checks(drawn: Sequence[Array], sizes: Array, records: int, rate: float) -> Iterator[tuple[str, float, str]]:
    """(name, p-value, sentence) of the questions about the batches, those with the plainest answers first."""
    steps, spread = len(drawn), rate * (1 - rate)
    there = np.zeros((steps, records), bool)
    for k, batch in enumerate(drawn):
        there[k, batch] = True
    times, found = there.sum(0).astype(float), sizes.sum() / records / steps
    each = two_tails(stats.binom, times, steps, rate)
    record, extremes = int(np.argmin(each)), stats.binom(records, rate)
    z = (sizes.sum() - records * steps * rate) / math.sqrt(records * steps * spread)
    yield ("rate", float(two_tails(stats.norm, z)),
           f"Records are drawn with probability {found:.4g}, but {rate:.4g} is accounted.")  # fmt: skip
    size = _dispersion(sizes, records * rate, records * spread)
    if np.ptp(sizes) <= 1:
        yield ("sizes", size, f"All batches have {int(sizes.max())} records: the loader shuffles or draws a fixed "
               "number, and is no Poisson sampler. The accountant's amplification is of Poisson sampling; others need "
               "other accountants, or have none.")  # fmt: skip
    yield ("single records", min(1.0, records * float(each.min())), f"Record {record} is drawn in "
           f"{times[record]:.0f} of {steps} batches, where {steps * rate:.1f} are due.")  # fmt: skip
    largest, smallest = extremes.cdf(sizes.max()) ** steps, extremes.sf(sizes.min() - 1) ** steps
    yield ("extremes", float(min(1.0, 2 * min(largest, smallest))), f"Batches have {sizes.min():.0f} to "
           f"{sizes.max():.0f} records: large ones are cut, or small ones filled up.")  # fmt: skip
    for lag in range(1, min(LAGS, steps - 1) + 1):
        number, both = (steps - lag) * records, int((there[lag:] & there[:-lag]).sum())
        # products of neighbours are uncorrelated once centred, where both tails are normal; else rare, and binomial
        z = float(((there[lag:] - rate) * (there[:-lag] - rate)).sum()) / spread / math.sqrt(number)
        p_value = float(max(two_tails(stats.binom, both, number, rate**2), two_tails(stats.norm, z)))
        yield (f"{lag} steps later", p_value, f"A record that was drawn is drawn too often or too seldom {lag} steps "
               "later: batches must not depend on earlier ones.")  # fmt: skip
    yield ("sizes", size, "The sizes of batches vary too little or too much: groups of records are in a batch or out "
           "of it, or sizes are not by chance.")  # fmt: skip
    yield ("records", _dispersion(times, steps * rate, steps * spread), "How often records are drawn varies too little "
           "or too much: an epoch shuffles them, or some are preferred.")  # fmt: skip


def _checked(drawn: Sequence[Any], records: int, steps: int) -> list[Array]:
    found = [np.asarray(batch, dtype=int).ravel() for batch in drawn]
    if len(found) != steps:
        raise AuditError(f"sample({records}, {steps}, seed) gave {len(found)} batches, not {steps}")
    if any(batch.size and (batch.min() < 0 or batch.max() >= records) for batch in found):
        raise AuditError(f"sample({records}, ...) gave indices outside of 0 to {records - 1}")
    return found


def _dispersion(counts: Array, mean: float, variance: float) -> float:
    """p-value of "these counts are independent and binomial": their squared deviations against chi-square."""
    return float(two_tails(stats.chi2, ((counts - mean) ** 2).sum() / variance, len(counts)))
