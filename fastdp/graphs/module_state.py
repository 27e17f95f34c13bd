"""What modules keep beside parameters (attributes, places of buffers, generators of their own): set back after a
recording, which calls the forward more often than the user does."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from .guards import OWN, is_plain_object

_DEPTH = 4


class _Kept(NamedTuple):
    """A dict or list that modules keep, where, and a copy of it."""

    where: str
    own: Any
    before: Any


class ModuleState:
    """The state of a model's modules."""

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
                self._take(f"'{name}' {where}", value, _DEPTH)

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
        elif is_plain_object(value):
            self._take(where, value.__dict__, depth)
        elif isinstance(value, dict | list):
            self._kept.append(_Kept(where, value, copy.copy(value)))
            for each in value.values() if isinstance(value, dict) else value:
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
            if isinstance(own, list):
                if len(own) != len(before) or not all(map(_is_same, own, before)):
                    return where
                continue
            now = {name: value for name, value in own.items() if name not in OWN or name in before}
            if why := next((n for n in {**now, **before} if not _is_same(now.get(n), before.get(n))), ""):
                return where if where.startswith("'") else f"'{why}' {where}"
        for where, _, before, state, _ in self._stateful:
            if not _is_same_state(state(), before):
                return where
        return ""

    def restore(self) -> None:
        """All as it was."""
        for _, own, before in self._kept:
            if isinstance(own, list):
                own[:] = before
                continue
            for name in [name for name in own if name not in OWN and name not in before]:
                dict.__delitem__(own, name)
            dict.update(own, before)  # (a Counter's own would add)
        for _, _, before, _, set_back in self._stateful:
            set_back(before)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | complex | str | bytes) and a == b)


def _is_same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.tobytes() == b.tobytes()
    return a[0] == b[0] if isinstance(a, list) else repr(a) == repr(b)
