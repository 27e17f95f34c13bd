// Weight gradients of convolutions by sample. The matrix of patches is never built for a whole batch: each job
// packs what it reads of one sample into cache.
//
// Columns of G_b come from patches in one of two ways. Channels side by side [channels / 16][image][16]: then
// every tap is the same memory from another start, nothing is copied per tap, and a sliver is 16 channels of one
// tap. Or, for few channels, as columns of the patch matrix in the weight's own order.
#include "depthwise.h"
#include "gram.h"
#include "patches.h"
#include "threads.h"

#include <algorithm>

using namespace fastdp;

namespace {

constexpr int64_t BAND = 256 << 10;   // floats of x packed at once, where a line of positions takes no more
constexpr int64_t SUMS = 512 << 10;   // doubles that wait for the next band
constexpr int64_t JOBS = 8;           // wanted at least
constexpr int64_t LONG = 192;         // positions from which writing a tap apart costs little beside its sum

struct Plan {
    Axis axis[3];
    int64_t taps, columns;    // of G_b
    bool by_channel;          // the first way
    int64_t slivers;          // of columns
    int64_t part, parts;      // rows of a job, jobs of a group
    int64_t bands, steps;     // of the image; positions of a band along the cut axis
    int64_t pieces;           // of the images of a sample: images * bands
    int64_t x, columns_size, rows_size, lines, total;  // floats; lines and total: bytes
};

int64_t align64(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

Plan plan_of(const fastdp_conv &conv, bool store) {
    Plan plan;
    for (int d = 0; d < 3; ++d) plan.axis[d] = axis_of(conv, d);
    const int64_t across = plan.axis[2].count, positions = plan.axis[0].count * plan.axis[1].count * across;
    plan.taps = conv.kernel[0] * conv.kernel[1] * conv.kernel[2];
    plan.columns = conv.inputs * plan.taps;
    const int64_t padded = ceil_div(conv.inputs, SLIVER) * SLIVER;
    plan.by_channel = 4 * padded <= 5 * conv.inputs && (!store || plan.taps == 1 || positions >= LONG);
    plan.slivers = plan.by_channel ? padded / SLIVER * plan.taps : ceil_div(plan.columns, SLIVER);

    const int cut = cut_axis(plan.axis);
    const auto x_size = [&](int64_t steps) {
        const Band band = band_of(plan.axis, 0, steps);
        return (plan.by_channel ? padded : conv.inputs) * band.axis[0].extent() * band.axis[1].extent() *
               band.axis[2].extent();
    };
    const int64_t each = positions / plan.axis[cut].count;  // positions of a step
    const auto columns_size = [&](int64_t steps) {
        return plan.by_channel ? 0 : plan.slivers * SLIVER * steps * each;
    };
    plan.steps = plan.axis[cut].count;
    while (plan.steps > 1 && x_size(plan.steps) + columns_size(plan.steps) > BAND) plan.steps = ceil_div(plan.steps, 2);
    plan.bands = ceil_div(plan.axis[cut].count, plan.steps);
    plan.pieces = plan.bands * conv.images;

    const int64_t row_slivers = ceil_div(conv.outputs, SLIVER);
    int64_t part = ceil_div(row_slivers, ceil_div(JOBS, max64(1, conv.batch * conv.groups)));
    if (plan.pieces > 1) part = max64(1, min64(part, SUMS / (plan.slivers * SLIVER * SLIVER)));
    plan.part = part * SLIVER;
    plan.parts = ceil_div(row_slivers, part);

    plan.x = align64(4 * (x_size(plan.steps) + Patches::SLACK));
    plan.columns_size = align64(4 * columns_size(plan.steps));
    plan.rows_size = align64(4 * plan.part * plan.steps * each);
    const int64_t cells = plan.pieces > 1 ? plan.part / HALF * plan.slivers : GROUP;
    const int64_t lines = ceil_div(plan.steps * each, across) * ceil_div(across, FLUSH) + plan.steps * each / FLUSH + 1;
    plan.lines = align64(lines * (int64_t)sizeof(Line));
    plan.total = plan.x + plan.columns_size + plan.rows_size + plan.lines + cells * CELL * (int64_t)sizeof(double);
    return plan;
}

// What a job has packed, and how its columns are read.
struct Packed {
    float *x, *columns, *rows;
    Line *lines;
    double *sums;
    int64_t count, positions;  // of lines, of positions
    int64_t stride, size;      // floats between positions; floats of a sliver (of channels, or of columns)
    int64_t plane, row;        // floats of a plane and a row of a sliver of channels
};

Packed packed_in(const Plan &plan, void *scratch, int thread) {
    char *base = (char *)scratch + thread * plan.total;
    Packed packed{};
    packed.x = (float *)base;
    packed.columns = (float *)(base += plan.x);
    packed.rows = (float *)(base += plan.columns_size);
    packed.lines = (Line *)(base += plan.rows_size);
    packed.sums = (double *)(base + plan.lines);
    return packed;
}

void pack(const fastdp_conv &conv, const Plan &plan, int64_t sample, int64_t group, int64_t row, int64_t rows,
          int64_t piece, Packed &my) {
    const int64_t image = piece / plan.bands, first = piece % plan.bands * plan.steps;
    const int64_t all = plan.axis[cut_axis(plan.axis)].count;
    const Band band = band_of(plan.axis, first, min64(plan.steps, all - first));
    const Axis *axis = band.axis;
    const Source x = source_of(conv.x, sample, image, group * conv.inputs);
    my.row = axis[2].extent() * SLIVER, my.plane = axis[1].extent() * my.row;
    my.positions = axis[0].count * axis[1].count * axis[2].count;
    my.count = 0;
    if (plan.by_channel) {
        pack_channels(x, conv.inputs, band, my.x);
        my.stride = axis[2].stride * SLIVER;
        my.size = axis[0].extent() * my.plane;
        for (int64_t d = 0; d < axis[0].count; ++d)
            for (int64_t h = 0; h < axis[1].count; ++h)
                for (int64_t w = 0; w < axis[2].count; w += FLUSH)
                    my.lines[my.count++] = {
                        d * axis[0].stride * my.plane + h * axis[1].stride * my.row + w * my.stride,
                        min64(FLUSH, axis[2].count - w)};
    } else {
        pack_padded(x, conv.inputs, band, my.x);
        Patches{my.x, 0, band}.columns(0, plan.columns, my.columns);
        my.stride = SLIVER, my.size = my.positions * SLIVER;
        for (int64_t p = 0; p < my.positions; p += FLUSH)
            my.lines[my.count++] = {p * SLIVER, min64(FLUSH, my.positions - p)};
    }
    pack_outputs(source_of(conv.g, sample, image, group * conv.outputs + row), rows, band, first, my.rows);
}

// The start of a sliver of columns; of how many columns; the first of them in the weight; how far apart there.
struct Sliver {
    const float *data;
    int64_t columns, first, apart;
};

INLINE Sliver sliver_of(const fastdp_conv &conv, const Plan &plan, const Packed &my, int64_t s) {
    if (!plan.by_channel) return {my.columns + s * my.size, min64(SLIVER, plan.columns - s * SLIVER), s * SLIVER, 1};
    const Axis *axis = plan.axis;
    const int64_t channel = s / plan.taps, tap = s % plan.taps, kw = tap % axis[2].kernel;
    const int64_t kh = tap / axis[2].kernel % axis[1].kernel, kd = tap / axis[2].kernel / axis[1].kernel;
    const float *image = my.x + channel * my.size + kd * axis[0].dilation * my.plane;
    return {image + kh * axis[1].dilation * my.row + kw * axis[2].dilation * SLIVER,
            min64(SLIVER, conv.inputs - channel * SLIVER), channel * SLIVER * plan.taps + tap, plan.taps};
}

// Forms the rows [row, row + rows) of one sample's and group's gradient, tile by tile, and hands each finished cell
// to use(sums, first row, rows, sliver).
template <typename Use>
void form(const fastdp_conv &conv, const Plan &plan, int64_t sample, int64_t group, int64_t row, int64_t rows,
          Packed &my, const Use &use) {
    const int64_t halves = ceil_div(rows, HALF);
    for (int64_t piece = 0; piece < plan.pieces; ++piece) {
        pack(conv, plan, sample, group, row, rows, piece, my);
        const bool last = piece + 1 == plan.pieces;
        const int64_t across = ceil_div(plan.slivers, GROUP), tiles = across * halves;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            // Down the columns, which stay in L1; but along the rows where sums are short and writing them is the work.
            const int64_t r = plan.by_channel ? tile % halves : tile / across;
            const int64_t s = (plan.by_channel ? tile / halves : tile % across) * GROUP;
            const int some = (int)min64(GROUP, plan.slivers - s);
            Sliver slivers[GROUP];
            const float *columns[GROUP];
            for (int j = 0; j < some; ++j) columns[j] = (slivers[j] = sliver_of(conv, plan, my, s + j)).data;
            double *sums = plan.pieces > 1 ? my.sums + (r * plan.slivers + s) * CELL : my.sums;
            multiply(some, my.rows + r / 2 * my.positions * SLIVER + r % 2 * HALF, columns, my.stride, my.lines,
                     my.count, piece == 0, sums);
            for (int j = 0; j < some && last; ++j)
                use(sums + j * CELL, r * HALF, min64(HALF, rows - r * HALF), slivers[j]);
        }
    }
}

void store_cell(const double *sums, int64_t rows, const Sliver &sliver, int64_t columns, float *out) {
    for (int64_t r = 0; r < rows; ++r, sums += SLIVER, out += columns)
        if (sliver.apart == 1 && sliver.columns == SLIVER)
            for (int c = 0; c < SLIVER; ++c) out[sliver.first + c] = (float)sums[c];
        else
            for (int64_t c = 0; c < sliver.columns; ++c) out[sliver.first + c * sliver.apart] = (float)sums[c];
}

// ---------------------------------------------------------------- gram

struct GramPlan {
    Axis axis[3], flat[3];
    int64_t columns, positions, side, blocks;  // positions of all images of a sample
    int64_t x, g, total;                       // floats of one image; bytes
};

GramPlan gram_plan(const fastdp_conv &conv) {
    GramPlan plan;
    int64_t extent = 1, each = 1;
    for (int d = 0; d < 3; ++d) {
        plan.axis[d] = axis_of(conv, d);
        plan.flat[d] = {conv.positions[d], conv.positions[d], 1, 1, 1, 1, 0};
        extent *= plan.axis[d].extent();
        each *= conv.positions[d];
    }
    plan.columns = conv.inputs * conv.kernel[0] * conv.kernel[1] * conv.kernel[2];
    plan.positions = conv.images * each;
    plan.side = gram_side(conv.batch * conv.groups, plan.positions);
    plan.blocks = gram_blocks(plan.positions, plan.side);
    plan.x = conv.inputs * extent, plan.g = conv.outputs * each;
    plan.total = align64((int64_t)sizeof(GramScratch)) + align64(4 * (conv.images * plan.x + Patches::SLACK)) +
                 align64(4 * (conv.images * plan.g + Patches::SLACK));
    return plan;
}

void gram_job(const fastdp_conv &conv, const GramPlan &plan, int64_t sample, int64_t group, int64_t block,
              char *scratch, double *out) {
    GramScratch &my = *(GramScratch *)scratch;
    float *x = (float *)(scratch + align64((int64_t)sizeof(GramScratch)));
    float *g = (float *)((char *)x + align64(4 * (conv.images * plan.x + Patches::SLACK)));
    const Band all = band_of(plan.axis, 0, plan.axis[cut_axis(plan.axis)].count);
    const Band flat = band_of(plan.flat, 0, plan.flat[cut_axis(plan.flat)].count);
    Band run = flat;  // packed, the positions of g are one line
    run.axis[0].count = run.axis[1].count = 1, run.axis[2].count = plan.positions / conv.images;
    for (int64_t f = 0; f < conv.images; ++f) {
        pack_padded(source_of(conv.x, sample, f, group * conv.inputs), conv.inputs, all, x + f * plan.x);
        pack_padded(source_of(conv.g, sample, f, group * conv.outputs), conv.outputs, flat, g + f * plan.g);
    }
    gram_block(Patches{x, plan.x, all}, plan.columns, Patches{g, plan.g, run}, conv.outputs, plan.positions, plan.side,
               block, my, out);
}

}  // namespace

