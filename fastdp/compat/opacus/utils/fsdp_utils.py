"""Models in parts on all processes by Opacus's names, for grad_sample_mode "ghost_fsdp"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..grad_sample import GradSampleModuleFastGradientClippingFSDP

__all__ = ["FSDP2Wrapper", "has_params", "iterate_submodules"]


def has_params(module: nn.Module) -> bool:
    """Whether the module itself owns parameters."""
    return next(module.parameters(recurse=False), None) is not None


def iterate_submodules(module: nn.Module) -> Iterable[nn.Module]:
    """The modules that own parameters, parents first; a module at two places comes twice."""
    if has_params(module):
        yield module
    for child in module.children():
        yield from iterate_submodules(child)


def FSDP2Wrapper(model: nn.Module, **kwargs: Any) -> nn.Module:
    """Lay a model in parts on all processes, in place: torch's `fully_shard` on each layer that Opacus has a function
    for, and on the model. Make the optimizer after it.

    A layer that shares a parameter with another one stays with the model, so that it stays tied (`fully_shard` of each
    would part them).

    Args:
        mp_policy: the MixedPrecisionPolicy of all layers. Clipped sums and updates stay float32 under any.
        opacus_high_precision_layers: classes of layers that compute in torch's default type instead.
        kwargs: other arguments of `fully_shard` (mesh, reshard_after_forward). Opacus ignores these.
    """
    policy = kwargs.pop("mp_policy", None) or MixedPrecisionPolicy()
    precise = tuple(kwargs.pop("opacus_high_precision_layers", ()))
    hooks = GradSampleModuleFastGradientClippingFSDP
    kinds = {*hooks.GRAD_SAMPLERS, *hooks.NORM_SAMPLERS}
    layers = list({id(module): module for module in iterate_submodules(model)}.values())
    owners = Counter(id(p) for module in layers for p in module._parameters.values() if p is not None)
    for module in reversed(layers):  # what lies within another one first
        own = list(module.parameters())
        if module is model or type(module) not in kinds or any(owners[id(p)] > 1 for p in own):
            continue
        high = MixedPrecisionPolicy(param_dtype=torch.get_default_dtype())
        fully_shard(module, mp_policy=high if isinstance(module, precise) else policy, **kwargs)
    fully_shard(model, mp_policy=policy, **kwargs)
    return model
