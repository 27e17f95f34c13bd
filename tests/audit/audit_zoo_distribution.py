"""Planted bugs of the noise's law: cut tails, other distributions, single coordinates, sizes that are rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .audit_hand import Hand, Job, planted

Drawn = Callable[[Tensor, Any], Tensor]
LAW, STEPS = "noise_distribution", "noise_independence"


def other(name: str, change: Drawn, *found_by: str) -> None:
    """Noise that is drawn as usual [P], and then changed; the generator is there to draw more from."""

    class Other(Hand):
        def draw(self, job: Job, generator: Any) -> Tensor:
            return change(super().draw(job, generator), generator)

    planted(name, *(found_by or (LAW,)))(Other)


def redrawn(edge: float) -> Drawn:
    """Values beyond the edge are drawn again."""

    def change(z: Tensor, generator: Any) -> Tensor:
        while (beyond := z.abs() > edge).any():
            z = torch.where(beyond, torch.randn(z.shape, generator=generator), z)
        return z

    return change


def uniform(z: Tensor, generator: Any, number: int = 1) -> Tensor:
    return torch.rand((number, *z.shape), generator=generator)


def student(z: Tensor, generator: Any, freedom: int = 12) -> Tensor:
    chi = torch.randn((freedom, *z.shape), generator=generator).square().mean(0)
    return z / chi.sqrt() * ((freedom - 2) / freedom) ** 0.5


def laplace(z: Tensor, generator: Any) -> Tensor:
    u = uniform(z, generator)[0] - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs().clamp(max=0.4999999)) / math.sqrt(2)


def logistic(z: Tensor, generator: Any) -> Tensor:
    return torch.logit(uniform(z, generator)[0].clamp(1e-7, 1 - 1e-7)) * math.sqrt(3) / math.pi


def some(z: Tensor, generator: Any, share: float, value: float) -> Tensor:
    """A share of all values is multiplied with a value."""
    return torch.where(uniform(z, generator)[0] < share, value * z, z)


for edge in (2, 3):
    other(f"noise cut at {edge} sigma", lambda z, _, edge=edge: z.clamp(-edge, edge))
    other(f"noise beyond {edge} sigma drawn again", redrawn(edge))
other("noise cut at 4 sigma", lambda z, _: z.clamp(-4, 4))
other("noise cut at 2.5 sigma, and enlarged again", lambda z, _: z.clamp(-2.5, 2.5) / z.clamp(-2.5, 2.5).std())
other("noise cut on one side", lambda z, _: z.clamp(max=2.5))
other("sum of 12 uniforms", lambda z, g: uniform(z, g, 12).sum(0) - 6)
other("sum of 6 uniforms", lambda z, g: (uniform(z, g, 6).sum(0) - 3) * 2**0.5)
other("Laplace noise", laplace)
other("logistic noise", logistic)
other("Student's noise", student)
other("noise on a grid of sigma / 20", lambda z, _: (20 * z).round() / 20)
other("noise on a grid of sigma / 500", lambda z, _: (500 * z).round() / 500)
other("one value in a hundred without noise", lambda z, g: some(z, g, 0.01, 0.0))
other("one value in fifty with twice the noise", lambda z, g: some(z, g, 0.02, 2.0))
other("noise of mean sigma / 20", lambda z, _: z + 0.05)
other("skewed noise", lambda z, g: (torch.randn((40, *z.shape), generator=g).square().mean(0) - 1) * 20**0.5)
other("noise of the absolute value", lambda z, _: z.abs())
other("noise of a random sign", lambda z, _: z.sign())

# ---------------------------------------------------------------------- coordinates


def at(where: slice, value: float) -> Drawn:
    """Values at some coordinates are multiplied with a value; -4 on are the last bias."""

    def change(z: Tensor, _: Any) -> Tensor:
        z = z.clone()
        z[where] *= value
        return z

    return change


other("half the noise on the 4 coordinates of a bias", at(slice(-4, None), 0.5))
other("half the noise on 4 coordinates of a weight", at(slice(100, 104), 0.5))
other("no noise on one coordinate", at(slice(50, 51), 0.0))
other("0.8 of the noise on a bias", at(slice(192, 208), 0.8))
other("0.95 of the noise on a layer", at(slice(0, 208), 0.95))
other("twice the noise on one coordinate", at(slice(7, 8), 2.0))
other("noise that is centred", lambda z, _: z - z.mean())
other("noise of a fixed norm", lambda z, _: z / z.norm() * z.numel() ** 0.5, STEPS)
other("noise with a tenth that all share", lambda z, g: 0.9**0.5 * z + 0.1**0.5 * torch.randn(1, generator=g))


def parts(change: Callable[[list[Tensor], Any], list[Tensor]]) -> Drawn:
    """Weight [16, 12], bias [16], weight [4, 16], bias [4]."""

    def changed(z: Tensor, generator: Any) -> Tensor:
        pieces = [piece.view(shape) for piece, shape in zip(z.split([192, 16, 64, 4]), SHAPES, strict=True)]
        return torch.cat([piece.flatten() for piece in change(pieces, generator)])

    return changed


SHAPES = ((16, 12), (16,), (4, 16), (4,))
other("noise of one row for all", parts(lambda p, _: [t[:1].expand_as(t) if t.dim() > 1 else t for t in p]), STEPS)
other("noise of one column for all", parts(lambda p, _: [t[..., :1].expand_as(t) if t.dim() > 1 else t for t in p]),
      STEPS)  # fmt: skip
other("a bias gets the noise of its weight", parts(lambda p, _: [*p[:3], p[2][0, :4]]), STEPS)
other(
    "a bias gets the noise of a weight, shuffled", parts(lambda p, _: [*p[:3], p[0].flatten()[[9, 77, 3, 50]]]), STEPS
)
other("noise of rank one", parts(lambda p, _: [t[:, :1] * t[:1] if t.dim() > 1 else t for t in p]))
other("noise transposed and added", parts(lambda p, _: [(t + t.roll(1, 0)) / 2**0.5 if t.dim() > 1 else t for t in p]),
      STEPS)  # fmt: skip

# ---------------------------------------------------------------------- sizes


def sized(name: str, sigma_of: Callable[[float], float], *found_by: str) -> None:
    class Sized(Hand):
        def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
            return super().noise(job, c, sigma_of(sigma), generator, size, parts)

    planted(name, *(found_by or (LAW,)))(Sized)


sized("sigma rounded down to a tenth", lambda s: math.floor(10 * s) / 10)
sized("sigma rounded to a tenth", lambda s: round(s, 1))
sized("sigma rounded to a hundredth", lambda s: round(s, 2))
sized("sigma rounded up to a whole number", math.ceil)
sized("sigma of at least a half", lambda s: max(s, 0.5) if s else 0.0)
sized("sigma of at most 4", lambda s: min(s, 4.0))
sized("0.97 of the noise", lambda s: 0.97 * s)
