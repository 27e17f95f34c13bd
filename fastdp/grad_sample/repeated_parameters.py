"""Parameters repeated for every sample: learned queries, first states, start tokens (`self.q.expand(len(x), -1, -1)`).

What is made of parameters alone has no samples, and its gradients are pulled back sample by sample. Where it holds a
copy for every sample and goes through layers of its own, that costs the square of the batch. So its rows are followed
like those of data, and at the first layer it becomes data: each sample's gradient is that of its own copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch_axis import operator_table, tensor_notes
from ..batch_axis.batch_positions import rows_alike
from ..batch_axis.calls import Call
from ..batch_axis.layout import Layout, tag
from ..batch_axis.propagate import layouts_of
from ..errors import SampleMixingError
from ..utils.pytree import map_tensors
from .broadcast import capture_cat, capture_elementwise, uses_of_broadcast
from .captured_call import Captured, Context, capture
from .forward_pass import ForwardPass
from .parameter_links import link_of, mark_derived
from .rules import USE_RULES, by_sample

_CLOSED = (capture_elementwise, capture_cat)  # beside data, a copy for every sample costs them nothing
_ATTENTION = (F.multi_head_attention_forward, F.scaled_dot_product_attention)
_PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ bmm mm".split())
# of constants: what is asked by value at each call would cost more than it saves
_FOLLOWED = operator_table.CASTING | operator_table.TAKING_A_TYPE | operator_table.LIKE
_FILLED = operator_table.FILLING - {"empty", "new", "new_empty"} - operator_table.LIKE
REMEDY = "Compute it of the parameter itself, before it is repeated for the batch (expand, repeat)."


class Repeated(NamedTuple):
    """Where a tensor made of parameters, or a constant beside them, holds the rows of each sample.

    certain: its number of copies is the batch's size, and not another one that is equal.
    sources: the repeated tensors that it is made of, with nothing between that joins rows, and their layouts; none: it
    is one itself.
    """

    layout: Layout
    certain: bool
    sources: tuple[tuple[Tensor, Layout], ...]
    version: float


class RepeatingPass(ForwardPass, Protocol):
    """The parts of a pass (`fastdp.engine.capture.Pass`) that are used here."""

    made_data: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]]  # of repeated parameters, by their id


def repeated_of(tensor: Tensor) -> Repeated | None:
    """How a tensor repeats parameters for the samples, if it does."""
    note: Repeated | None = tensor.__dict__.get(tensor_notes.REPEATED)
    return note if note is not None and note.version == tensor_notes.version_of(tensor) else None


def note_repeated(call: Call, is_batch_size: Callable[[bool], bool]) -> None:
    """Note which results of a call on parameters, or on constants, hold rows of each sample.

    is_batch_size: whether a size equal to the batch's is most likely that, by the code that calls; asked with True:
    and no other.
    """
    if call.in_place or call.batch <= 1:
        return
    link = link_of(call.out) if isinstance(call.out, Tensor) else None
    looked_up = link is not None and link.kind == "lookup" and repeated_of(link.parent) is None  # as its ids say
    given = {id(t): note for t in call.tensors if not looked_up and (note := repeated_of(t)) is not None}
    if given and any(t.requires_grad and id(t) not in given and call.layout(t) is None for t in call.tensors):
        return  # made of other parameters, too, which are no sample's
    if not given:
        layout = _repeats(call)
        if layout is not None:
            certain = _like_data(call, layout) or is_batch_size(True)
            if certain or (call.out.requires_grad and is_batch_size(False)):
                _note(call.out, layout, certain, ())
        return
    if not any(t.requires_grad for t in call.results()) and call.name not in _FOLLOWED:
        return
    sources: dict[int, tuple[Tensor, Layout]] = {}
    for tensor in call.tensors:
        note = given.get(id(tensor))
        if note is not None and tensor.requires_grad:
            sources.update((id(own[0]), own) for own in note.sources or ((tensor, note.layout),))
    certain = all(note.certain for note in given.values())
    for result, layout in layouts_of(call.supposing({key: note.layout for key, note in given.items()})):
        if certain and layout is not None and _counts_copies(call, result, layout):
            why = f"{layout.mixed}: here the copies of a parameter, of which there are as many as samples"
            raise SampleMixingError(f"{why}, so that each sample changes it for all. {REMEDY}", why)
        if layout is not None and not (layout.mixed or layout.parted or layout.is_row_index):
            _note(result, layout, certain, tuple(sources.values()) if result.requires_grad else ())


def _counts_copies(call: Call, result: Tensor, layout: Layout) -> bool:
    """Whether a result depends on how many copies there are: not a mean or an extreme of all, nor one of them."""
    by_number = bool(layout.mixed) and layout.total != "mean" and call.name not in operator_table.EXTREMES
    return by_number and result.requires_grad


def _note(tensor: Tensor, layout: Layout, certain: bool, sources: tuple[tuple[Tensor, Layout], ...]) -> None:
    tensor.__dict__[tensor_notes.REPEATED] = Repeated(layout, certain, sources, tensor_notes.version_of(tensor))


def _repeats(call: Call) -> Layout | None:
    """The layout of a result that repeats a parameter or a constant as often as there are samples, in one dimension."""
    out, copies = call.out, call.name in operator_table.BROADCASTING | operator_table.COPYING
    if not isinstance(out, Tensor) or call.batch not in out.shape:
        return None
    link = link_of(out)
    once: tuple[int, ...] = ()  # the shape of what is there once
    if link is not None and link.kind == "broadcast" and out is not link.parent:
        once = tuple(link.parent.shape)
    elif link is not None and link.kind == "lookup" and link.ids is not None:
        dims = [dim for dim, size in enumerate(link.ids.shape) if size == call.batch]
        alike = len(dims) == 1 and rows_alike(link.ids, dims[0], Layout(call.batch, dims[0]))
        return Layout(call.batch, dims[0]) if alike else None
    elif out.requires_grad or not (copies or call.name in _FILLED):
        return None
    elif copies and out is not call.args[0]:
        once = tuple(call.args[0].shape)
    shape = (1,) * (out.dim() - len(once)) + once
    dims = [dim for dim, size in enumerate(shape) if size == 1 and out.size(dim) == call.batch]
    return Layout(call.batch, dims[0]) if len(dims) == 1 else None


def _like_data(call: Call, layout: Layout) -> bool:
    """Whether a result has taken its shape of data that lies so (expand_as)."""
    return any((t.dim(), own) == (call.out.dim(), layout) for t, own in call.inputs())


def with_rows(forward_pass: RepeatingPass, call: Call, has_data: bool) -> Call | None:
    """The call as one by sample, where it takes repeated parameters and that is due; else None.

    These become data where they meet a layer, or data whose rows lie alike; a parameter that is added to them, or by
    which they are multiplied, is repeated like them.
    """
    if call.in_place or call.batch <= 1 or "out" in call.kwargs:
        return None
    found = [(t, note) for t in call.tensors if (note := repeated_of(t)) is not None and call.layout(t) is None]
    if not found:
        return None
    if has_data:
        closed = USE_RULES.get(call.func) in _CLOSED
        found = [(t, note) for t, note in found if t.requires_grad and (note.sources or not closed)]
    else:
        others = [t for t in call.tensors if forward_pass.is_parameter(t) and repeated_of(t) is None]
        if not others or not all(note.certain for _, note in found):
            return None
        if call.name in operator_table.ELEMENTWISE:
            return _with_repeated(forward_pass, call, others, *found[0])
    if not _by_mask(call, found) and call.name not in operator_table.BY_LENGTHS:
        beside = {_place(t, layout) for t, layout in call.inputs()}
        found = [
            (t, note) for t, note in found if beside <= {_place(t, note.layout)} and _takes(call, t, note, has_data)
        ]
    data = {id(tensor): _as_data(forward_pass, tensor, note) for tensor, note in found}
    return _replaced(call, data) if found else None


def _by_mask(call: Call, found: list[tuple[Tensor, Repeated]]) -> bool:
    """Whether a mask of the samples picks some of the copies, one for each."""
    if call.name != "__getitem__" or len(found) != 1 or found[0][0] is not call.args[0] or not found[0][1].certain:
        return False
    masks = [(tensor, layout) for tensor, layout in call.inputs() if tensor is call.args[1]]
    return any(mask.dtype == torch.bool and layout.plain and not layout.dim for mask, layout in masks)


def _takes(call: Call, tensor: Tensor, note: Repeated, has_data: bool) -> bool:
    """Whether rows of this argument are most likely samples, not as many channels of a weight."""
    if not has_data:
        place = 1 if call.name == "addmm" else 0
        first = any(each is tensor for each in call.args[place : place + 1])
        layer = call.func in USE_RULES and call.name not in operator_table.LOOKING_UP  # (rows looked up follow ids')
        return call.func in _ATTENTION or (layer or call.name in _PRODUCTS) and first
    if call.name in _PRODUCTS:
        return note.layout.dim - tensor.dim() <= -3
    known = call.func in _ATTENTION or call.name in operator_table.ELEMENTWISE | operator_table.STACKING
    return known or (note.certain and call.func not in USE_RULES)


def _with_repeated(
    forward_pass: ForwardPass, call: Call, others: list[Tensor], tensor: Tensor, note: Repeated
) -> Call | None:
    """The call with other parameters repeated like this one, if they have the same numbers for all of its rows."""
    beside = note.layout.dim - tensor.dim()
    if not note.layout.plain:
        return None
    made: dict[int, Tensor] = {}
    for other in others:
        shape = [1] * max(0, -beside - other.dim()) + list(other.shape)
        if shape[beside] != 1:
            return None
        shape[beside] = call.batch
        repeat = Call(torch.Tensor.expand, (other, shape), {}, call.batch, call.path)
        made[id(other)] = repeat.run()
        mark_derived(repeat, forward_pass, [other])
        _note(repeat.out, note.layout._replace(dim=len(shape) + beside), True, ())
    return _replaced(call, made)


def _place(tensor: Tensor, layout: Layout) -> Any:
    """Where the samples lie, counted from the last dimension, and how; None where rows are of no known samples."""
    if layout.mixed or layout.parted or layout.is_row_index:
        return None
    return layout.dim - tensor.dim(), layout.outer, layout.inner


def _replaced(call: Call, by: dict[int, Tensor]) -> Call:
    args, kwargs = map_tensors(call.given, lambda t: by.get(id(t), t))
    return Call(call.func, args, kwargs, call.batch, call.path)


def _as_data(forward_pass: RepeatingPass, tensor: Tensor, note: Repeated) -> Tensor:
    """A repeated parameter as data, the same for all calls that take it while it is there; a constant's copy."""
    if not tensor.requires_grad:
        out = tensor.clone()
        tag(out, note.layout)
        return out
    known = forward_pass.made_data.get(id(tensor))
    if known is not None and known[0]() is tensor and (made := known[1]()) is not None:
        return made
    call = _Copies(forward_pass, note)
    out = capture(call, Context(forward_pass, tensor, *(source for source, _ in note.sources)))
    forward_pass.made_data[id(tensor)] = weakref.ref(tensor), weakref.ref(out)
    return out


class _Copies(Captured):
    """What repeats parameters for the samples, as data."""

    def __init__(self, forward_pass: ForwardPass, note: Repeated) -> None:
        super().__init__(forward_pass, "expand", note.layout)
        self.layouts = [layout for _, layout in note.sources]

    def run(self, ctx: Context, *data: Tensor) -> Any:
        return ctx.values[0].clone()  # the parameter's own memory must not pass for data

    def record_uses(self, ctx: Context, saved: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> None:
        tensor, *sources = ctx.operands
        pairs = [(tensor, self.layout, grads[0])]
        if sources:  # row by row, so that each sample's stay apart
            found = torch.autograd.grad(tensor, sources, grads[0], retain_graph=True, allow_unused=True)
            pairs = list(zip(sources, self.layouts, found, strict=True))
        for source, layout, g in pairs:
            if g is not None:
                use = uses_of_broadcast(source, by_sample(g, layout), layout, source.dim(), self.name)
                ctx.forward_pass.record(use)
