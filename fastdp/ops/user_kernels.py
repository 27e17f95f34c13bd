"""Kernels of users: a function that serves an operator on a device, in place of the one that fastdp has.

    @fastdp.ops.register_kernel("linear_norm_sq", device="cuda", dtypes=[torch.bfloat16])
    def mine(a, g, method="auto", *, dtype=None): ...

It is compared with the reference on small inputs before it is taken (`check_kernel`), wherever the device is present.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .kernel_inputs import Trial, trials
from .registry import OPERATORS, Kernel, Operator, replace

DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TOO_SMALL = 2e-5  # of a squared norm: what a bound may lose by rounding
FAR = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # of the largest
Function = TypeVar("Function", bound=Callable[..., Any])


def register_kernel(
    operator: str, *, device: str, dtypes: Sequence[torch.dtype] | None = None, check: bool = True
) -> Callable[[Function], Function]:
    """Serve an operator on a device by the decorated function, until `remove_kernel`.

    The function takes what the operator takes (`fastdp.ops.registry.OPERATORS[operator].schema`) and returns what it
    returns; operators whose name ends in "_" or ".out" write into their arguments and return None. The dispatch, the
    planner (which measures it anew) and the engine then use it. A replayed step (`optimizer.graphed`) keeps the kernels
    that it was recorded with.

    Args:
        operator: the name, as in `fastdp.ops` or "embedding_clipped_sum.out".
        device: "cpu" or "cuda".
        dtypes: the types of numbers that the function takes (default: float32, float64 and both 16-bit ones). What
            served before takes the others.
        check: whether to compare it with the reference first, if the device is present (`check_kernel`).

    Raises:
        ValueError: if the operator or the device is unknown, if a user's kernel serves there already, if the function
            cannot be called with the operator's arguments, or if its results are not the reference's.
    """
    found = _operator(operator)
    _check_device(device)
    kinds = tuple(DTYPES if dtypes is None else dtypes)
    if not kinds or not set(kinds) <= set(DTYPES):
        raise ValueError(f"dtypes must be of {', '.join(map(str, DTYPES))}, not {dtypes!r}")

    def register(function: Function) -> Function:
        if device in found.own:
            raise ValueError(
                f"{operator} on {device} is served by {found.own[device].backend}: call remove_kernel first"
            )
        _check_call(found, function, kinds)
        if check and _is_here(device):
            _compare(found, function, device, kinds)
        name = getattr(function, "__qualname__", type(function).__name__)
        serve = function if dtypes is None else _only(function, kinds, found.implementation, device)
        replace(found, device, Kernel(f"own: {name}", lambda: serve))
        return function

    return register


def remove_kernel(operator: str, *, device: str) -> None:
    """What served before `register_kernel` serves again. Raises ValueError if no user's kernel does."""
    found = _operator(operator)
    _check_device(device)
    if device not in found.own:
        raise ValueError(f"no kernel of yours serves {operator} on {device}")
    replace(found, device, None)


def check_kernel(operator: str, *, device: str, dtypes: Sequence[torch.dtype] | None = None) -> None:
    """Compare what serves an operator on a device with the reference, on small inputs of these types.

    Raises ValueError with the first difference, also where a kernel returns a norm that is too small, touches a sample
    whose factor is 0, or writes where it must not; RuntimeError if the device is not here.
    """
    found = _operator(operator)
    _check_device(device)
    if not _is_here(device):
        raise RuntimeError(f"there is no {device} device here")
    _compare(found, found.implementation(device), device, tuple(DTYPES if dtypes is None else dtypes))


# ---------------------------------------------------------------------- what may be registered


def _operator(name: str) -> Operator:
    found = OPERATORS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, OPERATORS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"there is no operator {name!r}{hint}; there are {', '.join(sorted(OPERATORS))}")
    return found


def _check_device(device: str) -> None:
    if device not in DEVICES:
        raise ValueError(f"device must be 'cpu' or 'cuda', not {device!r}")


def _is_here(device: str) -> bool:
    return device == "cpu" or torch.cuda.is_available()


def _check_call(operator: Operator, function: Callable[..., Any], kinds: Sequence[torch.dtype]) -> None:
    """Whether the function takes the operator's arguments, without calling it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a compiled function
        return
    for trial in trials(operator.name, torch.device("cpu"), torch.float32):
        try:
            signature.bind(*trial.args, **trial.kwargs)
        except TypeError as problem:
            raise ValueError(
                f"a kernel of {operator.name} is called as {operator.schema}; {function!r} cannot be: {problem}"
            ) from None


def _only(
    function: Callable[..., Any], kinds: Sequence[torch.dtype], before: Callable[[str], Callable[..., Any]], device: str
) -> Callable[..., Any]:
    """The function for numbers of these types, what served before for others."""
    other = before(device)

    def serve(*args: Any, **kwargs: Any) -> Any:
        first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_floating_point())
        return (function if first.dtype in kinds else other)(*args, **kwargs)

    return serve


# ---------------------------------------------------------------------- is it right?


def _compare(operator: Operator, function: Callable[..., Any], device: str, kinds: Sequence[torch.dtype]) -> None:
    for kind in kinds:
        for number, trial in enumerate(trials(operator.name, torch.device(device), kind)):
            with torch.no_grad():
                wrong = _difference(operator, function, trial)
            if wrong:
                shapes = ", ".join(str(list(t.shape)) for t in tree_leaves(trial) if isinstance(t, Tensor))
                raise ValueError(f"{function!r} is no {operator.name}: {wrong} (input {number}: {kind}, {shapes}). "
                                 "If it does not take this type, name those that it takes (dtypes=)")  # fmt: skip


def _difference(operator: Operator, function: Callable[..., Any], trial: Trial) -> str:
    """What is wrong with the results, and with what is left of the arguments; "" if nothing is."""
    # the same strides in each copy, so that a kernel meets the memory it would meet
    given, kept = (tree_map_only(Tensor, copy.deepcopy, trial) for _ in range(2))
    truth = operator.reference(*kept.args, **kept.kwargs)
    try:
        found = function(*given.args, **given.kwargs)
    except Exception as problem:  # noqa: BLE001  (whatever it raises, it is no kernel)
        return f"it raises {type(problem).__name__}: {str(problem)[:200]}"
    results, wanted = _tensors(found), _tensors(truth)
    if len(results) != len(wanted):
        return f"it returns {len(results)} tensors, not {len(wanted)}"
    for place, (mine, theirs) in enumerate(zip(results, wanted, strict=True)):
        if wrong := _wrong(mine, theirs, operator.name.endswith("norm_sq")):
            return f"of result {place}, {wrong}"
    for place, (mine, theirs) in enumerate(zip(_tensors(given), _tensors(kept), strict=True)):
        if wrong := _wrong(mine, theirs):
            return f"of what is left in argument {place}, {wrong}"
    return ""


def _wrong(found: Tensor, truth: Tensor, is_norm: bool = False) -> str:
    """What is wrong with numbers, which may be off by FAR of the largest; norms may hardly be too small."""
    finite = truth.double().nan_to_num()
    allowed = FAR.get(truth.dtype, 0.0) * float(finite.abs().max()) if truth.numel() else 0.0
    try:
        torch.testing.assert_close(found, truth, rtol=0, atol=allowed, equal_nan=True)
    except AssertionError as problem:
        return " ".join(str(problem).split())
    lost = (finite - found.double().nan_to_num()) / finite.abs().clamp(min=1e-30)
    if is_norm and lost.numel() and float(lost.max()) > TOO_SMALL:
        return f"a squared norm is too small by {float(lost.max()):.1e} of itself"
    return ""


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
