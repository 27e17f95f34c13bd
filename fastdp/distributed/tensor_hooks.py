"""Runs the hooks of tensor-parallel styles without capture.

They lay tensors out anew over the processes, by DTensors; the samples lie in what comes out of a hook as in what went
in. transformers (`tp_plan`) puts the same around a module's `forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..batch_axis.inputs import nested_tensors
from ..batch_axis.layout import layout_on, tag, tag_of
from ..errors import ParameterError, SampleMixingError, UncapturedUseError
from ..grad_sample.parameter_links import link_of
from ..utils.pytree import map_tensors
from .tensor_values import settled_for_autograd

# where styles make their hooks
STYLES = ("torch.distributed.tensor._api", "torch.distributed.tensor.parallel.style")
TRANSFORMERS = "transformers.distributed"
KNOWN = ("ColwiseParallel", "RowwiseParallel", "EmbeddingParallel", "SequenceParallel")  # of transformers


def out_of_sight(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Put what styles do around a module out of sight; yields what undoes it.

    Raises ParameterError of what transformers does in a way that is not known to be exact.
    """
    for hooks, before in ((module._forward_pre_hooks, True), (module._forward_hooks, False)):
        for number, hook in hooks.items():
            if getattr(hook, "__module__", "") in STYLES:
                named = before and number in module._forward_pre_hooks_with_kwargs
                hooks[number] = _apart(hook, before, named)
                yield _back(hooks, number, hook)
    forward: Any = module.__dict__.get("forward")
    if getattr(forward, "__module__", "").startswith(TRANSFORMERS):
        module.__dict__["forward"] = _around(module, forward)
        yield _back(module.__dict__, "forward", forward)


def check_plan(model: nn.Module) -> None:
    """Raises ParameterError of a module that a style treats in a way that is not known to be exact."""
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            found = origins(hook)
            foreign = sorted(where for where in found if not where.startswith("torch.distributed.tensor"))
            if found & set(STYLES) and foreign:
                raise ParameterError(
                    f"'{name}' is laid out by a style of {', '.join(foreign)}, which would run out of fastdp's sight: "
                    "use the styles of torch.distributed.tensor.parallel"
                )
        forward: Any = module.__dict__.get("forward")
        if getattr(forward, "__module__", "").startswith(TRANSFORMERS):
            held = _held(forward)
            style = type(held.get("self")).__name__
            if style not in KNOWN or not {"module", "mesh", "original_forward"} <= held.keys():
                raise ParameterError(
                    f"transformers' tp_plan has laid out '{name}' by {style if style != 'NoneType' else forward}, and "
                    f"fastdp knows {', '.join(KNOWN)}: give from_pretrained a plan of these alone, or leave the module "
                    "out of it."
                )


def origins(hook: Any) -> set[str]:
    """The modules of Python in which a hook was written, and what it calls of those who made it."""
    if isinstance(hook, functools.partial):
        return origins(hook.func)
    found = {getattr(hook, "__module__", None) or "", type(getattr(hook, "__self__", hook)).__module__}
    for value in _held(hook).values() if found & set(STYLES) else ():
        found |= origins(value) if callable(value) else {type(value).__module__}
    return found - {"builtins", "", "torch.distributed.device_mesh"}


def _held(function: Any) -> dict[str, Any]:
    """What a function within another one has of it, by name."""
    return {
        name: cell.cell_contents
        for name, cell in zip(
            getattr(getattr(function, "__code__", None), "co_freevars", ()),
            getattr(function, "__closure__", None) or (),
            strict=True,
        )
    }


def _back(place: dict[Any, Any], key: Any, value: Any) -> Callable[[], None]:
    def undo() -> None:
        if key in place:
            place[key] = value

    return undo


def _around(module: nn.Module, forward: Any) -> Callable[..., Any]:
    """What transformers puts around a module's forward, with its two changes of layout out of sight."""
    held = _held(forward)
    style, mesh, inner = held["self"], held["mesh"], held["original_forward"]

    def made(*args: Any, **kwargs: Any) -> Any:
        given, named = _ran((args, kwargs), lambda ready: style.transform_inputs_pre_forward(module, *ready, mesh))
        with style.context_around_forward(module, mesh):
            out = inner(*given, **named)
        return _ran(out, lambda ready: style.transform_output_post_forward(module, ready, mesh))

    return made


def _ran(given: Any, run: Callable[[Any], Any]) -> Any:
    """What a style makes of these, out of sight."""
    with torch._C.DisableTorchFunction():
        found = run(map_tensors(given, _ready))
        if found is None:
            return None
        made = map_tensors(found, _ready)
        for old, new in zip(nested_tensors(given), nested_tensors(made), strict=False):
            _carry(old, new)
        return made


def _apart(hook: Callable[..., Any], before: bool, named: bool) -> Callable[..., Any]:
    """A style's hook out of sight: it lays tensors out anew, in which the samples lie as in those that it was given."""

    def of_inputs(module: nn.Module, args: Any) -> Any:
        return _ran(args, lambda ready: hook(module, ready))

    def of_named_inputs(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _ran((args, kwargs), lambda ready: hook(module, *ready))

    def of_output(module: nn.Module, args: Any, out: Any) -> Any:
        return _ran(out, lambda ready: hook(module, args, ready))

    made: Any = (of_named_inputs if named else of_inputs) if before else of_output
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, None
    return made  # type: ignore[no-any-return]


def _ready(tensor: Tensor) -> Tensor:
    """With its numbers and its gradient's there, if it is no DTensor."""
    if hasattr(tensor, "placements") or not (tensor.requires_grad or hasattr(tensor, "trigger_wait")):
        return tensor
    found = settled_for_autograd(tensor)
    if link_of(tensor) is not None or isinstance(tensor, nn.Parameter):
        raise UncapturedUseError(
            "a style of tensor parallelism lays out a tensor that is made of parameters alone: this is not supported. "
            "Give the module data"
        )
    _carry(tensor, found)
    return found


def _carry(old: Tensor, new: Tensor) -> None:
    """Note on the new tensor where the samples lie, which is where they lay."""
    known = layout_on(old)
    layout = None if known is None else tag_of(old, known.batch)
    if new is old or layout is None:
        return
    places = getattr(new, "placements", ())
    cut = any(p.is_shard() and p.dim % new.dim() == layout.dim for p in places)
    cut = cut or new.shape[layout.dim : layout.dim + 1] != old.shape[layout.dim : layout.dim + 1]  # and joined again
    if layout.batch > 1 and layout.alone < 0 and cut:
        raise SampleMixingError(
            f"a style of tensor parallelism cuts dimension {layout.dim}, in which the samples lie, over the processes, "
            "each of which must have every sample: shard another dimension (the sequence is dimension 1)"
        )
    tag(new, layout)
