"""Custom rules: the per-sample gradient of a function that fastdp does not know, or knows only slowly.

A registered rule is checked against autograd the first time it meets a kind of call, and its shapes every time.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import BatchLayoutError
from ..layouts.calls import Call, function_name, is_in_place
from ..layouts.nests import tensors_in
from ..layouts.propagate import LAYOUT_RULES, ask, combined
from ..layouts.trial import Tags, is_independent
from . import rules
from .registered import Rule, RuleCall, capture_registered

_OURS: dict[Any, Any] = {}  # functions registered here: the rule
_APPLIES: dict[type, Any] = {}  # autograd functions made seen: their apply, which shows itself


def register_rule(*functions: Any, like: int | None = None) -> Callable[[Rule | None], Rule | None]:
    """Tell fastdp the per-sample gradient of a function with respect to its parameters.

    Args:
        functions: what a forward calls: a function of torch, an operator of torch.library (a custom_op, or
            torch.ops.name.op), a subclass of torch.autograd.Function (whose `apply` becomes visible to fastdp; a
            reference to it taken before does not), or a Python function under torch.overrides.wrap_torch_function.
        like: the result's samples lie as those of this argument (a position); to be given only where fastdp says
            that it cannot tell. Usually it finds out by running the function on meta tensors.

    The decorated rule gets a `RuleCall` and returns {parameter, as found in call.args or call.kwargs: its per-sample
    gradients [B, *parameter.shape]}, one entry at least for each parameter that is being trained. In place of a
    rule, None makes the function seen and lets autograd give the gradients, a sample at a time:
    `register_rule(MyFunction)(None)`.

    The function itself stays as it is, differentiable by autograd, which gives the gradient of the data. The first
    time that a kind of call is met (function, module, shapes), the rule is compared with autograd for a random
    gradient that is zero but for one sample, and must keep a NaN in one sample's gradient to that sample.

    Raises TypeError for a function whose calls fastdp could not see, ValueError for one that has a rule of
    fastdp's own or writes into its arguments; training raises UncapturedUseError, naming the rule, where it is wrong.

    >>> @torch.overrides.wrap_torch_function(lambda x, scale: (x, scale))
    ... def scaled(x, scale):
    ...     return x * scale
    >>> @register_rule(scaled)
    ... def rule(call):
    ...     x, scale = call.args  # [B, 1, T, D], [D]
    ...     return {scale: (call.grad * x).flatten(1, -2).sum(1)}
    """
    if not functions:
        raise TypeError("register_rule takes the function, then the rule: @register_rule(function)")
    spelled = [_owner(function) for function in functions]
    for function in spelled:
        _check_registrable(function)

    def register(rule: Rule | None) -> Rule | None:
        if rule is not None and not callable(rule):
            raise TypeError(f"a rule is a function of one RuleCall (or None), not {type(rule).__name__}")
        for function in spelled:
            for seen in _as_seen(function):
                rules.USE_RULES[seen] = functools.partial(capture_registered, rule)
                _OURS[seen] = rule
                if like is not None:
                    LAYOUT_RULES[seen] = functools.partial(_layout_like, like)
        return rule

    return register


def unregister_rule(*functions: Any) -> None:
    """Take rules of one's own off again; an autograd function gets its own `apply` back."""
    for function in map(_owner, functions):
        for seen in _as_seen(function):
            if seen in _OURS:
                del rules.USE_RULES[seen], _OURS[seen]
                LAYOUT_RULES.pop(seen, None)
        if function in _APPLIES:
            del _APPLIES[function]
            del function.apply


# --------------------------------------------------------------------------- what is seen of a function


def _owner(function: Any) -> Any:
    """The class, of the apply of an autograd function."""
    for known, apply in _APPLIES.items():
        if function is apply:
            return known
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else function


def _check_registrable(function: Any) -> None:
    name = function_name(function)
    if isinstance(function, type):
        if not issubclass(function, torch.autograd.Function):
            raise TypeError(f"{name} is a class, but no torch.autograd.Function: register the functions that it calls")
        return
    if isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__"):
        if function.__module__.split(".")[0] != "torch":
            raise TypeError(
                f"{name} is a plain Python function: fastdp sees the torch functions that it calls, not itself. "
                f"Register one of these, or decorate {name} with torch.overrides.wrap_torch_function(lambda <its "
                "arguments>: (<its tensors>,)) and register the decorated function."
            )
    if not callable(function):
        raise TypeError(f"{function!r} is no function")
    overloads = [seen for seen in _as_seen(function) if isinstance(seen, torch._ops.OpOverload)]
    if is_in_place(name) or any(seen._schema.is_mutable for seen in overloads):
        raise ValueError(f"{name} writes into its arguments: register a function that returns its result")
    if any(seen in rules.USE_RULES and seen not in _OURS for seen in _as_seen(function)):
        raise ValueError(f"fastdp has an exact rule for {name} already")


def _as_seen(function: Any) -> list[Any]:
    """The objects by which a TorchFunctionMode sees calls of the function."""
    if isinstance(function, type):
        return [_seen_apply(function)]
    if isinstance(function, torch.library.CustomOpDef):
        function = function._opoverload
    if isinstance(function, torch._ops.OpOverload):
        return [function, function._overloadpacket]
    if isinstance(function, torch._ops.OpOverloadPacket):
        return [function, *(getattr(function, name) for name in function.overloads())]
    return [function]


def _seen_apply(function: Any) -> Any:
    """The class's apply, which shows itself to function modes from now on."""
    if function in _APPLIES:
        return _APPLIES[function]
    own = function.apply

    def apply(*args: Any, **kwargs: Any) -> Any:
        tensors = tuple(tensors_in((args, kwargs)))
        if not torch.compiler.is_compiling() and has_torch_function(tensors):
            return handle_torch_function(apply, tensors, *args, **kwargs)
        return own(*args, **kwargs)

    apply.__name__ = function.__name__
    function.apply = staticmethod(apply)
    _APPLIES[function] = apply
    return apply


def _layout_like(position: int, call: Call) -> Tags:
    """The results' samples lie as those of one argument; checked by value."""
    source = call.args[position] if position < len(call.args) else None
    layout = call.layout(source)
    results = list(tensors_in(call.out))
    if layout is None or layout.mixed:
        return ask(call)
    for tensor in results:
        if tensor.shape[layout.dim : layout.dim + 1] != (layout.rows,):
            raise BatchLayoutError(
                f"{call.mixed()}: register_rule(..., like={position}) says that its result of shape "
                f"{tuple(tensor.shape)} holds {layout.rows} rows of samples along dimension {layout.dim}: it does not."
            )
    tags: Tags = [(tensor, layout) for tensor in results]
    if not is_independent(call, call.inputs(), tags):
        return [(t, combined(call, t, "lets one sample's rows depend on another's")) for t in results]
    return tags


__all__ = ["Rule", "RuleCall", "register_rule", "unregister_rule"]
