"""The whole number next to part + size * N where float32 leaves it open: csrc/exact.h for a GPU without nvcc.

First in float64 by the bits that there are; where the middle of two whole numbers may still lie between, by 96 more
bits of x and of the angle, with pairs of float64 (Dekker 1971). Kernels that call this must be launched with
enable_fp_fusion=False: a sum and a product that are joined into one rounding break the pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .keystream import first_digits

LEVELS, FINEST = tl.constexpr(3), tl.constexpr(2.0**-96)  # of bits, and what is left after them
ERROR, FINE_ERROR = tl.constexpr(2.0**-46), tl.constexpr(2.0**-92)  # of all arithmetic, relative to what is computed


# ---------------------------------------------------------------------- pairs of float64


@triton.jit
def in_order(a, b):
    """a + b as a pair, |a| >= |b|."""
    total = a + b
    return total, b - (total - a)


@triton.jit
def sum_of(a, b):
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@triton.jit
def add(a, a_low, b, b_low):
    high, rest = sum_of(a, b)
    low, last = sum_of(a_low, b_low)
    high, rest = in_order(high, rest + low)
    return in_order(high, rest + last)


@triton.jit
def halves_of(a):
    """Of 26 bits each, whose products are exact (Veltkamp): the interpreter's fma rounds twice."""
    large = a * 134217729.0
    upper = large - (large - a)
    return upper, a - upper


@triton.jit
def multiply(a, a_low, b, b_low):
    product = a * b
    a1, a2 = halves_of(a)
    b1, b2 = halves_of(b)
    rest = ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2
    return in_order(product, rest + (a * b_low + a_low * b))


@triton.jit
def divide(a, a_low, b, b_low):
    nothing = tl.zeros_like(a)
    first = a / b
    p, p_low = multiply(b, b_low, first, nothing)
    r, r_low = add(a, a_low, -p, -p_low)
    second = r / b
    p, p_low = multiply(b, b_low, second, nothing)
    r, r_low = add(r, r_low, -p, -p_low)
    q, q_low = in_order(first, second)
    return add(q, q_low, r / b, nothing)


@triton.jit
def root(a, a_low):
    nothing = tl.zeros_like(a)
    positive = a > 0
    first = tl.sqrt(tl.where(positive, a, 1.0))
    p, p_low = multiply(first, nothing, first, nothing)
    r, _ = add(a, a_low, -p, -p_low)
    high, low = in_order(first, r / (2 * first))
    return tl.where(positive, high, 0.0), tl.where(positive, low, 0.0)


# ---------------------------------------------------------------------- functions


@triton.jit
def minus_two_log(u, u_low):
    """-2 ln(u 2^-36) = -4 atanh((m - 1) / (m + 1)) - 2 e ln 2, m in [sqrt(1/2), sqrt(2)]."""
    nothing, one = tl.zeros_like(u), tl.zeros_like(u) + 1.0
    bits = u.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    m = ((bits & 0xFFFFFFFFFFFFF) | (1022 << 52)).to(tl.float64, bitcast=True)
    small = m < 0.7071067811865476
    exponent = tl.where(small, exponent - 1, exponent)
    m = tl.where(small, 2 * m, m)
    power = ((1023 - exponent) << 52).to(tl.float64, bitcast=True)
    m_low = u_low * power
    above, above_low = add(m, m_low, -one, nothing)
    below, below_low = add(m, m_low, one, nothing)
    t, t_low = divide(above, above_low, below, below_low)
    square, square_low = multiply(t, t_low, t, t_low)
    series, series_low = nothing, nothing
    for k in range(21):
        odd = one * (41 - 2 * k)
        series, series_low = multiply(series, series_low, square, square_low)
        inverse, inverse_low = divide(one, nothing, odd, nothing)
        series, series_low = add(series, series_low, inverse, inverse_low)
    series, series_low = multiply(series, series_low, t, t_low)
    ln2, ln2_low = multiply(nothing + 0.6931471805599453, nothing + 2.3190468138462996e-17,
                            -2 * (exponent - 36).to(tl.float64), nothing)  # fmt: skip
    return add(ln2, ln2_low, -4 * series, -4 * series_low)


