"""Theorem 1 of the convergence paper: under layerwise clipping with a small R the loss may rise, and need not end at 0.

    python examples/papers/layerwise_loss.py [--quick] [--networks 20] [--steps 8000]

No data is read, and there is no noise: gradient descent in float64 with a small step on the clipped gradients of
small random networks (those of `python -m fastdp ntk`). R goes from a hundredth to a hundred times a network's median
norm, flat and layerwise. Rows: the share of networks whose loss rises (in a step of which the kernel predicts it),
the largest rise above the least loss before (as a share of it), the share that reaches a thousandth of the first.

"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.papers import common
from fastdp.commands.ntk_table import ZERO, Networks, Row, descend, draw
from fastdp.utils.progress_bar import Bar

RATIOS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)  # R over the median norm before training
QUICK = (0.1, 1.0, 100.0)
STYLES = ("flat", "layerwise")


class Curve(NamedTuple):
    """Mean losses [T, S] of all networks before each step; rises [S]: whether one rose where K said so."""

    losses: Tensor
    rises: Tensor


def curve(nets: Networks, row: Row, steps: int) -> Curve:
    """Train without noise, each network until ZERO of its first loss."""
    weights, losses = nets.weights, []
    rises, rising = (torch.zeros(len(nets.y), dtype=torch.bool) for _ in range(2))
    going = torch.ones(len(nets.y), dtype=torch.bool)
    bar = Bar(steps)
    for step in range(steps + 1):
        found = descend(nets, row, weights, going)
        if losses:
            rises |= rising & (found.losses > losses[-1])
        losses.append(found.losses)
        going = going & (found.losses > ZERO * losses[0])
        rising = going & (found.cosine > 1e-9)
        keep = {name: going.view(-1, *[1] * (w.dim() - 1)) for name, w in weights.items()}
        weights = {name: torch.where(keep[name], w, weights[name]) for name, w in found.weights.items()}
        bar.at(step, row.name)
        if not going.any():
            break
    return Curve(torch.stack(losses), rises)


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, float], Curve]:
    """Train all, print, write rows; returns the curves of the last seed by (style, R over the median)."""
    made = common.parser(__doc__ or "", "layerwise_loss")
    made.add_argument("--networks", type=int, help="of each seed (default: 20; quick: 8)")
    made.add_argument("--steps", type=int, help="at most (default: 8000; quick: 2000)")
    options = made.parse_args(arguments)
    networks = options.networks or (8 if options.quick else 20)
    steps = options.steps or (2000 if options.quick else 8_000)
    mode = "quick" if options.quick else "full" if (networks, steps) == (20, 8_000) else "short"
    curves: dict[tuple[str, float], Curve] = {}

    def run(style: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        nets = draw(networks, seed)
        for ratio in QUICK if options.quick else RATIOS:
            row, start = Row(f"{style}, R = {ratio:g} medians", "", "local", ratio, style, None), time.perf_counter()
            found = curves[style, ratio] = curve(nets, row, steps)
            metrics = {
                "share whose loss rises": float(found.rises.double().mean()),
                "largest rise": float((found.losses / found.losses.cummin(0).values).max()) - 1,
                "share that reaches zero": float((found.losses[-1] <= ZERO * found.losses[0]).double().mean()),
            }
            columns = {"train_records": 8, "steps": steps, "batch": 8, "sigma": 0.0, "clipping": "local",
                       "style": style, "seconds": time.perf_counter() - start}  # fmt: skip
            tell(mode, metrics, columns, case=row.name)

    setting = {"networks": networks, "steps": steps}
    common.drive(options, "Theorem 1, layerwise", dict.fromkeys(STYLES, setting), run)
    return curves


if __name__ == "__main__":
    main()
