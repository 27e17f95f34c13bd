/* Types of numbers in memory: one code each, for C++ (fastdp.h), CUDA (fastdp_cuda.h) and Python (fastdp/ops/common.py).
 */
#ifndef FASTDP_DTYPES_H
#define FASTDP_DTYPES_H

enum { FASTDP_FLOAT32 = 0, FASTDP_FLOAT64 = 1, FASTDP_BFLOAT16 = 2, FASTDP_FLOAT16 = 3 };

#endif
