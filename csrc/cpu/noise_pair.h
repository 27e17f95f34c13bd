// Bits to normals, for a pair of slots; included by noise.h once for each instruction set, before noise_tile.h.
//
// Two normals come from two of a block's words, as fastdp.h says:
//     x in [0, 1) of 36 bits, radius sqrt(-2 ln(1 - x)): 7.06 at the largest x
//     y in (-1/2, 1/2) of 27 bits, and a bit that turns the point by half a circle
//     n = grid * round(sum / grid + size * radius * (cos, sin) pi y) * scale
// The sum is split into multiples of the grid and a part, and part + size * normal rounded. Where the arithmetic's error,
// or bits of x and y that no one has drawn, leave two whole numbers possible, exact.h finds the right one: one in thousands.
// Pair<double> follows this to 1e-13, Pair<float> to 7e-7 of the radius (tests/ops/test_noise_transform.py measures both).
// Word k of the block lies at w[k * W], the slots' elements at `sum` and one LANES further.
namespace fastdp {
namespace FASTDP_ISA {

template <class T>
struct Pair;

// What a sum and a normal become, and in which lanes that is open.
template <class Numbers>
struct Released {
    Numbers n;
    Open open;
};

// Large where a radius is out of reach, else less than 0.
template <class Numbers, class T>
INLINE Numbers beyond_reach(Numbers radius, const Reach<T> &reach) {
    return fma(size_of(radius - all_of(reach.middle)), all_of((T)1e9), all_of(reach.half * (T)-1e9));
}

// Blocks of the key stream with one counter, W of them (noise_tile.h).
inline void blocks_of(const uint32_t *const *states, int level, int64_t block, uint32_t *words);

// What is open, a lane at a time. words, block: of the first lane; without words, they are drawn again.
template <class T>
__attribute__((noinline, cold)) void settle(Open open, const T *sum, T *n, const uint32_t *words, int pair, bool odd,
                                            int64_t block, const Amounts<T> &by) {
    for (int l = 0; l < W; ++l) {
        if (!(open >> l & 1)) continue;
        const T grids = sum[l] * by.per_grid, whole = std::rint(grids), part = grids - whole;
        if (!(std::fabs(part) <= 1)) {  // no number, or one of more than 2^127 grids, of which noise changes no bit
            n[l] = sum[l] * by.scale;
            continue;
        }
        alignas(64) uint32_t drawn[exact::LEVELS + 1][16 * W];  // of W draws
        int first[exact::LEVELS + 1] = {-1, -1, -1, -1};
        const auto state_of = [&](int j) { return j < by.count ? by.earlier[j].state : by.state; };
        const double near = exact::nearest_whole(
            pair, odd, part, by.count + 1, [&](int j) { return j < by.count ? by.earlier[j].size : (double)by.size; },
            [&](int j, int level, uint32_t *to) {
                if (level == 0 && words) {
                    for (int k = 0; k < 16; ++k) to[k] = words[k * W + l];
                    return;
                }
                if (j / W * W != first[level]) {
                    const uint32_t *states[W];
                    first[level] = j / W * W;
                    for (int k = 0; k < W; ++k) states[k] = state_of(std::min(first[level] + k, by.count));
                    blocks_of(states, level, block + l, drawn[level]);
                }
                for (int k = 0; k < 16; ++k) to[k] = drawn[level][k * W + j % W];
            });
        n[l] = std::fma(whole + (T)near, by.grid_scaled, (T)0);
    }
}

template <>
struct Pair<double> {
    static constexpr int STEP = W == 16 ? 8 : 1;  // lanes at a time
    Real r, cosine, sine, turned;

