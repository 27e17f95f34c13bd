"""Predicts how long the operations of a private step take on a device, from a few measured constants.

A job's time is a sum of four terms with non-negative constants: a call, its arithmetic, its arithmetic over
the smallest side of the product (thin products run below the peak), and its bytes. The constants are fitted to
small probes of the family that is asked for, linear or convolutions, once a device in well under a second (and on a
GPU what its kernels take to be compiled), and kept in the user's cache folder.
FASTDP_CALIBRATE=0 takes the constants below instead (so does a machine too busy to measure): then the same shapes take
the same routes everywhere.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from .. import ops
from ..batch_axis.row_groups import Groups
from ..ops.common import event_on

Constants = dict[str, list[float]]  # job -> seconds a call, a flop, a flop over the smallest side, a byte
REPEATS = 5
CLOCK = 2e9  # cycles of a GPU in a second, at most
DEADLINE = 1.0  # seconds: a machine that takes longer is busy, and would tell nothing


class Shape(NamedTuple):
    """A use as a matrix product: T positions of I inputs and O outputs for each of B samples (of a convolution:
    T output positions, I = inputs of one output element), in groups that do not meet."""

    family: str  # "linear" or "conv"
    batch: int
    t: int
    i: int
    o: int
    groups: int = 1

    def gradient_bytes(self) -> int:
        """Bytes of the per-sample gradients."""
        return 4 * self.batch * self.i * self.o

    def by_group(self, groups: Groups) -> Shape:
        """The product by groups of samples: as many positions as a group of average size has."""
        return self._replace(batch=groups.count, t=-(-self.t * groups.records // max(groups.count, 1)))


class Segments(NamedTuple):
    """A use by routed rows: how many rows of each sample met each of `experts` matrices with I inputs, O outputs."""

    rows: Tensor  # [experts * batch], on the use's device
    experts: int
    i: int
    o: int

    def gram(self) -> Tensor:
        """Multiply-adds of the norms of each segment by the gram route, or directly where that is less; float64.

        MEASURED: the kernel takes what `linear_norm_sq` takes of as many samples of as many rows, 0.65-1.1 of it.
        """
        n = self.rows.double().cpu()
        return torch.where(n > 1, (n * n * (self.i + self.o) / 2).clamp(max=n * self.i * self.o), 0.0)

    def norm_units(self) -> float:
        """Multiply-adds of all norms over those of the gradient."""
        return float(self.gram().sum() / (self.rows.sum().cpu() * self.i * self.o).clamp(min=1))

    def seconds(self, constants: Constants) -> float:
        """Predicted time of norms and clipped sum; a product for each matrix in the sum."""
        total, used = int(self.rows.sum()), max(int((self.rows > 0).sum()), 1)
        each = Shape("linear", self.experts, -(-total // self.experts), self.i, self.o)
        call, flop, _, byte = constants["linear gram"]
        norms = call + 2 * float(self.gram().sum()) * flop + 4.0 * total * (self.i + self.o) * byte
        parts = terms("sum", each._replace(batch=1))
        return norms + min(self.experts, used) * sum(x * k for x, k in zip(parts, constants["linear sum"], strict=True))


def terms(job: str, s: Shape) -> tuple[float, float, float, float]:
    """(1, flop, flop over the smallest side, bytes) of a job of this shape."""
    data, weight = 4.0 * s.batch * s.t * (s.i * s.groups + s.o), 4.0 * s.i * s.o
    if job == "gram":
        flop, side = float(s.batch * s.t * s.t * (s.i + s.o)), min(s.t, s.i, s.o)
        return 1.0, flop, flop / max(side, 1), data
    if job == "weighted":  # the norms of stored gradients, and their weighted sum
        return 1.0, 0.0, 0.0, 2.0 * s.batch * weight
    flop = 2.0 * s.batch * s.t * s.i * s.o
    if job == "sum":
        return 1.0, flop, flop / max(min(s.i, s.o, s.batch * s.t), 1), 2 * data + weight
    side = min(s.i, s.o, s.t)
    return 1.0, flop, flop / max(side, 1), data + (s.batch * weight if job == "per_sample" else 0.0)


ROUTES = {"gram": ("gram", "sum"), "direct": ("direct", "sum"), "materialise": ("per_sample", "weighted")}


def seconds(route: str, shape: Shape, constants: Constants, calls: bool = True) -> float:
    """Predicted time of a use by a route: its norms and its clipped sum. calls: count those of what starts them."""
    total = 0.0
    for job in ROUTES[route]:
        parts = (float(calls), *terms(job, shape)[1:])
        total += sum(x * k for x, k in zip(parts, constants[f"{shape.family} {job}"], strict=True))
    return total


# ---------------------------------------------------------------------- probes

# B, T, I, O of linear probes, and B, C, O, side of the image of convolutions (3x3). They span what uses look like: thin
# and square, few and many positions, stored gradients within the cache and beyond it. A GPU needs more to be busy, and
# each other kind of shape is a kernel to be compiled, up to a second each: these share theirs.
_LINEAR = {
    "cpu": ((4, 32, 64, 64), (4, 128, 256, 256), (2, 256, 128, 512), (8, 64, 512, 8), (8, 128, 384, 96),
            (1, 300, 500, 200), (8, 32, 512, 512), (8, 8, 1024, 1024)),
    "cuda": ((16, 128, 512, 2048), (16, 256, 1024, 1536), (16, 512, 768, 3072), (16, 512, 1024, 4096),
             (16, 1024, 512, 1536), (16, 1024, 1024, 4096)),
}  # fmt: skip
_CONV = {
    "cpu": ((8, 3, 32, 32), (8, 16, 32, 16), (4, 64, 64, 8), (8, 128, 64, 4), (8, 64, 128, 16), (4, 256, 128, 4),
            (2, 8, 8, 2), (64, 16, 32, 5), (32, 128, 128, 2)),
    "cuda": ((32, 64, 128, 28), (32, 128, 128, 16), (32, 256, 128, 16), (32, 256, 256, 8)),
}  # fmt: skip


def _jobs(s: Shape, side: int, make: Callable[..., Tensor]) -> dict[str, Callable[[], object]]:
    """What is timed of a product, or of a convolution of 3 x 3 on images of this side."""
    rest: dict[str, Any] = {} if s.family == "linear" else {"kernel_size": 3, "padding": 1}
    of = {name: getattr(ops, f"{s.family}_{name}") for name in ("norm_sq", "clipped_sum", "per_sample")}
    if s.family == "linear":
        a, g = make(s.batch, s.t, s.i), make(s.batch, s.t, s.o)
    else:
        a, g = make(s.batch, s.i // 9, side, side), make(s.batch, s.o, side, side)
    c, kept = make(s.batch).float(), of["per_sample"](a, g, **rest)
    return {
        "gram": lambda: of["norm_sq"](a, g, method="gram", dtype=torch.float64, **rest),
        "direct": lambda: of["norm_sq"](a, g, method="direct", dtype=torch.float64, **rest),
        "sum": lambda: of["clipped_sum"](a, g, c, **rest),
        "per_sample": lambda: of["per_sample"](a, g, **rest),
        "weighted": lambda: (ops.square_sum(kept), ops.weighted_sum(kept, c)),
    }


def calibrate(device: torch.device, dtype: torch.dtype, family: str, deadline: float = DEADLINE) -> Constants | None:
    """Measure the probes of a family and fit its constants; None where that takes longer than the deadline (seconds).

    What a GPU's kernels take to be compiled at their first call is not counted.
    """
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    found: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    spent = 0.0
    for shape, jobs in _probes(device.type, family, make):
        for job, run in jobs.items():
            if device.type == "cuda":
                run()
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            found.setdefault(f"{shape.family} {job}", []).append((terms(job, shape), measure(run, device)))
            spent += time.perf_counter() - begin
            if spent > deadline:
                return None
    return {job: fit([x for x, _ in rows], [t for _, t in rows]) for job, rows in found.items()}


def _probes(
    kind: str, family: str, make: Callable[..., Tensor]
) -> Iterator[tuple[Shape, dict[str, Callable[[], object]]]]:
    """Shapes and their jobs, one at a time."""
    for size in _LINEAR[kind] if family == "linear" else ():
        shape = Shape("linear", *size)
        yield shape, _jobs(shape, 0, make)
    for b, c, o, side in _CONV[kind] if family == "conv" else ():
        shape = Shape("conv", b, side * side, 9 * c, o)
        yield shape, _jobs(shape, side, make)


def measure(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of a call: the least of several, which other processes disturb least. On a GPU the mean of several that
    are launched while it is held up, so that it does not wait for the host between them."""
    run()
    if device.type != "cuda":
        return min(seconds_of(run, device) for _ in range(repeats))
    begin = time.perf_counter()
    run()
    host = time.perf_counter() - begin
    clock = Clock(device)
    with torch.cuda.device(device):
        torch.cuda._sleep(int(min(2 * (repeats + 1) * host, 0.1) * CLOCK))
        with clock:
            for _ in range(repeats):
                run()
    return clock.milliseconds() / 1e3 / repeats


