"""DP-FTRL's accounting against the noise that is really in the weights: covariances, inverted, of random programs.

The gradients are zero, and every draw of noise is a unit vector of its own. So what a step moves the weights by says
which draws are in it, with which weights. From the covariance of the noise of all steps, numpy computes what a record's
gradients can be told by: of the steps S that it takes part in, with bounds R_i, the mechanism is Gaussian with at most
mu^2 = sum over S of |inverse covariance|_ij R_i R_j.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastdp.errors import StepError
from fastdp.mechanisms import DPFTRL, ftrl_loader, nodes_over, variance_of
from fastdp.mechanisms.participation import runs_of
from fastdp.mechanisms.tree import TreeNoise

pytestmark = pytest.mark.filterwarnings("ignore")

DRAWS, RECORDS = 600, 11
Draw = tuple[bytes, int, int]


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> dict[Draw, int]:
    """Every draw is a unit vector: the same one if key, step and height are the same."""
    drawn: dict[Draw, int] = {}

    def draw(self: TreeNoise, like: Tensor, std: float, end: int, height: int, offset: int) -> Tensor:
        place = drawn.setdefault((self.key, end, height), len(drawn))
        out = torch.zeros(DRAWS, dtype=torch.float64)
        out[place] = std
        return out.view_as(like)

    monkeypatch.setattr(TreeNoise, "_draw", draw)
    return drawn


def spent(rows: list[np.ndarray], places: list[int], bounds: list[float]) -> float:
    """mu^2 of the record that is told the most of."""
    noise = np.stack(rows)
    inverse = np.abs(np.linalg.inv(noise @ noise.T)) * np.outer(bounds, bounds)
    each = [[step for step, other in enumerate(places) if other == place] for place in set(places)]
    return float(max(inverse[np.ix_(steps, steps)].sum() for steps in each))


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 13, 33])
def test_a_tree_tells_no_more_than_is_counted(reduced: bool, steps: int, units: dict[Draw, int]) -> None:
    source, rows = TreeNoise(None, reduced), []
    for t in range(1, steps + 1):
        row = torch.zeros(DRAWS, dtype=torch.float64)
        source.add_tree_({0: row}, {0: 0}, 1.0)
        source.step += 1
        rows.append(row.numpy())
        assert np.square(np.sum(rows, 0)).sum() == pytest.approx(variance_of(t, reduced))
    found = spent(rows, list(range(steps)), [1.0] * steps)
    assert found <= nodes_over(steps) + 1e-9
    assert found > 0.4 * nodes_over(steps)  # the bound is not idle, nor is noise lost


class Program:
    """Steps of DP-FTRL in an order that a hostile user chose, and what each of them released."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        data = torch.utils.data.TensorDataset(torch.zeros(RECORDS, DRAWS, dtype=torch.float64))
        self.data, self.model = data, nn.Linear(DRAWS, 1, bias=False, dtype=torch.float64)
        self.reduced = draw.random() < 0.5
        self.optimizer, self.loader = self.made(), ftrl_loader(data, batch_size=1)
        self.rows: list[np.ndarray] = []
        self.places: list[int] = []
        self.bounds: list[float] = []
        self.states: list[Any] = []

    def made(self) -> DPFTRL:
        return DPFTRL(self.model, lr=1.0, noise_multiplier=2.0, variance_reduction=self.reduced)

    def train(self) -> None:
        steps = self.draw.randint(1, RECORDS + 3)
        if self.draw.random() < 0.7:  # else a pass begins
            self.loader.load_state_dict(self.loader.state_dict())
        while steps:
            for (x,) in self.loader:
                before, place = self.model.weight.detach().clone(), self.loader.state_dict()["step"] - 1
                self.model(x).sum(1).mean().backward()
                try:
                    self.optimizer.step()
                except StepError as error:
                    assert "beginning of this pass" in str(error)
                    self.optimizer.set_clipping(max_grad_norm=1.0)  # between passes, which the next one begins
                    self.optimizer.noise_multiplier = 2.0
                    return
                self.optimizer.zero_grad()
                self.rows.append((self.model.weight.detach() - before).flatten().numpy())
                self.places.append(place)
                self.bounds.append(self.optimizer.max_grad_norm)
                steps -= 1
                if not steps:
                    break

    def jump(self) -> None:
        self.loader.load_state_dict({"pass": self.draw.randint(0, 3), "step": self.draw.randint(0, RECORDS - 1)})

    def resume(self) -> None:
        """In another process."""
        state, place = copy.deepcopy(self.optimizer.state_dict()), self.loader.state_dict()
        self.optimizer.detach()
        self.optimizer, self.loader = self.made(), ftrl_loader(self.data, batch_size=1)
        self.optimizer.load_state_dict(state)
        self.loader.load_state_dict(place)

    def save(self) -> None:
        self.states.append(copy.deepcopy(self.optimizer.state_dict()))

    def go_back(self) -> None:
        """Load an old state into the optimizer that has made more steps since."""
        if self.states:
            self.optimizer.load_state_dict(self.draw.choice(self.states))

    def other_noise(self) -> None:
        """Most times, noise of the same size for longer or shorter gradients."""
        factor = 0.25 if self.optimizer.max_grad_norm > 1 else 4.0
        self.optimizer.set_clipping(max_grad_norm=factor * self.optimizer.max_grad_norm)
        self.optimizer.noise_multiplier *= self.draw.choice([1.0, 1 / factor, 1 / factor, 1 / factor])
        self.train()

    def run(self, actions: int) -> None:
        self.train()
        for _ in range(actions):
            self.draw.choice(
                [self.train, self.train, self.jump, self.resume, self.save, self.go_back, self.other_noise]
            )()


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_tell_no_more_than_is_counted(seed: int, units: dict[Draw, int]) -> None:
    program = Program(random.Random(seed))
    program.run(8)
    counted = sum(nodes / sigma**2 for sigma, _, nodes in runs_of(program.optimizer.trees))
    assert 0 < spent(program.rows, program.places, program.bounds) <= counted * (1 + 1e-9)
    assert sum(tree.steps for tree in program.optimizer.trees) == len(program.rows)
    program.optimizer.detach()
