"""Layout rules of functions that write or add rows by index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import tensor_notes
from .batch_slices import BY_POSITION
from .calls import Call, Tags, layout_rule
from .host_values import is_order, numbered, same_numbers, written_by
from .index_kinds import Entry, expanded, index_tuple, permutes
from .inputs import layouts_marked
from .layout import NOBODY, Layout, spread
from .operator_table import spellings
from .propagate import ask
from .totals import total_of

T = torch.Tensor
_MIXES = "writes rows of one sample into another's"
_GUESSED = f"{_MIXES}, or rows whose samples are not known (assign an input's rows to samples by fastdp.mark_rows)"


@layout_rule(T.__setitem__, by_value=True, picks=True, joins=True)
def _setitem(call: Call) -> Tags:
    target, index, value = call.args
    layout, source = call.layout(target), call.layout(value)
    items, entries = expanded(call, index_tuple(call, index, target.device))
    one = len(items) == 1 and 0 in entries and target.dim() > 0
    all_anew = one and is_order(entries[0].tensor, target.size(0))
    if all_anew and not call.kwargs:
        _note_numbers(target, entries[0].tensor, value)
    found = next((entry.layout for entry in entries.values() if entry.layout is not None), None)
    if found is None and layout is not None and _by_place(layout, source, target, items):
        return [(target, call.combined(BY_POSITION))]
    if source is None and found is None and (layout is None or layout.order is None):
        return [(target, layout)]
    if any(one is not None and one.order is not None for one in (layout, source)):
        if not _ordered_rows_may_go(call, layout, source, items, entries):
            why = "writes by position to or from rows whose order depends on the data"
            return [(target, call.combined(why))]
    known = [one for one in (layout, source, *[entry.layout for entry in entries.values()]) if one is not None]
    mixed = next((one.mixed for one in known if one.mixed), "")
    if layout is not None and layout.alone >= 0:  # all of one sample, and something else
        mixed = mixed or call.mixed(_MIXES)
    if mixed:
        return [
            (target, Layout(call.batch, mixed=mixed, is_row_index=all(one.is_row_index for one in known if one.mixed)))
        ]
    # (of rows that are known to be all written anew, `_new_layout` says the same)
    if layout is not None and not all_anew and _written_by_itself(call, layout, source, items, entries):
        return [(target, layout)]
    return [(target, _new_layout(call, layout, source, items, entries))]


@layout_rule(*spellings("index_put", "index_put_"), by_value=True, picks=True, joins=True)
def _index_put(call: Call) -> Tags:
    """target.index_put(indices, value): as target[indices] = value, added up or not."""
    target, index, value = (call.argument(i, n) for i, n in enumerate(("input", "indices", "values")))
    kwargs = {"accumulate": bool(call.argument(3, "accumulate", False))}
    same = Call(T.__setitem__, (target, tuple(index), value), kwargs, call.batch, call.path)
    return [(call.out, layout) for _, layout in _setitem(same)]


def _note_numbers(target: Tensor, index: Tensor, value: Any) -> None:
    """Of target[index] = value, by an order of all rows: the target's own numbers, if they follow."""
    if target.dim() == 1 and target.dtype == torch.int64 and isinstance(value, Tensor) and value.shape == target.shape:
        if (numbers := written_by(index, value)) is not None:
            numbers.of(target)


def _by_place(layout: Layout, source: Layout | None, target: Tensor, items: tuple[Any, ...]) -> bool:
    """Whether constants, or a part of the batch, are written to some samples and not to others, by their place."""
    if layout.mixed or layout.alone >= 0 or layout.owner is not None or target.shape[layout.dim] != layout.rows:
        return False
    if source is not None and (source.piece is None or source.alone >= 0):
        return False  # a sample's own (in a loop over them), or all samples'
    owners = spread(layout.owners(target.device), layout.dim, target.shape)[items]
    times = torch.bincount(owners.flatten(), minlength=layout.batch)
    return bool((times != times[0]).any())


def _ordered_rows_may_go(
    call: Call, layout: Layout | None, source: Layout | None, items: tuple[Any, ...], entries: dict[int, Entry]
) -> bool:
    """Whether rows whose order the data made are all written, each alike, or by an index that is data too."""
    value = call.args[2]
    if any(entry.layout is not None for entry in entries.values()):
        return True
    if source is not None:  # to a constant: `_in_new_order` keeps the order
        return layout is None and len(items) == 1 and 0 in entries and permutes(entries[0].tensor, len(call.args[0]))
    assert layout is not None
    everywhere = all(item == slice(None) for item in items[: layout.dim + 1] if item is not Ellipsis)
    return everywhere and not entries and (not isinstance(value, Tensor) or value.numel() == 1)