def fit(rows: Sequence[Sequence[float]], times: Sequence[float]) -> list[float]:
    """Non-negative k with rows k = times, least squares of the relative errors."""
    from scipy.optimize import nnls  # a second, which few runs need

    x = numpy.asarray(rows) / numpy.asarray(times)[:, None]
    size = numpy.maximum(numpy.linalg.norm(x, axis=0), 1e-30)  # calls and flops are far apart
    return (nnls(x / size, numpy.ones(len(times)))[0] / size).tolist()


# ---------------------------------------------------------------------- kept constants

# Two cores of an Intel Xeon (AVX-512), torch 2.13: what a device is taken for when nothing may be measured.
DEFAULT: Constants = {
    "linear gram": [2.4e-05, 4.6e-12, 0.0, 6.0e-11],
    "linear direct": [1.9e-05, 4.2e-12, 3.7e-11, 0.0],
    "linear sum": [3.0e-05, 3.7e-12, 0.0, 1.0e-11],
    "linear per_sample": [8.4e-06, 3.9e-12, 2.5e-11, 2.0e-11],
    "linear weighted": [1.9e-05, 0.0, 0.0, 2.0e-11],
    "conv gram": [6.9e-05, 6.0e-12, 4.5e-11, 1.0e-10],
    "conv direct": [5.1e-05, 3.3e-12, 6.5e-11, 7.0e-12],
    "conv sum": [8.9e-05, 3.4e-12, 0.0, 3.3e-11],
    "conv per_sample": [4.3e-05, 3.2e-12, 7.5e-12, 4.2e-11],
    "conv weighted": [2.3e-05, 0.0, 0.0, 1.6e-11],
}
# An H200, torch 2.11, Triton 3.6, bfloat16.
_ON_GPU: Constants = {
    "linear gram": [1.7e-05, 1.5e-15, 9.2e-14, 2.0e-13],
    "linear direct": [3.1e-06, 1.5e-15, 3.7e-13, 0.0],
    "linear sum": [1.2e-05, 2.2e-15, 0.0, 8.1e-14],
    "linear per_sample": [2.2e-06, 9.0e-16, 5.4e-13, 0.0],
    "linear weighted": [8.1e-06, 0.0, 0.0, 2.5e-13],
    "conv gram": [2.4e-05, 0.0, 5.6e-13, 0.0],
    "conv direct": [1.1e-05, 1.6e-15, 6.0e-13, 0.0],
    "conv sum": [6.5e-05, 5.4e-15, 0.0, 0.0],
    "conv per_sample": [0.0, 0.0, 0.0, 1.2e-12],
    "conv weighted": [1.4e-05, 0.0, 0.0, 2.2e-13],
}
DEFAULTS: dict[str, Constants] = {"cpu": DEFAULT, "cuda": _ON_GPU}


