"""Planted bugs of clipping and of samples: each step is right (tests/audit/audit_hand.py) but for one thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from .audit_hand import CLASSES, FEATURES, Hand, Job, altered, in_loop, planted, with_adam

ALONE, MOST = "per_sample_independence", "sensitivity"


@planted("no clipping", "no_clipping", MOST)
class NoClipping(Hand):
    def factors(self, norms: Tensor, c: float) -> Tensor:
        return torch.ones_like(norms)


def shared(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """The mean is clipped."""
    mean = self.gradients(job, x, y).sum(0) / max(len(y), 1)
    return len(y) * self.factors(mean.norm(), c) * mean


def of_sum(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """The sum is clipped."""
    total = self.gradients(job, x, y).sum(0)
    return self.factors(total.norm(), c) * total


def of_layers(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Every layer is clipped to C."""
    parts = self.gradients(job, x, y).split([shape.numel() for shape in job.shapes.values()], 1)
    return torch.cat([(self.factors(part.norm(dim=1), c)[:, None] * part).nansum(0) for part in parts])


def without_biases(self: Hand, job: Job, g: Tensor) -> Tensor:
    seen = torch.cat([torch.full((s.numel(),), float(len(s) > 1)) for s in job.shapes.values()])
    return (g * seen).norm(dim=1)


def with_factors(self: Hand, job: Job, x: Tensor, y: Tensor, c: float, weights: Any) -> Tensor:
    """The clipped sum, its factors multiplied with, or replaced by, a function of themselves."""
    g = self.gradients(job, x, y)
    g = torch.where(torch.isfinite(g).all(1)[:, None], g, 0.0)
    return (weights(self.factors(self.norms(job, g), c))[:, None] * g).sum(0)


