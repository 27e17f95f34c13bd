"""Scaled dot-product attention: with masks of data and of parameters, trained queries, and weights dropped out."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fastdp
from fastdp.errors import SampleMixingError

from ..cases.base import B, D, Net, P, T, square
from ..truth import compare

H = 2  # heads


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def attend(m: Any, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    q, k, v = (heads(m.qkv(x)[..., i * D : (i + 1) * D]) for i in range(3))
    return m.out(F.scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2).flatten(2))


def parts(**more: Any) -> dict[str, Any]:
    return {"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, 4), **more}


def drop_every_third(weights: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In place of dropout: by position within a sample, so that one sample alone drops the same."""
    return weights * (torch.arange(weights[0].numel()).view(weights.shape[1:]) % 3 > 0) / (1 - p)


FORWARDS = {
    "bias": lambda m, x: attend(m, x, m.bias[None]),
    "bias and mask": lambda m, x: attend(m, x, m.bias[None].masked_fill((x[..., 0] > 1)[:, None, None], -torch.inf)),
    "bias and scale": lambda m, x: attend(m, x, m.bias[None], scale=0.3),
    "bias of few keys": lambda m, x: F.scaled_dot_product_attention(
        heads(m.qkv(x)[..., :D]), heads(m.few(x)), heads(m.few(x)).tanh(), m.bias[None], enable_gqa=True).flatten(1),
}  # fmt: skip


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_masks_made_of_parameters(name: str, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if p and name == "bias and mask":
        return  # data by then: torch's own attention drops out
    torch.manual_seed(0)
    own = F.scaled_dot_product_attention

    def with_dropout(*args: Any, **kwargs: Any) -> Tensor:
        return own(*args, **kwargs, dropout_p=p)

    model = Net(FORWARDS[name], **parts(bias=P(H, T, T), few=nn.Linear(D, D)))
    if p:  # the truth too drops by position: it takes the steps of the softmax
        monkeypatch.setattr(F, "dropout", drop_every_third)
        monkeypatch.setattr(F, "scaled_dot_product_attention", by_steps(p))
        wanted = fastdp.PerSampleGradients(model)
        x = torch.randn(B, T, D)
        square(model, x).mean().backward()
        norms = wanted.norms()
        wanted.detach()
        monkeypatch.setattr(F, "scaled_dot_product_attention", with_dropout)
        engine = fastdp.PerSampleGradients(model)
        square(model, x).mean().backward()
        torch.testing.assert_close(engine.norms(), norms)
        return
    assert compare(model, torch.randn(B, T, D), square).worst < 1e-5


def by_steps(p: float) -> Any:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, enable_gqa: bool = False):
        if enable_gqa:
            k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
        scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale) + mask
        return drop_every_third(torch.softmax(scores, -1), p) @ v

    return attention


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_trained_queries_with_dropout(causal: bool, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resampler: the same queries for every sample, keys of data."""
    if causal and masked:
        return  # torch takes one of them
    torch.manual_seed(0)
    monkeypatch.setattr(F, "dropout", drop_every_third)

    def forward(m: Any, x: Tensor, by_hand: bool = False) -> Tensor:
        q, k = heads(m.queries[None]).expand(len(x), -1, -1, -1), heads(m.keys(x))
        mask = (x[..., 1] < 1)[:, None, None] if masked else None
        if not by_hand:
            return F.scaled_dot_product_attention(q, k, k.tanh(), mask, dropout_p=0.5, is_causal=causal).flatten(1)
        scores = q @ k.mT / q.size(-1) ** 0.5
        hidden = torch.ones(scores.shape[-2:]).triu(1) > 0 if causal else ~mask if masked else None
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        return (drop_every_third(scores.softmax(-1)) @ k.tanh()).flatten(1)

    model = Net(forward, queries=P(3, D), keys=nn.Linear(D, D))
    x = torch.randn(B, T, D)
    x[..., 0, 1] = 0  # something to look at in every sample
    engine = fastdp.PerSampleGradients(model)
    square(model, x).mean().backward()
    found = engine.norms()
    engine.detach()
    for b in range(B):
        loss = square(lambda x: model.function(model, x, by_hand=True), x[b : b + 1]).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(found[b], sum(g.square().sum() for g in grads).sqrt(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("tokens", [T, B])
def test_masks_of_data_cost_no_trial(p: float, kind: Any, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and dropout, as every fine-tuning has them: told by shapes, also where there are as many tokens as
    samples; asking attention by value at every step cost eight steps."""
    torch.manual_seed(0)
    module, asked = importlib.import_module("fastdp.batch_axis.propagate"), []
    own = module.coupling
    monkeypatch.setattr(module, "coupling", lambda call, *rest: asked.append(call.name) or own(call, *rest))

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        mask = keep[:, None, None].expand(-1, 1, x.size(1), -1)
        mask = mask if kind == torch.bool else torch.where(mask, 0.0, -torch.inf)
        return attend(m, x, mask, dropout_p=p)

    model, keep = Net(forward, **parts()), torch.ones(B, tokens, dtype=torch.bool)
    keep[1, 2:] = False
    engine = fastdp.PerSampleGradients(model)
    for _ in range(2):
        square(model, (torch.randn(B, tokens, D), keep)).mean().backward()
        assert bool((engine.norms() > 0).all())
    assert "scaled_dot_product_attention" not in asked
    engine.detach()
    if not p:
        assert compare(model, (torch.randn(B, tokens, D), keep), square).worst < 1e-5


@pytest.mark.parametrize("wrong", ["keys of others", "mask of others", "samples in the place of tokens", "grouped"])
def test_attention_across_samples_is_refused(wrong: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.out(x)
        if wrong == "keys of others":
            return F.scaled_dot_product_attention(h, h.flip(0), h)
        if wrong == "mask of others":
            return F.scaled_dot_product_attention(h, h, h, (x[..., 0] > 0).flip(0)[:, None])
        if wrong == "grouped":  # [T, B, 4]: three samples' queries look at one's keys
            h = h.transpose(0, 1)[:, :, None]
            return F.scaled_dot_product_attention(h, h[:, :1], h[:, :1], enable_gqa=True)
        return F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3)

    model = Net(forward, **parts())
    fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        model(torch.randn(B, T, D)).square().sum().backward()
