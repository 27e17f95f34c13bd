"""The key stream of `fastdp.ops.noise` bit for bit, and normals from it, in float32 (float64 for float64) by the
polynomials of csrc/cuda/keystream.cuh: each within 7e-7 of its pair's radius of the exact one.

Sources: RFC 8439, section 2.3; Box & Muller 1958.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl

from fastdp.ops.noise_reference import DOMAIN

LANES, PAIRS, TILE = tl.constexpr(64), tl.constexpr(8), tl.constexpr(1024)
# What the 36 bits of x leave, in units, of a normal of size 128, if its radius is within reach; one in 30,000 is not.
LEFT_OPEN, SMALLEST, LARGEST = tl.constexpr(2e-5), tl.constexpr(0.001), tl.constexpr(4.55)
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
    """-2 ln(1 - x) of x = (16 word + low) / 2^36. Where x < 1/2 by a polynomial in x: next to 0 nothing cancels."""
    rest = low.to(tl.float32) * 1.4551915228366852e-11
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
def first_digits(word, circle):
    """x in units of 2^-36 and the point in 2^-32 half circles, as float64, from a pair's two words."""
    x = word.to(tl.float64) * 16.0 + (circle & 15).to(tl.float64)
    return x, ((circle << 1) & 0xFFFFFFE0).to(tl.int32, bitcast=True).to(tl.float64)


@triton.jit
def box_muller(word, circle, DOUBLE: tl.constexpr):
    """A pair's normals, turned * (cosine, sine), from its two words."""
    if DOUBLE:
        x, point = first_digits(word, circle)
        radius = tl.sqrt(-2.0 * tl.log(1.0 - x * 1.4551915228366852e-11))
        angle = (point + 16.0) * 7.314590396335798e-10  # pi / 2^32
        cosine, sine = tl.cos(angle), tl.sin(angle)
    else:
        point = ((circle << 1) & 0xFFFFFFE0).to(tl.int32, bitcast=True).to(tl.float32)
        radius = tl.sqrt(minus_two_log(word, circle & 15))
        cosine, sine = cosine_sine((point + 16.0) * 2.3283064365386963e-10)
    return tl.where((circle >> 31) != 0, -radius, radius), cosine, sine


@triton.jit
def pair_of(words, pair: tl.constexpr, DOUBLE: tl.constexpr):
    """The normals of one of a block's eight pairs."""
    return box_muller(words[pair], words[PAIRS + pair], DOUBLE)


@triton.jit
def word_of(words, pair, first: tl.constexpr, apart: tl.constexpr):
    """The word of one of eight pairs, which lie so far apart in a block."""
    word = words[first]
    for k in tl.static_range(1, PAIRS):
        word = tl.where(pair == k, words[first + k * apart], word)
    return word


@triton.jit
def double_of(high, low):
    """A float64 of its two halves, int32: numbers among a kernel's arguments are float32."""
    bits = (tl.cast(high, tl.int64) << 32) | tl.cast(tl.cast(low, tl.uint32, bitcast=True), tl.int64)
    return bits.to(tl.float64, bitcast=True)


# ---------------------------------------------------------------------- for launchers


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
