// Gaussian noise of tiles, drawn and spent in one pass: what noise.cpp and step.cpp share.
//
// A tile is 1024 elements of the global index (see fastdp.h). It is worked off in groups of W blocks, one block a
// SIMD lane. While the rounds of ChaCha20 for one group run, which keep the integer units busy, the words of the
// group before become normals and are spent on their elements, which keeps divider, square root and memory busy:
// the two need nothing of each other, so the processor overlaps them.
//
// Only IEEE operations, fma where it is written and nowhere else (-ffp-contract=off): every instruction set gives
// the same bits. In float for float32 and 16-bit numbers, in double for float64 ones.
#ifndef FASTDP_CPU_NOISE_H
#define FASTDP_CPU_NOISE_H

#include "../exact.h"
#include "types.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FASTDP_X86 1
#include <immintrin.h>
#endif

namespace fastdp {

constexpr int LANES = FASTDP_LANES, SLOTS = FASTDP_SLOTS, PAIRS = SLOTS / 2, TILE = FASTDP_TILE;
constexpr int64_t TILES_PER_THREAD = 32;  // less is not worth waking a thread

int instruction_set();  // 0 plain, 1 AVX2 and FMA, 2 AVX-512: what this processor has, or less where a test says so

// ---------------------------------------------------------------- many tensors

template <class T>
struct Tile {  // pointers to element 0 of a tile, and the counter of its first block
    const T *sum;
    T *grad, *param, *first, *second;
    int64_t block;
    T *normals, *doubt;  // of correlated noise: the sum of all draws [TILE], and how far off it may be, a pair [TILE / 2]
};

// An update says how many arrays it has beside the sum, in the order of Tile: the pointers to others are NULL.
struct NoUpdate {
    static constexpr int ARRAYS = 0;
    template <int W, class T>
    INLINE void apply(const Tile<T> &, int) const {}
};

// A draw of an earlier step, which correlated noise takes a share of.
struct Earlier {
    uint32_t state[16];  // without the counter
    double size;         // its weight times std, in grids
};

// What is to be noised: tensors, and the number of tiles before each, [count + 1].
struct Work {
    const fastdp_tensor *tensors;
    const int64_t *tiles;
    int64_t count;
    uint32_t state[16];  // without the counter
    double std, scale;
    int read, keep;  // whether sums are read, whether the noised gradient is written into them
    std::vector<Earlier> earlier;
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

// The radii of which the 36 bits of x leave no more than `left_open` of a grid, of a normal of this weight: from 0.001 to
// the one that one in 2^15 exceeds (fewer, if the weight is less: then more of a radius may be open).
template <class T>
struct Reach {
    T middle, half;
    Reach(double weight = 1) {
        const double longest = std::sqrt(-std::log(std::fabs(weight) * 0x1p-30));
        middle = (T)((longest + 0.001) / 2), half = (T)((longest - 0.001) / 2);
    }
    static double left_open(double weight) { return 2e-5 * std::fmax(std::sqrt(std::fabs(weight)), std::fabs(weight)); }
};

// What is multiplied, in the arithmetic's type: grid, a power of two, and size = std / grid in [64, 128) round
// sum + std N to a multiple of the grid.
template <class T>
struct Amounts {
    T scale, size, per_grid, grid_scaled;  // 1 / grid, grid * scale
    const uint32_t *state;                 // of the generator, without the counter
    bool alone;                            // noise without a sum, not rounded to the grid
    const Earlier *earlier;
    int count;
    T left_open;  // what the 36 bits of x leave of radii within their reach, of all draws
    Reach<T> reach;
};

// A draw of correlated noise.
template <class T>
struct Share {
    T size;        // its weight times std, in grids
    T per_radius;  // of the error: 6e-7 as in noise_pair.h, the rounding of its size, and of each sum that it is in
    Reach<T> reach;
};

template <class T>
INLINE Amounts<T> amounts_of(const Work &work, T) {
    int exponent;
    const double size = std::frexp(work.std, &exponent) * 128;
    Amounts<T> by = {(T)work.scale, (T)size, (T)std::ldexp(1.0, 7 - exponent), (T)std::ldexp(work.scale, exponent - 7),
                     work.state, !work.read, work.earlier.data(), (int)work.earlier.size(), (T)2e-5, 1.0};
    for (const Earlier &draw : work.earlier) by.left_open += (T)Reach<T>::left_open(draw.size / size);
    return by;
}

// Of an earlier draw, or of the own, of number -1. They are added up from the last one on.
template <class T>
INLINE Share<T> share_of(const Amounts<T> &by, int draw) {
    const double size = draw < 0 ? by.size : by.earlier[draw].size;
    const double off = sizeof(T) == sizeof(float) ? 6e-7 + 6e-8 * (draw + 4) : 2e-8;
    return {(T)size, (T)(off * std::fabs(size)), size / by.size};
}

// ChaCha20's state and what of its first round does not depend on the lane: of the first column one sum, of the other
// three all, as the upper half of the counter is one for all blocks of a group.
struct Stream {
    uint32_t state[16], first[16];

