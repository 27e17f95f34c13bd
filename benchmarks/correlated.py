"""Correlated noise against independent noise, over records in a fixed order, and against DP-SGD, which samples them.

    python -m benchmarks.correlated [--out FILE.csv]      # eight minutes on one core

`accuracy`, on records left out, of two models whose training data are on every machine: scikit-learn's 8x8 digits (of
the extra `demo`), by a small MLP; and lines of six modules of Python's standard library, of which the model names the
module, by hashed trigrams in an EmbeddingBag. (Lines differ a little from one Python to the next.) All mechanisms are
those of `fastdp.mechanisms.compare`, with its settings and its noise multipliers, at the same epsilon, clipping norm,
batch size and number of passes. A run's seed sets weights, order and noise; its five numbers have a mean, with a 95 %
interval by Student's t. The part that is tested stays the same, so the interval is not of the choice of this part.

The learning rate is chosen for each mechanism and epsilon on a validation part, by runs with another seed. This is not
paid for: epsilon is of one run whose rate is known, which favours no mechanism.

`step`: the median time of a step relative to that of independent noise, and the tensors that are there after steps,
in bytes, less those with independent noise: past normals are drawn again, not kept. `error` is the one of `compare`,
which knows nothing of the task: of sums of gradients, hence of SGD without momentum (`--momentum 0`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fastdp
from fastdp.mechanisms import (
    Banded,
    Bisr,
    Comparison,
    Independent,
    Lambda,
    TreeAggregation,
    compare,
    cyclic_poisson_loader,
    fixed_order_loader,
)

from .models import GPT
from .timing import Row, append, interleaved, keep_memory, require_kernels, show, versions

EPSILONS, DELTA, SEEDS = (1.0, 3.0, 8.0), 1e-5, 5
STEPS, PASSES = 16, 10  # steps of a pass
MODULES = ("_pydecimal", "argparse", "doctest", "inspect", "tarfile", "typing")
BUCKETS, LENGTH = 1024, 40  # of trigrams: how many, and how many of a line
COLUMNS = ("what", "task", "momentum", "epsilon", "noise", "records", "draws", "noise_multiplier", "error", "rate",
           "seed", "value", "extra_bytes")  # fmt: skip

Part = tuple[Tensor, Tensor]


class Records(TensorDataset):
    """Tensors of which a batch is one indexing, so that time is not spent on single records."""

    def __getitems__(self, numbers: list[int]) -> Any:
        return self[torch.tensor(numbers, dtype=torch.long)]


class Lines(nn.Module):
    """The module that a line is of, by the mean of what its trigrams are mapped to."""

    def __init__(self) -> None:
        super().__init__()
        self.trigrams = nn.EmbeddingBag(BUCKETS, 8, mode="mean", padding_idx=0)
        self.head = nn.Linear(8, len(MODULES))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.trigrams(ids))


class Task(NamedTuple):
    """A model, clipping norm and momentum, the rate from which others are tried, and the data in three parts."""

    name: str
    build: Callable[[], nn.Module]
    norm: float
    momentum: float
    rate: float
    train: Part
    validation: Part
    test: Part


def digits() -> tuple[Tensor, Tensor]:
    """Images, with pixels of 0 to 16 moved to -1 to 1, without a look at any."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 8 - 1, torch.tensor(found.target)


def lines(each: int = 1000) -> tuple[Tensor, Tensor]:
    """So many lines of each module, of 20 characters or more, none twice: their hashed trigrams, from 1 on."""
    ids, owners = [], []
    for number, module in enumerate(MODULES):
        text = Path(sysconfig.get_paths()["stdlib"], f"{module}.py").read_text(encoding="utf-8")
        found = [line for line in dict.fromkeys(map(str.strip, text.splitlines())) if len(line) >= 20]
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
        for line in (found[place].encode("ascii", "replace") for place in order[:each]):
            hashed = [1 + zlib.crc32(line[i : i + 3]) % (BUCKETS - 1) for i in range(min(len(line) - 2, LENGTH))]
            ids.append(hashed + [0] * (LENGTH - len(hashed)))
            owners.append(number)
    return torch.tensor(ids), torch.tensor(owners)


def tasks(names: Sequence[str], momentum: float) -> Iterator[Task]:
    """The tasks of these names, with the parts of their data drawn once."""
    mlp = lambda: nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    for name, data, build, norm, rate, sizes in (
        ("digits", digits, mlp, 0.3, 1.0, (1200, 250)),
        ("lines", lines, Lines, 0.1, 30.0, (4000, 1000)),
    ):
        if name not in names:
            continue
        x, y = data()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        parts = [(x[part], y[part]) for part in order.tensor_split([sizes[0], sum(sizes)])]
        yield Task(name, build, norm, momentum, float(f"{rate * (1 - momentum):.3g}"), *parts)


