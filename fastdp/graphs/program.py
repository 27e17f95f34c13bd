"""Writes a recording as straight-line Python, without operations that its results do not need."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import GraphError
from .python_code import Source, plainly, slots_in
from .recorder import Operation, Read, Recorder, Seam, Slot, memory_of
from .view_folding import without_detours

aten = torch.ops.aten


class OutputGradient(NamedTuple):
    """The gradient of an output, as it came to a seam."""

    slot: int
    shape: torch.Size
    stride: tuple[int, ...]


class Cut(NamedTuple):
    """A recorder's seam, by slots and memory. place: of the first operation behind it; results: memory of the results
    of the backward; outputs: memory of those of the forward."""

    place: int
    results: list[int]
    outputs: list[int]
    gradients: dict[int, OutputGradient]  # by the numbers of the outputs


class Recording(NamedTuple):
    """What a recorder saw, without the tensors of the step itself."""

    operations: list[Operation]
    read: list[Read]
    inputs: int
    outputs: list[Slot]
    held: dict[int, Tensor]  # parameters, buffers and constants, by slot
    constants: set[int]  # which of these are constants
    memory: set[int]  # of the outputs
    cut: Cut | None  # where it has a seam
    device: torch.device


def recording_of(recorder: Recorder, inputs: int, results: Sequence[Tensor]) -> Recording:
    """With the outputs of a seam behind these results. Raises GraphError where one is none of the program's."""
    slots, seam = [], recorder.seam
    outputs = [*results, *(() if seam is None else seam.outputs)]
    for tensor in outputs:
        slot = recorder.known(tensor)
        if slot is None or recorder.is_unwritten(tensor):
            raise GraphError(
                f"a result of shape {tuple(tensor.shape)} was not made by torch's functions from the batch"
            )
        slots.append(slot)
    held = {number: kept.tensor for number, kept in recorder.kept.items()}
    constants = {number for number, kept in recorder.kept.items() if kept.is_constant}
    memory = set(map(memory_of, outputs))
    cut = None if seam is None else _cut(recorder, seam, results)
    apart = [] if cut is None else [gradient.slot for gradient in cut.gradients.values()]
    operations, renamed = without_detours(recorder.operations, recorder.contiguous, apart)
    slots = [Slot(renamed.get(slot.number, slot.number)) for slot in slots]
    return Recording(operations, recorder.read, inputs, slots, held, constants, memory, cut, recorder.device)


def _cut(recorder: Recorder, seam: Seam, results: Sequence[Tensor]) -> Cut:
    gradients = {}
    for number, tensor in seam.gradients.items():
        if (slot := recorder.known(tensor)) is None:
            raise GraphError("the gradient of an output was not made by torch's functions from the batch")
        gradients[number] = OutputGradient(slot.number, tensor.shape, tensor.stride())
    return Cut(seam.place, list(map(memory_of, results)), list(map(memory_of, seam.outputs)), gradients)


def needed(
    operations: Sequence[Operation], results: Iterable[Slot], memory: Iterable[int], *,
    begin: int = 0, given: Collection[int] = (), read: Collection[int] = (),
) -> list[int]:  # fmt: skip
    """The places, from `begin` on, of the operations that results and memory depend on, and of those that draw random
    numbers. given: slots of tensors that are there already. read: places of operations that are needed as well."""
    slots, memory = {slot.number for slot in results}.difference(given), set(memory)
    found = []
    for place in reversed(range(begin, len(operations))):
        operation = operations[place]
        made = {slot.number for slot in slots_in(operation.out)}
        if made & slots or operation.writes & memory or operation.draws or place in read:
            found.append(place)
            slots |= {slot.number for slot in slots_in(operation.args, operation.kwargs)}.difference(given)
            memory |= operation.reads
    return found[::-1]


