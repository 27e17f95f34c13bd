"""The floor on paper: what every kernel of a private step must take on an H200, beside the ordinary step's.

    python -m benchmarks.roof [--models gpt2-large ...] [--dtype bfloat16] [--shapes] [--rows 14] [--gathers 0.1]
        [--measured kernels_cuda.csv training_cuda.csv] [--out FILE.csv]

No device is needed and nothing is computed: the ordinary step and fastdp's own run on the meta device, and every call
is written down with its shapes (`benchmarks.roof_steps`, `benchmarks.roof_jobs`), by the routes that the planner would
take on a GPU. Predicted time: max(operations / peak, bytes / bandwidth) of each kernel, and `--launch` for each launch;
the sum takes the host to be ahead of the device. A kernel's *floor* is its fewest operations and bytes in one free
launch; that of a copy that no exact step needs is 0. A step at its floor has every kernel at its own, torch's at what
the ordinary step pays. Beside rows of `--measured` files of the same operator and shape, or of the same model and type,
stands what they took.
"""

from __future__ import annotations

import argparse
import csv
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .roof_jobs import Job, Roof, compile_kernels
from .roof_models import HF
from .roof_steps import Steps, steps_of
from .suites import GPU, find
from .timing import Row, append, commit, show

MODELS = ("gpt2", "gpt2-large", "llama-1b", "llama-lora", "vit-b16", "resnet50")
# of issue 22; transformers' builds of the same models ("hf-...") have theirs
TARGETS = {"gpt2-large": 1.25, "llama-lora": 1.05, "vit-b16": 1.2, "resnet50": 1.5}
COLUMNS = ("kernel", "calls", "launches", "Tflop", "GB", "ms", "ordinary ms", "floor ms", "more ms", "of floor",
           "measured ms")  # fmt: skip
SUMMARY = ("model", "batch", "length", "ordinary ms", "private ms", "ratio", "target", "floor", "launches",
           "furthest from its floor", "more ms", "measured")  # fmt: skip
SAVED = ("model", "dtype", "kernel", "shape", *COLUMNS[1:], "commit")


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

    def needed(self, target: float) -> list[tuple[Key, float]] | None:
        """The kernels that must come down to their floors for a target, the worst first; None: it is out of reach."""
        base, private, _ = self.seconds()
        needed: list[tuple[Key, float]] = []
        for key, more in self.losses():
            if private <= target * base:
                return needed
            private -= more
            needed.append((key, more))
        return needed if private <= target * base else None


def paper_of(steps: Steps, roof: Roof, shapes: bool = False) -> Paper:
    """Both steps by kernel. Torch's kernels have the ordinary step's time for a floor, if that is less."""
    ordinary, private = (added(jobs, roof, shapes) for jobs in (steps.ordinary, steps.private))
    floors = {
        key: s.least if s.least is not None else min(s.seconds, ordinary[key].seconds if key in ordinary else 0.0)
        for key, s in private.items()
    }
    return Paper(ordinary, private, floors)


# ---------------------------------------------------------------------- what was measured


def measured_rows(paths: Sequence[Path]) -> list[dict[str, str]]:
    """All rows of CSV files of benchmarks.kernels and benchmarks.training."""
    rows: list[dict[str, str]] = []
    for path in paths:
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


def kernel_ms(rows: Iterable[dict[str, str]], dtype: str) -> dict[Key, float]:
    """Milliseconds by operator and shape; the last row of several counts."""
    found = {}
    for row in rows:
        if "operator" in row and row.get("dtype") == dtype and row.get("ms", "-") not in ("-", ""):
            found["fastdp." + row["operator"], row["shape"]] = float(row["ms"])
    return found


def step_ms(rows: Iterable[dict[str, str]], model: str, dtype: str) -> dict[str, float]:
    """Milliseconds of a model's steps by contender; the last row of several counts."""
    mine = [r for r in rows if r.get("workload") == model and r.get("dtype") == dtype and r.get("sweep", "-") == "-"]
    return {row["contender"]: float(row["step_ms"]) for row in mine if row.get("step_ms", "-") not in ("-", "")}


# ---------------------------------------------------------------------- tables


def lines(paper: Paper, known: dict[Key, float]) -> list[Row]:
    """A row for each kernel of either step, what takes longest first."""
    rows: list[Row] = []
    for key in {**paper.private, **paper.ordinary}:
        s, base = paper.private.get(key, Sum()), paper.ordinary.get(key)
        floor = paper.floors.get(key, 0.0)
        row: Row = {"kernel": " ".join(filter(None, key)), "calls": s.calls, "launches": s.launches,
                    "Tflop": f"{s.flop / 1e12:.3f}", "GB": f"{s.bytes / 1e9:.2f}", "ms": f"{1e3 * s.seconds:.3f}",
                    "ordinary ms": f"{1e3 * base.seconds:.3f}" if base else "-"}  # fmt: skip
        if s.calls:
            row |= {"floor ms": f"{1e3 * floor:.3f}", "more ms": f"{1e3 * (s.seconds - floor):.3f}",
                    "of floor": f"{s.seconds / floor:.1f}" if floor else "-"}  # fmt: skip
        shape, _, layers = key[1].partition(" layers=")
        if (key[0], shape) in known:
            row["measured ms"] = f"{s.calls * int(layers or 1) * known[key[0], shape]:.3f}"
        rows.append(row)
    return sorted(rows, key=lambda row: -max(float(str(row["ms"])), float(str(row["ordinary ms"]).replace("-", "0"))))


