"""`register_rule`: a user's rule for a function that fastdp does not know, or knows only slowly.

A registered rule is checked against autograd the first time that it meets a kind of call; its shapes are checked every
time.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from ..batch_axis.calls import LAYOUT_RULES, Call, LayoutRule, Tags, rule_of
from ..batch_axis.operator_table import function_name, is_in_place
from ..batch_axis.probing import coupling
from ..batch_axis.propagate import ask
from ..errors import BatchLayoutError
from ..utils.pytree import tensors_in
from . import rules
from .custom_rule_calls import Rule, RuleCall, capture_registered

_OURS: dict[Any, LayoutRule] = {}  # functions registered here: the layout rule that they had before
_APPLIES: dict[type, Any] = {}  # autograd functions made seen: their apply, which shows itself


def register_rule(*functions: Any, like: int | None = None) -> Callable[[Rule | None], Rule | None]:
    """Tell fastdp the per-sample gradient of a function with respect to its parameters.

    The decorated rule receives a `RuleCall`. It returns {parameter, as found in call.args or call.kwargs: its
    per-sample gradients [B, *parameter.shape]}, with an entry for each parameter that is being trained. In place of a
    rule, None makes the function visible and lets autograd compute the gradients, one sample at a time:
    `register_rule(MyFunction)(None)`.

    The function stays differentiable by autograd, which computes the gradient of the data. The first time that a kind
    of call is met (function, module, shapes), the rule is compared with autograd for a random gradient that is zero
    except for one sample. It must also keep a NaN in one sample's gradient to that sample.

    Args:
        functions: what a forward calls: a function of torch, an operator of torch.library (a custom_op, or
            torch.ops.name.op), a subclass of torch.autograd.Function, or a Python function under
            torch.overrides.wrap_torch_function. The `apply` of an autograd function becomes visible to fastdp; a
            reference to it that was taken before does not.
        like: the position of the argument that has its samples in the same places as the result. Pass it only if fastdp
            says that it cannot tell; usually it finds out by running the function on meta tensors.

    Returns:
        A decorator for the rule.

    Raises:
        TypeError: if fastdp could not see the calls of a function, or the rule is not a function.
        ValueError: if fastdp has a built-in rule for a function, or the function writes into its arguments.
        UncapturedUseError: during training, if the rule is wrong. The error names the rule.

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
                _OURS.setdefault(seen, rule_of(seen))
                if like is not None:
                    LAYOUT_RULES[seen] = rule_of(seen)._replace(answer=functools.partial(_layout_like, like))
        return rule

    return register


def unregister_rule(*functions: Any) -> None:
    """Remove custom rules again. An autograd function gets its original `apply` back."""
    for function in map(_owner, functions):
        for seen in _as_seen(function):
            if seen in _OURS:
                del rules.USE_RULES[seen]
                LAYOUT_RULES[seen] = _OURS.pop(seen)
        if function in _APPLIES:
            del _APPLIES[function]
            del function.apply


def is_registered(function: Any) -> bool:
    """Whether a user's rule, or None in its place, is registered for the function."""
    function = _owner(function)
    return function in _APPLIES or function in _OURS


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
    results = call.results()
    if layout is None or layout.mixed:
        return ask(call)
    for tensor in results:
        if tensor.shape[layout.dim : layout.dim + 1] != (layout.rows,):
            raise BatchLayoutError(
                f"{call.mixed()}: register_rule(..., like={position}) says that its result of shape "
                f"{tuple(tensor.shape)} holds {layout.rows} rows of samples along dimension {layout.dim}: it does not."
            )
    tags: Tags = [(tensor, layout) for tensor in results]
    why = coupling(call, call.inputs(), tags)
    return call.all_combined(why) if why else tags


__all__ = ["Rule", "RuleCall", "register_rule", "unregister_rule"]


FUNCTIONS = {  # of PEFT's adapters
    "peft.tuners.boft.layer": ("FastBlockDiag",),
    "peft.tuners.c3a.utils": ("BlockCircularConvolution",),
    "peft.tuners.loha.layer": ("HadaWeight", "HadaWeightCP"),
    "peft.tuners.randlora.layer": ("UniqueBaseGrad",),
}


_seen: set[str] = set()


def see_foreign() -> None:
    """Register those of the modules that have been imported; autograd computes their per-sample gradients. What a user
    has registered, or unregistered since, stays so."""
    for module in FUNCTIONS.keys() & sys.modules.keys() - _seen:
        _seen.add(module)
        found = [getattr(sys.modules[module], name, None) for name in FUNCTIONS[module]]
        for function in found:
            if function is not None and not is_registered(function):
                register_rule(function)(None)
