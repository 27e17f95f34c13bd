"""The steps of a run one by one: what a sample contributes to each, where `trajectory` shows the parameters.

A momentum adds earlier steps' gradients to a step's. It is measured, by what one sample's contribution does at each
later step, and taken off: what remains are the sums that the optimizer was handed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .measure import Probe
from .reference_samples import alone, steady, taken_or_not
from .statistics import deviation
from .trainable import Array, Batch, count, pick

FAR = 240  # steps after which it is seen whether the learning rate has changed
LAGS = 64  # steps over which a momentum is followed
ALIKE = 0.07  # largest difference of two changes of scale, one of which noise tells
NEAR = 0.02  # largest departure of a memory from none, or from a momentum's powers
STEPS, NONE = 48, 0.2  # of the run that is compared; share of them on no sample
SHARES = (0.03, 0.3)  # least and largest C of that run over that of the samples alone
FINER = (3, 9)  # parts of that C at which what differs is looked at again
SHRUNK = 0.2  # of the weights: most that weight decay may take off in that run, which turns gradients, too
ROUNDING = 1.6e-3  # of a contribution, wanted
APART = 0.06  # of a contribution: largest distance from what the samples of a step contribute alone


@functools.lru_cache(maxsize=4)
def followed(probe: Probe) -> bool:
    """Whether the parameters after every step can be read: `trajectory` is there, and agrees with runs."""
    if getattr(probe.trainable, "trajectory", None) is None:
        return False
    three, norm = [probe.data(1, 221 + k) for k in range(3)], probe.usual_norm
    found = moves(probe, three, norm)
    ends = np.stack([probe.change(three[:k], norm) for k in (1, 2, 3)])
    return found.shape == ends.shape and float(np.abs(found.cumsum(0) - ends).max()) <= 4 * probe.resolution


def moves(probe: Probe, batches: Sequence[Batch], norm: float, sigma: float = 0.0, seed: int = 1) -> Array:
    """What each step changed [steps, P]; no step where they cannot be read."""
    probe.steps += len(batches)
    found = probe.trainable.trajectory(  # type: ignore[attr-defined]
        probe.trainable.build(probe.seed), batches, clipping_norm=norm, noise_multiplier=sigma,
        seed=probe.noise_seed(seed),
    )  # fmt: skip
    if found is None:
        return np.zeros((0, probe.start.size))
    with np.errstate(all="ignore"):
        return np.diff(np.asarray(found, float), axis=0, prepend=probe.start[None])


@functools.lru_cache(maxsize=4)
def rate_later(probe: Probe) -> float:
    """The size of a step after 240 others over that of the first, if contributions and noise have changed alike, as by
    a learning-rate schedule; 1 where they have not."""
    if probe.optimizer != "sgd" or not probe.answers_to_norm or not followed(probe):
        return 1.0
    norm, still = steady(probe, 0.01)
    one, other = (
        [probe.change([*[still] * k, probe.data(1, number)], norm) for k in (0, FAR)] for number in (241, 251)
    )
    first, later = (float(np.linalg.norm(a - b)) for a, b in zip(one, other, strict=True))
    if not np.isfinite(later) or first <= 100 * probe.resolution or abs(later / first - 1) < NEAR:
        return 1.0
    run = [still] * (FAR + 1)
    plain = moves(probe, run, norm)
    noise = np.stack([moves(probe, run, norm, 1.0, 3101 + k) - plain for k in range(probe.repeats(1, 4000))])
    before, after = (deviation(noise[:, k]) for k in (0, FAR))
    return later / first if abs(after / before / (later / first) - 1) < ALIKE else 1.0


def of_schedule(probe: Probe) -> str:
    """What a finding says of steps that were not examined."""
    if (rate := rate_later(probe)) == 1.0:
        return ""
    return f" The learning rate changes (x{rate:.3g} after {FAR} steps): give a constant one to examine later steps."


@functools.lru_cache(maxsize=4)
def memory(probe: Probe) -> Array | None:
    """What a contribution does at each of 64 later steps, over what it does at once: zeros for plain SGD.

    None where it cannot be told: samples do not answer in proportion to C, the learning rate changes, or steps cannot
    be read (Adam's are not).
    """
    if probe.optimizer != "sgd" or not probe.answers_to_norm or not followed(probe) or rate_later(probe) != 1.0:
        return None
    norm, still = steady(probe, 0.01)
    one, other = (moves(probe, [probe.data(1, number), *[still] * LAGS], norm) for number in (241, 251))
    apart = one - other
    size = float(apart[0] @ apart[0])
    if not np.isfinite(apart).all() or size <= (20 * probe.resolution) ** 2:
        return None
    found = _without_decay(probe, apart @ apart[0] / size)[1:]
    if np.abs(found).max() > 1.05:
        return None  # no memory lets a contribution grow: it was not steady
    if np.abs(found).max() < NEAR:
        return np.zeros(0)
    powers = float(found[1:] @ found[:-1] / (found[:-1] @ found[:-1])) ** np.arange(LAGS)
    powers *= float(found @ powers / (powers @ powers))
    return powers if np.abs(found - powers).max() < NEAR else found  # type: ignore[no-any-return]


def decay(probe: Probe) -> float:
    """The share of the parameters that weight decay takes off in a step."""
    return -float(probe.drift @ probe.start) / max(float(probe.start @ probe.start), 1e-300)


def _without_decay(probe: Probe, answers: Array) -> Array:
    """A momentum's answers to a contribution, at once and at later steps, if no weight decay went through it, too."""
    moved, found = np.cumsum(answers) - answers, np.array(answers)
    for k in range(len(found)):
        found[k] += decay(probe) * float(found[:k] @ moved[1 : k + 1][::-1])
    return found


def without_memory(probe: Probe, steps: Array, lags: Array) -> Array:
    """The steps less what earlier ones left in a momentum that answers with these lags, and less weight decay of what
    they moved."""
    found, left = np.array(steps), np.zeros_like(steps[:1])
    ratio = lags[1] / lags[0] if len(lags) else 0.0
    endless = len(lags) > 0 and np.abs(lags - lags[0] * ratio ** np.arange(len(lags))).max() < 1e-9
    for k in range(len(steps) if len(lags) else 0):
        back = min(k, len(lags))
        found[k] -= left[0] if endless else lags[:back] @ found[k - back : k][::-1]
        left = ratio * left + lags[0] * found[k]
    return found + decay(probe) * (np.cumsum(steps, 0) - steps)


@functools.lru_cache(maxsize=4)
def gain(probe: Probe) -> float:
    """Change of the parameters by a first step over the gradient that the optimizer is handed. Raises Lacking.

    Nesterov's momentum moves (1 + m) times the gradient at once and m^2 times a step later, and a momentum that
    averages 1 - m times: neither is a contribution above, or noise below, what is due.
    """
    rate, lags = probe.rate, memory(probe)
    if lags is None or not len(lags):
        return rate
    momentum = float(lags[1] / lags[0])
    if abs(lags[0] - momentum) > NEAR:
        return rate * (1 + momentum)
    norm, sample = steady(probe, 0.1)
    share = probe.contribution(sample, norm) / rate / norm
    return rate * (1 - momentum if abs(share / (1 - momentum) - 1) < 0.01 else 1.0)


class Step(NamedTuple):
    """A step: its number, what was in it and how many samples; norm of its sum over their number times C, and how far
    (over C) the sum is from what the samples contribute alone, both less what rounding can do."""

    number: int
    what: str
    samples: int
    share: float
    apart: float


@functools.lru_cache(maxsize=4)
def walked(probe: Probe) -> list[Step]:
    """48 steps without noise on samples of all labels in turn, and on none now and then.

    At a C far below the gradients the weights hardly move: a step is then the sum of what its samples contribute
    alone. Empty where steps cannot be read.
    """
    base, found = alone(probe)
    if memory(probe) is None or probe.regime.kind != "linear" or not found:
        return []
    largest = max(float(np.linalg.norm(change)) for _, _, change in found)
    unit = gain(probe) if probe.learning_rate is not None else largest / base  # of a contribution of 1
    draw = np.random.default_rng(probe.seed + 409)
    most = [1] if probe.expected_batch_size is None else [1, 1, 1, 2, 5]  # a sum that the batch's size divides
    script = [[int(k) for k in draw.integers(0, len(found), draw.choice(most))] for _ in range(STEPS)]
    for k in [7, 8, *np.flatnonzero(draw.random(STEPS) < NONE)]:
        script[k] = script[k] if k < 2 else []
    shrinking = decay(probe) * (1 + float(np.sum(memory(probe))))  # type: ignore[arg-type]
    script = script[: max(2, int(SHRUNK / max(shrinking, 1e-9)))]
    rounding = probe.resolution * probe.divisor(1) / unit / base
    norm = base * float(np.clip(rounding / ROUNDING, *SHARES))
    for chosen in (script, [part for part in script if part]):  # some scripts take no empty batch: its test says so
        with taken_or_not():
            steps = _compared(probe, chosen, norm, unit * norm)
            for finer in FINER:  # at less of C the weights move less
                if any(step.apart > APART for step in steps):
                    again = _compared(probe, chosen, norm / finer, unit * norm / finer)
                    steps = [min(pair, key=lambda step: step.apart) for pair in zip(steps, again, strict=True)]
            return steps
    return []


def _compared(probe: Probe, script: list[list[int]], norm: float, unit: float) -> list[Step]:
    """Sums; with weight decay, less those of a run on one sample over and over: what is left of it is that of the
    difference. (Without, that sample's kinks would be in all steps.)"""
    base, found = alone(probe)
    lags, nothing = memory(probe), pick(found[0][1], np.zeros(0, int))
    assert lags is not None
    batches = [probe.together([found[k][1] for k in part]) if part else nothing for part in script]
    decayed = float(np.any(probe.drift))
    steps = moves(probe, batches, norm)
    if decayed:
        steps = steps - moves(probe, [found[0][1]] * len(batches), norm)
    if len(steps) != len(batches) or not np.isfinite(steps).all():
        return []
    own = decayed * found[0][2] * norm / base
    sums = without_memory(probe, steps, lags) * probe.divisor(1) + own
    least = (4 * probe.resolution * probe.divisor(1) / unit + (2e-3 if len(lags) else 0.0)) / max(
        1 - sum(lags[:1]), 0.05
    )
    told = []
    for k, (part, total) in enumerate(zip(script, sums, strict=True)):
        due = np.sum([found[j][2] for j in part], 0) * norm / base if part else 0.0 * own
        what = ", ".join(found[j][0] for j in part[:2]) + (", ..." if len(part) > 2 else "") or "no sample"
        size, apart = (float(np.linalg.norm(value)) / unit - least for value in (total, total - due))
        told.append(Step(k + 1, what, count(batches[k][1]), size / max(len(part), 1), apart))
    return told
