// A tile of 1024 elements of the global index grid: 64 threads, one block of the key stream each, whose 16 normals are
// spent on 16 elements, 64 apart: neighbouring threads touch neighbouring elements.
#pragma once

#include "past.cuh"

namespace fastdp {

constexpr int BLOCKS_PER_MULTIPROCESSOR = 6;  // of a grid; what runs at once is less

// Which of this thread's 16 elements (first, first + 64, ...) lie in [0, count): one bit each.
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

// The elements of this thread whose bit in `open` is set, by more of the key stream's bits. Few: of 16, one in 200.
template <class Rule, class Draws>
static __device__ __noinline__ void settle(Rule rule, Draws earlier, const Key &key, Nonce nonce, uint64_t counter,
                                           unsigned open) {
    const auto &by = rule.amounts();
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) {
        if (!(open >> slot & 1)) continue;
        const auto e = rule.load(slot * LANES);
        const auto sum = rule.sum_of(e), grids = sum * by.per_grid, whole = rint(grids), part = grids - whole;
        if (!(fabs(part) <= 1)) {  // no number, or one of more than 2^127 grids, of which noise changes no bit
            rule.store(slot * LANES, e, sum * by.scale);
            continue;
        }
        const auto block = [&](int j, int level, uint32_t(&of_level)[16]) {
            Nonce shifted = j < earlier.count() ? earlier.nonce(j) : nonce;
            shifted.word[1] += (uint32_t)level << 16;
            chacha20_block(key, shifted, counter, of_level);
        };
        const auto size_of = [&](int j) { return j < earlier.count() ? earlier.size(j) : (double)by.size; };
        const double near = exact::nearest_whole(slot / 2, slot % 2 == 1, part, earlier.count() + 1, size_of, block);
        const typename Rule::Number n = fma(whole + (typename Rule::Number)near, by.grid_scaled, (typename Rule::Number)0);
        rule.store(slot * LANES, e, n);
    }
}

// One element: released and stored by the rule, or marked as open.
template <class Rule, class Past>
FASTDP_INLINE void spend(const Rule &rule, const Past &past, int slot, const Point<typename Rule::Number> &point,
                         const typename Rule::Element &e, unsigned &open) {
    typename Rule::Number n;
    if (release(point.turned, slot % 2 ? point.sine : point.cosine, rule.sum_of(e), rule.amounts(), past, slot, n)) {
        rule.store(slot * LANES, e, n);
    } else {
        open |= 1u << slot;
    }
}

// A tile that lies inside the array: what a pair reads is asked for well before it is needed, two of them before the
// block is drawn and Past::AHEAD while normals are made: more would not fit into the registers.
template <class Rule, class Past>
FASTDP_INLINE void whole_tile(const Rule &rule, Past &past, const Key &key, const Nonce &nonce, uint64_t counter) {
    constexpr int AHEAD = Past::AHEAD;
    past.gather(key, counter);
    Loaded<Rule> loaded[PAIRS];
    loaded[0] = load_pair(rule, 0), loaded[1] = load_pair(rule, 1);
    uint32_t words[16];
    unsigned open = 0;
    chacha20_block(key, nonce, counter, words);
    if (AHEAD > 2) loaded[2] = load_pair(rule, 2);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        Point<typename Rule::Number> point;
        box_muller(words, pair, point);
        point.turned *= rule.amounts().size;
        spend(rule, past, 2 * pair, point, loaded[pair].even, open);
        spend(rule, past, 2 * pair + 1, point, loaded[pair].odd, open);
        if (pair + AHEAD < PAIRS) loaded[pair + AHEAD] = load_pair(rule, pair + AHEAD);
    }
    if (open) settle(rule, past.draws(), key, nonce, counter, open);
}

// A tile at an end of the array.
template <class Rule, class Past>
FASTDP_INLINE void part_of_tile(const Rule &rule, Past &past, const Key &key, const Nonce &nonce, uint64_t counter,
                                unsigned inside) {
    past.gather(key, counter);
    uint32_t words[16];
    unsigned open = 0;
    chacha20_block(key, nonce, counter, words);
#pragma unroll
    for (int slot = 0; slot < SLOTS; slot += 2) {
        Point<typename Rule::Number> point;
        box_muller(words, slot / 2, point);
        point.turned *= rule.amounts().size;
        if (inside >> slot & 1) spend(rule, past, slot, point, rule.load(slot * LANES), open);
        if (inside >> (slot + 1) & 1) spend(rule, past, slot + 1, point, rule.load((slot + 1) * LANES), open);
    }
    if (open) settle(rule, past.draws(), key, nonce, counter, open);
}

// One tile of the global grid; `first`: this thread's first element in the arrays of `rule`, of `count` elements.
template <class Rule, class Past>
FASTDP_INLINE void noisy_tile(const Rule &rule, Past &past, const Key &key, const Nonce &nonce, int64_t tile,
                              int64_t first, int64_t count) {
    const int lane = (int)threadIdx.x % LANES;
    const uint64_t counter = (uint64_t)tile * LANES + lane;
    if (first >= lane && first - lane + TILE <= count) {
        whole_tile(rule, past, key, nonce, counter);
    } else {
        part_of_tile(rule, past, key, nonce, counter, elements_inside(first, count));
    }
}

}  // namespace fastdp
