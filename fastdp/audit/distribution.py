"""Tests of the noise: on every parameter, of the right size, normal, not coarse; its size beside a sample's share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np

from .finding import Finding, Result, audit_test
from .later_steps import gain
from .measure import Probe
from .noise_record import HANDED_ON, Record, draws, recorded, settings
from .normality import GRID, LEVEL, QUESTIONS, groups, shape, worst
from .reference_samples import ordinary_norm, taken_or_not, weak
from .statistics import deviation, scale_interval
from .trainable import Array, Batch, Lacking, count, is_floats, pick

MOST = 20_000  # values that a test of the distribution looks at
DRAWS, FEWER = 1400, 500  # of each setting of C and sigma; of each size of batch: standard errors of 1.9 and 3.2 %
MARGIN = 0.01
SHARES = ((0.073, 0.349), (0.73, 1.19))  # C over the audit's own norm; sigma: no round number
ABOVE = ((0.87, 4.49), (13.0, 0.0149), (1300.0, 1.19))  # C over an ordinary gradient's norm; sigma
SIZES = (0, 2, 4, 5, 12, 16, 31, 64, 151)  # samples; 1, 3 and 8 elsewhere


@audit_test
def noise_distribution(probe: Probe, *, seeds: int = 4, significance: float = 1e-3) -> Finding:
    """Tests that the noise on every coordinate is normal and has the standard deviation learning_rate * C * sigma / B.

    The size must hold whatever C, sigma, the gradients and the size of the batch are. The test examines the
    distribution function, moments and tails in 130,000 draws of many steps (fewer for a small model), and looks for
    coarse values, as of a generator of 16 bits.

    statistic: the measured standard deviation over the expected one; p_value: of normality.
    """
    norm, sigma = settings(probe)
    batch = [probe.data(8, 67)]
    if probe.optimizer == "sgd":  # louder where the parameters' rounding would blur the noise
        seen = deviation(draws(probe, norm, sigma, probe.repeats(1, 100), batch, 2901))
        sigma *= max(1.0, deviation(probe.start) / seen) if seen > 0 else 1.0
    noise = draws(probe, norm, sigma, probe.repeats(seeds, 1000), batch, 3001)
    result = Result("the noise is N(0, s^2), independent of coordinate and seed", norm=norm, sigma=sigma,
                    std=deviation(noise), sample=noise.ravel()[:2000].tolist())  # fmt: skip
    found = _few_steps(probe, result, noise, significance)
    return found if found is not None else _many_steps(probe, result, noise)


def _few_steps(probe: Probe, result: Result, noise: Array, significance: float) -> Finding | None:
    """Bugs that the noise [seeds, P] of single steps shows: none, none on some parameters, another size on some."""
    std, sigma = result.data["std"], result.data["sigma"]
    least = 2 * probe.precision * np.abs(probe.start) + 1e-300
    silent = np.asarray((np.abs(noise) <= least).all(0) & (least < 0.05 * std + 1e-300))
    if not np.any(np.abs(noise) > least):
        return result.bug(f"At sigma = {sigma:.3g} no parameter gets any noise: {HANDED_ON}", 0.0)
    if len(noise) > 1 and np.all(np.ptp(noise, 0) <= least):
        return result.bug("The noise is the same whatever its seed: the generator is seeded with a constant.", 0.0)
    if silent.mean() > 0.5 / max(silent.size, 50) and silent.sum() >= max(1, 1e-3 * silent.size):
        names = [name for name, where in _blocks(probe) if silent[where].all() and silent[where].size]
        which = f" ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else ""
        return result.bug(
            f"{int(silent.sum())} of {silent.size} trained parameters get no noise{which}. Whatever the data did to "
            "them is released as it is; and if nothing did, they are not trained though they are listed.",
            float(silent.mean()), None, 0.0,
        )  # fmt: skip
    margin = 0.02 if probe.optimizer == "sgd" else 0.05
    return _off(probe, result, noise, sigma * result.data["norm"] / probe.divisor(8), 1 - significance, margin)


def _many_steps(probe: Probe, result: Result, noise: Array) -> Finding:
    """Bugs that hundreds of steps show, or that there are none."""
    record = recorded(probe)
    std = deviation(record.noise)
    result.data |= {"draws": record.noise.size, "in_turn": record.in_turn}
    if std <= 10 * probe.resolution / math.sqrt(record.noise.shape[1]):
        return result.bug("In later steps there is no noise.", 0.0)
    if probe.optimizer == "sgd":
        off = _off(probe, result, record.noise, record.norm * record.sigma / probe.divisor(1), 1 - LEVEL, 0.005)
        if off is not None:
            return off
    ratio, z = result.data.get("ratio"), record.noise / std
    odd = worst(groups(z, _blocks(probe)))
    if odd.p_value < LEVEL:
        return result.bug(
            f"The noise is not alike on all parameters: {odd.what} (p = {odd.p_value:.1e}). It must be "
            "sigma * C, independently, on every coordinate of the sum.", ratio, odd.p_value, LEVEL,
        )  # fmt: skip
    if wrong := wrong_size(probe, record):
        return result.bug(
            f"The noise is not sigma * C everywhere: {wrong}. Look for a sigma that is rounded or bounded, and for "
            "noise that follows the samples' gradients instead of C.", ratio,
        )  # fmt: skip
    fine = z if probe.precision < 1e-4 else noise / result.data["std"]  # 16 bits: of single steps, which are louder
    odd = worst(shape(fine))
    if odd.p_value < LEVEL:
        return result.bug(
            f"The noise is not normal (p = {odd.p_value:.1e}): {odd.what}. Which distribution, and which generator, "
            "does it come from?", ratio, odd.p_value, LEVEL,
        )  # fmt: skip
    coarse = _coarse(probe, noise, result.data["std"])
    if coarse > 0.1:
        return result.bug(
            f"{100 * coarse:.0f} % of the noise's values coincide with another to a millionth of its size: it is drawn "
            "in 16 bits. Its tails end early, and low-order digits of the sum are not hidden. Draw it in float32.",
            coarse, odd.p_value, 0.1,
        )  # fmt: skip
    size = f", {ratio:.3f} of what C, sigma and the batch size give" if ratio is not None else ""
    p_value = min(1.0, QUESTIONS * odd.p_value)
    text = f"Every parameter gets noise, alike and normal (p = {p_value:.2g}){size}."
    return result.passed(text, ratio, p_value, LEVEL)


def _off(probe: Probe, result: Result, noise: Array, scale: float, confidence: float, margin: float) -> Finding | None:
    """A bug where the noise is not the learning rate times this scale, C sigma / B."""
    if probe.learning_rate is None:
        return None
    expected = gain(probe) * scale
    ratio = deviation(noise) / expected
    result.data |= {"ratio": ratio, "expected": result.data.get("expected", expected)}
    low, high = scale_interval(noise, confidence)
    if low / expected <= 1 + margin and high / expected >= 1 - margin:
        return None
    much = "too little: the guarantee is not the one accounted" if ratio < 1 else "too much: utility is lost"
    return result.bug(
        f"The noise of a step is {ratio:.4g} times learning_rate * C * sigma / B, {much}. Is it added to the sum "
        "(sigma * C) or to the mean (sigma * C / B), once and in every step, and are the divisor (expected_batch_size) "
        "and the learning rate what the audit was told?", ratio, None, 1.0,
    )  # fmt: skip


def wrong_size(probe: Probe, record: Record) -> str:
    """What is wrong with the noise at another C, sigma or batch; empty where nothing is. Plain words, for a sentence.

    C lies far below the samples' gradients, among them and far above; batches have from no sample to 151, and sums
    that are huge, ordinary and nothing.
    """
    unit = deviation(record.noise) / record.norm / record.sigma * probe.divisor(1)
    chosen, worst, found = list(_settings(probe)), 0.0, ""
    for number, (norm, sigma, batch, values, what) in enumerate(chosen):
        expected = unit * norm * sigma / probe.divisor(count(batch[1]))
        if expected < 30 * probe.precision * deviation(probe.start):
            continue  # rounding of the parameters would blur it
        with taken_or_not():
            noise = draws(probe, norm, sigma, probe.repeats(2, values), [batch], 3501 + 100 * number)
            low, high = scale_interval(noise, 1 - LEVEL / len(chosen))
            share = deviation(noise) / expected
            off = low > (1 + MARGIN) * expected or high < (1 - MARGIN) * expected
            if off and abs(share - 1) >= worst:
                worst = abs(share - 1)
                found = (
                    f"at sigma = {sigma:g} and C = {norm:.3g}, on {what}, it is {share:.3g} times what it is for sigma "
                    f"= {record.sigma:.3g} and C = {record.norm:.3g} on one sample, in proportion"
                )
    return found


def _settings(probe: Probe) -> Iterator[tuple[float, float, Batch, int, str]]:
    """(C, sigma, batch, draws, what the batch is)."""
    norm, sigma = settings(probe)
    many, few = probe.data(8, 281), probe.data(3, 283)
    if probe.optimizer == "adam":  # whose step is linear in small gradients only
        yield norm / 4.3, 0.349 * sigma, many, DRAWS, "8 samples"
        yield norm * 0.73, 1.19 * sigma, few, DRAWS, "3 samples"
    else:
        typical = ordinary_norm(probe)
        pairs = [(norm * share, sigma) for share, sigma in SHARES]
        pairs += [(typical * share, sigma) for share, sigma in ABOVE if typical is not None]
        for number, pair in enumerate(pairs):
            batch, what = (few, "3 samples") if number == 4 else (many, "8 samples")
            yield *pair, batch, DRAWS, what
    most = probe.data(max(SIZES), 285)
    for size in SIZES:  # sigma: as large on the mean as with few samples
        louder = max(1.0, probe.divisor(size) / probe.divisor(4))
        yield norm, sigma * louder, pick(most, np.arange(size)), FEWER, f"{size or 'no'} samples"
    with contextlib.suppress(Exception):  # no labels of no gradient can be had
        x, y = weak(probe, 0.0, 287)
        none = y * 0 if probe.loss_kind == "cross_entropy" else y  # no class at all: the sum is 0, without rounding
        yield norm, sigma, (x, none), FEWER, "a sample without gradient"
    x, y = probe.data(1, 289)
    if is_floats(x):  # where such samples are left out, the sum is 0
        yield norm, sigma, (np.full_like(x, np.nan), y), FEWER, "a sample of NaN"
    yield norm, sigma, probe.strong, FEWER, "a sample of a huge gradient"


def _blocks(probe: Probe) -> list[tuple[str, slice]]:
    """Each parameter's name and place; a few equal parts where no names are given."""
    names, size = getattr(probe.trainable, "parameter_names", None), probe.start.size
    if not names or sum(number for _, number in names) != size:
        parts = np.array_split(np.arange(size), min(16, size))
        names = [(f"elements {part[0]} to {part[-1]}", len(part)) for part in parts]
    ends = np.cumsum([number for _, number in names]).tolist()
    return [(str(name), slice(b - number, b)) for (name, number), b in zip(names, ends, strict=True) if number]


def _coarse(probe: Probe, noise: Array, std: float) -> float:
    """Share of neighbouring values that coincide; 0 where the parameters' own rounding hides it, or all lie on one grid
    that is fine enough."""
    after = np.abs(probe.start).max() + 4 * std
    if probe.precision * after > 1e-6 * std or noise.size < 200:
        return 0.0
    gaps = np.diff(np.sort(noise.ravel()[:MOST] / std))
    apart = gaps[gaps > 1e-4]
    steps = apart / apart.min(initial=1.0)
    if 0.4 * GRID < apart.min(initial=1.0) < 1.1 * GRID and np.abs(steps - steps.round()).max() < 0.1:
        return 0.0
    return float(np.mean(gaps < 2e-6))


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
    largest = max(probe.contribution(sample, norm) for sample in (probe.strong, probe.data(1, 71), probe.data(1, 73)))
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
