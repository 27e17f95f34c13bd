// Norms of the weight gradients of a matrix product, by sample: G_b = g_b^T a_b, never stored.
#include "../fastdp.h"
#include "gram.h"
#include "threads.h"

using namespace fastdp;

namespace {

// Rows of a matrix as slivers over positions: for the gram route.
struct PackRows {
    const void *data;
    int type;
    int64_t row, column;  // strides
    void operator()(int64_t first, int64_t rows, int64_t k, int64_t count, float *dst) const {
        for (int64_t r = 0; r < rows; r += SLIVER, dst += count * SLIVER)
            pack_sliver(at(data, type, (first + r) * row + k * column), type, row, column,
                        (int)min64(SLIVER, rows - r), count, dst);
    }
};

// ---------------------------------------------------------------- direct

// A job forms a block of WIDE x TALL outputs (columns of the wider operand x of the other).
constexpr int64_t WIDE = 24 * SLIVER, TALL = 16 * SLIVER, DEEP = 2 * FLUSH;  // k packed at once
constexpr int64_t WORTH_A_THREAD = 1 << 18;  // products of a sum

struct DirectScratch {
    float cols[WIDE * DEEP], rows[TALL * DEEP];
    double sums[WIDE * TALL];
};

int64_t direct_jobs(int64_t wide, int64_t tall, int64_t most_wide = WIDE, int64_t most_tall = TALL) {
    return ceil_div(wide, most_wide) * ceil_div(tall, most_tall);
}

// Factors of the samples by their rows, `each` of a sample; none: of 1.
struct Factors {
    const float *of_sample;
    int64_t each;
    void apply(float *rows, int64_t slivers, int64_t k, int64_t depth) const {
        for (int64_t s = 0; of_sample && s < slivers; ++s)
            for (int64_t i = 0; i < depth; ++i, rows += SLIVER) {
                const float factor = of_sample[(k + i) / each];
#pragma omp simd
                for (int r = 0; r < SLIVER; ++r) rows[r] *= factor;
            }
    }
};

// Forms outputs [w0, w0 + wide) x [t0, t0 + tall) of one sample: take(sums, t, w, rows, columns) gets each cell.
template <class Take>
INLINE void direct_block(const fastdp_matrix &w, const fastdp_matrix &t, int64_t sample, int64_t w0, int64_t wide,
                         int64_t t0, int64_t tall, int64_t positions, const Factors &factors, DirectScratch &my,
                         Take take) {
    const int64_t slivers = ceil_div(wide, SLIVER), halves = ceil_div(tall, HALF);
    const bool kept = positions > DEEP;  // sums wait for the next piece
    // Few rows do not repay a copy of the columns: whole slivers are read where they are.
    const int64_t in_place = w.type == FASTDP_FLOAT32 && w.column == 1 && halves <= 4 ? wide / SLIVER : 0;
    for (int64_t k = 0; k < positions; k += DEEP) {
        const int64_t depth = min64(DEEP, positions - k), size = depth * SLIVER;
        for (int64_t s = in_place; s < slivers; ++s)
            pack_sliver(at(w.data, w.type, sample * w.batch + k * w.row + (w0 + s * SLIVER) * w.column), w.type,
                        w.column, w.row, (int)min64(SLIVER, wide - s * SLIVER), depth, my.cols + s * size);
        for (int64_t s = 0; s < ceil_div(tall, SLIVER); ++s)
            pack_sliver(at(t.data, t.type, sample * t.batch + k * t.row + (t0 + s * SLIVER) * t.column), t.type,
                        t.column, t.row, (int)min64(SLIVER, tall - s * SLIVER), depth, my.rows + s * size);
        factors.apply(my.rows, ceil_div(tall, SLIVER), k, depth);
        for (int64_t s = 0, group; s < slivers; s += group) {
            const bool here = s < in_place;
            group = min64(GROUP, (here ? in_place : slivers) - s);
            const float *from = here ? (const float *)w.data + sample * w.batch + k * w.row + w0 : my.cols;
            const int64_t stride = here ? w.row : SLIVER, apart = here ? SLIVER : size;
            const float *three[GROUP] = {from + s * apart, from + (s + 1) * apart, from + (s + 2) * apart};
            const Line lines[2] = {{0, min64(FLUSH, depth)}, {FLUSH * stride, depth - FLUSH}};
            for (int64_t r = 0; r < halves; ++r) {
                double *sums = kept ? my.sums + (r * slivers + s) * CELL : my.sums;
                multiply((int)group, my.rows + r / 2 * size + r % 2 * HALF, three, stride, lines,
                         depth > FLUSH ? 2 : 1, k == 0, sums);
                for (int j = 0; j < group && k + DEEP >= positions; ++j)
                    take(sums + j * CELL, t0 + r * HALF, w0 + (s + j) * SLIVER, (int)min64(HALF, tall - r * HALF),
                         (int)min64(SLIVER, wide - (s + j) * SLIVER));
            }
        }
    }
}

// A block of a product whose larger side is w: block `number` of those that the product has.
struct Block {
    int64_t w0, wide, t0, tall;
    Block(int64_t number, const fastdp_matrix &w, const fastdp_matrix &t, int64_t most_wide = WIDE,
          int64_t most_tall = TALL) {
        const int64_t across = ceil_div(w.columns, most_wide);
        w0 = number % across * most_wide, t0 = number / across * most_tall;
        wide = min64(most_wide, w.columns - w0), tall = min64(most_tall, t.columns - t0);
    }
};

// The sum of squares of a block's outputs.
double direct_squares(const fastdp_matrix &w, const fastdp_matrix &t, int64_t sample, const Block &block,
                      int64_t positions, DirectScratch &my) {
    double total = 0;
    direct_block(w, t, sample, block.w0, block.wide, block.t0, block.tall, positions, Factors{nullptr, 1}, my,
                 [&](const double *sums, int64_t, int64_t, int rows, int columns) {
                     total += square_cell(sums, rows, columns);
                 });
    return total;
}

// ---------------------------------------------------------------- routed

union RoutedScratch {
    GramScratch gram;
    DirectScratch direct;
};

// The rows of a segment, as the only sample of a matrix.
fastdp_matrix rows_from(const fastdp_matrix &m, int64_t start) {
    return {at(m.data, m.type, start * m.row), m.type, m.columns, 0, m.row, m.column};
}

double direct_norm(const fastdp_matrix &a, const fastdp_matrix &g, int64_t rows, int64_t block, DirectScratch &my) {
    const fastdp_matrix &w = a.columns >= g.columns ? a : g, &t = a.columns >= g.columns ? g : a;
    return direct_squares(w, t, 0, Block(block, w, t), rows, my);
}

double square_row(const fastdp_matrix &m, int64_t row, float *memory) {
    double sum = 0;
    for (int64_t k = 0; k < m.columns; k += FLUSH) {
        const int64_t count = min64(FLUSH, m.columns - k);
        to_float(at(m.data, m.type, row * m.row + k * m.column), m.type, m.column, count, memory);
        for (int64_t i = 0; i < count; ++i) sum += (double)memory[i] * memory[i];
    }
    return sum;
}

bool all_zero(const fastdp_matrix &m, int64_t rows, float *memory) {
    for (int64_t r = 0; r < rows; ++r)
        if (!(square_row(m, r, memory) == 0)) return false;
    return true;
}

}  // namespace

