"""Attention over the packed rows of several samples, if its mask keeps every sample to itself.

What the mask says is looked at: a key of another sample must have a weight of exactly zero, so that neither its
value nor its gradient takes part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .calls import Call
from .layout import Layout


def masks_others(call: Call, query: Layout) -> bool:
    """Whether scaled_dot_product_attention(query, key, value, mask) along the samples' rows stays within samples."""
    q, k, v = call.args[:3]
    mask = call.argument(3, "attn_mask")
    if not isinstance(mask, Tensor) or call.layout(mask) is not None or call.argument(5, "is_causal", False):
        return False
    for tensor in (k, v):
        layout = call.layout(tensor)
        if layout is None or layout.mixed or layout.alone >= 0 or layout.dim != tensor.dim() - 2:
            return False
        if layout.order is not None or not layout.same_rows(query, q.device):
            return False
    if query.mixed or query.alone >= 0 or query.order is not None or query.dim != q.dim() - 2:
        return False
    return _bounded(q, k, v) and keeps_apart(mask, query.owners(mask.device), q.dtype)


def _bounded(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether no score can overflow and no value is infinite: a weight of zero times infinity is not zero."""
    highest = [float(t.detach().abs().max()) if t.numel() else 0.0 for t in (q, k, v)]
    return highest[0] * highest[1] * q.size(-1) < torch.finfo(q.dtype).max / 4 and math.isfinite(highest[2])


def keeps_apart(mask: Tensor, owners: Tensor, dtype: torch.dtype) -> bool:
    """Whether an attention mask [..., queries, keys] hides from every row the rows of other samples, entirely.

    owners: sample of each row [rows], of queries and keys alike. In a mask of numbers, which are added to scores, a
    hidden key has at least half of the lowest number of `dtype`, and every row sees some key of its own unchanged:
    else all its scores are as low, and the weights of the others' are not zero.
    """
    if mask.shape[-2:] != (len(owners), len(owners)):
        return False
    same = owners[:, None] == owners[None, :]
    if mask.dtype == torch.bool:
        return not bool((mask & ~same).any()) and bool((mask & same).any(-1).all())
    hidden = mask <= torch.finfo(dtype).min / 2
    seen = (mask == 0) & same
    return bool((hidden | same).all()) and bool(seen.any(-1).all())
