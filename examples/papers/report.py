"""docs/papers.md's tables: the papers' figures beside ours, from committed rows.

    python examples/papers/report.py [--check]

Reads benchmarks/data/papers_*.csv (rows of examples/papers/common.py) and examples/papers/paper_figures.csv, of columns
experiment, case, metric, paper, source, why: `paper` in the rows' unit (shares from 0 to 1, not percent), or words
where there is no number ("not stated"); `why`: the reason where ours differs. Nothing else gets into the tables.

Ours is the median over seeds of the rows of the highest mode (quick < short < full) that have the same setting as the
last of them; of a seed that was run twice the later run counts.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import between, table
from examples.papers import dp_loss_report
from examples.papers.common import COLUMNS, MODES, ROOT

DATA, FIGURES, PAGE = ROOT / "benchmarks/data", Path(__file__).with_name("paper_figures.csv"), ROOT / "docs/papers.md"
ASKED = ("experiment", "case", "metric", "paper", "source", "why")
SAME = ("mode", "train_records", "epochs", "steps", "batch", "sigma", "lr", "R", "clipping", "style")  # one setting
SHARES = ("accuracy", "ece", "mce", "clipped", "dropped", "share")  # metrics of these words are percentages
SETTING = ("train_records", "epochs", "steps", "batch", "sigma", "lr", "R", "clipping", "style")
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
            for number, row in enumerate(reader, start=2):
                if row["mode"] not in MODES or None in row.values():
                    raise ValueError(f"{path.name}, line {number}: {row}")
                found.append(row)
    return found


def figures(path: Path) -> list[Row]:
    """The papers' figures. Raises ValueError for other columns, and for a row that stands twice."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != ASKED:
            raise ValueError(f"{path.name} must have the columns {', '.join(ASKED)}")
        found = list(reader)
    keys = [(row["experiment"], row["case"], row["metric"]) for row in found]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ValueError(f"{path.name} has two rows for {', '.join(map(str, sorted(twice)))}")
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
        return f"{100 * value:.2f} %" if abs(value) < 0.1 else f"{100 * value:.1f} %"
    return f"{value:.2f}" if metric.startswith("epsilon") else f"{value:.3g}"


def told(metric: str, found: Ours | None) -> str:
    """Median, and what it is the median of."""
    if found is None:
        return "not run"
    text = number(metric, statistics.median(found.values))
    if len(found.values) == 1:
        return f"{text} (n 1)"
    low, high = number(metric, min(found.values)), number(metric, max(found.values))
    return f"{text} ({low} to {high}, n {len(found.values)})"


def theirs(row: Row) -> str:
    try:
        return number(row["metric"], float(row["paper"]))
    except ValueError:
        return row["paper"] or "not stated"


def setting(row: Row) -> str:
    """What a run was, in words, of the columns that are filled."""
    return ", ".join(f"{name.replace('train_', '')} {row[name]}" for name in SETTING if row[name])


# ---------------------------------------------------------------------- blocks


