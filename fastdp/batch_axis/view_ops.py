"""Layout rules of views and other functions with sizes among their arguments, and of elementwise functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .batch_positions import WHY, by_place, is_counted, was_by_place
from .batch_slices import cut
from .calls import Call, Inputs, Tags, layout_rule
from .host_values import numbered
from .index_kinds import brought_back, looked_at, note_groups, repeated
from .layout import Layout, layout_of_rows, regular_rows
from .operator_table import ELEMENTWISE, spellings
from .propagate import ask
from .reduction_ops import spread
from .sample_loops import numbers_in
from .written_constants import note_shape

T = torch.Tensor
FOLDS = (
    "folds samples into another dimension (if the model takes several rows of each sample, say how many samples there "
    "are: batch_size= or rows_per_sample=)"
)

# --------------------------------------------------------------------------- sizes in the arguments


@layout_rule(*spellings("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "_unsafe_view"))
def _reshape(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or call.out.numel() != source.numel():  # view(dtype)
        return ask(call)
    if layout.mixed:
        return [(call.out, layout)]
    if source.numel() == 0:  # no numbers: only where the samples' places go
        places = [dim for dim, size in enumerate(call.out.shape) if size == layout.rows]
        if layout.rows and layout.alone < 0 and places:
            return [(call.out, layout._replace(dim=layout.dim if layout.dim in places else places[0]))]
        return ask(call)
    found = reshaped(layout, source.shape, call.out.shape)
    return [(call.out, found)] if found is not None else spread(call, "sum", FOLDS)


@layout_rule(*spellings("squeeze"))
def _squeeze(call: Call) -> Tags:
    """Of the only row that a choice by the data has left, the dimension may go, too (nn.AdaptiveLogSoftmaxWithLoss)."""
    source, layout = call.args[0], call.layout(call.args[0])
    dims = call.argument(1, "dim")
    dims = range(source.dim()) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
    if layout is None or layout.mixed or layout.alone >= 0 or layout.owner is None or layout.rows != 1:
        return ask(call)
    if layout.dim not in [dim % source.dim() for dim in dims]:
        return ask(call)
    return [(call.out, layout.of_sample(int(layout.owner[0]), sized=True))]


@layout_rule(*spellings("expand", "expand_as", "broadcast_to"))
def _expand(call: Call) -> Tags:
    layout = call.layout(call.args[0])
    if layout is None:
        return []  # a constant that only takes the shape of data
    return [(call.out, layout._replace(dim=layout.dim + call.out.dim() - call.args[0].dim()))]


@layout_rule(*spellings("flip", "roll", "repeat", "tile"))
def _moved(call: Call) -> Tags:
    """Rows in another order, or repeated: as a column of their numbers is."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed:
        return [] if layout is None else [(call.out, layout)]
    if call.name == "roll" and call.argument(2, "dims", ()) in (None, ()):
        return call.all_combined("rolls samples into each other")
    seen, _, device = looked_at(layout, (), source.device)
    shape = [-1 if dim == layout.dim else 1 for dim in range(source.dim())]
    rows = call.func(numbered(layout.rows, device).view(shape), *call.args[1:], **call.kwargs)
    found = layout_of_rows(rows, seen)
    if found is None:
        return call.all_combined(FOLDS)
    if call.name == "roll" and found.order is not None and found.order is not layout.order:
        found = found._replace(order=torch.zeros_like(found.order))  # the groups go round
    return [(call.out, brought_back(found, source.device))]


