"""Checks made before an engine is attached to a model, and the warning that kernels are missing."""

from __future__ import annotations

import functools
import os
import sys
import warnings

import torch
from torch import nn

from ..errors import MissingKernelsWarning, ParameterError
from ..ops.registry import OPERATORS
from ..utils.code_location import users
from .module_hooks import hook_of


def refuse_hooks(parameters: dict[str, torch.Tensor]) -> None:
    """Captured uses are detached: a hook on a parameter's gradient would never be called."""
    hooked = [n for n, p in parameters.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        raise ParameterError(
            f"{hooked[:3]} have hooks on their gradients (register_hook), which would not run: the gradients of "
            "samples never become one before they are clipped. Remove the hooks; to mask a weight, multiply it by the "
            "mask in the forward (torch.nn.utils.parametrize)."
        )


def check_unattached(model: nn.Module) -> None:
    """Raises ParameterError where the model is a script, spread over devices by torch, or has an engine already."""
    for module in model.modules():
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise ParameterError(
                f"{type(module).__name__} would add up gradients of several devices before they are private. Give "
                "fastdp the plain model (its .module); a private optimizer takes a DistributedDataParallel as its "
                "whole model, one process a device (torchrun). To compile it, wrap what torch.compile returns."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ParameterError(
                f"{type(module).__name__} is a script (torch.jit), whose calls fastdp does not see: attach fastdp to "
                "the model that was scripted, or derive the class from nn.Module"
            )
        if hook_of(module) and not is_stateless(module):  # (an activation may be an argument's default, of many models)
            raise ParameterError(
                "the model already has a fastdp engine (an optimizer or PerSampleGradients); call its "
                "detach() first, two would clip the same gradients twice"
            )


def is_stateless(module: nn.Module) -> bool:
    """Whether a module holds nothing: no parameters, buffers or other modules."""
    return not (module._parameters or module._buffers or module._modules)


# what the environment says to setup.py: built by nobody, missed by nobody
UNWANTED = {"C++": "FASTDP_CPU", "CUDA C++": "FASTDP_CUDA"}


@functools.cache
def warn_of_missing_kernels(kind: str) -> None:
    """Warn if operators on this kind of device ("cpu", "cuda", ...) run without kernels that fastdp has for it."""
    caller = users(sys._getframe())
    place = (caller.f_code.co_filename, caller.f_lineno) if caller else ("fastdp", 0)
    for why, names in missing(kind).items():
        warnings.warn_explicit(
            f"{len(names)} of fastdp's {len(OPERATORS)} operators ({', '.join(names[:3])}{', ...' * (len(names) > 3)}) "
            f"run as plain PyTorch on {kind}, so training may take several times as long: {why}",
            MissingKernelsWarning,
            *place,
        )


def missing(kind: str) -> dict[str, list[str]]:
    """Operators by the reason why their kernel is not here, those left out that nobody wants."""
    found: dict[str, list[str]] = {}
    for name, operator in OPERATORS.items():
        kernel = operator.kernels.get(kind)
        if kernel is None or kind in operator.own or os.environ.get(UNWANTED.get(kernel.backend, ""), "") == "0":
            continue
        if isinstance(why := kernel.load(), str):
            found.setdefault(why, []).append(name)
    return found
