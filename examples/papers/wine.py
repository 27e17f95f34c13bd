"""Wine Quality (red): regression by full batch gradient descent, with a small and a large R, and none; 30 runs each.

    python examples/papers/wine.py --data DIR --full [--quick] [--seeds N] [--plots DIR] [--device cuda]
        [--checkpoints DIR]

DIR holds winequality-red.csv (1,599 x 11) of https://archive.ics.uci.edu/dataset/186/wine+quality. Bu et al., C.4:
1,279 records to train on, R = 2, rate 0.03 (0.001 without privacy), 2,000 steps. The large R is ours: ten times R at a
tenth of the rate, so that the noise in the weights is the same. Every record is in every batch: sampling saves no
privacy here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fastdp
from examples.papers import regression
from examples.papers.regression import Plan, Way

PLAN = Plan(
    "Wine Quality", "winequality-red.csv",
    "It is the red wine of https://archive.ics.uci.edu/dataset/186/wine+quality (CC BY 4.0).", ";",
    (Way("local, R = 2", "local", 2.0, 0.03), Way("local, R = 20", "local", 20.0, 0.003),
     Way("global, R = 20", "global", 20.0, 0.003), Way("not private", "", 0.0, 0.001)),
    fastdp.DPSGD, torch.optim.SGD, batch=0, epochs=2000, sigma=35.0, share=0.8,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, list[list[float]]]:
    """Run, print, write rows and the picture."""
    return regression.main(PLAN, __doc__ or "", "wine", arguments)


if __name__ == "__main__":
    main()
