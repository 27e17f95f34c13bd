"""Tells whose rows a constant holds once data is scattered into it (graph pooling, message passing).

What nobody wrote to may count as anyone's. So of all ways to give the rows to samples any will do that agrees with what
is written; that of the data which the constant took its shape from comes first, as results of both mostly meet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import tensor_notes
from .calls import Call
from .layout import NOBODY, Layout
from .marks import layouts_marked


def note_shape(tensor: Tensor, layout: Layout | None) -> None:
    """Note on a constant made by data of this layout (`h.new_zeros(h.shape)`) that it has as many rows."""
    if layout is None or layout.mixed or layout.alone >= 0:
        return
    if tensor.shape[layout.dim : layout.dim + 1] == (layout.rows,):
        tensor.__dict__[tensor_notes.SHAPED] = Layout(
            layout.batch, layout.dim, layout.outer, layout.inner, layout.owner
        )


def shape_of(tensor: Tensor, batch: int) -> Layout | None:
    """What was noted of a constant's shape."""
    layout: Layout | None = tensor.__dict__.get(tensor_notes.SHAPED)
    return layout if layout is not None and layout.batch == batch else None


def of_constant(
    call: Call, target: Tensor, dim: int, index: Tensor, own: Tensor, by_constants: bool, like: Layout | None
) -> Layout | None:
    """The layout of a constant whose rows `index` along dim get data of the samples `own`; None: two samples' meet.

    index, own: of one shape; by_constants: the index is none made of data; like: of the rows that are written.
    """
    size = target.size(dim)
    if index.numel() and (int(index.min()) < -size or int(index.max()) >= size):
        return None
    rows = torch.where(index < 0, index + size, index).long()
    for layout in _candidates(call, target, dim, like):
        if torch.equal(layout.owners(target.device)[rows], own):
            return layout
    if not by_constants:  # which rows nobody wrote to would depend on the data
        return None
    found = torch.full((size,), NOBODY, device=target.device)
    found[rows.flatten()] = own.flatten()
    if not index.numel() or not torch.equal(found[rows], own):
        return None
    owner = _filled(found)
    return Layout(call.batch, dim, owner=owner).taken(dim, torch.arange(size, device=target.device))


def _candidates(call: Call, target: Tensor, dim: int, like: Layout | None) -> Iterator[Layout]:
    size, batch = target.size(dim), call.batch
    shaped = shape_of(target, batch)
    if shaped is not None and shaped.dim == dim and shaped.rows == size:
        yield shaped
    if size and size % batch == 0:
        yield Layout(batch, dim, 1, size // batch)
    for layout in layouts_marked(batch, target.device):
        if layout.rows == size:
            yield layout._replace(dim=dim)
    if like is not None and like.rows == size and like.order is None:
        yield Layout(batch, dim, like.outer, like.inner, like.owner)


def _filled(owner: Tensor) -> Tensor:
    """Rows of nobody counted to the sample of the row before, the first ones to that of the row after."""
    rows = torch.arange(len(owner), device=owner.device)
    last = torch.where(owner == NOBODY, rows.new_full((), -1), rows).cummax(0).values
    first = int((owner != NOBODY).nonzero()[0])
    return owner[last.clamp(min=first)]
