"""Multi-head attention and other composite functions, captured call by call."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch_axis.calls import bind
from .forward_pass import ForwardPass
from .generic import python_body
from .rules import refuse_sequence_of_samples, use_rule


@use_rule(F.multi_head_attention_forward)
def capture_attention(forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """nn.MultiheadAttention: queries, keys and values are [T,B,E] here; the projections are linear uses."""
    query = args[0] if args else kwargs["query"]
    refuse_sequence_of_samples(
        forward_pass, query, 1, "multi_head_attention_forward", "attends from one sample to another"
    )
    body = python_body(func)
    assert body is not None
    return forward_pass.traced(body, *args, **kwargs)


@use_rule(F.scaled_dot_product_attention)
def capture_dot_product_attention(
    forward_pass: ForwardPass, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Seen through as the softmax that it is, where the mask is made of parameters (biases of relative positions), and
    where weights are dropped out, which the generic rule could not repeat for one sample; else the generic rule."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, key, value, mask, dropout, causal, scale, grouped = bind(args, kwargs, *names)
    if not dropout and not (isinstance(mask, Tensor) and forward_pass.is_parameter(mask)):
        return NotImplemented

    def body() -> Tensor:
        keys, values = key, value
        if grouped:
            times = query.size(-3) // key.size(-3)
            keys, values = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = (query * factor) @ keys.transpose(-2, -1)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], device=scores.device).tril() == 0, -torch.inf)
        elif mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
        nowhere = scores.amax(-1, keepdim=True) == -torch.inf  # rows that may look at nothing give zeros
        weights = weights.masked_fill(nowhere, 0.0)
        return (F.dropout(weights, dropout) if dropout else weights) @ values

    return forward_pass.traced(body)


# seen through also where no parameter of theirs is trained: their inner dimensions would hide attention from one
# sample to another
COMPOSITES = {F.multi_head_attention_forward: capture_attention}
