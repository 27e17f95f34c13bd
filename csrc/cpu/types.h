// Numbers as they lie in memory: float32, float64, bfloat16, float16, and the arithmetic's float or double.
#ifndef FASTDP_CPU_TYPES_H
#define FASTDP_CPU_TYPES_H

#include "../fastdp.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#define INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

namespace fastdp {

// The sum of n squares, in double (rows.cpp).
double squares(const float *x, int64_t n);

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

INLINE uint64_t bits_of(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

INLINE double double_of(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}

// To float, the last bit set where that is inexact ("round to odd"): rounding further gives what rounding once would.
INLINE float to_odd(double x) {
    const float f = (float)x;
    const uint32_t b = bits_of(f);
    const bool exact = (double)f == x || x != x, even = (b & 1) == 0;
    const uint32_t moved = std::fabs((double)f) < std::fabs(x) ? b + 1 : b - 1;
    return float_of(!exact && even ? moved : b);
}
INLINE float to_odd(float x) { return x; }

INLINE float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE uint16_t to_bf16(float x) {
    const uint32_t b = bits_of(x), rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : rounded);
}

INLINE float from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);  // also right for subnormal numbers
    return float_of(sign | ((h & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : finite));
}

INLINE uint16_t to_f16(float x) {
    const uint32_t b = bits_of(x), sign = b >> 16 & 0x8000, rest = b & 0x7fffffff;
    const uint32_t normal = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    const uint32_t small = bits_of(float_of(rest) + 0.5f) - 0x3f000000;  // the adder rounds at 2^-24
    uint32_t found = rest < 113u << 23 ? small : normal;
    found = rest >= 0x477ff000 ? 0x7c00 : found;  // 65520 and above, and infinity
    return (uint16_t)(sign | (rest > 0x7f800000 ? 0x7e00 : found));
}

template <class T>
constexpr int type_of() {
    return std::is_same<T, float>::value ? FASTDP_FLOAT32 : FASTDP_FLOAT64;
}

INLINE int size_of(int type) { return type == FASTDP_FLOAT64 ? 8 : type == FASTDP_FLOAT32 ? 4 : 2; }

template <class T>
__attribute__((noinline)) void load(int type, const void *from, int64_t at, int count, T *to) {
    if (type == FASTDP_FLOAT32) {
        for (int i = 0; i < count; ++i) to[i] = (T)((const float *)from)[at + i];
    } else if (type == FASTDP_FLOAT64) {
        for (int i = 0; i < count; ++i) to[i] = (T)((const double *)from)[at + i];
    } else if (type == FASTDP_BFLOAT16) {
        for (int i = 0; i < count; ++i) to[i] = (T)from_bf16(((const uint16_t *)from)[at + i]);
    } else {
        for (int i = 0; i < count; ++i) to[i] = (T)from_f16(((const uint16_t *)from)[at + i]);
    }
}

template <class T>
__attribute__((noinline)) void store(int type, const T *from, int count, void *to, int64_t at) {
    if (type == FASTDP_FLOAT32) {
        for (int i = 0; i < count; ++i) ((float *)to)[at + i] = (float)from[i];
    } else if (type == FASTDP_FLOAT64) {
        for (int i = 0; i < count; ++i) ((double *)to)[at + i] = (double)from[i];
    } else if (type == FASTDP_BFLOAT16) {
        for (int i = 0; i < count; ++i) ((uint16_t *)to)[at + i] = to_bf16(to_odd(from[i]));
    } else {
        for (int i = 0; i < count; ++i) ((uint16_t *)to)[at + i] = to_f16(to_odd(from[i]));
    }
}

}  // namespace fastdp

#endif
