"""Rows of the training benchmark: the newest of each measurement, which mode is best, where we lose.

Knows only CSV files and the standard library, so that a report needs neither torch nor the contenders.
"""

from __future__ import annotations

import csv
import hashlib
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

Row = dict[str, str]
OK, OURS, GRAPHED, BASE, COMPILED = "ok", "fastdp", "fastdp graphed", "non-private", "non-private compiled"
EMPTY = ("", "-")
CASE = ("suite", "device", "threads", "sweep", "workload", "batch_size", "length", "dtype")
# columns measured together, which another run may leave out; the first tells whether it did
TIME = ("step_ms", "p20_ms", "p80_ms", "rounds", "ratio", "floor", "of_floor")
MEMORY = ("peak_mib", "memory_ratio")
CHECK = ("error", "error_dtype")
FACTS = ("torch", "triton", "opacus", "fastdp", "commit", "date")
NEEDED = (*CASE, "contender", "status", "why", *TIME, *MEMORY, *CHECK, *FACTS)

# one of each family first: the order of tables and, where there is room for some only, of importance
WORKLOADS = ("gpt2", "bert", "gpt2-lora", "vit-b16", "resnet18", "convnext-t", "cifar-cnn", "lstm", "llama-1b",
             "llama-lora", "gpt2-large", "gpt", "roberta", "bert-lora", "resnet50", "mnist-cnn")  # fmt: skip
CONTENDERS = (BASE, COMPILED, OURS, GRAPHED, "fastdp global", "fastdp automatic", "fastdp layerwise", "opacus hooks",
              "opacus functorch", "opacus ew", "opacus ghost")  # fmt: skip


class Case(NamedTuple):
    """What contenders are compared on; ratios of different cases are not comparable."""

    suite: str
    device: str
    threads: str
    sweep: str
    workload: str
    batch_size: str
    length: str
    dtype: str


Cases = dict[Case, dict[str, Row]]  # rows by contender


# ---------------------------------------------------------------------- reading


def read(folder: Path) -> list[Row]:
    """Rows of all training_*.csv, in the order written; files of the benchmark before (other columns) are passed over,
    and named if it is not their name that says so."""
    rows: list[Row] = []
    for path in sorted(folder.glob("training_*.csv")):
        if path.stem.endswith("_before"):
            continue
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in NEEDED if column not in (reader.fieldnames or NEEDED)]
            if missing:
                print(f"{path.name} is passed over: it has no column {', '.join(missing)}", file=sys.stderr)
                continue
            rows += [row for row in reader if row["workload"] not in EMPTY]
    return rows


def newest(rows: Iterable[Row]) -> Cases:
    """The last row of each case and contender, by date, then by place in the file.

    Time, memory and error may come from runs of their own: what the last row did not measure is taken
    from the one before, unless either of them failed. "commit" then names both.
    """
    found: Cases = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        mine = found.setdefault(Case(*(row[column] for column in CASE)), {})
        before, fresh = mine.get(row["contender"]), dict(row)
        if before and before["status"] == OK == fresh["status"]:
            for group in (TIME, MEMORY, CHECK):
                if fresh[group[0]] in EMPTY and before[group[0]] not in EMPTY:
                    fresh |= {column: before[column] for column in group}
                    fresh["commit"] = " ".join(dict.fromkeys([*before["commit"].split(), *fresh["commit"].split()]))
        mine[row["contender"]] = fresh
    return found


def number(row: Row | None, column: str) -> float | None:
    """A measured number of a row that is right; None for anything else."""
    if row is None or row["status"] != OK or row[column] in EMPTY:
        return None
    try:
        value = float(row[column])
    except ValueError:  # in words: out of memory
        return None
    return value if math.isfinite(value) else None


def of_floor(row: Row | None) -> float | None:
    """Time over the least possible."""
    told, ratio, floor = (number(row, column) for column in ("of_floor", "ratio", "floor"))
    return told if told is not None else round(ratio / floor, 2) if ratio is not None and floor else None


def ordered(cases: Iterable[Case]) -> list[Case]:
    """By workload, then type, batch and length."""

    def key(case: Case) -> tuple[object, ...]:
        known = WORKLOADS.index(case.workload) if case.workload in WORKLOADS else len(WORKLOADS)
        return known, case.workload, case.dtype != "float32", case.dtype, _size(case.batch_size), _size(case.length)

    return sorted(cases, key=key)


