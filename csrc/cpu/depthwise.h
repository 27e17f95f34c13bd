// Depthwise convolutions (one input and one output channel a group): 16 channels side by side in a vector.
#ifndef FASTDP_DEPTHWISE_H
#define FASTDP_DEPTHWISE_H

#include "../fastdp.h"

namespace fastdp {

bool is_depthwise(const fastdp_conv &conv);

int64_t depthwise_scratch(const fastdp_conv &conv);  // bytes a thread, aligned to 64

// As fastdp_conv_norm; parts: [batch * ceil(groups / 16)]
void depthwise_norm(const fastdp_conv &conv, double *norm_sq, double *parts, void *scratch, int threads);

// As fastdp_conv_per_sample.
void depthwise_per_sample(const fastdp_conv &conv, float *out, void *scratch, int threads);

}  // namespace fastdp

#endif
