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
    trainable: Any, *, seed: int = 0, records: int = 240, steps: int = 240, significance: float = 1e-3
) -> Finding:
    """Examines the batches that the script's loader draws from a number of records, over a number of steps.

    The test looks at the number of records drawn in all (the rate); the variation of the sizes of batches (none, if the
    size is fixed), and the largest and the smallest (cut, filled up); how often each record is drawn (equally often, if
    an epoch shuffles; never, if the last is forgotten); whether the draw of a record tells of other steps (the next
    one, and any up to half the run later), of other records at any distance, and of other records in later steps;
    whether sizes follow each other; batches without a record, and of few records; records that are twice in a batch;
    batches that recur; and whether another seed draws other batches.

    statistic: the rate over the accounted rate; p_value: the smallest of the tests', times their number. Needs sample
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
    kept = [batch.tobytes() for batch in map(np.sort, drawn) if len(batch) > 8]
    if rate < 0.9 and len(set(kept)) < len(kept):
        return _bug("A batch of more than 8 records is drawn twice: batches are used again.", found / rate, None, data)
    if rate == 1:
        everything = bool((sizes == records).all())
        text = (
            "Every record is in every batch, as accounted."
            if everything
            else "The accounted rate is 1, but batches leave records out."
        )
        return Finding(NAME, OK if everything else BUG, text, found, None, None, NULL, data)
    spread = rate * (1 - rate)
    links = _links(drawn, records, rate)
    checks = {
        "rate": _two_sided(stats.norm.sf, (sizes.sum() - records * steps * rate) / math.sqrt(records * steps * spread)),
        "sizes": _dispersion(sizes, records * rate, records * spread),
        "records": _dispersion(times, steps * rate, steps * spread),
        "single records": min(1.0, records * float(_binomial(times, steps, rate).min())),
        **{name: p_value for name, (p_value, _) in links.items()},
        "sizes in a row": _following(sizes - records * rate, records * spread),
        "extremes": _extremes(sizes, records, rate),
        "empty batches": _empty(sample, rate, steps, seed),
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
    elif checks["single records"] * len(checks) < significance:
        record = int(np.argmin(_binomial(times, steps, rate)))
        text = f"Record {record} is drawn in {times[record]:.0f} of {steps} batches, where {steps * rate:.1f} are due."
    elif min(p for p, _ in links.values()) * len(checks) < significance:
        text = min(links.values())[1]
    elif checks["sizes in a row"] * len(checks) < significance:
        text = "The size of a batch depends on that of the one before: batches must be drawn independently."
    elif checks["extremes"] * len(checks) < significance:
        text = (
            f"Batches have {sizes.min():.0f} to {sizes.max():.0f} records: large ones are cut, or small ones filled up."
        )
    elif checks["empty batches"] * len(checks) < significance:
        text = "Of few records, batches without any come too seldom or too often: an empty batch is a batch, too."
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


def _binomial(found: Any, n: int, rate: float) -> Any:
    """Two-sided p-values of these numbers of n."""
    return np.minimum(1.0, 2 * np.minimum(stats.binom.cdf(found, n, rate), stats.binom.sf(found - 1, n, rate)))


def _extremes(sizes: Array, records: int, rate: float) -> float:
    """Smaller p-value, twice, of "none of the batches is larger" and "none is smaller"."""
    law = stats.binom(records, rate)
    return float(min(1.0, 2 * min(law.cdf(sizes.max()) ** len(sizes), law.sf(sizes.min() - 1) ** len(sizes))))


def _links(drawn: Sequence[Array], records: int, rate: float) -> dict[str, tuple[float, str]]:
    """(p-value, sentence) of the three ways in which draws may depend on each other: those of a record on its own in
    other steps, those of a step on each other, and those of a record on other records' in other steps.

    What is added up are products of (drawn - rate) of two draws, which are uncorrelated even where they share one; the
    tails of a sum are those of a gamma distribution of its skewness (Pearson's third kind). p-values are corrected for
    the distances that are tried.
    """
    steps = len(drawn)
    there = np.full((steps, records), -rate)
    for k, batch in enumerate(drawn):
        there[k, batch] += 1
    shape = (2 * steps, 2 * records)
    found = np.fft.irfft2(np.abs(np.fft.rfft2(there, shape)) ** 2, shape)
    later, apart = np.meshgrid(np.arange(steps // 2 + 1), np.arange(-(records // 2), records // 2 + 1), indexing="ij")
    number = (steps - later) * (records - np.abs(apart))
    z = found[later, apart] / (rate * (1 - rate)) / np.sqrt(number)
    skewness = (1 - 2 * rate) ** 2 / (rate * (1 - rate)) / np.sqrt(number)
    p_values = 2 * np.minimum(_gamma(z, skewness), _gamma(-z, -skewness))

    def least(where: Array, text: str) -> tuple[float, str]:
        chosen = np.where(where, p_values, np.inf)
        k = np.unravel_index(int(np.argmin(chosen)), chosen.shape)
        often = "more" if z[k] > 0 else "less"
        said = text.format(later=int(later[k]), apart=abs(int(apart[k])), often=often)
        return float(min(1.0, chosen[k] * int(where.sum()))), said

    return {
        "a record in other steps": least(
            (apart == 0) & (later > 0),
            "A record that was drawn is drawn {often} often {later} steps later: batches must not depend on earlier "
            "ones.",
        ),
        "records of a step": least(
            (later == 0) & (apart > 0),
            "Records that are {apart} apart are drawn together {often} often than by chance: groups are in a batch or "
            "out of it.",
        ),
        "records in other steps": least(
            (later > 0) & (apart != 0),
            "Which records a batch has depends on that of {later} steps before: those {apart} further are drawn "
            "{often} often.",
        ),
    }


def _gamma(z: Array, skewness: Array) -> Array:
    """Upper tail of a sum of mean 0, variance 1 and this skewness."""
    skewness = np.where(np.abs(skewness) < 1e-9, 1e-9, skewness)
    shape = 4 / skewness**2
    x = shape + z * np.sqrt(shape) * np.sign(skewness)
    upper, lower = stats.gamma.sf(np.maximum(x, 0), shape), stats.gamma.cdf(np.maximum(x, 0), shape)
    exact = np.where(skewness > 0, upper, lower)
    return np.where(np.abs(skewness) < 1e-3, stats.norm.sf(z), exact)  # type: ignore[no-any-return]


def _following(sizes: Array, variance: float) -> float:
    """p-value of "the size of a batch says nothing of the next one's", sizes less their mean."""
    found = float((sizes[1:] * sizes[:-1]).sum()) / variance / math.sqrt(len(sizes) - 1)
    return min(1.0, 2 * _two_sided(stats.norm.sf, found))  # twice: a sum of products has somewhat longer tails


def _empty(sample: Any, rate: float, steps: int, seed: int) -> float:
    """p-value of the number of empty batches, of so few records that many are."""
    few = max(2, round(1 / rate))
    drawn = _checked(sample(few, steps, 2 * seed + 3), few, steps)
    return float(_binomial(np.array(sum(not len(batch) for batch in drawn)), steps, (1 - rate) ** few))


def _two_sided(tail: Any, z: float) -> float:
    return float(2 * tail(abs(z)))


def _dispersion(counts: Array, mean: float, variance: float) -> float:
    """p-value of "these counts are independent and binomial": their squared deviations against chi-square."""
    total = float(((counts - mean) ** 2).sum() / variance)
    return float(min(1.0, 2 * min(stats.chi2.sf(total, len(counts)), stats.chi2.cdf(total, len(counts)))))
