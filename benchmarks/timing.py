"""What the benchmarks share: interleaved timing, the machine's roofs, versions, tables and CSV rows."""

from __future__ import annotations

import csv
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

Row = dict[str, object]


def versions(device: torch.device | str = "cpu") -> Row:
    """Device, versions, commit and date: beside every figure."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "-"

    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "triton": of("triton"),
        "opacus": of("opacus"), "fastdp": of("fastdp"), "commit": done.stdout.strip() or commit_file(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def commit_file() -> str:
    """The commit of a tree that travelled without its history (`benchmarks/gpu.sh` is told it)."""
    import os

    return os.environ.get("FASTDP_COMMIT", "-")


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """One call, by the device's own clock."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def interleaved(
    runs: dict[str, Callable[[], object]], device: torch.device, rounds: int = 15, warm: int = 2
) -> dict[str, float]:
    """Median seconds of each, round robin, so that all meet the same noise of the machine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + warm):
        for name, run in runs.items():
            spent = seconds(run, device)
            if number >= warm:
                times[name].append(spent)
    return {name: statistics.median(values) for name, values in times.items()}


def roofs(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(flop/s of a large matrix product, bytes/s of a copy, read and written), measured."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.empty((2**30 if device.type == "cuda" else 2**26) // 4, device=device).normal_()
    target = torch.empty_like(source)
    found = interleaved({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, device, 9)
    return 2 * n**3 / found["product"], 2 * source.numel() * 4 / found["copy"]


def show(rows: Sequence[Row], columns: Sequence[str], left: int = 2) -> None:
    """Print rows as an aligned table; the first `left` columns are text."""
    cells = [list(columns), *[[str(row.get(c, "-")) for c in columns] for row in rows]]
    widths = [max(len(r[k]) for r in cells) for k in range(len(columns))]
    for line in cells:
        print(
            "  ".join(
                c.rjust(w) if k >= left else c.ljust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True))
            )
        )


def append(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Add tidy rows to a CSV file."""
    fresh = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        if fresh:
            writer.writeheader()
        writer.writerows(rows)
