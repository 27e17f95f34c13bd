"""Layout rules of functions that read rows by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch_positions import WHY, is_fixed, rows_alike
from .batch_slices import cut
from .calls import Call, Tags, layout_rule
from .host_values import at, in_some_order, numbered
from .index_kinds import (
    Entry,
    brought_back,
    expanded,
    found_in,
    index_on_host,
    index_tuple,
    is_position_within,
    order_of,
    problem_of,
)
from .layout import Layout, extent_of, is_one, spread
from .propagate import ask, one_row
from .reduction_ops import Spread, gathered
from .view_ops import reshaped

T = torch.Tensor


@layout_rule(T.__getitem__, picks=True, joins=True)
def getitem(call: Call) -> Tags:
    """Rows, or parts of every row, by an index."""
    source, layout = call.args[0], call.layout(call.args[0])
    tags = _items(call, source, layout)
    if layout is None or not layout.is_row_index:
        return tags
    if is_position_within(source, index_tuple(call, call.args[1], source.device)):
        return tags
    return [(tensor, found and found._replace(is_row_index=True)) for tensor, found in tags]


def _is_last(at: Spread, index: tuple[Any, ...], source: Tensor) -> bool:
    """Whether an index takes the last row of the samples', of which each holds the sum of those before."""
    used, _ = _source_dims(index, source.dim())
    entry = used.get(at.dim)
    return isinstance(entry, int) and entry % source.size(at.dim) == source.size(at.dim) - 1


def _items(call: Call, source: Tensor, layout: Layout | None) -> Tags:
    if layout is None:  # a constant table, indexed by data: the result lies as the index does
        return _take_from_constant(call)
    index = index_tuple(call, call.args[1], source.device)
    if layout.mixed:
        return gathered(call, "last", lambda at: _is_last(at, index, source)) or [(call.out, layout._replace(dim=0))]
    if layout.alone >= 0:
        return call.all_combined("picks rows of one sample by another's data")
    if layout.is_row_index and is_position_within(source, index):
        layout = layout._replace(is_row_index=False)
    used, basic = _source_dims(index, source.dim())
    if layout.dim not in used:
        return ask(call) if basic else _index_elsewhere(call, layout, index, used)
    entry = used[layout.dim]
    if isinstance(entry, slice) and entry == slice(None):
        return ask(call) if basic else _index_elsewhere(call, layout, index, used)
    if isinstance(entry, slice):
        start, stop, step = entry.indices(layout.rows)
        if not layout.may_end(start, stop) or (layout.order is not None and step != 1):
            return call.all_combined("cuts rows off an order that depends on other samples")
    if isinstance(entry, slice) and basic:
        picked = numbered(layout.rows, source.device)[entry]
        found = layout.taken(_kept_position(index, source.dim(), layout.dim), picked)
        return [(call.out, cut(source, layout, found))]
    if isinstance(entry, int):
        return [(call.out, _row_and(call, layout, entry, used))]
    if isinstance(entry, Tensor) and index[0] is entry and _counts_rows(call, layout, entry, used):
        return [(call.out, layout.taken(0, entry)._replace(inferred=2))]
    return _index_rows(call, layout, index)


def _counts_rows(call: Call, layout: Layout, index: Tensor, used: dict[int, Any]) -> bool:
    """Whether an index counted over the whole batch repeats the samples' one row each, in order: 0 0 0 1 1 2 2 2.

    How often depends on all samples, so it stays a guess until these rows meet rows known to be the same samples'.
    """
    by = call.layout(index)
    if by is None or not by.mixed or by.is_row_index or not layout.plain or layout.dim != 0 or index.dim() != 1:
        return False
    if index.dtype not in (torch.int64, torch.int32) or not index.numel():
        return False
    if any(isinstance(item, Tensor) and item is not index for item in used.values()):
        return False
    steps = index[1:] - index[:-1]
    whole = int(index[0]) == 0 and int(index[-1]) == layout.batch - 1
    return whole and bool(((steps == 0) | (steps == 1)).all())


def _row_and(call: Call, layout: Layout, row: int, used: dict[int, Any]) -> Layout | None:
    """One row of the batch, and of it what else the index picks: constants' or the sample's own choice."""
    found = one_row(call, call.out, layout, row)
    picking = [item for item in used.values() if isinstance(item, Tensor)]
    if found is None or found.mixed or not picking:
        return found
    known = [by for item in picking if (by := call.layout(item)) is not None]
    if any(by.alone != found.alone for by in known):
        return call.combined("picks rows of one sample by another's data")
    sized = any(by.size_from_data for by in known) or (
        bool(known) and any(item.dtype == torch.bool for item in picking)
    )
    return found._replace(size_from_data=found.size_from_data or sized)


