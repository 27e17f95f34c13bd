"""Writes operations of a recording as straight-line Python: a line each, without the cost of modules and autograd."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..ops.registry import OPERATORS
from .recorder import Operation, Read, Slot
from .view_folding import SEEING

aten = torch.ops.aten

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


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within it calls are what they were recorded as: without autograd, and not cast once more by autocast."""
    with torch.no_grad(), torch._C._DisableAutocast():  # type: ignore[attr-defined]
        yield


def slots_in(*values: Any) -> list[Slot]:
    """The tensors among these."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Slot)]


class Source:
    """The operations of a recording, to be written as one function or several.

    read: what Python read of them; held: parameters, buffers and constants, by slot; these, and views of them, are
    looked up once, as long as they lie where they do.
    """

    def __init__(
        self, operations: Sequence[Operation], read: Sequence[Read], held: dict[int, Tensor], device: torch.device
    ) -> None:
        self._operations, self._device = operations, device
        self._read = {each.operation: each.value for each in read}
        self._names: dict[str, Any] = {
            "mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "add": torch.add, "mul": torch.mul,
        }  # fmt: skip
        self._fixed = {number: tensor.detach() for number, tensor in held.items()}
        self._seen_once = self._views()
        self._names |= {f"v{number}": tensor for number, tensor in self._fixed.items()}

    def function(
        self, places: Sequence[int], arguments: Sequence[int], results: Sequence[Slot], *, apart: bool = False,
        taken: Sequence[int] = (),
    ) -> Callable[..., Any]:  # fmt: skip
        """The operations at these places as a function of slots, which returns the results, and whether all that Python
        read is as it was. Each tensor is dropped after its last use.

        apart: in place of the calls that read numbers copies of what they take, as memory may be written to behind.
        taken: slots that come in a list, the last argument, which is emptied: dropped after their last use, too.
        """
        dying = self._last_used(places, {*self._fixed, *arguments, *(slot.number for slot in results)})
        reads = any(place in self._read for place in places)
        lines = ["asked = []"] if apart else ["same = True"] if reads else []
        if taken:
            lines += [f"[{', '.join(f'v{number}' for number in taken)}] = taken", "taken.clear()"]
        for place in places:
            if place in self._seen_once:
                continue
            if apart and place in self._read:
                given = slots_in(self._operations[place].args, self._operations[place].kwargs)
                lines += [f"asked.append({self._shown(slot)}.clone())" for slot in given]
                lines += [f"del v{number}" for number in dying.get(place, ())]
                continue
            lines += self._lines(place)
            if place in dying:
                lines.append("del " + ", ".join(f"v{number}" for number in dying[place]))
        last_word = "asked" if apart else "same" if reads else "True"
        lines.append(f"return [{', '.join(map(self._shown, results))}], {last_word}")
        head = ", ".join([*(f"v{number}" for number in arguments), *(["taken"] if taken else [])])
        source = f"def run({head}):\n" + "".join(f"    {line}\n" for line in lines)
        exec(compile(source, "<a step of fastdp>", "exec"), self._names)
        return self._names.pop("run")  # type: ignore[no-any-return]

    def fixed(self, number: int) -> Tensor | None:
        """The tensor of a slot that is looked up once, a parameter, a buffer, a constant or a view of one, or None."""
        return self._fixed.get(number)

    def _lines(self, place: int) -> list[str]:
        """An operation, and the comparison of what it told Python."""
        operation, asks = self._operations[place], place in self._read
        results, call = slots_in(operation.out), self._call(operation)
        if isinstance(operation.out, Slot):
            lines = [f"{self._shown(operation.out)} = {call}"]
        elif results or asks:
            parts = enumerate(operation.out or ())
            lines = [f"out = {call}", *(f"{self._shown(x)} = out[{k}]" for k, x in parts if isinstance(x, Slot))]
        else:
            lines = [call]
        if asks:
            self._names[f"r{place}"] = self._read[place]
            lines += _comparison([self._shown(slot) for slot in results], place)
        return lines

    def _shown(self, value: Any) -> str:
        if isinstance(value, Slot):
            return f"v{value.number}"
        if isinstance(value, list | tuple):
            return "[" + ", ".join(map(self._shown, value)) + "]"
        if value is None or type(value) in (int, bool, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._named("c", value)

    def _named(self, kind: str, value: Any) -> str:
        name = f"{kind}{len(self._names)}"
        self._names[name] = value
        return name

    def _call(self, operation: Operation) -> str:
        arguments = list(operation.args)
        form = _DIRECTLY.get(operation.func)
        if form is not None and not operation.kwargs and len(arguments) == form.count("{"):
            return form.format(*map(self._shown, arguments))
        name = self._named("f", _function(operation.func, self._device))
        given = [self._shown(value) for value in arguments]
        given += [f"{key}={self._shown(value)}" for key, value in operation.kwargs.items()]
        return f"{name}({', '.join(given)})"

    def _last_used(self, places: Sequence[int], kept: Collection[int]) -> dict[int, list[int]]:
        """The tensors that nothing reads after an operation, by its place."""
        last = {
            slot.number: place
            for place in places
            for slot in slots_in(*(getattr(self._operations[place], name) for name in ("args", "kwargs", "out")))
        }
        dying: dict[int, list[int]] = {}
        for number, place in last.items():
            if number not in kept:
                dying.setdefault(place, []).append(number)
        return dying

    def _views(self) -> set[int]:
        """The places of operations that see parameters and constants otherwise. What they give is then fixed, too."""
        found = set()
        for place, operation in enumerate(self._operations):
            given = slots_in(operation.args, operation.kwargs)
            if operation.func in SEEING and isinstance(operation.out, Slot) and given[0].number in self._fixed:
                first, *others = operation.args
                seen = operation.func(self._fixed[first.number], *others, **operation.kwargs)
                self._fixed[operation.out.number] = seen
                found.add(place)
        return found


def _comparison(results: list[str], place: int) -> list[str]:
    """Lines that compare what an operation told Python (`out`, or shapes) with what it told in the recording."""
    if not results:
        return [f"same = same and out == r{place}"]
    shapes = f"[tuple(t.shape) for t in [{', '.join(results)}]]"
    return [f"same = same and {shapes} == r{place}", "if not same: return [], False"]


def _function(func: Any, device: torch.device) -> Callable[..., Any]:
    """What a call runs: fastdp's kernels past the dispatcher."""
    space, _, name = func._schema.name.partition("::")
    if space == "fastdp":
        overload = func._overloadname
        return OPERATORS[name if overload == "default" else f"{name}.{overload}"].implementation(device.type)
    return getattr(func, "_op", func)  # type: ignore[no-any-return]  # what the overload calls in the end
