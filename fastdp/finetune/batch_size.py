"""How many samples to take at once: what memory allows, and what is fastest.

Tried on the longest records of the data, by forwards and backwards through the engine. No step is made: no noise is
drawn, no accountant knows of it, and weights, buffers, gradients and generators are afterwards what they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.grouping import Grouping
from ..ops.noise import noise_
from ..optim.optimizers import DPAdamW
from .job import FinetuneError, Job
from .keys import generators_kept
from .training import out_of_memory, to_device

SHARE = {"cpu": 0.6, "cuda": 0.9}  # of the free memory that may be used
LOOKED_AT = 5000  # records, where the job does not tell their lengths
FASTER = 0.97  # a larger batch is worth its memory where its time for a sample is less than this of the best so far
ENOUGH = 16  # sizes up to it are tried whatever the first times say: they are short, and others may use the machine
STATE = 16  # bytes for each trained number: clipped sums of two physical batches, Adam's two averages


@dataclasses.dataclass(frozen=True)
class Fit:
    """What was found.

    size: samples at once. seconds_per_sample, of records as they come, and seconds_per_step, of noise and update: for
    an estimate. bytes: predicted peak of a step beyond what is held before training. limit: what decided the size:
    "memory", "speed", "batch" (no logical batch is larger), "time" (trying took too long), "given".
    """

    size: int
    seconds_per_sample: float
    seconds_per_step: float
    bytes: int
    limit: str


def fit(job: Job, seconds: float = 15.0) -> Fit:
    """Find the physical batch size of a job, in about so many seconds.

    Where the plan gives max_physical_batch_size, that is only measured. Raises FinetuneError where memory does not
    suffice for one sample; errors of the model, of the loss and of fastdp as they are.
    """
    trial = _Trial(job)
    cap = largest_batch(job)
    given = job.plan.max_physical_batch_size
    with generators_kept(), trial:
        if given is not None:
            size, limit = min(given, cap), "given"
            trial(size, longest=True)
        elif trial.device.type == "cuda":
            size, limit = _by_trying(trial, cap)
        else:
            size, limit = _by_growing(trial, cap, seconds)
        each = trial(size, longest=False) / size
    used = trial.used.get(size) or trial.predicted(size)
    return Fit(size, each, _step_seconds(trial), int(used + trial.state), limit)


def largest_batch(job: Job) -> int:
    """Records of the largest logical batch that is at all likely: six standard deviations above the expected one."""
    expected = job.plan.expected_batch_size
    most = expected + 6 * math.sqrt(expected)
    if job.group_by is None:
        return max(1, min(len(job.data), math.ceil(most)))  # type: ignore[arg-type]
    grouping = Grouping.of(job.data, job.group_by)
    grouping.cap = job.plan.max_records_per_group
    return max(1, min(len(job.data), math.ceil(most * grouping.most)))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- searching


def _by_trying(trial: _Trial, cap: int) -> tuple[int, str]:
    """On a GPU: doubled until memory runs out, then halved in between, to an eighth."""
    good, bad = 0, cap + 1
    size = 1
    while True:
        if trial.fits(min(size, cap)):
            good = min(size, cap)
            if good == cap:
                return cap, "batch"
            size *= 2
        else:
            bad = size
            break
        if size >= bad:
            size = cap
    if not good:
        raise FinetuneError(NOT_ONE)
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trial.fits(middle) else (good, middle)
    return good, "memory"


NOT_ONE = (
    "memory does not suffice for a single sample: shorten the samples, train fewer parameters (LoRA), or take a "
    "smaller model"
)


def _by_growing(trial: _Trial, cap: int, seconds: float) -> tuple[int, str]:
    """On the CPU: doubled as long as that makes a sample faster, and the memory predicted for it is there."""
    deadline = time.monotonic() + seconds
    best, least, slower, size = 1, math.inf, 0, 1
    trial(1, longest=True)  # what is loaded and allocated once
    while True:
        took = trial(size, longest=True)
        if took / size < FASTER * least:
            best, slower = size, 0
        else:
            slower += 1
        least = min(least, took / size)
        if size == cap:
            return best, "batch" if best == cap else "speed"
        if slower >= 2 and size >= ENOUGH:
            return best, "speed"
        larger = min(2 * size, cap)
        if trial.predicted(larger) > trial.room:
            if size == 1 and trial.predicted(1) > trial.room:
                raise FinetuneError(NOT_ONE)
            return _refined(trial, size, larger) if best == size else best, "memory"
        if time.monotonic() + 2.5 * took > deadline:
            return best, "time"
        size = larger


def _refined(trial: _Trial, good: int, bad: int) -> int:
    """The largest size between whose prediction there is room for."""
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trial.predicted(middle) <= trial.room else (good, middle)
    return good


# ---------------------------------------------------------------------- trying


class _Trial:
    """Forwards and backwards of a job through the engine. used: {size: bytes at the peak} of the longest records."""

    def __init__(self, job: Job) -> None:
        self.job = job
        trained = [p for p in job.model.parameters() if p.requires_grad]
        if not trained:
            raise FinetuneError("no parameter of the model is trainable")
        self.device, self.numbers = trained[0].device, sum(p.numel() for p in trained)
        self.state = STATE * self.numbers
        self.used: dict[int, int] = {}
        self.longest = _longest_first(job)

    def __enter__(self) -> _Trial:
        job, plan = self.job, self.job.plan
        self._buffers = [(b, b.detach().clone()) for b in job.model.buffers()]
        self._mode = [(module, module.training) for module in job.model.modules()]
        job.model.train()
        self._free = free_memory(self.device)
        self.room = int(SHARE.get(self.device.type, 0.5) * self._free) - self.state
        self._before = _held(self.device)
        clipping = "local" if plan.clipping == "adaptive" else plan.clipping  # as much memory and time
        self.optimizer = DPAdamW(
            job.model, lr=0.0, noise_multiplier=0.0, max_grad_norm=plan.max_grad_norm, clipping=clipping,
            style=plan.style, expected_batch_size=plan.expected_batch_size,
        )  # fmt: skip
        return self

    def __exit__(self, *problem: Any) -> None:
        self._drop()
        self.optimizer.detach()
        for buffer, value in self._buffers:
            with torch.no_grad():
                buffer.copy_(value)
        for module, mode in self._mode:
            module.training = mode

    def _drop(self) -> None:
        self.optimizer.zero_grad()
        self.optimizer._privacy.discard()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __call__(self, size: int, longest: bool) -> float:
        """Seconds of a physical batch of the longest records, or of records as they come."""
        places: Sequence[int] = self.longest[:size]
        if not longest:
            total = len(self.job.data)  # type: ignore[arg-type]
            places = [k * total // size for k in range(size)]
        move = self.job.to_device or (lambda batch: to_device(batch, self.device))
        with _peak(self.device) as peak:
            begun = time.perf_counter()
            loss = self.job.loss(self.job.model, move(self.job.collate([self.job.data[k] for k in places])))
            if not isinstance(loss, Tensor) or loss.dim():
                raise FinetuneError("the loss must be one number: the mean of the samples' own losses")
            loss.backward()  # type: ignore[no-untyped-call]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took = time.perf_counter() - begun
        del loss
        self._drop()
        if longest:
            self.used[size] = max(self.used.get(size, 0) if size > 1 else 0, peak[0] - self._before)
        return took

    def fits(self, size: int) -> bool:
        """Whether a batch of the longest records passes, with room for what a step needs beside and a margin."""
        try:
            self(size, longest=True)
            return self.used[size] <= self.room
        except RuntimeError as problem:
            if not out_of_memory(problem):
                raise
        gc.collect()  # the error's frames held the batch
        self._drop()
        return False

    def predicted(self, size: int) -> int:
        """Bytes at the peak of a batch of the longest records: by the steepest growth seen, a fifth more."""
        known = sorted(self.used)
        below = [k for k in known if k <= size] or known[:1]
        last = below[-1]
        if last == size or not known:
            return self.used.get(size, 0)
        slopes = [(self.used[b] - self.used[a]) / (b - a) for a, b in zip(known, known[1:], strict=False)]
        steepest = max([*slopes, 0.0]) if slopes else self.used[last] / last
        return int(self.used[last] + 1.2 * steepest * (size - last))


def _longest_first(job: Job) -> list[int]:
    total = len(job.data)  # type: ignore[arg-type]
    places = range(total)
    length = job.length
    if length is None:
        places = range(0, total, max(1, total // LOOKED_AT))
        length = lambda k: _weight(job.data[k])
    with generators_kept():
        return sorted(places, key=length, reverse=True)


def _weight(item: Any) -> int:
    """How much an item holds: numbers of its tensors and arrays, lengths of its lists and texts."""
    if hasattr(item, "nbytes") and hasattr(item, "shape"):
        return math.prod(item.shape)
    if isinstance(item, dict):
        return sum(_weight(value) for value in item.values())
    if isinstance(item, str | bytes):
        return len(item)
    if isinstance(item, tuple | list):
        plain = all(isinstance(value, int | float) for value in item)
        return len(item) if plain else sum(_weight(value) for value in item)
    return 1


def _step_seconds(trial: _Trial) -> float:
    """Noise, update and the digest of the sums, from a part of them."""
    numbers = min(trial.numbers, 1 << 20)
    part = torch.zeros(numbers, device=trial.device)
    noise_(part, 1.0, bytes(32), 0)  # of no run: what is compiled or allocated once
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    begun = time.perf_counter()
    noise_(part, 1.0, bytes(32), 0)
    if trial.device.type == "cuda":
        torch.cuda.synchronize(trial.device)
    else:
        hashlib.sha256(part.numpy().tobytes()).digest()
    return 1.5 * (time.perf_counter() - begun) * trial.numbers / numbers


# ---------------------------------------------------------------------- memory


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken on a device; on the CPU without swapping, and within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))))
    for limit, used in (("memory.max", "memory.current"),
                        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):  # fmt: skip
        with contextlib.suppress(OSError, ValueError):  # "max" where there is none
            group = Path("/sys/fs/cgroup")
            found.append(int((group / limit).read_text()) - int((group / used).read_text()))
    if not found:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return max(0, min(found, default=4 << 30))


def _held(device: torch.device) -> int:
    """Bytes held now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return _high_water()


@contextlib.contextmanager
def _peak(device: torch.device) -> Iterator[list[int]]:
    """[bytes held at the peak of the block], of this process or of the device."""
    found = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found[0] = torch.cuda.max_memory_allocated(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    yield found
    found[0] = _high_water()


def _high_water() -> int:
    """The most memory this process held (where it cannot be begun anew, since it began)."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
