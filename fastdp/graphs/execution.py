"""Chooses how a recorded program runs: Python, Inductor, and either of them as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import GraphError
from ..utils.rng_state import States, random_states, same_states, set_random_states
from .cuda_graph import Captured, NotCaptured, Pool, Run
from .inductor import Compiled, NotCompiled
from .program import Program
from .rounding import differing


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
