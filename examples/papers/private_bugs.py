"""The experiment of "Finding private bugs: debugging implementations of DP-SGD" (submitted to ICLR 2023), again.

    python examples/papers/private_bugs.py --data DIR [--quick] [--seeds 3] [--out FILE.csv] [--plots DIR]
    python examples/papers/private_bugs.py --report    # the tables of docs/private_bugs.md, from the rows kept

A ResNet-20 on CIFAR-10 and a small BERT on SST-2, each trained by SGD and by Adam, rightly and with the paper's bugs;
the three tests of fastdp.audit must find each bug, and nothing else.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))  # of the checkout, where benchmarks/ is

import private_bugs_networks as networks

from benchmarks.report import table
from benchmarks.timing import Row, append, versions
from fastdp.audit import Finding
from fastdp.audit.clipping import no_clipping
from fastdp.audit.measure import Probe
from fastdp.audit.minibatch import minibatch_clipping
from fastdp.audit.noise import uncalibrated_noise
from fastdp.commands.demo import progress

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS, DOC = ROOT / "benchmarks/data/private_bugs.csv", ROOT / "docs/private_bugs.md"
TESTS: dict[str, Callable[..., Finding]] = {
    "no_clipping": no_clipping, "minibatch_clipping": minibatch_clipping, "uncalibrated_noise": uncalibrated_noise,
}  # fmt: skip
FINDS = {"no_clipping": "no clipping", "minibatch_clipping": "mini-batch", "uncalibrated_noise": "uncalibrated"}
PAPER = {  # its figures 2, 3 and 4; those with Adam are in its appendix
    ("no_clipping", "per-example"): "varies with C",
    ("no_clipping", "no clipping"): "constant",
    ("minibatch_clipping", "per-example"): "p < 0.01",
    ("minibatch_clipping", "mini-batch"): "p > 0.99",
    ("uncalibrated_noise", "per-example"): "p << 0.01",
    ("uncalibrated_noise", "uncalibrated"): "p large",
    ("uncalibrated_noise", "mini-batch"): "p << 0.01",
    ("uncalibrated_noise", "mini-batch, uncalibrated"): "p large",
}
COLUMNS = (
    "network", "optimizer", "implementation", "test", "seed", "verdict", "expected", "p_value", "statistic", "bound",
    "seconds", "setting", "device", "threads", "torch", "fastdp", "commit", "date", "sentence",
)  # fmt: skip


def expected(kind: str, test: str) -> str:
    """What the test should say of an implementation: it finds the bug it is for, in others none.

    Of a step that does not depend on C at all, nothing but that can be told: the other tests may say "not tested".
    """
    if FINDS[test] in kind.split(", "):
        return "bug"
    return "ok or not tested" if kind == "no clipping" else "ok"


def as_expected(row: Row) -> bool:
    return str(row["verdict"]) in str(row["expected"]).split(" or ")


# ---------------------------------------------------------------------- the runs


def tasks(options: argparse.Namespace) -> list[networks.Task]:
    """The networks asked for; exits with where to get data that is missing."""
    made = []
    for name in options.networks:
        if name == "resnet":
            made.append(networks.images(networks.need_images(options), options.records, 0, *options.resnet))
        else:
            made.append(networks.sentences(networks.need_sentences(options), options.records, 0, *options.bert))
    return made


def run(options: argparse.Namespace) -> tuple[list[Row], dict[tuple[str, ...], Finding]]:
    """A row for each network, optimizer, implementation, test and seed; and the findings of the first seed, to plot."""
    todo = [(task, optimizer, kind, seed, test) for task in tasks(options) for optimizer in options.optimizers
            for kind in options.implementations for seed in range(options.seeds) for test in options.tests]  # fmt: skip
    about = {**versions(), "setting": "quick" if options.quick else "full", "date": datetime.date.today().isoformat()}
    rows: list[Row] = []
    kept: dict[tuple[str, ...], Finding] = {}
    probe: tuple[object, Probe | None] = None, None
    for number, (task, optimizer, kind, seed, test) in enumerate(todo):
        progress(number, len(todo), f"{task.name}, {optimizer}, {kind}: {test}")
        start = time.perf_counter()
        if probe[0] != (of := (task.name, optimizer, kind, seed)):  # what one test measured, the next need not
            probe = of, Probe(networks.implementation(task, kind, optimizer), seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # seeds make noise repeatable, which is what is wanted here
            found = TESTS[test](probe[1], seed=seed)
        kept.setdefault((task.name, optimizer, kind, test), found)
        rows.append({
            **about, "network": task.name, "optimizer": optimizer, "implementation": kind, "test": test, "seed": seed,
            "verdict": found.verdict, "expected": expected(kind, test), "p_value": _number(found.p_value),
            "statistic": _number(found.statistic), "bound": _number(found.bound), "sentence": found.sentence,
            "seconds": f"{time.perf_counter() - start:.1f}",
        })  # fmt: skip
        if options.out:
            append(options.out, rows[-1:], COLUMNS)
    progress(len(todo), len(todo), "done")
    return rows, kept


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


# ---------------------------------------------------------------------- tables


def tables(rows: Sequence[Row]) -> str:
    """A table for each test: verdicts and the range of p-values of each implementation, beside the paper's."""
    parts = []
    places = list(dict.fromkeys((str(row["network"]), str(row["optimizer"])) for row in rows))
    for test in dict.fromkeys(str(row["test"]) for row in rows):
        mine = [row for row in rows if row["test"] == test]
        head = [
            "implementation",
            "expected",
            *(f"{network}, {optimizer}" for network, optimizer in places),
            "the paper",
        ]
        lines = []
        for kind in dict.fromkeys(str(row["implementation"]) for row in mine):
            of = [row for row in mine if row["implementation"] == kind]
            cells = [_cell([row for row in of if (row["network"], row["optimizer"]) == place]) for place in places]
            lines.append([kind, expected(kind, test), *cells, PAPER.get((test, kind), "-")])
        parts.append(f"### {test}\n\n{table(head, lines)}")
    wrong = [row for row in rows if not as_expected(row)]
    parts.append(f"{len(rows) - len(wrong)} of {len(rows)} verdicts are as expected."
                 + "".join(f"\n- not: {row['network']}, {row['optimizer']}, {row['implementation']}, {row['test']}, "
                           f"seed {row['seed']}: {row['verdict']}" for row in wrong))  # fmt: skip

    def all_of(column: str) -> str:
        return ", ".join(sorted({str(row[column]) for row in rows}))

    minutes = sum(float(str(row["seconds"])) for row in rows) / 60
    where = f"{all_of('setting')}, {all_of('device')}, {all_of('threads')} thread(s), torch {all_of('torch')}"
    parts.append(f"{where}, commit {all_of('commit')}, {all_of('date')}; {minutes:.0f} minutes in all")
    return "\n\n".join(parts)


