"""What the examples on scikit-learn's digits share: options, processes, the data, two small networks, and
their accuracy."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def parser(description: str | None) -> argparse.ArgumentParser:
    """--quick and --epsilon."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="a few epochs instead of 30")
    made.add_argument("--epsilon", type=float, default=3.0)
    return made


def join() -> torch.device:
    """Join the other processes that torchrun started; this one's device."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")


def digits(flat: bool = False) -> tuple[TensorDataset, Tensor, Tensor]:
    """1,437 images to train on, and 360 with their labels to test: the same, in the same order, on every rank.

    An image is [1, 8, 8], or [64] if flat.
    """
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    x = x.flatten(1) if flat else x
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    return TensorDataset(x[train], y[train]), x[test], y[test]


def convolutions() -> nn.Sequential:
    """A network for images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Block(nn.Module):
    """A block with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(width: int = 64) -> nn.Sequential:
    """A network for flat images."""
    return nn.Sequential(nn.Linear(64, width), Block(width), Block(width), nn.LayerNorm(width), nn.Linear(width, 10))


def accuracy(model: nn.Module, x: Tensor, y: Tensor, device: torch.device) -> float:
    """On all processes at once, where each has a part of the model."""
    with torch.no_grad():
        return float((model.eval()(x.to(device)).argmax(1).cpu() == y).float().mean())