def loader_for(task: Task, strategy: Any, cycle: int | None, seed: int) -> tuple[Any, Any]:
    """A loader and the optimizer's noise=. cycle: of samples; None: the fixed order. DP-SGD is a cycle of one step."""
    data, size = Records(*task.train), len(task.train[0]) / STEPS
    options: Any = {"collate_fn": lambda batch: batch}
    if cycle is None:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
        return fixed_order_loader(data, batch_size=int(size), order=order, **options), strategy
    if cycle == 1:
        return fastdp.poisson_loader(data, expected_batch_size=size, steps=STEPS, seed=seed, **options), None
    return cyclic_poisson_loader(data, cycle=cycle, batch_size=size, steps=STEPS, seed=seed, **options), strategy


class Run(NamedTuple):
    """A mechanism at one epsilon. cycle: as of `loader_for`."""

    strategy: Any
    noise_multiplier: float
    cycle: int | None
    passes: int
    told: Row  # of its rows

    def start(self, task: Task, rate: float, seed: int) -> tuple[nn.Module, Any, Any]:
        """A model, its optimizer and its loader."""
        torch.manual_seed(seed)
        model = task.build()
        loader, noise = loader_for(task, self.strategy, self.cycle, seed)
        optimizer = fastdp.DPSGD(model, lr=rate, momentum=task.momentum,
                                 noise_multiplier=self.noise_multiplier, max_grad_norm=task.norm,
                                 noise=noise, seed=seed)  # fmt: skip
        return model, optimizer, loader

    def accuracy(self, task: Task, rate: float, seed: int, part: Part) -> float:
        """Of a model trained for all passes, on a part of the data."""
        model, optimizer, loader = self.start(task, rate, seed)
        for _ in range(self.passes):
            train(model, optimizer, loader)
        epsilon = self.told["epsilon"]
        if seed == 0 and isinstance(epsilon, float) and not optimizer.epsilon(DELTA) <= epsilon * (1 + 1e-6):
            raise SystemExit(f"{self.told}: epsilon {optimizer.epsilon(DELTA)} was spent")
        with torch.no_grad():
            return float((model(part[0]).argmax(1) == part[1]).float().mean())


