"""How much one sample can change: never more than C, alone, in company, and after other steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .crowd import alone
from .every_step import AT_THE_END, moving, walked, worst_at_the_end
from .finding import BUG, OK, Finding, not_tested
from .known import confident, gradient_norm, steady, weak
from .measure import Probe
from .path import walker
from .trainable import Array, AuditError, Batch, pick, rows
from .update import echo
from .update import gain as rate_of

NAME = "sensitivity"
TOLERANCE = 1e-3
COMPANY = 7
OWN = (0.03, 0.3, 0.93)  # C over a sample's own gradient
STEPS = 24
LATER = {"sgd": 0.03, "adam": 0.15}  # relative; the weights move, and Adam's step is only nearly linear


def sensitivity(trainable: Any, *, seed: int = 0, tolerance: float = TOLERANCE) -> Finding:
    """Measures the largest contribution of one sample to the sum, over C, for samples that try to exceed it.

    The samples are ordinary ones, and ones with large labels, wrong labels, and inputs scaled by 10 to 1000 and down to
    0. Each is measured as a separate batch, as the difference that it makes to a batch of seven others, and (SGD) in a
    second step, at several clipping norms, as far as the rounding of the parameters shows a contribution to
    `tolerance`. Then come samples of small gradients, each at a C somewhat below its own norm; samples of every label;
    and every step of runs of 48 on those, at a small C and at one of the size of the gradients.

    statistic: the largest contribution over C; bound: 1 and the tolerance. Needs learning_rate.
    """
    probe = Probe.of(trainable, seed)
    gain = rate_of(probe)
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
            for label, change in _moved(probe, sample, norm, (company, base) if seen else None, first, after):
                with np.errstate(all="ignore"):
                    size = float(np.linalg.norm(change)) / gain / norm
                if math.isfinite(size):
                    found.append((size - slack, f"{how}, {label}", norm))
    found += _at_their_own_norms(probe, gain, adversaries)
    norm, each = alone(probe) if probe.regime.kind in ("linear", "switched") else (1.0, [])
    slack = _slack(probe, gain, norm)
    found += [(float(np.linalg.norm(change)) / gain / norm - slack, f"{what}, alone", norm) for what, _, change in each]
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
    steps = [step for step in [*walked(probe), *moving(probe)] if step.samples]
    most = max(steps, key=lambda step: step.share, default=None)
    if most is not None and most.share > 1 + tolerance:
        over = [step.number for step in steps if step.share > 1 + tolerance]
        text = (
            f"In step {most.number} of a run one sample contributes {most.share:.4g} C ({most.what}); in "
            f"{len(over)} of {len(steps)} steps it is more than C. Look at what the loop does at its k-th step, at "
            "factors, norms and weights that are kept from earlier steps, and at samples that get a threshold of "
            "their own."
        )
        return Finding(NAME, BUG, text, most.share, None, 1 + tolerance, data=data)
    data["steps"] = len(steps)
    odd = worst_at_the_end(probe) if not steps or walker(probe)[0] != "trajectory" else None
    if odd is not None and odd > AT_THE_END:
        text = (
            f"A run of {STEPS} steps ends {odd:.3g} C away from where its samples' contributions alone add up to: in "
            "some step they are not clipped to C, or count again. Look at what the loop does at its k-th step."
        )
        return Finding(NAME, BUG, text, odd, None, AT_THE_END, data=data)
    left = echo(probe, 4) if probe.optimizer == "sgd" else None
    if left is not None and left[-1] > 1 + LATER["sgd"]:
        text = (
            f"A sample contributes {left[-1]:.3g} times as much to the fourth step of a run as to the first. Look "
            "for a threshold that grows in the loop (and audit without a learning rate that does)."
        )
        return Finding(NAME, BUG, text, float(left[-1]), None, 1 + LATER["sgd"], data=data)
    growth = _later(probe) if odd is None and not steps else None
    if growth is not None and not abs(growth - 1) < LATER[probe.optimizer]:
        text = (
            f"{STEPS} steps on one sample change the parameters {growth:.3g} times as much as their share of C: in "
            "some later step the gradient is not clipped to C. Look at what the loop does at its k-th step, and at "
            "factors and norms that are kept."
        )
        return Finding(NAME, BUG, text, growth, None, 1 + LATER[probe.optimizer], data=data)
    text = f"No sample changes the sum by more than C: at most {worst:.4g} C in {len(found)} trials."
    return Finding(NAME, OK, text, worst, None, 1 + tolerance, data=data)


def _moved(
    probe: Probe, sample: Batch, norm: float, company: tuple[Batch, Array] | None, first: Batch, after: Array
) -> Iterator[tuple[str, Array]]:
    """What the sample changes alone, in a company of which the sum is given, and (SGD) in a second step.

    A sample that the script does not take (soft labels, perhaps) is left out.
    """
    try:
        yield "alone", probe.summed(sample, norm)
        if company is None:
            return
        yield f"with {COMPANY} others", probe.summed(probe.together([company[0], sample]), norm) - company[1]
        if probe.optimizer == "sgd":  # half of what it makes to take the place of another, at most C too;
            # what the first step left in a momentum is the same in both
            yield "in the second step", (probe.change([first, sample], norm) - after) * probe.divisor(1) / 2
    except AuditError:
        raise
    except Exception:  # noqa: BLE001
        return


def _at_their_own_norms(
    probe: Probe, gain: float, adversaries: list[tuple[str, Batch]]
) -> list[tuple[float, str, float]]:
    """Contributions at C a little and far below each sample's own gradient, small ones among them."""
    samples = adversaries[:1]
    for share in (1e-2, 1e-4):
        with contextlib.suppress(Exception):  # a script that takes no such labels
            samples.append((f"a label that is predicted to {share:g}", weak(probe, share, 311)))
    with contextlib.suppress(Exception):
        samples += [("a label that the model is sure of", sample) for sample in confident(probe, 313)]
    found = []
    for how, sample in samples:
        try:
            size = gradient_norm(probe, sample)
        except AuditError:
            raise
        except Exception:  # noqa: BLE001  (a label that the script does not take)
            continue
        if size is None or size * gain <= 50 * probe.resolution:
            continue
        for share in OWN:
            norm = share * size
            slack = 2 * probe.resolution * probe.divisor(1) / gain / norm
            contribution = float(np.linalg.norm(probe.summed(sample, norm))) / gain / norm
            if math.isfinite(contribution):
                found.append((contribution - slack, f"{how}, whose gradient is {size:.2g}", norm))
    return found


def _later(probe: Probe) -> float | None:
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
