// Images of one sample in cache, padded, in the forms the convolution's routes read.
#ifndef FASTDP_PATCHES_H
#define FASTDP_PATCHES_H

#include "../fastdp.h"
#include "tile.h"

namespace fastdp {

// One spatial axis: element i of the packed image is source element i * step - pad; position p meets the packed
// elements p * stride + k * dilation. Where the kernel has one element only what it meets is packed.
struct Axis {
    int64_t size, count, kernel, dilation, step, stride, pad;
    // packed elements that `count` positions meet
    int64_t extent(int64_t some) const { return (some - 1) * stride + (kernel - 1) * dilation + 1; }
    int64_t extent() const { return extent(count); }
};

Axis axis_of(const fastdp_conv &conv, int dimension);

// Channels of one image, packed: [channel or sliver][extents].
struct Source {
    const void *data;
    int type;
    int64_t channel;     // stride
    int64_t spatial[3];  // strides
};

Source source_of(const fastdp_images &images, int64_t sample, int64_t image, int64_t channel);

// Positions [first, first + count) along the outermost axis that has several: a band of the image.
struct Band {
    Axis axis[3];
    int64_t start[3];  // of the packed elements, added to i above
    int cut;           // that axis: a band of one plane of several is cut along the planes, too
};

Band band_of(const Axis *axes, int64_t first, int64_t count);
// The axis along which bands are cut.
INLINE int cut_axis(const Axis *axes) { return axes[0].count > 1 ? 0 : 1; }

// dst [channels][extents] float32, zeros outside the source.
void pack_padded(const Source &source, int64_t channels, const Band &band, float *dst);

// dst [channels / 16][extents][16]: channels side by side.
void pack_channels(const Source &source, int64_t channels, const Band &band, float *dst);

// dst [outputs / 16][positions of the band][16]: g of the positions [first, ...) along the cut axis.
void pack_outputs(const Source &source, int64_t outputs, const Band &band, int64_t first, float *dst);

// Columns of the patch matrix of packed images [channels][extents], several images `apart` floats from each other.
struct Patches {
    const float *data;
    int64_t apart;
    Band band;
    static constexpr int64_t SLACK = 16;  // floats that may be read and written beyond the end
    int64_t positions() const { return band.axis[0].count * band.axis[1].count * band.axis[2].count; }
    int64_t taps() const { return band.axis[0].kernel * band.axis[1].kernel * band.axis[2].kernel; }
    // As slivers over columns: dst [columns / 16][positions][16] of the columns [first, first + columns)
    void columns(int64_t first, int64_t columns, float *dst) const;
    // As slivers over positions, for the gram route: dst [rows / 16][count][16] of columns [k, k + count)
    void operator()(int64_t first, int64_t rows, int64_t k, int64_t count, float *dst) const;
};

}  // namespace fastdp

#endif
