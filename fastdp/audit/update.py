"""Recognises what an optimizer does with the sums that it is handed: plain SGD, momentum of several kinds, or Adam.

It is told from outside, by what one sample's contribution to each of four steps has done after the last. Momentum, with
dampening or Nesterov's, averages (1 - momentum) and Adam's are recognised; noise must go the same way as contributions,
so an update that multiplies both by the same number is no bug.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import optimize
from scipy.linalg import solve_triangular

from .measure import Probe, remembered
from .reference_samples import steady
from .trainable import Array

NEAR = 0.02  # largest departure of a contribution from what a kind of update does with it
STEPS = 4


class Update(NamedTuple):
    """Step t moves the parameters by rate * first * sum over s <= t of weights[t, s] * gradient s.

    kind: "plain", "momentum", "nesterov", "adam", or "unknown" for none of these. first: what is made of the first
    step's gradient at once, over learning_rate times it; later: what is made of a later one's at once, over that.
    """

    kind: str
    momentum: float = 0.0
    first: float = 1.0
    later: float = 1.0

    def weights(self, steps: int) -> Array:
        """[steps, steps], lower triangular; 1 in the first place."""
        back = np.subtract.outer(np.arange(steps), np.arange(steps))
        powers = np.tril(self.momentum ** np.maximum(back, 0))
        if self.kind == "momentum":
            powers[:, 1:] *= self.later
        elif self.kind == "nesterov":
            powers = np.where(back > 0, powers * self.momentum / (1 + self.momentum), powers)
        elif self.kind == "adam":
            powers *= ((1 - self.momentum) / (1 - self.momentum ** np.arange(1.0, steps + 1)))[:, None]
        return powers

    def undone(self, moves: Array) -> Array:
        """The gradients [steps, P], times rate * first, of which these are the steps' moves."""
        if self.kind in ("plain", "unknown"):
            return moves
        return solve_triangular(self.weights(len(moves)), moves, lower=True)  # type: ignore[no-any-return]


@remembered
def update(probe: Probe) -> Update:
    """The probe's update; "unknown", too, where samples do not answer in proportion to C."""
    found = echo(probe, STEPS)
    return Update("unknown") if found is None else _kind(probe, found)


def gain(probe: Probe) -> float:
    """Change of the parameters by a first step over the gradient that the optimizer is handed. Raises Lacking."""
    return probe.gain * update(probe).first


@remembered
def echo(probe: Probe, steps: int) -> Array | None:
    """What a contribution to the first, second, ... step has done after the last, over what it does in a single step.

    Ones for plain SGD. None where contributions are not proportional to C.
    """
    if not probe.answers_to_norm:
        return None
    norm, rest = steady(probe, 0.1 if probe.optimizer == "sgd" else 0.25)
    sample = probe.data(1, 241)
    base = probe.change([rest] * steps, norm)
    places = [[sample if k == place else rest for k in range(steps)] for place in range(steps)]
    apart = np.stack([probe.change(batches, norm) - base for batches in places])
    single = probe.change([sample], norm) - probe.change([rest], norm)
    size = float(single @ single)
    if not np.isfinite(apart).all() or size <= (100 * probe.resolution) ** 2:
        return None
    return apart @ single / size  # type: ignore[no-any-return]


def _kind(probe: Probe, found: Array) -> Update:
    """The kind of update that gives this echo."""
    last = float(found[-1])
    one, two = (float(value) for value in -np.diff(found)[-2:][::-1])  # what is left after one step, and after two
    candidates = [Update("plain")]
    if probe.optimizer == "adam":
        best = optimize.minimize_scalar(
            lambda beta: float(np.abs(Update("adam", beta).weights(len(found)).sum(0) - found).max()),
            bounds=(0.01, 0.999), method="bounded",
        )  # fmt: skip
        candidates.append(Update("adam", float(best.x)))
    elif abs(one) > 1e-9:
        ratio = two / one
        if 0 < ratio < 1:
            candidates.append(Update("nesterov", ratio, 1 + ratio))
        if 0 < last <= 1 + NEAR and abs(one / last) < 1:
            momentum = one / last
            later = last if abs(last - 1) > NEAR else 1.0
            candidates.append(Update("momentum", momentum, _averaged(probe, momentum) if later == 1 else 1.0, later))
    for candidate in candidates:
        if np.abs(candidate.weights(len(found)).sum(0) - found).max() < NEAR:
            return candidate
    return Update("unknown")


def _averaged(probe: Probe, momentum: float) -> float:
    """1 - momentum where a contribution is multiplied with that (m = momentum * m + (1 - momentum) * g), else 1."""
    if probe.regime.kind != "linear" or getattr(probe.trainable, "learning_rate", None) is None:
        return 1.0
    norm, sample = steady(probe, 0.1)
    share = float(np.linalg.norm(probe.summed(sample, norm))) / probe.gain / norm
    return 1 - momentum if abs(share / (1 - momentum) - 1) < 0.01 else 1.0
