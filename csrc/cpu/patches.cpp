#include "patches.h"

#include <algorithm>

namespace fastdp {

Axis axis_of(const fastdp_conv &conv, int d) {
    const bool point = conv.kernel[d] == 1;
    return {conv.size[d], conv.positions[d], conv.kernel[d], conv.dilation[d], point ? conv.stride[d] : 1,
            point ? 1 : conv.stride[d], conv.padding[d]};
}

Source source_of(const fastdp_images &images, int64_t sample, int64_t image, int64_t channel) {
    const int64_t *s = images.strides;
    return {at(images.data, images.type, sample * s[0] + image * s[1] + channel * s[2]), images.type, s[2],
            {s[3], s[4], s[5]}};
}

Band band_of(const Axis *axes, int64_t first, int64_t count) {
    Band band{{axes[0], axes[1], axes[2]}, {0, 0, 0}};
    const int cut = cut_axis(axes);
    band.start[cut] = first * axes[cut].stride;
    band.axis[cut].count = count;
    return band;
}

namespace {

// Of packed elements [0, extent) those inside the source: [low, high).
INLINE void inside(const Axis &axis, int64_t start, int64_t &low, int64_t &high) {
    low = max64(0, ceil_div(axis.pad, axis.step) - start);
    high = min64(axis.extent(), (axis.size - 1 + axis.pad) / axis.step + 1 - start);
    if (axis.size == 0 || high < low) low = high = 0;
}

// Calls line(source offset, packed index of the line's first element, low, high) for each line of the packed
// image; outside the source low = high = 0.
template <typename F>
INLINE void each_line(const Source &source, const Band &band, const F &line) {
    const Axis *axis = band.axis;
    int64_t low[3], high[3];
    for (int d = 0; d < 3; ++d) inside(axis[d], band.start[d], low[d], high[d]);
    const int64_t planes = axis[0].extent(), rows = axis[1].extent(), width = axis[2].extent();
    const int64_t first = (low[2] + band.start[2]) * axis[2].step - axis[2].pad;
    for (int64_t i = 0; i < planes; ++i)
        for (int64_t j = 0; j < rows; ++j) {
            const bool in = i >= low[0] && i < high[0] && j >= low[1] && j < high[1];
            const int64_t plane = (i + band.start[0]) * axis[0].step - axis[0].pad;
            const int64_t row = (j + band.start[1]) * axis[1].step - axis[1].pad;
            line(plane * source.spatial[0] + row * source.spatial[1] + first * source.spatial[2],
                 (i * rows + j) * width, in ? low[2] : 0, in ? high[2] : 0);
        }
}

}  // namespace

void pack_padded(const Source &source, int64_t channels, const Band &band, float *dst) {
    const int64_t width = band.axis[2].extent();
    const int64_t size = band.axis[0].extent() * band.axis[1].extent() * width;
    for (int64_t c = 0; c < channels; ++c)
        each_line(source, band, [&](int64_t offset, int64_t index, int64_t low, int64_t high) {
            float *line = dst + c * size + index;
            std::fill(line, line + low, 0.0f);
            if (high > low)
                to_float(at(source.data, source.type, c * source.channel + offset), source.type,
                         source.spatial[2] * band.axis[2].step, high - low, line + low);
            std::fill(line + high, line + width, 0.0f);
        });
}

void pack_channels(const Source &source, int64_t channels, const Band &band, float *dst) {
    const int64_t width = band.axis[2].extent();
    const int64_t size = band.axis[0].extent() * band.axis[1].extent() * width;
    for (int64_t c = 0; c < channels; c += SLIVER, dst += size * SLIVER)
        each_line(source, band, [&](int64_t offset, int64_t index, int64_t low, int64_t high) {
            float *line = dst + index * SLIVER;
            std::fill(line, line + low * SLIVER, 0.0f);
            if (high > low)
                pack_sliver(at(source.data, source.type, c * source.channel + offset), source.type, source.channel,
                            source.spatial[2] * band.axis[2].step, (int)min64(SLIVER, channels - c), high - low,
                            line + low * SLIVER);
            std::fill(line + high * SLIVER, line + width * SLIVER, 0.0f);
        });
}

void pack_outputs(const Source &source, int64_t outputs, const Band &band, int64_t first, float *dst) {
    const Axis *axis = band.axis;
    const int64_t *s = source.spatial, width = axis[2].count, start = first * s[cut_axis(axis) == 0 ? 0 : 1];
    const bool rows_follow = axis[1].count == 1 || s[1] == width * s[2];
    const bool planes_follow = rows_follow && (axis[0].count == 1 || s[0] == axis[1].count * width * s[2]);
    const int64_t planes = planes_follow ? 1 : axis[0].count, rows = rows_follow ? 1 : axis[1].count;
    const int64_t run = axis[0].count * axis[1].count * width / (planes * rows);
    for (int64_t o = 0; o < outputs; o += SLIVER)
        for (int64_t i = 0; i < planes; ++i)
            for (int64_t j = 0; j < rows; ++j, dst += run * SLIVER)
                pack_sliver(at(source.data, source.type, o * source.channel + start + i * s[0] + j * s[1]),
                            source.type, source.channel, s[2], (int)min64(SLIVER, outputs - o), run, dst);
}

namespace {

// Where a run of positions begins.
struct Start {
    int64_t image, plane, row, place;
};

INLINE Start start_of(const Patches &patches, int64_t first) {
    const Axis *axis = patches.band.axis;
    const int64_t width = axis[2].count, rows = axis[1].count, lines = first / width, planes = lines / rows;
    return {planes / axis[0].count, planes % axis[0].count, lines % rows, first % width};
}

// The columns of the patch matrix one after the other: channel, then tap.
struct Column {
    const Patches &patches;
    int64_t offset[3], channel;  // of the tap, and of the channel's packed image
    Column(const Patches &from, int64_t k) : patches(from) {
        const Axis *axis = from.band.axis;
        const int64_t taps = from.taps(), tap = k % taps;
        offset[2] = tap % axis[2].kernel * axis[2].dilation;
        offset[1] = tap / axis[2].kernel % axis[1].kernel * axis[1].dilation;
        offset[0] = tap / axis[2].kernel / axis[1].kernel * axis[0].dilation;
        channel = k / taps * axis[0].extent() * axis[1].extent() * axis[2].extent();
    }
    INLINE void next() {
        const Axis *axis = patches.band.axis;
        for (int d = 2; d >= 0; --d) {
            if ((offset[d] += axis[d].dilation) < axis[d].kernel * axis[d].dilation) return;
            offset[d] = 0;
        }
        channel += axis[0].extent() * axis[1].extent() * axis[2].extent();
    }
};

// dst[i] = the column at position start + i, i < count; up to SLACK more are spoilt.
INLINE void read_column(const Column &column, Start at, int64_t count, float *dst) {
    const Axis *axis = column.patches.band.axis;
    const int64_t width = axis[2].count, step = axis[2].stride, height = axis[1].extent();
    const int64_t breadth = axis[2].extent(), jump = axis[1].stride * breadth;
    while (count > 0) {
        const float *src = column.patches.data + at.image * column.patches.apart + column.channel +
                           ((at.plane * axis[0].stride + column.offset[0]) * height + at.row * axis[1].stride +
                            column.offset[1]) * breadth + column.offset[2];
        for (; at.row < axis[1].count && count > 0; ++at.row, src += jump) {
            const int64_t run = min64(width - at.place, count);
            const float *from = src + at.place * step;
            if (step == 1)
                for (int64_t i = 0; i < run; i += 4) __builtin_memcpy(dst + i, from + i, 16);
            else
                for (int64_t i = 0; i < run; ++i) dst[i] = from[i * step];
            dst += run, count -= run, at.place = 0;
        }
        at.row = 0;
        if (++at.plane == axis[0].count) at.plane = 0, ++at.image;
    }
}

}  // namespace

CLONES void Patches::columns(int64_t first, int64_t columns, float *dst) const {
    constexpr int64_t PIECE = 256, APART = PIECE + SLACK;
    alignas(64) float block[SLIVER * APART];
    const int64_t count = positions();
    for (int64_t c = 0; c < columns; c += SLIVER)
        for (int64_t p = 0; p < count; p += PIECE) {
            const int64_t piece = min64(PIECE, count - p), rows = min64(SLIVER, columns - c);
            const Start start = start_of(*this, p);
            Column column(*this, first + c);
            for (int64_t r = 0; r < rows; ++r, column.next()) read_column(column, start, piece, block + r * APART);
            pack_sliver(block, FLOAT32, APART, 1, (int)rows, piece, dst);
            dst += piece * SLIVER;
        }
}

CLONES void Patches::operator()(int64_t first, int64_t rows, int64_t k, int64_t count, float *dst) const {
    constexpr int64_t MOST = 128;
    alignas(64) float line[MOST + SLACK];
    const Start start = start_of(*this, first);
    Column column(*this, k);
    for (int64_t i = 0; i < count; ++i, column.next()) {
        read_column(column, start, rows, line);
        std::fill(line + rows, line + ceil_div(rows, SLIVER) * SLIVER, 0.0f);
        for (int64_t r = 0; r < rows; r += SLIVER)
            for (int j = 0; j < SLIVER; ++j) dst[r * count + i * SLIVER + j] = line[r + j];
    }
}

}  // namespace fastdp
