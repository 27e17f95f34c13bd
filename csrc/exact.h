// The whole number next to p + c z, z a normal of the key stream, or a weighted sum of normals of several steps, where
// float arithmetic leaves it open.
//
// The 36 bits of a pair's x and the 27 of its angle are the first ones of two real numbers; level 1, 2 and 3 of the
// key stream (see fastdp.h) give 32 more of each. So z is known to lie in an interval, which arithmetic widens by a
// bound of its error. First in double, without a level; where that leaves the middle of two whole numbers in the
// interval (one normal in 200,000), by one level; then all levels by pairs of doubles (Dekker 1971). What is open then
// has a probability below 2^-80 (2^-70, if the weights' sizes add up to 1024) and becomes NaN.
// For the CPU and for CUDA.
#ifndef FASTDP_EXACT_H
#define FASTDP_EXACT_H

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define EXACTLY __device__ inline
#else
#define EXACTLY inline
#endif

namespace fastdp {
namespace exact {

constexpr int LEVELS = 3;
constexpr double LN2 = 0x1.62e42fefa39efp-1, LN2_REST = 0x1.abc9e3b39803fp-56;
constexpr double PI = 0x1.921fb54442d18p+1, PI_REST = 0x1.1a62633145c07p-53;

// What is known of a pair: 36 bits of x, 28 of its point on the circle, and whether the sine is asked for.
struct Bits {
    uint64_t x;
    uint32_t circle;
    bool odd;
};

// A sum and a product that the compiler does not join into one rounding.
#ifdef __CUDA_ARCH__
EXACTLY double plus(double a, double b) { return __dadd_rn(a, b); }
EXACTLY double times(double a, double b) { return __dmul_rn(a, b); }
#else
EXACTLY double plus(double a, double b) { return a + b; }
EXACTLY double times(double a, double b) { return a * b; }
#endif

// ---------------------------------------------------------------- pairs of doubles

struct Two {  // high + low, |low| at most half a unit in the last place of high: 2^-106 of it
    double high, low;
    EXACTLY Two(double a = 0, double b = 0) : high(a), low(b) {}
};

EXACTLY Two in_order(double a, double b) {  // |a| >= |b|, or a = 0
    const double sum = plus(a, b);
    return Two(sum, plus(b, -plus(sum, -a)));
}
EXACTLY Two sum_of(double a, double b) {
    const double sum = plus(a, b), other = plus(sum, -a);
    return Two(sum, plus(plus(a, -plus(sum, -other)), plus(b, -other)));
}
EXACTLY Two operator-(Two a) { return Two(-a.high, -a.low); }
EXACTLY Two operator+(Two a, Two b) {
    Two high = sum_of(a.high, b.high);
    const Two low = sum_of(a.low, b.low);
    high = in_order(high.high, plus(high.low, low.high));
    return in_order(high.high, plus(high.low, low.low));
}
EXACTLY Two operator*(Two a, Two b) {
    const double product = times(a.high, b.high);
    const double rest = fma(a.high, b.high, -product);
    return in_order(product, plus(rest, fma(a.high, b.low, times(a.low, b.high))));
}
EXACTLY Two operator/(Two a, Two b) {
    const double first = a.high / b.high;
    const Two rest = a + -(b * Two(first));
    const double second = rest.high / b.high, third = (rest + -(b * Two(second))).high / b.high;
    return in_order(first, second) + Two(third);
}
EXACTLY Two root(Two a) {
    if (!(a.high > 0)) return Two(0);
    const double first = sqrt(a.high);
    const Two rest = a + -(Two(first) * Two(first));
    return in_order(first, rest.high / (2 * first));
}
EXACTLY double root(double a) { return sqrt(a > 0 ? a : 0); }

EXACTLY double first_of(double a) { return a; }
EXACTLY double first_of(Two a) { return a.high; }
EXACTLY double rest_of(double) { return 0; }
EXACTLY double rest_of(Two a) { return a.low; }

// ---------------------------------------------------------------- functions

// A bound of all errors, relative to what is computed.
template <class Real>
constexpr double ERROR = sizeof(Real) == sizeof(double) ? 0x1p-46 : 0x1p-92;

// -2 ln(u 2^-36), u > 0
EXACTLY double minus_two_log(double u) { return -2 * log(u * 0x1p-36); }
EXACTLY Two minus_two_log(Two u) {  // -2 ln m = -4 atanh((m - 1) / (m + 1)), m in [sqrt(1/2), sqrt(2)]
    int exponent;
    double m = frexp(u.high, &exponent);
    if (m < 0.7071067811865476) m *= 2, exponent -= 1;
    const Two mantissa(m, u.low * ldexp(1.0, -exponent)), t = (mantissa + Two(-1)) / (mantissa + Two(1)), square = t * t;
    Two series;
    for (int k = 21; k-- > 0;) series = series * square + Two(1) / Two(2 * k + 1);
    return Two(LN2, LN2_REST) * Two(-2.0 * (exponent - 36)) + t * series * Two(-4);
}

// cos(pi y) or sin(pi y), |y| <= 1/2
EXACTLY double circle(double y, bool sine) { return sine ? sin(PI * y) : cos(PI * y); }
EXACTLY Two circle(Two y, bool sine) {  // by their series
    const Two x = Two(PI, PI_REST) * y, square = x * x;
    Two series(1);
    for (int k = 17; k > 0; --k) {
        const double below = sine ? 2.0 * k * (2 * k + 1) : (2.0 * k - 1) * (2 * k);
        series = Two(1) + square * series / Two(-below);
    }
    return sine ? x * series : series;
}

// ---------------------------------------------------------------- the nearest whole number

EXACTLY Two join(Two a, double b) { return a + Two(b); }
EXACTLY double join(double a, double b) { return a + b; }

// part + the normals so far, and how far off that may be.
template <class Real>
struct Total {
    Real v;
    double off;
};

// Adds size z, with the first `levels` words of z's x and circle. count: of all normals of the total.
template <class Real>
EXACTLY void add_normal(Total<Real> &total, const Bits &bits, const uint32_t *x, const uint32_t *around, int levels,
                        double size, int count) {
    const double error = ERROR<Real> * (1 + 0.03125 * (count - 1));  // each sum rounds
    const double finest = ldexp(1.0, -32 * levels);  // of a bit of x: in units of 2^-36
    Real u = Real((double)((1ull << 36) - bits.x));
    Real y = Real((double)(int32_t)(bits.circle << 5) * 0x1p-32);
    for (int level = 0; level < levels; ++level) {
        u = join(u, -ldexp((double)x[level], -32 * (level + 1)));
        y = join(y, ldexp((double)around[level], -27 - 32 * (level + 1)));
    }
    const Real log = minus_two_log(u), radius = root(log);
    Real turned = radius;
    if (bits.circle >> 27) turned = -radius;
    total.v = turned * circle(y, bits.odd) * Real(size) + total.v;
    // how far off `log` may be: by arithmetic, and as x may be greater by one of its finest bits
    const double r = first_of(radius);
    const double log_off = error * (first_of(log) + 1) + 2.0000001 * finest / (first_of(u) - finest);
    const double radius_off = 2 * log_off / (r + sqrt(log_off));
    total.off += 1.0000001 * fabs(size) * (radius_off + r * (error + 7 * finest * 0x1p-28));
}

// NaN where a half-integer may lie between.
template <class Real>
EXACTLY double nearest(const Total<Real> &total) {
    const Real v = total.v;
    double whole = nearbyint(first_of(v));
    const double above = first_of(v) - whole, beyond = (fabs(above) - 0.5) + (above < 0 ? -rest_of(v) : rest_of(v));
    if (beyond > 0) whole += above < 0 ? -1 : 1;
    return fabs(beyond) > total.off ? whole : NAN;
}

// The bits of a pair of a block.
EXACTLY Bits bits_of(const uint32_t *words, int pair, bool odd) {
    const uint32_t high = words[pair], circle = words[8 + pair];
    return {(uint64_t)high << 4 | circle % 16, circle / 16, odd};
}

// Adds all normals, with the first `levels` words of each.
template <class Real, class Sizes, class Block>
EXACTLY double nearest_by(int levels, int pair, bool odd, double part, int count, const Sizes &size_of,
                          const Block &block) {
    Total<Real> total = {Real(part), ERROR<Real> * (1 + 0.03125 * (count - 1))};
    for (int j = 0; j < count; ++j) {
        uint32_t x[LEVELS], around[LEVELS], words[16];
        for (int level = 0; level < levels; ++level) {
            block(j, level + 1, words);
            x[level] = words[2 * pair], around[level] = words[2 * pair + 1];
        }
        block(j, 0, words);
        add_normal<Real>(total, bits_of(words, pair, odd), x, around, levels, size_of(j), count);
    }
    return nearest(total);
}

// part + the sum of sizes of `count` draws times their normals, rounded to a whole number. |part| <= 1/2; the last
// size is in [64, 128). pair: of all blocks. size_of(j): of a draw; block(j, level, words) writes its block of a level of
// the key stream, 0 or more.
template <class Sizes, class Block>
EXACTLY double nearest_whole(int pair, bool odd, double part, int count, const Sizes &size_of, const Block &block) {
    for (int levels = 0; levels < 2; ++levels) {
        const double found = nearest_by<double>(levels, pair, odd, part, count, size_of, block);
        if (found == found) return found;
    }
    return nearest_by<Two>(LEVELS, pair, odd, part, count, size_of, block);
}

}  // namespace exact
}  // namespace fastdp

#undef EXACTLY
#endif
