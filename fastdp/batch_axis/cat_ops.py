"""Layout rules of functions that join or split tensors along a dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from ..utils.pytree import tensors_in
from . import tensor_notes
from .batch_slices import cut, joined_rows
from .calls import Call, Tags, layout_rule
from .layout import Layout
from .operator_table import CONCATENATIONS, spellings
from .propagate import ask, one_row

T = torch.Tensor


@layout_rule(*CONCATENATIONS, joins=True)
def _cat(call: Call) -> Tags:
    tensors, dim = call.args[0], call.argument(1, "dim", 0)
    layouts = [call.layout(tensor) for tensor in tensors]
    if any(layout is not None and layout.alone >= 0 for layout in layouts):
        return _joined(call, list(tensors), dim % call.out.dim())
    known = [layout for layout in layouts if layout is not None]
    if not known or dim % call.out.dim() != known[0].dim:
        return ask(call)
    if len(known) < len(layouts) or len({layout.dim for layout in known}) > 1:
        return call.all_combined("joins constants to the batch")
    mixed = next((layout.mixed for layout in known if layout.mixed), "")
    piece, problem = joined_rows(known)
    if problem:
        return call.all_combined(problem, mixed)
    owner = torch.cat([layout.owners(tensor.device) for layout, tensor in zip(known, tensors, strict=True)])
    if all(layout.owner is None and layout.outer == 1 and layout.inner == known[0].inner for layout in known):
        return [(call.out, known[0]._replace(outer=len(known), mixed=mixed))]
    order = _joined_order(known, call.out.device)
    whole = Layout(call.batch, known[0].dim, owner=owner, mixed=mixed, order=order, piece=piece)
    return [(call.out, whole.taken(whole.dim, torch.arange(owner.numel(), device=owner.device)))]


def _joined(call: Call, tensors: list[Tensor], dim: int) -> Tags:
    """Tensors of one sample each (or rows of samples along `dim`) one after another; empty constants count for none."""
    known: list[Layout] = []
    single = all((found := call.layout(tensor)) is None or found.alone >= 0 for tensor in tensors)
    for tensor in tensors:
        layout = call.layout(tensor)
        if layout is None and tensor.numel() == 0:
            continue
        layout = None if layout is None else layout.along(dim, tensor.size(dim), tensor.device)
        if layout is None or layout.dim != dim or layout.mixed:
            return call.all_combined("joins rows of different samples")
        known.append(layout)
    device = call.out.device
    parts = [found for tensor in tensors if (found := call.layout(tensor)) is not None] if single else known
    piece, problem = joined_rows(parts)  # of single samples that went different ways a note is left
    if problem:
        return call.all_combined(problem)
    owner = torch.cat([layout.owners(device) for layout in known])
    places, inferred = any(layout.is_row_index for layout in known), any(layout.inferred for layout in known)
    order = _joined_order(known, device)
    whole = Layout(call.batch, dim, owner=owner, order=order, is_row_index=places, inferred=inferred, piece=piece)
    return [(call.out, whole.taken(dim, torch.arange(owner.numel(), device=device)))]


@layout_rule(torch.stack, joins=True)
def _stack(call: Call) -> Tags:
    """A loop's results put together again, or tensors of the whole batch side by side."""
    tensors, dim = call.args[0], call.argument(1, "dim", 0)
    if all(layout.alone < 0 for _, layout in call.inputs()):
        return ask(call)
    dim = dim % call.out.dim()
    known = [call.layout(tensor) for tensor in tensors]
    if any(layout is None or layout.alone < 0 for layout in known):
        return call.all_combined("joins rows of different samples")
    joined_rows([layout for layout in known if layout is not None])
    owner = torch.tensor([layout.alone for layout in known if layout is not None], device=call.out.device)
    places, inferred = (any(getattr(layout, name) for layout in known) for name in ("is_row_index", "inferred"))
    whole = Layout(call.batch, dim, owner=owner, is_row_index=places, inferred=inferred)
    return [(call.out, whole.taken(dim, torch.arange(len(owner), device=owner.device)))]


@layout_rule(torch._C._nn.pad_sequence, joins=True)
def _pad_sequence(call: Call) -> Tags:
    """Rows [t_b, ...] of one sample each, padded to the longest and put side by side."""
    tensors, batch_first = call.args[0], call.argument(1, "batch_first", False)
    known = [call.layout(tensor) for tensor in tensors]
    if all(layout is None or layout.alone < 0 for layout in known):
        return ask(call)
    owners = [-1 if layout is None or layout.mixed or layout.is_row_index else layout.alone for layout in known]
    if -1 in owners:
        return call.all_combined("joins rows of different samples")
    owner = torch.tensor(owners, device=call.out.device)
    inferred = any(layout is not None and layout.inferred for layout in known)
    call.out.__dict__[tensor_notes.LONGEST] = 1 if batch_first else 0
    whole = Layout(call.batch, 0 if batch_first else 1, owner=owner, inferred=inferred)
    return [(call.out, whole.taken(whole.dim, torch.arange(len(owner), device=owner.device)))]


def _joined_order(layouts: list[Layout], device: torch.device) -> Tensor | None:
    """Groups of the rows of tensors put one after another (the experts' parts of JetMoe)."""
    if all(layout.order is None for layout in layouts):
        return None
    parts: list[Tensor] = []
    for layout in layouts:
        keys = torch.arange(layout.rows, device=device) if layout.order is None else layout.order
        new = torch.ones(layout.rows, dtype=torch.long, device=device)
        if layout.rows:
            new[1:] = keys[1:] != keys[:-1]
        parts.append(new)
    return torch.cat(parts).cumsum(0)


@layout_rule(  # into sizes of one sample each, too
    *spellings("chunk", "split", "split_with_sizes", "tensor_split", "unbind"), T.__iter__, joins=True
)
def _split(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim = call.argument(1 if call.name == "unbind" else 2, "dim", 0) if call.name != "__iter__" else 0
    sized = any(found.alone >= 0 for item in tensors_in(call.args[1:2]) if (found := call.layout(item)) is not None)
    if sized and (layout is None or layout.mixed or layout.alone >= 0 or dim % source.dim() != layout.dim):
        why = "cuts all samples where the data of some says"
        return call.all_combined(why)
    if layout is None or layout.mixed or dim % source.dim() != layout.dim:
        return ask(call)
    tags: Tags = []
    start, rows = 0, torch.arange(layout.rows, device=source.device)
    for number, part in enumerate(call.results()):
        if part.dim() < source.dim():
            tags.append((part, one_row(call, part, layout, number)))
            continue
        stop = start + part.size(layout.dim)
        if not layout.may_end(start, stop):
            tags.append((part, call.combined("cuts rows off an order that depends on other samples")))
        else:
            found = cut(source, layout, layout.taken(layout.dim, rows[start:stop]))
            tags.append((part, found._replace(size_from_data=found.size_from_data or (sized and found.alone >= 0))))
        start = stop
    return tags
