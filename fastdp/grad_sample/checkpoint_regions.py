"""Checkpointed regions, whose forward runs again in backward, and the check of what saved-tensor hooks give back.

A tensor made of parameters within such a region (a merged weight, the sigmoid of a bias) takes the region with it: to
pull a gradient back to the parameters, all of the region runs again, and reads the parameters of all its modules.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ..errors import SampleMixingError
from ..utils.code_location import frames

_asks_for_all = torch.autograd.Variable._execution_engine.is_checkpoint_valid  # type: ignore[attr-defined]
_GRAD = inspect.unwrap(torch.autograd.grad).__code__
CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__
_OF_FRAME, _OF_CALL = "fn", "function"  # torch's names of what runs again


def frame_of(pack: Any) -> Any:
    """What torch knows of the region whose tensors this function packs; None if it is no checkpointing's."""
    cells = [cell.cell_contents for cell in getattr(pack, "__closure__", None) or ()]
    return next((cell for cell in cells if isinstance(cell, checkpoint._CheckpointFrame)), None)


def leaves_out(trained: Callable[[], Mapping[str, Tensor]], recomputes: bool) -> bool:
    """Whether the backward that runs is of chosen tensors alone (`inputs=`, torch.autograd.grad), and no trained
    parameter is among them. recomputes: it is of a forward that another backward has run again, a custom function's,
    which may ask for its parameters' gradients so."""
    if _asks_for_all():
        return False
    if not recomputes:
        return True
    given = next((frame.f_locals["inputs"] for frame in frames(sys._getframe()) if frame.f_code is _GRAD), ())
    asked = set(map(id, (given,) if isinstance(given, Tensor) else given))
    return not any(id(parameter) in asked for parameter in trained().values())


def run_again() -> tuple[Callable[..., Any], ...]:
    """What runs again for a tensor that autograd saves here: functions of regions within each other, inner first."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    region = None if hooks is None else frame_of(hooks[0])
    if region is None:
        return ()
    again = inspect.unwrap(region.recompute_fn)
    cells = dict(zip(again.__code__.co_freevars, again.__closure__ or (), strict=True))
    inner = [cells[_OF_FRAME].cell_contents] if _OF_FRAME in cells else [again]
    around = (frame for frame in frames(sys._getframe()) if frame.f_code is CHECKPOINT)
    return (*inner, *(frame.f_locals[_OF_CALL] for frame in around))


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module that holds all that a function calls, if the function says so."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """What to know these tensors by, where hooks that are not torch's are on; else None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or str(getattr(hooks[0], "__module__", "")).startswith("torch."):
        return None
    return [_fingerprint(tensor) for tensor in tensors]


def check_same(tensors: Sequence[Tensor], before: list[Tensor] | None, name: str, path: str) -> None:
    """Raises SampleMixingError where a tensor is not what was saved."""
    if before is None:
        return
    for tensor, known in zip(tensors, before, strict=True):
        now = _fingerprint(tensor)
        if now.device != known.device or not torch.equal(now, known):  # on a device it waits: such hooks do so anyway
            raise SampleMixingError(
                f"{name}() in module '{path}': torch.autograd.graph.saved_tensors_hooks gave back other numbers than "
                "were saved in the forward. fastdp cannot assign them to samples, so their gradients are unknown. "
                "Let the hooks give back what they took; to round what is saved, round it in the forward."
            )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Two sums of a tensor's bits, the second by their places, and its sizes: int64, exact in any order of summing."""
    with torch.no_grad():
        value = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        bits = value.contiguous().flatten().view(_WHOLE[value.element_size()]).long()
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        sums = torch.stack([bits.sum(), (bits * places).sum()])
        return torch.cat([sums, torch.tensor([*tensor.shape, len(str(tensor.dtype))], device=bits.device)])
