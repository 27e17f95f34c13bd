"""Planted bugs: each step is right (tests/audit_hand.py) but for one thing, which fastdp.audit must find.

PLANTED maps the bug's name to the step and the tests that must find it. Where another library had the bug, it is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from .audit_hand import CLASSES, FEATURES, LR, Hand, Job, small

Planted = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
PLANTED: Planted = {}


def planted(name: str, *found_by: str) -> Callable[[Any], Any]:
    def add(made: Any) -> Any:
        PLANTED[name] = (made, found_by)
        return made

    return add


# ---------------------------------------------------------------------- clipping


@planted("no clipping", "no_clipping", "sensitivity")
class NoClipping(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return torch.ones_like(norms)


@planted("mini-batch clipping", "minibatch_clipping", "per_sample_independence")
class MinibatchClipping(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        mean = self.gradients(job, x, y).sum(0) / max(len(y), 1)
        return len(y) * self.factors(mean.norm(), c) * mean


@planted("clipping norm of the first day", "no_clipping")
class StaleNorm(Hand):
    """A scheduler changes the noise but not the clipping (Opacus, ghost clipping)."""

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        return super().clipped_sum(job, x, y, 1.0)


@planted("factor max(1, C/n)", "sensitivity")
class FactorUpsideDown(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return (c / (norms + 1e-30)).clamp(min=1)


@planted("gradient times C, never divided by its norm", "sensitivity")
class ScaledByC(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return torch.full_like(norms, c)


@planted("clipping by coordinate", "sensitivity")
class ClippedByCoordinate(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        return self.gradients(job, x, y).nan_to_num(0, 0, 0).clamp(-c, c).sum(0)


@planted("every layer clipped to C, noise for C", "sensitivity")
class LayersToC(Hand):
    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        parts = g.split([shape.numel() for shape in job.shapes.values()], 1)
        return torch.cat([(self.factors(part.norm(dim=1), c)[:, None] * part).nansum(0) for part in parts])


@planted("norm without the biases", "sensitivity")
class NormWithoutBiases(Hand):
    """Uses of parameters that the norm does not see."""

    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        seen = torch.cat([torch.full((s.numel(),), float(len(s) > 1)) for s in job.shapes.values()])
        return (gradients * seen).norm(dim=1)


@planted("norm in bfloat16", "sensitivity")
class NormInHalf(Hand):
    """The bound is exceeded by some tenths of a percent (Opacus under autocast)."""

    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        return gradients.bfloat16().norm(dim=1).float()


@planted("largest coordinate as norm", "sensitivity")
class MaximumNorm(Hand):
    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        return gradients.abs().amax(1) if len(gradients) else gradients.new_zeros(0)


@planted("norms of the step before", "sensitivity")
class NormsOfBefore(Hand):
    """A layer that is not used in a step keeps its old norm (Opacus, ghost clipping)."""

    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        now, before = super().norms(job, gradients), job.last_norms
        job.last_norms = now
        return now if before is None or not len(before) else torch.full_like(now, float(before.min()) / 3)


@planted("factors [B] against losses [B, 1]", "per_sample_independence", "sensitivity")
class Broadcast(Hand):
    """Every sample is weighted with the sum of all factors (Opacus, ghost clipping)."""

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        weights = (self.factors(self.norms(job, g), c)[None, :] * torch.ones(len(y), 1)).sum(1)
        return (weights[:, None] * g).sum(0)


@planted("norms averaged over the batch", "per_sample_independence", "sensitivity")
class NormsShared(Hand):
    """Norms reduced across ranks that hold different samples (FlashNorm)."""

    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        norms = super().norms(job, gradients)
        return norms.square().mean().sqrt().expand_as(norms) if len(norms) else norms


@planted("every view of a sample clipped alone", "sensitivity")
class ViewsApart(Hand):
    """Augmentations of one sample count as samples."""

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        return sum((super(ViewsApart, self).clipped_sum(job, x * k, y, c) for k in (0.9, 1.0, 1.1)), torch.zeros(()))


class Tied(nn.Module):
    """One weight as first and as last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(CLASSES, FEATURES) / 3)
        self.inner = nn.Linear(CLASSES, FEATURES)

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        table = self.table if second is None else second
        return torch.tanh(self.inner(x @ self.table.t())) @ table.t()


