"""What was measured on a GPU: remarks on steps, and every operator and host time for benchmarks/README.md.

Rows of kernels_cuda.csv and host_cuda.csv: new ones take the place of old ones by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import report_data as data
from .report_data import Cases, Row
from .tables import read_rows, table, wrapped

KERNELS = ("operator", "shape", "backend", "ms", "reference_ms", "speedup", "roof", "bound", "error")
HOST = ("model", "contender", "wall_ms", "host_ms", "device_ms", "idle", "kernels", "device", "commit")


def remarks(mine: Cases) -> list[str]:
    """What must be said of rows that have a time: what they say themselves, and whether they were checked."""
    right = [(name, row) for group in mine.values() for name, row in group.items() if row["status"] == data.OK]
    said: dict[str, list[str]] = {}
    for name, row in right:
        if row["why"] not in data.EMPTY and not name.startswith("opacus"):
            said.setdefault(f"{name} {row['why']}", []).append(row["workload"])
    found = [f"{', '.join(models)}: {why}." for why, models in said.items()]
    if all(row["error"] in data.EMPTY for _, row in right):
        found.append("No update was compared with one-sample truth.")
    return found


def rows(path: Path, columns: Sequence[str], key: Sequence[str]) -> str:
    """All rows of a file, of each key the last, with device, versions and commit above them."""
    found: dict[tuple[str, ...], Row] = {tuple(row[k] for k in key): row for row in read_rows(path)}
    if not found:
        return "No rows yet."
    about = {
        ", ".join(f"{n} {row[n]}" for n in ("device", "torch", "triton", "commit", "date")) for row in found.values()
    }
    types = {row["dtype"] for row in found.values()}
    head = wrapped(f"{', '.join(sorted(types))}; {'; '.join(sorted(about))}.")
    return f"{head}\n\n{table(columns, ([row[column] for column in columns] for row in found.values()))}"


def kernels(folder: Path) -> str:
    return rows(folder / "kernels_cuda.csv", KERNELS, ("operator", "shape", "dtype", "device"))


def host(folder: Path) -> str:
    return rows(folder / "host_cuda.csv", HOST, ("model", "contender", "dtype", "device", "commit"))
