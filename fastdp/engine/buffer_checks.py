"""Refuses buffers that a forward without gradients writes: running statistics, observed ranges, averages.

They are released with the model, and its next forward reads them; clipping and noise reach neither. Where gradients are
recorded, the pass of capture sees such writes; without them this mode does, beneath torch's own functions, as some of
these write without autograd's counting it.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ..batch_axis.aliasing import shares, versions_of
from ..batch_axis.layout import tag, tag_of
from ..batch_axis.tensor_notes import LAYOUT, OF_STATE, storage_of
from ..errors import BatchReadWarning, SampleMixingError, UncapturedUseError
from ..utils.pytree import tensors_in
from .mode_stack import Dispatching

_REMEDY = (
    "A buffer is released with the model, without noise. Call eval() on the module, take one that keeps no state of "
    "the data (fastdp.make_compatible, track_running_stats=False, persistent=False), or, if the batch is public, run "
    "the forward within optimizer.public()."
)


_KEPT = (
    "the forward keeps numbers of several samples in buffer '{name}'. What is made of it outside of the loss (a bias "
    "that balances experts, by a hook of the optimizer) has neither clipping nor noise, and is released with the "
    "model: leave that out."
)


def states_of(module: nn.Module, path: str = "", kept: bool = True) -> list[tuple[nn.Module, str, str]]:
    """Where a state dict's buffers of numbers lie: (module, name, the name within the model). kept: or others."""
    return [
        (owner, name, ".".join(part for part in (path, inner, name) if part))
        for inner, owner in module.named_modules()
        for name, buffer in owner._buffers.items()
        if (name not in owner._non_persistent_buffers_set) == kept and (buffer is None or buffer.is_floating_point())
    ]


def state_error(name: str) -> SampleMixingError:
    """The error about a buffer that is given numbers of the batch."""
    return SampleMixingError(f"the forward writes numbers of the batch to buffer '{name}'. {_REMEDY}")


def refuse_filled(model: nn.Module) -> None:
    """Raises UncapturedUseError if a parameter, a frozen one too, holds numbers of the data (centres, a codebook)."""
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and shares(parameter):
            tag(parameter, None)  # its memory says so, until it has another
            raise UncapturedUseError(
                f"parameter '{name}' was given numbers of the batch in place: it is released with the model, without "
                "clipping or noise. Train it by its gradient (the loss may use it), or keep what follows the data "
                "apart from the model. To go on, give it other memory with the numbers of before: p.data = old.clone()."
            )


def warn_of_states(model: nn.Module, batch: int, warned: set[str]) -> None:
    """Warn if a forward that recorded gradients wrote data to a state, which no later one can read (`moments`)."""
    for owner, name, where in states_of(model):
        buffer = owner._buffers.get(name)
        if buffer is not None and where not in warned and (tag_of(buffer, batch) is not None or shares(buffer)):
            warned.add(where)
            warnings.warn(str(state_error(where)), BatchReadWarning, stacklevel=3)
    for owner, name, where in states_of(model, kept=False):
        layout = None if (buffer := owner._buffers.get(name)) is None else tag_of(buffer, batch)
        if where not in warned and layout is not None and layout.mixed:
            warned.add(where)
            warnings.warn(_KEPT.format(name=where), BatchReadWarning, stacklevel=3)


def is_held(states: list[tuple[nn.Module, str, str]]) -> bool:
    """Whether one of these buffers is a tensor that was made of data."""
    return any(
        (buffer := owner._buffers.get(name)) is not None and LAYOUT in buffer.__dict__ for owner, name, _ in states
    )


class Stateful:
    """The outermost forward without gradients of a module that has states.

    It is watched call by call: spectral norms write what they made of weights alone, which is no record's. Not in eval
    mode, where nothing is expected to be written, unless by this module's first forward, or after one that wrote.
    """

    def __init__(
        self, model: nn.Module, states: list[tuple[nn.Module, str, str]], watch: bool, then: Any, wrote: Any
    ) -> None:
        self._states, self._then, self._wrote = states, then, wrote
        self._before = self._buffers()
        self._at = self._places()
        self._mode = None
        if watch or any(owner.training for owner, _, _ in states):
            self._mode = _Watch({id(storage_of(t)): name for name, t in self._before.items()}, model)
            self._mode.__enter__()

    def _buffers(self) -> dict[str, Tensor]:
        held = {where: owner._buffers.get(name) for owner, name, where in self._states}
        return {where: buffer for where, buffer in held.items() if buffer is not None}

    def _places(self) -> dict[str, tuple[int, int]]:
        """The memory of each state, and how often it was written to."""
        return {
            name: (id(storage_of(buffer)), version)
            for (name, buffer), version in zip(
                self._before.items(), versions_of(list(self._before.values())), strict=True
            )
        }

    def stop(self) -> None:
        """Take the mode off, and those that an interrupted forward left above it."""
        while self._mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
            torch.utils._python_dispatch._pop_mode()

    def leave(self, out: Any) -> None:
        """The forward ends. Raises SampleMixingError if a state was written, unless something else was raised."""
        self.stop()
        if self._then is not None:
            self._then.leave(out)
        if out is None and sys.exc_info()[1] is not None:
            return
        places = self._places()
        for name, buffer in self._buffers().items():
            if buffer is self._before.get(name) and places[name] == self._at[name]:
                continue
            if self._mode is None:
                self._wrote()
            elif not self._mode.is_clean(buffer):
                raise state_error(name)


class _Watch(Dispatching, TorchDispatchMode):
    """Refuses the calls that write to a state what is made of anything but the model's own tensors."""

    def __init__(self, states: dict[int, str], model: nn.Module) -> None:
        super().__init__()
        self._states, self._clean = states, object()
        for tensor in (*model.parameters(), *model.buffers()):
            self._note(tensor, self._clean)

    def _note(self, tensor: Tensor, mark: object) -> None:
        if (storage := storage_of(tensor)) is not None:
            setattr(storage, OF_STATE, mark)

    def is_clean(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory holds nothing but what the model's own tensors made."""
        storage = storage_of(tensor)
        return storage is None or getattr(storage, OF_STATE, None) is self._clean

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        shaped = name.endswith("_like") or name.startswith("new_")  # of data, whose shape and type they take
        clean = shaped or all(self.is_clean(tensor) for tensor in tensors_in((args, kwargs)))
        written = _written(func, args, kwargs)
        for tensor in () if clean else written:
            if state := self._states.get(id(storage_of(tensor))):
                raise state_error(state)
        out = func(*args, **kwargs)
        for tensor in (*tensors_in(out), *written):
            self._note(tensor, self._clean if clean else None)
        return out


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to. Its schema tells; not of running statistics, by their usual names."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    trains = named.get("training", True)
    return [
        tensor
        for argument in schema.arguments
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (trains and argument.name.startswith("running_"))
        for tensor in tensors_in(named.get(argument.name))
    ]
