// Normals from the key stream, as csrc/fastdp.h defines them: ChaCha20 (RFC 8439), then Box & Muller (1958).
#pragma once

#include "../exact.h"
#include "common.cuh"

namespace fastdp {

constexpr int LANES = 64, SLOTS = 16, PAIRS = SLOTS / 2, TILE = LANES * SLOTS;  // FASTDP_LANES, ...: see fastdp.h
constexpr uint32_t DOMAIN_NOISE = 0x6e6f;

#ifndef FASTDP_ROUNDS
#define FASTDP_ROUNDS 20  // for estimates of what 12 or 8 would give; nothing else than 20 is fastdp's noise
#endif

// ---------------------------------------------------------------- ChaCha20

struct Key {
    uint32_t word[8];
};

struct Nonce {
    uint32_t word[2];
};

__host__ __device__ inline Nonce nonce_of(uint64_t step) {
    return {{(uint32_t)step, ((uint32_t)(step >> 32) & 0xffffu) | DOMAIN_NOISE << 16}};
}

FASTDP_INLINE uint32_t rotate_left(uint32_t x, int n) { return (x << n) | (x >> (32 - n)); }

FASTDP_INLINE void quarter_round(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
    a += b, d = rotate_left(d ^ a, 16);
    c += d, b = rotate_left(b ^ c, 12);
    a += b, d = rotate_left(d ^ a, 8);
    c += d, b = rotate_left(b ^ c, 7);
}

FASTDP_INLINE void diagonal_round(uint32_t (&x)[16]) {
    quarter_round(x[0], x[5], x[10], x[15]);
    quarter_round(x[1], x[6], x[11], x[12]);
    quarter_round(x[2], x[7], x[8], x[13]);
    quarter_round(x[3], x[4], x[9], x[14]);
}

FASTDP_INLINE void set_state(uint32_t (&x)[16], const Key &key, uint32_t low, uint32_t high, const Nonce &nonce) {
    x[0] = 0x61707865, x[1] = 0x3320646e, x[2] = 0x79622d32, x[3] = 0x6b206574;  // "expand 32-byte k"
#pragma unroll
    for (int k = 0; k < 8; ++k) x[4 + k] = key.word[k];
    x[12] = low, x[13] = high, x[14] = nonce.word[0], x[15] = nonce.word[1];
}

FASTDP_INLINE void column_round(uint32_t (&x)[16]) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[1], x[5], x[9], x[13]);
    quarter_round(x[2], x[6], x[10], x[14]);
    quarter_round(x[3], x[7], x[11], x[15]);
}

// The block of a 64-bit counter. Two of the first round's columns do not depend on the counter: with that round out of
// the loop, the compiler takes them out of a thread's loop over tiles.
FASTDP_INLINE void chacha20_block(const Key &key, const Nonce &nonce, uint64_t counter, uint32_t (&x)[16]) {
    const uint32_t low = (uint32_t)counter, high = (uint32_t)(counter >> 32);
    set_state(x, key, low, high, nonce);
    column_round(x);
    diagonal_round(x);
#pragma unroll 3
    for (int i = 1; i < FASTDP_ROUNDS / 2; ++i) {
        column_round(x);
        diagonal_round(x);
    }
    uint32_t start[16];
    set_state(start, key, low, high, nonce);
#pragma unroll
    for (int k = 0; k < 16; ++k) x[k] += start[k];
}

// ---------------------------------------------------------------- bits to normals

// -2 ln(1 - x), x = (16 high + low) / 2^36. Where x < 1/2 by a polynomial in x: next to x = 0 nothing cancels. Above
// by the hardware's logarithm of 1 - x (relative error 4e-7 at most), of which the sign of `high` gives the negative.
FASTDP_INLINE float minus_two_log(uint32_t high, uint32_t low) {
    const float v = fmaf(__int2float_rn((int)high), 0x1p-32f, (float)low * 0x1p-36f);  // x, or x - 1
    // -2 ln(1 - v) / v on [0, 1/2], a polynomial through Chebyshev's nodes: 4e-9
    float q = 0x1.be5224p+1f;
    q = fmaf(q, v, -0x1.3cfc4ap+2f);
    q = fmaf(q, v, 0x1.f88eeap+1f);
    q = fmaf(q, v, -0x1.2f3dd4p+0f);
    q = fmaf(q, v, 0x1.5c3ad6p-1f);
    q = fmaf(q, v, 0x1.6830eap-2f);
    q = fmaf(q, v, 0x1.01e9dap-1f);
    q = fmaf(q, v, 0x1.5542f6p-1f);
    q = fmaf(q, v, 0x1.00001ep+0f);
    q = fmaf(q, v, 2.0f);
    return v >= 0 ? q * v : fast_log2(-v) * -0x1.62e430p+0f;
}

