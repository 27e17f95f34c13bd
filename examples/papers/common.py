"""The driver of the experiments of docs/papers.md: options, checkpoints, one training loop, rows of results.

A script begins so (another examples/common.py exists, so this one goes by its full name):

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout's root
    from examples.papers import common

An experiment is its cases by name, each with all that its outcome depends on, and a function that makes one run:
`drive` runs every case with every seed, goes on from checkpoints, and writes rows.

The seed of a run draws its weights (and its batches, where nothing is private). Private sampling and noise are drawn
from the operating system, always, so that a run's epsilon holds; the last digits of a private run cannot be repeated.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import shlex
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples run from a checkout, where benchmarks/ is

from benchmarks.timing import append, commit
from examples.papers.images import Images, cifar10, fashion_mnist, mnist, need, subset  # noqa: F401  for the scripts
from fastdp.accounting import ACCOUNTANTS, epsilon_of

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
    refuses what does not go together."""

    stem = "experiment"

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        found = super().parse_args(given, namespace)
        if found.seeds < 1 or found.first_seed < 0:
            self.error("--seeds must be 1 or more, and --first-seed 0 or more")
        for name in ("epochs", "records", "test_records", "steps", "networks"):
            if getattr(found, name, None) is not None and not getattr(found, name) > 0:
                self.error(f"--{name.replace('_', '-')} must be positive")
        if getattr(found, "draw", False) and found.plots is None:
            self.error("--draw needs --plots DIR, to draw into")
        try:
            torch.empty(1, device=found.device)
        except (RuntimeError, AssertionError) as error:  # torch raises either, by its build
            self.error(f"--device {found.device}: {str(error).splitlines()[0]}")
        found.command = command_of(self.stem, given)
        found.changed = {
            a.dest for a in self._actions if hasattr(found, a.dest) and getattr(found, a.dest) != a.default
        }
        return found


def parser(description: str, stem: str, full: str = "", draw: bool = False) -> Parser:
    """The options that all experiments have.

    full: what --full runs, of an experiment whose runs are long: it goes on from checkpoints, and runs on a GPU. draw:
    whether it draws the rows that are there.
    """
    made = Parser(description=description.strip().splitlines()[0], conflict_handler="resolve")
    made.stem = stem
    made.add_argument("--data", type=Path, help="the folder with the data (without it, a message says where to get it)")
    made.add_argument("--quick", action="store_true", help="about two minutes on two CPU cores; a smaller experiment")
    made.add_argument("--seeds", type=int, default=1, help="how many runs of each case")
    made.add_argument("--first-seed", type=int, default=0, help="the first run's; the others follow")
    made.add_argument("--out", type=Path, default=ROOT / "benchmarks/data" / f"papers_{made.stem}.csv",
                      help="rows of results are added to this CSV file")  # fmt: skip
    made.add_argument("--plots", type=Path, help="write pictures (PNG) into this folder; needs matplotlib")
    made.set_defaults(device="cpu", checkpoints=None, full=False)
    if full:
        made.add_argument("--full", action="store_true", help=full)
        made.add_argument("--device", default="cpu", help="of torch, such as cuda; data and models lie there")
        made.add_argument("--checkpoints", type=Path, metavar="DIR", help="keep each run in this folder, go on with "
                          "what is there, and leave out what is done")  # fmt: skip
    if draw:
        made.add_argument("--draw", action="store_true", help="train nothing: draw the pictures of the rows in --out")
    return made


def command_of(stem: str, given: Sequence[str]) -> str:
    """The command line without what is of this machine: --data DIR, --checkpoints DIR, --cache FILE, --plots."""
    kinds = {"--data": "DIR", "--checkpoints": "DIR", "--cache": "FILE"}
    words, rest = [f"python examples/papers/{stem}.py"], list(given)
    while rest:
        name, _, value = rest.pop(0).partition("=")
        if name in (*kinds, "--out", "--plots"):
            if not value and rest:
                rest.pop(0)
            words += [f"{name} {kinds[name]}"] if name in kinds else []
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

    Threads, torch, commit and date are filled in. Raises ValueError on a column that is not of COLUMNS.
    """
    known = {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": COMMIT,
             "date": datetime.date.today().isoformat()}  # fmt: skip
    for row in found:
        if wrong := [name for name in row if name not in COLUMNS]:
            raise ValueError(f"no column of a result: {', '.join(wrong)} (columns: {', '.join(COLUMNS)})")
    blank = dict.fromkeys(COLUMNS, "")
    append(out, [{n: _plain(v) for n, v in {**blank, **known, **row}.items()} for row in found], COLUMNS)


def _plain(value: Any) -> Any:
    """Six digits are plenty; None is blank."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


