"""Captures parameters that a checkpointed region uses directly, instead of by a module that owns them.

Checkpointing computes the forward of a region again during backward. The modules called in it enter a pass of capture
by their hooks; a parameter taken by the region's own function (`gamma * self.block(x)`) would be used unseen then, and
what is saved the second time would not be what captured calls saved: at worst tensors of the same shapes, silently.
So the function that computes such a region again is replaced by one that enters a pass first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ..batch_axis.generations import Generation
from ..batch_axis.inputs import nested_tensors
from ..batch_axis.layout import tag_of
from ..errors import UncapturedUseError
from ..grad_sample.checkpoint_regions import CHECKPOINT, frame_of
from ..utils.code_location import frames
from .module_hooks import hook_of
from .state import Engine

_REENTRANT = checkpoint.CheckpointFunction.forward.__code__
_CALL = nn.Module._call_impl.__code__
_WRAPPED = "_fastdp_seen"


def watch_region(
    engine: Engine, path: str, batch: int, moment: Generation, calls: int = 0, taken: Sequence[Tensor] = ()
) -> None:
    """The caller takes a parameter: see to it that a region around it, if there is one, is seen the second time.

    calls: of modules, that the region may lie around. taken: parameters and tensors made of them. Raises
    UncapturedUseError if one is an argument of a reentrant region, which computes it again with another tensor.
    """
    if torch.is_grad_enabled():
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return
        region, code, name = frame_of(hooks[0]), CHECKPOINT, "recompute_fn"
        found = None if region is None else _arguments(engine, code, calls)
    else:
        _refuse_arguments(path, taken)
        found = _arguments(engine, _REENTRANT, calls)
        region, name = None if found is None else found.get("ctx"), "run_function"
    if region is None or found is None or getattr(getattr(region, name), _WRAPPED, False):
        return
    setattr(region, name, _seen(engine, path, batch, moment, found["args"], getattr(region, name)))


def _refuse_arguments(path: str, taken: Sequence[Tensor]) -> None:
    keys = set(map(id, taken))
    for frame in frames(sys._getframe()) if keys else ():
        if frame.f_code is _REENTRANT and keys & set(map(id, frame.f_locals["args"])):
            raise UncapturedUseError(
                f"in module '{path}': checkpoint(..., use_reentrant=True) is given a parameter, or a tensor made of "
                "parameters alone (a bias that all blocks use), as an argument, and puts another tensor "
                "in its place when it runs again: gradients of samples would not reach it. Pass use_reentrant=False "
                "(in transformers, gradient_checkpointing_kwargs={'use_reentrant': False})."
            )


def _arguments(engine: Engine, code: Any, calls: int) -> dict[str, Any] | None:
    """The variables of the innermost call of `code` around the caller; None if more modules stand in between."""
    for frame in frames(sys._getframe()):
        if frame.f_code is code:
            return frame.f_locals
        if frame.f_code is _CALL and hook_of(frame.f_locals["self"], engine):
            if not calls:
                return None
            calls -= 1
    return None


def _seen(
    engine: Any, path: str, batch: int, moment: Generation, args: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    layouts = [tag_of(tensor, batch) for tensor in nested_tensors(args)]
    count = len(args)

    def again(*inputs: Any, **kwargs: Any) -> Any:
        with engine.again(path, batch, inputs[len(inputs) - count :], layouts, moment):
            return function(*inputs, **kwargs)

    setattr(again, _WRAPPED, True)
    again.__wrapped__ = function  # type: ignore[attr-defined]
    return again
