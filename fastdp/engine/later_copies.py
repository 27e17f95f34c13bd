"""Follows what is made of a batch's outputs after its `backward()`, until the next forward.

A copy of outputs (`bank = h.detach().clone()`), or an average of losses, carries samples of that batch into later
steps. So between a backward and the next forward a function mode stays on while anything of the batch is there. It
looks only at calls that take such a tensor, and carries layouts on, of that batch. A later forward or loss refuses what
it meets of it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from ..batch_axis.batch_slices import NOTED
from ..batch_axis.calls import Call
from ..batch_axis.generations import LOADERS, Token, is_over, now, set_generation
from ..batch_axis.layout import Layout, generation_of, layout_on, tag, tag_of
from ..batch_axis.operator_table import SHAPED
from ..batch_axis.probing import keep_target
from ..batch_axis.propagate import propagate
from ..batch_axis.tensor_notes import INPUT, MOMENT, PRESUMED, TOKEN, is_of_model, release, storage_of
from ..errors import FastDPError
from ..utils.pytree import tensors_in
from .call_cache import Memo, inquires
from .compile_stance import any_compiled
from .mode_stack import insert, moving, remove_over

_MOST = 8  # batches of which something is kept
_MEMO = Memo()
_OVERWRITING = frozenset(("zero_", "fill_", "copy_"))
_OF_SHAPES = SHAPED | {"new_tensor", "randint_like"}  # what they make holds nothing of the first tensor
_DIFFERENTIATING = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))
_SUMMED = "torch.autograd.grad() sums over the samples that meet a tensor without rows of its own for them"


class _Here(threading.local):
    """Of this thread. tokens: of batches whose backward is over (`batch_axis.generations.Token`); gradient: of the last
    gradients that were taken at inputs."""

    def __init__(self) -> None:
        self.mode: LaterCopies | None = None
        self.tokens: list[weakref.ref[Any]] = []
        self.gradient: Callable[[], Any] = lambda: None


_HERE = _Here()


class LaterCopies(TorchFunctionMode):
    """On between a backward and the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.over = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_compiling() or self.over:
            return func(*args, **kwargs)
        kept = kept_output(tensors_in((args, kwargs) if kwargs else args), _takes_inputs())
        if kept is None or func in _DIFFERENTIATING or inquires(func):
            return func(*args, **kwargs)
        return carried(func, args, kwargs, kept)


def kept_output(tensors: Sequence[Tensor], inputs: bool = False) -> Tensor | None:
    """One of these tensors that was made of a batch whose backward is over, or of what a loader handed out, and is no
    input or label itself (inputs: or what a loader handed out)."""
    for tensor in tensors:  # (asked for in every call)
        notes = tensor.__dict__
        if MOMENT in notes and (inputs or INPUT not in notes) and PRESUMED not in notes:
            moment = generation_of(tensor)
            if moment is None:
                continue
            of_gradient = inputs and notes.get(TOKEN) is _HERE.gradient()
            if moment.owner is LOADERS or of_gradient or (is_over(moment) and INPUT not in notes):
                return tensor
    return None


def _takes_inputs() -> bool:
    """Whether the loader's batch is followed, too: a gradient that was taken at it meets it again (an attack)."""
    return _HERE.gradient() is not None


def carried(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: Tensor) -> Any:
    """Make a call that takes such a tensor: what it makes is of that batch, too."""
    layout, moment, before = layout_on(kept), generation_of(kept), now()
    if layout is None or moment is None:
        return func(*args, **kwargs)
    call = Call(func, args, kwargs, layout.batch)
    if torch._C._functorch.peek_interpreter_stack() is not None or _lets_go(call):
        return call.run()
    for target in call.args[:1] if call.name == "data" else call.written():
        for note in (INPUT, PRESUMED):  # a label of that batch, perhaps: from now on it is none
            target.__dict__.pop(note, None)
    set_generation(moment)
    try:
        signature = _MEMO.signature(call.func, *call.given, call.batch, {})
        keep_target(call)
        call.run()
        if call.results() or call.written() or call.name == "data":
            tokens = (tensor.__dict__.get(TOKEN) for tensor in call.tensors)
            moment.token = next((token for token in tokens if token is not None), None)
            _tag_results(call, signature)
    finally:
        moment.token = None
        set_generation(before)
    return call.out


def _lets_go(call: Call) -> bool:
    """Whether nothing of the batch is in what comes out: a shape was taken, or memory is written over as a whole."""
    whole = call.name in _OVERWRITING and not call.args[0]._is_view()
    if not (whole or call.name in _OF_SHAPES) or kept_output(tensors_in((call.args[1:], call.kwargs))) is not None:
        return False
    if whole:
        release(call.args[0])
        tag(call.args[0], None)
    return True


