"""Norms and weight gradients of a matrix product, per sample: G_b = g_b^T a_b.

Shapes: a [B,T,I], g [B,T,O], or [B,I] and [B,O]; any strides. Sums are float32, partial sums float64 in a fixed
order: equal inputs give equal bits, and no number of one sample touches another's.
Source: Goodfellow 2015 (T = 1) and Li et al. 2022, section 4: |G_b|^2 = sum_{t,s} (a_t . a_s)(g_t . g_s).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdp.ops.common import norm_type, sum_type
from fastdp.ops.linear import check_method, shaped

from .common import (  # fmt: skip
    Tile,
    aligned,
    chunk_of,
    extent,
    filled,
    float32_is_exact,
    has_kernel,
    is_half,
    precision,
    same_type,
    truncation,
    wide,
)
from .finish import Sums, finish
from .products import direct_kernel, gram_kernel, sizes_kernel, vector_kernel
from .tiles import diagonal, direct_tile, gram_is_cheaper, gram_tile

ROWS = 16  # whose sizes one program takes
BMM_WIDENS = hasattr(torch.ops.aten.bmm, "dtype")  # 16-bit products with a float32 result, from PyTorch 2.8


# ---------------------------------------------------------------------- launchers


def as_rows(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a and g as [B,T,I] and [B,T,O] of one type; raises ValueError on other shapes."""
    return same_type(*shaped(a, g))


class Layers(NamedTuple):
    """Products of equal shapes and strides that one launch takes: tables of addresses, int64 [count] each."""

    a: Tensor
    g: Tensor
    count: int
    type: tl.dtype


def filled_once(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """a [B,T,I] and g [B,T,O] for norms and sums that would both copy one of them to whole vectors of columns: with
    that copy, zeros behind, in its place. So where it is the wider one alone; else they are as they are."""
    narrow, wider = sorted((a, g), key=lambda x: x.size(2))
    if not is_half(a) or a.dtype != g.dtype or a.size(1) < 2 or narrow.size(2) < 2 or 0 in a.shape:
        return a, g
    if not aligned(narrow) or aligned(wider):
        return a, g
    return (filled(a), g) if wider is a else (a, filled(g))


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
    check_method(method)
    if not has_kernel(a):
        return torch.stack([torch.linalg.vector_norm(y.mT @ x) for x, y in zip(a, g, strict=True)]).square().to(kind)
    return _norms(a, g, method, kind, tile, None)[0]


def linear_norm_sq_and_bound(a: Tensor, g: Tensor, method: str, units: float,
                             tolerance: float) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`linear_norm_sq` in float64 with the bound units * sum_t |a_t| |g_t| [B], from one read of a and g.

    Where the bound is more than `tolerance` of a norm, the norm is enlarged by it. None: one position, which is no sum.
    """
    a, g = as_rows(a, g)
    return _norms(a, g, method, torch.float64, None, (units, tolerance))


def _norms(a: Tensor, g: Tensor, method: str, kind: torch.dtype, tile: Tile | None,
           bound: tuple[float, float] | None,
           layers: Layers | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Norms [B], of several layers one after the other, by the route of a method; bound: units, tolerance."""
    (batch, t, i), o = a.shape, g.size(2)
    if 0 in (batch, t, i, o):
        return a.new_zeros(batch, dtype=kind), None
    with torch.cuda.device_of(a):
        if t == 1:
            return _vector(a, g, kind, layers), None
        gram = method == "gram" or (method == "auto" and gram_is_cheaper(t, i, o))
        sums = Sums(t, i, o) if gram else None
        if bound is not None:
            sums = Sums(t, i, o, *bound)
        if tile is not None or layers is not None:
            return (_gram if gram else _direct)(a, g, kind, tile, sums, layers)
        route = _gram if gram else _direct
        parts = [route(part_a, part_g, kind, None, sums) for part_a, part_g, _ in wide(a, g)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts]), None if sums is None else torch.cat([b for _, b in parts])  # type: ignore[misc]


def _places(a: Tensor, g: Tensor, layers: Layers | None) -> tuple[Tensor, Tensor, int, tl.dtype | None]:
    """What kernels are given for a and g, how many samples there are in all, and the type behind addresses."""
    return (a, g, a.size(0), None) if layers is None else (layers.a, layers.g, layers.count * a.size(0), layers.type)


def _vector(a: Tensor, g: Tensor, kind: torch.dtype, layers: Layers | None = None) -> Tensor:
    p_a, p_g, count, type_ = _places(a, g, layers)
    out = torch.empty(count, dtype=kind, device=a.device)
    vector_kernel[(count,)](
        p_a, p_g, out, a.size(0), a.size(2), g.size(2), a.stride(0), a.stride(2), g.stride(0), g.stride(2), BLOCK=1024,
        TYPE=type_, num_warps=4,
    )  # fmt: skip
    return out


