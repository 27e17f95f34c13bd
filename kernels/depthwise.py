"""Per-sample gradients of depthwise convolutions, each of whose channels is a convolution of its own.

G_b[c,tap] = sum_p g_b[c,p] x_b[c, p + tap]: nothing for a matrix unit, whose tile would be one row of sixteen. Threads
take neighbouring channels, which lie side by side with channels last, and a few taps each; sums are float32, in blocks.
The gradients are small (a tap for a channel), so that norms and clipped sums are those of stored rows (`rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common import extent, has_kernel, kernel
from .conv_problem import Problem
from .patches import elements, positions, within

SPAN = 8192  # positions of a program, by their number alone, whatever the batch: 512 of each of 16 rows of a block


@kernel
def depthwise_kernel(
    p_x, p_g, p_out, P, C, depth, height, width, out_h, out_w, inverse,
    stride_xb, stride_c, stride_d, stride_h, stride_w, stride_gb, stride_gc, stride_gp, n_t, n_c, n_p,
    FAST: tl.constexpr, DEEP: tl.constexpr, FAR: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, DILATION: tl.constexpr, SPAN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_T taps of BLOCK_C channels of one sample, of one part of its positions."""
    taps: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    pid = tl.program_id(0)
    i_part, i_c, i_t = (pid // (n_t * n_c)).to(tl.int64), pid // n_t % n_c, pid % n_t
    i_b, i_p = i_part // n_p, (i_part % n_p).to(tl.int32)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    o_t = i_t * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t, m_c = o_t < taps, o_c < C
    of = elements(o_t, 1, 0, stride_d, stride_h, stride_w, FAR, False, KERNEL, DILATION)
    p_x += i_b * stride_xb + o_c.to(tl.int64)[None, None, :] * stride_c
    p_g += i_b * stride_gb + o_c.to(tl.int64)[None, :] * stride_gc
    total = tl.zeros([BLOCK_T, BLOCK_P, BLOCK_C], tl.float32)
    for start in range(i_p * SPAN, tl.minimum(i_p * SPAN + SPAN, P), BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P)
        m_p = o_p < P
        o_g = o_p * stride_gp if not FAR else o_p.to(tl.int64) * stride_gp
        g = tl.load(p_g + o_g[:, None], mask=m_p[:, None] & m_c[None, :], other=0.0).to(tl.float32)
        at = positions(o_p, out_h, out_w, inverse, stride_d, stride_h, stride_w, FAST, DEEP, FAR, STRIDE, PADDING)
        m = m_t[:, None] & m_p[None, :]
        if DEEP:
            m &= within(of[1][:, None] + at[1][None, :], depth)
        m &= within(of[2][:, None] + at[2][None, :], height)
        m &= within(of[3][:, None] + at[3][None, :], width)
        offset = of[0][:, None] + at[0][None, :]
        x = tl.load(p_x + offset[:, :, None], mask=m[:, :, None] & m_c[None, None, :], other=0.0)
        total += x.to(tl.float32) * g[None, :, :]
    place = (i_part * C + o_c)[None, :] * taps + o_t[:, None]
    tl.store(p_out + place, tl.sum(total, 1), mask=m_t[:, None] & m_c[None, :])


# ---------------------------------------------------------------------- launchers


def takes(p: Problem) -> bool:
    """Whether each channel of the input has one of the output, and the kernel takes such numbers."""
    return p.groups > 1 and p.weight[:2] == (p.groups, 1) and has_kernel(p.x)


def copied(p: Problem) -> tuple[bool, bool]:
    """Whether x, and g, are copied to lay channels last: a number of the input is loaded for each tap."""
    return p.x.stride(1) != 1, p.g.stride(1) != 1


def _last(p: Problem) -> Problem:
    """With channels last."""
    (of_x, of_g), x, g = copied(p), p.x, p.g
    if of_x:
        x = x.contiguous(memory_format=torch.channels_last_3d)
    return p._replace(x=x, g=g.mT.contiguous().mT if of_g else g)


def _blocks(taps: int, channels: int) -> tuple[int, int, int]:
    """Taps, positions and channels of a program. Eight taps share a load of g; of channels few are left empty."""
    block_c = min((64, 32), key=lambda size: triton.cdiv(channels, size) * size)
    block_c = min(block_c, extent(channels, 64))
    return 8 if taps > 4 else 4, 1024 // block_c, block_c


def per_sample(p: Problem) -> torch.Tensor:
    """The weight gradient of each sample, [B, C, 1, *kernel] float32."""
    p = _last(p)
    batch, channels, taps = p.x.size(0), p.groups, p.inputs
    block_t, block_p, block_c = _blocks(taps, channels)
    n_t, n_c, n_p = triton.cdiv(taps, block_t), triton.cdiv(channels, block_c), triton.cdiv(p.g.size(2), SPAN)
    out = p.x.new_empty((batch, n_p, *p.weight), dtype=torch.float32)
    sizes, constants = p.sizes(), p.constants()
    del constants["LAST"]
    with torch.cuda.device_of(p.x):
        depthwise_kernel[(batch * n_p * n_c * n_t,)](
            p.x, p.g, out, sizes[0], channels, *sizes[4:], *p.x.stride(), *p.g.stride(), n_t, n_c, n_p, **constants,
            SPAN=SPAN, BLOCK_T=block_t, BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return out[:, 0] if n_p == 1 else out.sum(1)  # in a fixed order, without atomics
