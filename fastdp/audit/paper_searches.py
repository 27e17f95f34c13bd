"""The two searches of Appendix B of "Finding private bugs": C* from which nothing is clipped, sigma* that is seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .measure import Probe
from .paper_losses import change_in_loss, positive, rounding, warm_batches
from .trainable import AuditError, Batch, Lacking

NORMS = tuple(10.0**k for k in range(-2, 7))
SIGMAS = tuple(10.0**k for k in range(-8, 2))
TRIALS = 3  # the paper: several
SAME = 1e-3  # relative: two changes in loss are the same
SEEN = 0.01  # relative to the change in loss without noise: the noise is seen


class Unseen(Lacking):
    """No noise multiplier of the grid makes a difference to the loss."""


class Search(NamedTuple):
    """What a search found: the value, and the changes in loss of each trial at each value of the grid."""

    value: float
    grid: list[float]
    changes: list[list[float]]
    trials: list[float]


def clipping_norm(
    probe: Probe, *, size: int = 8, norms: Sequence[float] = NORMS, trials: int = TRIALS,
    warm_up: int | None = None, batch: Batch | None = None,
) -> Search:  # fmt: skip
    """Find C*: the least C of the grid from which the change in loss of a step without noise stays the same.

    Each trial has its own data, and begins after one step of SGD or five of Adam. C* is the largest of the trials.
    batch: look at this batch in place of ordinary ones (then one trial). Raises Lacking if the change never settles.
    """
    grid = sorted(positive("norms", norms, 3))
    changes, found = [], []
    for trial in range(_trials(trials) if batch is None else 1):
        batches = warm_batches(probe, warm_up, 1, size, trial)
        there = probe.data(size, 11 + 100 * trial) if batch is None else batch
        seen = [change_in_loss(probe, there, norm, warm=batches) for norm in grid]
        line, least = [change for change, _ in seen], rounding(probe, seen[0][1])
        changes.append(line)
        found.append(settled(grid, line, least))
    return Search(max(found), grid, changes, found)


def settled(norms: Sequence[float], changes: Sequence[float], least: float) -> float:
    """The first norm from which all changes equal the last. Raises Lacking if the last two differ."""
    last = changes[-1]
    if not math.isfinite(last):
        raise Lacking(f"needs a step without noise whose loss stays finite at C = {norms[-1]:.0e}")
    first = len(norms) - 1
    while first > 0 and abs(changes[first - 1] - last) <= SAME * abs(last) + least:
        first -= 1
    if first == len(norms) - 1:
        raise Lacking(
            f"the change in loss still depends on C at C = {norms[-1]:.0e}, so there is no C from which nothing is "
            "clipped: gradients are larger, or every one is scaled to C (normalised clipping)"
        )
    return norms[first]


def noise_multiplier(
    probe: Probe, norm: float, *, size: int = 8, sigmas: Sequence[float] = SIGMAS,
    trials: int = TRIALS, warm_up: int | None = None,
) -> Search:  # fmt: skip
    """Find sigma*: the least sigma of the grid from which the change in loss at C* differs from that without noise.

    It is the smallest of the trials. Raises Lacking if even the largest sigma makes no difference.
    """
    grid = sorted(positive("sigmas", sigmas, 2))
    changes, found = [], []
    for trial in range(_trials(trials)):
        batches = warm_batches(probe, warm_up, 1, size, trial)
        there, noise = probe.data(size, 11 + 100 * trial), 41 + trial
        still, before = change_in_loss(probe, there, norm, warm=batches, seed=noise)
        line = [change_in_loss(probe, there, norm, sigma, warm=batches, seed=noise)[0] for sigma in grid]
        changes.append(line)
        found.append(visible(grid, line, still, rounding(probe, before)))
    seen = [value for value in found if value is not None]
    if not seen:
        raise Unseen(f"noise makes no difference to the loss, not even at sigma = {grid[-1]:g} and C = {norm:g}")
    return Search(min(seen), grid, changes, [math.nan if value is None else value for value in found])


def visible(sigmas: Sequence[float], changes: Sequence[float], still: float, least: float) -> float | None:
    """The first sigma from which all changes differ from that without noise; None where the last does not."""
    first = len(sigmas)
    while first > 0 and not abs(changes[first - 1] - still) <= SEEN * abs(still) + least:
        first -= 1
    return sigmas[first] if first < len(sigmas) else None


def _trials(trials: int) -> int:
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise AuditError(f"trials must be a whole number of at least 1, not {trials!r}")
    return trials