@layout_rule(torch.select, T.select, by_value=True)
def _select(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim, row = call.argument(1, "dim"), call.argument(2, "index")
    if layout is None or layout.mixed or dim % source.dim() != layout.dim or isinstance(row, Tensor):
        return ask(call)
    return [(call.out, one_row(call, call.out, layout, row))]


@layout_rule(torch.narrow, T.narrow, by_value=True)
def _narrow(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim, start, length = (call.argument(i, n) for i, n in ((1, "dim"), (2, "start"), (3, "length")))
    if layout is None or layout.mixed:
        return ask(call)
    if dim % source.dim() != layout.dim:
        return _narrow_elsewhere(call, layout, dim, start, length)
    if isinstance(start, Tensor) or isinstance(length, Tensor):
        return call.all_combined("cuts the batch where data says")
    start = start % max(layout.rows, 1) if start < 0 else start
    if not layout.may_end(start, start + length):
        return call.all_combined("cuts rows off an order that depends on other samples")
    rows = torch.arange(start, start + length, device=source.device)
    return [(call.out, cut(source, layout, layout.taken(layout.dim, rows)))]


def _narrow_elsewhere(call: Call, layout: Layout, dim: int, start: Any, length: Any) -> Tags:
    """Every sample's rows cut at the same places; numbers over the whole batch may say where, as a size may be one."""
    source = call.args[0]
    known = [found for item in (start, length) if (found := call.layout(item)) is not None]
    middle = int(start) != 0 and int(start) + int(length) != source.size(dim)
    if any(not found.mixed for found in known) or (known and call.layout(start) is not None and middle):
        return call.all_combined("cuts all samples where the data of some says")
    kept = layout.alone >= 0 or call.out.size(layout.dim) == layout.rows
    return [(call.out, layout if kept else call.combined("combines neighbouring samples"))]


def _source_dims(index: tuple[Any, ...], ndim: int) -> tuple[dict[int, Any], bool]:
    """Which source dimension each entry of an index speaks of, and whether there is no tensor among them."""
    width = sum(
        item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1
        for item in index
        if item is not None and item is not Ellipsis
    )
    used: dict[int, Any] = {}
    dim = 0
    for item in index:
        if item is None:
            continue
        if item is Ellipsis:
            dim += ndim - width
            continue
        for _ in range(item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1):
            used[dim] = item
            dim += 1
    basic = not any(isinstance(item, Tensor | list) for item in index)
    return used, basic


def _kept_position(index: tuple[Any, ...], ndim: int, dim: int) -> int:
    """Position of source dimension `dim` after basic indexing."""
    position, source = 0, 0
    width = sum(item is not None and item is not Ellipsis for item in index)
    for item in index:
        if item is None:
            position += 1
        elif item is Ellipsis:
            position, source = position + ndim - width, source + ndim - width
        elif source == dim:
            return position
        else:
            position, source = position + isinstance(item, slice), source + 1
    return position + dim - source


def _index_elsewhere(call: Call, layout: Layout, index: tuple[Any, ...], used: dict[int, Any]) -> Tags:
    """Tensor indices, but not along the batch: the same positions for every sample."""
    indices = [item for item in used.values() if isinstance(item, Tensor)]
    known = [found for item in indices if (found := call.layout(item)) is not None]
    if any(not (found.mixed and found.is_row_index) for found in known):
        return call.all_combined("indexes all samples by one sample's data")
    if any(item.numel() > 1 and item.dtype != torch.bool and call.layout(item) is not None for item in indices):
        return call.all_combined("picks of each sample what occurs in the batch")
    if known or any(item.dtype == torch.bool for item in indices):  # which choices occur at all
        return _index_rows(call, layout, index)
    return ask(call)


def _index_rows(call: Call, layout: Layout, index: tuple[Any, ...]) -> Tags:
    """Index a map of row numbers in the same way, and read off which rows the result holds."""
    source, given = call.args[0], layout
    items, entries = expanded(call, index)
    used, _ = _source_dims(items, source.dim())
    order = None
    along = [k for k, entry in entries.items() if used.get(layout.dim) is entry.tensor]
    if along:
        problem = problem_of(entries, along[0], layout)
        if problem:
            return call.all_combined(problem)
        order = order_of(entries, call.out.size(_position(entries, items)) if call.out.dim() else 1)
        if layout.order is not None and entries[along[0]].layout is None:
            picked = entries[along[0]].tensor
            if not layout.may_take(picked):
                return call.all_combined("cuts rows off an order that depends on other samples")
            order = torch.zeros_like(picked.flatten()) if order is None else order
    device = source.device
    if order is None and (host := index_on_host(items, layout)) is not None:
        items, layout, device = *host, torch.device("cpu")
    numbers = spread(numbered(layout.rows, device), layout.dim, source.shape)
    leading = source.dim() if any(item is Ellipsis for item in items) else 1 + max(layout.dim, *used)
    narrowed = numbers[(slice(None),) * leading + (0,) * (source.dim() - leading)] if source.numel() else numbers
    own_order = any(entry.own is not None for entry in entries.values()) and bool(along)
    one = len(items) == 1 and narrowed.dim() == 1 and isinstance(items[0], Tensor)
    found = _one_dimension(call, at(narrowed, items[0]) if one else narrowed[items], layout, order, own_order)
    if device != source.device:
        found, layout = brought_back(found, source.device), given
    if found is not None and all(entry.layout is None for entry in entries.values()):
        found = cut(source, layout, found)  # by constants
    if found is not None and found.alone >= 0:
        found = found._replace(
            size_from_data=any(e.layout is not None and e.layout.size_from_data for e in entries.values())
        )
    return [(call.out, found)]


def _position(entries: dict[int, Entry], items: tuple[Any, ...]) -> int:
    """Where the dimensions of an index of tensors begin in the result."""
    places = sorted(entries)
    apart = places[-1] - places[0] >= len(places)
    return 0 if apart else sum(item is not Ellipsis and not isinstance(item, int) for item in items[: places[0]])


def _one_dimension(
    call: Call, rows: Tensor, layout: Layout, order: Tensor | None = None, own_order: bool = False
) -> Layout | None:
    """The layout of a result that holds these rows, if their samples depend on one dimension only.

    own_order: the index gives the rows an order (`order`, or none to speak of) in place of the one they had.
    """
    owners = layout.owners(rows.device)
    if rows.numel() == 0:
        dim = next((d for d, size in enumerate(rows.shape) if size == 0), 0)
        return layout.taken(dim, rows.new_zeros(rows.size(dim) if rows.dim() else 0), order)
    if order is None and (own_order or layout.order is None) and is_one(at(owners, rows).flatten()):
        return layout.of_sample(int(in_some_order(at(owners, rows).flatten())[0]))
    for dim in range(rows.dim()):
        flat = rows.movedim(dim, 0).reshape(rows.size(dim), -1)
        if flat.size(1) == 1 or bool((owners[flat] == owners[flat[:, :1]]).all()):
            order = order if order is not None and len(order) == len(flat) else None
            return layout.taken(dim, rows if rows.dim() == 1 else flat[:, 0], order, own_order)
    return call.combined("gathers rows of different samples")


def _take_from_constant(call: Call) -> Tags:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if len(index) != 1 or not isinstance(index[0], Tensor):
        return ask(call)
    layout = call.layout(index[0])
    if index[0].dtype != torch.bool:  # numbers chosen from among the choices that occur are constants
        return [(call.out, None if layout is None or (layout.mixed and layout.is_row_index) else layout)]
    if layout is None or layout.mixed:
        return [(call.out, call.combined("picks rows by what other samples hold"))]
    coordinates, _, order = found_in(index[0], layout)
    places = not _same_for_all(call.args[0], layout.dim)
    return [(call.out, layout.taken(0, coordinates[layout.dim], order)._replace(is_row_index=places))]


def _same_for_all(table: Tensor, dim: int) -> bool:
    """Whether a table has the same numbers for every row along a dimension: positions within, not of, a sample."""
    return dim < table.dim() and bool((table == table.narrow(dim, 0, min(1, table.size(dim)))).all())


@layout_rule(torch.as_strided, T.as_strided, by_value=True, reaches=True)
def _as_strided(call: Call) -> Tags:
    """Windows over memory: the same strides over a map of row numbers."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed:
        return [(call.out, layout)]
    if layout.order is not None:
        return call.all_combined("cuts rows off an order that depends on other samples")
    if 0 in source.stride():
        return call.all_combined("takes windows of memory that stands for many rows")
    given, layout = layout, layout.along(0, source.size(0) if source.dim() else 1, source.device)
    offset = call.out.storage_offset() - source.storage_offset()
    if offset < 0:
        return call.all_combined("takes windows of memory outside of its input")
    memory = torch.full((max(extent_of(source), offset + extent_of(call.out)),), -1, device=source.device)
    numbers = spread(torch.arange(layout.rows, device=source.device), layout.dim, source.shape)
    memory.as_strided(source.shape, source.stride()).copy_(numbers)
    rows = memory.as_strided(call.out.shape, call.out.stride(), offset)
    if bool((rows < 0).any()):
        return call.all_combined("takes windows of memory outside of its input")
    return [(call.out, given if given.alone >= 0 else _one_dimension(call, rows, layout))]


@layout_rule(torch.index_select, T.index_select, by_value=True, picks=True, joins=True)
def _index_select(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if layout is None or layout.mixed:
        return ask(call)
    if layout.alone >= 0:
        return call.all_combined("picks rows of one sample by another's data")
    if not index.dim() and (by := call.layout(index)) is not None:
        index = index.reshape(1)  # of the only row that a choice has left
        call.knows(index, by.along(0, 1, index.device))
    items = (slice(None),) * (dim % source.dim()) + (index,)
    if dim % source.dim() != layout.dim:
        return _index_elsewhere(call, layout, items, {dim % source.dim(): index}) if call.layout(index) else [
            (call.out, layout)
        ]  # fmt: skip
    return _index_rows(call, layout, items)


@layout_rule(torch.gather, T.gather, torch.take_along_dim, T.take_along_dim, by_value=True, picks=True)
def _gather(call: Call) -> Tags:
    along = call.name == "take_along_dim"
    source, dim = call.args[0], call.argument(2 if along else 1, "dim")
    index = call.argument(1, "indices") if along else call.argument(2, "index")
    layout, by = call.layout(source), call.layout(index)
    both = [found for found in (layout, by) if found is not None]
    if layout is None and by is not None and not by.mixed:
        return [(call.out, _looked_up(call, source, index, by, dim))]
    if any(found.mixed for found in both) or dim is None:
        return call.all_combined("gathers one sample's data by another's indices")
    if layout is None or dim % source.dim() != layout.dim:
        if len(both) == 2 and not (both[0].dim == both[1].dim and both[0].same_rows(both[1], call.out.device)):
            return call.all_combined("gathers one sample's data by another's indices")
        if dim % source.dim() == both[0].dim:
            return call.all_combined("gathers along the batch")
        return [(call.out, both[0]._replace(is_row_index=both[0].is_row_index and layout is not None))]
    return [(call.out, _gathered_rows(call, layout, by, index))]


def _looked_up(call: Call, table: Tensor, index: Tensor, by: Layout, dim: int | None) -> Layout | None:
    """Numbers of a constant table, each chosen by its sample's own index: they lie as the index does."""
    if dim is None:  # both as one row
        why = "gathers rows of different samples"
        return reshaped(by, index.shape, call.out.shape) or call.combined(why)
    if call.out.dim() != index.dim() or call.out.shape[by.dim : by.dim + 1] != (by.rows,):
        return call.combined("gathers one sample's data by another's indices")
    if dim % table.dim() != by.dim and table.size(by.dim) != 1:  # the table has rows beside the samples'
        beside = table.narrow(by.dim, 0, by.rows)
        seen = by.order is not None or table.size(by.dim) > by.rows or (call.is_constant(table) and is_fixed(table))
        if seen and not rows_alike(beside, by.dim, by):
            return call.combined(WHY)
    return by


def _gathered_rows(call: Call, layout: Layout, by: Layout | None, index: Tensor) -> Layout | None:
    """Rows gathered along the samples' dimension: whole rows, of the sample whose index it is (labels of DeBERTa)."""
    if by is None and layout.order is not None:
        return call.combined("picks rows of an order that depends on other samples")
    owners = layout.owners(index.device)[index]
    rows = owners.movedim(layout.dim, 0).flatten(1) if index.dim() > 1 else owners.unsqueeze(1)
    own = None if by is None else spread(by.owners(index.device), by.dim, index.shape)
    if own is not None and not torch.equal(own, owners):
        return call.combined("gathers one sample's data by another's indices")
    if by is None and rows.numel() and not bool((rows == rows[:, :1]).all()):
        return call.combined("gathers along the batch")
    if by is not None:
        return by._replace(is_row_index=layout.is_row_index)
    moved = index.movedim(layout.dim, 0)
    return layout.taken(layout.dim, moved.flatten(1)[:, 0] if moved.dim() > 1 else moved)


_BASE = T._base.__get__  # type: ignore[union-attr]


@layout_rule(T.resize_, T.resize_as_, T.set_, _BASE, by_value=True, reaches=True)
def _other_memory(call: Call) -> Tags:
    return call.all_combined("takes memory of other samples")
