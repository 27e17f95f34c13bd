"""Layout rules of views and other functions with sizes among their arguments, and of elementwise functions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .batch_positions import WHY, by_place, was_by_place
from .calls import Call, Inputs, Tags, layout_rule
from .index_kinds import keep_coordinates, note_groups, repeated
from .index_write_ops import note_shape
from .layout import Layout, rows_each
from .operator_table import ELEMENTWISE, spellings
from .propagate import ask
from .reduction_ops import spread
from .sample_loops import numbers_in

T = torch.Tensor
_FOLDS = (
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
    keep_coordinates(source, call.out)
    found = reshaped(layout, source.shape, call.out.shape)
    return [(call.out, found)] if found is not None else spread(call, "sum", _FOLDS)


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


@layout_rule(T.repeat, torch.tile, T.tile)
def _repeat(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return []
    if layout.mixed:
        return [(call.out, layout)]
    dim = layout.dim + call.out.dim() - source.dim()
    times = call.out.size(dim) // max(source.size(layout.dim), 1)
    if times != 1 and layout.owner is not None:
        return [(call.out, layout.taken(dim, torch.arange(layout.rows, device=source.device).repeat(times)))]
    return [(call.out, layout._replace(dim=dim, outer=layout.outer * times))]


@layout_rule(torch.repeat_interleave, T.repeat_interleave)
def _repeat_interleave(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    times, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    dim = 0 if dim is None and source.dim() == 1 else dim
    if layout is not None and layout.mixed and isinstance(times, Tensor):
        by = call.layout(times)
        if by is not None and not by.mixed and by.alone < 0 and by.order is None:
            note_groups(call, times, by)
    if layout is None or layout.mixed or dim is None or times is None or dim % source.dim() != layout.dim:
        return ask(call)
    if isinstance(times, Tensor) or layout.owner is not None:
        rows = torch.arange(layout.rows, device=source.device).repeat_interleave(times)
        by = call.layout(times)
        if by is None and layout.may_take(rows):
            return [(call.out, layout.taken(layout.dim, rows))]
        if by is None or by.mixed or not by.same_rows(layout, source.device):
            return call.all_combined("repeats rows as often as other samples say")
        return [(call.out, repeated(layout, times, rows))]
    return [(call.out, layout._replace(inner=layout.inner * times))]


@layout_rule(*spellings("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))
def _constant(call: Call) -> Tags:
    """Constants of a tensor's type, unless their numbers are data."""
    data = numbers_in(call)
    if not data:
        for tensor in call.results():
            note_shape(tensor, call.layout(call.args[0]))
        return [(tensor, None) for tensor in call.results()]
    if call.name == "new_tensor" and call.argument(1, "data") is data[0][0]:
        return [(call.out, data[0][1])]
    return call.all_combined("makes numbers of several samples")


@layout_rule(*spellings("to", "cpu", "cuda", "type", "type_as", "contiguous", "clone"), T.data.__get__)  # type: ignore[attr-defined]
def _same(call: Call) -> Tags:
    return [(call.out, call.layout(call.args[0]))]


# --------------------------------------------------------------------------- one by one


@layout_rule(*spellings(*ELEMENTWISE))
def elementwise(call: Call) -> Tags:
    """Element by element with broadcasting: samples stay where they lie, counted from the right.

    The trial would say the same; this spares it, whose first call imports half of torch.
    """
    tensors = call.results()
    inputs = call.inputs()
    if len(tensors) != 1 or not inputs:
        return ask(call)
    out = tensors[0]
    if any(layout.owner is not None for _, layout in inputs):
        return _elementwise_in_any_order(call, out, inputs)
    found = {_aligned(layout, tensor.dim(), out.dim()) for tensor, layout in inputs if layout.owner is None}
    if len({layout.dim for layout in found if not layout.mixed}) > 1:
        return [(out, call.combined("combines inputs whose samples lie in different dimensions"))]
    if any(layout.mixed or layout.owner is not None for _, layout in inputs) or len(found) != 1:
        return ask(call)
    layout = found.pop()
    if out.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return ask(call)
    return [(out, _beside_places(call, out, layout, inputs))]


def _beside_places(call: Call, out: Tensor, layout: Layout, inputs: Inputs) -> Layout | None:
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


def _elementwise_in_any_order(call: Call, out: Tensor, inputs: Inputs) -> Tags:
    """Rows in an order of their own: every tensor that has rows must have the same."""
    aligned = [_aligned(layout, tensor.dim(), out.dim()) for tensor, layout in inputs]
    first = next(layout for layout in aligned if layout.owner is not None)
    if any(layout.mixed for layout in aligned):
        return ask(call)
    if not all(layout.dim == first.dim and layout.same_rows(first, out.device) for layout in aligned):
        return [(out, call.combined("combines rows of different samples"))]
    beside = first.dim - out.dim()  # counted from the right
    constants = [t for t in call.constants() if t.dim() >= -beside]
    if first.order is not None and any(t.size(beside) != 1 for t in constants):
        return [(out, call.combined("meets numbers by position with rows whose order depends on the data"))]
    if any(call.is_constant(t) and by_place(t, t.dim() + beside, first) for t in constants) and out.is_floating_point():
        return [(out, call.combined(WHY))]
    return [(out, first)] if out.size(first.dim) == first.rows else ask(call)


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
    assert layout.owner is not None
    rows = layout.owner.numel()
    each = rows_each(layout.owner, layout.batch)
    if each:  # to a shape that keeps the samples apart
        apart = reshaped(layout._replace(owner=None, order=None, inner=each), before, after)
        if apart is not None and apart._replace(is_row_index=False).plain:
            return apart
    stride = math.prod(after)
    above = math.prod(before[: layout.dim])
    for dim, size in enumerate(after):
        stride //= max(size, 1)
        if rows == 0 or stride == 0:
            continue
        if above == 1 and stride % below == 0 and size * (stride // below) == rows:  # neighbours made one row
            groups = layout.owner.view(size, -1)
            if bool((groups == groups[:, :1]).all()):
                return layout.taken(dim, torch.arange(0, rows, stride // below, device=layout.owner.device))
        if below % stride:
            continue
        repeat = below // stride
        if size == rows * repeat:
            return layout.taken(dim, torch.arange(rows, device=layout.owner.device).repeat_interleave(repeat))
        if dim == 0 and size == above * rows * repeat:
            below_each = torch.arange(rows, device=layout.owner.device).repeat_interleave(repeat)
            return layout.taken(0, below_each.repeat(above))
    return None
