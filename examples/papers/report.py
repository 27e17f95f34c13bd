"""docs/papers.md's tables: the papers' figures beside ours, from committed rows.

    python examples/papers/report.py [--check]

Reads benchmarks/data/papers_*.csv (rows of examples/papers/common.py) and examples/papers/paper_figures.csv, of columns
experiment, case, metric, paper, source, why: `paper` in the rows' unit (shares from 0 to 1, not percent), or words
where there is no number ("not stated"); `why`: the reason where ours differs, which the page leaves to its text.

Ours is the median over seeds of the rows of the highest mode (quick < short < full) that have the same setting as the
last of them; of a seed that was run twice the later run counts.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import between, read_rows, table
from examples.papers import dp_loss_report
from examples.papers.common import COLUMNS, MODES, ROOT

DATA, FIGURES, PAGE = ROOT / "benchmarks/data", Path(__file__).with_name("paper_figures.csv"), ROOT / "docs/papers.md"
SAME = ("mode", "train_records", "epochs", "steps", "batch", "sigma", "lr", "R", "clipping", "style")  # one setting
SHARES = ("accuracy", "ece", "mce", "clipped", "dropped", "share")  # metrics of these words are percentages
CALIBRATION = {"accuracy": "accuracy", "ece": "ECE"}
REGRESSION = {
    "training loss": "training loss", "test loss": "test loss", "share above its lowest": "ends above its lowest",
}  # fmt: skip
LOSSES = {
    "accuracy_best": "best accuracy", "accuracy_epsilon_below_1.5": "best below epsilon 1.5",
    "accuracy": "last accuracy", "ece": "ECE",
}  # fmt: skip
SHOWN: dict[str, dict[str, str]] = {  # the metrics of an experiment's table, and what its columns are called
    "MNIST CNN": CALIBRATION,
    "CIFAR-10 CNN": CALIBRATION,
    "SNLI, MiniLM-L6, last block": CALIBRATION,
    "Table 1, the NTK": {
        "share: symmetric": "symmetric", "share: positive in quadratic form": "positive (quadratic form)",
        "share: positive in eigenvalues": "positive (eigenvalues)", "share: loss converges": "loss converges",
        "share: loss never rises": "never rises", "share: zero loss, if it converges": "to zero, if it converges",
    },
    "Wine Quality": REGRESSION,
    "California Housing": REGRESSION,
    "ViT lr x R grid, CIFAR-10": {
        "accuracy": "accuracy", "ece": "ECE", "temperature": "temperature",
        "accuracy_explained_by_lr_R": "explained by lr x R", "accuracy_explained_by_lr": "by lr",
    },
    "DPLoss, MNIST": LOSSES,
    "DPLoss, Fashion-MNIST": LOSSES,
    "DPLoss, CIFAR-10": LOSSES,
}  # fmt: skip
CROSSED: dict[str, dict[str, str]] = {  # of cases "a, b": a line for each b, columns for each a
    "Theorem 1, layerwise": {
        "share whose loss rises": "loss rises", "share that reaches zero": "to zero",
    },
    "Fact 4.1, fixed noise": {"largest distance from no noise": "distance"},
}  # fmt: skip
Row = dict[str, str]


class Ours(NamedTuple):
    """Runs of one case and metric: values by seed, in one setting; the last row of them."""

    values: tuple[float, ...]
    row: Row


# ---------------------------------------------------------------------- rows


def read(folder: Path) -> list[Row]:
    """Rows of all experiments, but for *_bins.csv. Raises ValueError for a file of other columns."""
    found: list[Row] = []
    for path in sorted(folder.glob("papers_*.csv")):
        if path.stem.endswith("_bins"):
            continue
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise ValueError(
                    f"{path.name} has the columns {', '.join(reader.fieldnames or ())}, not those of a result"
                )
            found += reader
    return found


def ours(rows: Iterable[Row], experiment: str, case: str, metric: str) -> Ours | None:
    """What was measured of one figure, or None."""
    mine = [row for row in rows if (row["experiment"], row["case"], row["metric"]) == (experiment, case, metric)]
    if not mine:
        return None
    best = max((row["mode"] for row in mine), key=MODES.index)
    last = [row for row in mine if row["mode"] == best][-1]
    same = [row for row in mine if all(row[name] == last[name] for name in SAME)]
    by_seed = {row["seed"]: float(row["value"]) for row in same}  # the later run of a seed
    return Ours(tuple(by_seed.values()), last)


# ---------------------------------------------------------------------- words


def number(metric: str, value: float) -> str:
    """As the page shows it: shares in percent, epsilons with two decimals, others with three digits."""
    if set(re.split(r"\W|_", metric)) & set(SHARES):
        if value in (0, 1):
            return f"{100 * value:.0f} %"
        return f"{100 * value:.2f} %" if abs(value) < 0.1 else f"{100 * value:.1f} %"
    return f"{value:.2f}" if metric.startswith("epsilon") else f"{value:.3g}"


def told(metric: str, found: Ours | None) -> str:
    """Median, and what it is the median of."""
    if found is None:
        return "not run"
    text = number(metric, statistics.median(found.values))
    low, high = number(metric, min(found.values)), number(metric, max(found.values))
    return text if low == high else f"{text} ({low} to {high})"


def is_stated(row: Row) -> bool:
    """Whether the paper has a figure of it, not only words."""
    return any(letter.isdigit() for letter in row["paper"])


def theirs(row: Row) -> str:
    try:
        return number(row["metric"], float(row["paper"]))
    except ValueError:
        return row["paper"] or "not stated"


# ---------------------------------------------------------------------- blocks


def experiment(name: str, metrics: Mapping[str, str], asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """The table of one experiment: a line for each case that was run, a column for each metric.

    A metric of which the paper states a figure has two columns, the paper's and ours. Bold: the paper guarantees it.
    The column of runs is left out where all cases have as many of one mode.
    """
    said = {(row["case"], row["metric"]): row for row in asked if row["experiment"] == name}
    stated = {metric for (_, metric), row in said.items() if is_stated(row)}
    head = ["case", "runs"]
    for metric, title in metrics.items():
        head += [f"{title}: paper", "ours"] if metric in stated else [title]
    lines = []
    for case in dict.fromkeys(case for case, _ in said):
        found = {metric: ours(rows, name, case, metric) for metric in metrics}
        runs = [each for each in found.values() if each]
        if not runs:
            continue
        cells = [case, f"{max(len(each.values) for each in runs)} {runs[0].row['mode']}"]
        for metric, each in found.items():
            asked_of = said.get((case, metric))
            if metric in stated:
                cells.append(theirs(asked_of) if asked_of and is_stated(asked_of) else "")
            text = told(metric, each) if each else ""
            cells.append(f"**{text}**" if asked_of and asked_of["paper"] == "guaranteed" else text)
        lines.append(cells)
    if len({line[1] for line in lines}) == 1:
        head, lines = [head[0], *head[2:]], [[line[0], *line[2:]] for line in lines]
    return table(head, lines)


def crossed(name: str, metrics: Mapping[str, str], asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """The table of an experiment whose cases are pairs: a line for each second part, columns for each first one."""
    pairs = [row["case"].split(", ") for row in asked if row["experiment"] == name]
    firsts, seconds = (list(dict.fromkeys(pair[place] for pair in pairs)) for place in (0, 1))
    lines = []
    for second in seconds:
        found = [ours(rows, name, f"{first}, {second}", metric) for first in firsts for metric in metrics]
        cells = [told(metric, each) for metric, each in zip([*metrics] * len(firsts), found, strict=True)]
        lines.append([second, *cells])
    return table(("case", *(f"{first}: {title}" for first in firsts for title in metrics.values())), lines)


def accounting(asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """epsilon of the papers' settings by three accountants, and what the papers say."""
    lines = []
    mine = [row for row in rows if row["experiment"] == "accounting"]
    for case in dict.fromkeys(row["case"] for row in mine):
        found = [ours(mine, "accounting", case, f"epsilon_{name}") for name in ("gdp", "rdp", "prv")]
        spent = [number("epsilon", each.values[-1]) if each else "" for each in found]
        said = [theirs(r) for r in asked if (r["experiment"], r["case"]) == ("accounting", case)]
        spent = [*(said or ["not stated"])[:1], *spent]
        lines.append([case, *spent])
    return table(("setting", "paper", "GDP", "RDP", "PRV"), lines)


