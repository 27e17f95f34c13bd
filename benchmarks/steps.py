"""Interleaved steps: building contenders on equal weights and data, and timing them round robin within a time limit."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .contenders import CONTENDERS, Step
from .models import Workload
from .timing import synchronize

LEAST = 3  # rounds of a contender that cannot make all of them within its time
OUT = "out of memory"


class Place(NamedTuple):
    """Where a model runs, and the type of its weights."""

    device: torch.device
    dtype: torch.dtype = torch.float32


CPU = Place(torch.device("cpu"))


class OutOfTime(BaseException):
    """The time limit of a contender; no Exception, so that what it interrupts does not swallow it."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body after so many seconds, as soon as Python runs (in the main thread only)."""
    if not math.isfinite(seconds) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_line(problem: BaseException, width: int = 160) -> str:
    """An error's text for a CSV cell."""
    return " ".join(str(problem).split())[:width] or type(problem).__name__


def build(work: Workload, place: Place = CPU) -> nn.Module:
    torch.manual_seed(0)
    with place.device:
        return work.build().to(place.dtype)


def batch(work: Workload, place: Place = CPU) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, y = (t.to(place.device) for t in work.batch(work.batch_size))
    return (x.to(place.dtype) if x.is_floating_point() else x), y


def step_of(name: str, work: Workload, place: Place = CPU) -> Step:
    """A contender's step on the workload's weights."""
    contender = CONTENDERS[name]
    return contender.make(contender.prepare(build(work, place)), work)


def say(text: str) -> None:
    """What begins now."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Run:
    """A contender's steps: seconds of each, or why there are none."""

    status: str = "ok"
    why: str = "-"
    times: list[float] = field(default_factory=list)
    planned: int = 0
    step: Step | None = None
    peak_mib: float | None = None  # on a GPU: of its tensors alone, beside whatever else is there

    def stop(self, status: str, why: str) -> None:
        self.status, self.why, self.step, self.times = status, why, None, []


def interleaved(work: Workload, names: Sequence[str], rounds: int, place: Place = CPU, limit: float = math.inf
                ) -> dict[str, Run]:  # fmt: skip
    """Steps of every contender, round robin after warm-up; a slow one makes fewer rounds, LEAST at least.

    limit: seconds for each. A contender whose one step takes longer is "out of time"; a first step that compiles may
    take as often that as the contender's `patience` says.
    """
    x, y = batch(work, place)
    runs = {name: Run() for name in names}
    for name, run in runs.items():
        _guarded(run, lambda run=run, name=name: _warm(run, name, work, x, y, place, rounds, limit), place, limit)
    for number in range(rounds):
        for run in runs.values():
            # the planned rounds spread over all of them
            if run.step is not None and (number + 1) * run.planned // rounds > number * run.planned // rounds:
                _guarded(run, lambda run=run: run.times.append(_timed(run.step, x, y, place, limit)), place, limit)
    for run in runs.values():
        run.step = None
    return runs


def _warm(run: Run, name: str, work: Workload, x: Tensor, y: Tensor, place: Place, rounds: int, limit: float) -> None:
    """Build, make three steps, and plan the rounds by the time of the last."""
    begin, held = time.perf_counter(), held_bytes(place)
    with deadline(limit * CONTENDERS[name].patience):
        step = step_of(name, work, place)
        step(x, y)
    reset_peak(place)  # the first step may compile, measure and try; training is what follows
    used = 0.0 if CONTENDERS[name].patience > 1 else time.perf_counter() - begin
    second = _timed(step, x, y, place, limit)
    took = min(second, _timed(step, x, y, place, limit)) if used + 3 * second < limit else second
    if CONTENDERS[name].resident:  # the memory of a CUDA graph is not counted when it is replayed
        run.peak_mib = peak_since(place, held)
    left = limit - used - 2 * second
    run.planned = rounds if not math.isfinite(limit) else max(min(LEAST, rounds), min(rounds, int(left / took)))
    run.step = step


def held_bytes(place: Place) -> int:
    """Bytes of live tensors on a GPU."""
    return torch.cuda.memory_allocated(place.device) if place.device.type == "cuda" else 0


def reset_peak(place: Place) -> None:
    """The allocator's peak counts from here."""
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place.device)


def peak_since(place: Place, held: int) -> float | None:
    """The peak in MiB without what was held before; None on the CPU, where it is not known."""
    if place.device.type != "cuda":
        return None
    return (torch.cuda.max_memory_allocated(place.device) - held) / 2**20


def _timed(step: Any, x: Tensor, y: Tensor, place: Place, limit: float = math.inf) -> float:
    """Seconds of one step, its work on the device included; raises OutOfTime."""
    synchronize(place.device)
    start = time.perf_counter()
    with deadline(limit):
        step(x, y)
        synchronize(place.device)
    took = time.perf_counter() - start
    if took > limit:
        raise OutOfTime
    return took


def _guarded(run: Run, do: Callable[[], None], place: Place, limit: float) -> None:
    """What a contender does, its failure a status."""
    try:
        do()
        return
    except OutOfTime:
        run.stop("out of time", f"a step takes over {limit:.0f} s")
    except (torch.OutOfMemoryError, MemoryError):
        run.stop(OUT, OUT)
    except Exception as problem:  # noqa: BLE001  (a peer's failure is a row of the table)
        run.stop("raises", f"{type(problem).__name__}: {one_line(problem)}")
    # outside of the handlers, whose tracebacks hold the step's tensors
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
