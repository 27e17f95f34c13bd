"""Layout rules of loss functions: their sum or mean over the samples is a total (`layouts.totals`).

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

from .calls import Call
from .doubts import doubt
from .layout import Layout
from .propagate import ask, combined, rule
from .totals import equal_counts, parts_differ, total_of
from .trial import Tags

_BY_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.kl_div, F.poisson_nll_loss,
    F.binary_cross_entropy_with_logits, F.gaussian_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss,
)  # fmt: skip
_BY_ROW = (
    F.cosine_embedding_loss, F.margin_ranking_loss, F.triplet_margin_loss, F.multi_margin_loss,
    F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
)  # fmt: skip
LOSSES = frozenset((*_BY_ELEMENT, *_BY_ROW, F.cross_entropy, F.nll_loss))
UNEVEN = (
    "divides by the number (or weights) of the labels that count in the whole batch, which is not the same for every "
    "sample: each one's weight depends on the others. Take reduction=\"none\" and each sample's own mean, or "
    'reduction="sum" divided by a constant'
)


@functools.lru_cache(maxsize=64)
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _arguments(call: Call) -> dict[str, Any]:
    """The call's arguments by name."""
    names = list(_signature(call.func).parameters)
    found = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    return {name: value for name, value in found.items() if value is not None}


def _kind(given: dict[str, Any]) -> str:
    return "sum" if given.get("reduction") == "sum" else "mean"


@rule(*_BY_ELEMENT)
def _by_element(call: Call) -> Tags:
    given = _arguments(call)
    terms = [t for name, t in given.items() if isinstance(t, Tensor) and name not in ("weight", "pos_weight")]
    ndim = max(t.dim() for t in terms)
    found = {(layout.dim + ndim - t.dim(), layout.rows) for t in terms if (layout := call.layout(t)) is not None}
    return _reduced(call, given, terms, found, ndim)


@rule(*_BY_ROW)
def _by_row(call: Call) -> Tags:
    given = _arguments(call)
    terms = [t for name, t in given.items() if isinstance(t, Tensor) and name != "weight"]
    if any((layout := call.layout(t)) is not None and layout.dim for t in terms):
        return ask(call)
    found = {(0, layout.rows) for t in terms if (layout := call.layout(t)) is not None}
    return _reduced(call, given, terms, found, 1)


def _reduced(call: Call, given: dict[str, Any], terms: list[Tensor], places: set[tuple[int, int]], ndim: int) -> Tags:
    """The loss of terms whose samples lie in these places, of `ndim` dimensions before they are reduced."""
    known = [layout for t in terms if (layout := call.layout(t)) is not None]
    if any(layout.mixed or layout.places for layout in known) or not known:
        return ask(call)
    if len(places) > 1:
        why = "combines inputs whose samples lie in different dimensions (shapes that broadcast to [B, B], perhaps)"
        return [(call.out, combined(call, call.out, why))]
    first = next((layout for layout in known if layout.owner is not None), known[0])
    if not all(layout.same_rows(first, call.out.device) for layout in known):
        return [(call.out, combined(call, call.out, "combines rows of different samples"))]
    dim, rows = places.pop()
    if call.out.dim() and call.out.shape[dim : dim + 1] == (rows,):
        return [(call.out, first._replace(dim=dim))]
    if call.out.dim():
        return ask(call)
    if given.get("reduction", "mean") != "sum" and not equal_counts(first, call.out.device):
        return [(call.out, combined(call, call.out, "divides by the number of rows that the samples' data made"))]
    return [(call.out, total_of(call, call.out, first, _kind(given)))]


@rule(F.cross_entropy, F.nll_loss)
def _cross_entropy(call: Call) -> Tags:
    given = _arguments(call)
    source, target = given["input"], given["target"]
    layout, by = call.layout(source), call.layout(target)
    known = [found for found in (layout, by) if found is not None]
    if layout is None or any(found.mixed or found.places for found in known):
        return ask(call)
    by_class = target.is_floating_point()
    if layout.dim == 1 or source.dim() == 1:
        return [(call.out, combined(call, call.out, "takes the samples for classes"))]
    dim = layout.dim if layout.dim == 0 or by_class else layout.dim - 1  # in the target
    if by is not None and (by.dim != dim or not by.same_rows(layout, source.device)):
        return [(call.out, combined(call, call.out, "takes one sample's labels for another's output"))]
    if call.out.dim():
        return [(call.out, layout._replace(dim=layout.dim if layout.dim == 0 else layout.dim - 1))]
    if given.get("reduction", "mean") == "mean":
        if not equal_counts(layout, source.device):
            return [(call.out, combined(call, call.out, "divides by the number of rows that the samples' data made"))]
        if not by_class and _uneven(call, layout._replace(dim=dim), given):
            return [(call.out, combined(call, call.out, UNEVEN))]
    return [(call.out, total_of(call, call.out, layout, _kind(given)))]


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
