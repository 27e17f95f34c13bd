/* What C++ (fastdp.h), CUDA (fastdp_cuda.h) and Python share: a code for each type of numbers in memory
 * (fastdp/ops/common.py), and which definition of the noise this is (fastdp/ops/noise_reference.py).
 */
#ifndef FASTDP_DTYPES_H
#define FASTDP_DTYPES_H

enum { FASTDP_FLOAT32 = 0, FASTDP_FLOAT64 = 1, FASTDP_BFLOAT16 = 2, FASTDP_FLOAT16 = 3 };
#define FASTDP_STREAM 2

#endif
