"""Layout rules of functions that reduce, or accumulate, along a dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tensor_notes
from .batch_slices import NOTED
from .calls import Answer, Call, Tags, layout_rule
from .layout import Layout
from .operator_table import spellings
from .propagate import ask
from .tensor_notes import version_of
from .totals import equal_counts, note_terms, total_of

T = torch.Tensor


@layout_rule(*spellings(*"sum mean nansum nanmean amax amin var std logsumexp prod all any argmax argmin".split()))
def _reduce(call: Call) -> Tags:
    """Over some dimensions; over the batch's the samples are combined."""
    source, layout = call.args[0], call.layout(call.args[0])
    dims = call.argument(1, "dim")
    if call.name in ("sum", "mean") and (at := spread_in(source)) and (found := _of_spread(call, at, dims)):
        return found
    if layout is None or layout.mixed or not isinstance(call.out, Tensor) or len(call.args) > 3:
        return ask(call)
    if isinstance(dims, bool) or dims is None or (isinstance(dims, tuple | list) and not dims):
        return [(call.out, _over_samples(call, layout))]
    over = {dim % source.dim() for dim in (dims if isinstance(dims, tuple | list) else (dims,))}
    if call.name in ("mean", "var", "std") and source.__dict__.get(tensor_notes.LONGEST) in over:
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
    if call.name not in ("sum", "mean", "nansum", "nanmean"):
        return call.combined("combines the samples of the batch")
    if call.name == "nanmean" and bool(source.isnan().any()):
        return call.combined("divides by how many numbers of the batch are none")
    if "mean" in call.name and not equal_counts(layout, source.device):
        return call.combined("divides by the number of rows in the batch, which several samples made")
    if call.out.numel() == 1 and call.name == "sum":
        note_terms(call.out, source, layout)
    return total_of(call, call.out, layout, call.name.removeprefix("nan"))


def _of_spread(call: Call, at: Spread, dims: Any) -> Tags | None:
    """Of what is added up along all dimensions, or along some, so that the rest may be; None where it is not."""
    over = range(call.args[0].dim()) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
    if len(over) == call.args[0].dim() or call.out.numel() == 1:
        return gathered(call, "sum")
    if at.by == "sum":
        call.out.__dict__[tensor_notes.SPREAD] = at._replace(versions=(at.versions[0], version_of(call.out)))
        return call.all_combined("combines samples with each other")
    return None


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
            return spread(call, "last", why, layout.dim) if call.name == "cumsum" else call.all_combined(why)
        if layout is not None and isinstance(call.out, Tensor) and call.out.shape == source.shape:
            return [(call.out, layout)]
        return ask(call)

    return function


layout_rule(*spellings("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin"))(along(1, "dim"))
layout_rule(*spellings("logcumsumexp", "cumsum_", "cumprod_"))(along(1, "dim"))


layout_rule(F.normalize)(along(2, "dim"))


class Spread(NamedTuple):
    """Where the terms of a sum lie, by the tensor that had them as rows: `by` of what is made of it the sum is there.

    by: "sum", all of it added up; "last", the last along `dim`; "trace". versions: of the source, and of what has it.
    """

    by: str
    source: Tensor
    layout: Layout
    versions: tuple[float, float]
    dim: int = 0


def spread(call: Call, by: str, why: str, dim: int = 0) -> Tags:
    """Tags of a result in which no row is one sample's, but which may be added up."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is not None and not layout.mixed and layout.alone < 0 and isinstance(call.out, Tensor):
        call.out.__dict__[tensor_notes.SPREAD] = Spread(
            by, source, layout, (version_of(source), version_of(call.out)), dim
        )
    return call.all_combined(why)


def spread_in(tensor: Tensor) -> Spread | None:
    """Where the terms lie, if neither the tensor nor what it was made of was written to since."""
    found: Spread | None = tensor.__dict__.get(tensor_notes.SPREAD)
    return found if found is not None and found.versions == (version_of(found.source), version_of(tensor)) else None


def gathered(call: Call, by: str, takes: Callable[[Spread], bool] = lambda found: True) -> Tags | None:
    """Tags of a call that adds up what was spread; None of any other."""
    found = spread_in(call.args[0])
    if found is None or found.by != by or not takes(found):
        return None
    if call.name == "mean" and not equal_counts(found.layout, call.out.device):
        return None
    return [(call.out, total_of(call, call.out, found.layout, "mean" if call.name == "mean" else "sum"))]


@layout_rule(*spellings("diag"))
def _diagonal(call: Call) -> Tags:
    flat = call.args[0].dim() == 1 and not call.argument(1, "diagonal", 0)
    return spread(call, "trace", "combines samples with each other") if flat else ask(call)


@layout_rule(*spellings("trace"))
def _trace(call: Call) -> Tags:
    return gathered(call, "trace") or ask(call)
