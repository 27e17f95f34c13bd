// Normals from the key stream, as csrc/fastdp.h defines them: ChaCha20 (RFC 8439), then Box & Muller (1958).
#pragma once

#include "common.cuh"

namespace fastdp {

constexpr int LANES = 64, SLOTS = 8, TILE = LANES * SLOTS;  // FASTDP_LANES, ...: see fastdp.h
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

// -2 ln U, U = (2^32 high + low + 1) / 2^64 in (0, 1]. Below 3/4 by the hardware's logarithm (relative error 4e-7 at
// most), above from 1 - U, which the complement of the bits gives exactly: at U = 1 nothing cancels.
FASTDP_INLINE float minus_two_log(uint32_t high, uint32_t low) {
    const bool near_one = high >= 0xc0000000u;
    const uint32_t flip = near_one ? 0xffffffffu : 0u;
    const float v = __ull2float_rn((uint64_t)(high ^ flip) << 32 | (low ^ flip)) * 0x1p-64f;  // 1 - U, or U - 2^-64
    // -2 ln(1 - v) / v on [0, 1/4], a polynomial through Chebyshev's nodes: 5e-9
    float q = 0x1.55ec42p-1f;
    q = fmaf(q, v, 0x1.6eaceep-3f);
    q = fmaf(q, v, 0x1.b6c9fep-2f);
    q = fmaf(q, v, 0x1.fd5148p-2f);
    q = fmaf(q, v, 0x1.556420p-1f);
    q = fmaf(q, v, 0x1.ffffc4p-1f);
    q = fmaf(q, v, 2.0f);
    return near_one ? q * v : fast_log2(v + 0x1p-64f) * -0x1.62e430p+0f;
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

// Two normals of a pair's words w[0] .. w[3], in float: within 7e-7 of the radius of the exact ones.
FASTDP_INLINE void box_muller(const uint32_t *w, float &even, float &odd) {
    const float radius = fast_sqrt_normal(minus_two_log(w[1], w[0]));
    // the upper 52 bits, less half of their range, as a signed integer: an angle in [-1/2, 1/2) of half a circle
    const int64_t angle = (int64_t)((uint64_t)(w[3] ^ 0x80000000u) << 32 | (w[2] & 0xfffff000u));
    float cosine, sine;
    cosine_sine(__ll2float_rn(angle) * 0x1p-64f, cosine, sine);
    const float turned = __uint_as_float(__float_as_uint(radius) | w[2] << 31);  // the last bit: half a circle
    even = turned * cosine, odd = turned * sine;
}

// The same in double, for float64 data.
FASTDP_INLINE void box_muller(const uint32_t *w, double &even, double &odd) {
    const double u = fma((double)w[1], 0x1p32, (double)w[0] + 1.0) * 0x1p-64;
    const double radius = sqrt(-2.0 * log(u));
    const int64_t angle = (int64_t)((uint64_t)(w[3] ^ 0x80000000u) << 32 | (w[2] & 0xfffff000u));
    double cosine, sine;
    sincospi((double)angle * 0x1p-64, &sine, &cosine);
    const double turned = w[2] & 1 ? -radius : radius;
    even = turned * cosine, odd = turned * sine;
}

}  // namespace fastdp
