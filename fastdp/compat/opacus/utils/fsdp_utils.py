"""Sharded training by Opacus's names, which is refused."""

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
    """Raises NotImplementedError: these names do not train models in parts."""
    raise NotImplementedError(
        "FSDP2Wrapper and grad_sample_mode=\"ghost_fsdp\" are not supported. Use torch's fully_shard and fastdp's own "
        "optimizer (docs/distributed.md), or whole models with BatchMemoryManager for memory"
    )