# ---------------------------------------------------------------------- checkpoints


class Checkpoint:
    """The file of one run of --checkpoints, or nothing.

    A checkpoint is of one run in one setting, which its file's name stands for: other settings never take it up. The
    keys of private sampling and noise are not in it. They are drawn anew, which costs no privacy: the steps before are
    in the accountant's history, and that is part of the optimizer's state.

    Args: options of `parser`; name of the run; setting: all that its outcome depends on, of plain values.
    """

    def __init__(self, options: Any, name: str, setting: Mapping[str, Any]) -> None:
        mark = f"{zlib.crc32(repr(sorted(setting.items())).encode()):08x}"
        folder, plain = options.checkpoints, re.sub(r"[^\w.=-]+", "_", name)
        self.path = None if folder is None else folder / f"{plain}_{mark}.pt"
        self.state: dict[str, Any] = {}  # what was kept last
        if self.path is not None and self.path.exists():
            self.state = torch.load(self.path, map_location=options.device, weights_only=True)

    @property
    def done(self) -> bool:
        """Whether the run ended, and its rows were written."""
        return bool(self.state.get("done"))

    def keep(self, **state: Any) -> None:
        """Keep plain values and tensors, all or nothing; with done=True: the run is over, and its rows are written."""
        self.state = self.state | state
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            torch.save(self.state, new)
            new.replace(self.path)


Tell = Callable[..., None]


def drive(options: Any, experiment: str, cases: Mapping[str, Mapping[str, Any]],
          run: Callable[[str, int, Checkpoint, Tell], object],
          seen: Callable[[str, Checkpoint], object] | None = None) -> list[Row]:  # fmt: skip
    """Run every case with every seed, write rows and bins of confidence, print a line for each; returns the rows.

    Args:
        cases: by name, with all that a run's outcome depends on; what `options.checkpoints` holds of it is not done
            again.
        run: run(name, seed, kept, tell) makes one run; tell(mode, metrics, columns, logits=, labels=, case=) writes.
        seen: called with the name and the checkpoint of each run that is over, now or before.
    """
    from examples.papers import confidence

    written: list[Row] = []
    for seed in seeds(options):
        for name, setting in cases.items():

            def tell(mode: str, metrics: Mapping[str, float], columns: Mapping[str, Any], logits: Tensor | None = None,
                     labels: Tensor | None = None, case: str = name, seed: int = seed) -> None:  # fmt: skip
                found = rows(options, experiment, case, mode, seed, metrics, **columns)
                write(options.out, found)
                written.extend(found)
                if logits is not None and labels is not None:
                    run_of = {"experiment": experiment, "case": case, "mode": mode, "seed": seed}
                    confidence.keep(options.out, run_of, logits, labels)
                told = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
                print(f"{case}, seed {seed}, {columns.get('epochs', '')} epochs: {told}", flush=True)

            kept = Checkpoint(options, f"{experiment}_{name}, seed {seed}", {**setting, "experiment": experiment})
            if kept.done:
                print(f"{name}, seed {seed}: done before", flush=True)
            else:
                run(name, seed, kept, tell)
                kept.keep(done=True)
            if seen is not None:
                seen(name, kept)
    return written


def epsilons(sigma: float, sample_rate: float, steps: int, delta: float) -> dict[str, float]:
    """{"epsilon_prv", "epsilon_rdp", "epsilon_gdp"} of so many steps; infinite without noise."""
    history: list[tuple[float, float | None, int]] = [(sigma, sample_rate, steps)]
    return {f"epsilon_{name}": epsilon_of(history, delta, name) if sigma else math.inf for name in ACCOUNTANTS}
