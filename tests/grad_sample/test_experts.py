"""Experts: exact in every way of writing them; what depends on other samples is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fastdp
from fastdp.errors import SampleMixingError
from fastdp.grad_sample.planner import HeldBytes
from fastdp.grad_sample.routed_rows import Routed

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


def _first_sorted(m, x):
    ids, order = _scores(m, x).argmax(-1).sort()
    y = m.a(x).view(-1, D)[order][:5] @ m.w[0]
    return torch.zeros(len(ids), D, dtype=x.dtype).index_add(0, order[:5], y).view(len(x), -1)


def _experts_choose(m, x):
    """Each expert takes its best tokens of the whole batch."""
    h, scores = m.a(x).view(-1, D), _scores(m, x).softmax(-1)
    weight, token = scores.topk(2, dim=0)
    out = torch.zeros_like(h)
    for e in range(E):
        out = out.index_add(0, token[:, e], (h[token[:, e]] @ m.w[e]) * weight[:, e, None])
    return out.view(len(x), -1)


def _experts_choose_unweighted(m, x):
    h = m.a(x).view(-1, D)
    token = _scores(m, x)[:, 0].argsort()[:4]
    return torch.zeros_like(h).index_add(0, token, h[token] @ m.w[0]).view(len(x), -1)


def _most_wanted(m, x):
    """The expert that most tokens of the batch want, for all."""
    counts = torch.bincount(_scores(m, x).argmax(-1), minlength=E)
    return (m.a(x) @ m.w[counts.argmax()]).flatten(1)


def _number_by_place(m, x):
    ids, order = _scores(m, x).argmax(-1).sort()
    y = (m.a(x).view(-1, D)[order] @ m.w[0]) * torch.arange(len(order))[:, None]
    return y[order.argsort()].view(len(x), -1)


def _number_by_place_in_a_product(m, x):
    ids, order = _scores(m, x).argmax(-1).sort()
    y = torch.einsum("nd,n->nd", m.a(x).view(-1, D)[order] @ m.w[0], torch.linspace(0, 1, len(order), dtype=x.dtype))
    return y[order.argsort()].view(len(x), -1)


def _rank_in_table_alone(m, x):
    return m.p[m.a(x)[:, 0, 0].argsort().argsort()]


def _learned_by_place(m, x):
    ids, order = _scores(m, x).argmax(-1).sort()
    y = m.a(x).view(-1, D)[order] * m.p[: len(order)]
    return y[order.argsort()].view(len(x), -1)


def _rank_as_number(m, x):
    rank = _scores(m, x)[:, 0].argsort().argsort()
    return (m.a(x).view(-1, D) * rank.to(x.dtype)[:, None]).view(len(x), -1)


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


def _mask_by_others(m, x):
    h = m.a(x).view(-1, D)
    kept = h[:, 0] > h[:, 0].mean()
    out = torch.zeros_like(h)
    out[kept] = h[kept] @ m.w[0]
    return out.view(len(x), -1)


def _merged_elsewhere(m, x):
    """As many features as places, but in the order of other samples."""
    mask = (x[..., :1] > 0).expand_as(x)
    return m.a(x).masked_scatter(mask, m.a(x.flip(0)[mask.flip(0)].view(-1, D))).flatten(1)


def _balance(m, x):
    scores = _scores(m, x).softmax(-1)
    share = F.one_hot(scores.argmax(-1), E).to(x.dtype).mean(0)
    return (m.a(x) @ m.w[0]).flatten(1) + (share * scores.mean(0)).sum()


MIXING = (
    _capacity_by_count, _capacity_by_dispatch, _first_rows, _first_sorted, _experts_choose, _experts_choose_unweighted,
    _most_wanted, _number_by_place, _number_by_place_in_a_product,
    _learned_by_place, _rank_in_table_alone, _rank_as_number, _rank_in_table, _anothers_rows,
    _groups_by_count, _mask_by_others, _merged_elsewhere, _balance,
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


def test_experts_by_batch_are_frozen_or_trained_alike():
    """The layouts of routed rows do not need the experts to be trained."""
    for name in EXPERTS:
        model, batch, losses = build(name, SIZES["usual"])
        for key, p in model.named_parameters():
            p.requires_grad_(key.startswith(("before", "router")))
        assert compare(model, batch, losses, double=name not in SINGLE).worst < 1e-4, name


@pytest.mark.parametrize("name", ["batched", "batched_by_matmul"])
def test_gathered_matrices_are_not_held(name):
    """The use of a product with gathered matrices holds rows, not one matrix for each token."""
    size = SIZES["usual"]
    model, batch, losses = build(name.replace("einsum_of_gathered", "batched"), size)
    if name == "einsum_of_gathered":
        model = Net(_einsum_of_gathered, before=model.before, router=model.router, up=model.up, down=model.down)
    engine = fastdp.PerSampleGradients(model)
    losses(model, batch).mean().backward()
    rows = size.samples * size.tokens * size.each
    held = HeldBytes().hold([tensor for use in engine._last().uses_of(model.up) for tensor in use.data()])
    engine.detach()
    assert held < rows * model.up[0].numel() * 4 / 2


def _einsum_of_gathered(m, x):
    tokens = m.before(x).view(-1, D)
    weights, chosen = m.router(tokens).softmax(-1).topk(2, dim=-1)
    h = torch.einsum("nkhd,nd->nkh", m.up[chosen], tokens).tanh()
    return (torch.einsum("nkh,nkdh->nkd", h, m.down[chosen]) * weights.unsqueeze(-1)).sum(1).view_as(x)


def routed(dtype=torch.float32, samples=3):
    generator = torch.Generator().manual_seed(1)
    a, g = (torch.randn(11, n, generator=generator).to(dtype) for n in (5, 6))
    ids = torch.randint(0, 4, (11,), generator=generator)
    ids[3] = 7  # of no matrix
    owner = torch.randint(0, samples, (11,), generator=generator)
    owner[owner == 1] = 0  # sample 1 has no row
    return Routed(torch.zeros(4, 6, 5, dtype=dtype), a, g, ids, owner, samples, "test"), (a, g, ids, owner)


def by_loop(a, g, ids, owner, samples=3):
    grads = torch.zeros(samples, 4, 6, 5, dtype=torch.float64)
    for x, y, e, b in zip(a.double(), g.double(), ids, owner, strict=True):
        if e < 4:
            grads[b, e] += torch.outer(y, x)
    return grads


def test_a_row_that_is_not_finite_stays_with_its_sample():
    use, (a, g, ids, owner) = routed()
    clean = by_loop(a, g, ids, owner)
    use.a[(use.owner == 2).nonzero()[0]] = float("nan")
    norms = use.norm_sq()
    assert norms[2].isnan() and torch.allclose(norms[0].double(), clean[0].square().sum(), rtol=1e-5)
    summed = use.clipped_sum(torch.tensor([1.0, 1.0, 0.0]))
    assert torch.allclose(summed.double(), clean[0], atol=1e-5)
