"""Peak memory of fresh processes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .contenders import CONTENDERS, NotApplicable
from .models import Workload
from .steps import OUT, Place, batch, one_line, step_of
from .suites import find
from .timing import KEPT

MAIN = "benchmarks.memory"  # what a fresh process runs; of another benchmark with its own workloads
ROOT = Path(__file__).parent.parent
GIVE_BACK = "65536"  # bytes from which a block of memory goes back to the system when it is freed
SIDE_BY_SIDE = {"cpu": 2, "cuda": 3}


class Job(NamedTuple):
    """What is measured, so that a fresh process can make it again; 0: the workload's own."""

    suite: str
    workload: str
    device: str = "cpu"
    dtype: str = "float32"
    small: bool = False
    batch_size: int = 0
    length: int = 0

    def work(self) -> Workload:
        return find(self.suite, self.workload, self.small, self.batch_size, self.length)

    def place(self) -> Place:
        return Place(torch.device(self.device), getattr(torch, self.dtype))


class Peak(NamedTuple):
    """Peak memory in MiB, or why there is none: "out of memory", "out of time", "raises"."""

    mib: float | None
    status: str = "ok"
    why: str = "-"


def peaks(job: Job, names: Sequence[str], limit: float | None = None) -> dict[str, Peak]:
    """Peaks of fresh processes that make three steps each, contenders whose process shows something else left out.

    On the CPU the peak of resident memory, of live tensors: freed blocks go back to the system at once
    (MALLOC_MMAP_THRESHOLD_). On a GPU the peak of the allocator. Processes run side by side, as starting them takes
    longest; one that finds too little memory left runs again on its own. limit: seconds for each.
    """
    names = [name for name in names if job.device == "cuda" or CONTENDERS[name].resident]
    if job.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    with ThreadPoolExecutor(SIDE_BY_SIDE[job.device]) as pool:
        found = dict(zip(names, pool.map(lambda name: peak(job, name, limit=limit), names), strict=True))
    return {name: peak(job, name, limit=limit) if p.status == OUT else p for name, p in found.items()}


def fresh(module: str, job: Sequence[Any], limit: float | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m module --memory-of JOB` in a process whose allocator gives freed blocks back at once."""
    command = [sys.executable, "-m", module, "--memory-of", json.dumps(job)]
    environment = {name: value for name, value in os.environ.items() if name not in KEPT}
    environment["MALLOC_MMAP_THRESHOLD_"] = GIVE_BACK
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=limit)


def fresh_mib(module: str, job: Sequence[Any]) -> float:
    """The last word that such a process prints. Raises RuntimeError where it fails."""
    done = fresh(module, job)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1])


def peak(job: Job, name: str, steps: int = 3, limit: float | None = None) -> Peak:
    """The peak of one fresh process."""
    try:
        done = fresh(MAIN, [*job, name, steps], limit)
    except subprocess.TimeoutExpired:
        return Peak(None, "out of time", f"the process took over {limit:.0f} s")
    if OUT in done.stdout or done.returncode == -9:  # killed: the system had no more
        return Peak(None, OUT, OUT)
    if done.returncode:
        return Peak(None, "raises", done.stderr.strip().rpartition("\n")[2][:160])
    return Peak(float(done.stdout.split()[-1]))


def measure(told: str) -> None:
    """In the fresh process: print the peak in MiB, on the CPU the growth of resident memory over the imports."""
    *parts, name, steps = json.loads(told)
    job = Job(*parts)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    try:
        import opacus.validators  # noqa: F401  (so that every contender starts from the same imports)
    except ImportError:
        pass
    before = resident_kib()
    try:
        work, place = job.work(), job.place()
        x, y = batch(work, place)
        step = step_of(name, work, place)
        for _ in range(steps):
            step(x, y)
    except (torch.OutOfMemoryError, MemoryError):
        print(OUT)
        return
    except NotApplicable as problem:
        sys.exit(one_line(problem))
    on_gpu = job.device == "cuda"
    print(torch.cuda.max_memory_allocated() / 2**20 if on_gpu else (resident_kib() - before) / 1024)


def resident_kib() -> int:
    """Peak resident memory of this process image (ru_maxrss would count the parent's at the fork)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--memory-of":
        sys.exit("this module is run by benchmarks.training, in a fresh process for each contender")
    measure(sys.argv[2])