    // u = 1 - x, exactly
    INLINE Real uniform(const uint32_t *w, int pair) {
        const Words low = low_bits(words_at(w + (PAIRS + pair) * W));
        return fma(to_real(words_at(w + pair * W)), real(-0x1p-32), fma(to_real(low), real(-0x1p-36), real(1.0)));
    }
    // u = 2^e m, m in [sqrt(1/2), sqrt(2)): near u = 1, where ln u vanishes, nothing cancels. -2 ln m = -4 atanh t = t
    // S(t^2), |t| <= 0.172; S by Chebyshev's points, 2.7e-14 of it
    INLINE void radius(Real u) {
        const Bits above = bits(u) - bits(0x3fe6a09e667f3bcdu);
        const Real m = real(bits(u) - (above & bits(0xfff0000000000000u)));
        const Real e = exponent(above) * real(-0x1.62e42fefa39efp-52);  // -2 ln 2^e
        const Real t = (m - real(1.0)) / (m + real(1.0)), q = t * t;
        Real log = fma(real(-0x1.9192e67b031d5p-2), q, real(-0x1.c620ee4c22144p-2));
        log = fma(log, q, real(-0x1.2494381f492efp-1));
        log = fma(log, q, real(-0x1.9999962c0518cp-1));
        log = fma(log, q, real(-0x1.5555555671492p+0));
        log = fma(log, q, real(-0x1.fffffffffff12p+1));
        r = root(fma(t, log, e));  // never of less than 0: u > sqrt(1/2) has e = 0 and m <= 1
    }
    // cos and sin of pi y by Chebyshev's points in y^2: 2e-15 and 3e-16
    INLINE void circle(Real y) {
        const Real square = y * y;
        cosine = fma(real(-0x1.a52d5b81f5ed5p-14), square, real(0x1.f9612b4f21835p-10));
        cosine = fma(cosine, square, real(-0x1.a6d070b706549p-6));
        cosine = fma(cosine, square, real(0x1.e1f500e46da7bp-3));
        cosine = fma(cosine, square, real(-0x1.55d3c7d851320p+0));
        cosine = fma(cosine, square, real(0x1.03c1f0819eba5p+2));
        cosine = fma(cosine, square, real(-0x1.3bd3cc9be4180p+2));
        cosine = fma(cosine, square, real(0x1.fffffffffffefp-1));
        sine = fma(real(-0x1.62903d02bb153p-16), square, real(0x1.e89f6fe44fe7bp-12));
        sine = fma(sine, square, real(-0x1.e30631bdf732dp-8));
        sine = fma(sine, square, real(0x1.5078327046959p-4));
        sine = fma(sine, square, real(-0x1.32d2cce1ea145p-1));
        sine = fma(sine, square, real(0x1.466bc677522bdp+1));
        sine = fma(sine, square, real(-0x1.4abbce625bd83p+2));
        sine = fma(sine, square, real(0x1.921fb54442d17p+1)) * y;
    }
    INLINE Pair(const uint32_t *w, int pair, double size) {
        radius(uniform(w, pair));
        circle(fma(real_circle_of(words_at(w + (PAIRS + pair) * W)), real(0x1p-32), real(0x1p-28)));
        turned = real(bits(r * real(size)) ^ upper_bit(words_at(w + (PAIRS + pair) * W)));
    }
    // As in Pair<float>, but arithmetic is off by 1e-13 only.
    INLINE Real limit(const Amounts<double> &by) const {
        return real(0.5 - 2e-5) - larger(r * real(by.size) * real(2e-8), beyond_reach(r, by.reach));
    }
};

template <>
struct Pair<float> {
    static constexpr int STEP = W == 4 ? 1 : W;
    Single r, cosine, sine, turned;

