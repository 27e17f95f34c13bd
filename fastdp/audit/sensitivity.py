"""Tests that no sample changes the sum by more than C: alone, in a batch, and in later steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .finding import Finding, Result, audit_test
from .measure import Probe
from .noise_trajectory import walker
from .reference_samples import alone, confident, gradient_norm, steady, taken_or_not, weak
from .step_contributions import AT_THE_END, Step, moving, off_at_the_end, walked
from .trainable import Array, Batch, Lacking, is_floats, pick, rows
from .update import echo, gain

TOLERANCE = 1e-3
COMPANY = 7
OWN = (0.03, 0.3, 0.93)  # C over a sample's own gradient
STEPS = 24
LATER = {"sgd": 0.03, "adam": 0.15}  # relative; the weights move, and Adam's step is only nearly linear


class Contribution(NamedTuple):
    """A contribution over C, less what rounding can do; what the sample was; C."""

    size: float
    sample: str
    norm: float


@audit_test
def sensitivity(probe: Probe, *, tolerance: float = TOLERANCE) -> Finding:
    """Measures the largest contribution of one sample to the sum, over C, for samples that try to exceed it.

    The samples are ordinary ones, and ones with large labels, wrong labels, and inputs scaled by 10 to 1000 and down to
    0. Each is measured as a separate batch, as the difference that it makes to a batch of seven others, and (SGD) in a
    second step, at several clipping norms, as far as the rounding of the parameters shows a contribution to
    `tolerance`. Then come samples of small gradients, each at a C somewhat below its own norm; samples of every label;
    and every step of runs of 48 on those, at a small C and at one of the size of the gradients.

    statistic: the largest contribution over C; bound: 1 and the tolerance. Needs learning_rate.
    """
    gain(probe)  # which it needs
    tolerance = max(tolerance, 0.02) if probe.optimizer == "adam" else tolerance  # its small steps round more
    norms = _norms(probe)
    if not any(_slack(probe, norm) <= 2 * tolerance for norm in norms):
        raise Lacking("contributions are too small beside the rounding of the parameters: take a larger learning rate "
                      "for the audit, or float64")  # fmt: skip
    found = [*_adversarial(probe, norms, tolerance), *_at_their_own_norms(probe)]
    if probe.answers_to_norm:
        norm, each = alone(probe)
        found += [_contribution(probe, change, norm, f"{what}, alone") for what, _, change in each]
    found = [each for each in found if math.isfinite(each.size)]
    if not found:
        raise Lacking("every contribution is infinite or NaN, even of ordinary samples")
    worst = max(found)
    result = Result(norms=norms, worst=worst.size, sample=worst.sample, norm=worst.norm, measured=len(found))
    if worst.size > 1 + tolerance:
        return result.bug(
            f"One sample changes the sum by {worst.size:.4g} C at C = {worst.norm:.3g} ({worst.sample}): noise for C "
            "does not hide it. Look at the norm (of all parameters together? of all uses of a tied weight? in which "
            "precision?), at the factor's shape and sense, and at samples that are counted more than once.",
            worst.size, None, 1 + tolerance,
        )  # fmt: skip
    steps = [step for step in [*walked(probe), *moving(probe)] if step.samples]
    result.data["steps"] = len(steps)
    if (found_later := _in_later_steps(probe, result, steps, tolerance)) is not None:
        return found_later
    text = f"No sample changes the sum by more than C: at most {worst.size:.4g} C in {len(found)} trials."
    return result.passed(text, worst.size, None, 1 + tolerance)


def _in_later_steps(probe: Probe, result: Result, steps: list[Step], tolerance: float) -> Finding | None:
    """A bug of the steps of a run, of its end, or of what a sample contributes to later ones; None where there is none.

    Runs are compared as a whole where their steps cannot be read.
    """
    over = [step for step in steps if step.share > 1 + tolerance]
    if over:
        most = max(over, key=lambda step: step.share)
        text = (
            f"In step {most.number} of a run one sample contributes {most.share:.4g} C ({most.what}); in "
            f"{len(over)} of {len(steps)} steps it is more than C. Look at what the loop does at its k-th step, at "
            "factors, norms and weights that are kept from earlier steps, and at samples that get a threshold of "
            "their own."
        )
        return result.bug(text, most.share, None, 1 + tolerance)
    off = off_at_the_end(probe) if not steps or walker(probe)[0] != "trajectory" else None
    if off is not None and off > AT_THE_END:
        text = (
            f"A run of {STEPS} steps ends {off:.3g} C away from where its samples' contributions alone add up to: in "
            "some step they are not clipped to C, or count again. Look at what the loop does at its k-th step."
        )
        return result.bug(text, off, None, AT_THE_END)
    left = echo(probe, 4) if probe.optimizer == "sgd" else None
    if left is not None and left[-1] > 1 + LATER["sgd"]:
        text = (
            f"A sample contributes {left[-1]:.3g} times as much to the fourth step of a run as to the first. Look "
            "for a threshold that grows in the loop (and audit without a learning rate that does)."
        )
        return result.bug(text, float(left[-1]), None, 1 + LATER["sgd"])
    growth = growth_of_a_run(probe) if off is None and not steps else None
    if growth is not None and not abs(growth - 1) < LATER[probe.optimizer]:
        text = (
            f"{STEPS} steps on one sample change the parameters {growth:.3g} times as much as their share of C: in "
            "some later step the gradient is not clipped to C. Look at what the loop does at its k-th step, and at "
            "factors and norms that are kept."
        )
        return result.bug(text, growth, None, 1 + LATER[probe.optimizer])
    return None


def _adversarial(probe: Probe, norms: list[float], tolerance: float) -> list[Contribution]:
    """What adversarial samples change alone, in a company of which the sum is known, and (SGD) in a second step."""
    company, first, other = probe.data(COMPANY, 23), probe.data(1, 31), probe.data(1, 137)
    found = []
    for norm in norms:
        base, after = probe.summed(company, norm), probe.change([first, other], norm)
        for how, sample in _adversaries(probe):
            with taken_or_not():
                found.append(_contribution(probe, probe.summed(sample, norm), norm, f"{how}, alone"))
                if _slack(probe, norm) > 2 * tolerance:
                    continue
                change = probe.summed(probe.together([company, sample]), norm) - base
                found.append(_contribution(probe, change, norm, f"{how}, with {COMPANY} others"))
                if probe.optimizer == "sgd":  # half of what it makes to take the place of another, at most C too;
                    # what the first step left in a momentum is the same in both
                    change = (probe.change([first, sample], norm) - after) * probe.divisor(1) / 2
                    found.append(_contribution(probe, change, norm, f"{how}, in the second step"))
    return found


def _at_their_own_norms(probe: Probe) -> Iterator[Contribution]:
    """Contributions at C a little and far below each sample's own gradient, small ones among them."""
    samples = [("ordinary sample 0", pick(probe.data(4, 29), [0]))]
    for share in (1e-2, 1e-4):
        with contextlib.suppress(Exception):  # a script that takes no such labels
            samples.append((f"a label that is predicted to {share:g}", weak(probe, share, 311)))
    with contextlib.suppress(Exception):
        samples.append(("a label that the model is sure of", confident(probe, 313)))
    for how, sample in samples:
        size = None
        with taken_or_not():
            size = gradient_norm(probe, sample)
        if size is None or size * gain(probe) <= 50 * probe.resolution:
            continue
        for norm in (share * size for share in OWN):
            rounding = 2 * probe.resolution * probe.divisor(1) / gain(probe) / norm
            share = float(np.linalg.norm(probe.summed(sample, norm))) / gain(probe) / norm
            yield Contribution(share - rounding, f"{how}, whose gradient is {size:.2g}", norm)


