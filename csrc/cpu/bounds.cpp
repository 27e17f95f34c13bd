// Norms enlarged by what rounding may do to the clipped sums: fastdp/ops/bounds.py says why and by how much.
#include "../fastdp.h"
#include "gram.h"
#include "types.h"

#include <cmath>

namespace fastdp {

namespace {

// The sum of squares of one row, of which `start` is the first number.
double row_squares(const fastdp_matrix &m, int64_t start) {
    if (m.type == FASTDP_FLOAT32 && m.column == 1) return squares((const float *)m.data + start, m.columns);
    double sum = 0;
    float memory[FLUSH];
    for (int64_t k = 0; k < m.columns; k += FLUSH) {
        const int64_t count = min64(FLUSH, m.columns - k);
        to_float(at(m.data, m.type, start + k * m.column), m.type, m.column, count, memory);
        sum += squares(memory, count);
    }
    return sum;
}

// sum_t |a_t| |g_t| over the rows of one sample.
double products(const fastdp_matrix &a, const fastdp_matrix &g, int64_t sample, int64_t rows) {
    double sum = 0;
    for (int64_t t = 0; t < rows; ++t)
        sum += std::sqrt(row_squares(a, sample * a.batch + t * a.row) * row_squares(g, sample * g.batch + t * g.row));
    return sum;
}

void enlarge(double size, double units, double tolerance, double &norm_sq, double &bound) {
    bound = units * size;
    const double norm = std::sqrt(norm_sq < 0 ? 0 : norm_sq), more = bound - tolerance * norm;
    if (!(more <= 0)) norm_sq = (norm + more) * (norm + more);  // what is no number stays none
}

}  // namespace

}  // namespace fastdp

using namespace fastdp;

extern "C" {

void fastdp_enlarge_by_data(const fastdp_matrix *a, const fastdp_matrix *g, int64_t batch, int64_t rows, double units,
                            double tolerance, double *norm_sq, double *bound, int threads) {
    const int64_t size = batch * rows * (a->columns + g->columns);
#pragma omp parallel for schedule(static) num_threads(threads) if (batch > 1 && size > (1 << 15))
    for (int64_t b = 0; b < batch; ++b)
        enlarge(products(*a, *g, b, rows), units, tolerance, norm_sq[b], bound[b]);
}

int64_t fastdp_doubted_by_blocks(const double *parts, int64_t batch, int64_t blocks, double units, double tolerance,
                                 const double *norm_sq, double *bound) {
    int64_t count = 0;
    for (int64_t b = 0; b < batch; ++b) {
        double squares_a = 0, squares_g = 0;
        for (int64_t i = 0; i < blocks; ++i) {
            squares_a += parts[(b * blocks + i) * PARTS + ROWS_A];
            squares_g += parts[(b * blocks + i) * PARTS + ROWS_G];
        }
        bound[b] = units * std::sqrt(squares_a * squares_g);
        count += !(bound[b] <= tolerance * std::sqrt(norm_sq[b]));
    }
    return count;
}

}  // extern "C"
