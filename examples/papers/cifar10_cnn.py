"""CIFAR-10 by a small CNN, privately: clipping norms small and large, flat and by layers; accuracy and calibration.

    python examples/papers/cifar10_cnn.py --data DIR [--quick] [--epochs 15 --same-epsilon] [--plots DIR]

Bu et al. 2023: batch 250, about 60 epochs, sigma 1.3, (1.96, 1e-5)-DP by GDP; R 1.5 at rate 0.05, R 75 at rate 0.0007.
The paper's network is not known to us: this is that of PyTorch's tutorial on CIFAR-10 (62,006 parameters).
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
    """Images [B, 3, 32, 32] -> logits [B, 10]: two 5x5 convolutions, three linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


CASES = (
    Case("local, R = 1.5", "local", 1.5, 0.05),
    Case("global, R = 75", "global", 75.0, 0.0007),
    Case("local by layers, R = 1.5", "local", 1.5, 0.05, "layerwise"),  # R of the whole gradient: R / sqrt(5) each
    Case("global by layers, R = 75", "global", 75.0, 0.0007, "layerwise"),
    Case("not private", "none", None, 0.05),
)
SETTING = Setting("CIFAR-10 CNN", network, common.cifar10, CASES, 250, 60, 1.3, 1e-5, 1.96, 1)


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Run what the command line asks for; returns the rows written."""
    return classify.main(SETTING, classify.options_of(__doc__ or "", "cifar10_cnn", SETTING, arguments))


if __name__ == "__main__":
    main()
