"""Chooses what runs in place of compiled code while an engine is attached.

Models that were compiled before the optimizer was made: what the user compiled stays as it is, and runs without
gradients and after detach. Where gradients are wanted, a switch in its place runs the module through torch.compile with
a backend of fastdp (`engine.compile_graph`), one graph for the whole region. A region that torch cannot make one graph
of runs as the plain module, under the engine as ever.

While a pass is on, functions that were compiled on their own run as plain Python, where the capture mode sees them.
Torch would trace the mode itself into their code. What Dynamo does is one setting for the whole process (torch's
"stance"), so passes of several threads share it; it is the user's own again when the last of them ends.

All that is private to torch is in `_settings`, in `_Plainly` and in what `Switches` replaces.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ParameterError
from ..utils.code_location import FASTDP
from .module_hooks import REGION, refuse_compilation

if TYPE_CHECKING:
    from .capture import Pass

Found = tuple[Callable[..., Any], bool | None]  # backend, dynamic

_DYNAMO = "torch._dynamo.eval_frame"  # imported by torch.compile, as it takes seconds: without it nothing is compiled
_COMPILED = "/torch/_dynamo/eval_frame.py"
_AROUND = "/torch/_dynamo/external_utils.py"


def _is_call(name: str) -> bool:
    """Whether code of this file only stands between a model's forward and who called it."""
    return name.startswith(FASTDP) or name.endswith(("/torch/nn/modules/module.py", _COMPILED))


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
        frame: Any = sys._getframe(1)
        while frame is not None and _is_call(frame.f_code.co_filename):
            frame = frame.f_back
        while frame is not None and not frame.f_code.co_filename.endswith(_COMPILED):
            frame = frame.f_back
        return frame is None

    def end(self) -> None:
        """No longer."""
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0 and self._users is not None:
                sys.modules[_DYNAMO]._set_stance(self._users)
                self._users = None


PLAINLY = _Plainly()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is what torch.compile returned, or was compiled in place."""
    return is_wrapper(module) or module._compiled_call_impl is not None


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is what torch.compile returned (fully_shard makes a class of its own of the module's)."""
    return any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)


def _settings(module: nn.Module) -> Found | None:
    """Backend and dynamic shapes of a compiled module; None where compilation is off for it."""
    if is_wrapper(module):
        context = module.dynamo_ctx
    else:
        wrapper: Any = module._compiled_call_impl
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        if "self" not in cells:
            return None  # torch.compile(disable=True) gives the function itself
        context = cells["self"].cell_contents
    backend: Any = getattr(context, "callback", None)
    if not callable(backend):
        return None  # torch.compiler.disable
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if not callable(backend) or "convert_frame" in type(backend).__module__:
        raise ParameterError(
            f"torch {torch.__version__} hides the backend of a compiled module from fastdp: attach to the plain model"
        )
    return backend, getattr(context, "_dynamic", None)


