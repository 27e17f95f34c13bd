"""Numbers made of several samples that may go on: totals, and a maximum subtracted before a softmax.

A total is a sum over the samples, the form that a loss must have (`Layout.total`).

A loss must be a fixed linear function of terms of one sample each: their sum, or their mean over a number that the
shapes tell. Such a total may be added to others, scaled by constants, and returned. Whatever else is done with it (a
square, a product with data, a maximum, a division by a number that several samples made) makes a sample's gradient
depend on the others: the result is mixed for good, and a gradient through it is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import operator_table, tensor_notes
from .batch_slices import BESIDE, joined, joined_rows, settled, stamped
from .calls import Call, Inputs, Tags
from .layout import Layout, tag


def total_of(call: Call, tensor: Tensor, source: Layout, kind: str) -> Layout:
    """The layout of a sum over the samples (or a mean, by a number that shapes tell) of rows laid out like this."""
    why = call.mixed("combines the samples of the batch")
    version, certain = next(t.__dict__.get(tensor_notes.SHARE, (-1, False)) for t in call.tensors[:1])
    if version >= 0 and version == tensor_notes.version_of(call.tensors[0]):  # terms that were divided, each
        kind = ("mean" if certain else "either") if kind == "sum" else "other" if certain else kind
    fits = (tensor.is_floating_point() or tensor.is_complex()) and not source.mixed and not source.is_row_index
    piece = source.piece and source.piece._replace(past=hash((source.piece.past, call.name, source.rows)))
    return Layout(
        call.batch, mixed=source.mixed or why, total=kind if fits else "", piece=piece, inferred=source.inferred
    )


def follow(call: Call) -> Tags | None:
    """Of a call with a total among its arguments; None of any other."""
    inputs, outputs = call.inputs(), call.results()
    if any(layout.mixed for _, layout in inputs):
        carry_terms(call)
    if not any(layout.total for _, layout in inputs):
        return None
    if call.name in operator_table.SHAPED and not any(layout.total for t, layout in inputs if t is not call.args[0]):
        return [(tensor, None) for tensor in outputs]
    if call.name == "__setitem__":
        layout = call.combined("writes a sum over the samples into memory")
        return [(call.args[0], layout)]
    why = _broken(call, inputs)
    cut = any(layout.total and layout.piece is not None for _, layout in inputs)
    known = [layout.piece for _, layout in inputs if layout.total or (layout.alone >= 0 and layout.piece is not None)]
    pieces, problem = joined(known) if cut else (None, "")
    if why or problem:
        cause = next((lay.mixed for t, lay in inputs if lay.mixed and not lay.total and t.requires_grad), "")
        mixed = cause or f"{_begun(inputs)}, and {call.mixed(why or problem)}"
        return [(tensor, Layout(call.batch, mixed=mixed)) for tensor in outputs]
    if not cut:
        BESIDE.update(layout.alone for _, layout in inputs if layout.alone >= 0)
    mixed = _begun(inputs)
    inferred = max(layout.inferred for _, layout in inputs)
    floating = all(t.is_floating_point() or t.is_complex() for t in outputs)
    piece = settled(pieces)
    if piece is not None and call.name not in operator_table.ADDING | operator_table.STACKING:
        piece = stamped([piece], call)
    kind = _kind(call, inputs) if floating else ""
    total = Layout(call.batch, mixed=mixed, total=kind, piece=piece, inferred=inferred)
    return [(tensor, total) for tensor in outputs]


def _begun(inputs: Inputs) -> str:
    """What made the first sum over the samples."""
    return next(layout.mixed for _, layout in inputs if layout.total)


def _kind(call: Call, inputs: Inputs) -> str:
    """Whether the result is a sum over the samples or their mean."""
    found = {layout.total for _, layout in inputs if layout.total}
    if any(layout.alone >= 0 for t, layout in inputs if t.requires_grad):
        found.add("sum")
    if len(found - {"either"}) > 1:
        return "both"
    kind = next(iter(found - {"either"}), "either")
    by_count = sum(bool(layout.total) for _, layout in inputs) > 1  # that every sample has the same part in (`_broken`)
    if call.name in operator_table.SCALING and (by_count or any(not layout.total for _, layout in inputs)):
        return "mean" if kind == "sum" else kind  # by a number to which every sample gave as much
    return kind


def by_size(call: Call, told: Callable[[float], bool]) -> None:
    """A total that is scaled by the number of samples: a sum becomes a mean, or a mean a sum.

    told: whether the code has asked for that number, and writes no such constant; else one may happen to equal it.
    """
    if call.name not in operator_table.SCALING or not isinstance(call.out, Tensor):
        return
    found = call.layout(call.out)
    if found is None or not found.total:
        return
    values = [value for value in call.args if not isinstance(value, Tensor) or call.layout(value) is None]
    values = [v.detach() if isinstance(v, Tensor) else v for v in values]
    values = [float(v) for v in values if not isinstance(v, Tensor) or (v.numel() == 1 and v.device.type == "cpu")]
    share = share_of(values[0], call) if values else 0
    if not share:
        return
    kind = {("sum", -1): "mean", ("mean", 1): "sum", ("either", share): "either"}.get((found.total, share), "other")
    if not told(values[0]):
        kind = "either" if kind != "other" else found.total
    tag(call.out, found._replace(total=kind))


def share_of(number: float, call: Call) -> int:
    """-1 if the call divides by the number of samples, or by a multiple of it; 1 if it multiplies by that; else 0."""
    size, divides = abs(number), "div" in call.name
    if not math.isfinite(size) or size < 1e-300:  # whose inverse is not
        return 0
    if size < 1:
        size, divides = 1 / size, not divides
    size = round(size) if abs(size - round(size)) < 1e-6 * size else 0
    return (-1 if divides else 1) if size and size % call.batch == 0 else 0


def _broken(call: Call, inputs: Inputs) -> str:
    """Why the result is no total; '' if it is one."""
    name = call.name
    totals = [tensor for tensor, layout in inputs if layout.total]
    others = [(tensor, layout) for tensor, layout in inputs if not layout.total]
    if name in operator_table.LINEAR:
        return "takes a sum over the samples together with data" if others else ""
    if name in operator_table.STACKING or name in operator_table.ADDING:
        # of what has no gradient only the value is moved; one sample's own term is a term more
        bad = any(t.requires_grad and layout.alone < 0 or t.dim() and not layout.mixed for t, layout in others)
        return "joins a sum over the samples with single samples' data" if bad else ""
    if name == "where" and not others:
        return ""
    if name not in operator_table.SCALING:
        return "takes a sum over the samples, which may only be added to others, scaled by constants and returned"
    divides = "div" in name and call.args[0] is totals[0]
    if len(totals) > 1 and not (divides and all(_even(number) for number in totals[1:])):
        return "multiplies or divides one sum over the samples by another"
    if "div" in name and not divides:
        return "divides by a sum over the samples"
    if all(_even(number) for number, _ in others):
        return ""
    return (
        "scales a sum over the samples by a number that several samples made (how many tokens count in the batch, "
        "say), so that each sample's weight depends on the others: divide by a constant, or take each sample's own "
        "mean first"
    )


def sums_of_single_samples(call: Call) -> Tags | None:
    """The sum of terms of single samples, each made in a loop; None for other calls."""
    inputs = call.inputs()
    if call.name not in operator_table.ADDING or not isinstance(call.out, Tensor) or not call.out.is_floating_point():
        return None
    if any(layout.alone < 0 or layout.mixed or layout.is_row_index for _, layout in inputs):
        return None
    inferred = max(layout.inferred for _, layout in inputs)
    piece, _ = joined_rows([layout for _, layout in inputs])
    why = call.mixed("adds up samples")
    return [(call.out, Layout(call.batch, mixed=why, total="sum", inferred=inferred, piece=piece))]


# --------------------------------------------------------------------------- numbers to divide by


def note_terms(out: Tensor, source: Tensor, layout: Layout) -> None:
    """Remember what a number was summed from, in case a total is divided by it."""
    if not out.requires_grad:
        out.__dict__[tensor_notes.TERMS] = (source, layout, tensor_notes.version_of(source))


def carry_terms(call: Call) -> None:
    """A number that was cast, or kept from zero, is the same number."""
    if call.name not in operator_table.KEEPING_COUNTS and call.name not in operator_table.LINEAR:
        return
    source = call.args[0]
    note = source.__dict__.get(tensor_notes.TERMS) if isinstance(source, Tensor) else None
    if note is not None and isinstance(call.out, Tensor) and call.out.numel() == source.numel():
        call.out.__dict__[tensor_notes.TERMS] = note


def _even(number: Tensor) -> bool:
    """Whether every sample had the same part in a number: as many labels that count, say."""
    note = number.__dict__.get(tensor_notes.TERMS)
    if note is None:
        return False
    source, layout, version = note
    return tensor_notes.version_of(source) == version and equal_parts(source, layout)


def equal_parts(source: Tensor, layout: Layout) -> bool:
    """Whether the sums over the rows of each sample are equal."""
    if layout.mixed or layout.alone >= 0 or source.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return False
    return not bool(parts_differ(source, layout))


def parts_differ(source: Tensor, layout: Layout) -> Tensor:
    """Whether the sums over the rows of each sample differ, as a tensor: true or false."""
    rows = source.detach().movedim(layout.dim, 0).flatten(1) if source.dim() > 1 else source.detach().unsqueeze(1)
    each = rows.sum(1) if rows.dtype.is_floating_point else rows.long().sum(1)
    sums = torch.zeros(layout.batch, dtype=each.dtype, device=each.device)
    sums.index_add_(0, layout.owners(each.device), each)
    return (sums != sums[0]).any()


def equal_counts(layout: Layout, device: torch.device) -> bool:
    """Whether all samples have as many rows."""
    if layout.owner is None:
        return True
    counts = torch.bincount(layout.owners(device), minlength=layout.batch)
    if layout.piece is not None:  # of which samples it is, their places tell
        counts = counts[counts > 0]
    return bool((counts == counts[:1]).all())


_NUMBERS = itertools.count(1)


Ask = Callable[[Call], Tags]


class Shift(NamedTuple):
    """The layout of scores but for one number, and which number that was."""

    layout: Layout
    number: int


def begins_shift(call: Call) -> Tags | None:
    """scores - number, the number made of several samples; None for any other call."""
    if call.name not in operator_table.SUBTRACTING or len(call.args) != 2 or call.kwargs:
        return None
    scores, number = call.args
    if not isinstance(scores, Tensor) or not isinstance(number, Tensor) or number.dim() or not call.out.dim():
        return None
    layout, by = call.layout(scores), call.layout(number)
    if layout is None or layout.mixed or layout.is_row_index or layout.alone >= 0 or by is None or not by.mixed:
        return None
    if (
        by.shifted is not None
        or by.is_row_index
        or scores.dtype not in (torch.float32, torch.float64)
        or number.dtype != scores.dtype
    ):
        return None  # in 16 bits what the number's own gradient is rounded to, instead of zero, would count
    if not bool(number.isfinite()):  # infinity less infinity
        return None
    return [(call.out, layout._replace(mixed=by.mixed, shifted=Shift(layout, next(_NUMBERS))))]


def follow_shift(call: Call, ask: Ask) -> Tags | None:
    """Where an argument is shifted: shifted again, free of the number, or mixed for good; None of any other call."""
    inputs = call.inputs()
    shifts = [layout.shifted for _, layout in inputs if layout.shifted is not None]
    if not shifts:
        return None
    free = _frees(call, inputs, shifts)
    if not free and not _keeps(call):
        return ask(call.supposing({id(tensor): layout._replace(shifted=None) for tensor, layout in inputs}))
    mixed = next(layout.mixed for _, layout in inputs if layout.shifted is not None)
    found = ask(call.supposing({id(t): layout.shifted.layout for t, layout in inputs if layout.shifted is not None}))
    if free:
        return found
    return [(tensor, _again(tensor, layout, mixed, shifts[0].number)) for tensor, layout in found]


def _again(tensor: Tensor, layout: Layout | None, mixed: str, number: int) -> Layout | None:
    if layout is None or layout.mixed or not tensor.is_floating_point():
        return layout
    return layout._replace(mixed=mixed, shifted=Shift(layout, number))


def _frees(call: Call, inputs: Inputs, shifts: list[Shift]) -> bool:
    """Whether the number makes no difference to the result."""
    if call.name in ("softmax", "log_softmax"):
        return len(inputs) == 1
    if call.name not in operator_table.SUBTRACTING or len(call.args) != 2 or call.kwargs:
        return False
    return len(shifts) == 2 == len(inputs) and shifts[0].number == shifts[1].number


def _keeps(call: Call) -> bool:
    """Whether the result is what it would be without the number, less the number."""
    others = call.beside_first()
    if any(layout.shifted is not None for _, layout in others):
        return False
    if call.name in operator_table.KEEPING_SCORES:
        return True
    if call.name in ("masked_fill", "masked_fill_"):  # by what has no weight in a softmax, shifted or not
        value = call.argument(2, "value")
        return not isinstance(value, Tensor) and value <= torch.finfo(call.out.dtype).min / 2
    if call.name in ("clamp", "clip"):  # where it does nothing
        return not others and torch.equal(call.out, call.args[0])
    return (
        call.name in operator_table.EXTREMES and not others and isinstance(call.argument(1, "dim"), int | tuple | list)
    )
