// Gaussian noise from ChaCha20 (RFC 8439) by Box & Muller (1958): one array, and the parts of it for tests.
#include "noise.h"

namespace fastdp {

namespace {

int ceiling = 2;

int found_instruction_set() {
#ifdef FASTDP_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

template <class T>
void transform(const uint32_t *words, T *normals) {
    auto run = fastdp::plain::transform<T>;
#ifdef FASTDP_X86
    if (fastdp::instruction_set() == 1) run = fastdp::avx2::transform<T>;
    if (fastdp::instruction_set() == 2) run = fastdp::avx512::transform<T>;
#endif
    run(words, normals);
}

}  // namespace

int instruction_set() {
    static const int found = found_instruction_set();
    return std::min(found, ceiling);
}

// A std of more than 24 bits is rounded up, but for float64 data: noise is never less than asked for.
double std_of(const fastdp_tensor *tensors, int64_t count, double std) {
    int exponent;
    const double mantissa = std::frexp(std, &exponent);
    if (count > 0 && tensors[0].sum_type == FASTDP_FLOAT64) return std;
    return std::ldexp(std::ceil(mantissa * 0x1p24), exponent - 24);
}

Work work_of(const fastdp_tensor *tensors, int64_t count, int64_t *tiles, const fastdp_noise *noise) {
    Work work = {tensors, tiles, count, {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574},  // "expand 32-byte k"
                 std_of(tensors, count, noise->std), noise->scale, noise->read, noise->keep, {}};
    std::copy(noise->key, noise->key + 8, work.state + 4);
    const auto draws_of = [](uint32_t *state, uint64_t step) {
        state[14] = (uint32_t)step, state[15] = (uint32_t)(step >> 32) | (uint32_t)FASTDP_DOMAIN_NOISE << 16;
    };
    int exponent;
    const double size = std::frexp(work.std, &exponent) * 128;
    for (int32_t j = 0; noise->std != 0 && j < noise->earlier; ++j) {
        if (noise->earlier_weights[j] == 0) continue;
        work.earlier.push_back({{}, size * noise->earlier_weights[j]});
        uint32_t *state = work.earlier.back().state;
        std::copy(work.state, work.state + 16, state);
        draws_of(state, noise->earlier_steps[j]);
    }
    draws_of(work.state, noise->step);
    tiles[0] = 0;
    for (int64_t i = 0; i < count; ++i) {
        const fastdp_tensor &x = tensors[i];
        const int64_t here = x.count > 0 ? (x.offset + x.count - 1) / TILE - x.offset / TILE + 1 : 0;
        tiles[i + 1] = tiles[i] + here;
    }
    return work;
}

}  // namespace fastdp

extern "C" {

int fastdp_instruction_set(int at_most) {
    if (at_most >= 0) fastdp::ceiling = at_most;
    return fastdp::instruction_set();
}

void fastdp_chacha20_blocks(const uint32_t *state, uint32_t *words) {
    auto run = fastdp::plain::blocks;
#ifdef FASTDP_X86
    if (fastdp::instruction_set() == 1) run = fastdp::avx2::blocks;
    if (fastdp::instruction_set() == 2) run = fastdp::avx512::blocks;
#endif
    run(state, words);
}

void fastdp_box_muller(const uint32_t *words, void *normals, int type) {
    if (type == FASTDP_FLOAT32) {
        fastdp::transform(words, (float *)normals);
    } else {
        fastdp::transform(words, (double *)normals);
    }
}

void fastdp_noise_into(void *data, int type, int64_t count, int64_t offset, const fastdp_noise *noise) {
    const fastdp_tensor tensor = {nullptr, data, nullptr, nullptr, count, offset, type, type, type, type};
    int64_t tiles[2];
    const fastdp::Work work = fastdp::work_of(&tensor, 1, tiles, noise);
    if (type != FASTDP_FLOAT64 && fastdp::fits_float(*noise)) {
        fastdp::draw<float>(work, fastdp::NoUpdate(), noise->threads);
    } else {
        fastdp::draw<double>(work, fastdp::NoUpdate(), noise->threads);
    }
}

}  // extern "C"
