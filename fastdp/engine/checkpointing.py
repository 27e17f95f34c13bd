"""Checkpointed regions that use parameters directly, instead of calling a module that owns them.

Checkpointing computes the forward of a region again during backward. The modules called in it enter a pass of capture
by their hooks; a parameter taken by the region's own function (`gamma * self.block(x)`) would be used unseen then, and
what is saved the second time would not be what captured calls saved: at worst tensors of the same shapes, silently.
So the function that computes such a region again is replaced by one that enters a pass first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from ..layouts.inputs import nested_tensors
from ..layouts.layout import tag_of
from ..layouts.moments import Moment
from .engine import Engine
from .module_hooks import hook_of

_CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__
_REENTRANT = checkpoint.CheckpointFunction.forward.__code__
_CALL = nn.Module._call_impl.__code__
_WRAPPED = "_fastdp_seen"


def watch_region(engine: Engine, path: str, batch: int, moment: Moment, calls: int = 0) -> None:
    """The caller takes a parameter: see to it that a region around it, if there is one, is seen the second time.

    calls: of modules, that the region may lie around.
    """
    if torch.is_grad_enabled():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return
        region, code, name = _frame_of(hooks[0]), _CHECKPOINT, "recompute_fn"
        found = None if region is None else _arguments(engine, code, calls)
    else:
        found = _arguments(engine, _REENTRANT, calls)
        region, name = None if found is None else found.get("ctx"), "run_function"
    if region is None or found is None or getattr(getattr(region, name), _WRAPPED, False):
        return
    setattr(region, name, _seen(engine, path, batch, moment, found["args"], getattr(region, name)))


def _frame_of(pack: Any) -> Any:
    """What torch knows of the region whose tensors this function packs; None if it is no checkpointing's."""
    cells = [cell.cell_contents for cell in getattr(pack, "__closure__", None) or ()]
    return next((cell for cell in cells if isinstance(cell, checkpoint._CheckpointFrame)), None)


def _arguments(engine: Engine, code: Any, calls: int) -> dict[str, Any] | None:
    """The variables of the innermost call of `code` around the caller; None if more modules stand in between."""
    for frame in _frames():
        if frame.f_code is code:
            return frame.f_locals
        if frame.f_code is _CALL and hook_of(frame.f_locals["self"], engine):
            if not calls:
                return None
            calls -= 1
    return None


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _seen(
    engine: Engine, path: str, batch: int, moment: Moment, args: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    layouts = [tag_of(tensor, batch) for tensor in nested_tensors(args)]
    count = len(args)

    def again(*inputs: Any, **kwargs: Any) -> Any:
        with engine.again(path, batch, inputs[len(inputs) - count :], layouts, moment):
            return function(*inputs, **kwargs)

    setattr(again, _WRAPPED, True)
    return again


def custom_function() -> str:
    """The torch.autograd.Function in whose forward the caller stands, if its context shows it; for messages.

    "" in a checkpointed region: it is computed again, and seen then.
    """
    for frame in _frames():
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_argcount else None
        if isinstance(first, torch.autograd.function.FunctionCtx):
            name = type(first).__name__.removesuffix("Backward")
            if getattr(first, "_forward_cls", None) is checkpoint.CheckpointFunction:
                return ""
            return f"in the forward of {name}, a torch.autograd.Function: register_rule({name}) makes it seen"
    return "without grad, as in the forward of a torch.autograd.Function (which fastdp.register_rule makes seen)"
