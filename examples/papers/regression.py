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
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fastdp
from examples.papers import common, resume

POINTS = 20  # moments at which the losses are kept, beside the end
RUNS = 30  # the paper's
epsilons = functools.lru_cache(common.epsilons)  # the same for every seed
COLOURS = ("#4477aa", "#228833", "#bb5566", "black")


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
    """An experiment: optimizers by name, the batch (0: all records), epochs, noise; the share that is trained on."""

    name: str
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


def delta_of(records: int) -> float:
    """1 / (1.1 n)."""
    return 1 / (1.1 * records)


def run(plan: Plan, way: Way, task: Task, seed: int, epochs: int, kept: resume.Checkpoint
        ) -> tuple[list[float], dict[str, float], int]:  # fmt: skip
    """Training losses at POINTS + 1 moments, metrics, steps. A seed draws the weights."""
    torch.manual_seed(seed)
    device = task.x.device
    model = network(task.x.shape[1]).to(device)
    private, batch = bool(way.clipping), plan.batch or len(task.x)
    before = kept.load() or {"steps": 0, "counts": (0, 0), "points": []}
    begun, losses = int(before["steps"]), list(before["points"])
    batches = common.loader(task.x, task.y, batch, None if private else 1000 * begun + seed)
    optimizer: Any
    if private:
        optimizer = plan.private(model, lr=way.lr, noise_multiplier=plan.sigma, max_grad_norm=way.max_grad_norm,
                                 clipping=way.clipping)  # fmt: skip
    else:
        optimizer = plan.plain(model.parameters(), lr=way.lr)
    if begun:
        resume.take_up(before, model, optimizer)
    steps = epochs * batches.steps_per_epoch
    moments = {round(k * steps / POINTS) for k in range(POINTS)}

    def look(done: int) -> None:
        if begun + done in moments and len(losses) < POINTS:
            losses.append(loss_of(model, task.x, task.y))

    def save(until: common.Run) -> None:
        done = begun + until.steps
        if done < steps and (plan.batch or done % (steps // POINTS) == 0):  # a full batch is a pass: not after each
            counts = tuple(a + b for a, b in zip(before["counts"], until.counts, strict=True))
            kept.save(resume.state_of(model, optimizer, steps=done, counts=counts, points=losses))

    found = common.train(model, optimizer, batches, F.mse_loss, steps=steps - begun, before=look, so_far=save,
                         lines=False, text=f"{way.name}, seed {seed}")  # fmt: skip
    losses.append(loss_of(model, task.x, task.y))
    metrics = {"training loss": losses[-1], "test loss": loss_of(model, task.x_test, task.y_test),
               "training loss at half time": losses[POINTS // 2],
               "largest rise": max(b - a for a, b in zip(losses[:-1], losses[1:], strict=True)),
               "share above its lowest": losses[-1] / min(losses) - 1}  # fmt: skip
    if private:
        over, of = (a + b for a, b in zip(before["counts"], found.counts, strict=True))
        metrics |= epsilons(plan.sigma, batches.sample_rate, steps, delta_of(len(task.x)))
        metrics["share longer than R"] = over / max(of, 1)
        optimizer.detach()
    return losses, metrics, steps


def picture(plan: Plan, curves: dict[str, list[list[float]]], path: Path) -> None:
    """Mean of the runs, and a band of one standard deviation."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, found) in zip(COLOURS, ((k, v) for k, v in curves.items() if v), strict=False):
        stacked = torch.tensor(found)
        mean, std = stacked.mean(0), stacked.std(0, correction=0)
        moments = torch.linspace(0, 1, POINTS + 1)
        axes.plot(moments, mean, color=colour, label=f"{name} ({len(found)} runs)")
        axes.fill_between(moments, mean - std, mean + std, color=colour, alpha=0.2, lw=0)
    axes.set(
        xlabel="share of the steps", ylabel="training loss (standardized, squared)", title=plan.name, ylim=(0, None)
    )
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def options_of(description: str, stem: str, arguments: Sequence[str] | None) -> Any:
    """Parse the command line."""
    made = common.parser(description, stem)
    resume.add(made, f"the paper's {RUNS} runs of each case")
    options = made.parse_args(arguments)
    resume.check(made, options)
    options.stem = stem
    options.seeds = max(options.seeds, RUNS) if options.full else options.seeds
    return options


def main(plan: Plan, options: Any, numbers: Tensor) -> dict[str, list[list[float]]]:
    """All runs; rows are written after each. Returns the loss curves by way, those of runs done before included."""
    task = Task(*(t.to(options.device) for t in split(numbers, plan.share)))
    mode, epochs = ("quick", max(1, plan.epochs // 10)) if options.quick else ("full", plan.epochs)
    curves: dict[str, list[list[float]]] = {way.name: [] for way in plan.ways}
    for seed in common.seeds(options):
        for way in plan.ways:
            start = time.perf_counter()
            setting = {**way._asdict(), "experiment": plan.name, "batch": plan.batch, "epochs": epochs,
                       "sigma": plan.sigma, "records": len(task.x)}  # fmt: skip
            kept = resume.Checkpoint(options, f"{plan.name}_{way.name}, seed {seed}", setting)
            if kept.done:
                curves[way.name].append((kept.load() or {})["points"])
                continue
            try:
                losses, metrics, steps = run(plan, way, task, seed, epochs, kept)
            except resume.Stopped:
                print(f"stopped after {options.minutes:g} minutes: run the same command again to go on")
                return curves
            curves[way.name].append(losses)
            private = dict(sigma=plan.sigma, delta=delta_of(len(task.x)), R=way.max_grad_norm, clipping=way.clipping,
                           style="flat", epsilon=metrics.get("epsilon_gdp"), accountant="gdp")  # fmt: skip
            common.write(options.out, common.rows(
                options, plan.name, way.name, mode, seed, metrics, train_records=len(task.x), epochs=epochs,
                steps=steps, batch=plan.batch or len(task.x), lr=way.lr, seconds=time.perf_counter() - start,
                **(private if way.clipping else {}),
            ))  # fmt: skip
            kept.finish({"points": losses})
            print(f"seed {seed}, {way.name}: " + ", ".join(f"{k} {v:.3f}" for k, v in metrics.items()), flush=True)
    for name, found in curves.items():
        last = torch.tensor(found)[:, -1]
        print(
            f"{name}: training loss {float(last.mean()):.4f} +- {float(last.std(correction=0)):.4f} ({len(found)} runs)"
        )
    path = common.picture(options, options.stem)
    if path is not None:
        picture(plan, curves, path)
    return curves


def data(options: Any, file: str, where: str) -> Path:
    """The file in the folder that was given; exits with where to get it."""
    if options.data is None or not (options.data / file).exists():
        given = f"not in {options.data}" if options.data else "give its folder as --data"
        raise SystemExit(f"this experiment reads {file}: {given}.\n{where}")
    return Path(options.data) / file
