"""Measures what samples contribute to each of dozens of steps: at most C, and what they contribute alone.

A model is trained without noise on samples of all labels in turn, and on none now and then, and read after every step.
At a C far below the gradients the weights hardly move: a step is then the sum of what its samples contribute alone. At
a C of their size the weights move from step to step, and a contribution stays below C nevertheless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .measure import Probe, remembered
from .noise_trajectory import Walk, drifting_part, memory, steps_of, walker
from .reference_samples import alone, ordinary_norm, taken_or_not
from .trainable import Array, Batch, pick
from .update import Update, gain, update

STEPS, MOVING, WHOLE = 48, 48, 24  # of the walk at a small C, of that at a large one, of a run that is read at its end
SHARES = (0.03, 0.3)  # least and largest C of the walk over that of the samples alone
ROUNDING = 1.6e-3  # of a contribution, wanted
NONE = 0.2  # of the steps are on no sample
LARGE = 0.5  # C of the second walk over an ordinary gradient's norm
APART = {"sgd": 0.06, "adam": 0.2}  # of a contribution, from what the samples of a step contribute alone
AT_THE_END = 0.1


class Step(NamedTuple):
    """A step: its number, what was in it and how many samples; norm of its sum over their number times C, and how far
    (over C) the sum is from what the samples contribute alone, both less what rounding can do."""

    number: int
    what: str
    samples: int
    share: float
    apart: float


@remembered
def walked(probe: Probe) -> list[Step]:
    """The steps at a small C; those that depart are looked at again at a third of it, where the weights move less.

    Empty where the model cannot be read after every step, or what it keeps of earlier steps is not understood.
    """
    walk, known = _read(probe)
    if walk is None or probe.regime.kind != "linear" or not alone(probe)[1] or not per_c(probe) > 0:
        return []
    script, norm, bound = _script(probe), _small(probe), APART[probe.optimizer]
    for chosen in (script, [part for part in script if part]):  # some scripts take no empty batch: its test says so
        with taken_or_not():
            found = _compared(probe, walk, known, chosen, norm)
            if any(step.apart > bound for step in found):
                again = _compared(probe, walk, known, chosen, norm / 3)
                found = [min(pair, key=lambda step: step.apart) for pair in zip(found, again, strict=True)]
            return found
    return []


def off_at_the_end(probe: Probe) -> float | None:
    """How far a run of 24 steps is from what its samples contribute alone, over C; None where it cannot be told.

    For loops that are not read after every step of a run: a counter of the loop begins anew in each.
    """
    known, found = update(probe), alone(probe)[1] if probe.regime.kind == "linear" else []
    if known.kind == "unknown" or not found or np.any(probe.drift) or probe.optimizer != "sgd":
        return None
    norm, order = _small(probe), np.random.default_rng(probe.seed + 411).integers(0, len(found), WHOLE)
    weights = known.weights(WHOLE).sum(0)

    def apart(norm: float) -> float:
        moved = probe.change([found[k][1] for k in order], norm) * probe.divisor(1)
        due = weights @ np.stack([found[k][2] for k in order]) * norm / alone(probe)[0]
        slack = 2 * WHOLE**0.5 * probe.resolution * probe.divisor(1)
        return (float(np.linalg.norm(moved - due)) - slack) / per_c(probe) / norm / float(weights.max())

    found_at = apart(norm)
    return found_at if found_at <= AT_THE_END else min(found_at, apart(norm / 3))


def moving(probe: Probe) -> list[Step]:
    """Steps at a C of the gradients' size; `apart` is left at 0."""
    walk, known = _read(probe)
    found = alone(probe)[1] if walk is not None and probe.answers_to_norm and probe.optimizer == "sgd" else []
    if walk is None or not found:
        return []
    typical = ordinary_norm(probe)
    norm = 10 * probe.regime.norm if typical is None else LARGE * typical
    order = np.random.default_rng(probe.seed + 413).integers(0, len(found), MOVING)
    sums = _sums(probe, walk, known, [found[k][1] for k in order], norm)
    sizes = np.linalg.norm(sums, axis=1) * probe.divisor(1) / per_c(probe) / norm - _slack(probe, norm)
    return [Step(k + 1, found[order[k]][0], 1, float(size), 0.0) for k, size in enumerate(sizes)]


