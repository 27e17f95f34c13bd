"""What modules keep beside parameters (attributes, places of buffers, generators of their own): set back after a
recording, which calls the forward more often than the user does."""

from __future__ import annotations

import copy
import io
import random
import sys
from abc import ABCMeta
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from ..errors import GraphError
from ..utils.code_location import FASTDP, is_librarys
from .guards import DEPTH, OWN, Attribute, attributes_of, is_plain_object


class _Kept(NamedTuple):
    """A dict, list, queue or object with slots that modules keep, where, and a copy of what it holds."""

    where: str
    own: Any
    before: Any


class ModuleState:
    """The state of a model's modules. Raises GraphError for what cannot be set back."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[_Kept] = []
        # what has numbers of its own: where, it, these, and how they are asked for and set back
        self._stateful: list[tuple[str, Any, Any, Callable[[], Any], Callable[[Any], None]]] = []
        self._met: set[int] = set()
        for path, module in model.named_modules():
            where = f"of module '{path or type(model).__name__}'"
            own = {name: value for name, value in module.__dict__.items() if name not in OWN}
            self._kept.append(_Kept(where, module.__dict__, own))
            self._kept.append(_Kept(where, module._buffers, dict(module._buffers)))
            for name, value in own.items():
                self._take(f"'{name}' {where}", value, DEPTH)

    def _take(self, where: str, value: Any, depth: int) -> None:
        if id(value) in self._met or not depth:
            return
        self._met.add(id(value))
        if isinstance(value, torch.Generator):
            set_back: Any = value.set_state
            self._stateful.append((where, value, value.get_state(), value.get_state, set_back))
        elif isinstance(value, random.Random):
            self._stateful.append((where, value, value.getstate(), value.getstate, value.setstate))
        elif isinstance(value, numpy.random.RandomState):
            state: Any = value.get_state(legacy=False)
            self._stateful.append((where, value, state, lambda: value.get_state(legacy=False), value.set_state))
        elif isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            state = copy.deepcopy(bits.state)
            self._stateful.append((where, bits, state, lambda: bits.state, lambda old: setattr(bits, "state", old)))
        elif isinstance(value, torch.Tensor):
            self._take_tensor(where, value)
        elif isinstance(value, numpy.ndarray):
            self._stateful.append((where, value, value.copy(), lambda: value, lambda old: numpy.copyto(value, old)))
        elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise GraphError(
                f"{where} is an iterator, which a recording would take from, and a replay would not: give the forward "
                "what comes of it as an argument"
            )
        elif is_plain_object(value) and hasattr(value, "__dict__"):
            self._take(where, value.__dict__, depth)
        elif isinstance(value, dict | list | deque) or is_plain_object(value):
            held = copy.copy(_held_by(value))
            self._kept.append(_Kept(where, value, held))
            for each in held.values() if isinstance(held, dict) else held:
                self._take(where, each, depth - 1)

    def _take_tensor(self, where: str, tensor: torch.Tensor) -> None:
        if tensor.requires_grad or tensor.layout != torch.strided or tensor.is_inference():
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():
            state: list[Any] = [tensor._version, tensor.detach().clone()]

        def set_back(old: list[Any]) -> None:
            if tensor._version != old[0]:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    tensor.copy_(old[1])

        self._stateful.append((where, tensor, state, lambda: [tensor._version, state[1]], set_back))

    def changed(self) -> str:
        """What is another than it was, "" if nothing is."""
        for where, own, before in self._kept:
            if isinstance(own, list | deque):
                if len(own) != len(before) or not all(map(_is_same, own, before)):
                    return where
                continue
            now = {name: value for name, value in _held_by(own).items() if name not in OWN or name in before}
            if why := next((n for n in {**now, **before} if not _is_same(now.get(n), before.get(n))), ""):
                return where if where.startswith("'") else f"'{why}' {where}"
        for where, _, before, state, _ in self._stateful:
            if not _is_same_state(state(), before):
                return where
        return ""

    def restore(self) -> None:
        """All as it was."""
        for _, own, before in self._kept:
            if isinstance(own, list | deque):
                own.clear()
                own.extend(before)
                continue
            if not isinstance(own, dict):
                for name, value in before.items():
                    object.__setattr__(own, name, value)
                continue
            kind = OrderedDict if isinstance(own, OrderedDict) else dict  # (a Counter's own would add)
            for name in [name for name in own if name not in OWN and name not in before]:
                kind.__delitem__(own, name)
            kind.update(own, before)
        for _, _, before, _, set_back in self._stateful:
            set_back(before)


def _held_by(own: Any) -> Any:
    """What a dict, list or queue holds, or an object in its slots."""
    return own if isinstance(own, dict | list | deque) else attributes_of(own)


class AttributeReads:
    """Notes within it which attributes of a model's modules are read, in `read`: also those that are not there.

    Python asks a class for them, so each module's class notes it for as long. Of a class that has a way of its own, or
    takes none, all are."""

    def __init__(self, model: nn.Module) -> None:
        self.read: set[Attribute] = set()
        self._numbers = {id(module): number for number, module in enumerate(model.modules())}
        self._kinds = set(map(type, model.modules()))
        for number, module in enumerate(model.modules()):
            kind = type(module)
            if kind.__getattribute__ is not object.__getattribute__ or type(kind) not in (type, ABCMeta):
                self._kinds.discard(kind)
                self.read.add((number, "__dict__"))

    def __enter__(self) -> AttributeReads:
        numbers, read = self._numbers, self.read

        def noted(module: Any, name: str) -> Any:
            number = numbers.get(id(module))
            if number is not None and (name != "__dict__" or not _looks_for_parameters(sys._getframe(1).f_code)):
                read.add((number, name))
            return object.__getattribute__(module, name)

        for kind in self._kinds:
            kind.__getattribute__ = noted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *problem: Any) -> None:
        for kind in self._kinds:
            del kind.__getattribute__


def _looks_for_parameters(code: CodeType) -> bool:
    """Whether this is torch's code that looks into a module for parameters and buffers, or the guards'."""
    ours = code.co_filename.startswith(FASTDP)
    return ours or (code.co_name in ("__getattr__", "__setattr__") and is_librarys(code.co_filename))


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str | bytes) and a == b)


def _is_same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.tobytes() == b.tobytes()
    return a[0] == b[0] if isinstance(a, list) else repr(a) == repr(b)
