"""Who uses which parameter, with which data.

While the model's forward runs, a `TorchFunctionMode` sees every torch function call. Calls on data carry
layouts on (`fastdp.propagate`); calls on parameters alone make derived tensors (`fastdp.derived`); calls
that combine the two go to a rule (`fastdp.uses`). A call without a rule takes the generic one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import sampling
from . import uses as _use_rules  # noqa: F401  (registers the rules of uses)
from .derived import mark_derived
from .errors import SampleMixingError, StepError, UncapturedUseError
from .layouts.calls import Call, function_name, is_in_place, map_tensors, tensors_in
from .layouts.layout import Layout, tag, tag_of
from .layouts.propagate import propagate
from .links import leaves_of, link_of
from .memo import CONSTANT, Memo, inquires
from .planner import Planner
from .uses.attention import COMPOSITES
from .uses.base import RULES, Use
from .uses.generic import capture_generic


class Watcher(Protocol):
    """Sees what the calls of a pass are, where a compiled graph is interpreted (`fastdp.compiled_graph`)."""

    def captured(self, data: tuple[Tensor, ...]) -> None:
        """A call of data and parameters is captured."""

    def asked(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A call whose layouts may depend on more than on those of its arguments."""


_CONSTANT = "_fastdp_constant"  # requires grad, but of no sample and no tracked parameter


class Engine(Protocol):
    """What a pass and the module hooks need of the engine (`fastdp.engine.PerSampleGradients`)."""

    model: nn.Module
    token: Tensor
    last_use_of: dict[int, str]
    uses_of: dict[int, int]
    memo: Memo
    planner: Planner

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module's forward begins."""

    def leave(self, path: str, module: nn.Module, out: Any) -> None:
        """A module's forward ends."""

    def begin_record(self, recorder: Pass, path: str) -> None:
        """A captured call's backward begins."""

    def record(self, use: Use) -> None:
        """Keep a use until the end of backward."""


