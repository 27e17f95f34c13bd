"""Loops over the samples: exact in every way of writing them; where tensors of different samples meet, refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.batch_axis.row_groups import Groups
from fastdp.errors import FastDPError
from fastdp.grad_sample.linear import Matmul
from fastdp.grad_sample.parameter_use import Regrouped, Stack

from ..cases import Net, P, square
from ..truth import compare

D = 6
SIZES = {"usual": (3, 5), "all_equal": (D, D), "one_token": (3, 1), "one_sample": (1, 4)}
LOOPS = {}


def loop(function):
    LOOPS[function.__name__] = function
    return function


@loop
def iterated(m, x):
    return torch.stack([m.b(m.a(one).tanh()) for one in x])


@loop
def unbound(m, x):
    return torch.stack([m.b(one[None]).squeeze(0) * m.scale for one in m.a(x).unbind(0)])


@loop
def numbered(m, x):
    h = m.a(x)
    return torch.stack([m.b(h[i]).relu() + m.scale for i in range(len(h))])


@loop
def numbered_last_dimension(m, x):
    h = m.a(x)
    return torch.stack([m.b(h[i]).relu() for i in range(len(h))], dim=-1).movedim(-1, 0)


@loop
def joined(m, x):
    return torch.cat([m.b(m.a(one[None])) for one in x])


@loop
def joined_rows(m, x):
    """[T, D] of each sample, one after another."""
    return torch.cat([m.b(one) for one in m.a(x)]).view(x.shape).tanh() @ m.w


@loop
def split_rows(m, x):
    parts = m.a(x).flatten(0, 1).split(x.size(1))
    return torch.cat([m.b(part) * part.mean(0) for part in parts]).view(x.shape)


@loop
def selected(m, x):
    h = m.a(x)
    return torch.cat([m.b(h.select(0, i)).unsqueeze(0) + h.narrow(0, i, 1) for i in range(len(h))])


@loop
def backwards(m, x):
    h = m.a(x)
    found = [m.b(h[-1 - i]) for i in range(len(h))]
    return torch.stack(found[::-1])


@loop
def written_rows(m, x):
    out = torch.zeros_like(x)
    for i, one in enumerate(m.a(x)):
        out[i, : one.size(0)] = m.b(one)
    return m.a(out)


@loop
def added_to_rows(m, x):
    out = torch.zeros(x.shape, dtype=x.dtype)
    for i, one in enumerate(m.a(x)):
        out[i] += m.b(one)
    return out @ m.w


@loop
def own_choice(m, x):
    """Each sample keeps tokens by its own numbers; lengths differ."""
    kept = [one[one[:, 0] > one[:, 0].median() - 1e-3] for one in m.a(x)]
    found = [F.pad(m.b(part), (0, 0, 0, x.size(1) - len(part))) for part in kept]
    return torch.stack(found)


@loop
def tokens_and_table(m, x):
    ids = (x[..., 0] * 2).long().clamp(-3, 3) + 3
    return torch.stack([m.b(m.table(i)) * one for i, one in zip(ids, x, strict=True)])


@loop
def attention(m, x):
    found = []
    for one in m.a(x):
        q, k, v = (t.unsqueeze(0).unsqueeze(0) for t in (one, m.b(one), one))
        found.append(F.scaled_dot_product_attention(q, k, v)[0, 0])
    return torch.stack(found)


@loop
def multi_head(m, x):
    return torch.stack([m.heads(one, one, one)[0] for one in m.a(x)])


@loop
def images(m, x):
    return torch.cat([m.conv(one[None, None]).flatten(1) for one in m.a(x)])


@loop
def layer_norms(m, x):
    return torch.stack([m.norm(m.b(one)) + m.norm(one) for one in m.a(x)])


@loop
def twice_and_whole(m, x):
    """A parameter used by the whole batch, and by single samples several times."""
    h = m.a(x)
    return torch.stack([m.a(m.a(one)) + m.b(one) for one in h]) + m.b(h)


@loop
def transposed_weight(m, x):
    return torch.stack([torch.addmm(m.scale, one, m.w.t()) + one @ m.w[:, :D] for one in m.a(x)])


@loop
def generic(m, x):
    return torch.stack([torch.einsum("td,de->te", one, m.w.exp()) for one in m.a(x)])


def model_of(name):
    torch.manual_seed(3)
    parts = {
        "a": nn.Linear(D, D), "b": nn.Linear(D, D), "w": P(D, D), "scale": P(D), "norm": nn.LayerNorm(D),
        "table": nn.Embedding(7, D), "conv": nn.Conv2d(1, 2, 3, padding=1), "heads": nn.MultiheadAttention(D, 2),
    }  # fmt: skip
    return Net(LOOPS[name], **parts)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LOOPS)
def test_exact(name, size):
    model = model_of(name)
    assert compare(model, torch.randn(*SIZES[size], D), square).worst < 1e-5


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_when_the_layouts_are_known_already(name):
    """The second and third forward of one engine take layouts from memory."""
    model = model_of(name).double()
    engine = fastdp.PerSampleGradients(model)
    first = torch.randn(3, 5, D, dtype=torch.double)
    wanted = []
    for x in (first, torch.randn_like(first), first):
        square(model, x).mean().backward()
        wanted.append(engine.norms())
    engine.detach()
    assert torch.equal(wanted[0], wanted[2]) and not torch.equal(wanted[0], wanted[1])


B, T = 3, 4
MIXED = {
    "neighbours": lambda m, h: torch.stack([m.b(h[i]) + h[i - 1] for i in range(B)]),
    "running": lambda m, h: torch.stack([m.b(h[: i + 1].mean(0)) for i in range(B)]),
    "first_for_all": lambda m, h: m.b(h) * h[0],
    "first_for_all_by_cat": lambda m, h: torch.cat([m.b(h), h[:1].expand(B, -1, -1)], 1),
    "product_of_two": lambda m, h: torch.stack([m.b(h[i] @ h[(i + 1) % B].mT)[..., :1] for i in range(B)]),
    "joined_before_the_layer": lambda m, h: torch.stack([m.b(torch.cat([h[i], h[0]])) for i in range(B)]),
    "written_elsewhere": lambda m, h: _written(m, h, lambda out, i, y: out[i - 1].add_(y) * 0),
    "own_rows_by_another": lambda m, h: torch.stack([m.b(h[i])[h[i - 1].argsort(0)[:, 0]] for i in range(B)]),
    "another_in_place": lambda m, h: torch.stack([m.b(h[i].clone().add_(h[0])) for i in range(B)]),
    "weighted_by_another": lambda m, h: torch.stack([m.scale * h[i] * h[0].sum() for i in range(B)]),
    "parameter_with_two": lambda m, h: torch.stack([torch.cat([m.w[:1], h[i], h[0]]) for i in range(B)]),
    "added_to_another": lambda m, h: h.index_add(0, torch.tensor([1]), m.b(h[0])[None]),
    "written_over_another": lambda m, h: _set(m.b(h), 1, h[0]),
    "wrong_order_onto_the_batch": lambda m, h: torch.stack([m.b(one) for one in h][::-1]) + h,
}


def _written(m, h, write):
    out = torch.zeros(B, T, D)
    for i in range(B):
        write(out, i, m.b(h[i]))
    return m.a(out)


def _set(out, i, value):
    out[i] = value
    return out


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_meet_are_refused(name):
    torch.manual_seed(0)
    model = Net(lambda m, x: MIXED[name](m, m.a(x)), a=nn.Linear(D, D), b=nn.Linear(D, D), scale=P(D), w=P(D, D))
    if name == "product_of_two":
        model.b = nn.Linear(T, D)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(B, T, D)).flatten(1).square().sum(1).mean().backward()
        engine.norms()
    engine.detach()


@pytest.mark.parametrize("inside", [lambda one: one, lambda one: one * 2], ids=["leaf", "computed"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_called_for_each_sample(reentrant, inside):
    """As many tokens as samples: a repeated forward must not take tokens for samples. Exact, or refused."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(D, D), nn.Tanh())

    def forward(m, x):
        return torch.stack([checkpoint(lambda t: m.block(inside(t)), one, use_reentrant=reentrant) for one in m.a(x)])

    model = Net(forward, a=nn.Linear(D, D), block=block)
    try:
        assert compare(model, torch.randn(4, 4, D), square).worst < 1e-5
    except FastDPError:
        pass


