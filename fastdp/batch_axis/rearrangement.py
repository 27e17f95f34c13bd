"""How rows lie after a tensor is cut by sample or reshaped."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .host_values import in_some_order
from .layout import Layout, rows_each


def samplewise(tensor: Tensor, layout: Layout) -> Tensor:
    """Cut by sample: [*shape] -> [batch, *shape with dim -> rows of one sample].

    Rows in any order (`owner`) are padded with zeros to the largest number of rows of a sample.
    """
    dim, batch = layout.dim, layout.batch
    if layout.owner is None:
        if layout.outer == 1 and layout.inner == 1:
            return tensor.unsqueeze(1) if dim == 0 else tensor.movedim(dim, 0).unsqueeze(dim + 1)
        cut = tensor.unflatten(dim, (layout.outer, batch, layout.inner))
        return cut.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)
    owner = layout.owner.to(tensor.device)
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(in_some_order(owner), minlength=batch)
    width = int(counts.max()) if owner.numel() else 0
    first = (counts.cumsum(0) - counts).to(owner.device)
    by_owner = owner[order]
    slot = torch.arange(owner.numel(), device=owner.device) - first[by_owner]
    rows = tensor.movedim(dim, 0)[order]
    padded = rows.new_zeros((batch, width, *rows.shape[1:]))
    padded[by_owner, slot] = rows
    return padded.movedim(1, dim + 1)


def reshaped(layout: Layout, before: torch.Size, after: torch.Size) -> Layout | None:
    """Layout after a reshape (row-major order kept), or None where it cannot be written as one."""
    below = math.prod(before[layout.dim + 1 :])  # elements under one row
    if layout.owner is not None:
        return _reshaped_owner(layout, before, after, below)
    inner_total = layout.inner * below  # elements from one sample's row block to the next
    span = inner_total * layout.batch
    stride = math.prod(after)
    for dim, size in enumerate(after):
        stride //= max(size, 1)
        if inner_total % stride == 0 and (size * stride) % span == 0 and size > 0:
            inner = inner_total // stride
            outer = size // (inner * layout.batch)
            return layout._replace(dim=dim, outer=outer, inner=inner)
    return None


def _reshaped_owner(layout: Layout, before: torch.Size, after: torch.Size, below: int) -> Layout | None:
    assert layout.owner is not None
    rows = layout.owner.numel()
    each = rows_each(layout.owner, layout.batch)
    if each:  # to a shape that keeps the samples apart
        apart = reshaped(layout._replace(owner=None, order=None, inner=each), before, after)
        if apart is not None and apart._replace(is_row_index=False).plain:
            return apart
    stride = math.prod(after)
    above = math.prod(before[: layout.dim])
    for dim, size in enumerate(after):
        stride //= max(size, 1)
        if rows == 0 or stride == 0:
            continue
        if above == 1 and stride % below == 0 and size * (stride // below) == rows:  # neighbours made one row
            groups = layout.owner.view(size, -1)
            if bool((groups == groups[:, :1]).all()):
                return layout.taken(dim, torch.arange(0, rows, stride // below, device=layout.owner.device))
        if below % stride:
            continue
        repeat = below // stride
        if size == rows * repeat:
            return layout.taken(dim, torch.arange(rows, device=layout.owner.device).repeat_interleave(repeat))
        if dim == 0 and size == above * rows * repeat:
            below_each = torch.arange(rows, device=layout.owner.device).repeat_interleave(repeat)
            return layout.taken(0, below_each.repeat(above))
    return None
