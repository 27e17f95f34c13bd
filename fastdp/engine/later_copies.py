"""Follows what is made of a batch's outputs after its `backward()`, until the next forward.

A copy of outputs (`bank = h.detach().clone()`), or an average of losses, carries samples of that batch into later
steps. So between a backward and the next forward a function mode stays on while anything of the batch is there. It
looks only at calls that take such an output, and writes on what they make whose samples that carries. The next forward
or loss that meets it refuses it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..batch_axis.calls import Call
from ..batch_axis.generations import Generation, now, set_generation
from ..batch_axis.layout import Layout, generation_of, layout_on, tag
from ..batch_axis.operator_table import SHAPED
from ..batch_axis.tensor_notes import INPUT, PRESUMED, TOKEN, written
from ..utils.pytree import tensors_in
from .call_cache import inquires
from .compile_stance import any_compiled
from .mode_stack import insert, moving, remove, remove_over

_HERE = threading.local()
_OF_SHAPES = SHAPED | {"new_tensor", "randint_like"}  # what they make holds nothing of the tensor
_DIFFERENTIATING = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))


class LaterCopies(TorchFunctionMode):
    """On between a backward and the next forward. tokens: of the batches (`batch_axis.generations.Token`)."""

    def __init__(self, tokens: list[Any]) -> None:
        super().__init__()
        self.over, self.thread = False, threading.get_ident()
        me = weakref.ref(self)
        self.tokens = [weakref.ref(token, lambda _: _one_is_gone(me)) for token in tokens]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kept = None if self.over else kept_output(tensors_in((args, kwargs) if kwargs else args))
        if kept is None or func in _DIFFERENTIATING or inquires(func):
            return func(*args, **kwargs)
        return carried(Call(func, args, kwargs, layout_on(kept).batch), kept)  # type: ignore[union-attr]


def kept_output(tensors: Sequence[Tensor]) -> Tensor | None:
    """One of these tensors that is an output, or was made of one, of a batch whose backward is over."""
    for tensor in tensors:
        moment = generation_of(tensor)
        if isinstance(moment, Generation) and not moment.alive and moment.parent is None:
            notes = tensor.__dict__
            if INPUT not in notes and PRESUMED not in notes:
                return tensor
    return None


def carried(call: Call, kept: Tensor) -> Any:
    """Make a call that takes such an output: what it makes is of that batch, too."""
    out = call.run()
    if call.name in _OF_SHAPES or torch._C._functorch.peek_interpreter_stack() is not None:
        return out
    layout, before = Layout(call.batch, mixed=f"{call.name}() of an earlier batch"), now()
    moment: Any = generation_of(kept)
    moment.token = kept.__dict__.get(TOKEN)
    set_generation(moment)
    try:
        for target in call.args[:1] if call.name == "data" and out is None else call.written():
            root: Tensor = target._base if target._is_view() else target  # type: ignore[assignment]
            had = layout_on(root)
            for tensor in {id(root): root, id(target): target}.values():
                for note in (INPUT, PRESUMED):  # a label of this batch, perhaps: of the next it is none
                    tensor.__dict__.pop(note, None)
                tag(tensor, layout)
            if had is None or not had.mixed:
                written(root, layout, had)
        for tensor in call.results():
            tag(tensor, layout)
    finally:
        set_generation(before)
        moment.token = None
    return out


def begin(tokens: list[Any]) -> None:
    """A backward is over. (Not where something is compiled: compiled functions would not run as such.)

    tokens: of batches of which something may be left (None: nothing is).
    """
    tokens = [token for token in tokens if token is not None]
    if tokens and not any_compiled():
        end()
        _HERE.mode = LaterCopies(tokens)
        insert(_HERE.mode)


def end() -> list[Any]:
    """A forward begins, or work that is not the user's. Returns the tokens of batches that were followed."""
    mode = getattr(_HERE, "mode", None)
    if mode is None:
        return []
    _HERE.mode, mode.over = None, True
    remove(mode)
    return [token() for token in mode.tokens]


def _one_is_gone(known: Any) -> None:
    mode = known()
    if mode is not None and not any(token() is not None for token in mode.tokens):
        mode.over = True
        if mode.thread == threading.get_ident() and not moving():
            _HERE.mode = None
            remove_over()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=end)  # workers of loaders
