/* fastdp's CUDA kernels behind plain C: pointers to device memory, sizes, strides and a stream. They know neither
 * torch nor Python, never allocate and never wait. Nothing is checked here, the caller does (fastdp/ops/cuda.py).
 *
 * Every function launches on `stream` of `device` (the calling thread's current device is put back) and returns
 * {NULL, NULL}, or the kernel that could not be launched and CUDA's reason.
 */
#ifndef FASTDP_CUDA_H
#define FASTDP_CUDA_H

#include <stdint.h>

#include "dtypes.h"
#include "updates.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *kernel, *reason;
} fastdp_cuda_status;

enum { FASTDP_LOCAL, FASTDP_GLOBAL, FASTDP_AUTOMATIC };

/* ---------------------------------------------------------------- noise (noise.cu)
 *
 * The noise of fastdp.h: the same key stream, and the same normals up to rounding. For float64 data they are drawn in
 * double; for all else in float, each within 7e-7 of its pair's radius of the exact one.
 */

typedef struct {
    uint32_t key[8];
    uint64_t step; /* below 2^48 */
    double std, scale;
    int keep_sums;
    const int64_t *counter; /* NULL, or one number in device memory that is added to all steps (and to t) */
    int64_t earlier;        /* correlated noise: normals of so many earlier steps are drawn again */
    const uint64_t *earlier_steps;
    const double *earlier_weights; /* and added times these, and std */
} fastdp_cuda_draw;

/* Bytes of device memory that a step over this many entries needs as workspace, or noise (over none). */
int64_t fastdp_cuda_workspace(int64_t entries, int64_t earlier);

/* data = ((keep ? data : 0) + std * N(0, 1)) * scale, rounded once. data: [count], its first element has the global
 * index `offset`. Without earlier steps the workspace may be NULL.
 */
fastdp_cuda_status fastdp_cuda_noise(void *data, int type, int64_t count, int64_t offset, const fastdp_cuda_draw *draw,
                                     int keep, void *workspace, int device, void *stream);

/* For tests: blocks of the key stream from given states, [16][count] -> [16][count], and normals from given words,
 * [16][count] -> [12][count] of float32 or float64.
 */
fastdp_cuda_status fastdp_cuda_chacha20(const uint32_t *states, uint32_t *words, int64_t count, int device,
                                        void *stream);
fastdp_cuda_status fastdp_cuda_box_muller(const uint32_t *words, void *normals, int type, int64_t count, int device,
                                          void *stream);

/* ---------------------------------------------------------------- noise and optimizer's step (sgd.cu, adamw.cu)
 *
 * For all entries in one launch (a small launch before it puts the table into device memory, so that nothing is
 * copied from the host and a CUDA graph may hold both):
 *     n = (sum + std * N(0, 1)) * scale;  sum = n where keep_sums;  then the optimizer's rule with gradient n.
 * Sums are float64 for float64 parameters, else float32; states have a type of their own: that of the parameters, or
 * float32. Arithmetic is float32 (float64 for float64 parameters); everything is rounded once.
 */
typedef struct {
    void *param, *sum, *state1, *state2; /* [count] each; states that the rule does not use may be NULL */
    int64_t count, offset;               /* offset: the global index of the first element */
    int64_t end_tile;                    /* tiles of this and all earlier entries; filled in by the function */
    int64_t tile_shift;                  /* from a tile's place in that count to its global number; filled in, too */
} fastdp_cuda_entry;

fastdp_cuda_status fastdp_cuda_noisy_sgd(fastdp_cuda_entry *entries, int64_t count, void *workspace, int param_type,
                                         int state_type, const fastdp_cuda_draw *draw, const fastdp_sgd *rule,
                                         int device, void *stream);
fastdp_cuda_status fastdp_cuda_noisy_adamw(fastdp_cuda_entry *entries, int64_t count, void *workspace, int param_type,
                                           int state_type, const fastdp_cuda_draw *draw, const fastdp_adam *rule,
                                           int device, void *stream);

/* ---------------------------------------------------------------- clip factors (clip.cu)
 *
 * factors[b] of n = sqrt(sum_u norm_sq[u][b]) * (1 + margin), rounded down: c * n <= max_grad_norm exactly.
 * norm_sq: [uses][batch] contiguous, float32 or float64; factors: [batch] float32; kind: FASTDP_LOCAL, ...
 */
fastdp_cuda_status fastdp_cuda_clip_factors(const void *norm_sq, int type, int64_t uses, int64_t batch,
                                            double max_grad_norm, int kind, double gamma, double margin,
                                            float *factors, int device, void *stream);

/* ---------------------------------------------------------------- embedding (embedding.cu)
 *
 * g: [batch][k][d] with strides (in elements) of its first two dimensions, the last contiguous; padding: an id whose
 * rows are not read, or -1. ids sorted along their last dimension, order: where each stood; int64. No float atomics:
 * every sum has a fixed order.
 */

/* Squared norm of each sample's table gradient, [batch] float64. ids, order: [batch][k], sorted by sample.
 * partial: float64 [batch][fastdp_cuda_embedding_partials(k, d)].
 */
int64_t fastdp_cuda_embedding_partials(int64_t k, int64_t d);
fastdp_cuda_status fastdp_cuda_embedding_norm_sq(const int64_t *ids, const int64_t *order, const void *g, int type,
                                                 int64_t batch, int64_t k, int64_t d, int64_t stride_batch,
                                                 int64_t stride_k, int64_t padding, double *partial, double *norm_sq,
                                                 int device, void *stream);

/* out[v] += sum of factors[b] g[b][j] over the positions with id v. ids, order: [batch * k], sorted as a whole; order
 * counts positions b * k + j; out: [rows][d] float32 (float64 for float64 g); factors: [batch] float32, rows of samples
 * with factor 0 are not read. heads: [fastdp_cuda_embedding_chunks(batch * k)][d] of out's type. batch * k < 2^31.
 * An id outside [0, rows) is a device assertion ("device-side assert triggered"), as in torch; nothing is written.
 */
int64_t fastdp_cuda_embedding_chunks(int64_t positions);
fastdp_cuda_status fastdp_cuda_embedding_clipped_sum(const int64_t *ids, const int64_t *order, const void *g,
                                                     int type, const float *factors, int64_t batch, int64_t k,
                                                     int64_t d, int64_t stride_batch, int64_t stride_k, int64_t rows,
                                                     int64_t padding, void *out, void *heads, int device,
                                                     void *stream);

#ifdef __cplusplus
}
#endif

#endif
