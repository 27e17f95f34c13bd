"""Layout rules of functions that reduce, order, move or sum along a dimension: over the samples they combine them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import notes
from .calls import Call, Tags
from .kinds import spellings
from .layout import Layout
from .pieces import NOTED
from .positions import by_place
from .propagate import ask
from .rules import Answer, layout_rule
from .totals import equal_counts, note_terms, total_of

T = torch.Tensor


@layout_rule(
    *spellings("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "prod", "all", "any", "argmax", "argmin")
)
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
        return call.combined("combines the samples of the batch")
    if call.name == "mean" and not equal_counts(layout, source.device):
        return call.combined("divides by the number of rows in the batch, which several samples made")
    if call.out.numel() == 1 and call.name == "sum":
        note_terms(call.out, source, layout)
    return total_of(call, call.out, layout, call.name)


def along(position: int, name: str) -> Answer:
    """The rule of functions that combine the positions of dimension `name` and keep its size."""

    def function(call: Call) -> Tags:
        source, layout = call.args[0], call.layout(call.args[0])
        dims = call.argument(position, name, -1 if name == "dim" else None)
        if dims is None and call.name in ("softmax", "log_softmax", "softmin"):
            dims = 0 if source.dim() in (0, 1, 3) else 1  # what torch takes where none is given
        dims = range(source.dim()) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
        if layout is not None and layout.dim in [dim % source.dim() for dim in dims if source.dim()]:
            why = "works along the batch dimension"
            return call.all_combined(why)
        if layout is not None and isinstance(call.out, Tensor) and call.out.shape == source.shape:
            return [(call.out, layout)]
        return ask(call)

    return function


layout_rule(*spellings("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin"))(along(1, "dim"))
layout_rule(*spellings("logcumsumexp", "cumsum_", "cumprod_"))(along(1, "dim"))


@layout_rule(*spellings("flip", "roll"))
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
        return call.all_combined("rolls samples into each other")
    pairs = zip(*((v,) if isinstance(v, int) else tuple(v) for v in (shifts, dims)), strict=True)
    along = [shift for shift, dim in pairs if dim % source.dim() == layout.dim]
    if not sum(along) % max(layout.rows, 1):
        return [(call.out, layout)]
    order = None if layout.order is None else torch.zeros_like(rows)  # the groups go round
    return [(call.out, layout.taken(layout.dim, rows.roll(sum(along)), order))]


layout_rule(F.normalize)(along(2, "dim"))


@layout_rule(torch.dot, T.dot, torch.inner, T.inner, torch.vdot, T.vdot)
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
    if any(call.is_constant(t) and by_place(t, 0, layout) for t in both):
        return None
    return [(call.out, total_of(call, call.out, layout, "sum"))]


@layout_rule(F.linear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
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
