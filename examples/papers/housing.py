"""California Housing: regression by Adam in batches of 256, with local, global and no clipping; 30 runs each.

    python examples/papers/housing.py --data DIR --seeds 30 [--quick] [--plots DIR]

DIR holds california_housing.csv.gz: the 20,640 x 8 table of scikit-learn's fetch_california_housing and its target,
with a line of names. The paper's network, noise and learning rates are not known to us; ours were chosen by a few
runs on this data, which the epsilon does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fastdp
from examples.papers import common, regression
from examples.papers.regression import Plan, Way

FILE = "california_housing.csv.gz"
WHERE = "Write it with scikit-learn: fetch_california_housing(as_frame=True).frame.to_csv(PATH, index=False)"
PLAN = Plan(
    "California Housing",
    (Way("local", "local", 1.0, 1e-3), Way("global", "global", 10.0, 1e-3), Way("not private", "", 0.0, 1e-3)),
    fastdp.DPAdam, torch.optim.Adam, batch=256, epochs=10, sigma=1.0, width=32,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, list[list[float]]]:
    """Run, print, write rows and the picture."""
    options = common.parser(__doc__ or "").parse_args(arguments)
    options.stem = "housing"
    _, numbers = regression.read(regression.data(options, FILE, WHERE), ",")
    return regression.main(PLAN, options, regression.split(numbers))


if __name__ == "__main__":
    main()