def _new_layout(
    call: Call, layout: Layout | None, source: Layout | None, items: tuple[Any, ...], entries: dict[int, Entry]
) -> Layout | None:
    """A constant becomes data by what is written into it; rows that are all written anew change their samples."""
    target, value = call.args[0], call.args[2]
    entry = entries.get(0)
    if len(items) == 1 and entry is not None and (layout is None or not call.kwargs.get("accumulate")):
        new = _in_new_order(call, target, entry.tensor, entry.own, source, isinstance(value, Tensor))
        if new is not None:
            return new
    if layout is None:
        guesses = [
            Layout(call.batch, dim, 1, size // call.batch)
            for dim, size in enumerate(target.shape)
            if size and size % call.batch == 0
        ]
        fitting = [guess for guess in guesses if _written_by_itself(call, guess, source, items, entries)]
        by_number = [g for g in fitting if g.dim < len(items) and isinstance(items[g.dim], int)]  # out[b] = ...
        by_number = [g for g in by_number if g.inner == 1] or by_number  # out[b, i] = ...
        if not fitting and entry is not None and len(items) == 1 and (found := _by_rows(call, entry, source)):
            return found
        if len(fitting) == 1 or len(by_number) == 1:  # what is not written yet may count as anyone's
            return (by_number or fitting)[0]
        if source is None and not fitting:
            why = "marks which choices occur among the samples"  # may pick rows; must not become numbers
            return Layout(call.batch, mixed=call.mixed(why), is_row_index=True)
    return call.combined(_MIXES)


def _by_rows(call: Call, entry: Entry, source: Layout | None) -> Layout | None:
    """target[index] = rows of data, to a constant; accumulated or not."""
    index, own = entry.tensor, entry.own
    if source is None or source.dim != 0 or index.dim() != 1 or source.alone >= 0 or source.order is not None:
        return None
    rows = source.owners(index.device)
    if rows.shape != index.shape or (own is not None and not torch.equal(own, rows)):
        return None
    return of_constant(call, call.args[0], 0, index, rows, own is None, source)


def _in_new_order(
    call: Call, target: Tensor, index: Tensor, own: Tensor | None, source: Layout | None, by_position: bool
) -> Layout | None:
    """All rows of the target written, each once: they belong to those who wrote them.

    own: sample of each element of the index, None for constants; by_position: the rows written are a tensor's.
    """
    if not permutes(index, target.size(0)):
        return None
    owners = own
    if source is not None and source.alone >= 0:
        return None
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
    return found if found.owner is None else found._replace(order=torch.zeros_like(new))


def _written_by_itself(
    call: Call, layout: Layout, source: Layout | None, items: tuple[Any, ...], entries: dict[int, Entry]
) -> bool:
    """Whether target[index] = value writes every sample's rows into its own rows."""
    target, value = call.args[0], call.args[2]
    written = spread(layout.owners(target.device), layout.dim, target.shape)[items]
    if source is not None and source.alone >= 0:
        if not bool((written == source.alone).all()):
            return False
    elif source is not None:
        rows = source.owners(target.device)
        if not _agrees(written, spread(rows, source.dim, torch.Size(_shape(source, value)))):
            return False
    own = [entry.own for entry in entries.values() if entry.own is not None]
    return all(_rows_agree(written, rows, entries, items) for rows in own)


def _shape(source: Layout, value: Tensor) -> list[int]:
    return [source.rows if dim == source.dim else 1 for dim in range(value.dim())]


def _agrees(written: Tensor, rows: Tensor) -> bool:
    try:
        return bool((written == rows).all())
    except RuntimeError:
        return False


def _rows_agree(written: Tensor, own: Tensor, entries: dict[int, Entry], items: tuple[Any, ...]) -> bool:
    """Whether the elements that an index of data names belong to the sample that names them."""
    first = min(entries)
    before = sum(item is None or isinstance(item, slice) for item in items[:first])
    view = own.view(*own.shape, *[1] * (written.dim() - own.dim() - before)) if written.dim() >= own.dim() else own
    return _agrees(written, view)


def _added_up(call: Call, others: tuple[Layout | None, ...], rows: Layout | None, dim: int) -> Tags | None:
    """Of what adds all samples' rows to a constant's only place; None of any other call."""
    adds = "add" in call.name or (call.name.startswith("scatter_reduce") and call.argument(4, "reduce") == "sum")
    if not adds or others != (None, None) or rows is None or rows.dim != dim or call.out.size(dim) != 1:
        return None
    return [(call.out, total_of(call, call.out, rows, "sum"))]


@layout_rule(*spellings("index_fill", "index_fill_"), by_value=True, picks=True, joins=True)
@layout_rule(*spellings("index_reduce", "index_reduce_"), by_value=True)
@layout_rule(*spellings("index_add", "index_add_", "index_copy", "index_copy_"), by_value=True, picks=True, joins=True)
def _index_add(call: Call) -> Tags:
    target, dim, index, source = (call.argument(i, n) for i, n in enumerate(("input", "dim", "index", "source")))
    layout, rows, by = call.layout(target), call.layout(source), call.layout(index)
    dim, index = dim % target.dim(), index.reshape(-1)
    if any(one is not None and one.alone >= 0 for one in (layout, rows, by)):
        rows, by = (
            one if one is None else one.along(d, t.size(d) if t.dim() else 1, t.device)
            for one, d, t in ((rows, dim, source), (by, 0, index))
        )
        if layout is not None and layout.alone >= 0:
            return call.all_combined("adds rows of one sample to another's")
    known = [one for one in (layout, rows) if one is not None]
    mixed = next((one.mixed for one in known if one.mixed), "")
    if mixed:
        return [(call.out, Layout(call.batch, mixed=mixed))]
    if by is None and any(one.order is not None for one in known):
        return call.all_combined("meets rows by position whose order depends on the data")
    if rows is None and by is None:
        return [(call.out, layout)]
    if rows is not None and dim != rows.dim and by is None:
        if layout is None or (layout.dim == rows.dim and layout.same_rows(rows, target.device)):
            return [(call.out, rows)]
    if (found := _added_up(call, (layout, by), rows, dim)) is not None:
        return found
    if layout is None:
        own = (rows or by).owners(target.device)  # type: ignore[union-attr]
        if (rows is None or rows.dim == dim) and own.shape == index.shape:
            layout = of_constant(call, target, dim, index, own, by is None, rows)
    if layout is not None and layout.dim == dim and (rows is None or rows.dim == dim):
        own = (rows or by or layout).owners(target.device)
        written = layout.owners(target.device)[index]
        if torch.equal(written, own) and (by is None or by.mixed or torch.equal(written, by.owners(target.device))):
            return [(call.out, layout)]
    return call.all_combined("adds rows of one sample to another's")


@layout_rule(
    *spellings("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    by_value=True,
    picks=True,
)
def _scatter(call: Call) -> Tags:
    """Elements to target[index] along a dimension: to rows of their own sample, where it is the samples'."""
    target, dim, index = (call.argument(i, n) for i, n in enumerate(("input", "dim", "index")))
    source = call.argument(3, "src")
    layout, by = call.layout(target), call.layout(index)
    rows = call.layout(source)
    known = [one for one in (layout, by, rows) if one is not None]
    dim = dim % target.dim()
    if any(one.mixed for one in known) or all(one.dim != dim for one in known):
        return ask(call)
    if by is None and any(one.order is not None for one in known):
        return call.all_combined("meets rows by position whose order depends on the data")
    if (found := _added_up(call, (layout, by), rows, dim)) is not None:
        return found
    replaces = call.name.rstrip("_") == "scatter" and not call.argument(4, "reduce")
    if target.dim() == 1 and (layout is None or replaces):
        own = by.owners(index.device) if by is not None else None
        new = _in_new_order(call, target, index, own, rows, isinstance(source, Tensor))
        if new is not None:
            return [(call.out, new)]
    if layout is None and all(one.dim == dim for one in known):
        own = spread(known[-1].owners(target.device)[: index.size(dim)], dim, index.shape)
        layout = of_constant(call, target, dim, index, own, by is None, rows)
    if layout is None or any(one.dim != dim for one in (layout, *known)):
        return call.all_combined(_MIXES)
    written = layout.owners(target.device)[index]
    for one in (by, rows):
        if one is not None:
            own = spread(one.owners(target.device)[: index.size(dim)], dim, index.shape)
            if own.shape != written.shape or not torch.equal(own, written):
                return call.all_combined(_MIXES)
    return [(call.out, layout)]


@layout_rule(*spellings("masked_scatter", "masked_scatter_"), by_value=True, joins=True)
def _masked_scatter(call: Call) -> Tags:
    """The source's elements, one after another, to where the mask holds: each to a place of its own sample."""
    target, mask, source = (call.argument(i, n) for i, n in enumerate(("input", "mask", "source")))
    layout, by, rows = call.layout(target), call.layout(mask), call.layout(source)
    known = [one for one in (layout, by, rows) if one is not None]
    if any(one is not None and one.alone >= 0 for one in (layout, by)):
        return call.all_combined(_GUESSED)
    mixed = next((one.mixed for one in known if one.mixed), "")
    if rows is None or mixed:
        tags = ask(call)
        taken = not mixed and any(found is not None and found.mixed for _, found in tags)
        return call.all_combined(_GUESSED) if taken else tags
    own = layout or by or shape_of(target, call.batch)
    if own is not None and source.dim():
        rows = rows.along(0, source.size(0), source.device)
        dim = own.dim + call.out.dim() - (mask if layout is None and by is not None else target).dim()
        owners = spread(own.owners(target.device), dim, call.out.shape)
        places = owners[mask.expand(call.out.shape)]
        sources = spread(rows.owners(target.device), rows.dim, source.shape).flatten()[: places.numel()]
        same = by is None or by.same_rows(own, target.device)
        if same and torch.equal(places, sources):
            return [(call.out, own._replace(dim=dim, is_row_index=False))]
    return call.all_combined(_GUESSED)


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
