"""Norms of convolutions that are enlarged by what rounding may do to the clipped sum, in two launches.

The bound is units * |x| |g|, `fastdp.ops.bounds`: the squares of both sides are added by one kernel, behind the partial
sums of the norm, and the last kernel takes all three from there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import kernel
from .finish import SLACK, sum_of
from .rows import BLOCK, PART, flat


class Limits(NamedTuple):
    """The share of |x| |g| by which sums may be off, and the share of a norm that this must exceed to enlarge it."""

    units: float
    tolerance: float


@triton.jit
def _part_squares(p, i_n, N, stride_n, PART: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the squares of part i_n of a sample's N numbers, float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, PART, BLOCK):
        o_n = i_n * PART + start + tl.arange(0, BLOCK)
        x = tl.load(p + o_n * stride_n, mask=o_n < N, other=0.0).to(tl.float64)
        total += x * x
    return tl.sum(total, 0)


@kernel
def sides_kernel(p_x, p_g, p_out, n_x, n_g, N_X, N_G, stride_xb, stride_xn, stride_gb, stride_gn, stride_p,
                 PART: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Squares of one part of one side of one sample: n_x parts of x, then n_g parts of g."""
    pid = tl.program_id(0)
    i_b, i_n = (pid // (n_x + n_g)).to(tl.int64), (pid % (n_x + n_g)).to(tl.int64)
    if i_n < n_x:
        total = _part_squares(p_x + i_b * stride_xb, i_n, N_X, stride_xn, PART, BLOCK)
    else:
        total = _part_squares(p_g + i_b * stride_gb, i_n - n_x, N_G, stride_gn, PART, BLOCK)
    tl.store(p_out + i_b * stride_p + i_n, total)


@kernel
def enlarge_kernel(p_partial, p_out, values, n_x, n_g, stride, enlarge, units, tolerance, BLOCK: tl.constexpr):
    """Of one sample: partial sums of the norm, of the squares of x and of g, each added in their order; the norm,
    enlarged by the bound where that is more than the tolerance."""
    i_b = tl.program_id(0).to(tl.int64)
    p_partial += i_b * stride
    value = sum_of(p_partial, values, BLOCK)
    value += value * enlarge
    x_sq = sum_of(p_partial + values, n_x, BLOCK)
    g_sq = sum_of(p_partial + values + n_x, n_g, BLOCK)
    norm = tl.sqrt(value)
    more = tl.sqrt(x_sq) * tl.sqrt(g_sq) * units - tolerance * norm
    tl.store(p_out + i_b, tl.where(more > 0, (norm + more) * (norm + more), value))


def parts_of(x: Tensor, g: Tensor) -> int:
    """How many numbers of a sample `enlarged` puts behind the partial sums of its norm."""
    return triton.cdiv(x[0].numel(), PART) + triton.cdiv(g[0].numel(), PART)


def enlarged(partial: Tensor, values: int, x: Tensor, g: Tensor, enlarge: float, limits: Limits) -> Tensor:
    """The norms [B] float64 of partial sums [B, values + parts_of(x, g)], enlarged by `enlarge` and by the bound."""
    batch, x, g = x.size(0), flat(x), flat(g)
    n_x, n_g = triton.cdiv(x.size(1), PART), triton.cdiv(g.size(1), PART)
    out = torch.empty(batch, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        sides_kernel[(batch * (n_x + n_g),)](
            x, g, partial[:, values:], n_x, n_g, x.size(1), g.size(1), *x.stride(), *g.stride(), partial.stride(0),
            PART=PART, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        enlarge_kernel[(batch,)](
            partial, out, values, n_x, n_g, partial.stride(0), enlarge, limits.units * (1 + enlarge) * (1 + SLACK),
            limits.tolerance, BLOCK=256, num_warps=4,
        )  # fmt: skip
    return out
