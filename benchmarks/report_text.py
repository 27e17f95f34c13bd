"""Cells and sentences of the reports: numbers as they are in the rows, versions and commits."""

from __future__ import annotations

from collections.abc import Iterable

from . import report_data as data
from .report_data import OK, Case, Row

LOST = "†"  # marks a cell that beats ours


def cell(row: Row | None, column: str) -> str:
    """A number as it is in the CSV; where there is none, why."""
    if row is None:
        return ""
    return row["status"] if row["status"] != OK else "" if row[column] in data.EMPTY else row[column]


def two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def best(group: dict[str, Row], column: str) -> str:
    """The best mode of Opacus, marked where it beats ours."""
    found = data.best_opacus(group, column)
    if found is None:
        tried = [row for name, row in group.items() if name.startswith("opacus")]
        return "none runs" if tried and all(row["status"] != "ok" for row in tried) else ""
    return f"{found.value:.2f} {found.mode}" + f" {LOST}" * data.beaten(group, column)


def size(case: Case) -> str:
    return case.batch_size + ("" if case.length in data.EMPTY else f" x {case.length}")


def note(groups: Iterable[dict[str, Row]], commits: bool = True) -> str:
    """Versions, dates and, where they are asked for, commits of the rows."""
    rows = [row for group in groups for row in group.values()]

    def all_of(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value not in data.EMPTY})) or "-"

    peers = all_of(row["opacus"] for row in rows)
    made = f", commits {all_of(commit for row in rows for commit in row['commit'].split())}" if commits else ""
    dates = sorted({row["date"] for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"torch {all_of(row['torch'] for row in rows)}, Opacus {peers}, {when}{made}"
