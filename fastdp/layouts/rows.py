"""Layout rules of functions that take or write rows by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calls import Call, tensors_in
from .layout import Layout
from .propagate import ask, combined, rule, spellings
from .trial import Tags

T = torch.Tensor


@rule(T.__getitem__)
def _getitem(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:  # a constant table, indexed by data: the result lies as the index does
        return _take_from_constant(call)
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    index = tuple(torch.tensor(item, device=source.device) if isinstance(item, list) else item for item in index)
    if layout.mixed:
        return [(call.out, layout._replace(dim=0))]
    used, basic = _source_dims(index, source.dim())
    if layout.dim not in used:
        return ask(call) if basic else _index_elsewhere(call, layout, used)
    entry = used[layout.dim]
    if isinstance(entry, slice) and entry == slice(None):
        return ask(call) if basic else _index_elsewhere(call, layout, used)
    if isinstance(entry, slice) and basic:
        owner = layout.owners(source.device)[entry]
        return [(call.out, by_owner(call, _kept_position(index, source.dim(), layout.dim), owner, layout))]
    if isinstance(entry, int):
        return [(call.out, combined(call, call.out, "picks one sample out of the batch"))]
    leading = source.dim() if any(item is Ellipsis for item in index) else 1 + max(used)
    return _index_owner_map(call, layout, index, leading)


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


def _index_elsewhere(call: Call, layout: Layout, used: dict[int, Any]) -> Tags:
    """Tensor indices, but not along the batch: the same positions for every sample."""
    index = [item for item in used.values() if isinstance(item, Tensor | list)]
    if any(call.layout(item) is not None for item in index if isinstance(item, Tensor)):
        return [(call.out, combined(call, call.out, "indexes all samples by one sample's data"))]
    if any(isinstance(item, Tensor) and item.dtype == torch.bool for item in index):
        first = min(dim for dim, item in used.items() if isinstance(item, Tensor | list))
        if layout.dim < first:
            return [(call.out, layout)]
    return ask(call)


def _index_owner_map(call: Call, layout: Layout, index: tuple[Any, ...], leading: int) -> Tags:
    """Index a map of sample numbers in the same way, and read off who owns the result's rows."""
    source = call.args[0]
    owners = layout.owners(source.device)
    view = [1] * leading
    view[layout.dim] = owners.numel()
    owner_map = owners.view(view).expand(source.shape[:leading])
    result = owner_map[index]
    return [(call.out, _one_dimension(call, result, layout))]


def _one_dimension(call: Call, owner_map: Tensor, layout: Layout) -> Layout | None:
    """The layout whose owners depend on one dimension of the map only."""
    for dim in range(owner_map.dim()):
        rows = owner_map.movedim(dim, 0).reshape(owner_map.size(dim), -1)
        if rows.numel() == 0 or bool((rows == rows[:, :1]).all()):
            return by_owner(call, dim, rows[:, 0] if rows.numel() else rows.new_zeros(rows.size(0)), layout)
    return combined(call, call.out, "gathers rows of different samples")


