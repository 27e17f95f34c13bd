// Bits to normals, for a pair of slots; included by noise.h once for each instruction set, before noise_tile.h.
//
// Two normals come from 85 bits of a block's words, as fastdp.h says:
//     x in [0, 1) of 53 bits, radius sqrt(-2 ln(1 - x)): 8.57 at the largest x
//     y in (-1/2, 1/2) of 31 bits, and a bit that turns the point by half a circle
//     n = grid * round(sum / grid + size * radius * (cos, sin) pi y) * scale
// The sum is split into multiples of the grid and a part, and part + size * normal rounded. Where the arithmetic's error,
// or bits of x and y that no one has drawn, leave two whole numbers possible, exact.h finds the right one: one in thousands.
// Pair<double> follows this to 1e-13, Pair<float> to 7e-7 of the radius (tests/ops/test_noise_transform.py measures both).
// Each is cut into pieces, between which noise_tile.h lays the rounds of ChaCha20. Word k of the block lies at w[k * W],
// the slots' elements at `sum` and one LANES further.
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

// The block of a level of the key stream (noise_tile.h).
inline void level_words(const uint32_t *state, int level, int64_t block, uint32_t *words);

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
        uint32_t again[16];
        if (!words) level_words(by.state, 0, block + l, again);
        const exact::Bits own = words ? exact::bits_of(words + l, W, pair, odd) : exact::bits_of(again, 1, pair, odd);
        const double near = exact::nearest_whole(
            own, pair, part, by.size, by.count,
            [&](int j) { return by.earlier[j].size; },
            [&](int j, int level, uint32_t *to) {
                level_words(j < by.count ? by.earlier[j].state : by.state, level, block + l, to);
            });
        n[l] = std::fma(whole + (T)near, by.grid_scaled, (T)0);
    }
}

template <>
struct Pair<double> {
    static constexpr int STEP = W == 16 ? 8 : 1;  // lanes at a time
    Real u, m, t, e, q, log, r, y, square, cosine, sine, turned, limit;
    Bits above;

    INLINE void uniform(const uint32_t *w, int pair) {  // u = 1 - x, exactly
        const uint32_t *a = w + (pair < 4 ? 12 + pair : 2 * pair + 4) * W;
        const Words low = pair < 4 ? lower_21(words_at(a)) : upper_21(words_at(a), words_at(a + W));
        u = fma(to_real(words_at(w + pair * W)), real(-0x1p-32), fma(to_real(low), real(-0x1p-53), real(1.0)));
    }
    INLINE void split() {  // u = 2^e m, m in [sqrt(1/2), sqrt(2)): near u = 1, where ln u vanishes, nothing cancels
        above = bits(u) - bits(0x3fe6a09e667f3bcdu);
        m = real(bits(u) - (above & bits(0xfff0000000000000u)));
        e = exponent(above) * real(-0x1.62e42fefa39efp-52);  // -2 ln 2^e
    }
    INLINE void divide() { t = (m - real(1.0)) / (m + real(1.0)); }
    // -2 ln m = -4 atanh t = t S(t^2), |t| <= 0.172; S by Chebyshev's points, 2.7e-14 of it
    INLINE void log1() { q = t * t, log = fma(real(-0x1.9192e67b031d5p-2), q, real(-0x1.c620ee4c22144p-2)); }
    INLINE void log2() {
        log = fma(log, q, real(-0x1.2494381f492efp-1));
        log = fma(log, q, real(-0x1.9999962c0518cp-1));
    }
    INLINE void log3() {
        log = fma(log, q, real(-0x1.5555555671492p+0));
        log = fma(log, q, real(-0x1.fffffffffff12p+1));
    }
    INLINE void radius() { r = root(fma(t, log, e)); }  // never of less than 0: u > sqrt(1/2) has e = 0 and m <= 1
    INLINE void angle(const uint32_t *w, int pair) {
        y = fma(to_real_twice(words_at(w + (6 + pair) * W)), real(0x1p-32), real(0x1p-32));
    }
    // cos and sin of pi y by Chebyshev's points in y^2: 2e-15 and 3e-16
    INLINE void circle(double c, double s) {
        cosine = fma(cosine, square, real(c)), sine = fma(sine, square, real(s));
    }
    INLINE void circle1() {
        square = y * y, cosine = real(-0x1.a52d5b81f5ed5p-14), sine = real(-0x1.62903d02bb153p-16);
        circle(0x1.f9612b4f21835p-10, 0x1.e89f6fe44fe7bp-12);
    }
    INLINE void circle2() { circle(-0x1.a6d070b706549p-6, -0x1.e30631bdf732dp-8); }
    INLINE void circle3() { circle(0x1.e1f500e46da7bp-3, 0x1.5078327046959p-4); }
    INLINE void circle4() { circle(-0x1.55d3c7d851320p+0, -0x1.32d2cce1ea145p-1); }
    INLINE void circle5() { circle(0x1.03c1f0819eba5p+2, 0x1.466bc677522bdp+1); }
    INLINE void circle6() { circle(-0x1.3bd3cc9be4180p+2, -0x1.4abbce625bd83p+2); }
    INLINE void circle7() { circle(0x1.fffffffffffefp-1, 0x1.921fb54442d17p+1), sine = sine * y; }
    INLINE void turn(const uint32_t *w, int pair, double size) {
        turned = real(bits(r * real(size)) ^ upper_bit(words_at(w + (6 + pair) * W)));
    }
    // As in Pair<float>, but arithmetic is off by 1e-13 only.
    INLINE void limit_by(double size) {
        r = r * real(size);
        limit = smaller(fma(r, real(-1e-9), real(0.5 - 4e-6)), real(6.4 * size) - r);
    }