// cos(pi h) and sin(pi h), |h| <= 1/2, by polynomials through Chebyshev's nodes: absolute errors 2e-8 and 4e-8 before
// rounding.
FASTDP_INLINE void cosine_sine(float h, float &cosine, float &sine) {
    const float q = h * h;
    float c = -0x1.8fb59ap-6f;
    c = fmaf(c, q, 0x1.e126d0p-3f);
    c = fmaf(c, q, -0x1.55d074p+0f);
    c = fmaf(c, q, 0x1.03c1e4p+2f);
    c = fmaf(c, q, -0x1.3bd3ccp+2f);
    cosine = fmaf(c, q, 1.0f);
    float s = 0x1.3e15f6p-4f;
    s = fmaf(s, q, -0x1.32533cp-1f);
    s = fmaf(s, q, 0x1.4668f0p+1f);
    s = fmaf(s, q, -0x1.4abbc4p+2f);
    s = fmaf(s, q, 0x1.921fb6p+1f);
    sine = s * h;
}

// Two normals: turned * (cosine, sine). `turned` is the radius with a sign.
template <typename Number>
struct Point {
    Number turned, cosine, sine;
};

// The point of a pair of the block's words w, in float: its normals are within 7e-7 of the radius of the exact ones.
FASTDP_INLINE void box_muller(const uint32_t *w, int pair, Point<float> &point) {
    const uint32_t circle = w[PAIRS + pair];
    const float radius = fast_sqrt_normal(minus_two_log(w[pair], circle & 15u));
    cosine_sine(fmaf(__int2float_rn((int)(circle << 1 & ~31u)), 0x1p-32f, 0x1p-28f), point.cosine, point.sine);
    point.turned = __uint_as_float(__float_as_uint(radius) ^ (circle & 0x80000000u));
}

// The same in double, for float64 data.
FASTDP_INLINE void box_muller(const uint32_t *w, int pair, Point<double> &point) {
    const uint32_t circle = w[PAIRS + pair];
    const double u = fma((double)w[pair], -0x1p-32, fma((double)(circle & 15u), -0x1p-36, 1.0));  // 1 - x, exactly
    const double radius = sqrt(-2.0 * log(u));
    sincospi(fma((double)(int)(circle << 1 & ~31u), 0x1p-32, 0x1p-28), &point.sine, &point.cosine);
    point.turned = circle >> 31 ? -radius : radius;
}

// ---------------------------------------------------------------- normals to released elements

// What the 36 bits of x leave, in grids, of a normal of size 128, if its radius is within reach; one in 30,000 is not.
constexpr double LEFT_OPEN = 2e-5;

template <typename Number>
FASTDP_INLINE bool is_within_reach(Number radius, Number size) {  // radius: times size
    return radius >= (Number)0.001 * size && radius <= (Number)4.55 * size;
}

// What is multiplied, as by csrc/cpu/noise.h: std = size * grid, size in [64, 128); 1 / grid and grid * scale. Without
// noise the size is 0, and nothing open.
template <typename Number>
struct Amounts {
    Number scale, size, per_grid, grid_scaled;
    int alone;  // noise without a sum, not rounded to the grid
};

// A std of more than 24 bits is rounded up for float: noise is never less than asked for.
template <typename Number>
Amounts<Number> amounts_of(double std, double scale, bool alone, Number) {
    int exponent;
    double mantissa = frexp(std, &exponent);
    if (sizeof(Number) == 4) mantissa = ceil(mantissa * 0x1p24) * 0x1p-24;
    const double size = frexp(ldexp(mantissa, exponent), &exponent) * 128;
    return {(Number)scale, (Number)size, (Number)ldexp(1.0, 7 - exponent), (Number)ldexp(scale, exponent - 7), alone};
}

// n = grid * round(sum / grid + size * normal) * scale, the sum's multiples of the grid apart. False where it is open to
// what v is rounded: next to the middle of two whole numbers by 9e-7 of the radius (7e-7, and some for adding and what
// the angle's 28 bits leave) and LEFT_OPEN, and where the radius is out of reach. past: of earlier steps (past.cuh), what
// else the element's slot takes, and how that moves this bound.
template <typename Number, class Past>
FASTDP_INLINE bool release(Number turned, Number coordinate, Number sum, const Amounts<Number> &by, const Past &past,
                           int slot, Number &n) {
    const Number grids = sum * by.per_grid, whole = rint(grids), part = grids - whole;
    const Number v = fma(turned, coordinate, past.sum(slot, part)), near = rint(v), radius = fabs(turned);
    n = fma(whole + near, by.grid_scaled, (Number)0);  // adding 0 takes the sign off a zero
    if (by.size == 0) return n = sum * by.scale, true;
    if (by.alone) return n = turned * coordinate * by.grid_scaled, true;
    const Number limit = past.limit(slot, fma(radius, (Number)-9e-7, (Number)(0.5 - LEFT_OPEN)));
    return fabs(v - near) <= limit && is_within_reach(radius, by.size);
}

}  // namespace fastdp
