"""Mixtures of experts, written in the ways that models write them: tokens go to experts and come back.

A case builds (model, batch, losses) as in tests.cases. `size` gives samples, tokens and experts: also all equal, so
that shapes tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .cases import Built, Net, P, shake, square

D, HIDDEN = 8, 12
grouped_mm = getattr(F, "grouped_mm", torch._grouped_mm)  # public since torch 2.10


class Size(NamedTuple):
    samples: int
    tokens: int
    experts: int
    each: int  # experts a token


SIZES = {
    "usual": Size(3, 5, 4, 2),
    "all_equal": Size(4, 4, 4, 2),
    "one_each": Size(3, 7, 5, 1),
    "one_token": Size(2, 1, 3, 2),
    "one_sample": Size(1, 6, 3, 2),
    "more_experts_than_tokens": Size(3, 2, 9, 3),
}
EXPERTS: dict[str, Callable[[nn.Module, Tensor, Tensor, Tensor, Size], Tensor]] = {}
SINGLE = ("grouped", "grouped_biased")  # functions that torch has in float32 alone


def way(function: Callable[[nn.Module, Tensor, Tensor, Tensor, Size], Tensor]):
    EXPERTS[function.__name__] = function
    return function


def build(name: str, size: Size) -> Built:
    torch.manual_seed(4)

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        tokens = m.before(x).view(-1, D)
        scores = m.router(tokens).softmax(-1)
        weights, chosen = scores.topk(size.each, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return m.after(EXPERTS[name](m, tokens, chosen, weights, size).view_as(x).tanh())

    parts = {
        "before": nn.Linear(D, D), "after": nn.Linear(D, 4), "router": nn.Linear(D, size.experts),
        "up": P(size.experts, HIDDEN, D), "down": P(size.experts, D, HIDDEN),
        "bias": P(size.experts, HIDDEN),
        "modules_": nn.ModuleList([nn.Sequential(nn.Linear(D, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, D))
                                   for _ in range(size.experts)]),
    }  # fmt: skip
    used = NEEDS.get(name, ("up", "down", "bias"))
    keep = {key: part for key, part in parts.items() if key in ("before", "after", "router", *used)}
    model = shake(Net(forward, **keep))
    return model, (torch.randn(size.samples, size.tokens, D),), square


STACKS, MODULES = ("up", "down"), ("modules_",)
NEEDS = {
    **dict.fromkeys(
        "grouped scattered_back unstacked batched_by_matmul batched_by_einsum batched_twice dense einsum".split(),
        STACKS,
    ),
    **dict.fromkeys("modules modules_by_mask split_and_back slices_and_written_back unique".split(), MODULES),
}


@way
def eager(m, x, chosen, weights, size):
    """A loop over the experts that got any token."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(chosen, num_classes=size.experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for expert in hit:
        expert = expert[0]
        position, token = torch.where(mask[expert])
        h = torch.tanh(F.linear(x[token], m.up[expert], m.bias[expert]))
        out.index_add_(0, token, F.linear(h, m.down[expert]) * weights[token, position, None])
    return out


