"""Layout rules of functions that write or add rows by index.

Every one of them is looked at as `target[index] = values`: of which sample's rows the written elements are is seen on
the samples of the target's rows, indexed in the same way, and must be what the values and the index say. A constant
becomes data by what is written into it, if its rows then lie in a way that is known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch_positions import WHY, by_place, is_fixed, made_in_sight
from .batch_slices import BY_POSITION, assigned_part, note_write_of_one, only_writer
from .calls import Call, Tags, layout_rule
from .host_values import is_order, numbered, same_numbers, written_by
from .index_kinds import (
    CUT_BY_DATA,
    OWN_PLACES,
    Entry,
    by_own_place,
    cut_by_one,
    cut_by_samples,
    expanded,
    index_tuple,
    may_choose,
    permutes,
    source_dims,
)
from .layout import Layout, layout_of_rows, owner_of, spread
from .operator_table import spellings
from .own_numbers import DRAWN, OWN_NUMBERS, cuts_a_row
from .tensor_notes import filled
from .totals import total_of
from .written_constants import Write, of_constant

T = torch.Tensor
MIXES = "writes rows of one sample into another's"
ORDERED = "writes by position to or from rows whose order depends on the data"


# --------------------------------------------------------------------------- target[index] = values


@layout_rule(T.__setitem__, by_value=True, picks=True, joins=True)
def _setitem(call: Call) -> Tags:
    target, index, value = call.args
    index = index_tuple(call, index, target.device)
    if cut_by_samples(call, index):
        return [(target, _written_by_one(call, target, *cut_by_one(call, index), value))]
    return [(target, _assigned(call, target, index, value))]


def _written_by_one(call: Call, target: Tensor, sample: int, index: tuple[Any, ...], value: Any) -> Layout:
    """The layout of the target once target[index] = value, where the numbers of one sample say how far."""
    layout, source = call.layout(target), call.layout(value)
    if sample < 0 or any(one is not None and one.mixed for one in (layout, source)):
        return call.combined(CUT_BY_DATA)
    if source is not None and owner_of(source) != sample:
        return call.combined(MIXES)
    write = Write(target, lambda t: t[index], [torch.tensor(sample, device=target.device)], source, True)
    if layout is not None:
        return layout if layout.alone == sample or (layout.alone < 0 and write.fits(layout)) else call.combined(MIXES)
    numbers = [dim for dim, item in source_dims(index, target.dim()).items() if isinstance(item, int)]
    return of_constant(call, write, None, numbers) or call.combined(CUT_BY_DATA)


@layout_rule(*spellings("index_put", "index_put_"), by_value=True, picks=True, joins=True)
def _index_put(call: Call) -> Tags:
    target, index, value = (call.argument(i, n) for i, n in enumerate(("input", "indices", "values")))
    index = index_tuple(call, tuple(index), target.device)
    return [(call.out, _assigned(call, target, index, value, bool(call.argument(3, "accumulate", False))))]


@layout_rule(
    *spellings("index_fill", "index_fill_", "index_copy", "index_copy_"), by_value=True, picks=True, joins=True
)
@layout_rule(*spellings("index_add", "index_add_"), by_value=True, picks=True, joins=True)
@layout_rule(*spellings("index_reduce", "index_reduce_"), by_value=True)
def _index_add(call: Call) -> Tags:
    target, dim, index = (call.argument(i, n) for i, n in enumerate(("input", "dim", "index")))
    value = call.argument(3, "value" if "fill" in call.name else "source")
    if not index.dim():
        index = index.reshape(1)
        by = call.layout(call.argument(2, "index"))
        call.knows(index, by and by.along(0, 1, index.device))
    adds = "add" in call.name or "reduce" in call.name
    if "add" in call.name and (total := added_to_one_place(call, target, dim % target.dim(), index, value)):
        return total
    return [(call.out, _assigned(call, target, (*[slice(None)] * (dim % target.dim()), index), value, adds))]


def added_to_one_place(call: Call, target: Tensor, dim: int, index: Tensor, source: Any) -> Tags | None:
    """A total, if all samples' rows are added to a constant's only place along a dimension; None of any other call."""
    rows = call.layout(source)
    if rows is None or rows.mixed or rows.alone >= 0 or rows.order is not None or rows.dim != dim:
        return None
    if target.size(dim) != 1 or call.layout(target) is not None or call.layout(index) is not None:
        return None
    return [(call.out, total_of(call, call.out, rows, "sum"))]


def _assigned(call: Call, target: Tensor, index: tuple[Any, ...], value: Any, adds: bool = False) -> Layout | None:
    """The layout of the target once target[index] = value (added up, if `adds`)."""
    items, entries = expanded(call, index)
    found = _laid(call, target, value, adds, items, entries)
    if found is not None:
        named = source_dims(items, target.dim())
        rows = named.pop(found.dim, None)
        # constants of unseen origin may say which rows as samples' own data do: edges of graphs
        unseen = isinstance(rows, Tensor) and bool(rows.dim()) and not made_in_sight(rows)
        if not isinstance(rows, int) and not (unseen and call.layout(target) is None):  # (of one row by its number:
            found = with_part(call, target, value, list(named.values()), found)  # `batch_slices.unequally_written`)
    if found is None or found.mixed or found.alone >= 0 or target.shape[found.dim : found.dim + 1] != (found.rows,):
        return found
    along = source_dims(items, target.dim()).get(found.dim)
    fixed = isinstance(value, Tensor) and call.is_constant(value) and is_fixed(value) and found.rows in value.shape
    constant = fixed and all(entry.layout is None for entry in entries.values())  # else data says which goes where
    if not constant and not may_choose(along, entries, found):
        return found
    rows = spread(numbered(found.rows, target.device), found.dim, target.shape)[items]
    lie = layout_of_rows(rows, found)
    if lie is not None and constant and by_place(value, value.dim() - rows.dim() + lie.dim, lie):
        return call.combined(WHY)
    return call.combined(OWN_PLACES) if lie and by_own_place(along, items, entries, found, rows, lie) else found


def with_part(call: Call, target: Tensor, value: Any, others: Any, found: Layout | None) -> Layout:
    """The layout of the target that was found (None: none), or of a part of the samples, if the value is one.

    others: what an index says of other dimensions than the samples'.
    """
    source, before = call.layout(value), call.layout(target)
    if filled(target, len(call.written())):  # zeros_like(h)
        before = None
    if found is None:
        return call.combined(MIXES)
    if found.mixed or source is None or source.piece is None:
        return found
    if before is not None and before.piece is None and source.alone >= 0:  # h[i : i + 1] = ..., in a loop
        note_write_of_one(target, source.alone, source.piece)
        return found
    if before is not None and before.piece is None and target.requires_grad:
        return call.combined(BY_POSITION)
    found, problem = assigned_part(before, source.piece, others, found)
    return call.combined(problem) if problem else found


def _laid(
    call: Call, target: Tensor, value: Any, adds: bool, items: tuple[Any, ...], entries: dict[int, Entry]
) -> Layout | None:
    """The same but for which of its numbers each sample's are."""
    layout, source = call.layout(target), call.layout(value)
    by = [entry for entry in entries.values() if entry.layout is not None]
    first = entries.get(0) if len(items) == 1 and target.dim() else None
    all_anew = first is not None and not adds and is_order(first.tensor, target.size(0))
    if all_anew:
        _note_numbers(target, items[0], value)
    if not by and layout is not None and _by_place(call, layout, source, target, items):
        return call.combined(BY_POSITION)
    if source is None and not by and (layout is None or layout.order is None):
        return layout
    if not by and any(one is not None and one.order is not None for one in (layout, source)):
        if not _ordered_rows_may_go(layout, source, target, items, value):
            return call.combined(ORDERED)
    known = [one for one in (layout, source, *[entry.layout for entry in by]) if one is not None]
    if adds and source is not None:  # places of a packed batch, numbered over all samples: the rows' owners decide
        known = [one for one in (layout, source) if one is not None]
        by = [entry for entry in by if entry.layout is not None and not entry.layout.mixed]
    mixed = [one for one in known if one.mixed]
    if mixed or (layout is not None and layout.alone >= 0):  # all of one sample, and something else
        why = mixed[0].mixed if mixed else call.mixed(MIXES)
        return Layout(call.batch, mixed=why, is_row_index=all(one.is_row_index for one in mixed))
    by_data = any(entry.layout is not None for entry in entries.values())
    write = Write(target, lambda t: t[items], [], source, by_data)
    if source is not None:
        rows = source.owners(target.device) if source.alone < 0 else torch.tensor([source.alone], device=target.device)
        write.owners.append(
            spread(rows, source.dim, [rows.numel() if d == source.dim else 1 for d in range(value.dim())])
        )
    write.owners.extend(_aligned(entry.own, entries, items, target) for entry in by if entry.own is not None)
    if layout is not None and not all_anew and write.fits(layout):
        return layout
    if first is not None and (layout is None or not adds):
        new = in_new_order(call, target, first.tensor, first.own, source, isinstance(value, Tensor))
        if new is not None:
            return new
    if layout is not None:
        own = source is not None and source.alone >= 0 and only_writer(target) == source.alone
        return source if own else call.combined(MIXES)  # a table of as many rows as there are samples, of one of them
    numbers = [
        dim for dim, item in source_dims(items, target.dim()).items() if _names_each(call, item, target.size(dim))
    ]
    return of_constant(call, write, None, numbers) or _occurring(call, source, adds)


