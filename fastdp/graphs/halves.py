"""A program in two parts, a forward and its backward: as functions, and as two CUDA graphs."""

from __future__ import annotations

import bisect
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphError
from .cuda_graph import NotCaptured, Pool, in_a_row, warm_and_capture, why_not_captured
from .program import Program, needed
from .python_code import Source, plainly, slots_in
from .recorder import Slot

Saved = list[Tensor]  # what a forward leaves to its backward


class Halves:
    """The two parts, as functions.

    gradients: of which outputs, by their numbers, the backward takes gradients, and their types and devices; inputs:
    how many the forward takes. kept: the numbers of the outputs whose memory the backward takes.

    Raises GraphError where Python reads numbers behind the forward.
    """

    def __init__(
        self, program: Program, gradients: Sequence[tuple[int, torch.dtype, torch.device]], inputs: int
    ) -> None:
        assert program.cut is not None
        self.program, self.cut, self.gradients, self.inputs = program, program.cut, gradients, inputs
        seam, data = bisect.bisect_left(program.recorded, self.cut.place), len(self.cut.results)
        if read := next((each for each in program.read if each.operation >= seam), None):
            raise GraphError(f"Python reads {read.value!r} in the backward, which a replay cannot take back")
        results, self._outputs = program.outputs[1:data], program.outputs[data:]
        given = {gradient.slot for gradient in self.cut.gradients.values()}
        places = needed(program.operations, results, self.cut.results[1:], begin=seam, given=given)
        operations = [program.operations[place] for place in places]
        source = Source(program.operations, program.read, program.held, program.device)
        taken = {slot.number for slot in (*results, *slots_in(*((op.args, op.kwargs) for op in operations)))}
        made = {slot.number for op in program.operations[:seam] for slot in slots_in(op.out)}
        saved = sorted(number for number in taken & made if source.fixed(number) is None)
        # parameters, buffers and constants that the backward takes
        self.fixed = [tensor for number in sorted(taken) if (tensor := source.fixed(number)) is not None]
        self.of_inputs = sorted(taken & set(range(inputs)))  # numbers of the inputs that the backward takes
        front = range(seam), range(inputs), [*self._outputs, *map(Slot, saved)]
        self._forward, self._forward_apart = source.function(*front), source.function(*front, apart=True)
        slots = [self.cut.gradients[number].slot for number, *_ in gradients]
        self._backward = source.function(places, slots, results, taken=[*saved, *self.of_inputs])
        memory = frozenset().union(*(op.reads for op in operations), self.cut.results[1:])
        self.kept = {number for number, own in enumerate(self.cut.outputs) if own in memory}

    def split(self, found: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[Tensor], Saved]:
        """The outputs, and what the backward takes, of what the forward gave for these inputs."""
        count = len(self._outputs)
        return list(found[:count]), [*found[count:], *(inputs[number] for number in self.of_inputs)]

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Saved, bool]:
        """The outputs, what the backward takes, and whether all that Python read is as it was."""
        with plainly():
            found, same = self._forward(*inputs)
        return (*self.split(found, inputs), same) if same else ([], [], False)

    def apart(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the forward gives, and behind it what numbers are to be read of (`Program.is_same`)."""
        with plainly():
            return in_a_row(self._forward_apart(*inputs))

    def backward(self, gradients: Sequence[Tensor], saved: Saved) -> list[Tensor]:
        """The data of uses. saved: is emptied."""
        with plainly():
            data: list[Tensor] = self._backward(*gradients, *([saved] if saved else []))[0]
        return data

    def laid(self, number: int, gradient: Tensor, dim: int | None = None) -> Tensor:
        """The gradient of an output as it lay in the recording, with zeros behind it along `dim`."""
        known = self.cut.gradients[number]
        if gradient.shape == known.shape and gradient.stride() == known.stride:
            return gradient
        laid = torch.empty_strided(known.shape, known.stride, dtype=gradient.dtype, device=gradient.device)
        if dim is None:
            return laid.copy_(gradient)
        rows = gradient.size(dim)
        laid.narrow(dim, 0, rows).copy_(gradient)
        laid.narrow(dim, rows, laid.size(dim) - rows).zero_()
        return laid


class CapturedHalves:
    """The two parts as CUDA graphs of one pool, which lie in the memory of the capture: the backward must run before
    the next launch of any other. inputs: an example.

    Raises NotCaptured.
    """

    def __init__(self, halves: Halves, inputs: Sequence[Tensor], pool: Pool) -> None:
        program = halves.program
        if why := why_not_captured(program, inputs):
            raise NotCaptured(why)
        self._halves, self._pool = halves, pool
        self._inputs = [tensor.clone() for tensor in inputs]
        self._replay, found = warm_and_capture(pool, lambda given: halves.apart(self._inputs), [])
        asked = sum(len(slots_in(op.args, op.kwargs)) for op in (program.operations[r.operation] for r in program.read))
        pool.launch([], [], self._replay)  # what the backward takes, which is run before it is captured, stands there
        self._outputs, saved = halves.split(found[: len(found) - asked], self._inputs)
        self._asked = found[len(found) - asked :]
        del found
        self._gradients = []
        for number, dtype, device in halves.gradients:
            known = halves.cut.gradients[number]
            self._gradients.append(torch.empty_strided(known.shape, known.stride, dtype=dtype, device=device).zero_())
        # each backward is launched behind its forward, so what it is done with is memory for what it makes
        self._again, self._data = warm_and_capture(pool, lambda given: halves.backward(self._gradients, given), saved)
        self.number = 0  # of the last launch
        self.over = True  # (of a check)

    def free(self) -> bool:
        """Whether no replay has yet to run its backward on what stands in the graphs' memory."""
        user = None if self._pool.user is None else self._pool.user()
        return user is None or user.over

    def forward(self, inputs: Sequence[Tensor], user: Any) -> tuple[list[Tensor], bool]:
        """Copies of the outputs, and whether all that Python read is as it was. user: the replay, whose `over` says
        that its backward has run."""
        self._pool.user = weakref.ref(user)
        self.number = self._pool.launch(self._inputs, inputs, self._replay)
        return [tensor.clone() for tensor in self._outputs], self._halves.program.is_same(self._asked)

    def checked(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], int, bool]:
        """As `Halves.forward`, with the number of the launch in place of what the backward takes."""
        outputs, same = self.forward(inputs, self)
        return outputs, self.number, same

    def backward(self, gradients: Sequence[Tensor], number: int) -> list[Tensor]:
        """The data of uses, of the forward that was the launch of this number. Raises StepError if there was another
        since."""
        self._pool.check(number)
        self.number = self._pool.launch(self._gradients, gradients, self._again)
        return self._data

    def check(self, number: int) -> None:
        """Raises StepError once the results of the launch of this number are overwritten."""
        self._pool.check(number)


def captured(halves: Halves, inputs: Sequence[Tensor], pool: Pool | None) -> CapturedHalves | None:
    """The halves as CUDA graphs. Where that does not go, a warning says why."""
    if pool is None:
        return None
    try:
        return CapturedHalves(halves, inputs[: halves.inputs], pool)
    except NotCaptured as why:
        warnings.warn(f"a forward is replayed, but not as a CUDA graph: {why}", stacklevel=8)
        return None
