"""Planted bugs of thresholds, of noise that follows the gradients, of tiny gradients and of large batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .audit_hand import Hand, Job, altered, planted

ALONE, LAW, MOST = "per_sample_independence", "noise_distribution", "sensitivity"


def threshold(name: str, of: Callable[[Tensor, float], Tensor], *found_by: str) -> None:
    """Clipping to a threshold of the batch's norms without noise; with noise of scale C, and of that threshold."""

    class Threshold(Hand):
        scaled = False

        def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
            g = self.gradients(job, x, y)
            g = g[torch.isfinite(g).all(1)]
            norms = self.norms(job, g)
            self.threshold = float(of(norms, c)) if len(norms) else c
            return (self.factors(norms, self.threshold)[:, None] * g).sum(0)

        def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
            return super().noise(job, self.threshold if self.scaled else c, sigma, generator, size, parts)

    class Scaled(Threshold):
        scaled = True

    planted(f"threshold {name}", *(found_by or (ALONE,)))(Threshold)
    planted(f"threshold {name}, and noise of it", *(found_by or (ALONE,)), LAW)(Scaled)


threshold("min(C, median of the norms)", lambda n, c: n.median().clamp(max=c))
threshold("min(C, mean of the norms)", lambda n, c: n.mean().clamp(max=c))
threshold("min(C, 0.9 quantile of the norms)", lambda n, c: n.quantile(0.9).clamp(max=c))
threshold("min(C, least norm)", lambda n, c: n.min().clamp(max=c))
threshold("min(C, twice the median)", lambda n, c: (2 * n.median()).clamp(max=c))


