"""Records the noise of hundreds of steps of one model, for tests of tails, single coordinates and single steps.

A step of a few hundred parameters shows a few hundred draws; a tail that was cut at three standard deviations, or one
step in ten without noise, shows in a hundred thousand of them only. So a model is trained for hundreds of steps with
noise that is far above what samples contribute, and read after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .measure import NORMS, Probe, remembered
from .noise import FRESH, deviation, draws, settings
from .reference_samples import steady, taken_or_not
from .trainable import Array, Batch, Lacking, pick
from .update import NEAR, Update, update

VALUES = 130_000  # draws of noise: Irwin and Hall's sum of twelve is then seven standard errors away
MOST, LEAST = 560, 64  # steps
EMPTY = 0.85  # of the steps are on no sample, which is cheaper
LOUD = 97.3  # noise multiplier: what a sample contributes is a hundredth of the noise's standard deviation
QUIET = 1 / 8  # of the weights' typical size: the noise of a step, so that hundreds of them leave an ordinary model
LAGS = 64  # steps over which a momentum is followed
PREFIXES = 24  # steps of one run that is read after each of them by running it so often

Walk = Callable[[Sequence[Batch], float, float, int], Array]


class Trajectory(NamedTuple):
    """Noise of single steps.

    noise: [steps, P], in units of the parameters, a momentum taken off. way: "trajectory" (of one run), "continued"
    (one run a step, of one model) or "fresh" (a new model for each step). empty: which steps had no sample.
    """

    noise: Array
    norm: float
    sigma: float
    way: str
    empty: Array

    @property
    def std(self) -> float:
        return deviation(self.noise)


@remembered
def noise_trajectory(probe: Probe) -> Trajectory:
    """Hundreds of steps of noise. Raises Lacking where parameters become infinite."""
    norm, sigma = _loud(probe)
    least = LEAST if probe.start.size < 300_000 else PREFIXES  # of large models fewer, whose steps cost more
    number = int(min(MOST, max(least, -(-VALUES // probe.start.size))))
    way, walk = ("fresh", None) if probe.optimizer == "adam" or probe.precision > 1e-4 else walker(probe)
    if walk is None:
        return _of_fresh_models(probe, norm, sigma, max(LEAST, min(number // 3, MOST // 4)))
    known, lags = memory(probe, walk)
    if known.kind != "plain":
        number = min(number, 200)
    batches, empty = _batches(probe, walk, norm, sigma, number)
    found = steps_of(probe, walk(batches, norm, sigma, probe.noise_seed(2101)))
    if np.any(probe.drift) and known.kind == "plain":
        found -= drifting_part(probe, found)
    elif np.any(probe.drift):
        found -= steps_of(probe, walk(batches, norm, 0.0, probe.noise_seed(2101)))
    if not np.isfinite(found).all():
        raise Lacking(FRESH)
    return Trajectory(without_memory(known.undone(found), lags), norm, sigma, way, empty)


def _loud(probe: Probe) -> tuple[float, float]:
    """(C, sigma): noise far above every contribution, and a little below the weights' typical size.

    With Adam the settings of one step, since its answer bends with the noise.
    """
    norm, sigma = settings(probe)
    if probe.optimizer == "adam":
        return norm, sigma
    batch = [probe.data(1, 211)]
    seen = float(np.std(np.stack([probe.change(batch, norm, LOUD, 2801 + k) for k in range(probe.repeats(1, 100))])))
    share = QUIET * deviation(probe.start) / seen if seen > 10 * probe.resolution / probe.start.size**0.5 else 0.0
    return norm * (share or 1.0), LOUD


def memory(probe: Probe, walk: Walk) -> tuple[Update, Array]:
    """What a model that is read after every step keeps of earlier ones: an update that is known, or lags.

    Where every step is a run of its own, a momentum that begins anew in each run is none.
    """
    lags, known = response(probe, walk, 3), update(probe)
    if lags is None:
        return Update("unknown"), np.zeros(0)
    if np.abs(lags).max() < NEAR:
        return Update("plain"), np.zeros(0)
    if known.kind != "unknown" and np.abs(lags - known.weights(4)[1:, 0]).max() < NEAR:
        return known, np.zeros(0)
    lags = response(probe, walk, LAGS)
    return Update("unknown"), np.zeros(0) if lags is None else lags


def _of_fresh_models(probe: Probe, norm: float, sigma: float, number: int) -> Trajectory:
    batch = [probe.data(1, 211)]
    found = draws(probe, norm, sigma, number, batch, 2101)
    if probe.optimizer == "adam":
        still = probe.change(batch, norm)
        found = straightened(probe, found + still) - straightened(probe, still)
    return Trajectory(found, norm, sigma, "fresh", np.zeros(number, bool))


def straightened(probe: Probe, change: Array) -> Array:
    """The first step of Adam, u = rate * g / (|g| + eps), as rate * g / eps: as though it were linear.

    RMSprop's is bent less, u = rate * g / (a |g| + eps): what a huge gradient does tells a.
    """
    rate = getattr(probe.trainable, "learning_rate", None)
    if rate is None:
        return change
    farthest = float(np.abs(probe.change([probe.strong], max(NORMS)) - probe.drift).max())
    farthest = farthest if np.isfinite(farthest) and farthest > 0.5 * rate else rate
    return change / np.maximum(1 - np.abs(change) / farthest, 1e-3)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- ways of reading a model after every step


@remembered
def walker(probe: Probe) -> tuple[str, Walk | None]:
    """How the parameters [steps, P] after every step are had; None where a run leaves its model as it was."""
    three = [probe.data(1, 221 + k) for k in range(3)]
    norm = settings(probe)[0]
    alone = np.stack([probe.outcome(three[:k], norm).parameters for k in (1, 2, 3)])
    follow: Any = getattr(probe.trainable, "trajectory", None)

    def in_one_run(batches: Sequence[Batch], norm: float, sigma: float, seed: int) -> Array:
        probe.count(len(batches))
        model = probe.trainable.build(probe.seed)
        found = follow(model, batches, clipping_norm=norm, noise_multiplier=sigma, seed=seed)
        return np.zeros((0, 0)) if found is None else np.asarray(found, float)

    def continued(batches: Sequence[Batch], norm: float, sigma: float, seed: int) -> Array:
        model = probe.trainable.build(probe.seed)
        return np.stack([probe.run(model, [each], norm, sigma, seed + k).parameters for k, each in enumerate(batches)])

    if follow is not None:
        found = in_one_run(three, norm, 0.0, 1)
        if found.shape == alone.shape and float(np.abs(found - alone).max()) <= 4 * probe.resolution:
            return "trajectory", in_one_run
    if np.isfinite(continued(three, norm, 0.0, 1)).all() and _stays(probe, norm):
        return "continued", continued
    return "fresh", None


def _stays(probe: Probe, norm: float) -> bool:
    """Whether a run trains the model that it is given."""
    model = probe.trainable.build(probe.seed)
    first = probe.run(model, [probe.data(1, 221)], norm, 1.0, 1).parameters
    same = np.array_equal(probe.run(model, [], norm, 0.0, 1).parameters, first)
    return same and not np.array_equal(first, probe.start)


def prefixes(probe: Probe, path: Trajectory) -> tuple[Array, int]:
    """The noise [stretches, P] of one run, by running its first 1, 2, ... steps; and the steps of a stretch.

    For what goes on within a run only: a counter or a momentum of the loop. Large models are read after every second
    or fourth step, which tells enough where there are thousands of draws.
    """
    stride = 1 if probe.start.size < 1000 else 2 if probe.start.size < 5000 else 4
    kinds = [probe.data(1, 231 + k) for k in range(4)]
    nothing, empties = pick(kinds[0], np.zeros(0, int)), bool(path.empty.any())
    batches = [nothing if empties and k % 4 else kinds[k // 4 % 4] for k in range(PREFIXES)]
    ends = range(stride, PREFIXES + 1, stride)
    after = [probe.outcome(batches[:k], path.norm, path.sigma, 2401).parameters for k in ends]
    return steps_of(probe, np.stack(after)), stride


# ---------------------------------------------------------------------- what is taken off


def steps_of(probe: Probe, after: Array) -> Array:
    """What every step changed."""
    return np.diff(after, axis=0, prepend=probe.start[None])


def drifting_part(probe: Probe, steps: Array) -> Array:
    """What weight decay takes from the parameters at each of these steps."""
    decay = float(probe.drift @ probe.start / (probe.start @ probe.start))
    return decay * (probe.start + np.cumsum(steps, 0) - steps)


def response(probe: Probe, walk: Walk, lags: int) -> Array | None:
    """What a sample's contribution to one step does at each of so many later steps, over what it does at once.

    Zeros for plain SGD, powers of the momentum with one. None where samples do not answer in proportion to C.
    """
    if not probe.answers_to_norm:
        return None
    norm, still = steady(probe, 0.01)
    one, other, rest = probe.data(1, 241), probe.data(1, 251), [still] * lags
    apart = steps_of(probe, walk([one, *rest], norm, 0.0, 1)) - steps_of(probe, walk([other, *rest], norm, 0.0, 1))
    size = float(apart[0] @ apart[0])
    if not np.isfinite(apart).all() or size <= (20 * probe.resolution) ** 2:
        return None
    found = np.asarray(apart[1:] @ apart[0] / size)
    return found if np.abs(found).max() <= 1.05 else None  # no memory lets a contribution grow: it was not steady


def without_memory(steps: Array, lags: Array) -> Array:
    """The steps less what earlier ones left in a momentum that answers with these lags."""
    found = np.array(steps)
    for k in range(len(steps) if len(lags) else 0):
        back = min(k, len(lags))
        found[k] -= lags[:back] @ found[k - back : k][::-1]
    return found


def _batches(probe: Probe, walk: Walk, norm: float, sigma: float, number: int) -> tuple[list[Batch], Array]:
    """One sample a step; none in most, where steps on none have the same noise."""
    kinds = [probe.data(1, 261 + k) for k in range(8)]
    nothing, trial, usable = pick(kinds[0], np.zeros(0, int)), probe.repeats(1, 1000), False
    with taken_or_not():  # else its own test says so
        none, one = (deviation(steps_of(probe, walk([b] * trial, norm, sigma, 2301))) for b in (nothing, kinds[0]))
        usable = abs(none / one - 1) < 0.3
    number = number if usable else min(number, MOST // 2)
    empty = usable & (np.random.default_rng(probe.seed + 271).random(number) < EMPTY)
    empty[:2] = False
    return [nothing if empty[k] else kinds[k % 8] for k in range(number)], empty
