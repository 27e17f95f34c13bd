"""Norms and weight gradients of a matrix product, per sample: G_b = g_b^T a_b.

Shapes: a [B,T,I], g [B,T,O], or [B,I] and [B,O]; any strides. Sums are float32, partial sums float64 in a fixed
order: equal inputs give equal bits, and no number of one sample touches another's.
Source: Goodfellow 2015 (T = 1) and Li et al. 2022, section 4: |G_b|^2 = sum_{t,s} (a_t . a_s)(g_t . g_s).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    CHUNK,
    Tile,
    aligned,
    device_limits,
    dot,
    extent,
    finish,
    float32_is_exact,
    grouped,
    has_kernel,
    is_half,
    norm_type,
    precision,
    same_type,
    stages,
    tile_sums,
    triangle,
    truncation,
    wide,
)  # fmt: skip

STORED_T = 256  # up to so many positions the T x T products are stored; a guess until measured
BMM_WIDENS = hasattr(torch.ops.aten.bmm, "dtype")  # 16-bit products with a float32 result, from PyTorch 2.8


@triton.jit
def _rows_product(p_x, o_row, o_col, T, K, stride_t, stride_k, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
                  CHUNK: tl.constexpr, CHUNKED: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """x_t . x_s for a tile of rows t and s of one sample, [BLOCK, BLOCK]."""
    o_k = tl.arange(0, BLOCK_K)
    p_row = p_x + o_row.to(tl.int64)[:, None] * stride_t
    p_col = p_x + o_col.to(tl.int64)[None, :] * stride_t
    m_row, m_col = (o_row < T)[:, None], (o_col < T)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, CHUNK if CHUNKED else 1 << 30):  # a loop each: one loop with a branch spills registers
        acc = tl.zeros([BLOCK, BLOCK], tl.float32)
        for k in range(start, tl.minimum(start + CHUNK, K) if CHUNKED else K, BLOCK_K):
            o = k + o_k
            row = tl.load(p_row + o[None, :] * stride_k, mask=m_row & (o < K)[None, :], other=0.0)
            col = tl.load(p_col + o[:, None] * stride_k, mask=m_col & (o < K)[:, None], other=0.0)
            acc = dot(row, col, acc, PRECISION)
        if CHUNKED:
            total += acc
        else:
            total = acc
    return total


@triton.jit
def gram_kernel(
    p_a, p_g, p_value, p_spread, T, D_I, D_O, stride_ab, stride_at, stride_ai, stride_gb, stride_gt, stride_go, n,
    BLOCK: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr, CHUNK: tl.constexpr,
    CHUNK_I: tl.constexpr, CHUNK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's triangle of T x T summands; n rows of tiles."""
    tiles = n * (n + 1) // 2
    pid = tl.program_id(0)
    i_b = (pid // tiles).to(tl.int64)
    i_row, i_col = triangle(pid % tiles, n, 8)
    o_row = i_row * BLOCK + tl.arange(0, BLOCK)
    o_col = i_col * BLOCK + tl.arange(0, BLOCK)
    # M_ts = (a_t . a_s)(g_t . g_s)
    m = _rows_product(p_a + i_b * stride_ab, o_row, o_col, T, D_I, stride_at, stride_ai, BLOCK, BLOCK_I, CHUNK, CHUNK_I,
                      PRECISION)  # fmt: skip
    m *= _rows_product(p_g + i_b * stride_gb, o_row, o_col, T, D_O, stride_gt, stride_go, BLOCK, BLOCK_O, CHUNK,
                       CHUNK_O, PRECISION)  # fmt: skip
    value, spread = tile_sums(m)
    weight = tl.where(i_row == i_col, 1.0, 2.0).to(tl.float64)  # M_ts = M_st: each pair of tiles is formed once
    tl.store(p_value + pid, weight * value)
    tl.store(p_spread + pid, weight * spread)


@triton.jit
def direct_kernel(
    p_a, p_g, p_out, T, D_I, D_O, stride_ab, stride_at, stride_ai, stride_gb, stride_gt, stride_go, n_o, n_i,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr,
    PRECISION: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's G = g^T a: its sum of squares, or with STORE the tile itself."""
    pid = tl.program_id(0)
    i_b = (pid // (n_o * n_i)).to(tl.int64)
    i_o, i_i = grouped(pid % (n_o * n_i), n_o, n_i, 8)
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
        tl.store(p_out + pid, squares)


@triton.jit
def product_kernel(p_x, p_y, p_value, p_spread, N, n, BLOCK: tl.constexpr):
    """Sums of M = x y and of M^2 over one block of a sample's N stored products; n blocks a sample."""
    pid = tl.program_id(0)
    offset = (pid // n).to(tl.int64) * N
    o_n = (pid % n) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + offset + o_n, mask=o_n < N, other=0.0)
    y = tl.load(p_y + offset + o_n, mask=o_n < N, other=0.0)
    value, spread = tile_sums((x * y)[:, None])
    tl.store(p_value + pid, value)
    tl.store(p_spread + pid, spread)


@triton.jit
def vector_kernel(p_a, p_g, p_out, D_I, D_O, stride_ab, stride_ai, stride_gb, stride_go, BLOCK: tl.constexpr):
    """|a_b|^2 |g_b|^2 of one sample, in float64."""
    i_b = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BLOCK)
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
    tl.store(p_out + i_b, value.to(p_out.dtype.element_ty))


# ---------------------------------------------------------------------- choices


def matrix_tile(m: int, n: int, k: int, *tensors: Tensor) -> Tile:
    """The tile of a product [m, k] x [k, n] of numbers of these tensors, by their type, strides and device.

    On matrix units 128 x 128 x 64 with two warp groups; less where loads are narrow, and for float32 (by fused
    multiply-add, tf32 would be too coarse), which would spill registers.
    """
    whole = aligned(*tensors)
    if not is_half(tensors[0]):
        return Tile(extent(m, 64 if whole else 32), extent(n, 64), 16, 4, 2)
    most = 128 if whole else 64
    tile = Tile(extent(m, most), extent(n, most), extent(k, 64), 0, 0)
    warps = 8 if tile.m * tile.n > 64 * 128 else 4
    return tile._replace(
        warps=warps, stages=stages(2 * (tile.m + tile.n) * tile.k, device_limits(tensors[0].device).shared)
    )


def direct_tile(a: Tensor, g: Tensor) -> Tile:
    """The tile of G = g^T a. Three steps in flight leave room for a second program, whose work fills in at the ends."""
    tile = matrix_tile(g.size(2), a.size(2), a.size(1), a, g)
    return tile._replace(stages=min(tile.stages, 3))


def gram_tile(a: Tensor, g: Tensor) -> Tile:
    """The tile of the triangle, square. Two sums and a third being formed fill the registers, so that narrow loads
    (one address a number) and, before Hopper, sums in chunks get smaller tiles.
    """
    t, k = a.size(1), max(a.size(2), g.size(2))
    tile = matrix_tile(t, t, k, a, g)
    if not is_half(a):
        return tile._replace(n=tile.m)
    if not aligned(a, g):
        return tile._replace(k=min(tile.k, 32), warps=8 if tile.m == 64 else 4, stages=3)
    if k > CHUNK and device_limits(a.device).arch < 90:
        return tile._replace(m=min(tile.m, 64), n=min(tile.n, 64), warps=4)
    return tile


def gram_is_cheaper(t: int, i: int, o: int) -> bool:
    """By arithmetic in whole tiles: the triangle of T x T, over I + O, against T I O."""
    block = extent(t, 128)
    n = triton.cdiv(t, block)
    direct = t * (extent(i, 128) * triton.cdiv(i, extent(i, 128))) * (extent(o, 128) * triton.cdiv(o, extent(o, 128)))
    return n * (n + 1) // 2 * block * block * (i + o) < direct


def _stores_gram(a: Tensor) -> bool:
    """Whether T x T products are small enough that forming and storing them by cuBLAS is taken for the faster way."""
    return a.is_cuda and is_half(a) and BMM_WIDENS and a.size(1) <= STORED_T


# ---------------------------------------------------------------------- launchers


def as_rows(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a and g as [B,T,I] and [B,T,O] of one type; raises ValueError on other shapes."""
    if a.dim() == 2 and g.dim() == 2:
        a, g = a.unsqueeze(1), g.unsqueeze(1)
    if a.dim() != 3 or g.dim() != 3 or a.shape[:2] != g.shape[:2]:
        raise ValueError(f"expected a [B,T,I] and g [B,T,O], or [B,I] and [B,O]; got {a.shape} and {g.shape}")
    return same_type(a, g)


def linear_norm_sq(a: Tensor, g: Tensor, method: str = "auto", *, dtype: torch.dtype | None = None,
                   tile: Tile | None = None) -> Tensor:  # fmt: skip
    """Squared Frobenius norm of each sample's weight gradient g_b^T a_b.

    Args: a [B,T,I] or [B,I], g [B,T,O] or [B,O], float32, bfloat16 or float16 (others by plain PyTorch), any
    strides (16-bit rows that are no multiple of 16 are copied); method "auto", "gram" or "direct"; dtype float32
    or float64; tile in place of the rule's.
    Returns: [B], never too small by more than float32 rounding: by gram, a norm whose summands cancel is enlarged
    by their rounding. Raises ValueError on shapes, method, dtype. Source: Li et al. 2022, section 4.
    """
    kind = norm_type(a, dtype)
    a, g = as_rows(a, g)
    (batch, t, i), o = a.shape, g.size(2)
    if method not in ("auto", "gram", "direct"):
        raise ValueError(f"method must be 'auto', 'gram' or 'direct', not {method!r}")
    if 0 in (batch, t, i, o):
        return a.new_zeros(batch, dtype=kind)
    if not has_kernel(a):
        return torch.stack([torch.linalg.vector_norm(g[b].mT @ a[b]) for b in range(batch)]).square().to(kind)
    with torch.cuda.device_of(a):
        if t == 1:
            return _vector(a, g, kind)
        gram = method == "gram" or (method == "auto" and gram_is_cheaper(t, i, o))
        if tile is not None:
            return (_gram if gram else _direct)(a, g, kind, tile)
        route = _direct if not gram else _gram_stored if _stores_gram(a) else _gram
        parts = [route(part_a, part_g, kind) for part_a, part_g, _ in wide(a, g)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (out.double() + _vanished(a, g)).to(kind) if gram else out


def _vanished(a: Tensor, g: Tensor) -> Tensor:
    """What underflow may have taken from a gram norm, at most: an entry of a a^T may lose I 1.2e-38, and so on."""
    a_sq, g_sq = (torch.linalg.vector_norm(t, dim=(1, 2), dtype=torch.float64).square() for t in (a, g))
    return 1.2e-38 * a.size(1) * (a.size(2) * g_sq + g.size(2) * a_sq)


def _vector(a: Tensor, g: Tensor, kind: torch.dtype) -> Tensor:
    out = a.new_empty(a.size(0), dtype=kind)
    vector_kernel[(a.size(0),)](
        a, g, out, a.size(2), g.size(2), a.stride(0), a.stride(2), g.stride(0), g.stride(2), BLOCK=1024, num_warps=4
    )
    return out


def _gram(a: Tensor, g: Tensor, kind: torch.dtype, tile: Tile | None = None) -> Tensor:
    (batch, t, i), o = a.shape, g.size(2)
    half = is_half(a)
    tile = tile or gram_tile(a, g)
    n = triton.cdiv(t, tile.m)
    partial = a.new_empty((2, batch, n * (n + 1) // 2), dtype=torch.float64)
    gram_kernel[(partial[0].numel(),)](
        a, g, partial[0], partial[1], t, i, o, *a.stride(), *g.stride(), n,
        BLOCK=tile.m, BLOCK_I=min(tile.k, extent(i, 64)), BLOCK_O=min(tile.k, extent(o, 64)), CHUNK=CHUNK,
        CHUNK_I=half and i > CHUNK, CHUNK_O=half and o > CHUNK, PRECISION=precision(a),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return finish(partial[0], partial[1], truncation(i) + truncation(o) if half else 0.0, kind)


def _gram_stored(a: Tensor, g: Tensor, kind: torch.dtype) -> Tensor:
    """The same from stored T x T products of cuBLAS."""
    i, o = a.size(2), g.size(2)
    x, y = (torch.bmm(r, r.mT, out_dtype=torch.float32) for r in (a, g))  # type: ignore[call-overload]
    return _reduce_products(x, y, truncation(i, i) + truncation(o, o), kind)  # cuBLAS sums in one go


def _reduce_products(x: Tensor, y: Tensor, enlarge: float, kind: torch.dtype) -> Tensor:
    """sum x y for each sample, with the guard of the gram route; x, y [B,T,T] float32, contiguous."""
    count, block = x.size(1) * x.size(2), 4096
    n = triton.cdiv(count, block)
    partial = x.new_empty((2, x.size(0), n), dtype=torch.float64)
    product_kernel[(x.size(0) * n,)](x, y, partial[0], partial[1], count, n, BLOCK=block, num_warps=4)
    return finish(partial[0], partial[1], enlarge, kind)


def _direct(a: Tensor, g: Tensor, kind: torch.dtype, tile: Tile | None = None) -> Tensor:
    tile = tile or direct_tile(a, g)
    n_o, n_i = triton.cdiv(g.size(2), tile.m), triton.cdiv(a.size(2), tile.n)
    partial = a.new_empty((a.size(0), n_o * n_i), dtype=torch.float64)
    _launch_direct(a, g, partial, tile, n_o, n_i, store=False)
    return finish(partial, None, 2 * truncation(a.size(1)) if is_half(a) else 0.0, kind)


def _launch_direct(a: Tensor, g: Tensor, out: Tensor, tile: Tile, n_o: int, n_i: int, store: bool) -> None:
    half = is_half(a)
    direct_kernel[(a.size(0) * n_o * n_i,)](
        a, g, out, a.size(1), a.size(2), g.size(2), *a.stride(), *g.stride(), n_o, n_i,
        BLOCK_O=tile.m, BLOCK_I=tile.n, BLOCK_T=tile.k, CHUNK=CHUNK, CHUNKED=half and a.size(1) > CHUNK,
        PRECISION=precision(a), STORE=store, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def linear_per_sample(a: Tensor, g: Tensor, *, tile: Tile | None = None) -> Tensor:
    """The weight gradient of each sample, g_b^T a_b: [B,T,I], [B,T,O] -> [B,O,I] float32 (float64 for float64).

    By cuBLAS where that sums and returns float32, else by a kernel. Raises ValueError on shapes.
    """
    a, g = as_rows(a, g)
    (batch, t, i), o = a.shape, g.size(2)
    kind = torch.float32 if is_half(a) else a.dtype
    if 0 in (batch, t, i, o):
        return a.new_zeros((batch, o, i), dtype=kind)
    if tile is None:
        if not has_kernel(a) or (a.dtype == torch.float32 and float32_is_exact()):
            return torch.bmm(g.mT, a)
        if is_half(a) and a.is_cuda and BMM_WIDENS:
            return torch.bmm(g.mT, a, out_dtype=torch.float32)  # type: ignore[call-overload, no-any-return]
        tile = direct_tile(a, g)
    out = a.new_empty((batch, o, i), dtype=torch.float32)
    with torch.cuda.device_of(a):
        _launch_direct(a, g, out, tile, triton.cdiv(o, tile.m), triton.cdiv(i, tile.n), store=True)
    return out