@planted("tied weight, norm of one use only", "sensitivity")
class TiedNorm(Hand):
    """The second use overwrites the norm of the first (AWS's fastDP)."""

    make_model = Tied

    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        return self.of_head[: len(gradients)]

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        norms = []
        for a, b in zip(x, y, strict=True):
            named = job.named(job.flat)
            head = named["table"].clone().requires_grad_()
            logits = functional_call(job.model, named, (a[None], head))
            (g,) = torch.autograd.grad(nn.functional.cross_entropy(logits, b[None]), head)
            norms.append(g.norm())
        self.of_head = torch.stack(norms) if norms else torch.zeros(0)
        return super().clipped_sum(job, x, y, c)


@planted("mini-batch clipping of a sum", "minibatch_clipping", "per_sample_independence")
class SumClipped(Hand):
    """Nothing is divided, and the sum is clipped: B copies of a sample tell."""

    expected_batch_size = 1.0

    def divisor(self, size: int) -> float:
        return 1.0

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        total = self.gradients(job, x, y).sum(0)
        return self.factors(total.norm(), c) * total


def with_adam(name: str, *found_by: str) -> None:
    """The same bug, under Adam."""
    made = PLANTED[name][0]
    PLANTED[f"{name}, Adam"] = (lambda: made("adam"), found_by)


with_adam("no clipping", "no_clipping")
with_adam("mini-batch clipping", "minibatch_clipping", "per_sample_independence")
with_adam("every layer clipped to C, noise for C", "sensitivity")

# ---------------------------------------------------------------------- samples


class WithStatistics(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, CLASSES))


@planted("BatchNorm", "batch_statistics")
class BatchNorm(Hand):
    make_model = WithStatistics

    def gradients(self, job: Job, x: Tensor, y: Tensor) -> Tensor:
        """One more sample is in the statistics of each: all of the batch."""
        rows = []
        for k in range(len(y)):
            flat = job.flat.clone().requires_grad_()
            outputs = functional_call(job.model, {**job.named(flat), **self.buffers(job)}, x) if len(y) > 1 else None
            if outputs is None:
                rows.append(torch.zeros_like(job.flat) + 0.1)
                continue
            rows.append(torch.autograd.grad(nn.functional.cross_entropy(outputs[k : k + 1], y[k : k + 1]), flat)[0])
        return torch.stack(rows) if rows else torch.zeros(0, job.flat.numel())

    def buffers(self, job: Job) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in job.model.named_buffers()}

    def predict(self, job: Job, x: Any) -> np.ndarray:
        x = torch.as_tensor(x)
        job.model.train(len(x) > 1)
        with torch.no_grad():
            found = functional_call(job.model, {**job.named(job.flat), **self.buffers(job)}, x)
        job.model.train()
        return found.double().numpy()


@planted("running statistics released", "batch_statistics")
class RunningStatistics(Hand):
    """The model is used in eval mode, but statistics of the data are kept and released."""

    def state(self, job: Job) -> np.ndarray:
        return np.asarray(job.mean)

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        job.mean = x.mean(0).double().numpy()
        return super().clipped_sum(job, x, y, c)


@planted("loss divided by the batch's classes", "per_sample_independence")
class BatchWeights(Hand):
    """Each sample's gradient is weighted by what the batch looks like, as a token-mean loss does (AWS's fastDP)."""

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        classes = y.argmax(1) if y.is_floating_point() else y
        counts = torch.bincount(classes, minlength=CLASSES)
        g = self.gradients(job, x, y)
        factors = self.factors(self.norms(job, g), c) / counts[classes]
        return (factors[:, None] * g).nansum(0)


