"""Records the dispatcher calls of a real forward and backward.

Everything that fastdp checks of a step is checked during the recording, with real numbers. Where Python reads a number
on the way (to branch on it, or because a check of fastdp's does), the program computes that number again at every
replay, and a replay whose numbers differ is given up (`Read`).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..batch_axis.calls import bind
from ..batch_axis.probing import asking
from ..engine.mode_stack import remove
from ..errors import GraphError
from ..utils.pytree import tensors_of
from ..utils.rng_state import random_states, same_states

aten = torch.ops.aten


@dataclass(frozen=True)
class Slot:
    """A tensor of the program, by its number. (No tuple: torch would take that for a tree.)"""

    number: int


class Operation(NamedTuple):
    """One call of the dispatcher. out: as the function gave it, tensors as slots, None for those that nobody keeps."""

    func: Any
    args: Any
    kwargs: Any
    out: Any
    writes: frozenset[int]  # memory that it writes to
    reads: frozenset[int]  # memory of its arguments
    draws: bool  # random numbers, for the step itself
    of_check: bool  # random numbers of a generator of fastdp's own, to ask a function with
    beside: bool = False  # numbers that are not on the device, and change from step to step or are copied there


class Read(NamedTuple):
    """A number, or the number of rows, that decided how it went on."""

    operation: int
    value: Any  # a number, or the shape of the result
    where: str  # "" if a check of fastdp's read it


class Seam:
    """Where a recorded forward ends and its backward begins.

    outputs: what the forward gives. gradients: of some of these, by their numbers, as they come to the backward.
    """

    def __init__(self, place: int, outputs: Sequence[Tensor]) -> None:
        self.place, self.outputs = place, list(outputs)  # place: of the first operation behind the forward
        self.gradients: dict[int, Tensor] = {}


class Kept(NamedTuple):
    """A tensor that was there before: a parameter, a buffer, or a constant."""

    tensor: Tensor
    is_constant: bool


_CPU = torch.device("cpu")
_READING = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_FILLING = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
_MOVING_MEMORY = ("set_", "resize_", "resize_as_", "swap", "storage_resize_")
_COPYING = ("_to_copy", "copy_")
_UNCHANGED = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}


def _keeps_places(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> bool:
    """Whether no number lies elsewhere by such strides, as where pooling makes [B, C, 1, 1] channels last."""
    alike = all(n == 1 or a == b for n, a, b in zip(size, stride, tensor.stride(), strict=False))
    return alike and tuple(size) == tensor.shape and offset in (None, tensor.storage_offset())


_LEAVES = "{what} in the forward: what a step leaves there for the next is not replayed"


def memory_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory (of a sparse one, which no recording takes: its own)."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call of the dispatcher writes to."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_of(kwargs.get(argument.name, args[place] if place < len(args) else None))
    return found


class KeepsParameters(TorchDispatchMode):
    """Within it, what writes to a parameter raises GraphError before it does: a recording calls the forward more often
    than the user, and no copy of frozen parameters, which an average may be kept in, is at hand."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        super().__init__()
        plain = {name: t for name, t in held.items() if type(t) is nn.Parameter and t.layout is torch.strided}
        self._lie = {name: (each, each.detach()) for name, each in plain.items()}
        self._names = {memory_of(each): name for name, (each, _) in self._lie.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            if name := self._names.get(memory_of(tensor)):
                raise GraphError(_LEAVES.format(what=f"{func.overloadpacket.__name__}() writes to '{name}'"))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        moved = [name for name, (each, before) in self._lie.items() if memory_of(each) != memory_of(before)]
        for name in moved:
            self._lie[name][0].data = self._lie[name][1]
        if moved and problem[0] is None:
            raise GraphError(_LEAVES.format(what=f"other memory is given to '{moved[0]}'"))


class Recorder(TorchDispatchMode):
    """Within it every call is recorded. inputs: the tensors of the batch; held: parameters and buffers by name; device:
    where all of them lie.

    Raises GraphError, by name, where a call cannot be replayed.
    """

    def __init__(self, inputs: Sequence[Tensor], held: dict[str, Tensor], device: torch.device = _CPU) -> None:
        super().__init__()
        self.device = device
        self.operations: list[Operation] = []
        self.read: list[Read] = []
        self.seam: Seam | None = None
        self.kept: dict[int, Kept] = {}  # by slot
        self.held = {memory_of(tensor): name for name, tensor in held.items()}
        self.batch = {memory_of(tensor) for tensor in inputs}
        self._slots: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no id and no memory is another's
        self._before: set[int] = set()  # memory that was there before
        self._unwritten: set[int] = set()  # memory that no call has written to yet
        self._changing = set(self.batch)  # memory made of the batch, or of random numbers
        self._held_on = set(self.held)  # memory of parameters and buffers, or made of these
        self._random = random_states(device)  # after the last draw
        self.contiguous: dict[int, tuple[int, ...]] = {}  # shapes of slots whose numbers lie one after the other
        for tensor in inputs:
            self._new(tensor)

    # ------------------------------------------------------------------ tensors

    def _new(self, tensor: Tensor) -> int:
        number = len(self._alive)
        self._slots[id(tensor)] = number
        self._alive.append(tensor)
        if tensor.is_contiguous():
            self.contiguous[number] = tuple(tensor.shape)
        return number

    def slot(self, tensor: Tensor) -> Slot:
        """The slot of a tensor; one that was never seen was there before."""
        number = self._slots.get(id(tensor))
        if number is None or number in self.kept:
            asked = tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
            if asked and memory_of(tensor) not in self.held:
                raise GraphError(
                    f"a tensor of shape {tuple(tensor.shape)} that requires grad is none of the model's parameters: "
                    "its gradient would not be computed. Make it a parameter of the model, or detach() it"
                )
        if number is None:
            number = self._new(tensor)
            self._before.add(memory_of(tensor))
            self.kept[number] = Kept(tensor, memory_of(tensor) not in self.held)
        return Slot(number)

    def known(self, tensor: Tensor) -> Slot | None:
        """The slot of a tensor that the program makes or is given; None of one that was there before."""
        number = self._slots.get(id(tensor))
        return None if number is None or number in self.kept else Slot(number)

    def begin_backward(self, outputs: Sequence[Tensor]) -> Seam:
        """The forward has ended, and given these."""
        self.seam = Seam(len(self.operations), outputs)
        return self.seam

    # ------------------------------------------------------------------ calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        about_sizes = any(t.is_meta for t in given) or kwargs.get("device") == torch.device("meta")
        # (what tells the allocator of a stream is nothing that a replay computes: it lies in memory of its own)
        if about_sizes or func is aten.record_stream.default:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        written = written_by(func, args, kwargs)
        self._check(func, name, args, given, written)
        frozen = tree_map(lambda leaf: self.slot(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None and not asking()
        if draws:
            self._check_rewound(name)
        out = func(*args, **kwargs)
        if draws:
            self._random = random_states(self.device)
        results = tensors_of(out)
        if func in _UNCHANGED and results[0] is given[0]:
            return out
        if self._is_same(func, given, results, written):
            self._slots[id(results[0])] = self.slot(given[0]).number
            self._alive.append(results[0])  # (its place is the number of no slot)
            return out
        self._note_memory(name, given, results, written, draws)
        apart = [t for t in (*given, *results) if t.device != self.device]
        beside = any(t.dim() or name in _COPYING or self._is_of_step(t) for t in apart)
        changing = func in _READING or torch.Tag.data_dependent_output in func.tags
        shaping = torch.Tag.dynamic_output_shape in func.tags and not _is_index_by_places(func, given)
        frozen_out = tree_map(lambda leaf: self.slot_of_result(leaf) if isinstance(leaf, Tensor) else None, out)
        if (changing or shaping) and any(self._is_of_step(t) or memory_of(t) in self._before for t in given):
            value = [tuple(t.shape) for t in results] if results else out
            self.read.append(Read(len(self.operations), value, _reader()))
        of_check = isinstance(kwargs.get("generator"), torch.Generator)
        if of_check and _reader():
            raise GraphError(f"{name}() draws from a generator of its own ({_reader()}): use torch's default generator")
        reads, writes = frozenset(map(memory_of, given)), frozenset(map(memory_of, written))
        self.operations.append(
            Operation(func, frozen[0], frozen[1], frozen_out, writes, reads, draws, of_check, beside)
        )
        return out

    def slot_of_result(self, tensor: Tensor) -> Slot:
        """The slot of what a call gave."""
        number = self._slots.get(id(tensor))
        return Slot(self._new(tensor) if number is None else number)

    @staticmethod
    def _is_same(func: Any, given: list[Tensor], results: list[Tensor], written: list[Tensor]) -> bool:
        """Whether the call gives its first tensor as it is: the same memory, seen in the same way."""
        if written or len(results) != 1 or not given or results[0] is given[0]:
            return False
        a, b = given[0], results[0]
        if func in _UNCHANGED:
            return memory_of(a) == memory_of(b)
        return (
            memory_of(a) == memory_of(b)
            and (a.dtype, a.shape, a.stride(), a.storage_offset()) == (b.dtype, b.shape, b.stride(), b.storage_offset())
            and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        )

    def _note_memory(self, name: str, given: list[Tensor], results: list[Tensor], written: list[Tensor],
                     draws: bool) -> None:  # fmt: skip
        touched = [*results, *written]
        if draws or any(map(self.changes, given)):
            self._changing.update(map(memory_of, touched))
        elif any(memory_of(tensor) in self._held_on for tensor in given):
            self._held_on.update(map(memory_of, touched))
        if name in _FILLING:
            self._unwritten.update(map(memory_of, results))
        else:
            self._unwritten.difference_update(map(memory_of, written))

    def is_unwritten(self, tensor: Tensor) -> bool:
        """Whether no call of torch's has written its numbers: a kernel outside of the dispatcher did."""
        return memory_of(tensor) in self._unwritten

    def changes(self, tensor: Tensor) -> bool:
        """Whether its numbers are made of the batch, or of random numbers."""
        return memory_of(tensor) in self._changing

    def _is_of_step(self, tensor: Tensor) -> bool:
        """Whether its numbers may be others in the next step: made of the batch, of random numbers or of parameters."""
        return self.changes(tensor) or memory_of(tensor) in self._held_on

    # ------------------------------------------------------------------ what cannot be replayed

    def _check(self, func: Any, name: str, args: Any, given: list[Tensor], written: list[Tensor]) -> None:
        moves = name in _MOVING_MEMORY or torch.Tag.inplace_view in func.tags
        if moves and not (func is aten.as_strided_.default and _keeps_places(*args)):
            raise GraphError(f"{name}() changes where a tensor's numbers lie, which a replay cannot repeat")
        if odd := [t.device for t in given if t.device not in (self.device, _CPU)]:
            raise GraphError(f"{name}() takes a tensor on {odd[0]}, and the model lies on {self.device}")
        if any(tensor.layout != torch.strided for tensor in given):
            raise GraphError(f"{name}() takes sparse numbers")
        for tensor in written:
            self._check_written(name, tensor)
        if self._unwritten and name not in _FILLING and not _is_view(func):
            others = set(map(memory_of, given)) - set(map(memory_of, written))
            if others & self._unwritten:
                raise GraphError(
                    f"{name}() takes memory that no call of torch's has written to: a kernel outside of its dispatcher "
                    "filled it, which would not run again"
                )

    def _check_written(self, name: str, tensor: Tensor) -> None:
        memory = memory_of(tensor)
        if memory in self.held:
            raise GraphError(_LEAVES.format(what=f"{name}() writes to '{self.held[memory]}'"))
        if memory in self.batch or memory in self._before or id(tensor) not in self._slots:
            raise GraphError(f"{name}() writes to a tensor that was there before the step: write into a copy")

    def _check_rewound(self, name: str) -> None:
        if not same_states(random_states(self.device), self._random):
            raise GraphError(
                f"{name}() draws random numbers from a state that was set (by a seed, or set back, as checkpointing "
                "does to compute a block again): a replay would draw others. Switch off dropout, or checkpointing"
            )


class Watch(TorchFunctionMode):
    """Refuses what gives numbers of the batch to Python without asking the dispatcher."""

    _GIVING = frozenset((
        Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__dlpack__, Tensor.apply_, Tensor.map_, Tensor.map2_,
        Tensor.data.__set__, torch._C._to_dlpack,  # type: ignore[attr-defined]
    ))  # fmt: skip

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __exit__(self, *problem: Any) -> None:
        remove(self)  # (from beneath the mode of a forward that Ctrl-C has ended)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._GIVING and args and isinstance(args[0], Tensor) and self.recorder.changes(args[0]):
            raise GraphError(
                f"{func.__name__}() gives numbers of the batch to Python ({_reader() or 'a check of fastdp'}): what is "
                "made of them cannot be replayed"
            )
        if func is torch.nn.functional.one_hot:
            tensor, count = bind(args, kwargs or {}, "input", "num_classes")
            if isinstance(count, int) and count > 0:  # (torch's reads the largest index, only to compare it)
                zeros = torch.zeros((*tensor.shape, count), dtype=torch.int64, device=tensor.device)
                return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)
        return func(*args, **(kwargs or {}))


def _is_index_by_places(func: Any, given: list[Tensor]) -> bool:
    """Whether rows are picked by their places, so that the number of rows is that of the places."""
    return func is aten.index.Tensor and not any(t.dtype in (torch.bool, torch.uint8) for t in given[1:])


def _is_view(func: Any) -> bool:
    """Whether a function only sees memory otherwise, and reads no numbers."""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)


_OURS = __file__.rsplit("/", 2)[0]
_FOR_OTHERS = tuple(
    f"{_OURS}/{file}" for file in ("engine/capture.py", "engine/loss_tracking.py", "batch_axis/calls.py")
)


def _reader() -> str:
    """Where Python is that reads a number: a line of the user's code, or "" if a check of fastdp's does."""
    ours = True
    for frame in reversed(traceback.extract_stack()):
        name = frame.filename
        if "/torch/" in name or name == __file__ or (ours and name.startswith(_FOR_OTHERS)):
            ours = ours and not name.startswith(_FOR_OTHERS)
        elif name.startswith(_OURS):
            if ours:
                return ""
        else:
            return f"{name.rsplit('/', 1)[-1]}, line {frame.lineno}"
    return "?"
