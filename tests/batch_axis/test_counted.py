"""Rows numbered within their own group by sums over all groups, as models of vision number the patches of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fastdp
from fastdp.errors import SampleMixingError

from ..cases import Net
from ..truth import norms_of

D = 6
Numbers = Callable[[Tensor], Tensor]


def within(counts: Tensor) -> Tensor:
    starts = F.pad(counts.cumsum(0)[:-1], (1, 0)).repeat_interleave(counts)
    return torch.arange(int(counts.sum())) - starts


def patches(m: Any, rows: Tensor, counts: Tensor, owner: Tensor, numbers: Numbers, by_place: bool = False) -> Tensor:
    scales = counts.repeat_interleave(counts)[:, None]
    if by_place:
        scales = scales * torch.linspace(0.5, 1.5, len(scales))[:, None]
    h = (m.inner(rows) + m.places(numbers(counts)) * scales).tanh()
    return m.head(torch.zeros(len(counts), D).index_add(0, owner, h))


def model(numbers: Numbers = within, by_place: bool = False) -> nn.Module:
    torch.manual_seed(0)
    parts = {"inner": nn.Linear(D, D), "places": nn.Embedding(32, D), "head": nn.Linear(D, 3)}
    return Net(lambda m, *inputs: patches(m, *inputs, numbers, by_place), **parts)


def batch(counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    owner = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    rows, numbers = torch.randn(len(owner), D), torch.tensor(counts)
    fastdp.mark_rows(rows, owner, len(counts))
    return rows, numbers, fastdp.mark_rows(owner, owner, len(counts))


@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 2, 5]])
def test_numbers_within_groups_are_the_samples_own(counts: list[int]) -> None:
    net = model()
    rows, numbers, owner = batch(counts)
    alone = {}
    for b in range(3):
        own = owner == b
        out = net(rows[own], numbers[b : b + 1], owner[own] * 0)
        grads = torch.autograd.grad(out.square().sum(), list(net.parameters()))
        for (name, _), g in zip(net.named_parameters(), grads, strict=True):
            alone.setdefault(name, []).append(g.double())
    engine = fastdp.PerSampleGradients(net)
    net(rows, numbers, owner).square().sum(1).mean().backward()
    exact = norms_of({name: torch.stack(rows) for name, rows in alone.items()})
    torch.testing.assert_close(engine.norms().double(), exact, rtol=1e-5, atol=0)


WRONG: dict[str, Numbers] = {
    "starts of others": lambda c: torch.arange(len(c.repeat_interleave(c))) - c.cumsum(0).flip(0).repeat_interleave(c),
    "places in the batch": lambda c: c.cumsum(0).repeat_interleave(c) - torch.arange(int(c.sum())),
    "one too far": lambda c: within(c) + (c.cumsum(0).repeat_interleave(c) > 9),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_other_numbers_made_of_sums_over_the_batch_are_refused(name: str) -> None:
    net = model(lambda counts: WRONG[name](counts).abs())
    fastdp.PerSampleGradients(net)
    with pytest.raises(SampleMixingError):
        net(*batch([4, 2, 5])).square().sum(1).mean().backward()


def test_constants_by_place_are_refused_where_others_move_the_rows() -> None:
    net = model(by_place=True)
    fastdp.PerSampleGradients(net)
    with pytest.raises(SampleMixingError, match="by position"):
        net(*batch([4, 2, 5])).square().sum(1).mean().backward()
