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

// The lines of packed images. Of their elements [0, extent) those inside the source are [low, high).
struct Lines {
    const Band &band;
    int64_t low[3], high[3];

    INLINE Lines(const Band &of) : band(of) {
        for (int d = 0; d < 3; ++d) {
            const Axis &axis = of.axis[d];
            low[d] = max64(0, ceil_div(axis.pad, axis.step) - of.start[d]);
            high[d] = min64(axis.extent(), (axis.size - 1 + axis.pad) / axis.step + 1 - of.start[d]);
            if (axis.size == 0 || high[d] < low[d]) low[d] = high[d] = 0;
        }
    }
    INLINE bool all() const {
        bool found = true;
        for (int d = 0; d < 3; ++d) found = found && low[d] == 0 && high[d] == band.axis[d].extent();
        return found;
    }
};

// Calls line(source offset, packed index of the line's first element, low, high) for each line of the packed
// image; outside the source low = high = 0.
template <typename F>
INLINE void each_line(const Source &source, const Lines &lines, const F &line) {
    const Band &band = lines.band;
    const Axis *axis = band.axis;
    const int64_t *low = lines.low, *high = lines.high;
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

// A line of few floats, for which a call would take longer than the copy.
INLINE void copy_short(const float *src, int64_t count, float *dst) {
    for (; count >= 4; count -= 4, src += 4, dst += 4) __builtin_memcpy(dst, src, 16);
    if (count & 2) __builtin_memcpy(dst, src, 8);
    if (count & 1) dst[count - 1] = src[count - 1];
}

void pack_padded(const Source &source, int64_t channels, const Band &band, float *dst) {
    const Lines lines(band);
    const int64_t size = band.axis[0].extent() * band.axis[1].extent() * band.axis[2].extent();
    const int64_t step = source.spatial[2] * band.axis[2].step;
    if (!lines.all()) std::fill_n(dst, channels * size, 0.0f);
    for (int64_t c = 0; c < channels; ++c)
        each_line(source, lines, [&](int64_t offset, int64_t index, int64_t low, int64_t high) {
            const void *from = at(source.data, source.type, c * source.channel + offset);
            float *line = dst + c * size + index + low;
            if (source.type == FASTDP_FLOAT32 && step == 1)
                copy_short((const float *)from, high - low, line);
            else if (high > low)
                to_float(from, source.type, step, high - low, line);
        });
}

void pack_channels(const Source &source, int64_t channels, const Band &band, float *dst) {
    const int64_t width = band.axis[2].extent();
    const int64_t size = band.axis[0].extent() * band.axis[1].extent() * width;
    const Lines lines(band);
    for (int64_t c = 0; c < channels; c += SLIVER, dst += size * SLIVER)
        each_line(source, lines, [&](int64_t offset, int64_t index, int64_t low, int64_t high) {
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

// Where a position's patch begins, in floats from that of the first.
INLINE int64_t place_of(const Patches &patches, int64_t position) {
    const Axis *axis = patches.band.axis;
    const int64_t width = axis[2].count, rows = axis[1].count, planes = axis[0].count;
    const int64_t line = position / width, plane = line / rows;
    const int64_t row = plane % planes * axis[0].stride * axis[1].extent() + line % rows * axis[1].stride;
    return plane / planes * patches.apart + row * axis[2].extent() + position % width * axis[2].stride;
}

INLINE int64_t chunks_of(const Patches &patches, int64_t first, int64_t count, Chunk *chunks) {
    const int64_t width = patches.band.axis[2].count, step = patches.band.axis[2].stride;
    int64_t n = 0;
    for (int64_t done = 0, run; done < count; done += run) {
        const int64_t from = place_of(patches, first + done);
        run = min64(width - (first + done) % width, count - done);
        const int64_t wide = step == 1 ? 4 : 1;
        for (int64_t i = 0; i < run; i += wide) chunks[n++] = {from + i * step, done + i};
    }
    return n;
}

// The columns of the patch matrix one after the other: channel, then tap.
struct Column {
    const float *start;  // at the first position
    int64_t taps[3], left[3], to_next[4];  // of each axis: taps, those to come; floats to the next one, and channel

    INLINE Column(const Patches &patches, int64_t k) {
        const Axis *axis = patches.band.axis;
        const int64_t line = axis[2].extent(), plane = axis[1].extent() * line, size = axis[0].extent() * plane;
        const int64_t apart[4] = {size, axis[0].dilation * plane, axis[1].dilation * line, axis[2].dilation};
        int64_t rest = k, within = 0;  // floats from the first to the last tap of the axes within
        start = patches.data;
        for (int d = 2; d >= 0; --d) {
            const int64_t tap = rest % axis[d].kernel;
            rest /= axis[d].kernel;
            taps[d] = axis[d].kernel, left[d] = taps[d] - tap;
            to_next[d] = apart[d + 1] - within;
            within += (taps[d] - 1) * apart[d + 1];
            start += tap * apart[d + 1];
        }
        to_next[3] = size - within;
        start += rest * size;
    }
    INLINE void next() {
        int d = 2;
        while (d >= 0 && --left[d] == 0) left[d] = taps[d], --d;
        start += to_next[d < 0 ? 3 : d];
    }
};

// dst[to] = the column at the positions of the chunks; up to SLACK floats beyond the last are spoilt.
INLINE void read_column(const float *src, int64_t stride, const Chunk *chunks, int64_t count, float *dst) {
    if (stride == 1)
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

INLINE int runs_of(Column &column, const float *data, int columns, Run *runs) {
    int n = 0;
    for (int c = 0; c < columns;) {
        const int64_t from = column.start - data;
        const int run = (int)min64(columns - c, column.left[2]);
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
        const int here = (int)min64(SLIVER, columns - s), n = runs_of(column, patches.data, here, runs);
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
            for (int64_t r = 0; r < rows; ++r, column.next())
                read_column(column.start, band.axis[2].stride, chunks, n, block + r * APART);
            pack_sliver(block, FASTDP_FLOAT32, APART, 1, (int)rows, piece, dst + (s * count + p) * SLIVER);
        }
    }
}

// Element by element to where it stays: what is gathered in a line first, and then read as a vector, waits for it.
CLONES void Patches::operator()(int64_t first, int64_t rows, int64_t k, int64_t count, float *dst) const {
    constexpr int KINDS = 3;  // of 4, 2 and 1 floats in a row
    Chunk chunks[KINDS][PIECE];
    int64_t n[KINDS] = {};
    const Axis *axis = band.axis;
    for (int64_t r = 0, wide = 0; r < rows; r += wide) {
        const int64_t of_line = axis[2].count - (first + r) % axis[2].count, of_sliver = SLIVER - r % SLIVER;
        const int64_t run = axis[2].stride > 1 ? 1 : min64(rows - r, min64(of_line, of_sliver));
        const int kind = run >= 4 ? 0 : run >= 2 ? 1 : 2;
        wide = 4 >> kind;
        chunks[kind][n[kind]++] = {place_of(*this, first + r), r / SLIVER * SLIVER * count + r % SLIVER};
    }
    if (rows % SLIVER) std::fill_n(dst + rows / SLIVER * SLIVER * count, SLIVER * count, 0.0f);
    Column column(*this, k);
    for (int64_t i = 0; i < count; ++i, column.next(), dst += SLIVER) {
        const float *src = column.start;
        for (int64_t j = 0; j < n[0]; ++j) __builtin_memcpy(dst + chunks[0][j].to, src + chunks[0][j].from, 16);
        for (int64_t j = 0; j < n[1]; ++j) __builtin_memcpy(dst + chunks[1][j].to, src + chunks[1][j].from, 8);
        for (int64_t j = 0; j < n[2]; ++j) dst[chunks[2][j].to] = src[chunks[2][j].from];
    }
}

}  // namespace fastdp