def experiment(name: str, asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """The table of one experiment, and the commands that its numbers name."""
    commands: dict[str, list[str]] = {}
    lines = []
    for row in asked:
        found = ours(rows, name, row["case"], row["metric"])
        place, mode = "", ""
        if found is not None:
            mode = found.row["mode"]
            runs = commands.setdefault(found.row["command"], [])
            words = f"{row['case']}: {setting(found.row)} (commit {found.row['commit']}, {found.row['date']})"
            runs += [words] if words not in runs else []
            place = str([*commands].index(found.row["command"]) + 1)
        lines.append([row["case"], row["metric"], theirs(row), told(row["metric"], found), mode, place, row["why"]])
    made = [f"### {name}", table(("case", "metric", "paper", "ours", "mode", "command", "why"), lines)]
    sources = list(dict.fromkeys(row["source"] for row in asked if row["source"]))
    if sources:
        made.append(f"Source: {'; '.join(sources)}.")
    for place, (command, runs) in enumerate(commands.items(), start=1):
        made.append("\n".join([f"{place}. `{command}`", "", *(f"   - {words}" for words in runs)]))
    return "\n\n".join(made)


def experiments(asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """Every experiment that the papers' figures name, in the order of that file."""
    names = list(dict.fromkeys(row["experiment"] for row in asked))
    return "\n\n".join(experiment(name, [r for r in asked if r["experiment"] == name], rows) for name in names)


def status(asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """Which experiment was run in which mode, and how often."""
    names = list(dict.fromkeys([row["experiment"] for row in [*asked, *rows]]))
    lines = []
    for name in names:
        mine = [row for row in rows if row["experiment"] == name]
        cells = []
        for mode in MODES:
            cases = {row["case"] for row in mine if row["mode"] == mode}
            runs = {tuple(row[k] for k in ("case", "seed", *SAME)) for row in mine if row["mode"] == mode}
            cells.append(f"{len(cases)} cases, {len(runs)} runs" if cases else "")
        shown = sum(row["experiment"] == name for row in asked)
        missing = sum(ours(rows, name, r["case"], r["metric"]) is None for r in asked if r["experiment"] == name)
        gaps = f"{missing} of {shown} figures not run" if missing else ""
        lines.append([name, *cells, gaps])
    return table(("experiment", *MODES, "missing"), lines)


def accounting(asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """epsilon of the papers' settings by three accountants, and what the papers say."""
    lines = []
    mine = [row for row in rows if row["experiment"] == "accounting"]
    for case in dict.fromkeys(row["case"] for row in mine):
        row = [row for row in mine if row["case"] == case][-1]
        found = [ours(mine, "accounting", case, f"epsilon_{name}") for name in ("gdp", "rdp", "prv")]
        spent = [number("epsilon", each.values[-1]) if each else "" for each in found]
        said = [theirs(r) for r in asked if (r["experiment"], r["case"]) == ("accounting", case)]
        spent = [*(said or ["not stated"])[:1], *spent]
        lines.append([case, *(row[name] for name in ("sigma", "batch", "train_records", "epochs", "delta")), *spent])
    return table(("setting", "sigma", "batch", "records", "epochs", "delta", "paper", "GDP", "RDP", "PRV"), lines)


def calibrations(asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """ECE and MCE of the cases whose figures a paper states, beside ours: the convergence paper's Table 2."""
    stated = [row for row in asked if row["metric"] in ("ece", "mce") and any(c.isdigit() for c in row["paper"])]
    lines = []
    for name, case in dict.fromkeys((row["experiment"], row["case"]) for row in stated):
        cells = []
        for metric in ("ece", "mce"):
            said = [theirs(r) for r in stated if (r["experiment"], r["case"], r["metric"]) == (name, case, metric)]
            cells += [*(said or ["not stated"])[:1], told(metric, ours(rows, name, case, metric))]
        lines.append([name, case, *cells])
    return table(("experiment", "case", "ECE: paper", "ours", "MCE: paper", "ours"), lines)


def membership(asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """The attack on each class (the convergence paper's Figure 5) by the cases of CIFAR-10 that it shows."""
    name = "CIFAR-10 CNN"
    cases = [row["case"] for row in asked if row["experiment"] == name and row["metric"] == "membership_auc"]
    named = [row["metric"] for row in rows if row["experiment"] == name]
    classes = [metric for metric in named if metric.startswith("membership_auc, class")]
    lines = []
    for metric in ("membership_auc", "membership_auc, with the loss", *dict.fromkeys(classes)):
        lines.append([metric.rpartition(", ")[2], *(told(metric, ours(rows, name, case, metric)) for case in cases)])
    lines[0][0] = "all classes"
    return table(("AUC", *cases), lines)


def page(text: str, asked: Sequence[Row], rows: Sequence[Row]) -> str:
    """docs/papers.md of today. Raises ValueError where it lacks a table's place."""
    trained = [row for row in rows if row["experiment"] != "accounting"]
    figured = [row for row in asked if row["experiment"] != "accounting"]
    for name, body in (("accounting", accounting(asked, rows)), ("status", status(figured, trained)),
                       ("calibration", calibrations(figured, trained)),
                       ("experiments", experiments(figured, trained)), ("membership", membership(figured, trained)),
                       *dp_loss_report.blocks(DATA, table).items()):  # fmt: skip
        text = between(text, name, body)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; with --check, exit status 1 if it is not what the rows say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if the page would change")
    options = parser.parse_args(arguments)
    old = PAGE.read_text(encoding="utf-8")
    new = page(old, figures(FIGURES), read(DATA))
    if options.check:
        print("as the rows say" if new == old else f"{PAGE.name} is not what the rows say: run it without --check")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
