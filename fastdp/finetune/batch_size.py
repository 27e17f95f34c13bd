"""The number of samples that are taken at once: what memory allows, up to what is worth it.

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
from ..verification.state import evaluating
from .plan import FinetuneError, Job

SHARE = 0.6, 0.9  # of the free memory that may be used: on the CPU, on a GPU
ENOUGH = 32, 256  # samples at once beyond which a step is hardly faster: on the CPU, on a GPU
STATE = 16  # bytes for each trained number: clipped sums of two physical batches, Adam's two averages


@dataclasses.dataclass(frozen=True)
class Fit:
    """size: samples at once. bytes: the peak of a step beside what is held before. limit: what decided the size:
    "memory", "speed" (ENOUGH), "batch" (no logical batch is larger), "given"."""

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
    """(size, peak, limit). Doubled up to ENOUGH, while the memory predicted, by the growth so far and a fifth more, is
    there."""
    most, size, last = min(cap, ENOUGH[job.device.type == "cuda"]), 1, _held(job.device, "now")
    _fits(job, optimizer, longest[:1])  # loads and allocates what is needed once
    peak = _fits(job, optimizer, longest[:1])
    if peak is None or peak > room:
        raise FinetuneError(
            "memory does not suffice for a single sample: shorten the samples, train fewer parameters (LoRA), or take "
            "a smaller model"
        )
    while size < most:
        larger = min(2 * size, most)
        predicted = peak + 1.2 * 2 * max(peak - last, 0)
        found = None if predicted > room else _fits(job, optimizer, longest[:larger])
        if found is None or found > room:
            return size, peak, "memory"
        size, last, peak = larger, peak, max(peak, found)
    return size, peak, "batch" if size == cap else "speed"


def _fits(job: Job, optimizer: Any, places: Sequence[int]) -> int | None:
    """Bytes held at the peak of these records, or None where memory does not suffice."""
    try:
        return measured(job, optimizer, places)[1]
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
    states = random_states(job.device)
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    clipping = "local" if plan.clipping == "adaptive" else plan.clipping  # as much memory and time
    optimizer = DPAdamW(
        model, lr=0.0, noise_multiplier=0.0, max_grad_norm=plan.max_grad_norm, clipping=clipping,
        expected_batch_size=plan.expected_batch_size,
    )  # fmt: skip
    try:
        with evaluating(model):  # which keeps the modes
            model.train()
            yield optimizer
    finally:
        _drop(optimizer)
        optimizer.detach()
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
