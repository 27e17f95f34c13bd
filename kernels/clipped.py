"""The clipped sum of a matrix product's weight gradients: sum_b c_b g_b^T a_b.

A factor rounded into 16-bit numbers could lift a sample above its clipping norm by 0.4 %. So it is applied to the
float32 sum of its sample where samples have rows enough, else to rows split in two tf32 numbers (22 bits).
Source: book-keeping, Bu et al. 2023, arXiv 2210.00038.
"""

from __future__ import annotations

import math

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
    float32_is_exact,
    grouped,
    has_kernel,
    is_half,
    kernel,
    precision,
    start_of,
    wide,
)
from .linear import Layers, as_rows
from .tiles import matrix_tile

SHORT = 32  # samples of fewer rows are scaled row by row
MOST_SPLITS = 16
PART_ROWS = 600  # 8 bytes an element at 4 TB/s, over 2 flops a row and element at 600 TFLOP/s: a guess until measured


@triton.jit
def _program(n_o, n_i, parts, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """This program's layer and group of samples, and the rows and columns of its tile."""
    pid = tl.program_id(0)
    i_o, i_i = grouped(pid % (n_o * n_i), n_o, n_i, 8)
    i_all = pid // (n_o * n_i)
    return i_all // parts, i_all % parts, i_o * BLOCK_O + tl.arange(0, BLOCK_O), i_i * BLOCK_I + tl.arange(0, BLOCK_I)


@triton.jit
def _put(p_out, total, mask, ADD: tl.constexpr):
    """A tile of the sum, beside what is there or in its place."""
    if ADD:
        total += tl.load(p_out, mask=mask, other=0.0)
    tl.store(p_out, total, mask=mask)


@kernel
def clipped_kernel(
    p_a, p_g, p_c, p_out, B, T, D_I, D_O, stride_ab, stride_at, stride_ai, stride_gb, stride_gt, stride_go, stride_c,
    stride_cl, stride_ol, stride_os, stride_oo, stride_oi, n_o, n_i, parts, share,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    FLUSH: tl.constexpr, TYPE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """One tile of a layer's sum over `share` samples; the factor goes on each sample's float32 sum, or on those of each
    FLUSH steps."""
    i_layer, i_split, o_o, o_i = _program(n_o, n_i, parts, BLOCK_O, BLOCK_I)
    p_a, p_g = start_of(p_a, i_layer, TYPE), start_of(p_g, i_layer, TYPE)
    p_c += i_layer.to(tl.int64) * stride_cl
    o_step = tl.arange(0, BLOCK_T)
    m_o, m_i = (o_o < D_O)[:, None], (o_i < D_I)[None, :]
    p_g += o_o.to(tl.int64)[:, None] * stride_go
    p_a += o_i.to(tl.int64)[None, :] * stride_ai
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    steps = tl.cdiv(T, BLOCK_T)
    first = i_split * share
    for step in range(first * steps, tl.minimum(first + share, B) * steps):
        i_b, i_t = step // steps, step % steps
        o_t = i_t * BLOCK_T + o_step
        m_t = o_t < T
        row_g = i_b.to(tl.int64) * stride_gb + o_t.to(tl.int64) * stride_gt
        row_a = i_b.to(tl.int64) * stride_ab + o_t.to(tl.int64) * stride_at
        g = tl.load(p_g + row_g[None, :], mask=m_o & m_t[None, :], other=0.0)
        a = tl.load(p_a + row_a[:, None], mask=m_i & m_t[:, None], other=0.0)
        acc = dot(g, a, acc, PRECISION)
        if (i_t == steps - 1) | (i_t % FLUSH == FLUSH - 1):  # rounding grows with what one sum holds: `bounds.BLOCK`
            c = tl.load(p_c + i_b * stride_c).to(tl.float32)
            total += tl.where(c != 0, c * acc, 0.0)  # sum += c_b G_b; 0 * inf never formed into it
            acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    p_out = start_of(p_out, i_layer, OUT) + i_layer.to(tl.int64) * stride_ol + i_split.to(tl.int64) * stride_os
    p_out += o_o.to(tl.int64)[:, None] * stride_oo + o_i.to(tl.int64)[None, :] * stride_oi
    _put(p_out, total, m_o & m_i, ADD)


@triton.jit
def upper(x):
    """The part of a float32 that a tf32 holds exactly."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)


@kernel
def clipped_rows_kernel(
    p_a, p_g, p_c, p_out, B, T, D_I, D_O, stride_ab, stride_at, stride_ai, stride_gb, stride_gt, stride_go, stride_c,
    stride_cl, stride_ol, stride_os, stride_oo, stride_oi, n_o, n_i, parts, share,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_T: tl.constexpr, ADD: tl.constexpr, HALF: tl.constexpr,
    TYPE: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """The same with the factor on each row of g, in float32: for samples of few rows."""
    i_layer, i_split, o_o, o_i = _program(n_o, n_i, parts, BLOCK_O, BLOCK_I)
    p_a, p_g = start_of(p_a, i_layer, TYPE), start_of(p_g, i_layer, TYPE)
    p_c += i_layer.to(tl.int64) * stride_cl
    m_o, m_i = (o_o < D_O)[:, None], (o_i < D_I)[None, :]
    p_g += o_o.to(tl.int64)[:, None] * stride_go
    p_a += o_i.to(tl.int64)[None, :] * stride_ai
    total = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    first = i_split.to(tl.int64) * share
    end = tl.minimum(first + share, B) * T
    for row in range(first * T, end, BLOCK_T):
        o_row = tl.cast(row, tl.int64) + tl.arange(0, BLOCK_T)
        o_b, o_t = o_row // T, o_row % T
        c = tl.load(p_c + o_b * stride_c, mask=o_row < end, other=0.0).to(tl.float32)
        m_row = (o_row < end) & (c != 0)  # rows of dropped samples are not read at all
        g = tl.load(p_g + (o_b * stride_gb + o_t * stride_gt)[None, :], mask=m_o & m_row[None, :], other=0.0)
        a = tl.load(p_a + (o_b * stride_ab + o_t * stride_at)[:, None], mask=m_i & m_row[:, None], other=0.0)
        scaled = g.to(tl.float32) * c[None, :]
        a = a.to(tl.float32)
        if HALF:  # a is exact in tf32, c g in two of them
            top = upper(scaled)
            total = tl.dot(top, a, total, input_precision="tf32")
            total = tl.dot(scaled - top, a, total, input_precision="tf32")
        else:
            total = tl.dot(scaled, a, total, input_precision="ieee")
    p_out = start_of(p_out, i_layer, OUT) + i_layer.to(tl.int64) * stride_ol + i_split.to(tl.int64) * stride_os
    p_out += o_o.to(tl.int64)[:, None] * stride_oo + o_i.to(tl.int64)[None, :] * stride_oi
    _put(p_out, total, m_o & m_i, ADD)


@kernel
def add_parts_kernel(p_part, p_out, parts, D_O, D_I, stride_oo, stride_oi, ADD: tl.constexpr, BLOCK: tl.constexpr,
                     OUT: tl.constexpr):  # fmt: skip
    """Sums of groups of samples, [layers, parts, O, I], added in their order."""
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i_layer = tl.program_id(1).to(tl.int64)
    size = tl.cast(D_O, tl.int64) * D_I
    p_part += i_layer * parts * size
    p_out = start_of(p_out, i_layer, OUT)
    m_n = o_n < size
    p_to = p_out + o_n // D_I * stride_oo + o_n % D_I * stride_oi
    total = tl.zeros([BLOCK], tl.float32)
    if ADD:
        total = tl.load(p_to, mask=m_n, other=0.0)
    for part in range(parts):
        total += tl.load(p_part + part * size + o_n, mask=m_n, other=0.0)
    tl.store(p_to, total, mask=m_n)


# ---------------------------------------------------------------------- choices


def splits(batch: int, t: int, tiles: int, units: int) -> int:
    """Into how many groups of samples the sum is cut, so that multiprocessors end together: whole waves of tiles.

    Of a group more its sum is written and read: as long as multiplying PART_ROWS rows. Samples are not cut.
    """
    best, least = 1, math.inf
    for parts in range(1, min(batch, MOST_SPLITS) + 1):
        waves = triton.cdiv(tiles * parts, units)
        rows = waves * triton.cdiv(batch, parts) * t + (parts * PART_ROWS * tiles / units if parts > 1 else 0)
        if rows < 0.95 * least:
            best, least = parts, rows
    return best


def rows_tile(a: Tensor, g: Tensor) -> Tile:
    """The tile where rows are scaled one by one."""
    tile = Tile(extent(g.size(2), 64 if aligned(a, g) else 32), extent(a.size(2), 64), 16, 4, 2)
    return tile._replace(k=32, stages=3) if is_half(a) else tile


# ---------------------------------------------------------------------- launchers


def linear_clipped_sum(a: Tensor, g: Tensor, c: Tensor, *, tile: Tile | None = None,
                       parts: int | None = None) -> Tensor:  # fmt: skip
    """sum_b c_b g_b^T a_b, [O,I] float32 (float64 for float64); rows of samples with c_b = 0 are not read as numbers.

    Args: a [B,T,I] or [B,I]; g [B,T,O] or [B,O]; c [B] finite factors; tile and parts (groups of samples summed apart)
    in place of the rules'.
    Float32 goes through cuBLAS on g scaled before, where PyTorch does not round it to tf32; else a kernel.
    Raises ValueError on shapes. Source: book-keeping, Bu et al. 2023, arXiv 2210.00038.
    """
    a, g = as_rows(a, g)
    shape = (g.size(2), a.size(2))
    if c.shape != (a.size(0),):
        raise ValueError(f"expected factors [{a.size(0)}]; got {tuple(c.shape)}")
    if tile is None and parts is None and not is_half(a) and (not has_kernel(a) or float32_is_exact()):
        return _prescaled(a, g, c)
    if 0 in (*a.shape, shape[0]):
        return a.new_zeros(shape, dtype=torch.float32)
    total = a.new_empty(shape, dtype=torch.float32)
    with torch.cuda.device_of(a):
        if tile is not None or not is_half(a) or aligned(a, g):
            _launch(a, g, c, total, False, tile, parts)
            return total
        for part_a, part_g, rows in wide(a, g):  # with columns filled up to whole vectors
            if rows.start == 0:
                total = a.new_empty((part_g.size(2), part_a.size(2)), dtype=torch.float32)
            _launch(part_a, part_g, c[rows], total, rows.start > 0, None, parts)
    return total[: shape[0], : shape[1]].contiguous()


def _prescaled(a: Tensor, g: Tensor, c: Tensor) -> Tensor:
    """The same by cuBLAS on c_b g_b, which is exact enough in float32 and float64 alone."""
    drop = (c == 0)[:, None, None]
    zero = torch.zeros((), dtype=a.dtype, device=a.device)
    a, g = torch.where(drop, zero, a), torch.where(drop, zero, (g * c[:, None, None]).to(g.dtype))
    return torch.mm(g.flatten(0, 1).mT, a.flatten(0, 1))


def factor_strides(c: Tensor) -> tuple[int, int]:
    """From sample to sample, and from layer to layer, of factors [B] or [layers, B]."""
    return c.stride(-1), c.stride(0) if c.dim() == 2 else 0


def _launch(a: Tensor, g: Tensor, c: Tensor, out: Tensor, add: bool, tile: Tile | None, parts: int | None,
            layers: Layers | None = None, outs: Tensor | None = None) -> None:  # fmt: skip
    """Sums into `out`, or of several layers into the memory at the addresses `outs`, all with the strides of `out`.
    c: [B], or [layers, B]."""
    (batch, t, i), o = a.shape, g.size(2)
    p_a, p_g, count, type_ = (a, g, 1, None) if layers is None else (layers.a, layers.g, layers.count, layers.type)
    half = is_half(a)
    by_rows = not half or t < SHORT
    tile = tile or (rows_tile(a, g) if by_rows else matrix_tile(o, i, t, a, g))
    n_o, n_i = triton.cdiv(o, tile.m), triton.cdiv(i, tile.n)
    units = device_limits(a.device).units
    share = triton.cdiv(batch, parts or splits(batch, t, count * n_o * n_i, units))
    parts = triton.cdiv(batch, share)
    target, at = (out, None) if outs is None else (outs, tl.float32)
    whole = parts == 1
    part = target if whole else torch.empty((count, parts, o, i), dtype=torch.float32, device=a.device)
    strides = (0, 0, *out.stride()) if whole else part.stride()
    code, extra = clipped_rows_kernel, {"HALF": half}
    if not by_rows:
        code, extra = clipped_kernel, {"PRECISION": precision(a), "FLUSH": max(CHUNK // tile.k, 1)}
    code[(count * parts * n_o * n_i,)](
        p_a, p_g, c, part, batch, t, i, o, *a.stride(), *g.stride(), *factor_strides(c), *strides, n_o, n_i, parts,
        share, BLOCK_O=tile.m, BLOCK_I=tile.n, BLOCK_T=tile.k, ADD=add and whole, **extra, TYPE=type_,
        OUT=at if whole else None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if not whole:
        add_parts_kernel[(triton.cdiv(o * i, 1024), count)](
            part, target, parts, o, i, *out.stride(), ADD=add, BLOCK=1024, OUT=at, num_warps=4
        )