@triton.jit
def coordinate(y, y_low, odd):
    """cos(pi y), or sin(pi y) where odd, |y| <= 1/2, by their series."""
    nothing, one = tl.zeros_like(y), tl.zeros_like(y) + 1.0
    x, x_low = multiply(nothing + 3.141592653589793, nothing + 1.2246467991473532e-16, y, y_low)
    square, square_low = multiply(x, x_low, x, x_low)
    series, series_low = one, nothing
    for step in range(17):
        k = 17 - step
        below = one * (tl.where(odd, 2 * k * (2 * k + 1), (2 * k - 1) * (2 * k)))
        series, series_low = multiply(series, series_low, square, square_low)
        series, series_low = divide(series, series_low, -below, nothing)
        series, series_low = add(one, nothing, series, series_low)
    sine, sine_low = multiply(series, series_low, x, x_low)
    return tl.where(odd, sine, series), tl.where(odd, sine_low, series_low)


# ---------------------------------------------------------------------- the nearest whole number


@triton.jit
def off_of(log, radius, left, finest, size, error):
    """How far off size times a normal may be. left: 1 - x in units of 2^-36, which `finest` may be taken off."""
    log_off = error * (log + 1) + 2.0000001 * finest / (left - finest)
    radius_off = 2 * log_off / (radius + tl.sqrt(log_off))
    off = 1.0000001 * tl.abs(size) * (radius_off + radius * (error + 7 * finest * 3.725290298461914e-09))
    return tl.where(left > finest, off, float("inf"))


@triton.jit
def decide(v, v_low, off):
    """v rounded, and whether that is certain where it may be so far off."""
    whole = tl.floor(v + 0.5)
    above = v - whole
    beyond = (tl.abs(above) - 0.5) + tl.where(above < 0, -v_low, v_low)
    whole = tl.where(beyond > 0, tl.where(above < 0, whole - 1, whole + 1), whole)
    return whole, tl.abs(beyond) > off


@triton.jit
def normal_by_bits(word, circle, odd, size, error):
    """size * N in float64, and how far off it may be. word, circle: of a pair, uint32."""
    x, point = first_digits(word, circle)
    left = 68719476736.0 - x
    log = -2.0 * tl.log(left * 1.4551915228366852e-11)
    radius = tl.sqrt(log)
    y = point * 7.314590396335798e-10  # pi / 2^32
    turned = tl.where((circle >> 31) != 0, -radius, radius)
    v = turned * tl.where(odd, tl.sin(y), tl.cos(y)) * size
    return v, off_of(log, radius, left, tl.zeros_like(v) + 1.0, size, error)


@triton.jit
def by_bits(word, circle, odd, part, size):
    """part + size * N rounded, in float64, and whether that is certain."""
    v, off = normal_by_bits(word, circle, odd, size, ERROR)
    return decide(v + part, tl.zeros_like(v), off + ERROR)


@triton.jit
def first_bits(word, circle):
    """1 - x in units of 2^-36 and the angle in half circles, as pairs, as far as the first block has them."""
    x, point = first_digits(word, circle)
    left, y = 68719476736.0 - x, point * 2.3283064365386963e-10
    return left, tl.zeros_like(left), y, tl.zeros_like(y)


@triton.jit
def more_bits(u, u_low, y, y_low, x_word, y_word, unit):
    """Those of one level: words uint32 of so many units."""
    nothing = tl.zeros_like(u)
    u, u_low = add(u, u_low, x_word.to(tl.float64) * -unit, nothing)
    y, y_low = add(y, y_low, y_word.to(tl.float64) * (unit * 7.450580596923828e-09), nothing)
    return u, u_low, y, y_low


@triton.jit
def normal_by_more_bits(u, u_low, y, y_low, circle, odd, size, error):
    """As `normal_by_bits`, by pairs of float64."""
    nothing = tl.zeros_like(u)
    log, log_low = minus_two_log(u, u_low)
    radius, radius_low = root(log, log_low)
    at, at_low = coordinate(y, y_low, odd)
    v, v_low = multiply(radius, radius_low, at, at_low)
    turned = (circle >> 31) != 0
    v, v_low = multiply(tl.where(turned, -v, v), tl.where(turned, -v_low, v_low), nothing + size, nothing)
    return v, v_low, off_of(log, radius, u, nothing + FINEST, size, error)


@triton.jit
def by_more_bits(u, u_low, y, y_low, circle, odd, part, size):
    """As `by_bits`, by pairs of float64."""
    v, v_low, off = normal_by_more_bits(u, u_low, y, y_low, circle, odd, size, FINE_ERROR)
    v, v_low = add(v, v_low, part, tl.zeros_like(part))
    return decide(v, v_low, off + FINE_ERROR)
