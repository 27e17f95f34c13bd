"""Tests that a sample's contribution does not depend on the rest of the batch, nor on earlier steps' samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from .finding import Finding, Result, audit_test
from .later_steps import APART, of_schedule, walked
from .measure import Probe
from .reference_samples import ordinary_norm, weak
from .trainable import Array, Batch, is_floats, pick, rows

TOLERANCE = {"sgd": 0.01, "adam": 0.1}  # relative; of Adam, whose step is only nearly linear
LATER = 0.03  # relative, of a second step: the first has moved the weights a little
ORDINARY, MANY = 6, 131  # samples; the largest batch
SHARES = (0.6, 1000.0)  # C over the norm of an ordinary gradient: among those of samples, and above all of them


@audit_test
def per_sample_independence(probe: Probe) -> Finding:
    """Compares the sum of a batch with the sum of its samples' separate steps, without noise.

    C is below the norms of all gradients, among them, and above them. The batches have ordinary samples, samples with
    huge, small and no gradients, and 131 samples. Then come two steps (SGD): the effect of another sample in the second
    must be its effect in the first, whatever sample the first had. Then (SGD, with `trajectory`) every one of 48 steps,
    some of them on no sample, is compared with what its samples contribute alone.

    statistic: the norm of the difference over the largest contribution of a sample.
    """
    probe.check_sums()
    pool, bound, typical = _pool(probe), TOLERANCE[probe.optimizer], ordinary_norm(probe)
    norms = [probe.usual_norm, *(typical * share for share in SHARES if typical is not None)]
    found = [(off, f"{company}, at C = {norm:.3g}") for norm in norms for off, company in _sums(probe, pool, norm)]
    worst, where = max(found, key=lambda each: np.nan_to_num(each[0], nan=np.inf))
    result = Result(norm=norms[0], norms=norms, batches=len(found), where=where)
    if not worst <= bound:
        return result.bug(
            f"A batch is not the sum of its samples: the difference is {worst:.3g} of a sample's contribution "
            f"({where}). Other samples change what one contributes. Look for clipping of the batch, norms, thresholds "
            "or factors shared between samples, a loss divided by something of the batch (its tokens, its classes), "
            "attention or normalisation over the batch.",
            worst, None, bound,
        )  # fmt: skip
    for norm in norms:
        for difference, company in _second_steps(probe, pool, norm):
            if not difference <= LATER:
                text = (
                    f"What a sample contributes to a second step depends on the first one's: by {difference:.3g} of a "
                    f"contribution, after {company}, at C = {norm:.3g}. Look for a threshold that follows the norms of "
                    "earlier batches without noise, and for sums or norms that are kept from step to step."
                )
                return result.bug(text, difference, None, LATER)
    steps = walked(probe)
    many = [step for step in steps if step.apart > APART]
    if many:
        odd = max(many, key=lambda step: step.apart)
        return result.bug(
            f"Step {odd.number} of a run ({odd.what}) is {odd.apart:.3g} C away from what its samples contribute alone "
            f"({len(many)} of {len(steps)} steps are). Look for sums of earlier steps that are added again, on an "
            "empty batch perhaps, and for factors, norms or thresholds that are kept or changed from step to step.",
            odd.apart, None, APART,
        )  # fmt: skip
    text = f"A batch is the sum of its samples, to {max(worst, 0):.1e} of one's contribution, in {len(found)} batches."
    return result.passed(text + of_schedule(probe), worst, None, bound)


def _pool(probe: Probe) -> dict[str, Batch]:
    """Ordinary samples by their numbers, and others by what they are."""
    x, y = probe.data(ORDINARY, 39)
    pool = {str(k): pick((x, y), [k]) for k in range(ORDINARY)} | {"huge": probe.strong}
    if probe.optimizer != "sgd":
        return pool
    for name, share in (("none", 0.0), ("small", 1e-4)):
        with contextlib.suppress(Exception):  # a script that takes no such labels
            sample = weak(probe, share, 301)
            probe.change([probe.together([sample, pool["0"]])], 1.0)
            pool[name] = sample
    if is_floats(x):
        pool["large inputs"] = rows(x, [3]) * np.asarray(30, x.dtype), rows(y, [3])
    return pool


def _companies(pool: dict[str, Batch], linear: bool) -> Iterator[tuple[str, list[str]]]:
    some = [str(k) for k in range(ORDINARY)]
    yield "ordinary samples", some
    for size in (2, ORDINARY):
        yield f"{size} ordinary samples and one of a huge gradient", [*some[:size], "huge"]
    for name in [each for each in ("none", "small") if each in pool]:
        yield f"an ordinary sample, two of {name} gradient", ["0", name, name]
        yield f"a huge gradient and an ordinary one, four of {name} gradient", ["huge", *[name] * 4, "1"]
    if "large inputs" in pool:
        yield "ordinary samples and one of large inputs", [*some, "large inputs"]
    if linear:
        yield f"{MANY} samples", [some[k % ORDINARY] for k in range(MANY)]


def _sums(probe: Probe, pool: dict[str, Batch], norm: float) -> Iterator[tuple[float, str]]:
    alone = {name: probe.summed(sample, norm) for name, sample in pool.items()}
    if "none" in pool and np.linalg.norm(alone["none"]) > 0.1 * np.linalg.norm(alone["0"]):
        # every gradient is scaled to the norm C: what is scaled up of none is rounding, another one in each company
        pool = {name: sample for name, sample in pool.items() if name != "none"}
    for what, names in _companies(pool, probe.optimizer == "sgd"):
        batch = probe.together([pool[name] for name in names])
        largest = max(float(np.linalg.norm(alone[name])) for name in names)
        slack = 4 * probe.resolution * probe.divisor(len(names))
        expected = np.sum([alone[name] for name in names], 0)
        difference = float(np.linalg.norm(probe.summed(batch, norm) - expected))
        yield (difference - slack) / max(largest, probe.resolution), what


def _second_steps(probe: Probe, pool: dict[str, Batch], norm: float) -> Iterator[tuple[float, str]]:
    """Replacing a sample of the second step against replacing one of the first: a momentum is the same in both."""
    if probe.optimizer != "sgd" or not probe.answers_to_norm:
        return
    below = norm == probe.regime.norm
    if below and probe.regime.kind == "linear":
        norm /= 30
    # above the gradients' norms only samples that move the weights by nothing: others move the gradients
    first = [name for name in (("none", "small", "huge") if below else ("none", "small")) if name in pool]

    def made(before: list[Batch]) -> Array:
        return probe.change([*before, pool["0"]], norm) - probe.change([*before, pool["1"]], norm)

    alone = made([])
    size = float(np.linalg.norm(alone))
    if not np.isfinite(size) or size <= 100 * probe.resolution:
        return
    for name in first:
        difference = float(np.linalg.norm(made([pool[name]]) - alone))
        yield (difference - 4 * probe.resolution) / size, f"a sample of {name} gradient"
