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
from .totals import equal_counts, note_terms, total_of

T = torch.Tensor


@layout_rule(*spellings(*"sum mean nansum nanmean amax amin var std logsumexp prod all any argmax argmin".split()))
def _reduce(call: Call) -> Tags:
    """Over some dimensions; over the batch's the samples are combined."""
    source, layout = call.args[0], call.layout(call.args[0])
    dims = call.argument(1, "dim")
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


class RunningSum(NamedTuple):
    """What a running sum over the samples was made of. versions: of that tensor and of the sum, then."""

    source: Tensor
    layout: Layout
    versions: tuple[int, int]
    dim: int


def whole_of_running_sum(call: Call, row: Callable[[int], Any]) -> Layout | None:
    """The total that the last row of a running sum is, or None. row: what an index takes along a dimension."""
    tensor = call.args[0]
    found: RunningSum | None = tensor.__dict__.get(tensor_notes.RUNNING)
    if found is None or found.versions != (found.source._version, tensor._version):
        return None
    taken = row(found.dim)
    last = isinstance(taken, int) and taken % tensor.size(found.dim) == tensor.size(found.dim) - 1
    return total_of(call, call.out, found.layout, "sum") if last else None


def along(position: int, name: str) -> Answer:
    """The rule of functions that combine the positions of dimension `name` and keep its size."""

    def function(call: Call) -> Tags:
        source, layout = call.args[0], call.layout(call.args[0])
        dims = call.argument(position, name, -1 if name == "dim" else None)
        if dims is None and call.name in ("softmax", "log_softmax", "softmin"):
            dims = 0 if source.dim() in (0, 1, 3) else 1  # what torch takes where none is given
        dims = range(source.dim()) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
        if layout is not None and layout.dim in [dim % source.dim() for dim in dims if source.dim()]:
            if call.name == "cumsum" and layout.alone < 0 and not layout.mixed:
                versions = (source._version, call.out._version)
                call.out.__dict__[tensor_notes.RUNNING] = RunningSum(source, layout, versions, layout.dim)
            return call.all_combined("works along the batch dimension")
        if layout is not None and isinstance(call.out, Tensor) and call.out.shape == source.shape:
            return [(call.out, layout)]
        return ask(call)

    return function


layout_rule(*spellings("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin"))(along(1, "dim"))
layout_rule(*spellings("logcumsumexp", "cumsum_", "cumprod_"))(along(1, "dim"))


layout_rule(F.normalize)(along(2, "dim"))