_KEPT: dict[tuple[str, bool, str], Constants] = {}


def keep(device: torch.device, short: bool, known: Constants) -> None:
    """Take these, of one family or both, from now on: a run that is taken up must take the routes it took, whatever
    would be measured now."""
    for family in {job.split()[0] for job in known}:
        _KEPT[str(device), short, family] = _of_family(known, family)
    _constants.cache_clear()


def forget() -> None:
    """The run is over: what is measured counts again."""
    _KEPT.clear()
    _constants.cache_clear()


def constants(device: torch.device, short: bool, family: str) -> Constants:
    """The constants of a device for a family of uses, "linear" or "conv"; short: for 16-bit inputs. Measured at the
    first call, then read from the cache.

    Where a user has given a kernel (`ops.register_kernel`) they are measured anew, and kept for this process alone.
    """
    return _constants(device, short, family, ops.registry.changes())


@functools.cache
def _constants(device: torch.device, short: bool, family: str, changes: int) -> Constants:
    if (str(device), short, family) in _KEPT:
        return _KEPT[str(device), short, family]
    usual = _of_family(DEFAULTS.get(device.type, DEFAULT), family)
    if os.environ.get("FASTDP_CALIBRATE", "1") == "0" or device.type not in ("cpu", "cuda"):
        return usual
    if ops.registry.any_own():
        return _measured(device, short, family) or usual
    path = _path(device, short, family)
    try:
        kept: Constants = json.loads(path.read_text())
        if set(kept) == set(usual):
            return kept
    except (OSError, ValueError):
        pass
    found = _measured(device, short, family)
    if found is None:
        return usual
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, path)
    except OSError:
        pass  # measured again next time
    return found


