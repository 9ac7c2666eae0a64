#pragma once
// The table of a pair, as the warps of soft_dtw.cu and soft_dtw_backward.cu share it out: blocks of cells,
// lanes, steps, chunks; and the costs of the blocks.
//
// Compiled with: REAL, COST, C_T, FEATURES, ROWS, LANES, HELPERS, STEPS, HARD (see soft_dtw.cu).

#include "soft_dtw.cuh"

// COST, from sums over the features
#define SQUARES 0   // factor * sum (a - b)^2: squared Euclidean, and cosine for rows of length 1
#define ROOT 1      // factor * sqrt(sum (a - b)^2)
#define ABSOLUTE 2  // factor * sum |a - b|
#define GIVEN 3     // a cost matrix

constexpr int PAIRS = WARP / LANES;   // of a warp
constexpr int HEIGHT = LANES * ROWS;  // rows of a stripe
constexpr int THREADS = WARP * (1 + HELPERS);

typedef Reals<ROWS> Column;  // of a block

struct Span {  // of blocks of columns: first .. end - 1
    int first, count;
    __device__ int end() const { return first + count; }
    __device__ bool holds(int block) const { return unsigned(block - first) < unsigned(count); }
};

// The blocks that hold cells of the rows row .. row + ROWS - 1; none where the series has ended.
__device__ __forceinline__ Span blocks_of(const Pair& pair, int row) {
    if (row < 0 || row >= pair.n) return {0, 0};
    int last_row = min(row + ROWS, pair.n) - 1;
    int from = max(row - pair.lower, 0), to = min(last_row + pair.upper, pair.m - 1);
    return {from / COLUMNS, to / COLUMNS + 1 - from / COLUMNS};
}

// Those of them whose cells are all inside.
__device__ __forceinline__ Span whole_blocks_of(const Pair& pair, int row) {
    if (row < 0 || row + ROWS > pair.n) return {0, 0};
    int from = max(row + ROWS - 1 - pair.lower, 0), to = min(row + pair.upper, pair.m - 1);
    int first = (from + COLUMNS - 1) / COLUMNS;
    return {first, max((to + 1) / COLUMNS - first, 0)};
}

struct Block {  // of a table
    Real at[ROWS][COLUMNS];
    // a feature of its rows and columns, to sums of costs
    __device__ __forceinline__ void add(const Column& x, const Row& y) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k) {
                Real difference = x.at[r] - y.at[k];
                at[r][k] += COST == ABSOLUTE ? fabs(difference) : difference * difference;
            }
    }
};

struct alignas(16) Plane {  // of a chunk's blocks, in shared memory: a number a cell
    Row at[STEPS][ROWS][WARP];
    __device__ __forceinline__ void put(int t, const Block& block) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            Row row;
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k) row.at[k] = block.at[r][k];
            at[t][r][threadIdx.x % WARP] = row;
        }
    }
    __device__ __forceinline__ void get(int t, Block& block) const {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            Row row = at[t][r][threadIdx.x % WARP];
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k) block.at[r][k] = row.at[k];
        }
    }
};

// Which part of a pair's table a lane has.
struct Place {
    Pair pair;
    int index;  // of the pair, in the batch
    int stripe, lane, row;
    Span span;   // the blocks of its rows
    Span whole;  // those of them whose cells are all inside
    Span from_above, to_below;  // blocks whose row comes by mail, and those whose row goes
    Span to_above, from_below;  // the same for E, in the backward
    __device__ Place(const Pair* pairs, Index B, int stripes, int stripe, int group)
        : stripe(stripe), lane(int(threadIdx.x % LANES)), row((stripe * LANES + lane) * ROWS) {
        Index k = Index(group) * PAIRS + threadIdx.x % WARP / LANES;
        index = int(min(k, B - 1));
        pair = pairs[index];
        if (k >= B) pair.n = 0;  // no such pair: a table without rows
        span = blocks_of(pair, row);
        whole = whole_blocks_of(pair, row);
        from_above = to_below = to_above = from_below = {0, 0};
        if (lane == 0 && stripe > 0) {
            Span above = blocks_of(pair, row - ROWS);
            to_above = heard(span);
            from_above.first = max(to_above.first, above.first);
            from_above.count = max(min(to_above.end(), above.end()) - from_above.first, 0);
        }
        if (lane == LANES - 1 && stripe < stripes - 1) {
            to_below = span;
            from_below = heard(blocks_of(pair, row + ROWS));
        }
    }
    // Blocks of which a lane needs the row above: with the one that its first corner lies in.
    __device__ static Span heard(Span span) {
        bool more = span.count > 0 && span.first > 0;
        return {span.first - more, span.count + more};
    }
};

// The steps of a warp: from the first that a lane has to the last.
struct Steps {
    int first, end;
    __device__ Steps(const Place& at) {
        first = at.span.count > 0 ? Place::heard(at.span).first + at.lane : NONE;
        end = at.span.count > 0 ? at.span.end() + at.lane : 0;
#pragma unroll
        for (int other = WARP / 2; other > 0; other /= 2) {
            first = min(first, __shfl_xor_sync(FULL_MASK, first, other));
            end = max(end, __shfl_xor_sync(FULL_MASK, end, other));
        }
        if (end == 0) first = 0;
    }
    __device__ int chunks() const { return (end - first + STEPS - 1) / STEPS; }
};

// ---- costs