extern "C" {

int64_t fastdp_gram_scratch(void) { return (int64_t)sizeof(GramScratch); }

int64_t fastdp_gram_parts(int64_t batch, int64_t positions) {
    return PARTS * batch * gram_blocks(positions, gram_side(batch, positions));
}

int64_t fastdp_linear_gram(const fastdp_matrix *a, const fastdp_matrix *g, int64_t batch, int64_t positions,
                           double rounding, double tolerance, double smallest, double *norm_sq, uint8_t *doubt,
                           double *parts, void *scratch, int threads) {
    const int64_t side = gram_side(batch, positions), blocks = gram_blocks(positions, side), jobs = batch * blocks;
    const int team = (int)max64(1, min64(threads, jobs));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; ++job) {
        const int64_t b = job / blocks;
        const PackRows rows_a{at(a->data, a->type, b * a->batch), a->type, a->row, a->column};
        const PackRows rows_g{at(g->data, g->type, b * g->batch), g->type, g->row, g->column};
        gram_block(rows_a, a->columns, rows_g, g->columns, positions, side, job % blocks,
                   ((GramScratch *)scratch)[omp_get_thread_num()], parts + PARTS * job);
    }
    const GramLimits limits{a->columns, g->columns, positions, rounding, tolerance, smallest};
    return gram_finish(parts, batch, blocks, limits, norm_sq, doubt);
}

int64_t fastdp_direct_scratch(void) { return (int64_t)sizeof(DirectScratch); }

int64_t fastdp_direct_parts(int64_t batch, int64_t inputs, int64_t outputs) {
    return batch * direct_jobs(max64(inputs, outputs), min64(inputs, outputs));
}

void fastdp_linear_direct(const fastdp_matrix *a, const fastdp_matrix *g, int64_t batch, int64_t positions,
                          double *norm_sq, double *parts, void *scratch, int threads) {
    const fastdp_matrix &w = a->columns >= g->columns ? *a : *g, &t = a->columns >= g->columns ? *g : *a;
    const int64_t each = direct_jobs(w.columns, t.columns), jobs = batch * each;
    const int team = (int)max64(1, min64(threads, jobs));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; ++job)
        parts[job] = direct_squares(w, t, job / each, Block(job % each, w, t), positions,
                                    ((DirectScratch *)scratch)[omp_get_thread_num()]);
    for (int64_t b = 0; b < batch; ++b) {
        norm_sq[b] = 0;
        for (int64_t i = 0; i < each; ++i) norm_sq[b] += parts[b * each + i];
    }
}