def _tag_results(call: Call, signature: Any) -> None:
    """Write layouts on what a call made."""
    if (known := _MEMO.layouts(signature)) is not None:
        for tensor, layout in zip(call.results(), known, strict=True):
            tag(tensor, layout)
        return
    inputs, constants = _takes_inputs(), list[Tensor]()
    if not call.written():
        constants = [tensor for tensor in call.tensors if kept_output((tensor,), inputs) is None]
    others = [storage_of(tensor) for tensor in constants]
    apart = [result for result in call.results() if not any(storage_of(result) is other for other in others)]
    # some are constants that only took a shape or type; or numbers stand in a shape's place
    if len(apart) < len(call.results()) or call.name in _OF_SHAPES:
        for tensor in apart:
            tag(tensor, Layout(call.batch, mixed=f"{call.name}() of an earlier batch"))
        return
    try:
        propagate(call)
    except (FastDPError, RuntimeError) as problem:  # (tensors of inference mode count no versions)
        for tensor in (*call.results(), *call.written()):
            tag(tensor, Layout(call.batch, mixed=str(problem)))
    for target in call.written() if call.batch <= 1 else ():
        if target._is_view():
            tag(target._base, layout_on(target))  # type: ignore[arg-type]
    NOTED.clear()
    if signature is not None:
        _MEMO.learn(signature, call)


def differentiated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], following: Any) -> Any:
    """Make a call of `torch.autograd.grad`: at a tensor with rows of the samples, a gradient has the same rows (each
    sample's own, if what is differentiated is a sum over the samples or a mean); at others it is a sum over them.

    following: the mode that sees the call. It ends with the graph; the gradients are followed after that, too.
    """
    batch, before, token = following.batch, now(), Token()
    parts = (args[i : i + 1] or kwargs.get(name) for i, name in enumerate(("outputs", "inputs", "grad_outputs")))
    outputs, inputs, weights = map(tensors_in, parts)
    of_outputs = [(layout, generation_of(t)) for t in (*outputs, *weights) if (layout := tag_of(t, batch)) is not None]
    mixed = next((layout.mixed for layout, _ in of_outputs if layout.mixed and not layout.total), "")
    known = [(tag_of(t, batch), generation_of(t)) for t in inputs]
    out = func(*args, **kwargs)
    of_all = next((moment for _, moment in (*known, *of_outputs) if moment is not None), None)
    for tensor, (layout, moment), gradient in zip(inputs, known, out if len(out) == len(inputs) else (), strict=False):
        if layout is None and of_outputs and batch not in tensor.shape and not is_of_model(tensor):
            layout, moment = Layout(batch, mixed=_SUMMED), of_all
        elif moment is None or moment.owner is not LOADERS:
            continue  # (of inputs that no loader showed: as they, of unseen origin)
        if layout is not None and moment is not None and isinstance(gradient, Tensor):
            set_generation(moment)
            moment.token, others = token, moment.token
            behind = int(bool(kwargs.get("is_grads_batched")))
            tag(gradient, layout._replace(mixed=layout.mixed or mixed, dim=layout.dim + behind))
            moment.token = others
    set_generation(before)
    _HERE.gradient = weakref.ref(token, _one_is_gone)
    _HERE.tokens.append(_HERE.gradient)
    return out


def begin(*tokens: Any) -> None:
    """A backward through the batches of these tokens is over (None: nothing of them is left), or work that was not the
    user's. Where something is compiled, nothing is followed: it would run as plain Python."""
    _HERE.tokens += [weakref.ref(token, _one_is_gone) for token in tokens if token is not None]
    _HERE.tokens = [known for known in _HERE.tokens if known() is not None][-_MOST:]
    end()
    if _HERE.tokens and not any_compiled():
        _HERE.mode = LaterCopies()
        insert(_HERE.mode)


def end() -> None:
    """A forward begins, or work that is not the user's."""
    mode, _HERE.mode = _HERE.mode, None
    if mode is not None:
        mode.over = True
    remove_over()


def _one_is_gone(_: Any) -> None:
    """Of tokens: the mode ends with the last one. (Of another thread, or within a call that it sees, it is taken off
    by the next forward or step.)"""
    mode = _HERE.mode
    if mode is not None and not any(token() is not None for token in _HERE.tokens):
        mode.over = True
        if not moving():
            remove_over()


def forget() -> None:
    """Follow nothing of the batches so far."""
    _HERE.tokens = []
    end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget)  # workers of loaders
