"""MNIST by a small CNN, privately: clipping norms small and large, local and global; accuracy and calibration.

    python examples/papers/mnist_cnn.py --data DIR [--quick] [--full] [--cases "local, R = 1"] [--plots DIR]
        [--device cuda] [--checkpoints DIR]

Bu et al.: batch 256, sigma 1.1, (2.32, 1e-5)-DP by GDP, which 60 epochs cost; R = 1 at rate 0.15, R = 210 at rate
0.0007. The sweep of R changes nothing but R. Its values are ours, as the text does not have those of the figure.
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


SWEEP = (10.0, 50.0, 100.0, 420.0, 1000.0)  # beside 210
CASES = (
    Case("local, R = 1", "local", 1.0, 0.15),
    Case("global, R = 210", "global", 210.0, 0.0007),
    Case("local, R = 210", "local", 210.0, 0.0007),
    Case("not private", "none", None, 0.15),
    # the rate 0.0007 adds up to 9.84 in 60 epochs: as 197 steps at 0.05 do
    Case("not private, 197 steps", "none", None, 0.05, epochs=0.8406, more=True),
    *(Case(f"global, R = {R:g}, rate 0.0007", "global", R, 0.0007, more=True) for R in SWEEP),
    *(Case(f"local, R = {R:g}, rate 0.0007", "local", R, 0.0007, more=True) for R in SWEEP),
)
SETTING = Setting("MNIST CNN", network, common.mnist, CASES, 256, 60, 1.1, 1e-5, 2, seeds=5)


def main(arguments: Sequence[str] | None = None) -> list[common.Row]:
    """Run what the command line asks for; returns the rows written."""
    return classify.main(SETTING, __doc__ or "", "mnist_cnn", arguments)


if __name__ == "__main__":
    main()
