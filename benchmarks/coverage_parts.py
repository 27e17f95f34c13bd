"""What home-made models are put together from: a module with a forward given as a function, and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .coverage_losses import row_losses
from .coverage_truth import Built, Case, Sizes, shake

D, V = 8, 23
BATCH_FIRST = "opacus: the first dimension of every module's input must be the batch"
Forward = Callable[..., Tensor]
MODELS: dict[str, Case] = {}


class Net(nn.Module):
    """A forward given as a function of (module, inputs)."""

    def __init__(self, forward: Forward, parts: dict[str, Any]) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def square(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return row_losses(model(*[v for k, v in batch.items() if k != "seed"]), batch["seed"])


def add(
    name: str, forward: Forward, inputs: Callable[[Sizes], list[Tensor]], outside: str = "", **parts: Callable[[], Any]
) -> None:
    """A case: parts are made after the seed is set; inputs are samples first."""

    def build(sizes: Sizes) -> Built:
        torch.manual_seed(7)
        model = Net(forward, {n: make() for n, make in parts.items()})
        batch = {f"x{i}": t for i, t in enumerate(inputs(sizes))}
        return shake(model).train(), {**batch, "seed": torch.arange(3, 3 + sizes.batch)}, square

    assert name not in MODELS, name
    MODELS[name] = Case(name, build, outside=outside)


def P(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(0.5 * torch.randn(shape))


def lin(i: int, o: int, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(i, o, bias=bias)


def rows(*shape: int) -> Callable[[Sizes], list[Tensor]]:
    return lambda s: [torch.randn(s.batch, *shape)]


def sequence(s: Sizes) -> list[Tensor]:
    return [torch.randn(s.batch, s.tokens, D)]


def ids(s: Sizes) -> list[Tensor]:
    return [torch.randint(0, V, (s.batch, s.tokens))]


def two(s: Sizes) -> list[Tensor]:
    return sequence(s) + sequence(s)


def images(s: Sizes) -> list[Tensor]:
    return [torch.randn(s.batch, s.batch, 8, 8)]  # as many channels as samples
