"""Planted bugs that later steps have: noise that is left out or used again, sums of earlier steps without noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .audit_hand import LR, Hand, Job, altered, in_loop, planted

STEPS = "noise_independence"
Factor = Callable[[int, Any], float]


def at_steps(name: str, factor: Callable[[int], float], *found_by: str) -> None:
    """Noise times a factor of the number of steps before: counted by the model, and by the loop of one run."""

    class AtSteps(Hand):
        def draw(self, job: Job, generator: Any) -> Tensor:
            return factor(job.steps) * super().draw(job, generator)

    planted(name, *(found_by or (STEPS,)))(AtSteps)
    planted(f"{name} of the loop", *(found_by or (STEPS,)))(in_loop(AtSteps))


at_steps("no noise at every tenth step", lambda k: float(k % 10 != 9))
at_steps("no noise at step 11, 21, ...", lambda k: float(k % 10 != 0 or k == 0))
at_steps("no noise after step 20", lambda k: float(k < 20))
at_steps("a tenth of the noise at every seventh step", lambda k: 0.1 if k % 7 == 6 else 1.0)
at_steps("noise that fades", lambda k: 0.95**k)


altered(
    "noise that fades slowly",
    STEPS,
    draw=lambda self, job, generator: 0.999**job.steps * Hand.draw(self, job, generator),
)


altered(
    "no noise in one step of twenty, by chance",
    STEPS,
    draw=lambda self, job, generator: (
        float(torch.rand((), generator=generator) > 0.05) * Hand.draw(self, job, generator)
    ),
)


@planted("the noise of 25 steps before", STEPS)
class NoiseAgain(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        job.drawn = [*getattr(job, "drawn", []), super().draw(job, generator)]
        return job.drawn[job.steps % 25]


@planted("the noise of the step before, negative", STEPS)
class Antithetic(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        job.drawn = super().draw(job, generator) if job.steps % 2 == 0 else -job.drawn
        return job.drawn


@planted("half of the step before's noise again", STEPS)
class HalfAgain(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        fresh = super().draw(job, generator)
        job.drawn = fresh if job.steps == 0 else 0.75**0.5 * fresh + 0.5 * job.drawn
        return job.drawn


@planted("only 100 different noises", STEPS)
class FewSeeds(Hand):
    def draw(self, job: Job, generator: Any) -> Tensor:
        seed = int(torch.randint(100, (), generator=generator))
        return torch.randn(job.flat.shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- sums of earlier steps


def remembering(name: str, again: Callable[[Job, Tensor], Tensor], *found_by: str) -> None:
    """The clipped sum is mixed with those of earlier steps, and gets the noise of one; the memory is the model's."""

    class Remembering(Hand):
        def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
            return again(job, super().clipped_sum(job, x, y, c))

    planted(name, *(found_by or (STEPS,)))(Remembering)
    planted(f"{name}, in the loop", *(found_by or (STEPS,)))(in_loop(Remembering))


def momentum(job: Job, total: Tensor, factor: float = 0.9) -> Tensor:
    job.m = factor * job.m + total
    return job.m


def last_again(job: Job, total: Tensor, share: float = 1.0) -> Tensor:
    before, job.m = job.m, total
    return total + share * before


remembering("momentum over sums without noise", momentum)
remembering("momentum of 0.5 over sums without noise", lambda job, total: momentum(job, total, 0.5))
remembering("the last step's sum added again", last_again)
remembering("half of the last step's sum added again", lambda job, total: last_again(job, total, 0.5))


@planted("a momentum of noise, and another of sums", STEPS)
class TwoMomenta(Hand):
    """Momentum of 0.9 over sums, of 0.5 over the noise."""

    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        total = sum((self.clipped_sum(job, x, y, c) for x, y in parts), torch.zeros_like(job.flat))
        job.m = 0.9 * job.m + total
        job.v = 0.5 * job.v + self.noise(job, c, sigma, generator, size, len(parts))
        self.count(job, sigma, size)
        job.steps += 1
        return job.flat - LR * (job.m + job.v) / self.divisor(size)


@planted("momentum over the gradients, clipped after", "per_sample_independence")
class MomentumThenClipped(Hand):
    """Each step clips what it has of earlier ones, too: a sample counts C again in later steps."""

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        job.m = 0.5 * job.m + super().clipped_sum(job, x, y, c)
        return job.m * (c * max(len(y), 1) / (job.m.norm() + 1e-30)).clamp(max=1)


# ---------------------------------------------------------------------- clipping of later steps


@planted("no clipping at every tenth step", "sensitivity")
class UnclippedTenth(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return super().factors(norms, c) if self.number % 10 != 9 else torch.ones_like(norms)

    def step(self, job: Job, *given: Any) -> Tensor:
        self.number = job.steps
        return super().step(job, *given)


planted("no clipping at every tenth step of the loop", "sensitivity")(in_loop(UnclippedTenth))


@planted("factors of the first step", "sensitivity")
class FirstFactors(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return super().factors(norms, c) if self.first is None else self.first[: len(norms)]

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        self.first = getattr(job, "first", None)
        g = self.gradients(job, x, y)
        found = super().factors(self.norms(job, g), c)
        if self.first is None and len(g):
            job.first = found.max().expand(1000)
        return ((found if self.first is None else self.first[: len(g)])[:, None] * g).nansum(0)