def _names_each(call: Call, item: Any, rows: int) -> bool:
    """Whether an index names rows one by one: out[b] = ..., out[b, i] = ..., out[torch.arange(B), y] = ..."""
    return isinstance(item, int) or (isinstance(item, Tensor) and call.is_constant(item) and permutes(item, rows))


def _occurring(call: Call, source: Layout | None, adds: bool) -> Layout:
    """Of a constant in which data marks which choices occur: that may pick rows, and must not become numbers."""
    if source is not None or adds:
        return call.combined(MIXES)
    return call.combined("marks which choices occur among the samples")._replace(is_row_index=True)


def _aligned(own: Tensor, entries: dict[int, Entry], items: tuple[Any, ...], target: Tensor) -> Tensor:
    """The sample of each element of an index, as the elements that it names lie."""
    before = sum(item is None or isinstance(item, slice) for item in items[: min(entries)])
    behind = target.detach()[items].dim() - own.dim() - before  # (detached: a checkpoint counts what is saved)
    return own.view((*own.shape, *[1] * max(behind, 0)))


def _note_numbers(target: Tensor, index: Tensor, value: Any) -> None:
    """Of target[index] = value, by an order of all rows: the target's own numbers, if they follow."""
    if target.dim() == 1 and target.dtype == torch.int64 and isinstance(value, Tensor) and value.shape == target.shape:
        if (numbers := written_by(index, value)) is not None:
            numbers.of(target)


