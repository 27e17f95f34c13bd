/* The optimizers' updates, for C++ (fastdp.h), CUDA (fastdp_cuda.h) and, with the fields in this order, Python
 * (fastdp/ops/updates.py).
 */
#ifndef FASTDP_UPDATES_H
#define FASTDP_UPDATES_H

#include <stdint.h>

typedef struct {
    double lr, momentum, dampening, weight_decay;
    int32_t nesterov, maximize, first; /* first: momentum is written, not read */
} fastdp_sgd;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay;
    int64_t t;                   /* torch's step count after this step */
    int32_t decoupled, maximize; /* decoupled: weight decay as in AdamW */
} fastdp_adam;

#endif
