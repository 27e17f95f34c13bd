"""The noise itself: on every parameter, of the right size, normal, and not coarse; and its size beside a sample's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .finding import BUG, OK, Finding, not_tested
from .law import LEVEL, Doubt, groups, shape, worst
from .measure import Probe
from .noise import draws, settings
from .path import noise_path
from .sizes import wrong_size
from .statistics import normality, scale_interval
from .trainable import Array
from .update import gain

MOST = 20_000  # values that a test of the distribution looks at
NULL = "the noise is N(0, s^2), independent of coordinate and seed"


def visible(probe: Probe, norm: float, sigma: float, size: int = 8) -> float:
    """sigma, or a larger one where the parameters' rounding would blur the noise (SGD, whose step is linear)."""
    if probe.optimizer != "sgd":
        return sigma
    typical = float(np.sqrt(np.mean(probe.start**2)))
    seen = float(np.std(draws(probe, norm, sigma, probe.repeats(1, 100), size, 2901)))
    return sigma * max(1.0, typical / seen) if seen > 0 else sigma


def noise_distribution(trainable: Any, *, seed: int = 0, seeds: int = 4, significance: float = 1e-3) -> Finding:
    """Tests that the noise on every coordinate is normal and has the standard deviation learning_rate * C * sigma / B.

    The size must hold whatever C, sigma and the gradients are. The test examines the distribution function, moments,
    tails and single values in 130,000 draws of many steps (fewer for a small model), and looks for coarse values, as of
    a generator of 16 bits.

    statistic: the measured standard deviation over the expected one; p_value: of normality (Kolmogorov and Smirnov).
    """
    name = "noise_distribution"
    probe = Probe.of(trainable, seed)
    norm, sigma = settings(probe)
    sigma = visible(probe, norm, sigma)
    noise = draws(probe, norm, sigma, probe.repeats(seeds, 1000))
    least = 2 * probe.precision * np.abs(probe.start) + 1e-300
    visible_at = least < 0.05 * float(np.sqrt(np.mean(noise**2))) + 1e-300
    silent = np.asarray((np.abs(noise) <= least).all(0) & visible_at)
    if not np.any(np.abs(noise) > least):
        text = f"At sigma = {sigma:.3g} no parameter gets any noise: is noise_multiplier handed on?"
        return Finding(name, BUG, text, 0.0, None, None, NULL)
    if silent.mean() > 0.5 / max(noise.shape[1], 50) and silent.sum() >= max(1, 1e-3 * noise.shape[1]):
        where = _named(probe, silent)
        text = (
            f"{int(silent.sum())} of {silent.size} trained parameters get no noise{where}. Whatever the data did to "
            "them is released as it is; and if nothing did, they are not trained though they are listed."
        )
        return Finding(name, BUG, text, float(silent.mean()), None, 0.0, NULL, {"silent": int(silent.sum())})
    std = float(np.sqrt(np.mean(noise**2)))
    data: dict[str, Any] = {"norm": norm, "sigma": sigma, "std": std, "sample": noise.ravel()[:2000].tolist()}
    odd = _uneven(probe, noise, std, significance)
    if odd is not None:
        text = f"The noise is not alike on all parameters: {odd}. It must be sigma * C on every coordinate of the sum."
        return Finding(name, BUG, text, None, None, None, NULL, data)
    ratio = None
    if getattr(probe.trainable, "learning_rate", None) is not None:
        expected = gain(probe) * norm * sigma / probe.divisor(8)
        low, high = scale_interval(noise, 1 - significance)
        margin = 0.02 if probe.optimizer == "sgd" else 0.05
        ratio, data["expected"] = std / expected, expected
        if not low / expected <= 1 + margin or not high / expected >= 1 - margin:
            return Finding(name, BUG, _off(ratio), ratio, None, 1.0, NULL, data)
    path = noise_path(probe)
    data |= {"draws": path.noise.size, "read": path.way}
    if path.std <= 10 * probe.resolution / math.sqrt(path.noise.shape[1]):
        text = "In later steps there is no noise."
        return Finding(name, BUG, text, 0.0, None, None, NULL, data)
    if ratio is not None and probe.optimizer == "sgd":
        exact = gain(probe) * path.norm * path.sigma / probe.divisor(1)
        low, high = scale_interval(path.noise, 1 - LEVEL)
        if not low / exact <= 1.005 or not high / exact >= 0.995:
            return Finding(name, BUG, _off(path.std / exact), path.std / exact, None, 1.0, NULL, data)
        ratio = path.std / exact
    z = path.noise / path.std
    odd_place = worst(list(groups(z, _blocks(probe))))
    if odd_place.p_value < LEVEL:
        text = (
            f"The noise is not alike on all parameters: {odd_place.what} (p = {odd_place.p_value:.1e}). It must be "
            "sigma * C, independently, on every coordinate of the sum."
        )
        return Finding(name, BUG, text, ratio, odd_place.p_value, LEVEL, NULL, data)
    wrong = wrong_size(probe)
    if wrong:
        text = (
            f"The noise is not sigma * C everywhere: {wrong}. Look for a sigma that is rounded or bounded, and for "
            "noise that follows the samples' gradients instead of C."
        )
        return Finding(name, BUG, text, ratio, None, None, NULL, data)
    bent = probe.optimizer == "adam" and ratio is None  # how much Adam's step bends with the noise is not known
    z = noise / std if bent or probe.precision > 1e-4 else z
    p_value = normality(z.ravel() if not bent else np.random.default_rng(0).permutation(z.ravel())[:MOST])
    rounding = 2 * probe.precision * float(np.abs(probe.start).max()) / path.std
    odd_shape = worst(list(shape(z, rounding))) if not bent else Doubt(p_value, "")
    if odd_shape.p_value < (significance if bent else LEVEL):
        text = (
            f"The noise is not normal (p = {odd_shape.p_value:.1e}): {odd_shape.what or 'its distribution function'}. "
            "Which distribution, and which generator, does it come from?"
        )
        return Finding(name, BUG, text, ratio, odd_shape.p_value, LEVEL, NULL, data)
    coarse = _coarse(probe, noise, std)
    if coarse is not None and coarse > 0.1:
        text = (
            f"{100 * coarse:.0f} % of the noise's values coincide with another to a millionth of its size: it is drawn "
            "in 16 bits. Its tails end early, and low-order digits of the sum are not hidden. Draw it in float32."
        )
        return Finding(name, BUG, text, coarse, p_value, 0.1, NULL, data)
    size = f", {ratio:.3f} of what C, sigma and the batch size give" if ratio is not None else ""
    text = f"Every parameter gets noise, alike and normal (p = {p_value:.2g}){size}."
    return Finding(name, OK, text, ratio, p_value, significance, NULL, data)


