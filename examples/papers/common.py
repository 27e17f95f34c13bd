"""What the experiments of docs/papers.md share: options, data, one training loop, test metrics, rows of results.

A script begins so (another examples/common.py exists, so this one goes by its full name):

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root
    from examples.papers import common

The seed of a run draws its weights (and its batches, where nothing is private). Private sampling and noise are drawn
from the operating system, always, so that a run's epsilon holds; the last digits of a private run cannot be repeated.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples run from a checkout, where benchmarks/ is

import fastdp
from benchmarks.timing import commit
from examples.papers.images import Images, cifar10, fashion_mnist, mnist, need, subset  # noqa: F401  for the scripts
from fastdp.accounting import ACCOUNTANTS, epsilon_of
from fastdp.calibration import calibration
from fastdp.sampling import current
from fastdp.utils.progress_bar import Bar

ROOT = Path(__file__).resolve().parents[2]
COMMIT = commit()  # of the code that runs: hours later the checkout may be at another
MODES = ("quick", "short", "full")  # two minutes; less than the paper's setting, as the row says; the paper's
COLUMNS = (
    "experiment", "case", "mode", "seed", "metric", "value", "train_records", "epochs", "steps", "batch", "sigma",
    "epsilon", "delta", "accountant", "lr", "R", "clipping", "style", "seconds", "threads", "torch", "commit", "date",
    "command",
)  # fmt: skip
Row = dict[str, Any]


# ---------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """Adds `command`, as a reader would type it, and the names of what is `changed` from its default to what it parses;
    refuses counts below one."""

    stem = "experiment"

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        found = super().parse_args(given, namespace)
        if found.seeds < 1 or found.first_seed < 0:
            self.error("--seeds must be 1 or more, and --first-seed 0 or more")
        found.command = command_of(self.stem, given)
        found.changed = {
            a.dest for a in self._actions if hasattr(found, a.dest) and getattr(found, a.dest) != a.default
        }
        return found


def parser(description: str, stem: str | None = None) -> Parser:
    """The options that all experiments have: --data --quick --seeds --first-seed --out --plots.

    Args: description, of which the first line is shown; stem of the file names (default: of the script that calls).
    """
    made = Parser(description=description.strip().splitlines()[0], conflict_handler="resolve")
    made.stem = stem or Path(sys._getframe(1).f_code.co_filename).stem
    made.add_argument("--data", type=Path, help="the folder with the data (without it, a message says where to get it)")
    made.add_argument("--quick", action="store_true", help="about two minutes on two CPU cores; a smaller experiment")
    made.add_argument("--seeds", type=int, default=1, help="how many runs of each case")
    made.add_argument("--first-seed", type=int, default=0, help="the first run's; the others follow")
    made.add_argument("--out", type=Path, default=ROOT / "benchmarks/data" / f"papers_{made.stem}.csv",
                      help="rows of results are added to this CSV file")  # fmt: skip
    made.add_argument("--plots", type=Path, help="write pictures (PNG) into this folder; needs matplotlib")
    return made


def command_of(stem: str, given: Sequence[str]) -> str:
    """The command line without what is of this machine: --data DIR, --checkpoints DIR, --cache DIR; no --out, --plots
    and --minutes."""
    words, rest = [f"python examples/papers/{stem}.py"], list(given)
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if name in ("--data", "--checkpoints", "--cache", "--out", "--plots", "--minutes"):
            if not value and rest:
                rest.pop(0)
            words += [f"{name} DIR"] if name in ("--data", "--checkpoints", "--cache") else []
        else:
            words.append(shlex.quote(f"{name}={value}" if value else name))
    return " ".join(words)


def seeds(options: Any) -> range:
    """Of the runs asked for."""
    return range(options.first_seed, options.first_seed + options.seeds)


# ---------------------------------------------------------------------- rows


def rows(options: Any, experiment: str, case: str, mode: str, seed: int | str, metrics: Mapping[str, float],
         **setting: Any) -> list[Row]:  # fmt: skip
    """One row a metric. metrics: shares (accuracy, ece, mce, clipped, dropped) from 0 to 1, NLL in nats, others as
    named; setting: other columns of COLUMNS (train_records, epochs, sigma, lr, ...)."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
    base = {"experiment": experiment, "case": case, "mode": mode, "seed": seed, "command": options.command, **setting}
    return [{**base, "metric": name, "value": value} for name, value in metrics.items()]


