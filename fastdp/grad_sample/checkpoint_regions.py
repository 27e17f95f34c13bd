"""Tells whether code runs inside a checkpointed region, whose forward runs again in backward.

A tensor made of parameters within such a region (a merged weight, the sigmoid of a bias) takes the region with it: to
pull a gradient back to the parameters, all of the region runs again, and reads the parameters of all its modules.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__
_OF_FRAME, _OF_CALL = "fn", "function"  # torch's names of what runs again


def frame_of(pack: Any) -> Any:
    """What torch knows of the region whose tensors this function packs; None if it is no checkpointing's."""
    cells = [cell.cell_contents for cell in getattr(pack, "__closure__", None) or ()]
    return next((cell for cell in cells if isinstance(cell, checkpoint._CheckpointFrame)), None)


def frames() -> Iterator[FrameType]:
    """The caller's, and those around it."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def run_again() -> tuple[Callable[..., Any], ...]:
    """What runs again for a tensor that autograd saves here: functions of regions within each other, inner first."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    region = None if hooks is None else frame_of(hooks[0])
    if region is None:
        return ()
    again = inspect.unwrap(region.recompute_fn)
    cells = dict(zip(again.__code__.co_freevars, again.__closure__ or (), strict=True))
    inner = [cells[_OF_FRAME].cell_contents] if _OF_FRAME in cells else [again]
    return (*inner, *(frame.f_locals[_OF_CALL] for frame in frames() if frame.f_code is CHECKPOINT))


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that holds all that a function calls, if the function says so."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
