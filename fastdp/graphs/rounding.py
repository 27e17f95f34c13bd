"""Compares two ways to run a program, within rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .program import Program

# by the coarsest numbers of a program: of those of a result, and of the largest result, as some are but rounding
_TOLERANCES: tuple[tuple[set[torch.dtype], float, float], ...] = (
    ({torch.bfloat16, torch.float16}, 5e-2, 1e-3),
    ({torch.float32}, 1e-3, 1e-6),
    (set(), 1e-9, 1e-13),
)


def differing(program: Program, found: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """Which results of a program differ by more than rounding; "" if none does."""
    relative, absolute = tolerances(program, wanted)
    largest = max((_size_of(b) for b in wanted if b.is_floating_point()), default=0.0)
    pairs = enumerate(zip(found, wanted, strict=True))
    wrong = [number for number, (a, b) in pairs if not _is_close(a, b, relative, absolute * largest)]
    return "the losses" if 0 in wrong else f"{len(wrong)} of {len(wanted)} results" if wrong else ""


def tolerances(program: Program, outputs: Sequence[Tensor]) -> tuple[float, float]:
    """How far a result may be off, relative to itself and to the largest."""
    kinds = {tensor.dtype for tensor in (*outputs, *program.held.values())} | _casts(program)
    return next((a, b) for coarse, a, b in _TOLERANCES if not coarse or coarse & kinds)


def _casts(program: Program) -> set[torch.dtype]:
    """The types of numbers that its calls ask for."""
    given = (value for operation in program.operations for value in (*operation.args, *operation.kwargs.values()))
    return {value for value in given if isinstance(value, torch.dtype)}


def _size_of(tensor: Tensor) -> float:
    """The norm of what is finite."""
    return float(tensor.detach().double().nan_to_num(0.0, 0.0, 0.0).norm())


def _is_close(a: Tensor, b: Tensor, relative: float, absolute: float) -> bool:
    """By their norms: one number that falls on the other side of a step of the model tells little."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if not b.is_floating_point():
        return torch.equal(a, b)
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return False
    return _size_of(a.double() - b.double()) <= relative * _size_of(b) + absolute