def _gram(a: Tensor, g: Tensor, kind: torch.dtype, tile: Tile | None = None, sums: Sums | None = None,
          layers: Layers | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    (batch, t, i), o = a.shape, g.size(2)
    half, chunk, (p_a, p_g, count, type_) = is_half(a), chunk_of(a), _places(a, g, layers)
    tile = tile or gram_tile(a, g)
    n = triton.cdiv(t, tile.m)
    tiles = n * (n + 1) // 2
    partial = torch.empty((count, 2 * tiles + 3 * n), dtype=torch.float64, device=a.device)
    gram_kernel[(count * tiles,)](
        p_a, p_g, partial, batch, t, i, o, *a.stride(), *g.stride(), n,
        BLOCK=tile.m, BLOCK_I=min(tile.k, extent(i, 64)), BLOCK_O=min(tile.k, extent(o, 64)), CHUNK=chunk,
        CHUNK_I=half and i > chunk, CHUNK_O=half and o > chunk, PRECISION=precision(a), TYPE=type_,
        DIAGONAL=diagonal(a, g, n), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return finish(partial, tiles, truncation(i, a) + truncation(o, a), kind, True, sums or Sums(t, i, o))


def _direct(a: Tensor, g: Tensor, kind: torch.dtype, tile: Tile | None = None, sums: Sums | None = None,
            layers: Layers | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    tile = tile or direct_tile(a, g)
    n_o, n_i = triton.cdiv(g.size(2), tile.m), triton.cdiv(a.size(2), tile.n)
    t, count, tiles = a.size(1), _places(a, g, layers)[2], n_o * n_i
    partial = torch.empty((count, tiles + (0 if sums is None else t)), dtype=torch.float64, device=a.device)
    _launch_direct(a, g, partial, tile, n_o, n_i, False, layers)
    if sums is not None:
        _launch_sizes(a, g, partial[:, tiles:], layers)
    return finish(partial, tiles, 2 * truncation(t, a), kind, False, sums)


def _launch_sizes(a: Tensor, g: Tensor, out: Tensor, layers: Layers | None = None) -> None:
    (batch, t, i), o = a.shape, g.size(2)
    p_a, p_g, count, type_ = _places(a, g, layers)
    n = triton.cdiv(t, ROWS)
    sizes_kernel[(count * n,)](
        p_a, p_g, out, batch, t, i, o, *a.stride(), *g.stride(), n, out.stride(0),
        BLOCK_T=ROWS, BLOCK=extent(max(i, o), 128), TYPE=type_, num_warps=4,
    )  # fmt: skip


def sizes(a: Tensor, g: Tensor) -> Tensor:
    """sum_t |a_t| |g_t| of each sample, [B] float64, of a [B,T,I] and g [B,T,O]: each number is read once."""
    a, g = as_rows(a, g)
    if 0 in (*a.shape, g.size(2)):
        return a.new_zeros(a.size(0), dtype=torch.float64)
    out = torch.empty(a.shape[:2], dtype=torch.float64, device=a.device)
    with torch.cuda.device_of(a):
        _launch_sizes(a, g, out)
    return out.sum(1)


def _launch_direct(a: Tensor, g: Tensor, out: Tensor, tile: Tile, n_o: int, n_i: int, store: bool,
                   layers: Layers | None = None) -> None:  # fmt: skip
    half, (p_a, p_g, count, type_) = is_half(a), _places(a, g, layers)
    direct_kernel[(count * n_o * n_i,)](
        p_a, p_g, out, *a.shape, g.size(2), *a.stride(), *g.stride(), n_o, n_i, out.stride(0),
        BLOCK_O=tile.m, BLOCK_I=tile.n, BLOCK_T=tile.k, CHUNK=chunk_of(a), CHUNKED=half and a.size(1) > chunk_of(a),
        PRECISION=precision(a), STORE=store, TYPE=type_, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def linear_per_sample(a: Tensor, g: Tensor, *, tile: Tile | None = None) -> Tensor:
    """The weight gradient of each sample, g_b^T a_b: [B,T,I], [B,T,O] -> [B,O,I] float32 (float64 for float64).

    By cuBLAS where that sums and returns float32, else by a kernel. Raises ValueError on shapes.
    """
    a, g = as_rows(a, g)
    (batch, t, i), o = a.shape, g.size(2)
    if 0 in (batch, t, i, o):
        return a.new_zeros((batch, o, i), dtype=sum_type(a))
    if tile is None:
        if not has_kernel(a) or (a.dtype == torch.float32 and float32_is_exact()):
            return torch.bmm(g.mT, a)
        if is_half(a) and a.is_cuda and BMM_WIDENS:
            return torch.bmm(g.mT, a, out_dtype=torch.float32)  # type: ignore[call-overload, no-any-return]
        tile = direct_tile(a, g)
    out = a.new_empty((batch, o, i), dtype=torch.float32)
    with torch.cuda.device_of(a):
        _launch_direct(a, g, out, tile, triton.cdiv(o, tile.m), triton.cdiv(i, tile.n), True)
    return out
