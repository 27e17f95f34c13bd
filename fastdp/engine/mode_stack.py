"""Enters and leaves this package's function modes and dispatch modes, in whatever order they end."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import torch

_HERE = threading.local()


def moving() -> bool:
    """Whether the stack of this thread is being rebuilt."""
    return bool(getattr(_HERE, "moving", False))


def _pushed() -> list[Any]:
    """The modes that this thread has put on its stack and not taken off yet."""
    found: list[Any] | None = getattr(_HERE, "pushed", None)
    if found is None:
        found = _HERE.pushed = []
    return found


def _note_collection(phase: str, info: Any) -> None:
    """Python's garbage collector begins, or ends; asked for, it interrupts nothing."""
    _HERE.collecting, interrupted = phase == "start", sys._getframe().f_back
    if phase == "stop" and interrupted is not None and "collect" in interrupted.f_code.co_names:
        remove_over()


gc.callbacks.append(_note_collection)


def insert(mode: Any) -> None:
    """To the bottom of the stack of modes, so that others may end in any order; only torch's default device, which
    insists on that place, lies beneath."""
    _HERE.moving = True
    above = [torch.overrides._pop_mode() for _ in range(torch.overrides._len_torch_function_stack())]
    default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    if above and above[-1] is default:
        torch.overrides._push_mode(above.pop())
    torch.overrides._push_mode(mode)
    _pushed().append(mode)
    for other in reversed(above):
        torch.overrides._push_mode(other)
    _HERE.moving = False


def remove_over() -> None:
    """Take what is over off the stack of modes. One whose call runs just now is not there: torch puts it back after
    the call, and a later sweep takes it off; as it does if Python's garbage collector has found that it is over, which
    may run while torch is about to call the mode."""
    if getattr(_HERE, "collecting", False):
        return
    if found := [mode for mode in _pushed() if mode.over]:
        remove(*found)


def remove(*modes: Any) -> None:
    """Take these off the stack."""
    _HERE.moving, kept = True, []
    for _ in range(torch.overrides._len_torch_function_stack()):
        top = torch.overrides._pop_mode()
        if top in modes:
            _HERE.pushed = [mode for mode in _pushed() if mode is not top]
        else:
            kept.append(top)
    for mode in reversed(kept):
        torch.overrides._push_mode(mode)
    _HERE.moving = False


def leave(mode: Any) -> None:
    """Leave a mode that was entered, also from beneath one of the user's that is still open."""
    if torch.overrides._get_current_function_mode() is mode:
        mode.__exit__(None, None, None)
    else:
        remove(mode)


def end(*modes: Any) -> None:
    """Take modes off that were entered. One that is making a call just now is taken off by a later `remove_over`."""
    for mode in modes:
        mode.over = True
    _pushed().extend(modes)
    remove(*modes)


class Dispatching:
    """Beside torch's mode, not of it: what a subclass of the mode itself defines makes torch import torch._dynamo,
    which takes seconds."""

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call beneath autograd, to be made here. Every mode has its own."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "torch._dynamo" not in sys.modules:
            return self.handle(func, args, kwargs or {})
        return _undisturbed(self, func, args, kwargs or {})


@torch._disable_dynamo
def _undisturbed(mode: Dispatching, func: Any, args: Any, kwargs: Any) -> Any:
    """Where torch.compile is in use, it must not look into a mode."""
    return mode.handle(func, args, kwargs)
