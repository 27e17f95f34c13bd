"""Which tiles products are cut into, by types, strides and device; which route is cheaper."""

from __future__ import annotations

import triton
from torch import Tensor

from .common import CHUNK, Tile, aligned, device_limits, extent, is_half, stages


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
    """The tile of the triangle, square. Tiles of 64 rows would fill T = 197 better (40,960 products for each column,
    not 49,152), but read each row twice as often.

    Two sums and a third being formed fill the registers, so that narrow loads (one address a number) and, before
    Hopper, sums in chunks get smaller tiles.
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


def diagonal(a: Tensor, g: Tensor, n: int) -> str:
    """How tiles on the diagonal of a triangle of n rows are formed (`products.gram_kernel`): by rows that are read
    once, unless code for both kinds of tiles would spill registers (narrow loads; sums in chunks on Blackwell).

    At T = 197 the three tiles of a sample so read 394 rows, not 591.
    """
    if n == 1:
        return "only"
    if not is_half(a):
        return "apart"
    chunks = max(a.size(2), g.size(2)) > CHUNK and device_limits(a.device).arch >= 100
    return "apart" if aligned(a, g) and not chunks else "as others"


def gram_is_cheaper(t: int, i: int, o: int) -> bool:
    """By arithmetic in whole tiles: the triangle of T x T, over I + O, against T I O."""
    block = extent(t, 128)
    n = triton.cdiv(t, block)
    direct = t * (extent(i, 128) * triton.cdiv(i, extent(i, 128))) * (extent(o, 128) * triton.cdiv(o, extent(o, 128)))
    return n * (n + 1) // 2 * block * block * (i + o) < direct
