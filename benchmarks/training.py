"""Time and memory of a private training step against ordinary training and Opacus.

    python -m benchmarks.training [--device cuda] [--dtype bfloat16] [--models gpt resnet] [--rounds 9] [--out FILE.csv]

Steps of all contenders are interleaved in one process (each waited for, on a GPU), and medians compared; peak memory is
that of a fresh process for each. Before anything is timed, the update of each contender without noise is compared with
the exact one, one sample at a time: a wrong contender gets no time. Models too large for that are compared on a small
variant of the same code, in float32 and, where another type is timed, in that one too. `floor` is the least that an
exact step can cost (`benchmarks.floor`: matrix products and attention only; what a model spends elsewhere is ignored).
16-bit types mean weights, gradients and optimizer state of that type, for all contenders.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .contenders import CONTENDERS, R, Step, trained
from .floor import floor
from .large import LARGE
from .models import WORKLOADS, Workload
from .moe import MOE
from .timing import Row, append, roofs, show, synchronize, versions

TOLERANCE = 1e-3  # Opacus adds 1e-6 to norms before it divides: 1e-4 here
COARSE = 0.1  # in 16 bits, whose rounding in forward and backward is 1e-2
SUITES = {"cpu": WORKLOADS, "cuda": LARGE}
MODELS = {**WORKLOADS, **LARGE, **MOE}
DEFAULT = {"cpu": tuple(CONTENDERS), "cuda": ("non-private", "fastdp", "fastdp layerwise")}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHOWN = ("model", "contender", "ratio", "floor", "step_ms", "p20_ms", "p80_ms", "peak_mib", "memory_ratio", "error",
         "error_dtype")  # fmt: skip
COLUMNS = (*SHOWN, "batch_size", "dtype", "device", "threads", "torch", "triton", "opacus", "fastdp", "commit",
           "date")  # fmt: skip
OUT = "out of memory"
FLOORLESS = set(MOE)  # models whose forward needs values (routing does), where the floor has shapes alone
MAIN = "benchmarks.training"  # what a fresh process runs to measure memory; of another benchmark with its own models


class Place(NamedTuple):
    """Where a model runs, and the type of its weights."""

    device: torch.device
    dtype: torch.dtype = torch.float32


CPU = Place(torch.device("cpu"))


def build(work: Workload, place: Place = CPU) -> nn.Module:
    torch.manual_seed(0)
    with place.device:
        return work.build().to(place.dtype)


def batch(work: Workload, place: Place = CPU) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = (t.to(place.device) for t in work.batch(work.batch_size))
    return (x.to(place.dtype) if x.is_floating_point() else x), y


# ---------------------------------------------------------------------- is it right?


def exact_clipped_mean(model: nn.Module, work: Workload, x: Tensor, y: Tensor, layerwise: bool = False) -> list[Tensor]:
    """(1/B) sum_b c_b g_b with c_b = min(1, R / n_b), one sample at a time, by autograd alone.

    layerwise: n_b and R / sqrt(layers) of each module that owns parameters, instead of the whole gradient's.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    params, layers = list(named.values()), [(name.rpartition(".")[0] or name) * layerwise for name in named]
    limit = R / len(set(layers)) ** 0.5
    total = [torch.zeros_like(p) for p in params]
    for b in range(len(x)):
        grads = torch.autograd.grad(work.losses(model(x[b : b + 1]), y[b : b + 1]).sum(), params)
        squares = dict.fromkeys(layers, 0.0)
        for layer, g in zip(layers, grads, strict=True):
            squares[layer] += float(g.double().square().sum())
        for t, layer, g in zip(total, layers, grads, strict=True):
            t += g * min(1.0, limit / max(squares[layer], 1e-300) ** 0.5)
    return [t / len(x) for t in total]


