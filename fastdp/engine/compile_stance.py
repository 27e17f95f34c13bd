"""Runs compiled code as plain Python while an engine is attached: capture must see the torch functions that it calls.

What the user compiled stays as it is, and runs without gradients and after detach. Where gradients are wanted, what
stands in its place calls the module itself; functions that were compiled on their own run as plain Python while a
forward or a loss is followed, by torch's "stance". That is one setting for the whole process, so passes of several
threads share it; it is the user's own again when the last of them ends.
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from typing import Any

import torch
from torch import nn

from ..utils.code_location import FASTDP, frames

_DYNAMO = "torch._dynamo.eval_frame"  # imported by torch.compile, as it takes seconds: without it nothing is compiled
_COMPILED = "/torch/_dynamo/eval_frame.py"
_AROUND = ("/torch/nn/modules/module.py", "/torch/_dynamo/external_utils.py", _COMPILED)


class _Plainly:
    """Counts who wants compiled functions to run as plain Python."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage may end another one
        self._wanted = 0
        self._users: Any = None

    def begin(self) -> None:
        """From here on."""
        with self._lock:
            self._wanted += 1
            if self._wanted == 1 and (dynamo := sys.modules.get(_DYNAMO)) is not None:
                try:  # what torch.compiler.set_stance does, at a tenth of its time
                    self._users = dynamo._set_stance(dynamo.DynamoStance("force_eager"))
                except RuntimeError:  # compiled code called the model
                    self._users = None

    def possible(self) -> bool:
        """Whether no compiled function runs that called the model (the model itself may be compiled)."""
        if sys.modules.get(_DYNAMO) is None:
            return True
        files = (frame.f_code.co_filename for frame in frames(sys._getframe(1)))
        # (code of these files only stands between a model's forward and who called it)
        callers = itertools.dropwhile(lambda name: name.startswith(FASTDP) or name.endswith(_AROUND), files)
        return not any(name.endswith(_COMPILED) for name in callers)

    def end(self) -> None:
        """No longer."""
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0 and self._users is not None and (dynamo := sys.modules.get(_DYNAMO)) is not None:
                dynamo._set_stance(self._users)  # (no module is left where Python ends)
                self._users = None


PLAINLY = _Plainly()


def any_compiled() -> bool:
    """Whether something was compiled by torch.compile in this process, called yet or not."""
    dynamo = sys.modules.get(_DYNAMO)
    return dynamo is not None and any(map(callable, dynamo.cached_backends.values()))  # (of torch's own: None)


class CompiledModules:
    """The compiled modules of a model, which run as they are where gradients are wanted."""

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[tuple[nn.Module, str, Any]] = []
        for module in list(model.modules()):
            if any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__):  # (fully_shard's own class)
                self._replace(module, "forward", module._orig_mod)
            elif module._compiled_call_impl is not None and not hasattr(module._compiled_call_impl, "of_fastdp"):
                self._replace(module, "_compiled_call_impl", module._call_impl)
        if self._undo:
            warnings.warn(
                f"torch.compile under fastdp: {len(self._undo)} compiled module(s) run as they are, not compiled, "
                "where gradients are wanted. The results are exact, the speed is not that of compiled code: "
                "optimizer.graphed(compile=True) compiles the whole step.",
                stacklevel=2,
            )

    def _replace(self, module: nn.Module, name: str, plain: Any) -> None:
        compiled = getattr(module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            return (plain if torch.is_grad_enabled() else compiled)(*args, **kwargs)

        found = torch.compiler.disable(run)  # a compiled function may call the model
        found.__dict__.update(getattr(compiled, "__dict__", {}))  # torch sees through it where it compiles around it
        self._undo.append((module, name, compiled))
        setattr(module, name, found)

    def restore(self) -> None:
        """Everything as the user compiled it."""
        for module, name, compiled in self._undo:
            setattr(module, name, compiled)
        self._undo = []
