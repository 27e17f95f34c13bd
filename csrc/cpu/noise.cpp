// Gaussian noise from ChaCha20 (RFC 8439) by Box & Muller (1958), added in place.
//
// A tile of 64 blocks is drawn into L1 (4 KiB), one block a SIMD lane, and spent at once on 512 elements.
// Everything is written as loops over lanes that the compiler vectorises for each instruction set. Only
// IEEE operations and no contraction to fma (-ffp-contract=off), so every instruction set gives the same bits.
#include "../fastdp.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = FASTDP_LANES, SLOTS = FASTDP_SLOTS, TILE = FASTDP_TILE;
constexpr int64_t TILES_PER_THREAD = 32;  // less is not worth waking a thread

// ---------------------------------------------------------------- ChaCha20

INLINE uint32_t rotate_left(uint32_t x, int n) { return (x << n) | (x >> (32 - n)); }

INLINE void quarter_round(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
    a += b, d = rotate_left(d ^ a, 16);
    c += d, b = rotate_left(b ^ c, 12);
    a += b, d = rotate_left(d ^ a, 8);
    c += d, b = rotate_left(b ^ c, 7);
}

CLONES void chacha20_blocks(const uint32_t *__restrict s, uint32_t *__restrict words) {
#pragma omp simd
    for (int l = 0; l < LANES; ++l) {
        // the counter's low word, and the carry into its high word
        const uint32_t low = s[12] + (uint32_t)l, high = s[13] + (low < s[12] ? 1u : 0u);
        uint32_t x0 = s[0], x1 = s[1], x2 = s[2], x3 = s[3], x4 = s[4], x5 = s[5], x6 = s[6], x7 = s[7];
        uint32_t x8 = s[8], x9 = s[9], x10 = s[10], x11 = s[11], x12 = low, x13 = high, x14 = s[14], x15 = s[15];
#pragma GCC unroll 10
        for (int i = 0; i < 10; ++i) {
            quarter_round(x0, x4, x8, x12);
            quarter_round(x1, x5, x9, x13);
            quarter_round(x2, x6, x10, x14);
            quarter_round(x3, x7, x11, x15);
            quarter_round(x0, x5, x10, x15);
            quarter_round(x1, x6, x11, x12);
            quarter_round(x2, x7, x8, x13);
            quarter_round(x3, x4, x9, x14);
        }
        uint32_t *w = words + l;
        w[0 * LANES] = x0 + s[0], w[1 * LANES] = x1 + s[1], w[2 * LANES] = x2 + s[2], w[3 * LANES] = x3 + s[3];
        w[4 * LANES] = x4 + s[4], w[5 * LANES] = x5 + s[5], w[6 * LANES] = x6 + s[6], w[7 * LANES] = x7 + s[7];
        w[8 * LANES] = x8 + s[8], w[9 * LANES] = x9 + s[9], w[10 * LANES] = x10 + s[10];
        w[11 * LANES] = x11 + s[11], w[12 * LANES] = x12 + low, w[13 * LANES] = x13 + high;
        w[14 * LANES] = x14 + s[14], w[15 * LANES] = x15 + s[15];
    }
}

// ---------------------------------------------------------------- bits to normals

INLINE double as_double(uint64_t bits) {
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}

INLINE uint64_t as_bits(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, 8);
    return bits;
}

// sqrt(-2 ln U) with U = (2^32 high + low + 1) / 2^64 in (0, 1]: 9.42 at the smallest U.
INLINE double radius(uint32_t high, uint32_t low) {
    // Integers become doubles by way of the mantissa (2^84 + 2^32 high, 2^52 + low): SSE2 and AVX2 have no
    // conversion of unsigned integers. One rounding, in the last addition.
    const double upper = as_double(0x4530000000000000u | high) - 0x1p84;
    const double v = upper + (as_double(0x4330000000000000u | low) - (0x1p52 - 1));
    // v = 2^e m with m in [sqrt(1/2), sqrt(2)): then near U = 1, where ln U vanishes, nothing cancels.
    const uint64_t bits = as_bits(v), e = (bits - 0x3fe6a09e667f3bcdu) >> 52;
    const double m = as_double(bits - (e << 52));
    const double exponent = as_double(0x4330000000000000u | e) - (0x1p52 + 64);
    // ln m = 2 atanh t = 2 t (1 + t^2 / 3 + t^4 / 5 + ...), |t| <= 0.172: truncated at 1e-15 of it
    const double t = (m - 1) / (m + 1), q = t * t;
    double sum = 1.0 / 17;
    sum = sum * q + 1.0 / 15;
    sum = sum * q + 1.0 / 13;
    sum = sum * q + 1.0 / 11;
    sum = sum * q + 1.0 / 9;
    sum = sum * q + 1.0 / 7;
    sum = sum * q + 1.0 / 5;
    sum = sum * q + 1.0 / 3;
    sum = sum * q + 1;
    const double log_u = exponent * 0x1.62e42fefa39efp-1 + 2 * t * sum;
    return std::sqrt(-2 * log_u);  // log_u <= 0: of U > sqrt(1/2) the exponent is 0 and m <= 1
}