extern "C" {

int64_t fastdp_conv_scratch(const fastdp_conv *conv, int route) {
    if (route != FASTDP_CONV_GRAM && is_depthwise(*conv)) return depthwise_scratch(*conv);
    return route == FASTDP_CONV_GRAM ? gram_plan(*conv).total : plan_of(*conv, route == FASTDP_CONV_STORE).total;
}

int64_t fastdp_conv_parts(const fastdp_conv *conv, int route) {
    const int64_t each = route == FASTDP_CONV_GRAM ? PARTS * gram_plan(*conv).blocks : plan_of(*conv, false).parts;
    return conv->batch * conv->groups * each;
}

void fastdp_conv_norm(const fastdp_conv *conv, double *norm_sq, double *parts, void *scratch, int threads) {
    if (is_depthwise(*conv)) return depthwise_norm(*conv, norm_sq, parts, scratch, threads);
    const Plan plan = plan_of(*conv, false);
    const int64_t each = conv->groups * plan.parts, jobs = conv->batch * each;
    const int team = (int)max64(1, min64(threads, jobs));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; ++job) {
        const int64_t row = job % plan.parts * plan.part;
        Packed my = packed_in(plan, scratch, omp_get_thread_num());
        double total = 0;
        form(*conv, plan, job / each, job % each / plan.parts, row, min64(plan.part, conv->outputs - row), my,
             [&](const double *sums, int64_t, int64_t rows, const Sliver &sliver) {
                 total += square_cell(sums, (int)rows, (int)sliver.columns);
             });
        parts[job] = total;
    }
    for (int64_t b = 0; b < conv->batch; ++b) {
        norm_sq[b] = 0;
        for (int64_t i = 0; i < each; ++i) norm_sq[b] += parts[b * each + i];
    }
}

