#include "tile.h"

#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")  // fused multiply-add: one rounding less; setup.py turns it off for noise
#endif

namespace fastdp {
namespace {

// ---------------------------------------------------------------- multiply

// W floats of a vector register, M rows at once; the tile is covered by (8 / M) * (16 / W) passes that each keep
// M * N accumulators in registers.
template <int W, int M, int N>
INLINE void multiply_tile(const float *rows, const float *const *cols, int64_t stride, const Line *lines,
                          int64_t count, bool fresh, double *sums) {
    typedef float Vector __attribute__((vector_size(4 * W), aligned(4), may_alias));
    alignas(64) float part[N * CELL];
    for (int64_t first = 0, last, passed; first < count; first = last, rows += passed * SLIVER) {
        passed = lines[first].count;
        for (last = first + 1; last < count && passed + lines[last].count <= FLUSH; ++last)
            passed += lines[last].count;
        for (int r = 0; r < HALF; r += M)
            for (int q = 0; q < SLIVER / W; ++q) {
                Vector sum[M][N];
#pragma GCC unroll 8
                for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
                    for (int j = 0; j < N; ++j) sum[i][j] = Vector{};
                const float *a = rows + r;
                for (int64_t l = first; l < last; ++l) {
                    int64_t from = lines[l].offset + q * W;
                    for (int64_t k = lines[l].count; k > 0; --k, from += stride, a += SLIVER) {
                        Vector b[N];
#pragma GCC unroll 3
                        for (int j = 0; j < N; ++j) b[j] = *(const Vector *)(cols[j] + from);
#pragma GCC unroll 8
                        for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
                            for (int j = 0; j < N; ++j) sum[i][j] += a[i] * b[j];
                    }
                }
#pragma GCC unroll 8
                for (int i = 0; i < M; ++i)
#pragma GCC unroll 3
                    for (int j = 0; j < N; ++j) *(Vector *)(part + j * CELL + (r + i) * SLIVER + q * W) = sum[i][j];
            }
        if (fresh)
            for (int i = 0; i < N * CELL; ++i) sums[i] = part[i];
        else
            for (int i = 0; i < N * CELL; ++i) sums[i] += part[i];
        fresh = false;
    }
}

template <int W, int M>
INLINE void multiply_width(int slivers, const float *rows, const float *const *cols, int64_t stride,
                           const Line *lines, int64_t count, bool fresh, double *sums) {
    if (slivers == 3) {
        const float *const three[3] = {cols[0], cols[1], cols[2]};
        multiply_tile<W, M, 3>(rows, three, stride, lines, count, fresh, sums);
    } else if (slivers == 2) {
        const float *const two[2] = {cols[0], cols[1]};
        multiply_tile<W, M, 2>(rows, two, stride, lines, count, fresh, sums);
    } else {
        const float *const one[1] = {cols[0]};
        multiply_tile<W, M, 1>(rows, one, stride, lines, count, fresh, sums);
    }
}

using Multiply = void (*)(int, const float *, const float *const *, int64_t, const Line *, int64_t, bool, double *);

// Not target_clones: each instruction set has its own width, and AVX2 alone has no fused multiply-add.
#if FASTDP_X86
__attribute__((target("avx512f"))) void multiply_avx512(int slivers, const float *rows, const float *const *cols,
                                                        int64_t stride, const Line *lines, int64_t count, bool fresh,
                                                        double *sums) {
    multiply_width<16, 8>(slivers, rows, cols, stride, lines, count, fresh, sums);
}

__attribute__((target("avx2,fma"))) void multiply_avx2(int slivers, const float *rows, const float *const *cols,
                                                       int64_t stride, const Line *lines, int64_t count, bool fresh,
                                                       double *sums) {
    multiply_width<8, 4>(slivers, rows, cols, stride, lines, count, fresh, sums);
}
#endif

void multiply_plain(int slivers, const float *rows, const float *const *cols, int64_t stride, const Line *lines,
                    int64_t count, bool fresh, double *sums) {
    multiply_width<4, 4>(slivers, rows, cols, stride, lines, count, fresh, sums);
}

Multiply best() {
#if FASTDP_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return multiply_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return multiply_avx2;
#endif
    return multiply_plain;
}

const Multiply chosen = best();

// ---------------------------------------------------------------- packing

constexpr int64_t BLOCK = 64;  // k converted at once, where the source is not float32 in order

INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half & 0x7c00u, mantissa = half & 0x3ffu;
    const uint32_t shifted = (uint32_t)(half & 0x7fffu) << 13;
    const uint32_t normal = shifted + (exponent == 0x7c00u ? 0x70000000u : 0x38000000u);
    const float small = (float)(int32_t)mantissa * 0x1p-24f;  // subnormal, by way of an integer
    uint32_t bits;
    std::memcpy(&bits, &small, 4);
    bits = (exponent == 0 ? bits : normal) | sign;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

INLINE float brain_to_float(uint16_t brain) {
    const uint32_t bits = (uint32_t)brain << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

INLINE void convert(const void *source, int type, int64_t stride, int64_t count, float *__restrict dst) {
    if (type == FASTDP_FLOAT32) {
        const float *src = (const float *)source;
        if (stride == 1)
            for (int64_t i = 0; i < count; ++i) dst[i] = src[i];
        else
            for (int64_t i = 0; i < count; ++i) dst[i] = src[i * stride];
        return;
    }
    const uint16_t *src = (const uint16_t *)source;
    if (type == FASTDP_BFLOAT16 && stride == 1) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) dst[i] = brain_to_float(src[i]);
    } else if (type == FASTDP_BFLOAT16) {
        for (int64_t i = 0; i < count; ++i) dst[i] = brain_to_float(src[i * stride]);
    } else if (stride == 1) {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) dst[i] = half_to_float(src[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) dst[i] = half_to_float(src[i * stride]);
    }
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));