def write(out: Path, found: Sequence[Row]) -> None:
    """Append rows to a CSV file of the columns COLUMNS, blank where a row has none.

    Threads, torch, commit and date are filled in. One write of whole lines, so that runs side by side keep theirs.
    Raises ValueError on a column that is not of COLUMNS, or a file with others.
    """
    known = {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": COMMIT,
             "date": datetime.date.today().isoformat()}  # fmt: skip
    for row in found:
        if wrong := [name for name in row if name not in COLUMNS]:
            raise ValueError(f"no column of a result: {', '.join(wrong)} (columns: {', '.join(COLUMNS)})")
    out.parent.mkdir(parents=True, exist_ok=True)
    new = not out.exists() or not out.stat().st_size
    if not new:
        with out.open(newline="", encoding="utf-8") as file:
            if (header := next(csv.reader(file))) != list(COLUMNS):
                raise ValueError(f"{out} has other columns: {', '.join(header)}; name another file as --out")
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    if new:
        writer.writeheader()
    for row in found:
        writer.writerow({name: _plain(value) for name, value in {**known, **row}.items()})
    with out.open("a", newline="", encoding="utf-8") as file:
        file.write(text.getvalue())


def _plain(value: Any) -> Any:
    """Six digits are plenty; None is blank."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


# ---------------------------------------------------------------------- training


class Rows(Dataset[tuple[Tensor, ...]]):
    """Tensors of the same length as a data set that gives a batch at once; for `loader`."""

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(t) for t in tensors}) != 1:
            raise ValueError(f"tensors of different lengths: {', '.join(str(len(t)) for t in tensors)}")
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(t[index] for t in self.tensors)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        chosen = torch.tensor(indices, dtype=torch.long)
        return tuple(t[chosen] for t in self.tensors)


def _as_it_is(batch: Any) -> Any:
    """What Rows gave; one record of it in a list is a batch of one (to take no rows of)."""
    return tuple(t.unsqueeze(0) for t in batch[0]) if isinstance(batch, list) else batch


def loader(
    x: Tensor, y: Tensor, batch: float, seed: int | None = None, **options: Any
) -> fastdp.sampling.PoissonLoader:
    """A Poisson loader of (x, y), fetched a batch at a time. seed: only where nothing is private."""
    return fastdp.poisson_loader(Rows(x, y), expected_batch_size=batch, seed=seed, collate_fn=_as_it_is, **options)


class Run(NamedTuple):
    """What training was: logical steps and passes done, seconds; the share of gradients longer than R (of samples, by
    groups where clipping is; None without privacy); mean training loss of each pass; how many gradients were longer,
    and of how many."""

    steps: int
    epochs: float
    seconds: float
    clipped: float | None
    losses: list[float]
    counts: tuple[int, int] = (0, 0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, loss: Any = F.cross_entropy, *,
          steps: int, forward: Callable[[nn.Module, Any], Tensor] | None = None,
          before: Callable[[int], object] | None = None, after_pass: Callable[[int], object] | None = None,
          so_far: Callable[[Run], object] | None = None, text: str = "", lines: bool = True) -> Run:  # fmt: skip
    """One loop for private and other optimizers, in place.

    Args:
        batches: a Poisson loader; passes over it until `steps` logical batches are done.
        loss: loss(logits, labels) -> mean of the batch; its attribute `epoch`, if it has one, is set before each step.
        forward: forward(model, batch) -> mean loss, in the place of loss(model(*inputs), labels) on (*inputs, labels).
        before: called with the number of logical steps done before each of them (schedules).
        after_pass: called with the number of passes done after each; so_far: with the Run until then.
        lines: print a line a pass where no one watches a progress bar.

    Raises ValueError for steps < 1, FloatingPointError where the weights are no longer finite at the end of a pass.
    """
    if steps < 1:
        raise ValueError(f"steps must be 1 or more, not {steps}")
    private = hasattr(optimizer, "noise_multiplier")
    done, begun, over, all_norms = 0, -1, 0, 0
    losses: list[float] = []
    bar = Bar(steps)
    start = time.perf_counter()
    model.train()
    while done < steps:
        total, count = 0.0, 0
        for batch in batches:
            if begun < done:  # the first physical batch of a logical one
                begun = done
                if before is not None:
                    before(done)
                if hasattr(loss, "epoch"):
                    loss.epoch = done / batches.steps_per_epoch
            size, place = len(batch[-1]) if not isinstance(batch, Mapping) else 1, current(id(batches))
            if private or size:
                value = forward(model, batch) if forward is not None else loss(model(*batch[:-1]), batch[-1])
                value.backward()
                if private:
                    more, of = _beyond(optimizer)
                    over, all_norms = over + more, all_norms + of
                optimizer.step()
                optimizer.zero_grad()
                if size:
                    total, count = total + float(value.detach()) * size, count + size
            if place is not None and not place.final:
                continue
            done += 1
            bar.at(done, text)
            if done == steps:
                break
        losses.append(total / max(count, 1))
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise FloatingPointError(f"{text or 'training'}: weights are not finite after {done} steps: a smaller lr")
        if lines and not sys.stderr.isatty():
            spent = time.perf_counter() - start
            print(f"  {text}: step {done} of {steps}, training loss {losses[-1]:.4f}, {spent:.0f} s", flush=True)
        share = over / max(all_norms, 1) if private else None
        run = Run(done, done / batches.steps_per_epoch, time.perf_counter() - start, share, list(losses),
                  (over, all_norms))  # fmt: skip
        if after_pass is not None:
            after_pass(len(losses))
        if so_far is not None:
            so_far(run)
    return run


def _beyond(optimizer: Any) -> tuple[int, int]:
    """How many per-sample norms of the last backward are larger than their R, and of how many."""
    norms = optimizer.norms
    if isinstance(norms, Tensor):
        return int((norms > optimizer.max_grad_norm).sum()), norms.numel()
    groups = {group.name: group.max_grad_norm for group in optimizer._privacy.clipping.groups}
    return sum(int((n > groups[name]).sum()) for name, n in norms.items()), sum(n.numel() for n in norms.values())


# ---------------------------------------------------------------------- what came of it


def logits_of(model: nn.Module, x: Tensor, batch: int = 500) -> Tensor:
    """model(x) in evaluation mode, without gradients; the model is left in the mode it had."""
    training = model.training
    model.eval()
    with torch.no_grad():
        found = torch.cat([model(part) for part in x.split(batch)])
    model.train(training)
    return found


def test_metrics(logits: Tensor, labels: Tensor, bins: int = 15) -> dict[str, float]:
    """accuracy, ece, mce (shares from 0 to 1) and nll (nats) of logits [N, C]."""
    found = calibration(logits, labels, bins)
    return {"accuracy": found.accuracy, "nll": found.nll, "ece": found.ece, "mce": found.mce}


test_metrics.__test__ = False  # type: ignore[attr-defined]  # pytest: a function of the scripts


def epsilons(sigma: float, sample_rate: float, steps: int, delta: float) -> dict[str, float]:
    """{"epsilon_prv", "epsilon_rdp", "epsilon_gdp"} of so many steps; infinite without noise."""
    history: list[tuple[float, float | None, int]] = [(sigma, sample_rate, steps)]
    return {f"epsilon_{name}": epsilon_of(history, delta, name) if sigma else math.inf for name in ACCOUNTANTS}


def picture(options: Any, name: str) -> Path | None:
    """Where to write the picture NAME.png, if --plots was given and matplotlib is here; else None (and why)."""
    if options.plots is None:
        return None
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no pictures: they need matplotlib (pip install 'fastdp[demo]')", file=sys.stderr)
        return None
    os.makedirs(options.plots, exist_ok=True)
    return Path(options.plots) / f"{name}.png"