def _off(ratio: float) -> str:
    much = "too little: the guarantee is not the one accounted" if ratio < 1 else "too much: utility is lost"
    return (
        f"The noise of a step is {ratio:.4g} times learning_rate * C * sigma / B, {much}. Is it added to the sum "
        "(sigma * C) or to the mean (sigma * C / B), once, and divided by what the audit was told "
        "(expected_batch_size)?"
    )


def _blocks(probe: Probe) -> list[tuple[str, slice]]:
    """Each parameter's name and place; a few equal parts where no names are given."""
    names, size = getattr(probe.trainable, "parameter_names", None), probe.start.size
    if not names or sum(count for _, count in names) != size:
        edges = np.linspace(0, size, min(16, size) + 1).astype(int)
        return [(f"elements {a} to {b - 1}", slice(a, b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    found, at = [], 0
    for name, count in names:
        found.append((str(name), slice(at, at + count)))
        at += count
    return found


def _named(probe: Probe, silent: Array) -> str:
    names = [name for name, where in _blocks(probe) if silent[where].all() and silent[where].size]
    return f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""


def _uneven(probe: Probe, noise: Array, std: float, significance: float) -> str | None:
    """A parameter whose noise is of another size than that of all."""
    blocks = _blocks(probe)
    for name, where in blocks:
        part = noise[:, where]
        if not part.size:
            continue
        low, high = scale_interval(part, 1 - significance / len(blocks))
        if low > 1.05 * std or high < 0.95 * std:
            return f"on {name} its standard deviation is {float(np.sqrt(np.mean(part**2))) / std:.3g} times that of all"
    return None


def _coarse(probe: Probe, noise: Array, std: float) -> float | None:
    """Share of neighbouring values that coincide; None where the parameters' own rounding hides it."""
    after = np.abs(probe.start).max() + 4 * std
    if 4 * probe.precision * after > 1e-6 * std * 4 or noise.size < 200:
        return None
    values = np.sort(noise.ravel()[:MOST] / std)
    return float(np.mean(np.diff(values) < 2e-6))


def noise_scale(trainable: Any, *, seed: int = 0, seeds: int = 4) -> Finding:
    """Compares the standard deviation of the noise over the largest contribution of a sample with sigma.

    The ratio must be sigma whatever the learning rate is.

    statistic: that ratio over sigma.
    """
    name = "noise_scale"
    probe = Probe.of(trainable, seed)
    norm, sigma = settings(probe)
    if probe.regime.kind == "flat":
        return not_tested(name, "needs a gradient that is clipped (see no_clipping)")
    if probe.regime.kind == "switched":
        norm *= 1.5  # the strong sample counts
    size = 16
    noise = draws(probe, norm, sigma, probe.repeats(seeds, 1000), size, first=3301)
    largest = max(float(np.linalg.norm(probe.summed(sample, norm)))
                  for sample in (probe.strong, probe.data(1, 71), probe.data(1, 73)))  # fmt: skip
    if largest <= 10 * probe.resolution:
        return not_tested(name, "no sample contributes anything at the clipping norms tried")
    low, high = (end * probe.divisor(size) / largest / sigma for end in scale_interval(noise, 0.999))
    ratio = math.sqrt(low * high)
    data = {"norm": norm, "sigma": sigma, "low": low, "high": high, "largest": largest}
    if high < 0.97:
        text = (
            f"The noise is {ratio:.3g} times what sigma and a sample's largest contribution ask for. Noise for the "
            "mean (sigma * C / B) was added to a sum, contributions exceed C, or expected_batch_size is not what is "
            "divided by."
        )
        return Finding(name, BUG, text, ratio, None, 0.97, data=data)
    most = 3.0 if probe.regime.kind == "linear" else 8.0  # where samples count whole or not, few come near C
    if low > most:
        text = (
            f"The noise is {ratio:.3g} times what sigma and a sample's largest contribution ask for: private, but much "
            "is lost. Noise for the sum (sigma * C) was added to a mean, or expected_batch_size is not what is divided "
            "by."
        )
        return Finding(name, BUG, text, ratio, None, most, data=data)
    text = f"The noise is {ratio:.3g} times sigma times the largest contribution of a sample."
    return Finding(name, OK, text, ratio, None, 0.97, data=data)
