"""Propagates layouts through a call: which rows of a result belong to which sample.

Most functions are asked, not listed: the function is run once on meta tensors whose batch is larger by
one, and the dimension of the result that grew is where its samples lie. The answer is cached by shapes.
Only functions that bake sizes in (views), move rows (indexing) or mix rows in place of a dimension
(softmax along the batch) need a rule of their own: `view_ops`, `index_read_ops`, `reduction_ops` and others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import FastDPError
from ..utils.pytree import tensors_in
from . import batch_positions, operator_table, tensor_notes, totals
from .aliasing import written_through
from .batch_positions import by_place, was_by_place
from .calls import Call, Inputs, Tags, rule_of
from .index_kinds import counted
from .layout import Layout, layout_on, tag
from .operator_table import CONCATENATIONS, UNCHECKED
from .probe_calls import cached_trial, fewer
from .probing import any_whole, coupling, draws, is_blind_to_order
from .python_reads import read_of
from .sample_loops import of_no_numbers, of_one_sample
from .tensor_notes import FILLED, written

_FILLS = {"ones_like": 1, "zeros_like": 0}
_SIZED = {tensor_notes.COUNTED, tensor_notes.LONGEST}  # has a size that data made


def propagate(call: Call) -> str:
    """Tag the results of the call. The caller knows that an argument has a layout.

    Returns what the call tells Python of several samples together, or ''.
    """
    if call.name == "data" and call.out is None:  # tensor.data = other
        if (layout := _of_new_memory(call, *call.args[:2])) is not None and call.args[0].is_leaf:
            written(call.args[0], layout, None)
        tag(call.args[0], layout)
        call.forget()
        return ""
    if not call.results() and call.name != "__setitem__":
        return read_of(call, None) if call.batch > 1 else ""
    tags = layouts_of(call)
    for base, layout in call.bases:
        tag(base, layout)
    into = [(tensor, layout_on(tensor), _root(tensor)) for tensor in call.written()] if call.batch > 1 else ()
    for tensor, found in tags:
        tag(tensor, found)
        plain = call.name in _FILLS and found is not None and found.plain and not format_of(tensor)
        if plain and not _SIZED & call.args[0].__dict__.keys():
            tensor.__dict__[FILLED] = (_FILLS[call.name], 0)
    for tensor, before, (root, held) in into:
        found = layout_on(tensor)
        if tensor._is_view():
            written_through(call, tensor, before, found and found._replace(shifted=None))
        elif before is not None and before != found:
            tensor.__dict__[tensor_notes.RELAID] = tensor_notes.version_of(tensor)
        if (after := layout_on(root)) is not None and after != held:
            written(root, after, held)
    call.forget()
    return read_of(call, tags) if call.batch > 1 else ""


def layouts_of(call: Call) -> Tags:
    """The layouts of a call's results. Nothing is written on tensors but notes of how the results were made."""
    inputs = call.inputs()
    if call.batch <= 1:
        return _in_one_sample(call, inputs)
    kept = next((found for tensor in (*call.results(), *[t for t, _ in inputs]) if (found := format_of(tensor))), "")
    tags = _layouts_in(kept, call, inputs) if kept else _answer(call)
    if any(layout.inferred for _, layout in inputs):
        tags = with_inferred(call, inputs, tags, _answer)
    if not rule_of(call.func).picks and any(layout.is_row_index for _, layout in inputs):
        tags = [(tensor, _made_of_places(call, tensor, layout)) for tensor, layout in tags]
    return tags


def _in_one_sample(call: Call, inputs: Inputs) -> Tags:
    """Layouts in a batch of one: every result is the sample's, or of an earlier batch."""
    if (rule := rule_of(call.func)).refuses:
        rule.answer(call)
    unasked = of_no_numbers(call)
    if unasked is not None:
        return unasked
    stale = next((layout.mixed for _, layout in inputs if layout.mixed), "")
    return [(tensor, Layout(call.batch, mixed=stale)) for tensor in call.results() or tensors_in(call.args[0])]


def _of_new_memory(call: Call, tensor: Tensor, other: Tensor) -> Layout | None:
    """tensor.data = other: its gradient still goes where it went, so the numbers must be of the same samples."""
    before, layout = call.layout(tensor), call.layout(other)
    if tensor.is_leaf or (layout is not None and layout.mixed):
        return layout
    if before is not None and layout is None and tensor.shape[before.dim : before.dim + 1] == (before.rows,):
        return before
    same = before is not None and layout is not None and before._replace(owner=None) == layout._replace(owner=None)
    if same and before.same_rows(layout, tensor.device):  # type: ignore[union-attr, arg-type]
        return layout
    return None if before is layout is None else call.combined("takes numbers of other samples")


