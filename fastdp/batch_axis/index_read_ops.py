"""Layout rules of functions that read rows by index.

What such a function does to the rows of the samples is seen on their numbers: the index is applied to a tensor that
holds the number of each row (spread over the other dimensions without memory), and the samples of the rows that come
out are read off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch_positions import WHY, by_place, is_counted, is_fixed, made_in_sight, rows_alike
from .batch_slices import cut
from .calls import Call, Tags, layout_rule
from .host_values import at, numbered
from .index_kinds import (
    CUT_BY_DATA,
    OWN_PLACES,
    Entry,
    brought_back,
    by_own_place,
    cut_by_one,
    cut_by_samples,
    expanded,
    found_in,
    index_tuple,
    looked_at,
    order_of,
    position_of,
    problem_of,
    source_dims,
)
from .layout import Layout, layout_of_rows, spread
from .operator_table import BASE
from .own_places import gathers_alike, same_of_each, seen_through
from .propagate import ask
from .reduction_ops import Spread, gathered
from .view_ops import reshaped

T = torch.Tensor
_SEVERAL = "gathers rows of different samples"
_ORDER_ACROSS = "picks rows in an order that depends on other samples, across several dimensions"
_OTHERS = "gathers one sample's data by another's indices"


@layout_rule(T.__getitem__, picks=True, joins=True)
def getitem(call: Call) -> Tags:
    """Rows, or parts of every row, by an index."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:  # a constant table, indexed by data: the result lies as the index does
        return _take_from_constant(call)
    index = index_tuple(call, call.args[1], source.device)
    if cut_by_samples(call, index):
        sample, index = cut_by_one(call, index)
        found = call.combined(CUT_BY_DATA) if sample < 0 or layout.mixed else picked(call, layout, index)
        if found.alone != sample:
            return call.all_combined(CUT_BY_DATA)
        piece = found.piece and found.piece._replace(numbers=())
        return [(call.out, found._replace(size_from_data=True, is_row_index=layout.is_row_index, piece=piece))]
    if layout.mixed and (total := gathered(call, "last", lambda at: _is_last(at, index, source))) is not None:
        return total
    found = layout._replace(dim=0) if layout.mixed else picked(call, layout, index)
    return [(call.out, found._replace(is_row_index=layout.is_row_index))]


def _is_last(at: Spread, index: tuple[Any, ...], source: Tensor) -> bool:
    """Whether an index takes the last row of the samples', of which each holds the sum of those before."""
    row = source_dims(index, source.dim()).get(at.dim)
    return isinstance(row, int) and row % source.size(at.dim) == source.size(at.dim) - 1


def picked(call: Call, layout: Layout, index: tuple[Any, ...]) -> Layout:
    """The layout of source[index]: the same index of the rows' numbers, whose samples are read off."""
    source = call.args[0]
    if layout.alone >= 0:
        return call.combined("picks rows of one sample by another's data")
    items, entries = expanded(call, index)
    used = source_dims(items, source.dim())
    along = used.get(layout.dim)
    entry = next((entry for entry in entries.values() if entry.tensor is along), None)
    if isinstance(along, Tensor) and along is items[0] and len(entries) == 1 and _counts_rows(call, layout, along):
        return layout.taken(0, along)._replace(inferred=2)
    problem = problem_of(entries, along, layout) or _problem_of_order(entry, along, layout)
    if problem:
        return call.combined(problem)
    order, seen, device = None, layout, source.device
    if entry is not None:
        order = order_of(entries, call.out.size(position_of(entries, items)) if call.out.dim() else 1)
        if order is None and any(one.order is not None for one in entries.values()) and call.out.dim():
            return call.combined(_ORDER_ACROSS)
        if order is None and entry.layout is None and layout.order is not None:
            order = torch.zeros_like(entry.tensor.flatten())
    if order is None:
        seen, items, device = looked_at(layout, items, device)
    numbers = spread(numbered(layout.rows, device), layout.dim, source.shape)
    if entries and source.numel() and not any(item is Ellipsis for item in items):  # what is not indexed is left out
        leading = 1 + max(layout.dim, *used)
        numbers = numbers[(slice(None),) * leading + (0,) * (source.dim() - leading)]
    one = len(items) == 1 and numbers.dim() == 1 and isinstance(items[0], Tensor)
    rows = at(numbers, items[0]) if one else numbers[items]
    anew = entry is not None and any(one.own is not None for one in entries.values())
    where = position_of(entries, items) if entry is not None else 0
    in_line = (
        entry is not None and rows.dim() > 1 and rows.numel() == rows.size(where)
    )  # h[None, i], of one row perhaps
    if (found := layout_of_rows(rows.flatten() if in_line else rows, seen, order, anew)) is None:
        return call.combined(_SEVERAL)
    found = brought_back(found, source.device)
    if in_line:
        found = found._replace(dim=where)
    if found.order is not None and entry is not None and found.alone < 0 and found.dim != where:
        return call.combined(_ORDER_ACROSS)
    if entry is None or entry.layout is None:  # by constants
        found = cut(
            source, layout, found, rows, [item for dim, item in used.items() if dim != layout.dim], entry is not None
        )
    if by_own_place(along, items, entries, layout, rows, found):
        return call.combined(OWN_PLACES)
    sized = [e for e in entries.values() if e.layout is not None and (e.layout.size_from_data or e.order is not None)]
    return found._replace(size_from_data=found.size_from_data or bool(sized)) if found.alone >= 0 else found


