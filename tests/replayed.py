"""Models of checkpointed blocks for the tests of two backwards (test_replay*.py)."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastdp import PerSampleGradients

B, T, D, V = 5, 7, 16, 20
Names = tuple[str, ...]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(3 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * scale


class Model(nn.Module):
    def __init__(self, layers: int = 3, block: type[nn.Module] = Block, checkpointed: bool = True) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(V, D), nn.ModuleList(block() for _ in range(layers))
        self.head, self.checkpointed = nn.Linear(D, V), checkpointed

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, 0.5, use_reentrant=False) if self.checkpointed else block(x, 0.5)
        return self.head(x)


def backward(model: nn.Module, ids: Tensor) -> None:
    torch.manual_seed(3)  # of dropout
    losses = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape).mean(1)
    losses.mean().backward()


def run(model: nn.Module, ids: Tensor, budget: int | None) -> tuple[Tensor, dict[str, Tensor], str]:
    engine = PerSampleGradients(model, memory_budget=budget)
    try:
        backward(model, ids)
        norms = engine.norms()
        return norms, engine.clipped_sum((0.1 / norms).clamp(max=1)), engine.explain()
    finally:
        engine.detach()


def models(**options) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Model(**options)
    plain = copy.deepcopy(model)
    plain.checkpointed = False
    return model, plain, torch.randint(0, V, (B, T))


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7)


def assert_two_backwards(
    model: nn.Module, ids: Tensor, again: tuple[str, ...] = (), kept: tuple[str, ...] = ()
) -> None:
    """Norms and sums are the same with and without a second backward, which these rows of the plan have or have not."""
    norms, sums, plan = run(model, ids, None)
    again_norms, again_sums, replayed = run(model, ids, 1)
    assert "two backwards" not in plan
    twice = [line for line in replayed.splitlines() if "two backwards" in line]
    assert all(any(name in line for line in twice) for name in again)
    assert not any(name in line for line in twice for name in kept)
    torch.testing.assert_close(again_norms, norms)
    close(again_sums, sums)


class Penalised(Model):
    """Blocks that keep a tensor from within; `losses` add a penalty on it."""

    def __init__(self, within: Callable[[nn.Module, Tensor], Tensor]) -> None:
        class Within(Block):
            def forward(self, x: Tensor, scale: float) -> Tensor:
                return x + self.dropout(within(self, x)) * scale

        super().__init__(2, Within)

    def losses(self, ids: Tensor) -> Tensor:
        torch.manual_seed(3)  # of dropout
        first = F.cross_entropy(self(ids).flatten(0, 1), ids.flatten(), reduction="none").view(ids.shape).mean(1)
        return first + 3 * sum(block.kept.square().reshape(len(ids), -1).mean(1) for block in self.blocks)


def penalised(model: Penalised, ids: Tensor, budget: int | None) -> tuple[Tensor, dict[str, Tensor], str]:
    engine = PerSampleGradients(model, memory_budget=budget)
    try:
        model.losses(ids).mean().backward()
        norms = engine.norms()
        return norms, engine.clipped_sum((0.1 / norms).clamp(max=1)), engine.explain()
    finally:
        engine.detach()
