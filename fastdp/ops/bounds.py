"""What rounding may do to sums of terms that cancel, and norms that are enlarged by it.

A sample's part of a clipped sum is added up in float32 from terms (positions, uses, records, equal ids) that may be
far larger than their sum: what is then added is not the gradient but the gradient and the rounding of its terms. The
norm must bound that, too. So each use says how far its sums may be off, from the sizes of its terms; where that is
more than TOLERANCE of the norm, the norm is enlarged by it. Nothing changes where terms do not cancel.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import extension
from .common import MARGIN
from .rows import square_sum

# A bound of less than this share of the norm is left out: no contribution exceeds the clipping norm by more.
TOLERANCE = 5e-5
# Products are added in float32 in blocks, whose sums are added: no more terms than these follow one another.
# MEASURED: of 4096 equal terms, which are rounded alike, the sum is as far off as of these.
BLOCK = 512
# Roundings of the last place that n equal terms, added one by one, make for each term; MEASURED: 1/16 to 1/11 where
# they cancel, and less than half of one where there are few of them.
DRIFT = 1 / 10
FEW = 1.5
# A sample moves a float32 sum over n samples by its own part and by what the others' terms are rounded to without it:
# MEASURED at most 7 n roundings of the clipping norm, of samples that are alike, or by turns. This is twice that, so it
# holds for random batches of up to twice the expected size, too. Each sample beyond MANY_SAMPLES adds less than 2
# roundings, in several physical batches, too.
MOVED, MANY_SAMPLES = 2.0**-20, 4096


def unit(tensor: Tensor) -> float:
    """The largest relative rounding of the type in which sums over such tensors are taken."""
    return 2.0**-53 if tensor.dtype in (torch.float64, torch.complex128) else 2.0**-24


def roundings(terms: int, blocks: bool = True) -> float:
    """How many units a sum of so many terms may be off, for each of the terms' absolute sum.

    blocks: whether it is taken in blocks, as in matrix products that are no products of vectors.
    """
    return FEW + DRIFT * (min(terms, BLOCK) if blocks else terms)


def of_sums(expected: float) -> float:
    """The share of the clipping norm by which one sample may move the float32 sum of a batch of this expected size
    further than its own part does, and than factors leave room for."""
    return max(0.0, MOVED * (min(expected, MANY_SAMPLES) + max(expected - MANY_SAMPLES, 0) / 4) - MARGIN)


def enlarged(norm_sq: Tensor, bound: Tensor | None) -> Tensor:
    """Squared norms [B] float64 of norms larger by `bound` [B], but for what TOLERANCE allows."""
    if bound is None or is_small(norm_sq, bound):
        return norm_sq
    norm = norm_sq.double().clamp(min=0).sqrt()
    more = bound.to(norm.device) - TOLERANCE * norm
    return torch.where(more <= 0, norm_sq.double(), (norm + more).square())


def is_small(norm_sq: Tensor, bound: Tensor) -> bool:
    """Whether a bound changes no norm, where a look at values costs nothing: on the CPU."""
    return norm_sq.device.type == bound.device.type == "cpu" and bool((bound <= TOLERANCE * norm_sq.sqrt()).all())


def units_of_products(a: Tensor, g: Tensor) -> float:
    """The bound of `of_products` as a share of sum_t |a_t| |g_t|."""
    return roundings(a.size(1), min(a.size(2), g.size(2)) > 1) * unit(a)


def of_products(a: Tensor, g: Tensor) -> Tensor | None:
    """The bound [B] for sum_t g_t a_t^T, a [B,T,I] and g [B,T,O], by sum_t |g_t| |a_t|. None: no sum at all."""
    if a.size(1) <= 1 or a.numel() == 0 or g.numel() == 0:
        return None
    if (kernels := extension.on_device("linear", a, g)) is not None:
        return kernels.sizes(a, g) * units_of_products(a, g)  # type: ignore[no-any-return]
    wide = [torch.complex128 if rows.is_complex() else torch.float64 for rows in (a, g)]
    sizes = [torch.linalg.vector_norm(rows, dim=2, dtype=kind) for rows, kind in zip((a, g), wide, strict=True)]
    return (sizes[0] * sizes[1]).sum(1) * units_of_products(a, g)


def of_segments(a: Tensor, g: Tensor, starts: Tensor, batch: int) -> Tensor:
    """The bound [batch] for sums of g_t a_t^T over the rows of each segment, a [S,I] and g [S,O] in their order.

    starts: where segments begin, [matrices * batch + 1]. Segments of one row are no sums.
    """
    counts = starts.diff()
    # in the order of rows, without atomics: the same bits each time; rows of no matrix lie behind the last start
    sizes = [torch.segment_reduce(square_sum(x), "sum", offsets=starts, initial=0, unsafe=True) for x in (a, g)]
    terms = counts.double() if min(a.size(1), g.size(1)) == 1 else counts.double().clamp(max=BLOCK)
    units = torch.where(counts > 1, (FEW + DRIFT * terms) * unit(a), torch.zeros_like(terms))
    each = units * (sizes[0].sqrt() * sizes[1].sqrt())
    return torch.where(counts > 1, each, torch.zeros_like(each)).view(-1, batch).square().sum(0).sqrt()


def of_rows(g: Tensor) -> Tensor:
    """The bound [B] for sums of rows of g [B,K,d], whichever of them are added."""
    return square_sum(g).sqrt_().mul_(math.sqrt(g.size(1)) * roundings(g.size(1), blocks=False) * unit(g))


def of_repeats(ids: Tensor, g: Tensor) -> Tensor | None:
    """The bound [B] for sums of the rows of g [B,K,d] with equal ids [B,K]. None: no id is there twice."""
    if ids.size(1) <= 1 or g.numel() == 0:
        return None
    ordered, order = ids.sort(dim=1, stable=True)
    place = torch.arange(ids.size(1), device=ids.device).expand_as(ids)
    last = torch.ones_like(ids, dtype=torch.bool)
    last[:, :-1] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.ones_like(last)
    first[:, 1:] = last[:, :-1]
    start = torch.where(first, place, 0).cummax(1).values
    stop = torch.where(last, place, ids.size(1)).flip(1).cummin(1).values.flip(1)
    times = torch.empty_like(start).scatter_(1, order, stop - start + 1)  # of the id of each row
    if g.device.type != "cpu":
        sizes = square_sum(g.flatten(0, 1)).view(ids.shape)
    else:
        repeated = (times > 1).nonzero(as_tuple=True)
        if not len(repeated[0]):
            return None
        sizes = torch.zeros(ids.shape, dtype=torch.float64)
        sizes[repeated] = square_sum(g[repeated])
    units = (FEW + DRIFT * times) * unit(g)
    # (sum over the rows of an id)^2 <= rows times the sum of squares
    terms = torch.where(times > 1, units.square() * times * sizes, torch.zeros_like(sizes))
    return terms.sum(1).sqrt()


def added(*bounds: Tensor | None) -> Tensor | None:
    """The sum of bounds [B]; None: there is none."""
    total = None
    for bound in bounds:
        if bound is not None:
            total = bound if total is None else total + bound.to(total.device)
    return total
