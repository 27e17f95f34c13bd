"""Noise on a GPU without nvcc: of `fastdp.ops.noise` the key stream bit for bit, and normals from its very bits.

A program draws 128 blocks of ChaCha20, of two tiles of 1024 elements: element i is one of the 16 normals of a block,
whose counter follows from i alone. Normals are computed in float32 (float64 for float64) by the polynomials of
csrc/cuda, each within 7e-7 of its pair's radius of the exact one; where that leaves open what is released,
`kernels.exact` finds it. Sources: RFC 8439, section 2.3; Box & Muller 1958.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdp.ops.checks import check_earlier, check_out, check_single_std
from fastdp.ops.noise_reference import Grid
from fastdp.ops.updates import Draw

from .exact import LEVELS, by_bits, by_more_bits, first_bits, more_bits
from .keystream import (
    LANES,
    LARGEST,
    LEFT_OPEN,
    PAIRS,
    SMALLEST,
    TILE,
    chacha20,
    double_of,
    halves,
    pair_of,
    stream_of,
    word_of,
)
from .past import gathered, is_correlated, nearest_of_all, past_of

SIZE = TILE.value  # of a tile, for launchers
TILES = 2  # of a program


@triton.jit
def limit_of(turned, size):
    """How far from a whole number part + size * N may be, or it is open what is next; `turned` times size already."""
    radius = tl.abs(turned)
    known = (radius >= size * SMALLEST) & (radius <= size * LARGEST)
    return tl.where(known, radius * -9e-7 + (0.5 - LEFT_OPEN), -1.0)


@triton.jit
def release(turned, coordinate, limit, total, size, unit, scale):
    """n = unit * round(total / unit + size * N) * scale, and in which lanes it is open: see csrc/cuda/keystream.cuh."""
    grids = total * (1.0 / unit)
    whole = tl.floor(grids + 0.5)
    part = grids - whole
    v = tl.fma(turned, coordinate, part)
    near = tl.floor(v + 0.5)
    rounded = tl.fma(whole + near, tl.zeros_like(v) + unit * scale, tl.zeros_like(v))  # + 0: no zero has a sign
    unsure = (tl.abs(v - near) <= limit) == 0  # so is NaN
    return tl.where(size == 0, total * scale, rounded), tl.where(size == 0, tl.zeros_like(unsure), unsure)


@triton.jit
def drawn(words, pair: tl.constexpr, size, DOUBLE: tl.constexpr, CORRELATED: tl.constexpr):
    """What a pair adds to two elements, each as the product of two numbers, and their limit. words: of a block, or what
    `gathered` gives."""
    if CORRELATED:
        one = tl.zeros_like(words[0]) + 1.0
        return words[2 * pair], words[2 * pair + 1], one, one, words[2 * PAIRS + pair]
    else:
        turned, cosine, sine = pair_of(words, pair, DOUBLE)
        turned *= size
        return turned, turned, cosine, sine, limit_of(turned, size)


@triton.jit
def settled(words, slot, total, size, unit, scale, unsure, counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1, p_past,
            CORRELATED: tl.constexpr):  # fmt: skip
    """What is released where that is open, in one of a block's 16 slots."""
    grids = total * (1.0 / unit)
    whole = tl.floor(grids + 0.5)
    part, wide = (grids - whole).to(tl.float64), tl.cast(size, tl.float64)
    if CORRELATED:
        near = nearest_of_all(p_past, slot, part, unsure, counter, w0, w1, w2, w3, w4, w5, w6, w7)
    else:
        near = nearest(words, slot, part, wide, unsure, counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1)
    n = tl.fma(whole + near.to(whole.dtype), tl.zeros_like(whole) + unit * scale, tl.zeros_like(whole))
    number = tl.abs(part) <= 1  # not so of NaN, and of more than 2^127 units, of which noise changes no bit
    return tl.where(number, n, total * scale)


@triton.jit
def nearest(words, slot, part, wide, unsure, counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1):
    """part + wide * N, rounded to a whole number."""
    pair, odd = slot // 2, (slot % 2) != 0
    word, circle = word_of(words, pair, 0, 1), word_of(words, pair, PAIRS, 1)
    near, certain = by_bits(word, circle, odd, part, wide)
    if tl.max((unsure & (certain == 0)).to(tl.int32), 0) > 0:
        u, u_low, y, y_low = first_bits(word, circle)
        unit_of_level = wide * 0 + 2.3283064365386963e-10
        for level in range(LEVELS):
            more = chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1 + ((level + 1) << 16))
            u, u_low, y, y_low = more_bits(u, u_low, y, y_low, word_of(more, pair, 0, 2), word_of(more, pair, 1, 2),
                                           unit_of_level)  # fmt: skip
            unit_of_level *= 2.3283064365386963e-10
        finer, sure = by_more_bits(u, u_low, y, y_low, circle, odd, part, wide)
        near = tl.where(certain, near, tl.where(sure, finer, float("nan")))
    return near


