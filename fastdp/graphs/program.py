"""Writes a recording as straight-line Python, without operations that its results do not need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import GraphError
from ..ops.registry import OPERATORS
from .recorder import Operation, Read, Recorder, Slot, memory_of
from .view_folding import SEEING, without_detours

aten = torch.ops.aten


class Recording(NamedTuple):
    """What a recorder saw, without the tensors of the step itself."""

    operations: list[Operation]
    read: list[Read]
    inputs: int
    outputs: list[Slot]
    held: dict[int, Tensor]  # parameters, buffers and constants, by slot
    constants: set[int]  # which of these are constants
    memory: set[int]  # of the outputs
    device: torch.device


def recording_of(recorder: Recorder, inputs: int, outputs: Sequence[Tensor]) -> Recording:
    """Raises GraphError where an output is none of the program's."""
    slots = []
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
    operations, renamed = without_detours(recorder.operations, recorder.contiguous)
    slots = [Slot(renamed.get(slot.number, slot.number)) for slot in slots]
    return Recording(operations, recorder.read, inputs, slots, held, constants, memory, recorder.device)


def _slots(*values: Any) -> list[Slot]:
    """The tensors among these."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Slot)]


def live(recording: Recording, with_reads: bool = True) -> list[bool]:
    """Which operations the outputs, the numbers that were read and the random numbers of the step depend on."""
    slots = {slot.number for slot in recording.outputs}
    places = {read.operation for read in recording.read if with_reads}
    memory = set(recording.memory)
    wanted = [False] * len(recording.operations)
    for place in reversed(range(len(recording.operations))):
        operation = recording.operations[place]
        made = {slot.number for slot in _slots(operation.out)}
        if made & slots or operation.writes & memory or operation.draws or place in places:
            wanted[place] = True
            slots |= {slot.number for slot in _slots(operation.args, operation.kwargs)}
            memory |= operation.reads
    return wanted


class Program:
    """Replays a recording.

    `run(inputs)` returns the outputs, and whether all numbers that decided how it went on are as they were.
    """

    def __init__(self, recording: Recording) -> None:
        wanted = live(recording)
        self.operations = [op for op, kept in zip(recording.operations, wanted, strict=True) if kept]
        places = {old: new for new, old in enumerate(i for i, kept in enumerate(wanted) if kept)}
        self.read = [read._replace(operation=places[read.operation]) for read in recording.read]
        self.draws = any(operation.draws for operation in self.operations)
        self.inputs, self.outputs = recording.inputs, recording.outputs
        self.device = recording.device
        # a function that computes with numbers beside the device
        self.beside = next((op.func._schema.name.partition("::")[2] for op in self.operations if op.beside), "")
        used = {
            leaf.number
            for op in self.operations
            for leaf in tree_leaves((op.args, op.kwargs))
            if isinstance(leaf, Slot)
        }
        self.held = {number: tensor for number, tensor in recording.held.items() if number in used}
        results = zip(recording.operations, live(recording, with_reads=False), strict=True)
        needed = {slot.number for op, kept in results if kept for slot in _slots(op.args, op.kwargs)}
        self.constants = recording.constants & needed  # that the results take; checks have constants of their own
        first = recording._replace(outputs=recording.outputs[:1], memory=set())
        kept = live(first, with_reads=False)
        self.for_first = [op for op, used in zip(recording.operations, kept, strict=True) if used]
        self._run: Callable[..., Any] | None = None
        self._run_apart: Callable[..., Any] | None = None
        # whether the number of rows of a result depends on the numbers of the batch
        self.counts_rows = any(_slots(self.operations[read.operation].out) for read in self.read)

    def run(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
        """See above."""
        if self._run is None:
            self._run = _compiled(self)
        with torch.no_grad():
            found: tuple[list[Tensor], bool] = self._run(*inputs)
        return found

    def run_apart(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs, and what numbers are to be read of (`is_same`): for devices, which this does not wait for."""
        if self._run_apart is None:
            self._run_apart = _compiled(self, apart=True)
        with torch.no_grad():
            found: tuple[list[Tensor], list[Tensor]] = self._run_apart(*inputs)
        return found

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


# --------------------------------------------------------------------------- Python

# spared: the parsing of arguments by name, which costs as much as a small kernel
_DIRECTLY = {
    aten.view.default: "{0}.view({1})",
    aten.t.default: "{0}.t()",
    aten.transpose.int: "{0}.transpose({1}, {2})",
    aten.permute.default: "{0}.permute({1})",
    aten.unsqueeze.default: "{0}.unsqueeze({1})",
    aten.squeeze.dim: "{0}.squeeze({1})",
    aten.expand.default: "{0}.expand({1})",
    aten.mm.default: "mm({0}, {1})",
    aten.bmm.default: "bmm({0}, {1})",
    aten.addmm.default: "addmm({0}, {1}, {2})",
    aten.add.Tensor: "add({0}, {1})",
    aten.mul.Tensor: "mul({0}, {1})",
}


