"""Heads with their loss as one function, `fastdp.losses.linear_cross_entropy`, and the ways they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastdp.losses import linear_cross_entropy

from .base import B, Built, D, Net, P, T, V, ids, named


def own(model: nn.Module, batch: Any) -> Tensor:
    """The model returns the losses."""
    return model(*batch)


def labels(length: int = T, ignored: bool = False) -> Tensor:
    found = ids(B, length)
    if ignored:
        found[0, 1:3], found[1, 0] = -100, -100
    return found


def head(forward: Callable[..., Tensor], length: int = T, ignored: bool = False, **parts: Any) -> Callable[[], Built]:
    """A case: forward(module, ids, labels) -> losses."""
    return lambda: (Net(forward, **{name: make() for name, make in parts.items()}), (ids(B, length), labels(length, ignored)), own)  # fmt: skip


def body() -> dict[str, Callable[[], Any]]:
    return {"e": lambda: nn.Embedding(V, D), "b": lambda: nn.Linear(D, D)}


def lce(m: Any, h: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    return linear_cross_entropy(m.b(m.e(h)).tanh(), weight, y, bias, **options)


named("fused_head", head(lambda m, i, y: lce(m, i, y, m.h.weight), **body(), h=lambda: nn.Linear(D, V, bias=False)))
named("fused_head_bias", head(
    lambda m, i, y: lce(m, i, y, m.h.weight, m.h.bias), ignored=True, **body(), h=lambda: nn.Linear(D, V)))  # fmt: skip
named("fused_head_tied", head(lambda m, i, y: lce(m, i, y, m.e.weight), ignored=True, **body()))
named("fused_head_tied_bias", head(
    lambda m, i, y: lce(m, i, y, m.e.weight, m.c, softcap=3.0, label_smoothing=0.1), 9, **body(), c=lambda: P(V)))  # fmt: skip
named("fused_head_options", head(
    lambda m, i, y: lce(m, i, y, m.h.weight, m.h.bias, softcap=2.5, logit_scale=0.7, label_smoothing=0.2, z_loss=0.05,
                        shift=True), 9, True, **body(), h=lambda: nn.Linear(D, V)))  # fmt: skip
named("fused_head_frozen", head(
    lambda m, i, y: lce(m, i, y, m.h.weight, m.h.bias), **body(), h=lambda: nn.Linear(D, V).requires_grad_(False)))  # fmt: skip
named("fused_head_only_bias", head(
    lambda m, i, y: lce(m, i, y, m.h.weight.detach(), m.h.bias), **body(), h=lambda: nn.Linear(D, V)))  # fmt: skip
named("fused_head_alone", head(
    lambda m, i, y: linear_cross_entropy(torch.nn.functional.one_hot(i, D + 3).to(m.w.dtype), m.w, y),
    w=lambda: P(V, D + 3)))  # fmt: skip
named("fused_head_transposed", head(lambda m, i, y: lce(m, i, y, m.w.t()), **body(), w=lambda: P(D, V)))
named("fused_head_product", head(
    lambda m, i, y: lce(m, i, y, m.u @ m.v), **body(), u=lambda: P(V, 2), v=lambda: P(2, D)))  # fmt: skip
named("fused_head_twice", head(
    lambda m, i, y: lce(m, i, y, m.h.weight) + 0.5 * lce(m, i.flip(1), y, m.h.weight, z_loss=0.1), **body(),
    h=lambda: nn.Linear(D, V, bias=False)))  # fmt: skip
named("fused_head_beside_logits", head(
    lambda m, i, y: lce(m, i, y, m.e.weight) + (m.b(m.e(i)) @ m.e.weight.t()).square().mean((1, 2)), **body()))  # fmt: skip
for reentrant in (True, False):
    named(f"fused_head_checkpoint_{reentrant}", head(
        lambda m, i, y, reentrant=reentrant: checkpoint(
            lambda h: linear_cross_entropy(m.b(h).tanh(), m.h.weight, y, m.h.bias), m.e(i), use_reentrant=reentrant),
        **body(), h=lambda: nn.Linear(D, V)))  # fmt: skip
