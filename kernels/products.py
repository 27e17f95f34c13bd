"""The kernels of `linear`: tiles of Gram matrices and of gradients of matrix products, by sample.

Each takes one product, or several layers of equal shape and strides: then p_a and p_g are tables of addresses of
numbers of TYPE, and samples of all layers are counted through.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import dot, grouped, kernel, start_of, tile_sums, triangle
from .finish import TINY


@triton.jit
def rows_product(p_x, o_row, o_col, T, K, stride_t, stride_k, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
                  CHUNK: tl.constexpr, CHUNKED: tl.constexpr, PRECISION: tl.constexpr,
                  SAME: tl.constexpr = False):  # fmt: skip
    """x_t . x_s for a tile of rows t and s of one sample, [BLOCK, BLOCK]. SAME: of equal rows, which are read once."""
    o_k = tl.arange(0, BLOCK_K)
    p_row = p_x + o_row.to(tl.int64)[:, None] * stride_t
    p_col = p_x + o_col.to(tl.int64)[None, :] * stride_t
    m_row, m_col = (o_row < T)[:, None], (o_col < T)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, CHUNK if CHUNKED else 1 << 30):  # a loop each: one loop with a branch spills registers
        acc = tl.zeros([BLOCK, BLOCK], tl.float32)
        for k in range(start, tl.minimum(start + CHUNK, K) if CHUNKED else K, BLOCK_K):
            o = k + o_k
            m_k, o = o < K, o.to(tl.int64)  # columns may be far apart, as those of a convolution of 1 x 1 are
            row = tl.load(p_row + o[None, :] * stride_k, mask=m_row & m_k[None, :], other=0.0)
            if SAME:
                col = tl.trans(row)
            else:
                col = tl.load(p_col + o[:, None] * stride_k, mask=m_col & m_k[:, None], other=0.0)
            acc = dot(row, col, acc, PRECISION)
        if CHUNKED:
            total += acc
        else:
            total = acc
    return total


@triton.jit
def put_sizes(p_sizes, rows, gram_a, gram_g, o_row, o_col, T, D_I, D_O):
    """From a tile on the diagonal: sums of |a_t| |g_t|, |a_t|^2 and |g_t|^2; the first with what products may lose."""
    own = (o_row[:, None] == o_col[None, :]) & (o_row < T)[:, None]
    sizes = tl.sqrt(gram_a + TINY * D_I) * tl.sqrt(gram_g + TINY * D_O)
    tl.store(p_sizes, tl.sum(tl.where(own, sizes, 0.0)).to(tl.float64))
    tl.store(p_sizes + rows, tl.sum(tl.where(own, gram_a, 0.0)).to(tl.float64))
    tl.store(p_sizes + 2 * rows, tl.sum(tl.where(own, gram_g, 0.0)).to(tl.float64))


@triton.jit
def _gram_tile(p_a, p_g, p_partial, i_row, i_col, i_tile, T, D_I, D_O, stride_at, stride_ai, stride_gt, stride_go, n,
               BLOCK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, CHUNK: tl.constexpr,
               CHUNK_I: tl.constexpr, CHUNK_O: tl.constexpr, PRECISION: tl.constexpr,
               SAME: tl.constexpr):  # fmt: skip
    """One tile of one sample's triangle. SAME: one on the diagonal, whose columns are its rows; else it may be any."""
    tiles = n * (n + 1) // 2
    o_row = i_row * BLOCK + tl.arange(0, BLOCK)
    o_col = i_col * BLOCK + tl.arange(0, BLOCK)
    m = rows_product(p_a, o_row, o_col, T, D_I, stride_at, stride_ai, BLOCK, BLOCK_I, CHUNK, CHUNK_I, PRECISION, SAME)
    gram_g = rows_product(p_g, o_row, o_col, T, D_O, stride_gt, stride_go, BLOCK, BLOCK_O, CHUNK, CHUNK_O, PRECISION,
                          SAME)  # fmt: skip
    if i_row == i_col:
        put_sizes(p_partial + 2 * tiles + i_row, n, m, gram_g, o_row, o_col, T, D_I, D_O)
    # M_ts = (a_t . a_s)(g_t . g_s)
    value, spread = tile_sums(m * gram_g)
    weight = tl.where(i_row == i_col, 1.0, 2.0).to(tl.float64)  # M_ts = M_st: each pair of tiles is formed once
    tl.store(p_partial + i_tile, weight * value)
    tl.store(p_partial + tiles + i_tile, weight * spread)


