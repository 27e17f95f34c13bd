"""Layout rules of loss functions: their sum or mean over the samples is a total.

Each has a term for every element or row, and reduces these. What divides a mean must not be made by the samples: the
mean of a cross-entropy is over the labels that count, by their classes' weights, so every sample must have as many.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import legacy_get_string

from .batch_positions import WHY, by_place, is_numbered
from .calls import Call, Tags, bind, layout_rule
from .deferred_checks import doubt
from .layout import Layout
from .propagate import ask
from .totals import equal_counts, parts_differ, total_of

_BY_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.kl_div, F.poisson_nll_loss,
    F.binary_cross_entropy_with_logits, F.gaussian_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss,
)  # fmt: skip
_BY_ROW = (
    F.cosine_embedding_loss, F.triplet_margin_loss, F.multi_margin_loss, F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
)  # fmt: skip
LOSSES = frozenset((*_BY_ELEMENT, *_BY_ROW, F.cross_entropy, F.nll_loss, F.ctc_loss))
UNEVEN = (
    "divides by the number (or weights) of the labels that count in the whole batch, which is not the same for every "
    "sample: each one's weight depends on the others. Take reduction=\"none\", each sample's own mean (times "
    "a constant weight of its class, if classes are weighted), and the mean over the samples"
)
_SHARED = (
    "takes {} made of the samples, which all of them share, so that each sample's loss depends on the others: make it "
    "a constant (of counts that are public, say)"
)
_TERMS = frozenset("input target input1 input2 var weight pos_weight anchor positive negative".split())
_OF_CLASSES = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)  # their weights have one number for each class
_DIVIDING = (F.mse_loss, F.l1_loss)  # by the sum of the weights


@functools.lru_cache(maxsize=64)
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def class_weights(call: Call) -> Any:
    """The argument of a loss that has one number for each class, which no sample's can be."""
    if call.func not in _OF_CLASSES:
        return None
    return call.argument(list(_signature(call.func).parameters).index("weight"), "weight")


def _arguments(call: Call) -> dict[str, Any]:
    """The call's arguments by name."""
    names = list(_signature(call.func).parameters)
    found = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    found = {name: value for name, value in found.items() if value is not None}
    if "size_average" in found or "reduce" in found:
        found["reduction"] = legacy_get_string(found.get("size_average"), found.get("reduce"), emit_warning=False)
    return found


def _kind(given: dict[str, Any]) -> str:
    return "sum" if given.get("reduction") == "sum" else "mean"


def _shared(call: Call, given: dict[str, Any]) -> Tags | None:
    """The refusal, where what all samples share (weights of classes, a margin) is made of samples; else None."""
    for name, value in given.items():
        if isinstance(value, Tensor) and (name not in _TERMS or (name == "weight" and call.func in _OF_CLASSES)):
            layout = call.layout(value)
            if layout is not None:
                why = call.mixed(_SHARED.format(name))
                return [(call.out, Layout(call.batch, mixed=f"{layout.mixed}, and {why}" if layout.mixed else why))]
    return None


@layout_rule(*_BY_ELEMENT)
def _by_element(call: Call) -> Tags:
    given = _arguments(call)
    if "weight" in given and call.func in _DIVIDING and _kind(given) == "mean":
        return call.all_combined(UNEVEN)
    tensors = {name: value for name, value in given.items() if name in _TERMS and isinstance(value, Tensor)}
    ndim = max(tensor.dim() for tensor in tensors.values())
    terms = {name: (tensor, ndim - tensor.dim()) for name, tensor in tensors.items()}
    if "var" in terms and given["var"].shape == given["input"].shape[:-1]:
        terms["var"] = (given["var"], 0)  # one for all numbers of a row
    return _shared(call, given) or _reduced(call, given, list(terms.values()))


@layout_rule(*_BY_ROW)
def _by_row(call: Call) -> Tags:
    given = _arguments(call)
    terms = []
    for name, term in given.items():
        if not isinstance(term, Tensor) or name not in _TERMS or (name == "weight" and call.func in _OF_CLASSES):
            continue
        of_rows = name == "target" and call.func in (F.cosine_embedding_loss, F.multi_margin_loss)
        shift = 2 - term.dim() if name == "weight" else 0
        layout = call.layout(term)
        if layout is not None and not layout.mixed and (layout.dim + shift or (term.dim() < 2 and not of_rows)):
            return call.all_combined("takes the samples for the numbers of one row")
        terms.append((term, shift))
    return _shared(call, given) or _reduced(call, given, terms)


