// A step of an LSTM or GRU, forward and backward: its product with the state's matrix, which is laid out once for all
// steps, and in one pass what else takes torch a dozen calls on tensors of a few thousand numbers.
#include "threads.h"
#include "tile.h"
#include "types.h"

#include <algorithm>
#include <vector>

namespace {

constexpr int64_t TASK = 4096;  // numbers of a state for a thread

// e^x within 3e-8 of it; beyond -87 .. 88 that of the bound. A NaN stays one.
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    const float n = (x * 1.44269504f + ROUNDING) - ROUNDING;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts: n times the first is exact
    float p = 0.00138368449f;
    p = p * r + 0.0083748158f;
    p = p * r + 0.0416682256f;
    p = p * r + 0.166664202f;
    p = p * r + 0.499999921f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * fastdp::float_of((uint32_t)((int32_t)n + 127) << 23);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Near 0 a polynomial, which keeps small numbers' digits.
INLINE float hyperbolic_tangent(float x) {
    const float size = std::fabs(x), z = x * x, far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    float p = -0.00599320312f;
    p = p * z + 0.0209243472f;
    p = p * z - 0.0538351925f;
    p = p * z + 0.133326639f;
    p = p * z - 0.333333279f;
    return size < 0.64f ? x + x * (z * p) : std::copysign(far, x);
}

CLONES void lstm_row(const float *__restrict x, const float *__restrict product, const float *__restrict cell,
                     int64_t size, float *__restrict gates, float *__restrict cell_after, float *__restrict bent,
                     float *__restrict after) {
    for (int64_t j = 0; j < size; ++j) {
        const float i = sigmoid(x[j] + product[j]), f = sigmoid(x[size + j] + product[size + j]);
        const float g = hyperbolic_tangent(x[2 * size + j] + product[2 * size + j]);
        const float o = sigmoid(x[3 * size + j] + product[3 * size + j]);
        const float c = f * cell[j] + i * g, t = hyperbolic_tangent(c);
        gates[j] = i, gates[size + j] = f, gates[2 * size + j] = g, gates[3 * size + j] = o;
        cell_after[j] = c, bent[j] = t, after[j] = o * t;
    }
}

CLONES void lstm_row_back(const float *__restrict gates, const float *__restrict cell, const float *__restrict bent,
                          const float *__restrict of_state, int64_t size, float *__restrict of_cell,
                          float *__restrict grads) {
    for (int64_t j = 0; j < size; ++j) {
        const float i = gates[j], f = gates[size + j], g = gates[2 * size + j], o = gates[3 * size + j];
        const float h = of_state[j], t = bent[j], c = of_cell[j] + h * (o * (1.0f - t * t));
        grads[j] = c * (g * i * (1.0f - i));
        grads[size + j] = c * (cell[j] * f * (1.0f - f));
        grads[2 * size + j] = c * (i * (1.0f - g * g));
        grads[3 * size + j] = h * (t * o * (1.0f - o));
        of_cell[j] = c * f;
    }
}

CLONES void gru_row(const float *__restrict x, const float *__restrict product, const float *__restrict state,
                    int64_t size, float *__restrict gates, float *__restrict inner, float *__restrict after) {
    for (int64_t j = 0; j < size; ++j) {
        const float r = sigmoid(x[j] + product[j]), z = sigmoid(x[size + j] + product[size + j]);
        const float of_n = product[2 * size + j], n = hyperbolic_tangent(x[2 * size + j] + r * of_n);
        gates[j] = r, gates[size + j] = z, gates[2 * size + j] = n, inner[j] = of_n;
        after[j] = n + z * (state[j] - n);
    }
}

CLONES void gru_row_back(const float *__restrict gates, const float *__restrict inner, const float *__restrict state,
                         const float *__restrict of_state, int64_t size, float *__restrict grads,
                         float *__restrict products, float *__restrict passed) {
    for (int64_t j = 0; j < size; ++j) {
        const float r = gates[j], z = gates[size + j], n = gates[2 * size + j], h = of_state[j];
        const float of_n = h * ((1.0f - z) * (1.0f - n * n));
        grads[j] = products[j] = of_n * (inner[j] * r * (1.0f - r));
        grads[size + j] = products[size + j] = h * ((state[j] - n) * z * (1.0f - z));
        grads[2 * size + j] = of_n, products[2 * size + j] = of_n * r;
        passed[j] += h * z;
    }
}

// Calls step(b) for the samples that go on, and ended(b) for the others.
template <class Step, class Ended>
void each_sample(const uint8_t *active, int64_t batch, int64_t size, int threads, Step step, Ended ended) {
    const int team = (int)std::max<int64_t>(1, std::min<int64_t>({threads, batch, batch * size / TASK}));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t b = 0; b < batch; ++b) {
        if (!active || active[b]) step(b);
        else ended(b);
    }
}

// What came out before the step passes on to the state before, if there is such a step.
INLINE void pass_on(const float *before, int64_t at, int64_t size, float *passed) {
    if (before) std::copy_n(before + at, size, passed + at);
    else std::fill_n(passed + at, size, 0.0f);
}

// Of a sample that has ended: the state's gradient is that of the state before.
INLINE void stay(const float *before, const float *of_state, int64_t at, int64_t size, float *passed) {
    pass_on(before, at, size, passed);
    for (int64_t j = at; j < at + size; ++j) passed[j] += of_state[j];
}

}  // namespace

