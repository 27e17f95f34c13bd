"""Wine Quality (red): regression by full batch gradient descent, with local, global and no clipping; 30 runs each.

    python examples/papers/wine.py --data DIR --seeds 30 [--quick] [--plots DIR]

DIR holds winequality-red.csv (1,599 x 11) of https://archive.ics.uci.edu/dataset/186/wine+quality. The paper's
network, noise and learning rates are not known to us; ours were chosen by a few runs on this data, which the epsilon
does not count. Every record is in every batch: sampling saves no privacy here.
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

FILE = "winequality-red.csv"
WHERE = "It is the red wine of https://archive.ics.uci.edu/dataset/186/wine+quality (CC BY 4.0)."
PLAN = Plan(
    "Wine Quality",
    (Way("local", "local", 1.0, 0.3), Way("global", "global", 10.0, 0.015), Way("not private", "", 0.0, 0.1)),
    fastdp.DPSGD, torch.optim.SGD, batch=0, epochs=300, sigma=20.0, width=32,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> dict[str, list[list[float]]]:
    """Run, print, write rows and the picture."""
    options = common.parser(__doc__ or "").parse_args(arguments)
    options.stem = "wine"
    _, numbers = regression.read(regression.data(options, FILE, WHERE), ";")
    return regression.main(PLAN, options, regression.split(numbers))


if __name__ == "__main__":
    main()