    INLINE void all(const uint32_t *w, int pair) {
        uniform(w, pair), split(), divide(), log1(), log2(), log3(), radius(), angle(w, pair);
        circle1(), circle2(), circle3(), circle4(), circle5(), circle6(), circle7();
    }
};

template <>
struct Pair<float> {
    static constexpr int STEP = W == 4 ? 1 : W;
    Single z, f, e, log, r, y, square, cosine, sine, turned, limit;

    // z = x where x < 1/2, else x - 1: rounded to float's 24 bits and no coarser, as the upper 32 bits are a signed
    // number and what is added to them is exact: a float of that exponent counts in 2^-53, and 2^-30 is taken off it.
    INLINE void uniform(const uint32_t *w, int pair) {
        const uint32_t *a = w + (pair < 4 ? 12 + pair : 2 * pair + 4) * W;
        const Word exponent = word((127 - 30) << 23);
        const Single low = pair < 4 ? with_lower_21(word_at(a), exponent)
                                    : with_upper_21(word_at(a), word_at(a + W), exponent);
        z = fma(from_signed(word_at(w + pair * W)), single(0x1p-32f), low - single(0x1p-30f));
    }
    // 1 - x = 2^k (1 - f), f in [0, 1/2], e = -2 ln 2^k: k = 0 where x < 1/2. Both parts of -2 ln(1 - x) are positive.
    INLINE void split() { split_of(z, single(-0x1.62e430p+0f), f, e); }
    // -2 ln(1 - f) / f on [0, 1/2]: 4e-9 of it
    INLINE void log1() {
        log = fma(single(0x1.be5224p+1f), f, single(-0x1.3cfc4ap+2f));
        log = fma(log, f, single(0x1.f88eeap+1f));
    }
    INLINE void log2() {
        log = fma(log, f, single(-0x1.2f3dd4p+0f));
        log = fma(log, f, single(0x1.5c3ad6p-1f));
    }
    INLINE void log3() {
        log = fma(log, f, single(0x1.6830eap-2f));
        log = fma(log, f, single(0x1.01e9dap-1f));
    }
    INLINE void log4() {
        log = fma(log, f, single(0x1.5542f6p-1f));
        log = fma(log, f, single(0x1.00001ep+0f));
    }
    INLINE void log5() { log = fma(fma(log, f, single(2.0f)), f, e); }
    INLINE void radius() { r = root(log); }
    INLINE void angle(const uint32_t *w, int pair) {
        y = fma(from_signed(twice(word_at(w + (6 + pair) * W))), single(0x1p-32f), single(0x1p-32f));
    }
    // cos and sin of pi y: 1e-9 and 8e-9
    INLINE void circle(float c, float s) {
        cosine = fma(cosine, square, single(c)), sine = fma(sine, square, single(s));
    }
    INLINE void circle1() { square = y * y, cosine = fma(single(-0x1.889edap-6f), square, single(0x1.e0a1dcp-3f)); }
    INLINE void circle2() { cosine = fma(cosine, square, single(-0x1.55cd26p+0f)), sine = single(0x1.3911b2p-4f); }
    INLINE void circle3() { circle(0x1.03c1d4p+2f, -0x1.31fbeep-1f); }
    INLINE void circle4() { circle(-0x1.3bd3ccp+2f, 0x1.466504p+1f); }
    INLINE void circle5() { circle(1.0f, -0x1.4abba2p+2f); }
    INLINE void circle6() { sine = fma(sine, square, single(0x1.921fb4p+1f)) * y; }
    INLINE void turn(const uint32_t *w, int pair, float size) {
        turned = turned_by(word_at(w + (6 + pair) * W), r * single(size));
    }
    // Beyond the limit from a whole number, it is open which one is next. 6e-7 of the radius: arithmetic is off by 4.5e-7
    // (1.2e-7 the radius, 1.4e-7 the circle, over all floats; rounding x, y, two products), and the angle's 32 bits leave
    // 1e-9. 4e-6: rounding the limit, and what the 53 bits of x leave of the smallest radii (128 * 2^-26). Above a radius
    // of 6.4 they leave too much.
    INLINE void limit_by(float size) {
        r = r * single(size);
        limit = smaller(fma(r, single(-6e-7f), single(0.5f - 4e-6f)), single(6.4f * size) - r);
    }

