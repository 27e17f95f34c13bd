"""nn.MultiheadAttention: Opacus replaces it; fastdp is exact on it, so this is run only for who asks."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..layers import DPMultiheadAttention
from .errors import ShouldReplaceModuleError, UnsupportedModuleError
from .utils import advice, register_module_fixer, register_module_validator


@register_module_validator(nn.MultiheadAttention)
@advice
def validate(module: nn.MultiheadAttention) -> list[UnsupportedModuleError]:
    """One ShouldReplaceModuleError, as Opacus's; ModuleValidator does not call it."""
    return [
        ShouldReplaceModuleError(
            "nn.MultiheadAttention is exact as it is under fastdp; Opacus needs DPMultiheadAttention there"
        )
    ]


@register_module_fixer(nn.MultiheadAttention)
@advice
def fix(module: Any, **kwargs: Any) -> DPMultiheadAttention:
    """A DPMultiheadAttention of the same options and weights."""
    new = DPMultiheadAttention(
        embed_dim=module.embed_dim,
        num_heads=module.num_heads,
        dropout=module.dropout,
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
    )
    new.load_state_dict(module.state_dict())
    return new