class Switches:
    """The compiled modules of a model while an engine is attached."""

    def __init__(self, forward: Any) -> None:
        self.forward = forward
        self.notes: list[str] = []
        self._backends: list[tuple[Found, Any]] = []
        self._regions: dict[tuple[int, type], Callable[..., Any]] = {}
        self._plain: dict[tuple[int, bool], str] = {}  # why modules run as they are, in training and in eval mode
        self._undo: list[tuple[nn.Module, str, Any]] = []
        self._known: set[int] = set()  # ids of the modules that were compiled before
        inner: dict[int, str] = {}
        for path, module in forward.model.named_modules():
            inner.setdefault(id(module), path)
        for path, module in list(forward.model.named_modules()):
            if not is_compiled(module):
                continue
            self._known.add(id(module))
            found = _settings(module)
            if found is None:
                continue
            wrapped = is_wrapper(module)
            name, target = ("forward", module._orig_mod) if wrapped else ("_compiled_call_impl", module)
            original = getattr(module, name)
            self._undo.append((module, name, original))
            setattr(module, name, self._switch(inner.get(id(target), path), target, original, self._backend(found)))

    def remove(self) -> None:
        """Everything as the user compiled it."""
        for module, name, original in self._undo:
            setattr(module, name, original)
        self._undo = []

    def check(self) -> None:
        """Raises StepError if the model is called by what was compiled since, and runs as plain Python (torch's stance
        while a loader's batch is followed): without that, Dynamo would trace the hooks, which refuse it."""
        frame: Any = sys._getframe(1) if sys.modules.get(_DYNAMO) is not None else None
        while frame is not None and _is_call(frame.f_code.co_filename.replace(_AROUND, _COMPILED)):
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and is_compiled(caller) and id(caller) not in self._known:
                if not type(caller._compiled_call_impl).__module__.startswith("fastdp."):  # (`optim.deferred_setup`)
                    refuse_compilation()
            frame = frame.f_back

    def report(self) -> list[str]:
        """What was compiled so far, and what not and why: lines for `explain`."""
        runners = [runner for _, backend in self._backends for runner in backend.runners if runner.paths]
        return sorted({*[runner.report() for runner in runners], *self._plain.values()})

    def _backend(self, found: Found) -> Any:
        from .compile_graph import Backend  # imports Dynamo

        for known, backend in self._backends:
            if known == found:
                return backend
        self._backends.append((found, Backend(*found, self.notes)))
        return self._backends[-1][1]

    def _switch(self, path: str, module: nn.Module, original: Callable[..., Any], backend: Any) -> Callable[..., Any]:
        def switch(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                with _entered(None):
                    return original(*args, **kwargs)
            plain = (id(module), module.training) in self._plain
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if plain or hooks is not None or self.forward.runs_again():
                return module._call_impl(*args, **kwargs)
            return self._run(path, module, backend, args, kwargs)

        found: Callable[..., Any] = torch.compiler.disable(switch)  # a compiled function may call the model
        found.__dict__.update(getattr(original, "__dict__", {}))  # torch sees through it where it compiles around it
        return found

    def _run(self, path: str, module: nn.Module, backend: Any, args: Any, kwargs: Any) -> Any:
        forward, done, out = self.forward, False, None
        before = forward.backward.open_forwards()
        forward.enter(path, module, args, kwargs)
        try:
            with _entered(forward.running.active):
                out = self._region(module, backend)(module, args, kwargs)
            done = True
        except _Interpreted:
            backend.note(f"module '{path}' runs as it is, not compiled (torch.compile is switched off)")
        except Exception as problem:
            if not _cannot_compile(problem):
                raise
            why = f"module '{path}' runs as it is, not compiled ({_first_line(problem)})"
            self._plain[id(module), module.training] = why
            backend.note(why)
        finally:
            forward.leave(path, module, out)
        if done:
            return out
        forward.backward.give_up(before)
        return module._call_impl(*args, **kwargs)

    def _region(self, module: nn.Module, backend: Any) -> Callable[..., Any]:
        """A compiled function that calls a module of this class, whatever its hooks: (module, args, kwargs)."""
        key = (id(backend), type(module))
        if key not in self._regions:
            function = _function_of_its_own()
            self._regions[key] = torch.compile(function, backend=backend, dynamic=backend.dynamic, fullgraph=True)
        return self._regions[key]


class _Interpreted(Exception):
    """Torch runs what was to be compiled as plain Python: set_stance, TORCH_COMPILE_DISABLE. Nothing ran yet."""


def _function_of_its_own() -> Callable[..., Any]:
    """Dynamo keeps what it compiled by code object: one for each class of modules."""

    def region(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _Interpreted
        return module._call_impl(*args, **kwargs)

    region.__code__ = region.__code__.replace(co_name="region")
    return region


def _cannot_compile(problem: Exception) -> bool:
    """Whether torch refused to compile, before anything ran."""
    kinds = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)
    return isinstance(problem, kinds)


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0][:200] if lines else type(problem).__name__


@contextlib.contextmanager
def _entered(forward_pass: Pass | None) -> Iterator[None]:
    """Compiled code runs: the capture mode is off, and hooks that are traced know that it is by our leave."""
    before = REGION.enter(forward_pass)
    stack = torch.overrides._get_current_function_mode_stack()
    try:
        if forward_pass is not None:
            _set_stack([mode for mode in stack if mode is not forward_pass.mode])
            PLAINLY.end()
        yield
    finally:
        REGION.leave(before)
        if forward_pass is not None:
            PLAINLY.begin()
            _set_stack(stack)


def _set_stack(modes: list[Any]) -> None:
    """Make these the function modes of this thread."""
    for _ in range(torch.overrides._len_torch_function_stack()):
        torch.overrides._pop_mode()
    for mode in modes:
        torch.overrides._push_mode(mode)
