"""How far a batch's clipped sum moves when one sample is removed: at most the clipping norm R, if fastdp is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fastdp

R = 0.1


def clipped_sum(model: nn.Module, *args: Any) -> Tensor:
    """The clipped sum of squares' gradients, flat."""
    engine = fastdp.PerSampleGradients(model)
    try:
        model(*args).square().flatten(1).sum(1).mean().backward()
        factors = (R / engine.norms()).clamp(max=1)
        return torch.cat([part.flatten().clone() for part in engine.clipped_sum(factors).values()])
    finally:
        engine.detach()
        model.zero_grad()


def sensitivity(model: nn.Module, whole: Sequence[Any], less: Iterable[Sequence[Any]]) -> float:
    """The largest |sum(batch) - sum(batch without one)| / R. whole: the model's arguments; less: each time without."""
    state = copy.deepcopy(model.state_dict())
    full, worst = clipped_sum(model, *whole), 0.0
    for args in less:
        model.load_state_dict(state)
        worst = max(worst, float((full - clipped_sum(model, *args)).norm()) / R)
    return worst


def of_rows(model: nn.Module, x: Tensor) -> float:
    """The sensitivity of a model of one tensor, a row a sample."""
    rows = range(len(x))
    return sensitivity(model, (x,), [(x[[k for k in rows if k != i]],) for i in rows])


class Between(nn.Module):
    """A layer, any function of the model and its result, and a layer."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], width: int = 4) -> None:
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(width, width), nn.Linear(width, 3)
        self.kept: Tensor
        self.register_buffer("kept", torch.zeros(8, width))
        self.frozen = nn.Parameter(torch.randn(width, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self, self.a(x)))
