"""Norms and weight gradients of convolutions, per sample, without unfolded copies.

A convolution is a matrix product over patches: with P output positions and N = C / groups * taps of the kernel,
G_b = g_b [O,P] times patches [P,N]. Elements of patches are gathered as they are loaded. One to three dimensions are
taken as three. Sums are float32, partial sums float64 in a fixed order; no number of a sample touches another's.
Source: Bu et al. 2022, arXiv 2205.10683.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import common, linear, products, tiles
from .common import CHUNK, Tile, dot, extent, grouped, has_kernel, is_half, tile_sums, triangle, truncation
from .finish import finish

Size = int | Sequence[int]


class Geometry(NamedTuple):
    """Kernel, stride, padding and dilation along depth, height and width."""

    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]


@triton.jit
def _inside(o_out, o_tap, size, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr):
    """Where an output position and a tap meet in the input along one dimension, and whether that is inside it."""
    at = (o_out * STRIDE - PADDING)[:, None] + (o_tap * DILATION)[None, :]
    return at, (at >= 0) & (at < size)


@triton.jit
def _patches(p_x, o_p, o_n, P, N, depth, height, width, out_h, out_w, stride_c, stride_d, stride_h, stride_w,
             KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr):  # fmt: skip
    """Elements o_n of the patches at output positions o_p of one sample, 0 in the padding."""
    taps: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    o_tap = o_n % taps
    m = (o_p < P)[:, None] & (o_n < N)[None, :]
    at, inside = _inside(o_p % out_w, o_tap % KERNEL[2], width, STRIDE[2], PADDING[2], DILATION[2])
    offset = (o_n // taps).to(tl.int64)[None, :] * stride_c + at.to(tl.int64) * stride_w
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
    p_x, p_g, p_c, p_out, B, P, N, D_O, depth, height, width, out_h, out_w,
    stride_xb, stride_xg, stride_c, stride_d, stride_h, stride_w, stride_gb, stride_gg, stride_go, stride_gp,
    groups, n_o, n_n, share, flush,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, DILATION: tl.constexpr, MODE: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr,
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
        x = _patches(p_x + i_b * stride_xb, o_p, o_n, P, N, depth, height, width, out_h, out_w,
                     stride_c, stride_d, stride_h, stride_w, KERNEL, STRIDE, PADDING, DILATION)  # fmt: skip
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
        tl.store(p_out + row[:, None] * N + o_n[None, :], total, mask=(o_o < D_O)[:, None] & (o_n < N)[None, :])


@triton.jit
def conv_gram_kernel(
    p_x, p_g, p_partial, P, N, D_O, depth, height, width, out_h, out_w,
    stride_xb, stride_xg, stride_c, stride_d, stride_h, stride_w, stride_gb, stride_gg, stride_go, stride_gp,
    groups, n,
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
    m = tl.zeros([BLOCK, BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for k in range(0, N, BLOCK_N):
        o_n = k + tl.arange(0, BLOCK_N)
        row = _patches(p_x, o_row, o_n, P, N, depth, height, width, out_h, out_w,
                       stride_c, stride_d, stride_h, stride_w, KERNEL, STRIDE, PADDING, DILATION)  # fmt: skip
        col = _patches(p_x, o_col, o_n, P, N, depth, height, width, out_h, out_w,
                       stride_c, stride_d, stride_h, stride_w, KERNEL, STRIDE, PADDING, DILATION)  # fmt: skip
        acc = dot(row, tl.trans(col), acc, PRECISION)
        if CHUNK_N:
            if (k + BLOCK_N) % CHUNK == 0:
                m += acc
                acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    m += acc
    # M_pq = (patch_p . patch_q)(g_p . g_q)
    m *= products.rows_product(p_g + i_b * stride_gb + i_group * stride_gg, o_row, o_col, P, D_O, stride_gp, stride_go,
                              BLOCK, BLOCK_O, CHUNK, CHUNK_O, PRECISION)  # fmt: skip
    value, spread = tile_sums(m)
    weight = tl.where(i_row == i_col, 1.0, 2.0).to(tl.float64)
    p_partial += i_b * (2 * tiles * groups) + pid % (tiles * groups)
    tl.store(p_partial, weight * value)
    tl.store(p_partial + tiles * groups, weight * spread)


# ---------------------------------------------------------------------- launchers


class Problem(NamedTuple):
    """A convolution as the kernels take it: x [B,C,D,H,W], g [B,O,P], and the weight's shape."""

    x: Tensor
    g: Tensor
    out: tuple[int, int]  # height and width of the output
    geometry: Geometry
    groups: int
    weight: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """Elements of a patch in one group."""
        return math.prod(self.weight[1:])

    def sizes(self) -> tuple[int, ...]:
        return (self.g.size(2), self.inputs, self.weight[0] // self.groups, *self.x.shape[2:], *self.out)

    def strides(self) -> tuple[int, ...]:
        x, g = self.x.stride(), self.g.stride()
        channels, outputs = self.weight[1], self.weight[0] // self.groups
        return (x[0], x[1] * channels, *x[1:], g[0], g[1] * outputs, *g[1:])

    def constants(self) -> dict[str, tuple[int, ...]]:
        return {name.upper(): values for name, values in self.geometry._asdict().items()}


def _three(value: Size, n: int, default: int) -> tuple[int, int, int]:
    values = (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)
    if len(values) != n:
        raise ValueError(f"expected one number or {n}, not {value}")
    return (default,) * (3 - n) + values  # type: ignore[return-value]


def problem(x: Tensor, g: Tensor, kernel_size: Size, stride: Size, padding: Size, dilation: Size,
            groups: int) -> Problem:  # fmt: skip
    """Checks shapes and takes one or two dimensions as three; raises ValueError."""
    n = x.dim() - 2
    if n not in (1, 2, 3) or g.dim() != x.dim() or x.size(0) != g.size(0) or x.size(1) % groups or g.size(1) % groups:
        raise ValueError(f"expected x [B,C,*] and g [B,O,*] of one to three dimensions with C and O multiples of "
                         f"{groups}; got {tuple(x.shape)} and {tuple(g.shape)}")  # fmt: skip
    geometry = Geometry(_three(kernel_size, n, 1), _three(stride, n, 1), _three(padding, n, 0), _three(dilation, n, 1))
    full = (1,) * (3 - n) + tuple(x.shape[2:])
    expected = [(size + 2 * p - d * (k - 1) - 1) // s + 1
                for size, k, s, p, d in zip(full, *geometry, strict=True)]  # fmt: skip
    if tuple(expected[3 - n :]) != tuple(g.shape[2:]):
        raise ValueError(f"these sizes give an output of {expected[3 - n :]}; g has {list(g.shape[2:])}")
    x, g = common.same_type(x, g)
    view = x.view(*x.shape[:2], *full)
    weight = (g.size(1), x.size(1) // groups, *geometry.kernel[3 - n :])
    return Problem(view, g.flatten(2), (expected[1], expected[2]), geometry, groups, weight)


def _pointwise(p: Problem) -> bool:
    """A matrix product at every position."""
    k, s, pad, _ = p.geometry
    return p.groups == 1 and max(*k, *s) == 1 and max(pad) == 0


def _rows(p: Problem) -> tuple[Tensor, Tensor]:
    """The inputs [B,P,C] and output gradients [B,P,O] of a pointwise convolution, not copied if dense."""
    return p.x.flatten(2).mT, p.g.mT


def _empty(p: Problem) -> bool:
    return 0 in (p.x.size(0), p.g.size(2), *p.weight) or p.x.numel() == 0


def _tile(p: Problem, tile: Tile | None) -> Tile:
    """Gathered elements come one a load: fewer of them a thread than in a plain matrix product."""
    if tile is not None:
        return tile
    outputs = p.weight[0] // p.groups
    if not is_half(p.x):
        return Tile(extent(outputs, 64), extent(p.inputs, 32), 16, 8, 2)
    return Tile(extent(outputs, 128), extent(p.inputs, 64), 32, 8, 3)


def _launch(p: Problem, mode: str, out: Tensor, tile: Tile, share: int, c: Tensor | None = None) -> None:
    outputs = p.weight[0] // p.groups
    n_o, n_n = triton.cdiv(outputs, tile.m), triton.cdiv(p.inputs, tile.n)
    with torch.cuda.device_of(p.x):
        conv_kernel[(triton.cdiv(p.x.size(0), share) * p.groups * n_o * n_n,)](
            p.x, p.g, out if c is None else c, out, p.x.size(0), *p.sizes(), *p.strides(), p.groups, n_o, n_n, share,
            CHUNK // tile.k, **p.constants(), MODE=mode, BLOCK_O=tile.m, BLOCK_N=tile.n, BLOCK_P=tile.k,
            PRECISION=common.precision(p.x), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def _by_pytorch(p: Problem, x: Tensor, g: Tensor) -> Tensor:
    """The weight gradient summed over a batch, x [B,C,D,H,W] and g [B,O,P], by PyTorch without tf32."""
    depth = g.size(2) // (p.out[0] * p.out[1])
    k, s, pad, d = p.geometry
    weight = x.new_empty(1).expand(*p.weight[:2], *k)
    with common.exact_convolutions():
        return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
            g.reshape(*g.shape[:2], depth, *p.out), x, weight, None, list(s), list(pad), list(d), False, [0, 0, 0],
            p.groups, [False, True, False],
        )[1].view(p.weight)  # fmt: skip


def conv_norm_sq(x: Tensor, g: Tensor, kernel_size: Size, stride: Size = 1, padding: Size = 0, dilation: Size = 1,
                 groups: int = 1, method: str = "auto", *, dtype: torch.dtype | None = None,
                 tile: Tile | None = None) -> Tensor:  # fmt: skip
    """Squared norm of each sample's weight gradient, [B]; x [B,C,*], g [B,O,*] of one to three dimensions.

    Args: x and g float32, bfloat16 or float16 (float64 by plain PyTorch), any strides; method "auto", "gram" or
    "direct" as for linear_norm_sq; dtype float32 or float64; tile in place of the rule's. Raises ValueError.
    """
    kind = common.norm_type(x, dtype)
    if method not in ("auto", "gram", "direct"):
        raise ValueError(f"method must be 'auto', 'gram' or 'direct', not {method!r}")
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    if _empty(p):
        return x.new_zeros(x.size(0), dtype=kind)
    if not has_kernel(p.x):
        rows = conv_per_sample(x, g, kernel_size, stride, padding, dilation, groups)
        return torch.linalg.vector_norm(rows.flatten(1), dim=1).square().to(kind)
    if _pointwise(p):
        return linear.linear_norm_sq(*_rows(p), method, dtype=kind, tile=tile)
    outputs = p.weight[0] // groups
    if method == "gram" or (method == "auto" and tiles.gram_is_cheaper(p.g.size(2), p.inputs, outputs)):
        return _gram(p, kind, tile)
    tile = _tile(p, tile)
    count = groups * triton.cdiv(outputs, tile.m) * triton.cdiv(p.inputs, tile.n)
    partial = x.new_empty((x.size(0), count), dtype=torch.float64)
    _launch(p, "norm", partial, tile, 1)
    return finish(partial, count, 2 * truncation(p.g.size(2)) if is_half(p.x) else 0.0, kind)[0]


def _gram(p: Problem, kind: torch.dtype, tile: Tile | None) -> Tensor:
    positions, outputs, half = p.g.size(2), p.weight[0] // p.groups, is_half(p.x)
    tile = tile or Tile(extent(positions, 64), extent(positions, 64), 32 if half else 16, 8, 3)
    n = triton.cdiv(positions, tile.m)
    count = p.groups * (n * (n + 1) // 2)
    partial = p.x.new_empty((p.x.size(0), 2 * count), dtype=torch.float64)
    with torch.cuda.device_of(p.x):
        conv_gram_kernel[(partial.numel() // 2,)](
            p.x, p.g, partial, *p.sizes(), *p.strides(), p.groups, n, **p.constants(),
            BLOCK=tile.m, BLOCK_N=tile.k, BLOCK_O=tile.k, CHUNK=CHUNK, CHUNK_N=half and p.inputs > CHUNK,
            CHUNK_O=half and outputs > CHUNK, PRECISION=common.precision(p.x),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return finish(partial, count, truncation(p.inputs) + truncation(outputs) if half else 0.0, kind, True)[0]


def conv_per_sample(x: Tensor, g: Tensor, kernel_size: Size, stride: Size = 1, padding: Size = 0, dilation: Size = 1,
                    groups: int = 1, *, tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The weight gradient of each sample, [B, O, C / groups, *kernel_size] float32 (float64 for float64)."""
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    batch = x.size(0)
    kind = torch.float32 if is_half(p.x) else p.x.dtype
    if _empty(p):
        return x.new_zeros((batch, *p.weight), dtype=kind)
    if not has_kernel(p.x):
        return torch.stack([_by_pytorch(p, p.x[b : b + 1], p.g[b : b + 1]) for b in range(batch)])
    if _pointwise(p):
        return linear.linear_per_sample(*_rows(p), tile=tile).view(batch, *p.weight)
    out = x.new_empty((batch, *p.weight), dtype=torch.float32)
    _launch(p, "store", out, _tile(p, tile), 1)
    return out


def conv_clipped_sum(x: Tensor, g: Tensor, c: Tensor, kernel_size: Size, stride: Size = 1, padding: Size = 0,
                     dilation: Size = 1, groups: int = 1, out: Tensor | None = None, *, tile: Tile | None = None,
                     parts: int | None = None) -> Tensor:  # fmt: skip
    """sum_b c_b (weight gradient of sample b), of the weight's shape, float32; added to `out` if given.

    Samples with c_b = 0 are not read as numbers. Float32 goes through PyTorch's convolution over c_b g_b; 16-bit
    inputs through a kernel, for there c_b g_b would be rounded to 16 bits and a sample could exceed its bound.
    """
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    if c.shape != (x.size(0),):
        raise ValueError(f"expected factors [{x.size(0)}], got {tuple(c.shape)}")
    if _empty(p):
        total = x.new_zeros(p.weight, dtype=torch.float32 if is_half(p.x) else p.x.dtype)
    elif not is_half(p.x) and tile is None:
        drop, zero = c == 0, torch.zeros((), dtype=p.x.dtype, device=x.device)
        factors = c.to(p.x.dtype)[:, None, None]
        rows = torch.where(drop[:, None, None], zero, p.g * factors)
        total = _by_pytorch(p, torch.where(drop[:, None, None, None, None], zero, p.x), rows)
    else:
        total = _clipped_sum(p, c, _tile(p, tile), parts)
    return total if out is None else out.add_(total)


def _clipped_sum(p: Problem, c: Tensor, tile: Tile, parts: int | None) -> Tensor:
    batch, outputs = p.x.size(0), p.weight[0] // p.groups
    tiles = p.groups * triton.cdiv(outputs, tile.m) * triton.cdiv(p.inputs, tile.n)
    share = triton.cdiv(batch, parts or max(1, min(batch, 64, 2 * common.device_limits(p.x.device).units // tiles)))
    parts = triton.cdiv(batch, share)
    part = p.x.new_empty((parts, *p.weight), dtype=torch.float32)
    _launch(p, "sum", part, tile, share, c.contiguous())
    return part[0] if parts == 1 else part.sum(0)  # PyTorch adds in a fixed order, without atomics
