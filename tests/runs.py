"""A small model, its data and steps, for the tests of optimizers."""

from __future__ import annotations

import torch
import torch.nn as nn


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def data(n=6, seed=1):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def backward(model, x):
    model(x).square().sum(1).mean().backward()


def steps(optimizer, model, n):
    for _ in range(n):
        backward(model, data())
        optimizer.step()
        optimizer.zero_grad()
