"""Time and memory of a private step, against ordinary training, every Opacus mode and the floor.

    python -m benchmarks.training --suite cpu|gpu|quick [--models gpt bert ...] [--contenders fastdp ...]
        [--rounds 9] [--time-limit 60] [--patience 1] [--sweep batch|length|none] [--no-memory | --memory-here]
        [--dtype float32 bfloat16] [--out DIR]

Before anything is timed, the gradient of each contender without noise is compared with the truth, taken one sample at a
time: a wrong contender gets no time (`benchmarks.exactness`). Steps of all contenders are then interleaved in one
process; medians and 20 and 80 percentiles (`benchmarks.steps`). The C library's allocator keeps freed memory, for all
(--system-allocator: as it is). Peak memory is that of a fresh process for each (`benchmarks.memory`), or with
--memory-here, on a GPU, what the allocator tells of each within the one process. `floor` is the least that an exact
step can cost (`benchmarks.floor`). Rows are appended workload by workload to training_cpu.csv or training_cuda.csv in
DIR. 16-bit types mean weights, gradients and optimizer state of that type, for all contenders.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from .contenders import CONTENDERS, DEFAULT
from .exactness import Verdict, judge
from .floor import floor
from .memory import Job, Peak, peaks
from .steps import OUT, Run, interleaved, say
from .suites import BATCHES, FLOORLESS, LENGTHS, OTHERS, SUITES, SWEPT
from .timing import FACTS, Row, append, keep_memory, require_kernels, roofs, show, versions

COLUMNS = (
    "suite", "sweep", "workload", "contender", "batch_size", "length", "dtype", "status", "why", "ratio", "floor",
    "of_floor", "step_ms", "p20_ms", "p80_ms", "rounds", "peak_mib", "memory_ratio",
    "error", "error_dtype", *FACTS,
)  # fmt: skip
SHOWN = ("workload", "contender", "batch_size", "length", "dtype", "status", "ratio", "floor", "of_floor", "step_ms",
         "p20_ms", "p80_ms", "rounds", "peak_mib", "memory_ratio", "error")  # fmt: skip
BASE = "non-private"
TYPES = ("float32", "bfloat16", "float16")
DEFAULT_TYPES = {"cpu": ("float32",), "quick": ("float32",), "gpu": ("float32", "bfloat16")}
SWEEPERS = (BASE, "fastdp", "opacus hooks", "opacus ghost")  # contenders of a sweep, unless others are asked for
STARTING = 60.0  # seconds that a fresh process may take beside its steps


@dataclass
class Options:
    """How to measure; limit: seconds for each contender and workload."""

    names: Sequence[str] = DEFAULT
    rounds: int = 9
    limit: float = math.inf
    memory: bool = True
    here: bool = False  # on a GPU: memory by its allocator, in this process
    roof: tuple[float, float] = (1.0, 1.0)
    sweep: str = "-"


class Found(NamedTuple):
    """All that was measured of one job."""

    verdicts: dict[str, Verdict]
    runs: dict[str, Run]
    peaks: dict[str, Peak]


def measure(job: Job, options: Options, verdicts: dict[str, Verdict] | None = None) -> Found:
    """Check, then memory, then time; verdicts: of the same workload at another size."""
    work, place, limit = job.work(), job.place(), options.limit
    if verdicts is None:
        verdicts = judge(options.names, work, place, limit)
    good = [name for name in options.names if verdicts[name].status == "ok"]
    seconds = None if math.isinf(limit) else limit + STARTING
    mib = peaks(job, good, seconds) if options.memory and not options.here else {}
    say(f"{job.workload}: time")
    runs = interleaved(work, good, options.rounds, place, limit)
    if options.here:
        mib = {name: Peak(run.peak_mib) for name, run in runs.items() if run.peak_mib is not None}
    return Found(verdicts, runs, mib)


def rows_of(job: Job, options: Options, verdicts: dict[str, Verdict] | None = None) -> list[Row]:
    """A row for each contender, of the columns COLUMNS."""
    work, found, facts = job.work(), measure(job, options, verdicts), versions(job.device)
    least = None if job.workload in FLOORLESS else floor(work, options.roof)
    return [row_of(job, options.sweep, name, found, least) | facts for name in options.names]


def row_of(job: Job, sweep: str, name: str, found: Found, least: float | None) -> Row:
    """One contender's row, without versions; a value that was not measured is "-"."""
    work, verdict, run, peak = job.work(), found.verdicts[name], found.runs.get(name), found.peaks.get(name)
    status, why = verdict.status, verdict.why
    if status == "ok" and run is not None:
        status, why = run.status, run.why
    row: Row = dict.fromkeys(COLUMNS[: -len(FACTS)], "-")
    row |= {"suite": job.suite, "sweep": sweep, "workload": job.workload, "contender": name, "dtype": job.dtype,
            "batch_size": work.batch_size, "length": work.length or "-", "status": status, "why": why}  # fmt: skip
    if verdict.error is not None:
        row["error"] = f"{verdict.error:.1e}"
    if verdict.error_dtype is not None:
        row["error_dtype"] = f"{verdict.error_dtype:.1e}"
    private = CONTENDERS[name].clipping != "none"
    if least is not None and private:
        row["floor"] = f"{least:.2f}"
    if status == "ok" and run is not None and run.times:
        row |= _times(run.times, found.runs.get(BASE), least if private else None)
    if status == "ok" and peak is not None:
        row |= _memory(peak, found.peaks.get(BASE))
    return row


