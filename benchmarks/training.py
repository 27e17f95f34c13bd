"""Time and memory of a private training step against ordinary training and Opacus.

    python -m benchmarks.training [--models gpt resnet] [--rounds 9] [--out FILE.csv]

Steps of all contenders are interleaved in one process, and medians compared; peak memory is that of a
fresh process for each. Before anything is timed, the update of each contender without noise is compared
with the exact one (one sample at a time): a wrong contender gets no time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .contenders import CONTENDERS, R, trained
from .models import WORKLOADS, Workload
from .timing import append, show, versions

TOLERANCE = 1e-3  # Opacus adds 1e-6 to norms before it divides: 1e-4 here
COLUMNS = ("model", "contender", "ratio", "step_ms", "p20_ms", "p80_ms", "peak_mib", "memory_ratio", "error",
           "batch_size", "device", "threads", "torch", "opacus", "fastdp", "commit", "date")  # fmt: skip
SHOWN = ("model", "contender", "ratio", "step_ms", "p20_ms", "p80_ms", "peak_mib", "memory_ratio", "error")


def build(work: Workload) -> nn.Module:
    torch.manual_seed(0)
    return work.build()


def exact_clipped_mean(model: nn.Module, work: Workload, x: Tensor, y: Tensor) -> list[Tensor]:
    """(1/B) sum_b min(1, R / n_b) g_b, one sample at a time, by autograd alone."""
    params = trained(model)
    total = [torch.zeros_like(p) for p in params]
    for b in range(len(x)):
        grads = torch.autograd.grad(work.losses(model(x[b : b + 1]), y[b : b + 1]).sum(), params)
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
        for t, g in zip(total, grads, strict=True):
            t += g * min(1.0, R / float(norm))
    return [t / len(x) for t in total]


def error_of(name: str, work: Workload) -> float:
    """Relative error of the contender's gradient without noise, read as its optimizer sees it (inf if it fails)."""
    try:
        return _error_of(name, work)
    except Exception as problem:  # noqa: BLE001  (a peer's failure is a row of the table)
        print(f"{name} failed: {type(problem).__name__}: {str(problem)[:200]}", file=sys.stderr)
        return float("inf")


def _error_of(name: str, work: Workload) -> float:
    model = build(work)
    torch.manual_seed(1)
    x, y = work.batch(work.batch_size)
    truth = exact_clipped_mean(model, work, x, y)
    seen: dict[nn.Parameter, Tensor] = {}
    params = trained(model)

    def read(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.update({p: p.grad.detach().clone() for p in params if p.grad is not None})

    step = CONTENDERS[name](model, work, sigma=0.0)
    handle = register_optimizer_step_post_hook(read)
    step(x, y)
    handle.remove()
    wrong = sum(float((seen[p].double() - t.double()).square().sum()) for p, t in zip(params, truth, strict=True))
    return (wrong / sum(float(t.double().square().sum()) for t in truth)) ** 0.5


def interleaved(work: Workload, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of every step, round robin after two warm-up rounds."""
    torch.manual_seed(1)
    x, y = work.batch(work.batch_size)
    steps = {name: CONTENDERS[name](build(work), work) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step(x, y)
            if number >= 2:
                times[name].append(time.perf_counter() - start)
        print(f"\r  round {number + 1} of {rounds + 2}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)
    return times


def peak_mib(model: str, name: str) -> float:
    """Peak resident memory of a fresh process that makes three steps.

    Tensors are given back to the system at once (MALLOC_MMAP_THRESHOLD_), so that the peak is of what lives.
    """
    command = [sys.executable, "-m", "benchmarks.training", "--memory-of", model, name]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def measure_memory(model: str, name: str) -> None:
    """Print the growth of peak resident memory over the model's and optimizer's import, in MiB."""
    work = WORKLOADS[model]
    import opacus  # noqa: F401  (so that every contender starts from the same imports)

    x, y = work.batch(work.batch_size)
    before = peak_resident_kib()
    step = CONTENDERS[name](build(work), work)
    for _ in range(3):
        step(x, y)
    print((peak_resident_kib() - before) / 1024)


def peak_resident_kib() -> int:
    """Peak resident memory of this process image (ru_maxrss would count the parent's at the fork)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def run(model: str, names: list[str], rounds: int, memory: bool) -> list[dict[str, object]]:
    """All rows of one model."""
    work = WORKLOADS[model]
    errors = {name: error_of(name, work) for name in names if name not in ("non-private", "fastdp layerwise")}
    right = [name for name in names if errors.get(name, 0.0) < TOLERANCE]
    times = interleaved(work, right, rounds)
    peaks = {name: peak_mib(model, name) for name in right} if memory else {}
    base = statistics.median(times["non-private"])
    rows: list[dict[str, object]] = []
    for name in names:
        row: dict[str, object] = {
            "model": model,
            "contender": name,
            "error": f"{errors[name]:.1e}" if name in errors else "-",
        }
        row |= {"batch_size": work.batch_size, **versions()}
        if name in right:
            t = sorted(times[name])
            row |= {"ratio": f"{statistics.median(t) / base:.2f}", "step_ms": f"{1e3 * statistics.median(t):.1f}"}
            row |= {"p20_ms": f"{1e3 * t[len(t) // 5]:.1f}", "p80_ms": f"{1e3 * t[len(t) * 4 // 5]:.1f}"}
        if name in peaks:
            row |= {"peak_mib": f"{peaks[name]:.0f}", "memory_ratio": f"{peaks[name] / peaks['non-private']:.2f}"}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    if options.memory_of:
        measure_memory(*options.memory_of)
        return
    names = list(dict.fromkeys(["non-private", *options.contenders]))
    rows = []
    for model in options.models:
        rows += run(model, names, options.rounds, not options.no_memory)
    print(", ".join(f"{key} {value}" for key, value in versions().items()))
    show(rows, SHOWN)
    if options.out:
        append(options.out, rows, COLUMNS)


if __name__ == "__main__":
    main()
