// Gaussian noise of tiles, drawn and spent in one pass: what noise.cpp and step.cpp share.
//
// A tile is 512 elements of the global index (see fastdp.h). It is worked off in groups of W blocks, one block a
// SIMD lane. While the rounds of ChaCha20 for one group run, which keep the integer units busy, the words of the
// group before become normals and are spent on their elements, which keeps divider, square root and memory busy:
// the two need nothing of each other, so the processor overlaps them.
//
// Only IEEE operations, fma where it is written and nowhere else (-ffp-contract=off): every instruction set gives
// the same bits.
#ifndef FASTDP_CPU_NOISE_H
#define FASTDP_CPU_NOISE_H

#include "../fastdp.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#define INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FASTDP_X86 1
#include <immintrin.h>
#endif

namespace fastdp {

constexpr int LANES = FASTDP_LANES, SLOTS = FASTDP_SLOTS, TILE = FASTDP_TILE;
constexpr int64_t TILES_PER_THREAD = 32;  // less is not worth waking a thread

int instruction_set();  // 0 plain, 1 AVX2 and FMA, 2 AVX-512: what this processor has, or less where a test says so

// ---------------------------------------------------------------- types in memory

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
    return std::is_same<T, float>::value ? FASTDP_F32 : FASTDP_F64;
}

INLINE int size_of(int type) { return type == FASTDP_F64 ? 8 : type == FASTDP_F32 ? 4 : 2; }

template <class T>
__attribute__((noinline)) void load(int type, const void *from, int64_t at, int count, T *to) {
    if (type == FASTDP_F32) {
        for (int i = 0; i < count; ++i) to[i] = (T)((const float *)from)[at + i];
    } else if (type == FASTDP_F64) {
        for (int i = 0; i < count; ++i) to[i] = (T)((const double *)from)[at + i];
    } else if (type == FASTDP_BF16) {
        for (int i = 0; i < count; ++i) to[i] = (T)from_bf16(((const uint16_t *)from)[at + i]);
    } else {
        for (int i = 0; i < count; ++i) to[i] = (T)from_f16(((const uint16_t *)from)[at + i]);
    }
}

template <class T>
__attribute__((noinline)) void store(int type, const T *from, int count, void *to, int64_t at) {
    if (type == FASTDP_F32) {
        for (int i = 0; i < count; ++i) ((float *)to)[at + i] = (float)from[i];
    } else if (type == FASTDP_F64) {
        for (int i = 0; i < count; ++i) ((double *)to)[at + i] = (double)from[i];
    } else if (type == FASTDP_BF16) {
        for (int i = 0; i < count; ++i) ((uint16_t *)to)[at + i] = to_bf16(to_odd(from[i]));
    } else {
        for (int i = 0; i < count; ++i) ((uint16_t *)to)[at + i] = to_f16(to_odd(from[i]));
    }
}

// ---------------------------------------------------------------- many tensors

template <class T>
struct Tile {  // pointers to element 0 of a tile
    const T *sum;
    T *grad, *param, *first, *second;
};

struct NoUpdate {
    template <int W, class T>
    INLINE void apply(const Tile<T> &, int) const {}
};

// What is to be noised: tensors, and the number of tiles before each, [count + 1].
struct Work {
    const fastdp_tensor *tensors;
    const int64_t *tiles;
    int64_t count;
    uint32_t state[16];  // without the counter
    double std, scale;
    int read, keep;  // whether sums are read, whether the noised gradient is written into them
};

struct Place {
    int64_t tensor, tile;  // which, and which tile of the global index
};

INLINE Place place_of(const Work &work, int64_t number) {
    const int64_t *found = std::upper_bound(work.tiles, work.tiles + work.count + 1, number) - 1;
    const int64_t tensor = found - work.tiles;
    return {tensor, work.tensors[tensor].offset / TILE + (number - *found)};
}

INLINE Place place_after(const Work &work, Place place, int64_t number) {  // number: of the tile wanted
    if (number < work.tiles[place.tensor + 1]) return {place.tensor, place.tile + 1};
    return place_of(work, number);
}

INLINE void count_from(uint32_t *state, int64_t block) {
    state[12] = (uint32_t)block, state[13] = (uint32_t)((uint64_t)block >> 32);
}

alignas(64) inline const double zeros[TILE] = {};

// One array of a tile: where it lies, or a copy of it in the arithmetic's type.
template <class T>
__attribute__((noinline)) T *fetch(void *data, int type, int64_t begin, int from, int to, bool read, T *copy) {
    if (data == nullptr) return nullptr;
    if (type == type_of<T>() && to - from == TILE) return (T *)data + begin;
    if (to - from < TILE || !read) std::memset(copy, 0, TILE * sizeof(T));
    if (read) load(type, data, begin + from, to - from, copy + from);
    return copy;
}

}  // namespace fastdp

// The code for each instruction set: tile.h in a namespace of its own.
#define FASTDP_W 4
#define FASTDP_ISA plain
#include "noise_tile.h"
#undef FASTDP_W
#undef FASTDP_ISA
#ifdef FASTDP_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define FASTDP_W 8
#define FASTDP_ISA avx2
#include "noise_tile.h"
#undef FASTDP_W
#undef FASTDP_ISA
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#define FASTDP_W 16
#define FASTDP_ISA avx512
#include "noise_tile.h"
#undef FASTDP_W
#undef FASTDP_ISA
#pragma GCC pop_options
#endif

namespace fastdp {

template <class T, class Update>
void draw(const Work &work, const Update &update, int threads) {
    const int64_t tiles = work.tiles[work.count];
    const int team = (int)std::max<int64_t>(1, std::min<int64_t>(threads, tiles / TILES_PER_THREAD));
    auto run = plain::draw_tiles<T, Update>;
#ifdef FASTDP_X86
    if (instruction_set() == 1) run = avx2::draw_tiles<T, Update>;
    if (instruction_set() == 2) run = avx512::draw_tiles<T, Update>;
#endif
#pragma omp parallel for schedule(static, 1) num_threads(team) if (team > 1)
    for (int part = 0; part < team; ++part) run(work, update, tiles * part / team, tiles * (part + 1) / team);
}

// Fills `tiles` [count + 1] and the generator's state.
Work work_of(const fastdp_tensor *tensors, int64_t count, int64_t *tiles, const fastdp_noise *noise);

}  // namespace fastdp

#endif
