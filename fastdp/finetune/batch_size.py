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
from collections.abc import Sequence
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
    states = random_states(job.device)
    try:
        with Trial(job) as trial:
            if given is None:
                size, limit = _search(trial, cap)
            else:
                size, limit = min(given, cap), "given"
                trial(size, longest=True)
            each = trial(size, longest=False) / size
        return Fit(size, each, int(trial.used[size] + trial.state), limit)
    finally:
        set_random_states(states)


def largest_batch(job: Job) -> int:
    """Records of the largest logical batch that is at all likely: six standard deviations above the expected one."""
    most = job.plan.expected_batch_size + 6 * math.sqrt(job.plan.expected_batch_size)
    if job.groups is not None:
        grouping = Grouping.of(job.data, job.groups)
        grouping.cap = job.plan.max_records_per_group
        most *= grouping.most
    return max(1, min(len(job.data), math.ceil(most)))


def _search(trial: Trial, cap: int) -> tuple[int, str]:
    """Doubled while a sample gets faster (on a GPU: while it fits), and the memory predicted for it is there."""
    deadline, best, least, slower, size = time.monotonic() + SECONDS, 1, math.inf, 0, 1
    if not trial.fits(1):  # also loads and allocates what is needed once
        raise FinetuneError(
            "memory does not suffice for a single sample: shorten the samples, train fewer parameters (LoRA), or take "
            "a smaller model"
        )
    while True:
        begun = time.monotonic()
        if not trial.fits(size):
            return best, "memory"
        took = time.monotonic() - begun
        faster = trial.device.type == "cuda" or took / size < FASTER * least
        best, slower = (size, 0) if faster else (best, slower + 1)
        least = min(least, took / size)
        if size == cap:
            return best, "batch" if best == cap else "speed"
        if (slower >= 2 and size >= ENOUGH) or time.monotonic() + 2.5 * took > deadline:
            return best, "speed"
        if trial.predicted(min(2 * size, cap)) > trial.room:
            return best, "memory"
        size = min(2 * size, cap)


class Trial:
    """Forwards and backwards of a job through the engine. used: {size: bytes at the peak} of the longest records."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, job.device
        self.state = STATE * sum(p.numel() for p in job.model.parameters() if p.requires_grad)
        self.used: dict[int, int] = {}
        self.longest = sorted(range(len(job.data)), key=job.lengths.__getitem__, reverse=True)

    def __enter__(self) -> Trial:
        job, plan = self.job, self.job.plan
        self.buffers = [(b, b.detach().clone()) for b in job.model.buffers()]
        self.modes = [(module, module.training) for module in job.model.modules()]
        job.model.train()
        self.room = int(SHARE[self.device.type == "cuda"] * free_memory(self.device)) - self.state
        self.before = _held(self.device)
        clipping = "local" if plan.clipping == "adaptive" else plan.clipping  # as much memory and time
        self.optimizer = DPAdamW(
            job.model, lr=0.0, noise_multiplier=0.0, max_grad_norm=plan.max_grad_norm, clipping=clipping,
            expected_batch_size=plan.expected_batch_size,
        )  # fmt: skip
        return self

    def __exit__(self, *problem: Any) -> None:
        self._drop()
        self.optimizer.detach()
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        for module, mode in self.modes:
            module.training = mode

    def _drop(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer._privacy.discard()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __call__(self, size: int, longest: bool) -> float:
        """Seconds of a physical batch of the longest records, or of records as they come."""
        total = len(self.job.data)
        places: Sequence[int] = self.longest[:size] if longest else [k * total // size for k in range(size)]
        _forget_peak(self.device)
        begun = time.perf_counter()
        loss = self.job.loss(self.job.model, self.job.batch(places))
        loss.backward()  # type: ignore[no-untyped-call]
        peak = _held(self.device, peak=True)  # on a GPU, waits for it
        took = time.perf_counter() - begun
        del loss
        self._drop()
        if longest:
            self.used[size] = max(self.used.get(size, 0), peak - self.before)
        return took

    def fits(self, size: int) -> bool:
        """Whether a batch of the longest records passes, with room for what a step needs beside it."""
        try:
            self(size, longest=True)
            return self.used[size] <= self.room
        except torch.OutOfMemoryError:
            pass
        except RuntimeError as problem:
            if "can't allocate memory" not in str(problem):
                raise
        gc.collect()  # the error's frames held the batch
        self._drop()
        return False

    def predicted(self, size: int) -> int:
        """Bytes at the peak of a batch of the longest records: by the steepest growth seen, a fifth more."""
        known = sorted(self.used)
        slopes = [(self.used[b] - self.used[a]) / (b - a) for a, b in zip(known, known[1:], strict=False)]
        steepest = max([*slopes, 0.0]) if slopes else self.used[known[-1]] / known[-1]
        return int(self.used[known[-1]] + 1.2 * steepest * (size - known[-1]))


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken on a device; on the CPU without swapping, and within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [_kilobytes("/proc/meminfo", "MemAvailable") or 4 << 30]
    with contextlib.suppress(OSError, ValueError):  # "max" if there is none
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(found))


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _held(device: torch.device, peak: bool = False) -> int:
    """Bytes held now, or the most since `_forget_peak`; 0 if the system does not say."""
    if device.type != "cuda":
        return _kilobytes("/proc/self/status", "VmHWM" if peak else "VmRSS")
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def _kilobytes(path: str, name: str) -> int:
    """The bytes that a file of /proc states; 0 where there is no such file."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(path).read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))
    return 0
