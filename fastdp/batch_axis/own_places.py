"""Whether every sample's numbers are taken from the same places of its own.

`h.reshape(-1)[:: C + 1]`, `h[torch.arange(B), torch.arange(B)]` or strides over memory give each sample some of its own
numbers, but where it stands in the batch says which.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Layout = Any  # `batch_axis.layout` has it, and asks here
_ROUNDING = 2**10  # units of the last place of the largest number, in which equal rows of a product may differ


def ranks(layout: Layout, device: torch.device) -> Tensor:
    """Which of its sample's rows each row is: 0, 1 ..., int64 [rows]."""
    if layout.owner is None:
        own = torch.arange(layout.outer * layout.inner, device=device).view(layout.outer, 1, layout.inner)
        return own.expand(-1, layout.batch, -1).reshape(-1)
    owner = layout.owner.to(device)
    order = torch.argsort(owner, stable=True)
    counts = torch.bincount(owner, minlength=layout.batch)
    found = torch.empty_like(owner)
    found[order] = torch.arange(len(owner), device=device) - (counts.cumsum(0) - counts)[owner[order]]
    return found


def alike(values: Tensor, dim: int, layout: Layout, computed: bool = False) -> bool:
    """Whether all samples' rows along a dimension hold the same numbers: the first, the second ... of each.

    computed: they were computed, maybe of the same numbers, which a matrix product rounds as it takes them together.
    """
    return not values.numel() or bool(same_numbers(values, dim, layout, computed))


def same_numbers(values: Tensor, dim: int, layout: Layout, computed: bool = False) -> Tensor:
    """The same as `alike`, of a tensor that is not empty: a bool on its device, which nobody has waited for."""
    if layout.owner is None:
        values = values.unflatten(dim, (layout.outer, layout.batch, layout.inner))
        return _same(values, values.narrow(dim + 1, 0, 1), computed)
    rank = ranks(layout, values.device)
    first = torch.zeros(int(rank.max()) + 1, dtype=torch.long, device=rank.device)
    first[rank.flip(0)] = torch.arange(len(rank), device=rank.device).flip(0)  # a row of each rank
    rows = values.movedim(dim, 0)
    return _same(rows, rows[first[rank]], computed)


def _same(values: Tensor, wanted: Tensor, computed: bool) -> Tensor:
    if not computed or not values.is_floating_point():
        return (values == wanted).all()
    largest = values.abs().nan_to_num(nan=0.0, posinf=0.0).amax()  # of finite numbers: masks hold -inf
    close = (values - wanted).abs() <= _ROUNDING * torch.finfo(values.dtype).eps * largest
    return (close | (values == wanted)).all()


def same_of_each(rows: Tensor, columns: Tensor | None, before: Layout, found: Layout) -> bool:
    """Whether elements were taken from the same places of every sample. rows [*]: of `before`, which row each lies in;
    columns [*]: where in it (None: of all the same); found: how they lie now."""
    if found.alone >= 0 or not rows.numel():
        return True
    places = columns
    if columns is None:
        rows = rows[tuple(slice(0, None if step else 1) for step in rows.stride())]  # without those it is spread over
    if before.owner is not None or before.rows > before.batch:
        rank = ranks(before, rows.device)[rows]
        places = rank if columns is None else rank * (columns.max() + 1) + columns
    return places is None or alike(places, found.dim, found)


def gathers_alike(index: Tensor, layout: Layout, found: Layout) -> bool:
    """Whether an index of rows, for each element by itself, names the same places of every sample. found: how these
    rows lie now: along another dimension, each sample's have columns of their own."""
    return found.alone >= 0 or (found.dim == layout.dim and same_of_each(index, None, layout, found))


def seen_through(view: Tensor, base: Tensor, layout: Layout) -> tuple[Tensor, Tensor] | None:
    """Of each element of a view, the row that it lies in and where in the row; None if some lie in none."""
    offset = view.storage_offset() - base.storage_offset()
    known = base.shape[layout.dim : layout.dim + 1] == (layout.rows,) and view.dtype == base.dtype
    if offset < 0 or 0 in base.stride() or not known:
        return None
    memory = torch.full((max(_extent(base), offset + _extent(view)),), -1, device=base.device)
    elements = torch.arange(base.numel(), device=base.device).view(base.shape)
    memory.as_strided(base.shape, base.stride()).copy_(elements)
    seen = memory.as_strided(view.shape, view.stride(), offset)
    if bool((seen < 0).any()):
        return None
    width = math.prod(base.shape[layout.dim + 1 :])
    rows = seen // width % layout.rows
    return rows, seen - rows * width


def _extent(tensor: Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
