"""What a sample contributes must depend on nothing but itself: not on its company, nor on earlier steps' samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .every_step import APART, Step, walked
from .finding import BUG, OK, Finding
from .known import ordinary_norm, weak
from .measure import Probe
from .trainable import Array, Batch, pick, rows
from .update import update

NAME = "per_sample_independence"
TOLERANCE = {"sgd": 0.01, "adam": 0.1}  # relative; of Adam, whose step is only nearly linear
LATER = 0.03  # relative, of a second step: the first has moved the weights a little
ORDINARY, MANY = 6, 131  # samples; the largest batch
SHARES = (0.6, 1000.0)  # C over the norm of an ordinary gradient: among those of samples, and above all of them


def per_sample_independence(trainable: Any, *, seed: int = 0) -> Finding:
    """Compares the sum of a batch with the sum of its samples' separate steps, without noise.

    C is below the norms of all gradients, among them, and above them. The batches have ordinary samples, samples with
    huge, small and no gradients, and 131 samples. Then come two steps (SGD): the effect of another sample in the second
    must be its effect in the first, whatever sample the first had. Then every one of 48 steps, some of them on no
    sample, is compared with what its samples contribute alone.

    statistic: the norm of the difference over the largest contribution of a sample.
    """
    probe = Probe.of(trainable, seed)
    pool = _pool(probe)
    bound, tried, norms = TOLERANCE[probe.optimizer], 0, _norms(probe)
    worst, where = 0.0, ""
    for norm in norms:
        for difference, company in _sums(probe, pool, norm):
            tried += 1
            if not difference <= worst:
                worst, where = difference, f"{company}, at C = {norm:.3g}"
    data: dict[str, Any] = {"norm": norms[0], "norms": norms, "batches": tried, "where": where}
    if not worst <= bound:
        text = (
            f"A batch is not the sum of its samples: the difference is {worst:.3g} of a sample's contribution "
            f"({where}). Other samples change what one contributes. Look for clipping of the batch, norms, thresholds "
            "or factors shared between samples, a loss divided by something of the batch (its tokens, its classes), "
            "attention or normalisation over the batch."
        )
        return Finding(NAME, BUG, text, worst, None, bound, data=data)
    for norm in norms:
        for difference, company in _second_steps(probe, pool, norm):
            if not difference <= LATER:
                text = (
                    f"What a sample contributes to a second step depends on the first one's: by {difference:.3g} of a "
                    f"contribution, after {company}, at C = {norm:.3g}. Look for a threshold that follows the norms of "
                    "earlier batches without noise, and for sums or norms that are kept from step to step."
                )
                return Finding(NAME, BUG, text, difference, None, LATER, data=data)
    steps = walked(probe)
    if steps and max(steps, key=_apart).apart > APART[probe.optimizer]:
        odd = max(steps, key=_apart)
        many = sum(step.apart > APART[probe.optimizer] for step in steps)
        text = (
            f"Step {odd.number} of a run ({odd.what}) is {odd.apart:.3g} C away from what its samples contribute alone "
            f"({many} of {len(steps)} steps are). Look for sums of earlier steps that are added again, on an empty "
            "batch perhaps, and for factors, norms or thresholds that are kept or changed from step to step."
        )
        return Finding(NAME, BUG, text, odd.apart, None, APART[probe.optimizer], data=data)
    data["steps"] = len(steps)
    return Finding(NAME, OK, f"A batch is the sum of its samples, to {max(worst, 0):.1e} of one's contribution, in "
                   f"{tried} batches.", worst, None, bound, data=data)  # fmt: skip


def _apart(step: Step) -> float:
    return step.apart


def _norms(probe: Probe) -> list[float]:
    """C below samples' gradients, among them and above; where none are clipped, any."""
    regime = probe.regime
    found = [regime.norm if regime.kind in ("linear", "switched") else 1.0]
    typical = ordinary_norm(probe)
    return found + ([typical * share for share in SHARES] if typical is not None else [])


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
    if isinstance(x, np.ndarray) and x.dtype.kind == "f":
        pool["large inputs"] = rows(x, [3]) * np.asarray(30, x.dtype), rows(y, [3])
    return pool


def _companies(pool: dict[str, Batch], linear: bool) -> Iterator[tuple[str, list[str]]]:
    some = [str(k) for k in range(ORDINARY)]
    yield "ordinary samples", some
    for size in (2, ORDINARY):
        yield f"{size} ordinary samples and one of a huge gradient", [*some[:size], "huge"]
    for name in ("none", "small"):
        if name in pool:
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
    if probe.optimizer != "sgd" or probe.regime.kind not in ("linear", "switched"):
        return
    below = norm == probe.regime.norm
    if below and probe.regime.kind == "linear":
        norm /= 30
    # above the gradients' norms only samples that move the weights by nothing: others move the gradients
    first = [name for name in (("none", "small", "huge") if below else ("none", "small")) if name in pool]

    def made(before: list[Batch]) -> Array:
        return probe.change([*before, pool["0"]], norm) - probe.change([*before, pool["1"]], norm)

    alone = made([]) * update(probe).later
    size = float(np.linalg.norm(alone))
    if not np.isfinite(size) or size <= 100 * probe.resolution:
        return
    for name in first:
        difference = float(np.linalg.norm(made([pool[name]]) - alone))
        yield (difference - 4 * probe.resolution) / size, f"a sample of {name} gradient"
