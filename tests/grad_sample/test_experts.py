"""Experts: exact in every way of writing them; what depends on other samples is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastdp
from fastdp.errors import SampleMixingError
from fastdp.grad_sample.planner import HeldBytes

from ..cases import Net, P, square
from ..cases_experts import CASES, EXPERTS, SINGLE, SIZES, build, grouped_mm
from ..truth import compare


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPERTS)
def test_exact(name, size):
    model, batch, losses = build(name, SIZES[size])
    single = name in SINGLE
    found = compare(model, batch, losses, double=not single)
    assert found.worst < (1e-4 if single else 1e-5), found


@pytest.mark.parametrize("name", CASES)
def test_rows_that_leave_and_come_back(name):
    torch.manual_seed(2)
    assert compare(*CASES[name]()).worst < 1e-5


B, T, E, D = 3, 4, 3, 8


def _scores(m, x):
    return m.router(m.a(x).view(-1, D))


def _capacity_by_count(m, x):
    """Tokens are dropped by how many of other samples came before."""
    h, scores = m.a(x).view(-1, D), _scores(m, x)
    mask = F.one_hot(scores.argmax(-1), E)
    kept = (mask.cumsum(0) * mask <= 2) & mask.bool()
    return (torch.einsum("nd,edh->neh", h, m.w) * kept.unsqueeze(-1)).sum(1).view(len(x), -1)


def _capacity_by_dispatch(m, x):
    h, scores = m.a(x).view(-1, D), _scores(m, x)
    mask = F.one_hot(scores.argmax(-1), E)
    place = F.one_hot((mask.cumsum(0) * mask).clamp(max=3), 4)[..., 1:].to(x.dtype)
    y = torch.einsum("nec,nd->ecd", place, h) @ m.w
    return torch.einsum("nec,ecd->nd", place, y).view(len(x), -1)


def _first_rows(m, x):
    h, out = m.a(x).view(-1, D), torch.zeros(x[..., 0].numel(), D, dtype=x.dtype)
    for e in range(E):
        token = torch.where(_scores(m, x).argmax(-1) == e)[0][:2]
        out = out.index_add(0, token, h[token] @ m.w[e])
    return out.view(len(x), -1)


def _experts_choose(m, x):
    """Each expert takes its best tokens of the whole batch."""
    h, scores = m.a(x).view(-1, D), _scores(m, x).softmax(-1)
    weight, token = scores.topk(2, dim=0)
    out = torch.zeros_like(h)
    for e in range(E):
        out = out.index_add(0, token[:, e], (h[token[:, e]] @ m.w[e]) * weight[:, e, None])
    return out.view(len(x), -1)


def _number_by_place(m, x):
    ids, order = _scores(m, x).argmax(-1).sort()
    y = (m.a(x).view(-1, D)[order] @ m.w[0]) * torch.arange(len(order))[:, None]
    return y[order.argsort()].view(len(x), -1)


def _learned_by_place(m, x):
    ids, order = _scores(m, x).argmax(-1).sort()
    y = m.a(x).view(-1, D)[order] * m.p[: len(order)]
    return y[order.argsort()].view(len(x), -1)


def _rank_in_table(m, x):
    rank = _scores(m, x)[:, 0].argsort().argsort()
    return (m.a(x).view(-1, D) + m.p[rank]).view(len(x), -1)


def _anothers_rows(m, x):
    return m.a(x).view(-1, D)[m.router(x).argmax(-1).flatten()].view(len(x), -1)


def _groups_by_count(m, x):
    """Rows in their own order, divided among the experts by how many want each."""
    ids = _scores(m, x).argmax(-1)
    ends = torch.bincount(ids, minlength=E).cumsum(0, dtype=torch.int32)
    return grouped_mm(m.a(x).view(-1, D), m.w, offs=ends).view(len(x), -1)


def _merged_elsewhere(m, x):
    """As many features as places, but in the order of other samples."""
    mask = (x[..., :1] > 0).expand_as(x)
    return m.a(x).masked_scatter(mask, m.a(x.flip(0)[mask.flip(0)].view(-1, D))).flatten(1)


def _balance(m, x):
    scores = _scores(m, x).softmax(-1)
    share = F.one_hot(scores.argmax(-1), E).to(x.dtype).mean(0)
    return (m.a(x) @ m.w[0]).flatten(1) + (share * scores.mean(0)).sum()


MIXING = (
    _capacity_by_count, _capacity_by_dispatch, _first_rows, _experts_choose, _number_by_place, _learned_by_place,
    _rank_in_table, _anothers_rows, _groups_by_count, _merged_elsewhere, _balance,
)  # fmt: skip


@pytest.mark.parametrize("function", MIXING, ids=lambda f: f.__name__)
def test_what_depends_on_other_samples_is_refused(function):
    torch.manual_seed(0)
    parts = {"a": torch.nn.Linear(D, D), "router": torch.nn.Linear(D, E), "w": P(E, D, D), "p": P(B * T, D)}
    model = Net(function, **parts)
    engine = fastdp.PerSampleGradients(model)
    with pytest.raises(SampleMixingError, match=r"\(\) in module 'Net'|in module 'Net'"):
        square(model, torch.randn(B, T, D)).mean().backward()
    engine.detach()


@pytest.mark.parametrize("name", EXPERTS)
def test_exact_where_the_experts_are_frozen(name):
    """The layouts of routed rows do not need the experts to be trained."""
    model, batch, losses = build(name, SIZES["usual"])
    for key, p in model.named_parameters():
        p.requires_grad_(key.startswith(("before", "router")))
    assert compare(model, batch, losses, double=name not in SINGLE).worst < 1e-4


@pytest.mark.parametrize("name", ["batched", "batched_by_matmul"])
def test_gathered_matrices_are_not_held(name):
    """The use of a product with gathered matrices holds rows, not one matrix for each token."""
    size = SIZES["usual"]
    model, batch, losses = build(name, size)
    engine = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    held = HeldBytes().hold([tensor for use in engine._last().uses_of(model.up) for tensor in use.data()])
    engine.detach()
    assert held < size.samples * size.tokens * size.each * model.up[0].numel() * 4 / 2
