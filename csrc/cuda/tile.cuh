// A tile of 768 elements of the global index grid: 64 threads, one block of the key stream each, whose 12 normals are
// spent on 12 elements, 64 apart: neighbouring threads touch neighbouring elements.
#pragma once

#include "keystream.cuh"

namespace fastdp {

constexpr int THREADS = 256;
constexpr int BLOCKS_PER_MULTIPROCESSOR = 6;  // of a grid; what runs at once is less

// Which of this thread's 12 elements (first, first + 64, ...) lie in [0, count): one bit each.
FASTDP_INLINE unsigned elements_inside(int64_t first, int64_t count) {
    unsigned inside = 0;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
        if ((uint64_t)(first + slot * LANES) < (uint64_t)count) inside |= 1u << slot;
    }
    return inside;
}

// A pair's two elements.
template <class Rule>
struct Loaded {
    typename Rule::Element even, odd;
};

template <class Rule>
FASTDP_INLINE Loaded<Rule> load_pair(const Rule &rule, int pair) {
    return {rule.load(2 * pair * LANES), rule.load((2 * pair + 1) * LANES)};
}

// A tile that lies inside the array: what a pair reads is asked for well before it is needed, two of them before the
// block is drawn and AHEAD while normals are made: more would not fit into the registers.
template <class Rule>
FASTDP_INLINE void whole_tile(const Rule &rule, const Key &key, const Nonce &nonce, uint64_t counter) {
    constexpr int PAIRS = SLOTS / 2, AHEAD = 3;
    Loaded<Rule> loaded[PAIRS];
    loaded[0] = load_pair(rule, 0), loaded[1] = load_pair(rule, 1);
    uint32_t words[16];
    chacha20_block(key, nonce, counter, words);
    loaded[2] = load_pair(rule, 2);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        typename Rule::Number even, odd;
        box_muller(words, pair, even, odd);
        rule.store(2 * pair * LANES, loaded[pair].even, even);
        rule.store((2 * pair + 1) * LANES, loaded[pair].odd, odd);
        if (pair + AHEAD < PAIRS) loaded[pair + AHEAD] = load_pair(rule, pair + AHEAD);
    }
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
        box_muller(words, slot / 2, even, odd);
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