@planted("NaN goes through", "nan_sample")
class NaNThrough(Hand):
    """One bad sample destroys the model (Opacus)."""

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        return (self.factors(self.norms(job, g), c)[:, None] * g).sum(0)


@planted("nan_to_num after the sum", "nan_sample")
class NaNHidden(NaNThrough):
    """It takes the others with it (AWS's fastDP)."""

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        return super().clipped_sum(job, x, y, c).nan_to_num(0, 0, 0)


# ---------------------------------------------------------------------- noise


@planted("noise not scaled with C", "uncalibrated_noise", "noise_distribution")
class NoiseWithoutC(Hand):
    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return sigma * self.draw(job, generator)


@planted("noise of sigma / sqrt(B)", "uncalibrated_noise", "noise_distribution")
class NoiseOfBatchRoot(Hand):
    """Whatever C is (FlashDP)."""

    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return sigma * size**0.5 * self.draw(job, generator)


@planted("no noise", "uncalibrated_noise", "noise_distribution", "epsilon_bound")
class NoNoise(Hand):
    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return torch.zeros_like(job.flat)


@planted("noise of sigma whatever it is", "uncalibrated_noise")
class NoiseWithoutSigma(Hand):
    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return (sigma > 0) * c * self.draw(job, generator)


@planted("noise for the mean on the sum", "noise_distribution", "noise_scale", "epsilon_bound")
class NoiseForMean(Hand):
    """Sum against mean (an example of JAX-Privacy)."""

    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return sigma * c / max(size, 1) * self.draw(job, generator)


@planted("noise for the sum on the mean", "noise_distribution", "noise_scale")
class NoiseForSum(Hand):
    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return sigma * c * max(size, 1) * self.draw(job, generator)


@planted("noise of variance sigma C", "uncalibrated_noise")
class NoiseOfVariance(Hand):
    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return (sigma * c) ** 0.5 * self.draw(job, generator)


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


@planted("uniform noise", "noise_distribution")
class UniformNoise(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        return (2 * torch.rand(job.flat.shape, generator=generator) - 1) * 3**0.5


@planted("noise in bfloat16", "noise_distribution")
class NoiseInHalf(Hand):
    """(AWS's fastDP.)"""

    def draw(self, job: Job, generator: Any) -> Tensor:
        return super().draw(job, generator).bfloat16().float()


@planted("the same noise in every run", "uncalibrated_noise")
class NoiseSeededByConstant(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        return torch.randn(job.flat.shape, generator=torch.Generator().manual_seed(job.steps))


@planted("the same noise at every step", "noise_independence")
class NoiseReused(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        return torch.randn(job.flat.shape, generator=torch.Generator().manual_seed(generator.initial_seed()))


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


@planted("noise at every micro-batch", "noise_once")
class NoiseEveryPart(Hand):
    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return sum((sigma * c * self.draw(job, generator) for _ in range(parts)), torch.zeros(()))


@planted("workers average their noise", "noise_once")
class NoiseAveraged(Hand):
    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return sigma * c * self.draw(job, generator) / parts**0.5


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


@planted("only the last micro-batch counts", "noise_once")
class LastPartOnly(Hand):
    """A second backward before the step drops the first batch (Opacus, ghost clipping)."""

    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        return super().step(job, parts[-1:], size, c, sigma, generator)


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


@planted("the same batches in every run", "poisson_sampling")
class SameBatches(Hand):
    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        return super().sample(records, steps, 0)


@planted("empty batches skipped", "empty_batch")
class EmptySkipped(Hand):
    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        return super().step(job, parts, size, c, sigma, generator) if size else job.flat


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


def right(**attributes: Any) -> Callable[[], Any]:
    """The step that is right, with other attributes or parts."""
    return lambda: type("Right", (Hand,), attributes)()


__all__ = ["PLANTED", "Hand", "Sequence", "right", "small"]
