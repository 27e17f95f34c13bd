// Noise and an optimizer's rule for a table of parameters in one launch.
//
// The work is the list of all parameters' tiles, and 64 threads take 4 of them at a time.
#pragma once

#include "tile.cuh"

namespace fastdp {

constexpr int PREPARE_THREADS = 32;
constexpr int TILES_PER_ITEM = 4;             // of 64 threads' work, between two searches of the table
constexpr int64_t ENTRIES_PER_LAUNCH = 448;   // of the table by kernel arguments: 28 KB of the 32 KB there are

// What a step computes once, in device memory before the table, because a counter on the device may take part.
struct alignas(16) Header {
    Nonce nonce;
    double step_size, root;  // AdamW: lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
    float step_size_single, root_single;
};

struct Powers {  // what the header's powers are of; SGD has none
    double lr, beta1, beta2;
    int64_t t;
};

struct Batch {
    fastdp_cuda_entry entry[ENTRIES_PER_LAUNCH];
};

// base^n by squaring: a few roundings of double.
FASTDP_INLINE double power(double base, int64_t n) {
    double result = 1;
    for (; n > 0; n /= 2, base *= base) {
        if (n % 2) result *= base;
    }
    return result;
}

// The table comes by kernel arguments: no copy from the host, so a CUDA graph may hold it. A thread an entry, in small
// blocks: threads that read different arguments wait for each other.
static __global__ void prepare_step(const __grid_constant__ Batch batch, int count, fastdp_cuda_entry *table,
                                    Header *header, uint64_t step, const __grid_constant__ Powers powers,
                                    const int64_t *counter) {
    const int i = (int)(blockIdx.x * PREPARE_THREADS + threadIdx.x);
    if (i < count) table[i] = batch.entry[i];
    if (i == 0) {
        const int64_t more = counter != nullptr ? *counter : 0;
        header->nonce = nonce_of(step + (uint64_t)more);
        header->step_size = powers.lr / (1 - power(powers.beta1, powers.t + more));
        header->root = 1 / sqrt(1 - power(powers.beta2, powers.t + more));
        header->step_size_single = (float)header->step_size, header->root_single = (float)header->root;
    }
}

// The entry that holds this tile of the list: the first whose end lies behind it.
FASTDP_INLINE int find_entry(const fastdp_cuda_entry *table, int count, int64_t tile) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (table[middle].end_tile > tile) high = middle;
        else low = middle + 1;
    }
    return low;
}

template <class Rule, class Past>
static __global__ void __launch_bounds__(THREADS, Rule::BLOCKS)
    noisy_step(const fastdp_cuda_entry *__restrict__ table, int count, const Header *__restrict__ header,
               const __grid_constant__ Key key,
               const __grid_constant__ typename Rule::Options options,  // numbers in the type computed in
               const __grid_constant__ typename Past::Options earlier) {
    const int64_t groups = (int64_t)gridDim.x * (THREADS / LANES);
    const int64_t group = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / LANES;
    const int64_t tiles = table[count - 1].end_tile;
    const Nonce nonce = header->nonce;
    Rule rule(options, *header);
    Past past(earlier);
    for (int64_t begin = group * TILES_PER_ITEM; begin < tiles; begin += groups * TILES_PER_ITEM) {
        int p = find_entry(table, count, begin);
        for (int64_t tile = begin; tile < begin + TILES_PER_ITEM && tile < tiles; ++tile) {
            while (table[p].end_tile <= tile) ++p;
            const fastdp_cuda_entry entry = table[p];
            const int64_t global_tile = tile + entry.tile_shift;
            const int64_t first = global_tile * TILE - entry.offset + (int)threadIdx.x % LANES;
            rule.point_at(entry, first);
            noisy_tile(rule, past, key, nonce, global_tile, first, entry.count);
        }
    }
}

// ---------------------------------------------------------------- host

// Put places of tiles into the entries, so that the kernel need not divide; entries without elements have no tiles.
// Returns the number of tiles.
inline int64_t lay_out(fastdp_cuda_entry *entries, int64_t count) {
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) {
        const fastdp_cuda_entry &entry = entries[i];
        entries[i].tile_shift = entry.offset / TILE - tiles;
        if (entry.count > 0) tiles += (entry.offset + entry.count - 1) / TILE - entry.offset / TILE + 1;
        entries[i].end_tile = tiles;
    }
    return tiles;
}

template <class Rule>
fastdp_cuda_status step_over(const char *name, fastdp_cuda_entry *entries, int64_t count, void *workspace,
                             const fastdp_cuda_draw &draw, const Powers &powers, const typename Rule::Options &options,
                             int device, cudaStream_t stream) {
    const int64_t tiles = lay_out(entries, count);
    if (tiles == 0) return {nullptr, nullptr};
    Header *header = (Header *)workspace;
    fastdp_cuda_entry *table = (fastdp_cuda_entry *)(header + 1);
    for (int64_t begin = 0; begin < count; begin += ENTRIES_PER_LAUNCH) {
        const int part = (int)(count - begin < ENTRIES_PER_LAUNCH ? count - begin : ENTRIES_PER_LAUNCH);
        Batch batch;
        for (int i = 0; i < part; ++i) batch.entry[i] = entries[begin + i];
        const unsigned small_blocks = (unsigned)((part + PREPARE_THREADS - 1) / PREPARE_THREADS);
        FASTDP_LAUNCH(prepare_step, small_blocks, PREPARE_THREADS, stream, batch, part, table + begin, header,
                      draw.step, powers, draw.counter);
        const fastdp_cuda_status status = launched("prepare_step");
        if (status.kernel != nullptr) return status;
    }
    Key key;
    for (int k = 0; k < 8; ++k) key.word[k] = draw.key[k];
    const unsigned blocks =
        blocks_for(tiles, TILES_PER_ITEM * (THREADS / LANES), device, BLOCKS_PER_MULTIPROCESSOR);
    if (is_correlated(draw)) {
        using Number = typename Rule::Number;
        PastOptions<Number> earlier;
        const fastdp_cuda_status status =
            lay_out_draws(draw, options.draw.size, (Earlier *)(table + count), stream, earlier);
        if (status.kernel != nullptr) return status;
        const auto kernel = noisy_step<Rule, Past<Number>>;
        FASTDP_LAUNCH(kernel, blocks, THREADS, stream, table, (int)count, header, key, options, earlier);
    } else {
        const auto kernel = noisy_step<Rule, NoPast>;
        FASTDP_LAUNCH(kernel, blocks, THREADS, stream, table, (int)count, header, key, options, NoPast::Options());
    }
    return launched(name);
}

// Call `f` with null pointers of the parameters' and the states' type, of those pairs that there are.
template <typename F>
fastdp_cuda_status with_types(int param_type, int state_type, F &&f) {
    return with_type(param_type, [&](auto *param) -> fastdp_cuda_status {
        if (state_type == param_type) return f(param, param);
        if constexpr (!std::is_same_v<decltype(param), double *>) {
            if (state_type == FASTDP_FLOAT32) return f(param, (float *)nullptr);
        }
        return {"(none)", "states must have the parameter's type or float32"};
    });
}

}  // namespace fastdp
