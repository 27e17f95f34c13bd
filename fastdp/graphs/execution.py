"""Chooses how a recorded program runs (Python, Inductor, either as a CUDA graph), and compares ways within rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import GraphError
from ..utils.rng_state import States, random_states, same_states, set_random_states
from .cuda_graph import Captured, NotCaptured, Pool, Run
from .inductor import Compiled, NotCompiled
from .program import Program


class Example(NamedTuple):
    """A batch, what the recorded step made of it, and the states of the generators when that began."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    random: States


class Way(NamedTuple):
    """How a program is run. compiled: by Inductor's code; captured: as a CUDA graph, None if not."""

    run: Run
    compiled: bool = False
    captured: Captured | None = None

    def lasting(self) -> Callable[[], None] | None:
        """What raises StepError once the results of the last replay are overwritten; None if nothing does that."""
        return None if self.captured is None else self.captured.lasting()


def way_of(program: Program, examples: Sequence[Example], compile: bool, pool: Pool | None) -> Way:
    """The fastest way that there is, compared with the recorded steps.

    compile: ask Inductor; pool: capture CUDA graphs. Where that does not go, a warning says why. Raises GraphError if
    Inductor makes another step.
    """
    way, apart = Way(program.run), program.run_apart
    if compile:
        try:
            compiled = Compiled(program, examples[0].inputs)
            way, apart = Way(compiled.run, True), compiled.run_apart
        except NotCompiled as why:
            warnings.warn(f"a step is replayed, but not compiled: {why}", stacklevel=7)
        else:
            if different := _difference(program, way.run, examples):
                raise GraphError(
                    f"the compiled step is not the recorded one: {different}. Inductor computes something in another "
                    "way: leave out compile=True"
                )
    if pool is not None:
        try:
            captured = Captured(program, apart, examples[0].inputs, pool)
            if different := _difference(program, captured.run, examples):
                raise NotCaptured(f"launched, it is another step: {different}")
            way = way._replace(run=captured.run, captured=captured)
        except NotCaptured as why:
            warnings.warn(f"a step is replayed, but not as a CUDA graph: {why}", stacklevel=7)
    return way


def _difference(program: Program, run: Run, examples: Sequence[Example]) -> str:
    """What differs from the recorded steps, beside rounding; "" if nothing does."""
    for inputs, outputs, random in examples:
        set_random_states(random)
        program.run(inputs)
        after = random_states(program.device)
        set_random_states(random)
        found, same = run(inputs)
        if not same_states(random_states(program.device), after):
            return "it draws other random numbers"
        if not same:
            return "numbers that Python reads differ"
        if wrong := differing(program, found, outputs):
            return f"{wrong} differ by more than rounding"
    return ""


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
    kinds = {tensor.dtype for tensor in (*outputs, *program.held.values())}
    for operation in program.operations:
        kinds.update(v for v in (*operation.args, *operation.kwargs.values()) if isinstance(v, torch.dtype))
    return next((a, b) for coarse, a, b in _TOLERANCES if not coarse or coarse & kinds)


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
