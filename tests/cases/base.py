"""How a case is written: models as a function and its parts, a loss, and the list of all cases.

A case builds (model, batch, losses); losses(model, batch) gives one loss a sample. Sizes are odd, and where
it can deceive, another dimension has the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

B, T, D, V = 3, 5, 8, 11
Built = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
CASES: dict[str, Callable[[], Built]] = {}


def case(build: Callable[[], Built]) -> Callable[[], Built]:
    CASES[build.__name__] = build
    return build


def named(name: str, build: Callable[[], Built]) -> None:
    assert name not in CASES, name
    CASES[name] = build


def square(model: nn.Module, batch: Any) -> Tensor:
    """A loss that weighs every output differently, so that no gradient is symmetric."""
    out = model(*batch) if isinstance(batch, tuple) else model(batch)
    out = out.flatten(1)
    return (out * torch.linspace(0.5, 1.5, out.size(1), dtype=out.dtype, device=out.device)).square().mean(1)


def shake(model: nn.Module) -> nn.Module:
    """Away from zeros and ones, so that every parameter has a gradient of its own."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype))
    return model


def build(name: str) -> Built:
    torch.manual_seed(3)
    model, batch, losses = CASES[name]()
    return shake(model), batch, losses


class Net(nn.Module):
    """A forward given as a function of (module, *inputs)."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def P(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


def net(forward: Callable[..., Tensor], *inputs: Tensor, **parts: Any) -> Built:
    return Net(forward, **parts), inputs, square


def ids(*shape: int, low: int = 0, high: int = V) -> Tensor:
    return torch.randint(low, high, shape)
