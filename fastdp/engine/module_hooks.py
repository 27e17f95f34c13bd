"""Hooks on a model's modules, and on compiled code, which would run past hooks."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ..errors import StepError
from ..ops.registry import native
from .activation_hooks import wrap_module_hooks
from .state import Engine

_SAVING_HOOKS = torch._C._autograd._top_saved_tensors_default_hooks
_EVERYWHERE, _EVERYWHERE_BEFORE = torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks
ENTER, LEAVE = -1, -2  # numbers of the hooks
_COMPILED = "_compiled_call_impl"


class ModuleHook:
    """Enters and leaves a pass around a module's forward. Copies and pickles of a model do not carry it."""

    def __init__(self, engine: Any, path: str) -> None:
        self.engine, self.path = engine, path

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return ModuleHook(None, self.path)

    def __reduce__(self) -> Any:
        return (ModuleHook, (None, self.path))

    # tools that copy modules may register the hooks again, without kwargs
    def enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if torch.compiler.is_compiling():  # traced into compiled code, where nothing of this stays
            if self.engine is not None and torch.is_grad_enabled():
                refuse_compilation()
            return
        if self.engine is None:
            return
        here = self.engine.running
        if here.active is not None and self.path and torch.is_grad_enabled() and _SAVING_HOOKS(True) is None:
            here.entered.append(None)  # as `enter` does of an inner module that nothing will compute again
            here.active.stack.append(self.path)
        else:
            self.engine.enter(self.path, module, args, kwargs or {})
        if module._backward_hooks or module._backward_pre_hooks or _EVERYWHERE or _EVERYWHERE_BEFORE:
            active = self.engine.running.active
            if active is not None and torch.is_grad_enabled():
                wrap_module_hooks(self.engine.owner, active.path, sys._getframe(1))

    def leave(self, module: nn.Module, args: Any, *kwargs_and_out: Any) -> Any:
        if torch.compiler.is_compiling() or self.engine is None:
            return None
        return self.engine.leave(kwargs_and_out[-1])


class InnerCall(NamedTuple):
    """A module within a model: if its forward is captured and it has no hooks but fastdp's, C++ calls it past them."""

    module: nn.Module
    path: str
    running: Any  # fastdp.engine.state.Running
    grad_enabled: Any = torch.is_grad_enabled
    saving_hooks: Any = _SAVING_HOOKS
    enter_number: int = ENTER
    leave_number: int = LEAVE
    everywhere: tuple[Any, ...] = (
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        _EVERYWHERE_BEFORE,
        _EVERYWHERE,
    )


class InnerCalls:
    """The calls of a model's inner modules. They stand in the place where torch keeps compiled code, and only while a
    forward is captured: at other times tools that look there, or copy it, find nothing."""

    def __init__(self, model: nn.Module, running: Any) -> None:
        self._dicts, self._calls = list[dict[str, Any]](), list[Any]()
        if not hasattr(extension := native(), "module_call"):
            return
        for path, module in model.named_modules():
            kind = type(module)  # one that is pickled in its own way, as torch's RNNs are, would have the call in there
            own = kind.__getstate__ is not nn.Module.__getstate__ or kind.__reduce__ is not object.__reduce__
            if path and module._compiled_call_impl is None and not own and not issubclass(kind, torch.jit.ScriptModule):
                module.__dict__[_COMPILED] = None
                self._dicts.append(module.__dict__)
                self._calls.append(extension.module_call(InnerCall(module, path, running)))

    def begin(self) -> None:
        """A forward is captured."""
        if self._calls:
            native().switch_calls(self._dicts, self._calls, True)  # type: ignore[union-attr]

    def end(self) -> None:
        """No longer."""
        if self._calls:
            native().switch_calls(self._dicts, self._calls, False)  # type: ignore[union-attr]

    def remove(self) -> None:
        """The modules are as they were."""
        self.end()
        for held in self._dicts:
            if held.get(_COMPILED, self) is None:
                del held[_COMPILED]
        self._dicts, self._calls = [], []


def hook_of(module: nn.Module, engine: Engine | None = None) -> ModuleHook | None:
    """An engine's hook on a module, if it has one: of this engine, if one is given."""
    for hook in module._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, ModuleHook) and owner.engine is not None and engine in (None, owner.engine):
            return owner
    return None


def refuse_compilation() -> None:
    """Raises StepError."""
    raise StepError(
        "the model was compiled after the private optimizer was made, or is called by a compiled function (a training "
        "step, a loss), so its compiled code would run past fastdp. Compile the model itself, and first, then make the "
        "optimizer of what torch.compile returned (detach() the old one); or call the plain model."
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
