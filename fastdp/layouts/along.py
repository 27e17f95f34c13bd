"""Layout rules of functions that join, split, reduce, move or combine along a dimension: is it the batch's?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import SampleMixingError
from . import notes
from .calls import Call, tensors_in
from .layout import Layout, tag
from .masks import masks_others
from .one_sample import JOINING
from .pieces import NOTED, cut, joined_rows
from .positions import by_place
from .propagate import Rule, ask, combined, has_data_beside_first, one_row, rule, spellings
from .totals import equal_counts, note_terms, total_of
from .trial import Tags

T = torch.Tensor


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(call: Call) -> Tags:
    tensors, dim = call.args[0], call.argument(1, "dim", 0)
    layouts = [call.layout(tensor) for tensor in tensors]
    if any(layout is not None and layout.alone >= 0 for layout in layouts):
        return _joined(call, list(tensors), dim % call.out.dim())
    known = [layout for layout in layouts if layout is not None]
    if not known or dim % call.out.dim() != known[0].dim:
        return ask(call)
    if len(known) < len(layouts) or len({layout.dim for layout in known}) > 1:
        return [(call.out, combined(call, call.out, "joins constants to the batch"))]
    mixed = next((layout.mixed for layout in known if layout.mixed), "")
    piece, problem = joined_rows(known)
    if problem:
        return [(call.out, combined(call, call.out, problem, mixed))]
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
            return [(call.out, combined(call, call.out, "joins rows of different samples"))]
        known.append(layout)
    device = call.out.device
    parts = [found for tensor in tensors if (found := call.layout(tensor)) is not None] if single else known
    piece, problem = joined_rows(parts)  # of single samples that went different ways a note is left
    if problem:
        return [(call.out, combined(call, call.out, problem))]
    owner = torch.cat([layout.owners(device) for layout in known])
    places, guessed = any(layout.places for layout in known), any(layout.guessed for layout in known)
    order = _joined_order(known, device)
    whole = Layout(call.batch, dim, owner=owner, order=order, places=places, guessed=guessed, piece=piece)
    return [(call.out, whole.taken(dim, torch.arange(owner.numel(), device=device)))]


@rule(torch.stack)
def _stack(call: Call) -> Tags:
    """A loop's results put together again, or tensors of the whole batch side by side."""
    tensors, dim = call.args[0], call.argument(1, "dim", 0)
    if all(layout.alone < 0 for _, layout in call.inputs()):
        return ask(call)
    dim = dim % call.out.dim()
    known = [call.layout(tensor) for tensor in tensors]
    if any(layout is None or layout.alone < 0 for layout in known):
        return [(call.out, combined(call, call.out, "joins rows of different samples"))]
    joined_rows([layout for layout in known if layout is not None])
    owner = torch.tensor([layout.alone for layout in known if layout is not None], device=call.out.device)
    places, guessed = (any(getattr(layout, name) for layout in known) for name in ("places", "guessed"))
    whole = Layout(call.batch, dim, owner=owner, places=places, guessed=guessed)
    return [(call.out, whole.taken(dim, torch.arange(len(owner), device=owner.device)))]


@rule(torch._C._nn.pad_sequence)
def _pad_sequence(call: Call) -> Tags:
    """Rows [t_b, ...] of one sample each, padded to the longest and put side by side."""
    tensors, batch_first = call.args[0], call.argument(1, "batch_first", False)
    known = [call.layout(tensor) for tensor in tensors]
    if all(layout is None or layout.alone < 0 for layout in known):
        return ask(call)
    owners = [-1 if layout is None or layout.mixed or layout.places else layout.alone for layout in known]
    if -1 in owners:
        return [(call.out, combined(call, call.out, "joins rows of different samples"))]
    owner = torch.tensor(owners, device=call.out.device)
    guessed = any(layout is not None and layout.guessed for layout in known)
    call.out.__dict__[notes.LONGEST] = 1 if batch_first else 0
    whole = Layout(call.batch, 0 if batch_first else 1, owner=owner, guessed=guessed)
    return [(call.out, whole.taken(whole.dim, torch.arange(len(owner), device=owner.device)))]


JOINING.update((torch.cat, torch.concat, torch.concatenate, torch.stack, torch._C._nn.pad_sequence))


def _joined_order(layouts: list[Layout], device: torch.device) -> Tensor | None:
    """Groups of the rows of tensors put one after another."""
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


