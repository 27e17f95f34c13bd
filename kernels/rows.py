"""Rows of numbers, one a sample: sums of squares and the weighted sum, each number read once and none copied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import has_kernel, kernel, start_of
from .finish import finish

PART = 1 << 14  # numbers of a sample that one program squares: by their number alone, whatever the batch
BLOCK = 1024


@kernel
def square_kernel(p_x, p_out, B, N, n, stride_b, stride_n, PART: tl.constexpr, BLOCK: tl.constexpr,
                  TYPE: tl.constexpr):  # fmt: skip
    """Squares of one part of a sample's N numbers, of one of the layers, added in float64, where no square under- or
    overflows."""
    pid = tl.program_id(0)
    i_all, i_n = pid // n, (pid % n).to(tl.int64)
    p_x = start_of(p_x, i_all // B, TYPE) + (i_all % B).to(tl.int64) * stride_b
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, tl.minimum(N - i_n * PART, PART), BLOCK):
        o_n = i_n * PART + start + tl.arange(0, BLOCK)
        x = tl.load(p_x + o_n * stride_n, mask=o_n < N, other=0.0).to(tl.float64)
        total += x * x
    tl.store(p_out + pid, tl.sum(total, 0))


@kernel
def weighted_kernel(p_x, p_c, p_out, B, N, stride_b, stride_n, stride_c, stride_cl, SUM: tl.constexpr,
                    BLOCK: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """sum_b c_b x_b of a block of columns of one of the layers, samples in their order; those of factor 0 are not
    read."""
    p_x, p_out = start_of(p_x, tl.program_id(1), TYPE), start_of(p_out, tl.program_id(1), TYPE)
    p_c += tl.program_id(1).to(tl.int64) * stride_cl
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], SUM)
    for b in range(B):
        i_b = tl.cast(b, tl.int64)
        c = tl.load(p_c + i_b * stride_c).to(SUM)
        last = tl.where(c != 0, N, 0)
        total += c * tl.load(p_x + i_b * stride_b + o_n * stride_n, mask=o_n < last, other=0.0).to(SUM)
    tl.store(p_out + o_n, total.to(p_out.dtype.element_ty), mask=o_n < N)


# ---------------------------------------------------------------------- launchers


def takes(rows: Tensor) -> bool:
    """Whether the kernels take such numbers."""
    return has_kernel(rows) or rows.dtype == torch.float64


def _order(rows: Tensor) -> list[int]:
    """The dimensions behind the first, as they lie in memory."""
    return sorted(range(1, rows.dim()), key=lambda d: -rows.stride(d))


def flat(rows: Tensor) -> Tensor:
    """[B, ...] -> [B, n], as the numbers lie in memory: not copied if a sample's lie without gaps."""
    return rows.permute(0, *_order(rows)).reshape(rows.size(0), -1) if rows.dim() > 1 else rows.unsqueeze(1)


def square_sum(rows: Tensor) -> Tensor:
    """The sum of the squares of each sample's numbers: [B, ...] -> [B] float64; float32, float64 or 16 bits."""
    numbers = flat(rows)
    batch, count = numbers.shape
    n = triton.cdiv(count, PART)
    partial = torch.empty((batch, n), dtype=torch.float64, device=rows.device)
    with torch.cuda.device_of(rows):
        square_kernel[(batch * n,)](
            numbers, partial, batch, count, n, *numbers.stride(), PART=PART, BLOCK=BLOCK, TYPE=None, num_warps=4
        )
    return partial[:, 0] if n == 1 else finish(partial, n, 0.0, torch.float64)[0]


def weighted_sum(rows: Tensor, c: Tensor) -> Tensor:
    """sum_b c_b rows_b: [B, ...], [B] -> [...] in float32 (float64 of float64)."""
    order = _order(rows)
    numbers = flat(rows)
    batch, count = numbers.shape
    kind = torch.float64 if rows.dtype == torch.float64 else torch.float32
    out = torch.empty(count, dtype=kind, device=rows.device)
    with torch.cuda.device_of(rows):
        weighted_kernel[(triton.cdiv(count, BLOCK), 1)](
            numbers, c, out, batch, count, *numbers.stride(), c.stride(0), 0,
            SUM=tl.float64 if rows.dtype == torch.float64 else tl.float32, BLOCK=BLOCK, TYPE=None,
            num_warps=4,
        )  # fmt: skip
    back = sorted(range(len(order)), key=order.__getitem__)
    return out.view([rows.size(d) for d in order]).permute(back)
