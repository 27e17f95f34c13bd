"""The kernels of `conv`: patches are gathered as they are loaded.

Elements of a patch are ordered by channel and tap, or with LAST by tap and channel: where channels are neighbours in
memory, and come in whole vectors, 16 bytes are loaded at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import dot, grouped, tile_sums, triangle
from .products import rows_product


@triton.jit
def _inside(o_out, o_tap, size, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr):
    """Where an output position and a tap meet in the input along one dimension, and whether that is inside it."""
    at = (o_out * STRIDE - PADDING)[:, None] + (o_tap * DILATION)[None, :]
    return at, (at >= 0) & (at < size)


@triton.jit
def _element(o_n, C, taps: tl.constexpr, LAST: tl.constexpr):
    """Channel and tap of an element of a patch: taps are the inner ones, or with LAST the channels, as in memory."""
    if LAST:
        return o_n % C, o_n // C
    else:
        return o_n // taps, o_n % taps


@triton.jit
def _patches(p_x, o_p, o_n, P, N, C, depth, height, width, out_h, out_w, stride_c, stride_d, stride_h, stride_w,
             LAST: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
             DILATION: tl.constexpr):  # fmt: skip
    """Elements o_n of the patches at output positions o_p of one sample, 0 in the padding."""
    taps: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    o_c, o_tap = _element(o_n, C, taps, LAST)
    m = (o_p < P)[:, None] & (o_n < N)[None, :]
    at, inside = _inside(o_p % out_w, o_tap % KERNEL[2], width, STRIDE[2], PADDING[2], DILATION[2])
    offset = o_c.to(tl.int64)[None, :] * stride_c + at.to(tl.int64) * stride_w
    m &= inside
    at, inside = _inside(o_p // out_w % out_h, o_tap // KERNEL[2] % KERNEL[1], height, STRIDE[1], PADDING[1],
                         DILATION[1])  # fmt: skip
    offset += at.to(tl.int64) * stride_h
    m &= inside
    if KERNEL[0] > 1 or STRIDE[0] > 1 or PADDING[0] > 0:
        at, inside = _inside(o_p // (out_w * out_h), o_tap // (KERNEL[2] * KERNEL[1]), depth, STRIDE[0], PADDING[0],
                             DILATION[0])  # fmt: skip
        offset += at.to(tl.int64) * stride_d
        m &= inside
    else:
        offset += (o_p // (out_w * out_h)).to(tl.int64)[:, None] * stride_d
    return tl.load(p_x + offset, mask=m, other=0.0)


@triton.jit
def conv_kernel(
    p_x, p_g, p_c, p_out, B, P, N, C, D_O, depth, height, width, out_h, out_w,
    stride_xb, stride_xg, stride_c, stride_d, stride_h, stride_w, stride_gb, stride_gg, stride_go, stride_gp,
    groups, n_o, n_n, share, flush,
    LAST: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    MODE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of G of one group, of `share` samples: MODE "norm" sums its squares, "store" and "sum" store it.

    A sum goes to the total after `flush` steps and at the end of a sample, then times the sample's factor.
    """
    pid = tl.program_id(0)
    tiles = n_o * n_n
    i_split, i_group = pid // (tiles * groups), pid // tiles % groups
    i_o, i_n = grouped(pid % tiles, n_o, n_n, 8)
    o_o = i_o * BLOCK_O + tl.arange(0, BLOCK_O)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    p_x += i_group.to(tl.int64) * stride_xg
    p_g += i_group.to(tl.int64) * stride_gg
    p_row = p_g + o_o.to(tl.int64)[:, None] * stride_go
    steps = tl.cdiv(P, BLOCK_P)
    first = i_split * share
    total = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    for step in range(first * steps, tl.minimum(first + share, B) * steps):
        i_b, i_p = (step // steps).to(tl.int64), step % steps
        o_p = i_p * BLOCK_P + tl.arange(0, BLOCK_P)
        m_g = (o_o < D_O)[:, None] & (o_p < P)[None, :]
        g = tl.load(p_row + i_b * stride_gb + o_p.to(tl.int64)[None, :] * stride_gp, mask=m_g, other=0.0)
        x = _patches(p_x + i_b * stride_xb, o_p, o_n, P, N, C, depth, height, width, out_h, out_w,
                     stride_c, stride_d, stride_h, stride_w, LAST, KERNEL, STRIDE, PADDING, DILATION)  # fmt: skip
        acc = dot(g, x, acc, PRECISION)
        if (i_p == steps - 1) | (i_p % flush == flush - 1):
            if MODE == "sum":
                c = tl.load(p_c + i_b).to(tl.float32)
                total += tl.where(c != 0, c * acc, 0.0)  # sum += c_b G_b; 0 * inf never formed into it
            else:
                total += acc
            acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    if MODE == "norm":
        value, squares = tile_sums(total)  # |tile of G|^2
        tl.store(p_out + pid, squares)
    else:
        row = (i_split.to(tl.int64) * groups + i_group) * D_O + o_o
        taps: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
        o_c, o_tap = _element(o_n, C, taps, LAST)
        place = row[:, None] * N + (o_c * taps + o_tap)[None, :]
        tl.store(p_out + place, total, mask=(o_o < D_O)[:, None] & (o_n < N)[None, :])


@triton.jit
def conv_gram_kernel(
    p_x, p_g, p_partial, P, N, C, D_O, depth, height, width, out_h, out_w,
    stride_xb, stride_xg, stride_c, stride_d, stride_h, stride_w, stride_gb, stride_gg, stride_go, stride_gp,
    groups, n,
    LAST: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, CHUNK: tl.constexpr, CHUNK_N: tl.constexpr,
    CHUNK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the triangle of P x P summands of one group of one sample."""
    tiles = n * (n + 1) // 2
    pid = tl.program_id(0)
    i_b, i_group = (pid // (tiles * groups)).to(tl.int64), (pid // tiles % groups).to(tl.int64)
    i_row, i_col = triangle(pid % tiles, n, 8)
    o_row = i_row * BLOCK + tl.arange(0, BLOCK)
    o_col = i_col * BLOCK + tl.arange(0, BLOCK)
    p_x += i_b * stride_xb + i_group * stride_xg
    m = tl.zeros([BLOCK, BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, N, BLOCK_N):
        o_n = k + tl.arange(0, BLOCK_N)
        row = _patches(p_x, o_row, o_n, P, N, C, depth, height, width, out_h, out_w,
                       stride_c, stride_d, stride_h, stride_w, LAST, KERNEL, STRIDE, PADDING, DILATION)  # fmt: skip
        col = _patches(p_x, o_col, o_n, P, N, C, depth, height, width, out_h, out_w,
                       stride_c, stride_d, stride_h, stride_w, LAST, KERNEL, STRIDE, PADDING, DILATION)  # fmt: skip
        acc = dot(row, tl.trans(col), acc, PRECISION)
        if CHUNK_N:
            if (k + BLOCK_N) % CHUNK == 0:
                m += acc
                acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    m += acc
    # M_pq = (patch_p . patch_q)(g_p . g_q)
    m *= rows_product(p_g + i_b * stride_gb + i_group * stride_gg, o_row, o_col, P, D_O, stride_gp, stride_go,
                              BLOCK, BLOCK_O, CHUNK, CHUNK_O, PRECISION)  # fmt: skip
    value, spread = tile_sums(m)
    weight = tl.where(i_row == i_col, 1.0, 2.0).to(tl.float64)
    p_partial += i_b * (2 * tiles * groups) + pid % (tiles * groups)
    tl.store(p_partial, weight * value)
    tl.store(p_partial + tiles * groups, weight * spread)
