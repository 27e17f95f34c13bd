// Gradients of table look-ups: norms by segments of equal ids, and the clipped sum, without atomics.
#include "types.h"

#include <algorithm>

namespace {

constexpr int COLUMNS = FASTDP_COLUMNS, LANES = 16;

CLONES void add_row(double *__restrict sum, const double *__restrict row, int n) {
    for (int j = 0; j < n; ++j) sum[j] += row[j];
}

CLONES void widen(double *__restrict out, const float *__restrict row, int n) {
    for (int j = 0; j < n; ++j) out[j] = row[j];
}

CLONES double squares(const double *x, int n) {
    double lanes[LANES] = {};
    int j = 0;
    for (; j + LANES <= n; j += LANES) {
        for (int l = 0; l < LANES; ++l) lanes[l] += x[j + l] * x[j + l];
    }
    for (int l = 0; j < n; ++j, ++l) lanes[l] += x[j] * x[j];
    double sum = 0;
    for (int l = 0; l < LANES; ++l) sum += lanes[l];
    return sum;
}

CLONES void add_scaled(float *__restrict out, const float *__restrict row, float c, int64_t n) {
    for (int64_t j = 0; j < n; ++j) out[j] += c * row[j];
}

CLONES void add_scaled(double *__restrict out, const double *__restrict row, double c, int64_t n) {
    for (int64_t j = 0; j < n; ++j) out[j] += c * row[j];
}

void row_of(int type, const void *g, int64_t at, int n, double *row) {
    if (type == FASTDP_FLOAT32) {
        widen(row, (const float *)g + at, n);
    } else {
        fastdp::load(type, g, at, n, row);
    }
}

template <class T>
void scatter(const int64_t *ids, const void *g, int type, const T *c, int64_t batch, int64_t k, int64_t d,
             int has_padding, int64_t padding, T *out, int64_t low, int64_t high) {
    T copy[COLUMNS];
    for (int64_t b = 0; b < batch; ++b) {
        if (c[b] == 0) continue;
        for (int64_t t = b * k; t < (b + 1) * k; ++t) {
            if (has_padding && ids[t] == padding) continue;
            T *row = out + ids[t] * d;
            if (type == fastdp::type_of<T>()) {
                add_scaled(row + low, (const T *)g + t * d + low, c[b], high - low);
                continue;
            }
            for (int64_t j = low; j < high; j += COLUMNS) {
                const int n = (int)std::min<int64_t>(COLUMNS, high - j);
                fastdp::load(type, g, t * d + j, n, copy);
                add_scaled(row + j, copy, c[b], n);
            }
        }
    }
}

template <class T>
void clipped_sum(const int64_t *ids, const void *g, int type, const T *c, int64_t batch, int64_t k, int64_t d,
                 int64_t rows, int has_padding, int64_t padding, T *out, int add, int threads) {
    const int64_t size = rows * d, blocks = (d + LANES - 1) / LANES;
    const int fillers = (int)std::max<int64_t>(1, std::min<int64_t>(threads, size >> 16));
    if (!add) {
#pragma omp parallel for schedule(static) num_threads(fillers) if (fillers > 1)
        for (int part = 0; part < fillers; ++part) {
            const int64_t low = size / fillers * part, high = part + 1 == fillers ? size : size / fillers * (part + 1);
            std::memset((void *)(out + low), 0, (size_t)(high - low) * sizeof(T));
        }
    }
    // A thread owns columns: every element is summed in the order of positions.
    const int64_t wanted = std::min<int64_t>(blocks, batch * k * d >> 14);
    const int team = (int)std::max<int64_t>(1, std::min<int64_t>(threads, wanted));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int part = 0; part < team; ++part) {
        const int64_t low = std::min(d, blocks * part / team * LANES);
        const int64_t high = std::min(d, blocks * (part + 1) / team * LANES);
        scatter(ids, g, type, c, batch, k, d, has_padding, padding, out, low, high);
    }
}

}  // namespace

extern "C" {

int64_t fastdp_first_outside(const int64_t *ids, int64_t n, int64_t rows) {
    for (int64_t i = 0; i < n; ++i) {
        if ((uint64_t)ids[i] >= (uint64_t)rows) return i;
    }
    return -1;
}

void fastdp_embedding_norm_sq(const int64_t *ids, const void *g, int type, int64_t batch, int64_t k, int64_t d,
                              int has_padding, int64_t padding, int64_t *order, double *parts, double *out,
                              int threads) {
    const int64_t blocks = (d + COLUMNS - 1) / COLUMNS;
    const int team = (int)std::max<int64_t>(1, std::min<int64_t>(threads, batch * k * d >> 14));
#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t *mine = ids + b * k;
            for (int64_t t = 0; t < k; ++t) order[b * k + t] = t;
            std::sort(order + b * k, order + (b + 1) * k, [mine](int64_t s, int64_t t) {
                return mine[s] < mine[t] || (mine[s] == mine[t] && s < t);
            });
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < batch * blocks; ++task) {
            const int64_t b = task / blocks, low = task % blocks * COLUMNS, *mine = ids + b * k, *next = order + b * k;
            const int n = (int)std::min<int64_t>(COLUMNS, d - low);
            double sum[COLUMNS], row[COLUMNS], total = 0;
            for (int64_t i = 0; i < k;) {
                const int64_t id = mine[next[i]];
                if (has_padding && id == padding) {
                    while (i < k && mine[next[i]] == id) ++i;
                    continue;
                }
                row_of(type, g, (b * k + next[i++]) * d + low, n, sum);
                for (; i < k && mine[next[i]] == id; ++i) {
                    row_of(type, g, (b * k + next[i]) * d + low, n, row);
                    add_row(sum, row, n);
                }
                total += squares(sum, n);
            }
            parts[task] = total;
        }
    }
    for (int64_t b = 0; b < batch; ++b) {
        out[b] = 0;
        for (int64_t block = 0; block < blocks; ++block) out[b] += parts[b * blocks + block];
    }
}

void fastdp_embedding_clipped_sum(const int64_t *ids, const void *g, int type, const void *c, int64_t batch, int64_t k,
                                  int64_t d, int64_t rows, int has_padding, int64_t padding, void *out, int out_type,
                                  int add, int threads) {
    if (out_type == FASTDP_FLOAT64) {
        clipped_sum(ids, g, type, (const double *)c, batch, k, d, rows, has_padding, padding, (double *)out, add,
                    threads);
    } else {
        clipped_sum(ids, g, type, (const float *)c, batch, k, d, rows, has_padding, padding, (float *)out, add,
                    threads);
    }
}

}  // extern "C"
