"""Sharded training is not supported yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

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
    """Raises NotImplementedError: fastdp does not train on sharded parameters yet."""
    raise NotImplementedError(
        'sharded training (FSDP2Wrapper, grad_sample_mode="ghost_fsdp") is not supported by fastdp: train on one '
        "process, with BatchMemoryManager or memory_budget= for memory"
    )