def _compiled(program: Program, apart: bool = False) -> Callable[..., Any]:
    """The program as a function: each operation a line, each tensor dropped after its last use.

    apart: in place of the calls that read numbers copies of what they take, as memory may be written to behind.
    """
    names: dict[str, Any] = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "add": torch.add, "mul": torch.mul}
    fixed = {number: tensor.detach() for number, tensor in program.held.items()}
    seen_once = _views_of(fixed, program.operations)
    names |= {f"v{number}": tensor for number, tensor in fixed.items()}
    dying = _last_used(program, {slot.number for slot in program.outputs} | set(fixed))
    read = {read.operation: number for number, read in enumerate(program.read)}
    lines = ["asked = []"] if apart else ["same = True"] if program.read else []

    def shown(value: Any) -> str:
        if isinstance(value, Slot):
            return f"v{value.number}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(shown, value)) + "]"
        if value is None or type(value) in (int, bool, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        name = f"c{len(names)}"
        names[name] = value
        return name

    for place, operation in enumerate(program.operations):
        if place in seen_once:
            continue
        results = _slots(operation.out)
        if apart and place in read:
            lines += [f"asked.append({shown(slot)}.clone())" for slot in _slots(operation.args, operation.kwargs)]
            lines += [f"del v{number}" for number in dying.get(place, ())]
            continue
        call = _call(operation, shown, names, program.device)
        if isinstance(operation.out, Slot):
            lines.append(f"{shown(operation.out)} = {call}")
        elif results or place in read:
            lines.append(f"out = {call}")
            lines += [
                f"{shown(leaf)} = out[{k}]" for k, leaf in enumerate(operation.out or ()) if isinstance(leaf, Slot)
            ]
        else:
            lines.append(call)
        if place in read:
            names[f"r{place}"] = program.read[read[place]].value
            lines += _comparison([shown(slot) for slot in results], place)
        if place in dying:
            lines.append("del " + ", ".join(f"v{number}" for number in dying[place]))
    last_word = "asked" if apart else "same" if program.read else "True"
    lines.append(f"return [{', '.join(map(shown, program.outputs))}], {last_word}")
    arguments = ", ".join(f"v{number}" for number in range(program.inputs))
    source = f"def run({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<a step of fastdp>", "exec"), names)
    return names["run"]  # type: ignore[no-any-return]


def _comparison(results: list[str], place: int) -> list[str]:
    """Lines that compare what an operation told Python (`out`, or shapes) with what it told in the recording."""
    if not results:
        return [f"same = same and out == r{place}"]
    shapes = f"[tuple(t.shape) for t in [{', '.join(results)}]]"
    return [f"same = same and {shapes} == r{place}", "if not same: return [], False"]


def _last_used(program: Program, kept: set[int]) -> dict[int, list[int]]:
    """The tensors that nothing reads after an operation, by its place; neither inputs nor those in `kept`."""
    last: dict[int, int] = {}
    for place, operation in enumerate(program.operations):
        for slot in _slots(operation.args, operation.kwargs, operation.out):
            last[slot.number] = place
    dying: dict[int, list[int]] = {}
    for number, place in last.items():
        if number not in kept and number >= program.inputs:
            dying.setdefault(place, []).append(number)
    return dying


def _views_of(fixed: dict[int, Tensor], operations: Sequence[Operation]) -> set[int]:
    """The places of operations that see parameters and constants otherwise, as long as these lie where they do. What
    they give is added to `fixed`."""
    found = set()
    for place, operation in enumerate(operations):
        given = _slots(operation.args, operation.kwargs)
        if operation.func in SEEING and isinstance(operation.out, Slot) and given[0].number in fixed:
            first, *others = operation.args
            fixed[operation.out.number] = operation.func(fixed[first.number], *others, **operation.kwargs)
            found.add(place)
    return found


def _call(
    operation: Operation, shown: Callable[[Any], str], names: dict[str, Any], device: torch.device
) -> str:  # fmt: skip
    arguments = list(operation.args)
    form = _DIRECTLY.get(operation.func)
    if form is not None and not operation.kwargs and len(arguments) == form.count("{"):
        return form.format(*map(shown, arguments))
    name = f"f{len(names)}"
    names[name] = _function(operation.func, device)
    given = [shown(value) for value in arguments] + [f"{key}={shown(value)}" for key, value in operation.kwargs.items()]
    return f"{name}({', '.join(given)})"


def _function(func: Any, device: torch.device) -> Callable[..., Any]:
    """What a call runs: fastdp's kernels past the dispatcher."""
    space, _, name = func._schema.name.partition("::")
    if space == "fastdp":
        overload = func._overloadname
        return OPERATORS[name if overload == "default" else f"{name}.{overload}"].implementation(device.type)
    return getattr(func, "_op", func)  # type: ignore[no-any-return]  # what the overload calls in the end