def _size(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # "-"
        return 0.0


def contenders(group: dict[str, Row]) -> list[str]:
    """Of one case, in the usual order."""
    return sorted(group, key=lambda name: CONTENDERS.index(name) if name in CONTENDERS else len(CONTENDERS))


def places(cases: Cases, suite: str) -> list[tuple[str, str]]:
    """(device, threads) that a suite was measured on: first that of most workloads, then the last one."""
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for case, group in cases.items():
        if case.suite == suite:
            number, last = found.get((case.device, case.threads), (0, ""))
            last = max([last, *(row["date"] for row in group.values())])
            found[case.device, case.threads] = (number + (case.sweep in EMPTY), last)
    return sorted(found, key=lambda place: found[place], reverse=True)


# ---------------------------------------------------------------------- who wins


class Best(NamedTuple):
    """The least value of a column among the modes of Opacus."""

    mode: str
    value: float


def best_opacus(group: dict[str, Row], column: str) -> Best | None:
    """None where no mode has the number."""
    values = {name.removeprefix("opacus "): number(row, column) for name, row in group.items() if _opacus(name)}
    found = [Best(mode, value) for mode, value in values.items() if value is not None]
    return min(found, key=lambda best: best.value) if found else None


def _opacus(name: str) -> bool:
    return name.startswith("opacus")


def speed_up(group: dict[str, Row]) -> float | None:
    """Time of the fastest mode of Opacus over ours."""
    best, ours = best_opacus(group, "ratio"), number(group.get(OURS), "ratio")
    return round(best.value / ours, 2) if best and ours else None


def losses(group: dict[str, Row]) -> list[str]:
    """Where another contender does better than fastdp with flat, local clipping; in words."""
    ours, found = group.get(OURS), list[str]()
    if ours is None:
        return found
    for column, what in (("ratio", "time"), ("memory_ratio", "memory")):
        mine, failed = number(ours, column), ours["status"] != OK and column == "ratio"
        better = [
            f"{name} {row[column]}" for name, row in group.items() if _opacus(name)
            and (value := number(row, column)) is not None and (failed or (mine is not None and value < mine))
        ]  # fmt: skip
        if better:
            found.append(f"{what}: fastdp {ours['status'] if failed else ours[column]}, {', '.join(better)}")
    return found


def beaten(group: dict[str, Row], column: str) -> bool:
    """Whether a mode of Opacus does better in this column, or has a number where we failed."""
    best, ours = best_opacus(group, column), number(group.get(OURS), column)
    if best is None:
        return False
    if ours is None:
        return OURS in group and group[OURS]["status"] != OK
    return best.value < ours


def by_compiling(group: dict[str, Row]) -> str:
    """In words, where torch.compile makes ordinary training faster than the eager one that ratios are over; or ""."""
    compiled, ours = number(group.get(COMPILED), "ratio"), number(group.get(OURS), "ratio")
    if compiled is None or ours is None or compiled >= 1:
        return ""
    return f"ordinary training takes {compiled:.2f} compiled: fastdp's {ours:.2f} is {ours / compiled:.2f} of that"


# ---------------------------------------------------------------------- what tables and figures are made of


def label(case: Case) -> str:
    return case.workload + ("" if case.dtype == "float32" else f", {case.dtype}")


def where(suite: str, place: tuple[str, str]) -> str:
    return place[0] if suite == "gpu" else f"{place[0]}, {place[1]} thread{'s' * (place[1] != '1')}"


def measured(cases: Cases, suite: str, place: tuple[str, str], sweep: str = "-") -> Cases:
    """Of one suite on one device, in order; sweep: "-" for none of them."""
    mine = [c for c in ordered(cases) if (c.suite, c.device, c.threads) == (suite, *place) and c.sweep == sweep]
    return {case: cases[case] for case in mine}


def figure_names(cases: Cases) -> list[str]:
    """Files of the figures: training_SUITE.png."""
    suites = [suite for suite in ("cpu", "gpu") for place in places(cases, suite)[:1] if measured(cases, suite, place)]
    return [f"training_{suite}.png" for suite in suites]


def stamp(cases: Cases) -> str:
    """Of the rows: every figure carries it, so that one of other rows can be told."""
    text = repr(sorted((case, sorted(row.items())) for case, group in cases.items() for row in group.values()))
    return "rows " + hashlib.sha256(text.encode()).hexdigest()[:16]
