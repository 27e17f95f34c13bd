"""Mixtures of experts at their edges: nobody's experts, tied ones, duplicates, numbers that are not finite, several
layers, and steps that send tokens elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fastdp

from ..cases import Net, P, shake, square
from ..cases_experts import HIDDEN, SINGLE, D, Size, build
from ..truth import compare, norms_of, truth

SIZE = Size(4, 5, 4, 2)


def parts(**more: object) -> dict[str, object]:
    return {"before": nn.Linear(D, D), "router": nn.Linear(D, SIZE.experts), "up": P(SIZE.experts, HIDDEN, D),
            "down": P(SIZE.experts, D, HIDDEN), **more}  # fmt: skip


def model(forward, **more: object) -> nn.Module:
    torch.manual_seed(5)
    return shake(Net(forward, **parts(**more)))


def data() -> tuple[Tensor]:
    torch.manual_seed(6)
    return (torch.randn(SIZE.samples, SIZE.tokens, D),)


def routed(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens = m.before(x).view(-1, D)
    weights, chosen = m.router(tokens).softmax(-1).topk(SIZE.each, dim=-1)
    return tokens, weights, chosen


def loop(m: nn.Module, tokens: Tensor, weights: Tensor, chosen: Tensor, up=None, down=None) -> Tensor:
    """The usual loop over experts; up, down: matrices by expert."""
    up, down = up or (lambda e: m.up[e]), down or (lambda e: m.down[e])
    out = torch.zeros_like(tokens)
    for e in range(SIZE.experts):
        token, place = torch.where(chosen == e)
        y = F.linear(F.linear(tokens[token], up(e)).tanh(), down(e)) * weights[token, place, None]
        out = out.index_add(0, token, y)
    return out


# --------------------------------------------------------------------------- ways that are exact


def plain(m, x):
    return loop(m, *routed(m, x)).view_as(x)


def the_same_expert_twice(m, x):
    """Top-k with duplicates: a token's two places at one expert."""
    tokens, weights, chosen = routed(m, x)
    return loop(m, tokens, weights, chosen[:, :1].expand(-1, 2)).view_as(x)


def tied_slices(m, x):
    """Experts 0 and 3 are one matrix: its slices meet rows twice."""
    tokens, weights, chosen = routed(m, x)
    return loop(m, tokens, weights, chosen, lambda e: m.up[e % 3], lambda e: m.down[e % 2]).view_as(x)


def tied_over_two_calls(m, x):
    tokens, weights, chosen = routed(m, x)
    tokens = tokens + loop(m, tokens, weights, chosen)
    return loop(m, tokens, weights, chosen.flip(1)).view_as(x)


def slices_and_the_whole_stack(m, x):
    """The loop, then every expert on every token: slices and the stack overlap."""
    tokens, weights, chosen = routed(m, x)
    y = loop(m, tokens, weights, chosen)
    return (y + torch.einsum("nd,ehd->neh", y, m.up).tanh().sum(1) @ m.wide.T).view_as(x)


def fold(x: Tensor) -> Tensor:
    """[..., 6 D] -> [..., D]"""
    return x.tanh().unflatten(-1, (6, D)).sum(-2)


def one_matrix_by_both(m, x):
    """A whole parameter that meets routed rows and rows by sample."""
    kept = x[..., 0] > 0
    out = torch.zeros_like(x).index_put((kept,), fold(F.linear(m.before(x)[kept], m.tall, m.shift)))
    return fold(F.linear(out + x, m.tall, m.shift))


def a_table_that_is_the_head_of_routed_rows(m, x):
    """Tied weights: a look-up by sample, and a product by rows in any order."""
    kept = x[..., 0] > 0
    h = m.before(x) + F.embedding((x[..., 1] > 0).long(), m.tall)
    return h + torch.zeros_like(x).index_put((kept,), fold(F.linear(h[kept], m.tall)))


def scales_of_experts(m, x):
    """Trained factors by expert, and a trained bias of the choice."""
    tokens, weights, chosen = routed(m, x)
    scores = m.router(tokens).sigmoid() + m.shift[: SIZE.experts]
    weights = scores.gather(1, chosen) * m.scale[chosen]
    return loop(m, tokens, weights, chosen).view_as(x)


