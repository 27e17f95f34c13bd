"""Planted bugs of clipping and of samples: each step is right (tests/audit/audit_hand.py) but for one thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from .audit_hand import CLASSES, FEATURES, Hand, Job, altered, planted, with_adam

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


# A scheduler changes the noise but not the clipping (Opacus, ghost clipping).
altered(
    "clipping norm of the first day",
    "no_clipping",
    clipped_sum=lambda self, job, x, y, c: Hand.clipped_sum(self, job, x, y, 1.0),
)


altered("factor max(1, C/n)", "sensitivity", factors=lambda self, norms, c: (c / (norms + 1e-30)).clamp(min=1))


altered(
    "gradient times C, never divided by its norm",
    "sensitivity",
    factors=lambda self, norms, c: torch.full_like(norms, c),
)


altered(
    "clipping by coordinate",
    "sensitivity",
    clipped_sum=lambda self, job, x, y, c: self.gradients(job, x, y).nan_to_num(0, 0, 0).clamp(-c, c).sum(0),
)


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


# The bound is exceeded by some tenths of a percent (Opacus under autocast).
altered("norm in bfloat16", "sensitivity", norms=lambda self, job, gradients: gradients.bfloat16().norm(dim=1).float())


altered(
    "largest coordinate as norm",
    "sensitivity",
    norms=lambda self, job, gradients: gradients.abs().amax(1) if len(gradients) else gradients.new_zeros(0),
)


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