@kernel
def gram_kernel(
    p_a, p_g, p_partial, B, T, D_I, D_O, stride_ab, stride_at, stride_ai, stride_gb, stride_gt, stride_go, n,
    BLOCK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, CHUNK: tl.constexpr,
    CHUNK_I: tl.constexpr, CHUNK_O: tl.constexpr, PRECISION: tl.constexpr, TYPE: tl.constexpr, DIAGONAL: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's triangle of T x T summands, of one of the layers; n rows of tiles.

    DIAGONAL: "only" such tiles there are (n = 1), or they go "apart": they read their rows once, in place of rows and
    columns. Else they are as others.
    """
    tiles = n * (n + 1) // 2
    pid = tl.program_id(0)
    i_all, i_tile = pid // tiles, pid % tiles
    i_b = (i_all % B).to(tl.int64)
    p_a, p_g = start_of(p_a, i_all // B, TYPE) + i_b * stride_ab, start_of(p_g, i_all // B, TYPE) + i_b * stride_gb
    p_partial += i_all.to(tl.int64) * (2 * tiles + 3 * n)
    i_row, i_col = triangle(i_tile, n, 8)
    if DIAGONAL == "only":
        _gram_tile(p_a, p_g, p_partial, i_row, i_row, i_tile, T, D_I, D_O, stride_at, stride_ai, stride_gt, stride_go,
                   n, BLOCK, BLOCK_I, BLOCK_O, CHUNK, CHUNK_I, CHUNK_O, PRECISION, True)  # fmt: skip
    elif DIAGONAL == "apart" and i_row == i_col:  # a branch of its own: one within the loops spills registers
        _gram_tile(p_a, p_g, p_partial, i_row, i_row, i_tile, T, D_I, D_O, stride_at, stride_ai, stride_gt, stride_go,
                   n, BLOCK, BLOCK_I, BLOCK_O, CHUNK, CHUNK_I, CHUNK_O, PRECISION, True)  # fmt: skip
    else:
        _gram_tile(p_a, p_g, p_partial, i_row, i_col, i_tile, T, D_I, D_O, stride_at, stride_ai, stride_gt, stride_go,
                   n, BLOCK, BLOCK_I, BLOCK_O, CHUNK, CHUNK_I, CHUNK_O, PRECISION, False)  # fmt: skip


@kernel
def direct_kernel(
    p_a, p_g, p_out, B, T, D_I, D_O, stride_ab, stride_at, stride_ai, stride_gb, stride_gt, stride_go, n_o, n_i,
    stride_p, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr,
    CHUNKED: tl.constexpr, PRECISION: tl.constexpr, STORE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's G = g^T a, of one of the layers: its sum of squares, or with STORE the tile itself."""
    pid = tl.program_id(0)
    i_all, i_tile = pid // (n_o * n_i), pid % (n_o * n_i)
    i_b = (i_all % B).to(tl.int64)
    p_a, p_g = start_of(p_a, i_all // B, TYPE), start_of(p_g, i_all // B, TYPE)
    i_o, i_i = grouped(i_tile, n_o, n_i, 8)
    o_o = i_o * BLOCK_O + tl.arange(0, BLOCK_O)
    o_i = i_i * BLOCK_I + tl.arange(0, BLOCK_I)
    m_o, m_i = (o_o < D_O)[:, None], (o_i < D_I)[None, :]
    p_g += i_b * stride_gb + o_o.to(tl.int64)[:, None] * stride_go
    p_a += i_b * stride_ab + o_i.to(tl.int64)[None, :] * stride_ai
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for t in range(0, T, BLOCK_T):
        o_t = t + tl.arange(0, BLOCK_T)
        m_t = o_t < T
        o_t = o_t.to(tl.int64)
        g = tl.load(p_g + o_t[None, :] * stride_gt, mask=m_o & m_t[None, :], other=0.0)
        a = tl.load(p_a + o_t[:, None] * stride_at, mask=m_i & m_t[:, None], other=0.0)
        acc = dot(g, a, acc, PRECISION)
        if CHUNKED:
            if (t + BLOCK_T) % CHUNK == 0:
                total += acc
                acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    total += acc
    if STORE:
        offset = i_b * D_O * D_I + o_o.to(tl.int64)[:, None] * D_I + o_i[None, :]
        tl.store(p_out + offset, total, mask=m_o & m_i)
    else:
        value, squares = tile_sums(total)  # |tile of G|^2
        tl.store(p_out + i_all.to(tl.int64) * stride_p + i_tile, squares)


@kernel
def sizes_kernel(
    p_a, p_g, p_out, B, T, D_I, D_O, stride_ab, stride_at, stride_ai, stride_gb, stride_gt, stride_go, n, stride_p,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """|a_t| |g_t| of BLOCK_T rows of one sample, of one of the layers, in float64; n blocks of rows."""
    pid = tl.program_id(0)
    i_all = pid // n
    i_b = (i_all % B).to(tl.int64)
    o_t = (pid % n) * BLOCK_T + tl.arange(0, BLOCK_T)
    row = o_t.to(tl.int64)[:, None]
    p_row_a = start_of(p_a, i_all // B, TYPE) + i_b * stride_ab + row * stride_at
    p_row_g = start_of(p_g, i_all // B, TYPE) + i_b * stride_gb + row * stride_gt
    sizes = tl.sqrt(_row_squares(p_row_a, o_t < T, D_I, stride_ai, BLOCK_T, BLOCK))
    sizes *= tl.sqrt(_row_squares(p_row_g, o_t < T, D_O, stride_go, BLOCK_T, BLOCK))
    tl.store(p_out + i_all.to(tl.int64) * stride_p + o_t, sizes, mask=o_t < T)


@triton.jit
def _row_squares(p_row, m_t, K, stride_k, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr):
    """|x_t|^2 of rows that begin at p_row, [BLOCK_T] float64."""
    total = tl.zeros([BLOCK_T, BLOCK], tl.float64)
    for k in range(0, K, BLOCK):
        o = k + tl.arange(0, BLOCK)
        mask = m_t[:, None] & (o < K)[None, :]
        x = tl.load(p_row + o.to(tl.int64)[None, :] * stride_k, mask=mask, other=0.0).to(tl.float64)
        total += x * x
    return tl.sum(total, 1)


@kernel
def vector_kernel(p_a, p_g, p_out, B, D_I, D_O, stride_ab, stride_ai, stride_gb, stride_go, BLOCK: tl.constexpr,
                  TYPE: tl.constexpr):  # fmt: skip
    """|a_b|^2 |g_b|^2 of one sample, of one of the layers, in float64."""
    i_all = tl.program_id(0)
    i_b = (i_all % B).to(tl.int64)
    p_a, p_g = start_of(p_a, i_all // B, TYPE), start_of(p_g, i_all // B, TYPE)
    o_n = tl.arange(0, BLOCK).to(tl.int64)
    a_sq = tl.zeros([BLOCK], tl.float64)
    for start in range(0, D_I, BLOCK):
        o = start + o_n
        a = tl.load(p_a + i_b * stride_ab + o * stride_ai, mask=o < D_I, other=0.0).to(tl.float64)
        a_sq += a * a
    g_sq = tl.zeros([BLOCK], tl.float64)
    for start in range(0, D_O, BLOCK):
        o = start + o_n
        g = tl.load(p_g + i_b * stride_gb + o * stride_go, mask=o < D_O, other=0.0).to(tl.float64)
        g_sq += g * g
    value = tl.sum(a_sq, 0) * tl.sum(g_sq, 0)
    tl.store(p_out + i_all, value.to(p_out.dtype.element_ty))
