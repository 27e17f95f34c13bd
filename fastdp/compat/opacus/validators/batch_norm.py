"""BatchNorm: a sample's values depend on the others of the batch."""

from __future__ import annotations

import logging
import math
from typing import Any

from torch import nn

from .errors import ShouldReplaceModuleError, UnsupportableModuleError, UnsupportedModuleError
from .utils import register_module_fixer, register_module_validator

logger = logging.getLogger("opacus.validators.batch_norm")

BATCHNORMS = [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm]
_INSTANCE = {nn.BatchNorm1d: nn.InstanceNorm1d, nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d}


@register_module_validator(BATCHNORMS)
def validate(module: nn.Module) -> list[UnsupportedModuleError]:
    """One ShouldReplaceModuleError."""
    return [
        ShouldReplaceModuleError(
            f"{type(module).__name__} normalises each sample by statistics of the whole batch, so that a sample's "
            "gradient has no bound of its own. Replace it: ModuleValidator.fix makes it a GroupNorm (or, with "
            "replace_bn_with_in=True, an InstanceNorm); fastdp.make_compatible does so in place and keeps the weights."
        )
    ]


@register_module_fixer(BATCHNORMS)
def fix(module: Any, **kwargs: Any) -> nn.Module:
    """A new GroupNorm, or InstanceNorm.

    Args: num_groups (default: the greatest common divisor of 32 and the channels); replace_bn_with_in. Raises
    ValueError for both together, UnsupportableModuleError for a SyncBatchNorm as InstanceNorm.
    """
    logger.info(
        "The default batch_norm fixer replaces BatchNorm with GroupNorm; fix(..., replace_bn_with_in=True) takes "
        "InstanceNorm"
    )
    num_groups = kwargs.get("num_groups")
    if not kwargs.get("replace_bn_with_in", False):
        return nn.GroupNorm(num_groups or math.gcd(32, module.num_features), module.num_features, affine=module.affine)
    if num_groups is not None:
        raise ValueError("replace_bn_with_in and num_groups exclude each other")
    for batch, instance in _INSTANCE.items():
        if isinstance(module, batch):
            return instance(module.num_features)
    raise UnsupportableModuleError(f"there is no InstanceNorm for {type(module).__name__}: take GroupNorm")
