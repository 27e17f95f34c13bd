// A matrix product in small tiles, shared by linear.cpp and conv.cpp.
//
// Both operands lie in slivers: 16 rows (or columns) side by side for each k, [K][16] float32. A tile is 8 rows
// (half a sliver) by 1 to 3 slivers of columns: 24 accumulators of 16 lanes. Sums leave float32 for double every
// FLUSH products: rounding in one direction (constant data) then stays below 3e-6 of the sum.
#ifndef FASTDP_TILE_H
#define FASTDP_TILE_H

#include <stdint.h>

#include "../dtypes.h"

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FASTDP_X86 1
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FASTDP_X86 0
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

namespace fastdp {

constexpr int SLIVER = 16, HALF = 8, GROUP = 3;
constexpr int CELL = HALF * SLIVER;  // sums of half a sliver of rows and one of columns: [8][16]
constexpr int64_t FLUSH = 128;

INLINE int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }
INLINE int64_t min64(int64_t x, int64_t y) { return x < y ? x : y; }
INLINE int64_t max64(int64_t x, int64_t y) { return x > y ? x : y; }

// Successive k of the columns' slivers: `count` <= FLUSH of them from `offset` floats, `stride` floats apart.
// The rows' slivers are dense.
struct Line {
    int64_t offset, count;
};

// sums[s][r][c] (+)= sum_k rows[k][r] * cols[s][k][c], r < 8, c < 16, s < slivers <= 3; with `fresh` sums are
// overwritten. rows: [K][16], from the first of the 8. The order of summation depends on `lines` alone.
void multiply(int slivers, const float *rows, const float *const *cols, int64_t stride, const Line *lines,
              int64_t count, bool fresh, double *sums);


// The element `index` of an array of float32, bfloat16 or float16.
INLINE const void *at(const void *data, int type, int64_t index) {
    return (const char *)data + index * (type == FASTDP_FLOAT32 ? 4 : 2);
}

// dst[i] = src[i * stride], i < count
void to_float(const void *src, int type, int64_t stride, int64_t count, float *dst);

// dst[k][r] = src[r * row_stride + k * k_stride] for r < rows <= 16 and k < count; 0 for the other r.
void pack_sliver(const void *src, int type, int64_t row_stride, int64_t k_stride, int rows, int64_t count, float *dst);

// dst[r] += sum_k sliver[k][r]^2, r < 16
void add_squares(const float *sliver, int64_t count, double *dst);

// The sum of squares of sums[r][c], r < rows, c < columns, of a cell.
double square_cell(const double *sums, int rows, int columns);

// out[r * row + c * column] = sums[r][c], r < rows, c < columns, of a cell.
void store_cell(const double *sums, int rows, int columns, float *out, int64_t row, int64_t column);

}  // namespace fastdp

#endif