def _root(tensor: Tensor) -> tuple[Tensor, Layout | None]:
    """The tensor that a view is seen through, else itself, and its layout."""
    root = tensor._base if tensor._is_view() else tensor
    return root, layout_on(root)  # type: ignore[return-value, arg-type]


def format_of(tensor: Tensor) -> str:
    """How the numbers are kept where torch has few functions of them, sparse or quantized; '' of ordinary tensors."""
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return str(tensor.layout)
    return str(tensor.dtype) if tensor.is_quantized else ""


def _layouts_in(kept: str, call: Call, inputs: Inputs) -> Tags:
    """Layouts where data is sparse or quantized: of what only writes it otherwise, and of what can be asked."""
    if call.name in operator_table.CONVERTING and len(inputs) == 1 and call.out.shape == inputs[0][0].shape:
        return [(call.out, inputs[0][1])]
    try:
        return _answer(call)
    except FastDPError:
        raise
    except (RuntimeError, NotImplementedError):
        why = call.mixed(f"makes or takes data kept as {kept}, whose rows fastdp cannot follow here: keep data dense")
        mixed = next((layout.mixed for _, layout in inputs if layout.mixed), "") or why
        return [(tensor, Layout(call.batch, mixed=mixed)) for tensor in call.results()]


def _answer(call: Call) -> Tags:
    """What the first that has an answer says."""
    return next(tags for hook in ANSWERS if (tags := hook(call)) is not None)


def _by_rule(call: Call) -> Tags | None:
    return rule_of(call.func).answer(call)


def _made_of_places(call: Call, tensor: Tensor, layout: Layout | None) -> Layout | None:
    """Whole numbers made of places of rows are places again; any other number would tell of other samples."""
    if layout is None:
        return None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return layout._replace(mixed=layout.mixed or call.mixed("computes with the places of rows in the batch"))
    return layout._replace(is_row_index=True)


def ask(call: Call) -> Tags:
    """Layouts of the results by the trial with a larger batch."""
    outputs, inputs = call.results(), call.inputs()
    if call.name in operator_table.VIEWS:  # a count over the batch may be a size: sizes are not data
        inputs = [(t, layout) for t, layout in inputs if t.dim() or not layout.mixed]
        if not inputs:
            return [(tensor, None) for tensor in outputs]
    mixed = next((layout.mixed for _, layout in inputs if layout.mixed), "")
    order, clash = _common_order(inputs)
    if clash:
        return call.all_combined("combines rows of different samples")
    found, by_position = cached_trial(call, inputs)
    if order is not None and order.order is not None and (by_position if found is not None else _spans(call, order)):
        why = "meets numbers by position with rows whose order depends on the data"
        return call.all_combined(why, mixed)
    if by_position and any(meets_places(call, t, layout) for t, layout in inputs if not layout.mixed):
        return call.all_combined(batch_positions.WHY, mixed)
    if found is None or len(found) != len(outputs):
        tags: Tags = [(tensor, _guess(call, tensor, inputs, mixed)) for tensor in outputs]
    else:
        tags = [
            (tensor, _from_trial(call, tensor, grown, inputs, order, mixed))
            for tensor, grown in zip(outputs, found, strict=True)
        ]
    asked = fewer(call, inputs, tags)
    if not mixed and (why := coupling(*asked)):
        return call.all_combined(why)
    judged = order is not None and (order.order is not None or not (any_whole(inputs) or draws(*asked)))
    if not mixed and judged and not is_blind_to_order(*asked):
        data = (
            ", in an order that depends on the data"
            if order is not None and order.order is not None
            else " in the batch"
        )
        return call.all_combined(f"treats rows by their position{data}")
    return tags


def meets_places(call: Call, source: Tensor, layout: Layout) -> bool:
    """Whether a constant among the arguments has numbers for this source's rows by their place: samples first, or where
    they lie in the source."""
    beside = layout.dim - source.dim()
    before = call.before
    if before is not None and call.is_constant(call.args[0]):
        if any(was_by_place(before, call.args[0], dim, layout) for dim in {0, before.dim() + beside}):
            return True
    written = {id(t) for t in call.written()}  # what these hold now is data
    constants = [t for t in call.tensors if id(t) not in written and call.is_constant(t)]
    return any(by_place(t, dim, layout) for t in constants for dim in {0, t.dim() + beside})


def _spans(call: Call, order: Layout) -> bool:
    """Whether a constant may hold a number for each row."""
    return any(order.rows in t.shape for t in call.constants())


def _from_trial(
    call: Call, tensor: Tensor, grown: list[tuple[int, int]], inputs: Inputs, order: Layout | None, mixed: str
) -> Layout | None:
    if not grown:
        return call.combined("combines the samples of the batch", mixed)
    if len(grown) > 1:
        return call.combined("combines samples with each other", mixed)
    layout = _grown_layout(call, tensor, grown[0], inputs, order, mixed)
    if layout is not None and not layout.mixed and tensor.size(layout.dim) != layout.rows:
        return call.combined("combines neighbouring samples", mixed)
    return layout