void fastdp_conv_per_sample(const fastdp_conv *conv, float *out, void *scratch, int threads) {
    if (is_depthwise(*conv)) return depthwise_per_sample(*conv, out, scratch, threads);
    const Plan plan = plan_of(*conv, true);
    const int64_t each = conv->groups * plan.parts, jobs = conv->batch * each;
    const int team = (int)max64(1, min64(threads, jobs));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; ++job) {
        const int64_t row = job % plan.parts * plan.part, group = job / plan.parts;  // of all samples' groups
        Packed my = packed_in(plan, scratch, omp_get_thread_num());
        float *to = out + (group * conv->outputs + row) * plan.columns;
        form(*conv, plan, job / each, group % conv->groups, row, min64(plan.part, conv->outputs - row), my,
             [&](const double *sums, int64_t first, int64_t rows, const Sliver &sliver) {
                 store_cell(sums, rows, sliver, plan.columns, to + first * plan.columns);
             });
    }
}

int64_t fastdp_conv_gram(const fastdp_conv *conv, double rounding, double tolerance, double smallest,
                         double *norm_sq, uint8_t *doubt, double *parts, void *scratch, int threads) {
    const GramPlan plan = gram_plan(*conv);
    const int64_t each = conv->groups * plan.blocks, jobs = conv->batch * each;
    const int team = (int)max64(1, min64(threads, jobs));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; ++job)
        gram_job(*conv, plan, job / each, job % each / plan.blocks, job % plan.blocks,
                 (char *)scratch + omp_get_thread_num() * plan.total, parts + PARTS * job);
    const GramLimits limits{plan.columns, conv->outputs, plan.positions, rounding, tolerance, smallest};
    return gram_finish(parts, conv->batch, each, limits, norm_sq, doubt);
}

}  // extern "C"
