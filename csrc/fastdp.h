/* fastdp's compiled functions: plain C over pointers and sizes. They know neither torch nor Python and
 * never allocate. Arrays are contiguous; nothing is checked here, callers do (fastdp/ops).
 */
#ifndef FASTDP_H
#define FASTDP_H

#include <stdint.h>

#include "dtypes.h"
#include "updates.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------- noise (csrc/cpu/noise.cpp)
 *
 * Element i of step s is one of the 16 normals of one ChaCha20 block, found from the global index alone:
 *     tile = i / 1024, slot = i % 1024 / 64, lane = i % 64, block counter = 64 * tile + lane
 * so a tile's normals leave the SIMD lanes (lane = block) in memory order, without a transposition. Slots 2p and
 * 2p + 1 are radius * (cos, sin) of pair p in 0 .. 7, from the 64 bits of the words w[p] and w[8 + p]:
 *     radius = sqrt(-2 ln(1 - x)), x = (16 w[p] + low) / 2^36 in [0, 1), low the lower 4 bits of w[8 + p]: 7.06 at the
 *          largest x
 *     angle = pi (c + 1/2) / 2^27, c the other bits of w[8 + p] but for the upper one, as a signed number of 27 bits; the
 *          upper bit turns the point by half a circle
 */
enum {
    FASTDP_LANES = 64, /* blocks of a tile */
    FASTDP_SLOTS = 16, /* normals of a block */
    FASTDP_TILE = FASTDP_LANES * FASTDP_SLOTS,
    FASTDP_DOMAIN_NOISE = 0x6e6f /* upper 16 bits of the nonce: what the key stream is used for */
};

/* Use no more than this instruction set (0 plain, 1 AVX2 with FMA, 2 AVX-512), for tests; -1 changes nothing.
 * Returns the one in use. Results are the same bits with each.
 */
int fastdp_instruction_set(int at_most);

/* FASTDP_LANES consecutive ChaCha20 blocks (RFC 8439, 2.3). Words 12 and 13 of the state are one 64-bit
 * counter, of block 0; block l has that counter + l.
 * state: [16]; words: [16][FASTDP_LANES], word k of block l at k * FASTDP_LANES + l.
 */
void fastdp_chacha20_blocks(const uint32_t *state, uint32_t *words);

/* The transform from key stream to normals (Box & Muller 1958) on chosen bits, for tests.
 * words: [16][FASTDP_LANES]; normals: [FASTDP_SLOTS][FASTDP_LANES], type FASTDP_F32 (computed in float, each within
 * 7e-7 of its pair's radius) or FASTDP_F64 (in double, within 1e-13).
 */
void fastdp_box_muller(const uint32_t *words, void *normals, int type);

/* What is drawn: n = unit * round((sum + std * N(0, 1)) / unit) * scale, unit the largest power of two that is at most
 * std / 64, or sum * scale where std = 0; where read = 0, std * N(0, 1) * scale, not rounded to a unit. In double for
 * float64 sums, in float for all other (in double, too, where std or scale is not 0 and outside 2^-60 .. 2^60); a std of
 * more than float's 24 bits is rounded up there: noise is never less than asked for. A rounded n is what real numbers
 * would give (csrc/exact.h): where 64 bits do not decide, block `counter` under the nonce's upper 16 bits + l has in its
 * words 2p and 2p + 1 the next 32 bits of x and of the angle, l = 1, 2, 3.
 * key: 8 words, the 32 bytes of RFC 8439 in little-endian order; step < 2^48; keep: n is written over the sums.
 * Sums are not looked at where read = 0. The same bits whatever the threads (>= 1), the pieces in which an array
 * is passed, or the instruction set.
 */
typedef struct {
    const uint32_t *key;
    uint64_t step;
    double std, scale;
    int32_t read, keep, threads;
    int32_t earlier;               /* correlated noise: to N(0, 1) is added the sum of weights[j] times the normal that */
    const uint64_t *earlier_steps; /* earlier_steps[j] draws for the element; read = 1 */
    const double *earlier_weights; /* the sum of their sizes at most 1024 */
} fastdp_noise;

/* data = n, in place. type: of data; offset >= 0: global index of data[0]. */
void fastdp_noise_into(void *data, int type, int64_t count, int64_t offset, const fastdp_noise *noise);