@way
def modules(m, x, chosen, weights, size):
    """A loop over all experts, some of which have no token."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.modules_):
        token, position = torch.where(chosen == number)
        out = out.index_add(0, token, expert(x[token]) * weights[token, position].unsqueeze(-1))
    return out


@way
def modules_by_mask(m, x, chosen, weights, size):
    out = torch.zeros_like(x)
    for number, expert in enumerate(m.modules_):
        mine = (chosen == number).any(-1)
        weight = (weights * (chosen == number)).sum(-1)
        out[mine] = out[mine] + expert(x[mine]) * weight[mine][:, None]
    return out


@way
def unique(m, x, chosen, weights, size):
    out = torch.zeros_like(x)
    for number in chosen.unique().tolist():
        rows = (chosen == number).nonzero()
        token, position = rows[:, 0], rows[:, 1]
        out.index_add_(0, token, m.modules_[number](x.index_select(0, token)) * weights[token, position, None])
    return out


def _sorted(x, chosen, size):
    ids, order = torch.sort(chosen.reshape(-1))
    return ids, order, x[order // size.each]


def _ends(ids, size):
    return torch.histc(ids.float(), bins=size.experts, min=0, max=size.experts - 1).cumsum(0, dtype=torch.int32)


@way
def grouped(m, x, chosen, weights, size):
    ids, order, rows = _sorted(x, chosen, size)
    ends = _ends(ids, size)
    h = grouped_mm(rows, m.up.transpose(-2, -1), offs=ends).tanh()
    y = grouped_mm(h, m.down.transpose(-2, -1), offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=x.device)
    return y[back].view(*chosen.shape, D).sum(1)


@way
def grouped_biased(m, x, chosen, weights, size):
    """Stored the other way round, and used twice."""
    ids, order, rows = _sorted(x, chosen, size)
    ends = _ends(ids, size)
    h = torch._grouped_mm(rows, m.down, offs=ends)
    h.add_(m.bias[ids])
    h = torch._grouped_mm(h.tanh(), m.up, offs=ends).tanh()
    h = (torch._grouped_mm(h, m.down, offs=ends) + m.bias[ids]).tanh()
    y = torch._grouped_mm(h, m.up, offs=ends) * weights.reshape(-1)[order].unsqueeze(-1)
    return y[order.argsort()].view(*chosen.shape, D).sum(1)


@way
def batched(m, x, chosen, weights, size):
    """The matrices of every token, gathered."""
    ids = chosen.reshape(-1)
    rows = x.repeat_interleave(size.each, dim=0)
    h = torch.bmm(m.up[ids], rows.unsqueeze(-1)).squeeze(-1)
    h.add_(m.bias[ids])
    y = torch.bmm(h.tanh().unsqueeze(1), m.down[ids].transpose(1, 2)).squeeze(1)
    return (y * weights.reshape(-1, 1)).view(*chosen.shape, D).sum(1)


@way
def batched_by_matmul(m, x, chosen, weights, size):
    """[N, k, ., .] matrices times the token."""
    h = torch.matmul(m.up[chosen], x[:, None, :, None]).tanh()
    return ((m.down[chosen] @ h).squeeze(-1) * weights.unsqueeze(-1)).sum(1)


@way
def batched_by_einsum(m, x, chosen, weights, size):
    """Gathered matrices in the equations that people write, from either side and for all choices of a token."""
    h = torch.einsum("nd,nkhd->nkh", x, m.up[chosen]).tanh()
    y = torch.einsum("nkdh,nkh->nkd", m.down[chosen], h).tanh()
    y = torch.einsum("nkd, nkdh -> nkh", y, m.down[chosen])
    return torch.einsum("nkhd,nkh,nk->nd", m.up[chosen], y, weights)


@way
def batched_twice(m, x, chosen, weights, size):
    """Gathered matrices that meet more than one product, and a loss on themselves."""
    up, down = m.up[chosen[:, 0]], m.down[chosen[:, -1]]
    h = torch.bmm(up, x.unsqueeze(-1)).tanh()
    h = torch.bmm(up, torch.bmm(down, h)).tanh()
    return torch.bmm(down, h).squeeze(-1) * weights[:, :1] + down.square().mean(-1)


@way
def split_and_back(m, x, chosen, weights, size):
    ids, order, rows = _sorted(x, chosen, size)
    parts = rows.split(torch.bincount(ids, minlength=size.experts).tolist())
    y = torch.cat([expert(part) for expert, part in zip(m.modules_, parts, strict=True)])
    y = y * weights.reshape(-1)[order][:, None]
    return y[torch.argsort(order)].view(*chosen.shape, D).sum(1)


@way
def slices_and_written_back(m, x, chosen, weights, size):
    order = chosen.view(-1).argsort()
    ends = chosen.view(-1).bincount(minlength=size.experts).cumsum(0).tolist()
    found = []
    for expert, start, stop in zip(m.modules_, [0, *ends], ends, strict=False):
        if start < stop:
            found.append(expert(x[order[start:stop] // size.each]))
    y = torch.cat(found)
    back = torch.empty_like(y)
    back[order] = y
    return (back.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


@way
def scattered_back(m, x, chosen, weights, size):
    out = torch.zeros_like(x)
    for number in range(size.experts):
        token, position = torch.where(chosen == number)
        y = torch.gather(x, 0, token[:, None].expand(-1, D)) @ m.up[number].t()
        y = F.linear(y.tanh(), m.down[number]) * weights[token, position, None]
        out = out.scatter_add(0, token[:, None].expand(-1, D), y)
    return out


@way
def unstacked(m, x, chosen, weights, size):
    """The stack taken apart once."""
    gates = x.new_zeros(len(x), size.experts).scatter(1, chosen, weights)
    found = [F.linear(F.linear(x, up).tanh(), down) for up, down in zip(m.up.unbind(0), m.down.unbind(0), strict=True)]
    return (torch.stack(found, 1) * gates.unsqueeze(-1)).sum(1)


@way
def dense(m, x, chosen, weights, size):
    """Every token at every expert: a product with the whole stack."""
    gates = x.new_zeros(len(x), size.experts).scatter(1, chosen, weights)
    rows = x.repeat(size.experts, 1).view(size.experts, -1, D)
    y = torch.bmm(torch.bmm(rows, m.up.transpose(1, 2)).tanh(), m.down.transpose(1, 2))
    return (y * gates.t().reshape(size.experts, -1, 1)).sum(0)


@way
def einsum(m, x, chosen, weights, size):
    gates = x.new_zeros(len(x), size.experts).scatter(1, chosen, weights)
    h = torch.einsum("nd,ehd->neh", x, m.up).tanh()
    return torch.einsum("neh,edh,ne->nd", h, m.down, gates)


# --------------------------------------------------------------------------- rows that leave and come back

CASES: dict[str, Callable[[], Built]] = {}


def case(name: str, forward: Callable[..., Tensor], *shape: int) -> None:
    parts = {"a": nn.Linear(D, D), "b": nn.Linear(D, D)}
    CASES[name] = lambda: (shake(Net(forward, **parts)), (torch.randn(*shape or (3, 5, D)),), square)


def _merged(m: nn.Module, x: Tensor) -> Tensor:
    """Features of some tokens, computed apart, written over the embeddings."""
    mask = (x[..., :1] > 0).expand_as(x)
    return m.a(x).masked_scatter(mask, m.b(x[mask].view(-1, D)).tanh())


def _same_number_each(m: nn.Module, x: Tensor) -> Tensor:
    """A mask that keeps as many tokens of every sample."""
    mask = x.new_zeros(len(x), 5, dtype=torch.bool).scatter_(1, x[..., 0].argsort(1)[:, :2], True)
    return torch.cat([m.a(x[mask].reshape(len(x), -1, D)), m.b(x[~mask].reshape(len(x), -1, D))], 1)


def _nobody(m: nn.Module, x: Tensor) -> Tensor:
    """A mask that keeps no row."""
    mask = x[..., 0] > 1e9
    return m.a(x) + torch.zeros_like(x).index_put((mask,), m.b(x[mask]))


def _unpadded(m: nn.Module, x: Tensor) -> Tensor:
    """Tokens without padding, as attention kernels for ragged batches take them."""
    mask = x[..., 1] > -0.5
    places = torch.nonzero(mask.flatten()).flatten()
    rows = m.a(x.flatten(0, 1)[places]).tanh()
    return m.b(x.new_zeros(mask.numel(), D).index_put((places,), rows).view_as(x))


def _by_length(m: nn.Module, x: Tensor) -> Tensor:
    """Samples sorted by a length, and back."""
    order = (x[..., 0] > 0).sum(1).argsort(descending=True)
    return m.b(m.a(x[order]).tanh())[order.argsort()]


case("merged", _merged)
case("same_number_each", _same_number_each)
case("nobody", _nobody)
case("unpadded", _unpadded)
case("by_length", _by_length)
case("mean_by_axis", lambda m, x: m.a(x) / torch.mean(x * x, axis=-1, keepdim=True) + m.b(x).sum(axis=1, keepdim=True))
case("mean_by_axis_all_equal", lambda m, x: m.a(x) * m.b(x).var(axis=1, keepdim=True), D, D, D)
case("type_of_data", lambda m, x: m.a(x) + torch.arange(x.size(1), device=x.device).type_as(m.b(x))[:, None] * m.b(x))
