"""Experts and loops over samples under a memory budget: as exact as without it; checkpointed blocks hold only norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastdp

from ..cases import square
from ..cases_experts import EXPERTS, SINGLE, D, build
from .test_experts_training import SIZE, data, made, plain, tied_slices


class Blocks(nn.Module):
    """Layers, each of which may be run again; for each sample alone where `by_sample`."""

    def __init__(self, *layers: nn.Module, by_sample: bool = False) -> None:
        super().__init__()
        self.layers, self.last, self.by_sample, self.checkpointed = nn.ModuleList(layers), nn.Linear(D, D), by_sample, 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            parts = x.split(1) if self.by_sample else (x,)
            x = torch.cat([checkpoint(layer, p, use_reentrant=False) if self.checkpointed else layer(p) for p in parts])
        return self.last(x)


def experts(name: str) -> Blocks:
    """Two layers of experts in one of the usual ways."""
    layers = [build(name, SIZE)[0] for _ in range(2)]
    for layer in layers:
        layer.after = nn.Identity()
    return Blocks(*layers)


def under_budget(
    net: Blocks, budget: int | None, checkpointed: bool
) -> tuple[Tensor, dict[str, Tensor], list[str], int]:
    """Norms, sums, the plan's lines, and the bytes held."""
    net.checkpointed, (x,) = checkpointed, data()
    engine = fastdp.PerSampleGradients(net, memory_budget=budget)
    try:
        square(net, x).mean().backward()
        norms = engine.norms()
        sums = engine.clipped_sum((norms.median() / norms).clamp(max=1))
        return norms, sums, engine.explain().splitlines(), engine.planner.held
    finally:
        engine.detach()


MODELS = {name: lambda name=name: experts(name) for name in EXPERTS if name not in SINGLE} | {
    "tied slices": lambda: Blocks(made(tied_slices)),  # they have cross terms: their norm is taken from both together
    "loop over samples": lambda: Blocks(made(plain), by_sample=True),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_exact_under_a_memory_budget(name, checkpointed):
    net = MODELS[name]()
    norms, sums, *_ = under_budget(net, None, False)
    found, again, *_ = under_budget(net, 1 if checkpointed else 4000, checkpointed)
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
    for key in sums:
        torch.testing.assert_close(again[key], sums[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["eager", "modules", "grouped", "unstacked", "scattered_back", "split_and_back"])
def test_the_budget_is_kept_where_blocks_can_run_again(name):
    """Of checkpointed experts nothing is held but norms, for the loop over slices of a stack too."""
    net = experts(name)
    net.last.requires_grad_(False)
    assert not any("two backwards" in line for line in under_budget(net, None, True)[2])
    *_, plan, held = under_budget(net, 1, True)
    rows = [line for line in plan if "layers." in line]
    assert len(rows) > 8 and all("two backwards" in row for row in rows), plan
    assert held == len(rows) * SIZE.samples * 8
