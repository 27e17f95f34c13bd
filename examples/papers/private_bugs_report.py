"""The tables and figures of docs/private_bugs.md, from the rows and curves that private_bugs.py has measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import between, read_rows, table
from benchmarks.timing import Row
from examples.papers.pictures import Panel, panels

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS, DOC = ROOT / "benchmarks/data/private_bugs.csv", ROOT / "docs/private_bugs.md"
CURVES = ROOT / "benchmarks/data/private_bugs_curves.jsonl"
SHOWN = (("ResNet-20, CIFAR-10 (JPEG)", "sgd"), ("BERT (2 x 128), SST-2", "adam"))  # of which the page has figures

PAPER = {  # its figures 2 to 4 and 7; those with Adam, 5, 6 and 8, are said to be alike
    ("no_clipping", "per-example"): "varies with C",
    ("no_clipping", "no clipping"): "constant",
    ("minibatch_clipping", "per-example"): "p < 0.01",
    ("minibatch_clipping", "mini-batch"): "p > 0.99",
    **{("uncalibrated_noise", clipping): "p << 0.01" for clipping in ("per-example", "mini-batch", "no clipping")},
    **{("uncalibrated_noise", f"{clipping}, {noise}"): "p large, independent of C"
       for clipping in ("per-example", "mini-batch", "no clipping") for noise in ("uncalibrated", "no noise")},
}  # fmt: skip


def as_expected(row: Row) -> bool:
    return str(row["verdict"]) in str(row["expected"]).split(" or ")


def tables(rows: Sequence[Row]) -> str:
    """Verdicts of both statistics for each test and implementation, over all networks and seeds, and the paper's p.

    Only counted are rows with dropout, and cases of which the paper says nothing, if all verdicts are as expected.
    """
    lines = []
    kept = [row for row in rows if "dropout" not in str(row["network"])]
    for test, kind in dict.fromkeys((str(row["test"]), str(row["implementation"])) for row in kept):
        mine = [row for row in kept if (row["test"], row["implementation"]) == (test, kind)]
        if (test, kind) not in PAPER and all(map(as_expected, mine)):
            continue
        hoped = " or ".join(dict.fromkeys(word for row in mine for word in str(row["expected"]).split(" or ")))
        ours, paper = ([row for row in mine if row["statistics"] == name] for name in ("fastdp", "paper"))
        lines.append([test, kind, hoped, _verdicts(ours), _cell(paper), PAPER.get((test, kind), "-")])
    head = ["test", "implementation", "expected", "fastdp's test", "the paper's test", "the paper says"]
    parts = [table(head, lines)] if lines else []
    parts.append(counted(rows))

    def all_of(column: str) -> str:
        return ", ".join(sorted({str(row[column]) for row in rows}))

    minutes = sum(float(str(row["seconds"])) for row in rows) / 60
    where = f"{all_of('setting')}, {all_of('device')}, {all_of('threads')} thread(s), torch {all_of('torch')}"
    parts.append(f"{where}, commit {all_of('commit')}, {all_of('date')}; {minutes:.0f} minutes in all")
    return "\n\n".join(parts)


def counted(rows: Sequence[Row]) -> str:
    """How many verdicts are as expected, of each statistics, without and with dropout; and which are not."""
    lines = []
    for dropout in (False, True):
        for statistics in ("fastdp", "paper"):
            mine = [r for r in rows if r["statistics"] == statistics and ("dropout" in str(r["network"])) == dropout]
            if not mine:
                continue
            right = sum(map(as_expected, mine))
            unsure = sum(r["verdict"] in ("undecided", "not tested") for r in mine if not as_expected(r))
            name = "fastdp's tests" if statistics == "fastdp" else "the paper's tests"
            where = ", with dropout" if dropout else ""
            lines.append(f"- {name}{where}: {right} of {len(mine)} verdicts are as expected, {unsure} are undecided or "
                         f"not tested, {len(mine) - right - unsure} are wrong.")  # fmt: skip
    for row in rows:
        if row["statistics"] == "fastdp" and not as_expected(row) and "dropout" not in str(row["network"]):
            lines.append(f"- not: {row['network']}, {row['optimizer']}, {row['implementation']}, {row['test']}, seed "
                         f"{row['seed']}: {row['verdict']}")  # fmt: skip
    return "\n".join(lines)


def _verdicts(rows: Sequence[Row]) -> str:
    """Verdicts, counted."""
    found = [str(row["verdict"]) for row in rows]
    return ", ".join(f"{name} {found.count(name)}/{len(rows)}" for name in dict.fromkeys(found))


def _cell(rows: Sequence[Row]) -> str:
    """Verdicts, counted, and their p-values."""
    text = _verdicts(rows)
    values = [float(str(row["p_value"])) for row in rows if row["p_value"] != "-"]
    values = sorted(value for value in values if not math.isnan(value))
    if not values:
        return text
    low, high = f"{values[0]:.2g}", f"{values[-1]:.2g}"
    return f"{text}; p {low}" + (f" to {high}" if low != high else "")


# ---------------------------------------------------------------------- figures


DRAWN = ("per-example", "no clipping", "mini-batch", "per-example, uncalibrated", "mini-batch, uncalibrated",
         "per-example, no noise")  # fmt: skip
WORDS = {"sizes": "batch size B", "alone": "mean of the steps alone", "norms": "clipping norm C",
         "distances": "distance of models", "changes": "change of parameters", "losses": "change in loss"}  # fmt: skip


def read_curves(file: Path) -> list[dict[str, Any]]:
    """The curves of a file; the last one of each, where there are several."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    names = ("network", "optimizer", "implementation", "statistics", "test")
    return list({tuple(line[name] for name in names): line for line in lines}.values())


