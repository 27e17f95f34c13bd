// Bits to normals, for a pair of slots; included by noise.h once for each instruction set, before noise_tile.h.
//
// Two normals come from 85 bits of a block's words, as fastdp.h says:
//     x in [0, 1) of 53 bits, radius sqrt(-2 ln(1 - x)): 8.57 at the largest x
//     y in (-1/2, 1/2) of 31 bits, and a bit that turns the point by half a circle
//     n = (sum + std * radius * (cos, sin) pi y) * scale
// Pair<double> follows this to 1e-13, Pair<float> to 7e-7 of the radius (tests/ops/test_noise_transform.py measures both).
// Each is cut into pieces, between which noise_tile.h lays the rounds of ChaCha20. Word k of the block lies at w[k * W],
// the slots' elements at `sum` and one LANES further.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC's own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
namespace fastdp {
namespace FASTDP_ISA {

constexpr int W = FASTDP_W;
constexpr uint32_t LOW_BITS = (1u << 21) - 1;  // of 53

template <class T>
struct Pair;

// ---------------------------------------------------------------- in double

#if FASTDP_W == 16
typedef __m512d Real;  // eight doubles, by the names of the plain functions below
typedef __m512i Bits;
typedef __m256i Words;
INLINE Words words_at(const uint32_t *w) { return _mm256_load_si256((const __m256i *)w); }
INLINE Real to_real(Words w) { return _mm512_cvtepu32_pd(w); }
INLINE Real to_real_twice(Words w) { return _mm512_cvtepi32_pd(_mm256_add_epi32(w, w)); }  // signed
INLINE Bits upper_bit(Words w) { return _mm512_slli_epi64(_mm512_cvtepu32_epi64(_mm256_srli_epi32(w, 31)), 63); }
INLINE Words lower_21(Words w) { return _mm256_and_si256(w, _mm256_set1_epi32((int)LOW_BITS)); }
INLINE Words upper_21(Words a, Words b) {
    return _mm256_or_si256(_mm256_srli_epi32(a, 21), _mm256_slli_epi32(_mm256_srli_epi32(b, 22), 11));
}
INLINE Real exponent(Bits above) {  // times 2^52
    return _mm512_cvtepi64_pd(_mm512_and_si512(above, _mm512_set1_epi64((int64_t)0xfff0000000000000u)));
}
INLINE Real real(double x) { return _mm512_set1_pd(x); }
INLINE Real real(Bits x) { return _mm512_castsi512_pd(x); }
INLINE Bits bits(Real x) { return _mm512_castpd_si512(x); }
INLINE Bits bits(uint64_t x) { return _mm512_set1_epi64((int64_t)x); }
INLINE Real fma(Real a, Real b, Real c) { return _mm512_fmadd_pd(a, b, c); }
INLINE Real root(Real x) { return _mm512_sqrt_pd(x); }
INLINE Real real_at(const double *x) { return _mm512_loadu_pd(x); }
INLINE void put(double *x, Real y) { _mm512_storeu_pd(x, y); }
#else
typedef double Real;
typedef uint64_t Bits;
typedef uint32_t Words;
INLINE Words words_at(const uint32_t *w) { return *w; }
// Below AVX-512 nothing converts unsigned integers: by way of the mantissa, also exact.
INLINE Real to_real(Words w) { return double_of(0x4330000000000000u | w) - 0x1p52; }
INLINE Real to_real_twice(Words w) { return (double)(int32_t)(w << 1); }
INLINE Bits upper_bit(Words w) { return (uint64_t)(w >> 31) << 63; }
INLINE Words lower_21(Words w) { return w & LOW_BITS; }
INLINE Words upper_21(Words a, Words b) { return a >> 21 | b >> 22 << 11; }
INLINE Real exponent(Bits above) {
    return (double_of(0x4330000000000000u | (above + (64ull << 52)) >> 52) - (0x1p52 + 64)) * 0x1p52;
}
INLINE Real real(double x) { return x; }
INLINE Real real(Bits x) { return double_of(x); }
INLINE Bits bits(Real x) { return bits_of(x); }
INLINE Bits bits(uint64_t x) { return x; }
INLINE Real fma(Real a, Real b, Real c) { return std::fma(a, b, c); }
INLINE Real root(Real x) { return std::sqrt(x); }
INLINE Real real_at(const double *x) { return *x; }
INLINE void put(double *x, Real y) { *x = y; }
#endif

template <>
struct Pair<double> {
    static constexpr int STEP = W == 16 ? 8 : 1;  // lanes at a time
    Real u, m, t, e, q, log, r, y, square, cosine, sine, turned, even, odd;
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
    INLINE void turn(const uint32_t *w, int pair, const Amounts<double> &by) {
        turned = real(bits(r) ^ upper_bit(words_at(w + (6 + pair) * W))) * real(by.std);
    }
    INLINE void add_to(const double *sum, const Amounts<double> &by) {
        even = fma(turned, cosine, real_at(sum)) * real(by.scale);
        odd = fma(turned, sine, real_at(sum + LANES)) * real(by.scale);
    }
    INLINE void write(double *grad) { put(grad, even), put(grad + LANES, odd); }

