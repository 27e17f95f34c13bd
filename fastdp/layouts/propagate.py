"""Carry layouts through a forward: which rows of a result belong to which sample.

Most functions are asked, not listed: the function is run once on meta tensors whose batch is larger by
one, and the dimension of the result that grew is where its samples lie. The answer is cached by shapes.
Only functions that bake sizes in (views), move rows (indexing) or mix rows in place of a dimension
(softmax along the batch) need a rule of their own: `fastdp.layouts.shapes`, `rows` and `along`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import FastDPError
from . import notes, positions, totals
from .assumed import with_guesses
from .calls import Call
from .counted import counted
from .held import written
from .layout import Layout, layout_on, tag, tag_of
from .memory import written_through
from .nests import tensors_in
from .one_sample import of_no_numbers, of_one_sample
from .pieces import cut
from .positions import by_place, was_by_place
from .reads import read_of
from .shifted import begins, follow
from .trial import UNCHECKED, VIEWS, Tags, cached_trial, is_blind_to_order, is_independent

Rule = Callable[[Call], Tags]
LAYOUT_RULES: dict[Any, Rule] = {}
BY_VALUE: set[Any] = set()  # layouts of their results follow from numbers (an index, a mask): never from shapes alone
PICKING: set[Any] = set()  # functions that take places of rows as an index; their rules look at them
REFUSING: set[Any] = {F.batch_norm, F.instance_norm, torch.batch_norm}


def layout_rule(*functions: Any, by_value: bool = False) -> Callable[[Rule], Rule]:
    """Register a layout rule for torch functions. by_value: what it finds depends on the tensors' numbers, so it is
    asked at every call; what other rules find is kept by shapes (`Memo`)."""

    def register(function: Rule) -> Rule:
        for torch_function in functions:
            LAYOUT_RULES[torch_function] = function
            if by_value:
                BY_VALUE.add(torch_function)
            else:
                BY_VALUE.discard(torch_function)
        return function

    return register


def spellings(*names: str) -> list[Any]:
    """Every spelling of the functions: torch.f, Tensor.f, F.f."""
    found = [getattr(place, name, None) for name in names for place in (torch, torch.Tensor, F)]
    return [function for function in found if function is not None]


def propagate(call: Call) -> str:
    """Tag the results of the call. The caller knows that an argument has a layout.

    Returns what the call tells Python of several samples together, or ''.
    """
    if call.name == "data" and call.out is None:  # tensor.data = other
        tag(call.args[0], _of_new_memory(call, *call.args[:2]))
        return ""
    outputs = list(tensors_in(call.out))
    if not outputs and call.name != "__setitem__":
        return read_of(call, None) if call.batch > 1 else ""
    rule = LAYOUT_RULES.get(call.func)
    inputs = call.inputs()
    if call.batch <= 1:
        if call.func in REFUSING and rule is not None:
            rule(call)
        stale = next((layout.mixed for _, layout in inputs if layout.mixed), "")  # of an earlier batch
        unasked = of_no_numbers(call)
        for tensor, layout in unasked or ():
            tag(tensor, layout)
        if unasked is None:
            for tensor in outputs or tensors_in(call.args[0]):
                tag(tensor, Layout(call.batch, mixed=stale))
        return ""
    kept = next((f for t in (*outputs, *[t for t, _ in inputs]) if (f := format_of(t))), "")
    tags = _layouts_of(call, inputs) if not kept else _layouts_in(kept, call, outputs, inputs)
    if any(layout.guessed for _, layout in inputs):
        tags = with_guesses(call, inputs, tags, functools.partial(_layouts_of, call))
    into = [(tensor, layout_on(tensor), _root(tensor)) for tensor in _written(call)]
    from_places = call.func not in PICKING and any(layout.places for _, layout in inputs)
    for tensor, layout in tags:
        if from_places:
            layout = _made_of_places(call, tensor, layout)
        tag(tensor, layout)
    for tensor, before, (root, held) in into:
        layout = layout_on(tensor)
        if tensor._is_view():
            written_through(call, tensor, before, layout and layout._replace(shifted=None))
        elif before is not None and before != layout:
            tensor.__dict__[notes.RELAID] = tensor._version
        if (after := layout_on(root)) is not None and after != held:
            written(root, after, held)
    return read_of(call, tags)


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
    return None if before is layout is None else Layout(call.batch, mixed=call.mixed("takes numbers of other samples"))


def _root(tensor: Tensor) -> tuple[Tensor, Layout | None]:
    """The tensor that a view is seen through, else itself, and its layout."""
    root = tensor._base if tensor._is_view() else tensor
    return root, layout_on(root)  # type: ignore[return-value, arg-type]


def format_of(tensor: Tensor) -> str:
    """How the numbers are kept where torch has few functions of them, sparse or quantized; '' of ordinary tensors."""
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return str(tensor.layout)
    return str(tensor.dtype) if tensor.is_quantized else ""


_CONVERTING = frozenset(
    "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_dense to_mkldnn coalesce dequantize detach clone".split()
)


def _layouts_in(kept: str, call: Call, outputs: Sequence[Tensor], inputs: list[tuple[Tensor, Layout]]) -> Tags:
    """Layouts where data is sparse or quantized: of what only writes it otherwise, and of what can be asked."""
    if call.name in _CONVERTING and len(inputs) == 1 and call.out.shape == inputs[0][0].shape:
        return [(call.out, inputs[0][1])]
    try:
        return _layouts_of(call, inputs)
    except FastDPError:
        raise
    except (RuntimeError, NotImplementedError):
        why = call.mixed(f"makes or takes data kept as {kept}, whose rows fastdp cannot follow here: keep data dense")
        mixed = next((layout.mixed for _, layout in inputs if layout.mixed), "") or why
        return [(tensor, Layout(call.batch, mixed=mixed)) for tensor in outputs]


def _written(call: Call) -> list[Tensor]:
    return [call.args[0]] if call.name == "__setitem__" else call.written()


def _layouts_of(call: Call, inputs: list[tuple[Tensor, Layout]]) -> Tags:
    if any(layout.total for _, layout in inputs):
        return begins(call) or totals.follow(call, inputs)
    if any(layout.mixed for _, layout in inputs):
        totals.carry_terms(call)
        if any(layout.shifted is not None for _, layout in inputs):
            return follow(call, inputs, functools.partial(_layouts_of, call))
        tags = begins(call)
        if tags is not None:
            return tags
        numbers = counted(call)
        if numbers is not None:
            return [(call.out, numbers)]
    tags = None
    if any(layout.alone >= 0 for _, layout in inputs):
        tags = of_one_sample(call)
        if tags is not None and len(tags) == 1 and tags[0][1] is not None and tags[0][1].mixed:
            tags = totals.sums_of_single_samples(call, inputs) or tags
    if tags is None:
        rule = LAYOUT_RULES.get(call.func)
        tags = rule(call) if rule is not None else ask(call)
    return tags


def _made_of_places(call: Call, tensor: Tensor, layout: Layout | None) -> Layout | None:
    """Whole numbers made of places of rows are places again; any other number would tell of other samples."""
    if layout is None:
        return None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        return layout._replace(mixed=layout.mixed or call.mixed("computes with the places of rows in the batch"))
    return layout._replace(places=True)


def ask(call: Call) -> Tags:
    """Layouts of the results by the trial with a larger batch."""
    outputs = list(tensors_in(call.out))
    inputs = call.inputs()
    if call.name in VIEWS:  # a count over the batch may be a size: sizes are not data
        inputs = [(t, layout) for t, layout in inputs if t.dim() or not layout.mixed]
        if not inputs:
            return [(tensor, None) for tensor in outputs]
    mixed = next((layout.mixed for _, layout in inputs if layout.mixed), "")
    order, clash = _common_order(inputs)
    if clash:
        return [(t, combined(call, t, "combines rows of different samples")) for t in outputs]
    found, by_position = cached_trial(call, inputs)
    if order is not None and order.order is not None and (by_position if found is not None else _spans(call, order)):
        why = "meets numbers by position with rows whose order depends on the data"
        return [(t, combined(call, t, why, mixed)) for t in outputs]
    if by_position and any(meets_places(call, t, layout) for t, layout in inputs if not layout.mixed):
        return [(t, by_place_layout(call, t, mixed)) for t in outputs]
    if found is None or len(found) != len(outputs):
        tags: Tags = [(tensor, _guess(call, tensor, inputs, mixed)) for tensor in outputs]
    else:
        tags = [
            (tensor, _from_trial(call, tensor, grown, inputs, order, mixed))
            for tensor, grown in zip(outputs, found, strict=True)
        ]
    if not mixed and not is_independent(call, inputs, tags):
        return [(t, combined(call, t, "lets one sample's rows depend on another's")) for t in outputs]
    if not mixed and order is not None and order.order is not None and not is_blind_to_order(call, inputs, tags):
        why = "treats rows by their position, in an order that depends on the data"
        return [(t, combined(call, t, why)) for t in outputs]
    return tags


def meets_places(call: Call, source: Tensor, layout: Layout) -> bool:
    """Whether a constant among the arguments has numbers for this source's rows by their place: samples first, or where
    they lie in the source."""
    written = {id(t) for t in call.written()}  # what these hold now is data
    constants = [t for t in tensors_in((call.args, call.kwargs)) if tag_of(t, call.batch) is None]
    beside = layout.dim - source.dim()
    before = call.before
    if before is not None and any(
        was_by_place(before, call.args[0], dim, layout) for dim in {0, before.dim() + beside}
    ):
        return True
    return any(by_place(t, dim, layout) for t in constants if id(t) not in written for dim in {0, t.dim() + beside})


def by_place_layout(call: Call, tensor: Tensor, mixed: str = "") -> Layout | None:
    """The layout of a result in which numbers by place in the batch have entered."""
    return combined(call, tensor, positions.WHY, mixed)


def _spans(call: Call, order: Layout) -> bool:
    """Whether a constant may hold a number for each row."""
    tensors = tensors_in((call.args, call.kwargs))
    return any(order.rows in t.shape for t in tensors if tag_of(t, call.batch) is None)


def _from_trial(
    call: Call,
    tensor: Tensor,
    grown: list[tuple[int, int]],
    inputs: list[tuple[Tensor, Layout]],
    order: Layout | None,
    mixed: str,
) -> Layout | None:
    if not grown:
        return combined(call, tensor, "combines the samples of the batch", mixed)
    if len(grown) > 1:
        return combined(call, tensor, "combines samples with each other", mixed)
    layout = _grown_layout(call, tensor, grown[0], inputs, order, mixed)
    if layout is not None and not layout.mixed and tensor.size(layout.dim) != layout.rows:
        return combined(call, tensor, "combines neighbouring samples", mixed)
    return layout


def has_data_beside_first(call: Call) -> bool:
    """Whether an argument after the first carries samples: what all samples share must not be made of some."""
    return bool(call.beside_first())


def combined(call: Call, tensor: Tensor, why: str, mixed: str = "") -> Layout | None:
    """Made of several samples: numbers, and masks and counts, which may become numbers."""
    return Layout(call.batch, mixed=mixed or call.mixed(why))


def one_row(call: Call, tensor: Tensor, layout: Layout, row: int) -> Layout | None:
    """A row of the batch without its dimension: the tensor of one sample."""
    if layout.order is not None:
        return combined(call, tensor, "picks a row of an order that depends on other samples")
    return cut(call.args[0], layout, layout.of_sample(int(layout.owners(tensor.device)[row])))


def _common_order(inputs: list[tuple[Tensor, Layout]]) -> tuple[Layout | None, bool]:
    """The layout whose order of rows (`owner`) all inputs share, and whether they disagree."""
    real = [(t, layout) for t, layout in inputs if not layout.mixed]
    first = next((layout for _, layout in real if layout.owner is not None), None)
    if first is None:
        orders = {(layout.outer, layout.inner) for _, layout in real}
        sizes = {outer * inner for outer, inner in orders}
        return None, len(orders) > len(sizes)  # [T * B] meets [B * T]
    return first, not all(layout.same_rows(first, tensor.device) for tensor, layout in real)


def _grown_layout(
    call: Call,
    tensor: Tensor,
    grown: tuple[int, int],
    inputs: list[tuple[Tensor, Layout]],
    order: Layout | None,
    mixed: str,
) -> Layout | None:
    dim, growth = grown
    if order is not None:
        if growth == 1 and tensor.size(dim) == order.rows:
            piece = order.piece
            return Layout(call.batch, dim, owner=order.owner, mixed=mixed, order=order.order, piece=piece)
    else:
        for _, layout in inputs:
            if layout.outer * layout.inner == growth:
                return layout._replace(dim=dim, mixed=mixed, places=False)
        if growth == 1:
            return Layout(call.batch, dim, mixed=mixed)
    return combined(call, tensor, "reorders rows in a way that could not be followed", mixed)


_SIZED = frozenset("arange zeros ones empty eye rand randn randperm tril_indices triu_indices".split())


def _guess(call: Call, tensor: Tensor, inputs: list[tuple[Tensor, Layout]], mixed: str) -> Layout | None:
    """No trial succeeded: the same shape, or the only dimension of the right size, to be checked by value."""
    if call.name in _SIZED and not any(t.dim() for t, _ in inputs):
        return None  # a number of the batch as a size
    places = {(layout.dim - source.dim(), layout.outer, layout.inner) for source, layout in inputs}
    if len(places) > 1:
        return combined(call, tensor, "combines inputs whose samples lie in different dimensions", mixed)
    if call.name not in VIEWS and call.func not in UNCHECKED:
        for source, layout in inputs:
            if source.shape == tensor.shape:
                return layout._replace(mixed=mixed or layout.mixed)
        found = {
            (dim, layout)
            for _, layout in inputs
            if layout.owner is None and not layout.mixed
            for dim, size in enumerate(tensor.shape)
            if size == layout.rows
        }
        if len(found) == 1:
            dim, layout = found.pop()
            return layout._replace(dim=dim, mixed=mixed)
    return combined(call, tensor, "has a result whose rows could not be followed", mixed)
