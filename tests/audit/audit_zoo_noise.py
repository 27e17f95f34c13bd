"""Planted bugs of noise: its size, its distribution, its coordinates, its steps (see tests/audit/audit_zoo.py)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .audit_hand import LR, Hand, Job, altered, in_loop, planted, with_adam

CALIBRATED, LAW, STEPS = "uncalibrated_noise", "noise_distribution", "noise_independence"
ONCE = "noise_once"


def scaled(name: str, scale: Any, *found_by: str) -> None:
    """Noise of this standard deviation, of the model, sigma, C and the size of the batch."""

    def noise(self: Hand, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return scale(job, sigma, c, size) * self.draw(job, generator)

    altered(name, *found_by, noise=noise)


def drawn(name: str, change: Any, *found_by: str) -> None:
    """Noise that is drawn as usual [P], and then changed; the model and the generator are there to draw more from."""
    altered(name, *found_by, draw=lambda self, job, generator: change(job, Hand.draw(self, job, generator), generator))


scaled("noise not scaled with C", lambda job, sigma, c, size: sigma, CALIBRATED, LAW)
scaled("no noise", lambda job, sigma, c, size: 0.0, CALIBRATED, LAW, "epsilon_bound")
scaled("noise of sigma whatever it is", lambda job, sigma, c, size: (sigma > 0) * c, CALIBRATED)
scaled("noise of variance sigma C", lambda job, sigma, c, size: (sigma * c) ** 0.5, CALIBRATED)
# Sum against mean (an example of JAX-Privacy).
scaled("noise for the mean on the sum", lambda job, sigma, c, size: sigma * c / max(size, 1), LAW, "noise_scale",
       "epsilon_bound")  # fmt: skip
scaled("noise for the sum on the mean", lambda job, sigma, c, size: sigma * c * max(size, 1), LAW, "noise_scale")
scaled("0.97 of the noise", lambda job, sigma, c, size: 0.97 * sigma * c, LAW)
scaled("sigma rounded to a tenth", lambda job, sigma, c, size: round(sigma, 1) * c, LAW)
scaled("sigma of at most 4", lambda job, sigma, c, size: min(sigma, 4.0) * c, LAW)
scaled("a quarter of the noise on more than 40 samples", lambda job, sigma, c, size: sigma * c / (1 + 3 * (size > 40)),
       LAW)  # fmt: skip
scaled("no noise on an empty batch", lambda job, sigma, c, size: sigma * c * (size > 0), "empty_batch")
altered("divided by the batch, not by what is expected", LAW, expected_batch_size=16.0)
with_adam("noise not scaled with C", CALIBRATED)
with_adam("no noise", CALIBRATED)
with_adam("noise for the mean on the sum", LAW, "noise_scale")


@planted("noise of min(C, largest contribution)", LAW)
class OfLargest(Hand):
    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        job.norms = super().norms(job, gradients)
        return job.norms

    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return super().noise(
            job, min([c, *job.norms.max(0, True)[0].tolist()] if size else [c]), sigma, generator, size, parts
        )


@planted("noise, then clipping", LAW, "noise_scale")
class NoiseThenClipping(Hand):
    """The sum is clipped to C after the noise was added."""

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        return super().update(job, gradient * (job.c / job.size / (gradient.norm() + 1e-30)).clamp(max=1))

    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        job.c, job.size = torch.tensor(c), max(size, 1)
        return super().noise(job, c, sigma, generator, size, parts)


# ---------------------------------------------------------------------- its distribution and coordinates


def at(where: slice, value: float) -> Any:
    """Values at some coordinates are multiplied with a value; -4 on are the last bias."""

    def change(job: Job, z: Tensor, generator: Any) -> Tensor:
        z[where] *= value
        return z

    return change


def more(z: Tensor, generator: Any, number: int = 1) -> Tensor:
    return torch.rand((number, *z.shape), generator=generator)


def same_for_each(job: Job, z: Tensor, generator: Any) -> Tensor:
    return torch.cat([z[: s.numel()] for s in job.shapes.values()])


drawn("uniform noise", lambda job, z, g: (2 * more(z, g)[0] - 1) * 3**0.5, LAW)
drawn("sum of 12 uniforms", lambda job, z, g: more(z, g, 12).sum(0) - 6, LAW)
drawn("noise cut at 3 sigma", lambda job, z, g: z.clamp(-3, 3), LAW)
drawn("Laplace noise", lambda job, z, g: -torch.log(more(z, g)[0].clamp(min=1e-7)) * z.sign() / math.sqrt(2), LAW)
drawn("noise of mean sigma / 20", lambda job, z, g: z + 0.05, LAW)
drawn("one value in a hundred without noise", lambda job, z, g: z * (more(z, g)[0] > 0.01), LAW)
drawn("noise in bfloat16", lambda job, z, g: z.bfloat16().float(), LAW)  # (AWS's fastDP.)
drawn("no noise on biases", lambda job, z, g: at(slice(192, 208), 0.0)(job, z, g), LAW)
drawn("half the noise on the 4 coordinates of a bias", at(slice(-4, None), 0.5), LAW)
drawn("no noise on one coordinate", at(slice(50, 51), 0.0), LAW)
drawn("0.95 of the noise on a layer", at(slice(0, 208), 0.95), LAW)
drawn("noise that is centred", lambda job, z, g: z - z.mean(), LAW)
drawn("the same noise for every parameter", same_for_each, STEPS)


@planted("last layer never trained", LAW)
class LayerDropped(Hand):
    """Unsupported parameters are left out with a line on the screen (AWS's fastDP)."""

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        last = list(job.shapes.values())[-1].numel()
        return torch.cat([super().update(job, gradient)[:-last], job.flat[-last:]])


# ---------------------------------------------------------------------- its steps


def again(job: Job, z: Tensor, generator: Any) -> Tensor:
    """The noise of 25 steps before."""
    job.drawn = [*getattr(job, "drawn", []), z]
    return job.drawn[job.steps % 25]


def half_again(job: Job, z: Tensor, generator: Any) -> Tensor:
    """Half of the step before's noise."""
    job.drawn = z if job.steps == 0 else 0.75**0.5 * z + 0.5 * job.drawn
    return job.drawn


def seeded(number: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(number))


drawn("the same noise in every run", lambda job, z, g: seeded(job.steps, len(z)), CALIBRATED)
drawn("the same noise at every step", lambda job, z, g: seeded(g.initial_seed(), len(z)), STEPS)
with_adam("the same noise at every step", STEPS)
drawn("no noise at every tenth step", lambda job, z, g: z * (job.steps % 10 != 9), STEPS)
planted("no noise at every tenth step of the loop", STEPS)(in_loop("no noise at every tenth step"))
drawn("noise that fades", lambda job, z, g: z * 0.999**job.steps, STEPS)
drawn("the noise of 25 steps before", again, STEPS)
drawn("half of the step before's noise again", half_again, STEPS)


def momentum(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    job.m = 0.9 * job.m + Hand.clipped_sum(self, job, x, y, c)
    return job.m


def last_again(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    before, job.m = job.m, Hand.clipped_sum(self, job, x, y, c)
    return job.m + before


altered("momentum over sums without noise", STEPS, clipped_sum=momentum)
altered("the last step's sum added again", STEPS, clipped_sum=last_again)
planted("momentum over sums without noise, in the loop", STEPS)(in_loop("momentum over sums without noise"))

# ---------------------------------------------------------------------- parts of a batch


def every_part(self: Hand, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
    return sigma * c * parts**0.5 * self.draw(job, generator)


def averaged(self: Hand, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
    return sigma * c / parts**0.5 * self.draw(job, generator)


def accumulated(self: Hand, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
    """Accumulated, then clipped."""
    if len(parts) == 1:
        return Hand.step(self, job, parts, size, c, sigma, generator)
    means = [self.gradients(job, x, y).mean(0) for x, y in parts]
    total = sum(((c / m.norm()).clamp(max=1) * m for m in means), torch.zeros_like(job.flat))
    return job.flat - LR * (total + self.noise(job, c, sigma, generator, size, 1)) / len(parts)


def last_part(self: Hand, job: Job, parts: list[Any], *given: Any) -> Tensor:
    """A second backward before the step drops the first batch (Opacus, ghost clipping)."""
    return Hand.step(self, job, parts[-1:], *given)


altered("noise at every micro-batch", ONCE, noise=every_part)
altered("workers average their noise", ONCE, noise=averaged)
altered("accumulated, then clipped", ONCE, step=accumulated)
altered("only the last micro-batch counts", ONCE, step=last_part)
