"""The noise of many steps, one by one: what tails, single coordinates and single steps are looked at in.

A step of a few hundred parameters shows a few hundred draws; a tail that was cut at three standard deviations, or one
step in ten without noise, shows in a hundred thousand of them only. So a model is trained for hundreds of steps with
noise that is far above what samples contribute, and read after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .known import steady
from .measure import NORMS, Probe
from .noise import settings
from .trainable import Array, AuditError, Batch, Lacking, check_outcome, pick
from .update import NEAR, Update, update

VALUES = 130_000  # draws of noise: Irwin and Hall's sum of twelve is then seven standard errors away
MOST, LEAST = 560, 64  # steps
EMPTY = 0.85  # of the steps are on no sample, which is cheaper
LOUD = 97.3  # noise multiplier: what a sample contributes is a hundredth of the noise's standard deviation
QUIET = 1 / 8  # of the weights' typical size: the noise of a step, so that hundreds of them leave an ordinary model
LAGS = 64  # steps over which a momentum is followed
PREFIXES = 24  # steps of one run that is read after each of them by running it so often

Walk = Callable[[Sequence[Batch], float, float, int], Array]


class Path(NamedTuple):
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
        return float(np.sqrt(np.mean(self.noise**2)))


def noise_path(probe: Probe) -> Path:
    """The probe's path, walked once. Raises Lacking where parameters become infinite."""
    if "path" not in probe.memo:
        probe.memo["path"] = _walked(probe)
    return probe.memo["path"]  # type: ignore[no-any-return]