    INLINE void all(const uint32_t *w, int pair) {
        uniform(w, pair), split(), log1(), log2(), log3(), log4(), log5(), radius(), angle(w, pair);
        circle1(), circle2(), circle3(), circle4(), circle5(), circle6();
    }
};

// A sum with its noise, in grids, as a whole number and a rest: n, and the lanes in which it is open. Adding 0 takes the
// sign off a zero.
template <class Numbers, class T>
INLINE Released<Numbers> released(Numbers whole, Numbers rest, Numbers limit, const Amounts<T> &by) {
    const auto near = rounded(rest);
    return {fma(whole + near, all_of(by.grid_scaled), all_of((T)0)), beyond(rest - near, limit)};
}

template <class T>
INLINE auto released(const Pair<T> &p, bool odd, const Tile<T> &tile, int at, const Amounts<T> &by) {
    const auto grids = numbers_at(tile.sum + at) * all_of(by.per_grid), whole = rounded(grids);
    return released(whole, fma(p.turned, odd ? p.sine : p.cosine, grids - whole), p.limit, by);
}

template <class T>
INLINE auto released_normals(const Tile<T> &tile, int at, int pair_at, const Amounts<T> &by) {
    const auto grids = numbers_at(tile.sum + at) * all_of(by.per_grid), whole = rounded(grids);
    const auto limit = all_of((T)0.5 - by.left_open) - numbers_at(tile.doubt + pair_at);
    return released(whole, grids - whole + numbers_at(tile.normals + at), limit, by);
}

// Adds the normals of one draw to those of others, and how far off they are to the doubt, which a radius above 6.4 makes
// larger than any limit.
template <class T>
INLINE void gather(Pair<T> &p, const Tile<T> &tile, int pair, int lane, const uint32_t *words, const Share<T> &share) {
    T *even = tile.normals + 2 * pair * LANES + lane, *odd = even + LANES, *doubt = tile.doubt + pair * LANES + lane;
    p.turn(words, pair, share.size);
    put(even, fma(p.turned, p.cosine, numbers_at(even))), put(odd, fma(p.turned, p.sine, numbers_at(odd)));
    const auto off = fma(p.r, all_of(share.per_radius), numbers_at(doubt));
    put(doubt, larger(off, fma(p.r, all_of((T)1e9), all_of((T)-6.4e9))));
}

