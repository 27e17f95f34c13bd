"""The floor on paper: what every kernel of a private step must take on an H200, beside the ordinary step's.

    python -m benchmarks.roof [--models gpt2-large ...] [--dtype bfloat16] [--shapes] [--rows 14] [--gathers 0.1]
        [--out FILE.csv] [--compile-only]

No device is needed and nothing is computed: the ordinary step and fastdp's own run on the meta device, and every call
is written down with its shapes (`benchmarks.roof_steps`, `benchmarks.roof_jobs`), by the routes that the planner would
take on a GPU. Predicted time: max(operations / peak, bytes / bandwidth) of each kernel, and `--launch` for each launch;
the sum takes the host to be ahead of the device. A kernel's *floor* is its fewest operations and bytes in one free
launch; that of a copy that no exact step needs is 0. A step at its floor has every kernel at its own, torch's at what
the ordinary step pays. --compile-only compiles the kernels for sm_90 into TRITON_CACHE_DIR instead.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .roof_jobs import Job, Roof, compile_kernels
from .roof_steps import Steps, steps_of
from .suites import GPU, find
from .timing import Row, append, commit, show

MODELS = ("gpt2", "gpt2-large", "llama-1b", "llama-lora", "vit-b16", "resnet50")
TARGETS = {"gpt2-large": 1.25, "llama-lora": 1.05, "vit-b16": 1.2, "resnet50": 1.5}  # private over ordinary
COLUMNS = (
    "kernel",
    "shape",
    "calls",
    "launches",
    "Tflop",
    "GB",
    "ms",
    "ordinary ms",
    "floor ms",
    "more ms",
    "of floor",
)
SUMMARY = ("model", "batch", "length", "ordinary ms", "private ms", "ratio", "target", "floor", "launches",
           "furthest from its floor", "more ms")  # fmt: skip


class Sum(NamedTuple):
    """All calls of one kernel in a step."""

    calls: int = 0
    launches: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    least: float | None = None

    def with_job(self, job: Job, roof: Roof) -> Sum:
        least = self.least if job.least is None else (self.least or 0.0) + roof.seconds(job.least)
        parts = job.parts
        launches, flop, moved = (sum(p[k] for p in parts) for k in (2, 0, 1))
        return Sum(self.calls + 1, self.launches + int(launches), self.flop + flop, self.bytes + moved,
                   self.seconds + sum(map(roof.seconds, job.parts)), least)  # fmt: skip


Key = tuple[str, str]
Sums = dict[Key, Sum]


def added(jobs: Iterable[Job], roof: Roof, shapes: bool = False) -> Sums:
    """By kernel, or by kernel and shape."""
    found: Sums = {}
    for job in jobs:
        key = (job.name, job.shape if shapes else "")
        found[key] = found.get(key, Sum()).with_job(job, roof)
    return found


class Paper(NamedTuple):
    """A model's two steps, added up; floors: by kernel of the private step, in seconds."""

    ordinary: Sums
    private: Sums
    floors: dict[Key, float]

    def seconds(self) -> tuple[float, float, float]:
        """(ordinary step, private step, its floor)."""
        return (sum(s.seconds for s in self.ordinary.values()), sum(s.seconds for s in self.private.values()),
                sum(self.floors.values()))  # fmt: skip

    def losses(self) -> list[tuple[Key, float]]:
        """What each kernel takes beyond its floor, the most first."""
        return sorted(((k, s.seconds - self.floors[k]) for k, s in self.private.items()), key=lambda row: -row[1])


def paper_of(steps: Steps, roof: Roof, shapes: bool = False) -> Paper:
    """Both steps by kernel. Torch's kernels have the ordinary step's time for a floor, if that is less."""
    ordinary, private = (added(jobs, roof, shapes) for jobs in (steps.ordinary, steps.private))
    floors = {
        key: s.least if s.least is not None else min(s.seconds, ordinary[key].seconds if key in ordinary else 0.0)
        for key, s in private.items()
    }
    return Paper(ordinary, private, floors)


