"""Checks made before an engine is attached to a model (scripts, replicas, other engines, parameter hooks)."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import ParameterError
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


_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_unattached(model: nn.Module) -> None:
    """Raises ParameterError where the model is a script, spread over devices by torch, or has an engine already."""
    for module in model.modules():
        if isinstance(module, _PARALLEL):
            raise ParameterError(
                f"{type(module).__name__} would add up gradients of several devices before they are private. Give "
                "fastdp the plain model (its .module); a private optimizer takes a DistributedDataParallel as its "
                "whole model, one process a device (torchrun). To compile it, wrap what torch.compile returns."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ParameterError(f"{type(module).__name__} is not supported: attach fastdp to the plain model")
        if hook_of(module):
            raise ParameterError(
                "the model already has a fastdp engine (an optimizer or PerSampleGradients); call its "
                "detach() first, two would clip the same gradients twice"
            )
