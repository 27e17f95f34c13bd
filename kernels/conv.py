"""Norms and weight gradients of convolutions, per sample, without unfolded copies.

A convolution is a matrix product over patches: with P output positions and N = C / groups * taps of the kernel,
G_b = g_b [O,P] times patches [P,N]. Elements of patches are gathered as they are loaded. One to three dimensions are
taken as three. Sums are float32, partial sums float64 in a fixed order; no number of a sample touches another's.
Source: Bu et al. 2022, arXiv 2205.10683.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from fastdp.ops.common import norm_type, scaled, sum_type, without_dropped
from fastdp.ops.linear import check_method

from . import clipped, common, depthwise, linear, rows, tiles
from .common import VECTOR, Tile, chunk_of, extent, has_kernel, is_half, truncation
from .conv_bound import Limits, enlarged, parts_of
from .conv_problem import Problem, Size, problem
from .finish import Sums, finish
from .patches import conv_gram_kernel, conv_kernel

# ---------------------------------------------------------------------- launchers


def _pointwise(p: Problem) -> bool:
    """A matrix product at every position."""
    k, s, pad, _ = p.geometry
    return p.groups == 1 and max(*k, *s) == 1 and max(pad) == 0


def _rows(p: Problem) -> tuple[Tensor, Tensor]:
    """The inputs [B,P,C] and output gradients [B,P,O] of a pointwise convolution, not copied if dense; of 16 bits once
    if neither positions nor channels come in whole vectors as they lie, but would with channels last."""
    a, g = (side.contiguous() if _ragged(side) else side for side in (p.x.flatten(2).mT, p.g.mT))
    return a, g


def _ragged(side: Tensor) -> bool:
    return is_half(side) and not common.aligned(side) and side.size(2) % VECTOR == 0


def wants_last(x: Tensor, g: Tensor, kernel_size: Size, stride: Size, padding: Size, dilation: Size,
               groups: int) -> tuple[bool, bool]:  # fmt: skip
    """Whether the launchers would copy x, and g, to lay their channels last: who calls several does it once before."""
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    if _empty(p) or not has_kernel(p.x) or x.dtype != g.dtype:
        return False, False
    if _pointwise(p):
        return _ragged(p.x.flatten(2).mT), _ragged(p.g.mT)
    return depthwise.copied(p) if depthwise.takes(p) else p.copied()


def _empty(p: Problem) -> bool:
    return 0 in (p.x.size(0), p.g.size(2), *p.weight) or p.x.numel() == 0


def _tile(p: Problem, tile: Tile | None) -> Tile:
    """Gathered elements come one a load: fewer of them a thread than in a plain matrix product."""
    if tile is not None:
        return tile
    outputs = p.weight[0] // p.groups
    if not is_half(p.x):
        return Tile(extent(outputs, 64), extent(p.inputs, 32), 16, 8, 2)
    if p.last:
        return _wide_tile(extent(outputs, 128), extent(p.inputs, 128))
    return Tile(extent(outputs, 128), extent(p.inputs, 64), 32, 8, 3)


def _wide_tile(m: int, n: int) -> Tile:
    """Where 16 bytes are loaded at once: as many warps as have 16 rows or more of a tile with enough to sum each."""
    return Tile(m, n, 64, 8 if m * n > 64 * 128 else 4, 3)


def _launch(p: Problem, mode: str, out: Tensor, tile: Tile, share: int, c: Tensor | None = None) -> None:
    outputs = p.weight[0] // p.groups
    n_o, n_n = triton.cdiv(outputs, tile.m), triton.cdiv(p.inputs, tile.n)
    with torch.cuda.device_of(p.x):
        conv_kernel[(triton.cdiv(p.x.size(0), share) * p.groups * n_o * n_n,)](
            p.x, p.g, out if c is None else c, out, p.x.size(0), *p.sizes(), *p.strides(), p.groups, n_o, n_n, share,
            out.stride(0), **p.constants(), MODE=mode, BLOCK_O=tile.m, BLOCK_N=tile.n, BLOCK_P=tile.k,
            CHUNK=chunk_of(p.x), PRECISION=common.precision(p.x), num_warps=tile.warps, num_stages=tile.stages,
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
    kind = norm_type(x, dtype)
    check_method(method)
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    if _empty(p):
        return x.new_zeros(x.size(0), dtype=kind)
    if not has_kernel(p.x):
        stored = conv_per_sample(x, g, kernel_size, stride, padding, dilation, groups)
        return torch.linalg.vector_norm(stored.flatten(1), dim=1).square().to(kind)
    if _pointwise(p):
        return linear.linear_norm_sq(*_rows(p), method, dtype=kind, tile=tile)
    if depthwise.takes(p) and tile is None:
        return rows.square_sum(depthwise.per_sample(p)).to(kind)
    p, gram = p.wide(), _by_gram(p, method)
    return _gram(p, kind, tile, _sums(p)) if gram else _direct(p, kind, tile)


def conv_norm_sq_and_bound(x: Tensor, g: Tensor, kernel_size: Size, stride: Size, padding: Size, dilation: Size,
                           groups: int, method: str, units: float,
                           limits: tuple[float, float]) -> Tensor:  # fmt: skip
    """`conv_norm_sq` in float64, enlarged by what rounding may do to the clipped sum, in the same launches.

    units: of one product at each position, the share of sum_p |x_p| |g_p| by which sums may be off. limits: the share
    of |x| |g| by which sums over any patches may be off, and the share of a norm that a bound must exceed to enlarge
    it.
    """
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    if _empty(p):
        return x.new_zeros(x.size(0), dtype=torch.float64)
    if _pointwise(p):
        return linear.linear_norm_sq_and_bound(*_rows(p), method, units, limits[1])[0]
    known = None if p.g.size(2) == 1 else Limits(*limits)
    if depthwise.takes(p):
        found = rows.square_sum(depthwise.per_sample(p))
        return found if known is None else _enlarged(found, p, known)
    if not _by_gram(p, method):
        return _direct(p.wide(), torch.float64, None, known)
    return _gram(p.wide(), torch.float64, None, _sums(p, units, math.inf if known is None else limits[1]))


def _sums(p: Problem, units: float = 0.0, tolerance: float = math.inf) -> Sums:
    """A bound by the sizes of patches: of each position a product, as of a linear layer."""
    return Sums(p.g.size(2), p.inputs, p.weight[0] // p.groups, units, tolerance)


def _by_gram(p: Problem, method: str) -> bool:
    cheaper = method == "auto" and tiles.gram_is_cheaper(p.g.size(2), p.inputs, p.weight[0] // p.groups)
    return method == "gram" or cheaper


def _direct(p: Problem, kind: torch.dtype, tile: Tile | None, limits: Limits | None = None) -> Tensor:
    tile = _tile(p, tile)
    count = p.groups * triton.cdiv(p.weight[0] // p.groups, tile.m) * triton.cdiv(p.inputs, tile.n)
    behind = 0 if limits is None else parts_of(p.x, p.g)
    partial = p.x.new_empty((p.x.size(0), count + behind), dtype=torch.float64)
    _launch(p, "norm", partial, tile, 1)
    share = 2 * truncation(p.g.size(2), p.x)
    if limits is None:
        return finish(partial, count, share, kind)[0]
    return enlarged(partial, count, p.x, p.g, share, limits)


def _gram(p: Problem, kind: torch.dtype, tile: Tile | None, sums: Sums) -> Tensor:
    positions, outputs, half = p.g.size(2), p.weight[0] // p.groups, is_half(p.x)
    if tile is None and p.last:
        tile = _wide_tile(extent(positions, 128), extent(positions, 128))
    tile = tile or Tile(extent(positions, 64), extent(positions, 64), 32 if half else 16, 8, 3)
    n, chunk = triton.cdiv(positions, tile.m), chunk_of(p.x)
    count = p.groups * (n * (n + 1) // 2)
    partial = p.x.new_empty((p.x.size(0), 2 * count + 3 * n * p.groups), dtype=torch.float64)
    with torch.cuda.device_of(p.x):
        conv_gram_kernel[(p.x.size(0) * count,)](
            p.x, p.g, partial, *p.sizes(), *p.strides(), p.groups, n, **p.constants(),
            BLOCK=tile.m, BLOCK_N=tile.k, BLOCK_O=tile.k, CHUNK=chunk, CHUNK_N=half and p.inputs > chunk,
            CHUNK_O=half and outputs > chunk, PRECISION=common.precision(p.x),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        share = truncation(p.inputs, p.x) + truncation(outputs, p.x)
        return finish(partial, count, share, kind, True, sums)[0]


def _enlarged(found: Tensor, p: Problem, limits: Limits) -> Tensor:
    """Norms [B] float64 enlarged by their bound."""
    partial = p.x.new_empty((p.x.size(0), 1 + parts_of(p.x, p.g)), dtype=torch.float64)
    partial[:, 0] = found
    return enlarged(partial, 1, p.x, p.g, 0.0, limits)


def conv_per_sample(x: Tensor, g: Tensor, kernel_size: Size, stride: Size = 1, padding: Size = 0, dilation: Size = 1,
                    groups: int = 1, *, tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The weight gradient of each sample, [B, O, C / groups, *kernel_size] float32 (float64 for float64)."""
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    batch = x.size(0)
    if _empty(p):
        return x.new_zeros((batch, *p.weight), dtype=sum_type(p.x))
    if not has_kernel(p.x):
        return torch.stack([_by_pytorch(p, p.x[b : b + 1], p.g[b : b + 1]) for b in range(batch)])
    if _pointwise(p):
        return linear.linear_per_sample(*_rows(p), tile=tile).view(batch, *p.weight)
    if depthwise.takes(p) and tile is None:
        return depthwise.per_sample(p)
    out = x.new_empty((batch, *p.weight), dtype=torch.float32)
    p = p.wide()
    _launch(p, "store", out, _tile(p, tile), 1)
    return out


