"""Noise on a GPU without nvcc: of `fastdp.ops.noise` the key stream bit for bit, and normals from its very bits.

A program draws 128 blocks of ChaCha20, of two tiles of 768 elements: element i is one of the 12 normals of a block,
whose counter follows from i alone. Normals are computed in float32 (float64 for float64) by the polynomials of
csrc/cuda, each within 7e-7 of its pair's radius of the exact one; where that leaves open what is released,
`kernels.exact` finds it. Sources: RFC 8439, section 2.3; Box & Muller 1958.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastdp.ops.checks import check_out, check_single_std
from fastdp.ops.noise import reference_add_noise
from fastdp.ops.noise_reference import DOMAIN, Grid

from .exact import LEVELS, by_bits, by_more_bits, first_bits, more_bits

LANES, TILE = tl.constexpr(64), tl.constexpr(768)
SIZE = 768  # of a tile, for launchers
TILES = 2  # of a program
S0, S1, S2, S3 = (tl.constexpr(word) for word in (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574))  # "expand 32-byte k"


@triton.jit
def rotated(x, n: tl.constexpr):
    return (x << n) | (x >> (32 - n))


@triton.jit
def quarter_round(a, b, c, d):
    a += b
    d = rotated(d ^ a, 16)
    c += d
    b = rotated(b ^ c, 12)
    a += b
    d = rotated(d ^ a, 8)
    c += d
    b = rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def spread(word, like):
    """A word int32 as uint32, for every lane."""
    return tl.zeros_like(like) + tl.cast(word, tl.uint32, bitcast=True)


@triton.jit
def chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1):
    """The block of each 64-bit counter under a key of eight words and a nonce of two: 16 words uint32."""
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    k0, k1, k2, k3 = spread(w0, low), spread(w1, low), spread(w2, low), spread(w3, low)
    k4, k5, k6, k7 = spread(w4, low), spread(w5, low), spread(w6, low), spread(w7, low)
    nonce0, nonce1, nothing = spread(n0, low), spread(n1, low), tl.zeros_like(low)
    x0, x1, x2, x3 = nothing + S0, nothing + S1, nothing + S2, nothing + S3
    x4, x5, x6, x7, x8, x9, x10, x11 = k0, k1, k2, k3, k4, k5, k6, k7
    x12, x13, x14, x15 = low, high, nonce0, nonce1
    for _ in range(10):
        x0, x4, x8, x12 = quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = quarter_round(x3, x4, x9, x14)
    return (x0 + S0, x1 + S1, x2 + S2, x3 + S3, x4 + k0, x5 + k1, x6 + k2, x7 + k3, x8 + k4, x9 + k5, x10 + k6,
            x11 + k7, x12 + low, x13 + high, x14 + nonce0, x15 + nonce1)  # fmt: skip


@triton.jit
def term(q, v, c: tl.constexpr):
    """q v + c, rounded once."""
    return tl.fma(q, v, tl.zeros_like(v) + c)


@triton.jit
def minus_two_log(word, low):
    """-2 ln(1 - x) of x = (2^21 word + low) / 2^53. Where x < 1/2 by a polynomial in x: next to 0 nothing cancels."""
    rest = (low | 0x30800000).to(tl.float32, bitcast=True) - 9.313225746154785e-10  # low / 2^53
    v = tl.fma(word.to(tl.int32, bitcast=True).to(tl.float32), tl.zeros_like(rest) + 2.3283064365386963e-10, rest)
    q = term(tl.zeros_like(v) + 3.486881732940674, v, -4.9528985023498535)  # x, or x - 1; through Chebyshev's nodes
    q = term(term(q, v, 3.941861391067505), v, -1.1845371723175049)
    q = term(term(q, v, 0.6801363825798035), v, 0.35174909234046936)
    q = term(term(q, v, 0.5037372708320618), v, 0.6665264964103699)
    q = term(term(q, v, 1.0000017881393433), v, 2.0)
    return tl.where(v >= 0, q * v, tl.log2(tl.where(v >= 0, 1.0, -v)) * -1.3862943649291992)


@triton.jit
def cosine_sine(h):
    """cos(pi h) and sin(pi h), |h| <= 1/2, by polynomials."""
    q = h * h
    c = term(tl.zeros_like(q) - 0.024396324530243874, q, 0.23493731021881104)
    c = term(term(c, q, -1.335211992263794), q, 4.058709144592285)
    c = term(term(c, q, -4.934802055358887), q, 1.0)
    s = term(tl.zeros_like(q) + 0.07765766233205795, q, -0.598291277885437)
    s = term(term(s, q, 2.550077438354492), q, -5.167710304260254)
    return c, term(s, q, 3.1415927410125732) * h


@triton.jit
def box_muller(word, circle, low, DOUBLE: tl.constexpr):
    """A pair's normals, turned * (cosine, sine), from the words of its radius and its point, and the lower 21 bits of
    the former."""
    point = (circle << 1).to(tl.int32, bitcast=True)
    if DOUBLE:
        u = 1.0 - (word.to(tl.float64) * 2097152.0 + low.to(tl.float64)) * 1.1102230246251565e-16  # exact
        radius = tl.sqrt(-2.0 * tl.log(u))
        angle = (point.to(tl.float64) + 1.0) * 7.314590396335798e-10  # pi / 2^32
        cosine, sine = tl.cos(angle), tl.sin(angle)
    else:
        radius = tl.sqrt(minus_two_log(word, low))
        cosine, sine = cosine_sine((point.to(tl.float32) + 1.0) * 2.3283064365386963e-10)
    return tl.where((circle >> 31) != 0, -radius, radius), cosine, sine


@triton.jit
def lower_bits(words, pair: tl.constexpr):
    """21 of a pair's x."""
    if pair < 4:
        return words[12 + pair] & 0x1FFFFF
    else:
        return (words[2 * pair + 4] >> 21) | ((words[2 * pair + 5] >> 11) & 0x1FF800)


