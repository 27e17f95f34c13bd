"""What must be as it was when a step was recorded, for its replay to be the step that Python would make."""

from __future__ import annotations

import random
import types
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..errors import GraphError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")
_PLACES = ("_parameters", "_buffers")
_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


def _simple(module: nn.Module) -> dict[str, Any]:
    """Its attributes that are numbers, words or functions, by type and value; `forward`, if it has one of its own."""
    kinds = (bool, int, float, str, type(None), tuple, torch.dtype, types.FunctionType, types.MethodType)
    return {name: (type(value), value) for name, value in module.__dict__.items() if isinstance(value, kinds)}


class Guards:
    """The state of a model and of torch. `changed()` says what is another than it was, "" if nothing is."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = [(path, module, module.training) for path, module in model.named_modules()]
        self._parts = [self._part(module) for _, module, _ in self._modules]
        self._attributes = [_simple(module) for _, module, _ in self._modules]
        self._held: list[tuple[dict[str, Any], str, str, Tensor, int, bool]] = []
        for path, module, _ in self._modules:
            for place in (module._parameters, module._buffers):
                for name, tensor in place.items():
                    if tensor is not None:
                        full = f"{path}.{name}" if path else name
                        self._held.append((place, name, full, tensor, tensor.data_ptr(), tensor.requires_grad))
        self._torch = _state_of_torch()
        self._look()

    @staticmethod
    def _part(module: nn.Module) -> list[int]:
        """Its hooks and modules."""
        found = [id(value) for name in _HOOKS for value in getattr(module, name).values()]
        return [*found, *[len(getattr(module, name)) for name in _PLACES]]

    def _look(self) -> None:
        """What tells at a glance that nothing has changed: each module's attributes are the very objects that they
        were, and its dicts hold what they held."""
        self._ids = [list(map(id, module.__dict__.values())) for _, module, _ in self._modules]
        dicts = [getattr(module, name) for _, module, _ in self._modules for name in _HOOKS]
        self._dicts = [module.__dict__ for _, module, _ in self._modules]
        self._all_ids = _ids_in(self._dicts)
        self._empty = [found for found in dicts if not found]
        self._filled = [found for found in dicts if found]
        self._values = _ids_in(self._filled)
        self._places = [getattr(module, name) for _, module, _ in self._modules for name in _PLACES]
        self._sizes = list(map(len, self._places))

    def held(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        return {full: tensor for _, _, full, tensor, _, _ in self._held}

    def changed(self) -> str:
        for place, name, full, tensor, pointer, requires_grad in self._held:
            if place.get(name) is not tensor or tensor.data_ptr() != pointer:
                return f"'{full}' is another tensor, or lies in other memory"
            if tensor.requires_grad != requires_grad:
                return f"'{full}' was {'frozen' if requires_grad else 'unfrozen'}"
            if tensor._backward_hooks:
                return f"'{full}' has a hook on its gradient"
        suspects = self._suspects()
        if why := next((why for number in suspects if (why := self._differs(number))), ""):
            return why
        if suspects:
            self._look()
        return "" if _state_of_torch() == self._torch else "autocast, or another mode of torch, is another"

    def _suspects(self) -> Sequence[int]:
        """The numbers of modules of which something may have changed."""
        more = any(self._empty) or list(map(len, self._places)) != self._sizes
        if more or _ids_in(self._filled) != self._values:
            return range(len(self._modules))
        if _ids_in(self._dicts) == self._all_ids:
            return ()
        each = enumerate(zip(self._dicts, self._ids, strict=True))
        return [number for number, (now, ids) in each if list(map(id, now.values())) != ids]

    def _differs(self, number: int) -> str:
        """What is another of a module, "" if nothing is."""
        path, module, training = self._modules[number]
        if module.training != training:
            return f"module '{path}' is in {'training' if module.training else 'evaluation'} mode"
        if self._part(module) != self._parts[number]:
            return f"module '{path}' has got or lost hooks, parameters or modules"
        if (now := _simple(module)) != (before := self._attributes[number]):
            changed = next(name for name in {**now, **before} if now.get(name) != before.get(name))
            return f"module '{path}' has another '{changed}'"
        return ""


def _ids_in(dicts: Sequence[dict[str, Any]]) -> list[int]:
    """How many values each holds, and which."""
    return [*map(len, dicts), *[id(value) for found in dicts for value in found.values()]]


def _state_of_torch() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        *[tuple(map(id, getattr(nn.modules.module, name).values())) for name in _GLOBAL],
    )  # fmt: skip


class Outside:
    """The state beside torch's tensors that a recording must leave alone: random numbers and buffers."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self._python, self._numpy = random.getstate(), numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._held = {name: (tensor, tensor._version, tensor.detach().clone()) for name, tensor in held.items()
                      if not isinstance(tensor, nn.Parameter)}  # fmt: skip

    def moved(self) -> str:
        """Whose random numbers were drawn."""
        if random.getstate() != self._python:
            return "Python's random"
        now = numpy.random.get_state()
        same = all(numpy.array_equal(a, b) for a, b in zip(now, self._numpy, strict=True))
        return "" if same else "NumPy's random"

    def restore(self) -> None:
        """All as it was."""
        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        with torch.no_grad():
            for tensor, version, before in self._held.values():
                if tensor._version != version:
                    tensor.copy_(before)

    def check(self) -> None:
        """Raises GraphError where random numbers were drawn that a replay would not draw."""
        if whose := self.moved():
            raise GraphError(f"the forward or the loss draws numbers of {whose}: a replay would not. Use torch's")