def _of_family(known: Constants, family: str) -> Constants:
    return {job: values for job, values in known.items() if job.startswith(family)}


def _measured(device: torch.device, short: bool, family: str) -> Constants | None:
    with torch.no_grad():
        return calibrate(device, torch.bfloat16 if short else torch.float32, family)


def _path(device: torch.device, short: bool, family: str) -> Path:
    """A file for each device, its threads, the versions that decide speed, and the probes."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    served = [f"{key} {op.served_by(device.type)}" for key, op in sorted(ops.registry.OPERATORS.items())]
    what = (name, torch.get_num_threads(), os.cpu_count(), torch.__version__, short, served, family, _LINEAR, _CONV)
    digest = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fastdp" / f"costs-{digest}.json"


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """One call, by the device's own clock; waits for its end."""
    clock = Clock(device)
    with clock:
        run()
    return clock.milliseconds() / 1e3


class Clock:
    """Adds up spans: `with clock: ...`. Reading waits for the device.

    sharers: uses that are worked on together, of which each is told an equal part.
    """

    def __init__(self, device: torch.device, sharers: int = 1) -> None:
        self.device, self.sharers = device, sharers
        self.spans: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def __enter__(self) -> Clock:
        self._begin = _now(self.device)
        return self

    def __exit__(self, *problem: object) -> None:
        self.spans.append((self._begin, _now(self.device)))

    def milliseconds(self) -> float:
        """The sum of the spans so far, for one of the sharers."""
        spent = 0.0
        for begin, end in self.spans:
            if isinstance(end, float):
                spent += 1e3 * (end - begin)
            else:
                end.synchronize()
                spent += begin.elapsed_time(end)
        return spent / self.sharers


def _now(device: torch.device) -> Any:
    event = event_on(device, timed=True)
    return time.perf_counter() if event is None else event