void fastdp_linear_sum(const fastdp_matrix *a, const fastdp_matrix *g, const float *factors, int64_t count,
                       int64_t batch, int64_t positions, float *out, void *scratch, int threads) {
    const bool larger = a->columns >= g->columns;
    const fastdp_matrix &w = larger ? *a : *g, &t = larger ? *g : *a;
    const int64_t row = larger ? a->columns : 1, column = larger ? 1 : a->columns, depth = batch * positions;
    // Smaller blocks where there would be few for the threads; what a cell is added up from does not depend on them.
    const int64_t size = w.columns * t.columns, wanted = min64(2 * threads, 1 + count * depth * size / WORTH_A_THREAD);
    int64_t wide = WIDE, tall = TALL;
    while (count * direct_jobs(w.columns, t.columns, wide, tall) < wanted && tall > 2 * SLIVER)
        (3 * tall > wide ? tall : wide) /= 2;
    const int64_t each = direct_jobs(w.columns, t.columns, wide, tall), jobs = count * each;
    const int team = (int)max64(1, min64(threads, min64(jobs, wanted)));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; ++job) {
        const int64_t product = job / each;
        const Block block(job % each, w, t, wide, tall);
        float *const total = out + product * size;
        direct_block(w, t, product, block.w0, block.wide, block.t0, block.tall, depth,
                     Factors{factors + product * batch, positions}, ((DirectScratch *)scratch)[omp_get_thread_num()],
                     [=](const double *sums, int64_t t0, int64_t w0, int rows, int columns) {
                         store_cell(sums, rows, columns, total + t0 * row + w0 * column, row, column);
                     });
    }
}

int64_t fastdp_routed_scratch(void) { return (int64_t)sizeof(RoutedScratch); }

int64_t fastdp_routed_jobs(const int64_t *starts, int64_t segments, int64_t longest, int64_t inputs, int64_t outputs,
                           int64_t *first) {
    const int64_t direct = direct_jobs(max64(inputs, outputs), min64(inputs, outputs));
    first[0] = 0;
    for (int64_t s = 0; s < segments; ++s) {
        const int64_t rows = starts[s + 1] - starts[s];
        first[s + 1] = first[s] + (rows == 0 ? 0 : rows == 1 ? 1 : rows > longest ? direct : gram_blocks(rows, SQUARE));
    }
    return first[segments];
}

int64_t fastdp_routed_norm(const fastdp_matrix *a, const fastdp_matrix *g, const int64_t *starts, int64_t segments,
                           int64_t longest, const int64_t *first, double rounding, double tolerance, double smallest,
                           double *norm_sq, double *parts, void *scratch, int threads) {
    const int64_t jobs = first[segments], direct = direct_jobs(max64(a->columns, g->columns),
                                                               min64(a->columns, g->columns));
    const int team = (int)max64(1, min64(threads, jobs));
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1)
    for (int64_t job = 0; job < jobs; ++job) {
        const int64_t s = std::upper_bound(first, first + segments + 1, job) - first - 1;
        const int64_t rows = starts[s + 1] - starts[s], block = job - first[s];
        const fastdp_matrix own_a = rows_from(*a, starts[s]), own_g = rows_from(*g, starts[s]);
        RoutedScratch &my = ((RoutedScratch *)scratch)[omp_get_thread_num()];
        double *out = parts + PARTS * job;
        if (rows == 1)
            out[0] = square_row(own_a, 0, my.gram.rows) * square_row(own_g, 0, my.gram.rows);
        else if (rows > longest)
            out[0] = direct_norm(own_a, own_g, rows, block, my.direct);
        else
            gram_block(PackRows{own_a.data, own_a.type, own_a.row, own_a.column}, own_a.columns,
                       PackRows{own_g.data, own_g.type, own_g.row, own_g.column}, own_g.columns, rows, SQUARE, block,
                       my.gram, out);
    }
    int64_t again = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team) if (team > 1) reduction(+ : again)
    for (int64_t s = 0; s < segments; ++s) {
        const int64_t rows = starts[s + 1] - starts[s];
        const bool gram = rows > 1 && rows <= longest;
        double sum[PARTS] = {};
        for (int64_t job = first[s]; job < first[s + 1]; ++job)
            for (int i = 0; i < (gram ? PARTS : 1); ++i) sum[i] += parts[PARTS * job + i];
        norm_sq[s] = sum[TOTAL];
        const GramLimits limits{a->columns, g->columns, rows, rounding, tolerance, smallest};
        if (!gram || !limits.doubts(sum)) continue;
        const fastdp_matrix own_a = rows_from(*a, starts[s]), own_g = rows_from(*g, starts[s]);
        RoutedScratch &my = ((RoutedScratch *)scratch)[omp_get_thread_num()];
        norm_sq[s] = 0;
        if ((sum[ROWS_A] == 0 && all_zero(own_a, rows, my.gram.rows) && std::isfinite(sum[ROWS_G])) ||
            (sum[ROWS_G] == 0 && all_zero(own_g, rows, my.gram.rows) && std::isfinite(sum[ROWS_A])))
            continue;
        ++again;
        for (int64_t block = 0; block < direct; ++block)
            norm_sq[s] += direct_norm(own_a, own_g, rows, block, my.direct);
    }
    return again;
}

}  // extern "C"