#if FASTDP_X86
// Whole cache lines of the rows, 16 x 16 at once: rows that lie a power of two apart share few places in a cache, so a
// line that is come back to is gone by then. Returns how many k were done.
__attribute__((target("avx512f"))) int64_t transpose_avx512(const float *src, int64_t stride, int64_t count,
                                                            float *dst) {
    typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));
    int64_t k = 0;
    for (; k + SLIVER <= count; k += SLIVER) {
        Sixteen x[SLIVER], y[SLIVER];
#pragma GCC unroll 16
        for (int r = 0; r < SLIVER; ++r) x[r] = *(const Sixteen *)(src + r * stride + k);
#pragma GCC unroll 8
        for (int r = 0; r < SLIVER; r += 2) {  // pairs of numbers within each quarter
            y[r] = __builtin_shufflevector(x[r], x[r + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
            y[r + 1] =
                __builtin_shufflevector(x[r], x[r + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
        }
#pragma GCC unroll 4
        for (int r = 0; r < SLIVER; r += 4)  // fours: x[r + i] holds k = i, 4 + i, 8 + i, 12 + i of rows r to r + 3
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                x[r + 2 * i] = __builtin_shufflevector(y[r + i], y[r + 2 + i], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24,
                                                       25, 12, 13, 28, 29);
                x[r + 2 * i + 1] = __builtin_shufflevector(y[r + i], y[r + 2 + i], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11,
                                                           26, 27, 14, 15, 30, 31);
            }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)  // quarters: of rows 0 to 7 and 8 to 15
#pragma GCC unroll 2
            for (int half = 0; half < SLIVER; half += 8) {
                y[half + i] = __builtin_shufflevector(x[half + i], x[half + 4 + i], 0, 1, 2, 3, 16, 17, 18, 19, 4, 5,
                                                      6, 7, 20, 21, 22, 23);
                y[half + 4 + i] = __builtin_shufflevector(x[half + i], x[half + 4 + i], 8, 9, 10, 11, 24, 25, 26, 27,
                                                          12, 13, 14, 15, 28, 29, 30, 31);
            }
        float *to = dst + k * SLIVER;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 2
            for (int q = 0; q < 2; ++q) {
                *(Sixteen *)(to + (8 * q + i) * SLIVER) =
                    __builtin_shufflevector(y[4 * q + i], y[8 + 4 * q + i], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20,
                                            21, 22, 23);
                *(Sixteen *)(to + (8 * q + 4 + i) * SLIVER) =
                    __builtin_shufflevector(y[4 * q + i], y[8 + 4 * q + i], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26,
                                            27, 28, 29, 30, 31);
            }
    }
    return k;
}

const bool wide_registers = (__builtin_cpu_init(), __builtin_cpu_supports("avx512f"));
#endif

// dst[k][r] = src[r][k], r < 16, k < count; rows of src lie `stride` apart.
INLINE void transpose(const float *src, int64_t stride, int64_t count, float *dst) {
    int64_t k = 0;
#if FASTDP_X86
    if (wide_registers) k = transpose_avx512(src, stride, count, dst);
#endif
    for (; k + 4 <= count; k += 4)
        for (int r = 0; r < SLIVER; r += 8) {  // two blocks of 4 x 4 beside each other
            Eight row[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const Four low = *(const Four *)(src + (r + i) * stride + k);
                const Four high = *(const Four *)(src + (r + 4 + i) * stride + k);
                row[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
            }
            const Eight a = __builtin_shufflevector(row[0], row[1], 0, 8, 1, 9, 4, 12, 5, 13);
            const Eight b = __builtin_shufflevector(row[0], row[1], 2, 10, 3, 11, 6, 14, 7, 15);
            const Eight c = __builtin_shufflevector(row[2], row[3], 0, 8, 1, 9, 4, 12, 5, 13);
            const Eight d = __builtin_shufflevector(row[2], row[3], 2, 10, 3, 11, 6, 14, 7, 15);
            float *to = dst + k * SLIVER + r;
            *(Eight *)(to) = __builtin_shufflevector(a, c, 0, 1, 8, 9, 4, 5, 12, 13);
            *(Eight *)(to + SLIVER) = __builtin_shufflevector(a, c, 2, 3, 10, 11, 6, 7, 14, 15);
            *(Eight *)(to + 2 * SLIVER) = __builtin_shufflevector(b, d, 0, 1, 8, 9, 4, 5, 12, 13);
            *(Eight *)(to + 3 * SLIVER) = __builtin_shufflevector(b, d, 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (; k < count; ++k)
        for (int r = 0; r < SLIVER; ++r) dst[k * SLIVER + r] = src[r * stride + k];
}

}  // namespace

void multiply(int slivers, const float *rows, const float *const *cols, int64_t stride, const Line *lines,
              int64_t count, bool fresh, double *sums) {
    chosen(slivers, rows, cols, stride, lines, count, fresh, sums);
}

CLONES void to_float(const void *src, int type, int64_t stride, int64_t count, float *dst) {
    convert(src, type, stride, count, dst);
}

CLONES void pack_sliver(const void *src, int type, int64_t row_stride, int64_t k_stride, int rows, int64_t count,
                        float *dst) {
    if (type == FASTDP_FLOAT32 && k_stride == 1 && rows == SLIVER) {
        transpose((const float *)src, row_stride, count, dst);
    } else if (row_stride == 1 && rows == SLIVER) {
        for (int64_t k = 0; k < count; ++k) convert(at(src, type, k * k_stride), type, 1, SLIVER, dst + k * SLIVER);
    } else if (row_stride == 1) {
        for (int64_t k = 0; k < count; ++k) {
            convert(at(src, type, k * k_stride), type, 1, rows, dst + k * SLIVER);
            for (int r = rows; r < SLIVER; ++r) dst[k * SLIVER + r] = 0;
        }
    } else {
        alignas(64) float block[SLIVER * BLOCK];
        std::memset(block + rows * BLOCK, 0, sizeof(float) * (SLIVER - rows) * BLOCK);
        for (int64_t k = 0; k < count; k += BLOCK) {
            const int64_t some = min64(BLOCK, count - k);
            for (int r = 0; r < rows; ++r)
                convert(at(src, type, r * row_stride + k * k_stride), type, k_stride, some, block + r * BLOCK);
            transpose(block, BLOCK, some, dst + k * SLIVER);
        }
    }
}

CLONES void add_squares(const float *sliver, int64_t count, double *dst) {
    for (int64_t k = 0; k < count; k += FLUSH) {
        float sum[SLIVER] = {};
        for (int64_t i = k; i < min64(count, k + FLUSH); ++i)
#pragma omp simd
            for (int r = 0; r < SLIVER; ++r) sum[r] += sliver[i * SLIVER + r] * sliver[i * SLIVER + r];
        for (int r = 0; r < SLIVER; ++r) dst[r] += sum[r];
    }
}

CLONES double square_cell(const double *sums, int rows, int columns) {
    double lanes[SLIVER] = {};
    for (int r = 0; r < rows; ++r) {
        const double *row = sums + r * SLIVER;
        if (columns == SLIVER)
#pragma omp simd
            for (int c = 0; c < SLIVER; ++c) lanes[c] += row[c] * row[c];
        else
            for (int c = 0; c < columns; ++c) lanes[c] += row[c] * row[c];
    }
    double sum = 0;
    for (int c = 0; c < SLIVER; ++c) sum += lanes[c];
    return sum;
}

CLONES void store_cell(const double *sums, int rows, int columns, float *out, int64_t row, int64_t column) {
    if (column == 1)
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < columns; ++c) out[r * row + c] = (float)sums[r * SLIVER + c];
    else
        for (int c = 0; c < columns; ++c)
            for (int r = 0; r < rows; ++r) out[c * column + r * row] = (float)sums[r * SLIVER + c];
}

}  // namespace fastdp
