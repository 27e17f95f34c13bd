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
    const int cut = cut_axis(axes);
    Band band{{axes[0], axes[1], axes[2]}, {0, 0, 0}, cut};
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
    const int64_t *s = source.spatial, width = axis[2].count, start = first * s[band.cut];
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

// Positions of the patch matrix in pieces, found once for all columns: up to four in a row, or, where they are not
// side by side in the image, one.
struct Chunk {
    int64_t from, to;  // floats from the column's start; position
};

constexpr int64_t PIECE = 256;
constexpr int64_t WIDE_KERNEL = 3;  // from which a row of taps is worth a copy

INLINE int64_t chunks_of(const Patches &patches, int64_t first, int64_t count, Chunk *chunks) {
    const Axis *axis = patches.band.axis;
    const int64_t width = axis[2].count, rows = axis[1].count, planes = axis[0].count, step = axis[2].stride;
    const int64_t breadth = axis[2].extent(), height = axis[1].extent();
    int64_t n = 0;
    for (int64_t done = 0, run; done < count; done += run) {
        const int64_t p = first + done, w = p % width, line = p / width, plane = line / rows;
        const int64_t from = plane / planes * patches.apart + w * step +
                             (plane % planes * axis[0].stride * height + line % rows * axis[1].stride) * breadth;
        run = min64(width - w, count - done);
        const int64_t wide = step == 1 ? 4 : 1;
        for (int64_t i = 0; i < run; i += wide) chunks[n++] = {from + i * step, done + i};
    }
    return n;
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

// dst[to] = the column at the positions of the chunks; up to SLACK floats beyond the last are spoilt.
INLINE void read_column(const Column &column, const Chunk *chunks, int64_t count, float *dst) {
    const Axis *axis = column.patches.band.axis;
    const float *src = column.patches.data + column.channel + column.offset[2] +
                       (column.offset[0] * axis[1].extent() + column.offset[1]) * axis[2].extent();
    if (axis[2].stride == 1)
        for (int64_t i = 0; i < count; ++i) __builtin_memcpy(dst + chunks[i].to, src + chunks[i].from, 16);
    else
        for (int64_t i = 0; i < count; ++i) dst[chunks[i].to] = src[chunks[i].from];
}

// Taps of one row of the kernel lie side by side in the image, so that a sliver's columns at one position are a few
// runs of it. Runs are copied in blocks of a power of two, whose surplus the next run overwrites.
struct Run {
    int64_t from;  // floats from the position's first element
    int to, wide;  // float of the sliver; floats that are copied
};

INLINE int runs_of(Column &column, int columns, Run *runs) {
    int n = 0;
    for (int c = 0; c < columns;) {
        const Axis *axis = column.patches.band.axis;
        const int64_t from = column.channel + column.offset[2] +
                             (column.offset[0] * axis[1].extent() + column.offset[1]) * axis[2].extent();
        const int run = (int)min64(columns - c, axis[2].kernel - column.offset[2]);
        for (int done = 0; done < run;) {
            int wide = 1;
            while (wide < run - done && c + done + 2 * wide <= SLIVER) wide *= 2;
            runs[n++] = {from + done, c + done, wide};
            done += wide;
        }
        for (int i = 0; i < run; ++i, ++c) column.next();
    }
    return n;
}

template <int WIDE> INLINE void copy_run(const float *src, int64_t step, int64_t count, float *dst) {
    for (int64_t i = 0; i < count; ++i) __builtin_memcpy(dst + i * SLIVER, src + i * step, 4 * WIDE);
}

INLINE void columns_by_runs(const Patches &patches, int64_t first, int64_t columns, float *dst) {
    const Axis *axis = patches.band.axis;
    const int64_t width = axis[2].count, lines = axis[0].count * axis[1].count, step = axis[2].stride;
    Column column(patches, first);
    Run runs[2 * SLIVER];
    for (int64_t s = 0; s < columns; s += SLIVER) {
        const int here = (int)min64(SLIVER, columns - s), n = runs_of(column, here, runs);
        for (int64_t line = 0; line < lines; ++line, dst += width * SLIVER) {
            const int64_t plane = line / axis[1].count * axis[0].stride, row = line % axis[1].count * axis[1].stride;
            const float *src = patches.data + (plane * axis[1].extent() + row) * axis[2].extent();
            for (int i = 0; i < n; ++i) {
                const float *from = src + runs[i].from;
                float *to = dst + runs[i].to;
                if (runs[i].wide == 16) copy_run<16>(from, step, width, to);
                if (runs[i].wide == 8) copy_run<8>(from, step, width, to);
                if (runs[i].wide == 4) copy_run<4>(from, step, width, to);
                if (runs[i].wide == 2) copy_run<2>(from, step, width, to);
                if (runs[i].wide == 1) copy_run<1>(from, step, width, to);
            }
            for (int64_t p = 0; here < SLIVER && p < width; ++p)
                std::fill(dst + p * SLIVER + here, dst + (p + 1) * SLIVER, 0.0f);
        }
    }
}

}  // namespace

CLONES void Patches::columns(int64_t first, int64_t columns, float *dst) const {
    if (band.axis[2].kernel >= WIDE_KERNEL && band.axis[2].dilation == 1)
        return columns_by_runs(*this, first, columns, dst);
    constexpr int64_t APART = PIECE + SLACK;
    alignas(64) float block[SLIVER * APART];
    Chunk chunks[PIECE];
    const int64_t count = positions(), slivers = ceil_div(columns, SLIVER);
    for (int64_t p = 0; p < count; p += PIECE) {
        const int64_t piece = min64(PIECE, count - p), n = chunks_of(*this, p, piece, chunks);
        Column column(*this, first);
        for (int64_t s = 0; s < slivers; ++s) {
            const int64_t rows = min64(SLIVER, columns - s * SLIVER);
            for (int64_t r = 0; r < rows; ++r, column.next()) read_column(column, chunks, n, block + r * APART);
            pack_sliver(block, FASTDP_FLOAT32, APART, 1, (int)rows, piece, dst + (s * count + p) * SLIVER);
        }
    }
}

CLONES void Patches::operator()(int64_t first, int64_t rows, int64_t k, int64_t count, float *dst) const {
    alignas(64) float line[PIECE + SLACK];
    Chunk chunks[PIECE];
    const int64_t n = chunks_of(*this, first, rows, chunks), padded = ceil_div(rows, SLIVER) * SLIVER;
    Column column(*this, k);
    for (int64_t i = 0; i < count; ++i, column.next()) {
        read_column(column, chunks, n, line);
        for (int64_t r = rows; r < padded; ++r) line[r] = 0;
        for (int64_t r = 0; r < rows; r += SLIVER)
            for (int j = 0; j < SLIVER; ++j) dst[r * count + i * SLIVER + j] = line[r + j];
    }
}

}  // namespace fastdp
