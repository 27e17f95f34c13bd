"""What `benchmarks/gpu.sh` asks of a GPU beside the other benchmarks; each line and row is kept as it comes.

    python -m benchmarks.device warm --models gpt2-large [--jobs 4]    compiles what their steps launch
    python -m benchmarks.device host --models gpt2-large --out FILE.csv [--profile FILE.txt]

host: medians of ordinary and private steps, of IN_A_ROW that nothing waits between, as in a loop: `wall_ms` until the
device is done, `host_ms` until Python is, `device_ms` that the kernels of one take (torch.profiler), `idle` the share
of the wall in which the device had nothing to do; and the table of one step's kernels and functions. Steps are as the
training benchmark's, in --dtype.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .steps import Place, batch, one_line, step_of
from .suites import GPU, find
from .timing import Row, append, require_kernels, show, synchronize, versions

ROOT = Path(__file__).parent.parent
OURS = ("fastdp", "fastdp graphed", "fastdp loop", "fastdp layerwise")
CONTENDERS = ("non-private", *OURS, "opacus hooks")
COLUMNS = ("model", "contender", "dtype", "wall_ms", "host_ms", "device_ms", "idle", "kernels")
ROUNDS, IN_A_ROW = 5, 4


def place_of(told: argparse.Namespace) -> Place:
    return Place(torch.device(told.device), getattr(torch, told.dtype))


# ---------------------------------------------------------------------- warm


def warm(told: argparse.Namespace) -> None:
    """Each model in a process of its own, some side by side: compiling takes the host, hardly the device."""
    begin = time.perf_counter()
    options = ["--device", told.device, "--dtype", told.dtype, *(["--small"] if told.small else [])]

    def one(model: str) -> int:
        command = [sys.executable, "-m", "benchmarks.device", "one", "--models", model, *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        last = (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]
        print(f"{time.perf_counter() - begin:6.1f} s  {model}: {last[:300]}", flush=True)
        return done.returncode

    with ThreadPoolExecutor(told.jobs) as pool:
        failed = sum(code != 0 for code in pool.map(one, told.models))
    sys.exit(failed > 0)


def warm_one(told: argparse.Namespace) -> None:
    """Two steps of each of our contenders, at the small size, on which they are checked, and at the size that is
    timed."""
    place, model, failed = place_of(told), told.models[0], list[str]()
    for small in (True, False) if not told.small else (True,):
        work = find("gpu", model, small)
        for dtype in {place.dtype, torch.float32} if small else {place.dtype}:  # the check is in float32, too
            here = place._replace(dtype=dtype)
            x, y = batch(work, here)
            for name in OURS:
                try:
                    step = step_of(name, work, here)
                    for _ in range(2):
                        step(x, y)
                    synchronize(place.device)
                    del step
                except Exception as problem:  # noqa: BLE001  (the others' kernels are compiled all the same)
                    failed.append(f"{name}: {type(problem).__name__}: {one_line(problem)}")
                if place.device.type == "cuda":
                    torch.cuda.empty_cache()
    if failed:
        sys.exit("; ".join(dict.fromkeys(failed)))
    print("compiled")


# ---------------------------------------------------------------------- host


def timed(step: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, place: Place) -> tuple[float, float]:
    """(wall, host) seconds of a step."""
    synchronize(place.device)
    begin = time.perf_counter()
    for _ in range(IN_A_ROW):
        step(x, y)
    returned = time.perf_counter()
    synchronize(place.device)
    return (time.perf_counter() - begin) / IN_A_ROW, (returned - begin) / IN_A_ROW


def profiled(step: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, place: Place) -> Any:
    """The profiler of one step."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if place.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as found:
        step(x, y)
        synchronize(place.device)
    return found


def on_device(profile: Any) -> tuple[float, int]:
    """(seconds of the device's kernels and copies, how many)."""
    spans = [
        e
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]
    return sum(e.time_range.elapsed_us() for e in spans) / 1e6, len(spans)


def host(told: argparse.Namespace) -> None:
    require_kernels(told.device)
    place, facts = place_of(told), versions(told.device)
    rows: list[Row] = []
    for model in told.models:
        work = find("gpu", model, told.small)
        x, y = batch(work, place)
        for name in CONTENDERS:
            try:
                step = step_of(name, work, place)
                for _ in range(3):
                    step(x, y)
            except Exception as problem:  # noqa: BLE001  (a row says so, and the next contender is measured)
                rows.append({"model": model, "contender": name, "dtype": told.dtype, "wall_ms": type(problem).__name__})
                print(f"{model}, {name}: {type(problem).__name__}: {one_line(problem)}", file=sys.stderr)
                append(told.out, [rows[-1] | facts], (*COLUMNS, *facts))
                continue
            walls, hosts = zip(*(timed(step, x, y, place) for _ in range(ROUNDS)), strict=True)
            wall = statistics.median(walls)
            row: Row = {"model": model, "contender": name, "dtype": told.dtype, "wall_ms": f"{1e3 * wall:.2f}",
                        "host_ms": f"{1e3 * statistics.median(hosts):.2f}"}  # fmt: skip
            found = profiled(step, x, y, place)
            if place.device.type == "cuda":
                busy, count = on_device(found)
                row |= {"device_ms": f"{1e3 * busy:.2f}", "idle": f"{max(0.0, 1 - busy / wall):.2f}", "kernels": count}
            rows.append(row)
            append(told.out, [row | facts], (*COLUMNS, *facts))
            if told.profile:
                by = "self_device_time_total" if place.device.type == "cuda" else "self_cpu_time_total"
                with told.profile.open("a") as file:
                    print(f"=== {model}, {name}, {told.dtype}, by {by}", file=file)
                    print(found.key_averages().table(sort_by=by, row_limit=60, max_name_column_width=70), file=file)
            del step
            if place.device.type == "cuda":
                torch.cuda.empty_cache()
    show(rows, COLUMNS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("warm", "one", "host"))
    parser.add_argument("--models", nargs="+", choices=tuple(GPU), default=["gpt2-large"])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--small", action="store_true", help="the small variants, to try the benchmark")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    parser.add_argument("--profile", type=Path, help="append the profiler's tables to this file")
    told = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    {"warm": warm, "one": warm_one, "host": host}[told.what](told)


if __name__ == "__main__":
    main()