def _common_order(inputs: Inputs) -> tuple[Layout | None, bool]:
    """The layout whose order of rows (`owner`) all inputs share, and whether they disagree."""
    real = [(t, layout) for t, layout in inputs if not layout.mixed]
    first = next((layout for _, layout in real if layout.owner is not None), None)
    if first is None:
        orders = {(layout.outer, layout.inner) for _, layout in real}
        sizes = {outer * inner for outer, inner in orders}
        return None, len(orders) > len(sizes)  # [T * B] meets [B * T]
    return first, not all(layout.same_rows(first, tensor.device) for tensor, layout in real)


def _grown_layout(
    call: Call, tensor: Tensor, grown: tuple[int, int], inputs: Inputs, order: Layout | None, mixed: str
) -> Layout | None:
    dim, growth = grown
    if order is not None:
        if growth == 1 and tensor.size(dim) == order.rows:
            piece = order.piece
            return Layout(call.batch, dim, owner=order.owner, mixed=mixed, order=order.order, piece=piece)
    else:
        for _, layout in inputs:
            if layout.outer * layout.inner == growth:
                return layout._replace(dim=dim, mixed=mixed, is_row_index=False)
        if growth == 1:
            return Layout(call.batch, dim, mixed=mixed)
    return call.combined("reorders rows in a way that could not be followed", mixed)


def _guess(call: Call, tensor: Tensor, inputs: Inputs, mixed: str) -> Layout | None:
    """No trial succeeded: the same shape, to be checked by value."""
    if call.name in operator_table.SIZED and not any(t.dim() for t, _ in inputs):
        return None  # a number of the batch as a size
    places = {(layout.dim - source.dim(), layout.outer, layout.inner) for source, layout in inputs}
    if len(places) > 1:
        return call.combined("combines inputs whose samples lie in different dimensions", mixed)
    if call.name not in operator_table.VIEWS and call.func not in operator_table.UNCHECKED:
        for source, layout in inputs:
            if source.shape == tensor.shape:
                return layout._replace(mixed=mixed or layout.mixed)
    return call.combined("has a result whose rows could not be followed", mixed)


# ------------------------------------------------------------------ layouts inferred from shapes

_NAMES = ("masked_scatter", "index_put", "index_add", "index_copy", "masked_fill", "where", "add", "sub", "mul", "div")


def with_inferred(call: Call, inputs: Inputs, tags: Tags, again: Callable[[Call], Tags]) -> Tags:
    """Layouts of the results, where an argument's layout is a guess: confirmed, dropped, or a guess still."""
    sure = [(tensor, layout) for tensor, layout in inputs if not layout.inferred]
    guesses = [(tensor, layout) for tensor, layout in inputs if layout.inferred]
    mixes = any(layout is not None and layout.mixed for _, layout in tags)
    level = max(layout.inferred for _, layout in guesses)
    if level < 2 and sure and mixes and not any(tensor.requires_grad or layout.mixed for tensor, layout in guesses):
        if call.in_place and any(tensor is call.args[0] for tensor, _ in guesses):
            return tags
        return again(call.supposing({id(tensor): None for tensor, _ in guesses}))
    left = level if mixes or not _confirms(call, sure, tags) else 0
    return [(tensor, layout and layout._replace(inferred=left)) for tensor, layout in tags]


def _confirms(call: Call, sure: Inputs, tags: Tags) -> bool:
    """Whether every row of the result is made of known rows of its sample too."""
    if len(tags) != 1 or not any(not layout.mixed and layout.alone < 0 for _, layout in sure):
        return False
    if call.func in CONCATENATIONS:
        layout = tags[0][1]
        dim = call.argument(1, "dim", 0) % call.out.dim() if isinstance(call.out, Tensor) else 0
        return layout is not None and layout.alone < 0 and dim != layout.dim
    if call.name in ("__setitem__", *_NAMES, *[f"{name}_" for name in _NAMES]) and call.name != "where":
        first = next(iter(tensors_in(call.args)), None)
        writes = call.name.rstrip("_") not in ("add", "sub", "mul", "div")
        return not writes or any(tensor is first for tensor, _ in sure)
    return call.func is F.scaled_dot_product_attention or call.func in UNCHECKED


# `layouts_of` asks them in this order; each gives None of calls that it has nothing to say of
ANSWERS: tuple[Callable[[Call], Tags | None], ...] = (
    totals.begins_shift,
    totals.follow,
    functools.partial(totals.follow_shift, ask=_answer),
    counted,
    of_one_sample,
    _by_rule,
    ask,
)
