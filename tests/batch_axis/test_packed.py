"""Packed rows: several rows of each sample along one dimension, marked or guessed; a wrong guess is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fastdp
from fastdp.errors import FastDPError

from ..cases import Net, P
from ..truth import norms_of

B, T, D, ROW = 3, 9, 8, 6
LENGTHS = {"ragged": [2, 6, 4], "two_images": [4, 4, 4], "many_in_one": [2, 8, 2], "equal": [2, 2, 2]}


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


def refused(model, *batch, match=""):
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(FastDPError, match=match):
        model(*batch).square().mean().backward()
        engine.norms()
    engine.detach()


@pytest.mark.parametrize("name", [*LENGTHS, "equal rows need no mark"])
def test_marked_rows_are_exact(name):
    model, lengths = model_of(), LENGTHS.get(name, LENGTHS["two_images"])
    ids, pixels = batch_of(lengths)
    exact = truth_of(model, ids, pixels, lengths)
    if name in LENGTHS:
        fastdp.mark_rows(pixels, torch.arange(B).repeat_interleave(torch.tensor(lengths)))
    engine = fastdp.PerSampleGradients(model)
    model(ids, pixels, lengths).square().flatten(1).mean(1).mean().backward()
    factors = torch.tensor([0.5, 2.0, 0.25], dtype=torch.double)
    found, norms, sums = engine.materialize(), engine.norms(), engine.clipped_sum(factors)
    engine.detach()
    torch.testing.assert_close(norms.double(), norms_of(exact), rtol=1e-6, atol=0)
    for name, g in exact.items():
        torch.testing.assert_close(found[name], g, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(sums[name], torch.tensordot(factors, g, 1), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    "lengths,mark", [([2, 6, 4], None), ([2, 6, 4], [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]), ([2, 6, 2], None)]
)
def test_a_wrong_guess_or_mark_is_refused(lengths, mark):
    """Twelve rows for three samples look like four each; they are 2, 6 and 4. Ten rows cannot be guessed."""
    ids, pixels = batch_of(lengths)
    if mark is not None:
        fastdp.mark_rows(pixels, mark)
    refused(model_of(), ids, pixels, lengths, match="" if sum(lengths) == 12 else "mark_rows")


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
    refused(Net(UNCONFIRMED[name], a=nn.Linear(D, D)), torch.randn(B, D), torch.randn(2 * B, D))


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


def test_rows_in_another_order_beside_a_parameter_are_refused():
    parts = {name: nn.Linear(D, D) for name in "abc"}
    joined = lambda m, x: m.c(torch.cat([m.w.expand(B, 1, D), m.a(x), m.b(x).flip(0)], 1))
    refused(Net(joined, w=P(1, 1, D), **parts), torch.randn(B, 4, D))


# --------------------------------------------------------------------------- rows numbered within their group


def within(counts: Tensor) -> Tensor:
    starts = F.pad(counts.cumsum(0)[:-1], (1, 0)).repeat_interleave(counts)
    return torch.arange(int(counts.sum())) - starts


def patches(m: Any, rows: Tensor, counts: Tensor, owner: Tensor, numbers: Any, by_place: bool = False) -> Tensor:
    scales = counts.repeat_interleave(counts)[:, None]
    if by_place:
        scales = scales * torch.linspace(0.5, 1.5, len(scales))[:, None]
    h = (m.inner(rows) + m.places(numbers(counts)) * scales).tanh()
    return m.head(torch.zeros(len(counts), D).index_add(0, owner, h))


def numbering(numbers: Any = within, by_place: bool = False) -> nn.Module:
    torch.manual_seed(0)
    parts = {"inner": nn.Linear(D, D), "places": nn.Embedding(32, D), "head": nn.Linear(D, 3)}
    return Net(lambda m, *inputs: patches(m, *inputs, numbers, by_place), **parts)


def counted_rows(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    rows = fastdp.mark_rows(torch.randn(len(owner), D), owner, len(counts))
    return rows, torch.tensor(counts), fastdp.mark_rows(owner, owner, len(counts))


@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 2, 5]])
def test_numbers_within_groups_are_the_samples_own(counts: list[int]) -> None:
    net = numbering()
    rows, numbers, owner = counted_rows(counts)
    losses = [
        net(rows[owner == b], numbers[b : b + 1], owner[owner == b] * 0).square().sum() for b in range(len(counts))
    ]
    grads = [torch.autograd.grad(loss, list(net.parameters())) for loss in losses]
    exact = norms_of({str(i): torch.stack(parts).double() for i, parts in enumerate(zip(*grads, strict=True))})
    engine = fastdp.PerSampleGradients(net)
    net(rows, numbers, owner).square().sum(1).mean().backward()
    torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-5, atol=0)


WRONG: dict[str, Any] = {
    "starts of others": lambda c: torch.arange(len(c.repeat_interleave(c))) - c.cumsum(0).flip(0).repeat_interleave(c),
    "places in the batch": lambda c: c.cumsum(0).repeat_interleave(c) - torch.arange(int(c.sum())),
    "one too far": lambda c: within(c) + (c.cumsum(0).repeat_interleave(c) > 9),
    "by place": within,  # constants, where others move the rows
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_other_numbers_made_of_sums_over_the_batch_are_refused(name: str) -> None:
    by_place = name == "by place"
    model = numbering(lambda counts: WRONG[name](counts).abs(), by_place)
    refused(model, *counted_rows([4, 2, 5]), match="by position" if by_place else "")
