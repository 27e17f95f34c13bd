"""What the cases of other libraries are made of (coverage_libraries.py, coverage_vision.py)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .coverage_draws import without_dropout
from .coverage_losses import row_losses
from .coverage_truth import Built, Case, Sizes, shake

Make = Callable[[], nn.Module]
Inputs = Callable[[Sizes], dict[str, Tensor]]
Call = Callable[[nn.Module, dict[str, Tensor]], Tensor]


def plainly(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The tensor that comes out, or the first one of what does."""
    out = model(*batch.values())
    out = getattr(out, "sample", out)
    return out[0] if isinstance(out, tuple | list) else out


def library_case(name: str, make: Make, inputs: Inputs, call: Call = plainly) -> Case:
    def build(sizes: Sizes) -> Built:
        torch.manual_seed(7)
        model = without_dropout(shake(make()))
        torch.manual_seed(5)
        batch = {**inputs(sizes), "seed": torch.arange(3, 3 + sizes.batch)}

        def losses(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            out = call(model, {name: value for name, value in batch.items() if name != "seed"})
            return row_losses(out, batch["seed"])

        return model, batch, losses

    return Case(name, build)


def image(size: int = 32, channels: int = 3) -> Inputs:
    return lambda s: {"x": torch.randn(s.batch, channels, size, size)}


def noisy_image(channels: int, size: int, **conditions: int | tuple[int, ...]) -> Inputs:
    """An image, a step of diffusion, and conditions of these shapes."""

    def make(s: Sizes) -> dict[str, Tensor]:
        shapes = {n: (c,) if isinstance(c, int) else c for n, c in conditions.items()}
        more = {name: torch.randn(s.batch, *shape) for name, shape in shapes.items()}
        return {"x": torch.randn(s.batch, channels, size, size), "t": torch.arange(1, 1 + s.batch), **more}

    return make


def words(length: int | None = None) -> Inputs:
    return lambda s: {"x": torch.randint(0, 23, (s.batch, length or s.tokens))}


def features(*shape: int) -> Inputs:
    return lambda s: {"x": torch.randn(s.batch, *shape)}


def module(path: str) -> Any:
    return importlib.import_module(path)
