"""Balls in bins: the epsilon of noise over records that take part at one secret place of every cycle.

A record's place i is drawn uniformly. With it, what the encoder gives is shifted by at most m_i, the sum of the columns
of C of the steps i, i + period, ...; so the run is dominated by P, the mean over i of N(m_i, s^2), against Q = N(0,
s^2), if no entry of C is negative. delta(epsilon) is the larger of E_P[(1 - e^(epsilon - L))+] and
E_Q[(1 - e^(epsilon + L))+], with the privacy loss L = log(P / Q). L depends on the normals through their products y
with the m_i alone, whose covariance is the Gram matrix of the m_i over s^2: samples have as many numbers as a cycle has
steps. Means are taken by importance sampling, P from shifts by 1 + a of the m_i and Q from a shift by -a of their mean.
Then what is averaged has a bound that holds for all samples, by the inequality of power means and by Jensen's, and
the empirical Bernstein inequality gives an upper confidence bound of delta.

So epsilon is too small with a probability of at most FAILURE, over the draws of one evaluation. These are the same ones
every time, so that results repeat.

Source: Choquette-Choo, Ganesh, Haque, Steinke and Thakurta 2025, Near exact privacy amplification for matrix mechanisms
(arXiv 2410.06266); Maurer and Pontil 2009, Empirical Bernstein bounds (arXiv 0907.3740), theorem 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

FAILURE = 1e-6  # the probability that an epsilon is too small
SAMPLES = 1 << 20
_PILOT = 1 << 13  # samples by which tilts are chosen: others than those that are averaged
_CHUNK = 1 << 13
_TILTS = (0.1, 0.2, 0.35, 0.6, 1.0, 1.5, 2.2, 3.2, 4.5, 6.5, 10.0, 20.0, 50.0)
_SEED = 20241006


class _Losses(NamedTuple):
    """Samples of one direction.

    Attributes:
        loss: log of the ratio of the two distributions; positive where it counts.
        weight: log of the density of the sampled distribution over that of the second.
        tilt: the shift.
        bound: what is averaged at epsilon is at most exp(bound - tilt * epsilon).
    """

    loss: np.ndarray
    weight: np.ndarray
    tilt: float
    bound: float


def epsilon_of_bins(grams: Sequence[np.ndarray], delta: float, samples: int = SAMPLES) -> float:
    """Return an epsilon at delta, which is too small with a probability of at most FAILURE.

    Args:
        grams: for each independent draw of places, the products <m_i, m_j> over the variance of the noise. A Gaussian
            mechanism without sampling has one place.
        delta: in (0, 1).
        samples: that are averaged.
    """
    found = 0.0
    for sampled, counts in ((_towards, (samples,)), (_away, (samples // 8, samples))):  # the second is mostly smaller
        pilots = []
        for pilot in (sampled(grams, tilt, _PILOT, _SEED) for tilt in _TILTS):
            epsilon = _smallest(pilot, delta, counts[0])
            few = int((pilot.loss > epsilon).sum()) < 10  # of which nothing can be said
            pilots.append((few, epsilon, pilot.tilt))
        tilt = min(pilots)[2]
        for count in counts:
            epsilon = _smallest(sampled(grams, tilt, count, _SEED + count), delta, count)
            if epsilon <= found:
                break
        found = max(found, epsilon)
    return found * (1 + 1e-5) + 1e-4  # single precision


def _towards(grams: Sequence[np.ndarray], tilt: float, samples: int, seed: int) -> _Losses:
    """P against Q. Each y is shifted by 1 + tilt of what it is with the record."""

    def sample(y: Tensor, gram: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        half = gram.diagonal() / 2
        y.add_(gram[place], alpha=1 + tilt)
        return _mean_exp(y - half), _mean_exp((1 + tilt) * y - (1 + tilt) ** 2 * half)

    loss, weight = _sampled(grams, samples, seed, sample)
    # weight >= (1 + tilt) loss - bound, by power means
    return _Losses(loss, weight, tilt, tilt * (1 + tilt) * sum(np.diagonal(gram).max() for gram in grams) / 2)


def _away(grams: Sequence[np.ndarray], tilt: float, samples: int, seed: int) -> _Losses:
    """Q against P. Each y is shifted by -tilt times its product with the mean of all m."""

    def sample(y: Tensor, gram: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        centre = gram.mean(dim=0)
        y.sub_(tilt * centre)
        loss = -_mean_exp(y - gram.diagonal() / 2)
        return loss, loss - tilt * y.mean(dim=1) - tilt**2 * centre.mean() / 2

    loss, weight = _sampled(grams, samples, seed, sample)
    # the mean of y is at most that of the diagonal / 2 - loss, by Jensen
    bound = sum(tilt * float(np.trace(gram)) / len(gram) + tilt**2 * float(gram.mean()) for gram in grams) / 2
    return _Losses(loss, weight, tilt, bound)


def _sampled(
    grams: Sequence[np.ndarray],
    samples: int,
    seed: int,
    sample: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[np.ndarray, np.ndarray]:
    """The sums of the logarithms that `sample` gives for each draw of places."""
    found = np.zeros((2, samples))
    random = torch.Generator().manual_seed(seed)
    for gram in grams:
        values, vectors = np.linalg.eigh(gram)
        kept = values > 1e-13 * values.max()
        root = torch.tensor((vectors[:, kept] * np.sqrt(values[kept])).T, dtype=torch.float32)
        single = torch.tensor(gram, dtype=torch.float32)
        for begin in range(0, samples, _CHUNK):
            count = min(_CHUNK, samples - begin)
            place = torch.randint(len(gram), (count,), generator=random)
            normal = torch.randn((count, len(root)), generator=random)
            for number, value in enumerate(sample(normal @ root, single, place)):
                found[number, begin : begin + count] += value.numpy()
    return found[0], found[1]


def _mean_exp(values: Tensor) -> Tensor:
    """The logarithm of the mean of exponentials, of each row."""
    return values.logsumexp(dim=1) - math.log(values.shape[1])


def _upper(losses: _Losses, epsilon: float, samples: int) -> float:
    """An upper confidence bound of delta, as if from so many samples. It falls with epsilon."""
    tilt, over = losses.tilt, losses.loss > epsilon
    loss = losses.loss[over]
    terms = -np.expm1(epsilon - loss) * np.exp(np.minimum(loss - losses.weight[over], 700.0))
    mean, square = terms.sum() / len(losses.loss), (terms**2).sum() / len(losses.loss)
    # (1 - v) v^tilt, v = e^(epsilon - loss), is at most this
    top = losses.bound - tilt * epsilon + tilt * math.log(tilt / (1 + tilt)) - math.log1p(tilt)
    log = math.log(2 * 3 / FAILURE)  # three means are bounded at most
    mean += math.sqrt(2 * square * log / samples) + 7 * math.exp(min(top, 700.0)) * log / (3 * samples - 3)
    return float(mean) * 1.001  # single precision


def _smallest(losses: _Losses, delta: float, samples: int) -> float:
    """The smallest epsilon whose delta is small enough."""
    if _upper(losses, 0.0, samples) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while _upper(losses, high, samples) > delta:
        low, high = high, 2 * high
        if high > 1e6:
            return math.inf
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _upper(losses, middle, samples) > delta else (low, middle)
    return high
