"""Rows of the coverage benchmark: kept in a CSV file, taken up again, summed up."""

from __future__ import annotations

import collections
import csv
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import tables, timing
from .coverage_truth import OUTSIDE, STATUSES

COLUMNS = ("engine", "suite", "case", "status", "error", "whole", "message", "where", "truth", "coupling", "sizes",
           "runs", "notes", "seconds", "commit")  # fmt: skip
NOT_JUDGED = ("bad case", "not built")
CHANGED = "+changes"
REPAIRED = " [repaired]"  # ends the name of a case tried again after its engine's own repair
Row = dict[str, Any]


def commit() -> str:
    """Of the repository that holds benchmark and library, marked where files differ from it; "" without git."""
    now = timing.commit(12)
    if now == "-":
        return ""
    changed = subprocess.run(["git", "status", "-uno", "--porcelain"], cwd=Path(__file__).parent, capture_output=True)
    return now + (CHANGED if changed.stdout else "")


def read(path: Path) -> list[Row]:
    """The last row of each (suite, engine, case)."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise SystemExit(f"{path.name} has other columns than this version writes; start a new file")
        rows = {(r["suite"], r["engine"], r["case"]): r for r in reader}
    return list(rows.values())


def done(path: Path, now: str) -> set[tuple[str, str, str]]:
    """What need not be run again: its row is of this very commit. Uncommitted changes are never the same twice."""
    if not path.exists() or not now or now.endswith(CHANGED):
        return set()
    return {(r["suite"], r["engine"], r["case"]) for r in read(path) if r["commit"] == now}


# ---------------------------------------------------------------------- sums


def totals(rows: list[Row]) -> str:
    """A line an engine: counts, and shares of what was judged."""
    lines = []
    for engine in dict.fromkeys(r["engine"] for r in rows):
        count = collections.Counter(r["status"] for r in rows if r["engine"] == engine)
        judged = sum(n for status, n in count.items() if status not in NOT_JUDGED)
        shares = [
            f"{s} {count[s]} ({100 * count[s] / max(judged, 1):.1f} %)"
            for s in STATUSES
            if count[s] and s not in NOT_JUDGED
        ]
        rest = [f"{s} {count[s]}" for s in NOT_JUDGED if count[s]]
        lines.append(f"{engine}: judged {judged} of {sum(count.values())}: {', '.join(shares)}; {', '.join(rest)}")
    return "\n".join(lines)


def suite_of(row: Row) -> str:
    return row["suite"] + (", repaired" if row["case"].endswith(REPAIRED) else "")


def table(rows: list[Row]) -> str:
    """Markdown, a line for each suite and engine: counts, and shares of the judged; of what was not, shares of all."""
    lines = []
    order = list(dict.fromkeys(suite_of(r) for r in rows))
    for suite, engine in sorted(
        dict.fromkeys((suite_of(r), r["engine"]) for r in rows), key=lambda k: order.index(k[0])
    ):
        count = collections.Counter(r["status"] for r in rows if (suite_of(r), r["engine"]) == (suite, engine))
        total = sum(count.values())
        judged = total - sum(count[s] for s in NOT_JUDGED)
        shares = [_share(count[s], total if s in NOT_JUDGED else judged) for s in STATUSES]
        lines.append([suite, engine, str(total), str(judged), *shares])
    return tables.table(("suite", "engine", "cases", "judged", *STATUSES), lines)


def _share(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.1f} %)" if count else "0"


def footnotes(rows: list[Row]) -> str:
    """What the table does not say: which cases were asked of an engine beyond what its documentation promises."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        for note in (r.get("notes") or "").split("; "):
            if note.startswith(OUTSIDE):
                found.setdefault((r["engine"], note), []).append(f"{r['case']} ({r['status']})")
    return "\n".join(f"{engine}: {note}: {', '.join(names)}" for (engine, note), names in found.items())


def reason(message: str) -> str:
    """What messages of one cause have in common."""
    text = re.sub(r"'[\w.#]+'", "'…'", re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", message))
    text = text.split(" Per-sample gradients do not")[0].split(" Its parameter cannot")[0]
    return re.sub(r"^\S+ off by .*", "an update that is not the right one", text)[:160]


def groups(rows: Iterable[Row], status: str, engine: str) -> str:
    """The cases of a status by reason, the most frequent first."""
    found: dict[str, list[str]] = {}
    for r in rows:
        if (r["status"], r["engine"]) == (status, engine):
            found.setdefault(reason(r["message"]), []).append(r["case"])
    lines = [
        f"- {len(names)} x {why}\n  {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        for why, names in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
    return "\n".join([f"{engine}, {status}: {sum(map(len, found.values()))}", *lines]) if lines else ""


def summary(rows: list[Row]) -> str:
    """The table, then what is not exact, by reason."""
    parts = [table(rows), footnotes(rows), "commits: " + ", ".join(sorted({r["commit"] or "unknown" for r in rows}))]
    for engine in dict.fromkeys(r["engine"] for r in rows):
        for status in ("WRONG", "refused", "crashed", "timeout", "bad case", "not built"):
            parts.append(groups(rows, status, engine))
    return "\n\n".join(part for part in parts if part)