def _reduced(call: Call, given: dict[str, Any], terms: list[tuple[Tensor, int]]) -> Tags:
    """The loss of terms, each with how many dimensions it has less than what is reduced, before its own."""
    known = [(layout, shift) for t, shift in terms if (layout := call.layout(t)) is not None]
    if any(layout.mixed or layout.is_row_index for layout, _ in known) or not known:
        return ask(call)
    places = {(layout.dim + shift, layout.rows) for layout, shift in known}
    if len(places) > 1:
        why = "combines inputs whose samples lie in different dimensions (shapes that broadcast to [B, B], perhaps)"
        return call.all_combined(why)
    first = next((layout for layout, _ in known if layout.owner is not None), known[0][0])
    if not all(layout.same_rows(first, call.out.device) for layout, _ in known):
        return call.all_combined("combines rows of different samples")
    dim, rows = places.pop()
    why = "" if len(known) == len(terms) else constants_by_place(call, [(t, dim - shift) for t, shift in terms], first)
    if why:
        return call.all_combined(why)
    if call.out.dim() and call.out.shape[dim : dim + 1] == (rows,):
        return [(call.out, first._replace(dim=dim))]
    if call.out.dim():
        return ask(call)
    return [(call.out, reduced_to_one(call, first, _kind(given)))]


def reduced_to_one(call: Call, layout: Layout, kind: str) -> Layout | None:
    """The layout of the sum or the mean of losses that lie as this layout says."""
    if kind != "sum" and not equal_counts(layout, call.out.device):
        return call.combined("divides by the number of rows that the samples' data made")
    return total_of(call, call.out, layout, kind)


def constants_by_place(call: Call, terms: list[tuple[Tensor, int]], layout: Layout) -> str:
    """What is wrong with constants that meet samples' rows one by one, each along its dimension; '' if nothing."""
    for tensor, dim in terms:
        if not 0 <= dim < tensor.dim() or tensor.size(dim) == 1 or call.layout(tensor) is not None:
            continue
        if layout.order is not None:
            return "meets numbers by position with rows whose order depends on the data"
        if call.is_constant(tensor) and by_place(tensor, dim, layout):
            return WHY
    return ""


@layout_rule(F.cross_entropy, F.nll_loss)
def _cross_entropy(call: Call) -> Tags:
    given = _arguments(call)
    source, target = given["input"], given["target"]
    layout, by = call.layout(source), call.layout(target)
    shared = _shared(call, given)
    if shared is not None:
        return shared
    known = [found for found in (layout, by) if found is not None]
    if layout is None or any(found.mixed or found.is_row_index for found in known):
        return ask(call)
    by_class = target.is_floating_point()
    if layout.dim == 1 or source.dim() == 1:
        return call.all_combined("takes the samples for classes")
    dim = layout.dim if layout.dim == 0 or by_class else layout.dim - 1  # in the target
    if by is not None and (by.dim != dim or not by.same_rows(layout, source.device)):
        return call.all_combined("takes one sample's labels for another's output")
    if by is None and (why := constants_by_place(call, [(target, dim)], layout)):
        return call.all_combined(why)
    if call.out.dim():
        return [(call.out, layout._replace(dim=layout.dim if layout.dim == 0 else layout.dim - 1))]
    found_total = reduced_to_one(call, layout, _kind(given))
    if _kind(given) == "mean" and found_total is not None and found_total.total and not by_class:
        if _uneven(call, layout._replace(dim=dim), given):
            return call.all_combined(UNEVEN)
    return [(call.out, found_total)]


def _uneven(call: Call, layout: Layout, given: dict[str, Any]) -> bool:
    """Whether the labels of some samples weigh more in the mean's divisor. On a device that is asked later."""
    target, weight, ignored = given["target"], given.get("weight"), given.get("ignore_index", -100)
    counts = target != ignored
    if weight is None and target.device.type == "cpu" and bool(counts.all()):
        return False
    if target.shape[layout.dim : layout.dim + 1] != (layout.rows,):
        return not bool(counts.all())
    with torch.no_grad():
        weights = counts.double()
        if weight is not None:
            weights = weights * weight.detach().double()[target.clamp(0, len(weight) - 1)]
        differ = parts_differ(weights, layout)
    if target.device.type == "cpu":
        return bool(differ)
    doubt(differ, call.mixed(UNEVEN))
    return False


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
