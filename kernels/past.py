"""Normals of earlier steps, drawn again: of correlated noise, an element takes a share of each.

A table of int64 says which: the number of draws, the step's own among them; what a radius takes from the limit, and
the limit without it (float64); then of each draw two words of the nonce, and its weight times std in units (float64).
Draws are counted and read when a kernel runs: it is compiled once for all of them.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from fastdp.ops.updates import Draw

from .exact import (
    ERROR,
    FINE_ERROR,
    LEVELS,
    add,
    decide,
    first_bits,
    more_bits,
    normal_by_bits,
    normal_by_more_bits,
)
from .keystream import LARGEST, LEFT_OPEN, PAIRS, SMALLEST, chacha20, pair_of, stream_of, word_of

FIELDS = tl.constexpr(3)  # of a draw, and of what stands before the first


@triton.jit
def number_at(p_past, place):
    return tl.load(p_past + place).to(tl.float64, bitcast=True)


@triton.jit
def nonce_at(p_past, draw):
    at = p_past + FIELDS + FIELDS * draw
    return tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)


@triton.jit
def joined(words, pair: tl.constexpr, size, even, odd, radii, DOUBLE: tl.constexpr):
    """A draw's share of a pair added to the sums so far. A radius out of reach has no bound."""
    turned, cosine, sine = pair_of(words, pair, DOUBLE)
    radius = tl.abs(turned)
    turned *= size
    return (tl.fma(turned, cosine, even), tl.fma(turned, sine, odd),
            radii + tl.where((radius < SMALLEST) | (radius > LARGEST), float("inf"), tl.abs(turned)))  # fmt: skip


@triton.jit
def gathered(p_past, counter, w0, w1, w2, w3, w4, w5, w6, w7, DOUBLE: tl.constexpr):
    """What the draws add to each of a block's 16 elements, and the limits of 8 pairs (`noise.limit_of`)."""
    nothing = (counter * 0).to(tl.float64 if DOUBLE else tl.float32)
    s0, s1, s2, s3, s4, s5 = nothing, nothing, nothing, nothing, nothing, nothing
    s6, s7, s8, s9, s10, s11 = nothing, nothing, nothing, nothing, nothing, nothing
    s12, s13, s14, s15 = nothing, nothing, nothing, nothing
    r0, r1, r2, r3, r4, r5, r6, r7 = nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing
    for draw in range(tl.load(p_past).to(tl.int32)):
        n0, n1 = nonce_at(p_past, draw)
        words = chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1)
        size = number_at(p_past, FIELDS + FIELDS * draw + 2).to(nothing.dtype)
        s0, s1, r0 = joined(words, 0, size, s0, s1, r0, DOUBLE)
        s2, s3, r1 = joined(words, 1, size, s2, s3, r1, DOUBLE)
        s4, s5, r2 = joined(words, 2, size, s4, s5, r2, DOUBLE)
        s6, s7, r3 = joined(words, 3, size, s6, s7, r3, DOUBLE)
        s8, s9, r4 = joined(words, 4, size, s8, s9, r4, DOUBLE)
        s10, s11, r5 = joined(words, 5, size, s10, s11, r5, DOUBLE)
        s12, s13, r6 = joined(words, 6, size, s12, s13, r6, DOUBLE)
        s14, s15, r7 = joined(words, 7, size, s14, s15, r7, DOUBLE)
    by, most = number_at(p_past, 1).to(nothing.dtype), number_at(p_past, 2).to(nothing.dtype)
    return (s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, most - by * r0, most - by * r1,
            most - by * r2, most - by * r3, most - by * r4, most - by * r5, most - by * r6, most - by * r7)  # fmt: skip


@triton.jit
def nearest_of_all(p_past, slot, part, unsure, counter, w0, w1, w2, w3, w4, w5, w6, w7):
    """part and the shares of all draws, rounded to a whole number, in one of a block's 16 slots."""
    pair, odd, draws = slot // 2, (slot % 2) != 0, tl.load(p_past).to(tl.int32)
    sums = 1 + 0.03125 * (draws - 1).to(tl.float64)  # each rounds
    total, off = part, tl.zeros_like(part) + ERROR * sums
    for draw in range(draws):
        n0, n1 = nonce_at(p_past, draw)
        words = chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1)
        size = number_at(p_past, FIELDS + FIELDS * draw + 2)
        word, circle = word_of(words, pair, 0, 1), word_of(words, pair, PAIRS, 1)
        share, more_off = normal_by_bits(word, circle, odd, size, ERROR * sums)
        total += share
        off += more_off
    near, certain = decide(total, tl.zeros_like(total), off)
    if tl.max((unsure & (certain == 0)).to(tl.int32), 0) > 0:
        v, v_low, off = part, tl.zeros_like(part), tl.zeros_like(part) + FINE_ERROR * sums
        for draw in range(draws):
            n0, n1 = nonce_at(p_past, draw)
            size, circle = number_at(p_past, FIELDS + FIELDS * draw + 2), counter.to(tl.uint32)
            u, u_low, y, y_low, unit = v_low * 0, v_low * 0, v_low * 0, v_low * 0, v_low * 0 + 1
            for level in range(LEVELS + 1):
                words = chacha20(counter, w0, w1, w2, w3, w4, w5, w6, w7, n0, n1 + (level << 16))
                if level == 0:
                    circle = word_of(words, pair, PAIRS, 1)
                    u, u_low, y, y_low = first_bits(word_of(words, pair, 0, 1), circle)
                else:
                    u, u_low, y, y_low = more_bits(u, u_low, y, y_low, word_of(words, pair, 0, 2),
                                                   word_of(words, pair, 1, 2), unit)  # fmt: skip
                unit *= 2.3283064365386963e-10
            share, share_low, more_off = normal_by_more_bits(u, u_low, y, y_low, circle, odd, size, FINE_ERROR * sums)
            v, v_low = add(v, v_low, share, share_low)
            off += more_off
        finer, sure = decide(v, v_low, off)
        near = tl.where(certain, near, tl.where(sure, finer, float("nan")))
    return near


# ---------------------------------------------------------------------- launchers


def is_correlated(draw: Draw) -> bool:
    """Whether normals of earlier steps take part."""
    return draw.std != 0 and any(draw.earlier_weights)


def past_of(draw: Draw, size: float) -> list[int]:
    """The table. size: of std, in units."""
    earlier = [(step, weight) for step, weight in zip(draw.earlier_steps, draw.earlier_weights, strict=True) if weight]
    draws = [*earlier, (draw.step, 1.0)]
    # as `limit_of`, and for the rounding of each sum that a normal is in
    limit = (
        _bits(9e-7 + 6e-8 * (len(draws) + 1)),
        _bits(0.5 - LEFT_OPEN.value * sum(abs(weight) for _, weight in draws)),
    )
    rows = [(*stream_of(draw.key, step)[8:], _bits(size * weight)) for step, weight in draws]
    return [len(draws), *limit, *(number for row in rows for number in row)]


def _bits(number: float) -> int:
    """A float64 as an int64 of the same bits."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])
