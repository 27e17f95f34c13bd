"""Layout rules of matrix products and attention."""

from __future__ import annotations

import math
import string

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.pytree import tensors_in
from .batch_positions import WHY, by_place, rows_alike
from .calls import Call, Tags, layout_rule
from .layout import Layout
from .operator_table import spellings
from .propagate import ask
from .totals import total_of

T = torch.Tensor


Subscripts = tuple[list[str], str]  # of the operands, and of the result


def _of_matrices(first: Tensor, second: Tensor) -> Subscripts:
    """first @ second: the last dimension of one and the last but one of the other are summed over."""
    beside = string.ascii_uppercase[-max(first.dim(), second.dim()) :]
    rows, columns = ("n" if first.dim() > 1 else ""), ("m" if second.dim() > 1 else "")
    left, right = ("".join(beside[len(beside) - max(t.dim() - 2, 0) :]) for t in (first, second))
    return [f"{left}{rows}k", f"{right}k{columns}"], f"{max(left, right, key=len)}{rows}{columns}"


def _subscripts(call: Call) -> tuple[Subscripts, list[Tensor]] | None:
    """A product of tensors, as einsum writes it; None where it is another one, or has a term more."""
    name, operands = call.name, list(call.args[:2])
    if name == "einsum":
        equation, operands = call.args[0], list(call.args[1:])
        operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], tuple | list) else operands
        if not isinstance(equation, str) or "." in equation:
            return None
        given, arrow, result = equation.replace(" ", "").partition("->")
        if not arrow:
            result = "".join(sorted(letter for letter in set(given) - {","} if given.count(letter) == 1))
        return (given.split(","), result), operands
    if any(value is not None for name, value in call.kwargs.items() if name != "dims"):
        return None
    if len(operands) != 2 or not all(isinstance(t, Tensor) and t.dim() for t in operands):
        return None
    first, second = operands
    if name == "linear":
        return None if len(call.args) > 2 or second.dim() != 2 else (_of_matrices(first, second.T), [first, second.T])
    if name == "tensordot":
        dims = call.argument(2, "dims", 2)
        ends = (range(first.dim() - dims, first.dim()), range(dims)) if isinstance(dims, int) else dims
        if len(ends) != 2 or not all(isinstance(end, list | tuple | range) for end in ends):
            return None
        left, right = list(string.ascii_lowercase[: first.dim()]), list(string.ascii_uppercase[: second.dim()])
        for one, other in zip(*ends, strict=True):
            right[other] = left[one]
        return ([*map("".join, (left, right))], "".join(sorted({*left} ^ {*right}))), operands
    if name in ("dot", "vdot", "inner", "linalg_vecdot"):
        same = first.dim() == second.dim() == 1
        return ((["k", "k"], ""), operands) if same else None
    return _of_matrices(first, second), operands


def _summed_product(call: Call) -> Tags | None:
    """Of a product of samples' numbers with constants that do not tell them apart, added up; None of others."""
    found = _subscripts(call) if call.inputs() else None
    if found is None:
        return None
    (given, result), operands = found
    if len(given) != len(operands) or any(t.dim() != len(letters) for t, letters in zip(operands, given, strict=True)):
        return None
    laid = [(t, letters, call.layout(t)) for t, letters in zip(operands, given, strict=True)]
    data = [(letters[layout.dim], layout) for _, letters, layout in laid if layout is not None and not layout.mixed]
    if len(data) != sum(layout is not None for _, _, layout in laid) or any(one.alone >= 0 for _, one in data):
        return None
    samples, layout = data[0]
    if samples in result or any(letter != samples for letter, _ in data):
        return None
    if any(letters.count(samples) > 1 for _, letters, _ in laid):  # a diagonal: by place
        return None
    of_data = {letter for _, letters, one in laid if one is not None for letter in letters}
    for t, letters, _ in laid:
        if any(
            n == call.batch and letter not in (*of_data, *result) for letter, n in zip(letters, t.shape, strict=True)
        ):
            return None  # as many constants as samples, added up
    if not all(one.same_rows(layout, call.out.device) for _, one in data):
        return None
    constants = [(t, letters) for t, letters, one in laid if one is None and samples in letters]
    for t, letters in constants:
        dim = letters.index(samples)
        if t.size(dim) != layout.rows:  # one number for all of them
            return None
        if by_place(t, dim, layout) or (t.dim() > 1 and not rows_alike(t, dim, layout, computed=True)):
            return None
    return [(call.out, total_of(call, call.out, layout, "sum"))]


@layout_rule(*spellings("dot", "inner", "vdot", "bmm", "tensordot"), torch.linalg.vecdot, torch.einsum)
def _product(call: Call) -> Tags:
    return _summed_product(call) or ask(call)


