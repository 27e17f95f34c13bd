// Table gradients of look-ups: norms by sample, and the clipped sum. Ids come sorted, so that equal ones are
// neighbours; a block takes a chunk of positions and 128 columns, a thread a column. No atomics: every sum runs in the
// order of positions.
#include "common.cuh"

namespace fastdp {
namespace {

constexpr int COLUMNS = 128;  // threads of a block
constexpr int CHUNK = 64;     // positions of a block
constexpr int AHEAD = 8;      // positions read at a time, so that as many loads are under way

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Rows {
    const int64_t *ids, *order;  // sorted lists, and where each id stood
    int64_t positions;           // of one list
    int64_t k, stride_batch, stride_k;
    int64_t d, padding;
};

// Does a new id begin at position j of the list?
FASTDP_INLINE bool begins(const int64_t *ids, int64_t j) { return j == 0 || ids[j] != ids[j - 1]; }

// ---------------------------------------------------------------- norm

// The rest of a segment that began before position j.
template <typename T>
FASTDP_INLINE double sum_of_rest(const Rows &rows, const int64_t *ids, const int64_t *order, int64_t j,
                                 const T *values) {
    const int64_t id = ids[j - 1];
    double sum = 0;
    for (bool more = true; more; j += AHEAD) {
        double value[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            more = j + u < rows.positions && ids[j + u] == id;  // once false, false for all that follow
            value[u] = more ? (double)widen(values[order[j + u] * rows.stride_k]) : 0.0;
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) sum += value[u];
    }
    return sum;
}

// Every segment (run of equal ids) is summed, in double, by the block of the chunk it begins in.
// grid: samples * chunks, column blocks; partial: [samples][column blocks][chunks]
template <typename T>
__global__ void __launch_bounds__(COLUMNS, 8)
    embedding_squares(const __grid_constant__ Rows rows, const T *g, int64_t chunks, double *partial) {
    __shared__ double scratch[COLUMNS];
    __shared__ int64_t row[CHUNK];
    __shared__ bool fresh[CHUNK];
    const int64_t b = blockIdx.x / chunks, chunk = blockIdx.x % chunks, first = chunk * CHUNK;
    const int64_t *ids = rows.ids + b * rows.positions, *order = rows.order + b * rows.positions;
    const int count = (int)min((int64_t)CHUNK, rows.positions - first);
    for (int i = (int)threadIdx.x; i < count; i += COLUMNS) {
        row[i] = ids[first + i] == rows.padding ? -1 : order[first + i] * rows.stride_k;
        fresh[i] = begins(ids, first + i);
    }
    __syncthreads();
    const int64_t column = (int64_t)blockIdx.y * COLUMNS + threadIdx.x;
    double squares = 0, sum = 0;
    if (column < rows.d) {
        const T *values = g + b * rows.stride_batch + column;
        bool mine = false;  // until the first new id: another block's segment
        for (int base = 0; base < count; base += AHEAD) {
            double value[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                const int i = base + u;
                value[u] = i < count && row[i] >= 0 ? (double)widen(values[row[i]]) : 0.0;
            }
#pragma unroll
            for (int u = 0; u < AHEAD; ++u) {
                if (base + u < count && fresh[base + u]) squares += sum * sum, sum = 0, mine = true;
                if (mine) sum += value[u];
            }
        }
        const int64_t end = first + count;
        const bool goes_on = end < rows.positions && !begins(ids, end) && ids[end] != rows.padding;
        if (mine && goes_on) sum += sum_of_rest(rows, ids, order, end, values);
        squares += sum * sum;
    }
    const double total = block_sum<COLUMNS>(squares, scratch);
    if (threadIdx.x == 0) partial[(b * gridDim.y + blockIdx.y) * chunks + chunk] = total;
}

// norm_sq[b] = sum of partial[b][...]; a block a sample
static __global__ void __launch_bounds__(COLUMNS) sum_partials(const double *partial, int64_t count, double *norm_sq) {
    __shared__ double scratch[COLUMNS];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += COLUMNS) sum += partial[(int64_t)blockIdx.x * count + i];
    const double total = block_sum<COLUMNS>(sum, scratch);
    if (threadIdx.x == 0) norm_sq[blockIdx.x] = total;
}

// ---------------------------------------------------------------- clipped sum

// A chunk's part of the segment that began before it goes to heads[chunk]; what begins in it, to out. A segment that
// goes on behind the chunk is completed by `embedding_join`. grid: chunks, column blocks
template <typename T>
__global__ void __launch_bounds__(COLUMNS, 8)
    embedding_segments(const __grid_constant__ Rows rows, const T *g, const float *factors, int64_t table_rows,
                       arithmetic<T> *out, arithmetic<T> *heads) {
    using A = arithmetic<T>;
    __shared__ int64_t row[CHUNK], id_of[CHUNK];
    __shared__ float factor[CHUNK];
    __shared__ bool fresh[CHUNK];
    const int64_t first = (int64_t)blockIdx.x * CHUNK;
    const int count = (int)min((int64_t)CHUNK, rows.positions - first);
    for (int i = (int)threadIdx.x; i < count; i += COLUMNS) {
        const int64_t id = rows.ids[first + i];
        const uint32_t at = (uint32_t)rows.order[first + i], b = at / (uint32_t)rows.k;
        const bool inside = 0 <= id && id < table_rows;
        FASTDP_DEVICE_ASSERT(inside || id == rows.padding);  // else an id lies outside the table
        id_of[i] = inside && id != rows.padding ? id : -1;
        factor[i] = id_of[i] >= 0 ? factors[b] : 0.0f;
        row[i] = b * rows.stride_batch + (at - b * (uint32_t)rows.k) * rows.stride_k;
        fresh[i] = begins(rows.ids, first + i);
    }
    __syncthreads();
    const int64_t column = (int64_t)blockIdx.y * COLUMNS + threadIdx.x;
    if (column >= rows.d) return;
    A sum = 0;
    bool head = !fresh[0];  // heads hold nothing yet, out does
    A *to = head ? heads + (int64_t)blockIdx.x * rows.d + column : nullptr;  // where the segment's sum goes
    for (int base = 0; base < count; base += AHEAD) {
        A value[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {  // rows with factor 0 are not read: 0 * infinity is no number
            const int i = base + u;
            value[u] = i < count && factor[i] != 0 ? (A)factor[i] * (A)widen(g[row[i] + column]) : (A)0;
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
            const int i = base + u;
            if (i < count && fresh[i]) {
                if (to != nullptr) *to = head ? sum : *to + sum;
                head = false;
                to = id_of[i] >= 0 ? out + id_of[i] * rows.d + column : nullptr, sum = 0;
            }
            sum += value[u];
        }
    }
    if (to != nullptr) *to = head ? sum : *to + sum;
}

// out += the heads of a segment that goes on behind the chunk it begins in. grid: chunks, column blocks
template <typename A>
__global__ void __launch_bounds__(COLUMNS, 8)
    embedding_join(const __grid_constant__ Rows rows, int64_t table_rows, A *out, const A *heads) {
    const int64_t chunks = gridDim.x, column = (int64_t)blockIdx.y * COLUMNS + threadIdx.x;
    int64_t next = (int64_t)blockIdx.x + 1;
    if (next >= chunks || begins(rows.ids, next * CHUNK) || column >= rows.d) return;
    const int64_t id = rows.ids[next * CHUNK];
    if (rows.ids[(next - 1) * CHUNK] == id && !begins(rows.ids, (next - 1) * CHUNK)) return;  // began before this chunk
    if (id == rows.padding || id < 0 || id >= table_rows) return;
    A sum = 0;
#pragma unroll 4
    for (; next < chunks && rows.ids[next * CHUNK] == id; ++next) sum += heads[next * rows.d + column];
    out[id * rows.d + column] += sum;
}

}  // namespace
}  // namespace fastdp

