// G_b[c][k] = sum_p g[c][p] x[c][p * stride + k * dilation - padding]: no channel meets another, so a tile of rows by
// columns would be seven eighths empty. Here a vector is 16 channels, and its sums are those of up to NINE taps.
#include "depthwise.h"

#include "patches.h"
#include "threads.h"

#include <algorithm>
#include <vector>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")
#endif

namespace fastdp {
namespace {

constexpr int NINE = 9;               // taps at once: their sums stay in registers
constexpr int64_t BAND = 256 << 10;   // floats of x packed at once, where a line of positions takes no more

struct Plan {
    Axis axis[3];
    int64_t taps, blocks;  // of the kernel; of 16 channels
    int64_t steps, bands;  // positions of a band along the cut axis, bands of an image
    int64_t x, g, total;   // bytes
};

int64_t align64(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

Plan plan_of(const fastdp_conv &conv) {
    Plan plan;
    for (int d = 0; d < 3; ++d) plan.axis[d] = axis_of(conv, d);
    plan.taps = conv.kernel[0] * conv.kernel[1] * conv.kernel[2];
    plan.blocks = ceil_div(conv.groups, SLIVER);
    const int cut = cut_axis(plan.axis);
    const auto x_size = [&](int64_t steps) {
        const Band band = band_of(plan.axis, 0, steps);
        return SLIVER * band.axis[0].extent() * band.axis[1].extent() * band.axis[2].extent();
    };
    plan.steps = plan.axis[cut].count;
    while (plan.steps > 1 && x_size(plan.steps) > BAND) plan.steps = ceil_div(plan.steps, 2);
    plan.bands = ceil_div(plan.axis[cut].count, plan.steps);
    const int64_t each = plan.axis[0].count * plan.axis[1].count * plan.axis[2].count / plan.axis[cut].count;
    plan.x = align64(4 * (x_size(plan.steps) + Patches::SLACK));
    plan.g = align64(4 * SLIVER * plan.steps * each);
    plan.total = plan.x + plan.g + align64(8 * SLIVER * plan.taps);
    return plan;
}

// Positions side by side in x and in g; offsets in floats.
struct Run {
    int64_t x, g, count;
};

// sums[tap][16] += over the runs, g x by tap; taps: offsets in floats. The runs hold at most FLUSH positions, so that
// sums leave float32 as in tile.h.
template <int W, int N>
INLINE void add_taps(const float *x, const float *g, const Run *runs, int64_t count, int64_t stride,
                     const int64_t *taps, double *sums) {
    typedef float Vector __attribute__((vector_size(4 * W), aligned(4), may_alias));
    for (int q = 0; q < SLIVER; q += W) {
        Vector sum[N];
#pragma GCC unroll 9
        for (int i = 0; i < N; ++i) sum[i] = Vector{};
        const float *from[N];
        for (int64_t r = 0; r < count; ++r) {
            const float *grad = g + runs[r].g + q;
#pragma GCC unroll 9
            for (int i = 0; i < N; ++i) from[i] = x + runs[r].x + q + taps[i];
            int64_t at = 0;
            for (int64_t p = runs[r].count; p > 0; --p, at += stride, grad += SLIVER) {
                const Vector one = *(const Vector *)grad;
#pragma GCC unroll 9
                for (int i = 0; i < N; ++i) sum[i] += one * *(const Vector *)(from[i] + at);
            }
        }
#pragma GCC unroll 9
        for (int i = 0; i < N; ++i)
            for (int c = 0; c < W; ++c) sums[i * SLIVER + q + c] += sum[i][c];
    }
}

template <int W>
INLINE void add_all_taps(const float *x, const float *g, const Run *runs, int64_t count, int64_t stride,
                         const int64_t *taps, int64_t all, double *sums) {
    const int64_t chunks = ceil_div(all, NINE);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t first = all * chunk / chunks, some = all * (chunk + 1) / chunks - first;
        const int64_t *offsets = taps + first;
        double *to = sums + first * SLIVER;
        switch (some) {
            case 1: add_taps<W, 1>(x, g, runs, count, stride, offsets, to); break;
            case 2: add_taps<W, 2>(x, g, runs, count, stride, offsets, to); break;
            case 3: add_taps<W, 3>(x, g, runs, count, stride, offsets, to); break;
            case 4: add_taps<W, 4>(x, g, runs, count, stride, offsets, to); break;
            case 5: add_taps<W, 5>(x, g, runs, count, stride, offsets, to); break;
            case 6: add_taps<W, 6>(x, g, runs, count, stride, offsets, to); break;
            case 7: add_taps<W, 7>(x, g, runs, count, stride, offsets, to); break;
            case 8: add_taps<W, 8>(x, g, runs, count, stride, offsets, to); break;
            default: add_taps<W, 9>(x, g, runs, count, stride, offsets, to); break;
        }
    }
}

using Add = void (*)(const float *, const float *, const Run *, int64_t, int64_t, const int64_t *, int64_t, double *);

#if FASTDP_X86
__attribute__((target("avx512f"))) void add_avx512(const float *x, const float *g, const Run *runs, int64_t count,
                                                   int64_t stride, const int64_t *taps, int64_t all, double *sums) {
    add_all_taps<16>(x, g, runs, count, stride, taps, all, sums);
}

__attribute__((target("avx2,fma"))) void add_avx2(const float *x, const float *g, const Run *runs, int64_t count,
                                                  int64_t stride, const int64_t *taps, int64_t all, double *sums) {
    add_all_taps<8>(x, g, runs, count, stride, taps, all, sums);
}
#endif

void add_plain(const float *x, const float *g, const Run *runs, int64_t count, int64_t stride, const int64_t *taps,
               int64_t all, double *sums) {
    add_all_taps<4>(x, g, runs, count, stride, taps, all, sums);
}

Add best() {
#if FASTDP_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return add_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return add_avx2;
#endif
    return add_plain;
}

const Add chosen = best();

// The gradient of 16 channels (fewer at the end) of one sample, [taps][16]: in a thread's memory.
const double *form(const fastdp_conv &conv, const Plan &plan, int64_t sample, int64_t block, char *memory,
                   std::vector<int64_t> &taps, std::vector<Run> &runs) {
    float *x = (float *)memory, *g = (float *)(memory + plan.x);
    double *sums = (double *)(memory + plan.x + plan.g);
    std::fill(sums, sums + plan.taps * SLIVER, 0.0);
    const int64_t first = block * SLIVER, channels = min64(SLIVER, conv.groups - first);
    const int cut = cut_axis(plan.axis);
    for (int64_t piece = 0; piece < conv.images * plan.bands; ++piece) {
        const int64_t image = piece / plan.bands, start = piece % plan.bands * plan.steps;
        const Band band = band_of(plan.axis, start, min64(plan.steps, plan.axis[cut].count - start));
        const Axis *axis = band.axis;
        pack_channels(source_of(conv.x, sample, image, first), channels, band, x);
        pack_outputs(source_of(conv.g, sample, image, first), channels, band, start, g);
        const int64_t row = axis[2].extent() * SLIVER, plane = axis[1].extent() * row;
        taps.clear();
        for (int64_t d = 0; d < axis[0].kernel; ++d)
            for (int64_t h = 0; h < axis[1].kernel; ++h)
                for (int64_t w = 0; w < axis[2].kernel; ++w)
                    taps.push_back(d * axis[0].dilation * plane + h * axis[1].dilation * row +
                                   w * axis[2].dilation * SLIVER);
        // Few lines at a time, all taps of them: x and g of these stay in L1.
        int64_t waiting = 0, position = 0;
        runs.clear();
        const auto flush = [&] {
            chosen(x, g, runs.data(), (int64_t)runs.size(), axis[2].stride * SLIVER, taps.data(), plan.taps, sums);
            runs.clear();
            waiting = 0;
        };
        for (int64_t d = 0; d < axis[0].count; ++d)
            for (int64_t h = 0; h < axis[1].count; ++h)
                for (int64_t w = 0; w < axis[2].count; w += FLUSH) {
                    const int64_t count = min64(FLUSH, axis[2].count - w);
                    if (waiting + count > FLUSH) flush();
                    runs.push_back({d * axis[0].stride * plane + h * axis[1].stride * row + w * axis[2].stride * SLIVER,
                                    position * SLIVER, count});
                    waiting += count, position += count;
                }
        flush();
    }
    return sums;
}

// use(sample, block, sums [taps][16]) for all samples and blocks of channels.
template <typename Use>
void each_block(const fastdp_conv &conv, const Plan &plan, void *scratch, int threads, const Use &use) {
    const int64_t jobs = conv.batch * plan.blocks;
    const int team = (int)max64(1, min64(threads, jobs));
#pragma omp parallel num_threads(team) if (team > 1)
    {
        std::vector<int64_t> taps;
        std::vector<Run> runs;
        char *memory = (char *)scratch + omp_get_thread_num() * plan.total;
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < jobs; ++job)
            use(job / plan.blocks, job % plan.blocks,
                form(conv, plan, job / plan.blocks, job % plan.blocks, memory, taps, runs));
    }
}

}  // namespace