void fastdp_pack_columns(const float *matrix, int64_t columns, int64_t depth, int64_t column, int64_t row,
                         float *packed, int threads) {
    using namespace fastdp;
    const int64_t slivers = ceil_div(columns, SLIVER);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t s = 0; s < slivers; ++s)
        pack_sliver(matrix + s * SLIVER * column, FASTDP_FLOAT32, column, row,
                    (int)min64(SLIVER, columns - s * SLIVER), depth, packed + s * SLIVER * depth);
}

void fastdp_packed_product(const float *rows, const float *packed, const float *bias, int64_t batch, int64_t depth,
                           int64_t columns, float *packed_rows, float *out, int threads) {
    using namespace fastdp;
    const int64_t slivers = ceil_div(columns, SLIVER), size = SLIVER * depth, groups = ceil_div(slivers, GROUP);
    for (int64_t b = 0; b < batch; b += SLIVER)
        pack_sliver(rows + b * depth, FASTDP_FLOAT32, depth, 1, (int)min64(SLIVER, batch - b), depth,
                    packed_rows + b * depth);
    std::vector<Line> lines;
    for (int64_t k = 0; k < depth; k += FLUSH) lines.push_back({k * SLIVER, min64(FLUSH, depth - k)});
    const int team = (int)max64(1, min64(threads, groups));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < groups; ++job) {
        const int64_t s = job * GROUP;
        const int group = (int)min64(GROUP, slivers - s);
        const float *from = packed + s * size, *const three[GROUP] = {from, from + size, from + 2 * size};
        double sums[GROUP * CELL];
        for (int64_t b = 0; b < batch; b += HALF) {
            multiply(group, packed_rows + b / SLIVER * size + b % SLIVER, three, SLIVER, lines.data(),
                     (int64_t)lines.size(), true, sums);
            for (int j = 0; j < group; ++j) {
                const int64_t first = (s + j) * SLIVER, wide = min64(SLIVER, columns - first);
                for (int64_t r = 0; r < min64(HALF, batch - b); ++r) {
                    float *to = out + (b + r) * columns + first;
                    const float *base = bias ? bias + first : to;
                    const double *sum = sums + j * CELL + r * SLIVER;
                    for (int64_t c = 0; c < wide; ++c) to[c] = base[c] + (float)sum[c];
                }
            }
        }
    }
}

void fastdp_lstm_step(const float *x, const float *product, const float *cell, const float *state,
                      const uint8_t *active, int64_t batch, int64_t size, float *gates, float *cell_after, float *bent,
                      float *after, int threads) {
    each_sample(
        active, batch, size, threads,
        [=](int64_t b) {
            const int64_t at = b * size;
            lstm_row(x + 4 * at, product + 4 * at, cell + at, size, gates + 4 * at, cell_after + at, bent + at,
                     after + at);
        },
        [=](int64_t b) {
            const int64_t at = b * size;
            std::copy_n(cell + at, size, cell_after + at);
            std::copy_n(state + at, size, after + at);
            std::fill_n(bent + at, size, 0.0f);
            std::fill_n(gates + 4 * at, 4 * size, 0.0f);
        });
}

void fastdp_lstm_step_back(const float *gates, const float *cell, const float *bent, const float *of_state,
                           const float *before, const uint8_t *active, int64_t batch, int64_t size, float *of_cell,
                           float *grads, float *passed, int threads) {
    each_sample(
        active, batch, size, threads,
        [=](int64_t b) {
            const int64_t at = b * size;
            pass_on(before, at, size, passed);
            lstm_row_back(gates + 4 * at, cell + at, bent + at, of_state + at, size, of_cell + at, grads + 4 * at);
        },
        [=](int64_t b) {
            const int64_t at = b * size;
            stay(before, of_state, at, size, passed);
            std::fill_n(grads + 4 * at, 4 * size, 0.0f);
        });
}

void fastdp_gru_step(const float *x, const float *product, const float *state, const uint8_t *active, int64_t batch,
                     int64_t size, float *gates, float *inner, float *after, int threads) {
    each_sample(
        active, batch, size, threads,
        [=](int64_t b) {
            const int64_t at = b * size;
            gru_row(x + 3 * at, product + 3 * at, state + at, size, gates + 3 * at, inner + at, after + at);
        },
        [=](int64_t b) {
            const int64_t at = b * size;
            std::copy_n(state + at, size, after + at);
            std::fill_n(gates + 3 * at, 3 * size, 0.0f);
            std::fill_n(inner + at, size, 0.0f);
        });
}

void fastdp_gru_step_back(const float *gates, const float *inner, const float *state, const float *of_state,
                          const float *before, const uint8_t *active, int64_t batch, int64_t size, float *grads,
                          float *products, float *passed, int threads) {
    each_sample(
        active, batch, size, threads,
        [=](int64_t b) {
            const int64_t at = b * size;
            pass_on(before, at, size, passed);
            gru_row_back(gates + 3 * at, inner + at, state + at, of_state + at, size, grads + 3 * at,
                         products + 3 * at, passed + at);
        },
        [=](int64_t b) {
            const int64_t at = b * size;
            stay(before, of_state, at, size, passed);
            std::fill_n(grads + 3 * at, 3 * size, 0.0f);
            std::fill_n(products + 3 * at, 3 * size, 0.0f);
        });
}
