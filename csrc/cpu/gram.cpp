#include "gram.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif

namespace fastdp {

CLONES void gram_reduce(const GramScratch &my, int64_t rows, int64_t cols, bool diagonal, double *out) {
    double total = 0, spread = 0;
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t s = 0; s < cols && (!diagonal || s <= t); s += SLIVER) {
            const int64_t cell = (t / HALF * SLIVERS + s / SLIVER) * CELL + t % HALF * SLIVER;
            const double *a = my.a + cell, *h = my.h + cell, *col_a = my.col_a + s, *col_h = my.col_h + s;
            const double row_a = my.row_a[t], row_h = my.row_h[t];
            const int64_t last = min64(SLIVER, (diagonal ? t + 1 : cols) - s);
            double sum[SLIVER] = {}, square[SLIVER] = {};
            if (last == SLIVER)
#pragma omp simd
                for (int c = 0; c < SLIVER; ++c) {
                    sum[c] = a[c] * h[c];
                    square[c] = row_a * col_a[c] * (h[c] * h[c]) + row_h * col_h[c] * (a[c] * a[c]);
                }
            else
                for (int64_t c = 0; c < last; ++c) {
                    sum[c] = a[c] * h[c];
                    square[c] = row_a * col_a[c] * (h[c] * h[c]) + row_h * col_h[c] * (a[c] * a[c]);
                }
            for (int c = 0; c < SLIVER; ++c) total += 2 * sum[c], spread += 2 * square[c];
            if (diagonal && last <= SLIVER && s + last == t + 1) total -= sum[last - 1], spread -= square[last - 1];
        }
    out[0] = total, out[1] = spread;
}

int64_t gram_finish(const double *parts, int64_t batch, int64_t blocks, double rounding, double tolerance,
                    double smallest, double *norm_sq, uint8_t *doubt) {
    int64_t count = 0;
    for (int64_t b = 0; b < batch; ++b) {
        double total = 0, spread = 0;
        for (int64_t i = 0; i < blocks; ++i) {
            total += parts[(b * blocks + i) * 2];
            spread += parts[(b * blocks + i) * 2 + 1];
        }
        norm_sq[b] = total;
        doubt[b] = !(rounding * std::sqrt(spread) <= tolerance * total) || total < smallest;
        count += doubt[b];
    }
    return count;
}

}  // namespace fastdp