def three_dimensional_rows(m, x):
    """Routed rows with positions below them."""
    kept = x[..., 0] > 0
    rows = F.linear(m.before(x)[kept].view(-1, 2, D // 2), m.thin, m.thin_bias)
    return torch.zeros_like(x).index_put((kept,), rows.flatten(1)) + m.before(x)


def tables_in_slices(m, x):
    """Look-ups in parts of one parameter, each in an order of dimensions of its own."""
    ids = (x[..., 0] > 0).long()
    first, second = (m.tables[n].permute(0, 2, 1)[ids].tanh().sum(-1) for n in range(2))
    return m.before(x) + first * second


WAYS = (
    plain, the_same_expert_twice, tied_slices, tied_over_two_calls, slices_and_the_whole_stack, one_matrix_by_both,
    a_table_that_is_the_head_of_routed_rows, scales_of_experts, three_dimensional_rows, tables_in_slices,
)  # fmt: skip
MORE = {
    "slices_and_the_whole_stack": lambda: {"wide": P(D, HIDDEN)},
    "one_matrix_by_both": lambda: {"tall": P(6 * D, D), "shift": P(6 * D)},
    "a_table_that_is_the_head_of_routed_rows": lambda: {"tall": P(6 * D, D)},
    "scales_of_experts": lambda: {"scale": P(SIZE.experts), "shift": P(D)},
    "tables_in_slices": lambda: {"tables": P(2, 3, 5, D)},
    "three_dimensional_rows": lambda: {"thin": P(D // 2, D // 2), "thin_bias": P(D // 2)},
}


def made(function) -> nn.Module:
    return model(function, **MORE.get(function.__name__, dict)())


@pytest.mark.parametrize("function", WAYS, ids=lambda f: f.__name__)
def test_exact(function):
    assert compare(made(function), data(), square).worst < 1e-5


@pytest.mark.parametrize("name", ["eager", "modules", "batched", "scattered_back"])
def test_bfloat16_norms_hold(name):
    """16-bit weights: against float64 from the same weights, errors are of 16-bit rounding and no more."""
    net, batch, losses = build(name, SIZE)
    net, batch = net.bfloat16(), tuple(t.bfloat16() for t in batch)
    exact = norms_of(truth(net, batch, lambda m, b: losses(m, b).double()))
    engine = fastdp.PerSampleGradients(net)
    losses(net, batch).mean().backward()
    found = engine.norms().double()
    engine.detach()
    assert ((found / exact - 1).abs() < 0.05).all()


@pytest.mark.parametrize("name", ["eager", "modules", "grouped", "batched", "split_and_back"])
def test_a_sample_that_is_not_finite_contributes_nothing(name):
    net, batch, losses = build(name, SIZE)
    clean = truth(net, batch, losses, double=name not in SINGLE)
    batch[0][1, 2, 3] = float("nan")
    engine = fastdp.PerSampleGradients(net)
    losses(net, batch).mean().backward()
    norms = engine.norms()
    factors = torch.where(norms.isfinite(), 0.5, 0.0)
    summed = engine.clipped_sum(factors)
    engine.detach()
    others = [0, 2, 3]
    assert not norms[1].isfinite()
    torch.testing.assert_close(norms[others].double(), norms_of(clean)[others], rtol=1e-5, atol=0)
    for key, rows in clean.items():
        torch.testing.assert_close(summed[key].double(), 0.5 * rows[others].sum(0), rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------- step after step


@pytest.mark.parametrize("name", ["eager", "grouped", "modules"])
def test_sums_hold_nothing_of_the_step_before(name):
    """An expert that had tokens gets none in the next step: its sum is zero, not what was there before."""
    size, used = Size(3, 4, 4, 1), set()
    net, (x,), losses = build(name, size)
    plain_net = copy.deepcopy(net)
    optimizer = fastdp.DPSGD(net, lr=1.0, noise_multiplier=0.0, max_grad_norm=1e6, expected_batch_size=3)
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn_like(x) + 3 * torch.randn(D)
        plain_net.load_state_dict(net.state_dict())
        plain_net.zero_grad()
        losses(plain_net, (x,)).mean().backward()
        losses(net, (x,)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for (key, p), new in zip(plain_net.named_parameters(), net.parameters(), strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(p.detach() - new.detach(), grad, rtol=1e-4, atol=1e-5, msg=f"{key} {seed}")
            if key == "up":
                used.add(tuple(grad.flatten(1).ne(0).any(1).tolist()))
    assert name == "modules" or len(used) > 1, "the experts in use never changed"
