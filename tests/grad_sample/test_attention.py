"""Scaled dot-product attention: with masks of data and of parameters, trained queries, and weights dropped out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fastdp
from fastdp.errors import SampleMixingError

from ..cases.base import B, D, Net, P, T, square
from ..truth import against, compare, truth

H = 2  # heads
ATTENTION = F.scaled_dot_product_attention


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def attend(m: Any, x: Tensor, mask: Tensor | None = None, attention: Any = ATTENTION, **options: Any) -> Tensor:
    q, k, v = (heads(m.qkv(x)[..., i * D : (i + 1) * D]) for i in range(3))
    return m.out(attention(q, k, v, mask, **options).transpose(1, 2).flatten(2))


def parts(**more: Any) -> dict[str, Any]:
    return {"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, 4), **more}


def drop_every_third(weights: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """In place of dropout: by position within a sample, so that one sample alone drops the same."""
    return weights * (torch.arange(weights[0].numel()).view(weights.shape[1:]) % 3 > 0) / (1 - p) if p else weights


def by_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if enable_gqa:
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:]).tril() > 0
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return drop_every_third(torch.softmax(scores, -1), dropout_p) @ v


def resampler(m: Any, x: Tensor, attention: Any, mask: Tensor | None = None, **options: Any) -> Tensor:
    """The same trained queries for every sample, keys of data."""
    q, k = heads(m.queries[None]).expand(len(x), -1, -1, -1), heads(m.few(x))
    return attention(q, k, k.tanh(), mask, **options).flatten(1)


def seen(x: Tensor) -> Tensor:
    """[B,1,1,T]: a mask of the data, by which every sample sees its first token."""
    return ((x[..., 1] > 0) | (torch.arange(x.size(1)) == 0))[:, None, None]


FORWARDS: dict[str, Callable[..., Tensor]] = {
    "bias": lambda m, x, attention, **p: attend(m, x, m.bias[None], attention, **p),
    "bias and scale": lambda m, x, attention, **p: attend(m, x, m.bias[None], attention, scale=0.3, **p),
    "bias of few keys": lambda m, x, attention, **p: attention(
        heads(m.qkv(x)[..., :D]), heads(m.few(x)), heads(m.few(x)).tanh(), m.bias[None], enable_gqa=True, **p
    ).flatten(1),
    "trained queries": resampler,
    "trained queries, causal": lambda m, x, attention, **p: resampler(m, x, attention, is_causal=True, **p),
    "trained queries, padding": lambda m, x, attention, **p: resampler(m, x, attention, seen(x), **p),
    "bias and mask": lambda m, x, attention, **p: attend(
        m, x, m.bias[None].masked_fill(~seen(x), -torch.inf), attention, **p
    ),
}


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", FORWARDS)
def test_exact(name: str, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    if p and (name == "bias and mask" or name.startswith("trained queries")):
        pytest.skip("data by then, or torch's own attention drops out: see the next test")
    torch.manual_seed(0)
    monkeypatch.setattr(F, "dropout", drop_every_third)
    model = Net(
        lambda m, x: FORWARDS[name](m, x, m.attention, dropout_p=p),
        **parts(bias=P(H, T, T), queries=P(3, D), few=nn.Linear(D, D)),
        attention=by_steps,
    )
    x = torch.randn(B, T, D)
    exact = truth(model, x, square)
    model.attention = ATTENTION
    assert against(exact, model, x, square).worst < 1e-5


@pytest.mark.parametrize("name", [name for name in FORWARDS if name.startswith("trained queries")])
def test_trained_queries_are_dropped_out_by_torch(name: str) -> None:
    """They are data by then: the truth is each sample's own loss after the same draws."""
    torch.manual_seed(0)
    model = Net(
        lambda m, x: FORWARDS[name](m, x, ATTENTION, dropout_p=0.5), **parts(queries=P(3, D), few=nn.Linear(D, D))
    )
    x = torch.randn(B, T, D)

    def losses(m: Any, x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return square(m, x)

    trained, own = [p for key, p in model.named_parameters() if key in ("queries", "few.weight", "few.bias")], []
    for each in losses(model, x):
        found = torch.autograd.grad(each, trained, retain_graph=True)
        own.append(torch.cat([g.flatten() for g in found]))
    engine = fastdp.PerSampleGradients(model)
    losses(model, x).mean().backward()
    rows = engine.materialize()
    engine.detach()
    together = torch.cat([rows[key].flatten(1) for key in ("queries", "few.weight", "few.bias")], 1)
    torch.testing.assert_close(together, torch.stack(own), rtol=1e-4, atol=1e-6)


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


ACROSS = {
    "keys of others": lambda h, x: ATTENTION(h, h.flip(0), h),
    "mask of others": lambda h, x: ATTENTION(h, h, h, (x[..., 0] > 0).flip(0)[:, None]),
    "three samples' queries look at one's keys": lambda h, x: ATTENTION(
        h.mT.permute(2, 0, 1)[:, :, None], *[h.mT.permute(2, 0, 1)[:, :1, None]] * 2, enable_gqa=True
    ),
    "samples in the place of tokens": lambda h, x: ATTENTION(*[h.transpose(0, 1)] * 3),
}  # fmt: skip


@pytest.mark.parametrize("wrong", ACROSS)
def test_attention_across_samples_is_refused(wrong: str) -> None:
    model = Net(lambda m, x: ACROSS[wrong](m.out(x), x), **parts())
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError):
        model(torch.randn(B, T, D)).square().sum().backward()
    engine.detach()


OF_TWO_TYPES: dict[str, Callable[..., Tensor]] = {
    "attention by hand": lambda m, x: torch.softmax(m.few(x) @ x.mT, -1) @ x,
    "bmm": lambda m, x: torch.bmm(torch.bmm(m.few(x), x.mT).float(), m.few(x)),
    "einsum": lambda m, x: torch.einsum("btd,bsd->bts", m.few(x), x),
}


@pytest.mark.parametrize("name", OF_TWO_TYPES)
def test_autocast_multiplies_two_types(name: str) -> None:
    """16-bit results with data of float32, or weights that softmax gives so on a GPU."""
    torch.manual_seed(0)
    model, x = Net(OF_TWO_TYPES[name], few=nn.Linear(D, D)), torch.randn(B, T, D)

    def losses(m: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        return out.float().sin().flatten(1).sum(1)

    assert compare(model, x, losses, double=False).worst < 2e-2