def _problem_of_order(entry: Entry | None, along: Any, layout: Layout) -> str:
    """Why constants must not pick these of rows whose order the data made, or ''."""
    if layout.order is None or along is None or (entry is not None and entry.layout is not None):
        return ""
    if isinstance(along, int):
        return "picks a row of an order that depends on other samples"
    rows = torch.arange(layout.rows, device=layout.order.device)
    steps = isinstance(along, slice) and along.step not in (None, 1)
    if steps or not layout.may_take(along if isinstance(along, Tensor) else rows[along]):
        return "cuts rows off an order that depends on other samples"
    return ""


def _counts_rows(call: Call, layout: Layout, index: Tensor) -> bool:
    """Whether an index counted over the whole batch repeats the samples' one row each, in order: 0 0 0 1 1 2 2 2 (the
    sizes of GLM-4V's images, for each patch).

    How often depends on all samples, so it stays a guess until these rows meet rows known to be the same samples'.
    """
    by = call.layout(index)
    if by is None or not by.mixed or by.is_row_index or not layout.plain or layout.dim != 0 or index.dim() != 1:
        return False
    steps = index.diff()
    whole = index.numel() > 0 and int(index[0]) == 0 and int(index[-1]) == layout.batch - 1
    return whole and bool(((steps == 0) | (steps == 1)).all())


@layout_rule(torch.select, T.select, torch.narrow, T.narrow, by_value=True)
def _narrowed(call: Call) -> Tags:
    """One row, or a range of rows, along a dimension."""
    source, layout = call.args[0], call.layout(call.args[0])
    dim, start = call.argument(1, "dim"), call.argument(2, "index" if call.name == "select" else "start")
    if layout is None or layout.mixed:
        return ask(call)
    dim, bounds = dim % source.dim(), [start]
    if call.name == "narrow":
        bounds.append(call.argument(3, "length"))
    if any(isinstance(bound, Tensor) for bound in bounds):
        return _narrowed_by_data(call, layout, dim, bounds)
    if call.name == "narrow":
        start = start + source.size(dim) if start < 0 else start
        start = slice(start, start + bounds[1])
    return [(call.out, picked(call, layout, (*[slice(None)] * dim, start)))]


def _narrowed_by_data(call: Call, layout: Layout, dim: int, bounds: list[Any]) -> Tags:
    """Every sample's rows cut at the same places; numbers over the whole batch may say where, as a size may be one."""
    if dim == layout.dim:
        return call.all_combined("cuts the batch where data says")
    known = [found for item in bounds if (found := call.layout(item)) is not None]
    start, end = int(bounds[0]), sum(map(int, bounds))
    middle = len(bounds) == 1 or (start != 0 and end != call.args[0].size(dim) and call.layout(bounds[0]) is not None)
    if any(not found.mixed for found in known) or (known and middle):
        return call.all_combined(CUT_BY_DATA)
    return ask(call) if len(bounds) == 1 else [(call.out, layout)]


def _take_from_constant(call: Call) -> Tags:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if len(index) != 1 or not isinstance(index[0], Tensor):
        return ask(_without_places(call, index))
    layout = call.layout(index[0])
    if index[0].dtype != torch.bool:  # numbers chosen from among the choices that occur are constants
        return [(call.out, None if layout is None or (layout.mixed and layout.is_row_index) else layout)]
    if layout is None or layout.mixed:
        return [(call.out, call.combined("picks rows by what other samples hold"))]
    coordinates, _, order = found_in(index[0], layout)
    places = not _same_for_all(call.args[0], layout.dim)
    return [(call.out, layout.taken(0, coordinates[layout.dim], order)._replace(is_row_index=places))]


def _without_places(call: Call, index: tuple[Any, ...]) -> Call:
    """The same call of a constant table, its first row in the place of each that constants name along a dimension whose
    rows are the same (`positions.expand(batch, -1)[torch.arange(batch)[:, None], picked]`)."""
    table, items = call.args[0], list(index)
    if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in items):
        return call
    places = [number for number, item in enumerate(items) if item is not None and item is not Ellipsis]
    for number, dim in zip(places, source_dims(index, table.dim()), strict=True):
        item = items[number]
        if isinstance(item, Tensor) and call.is_constant(item) and made_in_sight(item) and _same_for_all(table, dim):
            items[number] = torch.zeros_like(item)
    other = Call(call.func, (table, tuple(items)), {}, call.batch, call.path, call.out)
    for tensor, layout in call.inputs():
        other.knows(tensor, layout)
    return other


