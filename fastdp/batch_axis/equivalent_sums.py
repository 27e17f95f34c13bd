"""Sums over the samples in other forms: products with ones, 1-norms, sums of rearranged rows.

All of them are fixed linear functions of terms of one sample each, as a loss may be (`batch_axis.totals`).
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import tensor_notes
from .batch_positions import by_place, rows_alike
from .calls import Call, Tags
from .layout import Layout
from .operator_table import spellings
from .propagate import ask
from .rules import layout_rule
from .totals import equal_counts, total_of

T = torch.Tensor
Subscripts = tuple[list[str], str]  # of the operands, and of the result


# --------------------------------------------------------------------------- products


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


def summed_product(call: Call) -> Tags | None:
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
        if by_place(t, dim, layout) or (t.dim() > 1 and not rows_alike(t, dim, layout, computed=True)):
            return None
    return [(call.out, total_of(call, call.out, layout, "sum"))]


@layout_rule(*spellings("dot", "inner", "vdot", "bmm", "tensordot"), torch.linalg.vecdot, torch.einsum)
def _product(call: Call) -> Tags:
    return summed_product(call) or ask(call)


@layout_rule(F.linear, torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def _times_matrix(call: Call) -> Tags:
    """Data [..., I] times a constant matrix: each row by itself, along whichever other dimension the samples lie."""
    source, layout = call.args[0], call.layout(call.args[0])
    matrix = call.argument(1, "weight" if call.name == "linear" else "other")
    if layout is None or layout.mixed or len(call.inputs()) != 1 or "out" in call.kwargs:
        return summed_product(call) or ask(call)
    if not isinstance(matrix, Tensor) or matrix.dim() != 2 or layout.dim >= source.dim() - 1:
        return summed_product(call) or ask(call)
    bias = call.argument(2, "bias") if call.name == "linear" else None
    return [(call.out, layout)] if bias is None or bias.dim() == 1 else ask(call)


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


# --------------------------------------------------------------------------- rearranged first


class Spread(NamedTuple):
    """Where the terms of a sum lie, by the tensor that had them as rows: `by` of what is made of it the sum is there.

    by: "sum", all of it added up; "last", the last along `dim`; "trace". versions: of the source, and of what has it.
    """

    by: str
    source: Tensor
    layout: Layout
    versions: tuple[int, int]
    dim: int = 0


def spread(call: Call, by: str, why: str, dim: int = 0) -> Tags:
    """Tags of a result in which no row is one sample's, but which may be added up."""
    source, layout = call.args[0], call.layout(call.args[0])
    if layout is not None and not layout.mixed and layout.alone < 0 and isinstance(call.out, Tensor):
        call.out.__dict__[tensor_notes.SPREAD] = Spread(by, source, layout, (source._version, call.out._version), dim)
    return call.all_combined(why)


def spread_in(tensor: Tensor) -> Spread | None:
    """Where the terms lie, if neither the tensor nor what it was made of was written to since."""
    found: Spread | None = tensor.__dict__.get(tensor_notes.SPREAD)
    return found if found is not None and found.versions == (found.source._version, tensor._version) else None


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