def steps_for(probe: Probe) -> int:
    """How many steps show VALUES draws: fewer for large models, whose steps cost more."""
    least = LEAST if probe.start.size < 300_000 else PREFIXES
    return int(min(MOST, max(least, -(-VALUES // probe.start.size))))


def loud(probe: Probe) -> tuple[float, float]:
    """(C, sigma): noise far above every contribution, and a little below the weights' typical size.

    With Adam the settings of one step, since its answer bends with the noise.
    """
    norm, sigma = settings(probe)
    if probe.optimizer == "adam":
        return norm, sigma
    batch = [probe.data(1, 211)]
    seen = float(np.std(np.stack([probe.change(batch, norm, LOUD, 2801 + k) for k in range(probe.repeats(1, 100))])))
    typical = float(np.sqrt(np.mean(probe.start**2)))
    share = QUIET * typical / seen if seen > 10 * probe.resolution / probe.start.size**0.5 and typical > 0 else 1.0
    return norm * share, LOUD


def _walked(probe: Probe) -> Path:
    norm, sigma = loud(probe)
    number = steps_for(probe)
    if probe.optimizer == "adam" or probe.precision > 1e-4:
        return _fresh(probe, norm, sigma, max(LEAST, min(number // 3, MOST // 4)))
    way, walk = walker(probe)
    if walk is None:
        return _fresh(probe, norm, sigma, max(LEAST, min(number // 3, MOST // 4)))
    known, lags = memory(probe, walk)
    drifting = bool(np.any(probe.drift))
    if known.kind != "plain":
        number = min(number, 200)
    batches, empty = _batches(probe, walk, norm, sigma, number)
    found = steps_of(probe, walk(batches, norm, sigma, probe.noise_seed(2101)))
    if drifting:
        found -= steps_of(probe, walk(batches, norm, 0.0, probe.noise_seed(2101))) if known.kind != "plain" else (
            drifting_part(probe, found))  # fmt: skip
    if not np.isfinite(found).all():
        raise Lacking("needs steps with noise that leave the parameters finite")
    return Path(without_memory(known.undone(found), lags), norm, sigma, way, empty)


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


def _fresh(probe: Probe, norm: float, sigma: float, number: int) -> Path:
    batch = [probe.data(1, 211)]
    still = probe.change(batch, norm)
    found = np.stack([probe.change(batch, norm, sigma, 2101 + k) - still for k in range(number)])
    if not np.isfinite(found).all():
        raise Lacking("needs steps with noise that leave the parameters finite")
    if probe.optimizer == "adam":
        found = straightened(probe, found + still) - straightened(probe, still)
    return Path(found, norm, sigma, "fresh", np.zeros(number, bool))


def straightened(probe: Probe, change: Array) -> Array:
    """The first step of Adam, u = rate * g / (|g| + eps), as rate * g / eps: as though it were linear.

    RMSprop's is bent less, u = rate * g / (a |g| + eps): what a huge gradient does tells a.
    """
    rate = getattr(probe.trainable, "learning_rate", None)
    if rate is None:
        return change
    return change / np.maximum(1 - np.abs(change) / farthest(probe, rate), 1e-3)  # type: ignore[no-any-return]


def farthest(probe: Probe, rate: float) -> float:
    """How far a step takes a parameter whose gradient is huge: the rate with Adam, ten of it with RMSprop at 0.99."""
    if "farthest" not in probe.memo:
        found = float(np.abs(probe.change([probe.strong], max(NORMS)) - probe.drift).max())
        probe.memo["farthest"] = found if np.isfinite(found) and found > 0.5 * rate else rate
    return probe.memo["farthest"]  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- ways of reading a model after every step


def walker(probe: Probe) -> tuple[str, Walk | None]:
    """How the parameters [steps, P] after every step are had; None where a run leaves its model as it was."""
    if "walk" not in probe.memo:
        probe.memo["walk"] = _way(probe)
    return probe.memo["walk"]  # type: ignore[no-any-return]


def _way(probe: Probe) -> tuple[str, Walk | None]:
    three = [probe.data(1, 221 + k) for k in range(3)]
    norm = settings(probe)[0]
    alone = [probe.outcome(three[:k], norm).parameters for k in (1, 2, 3)]
    for way, walk in (("trajectory", _trajectory(probe)), ("continued", _continued(probe))):
        if walk is None:
            continue
        found = walk(three, norm, 0.0, 1)
        same = found.shape == (3, probe.start.size) and np.isfinite(found).all()
        if way == "trajectory":
            same = same and float(np.abs(found - np.stack(alone)).max()) <= 4 * probe.resolution
        if same and (way == "trajectory" or _stays(probe, norm)):
            return way, walk
    return "fresh", None


def _stays(probe: Probe, norm: float) -> bool:
    """Whether a run trains the model that it is given."""
    model = probe.trainable.build(probe.seed)
    first = check_outcome(_one(probe, model, [probe.data(1, 221)], norm, 1.0, 1)).parameters
    same = np.array_equal(check_outcome(_one(probe, model, [], norm, 0.0, 1)).parameters, first)
    return same and not np.array_equal(first, probe.start)


def _one(probe: Probe, model: Any, batches: Sequence[Batch], norm: float, sigma: float, seed: int) -> Any:
    return probe.trainable.run(model, batches, clipping_norm=norm, noise_multiplier=sigma, seed=seed)


def _trajectory(probe: Probe) -> Walk | None:
    follow = getattr(probe.trainable, "trajectory", None)
    if follow is None:
        return None

    def walk(batches: Sequence[Batch], norm: float, sigma: float, seed: int) -> Array:
        model = probe.trainable.build(probe.seed)
        found = follow(model, batches, clipping_norm=norm, noise_multiplier=sigma, seed=seed)
        return np.zeros((0, 0)) if found is None else np.asarray(found, float)

    return walk


def _continued(probe: Probe) -> Walk:
    def walk(batches: Sequence[Batch], norm: float, sigma: float, seed: int) -> Array:
        model = probe.trainable.build(probe.seed)
        runs = (_one(probe, model, [batch], norm, sigma, seed + k) for k, batch in enumerate(batches))
        return np.stack([check_outcome(found).parameters for found in runs])

    return walk


def prefixes(probe: Probe, norm: float, sigma: float) -> tuple[Array, int]:
    """The noise [stretches, P] of one run, by running its first 1, 2, ... steps; and the steps of a stretch.

    For what goes on within a run only: a counter or a momentum of the loop. Large models are read after every second
    or fourth step, which tells enough where there are thousands of draws.
    """
    stride = 1 if probe.start.size < 1000 else 2 if probe.start.size < 5000 else 4
    empties = "path" in probe.memo and bool(noise_path(probe).empty.any())
    kinds = [probe.data(1, 231 + k) for k in range(4)]
    nothing = pick(kinds[0], np.zeros(0, int))
    batches = [nothing if empties and k % 4 else kinds[k // 4 % 4] for k in range(PREFIXES)]
    ends = range(stride, PREFIXES + 1, stride)
    return steps_of(probe, np.stack([probe.outcome(batches[:k], norm, sigma, 2401).parameters for k in ends])), stride


# ---------------------------------------------------------------------- what is taken off


def steps_of(probe: Probe, after: Array) -> Array:
    """What every step changed."""
    return np.diff(after, axis=0, prepend=probe.start[None])


def _before(probe: Probe, steps: Array) -> Array:
    """Parameters before every step."""
    return probe.start + np.cumsum(steps, 0) - steps


def decay(probe: Probe) -> float:
    """Weight decay of a step."""
    return float(probe.drift @ probe.start / (probe.start @ probe.start))


def drifting_part(probe: Probe, steps: Array) -> Array:
    """What weight decay takes from the parameters at each of these steps."""
    return decay(probe) * _before(probe, steps)


def response(probe: Probe, walk: Walk, lags: int) -> Array | None:
    """What a sample's contribution to one step does at each of so many later steps, over what it does at once.

    Zeros for plain SGD, powers of the momentum with one. None where samples do not answer in proportion to C.
    """
    if probe.regime.kind not in ("linear", "switched"):
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
    if not len(lags):
        return steps
    found = np.zeros_like(steps)
    for k in range(len(steps)):
        back = min(k, len(lags))
        found[k] = steps[k] - lags[:back] @ found[k - back : k][::-1]
    return found


def _batches(probe: Probe, walk: Walk, norm: float, sigma: float, number: int) -> tuple[list[Batch], Array]:
    """One sample a step; none in most, where steps on none have the same noise."""
    kinds = [probe.data(1, 261 + k) for k in range(8)]
    nothing = pick(kinds[0], np.zeros(0, int))
    empty = np.random.default_rng(probe.seed + 271).random(number) < EMPTY
    empty[:2] = False
    try:
        trial = probe.repeats(1, 1000)
        alike = [float(np.sqrt(np.mean(steps_of(probe, walk([batch] * trial, norm, sigma, 2301)) ** 2)))
                 for batch in (nothing, kinds[0])]  # fmt: skip
        usable = abs(alike[0] / alike[1] - 1) < 0.3
    except AuditError:
        raise
    except Exception:  # noqa: BLE001  (a script that takes no empty batch: its own test says so)
        usable = False
    if not usable:
        number, empty = min(number, MOST // 2), np.zeros(min(number, MOST // 2), bool)
    return [nothing if empty[k] else kinds[k % 8] for k in range(number)], empty


__all__ = [
    "Path", "decay", "drifting_part", "loud", "memory", "noise_path", "prefixes", "response", "steps_of",
    "straightened", "walker", "without_memory",
]  # fmt: skip
