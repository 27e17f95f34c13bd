"""Per-sample gradients of affine maps of normalised values, in one pass: weight sum_t g_t xhat_t, bias sum_t g_t.

Layer and RMS norm: x, g [B,...,d] with one statistic a row; group norm: x, g [B,C,...] with one a group of channels.
Sums are float32 (float64 for float64), over positions in a fixed order; no number of a sample touches another's.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdp.ops.common import sum_type

from .common import extent, kernel, same_type


@kernel
def rows_kernel(
    p_x, p_g, p_mean, p_rstd, p_weight, p_bias, T, D, stride_xb, stride_xt, stride_xd, stride_gb, stride_gt, stride_gd,
    CENTRED: tl.constexpr, SUM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One block of columns of one sample: x, g [T, D]; mean, rstd [T]."""
    i_b = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    p_x += i_b * stride_xb + o_d.to(tl.int64)[None, :] * stride_xd
    p_g += i_b * stride_gb + o_d.to(tl.int64)[None, :] * stride_gd
    weight = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    bias = tl.zeros([BLOCK_T, BLOCK_D], SUM)
    for t in tl.range(0, T, BLOCK_T, num_stages=3):
        o_t = t + tl.arange(0, BLOCK_T)
        m_t = o_t < T
        m = m_t[:, None] & m_d
        o_row = o_t.to(tl.int64)[:, None]
        x = tl.load(p_x + o_row * stride_xt, mask=m, other=0.0).to(SUM)
        g = tl.load(p_g + o_row * stride_gt, mask=m, other=0.0).to(SUM)
        rstd = tl.load(p_rstd + i_b * T + o_t, mask=m_t, other=0.0).to(SUM)
        if CENTRED:
            x -= tl.load(p_mean + i_b * T + o_t, mask=m_t, other=0.0).to(SUM)[:, None]
            bias += g
        weight += g * (x * rstd[:, None])  # g xhat
    o_out = i_b * D + o_d
    tl.store(p_weight + o_out, tl.sum(weight, 0), mask=o_d < D)
    if CENTRED:
        tl.store(p_bias + o_out, tl.sum(bias, 0), mask=o_d < D)


@kernel
def rstd_kernel(p_x, p_out, N, T, D, eps, stride_b, stride_t, stride_d, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of BLOCK_N of the N = B T rows of x [B, T, D], by sums in float64."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_row = p_x + (o_n // T * stride_b + o_n % T * stride_t)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float64)
    for d in range(0, D, BLOCK_D):
        o_d = d + tl.arange(0, BLOCK_D)
        mask = (o_n < N)[:, None] & (o_d < D)[None, :]
        x = tl.load(p_row + o_d.to(tl.int64)[None, :] * stride_d, mask=mask, other=0.0).to(tl.float64)
        total += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(total, 1) / D + eps)
    tl.store(p_out + o_n, rstd.to(tl.float32), mask=o_n < N)


