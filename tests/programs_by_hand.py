"""Small programs with one layer, and what one sample changes in their clipped sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fastdp

D, C = 5, 4


class WithLoss(nn.Module):
    """One layer, and a loss within the model."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(D, C), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layer(x), labels)


def assert_norms_of_single_samples(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    """The engine's norms, of one backward through the model's loss, are those of each sample by itself."""
    engine = fastdp.PerSampleGradients(model)
    model(x, labels).backward()
    found = engine.norms()
    engine.detach()
    for i in range(len(x)):
        model.zero_grad()
        model(x[i : i + 1], labels[i : i + 1]).backward()
        want = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None) ** 0.5
        assert abs(float(found[i]) - float(want)) < 1e-4 * float(want) + 1e-6


class Program(nn.Module):
    """One layer, and a forward to choose."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(D, C)
        self.w = nn.Parameter(torch.randn(20, C) / 2)
        self.token = nn.Parameter(torch.randn(1, C))
        self.register_buffer("table", torch.randn(20, C))
        self.program = forward

    def forward(self, x: Tensor) -> Any:
        return self.program(self, self.layer(x))


def squares(out: Tensor, labels: Tensor) -> Tensor:
    return out.square().sum(1).mean()


def run(forward: Any, loss: Any = squares, sizes: tuple[int, ...] = (6,), reduction: str = "mean") -> list[Tensor]:
    """Norms of a few backwards, with a fresh engine."""
    model = Program(forward)
    engine = fastdp.PerSampleGradients(model, loss_reduction=reduction)
    found = []
    torch.manual_seed(1)
    for size in sizes:
        x, labels = torch.randn(size, D), torch.randint(0, C, (size,))
        loss(model(x), labels).backward()
        found.append(engine.norms())
    engine.detach()
    return found


def truth(forward: Any, loss: Any = squares, size: int = 6) -> Tensor:
    """Norms of the gradients of one sample at a time, float64, for `run` of one backward."""
    model = Program(forward).double()
    torch.manual_seed(1)
    x, labels = torch.randn(size, D).double(), torch.randint(0, C, (size,))
    norms = []
    for i in range(size):
        model.zero_grad()
        loss(model(x[i : i + 1]), labels[i : i + 1]).backward()
        norms.append(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None) ** 0.5)
    return torch.stack([torch.as_tensor(n) for n in norms])