@layout_rule(torch.repeat_interleave, T.repeat_interleave)
def _repeat_interleave(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    times, dim = call.argument(1, "repeats"), call.argument(2, "dim", 0 if source.dim() == 1 else None)
    by = call.layout(times)
    if layout is not None and layout.mixed and by is not None and not by.mixed and by.alone < 0 and by.order is None:
        note_groups(call, times, by)
    if layout is None or layout.mixed or dim is None or times is None or dim % source.dim() != layout.dim:
        return ask(call)
    seen, (often,), device = looked_at(layout, (times,), source.device)
    rows = torch.arange(layout.rows, device=device).repeat_interleave(often)
    if by is None and layout.may_take(rows):
        found = brought_back(seen.taken(layout.dim, rows), source.device)
        return [
            (call.out, cut(source, layout, found, rows, named=not isinstance(times, Tensor) or not is_counted(times)))
        ]
    if by is None or by.mixed or not by.same_rows(layout, source.device):
        return call.all_combined("repeats rows as often as other samples say")
    return [(call.out, brought_back(repeated(seen, often, rows), source.device))]


@layout_rule(*spellings("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new"))
def _constant(call: Call) -> Tags:
    """Constants of a tensor's type, unless their numbers are data."""
    data = numbers_in(call)
    if not data:
        for tensor in call.results():
            note_shape(tensor, call.layout(call.args[0]))
        return [(tensor, None) for tensor in call.results()]
    if call.name in ("new_tensor", "new") and call.argument(1, "data") is data[0][0]:
        return [(call.out, data[0][1])]
    return call.all_combined("makes numbers of several samples")


@layout_rule(*spellings("to", "cpu", "cuda", "type", "type_as", "contiguous", "clone"), T.data.__get__)  # type: ignore[attr-defined]
def _same(call: Call) -> Tags:
    return [(call.out, call.layout(call.args[0]))]


# --------------------------------------------------------------------------- one by one


@layout_rule(*spellings(*ELEMENTWISE))
def elementwise(call: Call) -> Tags:
    """Element by element with broadcasting: samples stay where they lie, counted from the right.

    The trial would say the same of rows in regular order; this spares it, whose first call imports half of torch.
    """
    results, inputs = call.results(), call.inputs()
    if len(results) != 1 or not inputs:
        return ask(call)
    out = results[0]
    aligned = [_aligned(layout, tensor.dim(), out.dim()) for tensor, layout in inputs]
    if len({layout.dim for layout in aligned if not layout.mixed}) > 1:
        return [(out, call.combined("combines inputs whose samples lie in different dimensions"))]
    first = next((layout for layout in aligned if layout.owner is not None), aligned[0])
    if any(layout.mixed for layout in aligned) or (first.owner is None and len(set(aligned)) > 1):
        return ask(call)
    if not all(layout.same_rows(first, out.device) for layout in aligned):
        return [(out, call.combined("combines rows of different samples"))]
    if out.shape[first.dim : first.dim + 1] != (first.rows,):
        return ask(call)
    beside = first.dim - out.dim()  # counted from the right
    if first.order is not None and any(t.dim() >= -beside and t.size(beside) != 1 for t in call.constants()):
        return [(out, call.combined("meets numbers by position with rows whose order depends on the data"))]
    return [(out, _beside_places(call, out, first, inputs))]


def _beside_places(call: Call, out: Tensor, layout: Layout, inputs: Inputs) -> Layout:
    """The result's layout, if a constant has numbers of its own for each row: whole numbers are places then."""
    if len(inputs) == len(call.args) and not call.kwargs:
        return layout
    written = {id(t) for t in call.written()}  # what these hold now is data
    constants = [t for t in call.tensors if id(t) not in written and call.is_constant(t)]
    places = [by_place(t, layout.dim - out.dim() + t.dim(), layout) for t in constants]
    before = call.before
    if out is call.args[0] and before is not None and call.name != "copy_" and call.is_constant(out):
        places.append(was_by_place(before, out, layout.dim, layout))
    if not any(places):
        return layout
    whole = not (out.is_floating_point() or out.is_complex() or out.dtype == torch.bool)
    return layout._replace(is_row_index=True) if whole else call.combined(WHY)


def _aligned(layout: Layout, ndim: int, out_ndim: int) -> Layout:
    return layout._replace(dim=layout.dim + out_ndim - ndim)


@layout_rule(*spellings("_sample_dirichlet"))
def _dirichlet(call: Call) -> Tags:
    """Draws for each row along the last dimension."""
    layout = call.layout(call.args[0])
    if layout is not None and not layout.mixed and layout.dim == call.out.dim() - 1:
        return call.all_combined("draws for the samples together")
    return [(call.out, layout)]


def reshaped(layout: Layout, before: torch.Size, after: torch.Size) -> Layout | None:
    """Layout after a reshape (row-major order kept), or None where it cannot be written as one."""
    below = math.prod(before[layout.dim + 1 :])  # elements under one row
    if layout.owner is not None:
        return _reshaped_owner(layout, before, after, below)
    inner_total = layout.inner * below  # elements from one sample's row block to the next
    span = inner_total * layout.batch
    stride = math.prod(after)
    for dim, size in enumerate(after):
        stride //= max(size, 1)
        if inner_total % stride == 0 and (size * stride) % span == 0 and size > 0:
            inner = inner_total // stride
            outer = size // (inner * layout.batch)
            return layout._replace(dim=dim, outer=outer, inner=inner)
    return None


def _reshaped_owner(layout: Layout, before: torch.Size, after: torch.Size, below: int) -> Layout | None:
    """Of rows in any order: as their numbers are reshaped, each once for what lies under it of each new row."""
    assert layout.owner is not None
    regular = regular_rows(layout.owner, layout.batch)
    if regular:  # to a shape that keeps the samples apart
        apart = reshaped(layout._replace(owner=None, order=None, outer=regular[0], inner=regular[1]), before, after)
        if apart is not None and apart._replace(is_row_index=False).plain:
            return apart
    kept = next(dim for dim in range(1, len(after) + 1) if below % math.prod(after[dim:]) == 0)
    seen, _, device = looked_at(layout, (), layout.owner.device)
    each = torch.arange(layout.rows, device=device).repeat_interleave(below // math.prod(after[kept:]))
    found = layout_of_rows(each.repeat(math.prod(before[: layout.dim])).view(after[:kept]), seen)
    return found and brought_back(found, layout.owner.device)
