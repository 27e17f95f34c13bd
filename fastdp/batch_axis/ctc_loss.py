"""Layout rule of ctc_loss, which makes one loss of each sample's sequence and its own targets.

reduction="mean" divides each loss by the length of that sample's targets and takes the mean over the samples; so does
no sample change another's in any of the three reductions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .batch_positions import WHY, is_numbered
from .calls import Call, Tags, bind
from .layout import Layout
from .loss_ops import constants_by_place, reduced_to_one
from .propagate import ask
from .rules import layout_rule

_OTHERS = "takes one sample's targets or lengths for another's output"
_TIMES = "takes the samples for time steps or classes (log_probs has the shape [T, N, C]: transpose it)"


@layout_rule(F.ctc_loss)
def _ctc(call: Call) -> Tags:
    probs, targets, lengths, wanted, _, reduction = bind(
        call.args, call.kwargs, "log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction"
    )
    layout = call.layout(probs)
    if layout is None or any(found.mixed or found.is_row_index for _, found in call.inputs()):
        return ask(call)
    if probs.dim() != 3 or layout.dim != 1 or probs.size(1) != layout.rows:
        return call.all_combined(_TIMES)
    why = _problem_of(call, layout, targets, lengths, wanted)
    if why:
        return call.all_combined(why)
    if call.out.dim():
        return [(call.out, layout._replace(dim=0))]
    return [(call.out, reduced_to_one(call, layout, "sum" if reduction == "sum" else "mean"))]


def _problem_of(call: Call, layout: Layout, targets: Tensor, lengths: object, wanted: object) -> str:
    """Why targets and lengths are not of the samples whose output they meet; '' if they are."""
    beside = [t for t in (lengths, wanted) if isinstance(t, Tensor)]
    beside += [targets] if targets.dim() > 1 else []
    for tensor in beside:
        by = call.layout(tensor)
        if by is not None and (by.dim or tensor.dim() == 0 or not by.same_rows(layout, tensor.device)):
            return _OTHERS
    why = constants_by_place(call, [(tensor, 0) for tensor in beside], layout)
    return why or ("" if targets.dim() > 1 else _in_one_row(call, layout, targets, wanted))


def _in_one_row(call: Call, layout: Layout, targets: Tensor, wanted: object) -> str:
    """The same of all samples' targets one after the other."""
    by = call.layout(targets)
    if by is None:
        return WHY if is_numbered(targets) else ""
    times = torch.as_tensor(wanted, device=targets.device).flatten()
    owners = layout.owners(targets.device)
    if times.numel() != owners.numel() or by.alone >= 0:
        return _OTHERS
    return "" if torch.equal(by.owners(targets.device), owners.repeat_interleave(times)) else _OTHERS