/* ---------------------------------------------------------------- noise and update (csrc/cpu/step.cpp)
 *
 * One parameter: its weights, the clipped sum of its gradients, its states (first: momentum or the average of
 * gradients; second: of squares; NULL where the update has none), all of `count` elements in the same order.
 * Arithmetic is in float32, or in double where the first parameter is of type F64 (then all should be).
 */
typedef struct {
    void *param, *sum, *first, *second;
    int64_t count, offset; /* elements; global index of the first one */
    int32_t param_type, sum_type, first_type, second_type;
} fastdp_tensor;

/* torch.optim.SGD's and Adam's (AdamW's) update of all tensors with gradients n. tiles: scratch, [count + 1]. */
void fastdp_sgd_step(const fastdp_tensor *tensors, int64_t count, int64_t *tiles, const fastdp_noise *noise,
                     const fastdp_sgd *options);
void fastdp_adam_step(const fastdp_tensor *tensors, int64_t count, int64_t *tiles, const fastdp_noise *noise,
                      const fastdp_adam *options);

/* ---------------------------------------------------------------- matrix products (csrc/cpu/linear.cpp)
 *
 * Weight gradients G_b = g_b^T a_b of a [B,T,I], g [B,T,O] in any strides. Results do not depend on `threads`.
 * scratch: threads times as many bytes as the *_scratch function says, aligned to 64.
 */
typedef struct {
    const void *data;
    int type;                   /* FASTDP_FLOAT32, FASTDP_BFLOAT16 or FASTDP_FLOAT16 */
    int64_t columns;            /* I, O */
    int64_t batch, row, column; /* strides, in elements */
} fastdp_matrix;

int64_t fastdp_gram_scratch(void);
int64_t fastdp_gram_parts(int64_t batch, int64_t positions); /* doubles in `parts` */

/* norm_sq[b] = sum_{t,s} (a_t . a_s)(g_t . g_s), the squared norm of G_b. doubt[b] = 1 where rounding *
 * sqrt(sum (|a_t| |a_s| (g_t . g_s))^2 + ((a_t . a_s) |g_t| |g_s|)^2), or what underflow may have taken, is more than
 * tolerance * norm_sq[b] (the summands cancel), or norm_sq[b] less than `smallest`, or not finite. Returns how many
 * samples are in doubt.
 */
int64_t fastdp_linear_gram(const fastdp_matrix *a, const fastdp_matrix *g, int64_t batch, int64_t positions,
                           double rounding, double tolerance, double smallest, double *norm_sq, uint8_t *doubt,
                           double *parts, void *scratch, int threads);

int64_t fastdp_direct_scratch(void);
int64_t fastdp_direct_parts(int64_t batch, int64_t inputs, int64_t outputs);

/* The same norms from the elements of G_b, formed in registers. */
void fastdp_linear_direct(const fastdp_matrix *a, const fastdp_matrix *g, int64_t batch, int64_t positions,
                          double *norm_sq, double *parts, void *scratch, int threads);

/* out [count,O,I] = sum_b factors[*,b] G_b of each of `count` products, which lie a batch stride apart, and whose
 * samples' rows follow one another. Sums of 128 rows are in float32, all others in double.
 */
void fastdp_linear_sum(const fastdp_matrix *a, const fastdp_matrix *g, const float *factors, int64_t count,
                       int64_t batch, int64_t positions, float *out, void *scratch, int threads);

/* Norms of G_b = sum over `rows` rows of g_t a_t^T enlarged by what rounding may do to such sums (csrc/cpu/bounds.cpp):
 * bound[b] = units sum_t |a_t| |g_t|, and where that is more than tolerance of the norm, the norm grows by the rest.
 */
void fastdp_enlarge_by_data(const fastdp_matrix *a, const fastdp_matrix *g, int64_t batch, int64_t rows, double units,
                            double tolerance, double *norm_sq, double *bound, int threads);

/* Of how many samples units |a_b| |g_b|, which is as much or more and stands in the `parts` that fastdp_linear_gram has
 * left, is more than tolerance of the norm (or no number). bound[b]: that.
 */
int64_t fastdp_doubted_by_blocks(const double *parts, int64_t batch, int64_t blocks, double units, double tolerance,
                                 const double *norm_sq, double *bound);