class Program:
    """Replays a recording.

    `run(inputs)` returns the outputs, and whether all numbers that decided how it went on are as they were.
    """

    def __init__(self, recording: Recording) -> None:
        every, outputs, memory = recording.operations, recording.outputs, recording.memory
        # places in the recording of the operations that are replayed
        self.recorded = needed(every, outputs, memory, read={read.operation for read in recording.read})
        self.operations = [every[place] for place in self.recorded]
        places = {old: new for new, old in enumerate(self.recorded)}
        self.read = [read._replace(operation=places[read.operation]) for read in recording.read]
        self.draws = any(operation.draws for operation in self.operations)
        self.inputs, self.outputs, self.cut = recording.inputs, outputs, recording.cut
        self.device = recording.device
        # a function that computes with numbers beside the device
        self.beside = next((op.func._schema.name.partition("::")[2] for op in self.operations if op.beside), "")
        used = {slot.number for op in self.operations for slot in slots_in(op.args, op.kwargs)}
        self.held = {number: tensor for number, tensor in recording.held.items() if number in used}
        for_results = [every[place] for place in needed(every, outputs, memory)]
        # that the results take; checks have constants of their own
        self.constants = recording.constants & {s.number for op in for_results for s in slots_in(op.args, op.kwargs)}
        self.for_first = [every[place] for place in needed(every, outputs[:1], ())]
        self._run: Callable[..., Any] | None = None
        self._run_apart: Callable[..., Any] | None = None
        # whether the number of rows of a result depends on the numbers of the batch
        self.counts_rows = any(slots_in(self.operations[read.operation].out) for read in self.read)

    def run(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """See above."""
        if self._run is None:
            self._run = self._compiled()
        with plainly():
            found: tuple[list[Tensor], bool] = self._run(*inputs)
        return found

    def run_apart(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, and what numbers are to be read of (`is_same`): for devices, which this does not wait for."""
        if self._run_apart is None:
            self._run_apart = self._compiled(apart=True)
        with plainly():
            found: tuple[list[Tensor], list[Tensor]] = self._run_apart(*inputs)
        return found

    def _compiled(self, apart: bool = False) -> Callable[..., Any]:
        source = Source(self.operations, self.read, self.held, self.device)
        return source.function(range(len(self.operations)), range(self.inputs), self.outputs, apart=apart)

    def is_same(self, asked: Sequence[Tensor]) -> bool:
        """Whether all numbers that decided how it went on are as they were. asked: the arguments of the calls that read
        them, one call after the other."""
        given = iter(asked)
        for read in self.read:
            call = self.operations[read.operation]
            args, kwargs = tree_map(
                lambda leaf: next(given) if isinstance(leaf, Slot) else leaf, (call.args, call.kwargs)
            )
            if call.func(*args, **kwargs) != read.value:
                return False
        return True

    def calls_with(self, constant: Tensor) -> list[Any]:
        """The calls that take this constant, or one made anew with the same numbers: functions, and what they take
        beside tensors, the sizes to which they cut or expand it among these."""
        same = {number for number in self.constants if _same_tensor(constant, self.held[number])}
        found = []
        for op in self.operations:
            given = tree_leaves((op.args, op.kwargs))
            if any(isinstance(leaf, Slot) and leaf.number in same for leaf in given):
                found.append((op.func, [leaf for leaf in given if not isinstance(leaf, Slot)]))
        return found

    def difference_in_numbers(self, other: Program) -> str:
        """What differs in the first output, the losses, from a recording of the step at another size, beside sizes.

        "" if nothing does. How uses are stored is a matter of the planner, and may differ.
        """
        if [op.func for op in self.for_first] != [op.func for op in other.for_first]:
            return "torch's functions are called for another number of samples in another way"
        for one, two in zip(self.for_first, other.for_first, strict=True):
            name = one.func._schema.name.partition("::")[2]
            if name in ("arange", "linspace"):
                continue
            for place, argument in enumerate(one.func._schema.arguments):
                kind = str(argument.type)
                if "int" in kind.lower() or "Layout" in kind or "Device" in kind:
                    continue  # sizes
                mine, others = (op.kwargs.get(argument.name, op.args[place] if place < len(op.args) else None)
                                for op in (one, two))  # fmt: skip
                scalars = [self._scalar(mine), other._scalar(others)]
                if not _same_tensor(*scalars):
                    return f"{name}() takes {_shown(mine)} for one size, {_shown(others)} for another"
                numbers = [[x for x in tree_leaves(v) if isinstance(x, bool | int | float)] for v in (mine, others)]
                if numbers[0] != numbers[1]:
                    return f"{name}() takes {_shown(mine)} for one size, {_shown(others)} for another"
        return ""

    def _scalar(self, argument: Any) -> Tensor | None:
        """A constant of one number."""
        found = self.held.get(argument.number) if isinstance(argument, Slot) else None
        return found if found is not None and found.numel() == 1 else None

    def went_another_way(self, other: Program) -> bool:
        """Whether another recording read other numbers, so that the two cannot be compared."""
        return [read.value for read in self.read] != [read.value for read in other.read]

    def difference(self, other: Program) -> str:
        """What differs from another recording of the same step, on another batch; "" if nothing does."""
        if len(self.operations) != len(other.operations):
            return f"{len(self.operations)} calls of torch on one batch, {len(other.operations)} on another"
        numbers = dict(zip(range(self.inputs), range(self.inputs), strict=True))  # of the other's slots

        def same(a: Any, b: Any) -> bool:
            if isinstance(a, Slot) and isinstance(b, Slot):
                if a.number in self.held or b.number in other.held:
                    return _same_tensor(self.held.get(a.number), other.held.get(b.number))
                return numbers.get(a.number) == b.number
            return type(a) is type(b) and (a == b or (isinstance(a, float) and math.isnan(a) and math.isnan(b)))

        for one, two in zip(self.operations, other.operations, strict=True):
            mine, others = tree_leaves((one.args, one.kwargs)), tree_leaves((two.args, two.kwargs))
            name = one.func._schema.name.partition("::")[2]
            if one.func is not two.func or len(mine) != len(others):
                return f"{name}() is called on one batch, {two.func._schema.name.partition('::')[2]}() on another"
            for a, b in zip(mine, others, strict=True):
                if one.of_check and two.of_check and isinstance(a, torch.Generator):
                    continue
                if not same(a, b):
                    return f"{name}() takes {_shown(a)} on one batch, {_shown(b)} on another"
            for a, b in zip(tree_leaves(one.out), tree_leaves(two.out), strict=False):
                if isinstance(a, Slot) and isinstance(b, Slot):
                    numbers.setdefault(a.number, b.number)
        for first, second in zip(self.read, other.read, strict=True):
            if first.value != second.value:
                where = f" ({first.where})" if first.where else ""
                return f"Python reads {first.value!r} on one batch{where}, {second.value!r} on another"
        return ""


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a is b:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _shown(value: Any) -> str:
    return "another tensor" if isinstance(value, Slot) else repr(value)
