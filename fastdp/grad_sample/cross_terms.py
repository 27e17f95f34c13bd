"""Norms of parameters with several uses: their gradient is a sum, so its norm has cross terms.

A table that is also the head has a closed form; disjoint slices add up; anything else is materialised, a chunk of
samples at a time. Where the gradients of uses cancel, rounding is what is left: the closed form is given up where it
may be off, and norms are enlarged by what rounding may do to the clipped sums (`fastdp.ops.bounds`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import ops
from ..ops.bounds import BLOCK, added, enlarged, is_small, of_rows, roundings, unit
from ..ops.common import chunks, sum_type
from ..ops.linear import GRAM_TOLERANCE
from ..ops.rows import square_sum
from .embedding import Lookup
from .head_loss import HeadLoss
from .head_samples import HeadGradients, HeadParts
from .linear import Matmul
from .parameter_links import link_of, pull_back
from .parameter_use import ParameterUse

PROBES, PERIOD = 4, 4099  # random gradients that show what a map from parameters makes of rounding; a prime
CLOSED_TOLERANCE = 2e-5  # of a squared norm by the closed form; where it may be further off, it is not taken


def joint_norm_sq(parameter: Tensor, uses: list[ParameterUse]) -> Tensor:
    """Squared norms [B] of the samples' gradients of a parameter, by all of its uses."""
    if len(uses) == 1 and isometric(uses[0].operand):
        return _of_short(uses[0].operand, uses[0].norm_sq())
    if _tied(parameter, uses):
        return _tied_norm_sq(parameter, uses)
    if all(isometric(use.operand) for use in uses) and disjoint(parameter, uses):
        return torch.stack([_of_short(use.operand, use.norm_sq().double()) for use in uses]).sum(0)
    return _materialised_norm_sq(parameter, uses)


def _short(operand: Tensor) -> float:
    """Autograd pulls back through 16-bit tensors in 16 bits: the relative rounding of that, else 0."""
    small = operand.dtype in (torch.bfloat16, torch.float16)
    return torch.finfo(operand.dtype).eps if small and link_of(operand) is not None else 0.0


def _of_short(operand: Tensor, norm_sq: Tensor) -> Tensor:
    """Norms enlarged by the rounding to 16 bits."""
    rounding = _short(operand)
    return norm_sq if rounding == 0 else norm_sq * (1 + rounding) ** 2


def isometric(operand: Tensor) -> bool:
    """Whether gradients of the operand are gradients of one parameter, moved at most."""
    link = link_of(operand)
    return link is None or (link.isometric and len(link.leaves) == 1)


# ---------------------------------------------------------------------- a table that is the head


def _tied(parameter: Tensor, uses: list[ParameterUse]) -> bool:
    """One look-up and one matrix product (or loss behind one) of the table itself."""
    kinds = {type(use) for use in uses}
    pairs = [{head, Lookup} for head in (Matmul, HeadLoss, HeadGradients, HeadParts)]
    return len(uses) == 2 and kinds in pairs and all(use.operand is parameter for use in uses)


def _tied_norm_sq(parameter: Tensor, uses: list[ParameterUse]) -> Tensor:
    """|G_e + G_h|^2 = |G_e|^2 + |G_h|^2 + 2 <G_e, G_h>, where its summands do not cancel."""
    lookup = next(use for use in uses if isinstance(use, Lookup))
    head = next(use for use in uses if isinstance(use, Matmul | HeadLoss | HeadGradients | HeadParts))
    if isinstance(head, Matmul):
        cross, spread = ops.embedding.cross_term_and_spread(lookup.ids, lookup.g, head.a, head.g)
    else:
        cross, spread = head.cross_term_and_spread(lookup.ids, lookup.g)
    squares = lookup.norm_sq().double(), head.norm_sq().double()
    found = squares[0] + squares[1] + 2 * cross
    doubt = GRAM_TOLERANCE * (squares[0] + squares[1]) + 2 * unit(parameter) * roundings(parameter.size(1)) * spread
    sure = doubt <= CLOSED_TOLERANCE * found
    sizes = (squares[0].sqrt() + squares[1].sqrt()) * (2 * roundings(2) * unit(parameter))
    head_bound = head.rounding()
    if found.device.type != "cpu":  # no look at values on a device: rather a norm too large by its rounding
        found = torch.where(sure, found, found.clamp(min=0) + doubt)
        return enlarged(found, added(sizes, lookup.rounding(), head_bound))
    for b in torch.nonzero(~sure & torch.isfinite(found)).flatten().tolist():
        found[b : b + 1] = square_sum(materialised(parameter, uses, b, b + 1))
    rough = added(sizes, of_rows(lookup.g), head_bound)
    if rough is not None and is_small(found, rough):  # no need to look for equal ids
        return found
    return enlarged(found, added(sizes, lookup.rounding(), head_bound))


