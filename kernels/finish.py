"""From partial sums of programs to squared norms, and to a bound for what rounding may do to the clipped sum.

Partial sums of one sample lie side by side, float64: values [n]; with a guard the sums of squared summands [n]; sizes
sum_t |a_t| |g_t| [m]; with a guard |a|^2 [m] and |g|^2 [m]. So nothing is read but what the kernels of norms have in
hand, and no tensor is copied to float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import kernel

# Rounding of the gram route is taken as random: ROUNDING * sqrt(sum M^2), M_ts the summands. Where that is
# more than GRAM_TOLERANCE of the norm (summands cancel), it is added: rather a norm too large than too small.
# These stand on the right of products: on the left, the interpreter of Triton 3.8 makes a constexpr of a tensor.
ROUNDING = tl.constexpr(4 * 2.0**-24)
GRAM_TOLERANCE = tl.constexpr(4e-6)
# Products below 1e-38 are lost by the gram route; a norm as small as this is reported as this.
UNDERFLOW = tl.constexpr(1e-28)
TINY = tl.constexpr(1.2e-38)  # a product of float32 may lose so much
SLACK = 1e-5  # a sum of sizes in float32 may be too small by less


class Sums(NamedTuple):
    """What a bound is told from: positions T and sides I, O of a product; units, the share of sum_t |a_t| |g_t| by
    which sums may be off; tolerance, the share of a norm that a bound must exceed to enlarge it (inf: it never does).
    """

    t: int
    i: int
    o: int
    units: float = 0.0
    tolerance: float = math.inf


@triton.jit
def sum_of(p, n, BLOCK: tl.constexpr):
    """Numbers added in their order, float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        total += tl.load(p + o_n, mask=o_n < n, other=0.0)
    return tl.sum(total, 0)


@kernel
def finish_kernel(p_partial, p_out, p_bound, n, m, stride, T, D_I, D_O, enlarge, units, tolerance,
                  GUARD: tl.constexpr, SIZES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Partial sums of one sample added in their order; with GUARD enlarged where summands cancel and by what underflow
    may have taken, with SIZES where the clipped sum may be off."""
    i_b = tl.program_id(0).to(tl.int64)
    p_partial += i_b * stride
    value = sum_of(p_partial, n, BLOCK)
    value += value * enlarge
    p_sizes = p_partial + n
    if GUARD:
        p_sizes += n
        doubt = tl.sqrt(sum_of(p_partial + n, n, BLOCK)) * ROUNDING
        value = tl.where(value < 0, 0.0, value)  # keeps NaN
        value += tl.where(doubt > value * GRAM_TOLERANCE, doubt, 0.0)
        value = tl.where((value > 0) & (value < UNDERFLOW), UNDERFLOW, value)
        if SIZES:  # an entry of a a^T may have lost I TINY and meets at most |g_t| |g_s|; the sum of these is T |g|^2
            a_sq = sum_of(p_sizes + m, m, BLOCK) + (T * TINY) * D_I
            g_sq = sum_of(p_sizes + 2 * m, m, BLOCK) + (T * TINY) * D_O
            value += ((D_I * g_sq + D_O * a_sq) * TINY) * T
    if SIZES:
        bound = sum_of(p_sizes, m, BLOCK) * units
        tl.store(p_bound + i_b, bound)
        norm = tl.sqrt(value)
        more = bound - tolerance * norm
        value = tl.where(more > 0, (norm + more) * (norm + more), value)
    tl.store(p_out + i_b, value.to(p_out.dtype.element_ty))


def finish(partial: Tensor, values: int, enlarge: float, dtype: torch.dtype, guard: bool = False,
           sums: Sums | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Partial sums [B, ...] as above, so many values of each -> squared norms [B], and with `sums` the bound [B]."""
    batch, stride = partial.shape
    out = torch.empty(batch, dtype=dtype, device=partial.device)
    bound = None if sums is None else torch.empty(batch, dtype=torch.float64, device=partial.device)
    known = sums or Sums(1, 1, 1)
    rest = stride - values * (2 if guard else 1)
    with torch.cuda.device_of(partial):
        finish_kernel[(batch,)](
            partial, out, out if bound is None else bound, values, rest // 3 if guard else rest, stride, known.t,
            known.i, known.o, enlarge, known.units * (1 + enlarge) * (1 + SLACK), known.tolerance,
            GUARD=guard, SIZES=bound is not None, BLOCK=256, num_warps=4,
        )  # fmt: skip
    return out, bound
