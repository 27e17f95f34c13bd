"""InstanceNorm with running statistics: these are averages over the data, released without noise."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..utils.module_utils import clone_module
from .errors import IllegalModuleConfigurationError, UnsupportedModuleError
from .utils import register_module_fixer, register_module_validator

INSTANCENORMS = [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d]


@register_module_validator(INSTANCENORMS)
def validate(module: Any) -> list[UnsupportedModuleError]:
    """One IllegalModuleConfigurationError where it keeps running statistics."""
    if not module.track_running_stats and module.running_mean is None:
        return []
    return [
        IllegalModuleConfigurationError(
            f"{type(module).__name__} keeps running statistics of the data, to which no noise is added: make it with "
            "track_running_stats=False"
        )
    ]


@register_module_fixer(INSTANCENORMS)
def fix(module: Any, **kwargs: Any) -> nn.Module:
    """A copy without running statistics; the module itself where it keeps none.

    Opacus only sets track_running_stats to False, and torch goes on updating the buffers that are there.
    """
    if not validate(module):
        return module  # type: ignore[no-any-return]
    new: Any = clone_module(module)
    new.track_running_stats = False
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        new._buffers[name] = None
    return new  # type: ignore[no-any-return]