def error_of(name: str, work: Workload, place: Place = CPU) -> float:
    """Relative error of the contender's gradient without noise, read as its optimizer sees it (inf if it fails)."""
    try:
        return _error_of(name, work, place)
    except Exception as problem:  # noqa: BLE001  (a peer's failure is a row of the table)
        print(f"{name} failed: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
        return float("inf")


def _error_of(name: str, work: Workload, place: Place) -> float:
    small, work = work.small is not None, work.small or work
    model, (x, y) = build(work, place), batch(work, place)
    # float64 from the same rounded weights; at full size the float32 of ordinary training is near enough
    kind = torch.float64 if small else torch.float32
    exact, data = copy.deepcopy(model).to(kind), x.to(kind) if x.is_floating_point() else x
    truth = exact_clipped_mean(exact, work, data, y, name.endswith("layerwise"))
    seen: dict[nn.Parameter, Tensor] = {}
    params = trained(model)

    def read(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in params:
            if p.grad is not None:
                seen[p] = p.grad.detach().clone()
            elif "exp_avg" in optimizer.state.get(p, {}):  # a step that leaves no gradient: Adam's first average of it
                seen[p] = optimizer.state[p]["exp_avg"].double() / (1 - optimizer.param_groups[0]["betas"][0])

    handle = register_optimizer_step_post_hook(read)
    try:
        CONTENDERS[name](model, work, sigma=0.0)(x, y)
    finally:
        handle.remove()
    wrong = sum(float((seen[p].double() - t.double()).square().sum()) for p, t in zip(params, truth, strict=True))
    return (wrong / sum(float(t.double().square().sum()) for t in truth)) ** 0.5


def errors_of(name: str, work: Workload, place: Place) -> dict[str, float]:
    """Errors in float32 and, where another type is timed, in that; nothing to check of ordinary training."""
    if name == "non-private":
        return {}
    found = {"error": error_of(name, work, Place(place.device))}
    if place.dtype != torch.float32:
        found["error_dtype"] = error_of(name, work, place)
    return found


def right(errors: dict[str, float]) -> bool:
    """Whether a contender may be timed."""
    return errors.get("error", 0.0) < TOLERANCE and errors.get("error_dtype", 0.0) < COARSE


# ---------------------------------------------------------------------- time and memory


def interleaved(work: Workload, names: list[str], rounds: int, place: Place = CPU) -> dict[str, list[float]]:
    """Seconds of every step, round robin after two warm-up rounds; contenders out of memory are missing."""
    x, y = batch(work, place)
    steps: dict[str, Step] = {}
    times: dict[str, list[float]] = {}
    for number in range(rounds + 3):  # the first round builds
        for name in names:
            if number and name not in steps:
                continue
            try:
                if number == 0:
                    steps[name], times[name] = CONTENDERS[name](build(work, place), work), []
                    continue
                spent = timed(steps[name], x, y, place.device)
            except (torch.OutOfMemoryError, MemoryError):
                steps.pop(name, None), times.pop(name, None)
                spent = None
            if spent is None:  # outside of the handler, whose traceback holds the step's tensors
                if place.device.type == "cuda":
                    torch.cuda.empty_cache()
            elif number > 2:
                times[name].append(spent)
        if sys.stderr.isatty():
            print(f"\r  round {number} of {rounds + 2} ", end="\r", file=sys.stderr, flush=True)
    return times


def timed(step: Step, x: Tensor, y: Tensor, device: torch.device) -> float:
    """Seconds of one step, its work on the device included."""
    synchronize(device)
    start = time.perf_counter()
    step(x, y)
    synchronize(device)
    return time.perf_counter() - start


def peaks_mib(model: str, names: list[str], place: Place = CPU, small: bool = False) -> dict[str, float | None]:
    """Peak memory of fresh processes that make three steps, of each contender (None: out of memory).

    On the CPU the peak of resident memory; tensors are given back to the system at once (MALLOC_MMAP_THRESHOLD_), so
    that it is of what lives. On a GPU the peak of the allocator; there the processes run side by side, as starting
    them takes longest, and one that found too little memory left runs again on its own.
    """

    def peak(name: str) -> float | None:
        return peak_mib(model, name, place, small)

    if place.device.type != "cuda":
        return {name: peak(name) for name in names}
    gc.collect()
    torch.cuda.empty_cache()
    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(names, pool.map(peak, names), strict=True))
    return {name: peak(name) if value is None else value for name, value in found.items()}


def peak_mib(model: str, name: str, place: Place, small: bool) -> float | None:
    command = [sys.executable, "-m", MAIN, "--memory-of", model, name]
    command += ["--device", place.device.type, "--dtype", str(place.dtype)[6:], *["--small"] * small]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if OUT in done.stdout:
        return None
    if done.returncode:
        raise RuntimeError(f"the memory of {name} on {model} cannot be measured: {done.stderr[-300:]}")
    return float(done.stdout.split()[-1])


def measure_memory(work: Workload, name: str, place: Place) -> None:
    """Print the peak in MiB: on the CPU the growth of resident memory over the model's and optimizer's import."""
    try:
        import opacus  # noqa: F401  (so that every contender starts from the same imports)
    except ImportError:
        pass
    before = peak_resident_kib()
    try:
        x, y = batch(work, place)
        step = CONTENDERS[name](build(work, place), work)
        for _ in range(3):
            step(x, y)
    except (torch.OutOfMemoryError, MemoryError):
        print(OUT)
        return
    on_gpu = place.device.type == "cuda"
    print(torch.cuda.max_memory_allocated() / 2**20 if on_gpu else (peak_resident_kib() - before) / 1024)


def peak_resident_kib() -> int:
    """Peak resident memory of this process image (ru_maxrss would count the parent's at the fork)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


# ---------------------------------------------------------------------- the table


def run(model: str, names: list[str], rounds: int, memory: bool, place: Place = CPU, roof: tuple[float, float] = (1, 1),
        small: bool = False) -> list[Row]:  # fmt: skip
    """All rows of one model."""
    work = sized(model, small)
    errors = {name: errors_of(name, work, place) for name in names}
    good = [name for name in names if right(errors[name])]
    times = interleaved(work, good, rounds, place)
    peaks = peaks_mib(model, list(times), place, small) if memory else {}
    medians = {name: statistics.median(t) for name, t in times.items()}
    least = "-" if model in FLOORLESS else f"{floor(work, roof):.2f}"
    facts = versions(place.device)
    rows: list[Row] = []
    for name in names:
        row: Row = {"model": model, "contender": name, "batch_size": work.batch_size, "dtype": str(place.dtype)[6:]}
        row |= {"floor": "-" if name == "non-private" else least} | facts
        row |= {key: f"{value:.1e}" for key, value in errors[name].items()}
        if name in times:
            row |= _times(times[name], medians.get("non-private"))
        elif name in good:
            row["step_ms"] = OUT
        if name in peaks:
            row |= _memory(peaks[name], peaks.get("non-private"))
        rows.append(row)
    return rows


def sized(model: str, small: bool) -> Workload:
    """A workload, or its small variant."""
    return MODELS[model].small or MODELS[model] if small else MODELS[model]


def _times(spent: list[float], base: float | None) -> Row:
    t = sorted(spent)
    row: Row = {"step_ms": f"{1e3 * statistics.median(t):.1f}", "p20_ms": f"{1e3 * t[len(t) // 5]:.1f}",
                "p80_ms": f"{1e3 * t[len(t) * 4 // 5]:.1f}"}  # fmt: skip
    return row | ({"ratio": f"{statistics.median(t) / base:.2f}"} if base else {})


def _memory(peak: float | None, base: float | None) -> Row:
    if peak is None:
        return {"peak_mib": OUT}
    return {"peak_mib": f"{peak:.0f}"} | ({"memory_ratio": f"{peak / base:.2f}"} if base else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=list(SUITES))
    parser.add_argument("--dtype", default="float32", choices=list(TYPES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="default: those made for the device")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="default on a GPU: without Opacus")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--small", action="store_true", help="the small variants, to try the benchmark")
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    place = Place(torch.device(options.device), TYPES[options.dtype])
    if options.memory_of:
        model, name = options.memory_of
        measure_memory(sized(model, options.small), name, place)
        return
    names = list(dict.fromkeys(["non-private", *(options.contenders or DEFAULT[options.device])]))
    print(", ".join(f"{key} {value}" for key, value in versions(place.device).items()))
    roof = roofs(place.device, place.dtype)
    rows: list[Row] = []
    for model in options.models or SUITES[options.device]:
        rows += (found := run(model, names, options.rounds, not options.no_memory, place, roof, options.small))
        if options.out:  # model by model: a run cut short keeps what it has
            append(options.out, found, COLUMNS)
    show(rows, SHOWN)


if __name__ == "__main__":
    main()
