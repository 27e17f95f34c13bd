"""The networks of the loss paper's Tables 1 and 2, for images."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def _tanh(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """An activation after each layer."""
    return [module for layer in layers for module in (layer, nn.Tanh())]


def end_to_end() -> nn.Sequential:
    """Table 1, 26,010 parameters, for images [1, 28, 28]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Flatten(),
        nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


def end_to_end_cifar() -> nn.Sequential:
    """Table 2, 550,570 parameters, for images [3, 32, 32]."""
    layers: list[nn.Module] = []
    for before, channels in ((3, 32), (32, 64), (64, 128)):
        layers += _tanh([nn.Conv2d(before, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)])
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), *_tanh([nn.Linear(2048, 128)]), nn.Linear(128, 10))
