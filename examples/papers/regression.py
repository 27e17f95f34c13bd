"""What wine.py and housing.py share: tables of numbers, the paper's network, runs with a small and a large R, and none.

Bu et al., appendix C.4: layers of 64, 64, 32 and 1 units, ReLU between them; 30 runs. Not in the text as we have it,
which has lost most formulas: the noise multipliers, delta, the large R, and how targets are scaled. Noise multipliers
35 (wine) and 1 (housing) are ours: with delta 1 / (1.1 n), both experiments cost epsilon 4.4 by GDP.

Features and targets are standardized by the training part's mean and deviation, which is no private step: a release
would need public bounds. The losses written are of the whole training part, read now and then for the curves: the
epsilon does not cover them either.
"""

from __future__ import annotations

import csv
import functools
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastdp
from examples.papers import common
from examples.papers.pictures import Panel, panels, picture
from examples.papers.training import loader, train

POINTS = 20  # moments at which the losses are kept, beside the end
RUNS = 30  # the paper's
epsilons = functools.lru_cache(common.epsilons)  # the same for every seed


class Task(NamedTuple):
    """Standardized: x [N, F], y [N, 1], and the same of the test part."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


class Way(NamedTuple):
    """A way to train: clipping "local" or "global" of fastdp, or "" for none; max_grad_norm; learning rate."""

    name: str
    clipping: str
    max_grad_norm: float
    lr: float


class Plan(NamedTuple):
    """An experiment: its file, where it is from and what is between its columns; optimizers by name, the batch (0: all
    records), epochs, noise; the share that is trained on."""

    name: str
    file: str
    where: str
    delimiter: str
    ways: tuple[Way, ...]
    private: Callable[..., fastdp.PrivateOptimizer]
    plain: Callable[..., torch.optim.Optimizer]
    batch: int
    epochs: int
    sigma: float
    share: float


def read(path: Path, delimiter: str) -> tuple[list[str], Tensor]:
    """Column names, and numbers [N, columns] in the file's order."""
    opened: Any = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as file:
        rows = list(csv.reader(file, delimiter=delimiter))
    return rows[0], torch.tensor([[float(cell) for cell in row] for row in rows[1:]])


def split(numbers: Tensor, share: float = 0.8) -> Task:
    """The last column is the target; the same random part is left out in every run."""
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
    train, test = (numbers[part] for part in order.tensor_split([int(share * len(numbers))]))
    mean, std = train.mean(0), train.std(0)
    train, test = (train - mean) / std, (test - mean) / std
    return Task(train[:, :-1], train[:, -1:], test[:, :-1], test[:, -1:])


def network(features: int) -> nn.Module:
    """Features [B, F] -> predictions [B, 1]."""
    return nn.Sequential(
        nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(F.mse_loss(model(x), y))


def run(plan: Plan, way: Way, task: Task, seed: int, epochs: int, kept: common.Checkpoint
        ) -> tuple[dict[str, float], dict[str, Any]]:  # fmt: skip
    """Metrics, and the setting's columns; the losses at POINTS + 1 moments are in kept.state["more"]."""
    torch.manual_seed(seed)
    model = network(task.x.shape[1]).to(task.x.device)
    private, batch = bool(way.clipping), plan.batch or len(task.x)
    batches = loader(task.x, task.y, batch, None if private else 1000 * kept.state.get("steps", 0) + seed)
    optimizer: Any
    if private:
        optimizer = plan.private(model, lr=way.lr, noise_multiplier=plan.sigma, max_grad_norm=way.max_grad_norm,
                                 clipping=way.clipping)  # fmt: skip
    else:
        optimizer = plan.plain(model.parameters(), lr=way.lr)
    steps, more = epochs * batches.steps_per_epoch, {"points": list[float]()}
    moments = {round(k * steps / POINTS) for k in range(POINTS)}

    def look(done: int) -> None:
        if done in moments and len(more["points"]) < POINTS:
            more["points"].append(loss_of(model, task.x, task.y))

    found = train(model, optimizer, batches, F.mse_loss, steps=steps, before=look, kept=kept, more=more,
                  keep=max(1, steps // POINTS), lines=False, text=f"{way.name}, seed {seed}")  # fmt: skip
    losses = more["points"]
    losses.append(loss_of(model, task.x, task.y))
    metrics = {"training loss": losses[-1], "test loss": loss_of(model, task.x_test, task.y_test),
               "training loss at half time": losses[POINTS // 2],
               "largest rise": max(b - a for a, b in zip(losses[:-1], losses[1:], strict=True)),
               "share above its lowest": losses[-1] / min(losses) - 1}  # fmt: skip
    columns = {"train_records": len(task.x), "epochs": epochs, "steps": steps, "batch": batch, "lr": way.lr,
               "seconds": found.seconds}  # fmt: skip
    if private:
        delta = 1 / (1.1 * len(task.x))
        metrics |= epsilons(plan.sigma, batches.sample_rate, steps, delta)
        metrics["share longer than R"] = found.clipped or 0.0
        columns |= {"sigma": plan.sigma, "delta": delta, "R": way.max_grad_norm,
                    "clipping": way.clipping, "style": "flat", "epsilon": metrics["epsilon_gdp"],
                    "accountant": "gdp"}  # fmt: skip
        optimizer.detach()
    return metrics, columns


def main(plan: Plan, description: str, stem: str, arguments: Sequence[str] | None) -> dict[str, list[list[float]]]:
    """All runs; rows are written after each. Returns the loss curves by way, those of runs done before included."""
    options = common.parser(description, stem, f"the paper's {RUNS} runs of each case").parse_args(arguments)
    options.seeds = max(options.seeds, RUNS) if options.full else options.seeds
    path = common.need([options.data / plan.file] if options.data else [], f"{plan.file}: {plan.where}")
    numbers = read(path, plan.delimiter)[1]
    task = Task(*(t.to(options.device) for t in split(numbers, plan.share)))
    mode, epochs = ("quick", max(1, plan.epochs // 10)) if options.quick else ("full", plan.epochs)
    ways = {way.name: way for way in plan.ways}
    curves: dict[str, list[list[float]]] = {name: [] for name in ways}
    common_mark = {"batch": plan.batch, "epochs": epochs, "sigma": plan.sigma, "records": len(task.x)}
    common.drive(
        options, plan.name, {name: {**way._asdict(), **common_mark} for name, way in ways.items()},
        lambda name, seed, kept, tell: tell(mode, *run(plan, ways[name], task, seed, epochs, kept)),
        lambda name, kept: curves[name].append(kept.state["more"]["points"]),
    )  # fmt: skip
    if (path := picture(options, stem)) is not None:
        moments = torch.linspace(0, 1, POINTS + 1).tolist()
        named = {f"{name} ({len(found)} runs)": (moments, found) for name, found in curves.items() if found}
        panels(path, [Panel(plan.name, named, "share of the steps", "training loss (standardized, squared)")])
    return curves
