// Normals of earlier steps, drawn again: of correlated noise, an element takes a share of each.
//
// A thread adds up those of its block of the key stream, draw after draw, in shared memory that no other thread reads:
// registers are left to the tile's own draw, which comes last.
#pragma once

#include "keystream.cuh"

namespace fastdp {

constexpr int THREADS = 256;
constexpr int DRAWS_PER_LAUNCH = 256;  // by kernel arguments: 4 KB

struct alignas(16) Earlier {
    Nonce nonce;
    double size;  // its weight times std, in grids
};

// Independent noise.
struct NoPast {
    static constexpr int AHEAD = 3;
    struct Options {};
    struct Draws {
        FASTDP_INLINE int count() const { return 0; }
        FASTDP_INLINE double size(int) const { return 0; }
        FASTDP_INLINE Nonce nonce(int) const { return {}; }
    };
    FASTDP_INLINE explicit NoPast(const Options &) {}
    FASTDP_INLINE void gather(const Key &, uint64_t) {}
    FASTDP_INLINE Draws draws() const { return {}; }
    template <typename Number>
    FASTDP_INLINE Number sum(int, Number part) const {
        return part;
    }
    template <typename Number>
    FASTDP_INLINE Number limit(int, Number own) const {
        return own;
    }
};

// What is multiplied. per_radius: how far off a normal is, times its radius: as in `release`, and for each sum that it is
// in. left_open: what the bits of x leave of all these.
template <typename Number>
struct PastOptions {
    const Earlier *table;
    int count;
    Number per_radius, left_open;
};

template <typename Number>
class Past {
  public:
    static constexpr int AHEAD = 2;
    using Options = PastOptions<Number>;
    struct Draws {
        const Earlier *table;
        int number;
        FASTDP_INLINE int count() const { return number; }
        FASTDP_INLINE double size(int j) const { return table[j].size; }
        FASTDP_INLINE Nonce nonce(int j) const { return table[j].nonce; }
    };

    FASTDP_INLINE explicit Past(const Options &options) : o(options) {
        __shared__ Number held[(SLOTS + PAIRS) * THREADS];
        sums = held + threadIdx.x, radii = sums + SLOTS * THREADS;
    }

    FASTDP_INLINE void gather(const Key &key, uint64_t counter) {
#pragma unroll
        for (int k = 0; k < SLOTS + PAIRS; ++k) sums[k * THREADS] = 0;
        far = 0;
#pragma unroll 1
        for (int j = 0; j < o.count; ++j) {
            uint32_t words[16];
            chacha20_block(key, o.table[j].nonce, counter, words);
            const Number size = (Number)o.table[j].size;
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                Point<Number> point;
                box_muller(words, pair, point);
                if (!is_within_reach((Number)fabs(point.turned), (Number)1)) far |= 1u << pair;
                point.turned *= size;
                Number *even = sums + 2 * pair * THREADS, *odd = even + THREADS;
                *even = fma(point.turned, point.cosine, *even), *odd = fma(point.turned, point.sine, *odd);
                radii[pair * THREADS] += fabs(point.turned);
            }
        }
    }

    FASTDP_INLINE Draws draws() const { return {o.table, o.count}; }
    FASTDP_INLINE Number sum(int slot, Number part) const { return part + sums[slot * THREADS]; }

    // How far from a whole number a sum may be, of which `own` is the limit without these: never where it is below 0.
    FASTDP_INLINE Number limit(int slot, Number own) const {
        if (far >> (slot / 2) & 1) return -1;
        return fma(radii[slot / 2 * THREADS], -o.per_radius, own - o.left_open);
    }

  private:
    const Options &o;
    Number *sums, *radii;  // [SLOTS] and [PAIRS], THREADS apart
    unsigned far;          // pairs with a radius out of reach
};

// The table comes by kernel arguments, as that of `prepare_step`.
struct DrawBatch {
    uint64_t step[DRAWS_PER_LAUNCH];
    double size[DRAWS_PER_LAUNCH];
};

static __global__ void prepare_draws(const __grid_constant__ DrawBatch batch, int count, Earlier *table,
                                     const int64_t *counter) {
    const int i = (int)threadIdx.x;
    const uint64_t more = counter != nullptr ? (uint64_t)*counter : 0;
    if (i < count) table[i] = {nonce_of(batch.step[i] + more), batch.size[i]};
}

// ---------------------------------------------------------------- host

// Whether normals of earlier steps take part.
inline bool is_correlated(const fastdp_cuda_draw &draw) { return draw.std != 0 && draw.earlier > 0; }

// Lays the draws out in device memory, but for those without weight. size: of std, in grids.
template <typename Number>
fastdp_cuda_status lay_out_draws(const fastdp_cuda_draw &draw, Number size, Earlier *table, cudaStream_t stream,
                                 PastOptions<Number> &options) {
    DrawBatch batch;
    double weights = 0;
    int waiting = 0, count = 0;
    for (int64_t j = 0; j < draw.earlier; ++j) {
        if (draw.earlier_weights[j] != 0) {
            batch.step[waiting] = draw.earlier_steps[j], batch.size[waiting] = (double)size * draw.earlier_weights[j];
            weights += fabs(draw.earlier_weights[j]), ++waiting;
        }
        if (waiting == 0 || (waiting < DRAWS_PER_LAUNCH && j + 1 < draw.earlier)) continue;
        FASTDP_LAUNCH(prepare_draws, 1, DRAWS_PER_LAUNCH, stream, batch, waiting, table + count, draw.counter);
        const fastdp_cuda_status status = launched("prepare_draws");
        if (status.kernel != nullptr) return status;
        count += waiting, waiting = 0;
    }
    options = {table, count, (Number)(9e-7 + 6e-8 * (count + 2)), (Number)(LEFT_OPEN * weights)};
    return {nullptr, nullptr};
}

}  // namespace fastdp