@layout_rule(F.linear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def _times_matrix(call: Call) -> Tags:
    """Data [..., I] times a constant matrix: each row by itself, along whichever other dimension the samples lie."""
    source, layout = call.args[0], call.layout(call.args[0])
    matrix, bias = call.argument(1, "weight" if call.name == "linear" else "other"), None
    if call.name == "linear":
        bias = call.argument(2, "bias")
    if layout is None or layout.mixed or len(call.inputs()) != 1 or "out" in call.kwargs:
        return _summed_product(call) or ask(call)
    flat = isinstance(matrix, Tensor) and matrix.dim() == 2 and (bias is None or bias.dim() == 1)
    if flat and layout.dim < source.dim() - 1:
        return [(call.out, layout)]
    return _summed_product(call) or ask(call)


@layout_rule(*spellings("norm"), torch.linalg.vector_norm, torch.linalg.norm)
def _norm(call: Call) -> Tags:
    """Of order 1: the sum of what the numbers are without their signs."""
    source, layout = call.args[0], call.layout(call.args[0])
    order, dims = call.argument(1, "ord" if "linalg" in call.name else "p"), call.argument(2, "dim")
    of_vectors = call.name != "linalg_norm" or source.dim() == 1 or isinstance(dims, int)
    if layout is None or layout.mixed or layout.alone >= 0 or order != 1 or not of_vectors:
        return ask(call)
    over = range(source.dim()) if dims is None else dims if isinstance(dims, tuple | list) else (dims,)
    if layout.dim not in [dim % source.dim() for dim in over]:
        return ask(call)
    return [(call.out, total_of(call, call.out, layout, "sum"))]


def _masks_others(call: Call, query: Layout) -> bool:
    """Whether attention along the samples' rows stays within samples, by a mask (Pixtral's patches)."""
    q, k, v = call.args[:3]
    mask = call.argument(3, "attn_mask")
    if not isinstance(mask, Tensor) or call.layout(mask) is not None or call.argument(5, "is_causal", False):
        return False
    for tensor in (q, k, v):
        layout = call.layout(tensor)
        if layout is None or layout.mixed or layout.alone >= 0 or layout.dim != tensor.dim() - 2:
            return False
        if layout.order is not None or not layout.same_rows(query, q.device):
            return False
    return _bounded(q, k, v) and _keeps_apart(mask, query.owners(mask.device), q.dtype)


def _bounded(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether no score can overflow and no value is infinite: a weight of zero times infinity is not zero."""
    highest = [float(t.detach().abs().max()) if t.numel() else 0.0 for t in (q, k, v)]
    return highest[0] * highest[1] * q.size(-1) < torch.finfo(q.dtype).max / 4 and math.isfinite(highest[2])


def _keeps_apart(mask: Tensor, owners: Tensor, dtype: torch.dtype) -> bool:
    """Whether an attention mask [..., queries, keys] hides from every row the rows of other samples, entirely.

    owners: sample of each row [rows], of queries and keys alike. In a mask of numbers, which are added to scores, a
    hidden key has at least half of the lowest number of `dtype`, and every row sees some key of its own unchanged:
    else all its scores are as low, and the weights of the others' are not zero.
    """
    if mask.shape[-2:] != (len(owners), len(owners)):
        return False
    same = owners[:, None] == owners[None, :]
    if mask.dtype == torch.bool:
        return not bool((mask & ~same).any()) and bool((mask & same).any(-1).all())
    hidden = mask <= torch.finfo(dtype).min / 2
    seen = (mask == 0) & same
    return bool((hidden | same).all()) and bool(seen.any(-1).all())


@layout_rule(F.scaled_dot_product_attention)
def _attention(call: Call) -> Tags:
    if (known := _apart_in_attention(call)) is not None:
        beside = known.dim - call.out.dim()
        by_places = any(by_place(t, t.dim() + beside, known) for t in call.constants())  # of a mask, or keys and values
        return [(call.out, call.combined(WHY) if by_places else known)]
    given = [(tensor, layout) for tensor in tensors_in(call.args[:3]) if (layout := call.layout(tensor)) is not None]
    if len(call.inputs()) > len(given) or all(layout.dim < tensor.dim() - 2 for tensor, layout in given):
        return ask(call)  # a mask made of data, perhaps
    query = call.layout(call.args[0])
    apart = query is not None and _masks_others(call, query)
    return [(call.out, query if apart else call.combined("attends from one sample to another"))]


def _apart_in_attention(call: Call) -> Layout | None:
    """The result's layout, where queries, keys, values and mask have the samples in one dimension before those that are
    combined: whatever they hold, no sample meets another. None where that cannot be told from shapes."""
    if not (known := call.inputs()):
        return None  # of what is known of no sample
    places = {layout.dim - tensor.dim() for tensor, layout in known}
    place, first = max(places), known[0][1]
    grouped = bool(call.kwargs.get("enable_gqa")) and place == -3  # rows of keys then serve several of queries
    if len(places) > 1 or place >= -2 or grouped or call.out.size(place) != first.rows:
        return None
    for tensor, layout in known:
        regular = layout._replace(piece=None) == Layout(call.batch, layout.dim, first.outer, first.inner)
        if not regular or tensor.size(place) != first.rows:
            return None
    return first._replace(dim=call.out.dim() + place)


@layout_rule(*spellings("grouped_mm", "_grouped_mm"), by_value=True)
def _grouped_mm(call: Call) -> Tags:
    """Rows [S, I], each times the matrix of its group: rows stay where they are."""
    rows, matrices = call.args[:2]
    layout = call.layout(rows)
    if layout is None or layout.mixed or rows.dim() != 2 or matrices.dim() != 3 or call.layout(matrices) is not None:
        return ask(call)
    if layout.dim != 0:
        return call.all_combined("sums over the batch")
    return [(call.out, layout)]
