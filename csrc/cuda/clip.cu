// Clip factors from the squared norms of all uses. A thread a sample: the sum over uses has a fixed order.
#include "common.cuh"

namespace fastdp {
namespace {

constexpr int THREADS = 128;
constexpr double SMALLEST = 0x1p-126;  // float's smallest normal number

// c with c * norm <= limit exactly: the quotient in double, less two of its units, rounded down to float.
FASTDP_INLINE float factor_below(double limit, double norm) {
    const double most = 0x1.fffffep127;  // float's largest number
    const float c = __double2float_rd(fmin(limit / norm * (1 - 0x1p-51), most));
    return c >= (float)SMALLEST ? c : 0.0f;
}

template <typename T>
__global__ void clip_factors(const T *norm_sq, int64_t uses, int64_t batch, double limit, int kind, double gamma,
                             double margin, float *factors) {
    const int64_t b = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (b >= batch) return;
    double total = 0;
#pragma unroll 8
    for (int64_t u = 0; u < uses; ++u) total += (double)norm_sq[u * batch + b];
    const bool single = sizeof(T) == 4;
    const bool vanishes = total < (single ? SMALLEST : 0x1p-1022);  // then the norm's rounding is not small beside it
    if (single) total += (double)uses * SMALLEST;                   // squares that may have been lost
    const double norm = sqrt(total) * (1 + margin);
    float c = 0;
    if (isfinite(norm)) {  // and neither negative nor NaN
        if (kind == FASTDP_LOCAL) c = norm <= limit ? 1.0f : factor_below(limit, norm);
        else if (kind == FASTDP_GLOBAL) c = norm <= limit ? 1.0f : 0.0f;
        else if (gamma > 0 || !vanishes) c = factor_below(limit, norm + gamma);
    }
    factors[b] = c;
}

}  // namespace
}  // namespace fastdp

using namespace fastdp;

extern "C" fastdp_cuda_status fastdp_cuda_clip_factors(const void *norm_sq, int type, int64_t uses, int64_t batch,
                                                       double max_grad_norm, int kind, double gamma, double margin,
                                                       float *factors, int device, void *stream) {
    if (batch <= 0) return {nullptr, nullptr};
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("clip_factors", guard.error);
    const unsigned blocks = (unsigned)((batch + THREADS - 1) / THREADS);
    const cudaStream_t on = (cudaStream_t)stream;
    if (type == FASTDP_FLOAT64) {
        FASTDP_LAUNCH(clip_factors<double>, blocks, THREADS, on, (const double *)norm_sq, uses, batch, max_grad_norm,
                      kind, gamma, margin, factors);
    } else {
        FASTDP_LAUNCH(clip_factors<float>, blocks, THREADS, on, (const float *)norm_sq, uses, batch, max_grad_norm,
                      kind, gamma, margin, factors);
    }
    return launched("clip_factors");
}
