"""The two searches of Appendix B of "Finding private bugs": C* from which nothing is clipped, sigma* that is seen."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import Probe
from .paper_losses import change_in_loss, rounding, warm_batches
from .trainable import Batch, Lacking

NORMS = tuple(10.0**k for k in range(-2, 7))
SIGMAS = tuple(10.0**k for k in range(-8, 2))
TRIALS = 3  # the paper: several
SAME = 1e-3  # relative: two changes in loss are the same
SEEN = 0.01  # relative to the change in loss without noise: the noise is seen


def clipping_norm(
    probe: Probe, *, size: int = 8, norms: Sequence[float] = NORMS, trials: int = TRIALS,
    warm_up: int | None = None, batch: Batch | None = None,
) -> float:  # fmt: skip
    """Find C*: the least C of the grid from which the change in loss of a step without noise stays the same.

    Each trial has its own data, and begins after one step of SGD or five of Adam. C* is the largest of the trials.
    batch: look at this batch in place of ordinary ones (then one trial). Raises Lacking if the change never settles.
    """
    found = []
    for trial in range(trials if batch is None else 1):
        warm = warm_batches(probe, warm_up, 1, size, trial)
        there = probe.data(size, 11 + 100 * trial) if batch is None else batch
        seen = [change_in_loss(probe, there, norm, warm=warm) for norm in norms]
        last, before = seen[-1]
        same = [abs(change - last) <= SAME * abs(last) + rounding(probe, before) for change, _ in seen]
        found.append(next(norm for k, norm in enumerate(norms) if all(same[k:]) or k == len(norms) - 1))
    if max(found) == norms[-1]:
        raise Lacking(
            f"the change in loss still depends on C at C = {norms[-1]:.0e}, so there is no C from which nothing is "
            "clipped: gradients are larger, or every one is scaled to C (normalised clipping)"
        )
    return max(found)


def noise_multiplier(
    probe: Probe, norm: float, *, size: int = 8, sigmas: Sequence[float] = SIGMAS,
    trials: int = TRIALS, warm_up: int | None = None,
) -> float | None:  # fmt: skip
    """Find sigma*: the least sigma of the grid from which the change in loss at C* differs from that without noise.

    It is the smallest of the trials; None if even the largest sigma makes no difference.
    """
    found = []
    for trial in range(trials):
        warm = warm_batches(probe, warm_up, 1, size, trial)
        there, noise = probe.data(size, 11 + 100 * trial), 41 + trial
        still, before = change_in_loss(probe, there, norm, warm=warm, seed=noise)
        least = SEEN * abs(still) + rounding(probe, before)
        apart = [abs(change_in_loss(probe, there, norm, sigma, warm=warm, seed=noise)[0] - still) for sigma in sigmas]
        found += [sigma for k, sigma in enumerate(sigmas) if not any(change <= least for change in apart[k:])]
    return min(found, default=None)