@remembered
def per_c(probe: Probe) -> float:
    """What a contribution of C changes, over C: the gain; where no learning rate is said, what the largest does."""
    if getattr(probe.trainable, "learning_rate", None) is not None:
        return gain(probe)
    norm, found = alone(probe)
    return max(float(np.linalg.norm(change)) for _, _, change in found) / norm


# ---------------------------------------------------------------------- inside


def _slack(probe: Probe, norm: float) -> float:
    """What rounding, and a momentum that is known nearly only, can add to a contribution over C."""
    known, unit = update(probe), per_c(probe) * norm / probe.divisor(1)
    rounding = 4 * probe.resolution / unit
    if known.kind == "plain":
        return rounding
    return rounding + (2e-3 + 1e-3 * float(np.linalg.norm(probe.drift)) / unit) / (1 - abs(known.momentum))


def _small(probe: Probe) -> float:
    """C of the walk."""
    norm = alone(probe)[0]
    if np.any(probe.drift):  # beside which contributions must not be too small
        return norm * max(SHARES)
    rounding = probe.resolution * probe.divisor(1) / per_c(probe) / norm
    return norm * float(np.clip(rounding / ROUNDING, *SHARES))


def _read(probe: Probe) -> tuple[Walk | None, Update]:
    """How the model is read after every step, and what it keeps of earlier ones; None where that is not understood."""
    _, walk = walker(probe)
    known, lags = update(probe), np.zeros(0)
    if walk is not None and probe.optimizer != "adam":
        kept, lags = memory(probe, walk)
        known = known if kept.kind == "unknown" else kept
    return (None if known.kind == "unknown" or len(lags) else walk), known


def _sums(probe: Probe, walk: Walk, known: Update, batches: Sequence[Batch], norm: float) -> Array:
    """The sums [steps, P] times the first step's gain over what they are divided by; no step where not finite."""
    with np.errstate(all="ignore"):
        moves = steps_of(probe, walk(batches, norm, 0.0, 1))
    if not np.isfinite(moves).all():
        return moves[:0]
    if not np.any(probe.drift):
        return known.undone(moves)
    decayed = drifting_part(probe, moves)
    before, after = known.undone(moves - decayed), known.undone(moves) - decayed  # beside a momentum, and through it
    return min(before, after, key=lambda sums: float(np.linalg.norm(sums)))


def _script(probe: Probe) -> list[list[int]]:
    """Which samples are in each step; several only where they are divided by a number that stays."""
    draw, number = np.random.default_rng(probe.seed + 409), len(alone(probe)[1])
    sizes = [1] if probe.follows_batch else [1, 1, 1, 2, 5]
    script = [[int(k) for k in draw.integers(0, number, draw.choice(sizes))] for _ in range(STEPS)]
    for k in np.flatnonzero(draw.random(STEPS) < NONE):
        if k > 1:
            script[k] = []
    script[7], script[8] = [], []  # two running
    return script


def _compared(probe: Probe, walk: Walk, known: Update, script: list[list[int]], norm: float) -> list[Step]:
    base, found = alone(probe)
    batches: list[Any] = [
        probe.together([found[k][1] for k in part]) if part else pick(found[0][1], np.zeros(0, int)) for part in script
    ]
    sums = _sums(probe, walk, known, batches, norm) * probe.divisor(1)  # the size of a batch, where that divides: 1
    steps, unit, least = [], per_c(probe) * norm, _slack(probe, norm)
    for k, (part, total) in enumerate(zip(script, sums, strict=False)):
        due = np.sum([found[j][2] for j in part], 0) * norm / base if part else 0.0
        what = ", ".join(found[j][0] for j in part[:2]) + (", ..." if len(part) > 2 else "")
        size, apart = (float(np.linalg.norm(value)) / unit - least for value in (total, total - due))
        steps.append(Step(k + 1, what or "no sample", len(part), size / max(len(part), 1), apart))
    return steps
