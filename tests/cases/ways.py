"""Parameters seen through others or used more than once, and the ways a forward is run."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .base import B, Built, D, P, T, V, case, ids, named, net, square

# --------------------------------------------------------------------------- parametrized, tied, shared

named(
    "weight_norm",
    lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, T, D), a=parametrizations.weight_norm(nn.Linear(D, 6))),
)
named("weight_norm_conv", lambda: net(
    lambda m, x: m.a(x).tanh(), torch.randn(B, D, 9), a=parametrizations.weight_norm(nn.Conv1d(D, 6, 3), dim=2)))  # fmt: skip
named(
    "orthogonal",
    lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, D), a=parametrizations.orthogonal(nn.Linear(D, D))),
)
named("transposed_weight", lambda: net(
    lambda m, x: F.linear(F.linear(x, m.w).tanh(), m.w.t(), m.b), torch.randn(B, T, D), w=P(6, D), b=P(D)))  # fmt: skip
named("slices", lambda: net(
    lambda m, x: F.linear(F.linear(x, m.w[:D]).tanh(), m.w[D:]).tanh(), torch.randn(B, T, D), w=P(D + 4, D)))  # fmt: skip
named("chunks", lambda: net(
    lambda m, x, y: F.linear(x, m.w.chunk(3)[0]) * F.linear(y, m.w.chunk(3)[1]) + F.linear(x, m.w.chunk(3)[2]),
    torch.randn(B, T, D), torch.randn(B, T, D), w=P(3 * D, D)))  # fmt: skip
named("overlapping_slices", lambda: net(
    lambda m, x: F.linear(x, m.w[:6]) * F.linear(x, m.w[2:]), torch.randn(B, T, D), w=P(D, D)))  # fmt: skip
named("tied_embedding_head", lambda: net(
    lambda m, i: F.linear(m.b(m.a(i)).tanh(), m.a.weight), ids(B, 9), a=nn.Embedding(V, D), b=nn.Linear(D, D)))  # fmt: skip
named("tied_embedding_head_matmul", lambda: net(
    lambda m, i: (m.b(m.a(i)).tanh() @ m.a.weight.T), ids(B, 9), a=nn.Embedding(V, D), b=nn.Linear(D, D)))  # fmt: skip


@case
def tied_modules() -> Built:
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, V, bias=False))
    model[3].weight = model[0].weight
    return model, ids(B, 7), square


named("shared_layer", lambda: net(
    lambda m, x, y: torch.cat([m.a(m.a(x).tanh()).flatten(1), m.a(y).flatten(1)], 1), torch.randn(B, T, D),
    torch.randn(B, 2, D), a=nn.Linear(D, D)))  # fmt: skip
named("shared_norm", lambda: net(lambda m, x: m.a(m.a(x).tanh()), torch.randn(B, T, D), a=nn.LayerNorm(D)))
named("shared_embedding", lambda: net(
    lambda m, i, j: torch.cat([m.a(i), m.a(j)], 1).tanh(), ids(B, 4), ids(B, 5), a=nn.Embedding(V, D)))  # fmt: skip


@case
def two_forwards() -> Built:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4))

    def losses(m: nn.Module, batch: Any) -> Tensor:
        return (m(batch[0]) - m(batch[1])).square().mean(1) + m(batch[0]).square().sum(1)

    return model, (torch.randn(B, D), torch.randn(B, D)), losses


@case
def submodules_called() -> Built:
    model = nn.ModuleDict({"encoder": nn.Linear(D, D), "head": nn.Linear(D, 4)})

    def losses(m: nn.Module, x: Tensor) -> Tensor:
        return m["head"](m["encoder"](x).tanh()).square().mean(1)

    return model, torch.randn(B, D), losses


# --------------------------------------------------------------------------- how a forward is run

named("inplace_activation", lambda: net(
    lambda m, x: m.b(F.relu_(m.a(x))), torch.randn(B, T, D), a=nn.Linear(D, 9), b=nn.Linear(9, 4)))  # fmt: skip
named("inplace_after_conv", lambda: (
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 3)),
    torch.randn(B, 3, 8, 8), square))  # fmt: skip
for reentrant in (True, False):
    named(f"checkpoint_reentrant_{reentrant}", lambda reentrant=reentrant: net(
        lambda m, x: m.c(checkpoint(lambda y: m.b(m.a(y).tanh()), m.i(x), use_reentrant=reentrant)),
        torch.randn(B, T, D), i=nn.Linear(D, D), a=nn.Linear(D, 9), b=nn.LayerNorm(9), c=nn.Linear(9, 4)))  # fmt: skip
    named(f"checkpoint_module_{reentrant}", lambda reentrant=reentrant: net(
        lambda m, x: m.c(checkpoint(m.a, m.i(x), use_reentrant=reentrant)),
        torch.randn(B, T, D), i=nn.Linear(D, D), a=nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)),
        c=nn.Linear(D, 4)))  # fmt: skip


@case
def frozen_parts() -> Built:
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 4))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model, torch.randn(B, T, D), square


named(
    "skipped_layer",
    lambda: net(lambda m, x: m.a(x).tanh(), torch.randn(B, D), a=nn.Linear(D, 4), unused=nn.Linear(4, 4)),
)
named("windows", lambda: net(
    lambda m, x: m.a(x.view(-1, 2, 3, 2, 3, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 9, 4)).tanh().view(-1, 4, 9, 5),
    torch.randn(B, 6, 6, 4), a=nn.Linear(4, 5)))  # fmt: skip
named("two_views", lambda: net(
    lambda m, x: torch.cat(m.a(torch.cat([x, -0.5 * x])).tanh().chunk(2), -1), torch.randn(B, D), a=nn.Linear(D, 4)))  # fmt: skip
named("repeated_samples", lambda: net(
    lambda m, x: m.a(x.repeat_interleave(4, 0)).tanh().view(-1, 4, 5), torch.randn(B, D), a=nn.Linear(D, 5)))  # fmt: skip
named("last_token", lambda: net(
    lambda m, x, n: m.a(m.b(x)[torch.arange(len(x)), n]).tanh(), torch.randn(B, T, D), torch.tensor([4, 0, 2]),
    a=nn.Linear(D, 4), b=nn.Linear(D, D)))  # fmt: skip
