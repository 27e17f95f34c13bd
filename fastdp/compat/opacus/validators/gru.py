"""nn.GRU: Opacus replaces it; fastdp is exact on it, so this is run only for who asks."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..layers import DPGRU
from .errors import ShouldReplaceModuleError, UnsupportedModuleError
from .recurrent import replacement
from .utils import advice, register_module_fixer, register_module_validator


@register_module_validator(nn.GRU)
@advice
def validate(module: nn.GRU) -> list[UnsupportedModuleError]:
    """One ShouldReplaceModuleError, as Opacus's; ModuleValidator does not call it."""
    return [ShouldReplaceModuleError("nn.GRU is exact as it is under fastdp; Opacus needs layers.DPGRU in its place")]


@register_module_fixer(nn.GRU)
@advice
def fix(module: nn.GRU, **kwargs: Any) -> DPGRU:
    """A DPGRU of the same options and weights."""
    return replacement(module, DPGRU)  # type: ignore[return-value]
