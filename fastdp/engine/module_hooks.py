"""Hooks on a model's modules, and on compiled code, which would run past hooks."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..errors import StepError
from .activation_hooks import Around, around_module
from .state import Engine

_SAVING_HOOKS = torch._C._autograd._top_saved_tensors_default_hooks
_EVERYWHERE, _EVERYWHERE_BEFORE = torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks


class ModuleHook:
    """Enters and leaves a pass around a module's forward. Copies and pickles of a model do not carry it."""

    def __init__(self, engine: Engine | None, path: str) -> None:
        self.engine, self.path = engine, path
        self.around: list[Around] = []  # of the module's calls that run, where it has backward hooks

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return ModuleHook(None, self.path)

    def __reduce__(self) -> Any:
        return (ModuleHook, (None, self.path))

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # traced into compiled code, where nothing of this stays
            if not REGION.entered and self.engine is not None and torch.is_grad_enabled():
                refuse_compilation()
            return
        if self.engine is None:
            return
        here = self.engine.running
        if here.active is not None and self.path and torch.is_grad_enabled() and _SAVING_HOOKS(True) is None:
            here.entered.append(None)  # as `enter` does of an inner module that nothing will compute again
            here.active.stack.append(self.path)
        else:
            self.engine.enter(self.path, module, args, kwargs)
        if module._backward_hooks or module._backward_pre_hooks or _EVERYWHERE or _EVERYWHERE_BEFORE:
            active = self.engine.running.active
            if active is not None and torch.is_grad_enabled():
                around = around_module(self.engine.owner, active.batch, active.path, sys._getframe(1), self._depth())
                self.around.append(around)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if torch.compiler.is_compiling() or self.engine is None:
            return None
        if self.around and self.around[-1].depth == self._depth():
            self.around.pop().returned(args, out)
        return self.engine.leave(self.path, module, out)

    def _depth(self) -> tuple[int, int]:
        """The thread, and how many modules' forwards are on in it."""
        assert self.engine is not None
        return threading.get_ident(), len(self.engine.running.entered)


def hook_of(module: nn.Module, engine: Engine | None = None) -> ModuleHook | None:
    """An engine's hook on a module, if it has one: of this engine, if one is given."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, ModuleHook) and owner.engine is not None and engine in (None, owner.engine):
            return owner
    return None


class _Region:
    """Whether compiled code runs that `engine.compile_stance` knows of, and the pass that it runs in, by thread.

    Dynamo reads `entered` where it traces a hook: a plain truth, for all threads.
    """

    def __init__(self) -> None:
        self.entered = False
        self._lock, self._count, self._here = threading.Lock(), 0, threading.local()

    @property
    def forward_pass(self) -> Any:
        """The pass that this thread's compiled code runs in."""
        return getattr(self._here, "forward_pass", None)

    def enter(self, forward_pass: Any) -> Any:
        """Compiled code begins in this thread. Returns the pass before."""
        before, self._here.forward_pass = self.forward_pass, forward_pass
        self._change(1)
        return before

    def leave(self, before: Any) -> None:
        """It has ended."""
        self._here.forward_pass = before
        self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            self._count += by
            self.entered = self._count > 0


REGION = _Region()


def refuse_compilation() -> None:
    """Raises StepError."""
    raise StepError(
        "the model was compiled after the private optimizer was made, or is called by a compiled function (a training "
        "step, a loss), so its compiled code would run past fastdp. Compile the model itself, and first, then make the "
        "optimizer (detach() the old one); or call the plain model."
    )


# what torch.compiler.disable does to a function, but for importing a compiler that takes seconds
refuse_compilation._torchdynamo_disable = True  # type: ignore[attr-defined]
refuse_compilation._torchdynamo_disable_msg = None  # type: ignore[attr-defined]


def numbered(handle: Any, number: int, first: bool = False) -> Any:
    """The hook under a number that is the same in every module: compiled code asks for it, and modules share code."""
    for ref in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks = ref()
        if hooks is not None and handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
            if first:
                hooks.move_to_end(number, last=False)
    handle.id = number
    return handle