def _by_place(call: Call, layout: Layout, source: Layout | None, target: Tensor, items: tuple[Any, ...]) -> bool:
    """Whether constants are written to some samples and not to others, by their place."""
    if layout.mixed or layout.alone >= 0 or layout.owner is not None or target.shape[layout.dim] != layout.rows:
        return False
    if source is not None:
        return False  # a sample's own (in a loop over them), or all samples', or part by part (`with_part`)
    owners = spread(layout.owners(target.device), layout.dim, target.shape)[items]
    return unequal(owners, layout.batch) and not _by_own_numbers(call, owners)


def _by_own_numbers(call: Call, owners: Tensor) -> bool:
    """Whether these rows are a single sample's, as many as a number says that Python has of it, or has drawn for it:
    h[i, :n] = 0."""
    sample = int(owners.flatten()[0])
    if call.name != "__setitem__" or (owners != sample).any():
        return False
    target, index, value = call.args
    if OWN_NUMBERS.row_of(index, value, target.shape) == sample:
        DRAWN.note_own(target, sample)
        return True
    if cuts_a_row(index):
        DRAWN.note(target, index, value, data=True)  # judged once all is written (`DrawnPlaces.judge`)
    return cuts_a_row(index)


def unequal(owners: Tensor, batch: int) -> bool:
    """Whether some samples are there more often than others."""
    times = torch.bincount(owners.flatten(), minlength=batch)
    return bool((times != times[0]).any())


def _ordered_rows_may_go(
    layout: Layout | None, source: Layout | None, target: Tensor, items: tuple[Any, ...], value: Any
) -> bool:
    """Whether constants say of rows whose order the data made only that all are written, each alike or by itself."""
    if layout is None:  # to a constant: `in_new_order` keeps the order
        return len(items) == 1 and isinstance(items[0], Tensor) and permutes(items[0], len(target))
    if any(item is None or isinstance(item, Tensor | bool) for item in items):
        return False
    if ... in items:
        place = items.index(...)
        items = (*items[:place], *[slice(None)] * (target.dim() - len(items) + 1), *items[place + 1 :])
    if not all(item == slice(None) for item in items[: layout.dim + 1]):
        return False
    if source is None:
        return not isinstance(value, Tensor) or value.numel() == 1
    return source.dim == layout.dim == 0 and source == layout and value.shape == target[items].shape


def in_new_order(
    call: Call, target: Tensor, index: Tensor, own: Tensor | None, source: Layout | None, by_position: bool
) -> Layout | None:
    """All rows of the target written, each once: they belong to those who wrote them.

    own: sample of each element of the index, None for constants; by_position: the rows written are a tensor's.
    """
    if not permutes(index, target.size(0)) or (source is not None and source.alone >= 0):
        return None
    owners = own
    if source is not None:
        rows = source.owners(target.device)
        owners = rows if source.dim == 0 and (own is None or same_numbers(rows, own)) else None
    if owners is None:
        return None
    new = torch.empty_like(owners)
    new[index] = owners
    if (numbers := written_by(index, owners)) is not None:
        numbers.of(new)
    places = source.is_row_index if source is not None else by_position and not target.is_floating_point()
    found = Layout(call.batch, 0, owner=new, is_row_index=places).taken(0, numbered(len(new), new.device))
    fixed = found.owner is None or (
        own is None and source is not None and source.order is None and torch.equal(new, owners)
    )
    return found if fixed else found._replace(order=torch.zeros_like(new))