# ---------------------------------------------------------------------- tables


def lines(paper: Paper) -> list[Row]:
    """A row for each kernel of either step, what takes longest first."""
    rows: list[tuple[float, Row]] = []
    for key in {**paper.private, **paper.ordinary}:
        s, base = paper.private.get(key, Sum()), paper.ordinary.get(key, Sum())
        row: Row = {"kernel": key[0], "shape": key[1] or "-", "calls": s.calls, "launches": s.launches,
                    "Tflop": f"{s.flop / 1e12:.3f}", "GB": f"{s.bytes / 1e9:.2f}", "ms": f"{1e3 * s.seconds:.3f}",
                    "ordinary ms": f"{1e3 * base.seconds:.3f}" if base.calls else "-"}  # fmt: skip
        if s.calls:
            floor = paper.floors[key]
            row |= {"floor ms": f"{1e3 * floor:.3f}", "more ms": f"{1e3 * (s.seconds - floor):.3f}",
                    "of floor": f"{s.seconds / floor:.1f}" if floor else "-"}  # fmt: skip
        rows.append((max(s.seconds, base.seconds), row))
    return [row for _, row in sorted(rows, key=lambda each: -each[0])]


def summary(model: str, paper: Paper, batch: int, length: int) -> Row:
    """One line of a model."""
    base, private, floor = paper.seconds()
    (furthest, more), target = paper.losses()[0], TARGETS.get(model)
    launches = [sum(s.launches for s in step.values()) for step in (paper.private, paper.ordinary)]
    row: Row = {"model": model, "batch": batch, "length": length or "-", "ordinary ms": f"{1e3 * base:.1f}",
                "private ms": f"{1e3 * private:.1f}", "ratio": f"{private / base:.2f}", "floor": f"{floor / base:.2f}",
                "launches": f"{launches[0]} / {launches[1]}", "furthest from its floor": furthest[0],
                "more ms": f"{1e3 * more:.1f}"}  # fmt: skip
    if target is not None:
        row["target"] = f"{target} {'met' if private <= target * base else 'not met'}"
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(GPU), default=list(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--small", action="store_true", help="the small variants of the workloads")
    parser.add_argument("--shapes", action="store_true", help="a line for each kernel and shape")
    parser.add_argument("--rows", type=int, default=14, help="lines of a model's table; 0: all")
    for name, default in Roof()._asdict().items():
        parser.add_argument(f"--{name}", type=float, default=default, help=f"of the device; default {default:g}")
    parser.add_argument("--compile-only", action="store_true", help="compile for sm_90 into TRITON_CACHE_DIR")
    parser.add_argument("--out", type=Path, help="append a row for each kernel and shape to this CSV file")
    told = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: interpreted kernels are not launched")
    warnings.simplefilter("ignore")
    roof, dtype = Roof(*(getattr(told, name) for name in Roof._fields)), getattr(torch, told.dtype)
    print(f"{told.dtype}: {roof.flop / 1e12:.0f} TFLOP/s, {roof.bytes / 1e12:.1f} TB/s, {1e6 * roof.launch:.0f} us a "
          f"launch; gathering kernels at {roof.gathers:.0%} of the peak")  # fmt: skip
    if told.compile_only:
        compile_kernels()
    ends: list[Row] = []
    for model in told.models:
        work = find("gpu", model, told.small)
        steps = steps_of(work, dtype)
        if told.compile_only:
            print(f"{model}: compiled", flush=True)
            continue
        paper, full = paper_of(steps, roof), paper_of(steps, roof, shapes=True)
        print(f"\n{model}, {work.batch_size} x {work.length}")
        show(lines(full if told.shapes else paper)[: told.rows or None], COLUMNS)
        ends.append(summary(model, paper, work.batch_size, work.length))
        if told.out:
            about = {"model": model, "dtype": told.dtype, "commit": commit()}
            append(told.out, [about | row for row in lines(full)], (*about, *COLUMNS))
    if ends:
        print()
        show(ends, SUMMARY, left=1)


if __name__ == "__main__":
    main()
