"""Rows numbered within their own group: `arange(total) - repeat_interleave(starts, counts)`.

The starts are sums over the groups before, so over other samples; the difference is 0, 1, 2 ... in every group, which
its own count alone makes. It is told by value, where the groups are known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import operator_table, tensor_notes
from .calls import Call, Tags
from .layout import Layout


def repeated(layout: Layout, times: Tensor, rows: Tensor) -> Layout:
    """The layout of rows that were repeated as often as each sample's own data says, to the rows of these numbers.

    Where all say the same, rows lie as in any batch of so many rows a sample; else their places depend on the samples
    before, and constants must not meet them by place.
    """
    even = times.numel() > 0 and bool((times == times.flatten()[0]).all())
    return layout.taken(layout.dim, rows, layout.order if even and layout.order is None else torch.zeros_like(rows))


def note_groups(call: Call, times: Tensor, by: Layout) -> None:
    """Note on numbers of several samples, repeated as often as each sample says, which group every row is of."""
    if times.dim() != 1 or not isinstance(call.out, Tensor) or call.out.dim() != 1 or call.out.is_floating_point():
        return
    groups = torch.arange(by.rows, device=times.device).repeat_interleave(times)
    if len(groups) == len(call.out):
        call.out.__dict__[tensor_notes.GROUPS] = (groups, repeated(by, times, groups), call.out._version)


def counted(call: Call) -> Tags | None:
    """Of constants less repeated starts that number the rows of each group; None of any other call."""
    if call.name not in operator_table.SUBTRACTING or len(call.args) != 2 or call.kwargs:
        return None
    numbers, starts = call.args
    note = starts.__dict__.get(tensor_notes.GROUPS) if isinstance(starts, Tensor) else None
    if note is None or note[2] != starts._version or not isinstance(numbers, Tensor):
        return None
    groups, layout, _ = note
    by = call.layout(starts)
    if by is None or not by.mixed or call.layout(numbers) is not None or call.out.shape != groups.shape:
        return None
    rows = torch.arange(len(groups), device=groups.device)
    first = torch.searchsorted(groups, groups)  # groups come in order
    return [(call.out, layout)] if torch.equal(call.out, (rows - first).to(call.out.dtype)) else None