class Pass:
    """One outermost forward of the model (or of one of its modules)."""

    def __init__(self, engine: Engine, batch: int, tracked: dict[int, str], count: bool = True) -> None:
        self.count = count  # uses of parameters: not again where a forward is recomputed
        self.engine, self.batch, self.tracked = engine, batch, tracked
        self.memo, self.planner = engine.memo, engine.planner
        self.stack: list[str] = []  # module paths, innermost last
        self.called: set[str] = set()  # paths of all modules called so far
        self.backward_id = 0  # of the backward that went through this pass
        self.mode = _CaptureMode(self)
        self.watcher: Watcher | None = None

    @property
    def path(self) -> str:
        return (self.stack[-1] if self.stack else "") or type(self.engine.model).__name__

    def place(self, name: str) -> str:
        return f"{name}() in module '{self.path}'"

    def token_for(self, data: tuple[Tensor, ...]) -> Tensor:
        """A scalar that requires grad, so that backward reaches uses whose data does not."""
        if self.watcher is not None:
            self.watcher.captured(data)
        return self.engine.token

    def begin_record(self, path: str) -> None:
        self.engine.begin_record(self, path)

    def record(self, use: Use) -> None:
        self.engine.record(use)

    def is_tracked(self, tensor: Tensor) -> bool:
        return id(tensor) in self.tracked

    def guess_layout(self, tensor: Tensor) -> Layout | None:
        """Layout of data of unseen origin: the only dimension of the batch's size."""
        if self.batch <= 1:
            return Layout(self.batch)
        dims = [dim for dim, size in enumerate(tensor.shape) if size == self.batch]
        return Layout(self.batch, dims[0]) if len(dims) == 1 else None

    def is_parameter(self, tensor: Tensor) -> bool:
        """A tracked parameter, or a tensor derived from tracked parameters."""
        if not tensor.requires_grad:
            return False
        link = link_of(tensor)
        if link is not None and link.version != tensor._version:
            raise UncapturedUseError(
                f"module '{self.path}': a tensor made of parameters was written to through a view of it, which cannot "
                "be followed. Write into the tensor itself, or use torch.cat, torch.where or torch.stack."
            )
        return link is not None or id(tensor) in self.tracked

    def is_data(self, tensor: Tensor) -> bool:
        """Carries samples: tagged, or a differentiable result of unseen origin."""
        if tag_of(tensor, self.batch) is not None:
            return True
        return tensor.requires_grad and not tensor.is_leaf and _CONSTANT not in tensor.__dict__

    def traced(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function made of torch calls with its calls seen, from within a rule."""
        with self.mode:
            return function(*args, **kwargs)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One torch function call."""
        if inquires(func):
            return func(*args, **kwargs)
        signature = self.memo.signature(func, args, kwargs, self.batch, self.tracked)
        known = self.memo.layouts(signature)
        if known is not None:
            out = func(*args, **kwargs)
            for tensor, layout in zip(tensors_in(out), known, strict=True):
                if layout is not CONSTANT:
                    tag(tensor, layout)
                elif tensor.requires_grad and not tensor.is_leaf:
                    tensor.__dict__[_CONSTANT] = True
            return out
        out = self._ask(func, args, kwargs)
        if signature is not None:
            self.memo.learn(signature, out, self.batch)
        elif self.watcher is not None:
            self.watcher.asked(func, args, kwargs, out)
        return out

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a kind not seen before, or with a parameter among its arguments."""
        parameters, has_data = [], False
        for tensor in tensors_in((args, kwargs)):
            if self.is_parameter(tensor):
                parameters.append(tensor)
            elif self.is_data(tensor):
                has_data = True
        if parameters and torch.is_grad_enabled():
            if has_data:
                self.count_uses(parameters)
                return self._combine(func, args, kwargs)
            out = func(*args, **kwargs)
            for leaf in mark_derived(func, args, kwargs, out, self, parameters):
                self.engine.last_use_of[id(leaf)] = self.place(function_name(func))
            return out
        if has_data and func in COMPOSITES:
            return COMPOSITES[func](self, func, args, kwargs)
        before = _unmoved(func, args)
        out = func(*args, **kwargs)
        if has_data and before is not None:
            propagate(Call(before[0], (before[1], *args[1:]), kwargs, out, self.batch, self.path))
        elif has_data:
            propagate(Call(func, args, kwargs, out, self.batch, self.path))
        else:
            for tensor in tensors_in(out):
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.__dict__[_CONSTANT] = True
        return out

    def count_uses(self, parameters: Iterable[Tensor]) -> None:
        """A captured call takes these parameters."""
        for leaf in (leaf for parameter in parameters for leaf in leaves_of(parameter)) if self.count else ():
            self.engine.uses_of[id(leaf)] = self.engine.uses_of.get(id(leaf), 0) + 1

    def _combine(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        registered = RULES.get(func)
        try:
            if registered is not None:
                out = registered(self, func, args, kwargs)
                if out is not NotImplemented:
                    return out
            return capture_generic(self, func, args, kwargs)
        except SampleMixingError as problem:
            if not problem.mixed or is_in_place(function_name(func)):
                raise
            return self._poison(func, args, kwargs, problem)

    def _poison(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], problem: SampleMixingError) -> Any:
        """A result of mixed samples may be looked at (CLIP's logits); a gradient through it is refused."""
        detached = map_tensors((args, kwargs), lambda t: t.detach() if self.is_parameter(t) else t)
        out = func(*detached[0], **detached[1])
        mixed = Layout(self.batch, mixed=problem.mixed)

        def poison(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor = _Poison.apply(tensor, self.token_for(()), problem)  # type: ignore[no-untyped-call]
            tag(tensor, mixed)
            return tensor

        return map_tensors(out, poison)


_MOVING_IN_PLACE = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split())


def _unmoved(func: Any, args: tuple[Any, ...]) -> tuple[Any, Tensor] | None:
    """For a change of shape in place: the function that returns the same anew, and the tensor as it was."""
    name = function_name(func)
    if name not in _MOVING_IN_PLACE:
        return None
    with torch.no_grad():
        as_it_was = args[0].detach()
    as_it_was.__dict__.update(args[0].__dict__)
    return getattr(torch.Tensor, name[:-1]), as_it_was


class _Poison(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, token: Tensor, problem: SampleMixingError) -> Tensor:
        ctx.problem = problem
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SampleMixingError(str(ctx.problem))


class _CaptureMode(TorchFunctionMode):
    def __init__(self, recorder: Pass) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside vmap: masks, not data
            return func(*args, **kwargs)
        return self.recorder.dispatch(func, args, kwargs)


class ModuleHook:
    """Enters and leaves a pass around a module's forward. Copies and pickles of a model do not carry it."""

    def __init__(self, engine: Engine | None, path: str) -> None:
        self.engine, self.path = engine, path

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return ModuleHook(None, self.path)

    def __reduce__(self) -> Any:
        return (ModuleHook, (None, self.path))

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # traced into compiled code, where nothing of this stays
            if not REGION.entered and self.engine is not None and torch.is_grad_enabled():
                _refuse_compilation()
            return
        if self.engine is not None:
            self.engine.enter(self.path, module, args, kwargs)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.engine is not None:
            self.engine.leave(self.path, module, out)


class _Region:
    """Whether compiled code runs that `fastdp.compiled` knows of."""

    def __init__(self) -> None:
        self.entered = False
        self.recorder: Pass | None = None


REGION = _Region()


@torch.compiler.disable
def _refuse_compilation() -> None:
    raise StepError(
        "the model was compiled after the private optimizer was made, so its compiled code would run past fastdp. "
        "Compile first, then make the optimizer (detach() the old one); or call the plain model."
    )


def tag_inputs(
    values: Any, batch: int, dim: int, known: list[Layout | None] | None = None, folded: bool = False
) -> None:
    """Tag the tensors among a model's arguments that hold the samples along `dim`.

    known: their layouts, where the same call was seen before (recomputation); folded: batch * k rows, k
    consecutive ones of each sample, count as well.
    """
    for number, tensor in enumerate(nested_tensors(values)):
        if tag_of(tensor, batch) is not None:
            continue
        layout = None
        if known is not None and number < len(known):
            layout = known[number]
        elif batch <= 1:
            layout = Layout(batch)
        elif tensor.requires_grad and not tensor.is_leaf and list(tensor.shape).count(batch) > 1:
            layout = None  # of unseen origin, and its shape does not tell where the samples lie
        elif tensor.dim() > dim and tensor.size(dim) == batch:
            layout = Layout(batch, dim)
        elif folded and tensor.dim() > dim and tensor.size(dim) and tensor.size(dim) % batch == 0:
            layout = Layout(batch, dim, 1, tensor.size(dim) // batch)
        tag(tensor, layout)


def nested_tensors(values: Any) -> list[Tensor]:
    """Tensors in the arguments of a model: also in mappings and dataclasses."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, nn.utils.rnn.PackedSequence):
        return []  # tagged apart, by time
    if isinstance(values, tuple | list):
        return [tensor for item in values for tensor in nested_tensors(item)]
    if hasattr(values, "values") and callable(values.values) and hasattr(values, "keys"):
        return [tensor for item in values.values() for tensor in nested_tensors(item)]
    if hasattr(values, "__dataclass_fields__"):
        return [t for name in values.__dataclass_fields__ for t in nested_tensors(getattr(values, name))]
    return []


def tag_packed(values: Any, batch: int) -> None:
    """Tag packed sequences among the arguments."""
    for item in _packed(values):
        order = item.sorted_indices if item.sorted_indices is not None else torch.arange(batch)
        owner = torch.cat([order[: int(size)] for size in item.batch_sizes])
        tag(item.data, Layout(batch, 0, owner=owner))


def _packed(values: Any) -> list[nn.utils.rnn.PackedSequence]:
    if isinstance(values, nn.utils.rnn.PackedSequence):
        return [values]
    if isinstance(values, tuple | list):
        return [found for item in values for found in _packed(item)]
    if isinstance(values, dict):
        return [found for item in values.values() for found in _packed(item)]
    return []


def batch_of(values: Any, dim: int, rows_per_sample: int = 1) -> int:
    """The number of samples in a model's arguments: the size of the first tensor's batch dimension."""
    packed = _packed(values)
    sizes = [tensor.size(dim) for tensor in nested_tensors(values) if tensor.dim() > dim]
    current = sampling.current()
    if current is not None and current.size * rows_per_sample in sizes:
        return current.size * rows_per_sample
    if sizes and sizes[0] == 1 and any(size > 1 for size in sizes):
        raise StepError(
            f"the model's first tensor has size 1 in the batch dimension, others {sorted(set(sizes) - {1})}: which is "
            "the number of samples? Give batch_size= to the optimizer, or the batch first."
        )
    if sizes:
        return sizes[0]
    if packed:
        return int(packed[0].batch_sizes[0])
    raise StepError(
        "the model was called without a tensor that has a batch dimension; give batch_size= to the optimizer"
    )


__all__ = ["ModuleHook", "Pass", "batch_of", "function_name", "tag_inputs", "tag_packed"]
