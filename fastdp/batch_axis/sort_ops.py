"""Layout rules of sorting, and of functions that list positions (`nonzero`, `unique`, `argsort`).

Their numbers are places of rows, or name the choices that occur. They may pick rows; the rules that read them
as an index (`index_read_ops`, `index_write_ops`) look whether every sample picks its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.pytree import tensors_in
from . import tensor_notes
from .calls import Call, Tags, layout_rule
from .host_values import note_sorted
from .index_kinds import found_in
from .index_read_ops import getitem
from .layout import Layout
from .operator_table import spellings
from .propagate import ask
from .reduction_ops import along
from .view_ops import elementwise

T = torch.Tensor
_sort_along = along(1, "dim")


@layout_rule(*spellings("sort", "argsort"), by_value=True)
def _sort(call: Call) -> Tags:
    """Of one number a row over the batch: rows in another order. The numbers are the groups, if they are whole."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed or layout.is_row_index or source.dim() != 1:
        return _sort_along(call) if layout is None or not layout.is_row_index else _sorted_places(call, layout)
    out = call.results()
    picked = out[-1]
    note_sorted(picked, source)
    if source.is_floating_point():
        order = torch.zeros_like(picked)
        values = call.combined("works along the batch dimension")
    else:
        order = source[picked]
        values = layout.taken(0, picked, order)
    found = layout.taken(0, picked, order)._replace(is_row_index=True)
    return [(picked, found)] if len(out) == 1 else [(out[0], values), (picked, found)]


def _sorted_places(call: Call, layout: Layout) -> Tags:
    """The inverse of an order, by sorting it."""
    if layout.mixed or call.args[0].dim() != 1:
        return _sort_along(call)
    picked = call.results()[-1]
    if call.args[1:] in ((), (0,), (-1,)) and not call.kwargs:  # from the smallest to the largest
        note_sorted(picked, call.args[0])
    found = layout.taken(0, picked, anew=True)
    if found.owner is not None:
        found = found._replace(order=torch.zeros_like(picked))
    return [(tensor, found) for tensor in call.results()]


@layout_rule(*spellings("nonzero", "argwhere"), by_value=True)
def _nonzero(call: Call) -> Tags:
    """Coordinates of a sample's own elements, as rows of a matrix or as a tensor each."""
    source, layout = call.args[0], call.layout(call.args[0])
    out = call.results()
    if layout is None or layout.mixed:
        mixed = layout.mixed if layout is not None else call.mixed("keeps rows by value")
        return [(tensor, Layout(call.batch, mixed=mixed, is_row_index=True)) for tensor in out]
    coordinates = call.out.unbind(1) if isinstance(call.out, Tensor) else tuple(out)
    _, _, order = found_in(source, layout, coordinates)
    found = layout.taken(0, coordinates[layout.dim], order)
    if isinstance(call.out, Tensor):
        return [(call.out, found._replace(is_row_index=True))]
    return [(tensor, found._replace(is_row_index=dim == layout.dim)) for dim, tensor in enumerate(out)]


@layout_rule(T.where, by_value=True)
@layout_rule(torch.where)
def _where(call: Call) -> Tags:
    """Of a condition alone: where it holds."""
    return _nonzero(call) if len(call.args) == 1 and not call.kwargs else elementwise(call)


@layout_rule(*spellings("unique", "unique_consecutive"), torch._VF.unique_dim, by_value=True)  # type: ignore[attr-defined]
def _unique(call: Call) -> Tags:
    """Which choices occur."""
    tags = call.all_combined("keeps rows by value")
    whole = not call.args[0].is_floating_point()
    return [(t, None if layout is None else layout._replace(is_row_index=whole)) for t, layout in tags]


@layout_rule(torch.masked_select, T.masked_select, by_value=True)
def _masked_select(call: Call) -> Tags:
    """source[mask], both made as large as each other first."""
    given = (call.args[0], call.argument(1, "mask"))
    whole = torch.broadcast_tensors(*given)
    taken = Call(T.__getitem__, whole, {}, call.batch, call.path, call.out)
    for tensor, made in zip(given, whole, strict=True):
        layout = call.layout(tensor)
        if tensor_notes.MADE in tensor.__dict__:
            made.__dict__[tensor_notes.MADE] = tensor.__dict__[tensor_notes.MADE]
        if made is not tensor and layout is not None:
            aligned = layout._replace(dim=layout.dim + made.dim() - tensor.dim())
            if made.size(aligned.dim) != layout.rows:
                return _rows_by_value(call)
            taken.knows(made, aligned)
    return getitem(taken)


@layout_rule(*spellings("bincount", "histc"), by_value=True)
def _rows_by_value(call: Call) -> Tags:
    return call.all_combined("keeps rows by value")


@layout_rule(*spellings("isin", "bucketize", "searchsorted"), by_value=True)
def _looked_up(call: Call) -> Tags:
    """Values among a list that all share: of constants, or mixed. (A list for each row is asked about.)"""
    shared = call.args[:1] if call.name == "searchsorted" else call.args[1:2] or list(call.kwargs.values())
    lists = [t for t in tensors_in(shared) if t.dim() < 2 or call.name == "isin"]
    if any(call.layout(t) is not None for t in lists):
        return call.all_combined("looks values up among those of other samples")
    return ask(call)


@layout_rule(F.one_hot, by_value=True)
def _one_hot(call: Call) -> Tags:
    """A dimension more, behind; as long as the largest label of the batch asks for, if its length is not given."""
    if call.argument(1, "num_classes") in (None, -1):
        call.out.__dict__[tensor_notes.COUNTED] = call.out.size(-1)
    return [(call.out, call.layout(call.args[0]))]