_SPLITTING = (*spellings("chunk", "split", "split_with_sizes", "tensor_split", "unbind"), T.__iter__)


@rule(*_SPLITTING)
def _split(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    dim = call.argument(1 if call.name == "unbind" else 2, "dim", 0) if call.name != "__iter__" else 0
    sized = any(found.alone >= 0 for item in tensors_in(call.args[1:2]) if (found := call.layout(item)) is not None)
    if sized and (layout is None or layout.mixed or layout.alone >= 0 or dim % source.dim() != layout.dim):
        why = "cuts all samples where the data of some says"
        return [(part, combined(call, part, why)) for part in tensors_in(call.out)]
    if layout is None or layout.mixed or dim % source.dim() != layout.dim:
        return ask(call)
    tags: Tags = []
    start, rows = 0, torch.arange(layout.rows, device=source.device)
    for number, part in enumerate(tensors_in(call.out)):
        if part.dim() < source.dim():
            tags.append((part, one_row(call, part, layout, number)))
            continue
        stop = start + part.size(layout.dim)
        if not layout.may_end(start, stop):
            tags.append((part, combined(call, part, "cuts rows off an order that depends on other samples")))
        else:
            found = cut(source, layout, layout.taken(layout.dim, rows[start:stop]))
            tags.append((part, found._replace(sized=found.sized or (sized and found.alone >= 0))))
        start = stop
    return tags


JOINING.update(_SPLITTING)  # into sizes of one sample each


@rule(*spellings("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod", "all", "any", "argmax", "argmin"))
def _reduce(call: Call) -> Tags:
    """Over some dimensions; over the batch's the samples are combined."""
    source, layout = call.args[0], call.layout(call.args[0])
    dims = call.argument(1, "dim")
    if layout is None or layout.mixed or not isinstance(call.out, Tensor) or len(call.args) > 3:
        return ask(call)
    if isinstance(dims, bool) or dims is None or (isinstance(dims, tuple | list) and not dims):
        return [(call.out, _over_samples(call, layout))]
    over = {dim % source.dim() for dim in (dims if isinstance(dims, tuple | list) else (dims,))}
    if call.name in ("mean", "var", "std") and source.__dict__.get(notes.LONGEST) in over:
        NOTED.append(
            call.mixed("divides by the length of the longest sample in the batch, to which others were padded")
        )
    if layout.dim in over:
        return [(call.out, _over_samples(call, layout))]
    kept = call.out.dim() == source.dim()
    return [(call.out, layout if kept else layout._replace(dim=layout.dim - sum(d < layout.dim for d in over)))]


def _over_samples(call: Call, layout: Layout) -> Layout | None:
    """Of a reduction over the samples: a total, if it is a sum, or a mean over a number that no data made."""
    source = call.args[0]
    if call.name not in ("sum", "mean"):
        return combined(call, call.out, "combines the samples of the batch")
    if call.name == "mean" and not equal_counts(layout, source.device):
        return combined(call, call.out, "divides by the number of rows in the batch, which several samples made")
    if call.out.numel() == 1 and call.name == "sum":
        note_terms(call.out, source, layout)
    return total_of(call, call.out, layout, call.name)


def along(position: int, name: str) -> Rule:
    """The rule of functions that combine the positions of dimension `name` and keep its size."""

    def function(call: Call) -> Tags:
        source, layout = call.args[0], call.layout(call.args[0])
        dims = call.argument(position, name, -1 if name == "dim" else None)
        if dims is None and call.name in ("softmax", "log_softmax", "softmin"):
            dims = 0 if source.dim() in (0, 1, 3) else 1  # what torch takes where none is given
        dims = range(source.dim()) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
        if layout is not None and layout.dim in [dim % source.dim() for dim in dims if source.dim()]:
            why = "works along the batch dimension"
            return [(tensor, combined(call, tensor, why)) for tensor in tensors_in(call.out)]
        if layout is not None and isinstance(call.out, Tensor) and call.out.shape == source.shape:
            return [(call.out, layout)]
        return ask(call)

    return function


rule(*spellings("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin"))(along(1, "dim"))
rule(*spellings("logcumsumexp", "cumsum_", "cumprod_"))(along(1, "dim"))


@rule(*spellings("flip", "roll"))
def _moved(call: Call) -> Tags:
    """Rows in another order: apply the same to the sample numbers."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None or layout.mixed:
        return [(call.out, layout)]
    rows = torch.arange(layout.rows, device=source.device)
    if call.name == "flip":
        dims = call.args[1:] if isinstance(call.argument(1, "dims"), int) else call.argument(1, "dims")
        if layout.dim in [dim % source.dim() for dim in dims]:
            return [(call.out, layout.taken(layout.dim, rows.flip(0)))]
        return [(call.out, layout)]
    shifts, dims = call.argument(1, "shifts"), call.argument(2, "dims")
    if dims is None or dims == ():
        return [(call.out, combined(call, call.out, "rolls samples into each other"))]
    pairs = zip(*((v,) if isinstance(v, int) else tuple(v) for v in (shifts, dims)), strict=True)
    along = [shift for shift, dim in pairs if dim % source.dim() == layout.dim]
    if not sum(along) % max(layout.rows, 1):
        return [(call.out, layout)]
    order = None if layout.order is None else torch.zeros_like(rows)  # the groups go round
    return [(call.out, layout.taken(layout.dim, rows.roll(sum(along)), order))]


rule(F.normalize)(along(2, "dim"))


@rule(F.scaled_dot_product_attention)
def _attention(call: Call) -> Tags:
    known = _apart_in_attention(call)
    if known is not None:
        return [(call.out, known)]
    if len(call.inputs()) > len([t for t in tensors_in(call.args[:3]) if call.layout(t) is not None]):
        return ask(call)  # a mask made of data
    query = call.layout(call.args[0])
    for tensor in tensors_in(call.args[:3]):
        layout = call.layout(tensor)
        if layout is not None and layout.dim >= tensor.dim() - 2:
            apart = query is not None and masks_others(call, query)
            return [(call.out, query if apart else combined(call, call.out, "attends from one sample to another"))]
    others = {call.layout(tensor) for tensor in tensors_in(call.args[1:3])}
    if query is not None and query.owner is None and others == {query}:
        return [(call.out, query)]
    return ask(call)


def _apart_in_attention(call: Call) -> Layout | None:
    """The result's layout, where queries, keys, values and mask have the samples in one dimension before those that are
    combined: whatever they hold, no sample meets another. None where that cannot be told from shapes."""
    known = call.inputs()
    places = {layout.dim - tensor.dim() for tensor, layout in known}
    place, first = max(places), known[0][1]
    grouped = bool(call.kwargs.get("enable_gqa")) and place == -3  # rows of keys then serve several of queries
    if len(places) > 1 or place >= -2 or grouped or call.out.size(place) != first.rows:
        return None
    for tensor, layout in known:
        plain = layout.owner is layout.order is None and layout.alone < 0 and not (layout.mixed or layout.places)
        if not plain or layout.guessed or layout[2:4] != first[2:4] or tensor.size(place) != first.rows:
            return None
    return first._replace(dim=call.out.dim() + place)


@rule(torch.dot, T.dot, torch.inner, T.inner, torch.vdot, T.vdot)
def _dot(call: Call) -> Tags:
    """The samples' numbers, each by its weight, added up."""
    return _weighted(call) or ask(call)


def _weighted(call: Call) -> Tags | None:
    """Of one number per sample times constants that do not tell them apart; None for other products."""
    inputs, both = call.inputs(), call.args[:2]
    if not inputs or len(both) < 2 or any(not isinstance(t, Tensor) or t.dim() != 1 for t in both):
        return None
    layout = inputs[0][1]
    if any(other.mixed or other.alone >= 0 or not other.same_rows(layout, t.device) for t, other in inputs):
        return None
    if any(by_place(t, 0, layout) for t in both):
        return None
    return [(call.out, total_of(call, call.out, layout, "sum"))]


@rule(F.linear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def _times_matrix(call: Call) -> Tags:
    """Data [..., I] times a constant matrix: each row by itself, along whichever other dimension the samples lie."""
    if (found := _weighted(call)) is not None:
        return found
    source, layout = call.args[0], call.layout(call.args[0])
    matrix = call.argument(1, "weight" if call.name == "linear" else "other")
    if layout is None or layout.mixed or len(call.inputs()) != 1 or "out" in call.kwargs:
        return ask(call)
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or layout.dim >= source.dim() - 1:
        return ask(call)
    bias = call.argument(2, "bias") if call.name == "linear" else None
    return [(call.out, layout)] if bias is None or bias.dim() == 1 else ask(call)


@rule(F.embedding)
def _embedding(call: Call) -> Tags:
    """Rows of a constant table: a dimension more, behind."""
    layout = call.layout(call.args[0])
    return [(call.out, layout)] if layout is not None and len(call.inputs()) == 1 else ask(call)


@rule(F.layer_norm, F.rms_norm)
def _layer_norm(call: Call) -> Tags:
    source, layout = call.args[0], call.layout(call.args[0])
    if has_data_beside_first(call):
        return [(call.out, combined(call, call.out, "scales all samples by numbers made of the batch"))]
    if layout is not None and layout.dim >= source.dim() - len(call.argument(1, "normalized_shape")):
        return [(call.out, combined(call, call.out, "normalises over the batch"))]
    return [(call.out, layout)]


@rule(F.batch_norm, F.instance_norm, torch.batch_norm)
def _batch_norm(call: Call) -> Tags:
    if call.name == "batch_norm" and call.argument(5, "training", False):
        raise SampleMixingError(
            f"{call.mixed()} in training mode normalises every sample by the statistics of the whole batch, so "
            "per-sample gradients do not exist. fastdp.make_compatible(model) makes it a GroupNorm; or call its eval()."
        )
    if call.name == "instance_norm" and call.argument(5, "use_input_stats", True):
        if call.argument(1, "running_mean") is not None:
            raise SampleMixingError(
                f"{call.mixed()} keeps running statistics of the data, which would be released without noise. "
                "Use track_running_stats=False, or put the module in eval mode."
            )
    if has_data_beside_first(call):
        return [(call.out, combined(call, call.out, "normalises all samples by numbers made of the batch"))]
    if call.name == "instance_norm" and (layout := call.layout(call.args[0])) is not None and layout.dim > 1:
        return [(call.out, combined(call, call.out, "normalises over the batch"))]
    tag(call.out, call.layout(call.args[0]))
    return [(call.out, call.layout(call.args[0]))]


@rule(*[getattr(torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")])  # type: ignore[attr-defined]
def _recurrent(call: Call) -> Tags:
    """Frozen recurrent layers: samples lie in dimension 1 (0 if batch_first), or are packed."""
    source, layout = call.args[0], call.layout(call.args[0])
    tensors = list(tensors_in(call.out))
    if layout is None or layout.mixed:
        return ask(call)
    packed = isinstance(call.args[3], list | tuple)  # (data, batch_sizes, hx, weights, ...), else (input, hx, ...)
    if layout.dim != (0 if packed or call.args[-1] else 1) or source.dim() != (2 if packed else 3):
        return [(t, combined(call, t, "takes the batch for the sequence")) for t in tensors]
    rows = torch.arange(int(call.args[1][0]), device=source.device) if packed else None
    ends = layout._replace(dim=1) if rows is None else layout.taken(1, rows)
    for _, state in call.beside_first():
        if state.mixed or state.dim != 1 or not state.same_rows(ends, source.device):
            return [(t, combined(call, t, "begins with the state of other samples")) for t in tensors]
    return [(tensors[0], layout), *[(t, ends) for t in tensors[1:]]]


@rule(torch._VF._pad_packed_sequence, torch._VF._pack_padded_sequence)  # type: ignore[attr-defined]
def _packed(call: Call) -> Tags:
    """Packed rows lie by time: step t holds the first batch_sizes[t] samples of the sorted order."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is None:
        return []
    result, batch_first = call.out[0], call.argument(2, "batch_first", False)
    packs = call.name == "_pack_padded_sequence"
    sizes = [int(size) for size in (call.out[1] if packs else call.args[1])]
    if layout.mixed or layout.dim != (0 if batch_first or not packs else 1):
        return [(result, combined(call, result, "takes the batch for the sequence", layout.mixed))]
    owners = layout.owners(source.device)
    if packs:
        return [(result, layout._replace(dim=0, outer=1, inner=1, owner=torch.cat([owners[:n] for n in sizes])))]
    if not torch.equal(owners, torch.cat([owners[:n] for n in sizes])):
        return [(result, combined(call, result, "takes rows of several samples for one sequence"))]
    result.__dict__[notes.LONGEST] = 1 if batch_first else 0
    found = layout._replace(dim=0 if batch_first else 1, outer=1, inner=1, owner=owners[: sizes[0]], order=None)
    lengths = found._replace(dim=0, owner=owners[: sizes[0]].to(call.out[1].device))  # each its own sample's
    rows = torch.arange(lengths.rows, device=call.out[1].device)
    return [(result, found), (call.out[1], lengths.taken(0, rows))]
