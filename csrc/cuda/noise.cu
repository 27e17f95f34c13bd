// Noise alone, in place, and the parts of the generator for tests.
#include "tile.cuh"

namespace fastdp {
namespace {

// data = n of the data, or the noise alone without `keep`: then data are not read.
template <typename T>
struct Draw {
    using Number = arithmetic<T>;
    struct Element {
        T value;
    };
    static constexpr int BLOCKS = sizeof(Number) == 8 ? 1 : 3;

    FASTDP_INLINE Element load(int i) const {
        Element e;
        if (keep) e.value = data[i];
        else narrow(e.value, (Number)0);
        return e;
    }
    FASTDP_INLINE Number sum_of(const Element &e) const { return widen(e.value); }
    FASTDP_INLINE const Amounts<Number> &amounts() const { return by; }
    FASTDP_INLINE void store(int i, const Element &, Number n) const { narrow(data[i], n); }

    T *data;
    const Amounts<Number> &by;
    int keep;
};

template <typename T, class Past>
__global__ void __launch_bounds__(THREADS, Draw<T>::BLOCKS)
    noise(T *data, int64_t count, int64_t offset, int64_t first_tile, int64_t end_tile, const __grid_constant__ Key key, Nonce nonce,
          const __grid_constant__ Amounts<arithmetic<T>> by, int keep,
          const __grid_constant__ typename Past::Options earlier) {
    const int64_t groups = (int64_t)gridDim.x * (THREADS / LANES);
    const int64_t group = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LANES;
    Draw<T> rule = {data, by, keep};
    Past past(earlier);
    for (int64_t tile = first_tile + group; tile < end_tile; tile += groups) {
        const int64_t first = tile * TILE - offset + (int)threadIdx.x % LANES;
        rule.data = data + first;
        noisy_tile(rule, past, key, nonce, tile, first, count);
    }
}

// states, words: [16][count]
__global__ void chacha20(const uint32_t *states, uint32_t *words, int64_t count) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    Key key;
    for (int k = 0; k < 8; ++k) key.word[k] = states[(4 + k) * count + i];
    const Nonce nonce = {{states[14 * count + i], states[15 * count + i]}};
    uint32_t x[16];
    chacha20_block(key, nonce, (uint64_t)states[13 * count + i] << 32 | states[12 * count + i], x);
#pragma unroll
    for (int k = 0; k < 16; ++k) words[k * count + i] = x[k];
}

// words: [16][count], normals: [16][count]
template <typename Number>
__global__ void transform(const uint32_t *words, Number *normals, int64_t count) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    uint32_t w[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) w[k] = words[k * count + i];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        Point<Number> point;
        box_muller(w, pair, point);
        normals[2 * pair * count + i] = point.turned * point.cosine;
        normals[(2 * pair + 1) * count + i] = point.turned * point.sine;
    }
}

}  // namespace
}  // namespace fastdp

using namespace fastdp;

extern "C" fastdp_cuda_status fastdp_cuda_noise(void *data, int type, int64_t count, int64_t offset,
                                                const fastdp_cuda_draw *draw, int keep, void *workspace, int device,
                                                void *stream) {
    if (count <= 0) return {nullptr, nullptr};
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("noise", guard.error);
    Key key;
    for (int k = 0; k < 8; ++k) key.word[k] = draw->key[k];
    const int64_t first_tile = offset / TILE, end_tile = (offset + count - 1) / TILE + 1;  // divided once, here
    const unsigned blocks = blocks_for(end_tile - first_tile, THREADS / LANES, device, BLOCKS_PER_MULTIPROCESSOR);
    return with_type(type, [&](auto *typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        using Number = arithmetic<T>;
        const auto by = amounts_of(draw->std, draw->scale, !keep, Number());
        const auto run = [&](auto kernel, const auto &earlier) {
            FASTDP_LAUNCH(kernel, blocks, THREADS, (cudaStream_t)stream, (T *)data, count, offset, first_tile, end_tile,
                          key, nonce_of(draw->step), by, keep, earlier);
            return launched("noise");
        };
        if (!is_correlated(*draw)) return run(noise<T, NoPast>, NoPast::Options());
        PastOptions<Number> earlier;
        const fastdp_cuda_status status =
            lay_out_draws(*draw, by.size, (Earlier *)workspace, (cudaStream_t)stream, earlier);
        return status.kernel != nullptr ? status : run(noise<T, Past<Number>>, earlier);
    });
}

extern "C" fastdp_cuda_status fastdp_cuda_chacha20(const uint32_t *states, uint32_t *words, int64_t count, int device,
                                                   void *stream) {
    if (count <= 0) return {nullptr, nullptr};
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("chacha20", guard.error);
    FASTDP_LAUNCH(chacha20, (unsigned)((count + THREADS - 1) / THREADS), THREADS, (cudaStream_t)stream, states, words,
                  count);
    return launched("chacha20");
}

extern "C" fastdp_cuda_status fastdp_cuda_box_muller(const uint32_t *words, void *normals, int type, int64_t count,
                                                     int device, void *stream) {
    if (count <= 0) return {nullptr, nullptr};
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("box_muller", guard.error);
    const unsigned blocks = (unsigned)((count + THREADS - 1) / THREADS);
    if (type == FASTDP_FLOAT64) {
        FASTDP_LAUNCH(transform<double>, blocks, THREADS, (cudaStream_t)stream, words, (double *)normals, count);
    } else {
        FASTDP_LAUNCH(transform<float>, blocks, THREADS, (cudaStream_t)stream, words, (float *)normals, count);
    }
    return launched("box_muller");
}