def figures(curves: Sequence[dict[str, Any]], folder: Path) -> None:
    """A figure for each network and optimizer, as the paper's figures 2 to 8: curves over their largest values."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = [c for c in curves if c["implementation"] in DRAWN and c["test"] != "noise_distribution"]
    for network, optimizer in dict.fromkeys((curve["network"], curve["optimizer"]) for curve in kept):
        mine = [curve for curve in kept if (curve["network"], curve["optimizer"]) == (network, optimizer)]
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for curve in sorted(mine, key=lambda curve: (curve["statistics"], DRAWN.index(curve["implementation"]))):
            points = sorted(zip(map(float, curve["x"]), map(float, curve["y"]), strict=True))
            largest = max([abs(y) for _, y in points] + [1e-300])
            p = "" if curve["p_value"] == "-" else f", p {float(curve['p_value']):.2g}"
            lines = found.setdefault((curve["statistics"], curve["test"]), {"axes": (curve["x_is"], curve["y_is"])})
            lines[f"{curve['implementation']}: {curve['verdict']}{p}"] = (
                [x for x, _ in points], [y / largest for _, y in points])  # fmt: skip
        made = []
        for (statistics, test), lines in found.items():
            x, y = (WORDS[word] for word in lines.pop("axes"))
            logs = "xy" if statistics == "fastdp" else "x" if test == "no_clipping" else ""
            made.append(Panel(f"{statistics}: {test}; {network}, {optimizer}", lines, x, f"{y} / largest", logs))
        name = re.sub("[^a-z0-9]+", "_", f"private bugs {network} {optimizer}".lower())
        panels(folder / f"{name}.png", made, columns=3)


def report(doc: Path = DOC, runs: Path = RUNS, draw: bool = True) -> None:
    """Put the tables of the rows between the marks of the page, and draw its figures."""
    rows: list[Row] = [dict(row) for row in read_rows(runs)]
    text = doc.read_text()
    doc.write_text(between(text, "private bugs", tables(rows)))
    if draw:
        figures([line for line in read_curves(CURVES) if (line["network"], line["optimizer"]) in SHOWN], doc.parent)
