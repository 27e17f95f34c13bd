// Per-sample gradients of the weight and bias of normalisations: one pass over input and output gradient.
// Everything is summed in double, in an order that the number of threads does not change.
#include "types.h"

#include <algorithm>

namespace {

constexpr int COLUMNS = FASTDP_COLUMNS, LANES = 16;

CLONES void add_position(const float *__restrict x, const float *__restrict g, double mean, double rstd,
                         double *__restrict weight, double *__restrict bias, int n) {
    for (int j = 0; j < n; ++j) {
        const double gradient = g[j];
        weight[j] += gradient * ((x[j] - mean) * rstd);
        bias[j] += gradient;
    }
}

CLONES void add_position(const double *__restrict x, const double *__restrict g, double mean, double rstd,
                         double *__restrict weight, double *__restrict bias, int n) {
    for (int j = 0; j < n; ++j) {
        weight[j] += g[j] * ((x[j] - mean) * rstd);
        bias[j] += g[j];
    }
}

template <class T>
INLINE void lanes_of(const T *x, const T *g, double mean, int n, double *weight, double *bias) {
    int j = 0;
    for (; j + LANES <= n; j += LANES) {
        for (int l = 0; l < LANES; ++l) {
            const double gradient = g[j + l];
            weight[l] += gradient * (x[j + l] - mean);
            bias[l] += gradient;
        }
    }
    for (int l = 0; j < n; ++j, ++l) weight[l] += g[j] * (x[j] - mean), bias[l] += g[j];
}

CLONES void add_lanes(const float *x, const float *g, double mean, int n, double *weight, double *bias) {
    lanes_of(x, g, mean, n, weight, bias);
}

CLONES void add_lanes(const double *x, const double *g, double mean, int n, double *weight, double *bias) {
    lanes_of(x, g, mean, n, weight, bias);
}

// A piece of memory as the arithmetic's type: itself, or a copy.
template <class T>
const T *piece(int type, const void *from, int64_t at, int n, T *copy) {
    if (type == fastdp::type_of<T>()) return (const T *)from + at;
    fastdp::load(type, from, at, n, copy);
    return copy;
}

template <class T>
void by_columns(const void *x, const void *g, int type, const T *mean, const T *rstd, int64_t batch, int64_t t,
                int64_t d, T *weight, T *bias, int threads) {
    const int64_t blocks = (d + COLUMNS - 1) / COLUMNS;
    const int team = (int)std::max<int64_t>(1, std::min<int64_t>(threads, batch * t * d >> 14));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t task = 0; task < batch * blocks; ++task) {
        const int64_t b = task / blocks, low = task % blocks * COLUMNS;
        const int n = (int)std::min<int64_t>(COLUMNS, d - low);
        double of_weight[COLUMNS] = {}, of_bias[COLUMNS] = {};
        T copy[2][COLUMNS];
        for (int64_t row = b * t; row < (b + 1) * t; ++row) {
            const T *values = piece(type, x, row * d + low, n, copy[0]), *gradient = piece(type, g, row * d + low, n, copy[1]);
            add_position(values, gradient, mean ? mean[row] : 0.0, rstd[row], of_weight, of_bias, n);
        }
        for (int j = 0; j < n; ++j) {
            if (weight) weight[b * d + low + j] = (T)of_weight[j];
            if (bias) bias[b * d + low + j] = (T)of_bias[j];
        }
    }
}

template <class T>
void by_channels(const void *x, const void *g, int type, const T *mean, const T *rstd, int64_t batch, int64_t channels,
                 int64_t s, int64_t groups, T *weight, T *bias, int threads) {
    const int team = (int)std::max<int64_t>(1, std::min<int64_t>(threads, batch * channels * s >> 14));
    const int64_t of_group = groups ? channels / groups : 1;
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t row = 0; row < batch * channels; ++row) {
        const int64_t group = row / channels * groups + row % channels / of_group;
        double of_weight[LANES] = {}, of_bias[LANES] = {}, w = 0, v = 0;
        T copy[2][COLUMNS];
        for (int64_t low = 0; low < s; low += COLUMNS) {
            const int n = (int)std::min<int64_t>(COLUMNS, s - low);
            const T *values = piece(type, x, row * s + low, n, copy[0]), *gradient = piece(type, g, row * s + low, n, copy[1]);
            add_lanes(values, gradient, mean[group], n, of_weight, of_bias);
        }
        for (int l = 0; l < LANES; ++l) w += of_weight[l], v += of_bias[l];
        if (weight) weight[row] = (T)(w * rstd[group]);
        if (bias) bias[row] = (T)v;
    }
}

}  // namespace

extern "C" {

void fastdp_norm_affine(const void *x, const void *g, int type, const void *mean, const void *rstd, int64_t batch,
                        int64_t t, int64_t d, void *weight, void *bias, int threads) {
    if (type == FASTDP_FLOAT64) {
        by_columns(x, g, type, (const double *)mean, (const double *)rstd, batch, t, d, (double *)weight,
                   (double *)bias, threads);
    } else {
        by_columns(x, g, type, (const float *)mean, (const float *)rstd, batch, t, d, (float *)weight, (float *)bias,
                   threads);
    }
}

void fastdp_group_affine(const void *x, const void *g, int type, const void *mean, const void *rstd, int64_t batch,
                         int64_t channels, int64_t s, int64_t groups, void *weight, void *bias, int threads) {
    if (type == FASTDP_FLOAT64) {
        by_channels(x, g, type, (const double *)mean, (const double *)rstd, batch, channels, s, groups,
                    (double *)weight, (double *)bias, threads);
    } else {
        by_channels(x, g, type, (const float *)mean, (const float *)rstd, batch, channels, s, groups, (float *)weight,
                    (float *)bias, threads);
    }
}

}  // extern "C"
