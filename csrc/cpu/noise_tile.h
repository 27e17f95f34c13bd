// Key stream to normals to updated elements, a tile at a time; included by noise.h once for each instruction set.
//
// A tile is worked off in groups of W blocks, one block a SIMD lane. While the rounds of ChaCha20 for one group
// run, which keep the integer units busy, the words of the group before become normals and are spent on their
// elements, which keeps divider, square root and memory busy: neither needs the other, so the processor overlaps
// them.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
namespace fastdp {
namespace FASTDP_ISA {

constexpr int W = FASTDP_W;

// ---------------------------------------------------------------- bits to normals

#if FASTDP_W == 16
typedef __m512d Real;  // eight doubles, by the names of the plain functions below
typedef __m512i Bits;
typedef __m256i Words;
INLINE Words words_at(const uint32_t *w) { return _mm256_load_si256((const __m256i *)w); }
INLINE Real to_real(Words w) { return _mm512_cvtepu32_pd(w); }
INLINE Bits widen(Words w) { return _mm512_cvtepu32_epi64(w); }
INLINE Real exponent(Bits above) {  // times 2^52
    return _mm512_cvtepi64_pd(_mm512_and_si512(above, _mm512_set1_epi64((int64_t)0xfff0000000000000u)));
}
INLINE Real real(double x) { return _mm512_set1_pd(x); }
INLINE Real real(Bits x) { return _mm512_castsi512_pd(x); }
INLINE Bits bits(Real x) { return _mm512_castpd_si512(x); }
INLINE Bits bits(uint64_t x) { return _mm512_set1_epi64((int64_t)x); }
INLINE Real fma(Real a, Real b, Real c) { return _mm512_fmadd_pd(a, b, c); }
INLINE Real root(Real x) { return _mm512_sqrt_pd(x); }
INLINE Real real_at(const float *x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
INLINE Real real_at(const double *x) { return _mm512_loadu_pd(x); }
INLINE void put(float *x, Real y) { _mm256_storeu_ps(x, _mm512_cvtpd_ps(y)); }
INLINE void put(double *x, Real y) { _mm512_storeu_pd(x, y); }
constexpr int STEP = 8;
#else
typedef double Real;
typedef uint64_t Bits;
typedef uint32_t Words;
INLINE Words words_at(const uint32_t *w) { return *w; }
// Below AVX-512 nothing converts unsigned integers: by way of the mantissa, also exact.
INLINE Real to_real(Words w) { return double_of(0x4330000000000000u | w) - 0x1p52; }
INLINE Bits widen(Words w) { return w; }
INLINE Real exponent(Bits above) {
    return (double_of(0x4330000000000000u | (above + (64ull << 52)) >> 52) - (0x1p52 + 64)) * 0x1p52;
}
INLINE Real real(double x) { return x; }
INLINE Real real(Bits x) { return double_of(x); }
INLINE Bits bits(Real x) { return bits_of(x); }
INLINE Bits bits(uint64_t x) { return x; }
INLINE Real fma(Real a, Real b, Real c) { return std::fma(a, b, c); }
INLINE Real root(Real x) { return std::sqrt(x); }
template <class T>
INLINE Real real_at(const T *x) {
    return (double)*x;
}
template <class T>
INLINE void put(T *x, Real y) {
    *x = (T)y;
}
constexpr int STEP = 1;
#endif

// From words to updated elements in eight pieces, between which the rounds of ChaCha20 are laid: word k of a pair of
// slots is words[k * W], the slots' elements lie at `sum` and one LANES further. Normals of one pair need
//     U = (2^32 w1 + w0 + 1) / 2^64 in (0, 1], radius sqrt(-2 ln U): 9.42 at the smallest U
//     52 bits of w3 w2 for y in [-1/2, 1/2), the last bit to turn the point by half a circle
//     n = (sum + std * radius * (cos, sin) pi y) * scale
struct Pair {
    Real u, m, t, e, q, log, r, y, square, cosine, sine, turned, even, odd;
    Bits above;

    INLINE void uniform(const uint32_t *w) {
        const Real tiny = real(0x1p-64);
        u = fma(to_real(words_at(w + W)), real(0x1p-32), fma(to_real(words_at(w)), tiny, tiny));
    }
    INLINE void split() {  // u = 2^e m, m in [sqrt(1/2), sqrt(2)): near U = 1, where ln U vanishes, nothing cancels
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
    INLINE void radius() { r = root(fma(t, log, e)); }  // never of less than 0: U > sqrt(1/2) has e = 0 and m <= 1
    INLINE void angle(const uint32_t *w) {
        y = real(widen(words_at(w + 3 * W)) << 20 | widen(words_at(w + 2 * W)) >> 12 | bits(0x3ff0000000000000u));
        y = y - real(1.5);
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
    INLINE void turn(const uint32_t *w, double std) {
        turned = real(bits(r) ^ widen(words_at(w + 2 * W)) << 63) * real(std);
    }
    template <class T>
    INLINE void add(const T *sum, double scale) {
        even = fma(turned, cosine, real_at(sum)) * real(scale);
        odd = fma(turned, sine, real_at(sum + LANES)) * real(scale);
    }
    template <class T>
    INLINE void write(T *grad) {
        put(grad, even), put(grad + LANES, odd);
    }
};

// The same for COUNT blocks, all pieces at once.
template <int COUNT, class T>
INLINE void spend(const uint32_t *words, const T *sum, T *grad, double std, double scale) {
#pragma omp simd
    for (int l = 0; l < COUNT; l += STEP) {
        const uint32_t *w = words + l;
        Pair x;
        x.uniform(w), x.split(), x.divide(), x.log1(), x.log2(), x.log3(), x.radius(), x.angle(w);
        x.circle1(), x.circle2(), x.circle3(), x.circle4(), x.circle5(), x.circle6(), x.circle7();
        x.turn(w, std), x.add(sum + l, scale), x.write(grad + l);
    }
}

// ---------------------------------------------------------------- one group

typedef uint32_t V __attribute__((vector_size(4 * W)));

// The four steps of a quarter round, each for all four columns or diagonals.
#define FASTDP_MIX(a, b, d, n) a += b, d ^= a, d = d << n | d >> (32 - n)
#define FASTDP_COLUMNS_1(n) \
    FASTDP_MIX(x0, x4, x12, n), FASTDP_MIX(x1, x5, x13, n), FASTDP_MIX(x2, x6, x14, n), FASTDP_MIX(x3, x7, x15, n)
#define FASTDP_COLUMNS_2(n) \
    FASTDP_MIX(x8, x12, x4, n), FASTDP_MIX(x9, x13, x5, n), FASTDP_MIX(x10, x14, x6, n), FASTDP_MIX(x11, x15, x7, n)
#define FASTDP_DIAGONALS_1(n) \
    FASTDP_MIX(x0, x5, x15, n), FASTDP_MIX(x1, x6, x12, n), FASTDP_MIX(x2, x7, x13, n), FASTDP_MIX(x3, x4, x14, n)
#define FASTDP_DIAGONALS_2(n) \
    FASTDP_MIX(x10, x15, x5, n), FASTDP_MIX(x11, x12, x6, n), FASTDP_MIX(x8, x13, x7, n), FASTDP_MIX(x9, x14, x4, n)

// Fetches the elements of the tile after the next, in case they lie behind this one.
template <class T>
INLINE void ahead(const Tile<T> &tile, int at) {
    const int next = at + 2 * TILE;
    __builtin_prefetch(tile.sum + next), __builtin_prefetch(tile.param + next, 1);
    __builtin_prefetch(tile.first + next, 1), __builtin_prefetch(tile.second + next, 1);
}

// Words of the W blocks from the counter in state[12], state[13] into `next` [16][W]; meanwhile, where SPEND, the
// words of the group before are spent on the lanes from `lane` of `tile`.
//
// With AVX-512 half the lanes of a pair of slots are begun in each of the first eight double rounds, continued in the
// next and finished in the one after: no instruction stands in the queue long before its operands are there.
template <bool SPEND, class T, class Update>
INLINE void group(const uint32_t *s, uint32_t *next, const uint32_t *words, const Tile<T> &tile, int lane, double std,
                  double scale, const Update &update) {
    V low, high;
    for (int l = 0; l < W; ++l) low[l] = s[12] + (uint32_t)l, high[l] = s[13] + (s[12] + (uint32_t)l < s[12] ? 1 : 0);
    V x0 = V{} + s[0], x1 = V{} + s[1], x2 = V{} + s[2], x3 = V{} + s[3], x4 = V{} + s[4], x5 = V{} + s[5];
    V x6 = V{} + s[6], x7 = V{} + s[7], x8 = V{} + s[8], x9 = V{} + s[9], x10 = V{} + s[10], x11 = V{} + s[11];
    V x12 = low, x13 = high, x14 = V{} + s[14], x15 = V{} + s[15];
#if FASTDP_W == 16
    Pair p;
#pragma GCC unroll 10
    for (int i = 0; i < 10; ++i) {
        const bool begin = SPEND && i < 8, go_on = SPEND && i >= 1 && i < 9, finish = SPEND && i >= 2;
        const uint32_t *w0 = words + i / 2 * 4 * W + i % 2 * 8, *w1 = words + (i - 1) / 2 * 4 * W + (i - 1) % 2 * 8;
        const uint32_t *w2 = words + (i - 2) / 2 * 4 * W + (i - 2) % 2 * 8;
        const int at = (i - 2) / 2 * 2 * LANES + lane + (i - 2) % 2 * 8;
        FASTDP_COLUMNS_1(16);
        if (SPEND && i < SLOTS) ahead(tile, i * LANES + lane);
        if (finish) p.turn(w2, std);
        if (go_on) p.log1(), p.angle(w1);
        FASTDP_COLUMNS_2(12);
        if (finish) p.add(tile.sum + at, scale);
        if (go_on) p.log2(), p.circle1();
        FASTDP_COLUMNS_1(8);
        if (finish) p.write(tile.grad + at);
        if (go_on) p.log3(), p.circle2();
        if (begin) p.uniform(w0);
        FASTDP_COLUMNS_2(7);
        if (go_on) p.radius(), p.circle3();
        if (begin) p.split();
        FASTDP_DIAGONALS_1(16);
        if (begin) p.divide();
        if (go_on) p.circle4();
        FASTDP_DIAGONALS_2(12);
        if (go_on) p.circle5();
        FASTDP_DIAGONALS_1(8);
        if (go_on) p.circle6();
        if (SPEND && i >= 3) update.template apply<W>(tile, (i - 3) * LANES + lane);
        FASTDP_DIAGONALS_2(7);
        if (go_on) p.circle7();
    }
    if (SPEND) update.template apply<W>(tile, 7 * LANES + lane);
#else
    for (int i = 0; i < 10; ++i) {
        FASTDP_COLUMNS_1(16), FASTDP_COLUMNS_2(12), FASTDP_COLUMNS_1(8), FASTDP_COLUMNS_2(7);
        FASTDP_DIAGONALS_1(16), FASTDP_DIAGONALS_2(12), FASTDP_DIAGONALS_1(8), FASTDP_DIAGONALS_2(7);
        if (SPEND && i < SLOTS && i % 2 == 0) {
            const int at = i * LANES + lane;
            spend<W>(words + 2 * i * W, tile.sum + at, tile.grad + at, std, scale);
        }
        if (SPEND && i >= 2) update.template apply<W>(tile, (i - 2) * LANES + lane);
    }
#endif
    V *out = (V *)next;
    out[0] = x0 + s[0], out[1] = x1 + s[1], out[2] = x2 + s[2], out[3] = x3 + s[3], out[4] = x4 + s[4];
    out[5] = x5 + s[5], out[6] = x6 + s[6], out[7] = x7 + s[7], out[8] = x8 + s[8], out[9] = x9 + s[9];
    out[10] = x10 + s[10], out[11] = x11 + s[11], out[12] = x12 + low, out[13] = x13 + high, out[14] = x14 + s[14];
    out[15] = x15 + s[15];
}

// ---------------------------------------------------------------- many tiles

// The tiles [begin, end) of the work's list.
template <class T, class Update>
void draw_tiles(const Work &work, const Update &update, int64_t begin, int64_t end) {
    alignas(64) uint32_t words[2][16 * W], state[16];
    alignas(64) T copy[4][TILE];
    if (begin >= end) return;
    std::memcpy(state, work.state, sizeof state);
    Place place = place_of(work, begin);
    count_from(state, place.tile * LANES);
    int turn = 0;
    group<false>(state, words[0], nullptr, Tile<T>{}, 0, 0.0, 0.0, NoUpdate());
    for (int64_t number = begin; number < end; ++number) {
        const fastdp_tensor &x = work.tensors[place.tensor];
        const Place after = number + 1 < end ? place_after(work, place, number + 1) : place;
        const int64_t start = place.tile * TILE - x.offset;  // of the tile, in the tensor
        const int from = (int)std::max<int64_t>(0, -start), to = (int)std::min<int64_t>(TILE, x.count - start);
        T *sum = fetch(x.sum, x.sum_type, start, from, to, work.read != 0, copy[0]);
        Tile<T> tile;
        tile.sum = work.read ? sum : (const T *)(const void *)zeros;
        tile.grad = work.keep ? sum : copy[0];
        tile.param = fetch(x.param, x.param_type, start, from, to, true, copy[1]);
        tile.first = fetch(x.first, x.first_type, start, from, to, true, copy[2]);
        tile.second = fetch(x.second, x.second_type, start, from, to, true, copy[3]);
        for (int lane = 0; lane < LANES; lane += W, turn ^= 1) {
            const bool last = lane + W == LANES;
            count_from(state, last ? after.tile * LANES : place.tile * LANES + lane + W);
            group<true>(state, words[turn ^ 1], words[turn], tile, lane, work.std, work.scale, update);
        }
        const int count = to - from;
        if (work.keep && tile.grad == copy[0]) store(x.sum_type, copy[0] + from, count, x.sum, start + from);
        if (tile.param == copy[1]) store(x.param_type, copy[1] + from, count, x.param, start + from);
        if (tile.first == copy[2]) store(x.first_type, copy[2] + from, count, x.first, start + from);
        if (tile.second == copy[3]) store(x.second_type, copy[3] + from, count, x.second, start + from);
        place = after;
    }
}

// ---------------------------------------------------------------- for tests

inline void blocks(const uint32_t *given, uint32_t *words) {
    alignas(64) uint32_t state[16], part[16 * W];
    std::copy(given, given + 16, state);
    const uint64_t counter = (uint64_t)given[13] << 32 | given[12];
    for (int lane = 0; lane < LANES; lane += W) {
        count_from(state, (int64_t)(counter + (uint64_t)lane));
        group<false>(state, part, nullptr, Tile<float>{}, 0, 0.0, 0.0, NoUpdate());
        for (int k = 0; k < 16; ++k) std::copy(part + k * W, part + (k + 1) * W, words + k * LANES + lane);
    }
}

inline void transform(const uint32_t *words, double *normals) {
    alignas(64) uint32_t part[4 * W];
    for (int pair = 0; pair < SLOTS / 2; ++pair) {
        for (int lane = 0; lane < LANES; lane += W) {
            for (int k = 0; k < 4; ++k) {
                const uint32_t *w = words + (4 * pair + k) * LANES + lane;
                std::copy(w, w + W, part + k * W);
            }
            spend<W>(part, zeros, normals + 2 * pair * LANES + lane, 1.0, 1.0);
        }
    }
}

}  // namespace FASTDP_ISA
}  // namespace fastdp
#pragma GCC diagnostic pop
