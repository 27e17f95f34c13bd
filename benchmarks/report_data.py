"""Rows of the training benchmark: the newest of each measurement, which mode is best, where we lose, targets.

Knows only CSV files and the standard library, so that a report needs neither torch nor the contenders.
"""

from __future__ import annotations

import csv
import hashlib
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

Row = dict[str, str]
OK, OURS, GRAPHED, BASE, COMPILED = "ok", "fastdp", "fastdp graphed", "non-private", "non-private compiled"
EMPTY = ("", "-")
CASE = ("suite", "device", "threads", "sweep", "workload", "batch_size", "length", "dtype")
# columns measured together, which another run may leave out; the first tells whether it did
TIME = ("step_ms", "p20_ms", "p80_ms", "rounds", "ratio", "floor", "of_floor")
MEMORY = ("peak_mib", "memory_ratio")
LARGEST = ("largest_batch", "largest_batch_ratio")
CHECK = ("error", "error_dtype")
FACTS = ("torch", "triton", "opacus", "fastdp", "commit", "date")
NEEDED = (*CASE, "contender", "status", "why", *TIME, *MEMORY, *LARGEST, *CHECK, *FACTS)

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

    Time, memory, largest batch and error may come from runs of their own: what the last row did not measure is taken
    from the one before, unless either of them failed. "commit" then names both.
    """
    found: Cases = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        mine = found.setdefault(Case(*(row[column] for column in CASE)), {})
        before, fresh = mine.get(row["contender"]), dict(row)
        if before and before["status"] == OK == fresh["status"]:
            for group in (TIME, MEMORY, LARGEST, CHECK):
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


def best_opacus(group: dict[str, Row], column: str, most: bool = False) -> Best | None:
    """None where no mode has the number."""
    values = {name.removeprefix("opacus "): number(row, column) for name, row in group.items() if _opacus(name)}
    found = [Best(mode, value) for mode, value in values.items() if value is not None]
    return (max if most else min)(found, key=lambda best: best.value) if found else None


def _opacus(name: str) -> bool:
    return name.startswith("opacus")


def speed_up(group: dict[str, Row]) -> float | None:
    """Time of the fastest mode of Opacus over ours."""
    best, ours = best_opacus(group, "ratio"), number(group.get(OURS), "ratio")
    return round(best.value / ours, 2) if best and ours else None


def losses(group: dict[str, Row]) -> list[str]:
    """Where another contender does better than fastdp with flat, local clipping; in words."""
    ours = group.get(OURS)
    found: list[str] = []
    if ours is None:
        return found
    modes = {name: row for name, row in group.items() if _opacus(name)}

    def told(what: str, mine: str, column: str, wins: Callable[[float], bool]) -> None:
        numbers = {name: number(row, column) for name, row in modes.items()}
        better = [
            f"{name} {modes[name][column]}" for name, value in numbers.items() if value is not None and wins(value)
        ]
        if better:
            found.append(f"{what}: fastdp {mine}, {', '.join(better)}")

    if ours["status"] != OK:
        told("time", ours["status"], "ratio", lambda value: True)
    for column, what, unit in (
        ("ratio", "time", 1),
        ("memory_ratio", "memory", 1),
        ("largest_batch", "largest batch", -1),
    ):
        mine = number(ours, column)
        if mine is not None:
            told(what, ours[column], column, lambda value, mine=mine, unit=unit: unit * value < unit * mine)  # type: ignore[misc]
    return found


def beaten(group: dict[str, Row], column: str, most: bool = False) -> bool:
    """Whether a mode of Opacus does better in this column, or has a number where we have none."""
    best, ours = best_opacus(group, column, most), number(group.get(OURS), column)
    if best is None:
        return False
    if ours is None:
        return OURS in group and group[OURS]["status"] != OK
    return best.value > ours if most else best.value < ours


def by_compiling(group: dict[str, Row]) -> str:
    """In words, where torch.compile makes ordinary training faster than the eager one that ratios are over; or ""."""
    compiled, ours = number(group.get(COMPILED), "ratio"), number(group.get(OURS), "ratio")
    if compiled is None or ours is None or compiled >= 1:
        return ""
    return f"ordinary training takes {compiled:.2f} compiled: fastdp's {ours:.2f} is {ours / compiled:.2f} of that"


# ---------------------------------------------------------------------- targets


class Verdict(NamedTuple):
    """Of a target on one workload: met or not, or None where it asks nothing or was not measured."""

    met: bool | None
    text: str


LANGUAGE, CNN = ("gpt", "llama", "bert", "roberta", "lstm"), ("resnet", "convnext", "mnist-cnn", "cifar-cnn")
TARGETS = {
    "cpu": ("faster than every Opacus mode", "1.7x the best Opacus mode, if that costs over 1.8",
            "of the floor: 1.10 (language), 1.30 (CNN)", "memory at most 1.10"),
    "gpu": ("of the floor: 1.08", "2x Opacus ghost", "largest batch at least 0.90"),
}  # fmt: skip


def allowed(workload: str) -> float | None:
    """Of the floor, on the CPU; None where the targets name no such model (ViT)."""
    return 1.10 if workload.startswith(LANGUAGE) else 1.30 if workload.startswith(CNN) else None


def verdicts(case: Case, group: dict[str, Row]) -> list[Verdict]:
    """One for each of the suite's TARGETS; numbers are compared as they are shown, with two digits."""
    ours = group.get(OURS)
    if ours is None:
        return [Verdict(None, "not measured")] * len(TARGETS[case.suite])
    if ours["status"] != OK:
        return [Verdict(False, ours["status"])] * len(TARGETS[case.suite])
    if case.suite == "gpu":
        ghost, mine = number(group.get("opacus ghost"), "ratio"), number(ours, "ratio")
        return [
            _at_most(of_floor(ours), 1.08),
            _at_least(round(ghost / mine, 2) if ghost and mine else None, 2.0, _why(group.get("opacus ghost"))),
            _at_least(number(ours, "largest_batch_ratio"), 0.9),
        ]
    best, faster = best_opacus(group, "ratio"), speed_up(group)
    dear = Verdict(None, "asks nothing" if best else "no mode runs")
    if best and best.value > 1.8:
        dear = _at_least(faster, 1.7)
    limit = allowed(case.workload)
    return [
        Verdict(faster > 1, f"{faster:.2f}x {best.mode}") if best and faster else Verdict(None, "no mode runs"),
        dear,
        _at_most(of_floor(ours), limit) if limit else Verdict(None, _text(of_floor(ours)) + " (no target)"),
        _at_most(number(ours, "memory_ratio"), 1.1),
    ]


def _at_most(value: float | None, limit: float) -> Verdict:
    return Verdict(None if value is None else value <= limit, _text(value))


def _at_least(value: float | None, limit: float, why: str = "not measured") -> Verdict:
    return Verdict(None, why) if value is None else Verdict(value >= limit, f"{value:.2f}")


def _why(row: Row | None) -> str:
    return "not measured" if row is None or row["status"] == OK else row["status"]


def _text(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


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
    """Files of the figures: training_SUITE.png, training_SUITE_sweep.png."""
    found = []
    for suite in ("cpu", "gpu"):
        for place in places(cases, suite)[:1]:
            if measured(cases, suite, place):
                found.append(f"training_{suite}.png")
            if any(measured(cases, suite, place, sweep) for sweep in ("batch", "length")):
                found.append(f"training_{suite}_sweep.png")
    return found


def stamp(cases: Cases) -> str:
    """Of the rows: every figure carries it, so that one of other rows can be told."""
    text = repr(sorted((case, sorted(row.items())) for case, group in cases.items() for row in group.values()))
    return "rows " + hashlib.sha256(text.encode()).hexdigest()[:16]