def _cell(rows: Sequence[Row]) -> str:
    """Verdicts, counted, and their p-values."""
    if not rows:
        return ""
    verdicts = [str(row["verdict"]) for row in rows]
    text = ", ".join(f"{name} {verdicts.count(name)}/{len(rows)}" for name in dict.fromkeys(verdicts))
    values = [float(str(row["p_value"])) for row in rows if row["p_value"] != "-"]
    values = sorted(value for value in values if not math.isnan(value))
    if not values:
        return text
    low, high = f"{values[0]:.2g}", f"{values[-1]:.2g}"
    return f"{text}; p {low}" + (f" to {high}" if low != high else "")


def report(doc: Path = DOC, runs: Path = RUNS) -> None:
    """Put the tables of the rows kept between the marks of the page."""
    with runs.open(newline="") as file:
        rows: list[Row] = [dict(row) for row in csv.DictReader(file)]
    text = doc.read_text()
    new = f"<!-- table: private bugs -->\n{tables(rows)}\n<!-- end -->"
    doc.write_text(re.sub(r"<!-- table: private bugs -->.*?<!-- end -->", lambda _: new, text, flags=re.S))


# ---------------------------------------------------------------------- plots


def plot(kept: dict[tuple[str, ...], Finding], folder: Path) -> list[Path]:
    """A figure for each network and optimizer: the three tests' curves, as in the paper's figures 2 to 4."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for network, optimizer in dict.fromkeys(key[:2] for key in kept):
        tests = [test for test in TESTS if any(key[:2] == (network, optimizer) and key[3] == test for key in kept)]
        figure = Figure(figsize=(4.6 * len(tests), 3.8), layout="constrained")
        for place, test in enumerate(tests):
            axes = figure.add_subplot(1, len(tests), place + 1)
            for (*where, kind, of), found in kept.items():
                if (*where, of) == (network, optimizer, test):
                    draw(axes, kind, found)
            axes.set_title(test, fontsize=10)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=7)
        figure.suptitle(f"{network}, {optimizer}")
        written.append(folder / (re.sub("[^a-z0-9]+", "_", f"private bugs {network} {optimizer}".lower()) + ".png"))
        figure.savefig(written[-1], dpi=75)
    return written


COLOURS = ("#88ccee", "#bb5566", "#ddaa33", "#228833", "#000000")


def draw(axes: Any, kind: str, found: Finding) -> None:
    """One curve: the change of the parameters, or the distance of models, over its largest value."""
    data = found.data
    y = "distances" if "distances" in data else "changes"
    x = next((name for name in ("sizes", "alone", "norms") if name in data), None)
    if x is None or y not in data:
        return  # not tested: the row says why
    p = "" if found.p_value is None else f", p {found.p_value:.2g}"
    points = sorted(zip(data[x], data[y], strict=True))
    largest = max(max(data[y]), 1e-300)
    place = list(networks.KINDS).index(kind)  # curves often lie on one another: the first ones are broad
    axes.plot([a for a, _ in points], [b / largest for _, b in points], "o-", ms=3, lw=6 - 1.2 * place,
              color=COLOURS[place], label=f"{kind}: {found.verdict}{p}")  # fmt: skip
    axes.set(xscale="log", yscale="log",
             xlabel={"sizes": "batch size B", "alone": "mean of the steps alone", "norms": "clipping norm C"}[x],
             ylabel=("distance of models" if y == "distances" else "change of parameters") + " / largest")  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter("")  # over less than a decade their names lie on one another


# ---------------------------------------------------------------------- the command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--data", type=Path, help="the folder with the data (without it, a message says where to get it)")
    made.add_argument(
        "--quick", action="store_true", help="ResNet-8, one layer of BERT, one seed: under two minutes on two CPU cores"
    )
    made.add_argument("--networks", type=_some(("resnet", "bert")), default=["resnet", "bert"])
    made.add_argument("--optimizers", type=_some(("sgd", "adam")), default=["sgd", "adam"])
    made.add_argument("--implementations", type=_some(tuple(networks.KINDS), ";"), default=list(networks.KINDS),
                      help="separated by ;")  # fmt: skip
    made.add_argument("--tests", type=_some(tuple(TESTS)), default=list(TESTS))
    made.add_argument("--seeds", type=int, help="how many; default 3, or 1 with --quick")
    made.add_argument("--out", type=Path, help="append a row a test to this CSV file")
    made.add_argument("--plots", type=Path, help="write a PNG for each network and optimizer into this folder")
    made.add_argument("--report", action="store_true", help="only write the tables of docs/private_bugs.md")
    return made


def _some(known: Sequence[str], by: str = ",") -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(by)]
        if bad := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(bad)}: know {', '.join(known)}")
        return names

    return parse


def main(arguments: Sequence[str] | None = None, resnet: tuple[int, ...] = (), bert: tuple[int, ...] = ()) -> int:
    """Run; 0 if all verdicts are as expected. resnet, bert: their sizes, where others than the options' are wanted."""
    options = parser().parse_args(arguments)
    if options.report:
        report()
        return 0
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.records = 400
    options.resnet = resnet or ((1, 16) if options.quick else (3, 16))
    options.bert = bert or ((1, 64) if options.quick else (2, 128))
    rows, kept = run(options)
    print(tables(rows))
    if options.plots:
        print("wrote " + ", ".join(map(str, plot(kept, options.plots))))
    return int(not all(as_expected(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
