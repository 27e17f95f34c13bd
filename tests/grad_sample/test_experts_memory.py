"""Experts and loops over samples under a memory budget: as exact as without it; checkpointed blocks hold only norms."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastdp

from ..cases import square
from ..cases_experts import EXPERTS, SINGLE, D, build
from ..truth import compare
from .test_experts_training import SIZE, data, made, plain, tied_slices


class Layer(nn.Module):
    """Experts in one of the usual ways, as a checkpointed block."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = build(name, SIZE)[0]
        self.net.after = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Layers(nn.Module):
    def __init__(self, name: str, checkpointed: bool) -> None:
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(Layer(name) for _ in range(2)), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def under_budget(net: nn.Module, x: Tensor, budget: int | None) -> tuple[Tensor, dict[str, Tensor], str, int]:
    engine = fastdp.PerSampleGradients(net, memory_budget=budget)
    try:
        square(net, x).mean().backward()
        norms = engine.norms()
        sums = engine.clipped_sum((norms.median() / norms).clamp(max=1))
        return norms, sums, engine.explain(), engine.planner.held
    finally:
        engine.detach()


@pytest.mark.parametrize("name", [name for name in EXPERTS if name not in SINGLE])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("budget", [1, 4000])
def test_exact_under_a_memory_budget(name, checkpointed, budget):
    net, (x,) = Layers(name, checkpointed), data()
    plain_net = copy.deepcopy(net)
    plain_net.checkpointed = False
    norms, sums, _, _ = under_budget(plain_net, x, None)
    found, again, _, _ = under_budget(net, x, budget)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
    for key in sums:
        torch.testing.assert_close(again[key], sums[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["eager", "modules", "grouped", "unstacked", "scattered_back", "split_and_back"])
def test_the_budget_is_kept_where_blocks_can_run_again(name):
    """Of checkpointed experts nothing is held but norms, for the loop over slices of a stack too."""
    net, (x,) = Layers(name, True), data()
    assert "two backwards" not in under_budget(net, x, None)[2]
    _, _, plan, held = under_budget(net, x, 1)
    rows = [line for line in plan.splitlines() if ".net." in line]
    assert len(rows) > 8 and all("two backwards" in row for row in rows), plan
    assert held == len(rows) * SIZE.samples * 8


def test_slices_that_overlap_are_kept():
    """Tied slices have cross terms: under a budget, too, their norm is taken from both together."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = made(tied_slices)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.net, x, use_reentrant=False)

    net, (x,) = Tied(), data()
    norms, sums, _, _ = under_budget(net.net, x, None)
    found, again, _, _ = under_budget(net, x, 1)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
    for key in sums:
        torch.testing.assert_close(again[f"net.{key}"], sums[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_loop_over_samples_under_a_memory_budget(checkpointed):
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = made(plain), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            run = (lambda s: checkpoint(self.net, s, use_reentrant=False)) if checkpointed else self.net
            return self.last(torch.cat([run(sample) for sample in x.split(1)]))

    assert compare(Loop(), data(), square).worst < 1e-5
    net, (x,) = Loop(), data()
    norms, sums, _, _ = under_budget(copy.deepcopy(net), x, None)
    found, again, _, _ = under_budget(net, x, 1)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
    for key in sums:
        torch.testing.assert_close(again[key], sums[key], rtol=1e-4, atol=1e-6)
