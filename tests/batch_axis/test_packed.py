"""Packed rows: several rows of each sample along one dimension, marked or guessed; a wrong guess is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fastdp
from fastdp.errors import FastDPError

from ..cases import Net, P

B, T, D, ROW = 3, 9, 8, 6
LENGTHS = {"ragged": [2, 6, 4], "two_images": [4, 4, 4], "none_in_one": [0, 8, 4], "equal": [2, 2, 2]}


def attend(m, h, lengths):
    """Attention over chunks: one image each."""
    q, k, v = (m.qkv(h).view(len(h), 3, 2, D // 2).permute(1, 2, 0, 3).unsqueeze(1)).unbind(0)
    chunks = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
    found = torch.cat([F.scaled_dot_product_attention(*chunk) for chunk in chunks], dim=2)
    return found.squeeze(0).transpose(0, 1).reshape(len(h), D)


def forward(m, ids, pixels, lengths):
    """A vision tower on packed rows, two rows merged to one, written into the places of the text that ask for it."""
    h = m.conv(pixels.view(-1, 1, 2, 3)).flatten(1)
    table = torch.cat([torch.arange(float(n)) for n in lengths]).to(h.dtype)
    h = h * table.cos()[:, None] + m.position(torch.cat([torch.arange(n) for n in lengths]))
    h = h + m.out(attend(m, m.norm(h), [n for n in lengths if n]))
    h = m.merge(h.view(-1, 2 * D))
    x = m.embed(ids)
    x = x.masked_scatter((ids == 0).unsqueeze(-1).expand_as(x), h.to(x.dtype))
    return m.head(F.scaled_dot_product_attention(x, x, x).tanh())


def model_of(function=forward):
    torch.manual_seed(0)
    parts = {
        "conv": nn.Conv2d(1, D, (2, 3)), "position": nn.Embedding(8, D), "norm": nn.LayerNorm(D),
        "qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, D), "merge": nn.Linear(2 * D, D), "embed": nn.Embedding(7, D),
        "head": nn.Linear(D, 5),
    }  # fmt: skip
    return Net(function, **parts).double()


def batch_of(lengths):
    ids = torch.randint(1, 7, (len(lengths), T))
    for row, n in zip(ids, lengths, strict=True):
        row[1 : 1 + n // 2] = 0
    return ids, torch.randn(sum(lengths), ROW, dtype=torch.double)


def truth_of(model, ids, pixels, lengths):
    named = dict(model.named_parameters())
    rows, start = [], 0
    for row, n in zip(ids, lengths, strict=True):
        loss = model(row[None], pixels[start : start + n], [n]).square().mean()
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        rows.append(
            {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(named.items(), found, strict=True)}
        )
        start += n
    return {name: torch.stack([row[name] for row in rows]) for name in named}


def check(model, ids, pixels, lengths, truth):
    engine = fastdp.PerSampleGradients(model)
    try:
        model(ids, pixels, lengths).square().flatten(1).mean(1).mean().backward()
        found, norms = engine.materialize(), engine.norms()
        factors = torch.tensor([0.5, 2.0, 0.25], dtype=torch.double)
        sums = engine.clipped_sum(factors)
    finally:
        engine.detach()
    wanted = torch.stack([g.flatten(1).square().sum(1) for g in truth.values()]).sum(0).sqrt()
    torch.testing.assert_close(norms.double(), wanted, rtol=1e-6, atol=0)
    for name, g in truth.items():
        torch.testing.assert_close(found[name], g, rtol=1e-7, atol=1e-10)
        summed = torch.tensordot(factors, g, 1)
        torch.testing.assert_close(sums[name], summed, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("name", LENGTHS)
def test_marked_rows_are_exact(name):
    model, lengths = model_of(), LENGTHS[name]
    if name == "none_in_one":
        lengths = [2, 8, 2]
    ids, pixels = batch_of(lengths)
    truth = truth_of(model, ids, pixels, lengths)
    owner = torch.arange(B).repeat_interleave(torch.tensor(lengths))
    check(model, ids, fastdp.mark_rows(pixels, owner), lengths, truth)


def test_equal_rows_need_no_mark():
    model, lengths = model_of(), LENGTHS["two_images"]
    ids, pixels = batch_of(lengths)
    check(model, ids, pixels, lengths, truth_of(model, ids, pixels, lengths))


@pytest.mark.parametrize("mark", [None, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]])
def test_a_wrong_guess_or_mark_is_refused(mark):
    """Twelve rows for three samples look like four each; they are 2, 6 and 4."""
    model, lengths = model_of(), LENGTHS["ragged"]
    ids, pixels = batch_of(lengths)
    if mark is not None:
        fastdp.mark_rows(pixels, mark)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(ids, pixels, lengths).square().mean().backward()
    engine.detach()


def test_an_unmarked_ragged_batch_names_the_way_out():
    model, lengths = model_of(), [2, 6, 2]
    ids, pixels = batch_of(lengths)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError, match="mark_rows"):
        model(ids, pixels, lengths).square().mean().backward()
    engine.detach()


UNCONFIRMED = {
    "views": lambda m, x, views: m.a(views),
    "views_and_rows": lambda m, x, views: torch.cat([m.a(x), m.a(views)]),
    "views_by_view": lambda m, x, views: m.a(views).view(2, B, D)[0] * m.a(x),
    "their_mean": lambda m, x, views: m.a(x).mean() + m.a(views).square().mean(),
    "their_statistics": lambda m, x, views: m.a(x) + m.a((views - views.mean(0)).view(B, 2, D).sum(1)),
    "two_results": lambda m, x, views: torch.broadcast_tensors(m.a(x).repeat_interleave(2, 0), m.a(views))[1],
}


@pytest.mark.parametrize("name", UNCONFIRMED)
def test_a_guess_that_nothing_confirms_is_refused(name):
    """Two views of each sample, one block after another: the guess (neighbours) would be wrong."""
    torch.manual_seed(0)
    model = Net(UNCONFIRMED[name], a=nn.Linear(D, D))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(B, D), torch.randn(2 * B, D)).square().sum().backward()
        engine.norms()
    engine.detach()


@pytest.mark.parametrize("shared", ["marked", "seen"])
def test_a_table_among_the_inputs_is_no_sample(shared):
    """A table [T, D], T a multiple of B, beside tokens [B, T, D]: rows of the data's other dimension."""
    torch.manual_seed(0)
    model = Net(lambda m, x, table: m.a(x + table).tanh().flatten(1), a=nn.Linear(D, D)).double()
    x, table = torch.randn(B, 2 * B, D, dtype=torch.double), torch.randn(2 * B, D, dtype=torch.double)
    truth = [torch.autograd.grad(model(one[None], table).square().mean(), model.a.weight)[0] for one in x]
    engine = fastdp.PerSampleGradients(model)
    given = fastdp.mark_rows(table, None) if shared == "marked" else table
    model(x, given).square().mean(1).mean().backward()
    found = engine.materialize()["a.weight"]
    engine.detach()
    torch.testing.assert_close(found, torch.stack(truth), rtol=1e-7, atol=1e-10)


def test_marks_that_do_not_fit():
    with pytest.raises(ValueError, match="shape"):
        fastdp.mark_rows(torch.zeros(4, 2), [0, 1])
    model = Net(lambda m, x, rows: m.a(x), a=nn.Linear(D, D))
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError, match="3 samples"):
        model(torch.zeros(3, D), fastdp.mark_rows(torch.zeros(2, D), [0, 3]))
    engine.detach()


def test_rows_in_another_order_beside_a_parameter_are_refused():
    torch.manual_seed(0)
    parts = {name: nn.Linear(D, D) for name in "abc"}
    model = Net(lambda m, x: m.c(torch.cat([m.w.expand(B, 1, D), m.a(x), m.b(x).flip(0)], 1)), w=P(1, 1, D), **parts)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError):
        model(torch.randn(B, 4, D)).square().mean().backward()
    engine.detach()