@planted("threshold min(C, median of the last step's norms)", ALONE)
class LastMedian(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        norms = self.norms(job, g)
        limit = min(c, getattr(job, "median", c))
        if len(norms):
            job.median = float(norms.median())
        return (self.factors(norms, limit)[:, None] * g).nansum(0)


@planted("threshold min(C, a running mean of norms)", ALONE)
class RunningThreshold(LastMedian):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        norms = self.norms(job, g)
        limit = min(c, getattr(job, "mean", c))
        if len(norms):
            job.mean = 0.5 * getattr(job, "mean", c) + 0.5 * float(norms.mean())
        return (self.factors(norms, limit)[:, None] * g).nansum(0)


# ---------------------------------------------------------------------- noise that follows the gradients


def following(name: str, scale: Callable[[Tensor, float], Tensor], *found_by: str) -> None:
    """Noise of sigma times a scale, of the norms and C."""

    class Following(Hand):
        def norms(self, job: Job, gradients: Tensor) -> Tensor:
            job.norms = super().norms(job, gradients)
            return job.norms

        def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
            norms = job.norms if len(job.norms) else torch.full((1,), c)
            return super().noise(job, float(scale(norms, c)), sigma, generator, size, parts)

    planted(name, *(found_by or (LAW,)))(Following)


following("noise of min(C, largest contribution)", lambda n, c: n.max().clamp(max=c))
following("noise of the mean contribution", lambda n, c: n.clamp(max=c).mean())
following("noise of the share that was clipped", lambda n, c: c * (n >= c).float().mean())
following("no noise where nothing was clipped", lambda n, c: c * (n >= c).any().float())
following("noise of C, of at most 10", lambda n, c: torch.tensor(c).clamp(max=10.0))


@planted("noise times the sum", LAW)
class Multiplied(Hand):
    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        job.total = sum((self.clipped_sum(job, x, y, c) for x, y in parts), torch.zeros_like(job.flat))
        return super().step(job, parts, size, c, sigma, generator)

    def draw(self, job: Job, generator: Any) -> Tensor:
        return super().draw(job, generator) * job.total.abs() / (job.total.square().mean().sqrt() + 1e-30)


altered(
    "no noise on an empty batch",
    "empty_batch",
    noise=lambda self, job, c, sigma, generator, size, parts: (
        (size > 0) * Hand.noise(self, job, c, sigma, generator, size, parts)
    ),
)


@planted("noise of the last step's learning rate", LAW)
class NoiseOnWeights(Hand):
    """It is added to the weights after the step, without the learning rate."""

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        return super().update(job, gradient) + job.extra

    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        job.extra = super().noise(job, c, sigma, generator, size, parts) / max(size, 1)
        return torch.zeros_like(job.flat)


# ---------------------------------------------------------------------- norms of small and odd gradients


def norm(name: str, of: Callable[[Tensor], Tensor], *found_by: str) -> None:
    class Norm(Hand):
        def norms(self, job: Job, gradients: Tensor) -> Tensor:
            return of(gradients)

    planted(name, *(found_by or (MOST,)))(Norm)


norm("norm whose squares underflow in float16", lambda g: g.half().square().sum(1).float().sqrt())
norm("norm whose squares underflow, summed in float32", lambda g: g.half().square().float().sum(1).sqrt())
norm("norm in float16 that overflows to 0", lambda g: g.half().square().sum(1).sqrt().float().nan_to_num(0, 0, 0))
norm("norm without the first weight", lambda g: g[:, 192:].norm(dim=1))
norm("norm without the last weight", lambda g: torch.cat([g[:, :208], g[:, 272:]], 1).norm(dim=1))
norm("norm without the last bias", lambda g: g[:, :-4].norm(dim=1))
norm("norm of exponent 3", lambda g: g.norm(3, dim=1))
norm("norm squared", lambda g: g.square().sum(1))
norm("root of the norm", lambda g: g.norm(dim=1).sqrt())
norm("root of the mean square", lambda g: g.square().mean(1).sqrt())
norm("largest norm of a layer", lambda g: torch.stack([p.norm(dim=1) for p in g.split([192, 16, 64, 4], 1)]).amax(0))


def factor(name: str, of: Callable[[Tensor, float], Tensor], *found_by: str) -> None:
    class Factor(Hand):
        def factors(self, norms: Tensor, c: float) -> Tensor:
            return of(norms, c)

    planted(name, *(found_by or (MOST,)))(Factor)


factor("factor with eps outside", lambda n, c: (c / (n + 1e-30)).clamp(max=1) + 1e-6)
factor("factor 1 below C + 0.01", lambda n, c: torch.where(n < c + 0.01, 1.0, c / (n + 1e-30)))
factor("factor 1 below 1e-3", lambda n, c: torch.where(n < 1e-3, 1.0, (c / (n + 1e-30)).clamp(max=1)))
factor("factor rounded up to a power of 2", lambda n, c: 2 ** torch.log2((c / (n + 1e-30)).clamp(max=1)).ceil())
factor("factor C / n, of small gradients too, and twice", lambda n, c: 2 * c / (n + c))
factor("factor by the largest norm", lambda n, c: (c / (n.max() + 1e-30)).clamp(max=1).expand_as(n) if len(n) else n,
       ALONE)  # fmt: skip
factor("factors over the largest of them", lambda n, c: f / f.max() if len(f := (c / (n + 1e-30)).clamp(max=1)) else f,
       ALONE)  # fmt: skip
factor("outliers of three medians dropped", lambda n, c: (c / (n + 1e-30)).clamp(max=1) * (n <= 3 * n.median())
       if len(n) else n, ALONE)  # fmt: skip


@planted("sum brought to the norm that C allows", ALONE)
class Brought(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        total = super().clipped_sum(job, x, y, c)
        return total * c * len(y) / (total.norm() + 1e-30)


altered(
    "a hundredth of the gradient as it is",
    MOST,
    clipped_sum=lambda self, job, x, y, c: (
        Hand.clipped_sum(self, job, x, y, c) + 0.01 * self.gradients(job, x, y).nansum(0)
    ),
)


@planted("the last bias is summed without clipping", MOST)
class BiasUnclipped(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        whole = self.gradients(job, x, y).nansum(0)
        return torch.cat([super().clipped_sum(job, x, y, c)[:-4], whole[-4:]])


# ---------------------------------------------------------------------- large batches, and divisors


@planted("rest of a batch beyond 32 not clipped", ALONE)
class RestUnclipped(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        rest = self.gradients(job, x[32:], y[32:]).nansum(0) if len(y) > 32 else 0.0
        return super().clipped_sum(job, x[:32], y[:32], c) + rest


altered(
    "rest of a batch beyond 64 left out",
    ALONE,
    clipped_sum=lambda self, job, x, y, c: Hand.clipped_sum(self, job, x[:64], y[:64], c),
)


@planted("chunks of four share a factor", ALONE)
class ChunksClipped(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        total = torch.zeros_like(job.flat)
        for chunk in g.split(4) if len(g) else ():
            mean = chunk.nanmean(0)
            total += len(chunk) * self.factors(mean.norm(), c) * mean
        return total


@planted("divided by samples that are not clipped away", ALONE)
class DividedByCounted(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        norms = self.norms(job, g)
        kept = max(int((norms > 1e-3 * norms.max()).sum()), 1) if len(g) else 1
        return (self.factors(norms, c)[:, None] * g).nansum(0) * len(y) / kept


@planted("divided by the batch, not by what is expected", LAW)
class DividedByActual(Hand):
    expected_batch_size = 16.0


@planted("steps on large gradients skipped", ALONE)
class Skipped(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        mean = self.gradients(job, x, y).sum(0).norm() / max(len(y), 1)
        return super().clipped_sum(job, x, y, c) * (not float(mean) > 5)


# ---------------------------------------------------------------------- sampling and accounting


def sampled(name: str, draw: Callable[[np.random.Generator, int, float], np.ndarray]) -> None:
    """One batch from a generator, the number of records and the rate."""

    class Sampled(Hand):
        def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
            generator = np.random.default_rng(seed)
            return [draw(generator, records, self.sample_rate) for _ in range(steps)]

    planted(name, "poisson_sampling")(Sampled)


def poisson(draw: np.random.Generator, records: int, rate: float) -> np.ndarray:
    return np.flatnonzero(draw.random(records) < rate)


def again(draw: np.random.Generator, records: int, rate: float) -> np.ndarray:
    while not len(found := poisson(draw, records, rate)):
        pass
    return found


sampled("the last record is never drawn", lambda draw, n, rate: poisson(draw, n - 1, rate))
sampled("empty batches are drawn again", again)
sampled(
    "pairs of records drawn together", lambda draw, n, rate: np.flatnonzero(np.repeat(draw.random(n // 2) < rate, 2))
)
sampled("batches cut at 1.2 times their size", lambda draw, n, rate: poisson(draw, n, rate)[: int(1.2 * n * rate)])


@planted("every batch twice", "poisson_sampling")
class BatchTwice(Hand):
    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        found = super().sample(records, steps, seed)
        return [found[k // 2] for k in range(steps)]


@planted("every tenth step not counted", "accountant")
class TenthNotCounted(Hand):
    def count(self, job: Job, sigma: float, size: int) -> None:
        if job.steps % 10 != 9:
            super().count(job, sigma, size)
