"""Planted bugs of noise, of batches in parts, of sampling and of accounting (see tests/audit/audit_zoo.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .audit_hand import LR, Hand, Job, altered, planted, with_adam

# ---------------------------------------------------------------------- noise


altered(
    "noise not scaled with C",
    "uncalibrated_noise",
    "noise_distribution",
    noise=lambda self, job, c, sigma, generator, size, parts: sigma * self.draw(job, generator),
)


# Whatever C is (FlashDP).
altered(
    "noise of sigma / sqrt(B)",
    "uncalibrated_noise",
    "noise_distribution",
    noise=lambda self, job, c, sigma, generator, size, parts: sigma * size**0.5 * self.draw(job, generator),
)


altered(
    "no noise",
    "uncalibrated_noise",
    "noise_distribution",
    "epsilon_bound",
    noise=lambda self, job, c, sigma, generator, size, parts: torch.zeros_like(job.flat),
)


altered(
    "noise of sigma whatever it is",
    "uncalibrated_noise",
    noise=lambda self, job, c, sigma, generator, size, parts: (sigma > 0) * c * self.draw(job, generator),
)


# Sum against mean (an example of JAX-Privacy).
altered(
    "noise for the mean on the sum",
    "noise_distribution",
    "noise_scale",
    "epsilon_bound",
    noise=lambda self, job, c, sigma, generator, size, parts: sigma * c / max(size, 1) * self.draw(job, generator),
)


altered(
    "noise for the sum on the mean",
    "noise_distribution",
    "noise_scale",
    noise=lambda self, job, c, sigma, generator, size, parts: sigma * c * max(size, 1) * self.draw(job, generator),
)


altered(
    "noise of variance sigma C",
    "uncalibrated_noise",
    noise=lambda self, job, c, sigma, generator, size, parts: (sigma * c) ** 0.5 * self.draw(job, generator),
)


@planted("noise, then clipping", "noise_distribution", "noise_scale")
class NoiseThenClipping(Hand):
    """The sum is clipped to C after the noise was added."""

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        return super().update(job, gradient * (job.c / job.size / (gradient.norm() + 1e-30)).clamp(max=1))

    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        job.c, job.size = torch.tensor(c), max(size, 1)
        return super().noise(job, c, sigma, generator, size, parts)


@planted("no noise on biases", "noise_distribution")
class NoNoiseOnBiases(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        kept = torch.cat([torch.full((s.numel(),), float(len(s) > 1)) for s in job.shapes.values()])
        return kept * super().draw(job, generator)


@planted("last layer never trained", "noise_distribution")
class LayerDropped(Hand):
    """Unsupported parameters are left out with a line on the screen (AWS's fastDP)."""

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        new = super().update(job, gradient)
        last = list(job.shapes.values())[-1].numel()
        return torch.cat([new[:-last], job.flat[-last:]])


altered(
    "uniform noise",
    "noise_distribution",
    draw=lambda self, job, generator: (2 * torch.rand(job.flat.shape, generator=generator) - 1) * 3**0.5,
)


# (AWS's fastDP.)
altered(
    "noise in bfloat16",
    "noise_distribution",
    draw=lambda self, job, generator: Hand.draw(self, job, generator).bfloat16().float(),
)


altered(
    "the same noise in every run",
    "uncalibrated_noise",
    draw=lambda self, job, generator: torch.randn(job.flat.shape, generator=torch.Generator().manual_seed(job.steps)),
)


altered(
    "the same noise at every step",
    "noise_independence",
    draw=lambda self, job, generator: torch.randn(
        job.flat.shape, generator=torch.Generator().manual_seed(generator.initial_seed())
    ),
)


@planted("noise drawn every other step", "noise_independence")
class NoiseEveryOther(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        if job.steps % 2 == 0:
            job.kept = super().draw(job, generator)
        return job.kept


@planted("the same noise for every parameter", "noise_independence")
class NoiseByParameter(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        seed = int(torch.randint(2**31, (), generator=generator))
        parts = [torch.randn(s.numel(), generator=torch.Generator().manual_seed(seed)) for s in job.shapes.values()]
        return torch.cat(parts)


altered(
    "noise at every micro-batch",
    "noise_once",
    noise=lambda self, job, c, sigma, generator, size, parts: sum(
        (sigma * c * self.draw(job, generator) for _ in range(parts)), torch.zeros(())
    ),
)


altered(
    "workers average their noise",
    "noise_once",
    noise=lambda self, job, c, sigma, generator, size, parts: sigma * c * self.draw(job, generator) / parts**0.5,
)


with_adam("noise not scaled with C", "uncalibrated_noise")
with_adam("no noise", "uncalibrated_noise")
with_adam("noise for the mean on the sum", "noise_distribution", "noise_scale")
with_adam("the same noise at every step", "noise_independence")

# ---------------------------------------------------------------------- parts of a batch


@planted("accumulated, then clipped", "noise_once")
class AccumulatedThenClipped(Hand):
    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        if len(parts) > 1:
            means = [self.gradients(job, x, y).mean(0) for x, y in parts]
            total = sum(((c / m.norm()).clamp(max=1) * m for m in means), torch.zeros_like(job.flat))
            return job.flat - LR * (total + self.noise(job, c, sigma, generator, size, 1)) / len(parts)
        return super().step(job, parts, size, c, sigma, generator)


# A second backward before the step drops the first batch (Opacus, ghost clipping).
altered(
    "only the last micro-batch counts",
    "noise_once",
    step=lambda self, job, parts, size, c, sigma, generator: Hand.step(
        self, job, parts[-1:], size, c, sigma, generator
    ),
)


# ---------------------------------------------------------------------- sampling and accounting


@planted("shuffled batches of one size", "poisson_sampling")
class Shuffled(Hand):
    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        draw, size = np.random.default_rng(seed), round(records * self.sample_rate)
        order = np.concatenate([draw.permutation(records) for _ in range(steps * size // records + 1)])
        return [order[k * size : (k + 1) * size] for k in range(steps)]


@planted("batches of one size, drawn anew", "poisson_sampling")
class FixedSize(Hand):
    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [draw.choice(records, round(records * self.sample_rate), replace=False) for _ in range(steps)]


@planted("drawn with replacement", "poisson_sampling")
class WithReplacement(Hand):
    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [draw.choice(records, draw.binomial(records, self.sample_rate)) for _ in range(steps)]


@planted("drawn more often than accounted", "poisson_sampling")
class RateTooHigh(Hand):
    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [np.flatnonzero(draw.random(records) < 1.15 * self.sample_rate) for _ in range(steps)]


altered(
    "the same batches in every run",
    "poisson_sampling",
    sample=lambda self, records, steps, seed: Hand.sample(self, records, steps, 0),
)


altered(
    "empty batches skipped",
    "empty_batch",
    step=lambda self, job, parts, size, c, sigma, generator: (
        Hand.step(self, job, parts, size, c, sigma, generator) if size else job.flat
    ),
)


@planted("empty batches not counted", "empty_batch")
class EmptyNotCounted(Hand):
    def count(self, job: Job, sigma: float, size: int) -> None:
        if size:
            super().count(job, sigma, size)


@planted("every other step counted", "accountant")
class HalfCounted(Hand):
    def count(self, job: Job, sigma: float, size: int) -> None:
        if job.steps % 2 == 0:
            super().count(job, sigma, size)


@planted("accounted with twice the noise", "accountant")
class WrongNoiseCounted(Hand):
    def count(self, job: Job, sigma: float, size: int) -> None:
        super().count(job, 2 * sigma, size)


@planted("accounted at half the rate", "accountant")
class WrongRateCounted(Hand):
    def count(self, job: Job, sigma: float, size: int) -> None:
        job.history.append((sigma, self.sample_rate / 2, 1))