/* Rows of many samples, each multiplied with one of several matrices: segment s is rows [starts[s], starts[s + 1]) of
 * a [S,I] and g [S,O] (batch strides are not read), all of one sample and one matrix. norm_sq[s] is the squared norm of
 * its sum g_t a_t^T: by the gram route, directly for segments of more than `longest` rows and for those in doubt
 * (as above, or where products of float32 were lost). Returns how many were in doubt and not zero.
 * first: [segments + 1], filled by fastdp_routed_jobs, which returns how many times 4 doubles `parts` holds.
 */
int64_t fastdp_routed_scratch(void);
int64_t fastdp_routed_jobs(const int64_t *starts, int64_t segments, int64_t longest, int64_t inputs, int64_t outputs,
                           int64_t *first);
int64_t fastdp_routed_norm(const fastdp_matrix *a, const fastdp_matrix *g, const int64_t *starts, int64_t segments,
                           int64_t longest, const int64_t *first, double rounding, double tolerance, double smallest,
                           double *norm_sq, double *parts, void *scratch, int threads);

/* ---------------------------------------------------------------- convolutions (csrc/cpu/conv.cpp)
 *
 * Weight gradients by sample: G_b[o, i, k] = sum over images f and positions p of
 *     g[b, f, o, p] x[b, f, i, p stride + k dilation - padding]
 * with x 0 outside; three spatial dimensions (leading ones of size 1 for fewer). The axes of x and g:
 * sample, image, channel, three spatial. Results do not depend on `threads`.
 */
typedef struct {
    const void *data;
    int type;           /* as in fastdp_matrix */
    int64_t strides[6]; /* in elements */
} fastdp_images;

typedef struct {
    fastdp_images x, g;
    int64_t batch, images;           /* B, F */
    int64_t groups, inputs, outputs; /* inputs, outputs: channels of one group */
    int64_t size[3], kernel[3], positions[3], stride[3], padding[3], dilation[3]; /* size of x, positions of g */
} fastdp_conv;

enum { FASTDP_CONV_NORM = 0, FASTDP_CONV_STORE = 1, FASTDP_CONV_GRAM = 2 };

int64_t fastdp_conv_scratch(const fastdp_conv *conv, int route); /* bytes a thread, aligned to 64 */
int64_t fastdp_conv_parts(const fastdp_conv *conv, int route);   /* doubles in `parts` */

/* norm_sq[b] = squared norm of G_b, from its elements, formed in registers. */
void fastdp_conv_norm(const fastdp_conv *conv, double *norm_sq, double *parts, void *scratch, int threads);

/* out [B, groups * outputs, inputs, kernel]: G_b, fully written. */
void fastdp_conv_per_sample(const fastdp_conv *conv, float *out, void *scratch, int threads);

/* As fastdp_linear_gram, over patches of x. */
int64_t fastdp_conv_gram(const fastdp_conv *conv, double rounding, double tolerance, double smallest,
                         double *norm_sq, uint8_t *doubt, double *parts, void *scratch, int threads);

/* ---------------------------------------------------------------- table look-ups (csrc/cpu/embedding.cpp)
 *
 * ids: [batch, k]; g: [batch, k, d] of any type; has_padding: positions with the id `padding` have no gradient.
 */
enum { FASTDP_COLUMNS = 256 }; /* columns that one task works on */

/* Index of the first of n ids outside [0, rows), or -1. */
int64_t fastdp_first_outside(const int64_t *ids, int64_t n, int64_t rows);

/* out[b] = sum over the ids v of sample b of |sum of g[b, t] over t with ids[b, t] = v|^2, in double.
 * order: scratch, [batch * k]; parts: scratch, [batch * ceil(d / FASTDP_COLUMNS)].
 */
void fastdp_embedding_norm_sq(const int64_t *ids, const void *g, int type, int64_t batch, int64_t k, int64_t d,
                              int has_padding, int64_t padding, int64_t *order, double *parts, double *out,
                              int threads);

/* out[v] (+)= sum of c[b] g[b, t] over ids[b, t] = v, [rows, d]; samples with c = 0 are not read. add: 0 sets all of
 * out, 1 adds to it. c and out: float, or double where out_type is F64. All ids must lie in [0, rows).
 */
void fastdp_embedding_clipped_sum(const int64_t *ids, const void *g, int type, const void *c, int64_t batch, int64_t k,
                                  int64_t d, int64_t rows, int has_padding, int64_t padding, void *out, int out_type,
                                  int add, int threads);

