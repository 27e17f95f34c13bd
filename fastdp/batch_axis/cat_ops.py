"""Layout rules of functions that join or split tensors along a dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..utils.pytree import tensors_in
from . import tensor_notes
from .batch_slices import cut, joined_rows
from .calls import Call, Tags, layout_rule
from .host_values import numbered
from .index_kinds import brought_back, looked_at
from .layout import Layout
from .operator_table import CONCATENATIONS, spellings
from .propagate import ask

T = torch.Tensor


@layout_rule(*CONCATENATIONS, joins=True)
def _cat(call: Call) -> Tags:
    tensors, dim = call.args[0], call.argument(1, "dim", 0) % call.out.dim()
    layouts = [call.layout(tensor) for tensor in tensors]
    if not any(layout is not None and (layout.alone >= 0 or layout.dim == dim) for layout in layouts):
        return ask(call)
    given = zip(layouts, tensors, strict=True)
    return _joined(call, [(found, t.size(dim)) for found, t in given if found is not None or t.numel()], dim)


@layout_rule(torch.stack, torch._C._nn.pad_sequence, joins=True)
def _side_by_side(call: Call) -> Tags:
    """Tensors of one sample each (those of a loop, padded perhaps), or of the whole batch."""
    if all(layout.alone < 0 for _, layout in call.inputs()):
        return ask(call)
    dim = call.argument(1, "dim", 0) % call.out.dim()
    if call.name == "pad_sequence":
        dim = 0 if call.argument(1, "batch_first", False) else 1
        call.out.__dict__[tensor_notes.LONGEST] = 1 - dim
    several = call.combined("joins rows of different samples")
    layouts = [several if found is not None and found.alone < 0 else found for found in map(call.layout, call.args[0])]
    return _joined(call, [(found and found._replace(size_from_data=False), 1) for found in layouts], dim)


def _joined(call: Call, parts: Sequence[tuple[Layout | None, int]], dim: int) -> Tags:
    """Rows of samples along a dimension (so many of a tensor of one sample), one part after another."""
    device = call.out.device
    if len(parts) == call.batch and all(found is None or found.alone == k for k, (found, _) in enumerate(parts)):
        # of some samples it is a constant
        parts = [(found or Layout(call.batch, alone=k), size) for k, (found, size) in enumerate(parts)]
    known = [found.along(dim, size, device) for found, size in parts if found is not None]
    mixed = next((layout.mixed for layout in known if layout.mixed), "")
    if len(known) < len(parts) or mixed or any(layout.dim != dim for layout in known):
        return call.all_combined("joins rows of different samples", mixed)
    piece, problem = joined_rows([found for found, _ in parts if found is not None])
    if problem:
        return call.all_combined(problem)
    order = _joined_order(known, device)
    where, seen = device, [looked_at(layout, (), device) for layout in known]
    if all(place.type == "cpu" for _, _, place in seen):
        where, known = torch.device("cpu"), [layout for layout, _, _ in seen]
    owner = torch.cat([layout.owners(where) for layout in known])
    places, inferred = any(layout.is_row_index for layout in known), max(layout.inferred for layout in known)
    whole = Layout(call.batch, dim, owner=owner, order=order, is_row_index=places, inferred=inferred, piece=piece)
    return [(call.out, brought_back(whole.taken(dim, numbered(owner.numel(), where)), device))]


def _joined_order(layouts: list[Layout], device: torch.device) -> Tensor | None:
    """Groups of the rows of tensors put one after another (the experts' parts of JetMoe)."""
    if all(layout.order is None for layout in layouts):
        return None
    parts: list[Tensor] = []
    for layout in layouts:
        keys = torch.arange(layout.rows, device=device) if layout.order is None else layout.order
        new = torch.ones(layout.rows, dtype=torch.long, device=device)
        new[1:] = keys[1:] != keys[:-1]
        parts.append(new)
    return torch.cat(parts).cumsum(0)


def _split_dim(call: Call) -> int:
    """Along which dimension a function splits."""
    fixed = {"__iter__": 0, "vsplit": 0, "hsplit": min(1, call.args[0].dim() - 1), "dsplit": 2}
    return int(fixed.get(call.name, call.argument(1 if call.name == "unbind" else 2, "dim", 0)))


@layout_rule(  # into sizes of one sample each, too
    *spellings("chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind"),
    T.__iter__,
    joins=True,
)
def _split(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim = _split_dim(call)
    sized = any(found.alone >= 0 for item in tensors_in(call.args[1:2]) if (found := call.layout(item)) is not None)
    if layout is None or layout.mixed or layout.alone >= 0 or dim % source.dim() != layout.dim:
        return call.all_combined("cuts all samples where the data of some says") if sized else ask(call)
    tags: Tags = []
    seen, _, device = looked_at(layout, (), source.device)
    rows, start = numbered(layout.rows, device), 0
    for part in call.results():
        single = part.dim() < source.dim()
        taken = rows[start : start + (1 if single else part.size(layout.dim))]
        start += len(taken)
        if layout.order is not None and (single or not layout.may_take(taken)):
            tags.append((part, call.combined("cuts rows off an order that depends on other samples")))
            continue
        found = seen.of_sample(int(seen.owners(device)[taken[0]])) if single else seen.taken(layout.dim, taken)
        found = cut(source, layout, brought_back(found, source.device), taken)
        tags.append((part, found._replace(size_from_data=found.size_from_data or (sized and found.alone >= 0))))
    return tags
