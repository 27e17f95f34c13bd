"""Tests that no sample changes the sum by more than C: alone, in a batch, and in later steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .finding import Finding, Result, audit_test
from .later_steps import gain, walked
from .measure import Probe
from .reference_samples import alone, confident, gradient_norm, taken_or_not, weak
from .trainable import Array, Batch, Lacking, is_floats, pick, rows

COMPANY = 7
OWN = (0.03, 0.3, 0.93)  # C over a sample's own gradient


class Contribution(NamedTuple):
    """A contribution over C, less what rounding can do; what the sample was; C."""

    size: float
    sample: str
    norm: float


@audit_test
def sensitivity(probe: Probe, *, tolerance: float = 1e-3) -> Finding:
    """Measures the largest contribution of one sample to the sum, over C, for samples that try to exceed it.

    The samples are ordinary ones, and ones with large labels, wrong labels, and inputs scaled by 10 to 1000 and down to
    0. Each is measured as a separate batch, as the difference that it makes to a batch of seven others, and (SGD) in a
    second step, at several clipping norms, as far as the rounding of the parameters shows a contribution to
    `tolerance`. Then come samples of small gradients, each at a C somewhat below its own norm; samples of every label;
    and (SGD, with `trajectory`) every step of a run of 48 on those.

    statistic: the largest contribution over C; bound: 1 and the tolerance. Needs learning_rate.
    """
    gain(probe)  # which it needs
    probe.check_sums()
    tolerance = max(tolerance, 0.02) if probe.optimizer == "adam" else tolerance  # its small steps round more
    middle = probe.regime.norm if probe.answers_to_norm else max(probe.regime.changes) / gain(probe) / 10
    scales = (1e-3, 0.1, 1.0) if probe.optimizer == "adam" else (1e-4, 0.01, 0.1, 1.0, 10.0, 100.0)
    norms = [middle * scale for scale in scales]
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
            "precision?), at the factor's shape and sense, at samples that are counted more than once, "
            "and at the learning rate that the audit was told.",
            worst.size, None, 1 + tolerance,
        )  # fmt: skip
    steps = [step for step in walked(probe) if step.samples]
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
    text = (
        f"No sample changes the sum by more than C: at most {worst.size:.4g} C in {len(found)} trials and "
        f"{len(steps)} steps of a run."
    )
    return result.passed(text, worst.size, None, 1 + tolerance)


def _adversarial(probe: Probe, norms: list[float], tolerance: float) -> Iterator[Contribution]:
    """What adversarial samples change alone, in a company of which the sum is known, and (SGD) in a second step."""
    company, first, other = probe.data(COMPANY, 23), probe.data(1, 31), probe.data(1, 137)
    for norm in norms:
        base, after = probe.summed(company, norm), probe.change([first, other], norm)
        for how, sample in _adversaries(probe):
            with taken_or_not():
                yield _contribution(probe, probe.summed(sample, norm), norm, f"{how}, alone")
                if _slack(probe, norm) > 2 * tolerance:
                    continue
                change = probe.summed(probe.together([company, sample]), norm) - base
                yield _contribution(probe, change, norm, f"{how}, with {COMPANY} others")
                if probe.optimizer == "sgd":  # half of what it makes to take the place of another, at most C too;
                    # what the first step left in a momentum is the same in both
                    change = (probe.change([first, sample], norm) - after) * probe.divisor(1) / 2
                    yield _contribution(probe, change, norm, f"{how}, in the second step")


def _at_their_own_norms(probe: Probe) -> Iterator[Contribution]:
    """Contributions at C a little and far below each sample's own gradient, small ones among them."""
    made = [
        ("ordinary sample 0", lambda: pick(probe.data(4, 29), [0])),
        ("a label that is predicted to 0.01", lambda: weak(probe, 1e-2, 311)),
        ("a label that is predicted to 0.0001", lambda: weak(probe, 1e-4, 311)),
        ("a label that the model is sure of", lambda: confident(probe, 313)),
    ]
    for how, make in made:
        with taken_or_not():
            sample = make()
            size = gradient_norm(probe, sample)
            if size is None or size * gain(probe) <= 50 * probe.resolution:
                continue
            for norm in (share * size for share in OWN):
                rounding = 2 * probe.resolution * probe.divisor(1) / gain(probe) / norm
                share = probe.contribution(sample, norm) / gain(probe) / norm
                yield Contribution(share - rounding, f"{how}, whose gradient is {size:.2g}", norm)


def _contribution(probe: Probe, change: Array, norm: float, sample: str) -> Contribution:
    with np.errstate(all="ignore"):
        share = float(np.linalg.norm(change)) / gain(probe) / norm
    return Contribution(share - _slack(probe, norm), sample, norm)


def _slack(probe: Probe, norm: float) -> float:
    """What rounding of the parameters can add to a contribution over C."""
    return 2 * probe.resolution * probe.divisor(COMPANY + 1) / gain(probe) / norm


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
