"""A step of DP-SGD written by hand, and right; the zoo (tests/audit/audit_zoo.py) breaks one part of it at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fastdp.audit import Outcome

FEATURES, CLASSES, LR = 12, 4, 0.1


def make_batch(seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    y = draw.integers(0, CLASSES, size)
    centres = np.random.default_rng(7).normal(size=(CLASSES, FEATURES))
    return (centres[y] + draw.normal(size=(size, FEATURES))).astype(np.float32), y


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


class Job:
    """A model as one flat vector, its accountant and its generator."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        layers = list(model) if type(model) is nn.Sequential else [model]
        self.layers = layers if all(isinstance(layer, nn.Linear | nn.Tanh) for layer in layers) else []
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        self.history: list[tuple[float, float, int]] = []
        self.steps = 0
        self.m = self.v = torch.zeros_like(self.flat)
        self.last_norms: Tensor | None = None
        self.path: list[np.ndarray] = []

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


class Hand:
    """DP-SGD by hand: per-sample gradients [B, P], factors, sum, noise, division, step, count."""

    loss_kind, learning_rate = "cross_entropy", LR
    expected_batch_size: float | None = None
    sample_rate = 0.1
    make_model: Callable[[], nn.Module] = staticmethod(small)

    def __init__(self, optimizer: str = "sgd") -> None:
        self.optimizer = optimizer

    # ------------------------------------------------------------------ the protocol

    def build(self, seed: int) -> Job:
        torch.manual_seed(seed)
        return Job(self.make_model())

    def make_batch(self, seed: int, size: int) -> tuple[Any, Any]:
        return make_batch(seed, size)

    def predict(self, job: Job, x: Any) -> np.ndarray:
        with torch.no_grad():
            return self.logits(job, job.flat, torch.as_tensor(x)).double().numpy()

    def run(self, model: Job, batches: Sequence[Any], *, clipping_norm: float, noise_multiplier: float,
            seed: int) -> Outcome:  # fmt: skip
        return self.run_parts(model, [[b] for b in batches], clipping_norm=clipping_norm,
                              noise_multiplier=noise_multiplier, seed=seed)  # fmt: skip

    def run_parts(self, model: Job, batches: Sequence[Sequence[Any]], *, clipping_norm: float,
                  noise_multiplier: float, seed: int) -> Outcome:  # fmt: skip
        job, generator, loss = model, torch.Generator().manual_seed(seed), float("nan")
        for parts in batches:
            tensors = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in parts]
            size = sum(len(y) for _, y in tensors)
            job.flat = self.step(job, tensors, size, clipping_norm, noise_multiplier, generator)
            job.path.append(job.flat.double().numpy())
            loss = float(
                nn.functional.cross_entropy(torch.as_tensor(self.predict(job, tensors[-1][0])), tensors[-1][1])
            )
        return Outcome(loss, job.flat.double().numpy())

    def trajectory(self, model: Job, batches: Sequence[Any], **given: Any) -> np.ndarray:
        model.path = []
        self.run(model, batches, **given)
        return np.stack(model.path)

    def history(self, job: Job) -> list[tuple[float, float, int]]:
        return list(job.history)

    def sample(self, records: int, steps: int, seed: int) -> list[np.ndarray]:
        draw = np.random.default_rng(seed)
        return [np.flatnonzero(draw.random(records) < self.sample_rate) for _ in range(steps)]

    # ------------------------------------------------------------------ the parts that may be wrong

    def step(self, job: Job, parts: list[Any], size: int, c: float, sigma: float, generator: Any) -> Tensor:
        total = torch.zeros_like(job.flat)
        for x, y in parts:
            total = total + self.clipped_sum(job, x, y, c)
        total = total + self.noise(job, c, sigma, generator, size, len(parts))
        self.count(job, sigma, size)
        job.steps += 1
        return self.update(job, total / self.divisor(size))

    def update(self, job: Job, gradient: Tensor) -> Tensor:
        if self.optimizer == "sgd":
            return job.flat - LR * gradient
        job.m, job.v = 0.9 * job.m + 0.1 * gradient, 0.999 * job.v + 0.001 * gradient**2
        m, v = job.m / (1 - 0.9**job.steps), job.v / (1 - 0.999**job.steps)
        return job.flat - LR * m / (v.sqrt() + 1e-8)

    def logits(self, job: Job, flat: Tensor, x: Tensor) -> Tensor:
        if not job.layers:
            return functional_call(job.model, job.named(flat), x)
        parts = iter(job.named(flat).values())
        for layer in job.layers:  # as functional_call would, in a third of the time
            x = torch.tanh(x) if isinstance(layer, nn.Tanh) else nn.functional.linear(x, next(parts), next(parts))
        return x

    def loss(self, job: Job, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(job, flat, x), y)

    def gradients(self, job: Job, x: Tensor, y: Tensor) -> Tensor:
        if not len(y):
            return torch.zeros(0, job.flat.numel())
        rows = job.flat.expand(len(y), -1).clone().requires_grad_()  # the weights of each sample
        losses = vmap(lambda flat, a, b: self.loss(job, flat, a[None], b[None]))(rows, x, y)
        return torch.autograd.grad(losses.sum(), rows)[0]

    def norms(self, job: Job, gradients: Tensor) -> Tensor:
        return gradients.norm(dim=1)

    def factors(self, norms: Tensor, c: float) -> Tensor:
        return (c / (norms + 1e-30)).clamp(max=1)

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        g = self.gradients(job, x, y)
        finite = torch.isfinite(g).all(1)
        g = torch.where(finite[:, None], g, torch.zeros_like(g))
        return (self.factors(self.norms(job, g), c)[:, None] * g).sum(0)

    def noise(self, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
        return sigma * c * self.draw(job, generator)

    def draw(self, job: Job, generator: Any) -> Tensor:
        return torch.randn(job.flat.shape, generator=generator)

    def divisor(self, size: int) -> float:
        return max(size, 1)

    def count(self, job: Job, sigma: float, size: int) -> None:
        job.history.append((sigma, self.sample_rate, 1))


# ---------------------------------------------------------------------- bugs

Planted = dict[str, tuple[Callable[..., Any], tuple[str, ...]]]
PLANTED: Planted = {}


def planted(name: str, *found_by: str) -> Callable[[Any], Any]:
    def add(made: Any) -> Any:
        PLANTED[name] = (made, found_by)
        return made

    return add


def altered(name: str, *found_by: str, **methods: Any) -> None:
    """The right step, with these methods and values in place of its own."""
    planted(name, *found_by)(type(name, (Hand,), methods))


def in_loop(name: str) -> Any:
    """A planted step whose count and memory begin anew in every run, as those of a loop do."""

    class InLoop(PLANTED[name][0]):  # type: ignore[misc]
        def run_parts(self, model: Job, *given: Any, **options: Any) -> Any:
            model.steps, model.m = 0, torch.zeros_like(model.flat)
            return super().run_parts(model, *given, **options)

    return InLoop


def with_adam(name: str, *found_by: str) -> None:
    """The same bug, under Adam."""
    made = PLANTED[name][0]
    PLANTED[f"{name}, Adam"] = (lambda: made("adam"), found_by)
