"""MNIST by a small CNN, privately: clipping norms small and large, local and global; accuracy and calibration.

    python examples/papers/mnist_cnn.py --data DIR [--quick] [--seeds 3] [--cases "local, R = 1"] [--plots DIR]

Bu et al. 2023: batch 256, 60 epochs, sigma 1.1, (2.32, 1e-5)-DP by GDP. Learning rates are of the mean of the clipped
gradients: R times the rate is about 0.15 everywhere, so that every case adds noise of the same size to the weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.papers import classify, common
from examples.papers.classify import Case, Setting


def network() -> nn.Module:
    """Images [B, 1, 28, 28] -> logits [B, 10]; the network of Opacus's MNIST example: 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


CASES = (
    Case("local, R = 1", "local", 1.0, 0.15),
    Case("global, R = 210", "global", 210.0, 0.0007),
    Case("local, R = 210", "local", 210.0, 0.0007),
    Case("not private", "none", None, 0.15),
    # the rate 0.0007 adds up to 9.84 in 60 epochs: as 197 steps at 0.05 do
    Case("not private, 197 steps", "none", None, 0.05, epochs=0.8406),
)
SETTING = Setting("MNIST CNN", network, common.mnist, CASES, 256, 60, 1.1, 1e-5, 2.32, 2)


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Run what the command line asks for; returns the rows written."""
    return classify.main(SETTING, classify.options_of(__doc__ or "", "mnist_cnn", SETTING, arguments))


if __name__ == "__main__":
    main()
