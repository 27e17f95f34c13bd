"""The experiment of "Finding private bugs: debugging implementations of DP-SGD" (submitted to ICLR 2023), again.

    python examples/papers/private_bugs.py --data DIR [--quick] [--seeds 3] [--out FILE.csv] [--curves FILE.jsonl]
    python examples/papers/private_bugs.py --report    # tables and figures of docs/private_bugs.md, from the rows kept

A ResNet-20 on CIFAR-10 and a small BERT on SST-2, each trained by SGD and by Adam, rightly and with the paper's bugs:
the paper's tests as it describes them, and fastdp's own for the same bugs. The latter must find each bug, and nothing
else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # of the checkout, where benchmarks/ is

import private_bugs_networks as networks
from private_bugs_report import CURVES, DOC, RUNS, as_expected, figures, read_curves, report, tables

from benchmarks.tables import read_rows
from benchmarks.timing import Row, append, versions
from fastdp.audit import AuditError, Finding
from fastdp.audit.clipping import no_clipping
from fastdp.audit.finding import not_tested
from fastdp.audit.measure import Probe
from fastdp.audit.minibatch import minibatch_clipping
from fastdp.audit.noise import uncalibrated_noise
from fastdp.audit.paper import (
    paper_minibatch_clipping,
    paper_no_clipping,
    paper_noise_distribution,
    paper_uncalibrated_noise,
)
from fastdp.utils.progress_bar import Bar

__all__ = ["CURVES", "DOC", "RUNS", "as_expected", "expected", "main", "report"]

CLIPPING = ("no_clipping", "minibatch_clipping")
TESTS: dict[tuple[str, str], Callable[..., Finding]] = {
    ("fastdp", "no_clipping"): no_clipping,
    ("fastdp", "minibatch_clipping"): minibatch_clipping,
    ("fastdp", "uncalibrated_noise"): uncalibrated_noise,
    ("paper", "no_clipping"): paper_no_clipping,
    ("paper", "minibatch_clipping"): paper_minibatch_clipping,
    ("paper", "uncalibrated_noise"): paper_uncalibrated_noise,
    ("paper", "noise_distribution"): paper_noise_distribution,
}
SMALL = {
    "size": 2,
    "trials": 2,
}  # samples of a batch, and trials of the searches: hundreds of steps of a ResNet take long
COLUMNS = (
    "network", "optimizer", "implementation", "statistics", "test", "seed", "verdict", "expected", "p_value",
    "statistic", "bound", "steps", "search_steps", "seconds", "setting", "device", "threads", "torch", "fastdp",
    "commit", "date", "sentence",
)  # fmt: skip


def looked_at(kind: str, test: str, optimizer: str, seed: int) -> bool:
    """Noise is off in the tests of clipping, so they run once for each way of clipping; without noise, no seed makes a
    difference to the tests of noise; the paper's Appendix C has SGD only."""
    if test in CLIPPING:
        return "," not in kind
    if "no noise" in kind and seed:
        return False
    return test != "noise_distribution" or optimizer == "sgd"


def expected(kind: str, test: str, statistics: str = "fastdp", optimizer: str = "sgd") -> str:
    """What the test should say of an implementation: it finds the bug it is for, in others none.

    Of a step that does not depend on C at all, fastdp's other tests can tell little: they may say "not tested".
    """
    clipping, _, noise = kind.partition(", ")
    wrong = clipping if test in CLIPPING else noise
    if wrong and wrong in {"no_clipping": "no clipping", "minibatch_clipping": "mini-batch"}.get(
        test, "uncalibrated, no noise"
    ):
        return "bug or not tested" if (clipping, optimizer, statistics) == ("no clipping", "adam", "fastdp") and (
            test not in CLIPPING) else "bug"  # fmt: skip
    return "ok or not tested" if clipping == "no clipping" and statistics == "fastdp" else "ok"


# ---------------------------------------------------------------------- the runs


def tasks(options: argparse.Namespace) -> list[networks.Task]:
    """The networks asked for; exits with where to get data that is missing."""
    made = []
    for name in options.networks:
        if name == "resnet":
            made.append(networks.images(options.data, options.records, 0, *options.resnet))
        else:
            rate = 0.1 if name == "bert-dropout" else 0.0
            made.append(networks.sentences(options.data, options.records, 0, *options.bert, dropout=rate))
    return made


