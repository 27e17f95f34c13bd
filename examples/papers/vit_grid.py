"""Learning rate x clipping norm on a pre-trained ViT: what private training makes of every pair, in accuracy and ECE.

    python examples/papers/vit_grid.py --data DIR [--quick] [--seeds 3] [--plots DIR]

Bu et al., Convergence and calibration of deep learning with differential privacy. The ViT is frozen and its features
are computed once; a linear head, or one with a hidden layer (flat and layerwise clipping), is trained by DP-SGD.
Where R is small, every gradient is clipped to the length R: the step is lr x R times a sum of unit vectors and noise,
so all pairs of the same lr x R train alike, and good ones lie on a diagonal. Where R is large, nothing is clipped: R
only scales the noise, and lr alone scales the signal. The privacy is the same in all cells.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root

import fastdp
from examples.papers import common
from examples.papers import pretrained as frozen
from examples.papers.pictures import Grid, grids, picture
from examples.papers.training import loader, logits_of, test_metrics, train

EXPERIMENT = "ViT lr x R grid, CIFAR-10"
EPSILON, DELTA = 2.0, 1e-5  # by PRV
DEV = 5000  # training images held out, on which the best cell is chosen
STEP = math.sqrt(10)  # from one lr or R to the next
RADII = tuple(0.1 * STEP**k for k in range(8))  # 0.1 to 316
RATES = tuple(1e-4 * STEP**k for k in range(12))  # 0.0001 to 31.6
SMALL, LARGE = 0.99, 0.01  # R is small where this share of gradients is longer, large where no more than that is


class Case(NamedTuple):
    head: str
    style: str

    def __str__(self) -> str:
        return f"{self.head} head, {self.style}"


CASES = (Case("linear", "flat"), Case("mlp", "flat"), Case("mlp", "layerwise"))


class Cell(NamedTuple):
    """One run: test metrics by name, and dev_accuracy, temperature, clipped (the share of gradients)."""

    case: str
    lr: float
    R: float
    seed: int
    metrics: dict[str, float]


def parser() -> common.Parser:
    """The options."""
    made = common.parser(__doc__ or "", "vit_grid")
    made.add_argument("--cases", nargs="+", choices=[str(case) for case in CASES], help="default: all")
    made.add_argument("--model", help="a ViT-S/14: folder or hub name; default: DINOv2's")
    made.add_argument("--cache", type=Path, help="keep the features in this file")
    made.add_argument("--records", type=int, default=45000, help="to train on; 5,000 more are held out")
    made.add_argument("--test-records", type=int, default=10000)
    made.add_argument("--batch", type=int, default=1000)
    made.add_argument("--epochs", type=int, default=10)
    return made


# ---------------------------------------------------------------------- data


def read(options: Any) -> frozen.Features:
    """Features of the images to train on, of those held out and of the test's. Exits with where to get them."""
    few = (options.records, DEV // 10 if options.quick else DEV, options.test_records)
    if options.cache is not None and options.cache.exists():
        kept = torch.load(options.cache, weights_only=True)
        if all(len(y) >= n for (_, y), n in zip(kept, few, strict=True)):
            return frozen.Features(*((x[:n], y[:n]) for (x, y), n in zip(kept, few, strict=True)))
        print(f"{options.cache} holds fewer images than asked for: made anew", flush=True)
    data = common.cifar10(options.data)
    body = frozen.load_vit(options.model)
    parts = ((data.x[DEV:], data.y[DEV:]), (data.x[:DEV], data.y[:DEV]), (data.x_test, data.y_test))
    parts = tuple((x[:n], y[:n]) for (x, y), n in zip(parts, few, strict=True))
    print(f"features of {sum(len(y) for _, y in parts):,} images", flush=True)
    made = [(frozen.vit_features(body, x * 0.25 + 0.5), y) for x, y in parts]  # 0 to 1, as the ViT takes them
    if options.cache is not None:
        torch.save(made, options.cache)
    return frozen.Features(*made)


def head_of(kind: str, width: int, seed: int, classes: int = 10) -> nn.Module:
    """A linear layer on normalised features [B, width], or one with 64 hidden units before it."""
    torch.manual_seed(seed)
    norm = nn.LayerNorm(width, elementwise_affine=False)
    if kind == "linear":
        made = nn.Sequential(norm, nn.Linear(width, classes))
    else:
        made = nn.Sequential(norm, nn.Linear(width, 64), nn.GELU(), nn.Linear(64, classes))
    nn.init.normal_(made[-1].weight, std=0.01)
    return made


# ---------------------------------------------------------------------- one cell


def temperature(logits: Tensor, labels: Tensor) -> float:
    """The T for which softmax(logits / T) has the least NLL (Guo et al. 2017): above 1 where confidence is too high.

    logits [N, C], labels [N]; found between 0.01 and 1000. The NLL is convex in 1 / T, so that this is the least.
    """
    wide = logits.detach().double()

    def slope(log_t: float) -> float:
        """Of the NLL by 1 / T: mean expected logit less mean logit of the label."""
        expected = ((wide / math.exp(log_t)).softmax(1) * wide).sum(1)
        return float((expected - wide.gather(1, labels[:, None])[:, 0]).mean())

    low, high = math.log(0.01), math.log(1000)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def train_cell(data: frozen.Features, case: Case, lr: float, R: float, seed: int, sigma: float, options: Any,
               noise_seed: int | None = None) -> tuple[Cell, float]:  # fmt: skip
    """One private run, and how many seconds it took. noise_seed: for tests, which voids the privacy.

    Raises FloatingPointError where the weights leave the range of floats.
    """
    x, y = data.train
    model = head_of(case.head, x.shape[1], seed)
    batches = loader(x, y, min(options.batch, len(y) // 4), seed=noise_seed)
    steps = options.epochs * batches.steps_per_epoch
    optimizer = fastdp.DPSGD(model, lr=lr, noise_multiplier=sigma, max_grad_norm=R, style=case.style, seed=noise_seed)
    done = train(model, optimizer, batches, steps=steps, text=f"{case}, lr {lr:.2g}, R {R:.3g}", lines=False)
    optimizer.detach()
    dev, test = (logits_of(model, part[0], 5000) for part in (data.dev, data.test))
    metrics = {**test_metrics(test, data.test[1]), "temperature": temperature(dev, data.dev[1]),
               "dev_accuracy": test_metrics(dev, data.dev[1])["accuracy"], "clipped": done.clipped or 0.0}  # fmt: skip
    return Cell(str(case), lr, R, seed, metrics), done.seconds


# ---------------------------------------------------------------------- what the cells come to


def explained(cells: Sequence[Cell], by: Callable[[Cell], float], metric: str = "accuracy") -> float:
    """The share of the metric's variance between cells that lies between groups of the same by(cell); NaN of none."""
    values = torch.tensor([cell.metrics[metric] for cell in cells], dtype=torch.float64)
    names = [f"{by(cell):.4g}" for cell in cells]
    if len(cells) < 2 or not float(values.var(correction=0)):
        return math.nan
    within = 0.0
    for name in set(names):
        group = values[torch.tensor([other == name for other in names])]
        within += float((group - group.mean()).square().sum())
    return 1 - within / float((values - values.mean()).square().sum())


def summary(cells: Sequence[Cell]) -> dict[str, dict[str, float]]:
    """Of one case and seed: {which R: metrics}: the cell best on held-out images, and what accuracy depends on."""
    regimes = {"any R": list(cells), "small R": [cell for cell in cells if cell.metrics["clipped"] >= SMALL],
               "large R": [cell for cell in cells if cell.metrics["clipped"] <= LARGE]}  # fmt: skip
    found = {}
    for name, some in regimes.items():
        if not some:
            continue
        best = max(some, key=lambda cell: cell.metrics["dev_accuracy"])
        found[name] = {**best.metrics, "best_lr": best.lr, "best_R": best.R, "cells": float(len(some)),
                       "accuracy_explained_by_lr_R": explained(some, lambda cell: cell.lr * cell.R),
                       "accuracy_explained_by_lr": explained(some, lambda cell: cell.lr)}  # fmt: skip
        found[name] = {metric: value for metric, value in found[name].items() if not math.isnan(value)}
    return found


# ---------------------------------------------------------------------- pictures


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Heat maps of accuracy and ECE by lr and R, of the last seed."""
    maps = []
    for case in dict.fromkeys(c.case for c in cells):
        rates, radii = (sorted({getattr(c, name) for c in cells if c.case == case}) for name in ("lr", "R"))
        found = {(c.R, c.lr): c.metrics for c in cells if c.case == case}
        for metric, colours in (("accuracy", "viridis"), ("ece", "magma_r")):
            values = [[100 * found[R, lr][metric] for lr in rates] for R in reversed(radii)]
            texts = [[f"{value:.0f}" for value in line] for line in values]
            maps.append(Grid(f"{metric}, %: {case}; R by lr", values, texts, [f"{R:.2g}" for R in reversed(radii)],
                             [f"{lr:.2g}" for lr in rates], colours))  # fmt: skip
    grids(path, maps)


# ---------------------------------------------------------------------- the grid


def planned(options: Any, records: int) -> dict[str, Any]:
    """The setting of all cells, as columns of their rows: the noise is that which costs EPSILON."""
    batch = min(options.batch, records // 4)
    rate = batch / records
    steps = options.epochs * fastdp.accounting.steps_per_epoch(rate)
    sigma = fastdp.noise_multiplier_for(target_epsilon=EPSILON, delta=DELTA, sample_rate=rate,
                                        steps=steps)  # fmt: skip
    spent = fastdp.accounting.epsilon_of([(sigma, rate, steps)], DELTA)
    return {"train_records": records, "epochs": options.epochs, "steps": steps, "batch": batch, "sigma": sigma,
            "epsilon": spent, "delta": DELTA, "accountant": "prv", "clipping": "local"}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> list[Cell]:
    """Train every cell of every case; write cells, what they come to, and pictures."""
    options = parser().parse_args(arguments)
    file = options.out.with_name("vit_grid_cells.csv")
    if options.quick:
        options.records, options.test_records = min(options.records, 1600), min(options.test_records, 800)
        options.batch = min(options.batch, 200)
    data = read(options)
    setting = planned(options, len(data.train[1]))
    changed = options.changed & {"batch", "epochs", "test_records"}
    mode = "quick" if options.quick else "full" if len(data.train[1]) >= 45000 and not changed else "short"
    same = {"mode": mode, "sigma": f"{setting['sigma']:.6g}"}
    same |= {name: setting[name] for name in ("train_records", "epochs", "batch")}
    every = 3 if options.quick else 1
    rates, radii = RATES[::every], RADII[::every]
    cells: list[Cell] = []

    def run(name: str, seed: int, kept: common.Checkpoint, tell: common.Tell) -> None:
        case, mine = cases[name], list[Cell]()
        for R in radii:
            for lr in rates:
                cell, seconds = train_cell(data, case, lr, R, seed, setting["sigma"], options)
                mine.append(cell)
                common.write(file, common.rows(
                    options, EXPERIMENT, f"{case}; one cell", mode, seed, cell.metrics, **setting, style=case.style,
                    lr=lr, R=R, seconds=seconds,
                ))  # fmt: skip
            print(f"{case}, seed {seed}, R {R:.3g}: " + " ".join(
                f"{100 * cell.metrics['accuracy']:.0f}" for cell in mine[-len(rates) :]), flush=True)  # fmt: skip
        for regime, metrics in summary(mine).items():
            tell(mode, metrics, {**setting, "style": case.style}, case=f"{case}; {regime}")
        cells.extend(mine)

    cases = {str(case): case for case in CASES if not options.cases or str(case) in options.cases}
    common.drive(options, EXPERIMENT, {name: {**same, "every": every} for name in cases}, run)
    if (path := picture(options, "vit_grid")) is not None:
        draw(cells, path)
    return cells


if __name__ == "__main__":
    main()
