"""Loops over the samples: tensors that belong to one sample as a whole (`Layout.alone`).

Whatever is made of one sample's data and of constants is that sample's: no function need be asked. Where tensors of
different samples meet, samples are mixed, but in the functions that put rows together (`LayoutRule.joins`): their rules
know which rows are whose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..utils.pytree import tensors_in
from . import operator_table
from .aliasing import base_written
from .calls import Call, Inputs, Tags, rule_of
from .layout import Layout, owner_of, tag_of
from .totals import sums_of_single_samples


def of_one_sample(call: Call) -> Tags | None:
    """Where an argument is of one sample; None where the function's own rule is to say."""
    inputs, rule = call.inputs(), rule_of(call.func)
    if rule.reaches or all(layout.alone < 0 for _, layout in inputs):
        return None
    if (unasked := of_no_numbers(call)) is not None:
        return unasked
    owners = {owner_of(layout) for _, layout in inputs}
    first = call.layout(call.args[0]) if call.args else None
    picked_by_places = any(layout.is_row_index for tensor, layout in inputs if tensor is not call.args[0])
    whose = owners.pop() if len(owners) == 1 and not picked_by_places else -1
    if whose >= 0 and _fills_the_batch(call, whose):
        return None
    if whose < 0:
        if rule.joins and not any(layout.mixed for _, layout in inputs):
            return None  # its rule looks at every tensor's rows
        why = next((layout.mixed for _, layout in inputs if layout.mixed), "") or call.mixed(
            "combines rows of different samples"
        )
        layout = Layout(call.batch, mixed=why)
    else:
        places = first is not None and first.is_row_index
        pieces = [known.piece for _, known in inputs if known.piece is not None]
        sized = _is_sized(call, inputs)
        layout = Layout(
            call.batch, is_row_index=places, alone=whose, size_from_data=sized, piece=pieces[0] if pieces else None
        )
    outputs = call.results() or list(tensors_in(call.args[0]))
    if whose >= 0 and call.in_place:
        layout = _written_view(call, outputs[0], layout)
    tags: Tags = [(tensor, layout) for tensor in outputs]
    total = sums_of_single_samples(call) if layout.mixed and len(tags) == 1 else None
    return tags if total is None else total


def of_no_numbers(call: Call) -> Tags | None:
    """Layouts of the results of a call that takes only a dtype, a device or a shape of data; None of any other.

    Without it `mask.to(h)` would be data wherever data has the mask's dtype, since every result of a batch of one is.
    """
    if call.name in operator_table.TAKING_A_TYPE:
        found = call.layout(call.args[0])
    elif (call.name.partition("_")[0] == "new" and not numbers_in(call)) or (
        call.name in operator_table.LIKE and len(call.inputs()) == 1
    ):
        found = None
    else:
        return None
    return [(tensor, found) for tensor in call.results()]


def numbers_in(call: Call) -> Inputs:
    """The data whose numbers fill a new constant (new_full, new_tensor, new); a size is no data."""
    filling = {"new_full": (2, "fill_value"), "new_tensor": (1, "data"), "new": (1, "data")}.get(call.name)
    found = [] if filling is None else [(t, call.layout(t)) for t in tensors_in((call.argument(*filling),))]
    return [(tensor, layout) for tensor, layout in found if layout is not None]


def _fills_the_batch(call: Call, sample: int) -> bool:
    """Whether a sample's data goes to its place in a constant that has one for every sample: out[b] = ..., or
    out[b : b + 1] = ..."""
    if call.name != "__setitem__" or call.layout(call.args[0]) is not None:
        return False
    target, index = call.args[:2]
    items = index if isinstance(index, tuple) else (index,)
    if any(item is None or item is Ellipsis for item in items):
        return False
    sizes = zip(items, target.shape, strict=False)
    return any(size == call.batch and _is_row(item, sample, size) for item, size in sizes)


def _is_row(item: Any, sample: int, size: int) -> bool:
    """Whether an index takes this row of so many alone."""
    if type(item) is int:
        return item % size == sample
    return (
        isinstance(item, slice)
        and all(type(end) in (int, type(None)) for end in (item.start, item.stop, item.step))
        and (range(size)[item] == range(sample, sample + 1))
    )


def _is_sized(call: Call, inputs: Inputs) -> bool:
    """Whether a size of the result may be made by the data."""
    if any(layout.size_from_data or layout.order is not None for _, layout in inputs):
        return True
    if call.name in operator_table.SIZED_BY_DATA:  # a number of Python sizes all samples' alike
        told = {"repeat_interleave": "repeats", "one_hot": "num_classes"}.get(call.name)
        return told is None or type(number := call.argument(1, told)) is not int or number < 0
    if call.name == "where":
        return len(call.args) == 1 and not call.kwargs
    return call.name == "__getitem__" and any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(call.args[1]))


def _written_view(call: Call, view: Tensor, layout: Layout) -> Layout:
    """A sample's data written through a view of a larger memory makes that memory data: rows of that sample's place."""
    base = view._base if view._is_view() else None
    before = None if base is None else tag_of(base, call.batch)
    if base is None or before == layout or (before is not None and before.alone == layout.alone):
        return layout
    if before is not None and before.mixed:
        return before
    known = before is not None or tag_of(view, call.batch) is None
    whose = torch.tensor(layout.alone, device=view.device)
    found = base_written(base, view, before, whose, call.batch) if known else None
    layout = call.combined("writes one sample's data into memory of others") if found is None else layout
    call.bases.append((base, found or layout))
    return layout