def run(options: argparse.Namespace) -> list[Row]:
    """A row for each seed, network, optimizer, implementation and test."""
    made, seeds, there = (
        tasks(options),
        range(options.first_seed, options.first_seed + options.seeds),
        done(options.out),
    )
    todo = [(seed, task, optimizer, kind, *which) for seed in seeds for task in made for optimizer in options.optimizers
            for kind in options.implementations for which in TESTS if which[0] in options.statistics and which[1] in
            options.tests and looked_at(kind, which[1], optimizer, seed)
            and (task.name, optimizer, kind, *which, str(seed)) not in there]  # fmt: skip
    about = {**versions(), "setting": "quick" if options.quick else "full"}
    rows: list[Row] = []
    bar = Bar(len(todo))
    for number, (seed, task, optimizer, kind, statistics, test) in enumerate(todo):
        bar.at(number, f"{task.name}, {optimizer}, {kind}: {statistics} {test}")
        start = time.perf_counter()
        step = networks.implementation(task, kind, optimizer, statistics)
        given = dict(SMALL) if (statistics, test) == ("paper", "uncalibrated_noise") else {}
        if given and "no noise" in kind:
            given["models"] = 2  # which are equal
        found, steps = tested(step, statistics, test, seed, **given)
        rows.append({
            **about, "network": task.name, "optimizer": optimizer, "implementation": kind, "statistics": statistics,
            "test": test, "seed": seed, "verdict": found.verdict,
            "expected": expected(kind, test, statistics, optimizer), "p_value": _number(found.p_value),
            "statistic": _number(found.statistic), "bound": _number(found.bound), "steps": steps,
            "search_steps": found.data.get("search_steps", "-"), "sentence": found.sentence,
            "seconds": f"{time.perf_counter() - start:.1f}",
        })  # fmt: skip
        if options.out:
            append(options.out, rows[-1:], COLUMNS)
        if options.curves and seed == 0:
            keep(options.curves, rows[-1], found)
    bar.at(len(todo), "done")
    return rows


def done(file: Path | None) -> set[tuple[str, ...]]:
    """What the file has rows of: a run goes on where it was stopped."""
    names = ("network", "optimizer", "implementation", "statistics", "test", "seed")
    return {tuple(row[name] for name in names) for row in (read_rows(file) if file is not None else ())}


def tested(step: Any, statistics: str, test: str, seed: int, **given: Any) -> tuple[Finding, int]:
    """A test on a step of which nothing is known yet, and the training steps it took, those of its searches too."""
    probe = Probe(step, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # seeds make noise repeatable, which is what is wanted here
        try:
            found = TESTS[statistics, test](probe, seed=seed, **given)
        except AuditError as problem:
            found = not_tested(test, str(problem))
    return found, probe.steps


def keep(file: Path, row: Row, found: Finding) -> None:
    """Add a test's curve to the file: of the paper's noise test every distance, else a point for each C or B."""
    data = found.data
    x = next((name for name in ("sizes", "alone", "norms") if name in data), None)
    y = next((name for name in ("losses", "distances", "changes") if name in data), None)
    if found.name == "minibatch_clipping":
        y = "changes" if "changes" in data else None
    if x is None or y is None or len(data[x]) != len(data[y]):
        return
    line = {name: row[name] for name in ("network", "optimizer", "implementation", "statistics", "test", "verdict",
                                         "p_value")}  # fmt: skip
    line |= {"x_is": x, "x": [_number(v) for v in data[x]], "y_is": y, "y": [_number(v) for v in data[y]]}
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# ---------------------------------------------------------------------- the command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--data", type=Path, help="the folder with the data (without it, a message says where to get it)")
    made.add_argument("--quick", action="store_true", help="ResNet-8, one layer of BERT, one seed")
    made.add_argument("--networks", nargs="+", choices=("resnet", "bert", "bert-dropout"), default=["resnet", "bert"])
    made.add_argument("--optimizers", nargs="+", choices=("sgd", "adam"), default=["sgd", "adam"])
    made.add_argument("--implementations", nargs="+", choices=tuple(networks.KINDS), default=list(networks.KINDS))
    made.add_argument("--statistics", nargs="+", choices=("fastdp", "paper"), default=["fastdp", "paper"])
    known = list(dict.fromkeys(test for _, test in TESTS))
    made.add_argument("--tests", nargs="+", choices=known, default=known)
    made.add_argument("--seeds", type=int, help="how many; default 3, or 1 with --quick")
    made.add_argument("--first-seed", type=int, default=0)
    made.add_argument("--out", type=Path, help="append a row a test to this CSV file, but none that it has")
    made.add_argument("--curves", type=Path, help="append the curves of seed 0 to this file, for the figures")
    made.add_argument("--plots", type=Path, help="write a PNG for each network and optimizer into this folder")
    made.add_argument("--report", action="store_true", help="only write tables and figures of docs/private_bugs.md")
    return made


def main(arguments: Sequence[str] | None = None, resnet: tuple[int, ...] = (), bert: tuple[int, ...] = ()) -> int:
    """Run; 0 if all verdicts of fastdp's tests are as expected. resnet, bert: sizes other than the options'."""
    options = parser().parse_args(arguments)
    if options.report:
        report()
        return 0
    if options.plots and not options.curves:
        raise SystemExit("--plots draws the curves of --curves FILE: name one")
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.records = 400
    options.resnet = resnet or ((1, 16) if options.quick else (3, 16))
    options.bert = bert or ((1, 64) if options.quick else (2, 128))
    rows = run(options)
    print(tables(rows))
    if options.plots:
        figures(read_curves(options.curves), options.plots)
    return int(not all(as_expected(row) for row in rows if row["statistics"] == "fastdp"))


if __name__ == "__main__":
    sys.exit(main())