@triton.jit
def put(p_data, at, count, turned, coordinate, limit, size, unit, scale, KEEP: tl.constexpr):
    """Where it is open, nothing is stored."""
    inside = (at >= 0) & (at < count)
    if KEEP:
        total = tl.load(p_data + at, mask=inside, other=0.0).to(turned.dtype)
        n, unsure = release(turned, coordinate, limit, total, size, unit, scale)
        unsure = inside & unsure
        tl.store(p_data + at, n.to(p_data.dtype.element_ty), mask=inside & (unsure == 0))
        return unsure.to(tl.int32)
    else:
        tl.store(p_data + at, (turned * coordinate * unit).to(p_data.dtype.element_ty), mask=inside)
        return tl.zeros_like(inside).to(tl.int32)


_NUMBERS = (
    "count offset first w0 w1 w2 w3 w4 w5 w6 w7 n0 n1 size_high size_low unit_high unit_low scale_high scale_low"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def noise_kernel(p_data, count, offset, first, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1, size_high, size_low, unit_high,
                 unit_low, scale_high, scale_low, p_past, KEEP: tl.constexpr, DOUBLE: tl.constexpr,
                 CORRELATED: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    """data = n of the data, or noise alone: of two tiles, as their first and last elements lie in the data."""
    i = tl.program_id(0).to(tl.int64) * (TILES * LANES) + tl.arange(0, TILES * LANES)
    tile, lane = tl.cast(first, tl.int64) + i // LANES, i % LANES
    counter = tile * LANES + lane
    if CORRELATED:
        words = gathered(p_past, counter, w0, w1, w2, w3, w4, w5, w6, w7, DOUBLE)
    else:
        words = chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1)
    size, unit = double_of(size_high, size_low), double_of(unit_high, unit_low)
    scale = double_of(scale_high, scale_low)
    if not DOUBLE:
        size, unit, scale = size.to(tl.float32), unit.to(tl.float32), scale.to(tl.float32)
    at = tile * TILE + lane - tl.cast(offset, tl.int64)
    unsure = tl.zeros_like(lane)  # a bit for each slot
    for pair in tl.static_range(PAIRS):
        even, odd, cosine, sine, limit = drawn(words, pair, size, DOUBLE, CORRELATED)
        place = at + 2 * pair * LANES
        unsure |= put(p_data, place, count, even, cosine, limit, size, unit, scale, KEEP) << (2 * pair)
        unsure |= put(p_data, place + LANES, count, odd, sine, limit, size, unit, scale, KEEP) << (2 * pair + 1)
    if KEEP:
        if tl.max(unsure, 0) > 0:
            for slot in range(2 * PAIRS):
                here = ((unsure >> slot) & 1) != 0
                if tl.max(here.to(tl.int32), 0) > 0:
                    place = at + slot * LANES
                    total = tl.load(p_data + place, mask=here, other=0.0).to(size.dtype)
                    n = settled(words, slot, total, size, unit, scale, here, counter, w0, w1, w2, w3, w4, w5, w6, w7,
                                n0, n1, p_past, CORRELATED)  # fmt: skip
                    tl.store(p_data + place, n.to(p_data.dtype.element_ty), mask=here)


# ---------------------------------------------------------------------- launchers


def table_of(device: torch.device, numbers: list[int]) -> Tensor:
    """On the device; the host waits for nothing."""
    table = torch.tensor(numbers, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _draw(tensor: Tensor, draw: Draw, offset: int, keep: bool) -> None:
    check_out(tensor, draw.key, draw.step, draw.std, offset)
    check_single_std(draw.std, tensor.dtype)
    grid, first = Grid.of(draw.std, tensor.dtype), offset // SIZE
    correlated = keep and is_correlated(draw)
    if tensor.numel():
        tiles = (offset + tensor.numel() - 1) // SIZE + 1 - first
        with torch.cuda.device_of(tensor):
            noise_kernel[(triton.cdiv(tiles, TILES),)](
                tensor, tensor.numel(), offset, first, *stream_of(draw.key, draw.step), *halves(grid.size),
                *halves(grid.unit), *halves(draw.scale),
                table_of(tensor.device, past_of(draw, grid.size)) if correlated else None, KEEP=keep,
                DOUBLE=tensor.dtype == torch.float64, CORRELATED=correlated, TILES=TILES, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    torch.autograd.graph.increment_version(tensor)


def noise_(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> None:
    """out = std * N(0, 1), in place, as `fastdp.ops.noise_` says."""
    _draw(out, Draw(key, step, std, 1.0), offset, False)


def add_noise_(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int,
               earlier_steps: Sequence[int] = (), earlier_weights: Sequence[float] = ()) -> None:  # fmt: skip
    """tensor = (tensor + std * N(0, 1)) * scale, in place."""
    check_earlier(earlier_steps, earlier_weights)
    _draw(tensor, Draw(key, step, std, scale, True, earlier_steps, earlier_weights), offset, True)
