"""What a run must have done: samples one at a time in float64, clipped by hand, plain SGD."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

R, EXPECTED, RECORDS = 0.3, 10, 40


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def records():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        3 * torch.randn(RECORDS, 4, generator=generator), torch.randint(0, 3, (RECORDS,), generator=generator)
    )


class Loop:
    """A run by hand beside the real one: `see` each physical batch, `step` where a logical batch ends."""

    def __init__(self, model, lr=1.0):
        self.model, self.lr = copy.deepcopy(model).double(), lr
        self.steps, self._sums = 0, {}

    def see(self, x, y):
        for i in range(len(x)):
            self.model.zero_grad()
            F.cross_entropy(self.model(x[i : i + 1].double()), y[i : i + 1]).backward()
            grads = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
            for name, grad in grads.items():
                self._sums[name] = self._sums.get(name, 0) + grad * min(1.0, R / float(norm))

    def step(self):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p -= self.lr * self._sums.get(name, 0) / EXPECTED
        self._sums, self.steps = {}, self.steps + 1

    def assert_equal(self, model, tolerance=1e-5):
        for (name, a), b in zip(self.model.named_parameters(), model.parameters(), strict=True):
            error = (a - b.double()).detach().norm() / a.detach().norm()
            assert float(error) < tolerance, (name, float(error))
