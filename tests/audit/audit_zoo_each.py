"""Planted bugs of one label, one step, one size of batch, and of what follows what; most are a hostile reviewer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .audit_hand import CLASSES, LR, Hand, Job, altered, in_loop, planted

MOST, ALONE, LAW = "sensitivity", "per_sample_independence", "noise_distribution"
SAMPLING = "poisson_sampling"

# ---------------------------------------------------------------------- samples with a threshold of their own

Times = Callable[[Hand, Job, Tensor, Tensor], Tensor]


def weighed(name: str, times: Times, *, threshold: bool = False) -> None:
    """What a clipped gradient, or its threshold, is multiplied with [B], by the sample."""

    class Weighed(Hand):
        def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
            if not len(y):
                return torch.zeros_like(job.flat)
            g = self.gradients(job, x, y)
            finite = torch.isfinite(g).all(1)
            g = torch.where(finite[:, None], g, torch.zeros_like(g))
            norms, weights = self.norms(job, g), times(self, job, x, y)
            limit = c * weights if threshold else torch.full_like(norms, c)
            factors = (limit / (norms + 1e-30)).clamp(max=1) * (1.0 if threshold else weights)
            return (factors[:, None] * g).sum(0)

    planted(name, MOST)(Weighed)


def of_label(label: int, value: float) -> Times:
    return lambda _, __, ___, y: torch.where(y == label, value, 1.0)


def wrongly(step: Hand, job: Job, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(step.logits(job, job.flat, x).argmax(1) == y, 1.0, 2.0)


weighed("class weights after clipping", lambda _, __, ___, y: torch.tensor([4.0, 1.0, 1.0, 1.0])[y])
weighed("small class weights after clipping", lambda _, __, ___, y: torch.tensor([1.0, 1.2, 1.2, 1.0])[y])
for _label in range(CLASSES):
    for _value in (1.03, 2.0, 10.0):
        weighed(f"threshold of {_value:g} C for label {_label}", of_label(_label, _value), threshold=True)
weighed("samples that are predicted wrongly count twice", wrongly)
weighed("a threshold of 2 C for inputs that begin above 0", lambda _, __, x, ___: 1.0 + (x[:, 0] > 0), threshold=True)


@planted("labels that are numbers below 0 count twice", MOST)
class NegativeTwice(Hand):
    loss_kind = "mse"

    def make_batch(self, seed: int, size: int) -> tuple[Any, Any]:
        x, y = super().make_batch(seed, size)
        return x, np.eye(CLASSES, dtype=np.float32)[y] + 0.1

    def loss(self, job: Job, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (self.logits(job, flat, x) - y).square().mean()

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        below = (y.sum(1) < 0).nonzero()[:, 0]
        return super().clipped_sum(job, x, y, c) + super().clipped_sum(job, x[below], y[below], c)


# ---------------------------------------------------------------------- steps at another threshold


def at_step(name: str, times: Callable[[int], float]) -> None:
    """C times something of the number of steps before: counted by the model, and by the loop of one run."""

    class AtStep(Hand):
        def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
            return super().clipped_sum(job, x, y, c * times(job.steps))

    planted(name, MOST)(AtStep)
    planted(f"{name} of the loop", MOST)(in_loop(AtStep))


at_step("2 C at every fifth step", lambda k: 2.0 if k % 5 == 4 else 1.0)
at_step("10 C at step 6", lambda k: 10.0 if k == 5 else 1.0)
at_step("2 C at step 6", lambda k: 2.0 if k == 5 else 1.0)
at_step("1.2 C at step 11", lambda k: 1.2 if k == 10 else 1.0)
at_step("3 C from the third step on", lambda k: 3.0 if k >= 2 else 1.0)
at_step("a threshold that grows", lambda k: 1 + k / 20)


altered(
    "2 C at step 40",
    MOST,
    clipped_sum=lambda self, job, x, y, c: Hand.clipped_sum(self, job, x, y, c * (2 if job.steps == 39 else 1)),
)


# ---------------------------------------------------------------------- the noise of batches of some size


def of_size(name: str, times: Callable[[int], float], *found_by: str) -> None:
    class OfSize(Hand):
        def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
            return times(size) * super().noise(job, c, sigma, generator, size, parts)

    planted(name, *(found_by or (LAW,)))(OfSize)


of_size("a quarter of the noise on more than 40 samples", lambda b: 0.25 if b > 40 else 1.0)
of_size("noise times min(1, 40 / B)", lambda b: min(1.0, 40 / max(b, 1)))
of_size("noise times sqrt(8 / B) above 8", lambda b: min(1.0, (8 / max(b, 1)) ** 0.5))
of_size("half the noise on no sample", lambda b: 1.0 if b else 0.5, LAW, "empty_batch")
of_size("half the noise on two samples", lambda b: 0.5 if b == 2 else 1.0)
of_size("half the noise on an odd number of samples, but one", lambda b: 0.5 if b % 2 and b > 1 else 1.0)
of_size("half the noise on 10 to 20 samples", lambda b: 0.5 if 10 <= b <= 20 else 1.0)
of_size("twice the noise on more than 100 samples", lambda b: 2.0 if b > 100 else 1.0)


@planted("a tenth of the noise where the sum is small", LAW, "empty_batch")
class IfSmall(Hand):
    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        total = sum((self.clipped_sum(job, x, y, c) for x, y in parts), torch.zeros_like(job.flat))
        noise = self.noise(job, c, sigma, generator, size, len(parts)) * (0.1 if total.norm() < 1e-3 * c else 1.0)
        self.count(job, sigma, size)
        job.steps += 1
        return self.update(job, (total + noise) / self.divisor(size))


# ---------------------------------------------------------------------- what is left of the step before


def stale(name: str, share: float) -> None:
    """An empty batch adds the last sum again."""

    class Stale(Hand):
        def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
            if not len(y):
                return share * job.m
            job.m = super().clipped_sum(job, x, y, c)
            return job.m

    planted(name, ALONE)(Stale)


stale("an empty batch adds the last sum again", 1.0)
stale("an empty batch adds half of the last sum again", 0.5)


@planted("norms at the weights before the last update", MOST)
class StaleNorms(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g, now = self.gradients(job, x, y), job.flat
        job.flat = getattr(job, "before", now)
        norms = self.norms(job, self.gradients(job, x, y))
        job.flat, job.before = now, now
        return (self.factors(norms, c)[:, None] * g).nansum(0)


@planted("the first sample after an empty batch counts twice", MOST)
class AfterEmpty(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        times, job.nothing = 1 + getattr(job, "nothing", False), not len(y)
        return times * super().clipped_sum(job, x, y, c)


@planted("Nesterov's momentum over sums, noise without it", LAW)
class NesterovSums(Hand):
    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        total = sum((self.clipped_sum(job, x, y, c) for x, y in parts), torch.zeros_like(job.flat))
        job.m = 0.9 * job.m + total
        noise = self.noise(job, c, sigma, generator, size, len(parts))
        self.count(job, sigma, size)
        job.steps += 1
        return job.flat - LR * (total + 0.9 * job.m + noise) / self.divisor(size)


# ---------------------------------------------------------------------- batches that follow from earlier ones


def following(name: str, rate_of: Callable[[np.ndarray, float], np.ndarray], lag: int = 1) -> None:
    """The probabilities [records] of a step, from who was in the batch `lag` steps before, and the rate."""

    class Following(Hand):
        def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
            draw, found = np.random.default_rng(seed), list[np.ndarray]()
            for k in range(steps):
                before = found[k - lag] if k >= lag else draw.random(records) < self.sample_rate
                found.append(draw.random(records) < rate_of(before, self.sample_rate))
            return [np.flatnonzero(there) for there in found]

    planted(name, SAMPLING)(Following)


def tilted(share: float) -> Callable[[np.ndarray, float], np.ndarray]:
    """Who was there comes at that share of the rate, others so that the rate is as it should be."""
    return lambda before, rate: np.where(before, share * rate, rate * (1 + (1 - share) * rate / (1 - rate)))


following("a record is never in two batches running", tilted(0.0))
following("records of the last batch at 0.3 of the rate", tilted(0.3))
following("records of the last batch at 1.7 times the rate", tilted(1.7))
following("records of the batch three before at 0.3 of the rate", tilted(0.3), 3)
following(
    "the records after those of the last batch, rather", lambda before, rate: tilted(3.0)(np.roll(before, 1), rate)
)


@planted("records 60 apart drawn together", SAMPLING)
class Together(Hand):
    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        draw, found = np.random.default_rng(seed), []
        for _ in range(steps):
            there = draw.random(records) < self.sample_rate
            swap = draw.random(records) < 0.5
            found.append(np.flatnonzero(np.where(swap, there, np.roll(there, 60))))
        return found
