"""The number of samples that are taken at once: what memory allows, and what is fastest.

Tried by forwards and backwards of the longest records through the engine. No step is made: no noise is drawn, no
accountant knows of it, and weights, buffers, gradients and generators are afterwards what they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..data.grouping import Grouping
from ..optim.optimizers import DPAdamW
from ..utils.rng_state import random_states, set_random_states
from .plan import FinetuneError, Job

SHARE = 0.6, 0.9  # of the free memory that may be used: on the CPU, on a GPU
FASTER = 0.97  # a larger batch is worth its memory if its time for a sample is less than this of the best so far
ENOUGH = 16  # sizes up to it are tried whatever the first times say: they are short, and others may use the machine
STATE = 16  # bytes for each trained number: clipped sums of two physical batches, Adam's two averages
SECONDS = 15.0  # no further size is tried after


@dataclasses.dataclass(frozen=True)
class Fit:
    """size: samples at once. bytes: the peak of a step beside what is held before. limit: what decided the size:
    "memory", "speed" (or trying took too long), "batch" (no logical batch is larger), "given"."""

    size: int
    seconds_per_sample: float
    bytes: int
    limit: str


def fit(job: Job) -> Fit:
    """Find the physical batch size of a job; one that the options give is only measured.

    Raises FinetuneError if memory does not suffice for one sample.
    """
    cap, given = largest_batch(job), job.options.max_physical_batch_size
    state = STATE * sum(p.numel() for p in job.model.parameters() if p.requires_grad)
    held = _held(job.device, "now")
    room = held + int(SHARE[job.device.type == "cuda"] * free_memory(job.device)) - state
    longest = sorted(range(len(job.data)), key=job.lengths.__getitem__, reverse=True)
    with engine_on(job) as optimizer:
        if given is None:
            size, peak, limit = _search(job, optimizer, longest, cap, room)
        else:
            size, limit = min(given, cap), "given"
            _, peak = measured(job, optimizer, longest[:size])
        seconds, _ = measured(job, optimizer, [k * len(job.data) // size for k in range(size)])
    return Fit(size, seconds / size, peak - held + state, limit)


def largest_batch(job: Job) -> int:
    """Records of the largest logical batch that is at all likely: six standard deviations above the expected one."""
    most = job.plan.expected_batch_size + 6 * math.sqrt(job.plan.expected_batch_size)
    if job.groups is not None:
        grouping = Grouping.of(job.data, job.groups)
        grouping.cap = job.plan.max_records_per_group
        most *= grouping.most
    return max(1, min(len(job.data), math.ceil(most)))


def _search(job: Job, optimizer: Any, longest: Sequence[int], cap: int, room: int) -> tuple[int, int, str]:
    """(size, peak, limit). Doubled while a sample gets faster (on a GPU: while it fits), and the memory predicted for
    it, by the growth so far and a fifth more, is there."""
    deadline, best, used, least, slower, size = time.monotonic() + SECONDS, 0, 0, math.inf, 0, 1
    last = _held(job.device, "now")
    _fits(job, optimizer, longest[:1])  # loads and allocates what is needed once
    while True:
        found = _fits(job, optimizer, longest[:size])
        if found is None or found[1] > room:
            break
        seconds, peak = found
        faster = job.device.type == "cuda" or seconds / size < FASTER * least
        best, used, slower = (size, peak, 0) if faster else (best, used, slower + 1)
        least = min(least, seconds / size)
        if size == cap:
            return best, used, "batch" if best == cap else "speed"
        if (slower >= 2 and size >= ENOUGH) or time.monotonic() + 2.5 * seconds > deadline:
            return best, used, "speed"
        if peak + 1.2 * 2 * max(peak - last, 0) > room:
            break
        last, size = peak, min(2 * size, cap)
    if not best:
        raise FinetuneError(
            "memory does not suffice for a single sample: shorten the samples, train fewer parameters (LoRA), or take "
            "a smaller model"
        )
    return best, used, "memory"


def _fits(job: Job, optimizer: Any, places: Sequence[int]) -> tuple[float, int] | None:
    """`measured`, or None where memory does not suffice."""
    try:
        return measured(job, optimizer, places)
    except torch.OutOfMemoryError:
        pass
    except RuntimeError as problem:
        if "can't allocate memory" not in str(problem):
            raise
    gc.collect()  # the error's frames held the batch
    _drop(optimizer)
    return None


def measured(job: Job, optimizer: Any, places: Sequence[int]) -> tuple[float, int]:
    """(seconds, bytes held at the peak) of a forward and a backward of these records."""
    _held(job.device, "now")
    begun = time.perf_counter()
    loss = job.loss(job.model, job.batch(places))
    loss.backward()  # type: ignore[no-untyped-call]
    peak = _held(job.device, "peak")  # on a GPU, waits for it
    seconds = time.perf_counter() - begun
    del loss
    _drop(optimizer)
    return seconds, peak


@contextlib.contextmanager
def engine_on(job: Job) -> Iterator[Any]:
    """A private optimizer of the model, which is in training mode; nothing of it is left behind."""
    plan, model = job.plan, job.model
    states, training = random_states(job.device), [module for module in model.modules() if module.training]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    clipping = "local" if plan.clipping == "adaptive" else plan.clipping  # as much memory and time
    optimizer = DPAdamW(
        model, lr=0.0, noise_multiplier=0.0, max_grad_norm=plan.max_grad_norm, clipping=clipping,
        expected_batch_size=plan.expected_batch_size,
    )  # fmt: skip
    try:
        model.train()
        yield optimizer
    finally:
        _drop(optimizer)
        optimizer.detach()
        model.eval()
        for module in training:
            module.training = True
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        set_random_states(states)


def _drop(optimizer: Any) -> None:
    optimizer.zero_grad()
    optimizer._privacy.discard()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken on a device; on the CPU without swapping, and within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [_bytes("/proc/meminfo", "MemAvailable") or 4 << 30]
    with contextlib.suppress(OSError, ValueError):  # "max" if there is none
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(found))


def _held(device: torch.device, when: str) -> int:
    """Bytes held "now", from when on the "peak" is counted; 0 if the system does not say."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if when == "peak":
            return torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if when == "peak":
        return _bytes("/proc/self/status", "VmHWM")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _bytes("/proc/self/status", "VmRSS")


def _bytes(path: str, name: str) -> int:
    """What a file of /proc states in kilobytes; 0 where there is no such file."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(path).read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
    return 0
