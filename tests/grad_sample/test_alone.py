"""Loops over the samples: exact in every way of writing them; where tensors of different samples meet, refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fastdp
from fastdp.errors import FastDPError

from ..cases import Net, P, square
from ..truth import assert_refused, assert_step, compare

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
def split_rows(m, x):
    parts = m.a(x).flatten(0, 1).split(x.size(1))
    return torch.cat([m.b(part) * part.mean(0) for part in parts]).view(x.shape)


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
def multi_head(m, x):
    return torch.stack([m.heads(one, one, one)[0] for one in m.a(x)])


@loop
def images(m, x):
    return torch.cat([m.conv(one[None, None]).flatten(1) for one in m.a(x)])


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
    """The second forward of one engine takes layouts from memory."""
    engine = fastdp.PerSampleGradients(model_of(name))
    for _ in range(2):
        assert_step(engine, torch.randn(3, 5, D), square, 1e-4)
    engine.detach()


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
    "batch_norm": lambda m, h: torch.stack([m.norm(one) for one in h]),
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
    model = Net(
        lambda m, x: MIXED[name](m, m.a(x)),
        a=nn.Linear(D, D),
        b=nn.Linear(D, D),
        scale=P(D),
        w=P(D, D),
        norm=nn.BatchNorm1d(D),
    )
    if name == "product_of_two":
        model.b = nn.Linear(T, D)
    assert_refused(model, torch.randn(B, T, D), lambda m, x: m(x).flatten(1).square().sum(1))


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
    assert_step(engine, x, square)
    engine.detach()