def _times(spent: list[float], base: Run | None, least: float | None) -> Row:
    t = sorted(spent)
    middle = statistics.median(t)
    row: Row = {"step_ms": f"{1e3 * middle:.1f}", "p20_ms": f"{1e3 * t[len(t) // 5]:.1f}",
                "p80_ms": f"{1e3 * t[len(t) * 4 // 5]:.1f}", "rounds": len(t)}  # fmt: skip
    if base is not None and base.times:
        ratio = middle / statistics.median(base.times)
        row["ratio"] = f"{ratio:.2f}"
        if least is not None:
            row["of_floor"] = f"{ratio / least:.2f}"
    return row


def _memory(peak: Peak, base: Peak | None) -> Row:
    if peak.mib is None:
        return {"peak_mib": peak.status if peak.status == OUT else "-"}
    return {"peak_mib": f"{peak.mib:.0f}"} | (
        {"memory_ratio": f"{peak.mib / base.mib:.2f}"} if base is not None and base.mib else {}
    )


def jobs(suite: str, models: Sequence[str], sweep: str, device: str, dtype: str, small: bool) -> list[Job]:
    """The jobs of a run, in order; a sweep's of one workload one after the other."""
    plain = [Job(suite, model, device, dtype, small) for model in models]
    if sweep == "batch":
        return [job._replace(batch_size=b) for job in plain for b in BATCHES[suite]]
    if sweep == "length":
        return [job._replace(length=t) for job in plain if job.work().at is not None for t in LENGTHS[suite]]
    return plain


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(dict.fromkeys(name for suite in (*SUITES.values(), OTHERS) for name in suite))
    parser.add_argument("--suite", default="cpu", choices=list(SUITES))
    parser.add_argument("--models", nargs="+", choices=known, help="default: the suite's (of a sweep: GPT and ResNet)")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each contender and workload")
    parser.add_argument("--sweep", default="none", choices=("batch", "length", "none"))
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times the limit for fastdp's first step, to compile"
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--no-memory", action="store_true")
    memory.add_argument(
        "--memory-here", action="store_true", help="on a GPU: by its allocator, without other processes"
    )
    parser.add_argument("--dtype", nargs="+", choices=TYPES)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the suite's")
    parser.add_argument("--small", action="store_true", help="the small variants, to try the benchmark")
    parser.add_argument("--out", type=Path, help="append the rows to a CSV file in this folder")
    return parser.parse_args(arguments)


def contenders(told: argparse.Namespace) -> list[str]:
    """Those asked for, ordinary training first; a sweep takes few, quick none that must be compiled."""
    names = told.contenders or (SWEEPERS if told.sweep != "none" else DEFAULT)
    if told.suite == "quick" and not told.contenders:
        names = [name for name in names if CONTENDERS[name].patience == 1]
    return list(dict.fromkeys([BASE, *names]))


def main(arguments: Sequence[str] | None = None) -> None:
    told = parse(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    device = told.device or ("cuda" if told.suite == "gpu" else "cpu")
    models = told.models or [m for m in SUITES[told.suite] if told.sweep == "none" or m in SWEPT[told.sweep]]
    if told.memory_here and device != "cuda":
        raise SystemExit("--memory-here asks a GPU's allocator; on the CPU memory is that of fresh processes")
    require_kernels(device)
    print(", ".join(f"{key} {value}" for key, value in versions(device).items()))
    types = told.dtype or DEFAULT_TYPES[told.suite]
    wanted = [job for t in types for job in jobs(told.suite, models, told.sweep, device, t, told.small)]
    for name in told.contenders or DEFAULT:
        if name.startswith("fastdp"):
            CONTENDERS[name] = CONTENDERS[name]._replace(patience=max(told.patience, CONTENDERS[name].patience))
    options = Options(contenders(told), told.rounds, told.time_limit, not told.no_memory, told.memory_here,
                      sweep=told.sweep.replace("none", "-"))  # fmt: skip
    rows: list[Row] = []
    for dtype in types:
        options.roof = roofs(torch.device(device), getattr(torch, dtype))
        checked: dict[str, dict[str, Verdict]] = {}  # a sweep's workload is checked once
        for job in (job for job in wanted if job.dtype == dtype):
            work = job.work()
            say(f"{job.workload}, {dtype}, batch {work.batch_size}, length {work.length}: is every contender right?")
            if job.workload not in checked:
                checked[job.workload] = judge(options.names, work, job.place(), options.limit)
            found = rows_of(job, options, checked[job.workload])
            if told.out:  # job by job: a run cut short keeps what it has
                append(told.out / f"training_{device}.csv", found, COLUMNS)
            rows += found
    show(rows, SHOWN)


if __name__ == "__main__":
    keep_memory("benchmarks.training")
    main()