@triton.jit
def pair_of(words, pair: tl.constexpr, DOUBLE: tl.constexpr):
    """The normals of one of a block's six pairs."""
    return box_muller(words[pair], words[6 + pair], lower_bits(words, pair), DOUBLE)


@triton.jit
def release(turned, coordinate, total, size, unit, scale):
    """n = unit * round(total / unit + size * N) * scale, and in which lanes it is open: see csrc/cuda/keystream.cuh."""
    grids = total * (1.0 / unit)
    whole = tl.floor(grids + 0.5)
    part = grids - whole
    v = tl.fma(turned, coordinate, part)
    near, radius = tl.floor(v + 0.5), tl.abs(turned)
    rounded = tl.fma(whole + near, tl.zeros_like(v) + unit * scale, tl.zeros_like(v))  # + 0: no zero has a sign
    certain = (tl.abs(v - near) <= 0.499996 - 9e-7 * radius) & (radius <= 6.4 * size)
    return tl.where(size == 0, total * scale, rounded), tl.where(size == 0, certain, certain == 0)


@triton.jit
def word_of(words, pair, first: tl.constexpr, apart: tl.constexpr):
    """The word of one of six pairs, which lie so far apart in a block."""
    word = words[first]
    for k in tl.static_range(1, 6):
        word = tl.where(pair == k, words[first + k * apart], word)
    return word


@triton.jit
def low_of(words, pair):
    low = lower_bits(words, 0)
    for k in tl.static_range(1, 6):
        low = tl.where(pair == k, lower_bits(words, k), low)
    return low


@triton.jit
def settled(words, slot, total, size, unit, scale, unsure, counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1):
    """What is released where that is open, in one of a block's 12 slots."""
    pair, odd = slot // 2, (slot % 2) != 0
    grids = total * (1.0 / unit)
    whole = tl.floor(grids + 0.5)
    part, wide = (grids - whole).to(tl.float64), tl.cast(size, tl.float64)
    word, circle, low = word_of(words, pair, 0, 1), word_of(words, pair, 6, 1), low_of(words, pair)
    near, certain = by_bits(word, low, circle, odd, part, wide)
    if tl.max((unsure & (certain == 0)).to(tl.int32), 0) > 0:
        u, u_low, y, y_low = first_bits(word, low, circle)
        unit_of_level = wide * 0 + 2.3283064365386963e-10
        for level in range(LEVELS):
            more = chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1 + ((level + 1) << 16))
            u, u_low, y, y_low = more_bits(u, u_low, y, y_low, word_of(more, pair, 0, 2), word_of(more, pair, 1, 2),
                                           unit_of_level)  # fmt: skip
            unit_of_level *= 2.3283064365386963e-10
        finer, sure = by_more_bits(u, u_low, y, y_low, circle, odd, part, wide)
        near = tl.where(certain, near, tl.where(sure, finer, float("nan")))
    n = tl.fma(whole + near.to(whole.dtype), tl.zeros_like(whole) + unit * scale, tl.zeros_like(whole))
    number = tl.abs(part) <= 1  # not so of NaN, and of more than 2^127 units, of which noise changes no bit
    return tl.where(number, n, total * scale)


