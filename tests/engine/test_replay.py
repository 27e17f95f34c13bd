"""Two backwards for checkpointed blocks under a memory budget: the same norms and sums, less held, never more norm."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastdp import PerSampleGradients

from ..replayed import B, D, Model, T, V, assert_two_backwards, backward, close, models, run


@pytest.mark.parametrize("autocast", [False, True])
def test_the_same_norms_and_sums(autocast: bool) -> None:
    model, plain, ids = models()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        norms, sums, plan = run(plain, ids, None)
        again_norms, again, replayed = run(model, ids, 1)
    assert "two backwards" in replayed and "two backwards" not in plan
    torch.testing.assert_close(again_norms, norms)
    close(again, sums)


def test_only_beyond_the_budget() -> None:
    model, _, ids = models()
    _, _, plan = run(model, ids, None)
    assert "two backwards" not in plan
    _, _, plan = run(model, ids, 10**9)
    assert "two backwards" not in plan
    _, _, half = run(model, ids, 40_000)
    rows = [line for line in half.splitlines() if "two backwards" in line]
    assert 0 < len(rows) < 18 and all("blocks.2" not in row for row in rows), half  # the last block fits


def test_holds_less() -> None:
    model, _, ids = models(layers=6)

    def held(budget: int) -> int:
        engine = PerSampleGradients(model, memory_budget=budget)
        backward(model, ids)
        engine.detach()
        return engine.planner.held

    assert held(1) < held(1 << 40) / 4


def test_a_block_called_twice_is_kept() -> None:
    class Twice(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for _ in range(2):
                x = checkpoint(self.blocks[0], x, 0.5, use_reentrant=False)
            return self.head(checkpoint(self.blocks[1], x, 0.5, use_reentrant=False))

    torch.manual_seed(0)
    assert_two_backwards(Twice(2), torch.randint(0, V, (B, T)), again=("blocks.1",), kept=("blocks.0",))


def test_a_parameter_used_elsewhere_too_is_kept() -> None:
    class Shared(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + F.linear(self.embedding(ids), self.blocks[0].up.weight)[..., :V]

    torch.manual_seed(0)
    assert_two_backwards(Shared(2), torch.randint(0, V, (B, T)), kept=("blocks.0.up.weight",))


def test_a_nan_sample_stays_alone() -> None:
    class Poisoned(Model):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, 0.5, use_reentrant=False)
            return self.head(x)

    torch.manual_seed(0)
    model, x = Poisoned(2).eval(), torch.randn(B, T, D)
    without = x.clone()
    x[2, 3] = float("nan")

    def sums(data: Tensor) -> dict[str, Tensor]:
        engine = PerSampleGradients(model, memory_budget=1, loss_reduction="sum")
        model(data).square().sum().backward()
        norms = engine.norms()
        c = torch.where(norms.isfinite(), 0.1 / norms, torch.zeros_like(norms))
        c[2] = 0
        found = engine.clipped_sum(c)
        engine.detach()
        return found

    clean, spoiled = sums(without), sums(x)
    assert all(torch.isfinite(s).all() for s in spoiled.values())
    close(clean, spoiled)


@pytest.mark.parametrize("budget", [0, -1, True])
def test_budgets_are_positive(budget: int) -> None:
    with pytest.raises(ValueError, match="memory_budget"):
        PerSampleGradients(nn.Linear(2, 2), memory_budget=budget)
