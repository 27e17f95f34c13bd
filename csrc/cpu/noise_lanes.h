// The processor's vectors by names that stand for one number elsewhere; included by noise.h once for each instruction set.
namespace fastdp {
namespace FASTDP_ISA {

constexpr int W = FASTDP_W;
constexpr uint32_t LOW_BITS = 15;  // of a circle's word, the last ones of x

typedef uint32_t Open;  // a bit for each lane

// ---------------------------------------------------------------- in double

#if FASTDP_W == 16
typedef __m512d Real;  // eight doubles, by the names of the plain functions below
typedef __m512i Bits;
typedef __m256i Words;
INLINE Words words_at(const uint32_t *w) { return _mm256_load_si256((const __m256i *)w); }
INLINE Real to_real(Words w) { return _mm512_cvtepu32_pd(w); }
INLINE Real real_circle_of(Words w) {  // its bits but for the upper one, signed
    return _mm512_cvtepi32_pd(_mm256_andnot_si256(_mm256_set1_epi32((int)LOW_BITS * 2 + 1), _mm256_add_epi32(w, w)));
}
INLINE Bits upper_bit(Words w) { return _mm512_slli_epi64(_mm512_cvtepu32_epi64(_mm256_srli_epi32(w, 31)), 63); }
INLINE Words low_bits(Words w) { return _mm256_and_si256(w, _mm256_set1_epi32((int)LOW_BITS)); }
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
INLINE Real size_of(Real x) { return _mm512_abs_pd(x); }
INLINE Real smaller(Real a, Real b) { return _mm512_min_pd(a, b); }
INLINE Real larger(Real a, Real b) { return _mm512_max_pd(a, b); }
INLINE Real rounded(Real x) { return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Open beyond(Real x, Real limit) { return _mm512_cmp_pd_mask(_mm512_abs_pd(x), limit, _CMP_NLE_UQ); }
#else
typedef double Real;
typedef uint64_t Bits;
typedef uint32_t Words;
INLINE Words words_at(const uint32_t *w) { return *w; }
// Below AVX-512 nothing converts unsigned integers: by way of the mantissa, also exact.
INLINE Real to_real(Words w) { return double_of(0x4330000000000000u | w) - 0x1p52; }
INLINE Real real_circle_of(Words w) { return (double)(int32_t)((w & ~LOW_BITS) << 1); }
INLINE Bits upper_bit(Words w) { return (uint64_t)(w >> 31) << 63; }
INLINE Words low_bits(Words w) { return w & LOW_BITS; }
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
INLINE Real size_of(Real x) { return std::fabs(x); }
INLINE Real smaller(Real a, Real b) { return std::min(a, b); }
INLINE Real larger(Real a, Real b) { return std::max(a, b); }
INLINE Real rounded(Real x) { return std::rint(x); }
INLINE Open beyond(Real x, Real limit) { return !(std::fabs(x) <= limit); }
#endif

// ---------------------------------------------------------------- in float

#if FASTDP_W == 16
typedef __m512 Single;  // sixteen floats
typedef __m512i Word;
INLINE Word word_at(const uint32_t *w) { return _mm512_load_si512(w); }
INLINE Single single(float x) { return _mm512_set1_ps(x); }
INLINE Word word(uint32_t x) { return _mm512_set1_epi32((int)x); }
INLINE Single from_signed(Word w) { return _mm512_cvtepi32_ps(w); }
INLINE Word circle_of(Word w) { return _mm512_andnot_si512(word(2 * LOW_BITS + 1), _mm512_add_epi32(w, w)); }
INLINE Single with_low_bits(Word w, Word exponent) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(w, word(LOW_BITS), exponent, 0xea));  // a & b | c
}
INLINE Single turned_by(Word w, Single x) {
    const Word sign = word(0x80000000u);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(w, sign, _mm512_castps_si512(x), 0x6a));  // a & b ^ c
}
INLINE Single fma(Single a, Single b, Single c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Single root(Single x) { return _mm512_sqrt_ps(x); }
INLINE Single single_at(const float *x) { return _mm512_loadu_ps(x); }
INLINE void put(float *x, Single y) { _mm512_storeu_ps(x, y); }
INLINE Single size_of(Single x) { return _mm512_abs_ps(x); }
INLINE Single smaller(Single a, Single b) { return _mm512_min_ps(a, b); }
INLINE Single larger(Single a, Single b) { return _mm512_max_ps(a, b); }
INLINE Single rounded(Single x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Open beyond(Single x, Single limit) { return _mm512_cmp_ps_mask(_mm512_abs_ps(x), limit, _CMP_NLE_UQ); }
INLINE void split_of(Single z, Single each, Single &f, Single &e) {
    const __mmask16 lower = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_LT_OQ);
    const Single m = _mm512_getmant_ps(z, _MM_MANT_NORM_p5_1, _MM_MANT_SIGN_zero);
    f = _mm512_mask_sub_ps(z, lower, single(1.0f), m);
    e = _mm512_maskz_fmadd_ps(lower, _mm512_getexp_ps(z), each, each);  // of m in [1, 2): one less
}
#elif FASTDP_W == 8
typedef __m256 Single;  // eight floats
typedef __m256i Word;
INLINE Word word_at(const uint32_t *w) { return _mm256_load_si256((const __m256i *)w); }
INLINE Single single(float x) { return _mm256_set1_ps(x); }
INLINE Word word(uint32_t x) { return _mm256_set1_epi32((int)x); }
INLINE Single single(Word w) { return _mm256_castsi256_ps(w); }
INLINE Word bits(Single x) { return _mm256_castps_si256(x); }
INLINE Single from_signed(Word w) { return _mm256_cvtepi32_ps(w); }
INLINE Word circle_of(Word w) { return _mm256_add_epi32(w, w) & word(~(2 * LOW_BITS + 1)); }
INLINE Single with_low_bits(Word w, Word exponent) { return single((w & word(LOW_BITS)) | exponent); }
INLINE Single turned_by(Word w, Single x) { return single((w & word(0x80000000u)) ^ bits(x)); }
INLINE Single fma(Single a, Single b, Single c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Single root(Single x) { return _mm256_sqrt_ps(x); }
INLINE Single single_at(const float *x) { return _mm256_loadu_ps(x); }
INLINE void put(float *x, Single y) { _mm256_storeu_ps(x, y); }
INLINE Single size_of(Single x) { return single(bits(x) & word(0x7fffffffu)); }
INLINE Single smaller(Single a, Single b) { return _mm256_min_ps(a, b); }
INLINE Single larger(Single a, Single b) { return _mm256_max_ps(a, b); }
INLINE Single rounded(Single x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Open beyond(Single x, Single limit) {
    const Single size = single(bits(x) & word(0x7fffffffu));
    return (Open)_mm256_movemask_ps(_mm256_cmp_ps(size, limit, _CMP_NLE_UQ));
}
INLINE void split_of(Single z, Single each, Single &f, Single &e) {
    const Single m = single((bits(z) & word(0x7fffff)) | word(0x3f000000));
    const Word exponent = _mm256_srli_epi32(_mm256_add_epi32(bits(z), bits(z)), 24);
    const Single power = from_signed(_mm256_sub_epi32(exponent, word(126))) * each;
    f = _mm256_blendv_ps(z, single(1.0f) - m, z);  // by the sign
    e = _mm256_blendv_ps(single(0.0f), power, z);
}
#else
typedef float Single;
typedef uint32_t Word;
INLINE Word word_at(const uint32_t *w) { return *w; }
INLINE Single single(float x) { return x; }
INLINE Word word(uint32_t x) { return x; }
INLINE Single from_signed(Word w) { return (float)(int32_t)w; }
INLINE Word circle_of(Word w) { return (w & ~LOW_BITS) << 1; }
INLINE Single with_low_bits(Word w, Word exponent) { return float_of((w & LOW_BITS) | exponent); }
INLINE Single turned_by(Word w, Single x) { return float_of((w & 0x80000000u) ^ bits_of(x)); }
INLINE Single fma(Single a, Single b, Single c) { return std::fma(a, b, c); }
INLINE Single root(Single x) { return std::sqrt(x); }
INLINE Single single_at(const float *x) { return *x; }
INLINE void put(float *x, Single y) { *x = y; }
INLINE Single size_of(Single x) { return std::fabs(x); }
INLINE Single smaller(Single a, Single b) { return std::min(a, b); }
INLINE Single larger(Single a, Single b) { return std::max(a, b); }
INLINE Single rounded(Single x) { return std::rint(x); }
INLINE Open beyond(Single x, Single limit) { return !(std::fabs(x) <= limit); }
INLINE void split_of(Single z, Single each, Single &f, Single &e) {
    const float m = float_of((bits_of(z) & 0x7fffff) | 0x3f000000);
    const float power = (float)((int32_t)(bits_of(z) >> 23 & 0xff) - 126) * each;
    f = z < 0.0f ? 1.0f - m : z;
    e = z < 0.0f ? power : 0.0f;
}
#endif

INLINE Real all_of(double x) { return real(x); }
INLINE Single all_of(float x) { return single(x); }
INLINE Real numbers_at(const double *x) { return real_at(x); }
INLINE Single numbers_at(const float *x) { return single_at(x); }

}  // namespace FASTDP_ISA
}  // namespace fastdp