/* ---------------------------------------------------------------- affine norms (csrc/cpu/norm.cpp)
 *
 * weight[b, j] = sum_t g[b, t, j] (x[b, t, j] - mean[b, t]) rstd[b, t], bias[b, j] = sum_t g[b, t, j]; x and g
 * [batch, t, d] of one type; mean (NULL for 0) and rstd [batch, t]; mean, rstd, weight and bias (NULL where not
 * wanted) float, or double where type is F64.
 */
void fastdp_norm_affine(const void *x, const void *g, int type, const void *mean, const void *rstd, int64_t batch,
                        int64_t t, int64_t d, void *weight, void *bias, int threads);

/* The same with channels before positions: x and g [batch, channels, s]; mean, rstd [batch, groups]; weight and bias
 * [batch, channels].
 */
void fastdp_group_affine(const void *x, const void *g, int type, const void *mean, const void *rstd, int64_t batch,
                         int64_t channels, int64_t s, int64_t groups, void *weight, void *bias, int threads);

/* ---------------------------------------------------------------- recurrent layers (csrc/cpu/recurrent.cpp)
 *
 * packed: a matrix [depth, columns] in any strides as slivers of 16 columns, SLIVER ceil(columns / SLIVER) depth floats.
 */
void fastdp_pack_columns(const float *matrix, int64_t columns, int64_t depth, int64_t column, int64_t row,
                         float *packed, int threads);

/* out [batch, columns] = rows [batch, depth] times that matrix, plus bias [columns], or plus itself where bias is NULL.
 * packed_rows: scratch of SLIVER ceil(batch / SLIVER) depth floats.
 */
void fastdp_packed_product(const float *rows, const float *packed, const float *bias, int64_t batch, int64_t depth,
                           int64_t columns, float *packed_rows, float *out, int threads);

/* A step beside its product with the state's matrix, in the formulas of torch.nn. Of samples that are not active [batch]
 * (NULL: all are) the state stays. What is not named is [batch, size].
 *
 * LSTM: x, product, gates [batch, 4, size]: the input's and the state's part of the arguments of i, f, g, o, with
 * biases, and their values; bent is tanh(cell_after).
 */
void fastdp_lstm_step(const float *x, const float *product, const float *cell, const float *state,
                      const uint8_t *active, int64_t batch, int64_t size, float *gates, float *cell_after, float *bent,
                      float *after, int threads);

/* of_state: gradient of the state after; of_cell: of the cell after, then of the one before; grads [batch, 4, size]: of
 * the gates' arguments; passed: of the state before, but for the product: what came out there (before; NULL: 0), and
 * what stays.
 */
void fastdp_lstm_step_back(const float *gates, const float *cell, const float *bent, const float *of_state,
                           const float *before, const uint8_t *active, int64_t batch, int64_t size, float *of_cell,
                           float *grads, float *passed, int threads);

/* GRU: x, product, gates [batch, 3, size]: the same of r, z, n; inner: the state's part of n.
 */
void fastdp_gru_step(const float *x, const float *product, const float *state, const uint8_t *active, int64_t batch,
                     int64_t size, float *gates, float *inner, float *after, int threads);

/* grads, products [batch, 3, size]: gradients of x and of product. */
void fastdp_gru_step_back(const float *gates, const float *inner, const float *state, const float *of_state,
                          const float *before, const uint8_t *active, int64_t batch, int64_t size, float *grads,
                          float *products, float *passed, int threads);

/* ---------------------------------------------------------------- rows (csrc/cpu/rows.cpp)
 *
 * rows: batch rows of n floats, `stride` floats from one to the next.
 */
int64_t fastdp_square_parts(int64_t batch, int64_t n); /* doubles in `parts` */

/* out[b] = sum of the squares of row b, in double. */
void fastdp_square_sum(const float *rows, int64_t batch, int64_t n, int64_t stride, double *parts, double *out,
                       int threads);

/* out[j] = sum_b c[b] rows[b][j], added in double; rows with c = 0 are not read. */
void fastdp_weighted_sum(const float *rows, const float *c, int64_t batch, int64_t n, int64_t stride, float *out,
                         int threads);

#ifdef __cplusplus
}
#endif

#endif