@triton.jit
def double_of(high, low):
    """A float64 of its two halves, int32: numbers among a kernel's arguments are float32."""
    bits = (tl.cast(high, tl.int64) << 32) | tl.cast(tl.cast(low, tl.uint32, bitcast=True), tl.int64)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def put(p_data, at, count, turned, coordinate, size, unit, scale, KEEP: tl.constexpr):
    """Where it is open, nothing is stored."""
    inside = (at >= 0) & (at < count)
    if KEEP:
        total = tl.load(p_data + at, mask=inside, other=0.0).to(turned.dtype)
        n, unsure = release(turned, coordinate, total, size, unit, scale)
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
                 unit_low, scale_high, scale_low, KEEP: tl.constexpr, DOUBLE: tl.constexpr,
                 TILES: tl.constexpr):  # fmt: skip
    """data = n of the data, or noise alone: of two tiles, as their first and last elements lie in the data."""
    i = tl.program_id(0).to(tl.int64) * (TILES * LANES) + tl.arange(0, TILES * LANES)
    tile, lane = tl.cast(first, tl.int64) + i // LANES, i % LANES
    words = chacha20(tile * LANES + lane, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1)
    size, unit = double_of(size_high, size_low), double_of(unit_high, unit_low)
    scale = double_of(scale_high, scale_low)
    if not DOUBLE:
        size, unit, scale = size.to(tl.float32), unit.to(tl.float32), scale.to(tl.float32)
    at = tile * TILE + lane - tl.cast(offset, tl.int64)
    unsure = tl.zeros_like(lane)  # a bit for each slot
    for pair in tl.static_range(6):
        turned, cosine, sine = pair_of(words, pair, DOUBLE)
        turned *= size
        unsure |= put(p_data, at + 2 * pair * LANES, count, turned, cosine, size, unit, scale, KEEP) << (2 * pair)
        unsure |= put(
            p_data, at + (2 * pair + 1) * LANES, count, turned, sine, size, unit, scale, KEEP
        ) << (2 * pair + 1)  # fmt: skip
    if KEEP:
        if tl.max(unsure, 0) > 0:
            for slot in range(12):
                here = ((unsure >> slot) & 1) != 0
                if tl.max(here.to(tl.int32), 0) > 0:
                    place = at + slot * LANES
                    total = tl.load(p_data + place, mask=here, other=0.0).to(turned.dtype)
                    n = settled(words, slot, total, size, unit, scale, here, tile * LANES + lane, w0, w1, w2, w3, w4,
                                w5, w6, w7, n0, n1)  # fmt: skip
                    tl.store(p_data + place, n.to(p_data.dtype.element_ty), mask=here)


# ---------------------------------------------------------------------- launchers


def signed(word: int) -> int:
    """A word of 32 bits as an int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def stream_of(key: Sequence[int], step: int) -> list[int]:
    """The key's eight words and the two of the nonce, as kernels take them."""
    return [signed(word) for word in (*key, step & 0xFFFFFFFF, step >> 32 | DOMAIN << 16)]


def halves(number: float) -> tuple[int, int]:
    """A float64 as `double_of` takes it."""
    low, high = struct.unpack("<II", struct.pack("<d", number))
    return signed(high), signed(low)


def _draw(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int, keep: bool) -> None:
    check_out(tensor, key, step, std, offset)
    check_single_std(std, tensor.dtype)
    grid, first = Grid.of(std, tensor.dtype), offset // SIZE
    if tensor.numel():
        tiles = (offset + tensor.numel() - 1) // SIZE + 1 - first
        with torch.cuda.device_of(tensor):
            noise_kernel[(triton.cdiv(tiles, TILES),)](
                tensor, tensor.numel(), offset, first, *stream_of(key, step), *halves(grid.size), *halves(grid.unit),
                *halves(scale), KEEP=keep, DOUBLE=tensor.dtype == torch.float64, TILES=TILES, num_warps=4,
                enable_fp_fusion=False,
            )  # fmt: skip
    torch.autograd.graph.increment_version(tensor)


def noise_(out: Tensor, std: float, key: Sequence[int], step: int, offset: int = 0) -> None:
    """out = std * N(0, 1), in place, as `fastdp.ops.noise_` says."""
    _draw(out, std, 1.0, key, step, offset, False)


def add_noise_(tensor: Tensor, std: float, scale: float, key: Sequence[int], step: int, offset: int,
               earlier_steps: Sequence[int] = (), earlier_weights: Sequence[float] = ()) -> None:  # fmt: skip
    """tensor = (tensor + std * N(0, 1)) * scale, in place."""
    if earlier_steps or earlier_weights:
        reference_add_noise(tensor, std, scale, key, step, offset, earlier_steps, earlier_weights)
        return
    _draw(tensor, std, scale, key, step, offset, True)
