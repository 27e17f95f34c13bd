// Key stream to normals to updated elements, a tile at a time; included by noise.h once for each instruction set.
//
// A tile is worked off in groups of W blocks, one block a SIMD lane. While the rounds of ChaCha20 for one group
// run, which keep the integer units busy, the words of the group before become normals and are spent on their
// elements, which keeps divider, square root and memory busy: neither needs the other, so the processor overlaps
// them.
namespace fastdp {
namespace FASTDP_ISA {

// ---------------------------------------------------------------- one group

typedef uint32_t V __attribute__((vector_size(4 * W)));

alignas(64) constexpr uint32_t numbers[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                              16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

// One of the sixteen numbers of ChaCha20's state, of HALVES times W blocks.
template <int HALVES>
struct Halves {
    V part[HALVES];
    Halves() = default;
    INLINE Halves(uint32_t x) {
        for (V &each : part) each = V{} + x;
    }
    INLINE void operator+=(const Halves &other) {
        for (int h = 0; h < HALVES; ++h) part[h] += other.part[h];
    }
    INLINE void operator^=(const Halves &other) {
        for (int h = 0; h < HALVES; ++h) part[h] ^= other.part[h];
    }
    INLINE void turn(int n) {
        for (V &each : part) each = each << n | each >> (32 - n);
    }
};

// The four steps of a quarter round, each for all four columns or diagonals.
#define FASTDP_MIX(a, b, d, n) a += b, d ^= a, d.turn(n)
#define FASTDP_COLUMNS_1(n) \
    FASTDP_MIX(x0, x4, x12, n), FASTDP_MIX(x1, x5, x13, n), FASTDP_MIX(x2, x6, x14, n), FASTDP_MIX(x3, x7, x15, n)
#define FASTDP_COLUMNS_2(n) \
    FASTDP_MIX(x8, x12, x4, n), FASTDP_MIX(x9, x13, x5, n), FASTDP_MIX(x10, x14, x6, n), FASTDP_MIX(x11, x15, x7, n)
#define FASTDP_DIAGONALS_1(n) \
    FASTDP_MIX(x0, x5, x15, n), FASTDP_MIX(x1, x6, x12, n), FASTDP_MIX(x2, x7, x13, n), FASTDP_MIX(x3, x4, x14, n)
#define FASTDP_DIAGONALS_2(n) \
    FASTDP_MIX(x10, x15, x5, n), FASTDP_MIX(x11, x12, x6, n), FASTDP_MIX(x8, x13, x7, n), FASTDP_MIX(x9, x14, x4, n)
#define FASTDP_COLUMNS FASTDP_COLUMNS_1(16), FASTDP_COLUMNS_2(12), FASTDP_COLUMNS_1(8), FASTDP_COLUMNS_2(7)
#define FASTDP_DIAGONALS FASTDP_DIAGONALS_1(16), FASTDP_DIAGONALS_2(12), FASTDP_DIAGONALS_1(8), FASTDP_DIAGONALS_2(7)

// Fetches the elements of the tile after the next, in case they lie behind this one (addresses as numbers, not pointers:
// they may lie outside of the arrays): a group's share of the lines, two a pair, in the order of memory, which the
// processor's own fetching then follows. Large arrays lie alike in their pages: fetched a line apart, they do not wait
// for each other's place in the cache.
template <class Update, class T>
INLINE void ahead(const Tile<T> &tile, int lane, int pair) {
    constexpr int LINE = 64 / sizeof(T), SHARE = 2 * W;  // elements, of a group in a pair
    if (SHARE < LINE && lane % (LINE / 2) != 0) return;
    for (int at = 0; at < SHARE; at += LINE) {
        const uintptr_t next = (lane * SLOTS + pair * (SHARE < LINE ? LINE : SHARE) + at + 2 * TILE) * sizeof(T);
        __builtin_prefetch((const void *)((uintptr_t)tile.sum + next));
        if (Update::ARRAYS > 0) __builtin_prefetch((const void *)((uintptr_t)tile.param + next + 64), 1);
        if (Update::ARRAYS > 1) __builtin_prefetch((const void *)((uintptr_t)tile.first + next + 2 * 64), 1);
        if (Update::ARRAYS > 2) __builtin_prefetch((const void *)((uintptr_t)tile.second + next + 3 * 64), 1);
    }
}

// Groups at a time where normals are only added up: a round waits for its own results half of the time, and then other
// blocks' can go on. With updates in between there are not enough registers for that.
constexpr int AT_ONCE = W == 16 ? 2 : 1, STRIDE = AT_ONCE * W;

// A pair and its updates, behind eight of the ten double rounds.
template <class T, class By, class Update>
INLINE void between(int i, const uint32_t *words, const Tile<T> &tile, int lane, const By &by, const Update &update) {
    if (4 * i % 5 > 3) return;
    const int pair = 4 * i / 5, at = 2 * pair * LANES + lane;
    if (Update::ARRAYS > 0) ahead<Update>(tile, lane, pair);
    spend(words, pair, tile, lane, by);
    update.template apply<W>(tile, at);
    update.template apply<W>(tile, at + LANES);
}

// Words of HALVES times W blocks from the stream's counter, a multiple of W, into `next` [HALVES][16][W]; meanwhile, where
// SPEND, the words of the blocks before are spent on as many lanes from `lane` of `tile`.
template <int HALVES, bool SPEND, class T, class By, class Update>
INLINE void group(const Stream &stream, uint32_t *next, const uint32_t *words, const Tile<T> &tile, int lane,
                  const By &by, const Update &update) {
    typedef Halves<HALVES> H;
    const uint32_t *s = stream.state, *f = stream.first;
    H low = H(s[12]);
    for (int half = 0; half < HALVES; ++half) low.part[half] += ((const V *)numbers)[half];
    H x0(f[0]), x1(f[1]), x2(f[2]), x3(f[3]), x4(f[4]), x5(f[5]), x6(f[6]), x7(f[7]), x8(f[8]), x9(f[9]), x10(f[10]);
    H x11(f[11]), x12 = low, x13(f[13]), x14(f[14]), x15(f[15]);
#if FASTDP_W == 16
#pragma GCC unroll 10
#endif
    for (int i = 0; i < 10; ++i) {
        if (i == 0) {  // the first column but for its first sum; the others are done
            x12 ^= x0, x12.turn(16);
            FASTDP_MIX(x8, x12, x4, 12), FASTDP_MIX(x0, x4, x12, 8), FASTDP_MIX(x8, x12, x4, 7);
        } else {
            FASTDP_COLUMNS;
        }
        FASTDP_DIAGONALS;
        for (int half = 0; SPEND && half < HALVES; ++half) {
            between(i, words + 16 * W * half, tile, lane + W * half, by, update);
        }
    }
    const H *rows[16] = {&x0, &x1, &x2, &x3, &x4, &x5, &x6, &x7, &x8, &x9, &x10, &x11, &x12, &x13, &x14, &x15};
    for (int half = 0; half < HALVES; ++half) {
        V *out = (V *)next + 16 * half;
        for (int k = 0; k < 16; ++k) out[k] = rows[k]->part[half] + (k == 12 ? low.part[half] : V{} + s[k]);
    }
}

// Word k of lane l's block lies at words[k * W + l]. states: of one key, without the counter, which is `block` for all.
inline void blocks_of(const uint32_t *const *states, int level, int64_t block, uint32_t *words) {
    typedef Halves<1> H;
    H start[16] = {};
    for (int k = 0; k < 12; ++k) start[k] = H(states[0][k]);
    start[12] = H((uint32_t)block), start[13] = H((uint32_t)((uint64_t)block >> 32));
    for (int l = 0; l < W; ++l) {
        start[14].part[0][l] = states[l][14];
        start[15].part[0][l] = states[l][15] + ((uint32_t)level << 16);  // of the upper half of the nonce
    }
    H x0 = start[0], x1 = start[1], x2 = start[2], x3 = start[3], x4 = start[4], x5 = start[5], x6 = start[6];
    H x7 = start[7], x8 = start[8], x9 = start[9], x10 = start[10], x11 = start[11], x12 = start[12], x13 = start[13];
    H x14 = start[14], x15 = start[15];
    for (int i = 0; i < 10; ++i) {
        FASTDP_COLUMNS;
        FASTDP_DIAGONALS;
    }
    const H *rows[16] = {&x0, &x1, &x2, &x3, &x4, &x5, &x6, &x7, &x8, &x9, &x10, &x11, &x12, &x13, &x14, &x15};
    for (int k = 0; k < 16; ++k) ((V *)words)[k] = rows[k]->part[0] + start[k].part[0];
}

// ---------------------------------------------------------------- many tiles

// n = sum * scale.
template <class T, class Update>
INLINE void without_noise(const Tile<T> &tile, T scale, const Update &update) {
    for (int at = 0; at < TILE; at += W) {
#pragma omp simd
        for (int l = 0; l < W; ++l) tile.grad[at + l] = tile.sum[at + l] * scale;
        update.template apply<W>(tile, at);
    }
}

// The stream that a tile's first words are of.
template <class T>
INLINE Stream first_of(const Amounts<T> &by) {
    return Stream(by.count > 0 ? by.earlier[by.count - 1].state : by.state);
}

// Once in the code, so that the processor keeps it decoded.
template <class T>
__attribute__((noinline)) void gather_group(const Stream &stream, uint32_t *next, const uint32_t *words,
                                            const Tile<T> &tile, int lane, const Share<T> &share) {
    group<AT_ONCE, true>(stream, next, words, tile, lane, share, NoUpdate());
}

// n of a tile by the normals of this step and earlier ones, which are added up first: the last ones before the first,
// which are of the steps just before and mostly the largest, and are then in the fewest sums. words: of the first draw; and
// then of the tile from block `after` on.
template <class T>
__attribute__((noinline)) void correlated(Tile<T> tile, const Amounts<T> &by, uint32_t (&words)[2][AT_ONCE * 16 * W],
                                          int &turn, int64_t after) {
    alignas(64) T normals[TILE], doubt[TILE / 2];
#pragma omp simd
    for (int at = 0; at < TILE / 2; ++at) normals[at] = normals[at + TILE / 2] = doubt[at] = 0;
    tile.normals = normals, tile.doubt = doubt;
    Stream stream = first_of(by);
    for (int draw = by.count - 1; draw >= -1; --draw) {
        const Share<T> share = share_of(by, draw);
        for (int lane = 0; lane < LANES; lane += STRIDE, turn ^= 1) {
            const bool last = lane + STRIDE == LANES;
            if (last) stream = draw < 0 ? first_of(by) : Stream(draw > 0 ? by.earlier[draw - 1].state : by.state);
            stream.count_from(last ? (draw < 0 ? after : tile.block) : tile.block + lane + STRIDE);
            gather_group(stream, words[turn ^ 1], words[turn], tile, lane, share);
        }
    }
    constexpr int STEP = Pair<T>::STEP, PARTS = LANES / STEP;
    for (int slot = 0; slot < SLOTS; ++slot) {
        alignas(64) T n[LANES];
        Open open[PARTS], any = 0;
#if FASTDP_W == 16
#pragma GCC unroll 4
#endif
        for (int part = 0; part < PARTS; ++part) {
            const int lane = part * STEP;
            const auto x = released_normals(tile, slot * LANES + lane, slot / 2 * LANES + lane, by);
            put(n + lane, x.n), open[part] = x.open, any |= x.open;
        }
        for (int part = 0; any && part < PARTS; ++part) {
            const int lane = part * STEP, at = slot * LANES + lane;
            settle(open[part], tile.sum + at, n + lane, nullptr, slot / 2, slot % 2 == 1, tile.block + lane, by);
        }
        std::copy(n, n + LANES, tile.grad + slot * LANES);
    }
}

// The tiles [begin, end) of the work's list. Small tensors that lie in one tile are worked off together.
template <class T, class Update>
void draw_tiles(const Work &work, const Update &update, int64_t begin, int64_t end) {
    alignas(64) uint32_t words[2][AT_ONCE * 16 * W];
    alignas(64) T copy[4][TILE];
    if (begin >= end) return;
    const bool noisy = work.std != 0;
    const Amounts<T> by = amounts_of(work, T());
    Place place = place_of(work, begin);
    Stream stream = first_of(by);
    stream.count_from(place.tile * LANES);
    int turn = 0;
    if (by.count > 0) {
        group<AT_ONCE, false>(stream, words[0], nullptr, Tile<T>{}, 0, by, NoUpdate());
    } else {
        group<1, false>(stream, words[0], nullptr, Tile<T>{}, 0, by, NoUpdate());
    }
    std::vector<Piece> pieces;
    for (int64_t number = begin; number < end;) {
        pieces.assign(1, piece_of(work, place));
        Place after = place;
        while (++number < end) {
            after = place_after(work, after, number);
            const Piece next = piece_of(work, after);
            if (after.tile != place.tile || next.from < pieces.back().to) break;
            pieces.push_back(next);
        }
        T *sum = fetch(pieces, &fastdp_tensor::sum, &fastdp_tensor::sum_type, work.read != 0, copy[0]);
        Tile<T> tile;
        tile.sum = work.read ? sum : (const T *)(const void *)zeros;
        tile.grad = work.keep ? sum : copy[0];
        tile.param = fetch(pieces, &fastdp_tensor::param, &fastdp_tensor::param_type, true, copy[1]);
        tile.first = fetch(pieces, &fastdp_tensor::first, &fastdp_tensor::first_type, true, copy[2]);
        tile.second = fetch(pieces, &fastdp_tensor::second, &fastdp_tensor::second_type, true, copy[3]);
        tile.block = place.tile * LANES;
        if (!noisy) without_noise(tile, by.scale, update);
        if (by.count > 0) {
            correlated(tile, by, words, turn, after.tile * LANES);
            for (int at = 0; at < TILE; at += W) update.template apply<W>(tile, at);
        }
        for (int lane = 0; noisy && by.count == 0 && lane < LANES; lane += W, turn ^= 1) {
            const bool last = lane + W == LANES;
            stream.count_from(last ? after.tile * LANES : place.tile * LANES + lane + W);
            group<1, true>(stream, words[turn ^ 1], words[turn], tile, lane, by, update);
        }
        for (const Piece &piece : pieces) {
            const fastdp_tensor &x = *piece.tensor;
            const int from = piece.from, count = piece.to - from;
            const int64_t at = piece.start + from;
            if (work.keep && tile.grad == copy[0]) store(x.sum_type, copy[0] + from, count, x.sum, at);
            if (tile.param == copy[1]) store(x.param_type, copy[1] + from, count, x.param, at);
            if (tile.first == copy[2]) store(x.first_type, copy[2] + from, count, x.first, at);
            if (tile.second == copy[3]) store(x.second_type, copy[3] + from, count, x.second, at);
        }
        place = after;
    }
}

// ---------------------------------------------------------------- for tests

inline void blocks(const uint32_t *given, uint32_t *words) {
    alignas(64) uint32_t part[16 * W];
    const uint64_t counter = (uint64_t)given[13] << 32 | given[12];
    Stream stream(given);
    for (uint64_t lane = 0; lane < (uint64_t)LANES; ++lane) {
        const uint64_t column = (counter + lane) % W;
        stream.count_from((int64_t)(counter + lane - column));
        group<1, false>(stream, part, nullptr, Tile<float>{}, 0, Amounts<float>{}, NoUpdate());
        for (int k = 0; k < 16; ++k) words[k * LANES + lane] = part[k * W + column];
    }
}

template <class T>
void transform(const uint32_t *words, T *normals) {
    alignas(64) uint32_t part[16 * W];
    for (int lane = 0; lane < LANES; lane += W) {
        for (int k = 0; k < 16; ++k) {
            const uint32_t *w = words + k * LANES + lane;
            std::copy(w, w + W, part + k * W);
        }
        for (int pair = 0; pair < PAIRS; ++pair) {
            normals_of(part, pair, normals + 2 * pair * LANES + lane);
        }
    }
}

}  // namespace FASTDP_ISA
}  // namespace fastdp
