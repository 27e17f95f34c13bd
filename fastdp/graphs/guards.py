"""Conditions under which a recorded step may be replayed (model, torch settings, shapes)."""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..errors import GraphError
from ..ops.common import autocast_kinds
from ..ops.registry import native
from ..ops.step import memory_mark
from ..utils.random_generators import RandomNumbers, living

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")
_PLACES = ("_parameters", "_buffers")
GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


_KINDS = (
    bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, numpy.generic, enum.Enum,
    functools.partial, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
OWN = {*nn.Module().__dict__, "_compiled_call_impl"}  # of every module: looked at in other ways
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
DEPTH = 6
_LARGEST = 1 << 12
Attribute = tuple[int, str]  # the number of a module, and a name
Notes = list[dict[str, Any]]  # of each module, what its attributes are as far as that can be compared


class _Itself:
    """An object that nothing is known of: another one is a change."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _comparable(value: Any, met: list[Any], depth: int = 0) -> Any:
    """A value as what can be compared: a number, a word or a function with its type; lists, dicts and configurations of
    such. What cannot (a tensor, another object) is not looked at. met: takes what may change in its place."""
    if isinstance(value, _KINDS):
        return type(value), value
    if isinstance(value, set | frozenset | numpy.ndarray | deque):
        met.append(value)
        return type(value), _numbers_of(value, depth)
    if depth < DEPTH and isinstance(value, dict):
        met.append(value)
        return {key: _comparable(each, met, depth + 1) for key, each in value.items()}
    if depth < DEPTH and type(value) in (list, tuple):
        if type(value) is list:
            met.append(value)
        return [_comparable(each, met, depth + 1) for each in value]
    if depth < DEPTH and is_plain_object(value):
        if hasattr(value, "__dict__"):
            return type(value), _comparable(value.__dict__, met, depth + 1)
        met.append(value)
        return type(value), _numbers_of(value, depth)
    return None


def _numbers_of(value: Any, depth: int = 0) -> Any:
    """What a set, a queue, an array of NumPy or an object with slots holds, as far as that is worth a look at every
    step."""
    if isinstance(value, numpy.ndarray):
        return (value.shape, value.tobytes()) if value.dtype != object and value.nbytes <= _LARGEST else None
    if isinstance(value, set | frozenset):
        return frozenset(value) if len(value) <= _LARGEST else None
    if isinstance(value, deque):
        return [_comparable(each, [], depth + 1) for each in value] if len(value) <= _LARGEST else None
    return _comparable(attributes_of(value), [], depth + 1)


def _is_plain_kind(kind: Any) -> bool:
    return isinstance(kind, type) and kind in _PLAIN


def _is_known(note: Any) -> bool:
    """Whether all that a value holds can be compared."""
    if isinstance(note, dict):
        return all(map(_is_known, note.values()))
    if isinstance(note, tuple):  # (kind, what it holds)
        return _is_known(note[1]) if isinstance(note[1], dict | list) else note[1] is not None or note[0] is type(None)
    return all(map(_is_known, note)) if isinstance(note, list) else note is not None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """An object's attributes; None of one that has neither a `__dict__` nor slots of its own class's making."""
    held = getattr(value, "__dict__", None)
    if type(held) is dict:
        return held
    if held is not None or type(value).__module__.partition(".")[0] in sys.stdlib_module_names:
        return None
    named = [(kind.__name__, kind.__dict__.get("__slots__", ())) for kind in type(value).__mro__]
    slots = [
        f"_{kind.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
        for kind, each in named
        for name in ((each,) if isinstance(each, str) else each)
    ]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} if slots else None


def is_plain_object(value: Any, depth: int = 3) -> bool:
    """Whether a value is an object whose attributes can be looked at: a configuration, as a rule, and not what holds
    modules, as a trainer does."""
    others = *_KINDS, dict, list, tuple, set, frozenset, nn.Module, Tensor, types.ModuleType
    if isinstance(value, others) or (held := attributes_of(value)) is None:
        return False
    simple = *_KINDS, dict, list, tuple, Tensor
    return all(
        isinstance(x, simple) or not hasattr(x, "__dict__") or (depth and is_plain_object(x, depth - 1))
        for x in held.values()
    )


def notes_of(model: nn.Module) -> Notes:
    """The attributes of all modules."""
    return [_attributes(module, []) for module in model.modules()]


def _attributes(module: nn.Module, met: list[Any]) -> dict[str, Any]:
    found = module.__dict__.items()
    return {name: _comparable(value, met) for name, value in found if name not in OWN or name == "forward"}


def changed_notes(before: Notes, now: Notes) -> list[Attribute]:
    """The numbers of modules and the names of attributes that differ."""
    return [
        (number, name)
        for number, (a, b) in enumerate(zip(before, now, strict=True))
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    ]


class _ObjectSnapshot:
    """The objects in dicts and lists, compared by identity. They are kept alive, so that no other object has their
    ids."""

    def __init__(self, owners: list[Any]) -> None:
        self._owners = owners
        self._alive = [self._values(owner) for owner in owners]

    @staticmethod
    def _values(owner: Any) -> list[Any]:
        return [each for pair in owner.items() for each in pair] if isinstance(owner, dict) else list(owner)

    def unchanged(self) -> bool:
        """Whether all are the very objects that they were, in the same order."""
        if not isinstance(module := native(), str):
            return bool(module.objects_unchanged(self._owners, self._alive))
        for owner, values in zip(self._owners, self._alive, strict=True):
            now = self._values(owner)
            if len(now) != len(values) or any(a is not b for a, b in zip(now, values, strict=True)):
                return False
        return True


class Guards:
    """The state of a model and of torch. `changed()` says what is another than it was, "" if nothing is.

    constants: memory of tensors that a recording takes; written: attributes that a forward writes (the length of the
    last batch), which tell nothing of the next; read: those that it reads (all): a number or word in another decides
    nothing. (An object may be reached past the module that keeps it, too.)
    """

    def __init__(
        self, model: nn.Module, constants: Collection[int] = (), written: Collection[Attribute] = (),
        read: Collection[Attribute] | None = None,
    ) -> None:  # fmt: skip
        self.model, self._written = model, frozenset(written)
        self._read = None if read is None else frozenset(read)
        self._modules = [(path, module, module.training) for path, module in model.named_modules()]
        self._parts = [self._part(module) for _, module, _ in self._modules]
        self._held: list[tuple[dict[str, Any], str, str, Tensor, Any, bool]] = []
        self._absent: list[tuple[dict[str, Any], str, str]] = []
        sparse: list[tuple[Any, Any, Tensor, Any]] = []  # buffers that no recording takes: the same objects, at least
        for path, module, _ in self._modules:
            for place in (module._parameters, module._buffers):
                for name, tensor in place.items():
                    full = f"{path}.{name}" if path else name
                    if tensor is None:
                        self._absent.append((place, name, full))
                    elif tensor.layout is not torch.strided:
                        sparse.append((place, name, tensor, None))
                    else:
                        self._held.append((place, name, full, tensor, memory_mark(tensor), tensor.requires_grad))
        self._torch = _state_of_torch()
        self._attributes = self._look()
        owners: list[Any] = [*self._dicts, *self._lists]
        self._tensors = sparse + [
            (owner, key, value, memory_mark(value))
            for owner in owners
            for key, value in (owner.items() if isinstance(owner, dict) else enumerate(owner))
            if isinstance(value, Tensor) and value.layout == torch.strided and _memory(value) in constants
        ]

    @staticmethod
    def _part(module: nn.Module) -> list[Any]:
        """Its class, hooks and modules, and how many parameters and buffers it has."""
        found = [value for name in _HOOKS for value in getattr(module, name).values()]
        counts = [len(getattr(module, name)) for name in _PLACES]
        return [type(module), type(module).forward, *found, *counts]

    def _look(self) -> Notes:
        """What tells at a glance that nothing has changed: each module's attributes are the very objects that they
        were, and its dicts hold what they held."""
        met: list[Any] = []
        notes = [self._notes(module, met) for _, module, _ in self._modules]
        dicts = [getattr(module, name) for _, module, _ in self._modules for name in _HOOKS]
        own = [module.__dict__ for _, module, _ in self._modules]
        self._dicts = [*own, *[each for each in met if isinstance(each, dict)]]
        self._lists = [each for each in met if isinstance(each, list)]
        self._values = [each for each in met if not isinstance(each, dict | list)]
        self._empty = [found for found in dicts if not found]
        self._filled = [found for found in dicts if found]
        self._places = [getattr(module, name) for _, module, _ in self._modules for name in _PLACES]
        self._snapshot = _ObjectSnapshot([*self._dicts, *self._filled, *self._lists])
        self._seen = self._glance()
        return notes

    def _notes(self, module: nn.Module, met: list[Any]) -> dict[str, Any]:
        found, held = _attributes(module, met), module.__dict__
        return found | {name: (note, _Itself(held[name])) for name, note in found.items() if not _is_known(note)}

    def _glance(self) -> list[Any]:
        return [
            any(self._empty), list(map(len, self._places)), [type(module).forward for _, module, _ in self._modules],
            list(map(_numbers_of, self._values)),
        ]  # fmt: skip

    def held(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return {full: tensor for _, _, full, tensor, _, _ in self._held}

    def changed(self) -> str:
        """What is another, of the model or of torch."""
        other = "" if _state_of_torch() == self._torch else "autocast, or another mode of torch, is another"
        return self.model_changed() or other

    def model_changed(self) -> str:
        """What is another of the model."""
        for place, name, full in self._absent:
            if place.get(name) is not None:
                return f"'{full}' was None"
        native_module = native()
        known = not isinstance(native_module, str) and native_module.tensors_unchanged(self._held)
        for place, name, full, tensor, lies, requires_grad in () if known else self._held:
            if place.get(name) is not tensor or memory_mark(tensor) != lies:
                return f"'{full}' is another tensor, or lies in other memory"
            if tensor.requires_grad != requires_grad:
                return f"'{full}' was {'frozen' if requires_grad else 'unfrozen'}"
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                return f"'{full}' has a hook on its gradient"
        if not self._snapshot.unchanged() or self._glance() != self._seen:
            if why := next((why for number in range(len(self._modules)) if (why := self._differs(number))), ""):
                return why
            self._look()
        for owner, key, tensor, lies in self._tensors:
            now = owner.get(key) if isinstance(owner, dict) else owner[key] if key < len(owner) else None
            if now is not tensor or (lies is not None and memory_mark(tensor) != lies):
                return f"a tensor that a module keeps ('{key}') is another, or lies in other memory"
        return ""

    def _matters(self, attribute: Attribute, *notes: Any) -> bool:
        """Whether what a forward does may depend on an attribute, of which this was, or is, known."""
        read = self._read is None or attribute in self._read or (attribute[0], "__dict__") in self._read
        plain = all(note is None or (isinstance(note, tuple) and _is_plain_kind(note[0])) for note in notes)
        return (read or not plain) and attribute not in self._written

    def _differs(self, number: int) -> str:
        """What is another of a module, "" if nothing is."""
        path, module, training = self._modules[number]
        if module.training != training:
            return f"module '{path}' is in {'training' if module.training else 'evaluation'} mode"
        now, before = self._part(module), self._parts[number]
        if len(now) != len(before) or any(a is not b and a != b for a, b in zip(now, before, strict=True)):
            return f"module '{path}' has got or lost hooks, parameters or modules, or is of another class"
        attributes, known = self._notes(module, []), self._attributes[number]
        for name in {**attributes, **known}:
            a, b = known.get(name), attributes.get(name)
            if a != b and self._matters((number, name), a, b):
                return f"module '{path}' has another '{name}'"
        return ""


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _state_of_torch() -> tuple[Any, ...]:
    return (
        *[(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in autocast_kinds()],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        *[tuple(getattr(nn.modules.module, name).values()) for name in GLOBAL_HOOKS],
    )  # fmt: skip


class Outside:
    """The state beside torch's tensors that a recording must leave alone: random numbers and buffers."""

    def __init__(self, model: nn.Module, held: dict[str, Tensor], device: torch.device) -> None:
        self._random = RandomNumbers({device}, living(model))
        self._held = {name: (tensor, tensor._version, tensor.detach().clone()) for name, tensor in held.items()
                      if not isinstance(tensor, nn.Parameter)}  # fmt: skip

    def restore(self) -> None:
        """All as it was."""
        self._random.put_back()
        with torch.no_grad():
            for tensor, version, before in self._held.values():
                if tensor._version != version:
                    tensor.copy_(before)

    def check(self) -> None:
        """Raises GraphError where random numbers were drawn that a replay would not draw."""
        own = [generator for generator, _ in self._random.own]
        if whose := RandomNumbers(set(), own).others_moved(self._random):
            raise GraphError(f"the forward or the loss draws numbers of {whose[0]}: a replay would not. Use torch's")
