"""Layout rules of functions that write element by element, to places that a tensor of the elements' shape names."""

from __future__ import annotations

import torch
from torch import Tensor

from .batch_positions import WHY, is_counted, is_fixed
from .batch_slices import BY_POSITION
from .calls import Call, Tags, layout_rule
from .index_kinds import OWN_PLACES
from .index_write_ops import MIXES, ORDERED, added_to_one_place, in_new_order, unequal, with_part
from .layout import layout_of_rows, spread
from .operator_table import spellings
from .own_places import alike, gathers_alike
from .propagate import ask
from .written_constants import Write, of_constant, shape_of

_GUESSED = f"{MIXES}, or rows whose samples are not known (assign an input's rows to samples by fastdp.mark_rows)"


@layout_rule(
    *spellings("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    by_value=True,
    picks=True,
)
def _scatter(call: Call) -> Tags:
    """Elements to target[index] along a dimension: to rows of their own sample, where it is the samples'."""
    target, dim, index = (call.argument(i, n) for i, n in enumerate(("input", "dim", "index")))
    source, dim = call.argument(3, "src"), dim % target.dim()
    layout, by, rows = call.layout(target), call.layout(index), call.layout(source)
    known = [one for one in (layout, by, rows) if one is not None]
    if any(one.mixed for one in known) or all(one.dim != dim for one in known):
        return ask(call)
    if by is None and any(one.order is not None for one in known):
        return call.all_combined(ORDERED)
    adds = "add" in call.name or ("reduce" in call.name and call.argument(4, "reduce") == "sum")
    if adds and (total := added_to_one_place(call, target, dim, index, source)):
        return total
    replaces = call.name.rstrip("_") == "scatter" and not call.argument(4, "reduce")
    if target.dim() == 1 and (layout is None or replaces):
        own = by.owners(index.device) if by is not None else None
        new = in_new_order(call, target, index, own, rows, isinstance(source, Tensor))
        if new is not None:
            return [(call.out, new)]
    if any(one.dim != dim for one in known):
        return call.all_combined(MIXES)
    cut = tuple(slice(size) for size in index.shape)
    owners = [spread(one.owners(target.device), dim, t.shape)[cut] for one, t in ((rows, source), (by, index)) if one]
    write = Write(target, lambda t: t.gather(dim, index), owners, rows, by is not None)
    if layout is not None and known == [layout] and layout.alone < 0 and layout.owner is None:
        if unequal(write.places(spread(layout.owners(target.device), dim, target.shape)), layout.batch):
            return call.all_combined(BY_POSITION)
    if layout is not None and is_counted(index) and by is None:
        lie = layout_of_rows(index, layout)
        if lie is None or not gathers_alike(index, layout, lie):
            return call.all_combined(OWN_PLACES)
        constant = isinstance(source, Tensor) and call.is_constant(source) and is_fixed(source)
        if constant and lie.alone < 0 and not alike(source.detach()[cut], lie.dim, lie):
            return call.all_combined(WHY)
    if layout is not None and not write.fits(layout):
        return call.all_combined(MIXES)
    return [(call.out, with_part(call, target, source, [], layout or of_constant(call, write, dim)))]


@layout_rule(*spellings("put", "put_"), by_value=True)
def _put(call: Call) -> Tags:
    """Numbers counted over all elements say where: use index_put, or scatter along a dimension."""
    return call.all_combined(MIXES)


@layout_rule(*spellings("masked_scatter", "masked_scatter_"), by_value=True, joins=True)
def _masked_scatter(call: Call) -> Tags:
    """The source's elements, one after another, to where the mask holds: each to a place of its own sample."""
    target, mask, source = (call.argument(i, n) for i, n in enumerate(("input", "mask", "source")))
    layout, by, rows = call.layout(target), call.layout(mask), call.layout(source)
    known = [one for one in (layout, by, rows) if one is not None]
    if any(one is not None and one.alone >= 0 for one in (layout, by)):
        return call.all_combined(_GUESSED)
    mixed = any(one.mixed for one in known)
    if rows is None or mixed:
        tags = ask(call)
        taken = not mixed and any(found is not None and found.mixed for _, found in tags)
        return call.all_combined(_GUESSED) if taken else tags
    own = layout or by or shape_of(target, call.batch)
    if own is None or not source.dim() or not (by is None or by.same_rows(own, target.device)):
        return call.all_combined(_GUESSED)
    rows = rows.along(0, source.size(0), source.device)
    own = own._replace(dim=own.dim + call.out.dim() - (mask if layout is None and by is not None else target).dim())
    places = spread(own.owners(target.device), own.dim, call.out.shape)[mask.expand(call.out.shape)]
    sources = spread(rows.owners(target.device), rows.dim, source.shape).flatten()[: places.numel()]
    same = torch.equal(places, sources)
    return [(call.out, own._replace(is_row_index=False))] if same else call.all_combined(_GUESSED)
