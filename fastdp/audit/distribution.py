"""Tests of the noise: on every parameter, of the right size, normal, not coarse; its size beside a sample's share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from .finding import Finding, Result, audit_test
from .measure import Probe
from .noise import deviation, draws, settings
from .noise_settings import wrong_size
from .noise_trajectory import Trajectory, noise_trajectory
from .normality import LEVEL, Doubt, groups, shape, worst
from .statistics import kolmogorov, scale_interval
from .trainable import Array, Lacking
from .update import gain

MOST = 20_000  # values that a test of the distribution looks at


@audit_test
def noise_distribution(probe: Probe, *, seeds: int = 4, significance: float = 1e-3) -> Finding:
    """Tests that the noise on every coordinate is normal and has the standard deviation learning_rate * C * sigma / B.

    The size must hold whatever C, sigma and the gradients are. The test examines the distribution function, moments,
    tails and single values in 130,000 draws of many steps (fewer for a small model), and looks for coarse values, as of
    a generator of 16 bits.

    statistic: the measured standard deviation over the expected one; p_value: of normality (Kolmogorov and Smirnov).
    """
    norm, sigma = settings(probe)
    batch = [probe.data(8, 67)]
    sigma = _visible(probe, norm, sigma)
    noise = draws(probe, norm, sigma, probe.repeats(seeds, 1000), batch, 3001)
    result = Result("the noise is N(0, s^2), independent of coordinate and seed", norm=norm, sigma=sigma,
                    std=deviation(noise), sample=noise.ravel()[:2000].tolist())  # fmt: skip
    questions = _few_steps(probe, result, noise, significance), _many_steps(probe, result, noise, significance)
    return next(finding for asked in questions for finding in asked)


def _few_steps(probe: Probe, result: Result, noise: Array, significance: float) -> Iterator[Finding]:
    """Bugs that the noise [seeds, P] of single steps shows: none, none on some parameters, another size on some."""
    std, sigma = result.data["std"], result.data["sigma"]
    least = 2 * probe.precision * np.abs(probe.start) + 1e-300
    silent = np.asarray((np.abs(noise) <= least).all(0) & (least < 0.05 * std + 1e-300))
    if not np.any(np.abs(noise) > least):
        yield result.bug(f"At sigma = {sigma:.3g} no parameter gets any noise: is noise_multiplier handed on?", 0.0)
    if silent.mean() > 0.5 / max(noise.shape[1], 50) and silent.sum() >= max(1, 1e-3 * noise.shape[1]):
        names = [name for name, where in _blocks(probe) if silent[where].all() and silent[where].size]
        where = f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""
        result.data["silent"] = int(silent.sum())
        yield result.bug(
            f"{int(silent.sum())} of {silent.size} trained parameters get no noise{where}. Whatever the data did to "
            "them is released as it is; and if nothing did, they are not trained though they are listed.",
            float(silent.mean()), None, 0.0,
        )  # fmt: skip
    blocks = [(name, noise[:, where]) for name, where in _blocks(probe)]
    for name, part in blocks:
        low, high = scale_interval(part, 1 - significance / len(blocks)) if part.size else (std, std)
        if low > 1.05 * std or high < 0.95 * std:
            yield result.bug(
                f"The noise is not alike on all parameters: on {name} its standard deviation is "
                f"{deviation(part) / std:.3g} times that of all. It must be sigma * C on every coordinate of the sum."
            )
    yield from _off(probe, result, noise, 8, 1 - significance, 0.02 if probe.optimizer == "sgd" else 0.05)


def _many_steps(probe: Probe, result: Result, noise: Array, significance: float) -> Iterator[Finding]:
    """Bugs that hundreds of steps show, and at last that there are none."""
    path = noise_trajectory(probe)
    result.data |= {"draws": path.noise.size, "read": path.way}
    if path.std <= 10 * probe.resolution / math.sqrt(path.noise.shape[1]):
        yield result.bug("In later steps there is no noise.", 0.0)
    if probe.optimizer == "sgd":
        yield from _off(probe, result, path.noise, 1, 1 - LEVEL, 0.005, path)
    ratio, std = result.data.get("ratio"), result.data["std"]
    z = path.noise / path.std
    odd = worst(groups(z, _blocks(probe)))
    if odd.p_value < LEVEL:
        yield result.bug(
            f"The noise is not alike on all parameters: {odd.what} (p = {odd.p_value:.1e}). It must be "
            "sigma * C, independently, on every coordinate of the sum.", ratio, odd.p_value, LEVEL,
        )  # fmt: skip
    if wrong := wrong_size(probe):
        yield result.bug(
            f"The noise is not sigma * C everywhere: {wrong}. Look for a sigma that is rounded or bounded, and for "
            "noise that follows the samples' gradients instead of C.", ratio,
        )  # fmt: skip
    bent = probe.optimizer == "adam" and ratio is None  # how much Adam's step bends with the noise is not known
    z = noise / std if bent or probe.precision > 1e-4 else z
    p_value = kolmogorov(np.random.default_rng(0).permutation(z.ravel())[:MOST] if bent else z.ravel())
    rounding = 2 * probe.precision * float(np.abs(probe.start).max()) / path.std
    odd = Doubt(p_value, "its distribution function") if bent else worst(shape(z, rounding))
    if odd.p_value < (significance if bent else LEVEL):
        yield result.bug(
            f"The noise is not normal (p = {odd.p_value:.1e}): {odd.what}. Which distribution, and which generator, "
            "does it come from?", ratio, odd.p_value, LEVEL,
        )  # fmt: skip
    coarse = _coarse(probe, noise, std)
    if coarse > 0.1:
        yield result.bug(
            f"{100 * coarse:.0f} % of the noise's values coincide with another to a millionth of its size: it is drawn "
            "in 16 bits. Its tails end early, and low-order digits of the sum are not hidden. Draw it in float32.",
            coarse, p_value, 0.1,
        )  # fmt: skip
    size = f", {ratio:.3f} of what C, sigma and the batch size give" if ratio is not None else ""
    text = f"Every parameter gets noise, alike and normal (p = {p_value:.2g}){size}."
    yield result.passed(text, ratio, p_value, significance)


def _off(probe: Probe, result: Result, noise: Array, size: int, confidence: float, margin: float,
         path: Trajectory | None = None) -> Iterator[Finding]:  # fmt: skip
    """A bug where the noise of batches of this size is not what C, sigma and the learning rate give.

    path: whose C and sigma these are; None: the test's own.
    """
    if getattr(probe.trainable, "learning_rate", None) is None:
        return
    norm, sigma = (result.data["norm"], result.data["sigma"]) if path is None else (path.norm, path.sigma)
    expected = gain(probe) * norm * sigma / probe.divisor(size)
    result.data |= {"ratio": deviation(noise) / expected, **({"expected": expected} if path is None else {})}
    low, high = scale_interval(noise, confidence)
    if low / expected <= 1 + margin and high / expected >= 1 - margin:
        return
    ratio = result.data["ratio"]
    much = "too little: the guarantee is not the one accounted" if ratio < 1 else "too much: utility is lost"
    yield result.bug(
        f"The noise of a step is {ratio:.4g} times learning_rate * C * sigma / B, {much}. Is it added to the sum "
        "(sigma * C) or to the mean (sigma * C / B), once, and divided by what the audit was told "
        "(expected_batch_size)?", ratio, None, 1.0,
    )  # fmt: skip


def _visible(probe: Probe, norm: float, sigma: float) -> float:
    """sigma, or a larger one where the parameters' rounding would blur the noise (SGD, whose step is linear)."""
    if probe.optimizer != "sgd":
        return sigma
    seen = float(np.std(draws(probe, norm, sigma, probe.repeats(1, 100), [probe.data(8, 67)], 2901)))
    return sigma * max(1.0, deviation(probe.start) / seen) if seen > 0 else sigma


