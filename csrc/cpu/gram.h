// The gram route: |G|^2 = sum_{t,s} A_ts H_ts with A = a a^T, H = g g^T, by tiles of the triangle s <= t.
#ifndef FASTDP_GRAM_H
#define FASTDP_GRAM_H

#include "tile.h"

#include <algorithm>
#include <cmath>

namespace fastdp {

constexpr int64_t SQUARE = 128;  // positions at most on a side of a block of the T x T matrices
constexpr int64_t SLIVERS = SQUARE / SLIVER;
constexpr double TINY = 1.2e-38;  // what a product of float32 may lose (fastdp/ops/linear.py, `vanished`)

// Of a block: sum of M = A H; sum of (|a_t| |a_s| H_ts)^2 + (A_ts |g_t| |g_s|)^2, which is what the rounding of A and H
// does to M (off the diagonal both count twice); and, of blocks on the diagonal, |a|^2 and |g|^2 of its rows, else 0.
enum { TOTAL = 0, SPREAD = 1, ROWS_A = 2, ROWS_G = 3, PARTS = 4 };

// One thread's memory.
struct GramScratch {
    float rows[SQUARE * FLUSH], cols[SQUARE * FLUSH];  // [8][128][16] each
    double a[SQUARE * SQUARE], h[SQUARE * SQUARE];     // cells: [16 halves][8 slivers][8][16]
    double row_a[SQUARE], row_h[SQUARE], col_a[SQUARE], col_h[SQUARE];  // |a_t|^2 and |g_t|^2
};

// The side of a block: smaller where there would be too few of them for several threads.
INLINE int64_t gram_side(int64_t batch, int64_t positions) {
    return batch * ceil_div(positions, SQUARE) <= 2 && positions > SQUARE / 4 ? SQUARE / 2 : SQUARE;
}

// Blocks of a sample: those of the triangle.
INLINE int64_t gram_blocks(int64_t positions, int64_t side) {
    const int64_t n = ceil_div(positions, side);
    return n * (n + 1) / 2;
}

// products = P P^T over `depth`, P the packed rows [first, first + rows) and columns [start, start + cols) of
// `pack`: pack(first, rows, k, count, dst) fills dst [slivers][count][16], zeros beyond `rows`.
template <typename Pack>
void gram_products(const Pack &pack, int64_t depth, int64_t first, int64_t rows, int64_t start, int64_t cols,
                   GramScratch &my, double *products, double *row_squares, double *col_squares) {
    const bool diagonal = first == start;
    const int64_t halves = ceil_div(rows, HALF), slivers = ceil_div(cols, SLIVER);
    std::fill_n(row_squares, SQUARE, 0.0);
    std::fill_n(col_squares, SQUARE, 0.0);
    for (int64_t k = 0; k < depth; k += FLUSH) {
        const Line line{0, min64(FLUSH, depth - k)};
        pack(first, rows, k, line.count, my.rows);
        if (!diagonal) pack(start, cols, k, line.count, my.cols);
        const float *columns = diagonal ? my.rows : my.cols;
        const int64_t size = line.count * SLIVER;
        for (int64_t s = 0; !diagonal && s < ceil_div(rows, SLIVER); ++s)
            add_squares(my.rows + s * size, line.count, row_squares + s * SLIVER);
        for (int64_t s = 0; !diagonal && s < slivers; ++s)
            add_squares(columns + s * size, line.count, col_squares + s * SLIVER);
        for (int64_t s = 0; s < slivers; s += GROUP)
            for (int64_t r = diagonal ? 2 * s : 0; r < halves; ++r) {
                const int64_t last = diagonal ? min64(slivers, r / 2 + 1) : slivers;
                const int group = (int)min64(GROUP, last - s);
                const float *three[GROUP] = {columns + s * size, columns + (s + 1) * size, columns + (s + 2) * size};
                multiply(group, my.rows + r / 2 * size + r % 2 * HALF, three, SLIVER, &line, 1, k == 0,
                         products + (r * SLIVERS + s) * CELL);
            }
    }
    for (int64_t t = 0; diagonal && t < rows; ++t)  // of a block on the diagonal they stand on its diagonal
        row_squares[t] = col_squares[t] =
            products[(t / HALF * SLIVERS + t / SLIVER) * CELL + t % HALF * SLIVER + t % SLIVER];
}

// out[TOTAL] and out[SPREAD] of the block in `my`.
void gram_reduce(const GramScratch &my, int64_t rows, int64_t cols, bool diagonal, double *out);

// One block of a sample's triangle: `block` counts row by row. depth_a, depth_g: columns of a and of g. out: [PARTS]
template <typename PackA, typename PackG>
void gram_block(const PackA &a, int64_t depth_a, const PackG &g, int64_t depth_g, int64_t positions, int64_t side,
                int64_t block, GramScratch &my, double *out) {
    int64_t row = 0;
    while ((row + 1) * (row + 2) / 2 <= block) ++row;
    const int64_t col = block - row * (row + 1) / 2;
    const int64_t first = row * side, start = col * side;
    const int64_t rows = min64(side, positions - first), cols = min64(side, positions - start);
    gram_products(a, depth_a, first, rows, start, cols, my, my.a, my.row_a, my.col_a);
    gram_products(g, depth_g, first, rows, start, cols, my, my.h, my.row_h, my.col_h);
    gram_reduce(my, rows, cols, row == col, out);
    out[ROWS_A] = out[ROWS_G] = 0;
    for (int64_t r = 0; row == col && r < rows; ++r) out[ROWS_A] += my.row_a[r], out[ROWS_G] += my.row_h[r];
}

// What a caller gives beside the data: columns of a and of g, positions, and when a sample is in doubt.
struct GramLimits {
    int64_t columns_a, columns_g, positions;
    double rounding, tolerance, smallest;

    // Whether rounding, taken as random, or products of float32 that were lost, may exceed `tolerance` of the
    // total; or that is too small, or not finite.
    bool doubts(const double *sums) const {
        const double lost = TINY * positions * (columns_a * sums[ROWS_G] + columns_g * sums[ROWS_A]);
        return !(rounding * std::sqrt(sums[SPREAD]) <= tolerance * sums[TOTAL] && lost <= tolerance * sums[TOTAL] &&
                 sums[TOTAL] >= smallest);
    }
};

// Sums the blocks of each sample in order: parts [batch][blocks][PARTS] -> norm_sq [batch]. Returns how many
// samples are in doubt, and marks them.
int64_t gram_finish(const double *parts, int64_t batch, int64_t blocks, const GramLimits &limits, double *norm_sq,
                    uint8_t *doubt);

}  // namespace fastdp

#endif