def conv_clipped_sum(x: Tensor, g: Tensor, c: Tensor, kernel_size: Size, stride: Size = 1, padding: Size = 0,
                     dilation: Size = 1, groups: int = 1, *, tile: Tile | None = None,
                     parts: int | None = None) -> Tensor:  # fmt: skip
    """sum_b c_b (weight gradient of sample b), of the weight's shape, float32.

    Samples with c_b = 0 are not read as numbers. Float32 goes through PyTorch's convolution over c_b g_b; 16-bit
    inputs through a kernel, for there c_b g_b would be rounded to 16 bits and a sample could exceed its bound.
    """
    p = problem(x, g, kernel_size, stride, padding, dilation, groups)
    if c.shape != (x.size(0),):
        raise ValueError(f"expected factors [{x.size(0)}], got {tuple(c.shape)}")
    if _empty(p):
        return x.new_zeros(p.weight, dtype=sum_type(p.x))
    if _pointwise(p) and has_kernel(p.x):
        return clipped.linear_clipped_sum(*_rows(p), c, tile=tile, parts=parts).view(p.weight)
    if depthwise.takes(p) and tile is None:
        return rows.weighted_sum(depthwise.per_sample(p), c)
    if not is_half(p.x) and tile is None:
        return _by_pytorch(p, without_dropped(p.x, c), scaled(p.g, c))
    p = p.wide()
    return _clipped_sum(p, c, _tile(p, tile), parts)


def _clipped_sum(p: Problem, c: Tensor, tile: Tile, parts: int | None) -> Tensor:
    batch, outputs = p.x.size(0), p.weight[0] // p.groups
    tiles = p.groups * triton.cdiv(outputs, tile.m) * triton.cdiv(p.inputs, tile.n)
    share = triton.cdiv(batch, parts or max(1, min(batch, 64, 2 * common.device_limits(p.x.device).units // tiles)))
    parts = triton.cdiv(batch, share)
    part = p.x.new_empty((parts, *p.weight), dtype=torch.float32)
    _launch(p, "sum", part, tile, share, c.contiguous())
    return part[0] if parts == 1 else part.sum(0)  # PyTorch adds in a fixed order, without atomics