def _same_for_all(table: Tensor, dim: int) -> bool:
    """Whether a table has the same numbers for every row along a dimension: positions within, not of, a sample."""
    return dim < table.dim() and bool((table == table.narrow(dim, 0, min(1, table.size(dim)))).all())


@layout_rule(torch.as_strided, T.as_strided, by_value=True, reaches=True)
def _as_strided(call: Call) -> Tags:
    """Windows over memory (the chunks of Longformer): the same strides over a map of row numbers."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed:
        return [(call.out, layout)]
    seen = None
    if layout.order is None:
        seen = seen_through(call.out, source, layout.along(0, source.size(0) if source.dim() else 1, source.device))
    if seen is None:
        return call.all_combined("takes windows of memory outside of its input")
    found = layout if layout.alone >= 0 else layout_of_rows(seen[0], layout)
    if found is not None and not same_of_each(*seen, layout, found):
        return call.all_combined(OWN_PLACES)
    return [(call.out, call.combined(_SEVERAL) if found is None else cut(source, layout, found, seen[0]))]


@layout_rule(torch.index_select, T.index_select, by_value=True, picks=True, joins=True)
def _index_select(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if layout is None or layout.mixed:
        return ask(call)
    if not index.dim() and (by := call.layout(index)) is not None:
        index = index.reshape(1)  # of the only row that a choice has left
        call.knows(index, by.along(0, 1, index.device))
    return [(call.out, picked(call, layout, (*[slice(None)] * (dim % source.dim()), index)))]


@layout_rule(torch.gather, T.gather, torch.take_along_dim, T.take_along_dim, by_value=True, picks=True)
def _gather(call: Call) -> Tags:
    along = call.name == "take_along_dim"
    source, dim = call.args[0], call.argument(2 if along else 1, "dim")
    index = call.argument(1, "indices") if along else call.argument(2, "index")
    layout, by = call.layout(source), call.layout(index)
    if layout is None and by is not None and not by.mixed:
        return [(call.out, _looked_up(call, source, index, by, dim))]
    if layout is None or layout.mixed or (by is not None and by.mixed) or dim is None:
        return call.all_combined(_OTHERS)
    if dim % source.dim() == layout.dim:
        return [(call.out, _gathered_rows(call, layout, by, index))]
    if by is not None and not (layout.dim == by.dim and layout.same_rows(by, call.out.device)):
        return call.all_combined(_OTHERS)
    if by_place(index, layout.dim, layout):
        return call.all_combined(OWN_PLACES)
    return [(call.out, _first_rows(call, layout))]


def _first_rows(call: Call, layout: Layout) -> Layout:
    """The layout of a result that has as many rows as an index: fewer than the source, perhaps."""
    if call.out.size(layout.dim) == layout.rows:
        return layout
    rows = numbered(call.out.size(layout.dim), call.out.device)
    return cut(call.args[0], layout, layout.taken(layout.dim, rows), rows)


def _looked_up(call: Call, table: Tensor, index: Tensor, by: Layout, dim: int | None) -> Layout:
    """Numbers of a constant table, each chosen by its sample's own index: they lie as the index does."""
    if dim is None:  # both as one row
        return reshaped(by, index.shape, call.out.shape) or call.combined(_SEVERAL)
    if call.out.dim() != index.dim() or call.out.shape[by.dim : by.dim + 1] != (by.rows,):
        return call.combined(_OTHERS)
    if dim % table.dim() != by.dim and table.size(by.dim) != 1:  # the table has rows beside the samples'
        beside = table.narrow(by.dim, 0, by.rows)
        seen = by.order is not None or table.size(by.dim) > by.rows or (call.is_constant(table) and is_fixed(table))
        if seen and not rows_alike(beside, by.dim, by):
            return call.combined(WHY)
    return by


def _gathered_rows(call: Call, layout: Layout, by: Layout | None, index: Tensor) -> Layout:
    """Rows gathered along the samples' dimension: whole rows, of the sample whose index it is (labels of DeBERTa)."""
    owners = layout.owners(index.device)[index]
    if by is not None:
        own = torch.equal(spread(by.owners(index.device), by.dim, index.shape), owners)
        return by._replace(is_row_index=layout.is_row_index) if own else call.combined(_OTHERS)
    found = None if layout.order is not None else layout_of_rows(index, layout)
    if found is not None and is_counted(index) and not gathers_alike(index, layout, found):
        return call.combined(OWN_PLACES)
    return call.combined(_SEVERAL) if found is None else cut(call.args[0], layout, found, index, named=True)


@layout_rule(T.resize_, T.resize_as_, T.set_, BASE, by_value=True, reaches=True)
def _other_memory(call: Call) -> Tags:
    return call.all_combined("takes memory of other samples")