def test_a_sample_with_nan_stays_alone():
    model = model_of("iterated")
    x = torch.randn(3, 5, D)
    engine = fastdp.PerSampleGradients(model)
    square(model, x).mean().backward()
    clean = engine.norms()
    x[1, 2, 3] = float("nan")
    square(model, x).mean().backward()
    found, sums = engine.norms(), engine.clipped_sum(torch.tensor([1.0, 0.0, 0.5]))
    engine.detach()
    assert not torch.isfinite(found[1]) and torch.equal(found[[0, 2]], clean[[0, 2]])
    assert all(bool(torch.isfinite(g).all()) for g in sums.values())


def test_batch_norm_in_training_mode_is_refused_in_a_loop():
    model = Net(lambda m, x: torch.stack([m.norm(one) for one in m.a(x)]), a=nn.Linear(D, D), norm=nn.BatchNorm1d(D))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(3, 4, D)).sum().backward()
    engine.detach()


def test_uses_by_samples_are_one_use_by_the_batch():
    """Several matrix products of each sample, of different lengths: one use."""
    w = nn.Parameter(torch.randn(2, 3))
    torch.manual_seed(1)
    pieces = [(b, torch.randn(1, t, 3), torch.randn(1, t, 2)) for b, t in ((0, 2), (2, 1), (0, 3))]
    uses = [Regrouped(Matmul(w, a, g, "linear"), Groups(torch.tensor([b]), 4)) for b, a, g in pieces]
    whole = uses[0].concat(uses[1:], "linear x3")
    stack = Regrouped(Stack([use.inner for use in uses]), Groups(torch.tensor([b for b, _, _ in pieces]), 4))
    truth = torch.zeros(4, 2, 3, dtype=torch.double)
    for b, a, g in pieces:
        truth[b] += g[0].double().mT @ a[0].double()
    c = torch.tensor([0.5, 1.0, 2.0, 0.0])
    for use in (whole, stack):
        torch.testing.assert_close(use.per_sample(0, 4).double(), truth, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(use.per_sample(1, 3).double(), truth[1:3], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(use.norm_sq().double(), truth.square().sum((1, 2)), rtol=1e-5, atol=1e-6)
        summed = torch.einsum("b,boi->oi", c.double(), truth)
        torch.testing.assert_close(use.clipped_sum(c).double(), summed, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.stack([u.norm_sq() for u in uses[1:2]])[0] > 0, torch.tensor([False, False, True, False]))


def only_one_samples_tokens(m, x, reduce=False):
    """An expert that tokens of sample 1 alone were routed to: rows by number, and rows of that sample as a whole."""
    rows = m.a(x).flatten(0, 1)
    hit = torch.where(x.flatten(0, 1)[:, 0] > 1)[0]
    scale = (x * x).sum(-1).view(-1, 1)
    if reduce:
        return m.b(rows.index_add(0, hit, rows[hit] + rows[None, hit][0].roll(1, 0)).view(x.shape))
    picked = m.b(rows[None, hit].reshape(-1, D)) * scale[hit, torch.zeros_like(hit), None]
    return rows.index_add(0, hit, picked * m.scale).view(x.shape)


@pytest.mark.parametrize("reduce", [False, True])
def test_rows_that_happen_to_be_of_one_sample(reduce):
    torch.manual_seed(0)
    parts = {"a": nn.Linear(D, D), "b": nn.Linear(D, D)} | ({} if reduce else {"scale": P(D)})
    model, x = Net(lambda m, x: only_one_samples_tokens(m, x, reduce), **parts), torch.randn(3, 5, D)
    x[..., 0] = torch.tensor([[0.0] * 5, [2, 0, 2, 2, 0], [0.0] * 5])
    engine = fastdp.PerSampleGradients(model)
    square(model, x).mean().backward()
    found = engine.norms()
    engine.detach()
    for b in range(3):
        grads = torch.autograd.grad(square(model, x[b : b + 1]).sum(), list(model.parameters()), allow_unused=True)
        norm = sum(g.square().sum() for g in grads if g is not None).sqrt()
        torch.testing.assert_close(found[b], norm, rtol=1e-4, atol=1e-6)
