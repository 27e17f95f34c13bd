"""nn.LSTM: Opacus replaces it; fastdp is exact on it, so this is run only for who asks."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..layers import DPLSTM
from .errors import ShouldReplaceModuleError, UnsupportedModuleError
from .recurrent import replacement
from .utils import advice, register_module_fixer, register_module_validator


@register_module_validator(nn.LSTM)
@advice
def validate(module: nn.LSTM) -> list[UnsupportedModuleError]:
    """One ShouldReplaceModuleError, as Opacus's; ModuleValidator does not call it."""
    return [ShouldReplaceModuleError("nn.LSTM is exact as it is under fastdp; Opacus needs layers.DPLSTM in its place")]


@register_module_fixer(nn.LSTM)
@advice
def fix(module: nn.LSTM, **kwargs: Any) -> DPLSTM:
    """A DPLSTM of the same options and weights."""
    return replacement(module, DPLSTM)  # type: ignore[return-value]
