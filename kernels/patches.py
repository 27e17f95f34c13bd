"""The kernels of `conv`: patches are gathered as they are loaded.

Elements of a patch are ordered by channel and tap, or with LAST by tap and channel: where channels are neighbours in
memory, and come in whole vectors, 16 bytes are loaded at once. Where an element lies is the sum of a part by position
and a part by element, so that a load takes one addition, and each part is formed once for a row or column of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import dot, grouped, kernel, tile_sums, triangle
from .products import put_sizes, rows_product


@triton.jit
def _over(x, y, inverse, FAST: tl.constexpr):
    """x // y. FAST: by `inverse`, the next integer above 2^31 / y, for x y < 2^31: one multiplication, no division."""
    if FAST:
        return tl.umulhi((2 * x).to(tl.uint32), inverse.to(tl.uint32)).to(tl.int32)
    else:
        return x // y


@triton.jit
def positions(o_p, out_h, out_w, inverse, stride_d, stride_h, stride_w, FAST: tl.constexpr, DEEP: tl.constexpr,
               FAR: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr):  # fmt: skip
    """Where the patches of output positions begin: offset, depth, row and column, which padding may put before 0."""
    line = _over(o_p, out_w, inverse, FAST)
    column = (o_p - line * out_w) * STRIDE[2] - PADDING[2]
    if DEEP:
        depth = (line // out_h) * STRIDE[0] - PADDING[0]
        line = line % out_h
    else:
        depth = tl.zeros_like(line)
    line = line * STRIDE[1] - PADDING[1]
    if FAR:
        depth, line, column = depth.to(tl.int64), line.to(tl.int64), column.to(tl.int64)
    offset = line * stride_h + column * stride_w
    if DEEP:
        offset += depth * stride_d
    return offset, depth, line, column


@triton.jit
def _element(o_n, C, taps: tl.constexpr, LAST: tl.constexpr):
    """Channel and tap of an element of a patch: taps are the inner ones, or with LAST the channels, as in memory."""
    if LAST:
        return o_n % C, o_n // C
    else:
        return o_n // taps, o_n % taps


@triton.jit
def elements(o_n, C, stride_c, stride_d, stride_h, stride_w, FAR: tl.constexpr, LAST: tl.constexpr,
              KERNEL: tl.constexpr, DILATION: tl.constexpr):  # fmt: skip
    """Where elements of a patch lie from its beginning: offset, depth, rows and columns."""
    o_c, o_tap = _element(o_n, C, KERNEL[0] * KERNEL[1] * KERNEL[2], LAST)
    column = (o_tap % KERNEL[2]) * DILATION[2]
    line = (o_tap // KERNEL[2] % KERNEL[1]) * DILATION[1]
    depth = (o_tap // (KERNEL[2] * KERNEL[1])) * DILATION[0]
    if FAR:
        o_c, depth, line, column = o_c.to(tl.int64), depth.to(tl.int64), line.to(tl.int64), column.to(tl.int64)
    offset = o_c * stride_c + line * stride_h + column * stride_w
    if KERNEL[0] > 1:
        offset += depth * stride_d
    return offset, depth, line, column


@triton.jit
def within(place, size):
    """Whether 0 <= place < size, by one comparison: below 0 is far above as an unsigned number."""
    kind: tl.constexpr = tl.uint64 if place.dtype == tl.int64 else tl.uint32
    return place.to(kind) < tl.cast(size, kind)


@triton.jit
def _patches(p_x, at, of, m_p, m_n, depth, height, width, DEEP: tl.constexpr, KERNEL: tl.constexpr,
             PADDING: tl.constexpr):  # fmt: skip
    """Elements `of` the patches `at` output positions of one sample, 0 in the padding. Without padding and within m_p
    and m_n there is no element outside."""
    m = m_p[:, None] & m_n[None, :]
    if DEEP and PADDING[0] > 0:
        m &= within(at[1][:, None] + of[1][None, :], depth)
    if PADDING[1] > 0:
        m &= within(at[2][:, None] + of[2][None, :], height)
    if PADDING[2] > 0:
        m &= within(at[3][:, None] + of[3][None, :], width)
    return tl.load(p_x + (at[0][:, None] + of[0][None, :]), mask=m, other=0.0)


@kernel
def conv_kernel(
    p_x, p_g, p_c, p_out, B, P, N, C, D_O, depth, height, width, out_h, out_w, inverse,
    stride_xb, stride_xg, stride_c, stride_d, stride_h, stride_w, stride_gb, stride_gg, stride_go, stride_gp,
    groups, n_o, n_n, share, stride_p, LAST: tl.constexpr, FAST: tl.constexpr, DEEP: tl.constexpr, FAR: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
    MODE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of G of one group, of `share` samples: MODE "norm" sums its squares, "store" and "sum" store it.

    A sum goes to the total after CHUNK positions and at the end of a sample, then times the sample's factor.
    """
    pid = tl.program_id(0)
    tiles = n_o * n_n
    i_split, i_group = pid // (tiles * groups), pid // tiles % groups
    i_o, i_n = grouped(pid % tiles, n_o, n_n, 8)
    o_o = i_o * BLOCK_O + tl.arange(0, BLOCK_O)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    first = i_split * share
    p_x += i_group.to(tl.int64) * stride_xg
    p_g += i_group.to(tl.int64) * stride_gg
    p_row = p_g + o_o.to(tl.int64)[:, None] * stride_go
    m_o, m_n = (o_o < D_O)[:, None], o_n < N
    of = elements(o_n, C, stride_c, stride_d, stride_h, stride_w, FAR, LAST, KERNEL, DILATION)
    total = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    i_b, i_p = first.to(tl.int64), tl.zeros_like(first)  # counted: a division takes as long as all else of a step
    for _ in range((tl.minimum(first + share, B) - first) * tl.cdiv(P, BLOCK_P)):
        o_p = i_p + tl.arange(0, BLOCK_P)
        m_p = o_p < P
        o_g = o_p * stride_gp if not FAR else o_p.to(tl.int64) * stride_gp
        g = tl.load(p_row + i_b * stride_gb + o_g[None, :], mask=m_o & m_p[None, :], other=0.0)
        at = positions(o_p, out_h, out_w, inverse, stride_d, stride_h, stride_w, FAST, DEEP, FAR, STRIDE, PADDING)
        x = _patches(p_x + i_b * stride_xb, at, of, m_p, m_n, depth, height, width, DEEP, KERNEL, PADDING)
        acc = dot(g, x, acc, PRECISION)
        i_p += BLOCK_P
        end = i_p >= P
        if end | (i_p % CHUNK == 0):
            if MODE == "sum":
                c = tl.load(p_c + i_b).to(tl.float32)
                total = tl.where(c != 0, total + c * acc, total)  # 0 * inf is never added
            else:
                total += acc
            acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
        i_b += tl.where(end, 1, 0)
        i_p = tl.where(end, 0, i_p)
    if MODE == "norm":
        value, squares = tile_sums(total)  # |tile of G|^2
        tl.store(p_out + i_split.to(tl.int64) * stride_p + pid % (tiles * groups), squares)
    else:
        row = (i_split.to(tl.int64) * groups + i_group) * D_O + o_o
        taps: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
        o_c, o_tap = _element(o_n, C, taps, LAST)
        place = row[:, None] * N + (o_c * taps + o_tap)[None, :]
        tl.store(p_out + place, total, mask=m_o & m_n[None, :])


@kernel
def conv_gram_kernel(
    p_x, p_g, p_partial, P, N, C, D_O, depth, height, width, out_h, out_w, inverse,
    stride_xb, stride_xg, stride_c, stride_d, stride_h, stride_w, stride_gb, stride_gg, stride_go, stride_gp,
    groups, n, LAST: tl.constexpr, FAST: tl.constexpr, DEEP: tl.constexpr, FAR: tl.constexpr,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr,
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
    row_at = positions(o_row, out_h, out_w, inverse, stride_d, stride_h, stride_w, FAST, DEEP, FAR, STRIDE, PADDING)
    col_at = positions(o_col, out_h, out_w, inverse, stride_d, stride_h, stride_w, FAST, DEEP, FAR, STRIDE, PADDING)
    m_row, m_col = o_row < P, o_col < P
    m = tl.zeros([BLOCK, BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, N, BLOCK_N):
        o_n = k + tl.arange(0, BLOCK_N)
        of = elements(o_n, C, stride_c, stride_d, stride_h, stride_w, FAR, LAST, KERNEL, DILATION)
        row = _patches(p_x, row_at, of, m_row, o_n < N, depth, height, width, DEEP, KERNEL, PADDING)
        col = _patches(p_x, col_at, of, m_col, o_n < N, depth, height, width, DEEP, KERNEL, PADDING)
        acc = dot(row, tl.trans(col), acc, PRECISION)
        if CHUNK_N:
            if (k + BLOCK_N) % CHUNK == 0:
                m += acc
                acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    m += acc
    gram_g = rows_product(p_g + i_b * stride_gb + i_group * stride_gg, o_row, o_col, P, D_O, stride_gp, stride_go,
                          BLOCK, BLOCK_O, CHUNK, CHUNK_O, PRECISION)  # fmt: skip
    p_partial += i_b * ((2 * tiles + 3 * n) * groups)
    if i_row == i_col:
        put_sizes(p_partial + 2 * tiles * groups + i_group * n + i_row, n * groups, m, gram_g, o_row, o_col, P, N, D_O)
    # M_pq = (patch_p . patch_q)(g_p . g_q)
    value, spread = tile_sums(m * gram_g)
    weight = tl.where(i_row == i_col, 1.0, 2.0).to(tl.float64)
    p_partial += pid % (tiles * groups)
    tl.store(p_partial, weight * value)
    tl.store(p_partial + tiles * groups, weight * spread)