# ---------------------------------------------------------------------- anything else


def _materialised_norm_sq(parameter: Tensor, uses: list[ParameterUse]) -> Tensor:
    numel = parameter.numel() + max(use.operand.numel() for use in uses)
    batch = uses[0].batch
    gains = [_gains(parameter, use.operand) for use in uses]
    parts: list[Tensor] = []
    sizes: list[Tensor] = []  # of what rounding on the way from the operands may do
    for low, high in chunks(batch, 8 * numel, 2**28):
        total = _zeros(parameter, high - low)
        rounding = torch.zeros(high - low, dtype=torch.float64, device=parameter.device)
        for use, (_, units) in zip(uses, gains, strict=True):
            own = use.per_sample(low, high)
            part = pull_back(use.operand, own).get(id(parameter))
            if part is not None:
                total = total + part
                rounding += (square_sum(own).sqrt() * units).to(rounding.device)
        parts.append(square_sum(total))
        sizes.append(rounding)
    each = [(use.rounding(), gain) for use, (gain, _) in zip(uses, gains, strict=True)]
    bound = added(torch.cat(sizes), *[None if own is None else own * gain for own, gain in each])
    found = torch.cat(parts)
    short = (1 + max(_short(use.operand) for use in uses)) ** 2
    return torch.maximum(found * short, enlarged(found, bound))


def _gains(parameter: Tensor, operand: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """What an operand's gradient of size 1 leaves in the parameter's: (of its rounding, by rounding on the way).

    The map's size is its root mean square over random gradients, which rounding resembles; but equal numbers are
    rounded alike, so it is as much more as that makes, where many are added into one.
    """
    short = _short(operand)
    if isometric(operand):
        return 1.0, 2 * roundings(2) * unit(operand) + short
    found = pull_back(operand, _probes(operand)).get(id(parameter))
    if found is None:
        return 0.0, 0.0
    count = max(operand.numel(), 1)
    sizes = (square_sum(found) / count).sqrt()
    alike = max(1, count // max(parameter.numel(), 1))  # numbers added into one, at least
    random = sizes[1:].square().mean().sqrt()
    gain = torch.maximum(random * math.sqrt(alike), sizes[0])
    return gain, gain * (roundings(max(min(count, BLOCK), alike)) * unit(operand)) + random * short


def _probes(operand: Tensor) -> Tensor:
    """Gradients of an operand: of ones, then PROBES random ones of 1 and -1, the same each time, made where it lies:
    copying them there would wait for a device."""
    count, device = operand.numel(), operand.device
    places = torch.arange(1, PROBES * PERIOD + 1, device=device).view(PROBES, PERIOD)
    mixed = places * -7046029254386353131  # splitmix64's odd numbers
    mixed = (mixed ^ mixed >> 31) * -4658895280553007687
    signs = torch.cat([torch.ones(1, PERIOD, device=device), ((mixed >> 40 & 1) * 2 - 1).float()])
    return signs.repeat(1, -(-count // PERIOD))[:, :count].reshape(PROBES + 1, *operand.shape)


def _zeros(parameter: Tensor, count: int) -> Tensor:
    return torch.zeros((count, *parameter.shape), dtype=sum_type(parameter), device=parameter.device)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, of one type, lie in the same storage."""
    return a.dtype == b.dtype and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def disjoint(parameter: Tensor, uses: list[ParameterUse]) -> bool:
    """Whether the uses are of slices of the parameter that share no element (as intervals of memory)."""
    spans = []
    for use in uses:
        operand = use.operand
        if not same_memory(operand, parameter):
            return False
        extent = sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride(), strict=True))
        spans.append((operand.storage_offset(), operand.storage_offset() + extent))
    spans.sort()
    return all(end < start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def materialised(parameter: Tensor, uses: list[ParameterUse], low: int, high: int) -> Tensor:
    """Gradients of samples [low, high) by all uses, [high - low, *parameter.shape]."""
    total = _zeros(parameter, high - low)
    for use in uses:
        part = pull_back(use.operand, use.per_sample(low, high)).get(id(parameter))
        if part is not None:
            total = total + part
    return total