// cos and sin of x in [-pi/2, pi/2] by Taylor's series; the first terms left out are x^20 / 20! and x^21 / 21!,
// at the ends of the range 3.4e-15 and 2.6e-16.
INLINE void cosine_sine(double x, double &cosine, double &sine) {
    const double q = x * x;
    double c = -1.0 / 6402373705728000.0;
    c = c * q + 1.0 / 20922789888000.0;
    c = c * q - 1.0 / 87178291200.0;
    c = c * q + 1.0 / 479001600.0;
    c = c * q - 1.0 / 3628800.0;
    c = c * q + 1.0 / 40320.0;
    c = c * q - 1.0 / 720.0;
    c = c * q + 1.0 / 24.0;
    c = c * q - 1.0 / 2.0;
    cosine = c * q + 1;
    double s = -1.0 / 121645100408832000.0;
    s = s * q + 1.0 / 355687428096000.0;
    s = s * q - 1.0 / 1307674368000.0;
    s = s * q + 1.0 / 6227020800.0;
    s = s * q - 1.0 / 39916800.0;
    s = s * q + 1.0 / 362880.0;
    s = s * q - 1.0 / 5040.0;
    s = s * q + 1.0 / 120.0;
    s = s * q - 1.0 / 6.0;
    sine = (s * q) * x + x;
}

// data = (data + std * normal) * scale for a whole tile; words [16][LANES], data [SLOTS][LANES].
template <typename T>
INLINE void spend(const uint32_t *__restrict words, T *__restrict data, double std, double scale) {
    for (int p = 0; p < SLOTS / 2; ++p) {
        const uint32_t *w = words + 4 * p * LANES;
        T *even = data + 2 * p * LANES, *odd = even + LANES;
#pragma omp simd
        for (int l = 0; l < LANES; ++l) {
            const double r = radius(w[l + LANES], w[l]);
            // The angle: 52 bits give x in [-pi/2, pi/2), the last bit turns the point by half a circle.
            const uint64_t a = (uint64_t)w[l + 3 * LANES] << 32 | w[l + 2 * LANES];
            const double x = (as_double(0x3ff0000000000000u | a >> 12) - 1.5) * 0x1.921fb54442d18p+1;
            double cosine, sine;
            cosine_sine(x, cosine, sine);
            const double turned = as_double(as_bits(r) ^ a << 63);
            even[l] = (T)(((double)even[l] + (turned * cosine) * std) * scale);
            odd[l] = (T)(((double)odd[l] + (turned * sine) * std) * scale);
        }
    }
}

CLONES void spend_tile(const uint32_t *words, float *data, double std, double scale) {
    spend(words, data, std, scale);
}

CLONES void spend_tile(const uint32_t *words, double *data, double std, double scale) {
    spend(words, data, std, scale);
}

// ---------------------------------------------------------------- arrays

uint32_t little_endian(const uint8_t *b) {
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

// One tile of the global index, of which `data` holds the elements [from, to).
template <typename T>
void one_tile(const uint32_t *base, int64_t tile, T *data, int from, int to, double std, double scale, bool keep) {
    uint32_t state[16], words[16 * LANES];
    std::memcpy(state, base, sizeof state);
    const uint64_t counter = (uint64_t)tile * LANES;
    state[12] = (uint32_t)counter, state[13] = (uint32_t)(counter >> 32);
    chacha20_blocks(state, words);
    if (from == 0 && to == TILE) {
        if (!keep) std::memset(data, 0, TILE * sizeof(T));
        spend_tile(words, data, std, scale);
        return;
    }
    T part[TILE] = {};
    if (keep) std::copy(data, data + (to - from), part + from);
    spend_tile(words, part, std, scale);
    std::copy(part + from, part + to, data);
}

template <typename T>
void add_noise(T *data, int64_t count, int64_t offset, const uint8_t *key, uint64_t step, double std, double scale,
               bool keep, int threads) {
    if (count <= 0) return;
    uint32_t base[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};  // "expand 32-byte k"
    for (int k = 0; k < 8; ++k) base[4 + k] = little_endian(key + 4 * k);
    base[14] = (uint32_t)step;
    base[15] = (uint32_t)(step >> 32) | (uint32_t)FASTDP_DOMAIN_NOISE << 16;
    const int64_t first = offset / TILE, last = (offset + count - 1) / TILE, tiles = last - first + 1;
    const int team = (int)std::max<int64_t>(1, std::min<int64_t>(threads, tiles / TILES_PER_THREAD));
#pragma omp parallel for schedule(static) num_threads(team) if (team > 1)
    for (int64_t tile = first; tile <= last; ++tile) {
        const int64_t begin = tile * TILE - offset;  // of the tile, in data
        const int from = (int)std::max<int64_t>(0, -begin), to = (int)std::min<int64_t>(TILE, count - begin);
        one_tile(base, tile, data + begin + from, from, to, std, scale, keep);
    }
}

}  // namespace

extern "C" {

void fastdp_chacha20_blocks(const uint32_t *state, uint32_t *words) { chacha20_blocks(state, words); }

void fastdp_box_muller(const uint32_t *words, double *normals) {
    std::memset(normals, 0, TILE * sizeof(double));
    spend_tile(words, normals, 1.0, 1.0);
}

void fastdp_noise_f32(float *data, int64_t count, int64_t offset, const uint8_t *key, uint64_t step, double std,
                      double scale, int keep, int threads) {
    add_noise(data, count, offset, key, step, std, scale, keep != 0, threads);
}

void fastdp_noise_f64(double *data, int64_t count, int64_t offset, const uint8_t *key, uint64_t step, double std,
                      double scale, int keep, int threads) {
    add_noise(data, count, offset, key, step, std, scale, keep != 0, threads);
}

}  // extern "C"