// The elements of one slot, STEP of them: released, or the noise alone.
template <class T>
INLINE void release(const Pair<T> &p, bool odd, const Tile<T> &tile, int at, const uint32_t *words, int pair,
                    int64_t block, const Amounts<T> &by) {
    if (by.alone) return put(tile.grad + at, p.turned * (odd ? p.sine : p.cosine) * all_of(by.grid_scaled));
    auto x = released(p, odd, tile, at, by);
    if (__builtin_expect(x.open != 0, 0)) {
        alignas(64) T n[Pair<T>::STEP];
        put(n, x.n);
        settle(x.open, tile.sum + at, n, words, pair, odd, block, by);
        x.n = numbers_at(n);
    }
    put(tile.grad + at, x.n);
}

template <class T>
INLINE void spend(Pair<T> &p, const Tile<T> &tile, int pair, int lane, const uint32_t *words, const Share<T> &share) {
    gather(p, tile, pair, lane, words, share);
}
template <class T>
INLINE void spend(Pair<T> &p, const Tile<T> &tile, int pair, int lane, const uint32_t *words, const Amounts<T> &by) {
    p.turn(words, pair, by.size), p.limit_by(by.size);
    for (int odd = 0; odd < 2; ++odd) {
        release(p, odd == 1, tile, (2 * pair + odd) * LANES + lane, words, pair, tile.block + lane, by);
    }
}

#if FASTDP_W < 16
// A pair of slots, where the compiler makes vectors of the lanes.
template <class T>
INLINE void spend_by_lanes(const uint32_t *words, int pair, const Tile<T> &tile, int lane, const Share<T> &share) {
#pragma omp simd
    for (int l = 0; l < W; ++l) {
        Pair<T> p;
        p.all(words + l, pair), gather(p, tile, pair, lane + l, words + l, share);
    }
}
template <class T>
INLINE void spend_by_lanes(const uint32_t *words, int pair, const Tile<T> &tile, int lane, const Amounts<T> &by) {
    alignas(64) T n[2][W];
    alignas(64) Open open[2][W];
    Open any = 0;
    const int at = 2 * pair * LANES + lane;
#pragma omp simd reduction(| : any)
    for (int l = 0; l < W; ++l) {
        Pair<T> p;
        p.all(words + l, pair), p.turn(words + l, pair, by.size), p.limit_by(by.size);
        const auto even = released(p, false, tile, at + l, by), odd = released(p, true, tile, at + LANES + l, by);
        n[0][l] = by.alone ? p.turned * p.cosine * by.grid_scaled : even.n, open[0][l] = even.open;
        n[1][l] = by.alone ? p.turned * p.sine * by.grid_scaled : odd.n, open[1][l] = odd.open;
        any |= even.open | odd.open;
    }
    for (int slot = 0; any && !by.alone && slot < 2; ++slot) {
        Open lanes = 0;
        for (int l = 0; l < W; ++l) lanes |= open[slot][l] << l;
        settle(lanes, tile.sum + at + slot * LANES, n[slot], words, pair, slot == 1, tile.block + lane, by);
    }
    for (int slot = 0; slot < 2; ++slot) std::copy(n[slot], n[slot] + W, tile.grad + at + slot * LANES);
}

// A pair of slots.
template <class T, class By>
INLINE void spend(const uint32_t *words, int pair, const Tile<T> &tile, int lane, const By &by) {
    if constexpr (Pair<T>::STEP == W) {
        Pair<T> p;
        p.all(words, pair);
        spend(p, tile, pair, lane, words, by);
    } else {
        spend_by_lanes(words, pair, tile, lane, by);
    }
}
#endif

// The normals themselves, for tests.
template <class T>
INLINE void normals_of(const uint32_t *words, int pair, T *even) {
    for (int l = 0; l < W; l += Pair<T>::STEP) {
        Pair<T> p;
        p.all(words + l, pair), p.turn(words + l, pair, 1);
        put(even + l, p.turned * p.cosine), put(even + LANES + l, p.turned * p.sine);
    }
}

}  // namespace FASTDP_ISA
}  // namespace fastdp