def membership(asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """The attack on CIFAR-10: over all classes, with the loss, and its range over attacks on single classes."""
    name, mark = "CIFAR-10 CNN", "membership_auc"
    classes = [row["metric"] for row in rows if row["experiment"] == name and f"{mark}, class" in row["metric"]]
    lines = []
    for case in (row["case"] for row in asked if (row["experiment"], row["metric"]) == (name, mark)):
        single = [each.values[-1] for metric in dict.fromkeys(classes) if (each := ours(rows, name, case, metric))]
        both = [told(metric, ours(rows, name, case, metric)) for metric in (mark, f"{mark}, with the loss")]
        lines.append([case, *both, f"{number(mark, min(single))} to {number(mark, max(single))}"])
    return table(("AUC", "logits, label", "logits, label, loss", "logits, label: each class alone"), lines)


def page(text: str, asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """docs/papers.md of today. Raises ValueError where it lacks a table's place."""
    blocks = {name: experiment(name, metrics, asked, rows) for name, metrics in SHOWN.items()}
    blocks |= {name: crossed(name, metrics, asked, rows) for name, metrics in CROSSED.items()}
    blocks |= {"accounting": accounting(asked, rows), "membership": membership(asked, rows)}
    blocks |= dp_loss_report.blocks(DATA)
    for name, body in blocks.items():
        text = between(text, name, body)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; with --check, exit status 1 if it is not what the rows say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the page would change")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = page(old, read_rows(FIGURES), read(DATA))
    if options.check:
        print("as the rows say" if new == old else f"{PAGE.name} is not what the rows say: run it without --check")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
