"""Telling rounding from a fault: a check that fails in float32 is made once more in float64.

Deep models amplify rounding: plain torch's own gradient of one sample, in float32, may be 1e-3 away from float64's (a
softmax over 49,152 tokens gives 2e-5 of its loss away). A batch is multiplied and summed in other blocks than one
sample, so gradients can differ by as much although no sample sees another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import FastDPError
from .comparison import apart, norms_of

if TYPE_CHECKING:
    from .report import VerifyReport

TIMES = 4.0  # the engine's float32 may be this many times as far off as plain torch's float32 is
WORST = 1e-2  # above it, float32 says nothing of this model
TINY = 1e-4  # of the largest gradient: a smaller one may be all rounding in float32 (a pair of equal answers)
ZERO, ROUGH = 1e-6, 1e8  # float64's gradients over float32's, and their relative errors, if all are only rounding


def may_be_doubled(model: nn.Module) -> bool:
    """Whether there is a float32 model to compute in float64: all floating parameters and buffers are float32, and the
    device has float64."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() or t.is_complex()]
    plain = all(t.dtype == torch.float32 and type(t.data) is Tensor and t.device.type != "mps" for t in tensors)
    return bool(tensors) and plain


def judged_in_double(
    report: VerifyReport, truth: dict[str, Tensor], model: nn.Module,
    repeat: Callable[[], tuple[VerifyReport, dict[str, Tensor]]],
    of: Callable[[list[int]], tuple[VerifyReport, dict[str, Tensor]]],
) -> tuple[str, float | None]:  # fmt: skip
    """Whether float32's failure is rounding: (what is wrong or "", rounding of plain torch's float32 if it decided).

    report, truth: of float32, with one-sample gradients [B, ...] by name; repeat: gives the same of the model as it is;
    of: the same of some of the samples.
    """
    try:
        with in_double(model):
            double, exact = repeat()
    except (RuntimeError, TypeError, ValueError, FastDPError) as error:
        return f"{report.problem} (In float64, which could tell rounding from a fault: {error})", None
    sizes = norms_of(exact)
    largest = float(sizes.max())
    single = max(float(norms_of(truth).max()), report.worst() * 1e-30)  # or how far off those are that alone are 0
    rough = double.worst() < (ROUGH if largest else ZERO * single * 1e30)
    if double.problem and largest < ZERO * single and rough:
        report.not_looked_at.append("the samples' gradients here: they are zero but for rounding")
        return "", None
    if double.problem:
        return report.problem, None
    large = (sizes >= TINY * sizes.max()).nonzero().flatten().tolist()
    if 2 <= len(large) < len(sizes):
        report.not_looked_at.append(f"{len(sizes) - len(large)} gradients in float32: they are zero but for rounding")
        some, truth = of(large)
        report.norm_error, report.sum_error, report.coupling = some.norm_error, some.sum_error, some.coupling
        exact, sizes = {name: rows[large] for name, rows in exact.items()}, sizes[large]
        if not some.problem:
            return "", None
    plain = apart(exact, truth) / sizes.clamp(min=float(sizes.max()) * 1e-6 + 1e-30)  # torch's own float32
    rounding = float(plain.max())
    if not rounding <= WORST:
        return (
            f"exact in float64, but float32 does not carry this model: plain one-sample gradients are {rounding:.1e} "
            "off. Train it in float64, or make it better conditioned (initial weights, norm layers)."
        ), None
    off = report.worst()
    if off <= TIMES * rounding:
        return "", rounding
    return (
        f"wrong per-sample gradients in float32 only: {off:.1e} off, where plain one-sample gradients are "
        f"{rounding:.1e} off float64's. Please report the model: this is a bug of fastdp."
    ), None


@contextlib.contextmanager
def in_double(model: nn.Module) -> Iterator[None]:
    """The model's parameters and buffers as float64; afterwards the very memory they had. Takes three times the model's
    memory meanwhile. Parameters stay the same objects, so tied ones stay tied."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()}
    kept = [(t, t.data) for t in tensors.values()]
    try:
        for tensor, data in kept:
            tensor.grad = None
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in kept:
            tensor.grad = None
            tensor.data = data