def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        F.cross_entropy(model(x).movedim(-1, 1), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def runs_of(found: Comparison, passes: int) -> list[Run]:
    """All mechanisms of a comparison."""
    runs = []
    for row in found.rows:
        sampled = row.participation.kind == "cyclic Poisson"
        told: Row = {"epsilon": found.epsilon, "noise": repr(row.strategy), "records": row.records,
                     "draws": f"{row.draws:.3g}", "noise_multiplier": f"{row.noise_multiplier:.4g}",
                     "error": f"{row.error:.4g}"}  # fmt: skip
        cycle = row.participation.period if sampled else None
        runs.append(Run(row.strategy, row.noise_multiplier, cycle, passes, told))
    return runs


def best_rate(score: Callable[[float], float], start: float) -> float:
    """The best of rates from `start` on, by factors of 3 up, or else down, as long as the score rises."""
    found = {start: score(start)}
    for factor in (3.0, 1 / 3.0):
        rate, best = start, found[start]
        while len(found) < 6 and (now := score(rate := float(f"{rate * factor:.3g}"))) > best:
            found[rate] = best = now
        if len(found) > 1:
            break
    return max(found, key=found.__getitem__)


def accuracies(task: Task, run: Run, seeds: int) -> Iterator[Row]:
    """A row for each seed, at the best rate."""
    rate = best_rate(lambda rate: run.accuracy(task, rate, seeds, task.validation), task.rate)
    for seed in range(seeds):
        value = run.accuracy(task, rate, seed, task.test)
        yield {"what": "accuracy", "task": task.name, "momentum": task.momentum, **run.told, "rate": rate, "seed": seed,
               "value": f"{value:.4f}"}  # fmt: skip


def tensors() -> int:
    """The bytes of all tensors that are there."""
    gc.collect()
    found = [item.untyped_storage() for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def step_times(task: Task, runs: Sequence[Run], rounds: int, passes: int = 4) -> Iterator[Row]:
    """Steps in a fixed order, after passes; and what memory they hold then, beyond that of the run before them."""
    steps: dict[str, Callable[[], object]] = {}
    held = {}
    for run in runs:
        before = tensors()
        model, optimizer, loader = run.start(task, 0.0, 0)
        for _ in range(passes):
            train(model, optimizer, loader)
        held[repr(run.strategy)] = tensors() - before
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        steps[repr(run.strategy)] = lambda m=model, o=optimizer, b=batches: train(m, o, [next(b)])
    spent, alone = interleaved(steps, torch.device("cpu"), rounds), repr(Independent())
    for run in runs:
        name = repr(run.strategy)
        yield {"what": "step", "task": task.name, "momentum": task.momentum, **run.told, "epsilon": "-",
               "noise_multiplier": "-", "error": "-",
               "value": f"{spent[name] / spent[alone]:.3f}", "extra_bytes": held[name] - held[alone]}  # fmt: skip


def wide(task: Task) -> Task:
    """A task whose model has a million weights, and whose steps are of noise more than of Python."""
    x = torch.zeros(len(task.train[0]), 1024)
    return task._replace(name="1M weights", build=lambda: nn.Linear(1024, 1024), train=(x, task.train[1]))


def language(task: Task) -> Task:
    """The GPT of benchmarks.training."""
    ids, targets = torch.randint(8192, (2, STEPS * 8, 128), generator=torch.Generator().manual_seed(0))
    return task._replace(name="GPT", build=GPT, train=(ids, targets))


def gpt_steps() -> Iterator[Row]:
    """Of 16 bands and less, without accuracies."""
    told: Row = {"records": "fixed order", "draws": "-"}
    strategies = (Independent(), TreeAggregation(), Lambda(0.9), Bisr(4), Bisr(8), Bisr(16))
    runs = [Run(each, 1.0, None, 1, {**told, "noise": repr(each)}) for each in strategies]
    return step_times(language(next(tasks(["digits"], 0.9))), runs, 15, passes=1)


def summary(rows: Sequence[Row]) -> list[Row]:
    """A row for each task, epsilon and mechanism, with the mean over seeds in percent and its 95 % interval."""
    from scipy.stats import t

    cells: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row["what"] == "accuracy":
            cells.setdefault((row["task"], row["epsilon"], row["noise"], row["records"]), []).append(row)
    found = []
    for cell in cells.values():
        values = [100 * float(str(row["value"])) for row in cell]
        half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
        found.append({**cell[0], "accuracy": f"{statistics.mean(values):.1f} +- {half:.1f}"})
    return found


def main(command: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="one pass over the digits, few mechanisms")
    parser.add_argument("--tasks", nargs="+", default=["digits", "lines"])
    parser.add_argument("--epsilons", nargs="+", type=float, default=EPSILONS)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--gpt", action="store_true", help="only steps, of the GPT of benchmarks.training")
    options = parser.parse_args(command)
    warnings.simplefilter("ignore")
    require_kernels()
    if options.gpt:
        options.tasks, options.epsilons = [], []
    epsilons, passes, seeds, rounds = ((8.0,), 1, 2, 1) if options.quick else (options.epsilons, PASSES, SEEDS, 41)
    few = [Independent(), TreeAggregation(), Banded(2, steps=STEPS)] if options.quick else None
    compared = [
        compare(steps=passes * STEPS, epochs=passes, target_epsilon=epsilon, delta=DELTA, strategies=few)
        for epsilon in epsilons
    ]
    none = Run(Independent(), 0.0, None, passes, {"epsilon": "-", "noise": "none", "records": "fixed order"})
    about, rows = versions(), list(gpt_steps()) if options.gpt else list[Row]()
    append(options.out, [{**row, **about} for row in rows], (*COLUMNS, *about))
    for task in tasks(["digits"] if options.quick else options.tasks, options.momentum):
        found: list[Row] = []
        for run in [none, *(run for one in compared for run in runs_of(one, passes))]:
            found += accuracies(task, run, seeds)
            print(".", end="", flush=True)
        ordered = [run for run in runs_of(compared[-1], passes) if run.cycle is None]
        for timed in (task, *[wide(task)] * (task.name == "digits" and not options.quick)):
            found += step_times(timed, ordered, rounds)
        append(options.out, [{**row, **about} for row in found], (*COLUMNS, *about))
        rows += found
    print()
    show(summary(rows), ("task", "epsilon", "noise", "records", "draws", "noise_multiplier", "error", "rate",
                         "accuracy"), 4)  # fmt: skip
    show([row for row in rows if row["what"] == "step"], ("task", "noise", "draws", "value", "extra_bytes"))


if __name__ == "__main__":
    keep_memory("benchmarks.correlated")
    main()
