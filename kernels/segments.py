"""Products of rows by segment (experts) whose lengths only the device knows: sums of g_t a_t^T over the rows t in
[starts[k], starts[k + 1]).

A program takes one tile of one segment's sum and reads from `starts` which rows it is of, so that nothing is cut,
filled up or gathered, and a segment without rows costs a look. Sums are float32, in the order of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .clipped import upper
from .common import Tile, chunk_of, dot, grouped, is_half, kernel, precision, tile_sums, truncation
from .finish import finish
from .tiles import matrix_tile


@kernel
def segment_kernel(
    p_a, p_g, p_starts, p_c, p_out, D_I, D_O, stride_as, stride_ai, stride_gs, stride_go,
    stride_ok, stride_oo, stride_oi, n_o, n_i, MODE: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """MODE "norm": squares of a tile of the sum; "store": the tile; "sum": of rows times a factor each, in float32."""
    pid = tl.program_id(0)
    i_k, i_tile = (pid // (n_o * n_i)).to(tl.int64), pid % (n_o * n_i)
    i_o, i_i = grouped(i_tile, n_o, n_i, 8)
    o_o = i_o * BLOCK_O + tl.arange(0, BLOCK_O)
    o_i = i_i * BLOCK_I + tl.arange(0, BLOCK_I)
    m_o, m_i = (o_o < D_O)[:, None], (o_i < D_I)[None, :]
    p_g += o_o.to(tl.int64)[:, None] * stride_go
    p_a += o_i.to(tl.int64)[None, :] * stride_ai
    first, end = tl.load(p_starts + i_k), tl.load(p_starts + i_k + 1)
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for step in range(0, tl.cdiv(end - first, BLOCK_T)):
        o_t = first + step * BLOCK_T + tl.arange(0, BLOCK_T)
        m_t = o_t < end
        if MODE == "sum":
            c = tl.load(p_c + o_t, mask=m_t, other=0.0).to(tl.float32)
            m_t = m_t & (c != 0)  # rows of dropped samples are not read at all
        g = tl.load(p_g + o_t[None, :] * stride_gs, mask=m_o & m_t[None, :], other=0.0)
        a = tl.load(p_a + o_t[:, None] * stride_as, mask=m_i & m_t[:, None], other=0.0)
        if MODE == "sum":
            scaled, a = g.to(tl.float32) * c[None, :], a.to(tl.float32)
            if HALF:  # a is exact in tf32, c g in two of them
                top = upper(scaled)
                acc = tl.dot(top, a, acc, input_precision="tf32")
                acc = tl.dot(scaled - top, a, acc, input_precision="tf32")
            else:
                acc = tl.dot(scaled, a, acc, input_precision="ieee")
        else:
            acc = dot(g, a, acc, PRECISION)
        if (step + 1) * BLOCK_T % CHUNK == 0:
            total += acc
            acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    total += acc
    if MODE == "norm":
        value, squares = tile_sums(total)
        tl.store(p_out + pid, squares)
    else:
        p_out += i_k * stride_ok + o_o.to(tl.int64)[:, None] * stride_oo + o_i.to(tl.int64)[None, :] * stride_oi
        tl.store(p_out, total, mask=m_o & m_i)


# ---------------------------------------------------------------------- launchers


def _launch(a: Tensor, g: Tensor, starts: Tensor, out: Tensor, mode: str, tile: Tile, c: Tensor | None) -> None:
    segments, (i, o) = starts.numel() - 1, (a.size(1), g.size(1))
    n_o, n_i = triton.cdiv(o, tile.m), triton.cdiv(i, tile.n)
    strides: Any = (0, 0, 0) if mode == "norm" else out.stride()
    with torch.cuda.device_of(a):
        segment_kernel[(segments * n_o * n_i,)](
            a, g, starts, starts if c is None else c, out, i, o, *a.stride(), *g.stride(), *strides, n_o, n_i,
            MODE=mode, BLOCK_O=tile.m, BLOCK_I=tile.n, BLOCK_T=tile.k, CHUNK=chunk_of(a), HALF=is_half(a),
            PRECISION=precision(a), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def segment_tile(a: Tensor, g: Tensor, segments: int, scaled: bool) -> Tile:
    """The tile of a sum: as many rows a step as a segment has on the average. Scaled rows are products of float32."""
    tile = matrix_tile(g.size(1), a.size(1), max(16, a.size(0) // max(segments, 1)), a.unsqueeze(0), g.unsqueeze(0))
    if scaled and is_half(a):
        return Tile(min(tile.m, 64), min(tile.n, 64), min(tile.k, 32), 4, 3)
    return tile._replace(stages=min(tile.stages, 3))


def norm_sq(a: Tensor, g: Tensor, starts: Tensor, *, tile: Tile | None = None) -> Tensor:
    """The squared norm of each segment's sum of g_t a_t^T, a [S,I] and g [S,O] of one type, starts int64 [K + 1]: [K]
    float64, never too small by more than float32 rounding."""
    segments = starts.numel() - 1
    tile = tile or segment_tile(a, g, segments, False)
    count = triton.cdiv(g.size(1), tile.m) * triton.cdiv(a.size(1), tile.n)
    partial = torch.empty((segments, count), dtype=torch.float64, device=a.device)
    _launch(a, g, starts, partial, "norm", tile, None)
    return finish(partial, count, 2 * truncation(a.size(0), a), torch.float64)[0]


def overwrite_sums(a: Tensor, g: Tensor, starts: Tensor, into: Tensor, factors: Tensor | None = None, *,
                   tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The sums of g_t a_t^T, times the factor of each row [S], into float32 memory [K,O,I] whose contents are lost.

    Rows of factor 0 are not read as numbers.
    """
    tile = tile or segment_tile(a, g, starts.numel() - 1, factors is not None)
    c = None if factors is None else factors.contiguous()
    _launch(a, g, starts, into, "store" if c is None else "sum", tile, c)
    return into
