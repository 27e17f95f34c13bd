#include "gram.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif

namespace fastdp {

CLONES void gram_reduce(const GramScratch &my, int64_t rows, int64_t cols, bool diagonal, double *out) {
    double sum[SLIVER] = {}, square[SLIVER] = {};  // by column within a sliver: no chain of additions
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t s = 0; s < cols && (!diagonal || s <= t); s += SLIVER) {
            const int64_t cell = (t / HALF * SLIVERS + s / SLIVER) * CELL + t % HALF * SLIVER;
            const double *a = my.a + cell, *h = my.h + cell, *col_a = my.col_a + s, *col_h = my.col_h + s;
            const double row_a = 2 * my.row_a[t], row_h = 2 * my.row_h[t];
            const int64_t last = min64(SLIVER, (diagonal ? t : cols) - s);  // before the diagonal
            if (last == SLIVER)
#pragma omp simd
                for (int c = 0; c < SLIVER; ++c) {
                    sum[c] += 2 * a[c] * h[c];
                    square[c] += row_a * col_a[c] * (h[c] * h[c]) + row_h * col_h[c] * (a[c] * a[c]);
                }
            else
                for (int64_t c = 0; c < last; ++c) {
                    sum[c] += 2 * a[c] * h[c];
                    square[c] += row_a * col_a[c] * (h[c] * h[c]) + row_h * col_h[c] * (a[c] * a[c]);
                }
            if (diagonal && last < SLIVER) {  // A_tt H_tt, once
                sum[last] += a[last] * h[last];
                square[last] += (row_a * col_a[last] * (h[last] * h[last]) + row_h * col_h[last] * (a[last] * a[last])) / 2;
            }
        }
    out[TOTAL] = out[SPREAD] = 0;
    for (int c = 0; c < SLIVER; ++c) out[TOTAL] += sum[c], out[SPREAD] += square[c];
}

int64_t gram_finish(const double *parts, int64_t batch, int64_t blocks, const GramLimits &limits, double *norm_sq,
                    uint8_t *doubt) {
    int64_t count = 0;
    for (int64_t b = 0; b < batch; ++b) {
        double sums[PARTS] = {};
        for (int64_t i = 0; i < blocks; ++i)
            for (int k = 0; k < PARTS; ++k) sums[k] += parts[(b * blocks + i) * PARTS + k];
        norm_sq[b] = sums[TOTAL];
        doubt[b] = limits.doubts(sums);
        count += doubt[b];
    }
    return count;
}

}  // namespace fastdp