def _blocks(probe: Probe) -> list[tuple[str, slice]]:
    """Each parameter's name and place; a few equal parts where no names are given."""
    names, size = getattr(probe.trainable, "parameter_names", None), probe.start.size
    if names and sum(count for _, count in names) == size:
        edges = np.cumsum([0, *(count for _, count in names)]).tolist()
        return [(str(name), slice(a, b)) for (name, _), a, b in zip(names, edges[:-1], edges[1:], strict=True)]
    edges = np.linspace(0, size, min(16, size) + 1).astype(int).tolist()
    return [(f"elements {a} to {b - 1}", slice(a, b)) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def _coarse(probe: Probe, noise: Array, std: float) -> float:
    """Share of neighbouring values that coincide; 0 where the parameters' own rounding hides it."""
    after = np.abs(probe.start).max() + 4 * std
    if 4 * probe.precision * after > 1e-6 * std * 4 or noise.size < 200:
        return 0.0
    values = np.sort(noise.ravel()[:MOST] / std)
    return float(np.mean(np.diff(values) < 2e-6))


@audit_test
def noise_scale(probe: Probe, *, seeds: int = 4) -> Finding:
    """Compares the standard deviation of the noise over the largest contribution of a sample with sigma.

    The ratio must be sigma whatever the learning rate is.

    statistic: that ratio over sigma.
    """
    norm, sigma = settings(probe)
    if probe.regime.kind == "flat":
        raise Lacking("needs a gradient that is clipped (see no_clipping)")
    if probe.regime.kind == "switched":
        norm *= 1.5  # the strong sample counts
    noise = draws(probe, norm, sigma, probe.repeats(seeds, 1000), [probe.data(16, 67)], 3301)
    largest = max(float(np.linalg.norm(probe.summed(sample, norm)))
                  for sample in (probe.strong, probe.data(1, 71), probe.data(1, 73)))  # fmt: skip
    if largest <= 10 * probe.resolution:
        raise Lacking("no sample contributes anything at the clipping norms tried")
    low, high = (end * probe.divisor(16) / largest / sigma for end in scale_interval(noise, 0.999))
    ratio = math.sqrt(low * high)
    shown = f"The noise is {ratio:.3g} times what sigma and a sample's largest contribution ask for"
    result = Result(norm=norm, sigma=sigma, low=low, high=high, largest=largest)
    if high < 0.97:
        return result.bug(
            f"{shown}. Noise for the mean (sigma * C / B) was added to a sum, contributions exceed C, or "
            "expected_batch_size is not what is divided by.", ratio, None, 0.97,
        )  # fmt: skip
    most = 3.0 if probe.regime.kind == "linear" else 8.0  # where samples count whole or not, few come near C
    if low > most:
        return result.bug(
            f"{shown}: private, but much is lost. Noise for the sum (sigma * C) was added to a mean, or "
            "expected_batch_size is not what is divided by.", ratio, None, most,
        )  # fmt: skip
    text = f"The noise is {ratio:.3g} times sigma times the largest contribution of a sample."
    return result.passed(text, ratio, None, 0.97)