def verdict(paper: Paper, target: float | None) -> str:
    """Whether the target is met, and what it would take."""
    base, private, floor = paper.seconds()
    said = f"private / ordinary = {private / base:.2f} on paper, floor {floor / base:.2f}"
    if target is None:
        return said
    needed = paper.needed(target)
    if needed is None:
        return f"{said}: target {target} is out of reach even with every kernel at its floor"
    if not needed:
        return f"{said}: target {target} is met"
    which = ", ".join(f"{' '.join(filter(None, key))} (-{1e3 * more:.2f} ms)" for key, more in needed)
    return f"{said}: target {target} is not met; it would be with these at their floors: {which}"


def summary(model: str, paper: Paper, steps: dict[str, float], work_size: tuple[int, int]) -> Row:
    """One line of a model."""
    base, private, floor = paper.seconds()
    (furthest, more), target = paper.losses()[0], TARGETS.get(model.removeprefix("hf-"))
    row: Row = {"model": model, "batch": work_size[0], "length": work_size[1] or "-",
                "ordinary ms": f"{1e3 * base:.1f}",
                "private ms": f"{1e3 * private:.1f}", "ratio": f"{private / base:.2f}", "floor": f"{floor / base:.2f}",
                "launches": f"{sum(s.launches for s in paper.private.values())} / "
                            f"{sum(s.launches for s in paper.ordinary.values())}",
                "furthest from its floor": " ".join(filter(None, furthest)),
                "more ms": f"{1e3 * more:.1f}"}  # fmt: skip
    if target is not None:
        row["target"] = f"{target} {'met' if private <= target * base else 'not met'}"
    if "fastdp" in steps and "non-private" in steps:
        ratio = steps["fastdp"] / steps["non-private"]
        row["measured"] = f"{ratio:.2f} ({steps['fastdp']:.1f} / {steps['non-private']:.1f} ms)"
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Roof()
    parser.add_argument("--models", nargs="+", choices=(*GPU, *HF), default=list(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--small", action="store_true", help="the small variants of the workloads")
    parser.add_argument("--shapes", action="store_true", help="a line for each kernel and shape")
    parser.add_argument("--rows", type=int, default=14, help="lines of a model's table; 0: all")
    parser.add_argument("--plan", action="store_true", help="the engine's own plan, too: uses, routes, units")
    parser.add_argument("--flops", type=float, default=default.flop, help="16-bit operations a second")
    parser.add_argument("--float32", type=float, default=default.float32, help="float32 operations a second")
    parser.add_argument("--bandwidth", type=float, default=default.bytes, help="bytes a second")
    parser.add_argument("--launch", type=float, default=1e6 * default.launch, help="microseconds of a launch")
    parser.add_argument("--gathers", type=float, default=default.gathers,
                        help="share of the peak of kernels that load two bytes at a time")  # fmt: skip
    parser.add_argument("--measured", type=Path, nargs="*", default=[], help="kernels_cuda.csv, training_cuda.csv")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile the kernels into TRITON_CACHE_DIR, for sm_90"
    )
    parser.add_argument("--out", type=Path, help="append a row for each kernel and shape to this CSV file")
    told = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("unset TRITON_INTERPRET: interpreted kernels are not launched")
    warnings.simplefilter("ignore")
    roof = Roof(told.flops, told.bandwidth, told.float32, 1e-6 * told.launch, told.gathers)
    dtype, rows = getattr(torch, told.dtype), measured_rows(told.measured)
    kernels = kernel_ms(rows, told.dtype)
    print(f"{told.dtype}: {roof.flop / 1e12:.0f} TFLOP/s, {roof.bytes / 1e12:.1f} TB/s, {1e6 * roof.launch:.0f} us a "
          f"launch; gathering kernels at {roof.gathers:.0%} of the peak")  # fmt: skip
    ends: list[Row] = []
    if told.compile_only:
        compile_kernels()
    for model in told.models:
        work = HF[model] if model in HF else find("gpu", model, told.small)
        steps = steps_of(work, dtype)
        if told.compile_only:
            print(f"{model}: compiled", flush=True)
            continue
        paper, full = paper_of(steps, roof), paper_of(steps, roof, shapes=True)
        table = lines(full if told.shapes else paper, kernels)
        print(f"\n{model}, {work.batch_size} x {work.length}")
        show(table[: told.rows or None], COLUMNS, left=1)
        print(verdict(paper, TARGETS.get(model.removeprefix("hf-"))))
        if told.plan:
            print(steps.plan)
        ends.append(summary(model, paper, step_ms(rows, model, told.dtype), (work.batch_size, work.length)))
        if told.out:
            about = {"model": model, "dtype": told.dtype, "commit": commit()}
            append(told.out, [row | about | _split(row) for row in lines(full, kernels)], SAVED)
    if ends:
        print()
        show(ends, SUMMARY, left=1)


def _split(row: Row) -> Row:
    """Kernel and shape of a line by both: a method belongs to the kernel, the shape begins with a digit or B=."""
    words = str(row["kernel"]).split()
    cut = next((k for k, word in enumerate(words) if k and (word[0].isdigit() or word.startswith("B="))), len(words))
    return {"kernel": " ".join(words[:cut]), "shape": " ".join(words[cut:])}


if __name__ == "__main__":
    main()