bool is_depthwise(const fastdp_conv &conv) { return conv.inputs == 1 && conv.outputs == 1 && conv.groups > 1; }

int64_t depthwise_scratch(const fastdp_conv &conv) { return plan_of(conv).total; }

void depthwise_norm(const fastdp_conv &conv, double *norm_sq, double *parts, void *scratch, int threads) {
    const Plan plan = plan_of(conv);
    each_block(conv, plan, scratch, threads, [&](int64_t sample, int64_t block, const double *sums) {
        double total = 0;  // lanes without a channel are 0
        for (int64_t i = 0; i < plan.taps * SLIVER; ++i) total += sums[i] * sums[i];
        parts[sample * plan.blocks + block] = total;
    });
    for (int64_t b = 0; b < conv.batch; ++b) {
        norm_sq[b] = 0;
        for (int64_t i = 0; i < plan.blocks; ++i) norm_sq[b] += parts[b * plan.blocks + i];
    }
}

void depthwise_per_sample(const fastdp_conv &conv, float *out, void *scratch, int threads) {
    const Plan plan = plan_of(conv);
    each_block(conv, plan, scratch, threads, [&](int64_t sample, int64_t block, const double *sums) {
        const int64_t first = block * SLIVER, channels = min64(SLIVER, conv.groups - first);
        float *to = out + (sample * conv.groups + first) * plan.taps;
        for (int64_t c = 0; c < channels; ++c)
            for (int64_t k = 0; k < plan.taps; ++k) to[c * plan.taps + k] = (float)sums[k * SLIVER + c];
    });
}

}  // namespace fastdp
