"""The inner product of a look-up's and a head's gradient of one table, per sample: `embedding.tied_cross_term`.

<G_embedding, G_head> = sum_{k,t} g_t[ids_k] (e_k . h_t), ids [B,K], e [B,K,d], h [B,T,d], g [B,T,V]: of the logits'
gradients only those of words that were looked up are read, each where it lies. Products of 16 bits are formed on matrix
units, all that follows is float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rows
from .common import CHUNK, Tile, aligned, dot, extent, is_half, kernel, precision, same_type


@kernel
def cross_kernel(
    p_ids, p_e, p_h, p_logits, p_e_sq, p_h_sq, p_out, K, T, V, D, stride_eb, stride_ek, stride_ed, stride_hb, stride_ht,
    stride_hd, stride_gb, stride_gt, stride_gv, n_k, n_t, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, CHUNKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of one sample's summands [T, K]: their sum, and the sum of |g_t[ids_k]| |e_k| |h_t|. ids are
    contiguous, as are the squared sizes of e and h."""
    pid = tl.program_id(0)
    i_b, i_tile = (pid // (n_k * n_t)).to(tl.int64), pid % (n_k * n_t)
    o_t = (i_tile % n_t) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_k = (i_tile // n_t) * BLOCK_K + tl.arange(0, BLOCK_K)
    m_t, m_k = o_t < T, o_k < K
    p_h += i_b * stride_hb + o_t.to(tl.int64)[:, None] * stride_ht
    p_e += i_b * stride_eb + o_k.to(tl.int64)[None, :] * stride_ek
    dots = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for start in range(0, D, CHUNK if CHUNKED else 1 << 30):  # a loop each: one loop with a branch spills registers
        acc = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
        for d in range(start, tl.minimum(start + CHUNK, D) if CHUNKED else D, BLOCK_D):
            o = d + tl.arange(0, BLOCK_D)
            m_d, o = o < D, o.to(tl.int64)
            h = tl.load(p_h + o[None, :] * stride_hd, mask=m_t[:, None] & m_d[None, :], other=0.0)
            e = tl.load(p_e + o[:, None] * stride_ed, mask=m_k[None, :] & m_d[:, None], other=0.0)
            acc = dot(h, e, acc, PRECISION)
        if CHUNKED:
            dots += acc
        else:
            dots = acc
    word = tl.load(p_ids + i_b * K + o_k, mask=m_k, other=0).to(tl.int64)
    inside = (word >= 0) & (word < V)
    p_logits += i_b * stride_gb + o_t.to(tl.int64)[:, None] * stride_gt
    mask = m_t[:, None] & m_k[None, :]
    g = tl.load(p_logits + word[None, :] * stride_gv, mask=mask & inside[None, :], other=0.0).to(tl.float64)
    g = tl.where(mask & (inside == 0)[None, :], float("nan"), g)  # no such word: no number
    size_e = tl.sqrt(tl.load(p_e_sq + i_b * K + o_k, mask=m_k, other=0.0))
    size_h = tl.sqrt(tl.load(p_h_sq + i_b * T + o_t, mask=m_t, other=0.0))
    p_out += 2 * pid.to(tl.int64)
    tl.store(p_out, tl.sum(dots.to(tl.float64) * g))
    tl.store(p_out + 1, tl.sum(tl.abs(g) * size_h[:, None] * size_e[None, :]))


def cross_tile(e: Tensor, h: Tensor) -> Tile:
    """Rows of h (m), rows of e (n). Beside the sums there are as many logits in flight, one address each."""
    if not is_half(e):
        return Tile(extent(h.size(1), 32), extent(e.size(1), 32), 16, 4, 2)
    deep = extent(e.size(2), 64 if aligned(e, h) else 32)
    return Tile(extent(h.size(1), 64), extent(e.size(1), 64), deep, 4, 3)


def cross_term_and_spread(ids: Tensor, e: Tensor, h: Tensor, g: Tensor, *,
                          tile: Tile | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The inner products, and what their rounding is to be told from: sum_{k,t} |g_t[ids_k]| |e_k| |h_t|, [B] float64
    each. A sample with an id outside the vocabulary has no number (NaN).

    Args: ids [B,K] integers; e [B,K,d], h [B,T,d], g [B,T,V], of 16 bits or float32, any strides.
    Raises ValueError on shapes.
    """
    if ids.dim() != 2 or e.shape[:2] != ids.shape or h.dim() != 3 or g.shape[:2] != h.shape[:2]:
        raise ValueError(f"expected ids [B,K], e [B,K,d], h [B,T,d] and g [B,T,V]; got {tuple(ids.shape)}, "
                         f"{tuple(e.shape)}, {tuple(h.shape)} and {tuple(g.shape)}")  # fmt: skip
    if e.size(0) != h.size(0) or e.size(2) != h.size(2):
        raise ValueError(f"e and h differ in samples or columns: {tuple(e.shape)} and {tuple(h.shape)}")
    e, h = same_type(e, h)
    (batch, k, d), (t, v) = e.shape, g.shape[1:]
    if 0 in (batch, k, d, t):
        return e.new_zeros(batch, dtype=torch.float64), e.new_zeros(batch, dtype=torch.float64)
    tile = tile or cross_tile(e, h)
    n_k, n_t = triton.cdiv(k, tile.n), triton.cdiv(t, tile.m)
    sizes = [rows.square_sum(x.flatten(0, 1)) for x in (e, h)]
    out = torch.empty((batch, n_k * n_t, 2), dtype=torch.float64, device=e.device)
    with torch.cuda.device_of(e):
        cross_kernel[(batch * n_k * n_t,)](
            ids.contiguous(), e, h, g, *sizes, out, k, t, v, d, *e.stride(), *h.stride(), *g.stride(), n_k, n_t,
            BLOCK_T=tile.m, BLOCK_K=tile.n, BLOCK_D=tile.k, CHUNK=CHUNK, CHUNKED=is_half(e) and d > CHUNK,
            PRECISION=precision(e), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    cross, spread = out.sum(1).unbind(1)
    return cross, spread