struct Source {  // of the costs
    const Real* a;  // packed [batch, D, padded_a], here at the lane's pair and row
    const Real* b;  // packed [batch, D, padded_b], here at the lane's pair
    Index D, padded_a, padded_b;
    const C_T* C;  // [B, N, M], here at the lane's pair
    Index stride_row, stride_column;
    int* spoilt;  // [B], here at the lane's pair: a NaN was seen in C
    Real scale;   // from the sum over features to the unit of R
    // those features that come from `first` on, as the only ones
    __device__ __forceinline__ Source from(Index first) const {
        Source rest = *this;
        rest.a += first * padded_a;
        rest.b += first * padded_b;
        rest.D -= first;
        return rest;
    }
    __device__ __forceinline__ Column rows(Index f) const { return *reinterpret_cast<const Column*>(a + f * padded_a); }
    __device__ __forceinline__ Row columns(Index f, int block) const {
        return *reinterpret_cast<const Row*>(b + f * padded_b + block * COLUMNS);
    }
};

__device__ Source source_of(const Place& at, const Real* a, const Real* b, Index D, Index padded_a, Index padded_b,
                            const C_T* C, Index C_stride_batch, Index C_stride_row, Index C_stride_column, int* spoilt,
                            double factor) {
    double scale = HARD && at.pair.gamma == 0 ? factor : factor / (at.pair.gamma * LN_2);
    return {a ? a + at.pair.a * D * padded_a + at.row : nullptr, b ? b + at.pair.b * D * padded_b : nullptr,
            D, padded_a, padded_b,
            C ? C + at.index * C_stride_batch : nullptr, C_stride_row, C_stride_column,
            spoilt + at.index,
            Real(min(scale, 1e38))};  // finite however small gamma is, so that a cost of 0 stays 0
}

// Features in registers: those of a lane's rows, and of its next block, loaded a step ahead.
template <int count> struct Features {
    static constexpr int some = count > 0 ? count : 1;
    Column rows[some];
    Row columns[some];
    // the first ones, as far as there are
    __device__ __forceinline__ void take_rows(const Source& source, const Place& at) {
#pragma unroll
        for (int f = 0; f < count; ++f) {
            rows[f] = Column{};
            if (at.span.count > 0 && f < source.D) rows[f] = source.rows(f);
        }
    }
    __device__ __forceinline__ void take_columns(const Source& source, const Place& at, int block) {
#pragma unroll
        for (int f = 0; f < count; ++f)
            if (at.span.holds(block) && (count == FEATURES || f < source.D)) columns[f] = source.columns(f, block);
    }
};
typedef Features<FEATURES> Held;

// The given costs of a block, as far as a path may cross them.
__device__ __forceinline__ void given(const Source& source, const Place& at, int block, Block& C) {
    bool spoilt = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            int i = at.row + r, j = block * COLUMNS + k;
            C.at[r][k] = at.pair.inside(i, j)
                             ? widen<Real>(source.C[i * source.stride_row + j * source.stride_column])
                             : Real(0);
            spoilt |= !(C.at[r][k] > -infinity());
        }
    if (spoilt) {  // known before any row that follows from this block is sent on
        *static_cast<volatile int*>(source.spoilt) = 1;
        __threadfence();
    }
}

// Sums over features, or given costs, into costs in the unit of R.
__device__ __forceinline__ void scale_costs(const Source& source, const Place& at, int block, Block& C) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            Real sum = COST == ROOT ? sqrt(C.at[r][k]) : C.at[r][k];
            C.at[r][k] = min(sum * source.scale, FORBIDDEN);  // NaN, too, is FORBIDDEN
        }
    if (at.whole.holds(block)) return;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k)
            if (!at.pair.inside(at.row + r, block * COLUMNS + k)) C.at[r][k] = FORBIDDEN;
}

__device__ __forceinline__ void held_costs(const Source& source, const Held& held, const Place& at, int block,
                                           Block& C) {
    C = Block{};
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) C.add(held.rows[f], held.columns[f]);
    scale_costs(source, at, block, C);
}

// Columns that a chunk is the first to need, on their way to the cache: those of the group's lane `of`.
__device__ __forceinline__ void prefetch_columns(const Source& source, const Place& at, const Steps& steps, int chunk,
                                                 int of) {
    int first = steps.first + chunk * STEPS - of, last = first + STEPS - 1, blocks = int(source.padded_b) / COLUMNS;
    for (Index f = Index(threadIdx.x / WARP - 1) * LANES + at.lane; f < source.D; f += HELPERS * LANES) {
        if (first >= 0 && first < blocks) prefetch(source.b + f * source.padded_b + first * COLUMNS);
        if (last >= 0 && last < blocks) prefetch(source.b + f * source.padded_b + last * COLUMNS);
    }
}

constexpr int SUMMED = 8;  // features at a time, whose loads are under way together

// All features of a block that is inside; by parts, for the sake of the last digits.
__device__ __forceinline__ void add_features(const Source& source, int block, Block& C) {
    Index f = 0;
    for (; f + SUMMED <= source.D; f += SUMMED) {
        Block part{};
#pragma unroll
        for (int next = 0; next < SUMMED; ++next) part.add(source.rows(f + next), source.columns(f + next, block));
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k) C.at[r][k] += part.at[r][k];
    }
    for (; f < source.D; ++f) C.add(source.rows(f), source.columns(f, block));
}

// The costs of a chunk, its steps shared out among the helpers.
__device__ __forceinline__ void prepare_costs(const Source& source, const Place& at, const Steps& steps, int chunk,
                                              Plane& plane) {
    for (int t = int(threadIdx.x / WARP) - 1; t < STEPS; t += HELPERS > 0 ? HELPERS : 1) {
        int block = steps.first + chunk * STEPS + t - at.lane;
        if (!at.span.holds(block)) continue;
        Block C{};
        if (COST == GIVEN) {
            given(source, at, block, C);
        } else {
            add_features(source, block, C);
        }
        scale_costs(source, at, block, C);
        plane.put(t, C);
    }
}