@kernel
def channels_kernel(
    p_x, p_g, p_mean, p_rstd, p_weight, p_bias, C, S, stride_xb, stride_xc, stride_xs, stride_gb, stride_gc, stride_gs,
    per_group, groups, SUM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One block of channels of one sample: x, g [C, S]; mean, rstd [groups]."""
    i_b = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_group = i_b * groups + o_c // per_group
    mean = tl.load(p_mean + o_group, mask=m_c, other=0.0).to(SUM)
    rstd = tl.load(p_rstd + o_group, mask=m_c, other=0.0).to(SUM)
    p_x += i_b * stride_xb + o_c.to(tl.int64)[:, None] * stride_xc
    p_g += i_b * stride_gb + o_c.to(tl.int64)[:, None] * stride_gc
    weight = tl.zeros([BLOCK_C, BLOCK_S], SUM)
    bias = tl.zeros([BLOCK_C, BLOCK_S], SUM)
    for s in tl.range(0, S, BLOCK_S, num_stages=3):
        o_s = s + tl.arange(0, BLOCK_S)
        m = m_c[:, None] & (o_s < S)[None, :]
        o_column = o_s.to(tl.int64)[None, :]
        x = tl.load(p_x + o_column * stride_xs, mask=m, other=0.0).to(SUM)
        g = tl.load(p_g + o_column * stride_gs, mask=m, other=0.0).to(SUM)
        weight += g * tl.where(m, (x - mean[:, None]) * rstd[:, None], 0.0)  # g xhat
        bias += g
    o_out = i_b * C + o_c
    tl.store(p_weight + o_out, tl.sum(weight, 1), mask=m_c)
    tl.store(p_bias + o_out, tl.sum(bias, 1), mask=m_c)


# ---------------------------------------------------------------------- launchers


def _rows(x: Tensor, g: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != g.shape or x.dim() < 2:
        raise ValueError(f"expected x and g [B,...,d]; got {tuple(x.shape)} and {tuple(g.shape)}")
    batch, d = x.size(0), x.size(-1)
    count = math.prod(x.shape[1:-1])
    for statistic in (mean, rstd):
        if statistic is not None and tuple(statistic.shape) not in ((*x.shape[:-1],), (*x.shape[:-1], 1)):
            raise ValueError(f"expected a statistic a row, {tuple(x.shape[:-1])}; got {tuple(statistic.shape)}")
    x, g = same_type(x, g)
    x, g = x.reshape(batch, count, d), g.reshape(batch, count, d)
    kind = sum_type(x)
    out = x.new_empty((2, batch, d), dtype=kind)
    if 0 in (batch, count, d):
        out.zero_()
        return out[0], out[1]
    block = extent(d, 64)
    with torch.cuda.device_of(x):
        rows_kernel[(batch, triton.cdiv(d, block))](
            x, g, rstd if mean is None else mean.contiguous(), rstd.contiguous(), out[0], out[1], count, d,
            *x.stride(), *g.stride(), CENTRED=mean is not None, SUM=_triton_type(kind),
            BLOCK_T=extent(count, 32), BLOCK_D=block, num_warps=4,
        )  # fmt: skip
    return out[0], out[1]


def _triton_type(kind: torch.dtype) -> tl.dtype:
    return tl.float64 if kind == torch.float64 else tl.float32


def norm_affine_per_sample(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm: sum_t g_t (x_t - mean_t) rstd_t, and sum_t g_t.

    Args: x, g [B,...,d]; mean, rstd [B,...] or [B,...,1]. Returns the weight's and the bias's gradients, [B,d] each,
    float32 (float64 for float64). Raises ValueError on shapes.
    """
    return _rows(x, g, mean, rstd)


def rms_affine_per_sample(x: Tensor, g: Tensor, rstd: Tensor) -> Tensor:
    """RMS norm: sum_t g_t x_t rstd_t, [B,d]. x, g [B,...,d]; rstd [B,...] or [B,...,1]. Raises ValueError on shapes."""
    return _rows(x, g, None, rstd)[0]


def rms_rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps) of each row of x [B,T,d], which is read once: [B,T] float32."""
    (batch, count, d), block = x.shape, 4
    out = torch.empty((batch, count), dtype=torch.float32, device=x.device)
    if out.numel():
        with torch.cuda.device_of(x):
            rstd_kernel[(triton.cdiv(batch * count, block),)](
                x, out, batch * count, count, d, eps, *x.stride(), BLOCK_N=block, BLOCK_D=extent(d, 512), num_warps=4
            )
    return out


def group_affine_per_sample(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor,
                            num_groups: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Group norm: sum_s g_s (x_s - mean) rstd for each channel, and sum_s g_s.

    Args: x, g [B,C,...]; mean, rstd [B,num_groups] (or [B,num_groups,1]). Returns the weight's and the bias's
    gradients, [B,C] each, float32 (float64 for float64). Raises ValueError on shapes.
    """
    if x.shape != g.shape or x.dim() < 2 or x.size(1) % num_groups:
        raise ValueError(f"expected x and g [B,C,...] with C a multiple of {num_groups}; got {tuple(x.shape)} "
                         f"and {tuple(g.shape)}")  # fmt: skip
    batch, channels = x.shape[:2]
    sizes = [[size for size in each if size != 1] for each in ((batch, num_groups), mean.shape, rstd.shape)]
    if sizes[1:] != sizes[:1] * 2:
        raise ValueError(f"expected a statistic a sample and group, {batch * num_groups}; got {tuple(mean.shape)} "
                         f"and {tuple(rstd.shape)}")  # fmt: skip
    x, g = same_type(x, g)
    size = math.prod(x.shape[2:])
    x, g = x.reshape(batch, channels, size), g.reshape(batch, channels, size)
    kind = sum_type(x)
    out = x.new_empty((2, batch, channels), dtype=kind)
    if 0 in (batch, channels, size):
        out.zero_()
        return out[0], out[1]
    by_channel = x.stride(1) == 1 or size < 64  # neighbours in memory are of different channels
    block = 64 if by_channel else 16
    with torch.cuda.device_of(x):
        channels_kernel[(batch, triton.cdiv(channels, block))](
            x, g, mean.contiguous(), rstd.contiguous(), out[0], out[1], channels, size, *x.stride(), *g.stride(),
            channels // num_groups, num_groups, SUM=_triton_type(kind), BLOCK_C=block,
            BLOCK_S=extent(size, 32 if by_channel else 128), num_warps=4,
        )  # fmt: skip
    return out[0], out[1]
