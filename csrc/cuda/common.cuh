// What the kernels share: number types, launches and their errors, the device guard.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../fastdp_cuda.h"

// tests/emulation defines these for a run on the CPU; nothing else in csrc/cuda knows of it.
#ifndef FASTDP_LAUNCH
#define FASTDP_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#define FASTDP_DEVICE_ASSERT(condition) assert(condition)
#include <cassert>
#endif

namespace fastdp {

#define FASTDP_INLINE __device__ __forceinline__

// ---------------------------------------------------------------- number types

FASTDP_INLINE float widen(float x) { return x; }
FASTDP_INLINE float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
FASTDP_INLINE float widen(__half x) { return __half2float(x); }
FASTDP_INLINE double widen(double x) { return x; }

FASTDP_INLINE void narrow(float &to, float x) { to = x; }
FASTDP_INLINE void narrow(__nv_bfloat16 &to, float x) { to = __float2bfloat16_rn(x); }
FASTDP_INLINE void narrow(__half &to, float x) { to = __float2half_rn(x); }
FASTDP_INLINE void narrow(double &to, double x) { to = x; }

template <typename T>
struct Arithmetic {
    using type = float;
};
template <>
struct Arithmetic<double> {
    using type = double;
};
template <typename T>
using arithmetic = typename Arithmetic<T>::type;  // what is computed in, and the type of sums

// ---------------------------------------------------------------- float instructions that are not IEEE's

// The hardware's own, a few units in the last place off. IEEE versions take 8 instructions or more each.
#ifdef __CUDA_ARCH__
FASTDP_INLINE float fast_log2(float x) {  // relative error 2^-22 outside (1/2, 2), absolute 2^-22.6 within
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FASTDP_INLINE float fast_sqrt(float x) {  // of 0: 0; relative error 2^-23; denormal numbers count
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FASTDP_INLINE float fast_sqrt_normal(float x) {  // the same where x is 0 or no denormal number
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
FASTDP_INLINE float fast_reciprocal(float x) {  // of 0 and denormal numbers: infinity; relative error 2^-23
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#else
FASTDP_INLINE float fast_reciprocal(float x) { return 1.0f / x; }
FASTDP_INLINE float fast_log2(float x) { return log2f(x); }
FASTDP_INLINE float fast_sqrt(float x) { return sqrtf(x); }
FASTDP_INLINE float fast_sqrt_normal(float x) { return sqrtf(x); }
#endif

// A pointer that was read from memory, as one into device memory (it must be, so not NULL): loads and stores need not
// ask what it points at.
template <typename T>
FASTDP_INLINE T *global(void *pointer) {
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(pointer));
#endif
    return (T *)pointer;
}

// ---------------------------------------------------------------- sums of a block

// Sum over the threads of a block in a fixed order; all threads call it, thread 0 gets the sum.
template <int THREADS>
FASTDP_INLINE double block_sum(double value, double *scratch) {
    const int thread = (int)threadIdx.x;
    scratch[thread] = value;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) scratch[thread] += scratch[thread + half];
    }
    __syncthreads();
    return scratch[0];
}

// ---------------------------------------------------------------- host

inline fastdp_cuda_status status_of(const char *kernel, cudaError_t error) {
    if (error == cudaSuccess) return {nullptr, nullptr};
    return {kernel, cudaGetErrorString(error)};
}

inline fastdp_cuda_status launched(const char *kernel) { return status_of(kernel, cudaGetLastError()); }

// The calling thread's current device is `device` while this lives.
class DeviceGuard {
  public:
    explicit DeviceGuard(int device) : device_(device) {
        error = cudaGetDevice(&before_);
        if (error == cudaSuccess && before_ != device) error = cudaSetDevice(device);
    }
    ~DeviceGuard() {
        if (error == cudaSuccess && before_ != device_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard &) = delete;
    DeviceGuard &operator=(const DeviceGuard &) = delete;
    cudaError_t error = cudaSuccess;

  private:
    int device_, before_ = 0;
};

// Blocks for a grid-stride loop over `items` work items, of which a block takes `per_block` at a time.
inline unsigned blocks_for(int64_t items, int64_t per_block, int device, int blocks_per_multiprocessor) {
    int multiprocessors = 1;
    if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        cudaGetLastError();  // then one wave is not known; any number is right
        multiprocessors = 128;
    }
    const int64_t needed = (items + per_block - 1) / per_block, most = (int64_t)multiprocessors * blocks_per_multiprocessor;
    return (unsigned)(needed < 1 ? 1 : needed < most ? needed : most);
}

// Call `f` with a null pointer of the type of that code: what turns a type code into a template argument.
template <typename F>
fastdp_cuda_status with_type(int code, F &&f) {
    switch (code) {
        case FASTDP_FLOAT32: return f((float *)nullptr);
        case FASTDP_BFLOAT16: return f((__nv_bfloat16 *)nullptr);
        case FASTDP_FLOAT16: return f((__half *)nullptr);
        case FASTDP_FLOAT64: return f((double *)nullptr);
        default: return {"(none)", "unknown number type"};
    }
}

}  // namespace fastdp
