"""Random programs of tensor operations around trained layers, whose sizes coincide as often as not.

A program is a list of steps; a step takes the tensors made so far and gives another, or writes into one of them. It is
drawn by running it, so every step fits; it can be run again on other samples.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from .layouts_steps import KINDS, RISKY, D, Step, layer

NO_PROGRAM = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, ZeroDivisionError)
LARGEST = 600  # elements


class Model(nn.Module):
    """Runs a program."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.scale, self.table = nn.Parameter(torch.randn(D)), nn.Embedding(7, D)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        pool = [x]
        for step in self.steps:
            out = step(self, pool)
            if out is not None:
                pool.append(out)
        return pool[-1]


def draw(seed: int) -> tuple[Model, Tensor]:
    """A model of a random program, and a batch for it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch = rng.choice([2, 3, 3, 3, 4])
    sizes = [rng.choice([batch, D, D, 2, 4]) for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))]
    x = torch.randn(batch, *sizes, D, dtype=torch.double)
    model = Model([]).double()
    length, tries, layers = rng.choice([2, 3, 3, 4, 5, 6, 7]), 0, rng.choice([0, 0, 0, 1, 2])
    with torch.no_grad():
        pool = [x]
        while len(model.steps) < length and tries < 60:
            tries += 1
            makes = layer if len(model.steps) == layers or rng.random() < 0.12 else rng.choice(KINDS + RISKY)
            try:
                step = makes(rng, pool)
                out = step(model, list(pool))
            except NO_PROGRAM:
                continue
            good = isinstance(out, Tensor) and out.is_floating_point() and 0 < out.numel() <= LARGEST
            if good and out.dim() <= 4 and bool(out.isfinite().all()):
                pool.append(out)
                model.steps.append(step)
    model.steps.append(last if pool[-1].dim() == 0 or pool[-1].size(-1) != D else last_layer)
    return model, x


def last(m: Any, p: list[Tensor]) -> Tensor:
    return torch.tanh(p[-1]) * m.scale[:1]


def last_layer(m: Any, p: list[Tensor]) -> Tensor:
    return m.b(torch.tanh(p[-1]))
