// Rows of numbers, one a sample: sums of their squares, and their weighted sum. Memory is read once; everything is
// added in double, in an order that the number of threads does not change.
#include "types.h"

#include <algorithm>

namespace {

constexpr int64_t PIECE = 1 << 15;  // elements of a row that one task squares
constexpr int LANES = 32;
constexpr int COLUMNS = 1024;  // that one task of the weighted sum works on: its sums stay in the L1 cache

CLONES void add_row(const float *__restrict x, double c, double *__restrict sum, int n) {
    for (int j = 0; j < n; ++j) sum[j] += c * x[j];
}

}  // namespace

namespace fastdp {

CLONES double squares(const float *__restrict x, int64_t n) {
    double lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int l = 0; l < LANES; ++l) {
            const double v = x[i + l];
            lanes[l] += v * v;
        }
    }
    for (int l = 0; i < n; ++i, ++l) lanes[l] += (double)x[i] * x[i];
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    return lanes[0];
}

}  // namespace fastdp

extern "C" {

int64_t fastdp_square_parts(int64_t batch, int64_t n) { return batch * ((n + PIECE - 1) / PIECE); }

void fastdp_square_sum(const float *rows, int64_t batch, int64_t n, int64_t stride, double *parts, double *out,
                       int threads) {
    const int64_t pieces = (n + PIECE - 1) / PIECE, tasks = batch * pieces;
#pragma omp parallel for schedule(static) num_threads(threads) if (tasks > 1 && batch * n > PIECE)
    for (int64_t task = 0; task < tasks; ++task) {
        const int64_t begin = task % pieces * PIECE;
        parts[task] = fastdp::squares(rows + task / pieces * stride + begin, std::min(PIECE, n - begin));
    }
    for (int64_t b = 0; b < batch; ++b) {
        out[b] = 0;
        for (int64_t p = 0; p < pieces; ++p) out[b] += parts[b * pieces + p];
    }
}

void fastdp_weighted_sum(const float *rows, const float *c, int64_t batch, int64_t n, int64_t stride, float *out,
                         int threads) {
    const int64_t tasks = (n + COLUMNS - 1) / COLUMNS;
#pragma omp parallel for schedule(static) num_threads(threads) if (batch * n > PIECE)
    for (int64_t task = 0; task < tasks; ++task) {
        double sum[COLUMNS] = {};
        const int64_t begin = task * COLUMNS;
        const int count = (int)std::min<int64_t>(COLUMNS, n - begin);
        for (int64_t b = 0; b < batch; ++b) {
            if (c[b] != 0) add_row(rows + b * stride + begin, c[b], sum, count);
        }
        for (int j = 0; j < count; ++j) out[begin + j] = (float)sum[j];
    }
}

}  // extern "C"
