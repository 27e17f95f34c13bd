// How far the normals' float arithmetic of csrc/cpu/noise_pair.h is off, over all floats that it can be given. Prints the
// largest relative error of the radius, and the largest errors of cosine and sine.
#include "cpu/noise.h"

#include <cstdio>

namespace fastdp {

int instruction_set() { return 0; }

}  // namespace fastdp

using fastdp::bits_of;
using fastdp::float_of;
using Pair = fastdp::plain::Pair<float>;

double radius_error(float z) {  // of x = z, or of x = 1 + z where z < 0
    Pair p;
    p.radius(z);
    const double exact = std::sqrt(-2 * (z < 0 ? std::log(-(double)z) : std::log1p(-(double)z)));
    return std::fabs(p.r - exact) / exact;
}

int main() {
    double radius = 0, cosine = 0, sine = 0;
    for (uint32_t bits = bits_of(0x1p-36f); bits <= bits_of(0.5f); ++bits) {
        const float z = float_of(bits);
        radius = std::fmax(radius, radius_error(-z));
        if (z < 0.5f) radius = std::fmax(radius, radius_error(z));
    }
    for (uint32_t bits = bits_of(0x1p-32f); bits <= bits_of(0.5f); ++bits) {
        Pair p;
        p.circle(float_of(bits));
        const double angle = 3.14159265358979323846 * (double)float_of(bits);
        cosine = std::fmax(cosine, std::fabs(p.cosine - std::cos(angle)));
        sine = std::fmax(sine, std::fabs(p.sine - std::sin(angle)));
    }
    std::printf("%.4g %.4g %.4g\n", radius, cosine, sine);
}