def broadcast(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Factors [B] against losses [B, 1]: every sample is weighted with the sum of all (Opacus, ghost clipping)."""
    return with_factors(self, job, x, y, c, lambda f: f.sum().expand_as(f))


def by_class(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Divided by how often the class is in the batch, as a token-mean loss does (AWS's fastDP)."""
    classes = y.argmax(1) if y.is_floating_point() else y
    counts = torch.bincount(classes, minlength=CLASSES)
    return with_factors(self, job, x, y, c, lambda f: f / counts[classes])


def weighted(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    table = torch.tensor([1.0, 1.2, 1.2, 1.0])
    return with_factors(self, job, x, y, c, lambda f: f * (y @ table if y.is_floating_point() else table[y]))


def views(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Augmentations of one sample count as samples."""
    return sum((Hand.clipped_sum(self, job, x * k, y, c) for k in (0.9, 1.0, 1.1)), torch.zeros(()))


def chunks(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Four samples share a factor."""
    return sum(
        (shared(self, job, x[k : k + 4], y[k : k + 4], c) for k in range(0, len(y), 4)), torch.zeros_like(job.flat)
    )


def rest_unclipped(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    rest = self.gradients(job, x[32:], y[32:]).nansum(0) if len(y) > 32 else 0.0
    return Hand.clipped_sum(self, job, x[:32], y[:32], c) + rest


def norms_of_before(self: Hand, job: Job, g: Tensor) -> Tensor:
    """A layer that is not used in a step keeps its old norm (Opacus, ghost clipping)."""
    now, before = g.norm(dim=1), job.last_norms
    job.last_norms = now
    return now if before is None or not len(before) else torch.full_like(now, float(before.min()) / 3)


def half_norm(self: Hand, job: Job, g: Tensor) -> Tensor:
    """Squares underflow in float16."""
    return g.half().square().sum(1).float().sqrt()


def median_threshold(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Clipped to the median of the norms, which job.norm notes."""
    g = self.gradients(job, x, y)
    norms = self.norms(job, g[torch.isfinite(g).all(1)])
    job.norm = min(c, float(norms.median())) if len(norms) else c
    return Hand.clipped_sum(self, job, x, y, job.norm)


def last_threshold(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Clipped to the median of the last step's norms."""
    limit = getattr(job, "norm", c)
    median_threshold(self, job, x, y, c)
    return Hand.clipped_sum(self, job, x, y, limit)


def noise_of_threshold(self: Hand, job: Job, c: float, sigma: float, generator: Any, size: int, parts: int) -> Tensor:
    return sigma * job.norm * self.draw(job, generator)


def twice_at_fifth(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    return Hand.clipped_sum(self, job, x, y, c * (2.0 if job.steps % 5 == 4 else 1.0))


def stale(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """An empty batch adds half of the last sum again."""
    if not len(y):
        return 0.5 * job.m
    job.m = Hand.clipped_sum(self, job, x, y, c)
    return job.m


def momentum_clipped(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """Each step clips what it has of earlier ones, too: a sample counts C again in later steps."""
    job.m = 0.5 * job.m + Hand.clipped_sum(self, job, x, y, c)
    return job.m * (c * max(len(y), 1) / (job.m.norm() + 1e-30)).clamp(max=1)


def nan_through(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """One bad sample destroys the model (Opacus)."""
    g = self.gradients(job, x, y)
    return (self.factors(self.norms(job, g), c)[:, None] * g).sum(0)


def nan_hidden(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """nan_to_num after the sum takes the others with it (AWS's fastDP)."""
    return nan_through(self, job, x, y, c).nan_to_num(0, 0, 0)


def by_coordinate(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    return self.gradients(job, x, y).nan_to_num(0, 0, 0).clamp(-c, c).sum(0)


def first_day(self: Hand, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
    """A scheduler changes the noise but not the clipping (Opacus, ghost clipping)."""
    return Hand.clipped_sum(self, job, x, y, 1.0)


def shared_norms(self: Hand, job: Job, g: Tensor) -> Tensor:
    """Norms reduced across ranks that hold different samples (FlashNorm)."""
    norms = g.norm(dim=1)
    return norms.square().mean().sqrt().expand_as(norms) if len(norms) else norms


altered("mini-batch clipping", "minibatch_clipping", ALONE, clipped_sum=shared)
altered("mini-batch clipping of a sum", "minibatch_clipping", ALONE, clipped_sum=of_sum, expected_batch_size=1.0,
        divisor=lambda self, size: 1.0)  # fmt: skip
altered("clipping norm of the first day", "no_clipping", clipped_sum=first_day)
altered("factor max(1, C/n)", MOST, factors=lambda self, norms, c: (c / (norms + 1e-30)).clamp(min=1))
altered("clipping by coordinate", MOST, clipped_sum=by_coordinate)
altered("every layer clipped to C, noise for C", MOST, clipped_sum=of_layers)
altered("norm without the biases", MOST, norms=without_biases)
# The bound is exceeded by some tenths of a percent (Opacus under autocast).
altered("norm in bfloat16", MOST, norms=lambda self, job, g: g.bfloat16().norm(dim=1).float())
altered("norm whose squares underflow in float16", MOST, norms=half_norm)
altered("norms of the step before", MOST, norms=norms_of_before)
altered("factors [B] against losses [B, 1]", ALONE, MOST, clipped_sum=broadcast)
altered("norms averaged over the batch", ALONE, MOST, norms=shared_norms)
altered("every view of a sample clipped alone", MOST, clipped_sum=views)
altered("class weights after clipping", MOST, clipped_sum=weighted)
altered("2 C at every fifth step", MOST, clipped_sum=twice_at_fifth)
planted("2 C at every fifth step of the loop", MOST)(in_loop("2 C at every fifth step"))
altered("threshold min(C, median of the norms)", ALONE, clipped_sum=median_threshold)
altered("threshold min(C, median of the norms), and noise of it", ALONE, "noise_distribution",
        clipped_sum=median_threshold, noise=noise_of_threshold)  # fmt: skip
altered("threshold min(C, median of the last step's norms)", ALONE, clipped_sum=last_threshold)
altered("chunks of four share a factor", ALONE, clipped_sum=chunks)
altered("rest of a batch beyond 32 not clipped", ALONE, clipped_sum=rest_unclipped)
altered("loss divided by the batch's classes", ALONE, clipped_sum=by_class)
altered("an empty batch adds half of the last sum again", ALONE, clipped_sum=stale)
altered("momentum over the gradients, clipped after", ALONE, clipped_sum=momentum_clipped)
altered("NaN goes through", "nan_sample", clipped_sum=nan_through)
altered("nan_to_num after the sum", "nan_sample", clipped_sum=nan_hidden)
with_adam("no clipping", "no_clipping")
with_adam("mini-batch clipping", "minibatch_clipping", ALONE)
with_adam("every layer clipped to C, noise for C", MOST)

# ---------------------------------------------------------------------- of models


class Tied(nn.Module):
    """One weight as first and as last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(CLASSES, FEATURES) / 3)
        self.inner = nn.Linear(CLASSES, FEATURES)

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        table = self.table if second is None else second
        return torch.tanh(self.inner(x @ self.table.t())) @ table.t()


@planted("tied weight, norm of one use only", MOST)
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


@planted("BatchNorm", "batch_statistics")
class BatchNorm(Hand):
    """The statistics of the batch are in every sample's outputs."""

    def logits(self, job: Job, flat: Tensor, x: Tensor) -> Tensor:
        found = super().logits(job, flat, x)
        return found - found.mean(0) if len(x) > 1 else found


@planted("running statistics released", "batch_statistics")
class RunningStatistics(Hand):
    """The model is used in eval mode, but statistics of the data are kept and released."""

    def state(self, job: Job) -> np.ndarray:
        return np.asarray(job.mean)

    def clipped_sum(self, job: Job, x: Tensor, y: Tensor, c: float) -> Tensor:
        job.mean = x.mean(0).double().numpy()
        return super().clipped_sum(job, x, y, c)