def by_owner(call: Call, dim: int, owner: Tensor, layout: Layout) -> Layout:
    each = max(owner.numel() // call.batch, 1)
    if owner.numel() == call.batch * each:
        if torch.equal(owner, torch.arange(call.batch, device=owner.device).repeat_interleave(each)):
            return Layout(call.batch, dim, 1, each, mixed=layout.mixed)
    return Layout(call.batch, dim, owner=owner, mixed=layout.mixed)


def _take_from_constant(call: Call) -> Tags:
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if len(index) == 1 and isinstance(index[0], Tensor) and index[0].dtype != torch.bool:
        return [(call.out, call.layout(index[0]))]
    return ask(call)


@rule(torch.as_strided, T.as_strided)
def _as_strided(call: Call) -> Tags:
    """Windows over memory: the same strides over a map of sample numbers."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed:
        return [(call.out, layout)]
    view = [1] * source.dim()
    view[layout.dim] = layout.rows
    offset = call.out.storage_offset() - source.storage_offset()
    span = max(_extent(source), offset + _extent(call.out))
    memory = torch.full((span,), -1, device=source.device)
    memory.as_strided(source.shape, source.stride()).copy_(layout.owners(source.device).view(view))
    if offset < 0:
        return [(call.out, combined(call, call.out, "takes windows of memory outside of its input"))]
    owner_map = memory.as_strided(call.out.shape, call.out.stride(), offset)
    return [(call.out, _one_dimension(call, owner_map, layout))]


def _extent(tensor: Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@rule(torch.index_select, T.index_select)
def _index_select(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim, index = call.argument(1, "dim"), call.argument(2, "index")
    if layout is None:
        return ask(call)
    if dim % source.dim() != layout.dim:
        if call.layout(index) is not None:
            return [(call.out, combined(call, call.out, "indexes all samples by one sample's data"))]
        return [(call.out, layout)]
    return [(call.out, by_owner(call, layout.dim, layout.owners(source.device)[index], layout))]


def _same_rows(a: Layout, b: Layout, device: torch.device) -> bool:
    """Whether rows lie along one dimension in one order."""
    if a.dim != b.dim or a.rows != b.rows:
        return False
    return a.owner is b.owner is None and a[2:4] == b[2:4] or torch.equal(a.owners(device), b.owners(device))


@rule(torch.gather, T.gather, torch.take_along_dim, T.take_along_dim)
def _gather(call: Call) -> Tags:
    along = call.name == "take_along_dim"
    source, dim = call.args[0], call.argument(2 if along else 1, "dim")
    index = call.argument(1, "indices") if along else call.argument(2, "index")
    layout = call.layout(source) or call.layout(index)
    both = [found for found in (call.layout(source), call.layout(index)) if found is not None]
    if any(found.mixed for found in both) or (len(both) == 2 and not _same_rows(both[0], both[1], call.out.device)):
        return [(call.out, combined(call, call.out, "gathers one sample's data by another's indices"))]
    if dim is None or layout is None or dim % source.dim() == layout.dim:
        return [(call.out, combined(call, call.out, "gathers along the batch"))]
    return [(call.out, layout)]


@rule(*spellings("masked_select", "nonzero", "unique", "argwhere", "bincount"))
def _rows_by_value(call: Call) -> Tags:
    return [(tensor, combined(call, tensor, "keeps rows by value")) for tensor in tensors_in(call.out)]


@rule(T.__setitem__)
def _setitem(call: Call) -> Tags:
    target, index, value = call.args
    layout, source = call.layout(target), call.layout(value)
    if source is None:
        return [(target, layout)]
    if source.mixed or (layout is not None and layout.mixed):
        return [(target, Layout(call.batch, mixed=source.mixed or layout.mixed))]  # type: ignore[union-attr]
    if layout is None or not _written_by_itself(call, layout, source, index):
        return _new_target(call, target, layout, source, index)
    return [(target, layout._replace(mixed=layout.mixed or source.mixed))]


@rule(*spellings("index_put", "index_put_"))
def _index_put(call: Call) -> Tags:
    """target.index_put(indices, value): as target[indices] = value."""
    target, index, value = (call.argument(i, n) for i, n in enumerate(("input", "indices", "values")))
    if call.argument(3, "accumulate", False):
        return ask(call)
    same = Call(T.__setitem__, (target, tuple(index), value), {}, None, call.batch, call.path)
    return [(call.out, layout) for _, layout in _setitem(same)]


def _new_target(call: Call, target: Tensor, layout: Layout | None, source: Layout, index: Any) -> Tags:
    """A constant becomes data by what is written into it: along the only dimension that fits."""
    if layout is None:
        guesses = [
            Layout(call.batch, dim, 1, size // call.batch)
            for dim, size in enumerate(target.shape)
            if size and size % call.batch == 0
        ]
        fitting = [guess for guess in guesses if _written_by_itself(call, guess, source, index)]
        if len(fitting) == 1:
            return [(target, fitting[0])]
    return [(target, Layout(call.batch, mixed=call.mixed("writes rows of one sample into another's")))]


def _written_by_itself(call: Call, layout: Layout, source: Layout, index: Any) -> bool:
    """Whether target[index] = value writes every sample's rows into its own rows."""
    target, value = call.args[0], call.args[2]
    view = [1] * target.dim()
    view[layout.dim] = layout.rows
    written = layout.owners(target.device).view(view).expand(target.shape)[index]
    view = [1] * value.dim()
    view[source.dim] = source.rows
    return bool((written == source.owners(target.device).view(view)).all())


@rule(*spellings("index_add", "index_add_", "index_copy", "index_copy_"))
def _index_add(call: Call) -> Tags:
    target, dim, index, source = (call.argument(i, n) for i, n in enumerate(("input", "dim", "index", "source")))
    layout, rows = call.layout(target), call.layout(source)
    dim = dim % target.dim()
    if rows is None:
        return [(call.out, layout)]
    if dim != rows.dim and (layout is None or layout == rows) and call.layout(index) is None and not rows.mixed:
        return [(call.out, rows)]
    if layout is None and target.size(dim) % call.batch == 0:
        layout = Layout(call.batch, dim, 1, target.size(dim) // call.batch)
    if layout is not None and layout.dim == dim == rows.dim:
        if torch.equal(layout.owners(target.device)[index], rows.owners(target.device)):
            return [(call.out, layout._replace(mixed=layout.mixed or rows.mixed))]
    return [(call.out, combined(call, call.out, "adds rows of one sample to another's"))]