    // z = x where x < 1/2, else x - 1: within 2^-23 of it, as the upper 32 bits are a signed number, rounded once, and
    // what is added to them is exact: a float of that exponent counts in 2^-36, and 2^-13 is taken off it.
    INLINE Single uniform(const uint32_t *w, int pair) {
        const Single low = with_low_bits(word_at(w + (PAIRS + pair) * W), word((127 - 13) << 23));
        return fma(from_signed(word_at(w + pair * W)), single(0x1p-32f), low - single(0x1p-13f));
    }
    // 1 - x = 2^k (1 - f), f in [0, 1/2], e = -2 ln 2^k: k = 0 where x < 1/2. Both parts of -2 ln(1 - x) are positive:
    // -2 ln(1 - f) / f on [0, 1/2] by Chebyshev's points, 4e-9 of it
    INLINE void radius(Single z) {
        Single f, e;
        split_of(z, single(-0x1.62e430p+0f), f, e);
        Single log = fma(single(0x1.be5224p+1f), f, single(-0x1.3cfc4ap+2f));
        log = fma(log, f, single(0x1.f88eeap+1f));
        log = fma(log, f, single(-0x1.2f3dd4p+0f));
        log = fma(log, f, single(0x1.5c3ad6p-1f));
        log = fma(log, f, single(0x1.6830eap-2f));
        log = fma(log, f, single(0x1.01e9dap-1f));
        log = fma(log, f, single(0x1.5542f6p-1f));
        log = fma(log, f, single(0x1.00001ep+0f));
        r = root(fma(fma(log, f, single(2.0f)), f, e));
    }
    // cos and sin of pi y: 1e-9 and 8e-9
    INLINE void circle(Single y) {
        const Single square = y * y;
        cosine = fma(single(-0x1.889edap-6f), square, single(0x1.e0a1dcp-3f));
        cosine = fma(cosine, square, single(-0x1.55cd26p+0f));
        cosine = fma(cosine, square, single(0x1.03c1d4p+2f));
        cosine = fma(cosine, square, single(-0x1.3bd3ccp+2f));
        cosine = fma(cosine, square, single(1.0f));
        sine = fma(single(0x1.3911b2p-4f), square, single(-0x1.31fbeep-1f));
        sine = fma(sine, square, single(0x1.466504p+1f));
        sine = fma(sine, square, single(-0x1.4abba2p+2f));
        sine = fma(sine, square, single(0x1.921fb4p+1f)) * y;
    }
    Pair() = default;
    INLINE Pair(const uint32_t *w, int pair, float size) {
        radius(uniform(w, pair));
        circle(fma(from_signed(circle_of(word_at(w + (PAIRS + pair) * W))), single(0x1p-32f), single(0x1p-28f)));
        turned = turned_by(word_at(w + (PAIRS + pair) * W), r * single(size));
    }
    // Beyond the limit from a whole number, it is open which one is next. 6e-7 of the radius: arithmetic is off by 4.5e-7
    // (1.2e-7 the radius, 1.4e-7 the circle, over all floats; rounding x, y, two products), and the angle's 28 bits leave
    // 1.2e-8. 2e-5: rounding the limit, and what x leaves of a radius within reach.
    INLINE Single limit(const Amounts<float> &by) const {
        return single(0.5f - 2e-5f) - larger(r * single(by.size) * single(6e-7f), beyond_reach(r, by.reach));
    }
};

// A sum with its noise, in grids, as a whole number and a rest: n, and the lanes in which it is open. Adding 0 takes the
// sign off a zero.
template <class Numbers, class T>
INLINE Released<Numbers> released(Numbers whole, Numbers rest, Numbers limit, const Amounts<T> &by) {
    const auto near = rounded(rest);
    return {fma(whole + near, all_of(by.grid_scaled), all_of((T)0)), beyond(rest - near, limit)};
}

// Of one of a pair's two elements; of noise alone, nothing is open.
template <class T>
INLINE auto released(const Pair<T> &p, bool odd, const Tile<T> &tile, int at, const Amounts<T> &by) {
    const auto coordinate = odd ? p.sine : p.cosine;
    const auto grids = numbers_at(tile.sum + at) * all_of(by.per_grid), whole = rounded(grids);
    if (by.alone) return Released<decltype(p.turned)>{p.turned * coordinate * all_of(by.grid_scaled), 0};
    return released(whole, fma(p.turned, coordinate, grids - whole), p.limit(by), by);
}

template <class T>
INLINE auto released_normals(const Tile<T> &tile, int at, int pair_at, const Amounts<T> &by) {
    const auto grids = numbers_at(tile.sum + at) * all_of(by.per_grid), whole = rounded(grids);
    const auto limit = all_of((T)0.5 - by.left_open) - numbers_at(tile.doubt + pair_at);
    return released(whole, grids - whole + numbers_at(tile.normals + at), limit, by);
}

// ---------------------------------------------------------------- W lanes of a pair

// Adds the normals of one draw to those of others, and how far off they are to the doubt, which a radius out of reach
// makes larger than any limit.
template <class T>
INLINE void spend(const uint32_t *words, int pair, const Tile<T> &tile, int lane, const Share<T> &share) {
    constexpr int STEP = Pair<T>::STEP;
    T *even = tile.normals + 2 * pair * LANES + lane, *odd = even + LANES, *doubt = tile.doubt + pair * LANES + lane;
#if FASTDP_W < 16
#pragma omp simd
#endif
    for (int l = 0; l < W; l += STEP) {
        const Pair<T> p(words + l, pair, share.size);
        put(even + l, fma(p.turned, p.cosine, numbers_at(even + l)));
        put(odd + l, fma(p.turned, p.sine, numbers_at(odd + l)));
        const auto off = fma(p.r, all_of(share.per_radius), numbers_at(doubt + l));
        put(doubt + l, larger(off, beyond_reach(p.r, share.reach)));
    }
}

// Releases what a pair's two slots take.
template <class T>
INLINE void spend(const uint32_t *words, int pair, const Tile<T> &tile, int lane, const Amounts<T> &by) {
    constexpr int STEP = Pair<T>::STEP;
    alignas(64) T n[2][W];
    alignas(64) Open open[2][W / STEP];
    Open any = 0;
    const int at = 2 * pair * LANES + lane;
#if FASTDP_W < 16
#pragma omp simd reduction(| : any)
#else
#pragma GCC unroll 2
#endif
    for (int l = 0; l < W; l += STEP) {
        const Pair<T> p(words + l, pair, by.size);
        const auto even = released(p, false, tile, at + l, by), odd = released(p, true, tile, at + LANES + l, by);
        put(n[0] + l, even.n), open[0][l / STEP] = even.open;
        put(n[1] + l, odd.n), open[1][l / STEP] = odd.open;
        any |= even.open | odd.open;
    }
    for (int slot = 0; any && slot < 2; ++slot) {
        Open lanes = 0;
        for (int l = 0; l < W; l += STEP) lanes |= open[slot][l / STEP] << l;
        settle(lanes, tile.sum + at + slot * LANES, n[slot], words, pair, slot == 1, tile.block + lane, by);
    }
    for (int l = 0; l < W; l += STEP) {
        put(tile.grad + at + l, numbers_at(n[0] + l)), put(tile.grad + at + LANES + l, numbers_at(n[1] + l));
    }
}

// The normals themselves, for tests.
template <class T>
INLINE void normals_of(const uint32_t *words, int pair, T *even) {
    for (int l = 0; l < W; l += Pair<T>::STEP) {
        const Pair<T> p(words + l, pair, 1);
        put(even + l, p.turned * p.cosine), put(even + LANES + l, p.turned * p.sine);
    }
}

}  // namespace FASTDP_ISA
}  // namespace fastdp