    explicit Stream(const uint32_t *given) { std::copy(given, given + 16, state); }

    INLINE void count_from(int64_t block) {
        state[12] = (uint32_t)block, state[13] = (uint32_t)((uint64_t)block >> 32);
        std::copy(state, state + 16, first);
        first[0] += first[4];
        for (int k = 1; k < 4; ++k) {
            uint32_t &a = first[k], &b = first[4 + k], &c = first[8 + k], &d = first[12 + k];
            a += b, d ^= a, d = d << 16 | d >> 16, c += d, b ^= c, b = b << 12 | b >> 20;
            a += b, d ^= a, d = d << 8 | d >> 24, c += d, b ^= c, b = b << 7 | b >> 25;
        }
    }
};

alignas(64) inline const double zeros[TILE] = {};

// What of a tile is one tensor's: its elements [from, to), where element 0 would be the tensor's element `start`.
struct Piece {
    const fastdp_tensor *tensor;
    int64_t start;
    int from, to;
};

INLINE Piece piece_of(const Work &work, Place place) {
    const fastdp_tensor &x = work.tensors[place.tensor];
    const int64_t start = place.tile * TILE - x.offset;
    return {&x, start, (int)std::max<int64_t>(0, -start), (int)std::min<int64_t>(TILE, x.count - start)};
}

// One array of a tile: where it lies, or a copy of its pieces in the arithmetic's type.
template <class T>
__attribute__((noinline)) T *fetch(const std::vector<Piece> &pieces, void *fastdp_tensor::*array, int fastdp_tensor::*type,
                                   bool read, T *copy) {
    const Piece &first = pieces.front();
    const bool whole = first.to - first.from == TILE;
    if (first.tensor->*array == nullptr) return nullptr;
    if (first.tensor->*type == type_of<T>() && whole) return (T *)(first.tensor->*array) + first.start;
    if (!whole || !read) std::memset(copy, 0, TILE * sizeof(T));
    for (const Piece &piece : pieces) {
        const int64_t at = piece.start + piece.from;
        if (read) load(piece.tensor->*type, piece.tensor->*array, at, piece.to - piece.from, copy + piece.from);
    }
    return copy;
}

}  // namespace fastdp

// The code for each instruction set: noise_lanes.h, noise_pair.h and noise_tile.h in a namespace of its own.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wignored-attributes"  // vector types as template arguments
#define FASTDP_W 4
#define FASTDP_ISA plain
#include "noise_lanes.h"
#include "noise_pair.h"
#include "noise_tile.h"
#undef FASTDP_W
#undef FASTDP_ISA
#ifdef FASTDP_X86
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define FASTDP_W 8
#define FASTDP_ISA avx2
#include "noise_lanes.h"
#include "noise_pair.h"
#include "noise_tile.h"
#undef FASTDP_W
#undef FASTDP_ISA
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")
#define FASTDP_W 16
#define FASTDP_ISA avx512
#include "noise_lanes.h"
#include "noise_pair.h"
#include "noise_tile.h"
#undef FASTDP_W
#undef FASTDP_ISA
#pragma GCC pop_options
#endif
#pragma GCC diagnostic pop

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

// Whether std and scale can be multiplied in float with room to spare on both ends; else all is done in double.
INLINE bool fits_float(const fastdp_noise &noise) {
    const auto fits = [](double x) { return x == 0 || (std::fabs(x) >= 0x1p-60 && std::fabs(x) <= 0x1p60); };
    return fits(noise.std) && fits(noise.scale);
}

// Fills `tiles` [count + 1] and the generator's state.
Work work_of(const fastdp_tensor *tensors, int64_t count, int64_t *tiles, const fastdp_noise *noise);

}  // namespace fastdp

#endif
