"""Private training of compiled models: step time against compiled and eager, private and not.

    python -m benchmarks.compiled [--models gpt resnet] [--rounds 9] [--backend inductor] [--out FILE.csv]

Steps of all four are interleaved in one process. `ratio` is to the same way of running without privacy: compiled
private to compiled non-private, eager private to eager non-private. The first steps, which compile, are not timed;
`compile_s` is how long they took. AdamW, a noise multiplier of 1, clipping norm 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fastdp.grad_sample.cost_model import seconds_of as seconds

from .contenders import nonprivate, ours
from .models import Workload
from .suites import CPU as WORKLOADS
from .suites import find
from .timing import Row, append, show, versions

CPU = torch.device("cpu")
WARM = 4  # interpret, compile, and run
COLUMNS = ("model", "contender", "ratio", "best_ratio", "median_ms", "min_ms", "compile_s")


def contenders(work: Workload, backend: str) -> dict[str, Callable[[], None]]:
    """The four steps, on equal weights and data."""
    torch.manual_seed(1)
    x, y = work.batch(work.batch_size)
    runs = {}
    for name in ("eager", "eager private", "compiled", "compiled private"):
        torch.manual_seed(0)
        model: nn.Module = work.build()
        if name.startswith("compiled"):
            model.compile(backend=backend)
        step = (ours() if name.endswith("private") else nonprivate)(model, work)
        runs[name] = lambda step=step: step(x, y)
    return runs


def prepare(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds until each runs as it will."""
    took = {}
    for name, run in runs.items():
        begin = time.perf_counter()
        for _ in range(WARM):
            run()
        took[name] = time.perf_counter() - begin
    return took


def measure(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, CPU))
    return times


def rows(model: str, took: dict[str, float], times: dict[str, list[float]]) -> list[Row]:
    found: list[Row] = []
    for name, mine in times.items():
        base = times[name.removesuffix(" private")]
        found.append({
            "model": model, "contender": name, "ratio": f"{statistics.median(mine) / statistics.median(base):.2f}",
            "best_ratio": f"{min(mine) / min(base):.2f}", "median_ms": f"{1e3 * statistics.median(mine):.1f}",
            "min_ms": f"{1e3 * min(mine):.1f}", "compile_s": f"{took[name]:.0f}",
        })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt", "resnet"], choices=[*WORKLOADS, "resnet"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name in options.models:
        runs = contenders(find("cpu", name), options.backend)
        took = prepare(runs)
        found = rows(name, took, measure(runs, options.rounds))
        show(found, COLUMNS)
        if options.out:
            append(options.out, [{**row, **versions()} for row in found], (*COLUMNS, *versions()))


if __name__ == "__main__":
    main()
