// A tile of 512 elements of the global index grid: 64 threads, one block of the key stream each, whose 8 normals are
// spent on 8 elements, 64 apart: neighbouring threads touch neighbouring elements.
#pragma once

#include "keystream.cuh"

namespace fastdp {

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_MULTIPROCESSOR = 6;  // of a grid; what runs at once is less

// Which of this thread's 8 elements (first, first + 64, ...) lie in [0, count): one bit each.
FASTDP_INLINE unsigned elements_inside(int64_t first, int64_t count) {
    unsigned inside = 0;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        if ((uint64_t)(first + slot * LANES) < (uint64_t)count) inside |= 1u << slot;
    }
    return inside;
}

template <class Rule>
struct Loaded {
    typename Rule::Element element[SLOTS / 2];
};

// Read this thread's elements `half` * 4 .. + 3.
template <class Rule>
FASTDP_INLINE void load_half(const Rule &rule, int half, Loaded<Rule> &loaded) {
#pragma unroll
    for (int k = 0; k < SLOTS / 2; ++k) loaded.element[k] = rule.load((half * SLOTS / 2 + k) * LANES);
}

template <class Rule>
FASTDP_INLINE void spend_half(const Rule &rule, int half, const uint32_t *words, const Loaded<Rule> &loaded) {
#pragma unroll
    for (int k = 0; k < SLOTS / 2; k += 2) {
        const int slot = half * SLOTS / 2 + k;
        typename Rule::Number even, odd;
        box_muller(words + 2 * slot, even, odd);
        rule.store(slot * LANES, loaded.element[k], even);
        rule.store((slot + 1) * LANES, loaded.element[k + 1], odd);
    }
}

// A tile that lies inside the array: what a half reads is asked for well before it is needed, the first before the
// block is drawn.
template <class Rule>
FASTDP_INLINE void whole_tile(const Rule &rule, const Key &key, const Nonce &nonce, uint64_t counter) {
    Loaded<Rule> low, high;
    load_half(rule, 0, low);
    uint32_t words[16];
    chacha20_block(key, nonce, counter, words);
    load_half(rule, 1, high);
    spend_half(rule, 0, words, low);
    spend_half(rule, 1, words, high);
}

// A tile at an end of the array.
template <class Rule>
FASTDP_INLINE void part_of_tile(const Rule &rule, const Key &key, const Nonce &nonce, uint64_t counter,
                                unsigned inside) {
    uint32_t words[16];
    chacha20_block(key, nonce, counter, words);
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot += 2) {
        typename Rule::Number even, odd;
        box_muller(words + 2 * slot, even, odd);
        if (inside >> slot & 1) rule.store(slot * LANES, rule.load(slot * LANES), even);
        if (inside >> (slot + 1) & 1) rule.store((slot + 1) * LANES, rule.load((slot + 1) * LANES), odd);
    }
}

// One tile of the global grid; `first`: this thread's first element in the arrays of `rule`, of `count` elements.
template <class Rule>
FASTDP_INLINE void noisy_tile(const Rule &rule, const Key &key, const Nonce &nonce, int64_t tile, int64_t first,
                              int64_t count) {
    const int lane = (int)threadIdx.x % LANES;
    const uint64_t counter = (uint64_t)tile * LANES + lane;
    if (first >= lane && first - lane + TILE <= count) {
        whole_tile(rule, key, nonce, counter);
    } else {
        part_of_tile(rule, key, nonce, counter, elements_inside(first, count));
    }
}

// A std that is no float is rounded up: noise is never less than asked for.
inline void round_up(double x, float &to) {
    to = (float)x;
    if ((double)to < x) to = nextafterf(to, INFINITY);
}
inline void round_up(double x, double &to) { to = x; }

}  // namespace fastdp
