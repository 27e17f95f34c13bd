"""Layout rules of products with a constant matrix, and of attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.pytree import tensors_in
from .batch_positions import WHY, by_place
from .calls import Call, Tags, layout_rule
from .layout import Layout
from .operator_table import spellings
from .propagate import ask
from .totals import total_of

T = torch.Tensor


@layout_rule(F.linear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def _times_matrix(call: Call) -> Tags:
    """Data [..., I] times a constant matrix: each row by itself, along whichever other dimension the samples lie."""
    source, layout = call.args[0], call.layout(call.args[0])
    matrix, bias = call.argument(1, "weight" if call.name == "linear" else "other"), None
    if call.name == "linear":
        bias = call.argument(2, "bias")
    if isinstance(matrix, Tensor) and matrix.dim() == source.dim() == 1:
        return _dot(call)
    if layout is None or layout.mixed or len(call.inputs()) != 1 or "out" in call.kwargs:
        return ask(call)
    flat = isinstance(matrix, Tensor) and matrix.dim() == 2 and (bias is None or bias.dim() == 1)
    return [(call.out, layout)] if flat and layout.dim < source.dim() - 1 else ask(call)


@layout_rule(torch.dot, T.dot)
def _dot(call: Call) -> Tags:
    """One number a sample, times weights, added up: the sum over the samples, if no weight goes by its place."""
    first, second = call.args if len(call.args) == 2 else (None, None)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dim() != 1 or second.dim() != 1:
        return ask(call)
    known = [layout for _, layout in call.inputs()]
    whole = all(not (layout.mixed or layout.alone >= 0 or layout.order is not None) for layout in known)
    if call.kwargs or not whole or not all(layout.same_rows(known[0], call.out.device) for layout in known):
        return ask(call)
    if any(by_place(tensor, 0, known[0]) for tensor in call.args if call.is_constant(tensor)):
        return call.all_combined(WHY)
    return [(call.out, total_of(call, call.out, known[0], "sum"))]


def _masks_others(call: Call, query: Layout) -> bool:
    """Whether attention along the samples' rows stays within samples, by a mask (Pixtral's patches)."""
    q, k, v = call.args[:3]
    mask = call.argument(3, "attn_mask")
    if not isinstance(mask, Tensor) or call.layout(mask) is not None or call.argument(5, "is_causal", False):
        return False
    for tensor in (q, k, v):
        layout = call.layout(tensor)
        if layout is None or layout.mixed or layout.alone >= 0 or layout.dim != tensor.dim() - 2:
            return False
        if layout.order is not None or not layout.same_rows(query, q.device):
            return False
    return _bounded(q, k, v) and _keeps_apart(mask, query.owners(mask.device), q.dtype)


def _bounded(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether no score can overflow and no value is infinite: a weight of zero times infinity is not zero."""
    highest = [float(t.detach().abs().max()) if t.numel() else 0.0 for t in (q, k, v)]
    return highest[0] * highest[1] * q.size(-1) < torch.finfo(q.dtype).max / 4 and math.isfinite(highest[2])


def _keeps_apart(mask: Tensor, owners: Tensor, dtype: torch.dtype) -> bool:
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


@layout_rule(F.scaled_dot_product_attention)
def _attention(call: Call) -> Tags:
    if (known := _apart_in_attention(call)) is not None:
        return [(call.out, known)]
    given = [(tensor, layout) for tensor in tensors_in(call.args[:3]) if (layout := call.layout(tensor)) is not None]
    if len(call.inputs()) > len(given) or all(layout.dim < tensor.dim() - 2 for tensor, layout in given):
        return ask(call)  # a mask made of data, perhaps
    query = call.layout(call.args[0])
    apart = query is not None and _masks_others(call, query)
    return [(call.out, query if apart else call.combined("attends from one sample to another"))]


def _apart_in_attention(call: Call) -> Layout | None:
    """The result's layout, where queries, keys, values and mask have the samples in one dimension before those that are
    combined: whatever they hold, no sample meets another. None where that cannot be told from shapes."""
    known = call.inputs()
    places = {layout.dim - tensor.dim() for tensor, layout in known}
    place, first = max(places), known[0][1]
    grouped = bool(call.kwargs.get("enable_gqa")) and place == -3  # rows of keys then serve several of queries
    if len(places) > 1 or place >= -2 or grouped or call.out.size(place) != first.rows:
        return None
    for tensor, layout in known:
        regular = layout._replace(piece=None) == Layout(call.batch, layout.dim, first.outer, first.inner)
        if not regular or tensor.size(place) != first.rows:
            return None
    return first._replace(dim=call.out.dim() + place)


@layout_rule(*spellings("grouped_mm", "_grouped_mm"), by_value=True)
def _grouped_mm(call: Call) -> Tags:
    """Rows [S, I], each times the matrix of its group: rows stay where they are."""
    rows, matrices = call.args[:2]
    layout = call.layout(rows)
    if layout is None or layout.mixed or rows.dim() != 2 or matrices.dim() != 3 or call.layout(matrices) is not None:
        return ask(call)
    if layout.dim != 0:
        return call.all_combined("sums over the batch")
    return [(call.out, layout)]
