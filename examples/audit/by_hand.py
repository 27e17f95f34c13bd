"""A DP-SGD loop written by hand, and how it is audited.

    python -m fastdp audit examples/audit/by_hand.py:make_step

Everything above the line is the script; below it, what the audit needs to know of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

LR, RATE, EXPECTED = 0.1, 0.1, 32  # samples a batch has in expectation: what every sum is divided by


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))


def data(seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four clouds of points."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (size,), generator=draw)
    centres = torch.randn(4, 12, generator=torch.Generator().manual_seed(7))
    return centres[y] + torch.randn(size, 12, generator=draw), y


def train(model: nn.Module, batches, *, clipping_norm: float, noise_multiplier: float, **_) -> None:
    """One step a batch: per-sample gradients, clipped, added up, noised, divided."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x, y):
        return F.cross_entropy(functional_call(model, weights, x[None]), y[None])

    for x, y in batches:
        total = {name: torch.zeros_like(w) for name, w in weights.items()}
        if len(x):  # a Poisson sample can be empty: then the step is noise alone
            each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, x, y)  # [B, ...] for every parameter
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
            factors = (clipping_norm / norms.clamp(min=1e-12)).clamp(max=1)
            good = torch.isfinite(norms)  # a sample with NaN counts nothing: left out, since 0 * NaN is NaN
            total = {name: torch.einsum("b,b...->...", factors[good], g[good]) for name, g in each.items()}
        for name, w in weights.items():
            noise = noise_multiplier * clipping_norm * torch.randn_like(w)
            w -= LR * (total[name] + noise) / EXPECTED  # not len(x): the noise would tell how many were drawn
        model.accounted = [*getattr(model, "accounted", []), (noise_multiplier, RATE, 1)]


# ----------------------------------------------------------------------


def sample(records: int, steps: int, seed: int):
    draw = torch.Generator().manual_seed(seed)
    return [torch.nonzero(torch.rand(records, generator=draw) < RATE).flatten().numpy() for _ in range(steps)]


def make_step():
    from fastdp.audit import TorchTrainable

    return TorchTrainable(
        network,
        train=train,
        loss=F.cross_entropy,
        make_batch=data,
        loss_kind="cross_entropy",
        learning_rate=LR,
        expected_batch_size=EXPECTED,
        sample=sample,
        sample_rate=RATE,
        history=lambda model: model.accounted,
    )