using namespace fastdp;

extern "C" int64_t fastdp_cuda_embedding_partials(int64_t k, int64_t d) {
    return divide_up(k, CHUNK) * divide_up(d, COLUMNS);
}

extern "C" int64_t fastdp_cuda_embedding_chunks(int64_t positions) { return divide_up(positions, CHUNK); }

extern "C" fastdp_cuda_status fastdp_cuda_embedding_norm_sq(const int64_t *ids, const int64_t *order, const void *g,
                                                            int type, int64_t batch, int64_t k, int64_t d,
                                                            int64_t stride_batch, int64_t stride_k, int64_t padding,
                                                            double *partial, double *norm_sq, int device,
                                                            void *stream) {
    if (batch <= 0) return {nullptr, nullptr};
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("embedding_norm_sq", guard.error);
    const Rows rows = {ids, order, k, k, stride_batch, stride_k, d, padding};
    const int64_t chunks = divide_up(k, CHUNK);
    const dim3 grid((unsigned)(batch * chunks), (unsigned)divide_up(d, COLUMNS));
    if (k > 0 && d > 0) {
        const fastdp_cuda_status status = with_type(type, [&](auto *typed) {
            using T = std::remove_pointer_t<decltype(typed)>;
            FASTDP_LAUNCH(embedding_squares<T>, grid, COLUMNS, (cudaStream_t)stream, rows, (const T *)g, chunks,
                          partial);
            return launched("embedding_squares");
        });
        if (status.kernel != nullptr) return status;
    }
    FASTDP_LAUNCH(sum_partials, (unsigned)batch, COLUMNS, (cudaStream_t)stream, (const double *)partial,
                  fastdp_cuda_embedding_partials(k, d), norm_sq);
    return launched("sum_partials");
}

extern "C" fastdp_cuda_status fastdp_cuda_embedding_clipped_sum(const int64_t *ids, const int64_t *order,
                                                                const void *g, int type, const float *factors,
                                                                int64_t batch, int64_t k, int64_t d,
                                                                int64_t stride_batch, int64_t stride_k,
                                                                int64_t table_rows, int64_t padding, void *out,
                                                                void *heads, int device, void *stream) {
    if (batch <= 0 || k <= 0 || d <= 0) return {nullptr, nullptr};
    const DeviceGuard guard(device);
    if (guard.error != cudaSuccess) return status_of("embedding_clipped_sum", guard.error);
    const Rows rows = {ids, order, batch * k, k, stride_batch, stride_k, d, padding};
    const dim3 grid((unsigned)divide_up(batch * k, CHUNK), (unsigned)divide_up(d, COLUMNS));
    return with_type(type, [&](auto *typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        using A = arithmetic<T>;
        FASTDP_LAUNCH(embedding_segments<T>, grid, COLUMNS, (cudaStream_t)stream, rows, (const T *)g, factors,
                      table_rows, (A *)out, (A *)heads);
        const fastdp_cuda_status status = launched("embedding_segments");
        if (status.kernel != nullptr || grid.x == 1) return status;
        FASTDP_LAUNCH(embedding_join<A>, grid, COLUMNS, (cudaStream_t)stream, rows, table_rows, (A *)out,
                      (const A *)heads);
        return launched("embedding_join");
    });
}