def _contribution(probe: Probe, change: Array, norm: float, sample: str) -> Contribution:
    with np.errstate(all="ignore"):
        share = float(np.linalg.norm(change)) / gain(probe) / norm
    return Contribution(share - _slack(probe, norm), sample, norm)


def growth_of_a_run(probe: Probe) -> float | None:
    """Ten times what a tenth of C does in many steps, over what C does, or the other way: 1 where all are clipped."""
    regime, drifting = probe.regime, bool(np.any(probe.drift))
    norm, sample = steady(probe, 0.01 if probe.optimizer == "sgd" else 0.3)
    many, others = [sample] * STEPS, [probe.data(1, 319)] * STEPS

    def moved(c: float) -> float:
        return float(np.linalg.norm(probe.change(many, c) - (probe.change(others, c) if drifting else 0.0)))

    if regime.kind == "switched":  # nothing, if the sample never counts
        return None if drifting else 1 + moved(norm) / max(regime.changes)
    if regime.kind != "linear":
        return None
    sizes = moved(norm), moved(norm / 10)
    if min(sizes) <= 300 * probe.resolution:
        return None
    share = sizes[0] / sizes[1] / 10
    return max(share, 1 / share)


def _slack(probe: Probe, norm: float) -> float:
    """What rounding of the parameters can add to a contribution over C."""
    return 2 * probe.resolution * probe.divisor(COMPANY + 1) / gain(probe) / norm


def _norms(probe: Probe) -> list[float]:
    middle = probe.regime.norm if probe.answers_to_norm else max(probe.regime.changes) / gain(probe) / 10
    return [
        middle * k for k in ((1e-3, 0.1, 1.0) if probe.optimizer == "adam" else (1e-4, 0.01, 0.1, 1.0, 10.0, 100.0))
    ]


def _adversaries(probe: Probe) -> list[tuple[str, Batch]]:
    x, y = probe.data(4, 29)
    found = [(f"ordinary sample {k}", pick((x, y), [k])) for k in range(2)]
    found.append(("the sample with the largest label", probe.strong))
    with contextlib.suppress(Exception):  # no labels can be had
        found.append(("a wrong label", probe.by_wrong_label()))
    for scale in (0.0, 10.0, 1000.0) if is_floats(x) else ():
        sample = rows(x, [3]) * np.asarray(scale, x.dtype), rows(y, [3])
        found.append((f"inputs times {scale:g}" if scale else "inputs of zeros", sample))
    return found
