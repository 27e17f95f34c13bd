// The part of CUDA that csrc/cuda uses, on the CPU, so that g++ compiles the same sources and tests run them without
// a GPU: blocks one after another, the threads of a block as fibers that __syncthreads switches between. The order of
// blocks and threads can be turned round: a result that changes with it is a race.
#pragma once

#include <math.h>
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 threadIdx, blockIdx, gridDim, blockDim;

// ---------------------------------------------------------------- the machine

namespace emulation {

inline bool reversed = false;    // order of blocks and of threads between two barriers
inline int failed_assertions = 0;
inline int next_error = 0;       // what the next cudaGetLastError reports
inline int devices_set = 0;      // calls of cudaSetDevice

constexpr std::size_t STACK = 256 * 1024;

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool started = false, finished = false;
};

inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline Fiber *running = nullptr;
inline const std::function<void()> *body = nullptr;

inline void run_body() {
    (*body)();
    running->finished = true;
    swapcontext(&running->context, &scheduler);
}

inline void resume(Fiber &fiber) {
    if (!fiber.started) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_body, 0);
        fiber.started = true;
    }
    running = &fiber;
    swapcontext(&scheduler, &fiber.context);
    running = nullptr;
}

inline void run_block(unsigned threads) {
    while (fibers.size() < threads) fibers.emplace_back();
    for (unsigned t = 0; t < threads; ++t) fibers[t].started = fibers[t].finished = false;
    for (bool more = true; more;) {  // from one barrier to the next
        more = false;
        for (unsigned k = 0; k < threads; ++k) {
            const unsigned t = reversed ? threads - 1 - k : k;
            if (fibers[t].finished) continue;
            threadIdx = dim3(t);
            resume(fibers[t]);
            more = more || !fibers[t].finished;
        }
    }
}

inline void launch(dim3 grid, unsigned threads, const std::function<void()> &kernel) {
    gridDim = grid, blockDim = dim3(threads), body = &kernel;
    const std::uint64_t blocks = (std::uint64_t)grid.x * grid.y * grid.z;
    for (std::uint64_t k = 0; k < blocks; ++k) {
        const std::uint64_t i = reversed ? blocks - 1 - k : k;
        blockIdx = dim3((unsigned)(i % grid.x), (unsigned)(i / grid.x % grid.y), (unsigned)(i / grid.x / grid.y));
        run_block(threads);
    }
}

}  // namespace emulation

inline void __syncthreads() {
    const dim3 mine = threadIdx;
    swapcontext(&emulation::running->context, &emulation::scheduler);
    threadIdx = mine;
}

// The arguments of a launch are evaluated once, before it, as by CUDA.
#define FASTDP_LAUNCH(kernel, grid, block, stream, ...)                                       \
    ((void)(stream), [](dim3 fastdp_grid, unsigned fastdp_block, auto &&fastdp_call) {        \
        emulation::launch(fastdp_grid, fastdp_block, fastdp_call);                            \
    }(grid, block, [=] { kernel(__VA_ARGS__); }))
#define FASTDP_DEVICE_ASSERT(condition) \
    if (!(condition)) ++emulation::failed_assertions

// ---------------------------------------------------------------- the runtime's functions

typedef int cudaError_t;
typedef void *cudaStream_t;
enum { cudaSuccess = 0, cudaDevAttrMultiProcessorCount = 16 };

inline cudaError_t cudaGetLastError() {
    const int error = emulation::next_error;
    emulation::next_error = 0;
    return error;
}
inline const char *cudaGetErrorString(cudaError_t) { return "an emulated error"; }
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return ++emulation::devices_set, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int *value, int, int) { return *value = 2, cudaSuccess; }

// ---------------------------------------------------------------- device functions

inline std::int64_t min(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
inline float __int2float_rn(int x) { return (float)x; }
inline std::uint32_t __float_as_uint(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline float __double2float_rd(double x) {
    const float nearest = (float)x;
    return (double)nearest > x ? nextafterf(nearest, -INFINITY) : nearest;
}
inline void sincospi(double x, double *sine, double *cosine) {
    *sine = sin(x * 3.14159265358979323846), *cosine = cos(x * 3.14159265358979323846);
}
