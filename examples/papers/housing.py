"""California Housing: regression by Adam in batches of 256, with a small and a large R, and none; 30 runs each.

    python examples/papers/housing.py --data DIR --full [--quick] [--seeds N] [--plots DIR] [--device cuda]
        [--checkpoints DIR]

DIR holds california_housing.csv.gz: the 20,640 x 8 table of scikit-learn's fetch_california_housing and its target,
with a line of names. Bu et al., C.4: 18,576 records to train on, R = 1, rate 0.0002, 50 epochs (3,650 steps). The large
R, ten times that, is ours.
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
    "California Housing", "california_housing.csv.gz",
    "Write it with scikit-learn: fetch_california_housing(as_frame=True).frame.to_csv(PATH, index=False)", ",",
    (Way("local, R = 1", "local", 1.0, 2e-4), Way("local, R = 10", "local", 10.0, 2e-4),
     Way("global, R = 10", "global", 10.0, 2e-4), Way("not private", "", 0.0, 2e-4)),
    fastdp.DPAdam, torch.optim.Adam, batch=256, epochs=50, sigma=1.0, share=0.9,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, list[list[float]]]:
    """Run, print, write rows and the picture."""
    return regression.main(PLAN, __doc__ or "", "housing", arguments)


if __name__ == "__main__":
    main()