    INLINE void all(const uint32_t *w, int pair) {
        uniform(w, pair), split(), divide(), log1(), log2(), log3(), radius(), angle(w, pair);
        circle1(), circle2(), circle3(), circle4(), circle5(), circle6(), circle7();
    }
};

// ---------------------------------------------------------------- in float

#if FASTDP_W == 16
typedef __m512 Single;  // sixteen floats
typedef __m512i Word;
INLINE Word word_at(const uint32_t *w) { return _mm512_load_si512(w); }
INLINE Single single(float x) { return _mm512_set1_ps(x); }
INLINE Word word(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE Single from_signed(Word w) { return _mm512_cvtepi32_ps(w); }
INLINE Word twice(Word w) { return _mm512_add_epi32(w, w); }
INLINE Single with_lower_21(Word w, Word exponent) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(w, word(LOW_BITS), exponent, 0xea));  // a & b | c
}
INLINE Single with_upper_21(Word a, Word b, Word exponent) {
    const Word shifted = _mm512_srli_epi32(a, 21), above = _mm512_srli_epi32(b, 11);
    const Word low = _mm512_ternarylogic_epi32(shifted, above, word(0x7ff), 0xf4);  // a | b & ~c
    return _mm512_castsi512_ps(_mm512_or_si512(low, exponent));
}
INLINE Single turned_by(Word w, Single x) {
    const Word sign = word(0x80000000u);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(w, sign, _mm512_castps_si512(x), 0x6a));  // a & b ^ c
}
INLINE Single fma(Single a, Single b, Single c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Single root(Single x) { return _mm512_sqrt_ps(x); }
INLINE Single single_at(const float *x) { return _mm512_loadu_ps(x); }
INLINE void put(float *x, Single y) { _mm512_storeu_ps(x, y); }
INLINE void split_of(Single z, Single each, Single &f, Single &e) {
    const __mmask16 lower = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_LT_OQ);
    const Single m = _mm512_getmant_ps(z, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_zero);
    f = _mm512_mask_sub_ps(z, lower, single(1.0f), m);
    e = _mm512_maskz_fmadd_ps(lower, _mm512_getexp_ps(z), each, each);  // of m in [1, 2): one less
}
#else
typedef float Single;
typedef uint32_t Word;
INLINE Word word_at(const uint32_t *w) { return *w; }
INLINE Single single(float x) { return x; }
INLINE Word word(uint32_t x) { return x; }
INLINE Single from_signed(Word w) { return (float)(int32_t)w; }
INLINE Word twice(Word w) { return w << 1; }
INLINE Single with_lower_21(Word w, Word exponent) { return float_of((w & LOW_BITS) | exponent); }
INLINE Single with_upper_21(Word a, Word b, Word exponent) { return float_of(a >> 21 | b >> 22 << 11 | exponent); }
INLINE Single turned_by(Word w, Single x) { return float_of((w & 0x80000000u) ^ bits_of(x)); }
INLINE Single fma(Single a, Single b, Single c) { return std::fma(a, b, c); }
INLINE Single root(Single x) { return std::sqrt(x); }
INLINE Single single_at(const float *x) { return *x; }
INLINE void put(float *x, Single y) { *x = y; }
INLINE void split_of(Single z, Single each, Single &f, Single &e) {
    const float m = float_of((bits_of(z) & 0x7fffff) | 0x3f000000);
    const float power = (float)((int32_t)(bits_of(z) >> 23 & 0xff) - 126) * each;
    f = z < 0.0f ? 1.0f - m : z;
    e = z < 0.0f ? power : 0.0f;
}
#endif

template <>
struct Pair<float> {
    static constexpr int STEP = W == 16 ? 16 : 1;
    Single z, f, e, log, r, y, square, cosine, sine, turned, even, odd;

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
    INLINE void turn(const uint32_t *w, int pair, const Amounts<float> &by) {
        turned = turned_by(word_at(w + (6 + pair) * W), r) * single(by.std);
    }
    INLINE void add_to(const float *sum, const Amounts<float> &by) {
        even = fma(turned, cosine, single_at(sum)) * single(by.scale);
        odd = fma(turned, sine, single_at(sum + LANES)) * single(by.scale);
    }
    INLINE void write(float *grad) { put(grad, even), put(grad + LANES, odd); }

    INLINE void all(const uint32_t *w, int pair) {
        uniform(w, pair), split(), log1(), log2(), log3(), log4(), log5(), radius(), angle(w, pair);
        circle1(), circle2(), circle3(), circle4(), circle5(), circle6();
    }
};

// The same for W blocks, all pieces at once.
template <class T>
INLINE void spend(const uint32_t *words, int pair, const T *sum, T *grad, const Amounts<T> &by) {
#pragma omp simd
    for (int l = 0; l < W; l += Pair<T>::STEP) {
        Pair<T> x;
        x.all(words + l, pair), x.turn(words + l, pair, by), x.add_to(sum + l, by), x.write(grad + l);
    }
}

}  // namespace FASTDP_ISA
}  // namespace fastdp
#pragma GCC diagnostic pop
