// Soft-DTW between two time series: the sweeps over the table of a pair, forward and backward.
//
//     C[i,j]  = cost(a[i], b[j])
//     R[i,j]  = C[i,j] + softmin(R[i-1,j-1], R[i-1,j], R[i,j-1]),   R[-1,-1] = 0, else outside = inf
//     softmin(r) = -gamma log sum exp(-r / gamma),                  value = R[n-1,m-1]
//     E[i,j]  = d value / d C[i,j]:  E[n-1,m-1] = 1, and each cell hands E to its three predecessors
//               in proportion to their weights exp(-r / gamma) / sum exp(-r / gamma)
//     grad_a[i] = sum_j E[i,j] dC[i,j]/da[i],   grad_b likewise
//     d value / d gamma = -sum_ij E[i,j] entropy(weights of i,j)
//     (Cuturi & Blondel 2017, "Soft-DTW: a differentiable loss function for time-series")
// gamma = 0 is the hard minimum: the same sweep, where the least predecessor has all the weight.
//
// Numbers. R is kept in units of gamma ln 2, so that the softmin takes powers and logarithms of 2,
// and relative to a base: a whole number that a lane moves, before each block, to the least R that
// the block starts from. So the cells near the best paths stay small and keep their digits however
// large R / gamma becomes; the others lose theirs where their weight is nil. Weights come from
// cells side by side, never from differences of large R. A cell that no path may cross has R of
// 1e28 and more: there is no infinity, and no NaN, in the recurrence.
//
// Work. A group of LANES lanes takes a stripe of LANES * ROWS rows of a pair; a warp takes as many
// pairs as it has groups. A lane does one block of ROWS x COLUMNS cells a step, in registers: at
// step s lane l is at block s - l of its rows, for the lane above has just finished the block
// above, and shuffles hand its last row over. The stripes of a pair run side by side: the last row
// of a stripe goes to the next one by mail (soft_dtw.cuh). A stripe waits only for stripes of lower
// blockIdx, which the device has started before.
// With HELPERS, that many more warps prepare the costs of the next chunk of STEPS steps and, in the
// backward, add up the gradients of the last one: for series with many features.
//
// For the backward the forward keeps the last row of each stripe and what a lane carries at the
// start of each chunk. The backward walks stripes and chunks in reverse, computes the weights of a
// chunk anew into shared memory, and sends E back the way that R came. Nothing of size N x M is kept.
//
// Launch: grid (stripes * groups), stripe by stripe; block (32 * (1 + HELPERS)).
// Compiled with: REAL; COST; C_T (type of a given cost and of its gradient); FEATURES (D, where few
// features stay in registers, else 0); LANES; HELPERS; STEPS; MAIL (0: one stripe holds every
// pair); HARD (1: gamma may be 0); for the backward, OUTPUT.

#include "soft_dtw.cuh"

// COST, from sums over the features
#define SQUARES 0   // factor * sum (a - b)^2: squared Euclidean, and cosine for rows of length 1
#define ROOT 1      // factor * sqrt(sum (a - b)^2)
#define ABSOLUTE 2  // factor * sum |a - b|
#define GIVEN 3     // a cost matrix

// OUTPUT of the backward
#define SERIES 1     // gradients of a and b
#define ALIGNMENT 2  // E
#define ENTROPY 3    // d value / d gamma

constexpr int PAIRS = WARP / LANES;       // of a warp
constexpr int HEIGHT = LANES * ROWS;      // rows of a stripe
constexpr int THREADS = WARP * (1 + HELPERS);
// Blocks of threads for which a multiprocessor's registers have to suffice.
constexpr int RESIDENT_FORWARD = HELPERS == 0 ? 16 : HELPERS < 4 ? 4 : 1, RESIDENT_BACKWARD = HELPERS == 0 || HELPERS > 3 ? 1 : 2;
constexpr int LANE_WORDS = ROWS + COLUMNS + 2;  // of a Lane
typedef Message<COLUMNS + 1> RowLetter;   // R of a block's last row, and their base

struct Lane {  // what a lane carries from one step to the next; R relative to base
    Column left;  // R of the last column done
    Row bottom;   // R of the last row of the block just done, for the lane below
    Real corner;  // R above left
    Real base;
};

// Lanes are kept for the backward, a word of each lane of the warp side by side.
__device__ __forceinline__ void keep(const Lane& lane, Real* to) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) to[r * WARP] = lane.left.at[r];
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) to[(ROWS + k) * WARP] = lane.bottom.at[k];
    to[(ROWS + COLUMNS) * WARP] = lane.corner;
    to[(ROWS + COLUMNS + 1) * WARP] = lane.base;
}
__device__ __forceinline__ void bring_back(const Real* from, Lane& lane) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) lane.left.at[r] = from[r * WARP];
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) lane.bottom.at[k] = from[(ROWS + k) * WARP];
    lane.corner = from[(ROWS + COLUMNS) * WARP];
    lane.base = from[(ROWS + COLUMNS + 1) * WARP];
}

struct Block {  // of a table
    Real at[ROWS][COLUMNS];
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
        : stripe(stripe), lane(int(threadIdx.x) % LANES), row((stripe * LANES + lane) * ROWS) {
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
    __device__ __forceinline__ Column rows(Index f) const { return *reinterpret_cast<const Column*>(a + f * padded_a); }
    __device__ __forceinline__ Row columns(Index f, int block) const {
        return *reinterpret_cast<const Row*>(b + f * padded_b + block * COLUMNS);
    }
};

__device__ Source source_of(const Place& at, const Real* a, const Real* b, Index batch_a, Index batch_b, Index D,
                            Index padded_a, Index padded_b, const C_T* C, Index C_stride_batch, Index C_stride_row,
                            Index C_stride_column, int* spoilt, double factor) {
    double scale = HARD && at.pair.gamma == 0 ? factor : factor / (at.pair.gamma * LN_2);
    return {a ? a + (batch_a > 1 ? at.index : 0) * D * padded_a + at.row : nullptr,
            b ? b + (batch_b > 1 ? at.index : 0) * D * padded_b : nullptr,
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
    // of the features first .. first + count - 1, as far as there are
    __device__ __forceinline__ void take_rows(const Source& source, const Place& at, Index first = 0) {
#pragma unroll
        for (int f = 0; f < count; ++f) {
            rows[f] = Column{};
            if (at.span.count > 0 && first + f < source.D) rows[f] = source.rows(first + f);
        }
    }
    __device__ __forceinline__ void take_columns(const Source& source, const Place& at, int block, Index first = 0) {
#pragma unroll
        for (int f = 0; f < count; ++f)
            if (at.span.holds(block) && (count == FEATURES || first + f < source.D)) columns[f] = source.columns(first + f, block);
    }
};
typedef Features<FEATURES> Held;

template <int count>
__device__ __forceinline__ void add_feature(const Real (&x)[count], const Row& y, Real (&C)[count][COLUMNS]) {
#pragma unroll
    for (int r = 0; r < count; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            Real difference = x[r] - y.at[k];
            C[r][k] += COST == ABSOLUTE ? fabs(difference) : difference * difference;
        }
}

// The given costs of `count` rows from `row` on, as far as a path may cross them.
template <int count>
__device__ __forceinline__ void given(const Source& source, const Place& at, int row, int block, Real (&C)[count][COLUMNS]) {
    bool spoilt = false;
#pragma unroll
    for (int r = 0; r < count; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            int i = row + r, j = block * COLUMNS + k;
            C[r][k] = at.pair.inside(i, j) ? widen<Real>(source.C[i * source.stride_row + j * source.stride_column]) : Real(0);
            spoilt |= !(C[r][k] > -infinity());
        }
    if (spoilt) {  // known before any row that follows from this block is sent on
        *static_cast<volatile int*>(source.spoilt) = 1;
        __threadfence();
    }
}

// Sums over features, or given costs, into costs in the unit of R.
template <int count>
__device__ __forceinline__ void scale_costs(const Source& source, const Place& at, int row, int block, Real (&C)[count][COLUMNS]) {
#pragma unroll
    for (int r = 0; r < count; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            Real sum = COST == ROOT ? sqrt(C[r][k]) : C[r][k];
            C[r][k] = min(sum * source.scale, FORBIDDEN);  // NaN, too, is FORBIDDEN
        }
    if (at.whole.holds(block)) return;
#pragma unroll
    for (int r = 0; r < count; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k)
            if (!at.pair.inside(row + r, block * COLUMNS + k)) C[r][k] = FORBIDDEN;
}

__device__ __forceinline__ void held_costs(const Source& source, const Held& held, const Place& at, int block, Block& C) {
    C = Block{};
#pragma unroll
    for (int f = 0; f < FEATURES; ++f) add_feature(held.rows[f].at, held.columns[f], C.at);
    scale_costs(source, at, at.row, block, C.at);
}

constexpr int PARTS = 2;   // of a block, for helpers
constexpr int SUMMED = 8;  // features at a time, whose loads are under way together
struct alignas(2 * sizeof(Real)) Part {
    Real at[ROWS / PARTS];
};

// Columns that a chunk is the first to need, on their way to the cache: those of the group's lane `of`.
__device__ __forceinline__ void prefetch_columns(const Source& source, const Place& at, const Steps& steps, int chunk, int of) {
    int first = steps.first + chunk * STEPS - of, last = first + STEPS - 1, blocks = int(source.padded_b) / COLUMNS;
    for (Index f = Index(threadIdx.x / WARP - 1) * LANES + at.lane; f < source.D; f += HELPERS * LANES) {
        if (first >= 0 && first < blocks) prefetch(source.b + f * source.padded_b + first * COLUMNS);
        if (last >= 0 && last < blocks) prefetch(source.b + f * source.padded_b + last * COLUMNS);
    }
}

// The costs of a chunk, shared out among the helpers.
__device__ __forceinline__ void prepare_costs(const Source& source, const Place& at, const Steps& steps, int chunk,
                                              Plane& plane) {
    constexpr int count = ROWS / PARTS;
    for (int unit = int(threadIdx.x) / WARP - 1; unit < STEPS * PARTS; unit += HELPERS > 0 ? HELPERS : 1) {
        int t = unit / PARTS, r0 = unit % PARTS * count, block = steps.first + chunk * STEPS + t - at.lane;
        if (!at.span.holds(block)) continue;
        Real C[count][COLUMNS] = {};
        if (COST == GIVEN) {
            given(source, at, at.row + r0, block, C);
        } else {
            for (Index first = 0; first < source.D; first += SUMMED) {  // by parts, for the sake of the last digits
                Real part[count][COLUMNS] = {};
#pragma unroll
                for (int f = 0; f < SUMMED; ++f) {
                    if (first + f >= source.D) break;
                    Part x = *reinterpret_cast<const Part*>(source.a + (first + f) * source.padded_a + r0);
                    add_feature(x.at, source.columns(first + f, block), part);
                }
#pragma unroll
                for (int r = 0; r < count; ++r)
#pragma unroll
                    for (int k = 0; k < COLUMNS; ++k) C[r][k] += part[r][k];
            }
        }
        scale_costs(source, at, at.row + r0, block, C);
#pragma unroll
        for (int r = 0; r < count; ++r)
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k) plane.at[t][r0 + r][threadIdx.x % WARP].at[k] = C[r][k];
    }
}

// ---- the recurrence

__device__ __forceinline__ float log2_of(float v) { return __log2f(v); }
__device__ __forceinline__ double log2_of(double v) { return log2(v); }
// Rounded well: an error of the fast one would go into the weights of every cell on a path.
__device__ __forceinline__ float reciprocal(float v) {
    float r = __fdividef(1.0f, v);
    return fmaf(r, fmaf(-v, r, 1.0f), r);
}
__device__ __forceinline__ double reciprocal(double v) { return 1 / v; }

// R of a cell, where `up` is the last to be known. The large number comes last: R is rounded once.
__device__ __forceinline__ Real recurrence(Real diagonal, Real up, Real left, Real cost, bool hard) {
    Real low = min(diagonal, left), high = max(diagonal, left);
    Real least = min(low, up), middle = max(low, up);
    if (HARD && hard) return least + cost;
    return least + (cost - log2_of(1 + exp2(least - middle) + exp2(least - high)));
}

struct Weights {  // of the predecessors of a block's cells; they add up to 1
    Block diagonal, up, left;
};

// R of cell (r, k) of a block, with its weights and, for OUTPUT ENTROPY, their entropy.
__device__ __forceinline__ Real recurrence(Real diagonal, Real up, Real left, Real cost, bool hard, int r, int k,
                                           Weights& weights, Block& entropy) {
    Real least = min(min(diagonal, left), up);
    Real d, u, l, logarithm = 0;
    if (HARD && hard) {
        d = Real(diagonal == least);
        u = d == 0 ? Real(up == least) : Real(0);
        l = 1 - d - u;
    } else {
        d = exp2(least - diagonal), u = exp2(least - up), l = exp2(least - left);
        Real sum = d + u + l, share = reciprocal(sum);
        logarithm = log2_of(sum);
        d *= share, u *= share, l *= share;
    }
    weights.diagonal.at[r][k] = d;
    weights.up.at[r][k] = u;
    weights.left.at[r][k] = l;
#ifdef OUTPUT
    if (OUTPUT == ENTROPY)  // -sum w ln w
        entropy.at[r][k] = Real(LN_2) * (logarithm + d * (diagonal - least) + u * (up - least) + l * (left - least));
#endif
    return least + (cost - logarithm);
}

__device__ __forceinline__ Lane before_first(const Place& at) {
    Lane lane;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) lane.left.at[r] = FORBIDDEN;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) lane.bottom.at[k] = FORBIDDEN;
    lane.corner = at.row == 0 ? Real(0) : FORBIDDEN;  // R[-1,-1] = 0
    lane.base = 0;
    return lane;
}

// Moves the base of the lane, and of the row above, to the least R that the next block starts from.
__device__ __forceinline__ void rebase(Lane& lane, Row& above, Real base_above) {
    Real least = above.at[0];
#pragma unroll
    for (int k = 1; k < COLUMNS; ++k) least = min(least, above.at[k]);
    least = min(least + (base_above - lane.base), lane.corner);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) least = min(least, lane.left.at[r]);
    Real base = lane.base + (least < NO_PATH ? rint(least) : Real(0));
    Real shift = base - lane.base, shift_above = base - base_above;  // exact: whole numbers, close together
    lane.base = base;
    lane.corner -= shift;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) lane.left.at[r] -= shift;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) above.at[k] -= shift_above;
}

// One block: `cell(diagonal, up, left, cost, r, k)` gives R of a cell.
template <class Cell>
__device__ __forceinline__ void advance(Lane& lane, Row above, const Block& C, Cell cell, Block& R) {
    Real corner = lane.corner;
    lane.corner = above.at[COLUMNS - 1];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        Real diagonal = corner, left = lane.left.at[r];
        corner = left;
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            left = R.at[r][k] = cell(diagonal, above.at[k], left, C.at[r][k], r, k);
            diagonal = above.at[k];
            above.at[k] = left;
        }
        lane.left.at[r] = left;
    }
    lane.bottom = above;
}

// Outside of its blocks a lane only follows what is above it.
__device__ __forceinline__ void stand_by(Lane& lane, const Row& above, Real base_above) {
    lane.corner = above.at[COLUMNS - 1];
    lane.base = base_above;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) lane.bottom.at[k] = FORBIDDEN;
}

// ---- from stripe to stripe

// Where a stripe puts the letters about its last row, by blocks. Kept: [stripes - 1, B, blocks], else
// [B, blocks], which all stripes use in turn.
__device__ RowLetter* letters_of(int stripe, RowLetter* mail, Index B, Index blocks, bool kept, const Place& at, int last_row) {
    if (!kept) return mail + at.index * blocks;
    return mail + (Index(stripe) * B + at.index) * blocks - blocks_of(at.pair, last_row).first;
}

// The row above the lane's next block, and its base, from the lane or the stripe above. The letter is
// in `inbox`, or will come; the one about the next block is asked for.
__device__ __forceinline__ void take_above(const Lane& lane, const Place& at, int block, const RowLetter* letters,
                                           RowLetter& inbox, Row& above, Real& base_above) {
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) {
        Real from_lane = __shfl_up_sync(FULL_MASK, lane.bottom.at[k], 1, LANES);
        above.at[k] = at.lane == 0 ? FORBIDDEN : from_lane;
    }
    Real from_lane = __shfl_up_sync(FULL_MASK, lane.base, 1, LANES);
    base_above = at.lane == 0 ? lane.base : from_lane;
    if (!MAIL) return;
    if (at.from_above.holds(block)) {
        inbox.wait(letters + block, at.stripe - 1);
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) inbox.get(k, above.at[k]);
        inbox.get(COLUMNS, base_above);
    }
    if (at.from_above.holds(block + 1)) inbox.look(letters + block + 1);
}

#ifndef OUTPUT

// -1 for NaN, 1 for infinity, 0 for a value that is to be taken. The lanes of a group look together.
__device__ int out_of_numbers(const Place& at, const FirstOf* first_of_a, const FirstOf* first_of_b, const int* spoilt) {
    bool nan = !at.pair.usable || *static_cast<const volatile int*>(spoilt), infinite = false;
    if (COST != GIVEN) {
        for (int tile = at.lane; tile * TILE < at.pair.n; tile += LANES) {
            nan |= first_of_a[tile].nan < at.pair.n;
            infinite |= first_of_a[tile].infinity < at.pair.n;
        }
        for (int tile = at.lane; tile * TILE < at.pair.m; tile += LANES) {
            nan |= first_of_b[tile].nan < at.pair.m;
            infinite |= first_of_b[tile].infinity < at.pair.m;
        }
    }
    unsigned lanes = (LANES == WARP ? FULL_MASK : (1u << LANES % WARP) - 1) << (threadIdx.x % WARP / LANES * LANES);
    unsigned nans = __ballot_sync(FULL_MASK, nan) & lanes, infinities = __ballot_sync(FULL_MASK, infinite) & lanes;
    return nans ? -1 : infinities ? 1 : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_FORWARD)
soft_dtw_forward(Index B, Index groups, Index stripes, const Pair* pairs /* [B] */,
                 const Real* a /* packed [batch_a, D, padded_a] */, const Real* b /* packed [batch_b, D, padded_b] */,
                 Index batch_a, Index batch_b, Index D, Index padded_a, Index padded_b,
                 const C_T* C /* [B, N, M] */, Index C_stride_batch, Index C_stride_row, Index C_stride_column,
                 int* spoilt /* [B] */, double factor, RowLetter* mail /* see letters_of */, Index mail_blocks,
                 Real* lanes /* kept: [stripes, groups, chunks, LANE_WORDS, 32], else null */, Index chunks,
                 const FirstOf* first_of_a /* [batch_a, tiles] */, const FirstOf* first_of_b /* [batch_b, tiles] */,
                 Real* values /* [B] */) {
    __shared__ Plane prepared[HELPERS > 0 ? 2 : 1];
    bool sweeps = threadIdx.x < WARP, kept = lanes != nullptr;
    Place at(pairs, B, int(stripes), int(blockIdx.x / groups), int(blockIdx.x % groups));
    Source source = source_of(at, a, b, batch_a, batch_b, D, padded_a, padded_b, C, C_stride_batch, C_stride_row,
                              C_stride_column, spoilt, factor);
    Steps steps(at);
    const RowLetter* letters_in = letters_of(at.stripe - 1, mail, B, mail_blocks, kept, at, at.row - ROWS);
    RowLetter* letters_out = letters_of(at.stripe, mail, B, mail_blocks, kept, at, at.row);
    RowLetter inbox;
    inbox.clear();
    Held held;
    held.take_rows(source, at);
    held.take_columns(source, at, steps.first - at.lane);
    bool hard = at.pair.gamma == 0;
    int last_row = at.pair.n - 1 - at.row, last_column = (at.pair.m - 1) % COLUMNS;
    bool ends = last_row >= 0 && last_row < ROWS;  // here is the last row of the table
    int last_block = ends ? (at.pair.m - 1) / COLUMNS : -1;
    double value = 0;
    Lane lane = before_first(at);

    if (HELPERS > 0 && !sweeps) prepare_costs(source, at, steps, 0, prepared[0]);
    for (int chunk = 0; chunk < steps.chunks(); ++chunk) {
        if (HELPERS > 0) __syncthreads();
        if (HELPERS > 0 && !sweeps) {
            prefetch_columns(source, at, steps, chunk + 2, 0);
            prepare_costs(source, at, steps, chunk + 1, prepared[(chunk + 1) % 2]);
            continue;
        }
        if (kept) keep(lane, lanes + (Index(blockIdx.x) * chunks + chunk) * LANE_WORDS * WARP + threadIdx.x);
#pragma unroll 1
        for (int t = 0; t < STEPS; ++t) {
            int block = steps.first + chunk * STEPS + t - at.lane;
            bool inside = at.span.holds(block);
            Row above;
            Real base_above;
            Block cost, R;
            take_above(lane, at, block, letters_in, inbox, above, base_above);
            if (inside && HELPERS > 0) prepared[chunk % 2].get(t, cost);
            else if (inside) held_costs(source, held, at, block, cost);
            held.take_columns(source, at, block + 1);
            if (!inside) {
                stand_by(lane, above, base_above);
                continue;
            }
            rebase(lane, above, base_above);
            auto cell = [&](Real diagonal, Real up, Real left, Real c, int, int) {
                return recurrence(diagonal, up, left, c, hard);
            };
            if (block == last_block) {
                Lane at_end = lane;
                advance(at_end, above, cost, cell, R);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int k = 0; k < COLUMNS; ++k)
                        if (r == last_row && k == last_column) value = double(lane.base) + double(R.at[r][k]);
            }
            advance(lane, above, cost, cell, R);
            if (MAIL && at.to_below.holds(block)) {
                RowLetter letter;
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) letter.put(k, lane.bottom.at[k], at.stripe);
                letter.put(COLUMNS, lane.base, at.stripe);
                letter.send(letters_out + block);
            }
        }
    }
    if (!sweeps) return;
    __syncwarp();  // what a lane saw of NaN, all of them see
    int instead = out_of_numbers(at, first_of_a + (batch_a > 1 ? at.index : 0) * ((padded_a + TILE - 1) / TILE),
                                 first_of_b + (batch_b > 1 ? at.index : 0) * ((padded_b + TILE - 1) / TILE), source.spoilt);
    if (!ends) return;
    double unit = hard ? 1 : at.pair.gamma * LN_2;
    values[at.index] = instead < 0 ? not_a_number<Real>()
                       : instead > 0 || value >= NO_PATH ? Real(infinity())
                                                         : Real(value * unit);
}

#else

// ---- backward

constexpr bool SLOPES = OUTPUT == SERIES && COST == ROOT;
constexpr int PLANES = SLOPES || OUTPUT == ENTROPY ? 4 : 3;
constexpr int COSTS = 0, FLOW = 1;                    // of helpers: what a plane holds before its weights, and after
constexpr int DIAGONAL = 0, UP = 1, LEFT = 2;         // planes of weights
constexpr int EXTRA = PLANES - 1;                     // slopes of ROOT, or entropies
constexpr int GROUP = FEATURES > 0 ? FEATURES : 4;    // features whose gradients are added up at a time
constexpr int LETTERS = (STEPS + LANES - 1) / LANES;  // of a chunk, that a lane takes for its stripe
constexpr int BOXES = MAIL ? PAIRS : 1;

struct Chunk {  // what is shared of a chunk
    Plane planes[PLANES];
};

struct Letterbox {  // for the last lane of each pair: what came from the stripe below for the steps of a chunk
    Row at[STEPS][BOXES];
};

// The letters that a stripe's last lane is to find in its letterbox; each lane of the group takes some.
struct Inboxes {
    Letter letters[LETTERS];
    // those about the blocks of `span`; the first step is about block `first`
    __device__ __forceinline__ void look(const Place& at, int first, Span span, const Letter* mail) {
#pragma unroll
        for (int n = 0; n < LETTERS; ++n) {
            int t = n * LANES + at.lane;
            letters[n].clear();
            if (t < STEPS && span.holds(first + t)) letters[n].look(mail + first + t);
        }
    }
    __device__ __forceinline__ void wait(const Place& at, int first, Span span, const Letter* mail, Letterbox& box) {
#pragma unroll
        for (int n = 0; n < LETTERS; ++n) {
            int t = n * LANES + at.lane;
            Row row{};
            if (t < STEPS && span.holds(first + t)) {
                letters[n].wait(mail + first + t, at.stripe + 1);
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) letters[n].get(k, row.at[k]);
            }
            if (t < STEPS) box.at[t][threadIdx.x % WARP / LANES] = row;
        }
    }
};

// `row` of the lane below; of the last lane, what came from the stripe below.
__device__ __forceinline__ Row from_lane_below(const Place& at, const Row& row, const Letterbox& box, int t) {
    Row below;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) below.at[k] = __shfl_down_sync(FULL_MASK, row.at[k], 1, LANES);
    if (at.lane == LANES - 1) below = MAIL ? box.at[t][threadIdx.x % WARP / LANES] : Row{};
    return below;
}

__device__ __forceinline__ void send(const Row& row, int stripe, Letter* to) {
    Letter letter;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) letter.put(k, row.at[k], stripe);
    letter.send(to);
}

struct Flow {  // what a lane carries in the backward, from later columns to earlier ones
    Column left;    // E for its own next column, from the block done
    Row message;    // E for the row above the block done
    Real diagonal;  // E for the corner above the block done
};

// E of a block's cells: R's recurrence backwards. `seed(r, k)` comes from outside of the table.
template <class Seed>
__device__ __forceinline__ void flow_back(Flow& flow, Row below, const Weights& weights, Block& E, Seed seed) {
#pragma unroll
    for (int k = COLUMNS - 1; k >= 0; --k) {
        Real up = below.at[k], diagonal = 0;
#pragma unroll
        for (int r = ROWS - 1; r >= 0; --r) {
            Real e = E.at[r][k] = flow.left.at[r] + up + seed(r, k);
            flow.left.at[r] = weights.left.at[r][k] * e + diagonal;
            up = weights.up.at[r][k] * e;
            diagonal = weights.diagonal.at[r][k] * e;
        }
        flow.message.at[k] = up + flow.diagonal;
        flow.diagonal = diagonal;
    }
}

// Blocks in which a stripe has cells.
__device__ Span blocks_of_stripe(const Pair& pair, int stripe) {
    int top = stripe * HEIGHT, bottom = min(top + HEIGHT, pair.n) - 1;
    if (top >= pair.n) return {0, 0};
    int first = blocks_of(pair, top).first;
    return {first, blocks_of(pair, bottom / ROWS * ROWS).end() - first};
}

// Sums of E times the slopes of the cost, for a group of features.
struct Sums {
    Column along[GROUP];  // a lane's rows: for grad_a
    Row down[GROUP];      // the columns of the block just done, over this row and those below: for grad_b
    // one block, whose columns have been summed over the rows below
    __device__ __forceinline__ void add(const Features<GROUP>& features, const Block& E) {
#pragma unroll
        for (int f = 0; f < GROUP; ++f)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) {
                    Real slope = features.rows[f].at[r] - features.columns[f].at[k];
                    if (COST == ABSOLUTE) slope = Real(slope > 0) - Real(slope < 0);
                    along[f].at[r] += E.at[r][k] * slope;
                    down[f].at[k] += E.at[r][k] * slope;
                }
    }
};

struct Gradients {  // where sums of gradients are kept, here those of the lane
    Real* a;         // [B, D, padded_a]
    Letter* b;       // [B, D, blocks]: mail, from stripe to stripe
    Row* in_flight;  // [stripes * groups, D, 32], of helpers: sums of columns on their way from lane to lane
    Index padded_a, blocks;
    Span sent, received;  // blocks about which the stripe writes, and those about which the one below does
    __device__ Gradients(const Place& at, Index D, Index padded_a, Index blocks, Index task, Real* a, Letter* b, Real* in_flight)
        : a(a + at.index * D * padded_a + at.row), b(b + at.index * D * blocks),
          in_flight(reinterpret_cast<Row*>(in_flight) + task * D * WARP + threadIdx.x % WARP), padded_a(padded_a),
          blocks(blocks), sent(blocks_of_stripe(at.pair, at.stripe)), received(blocks_of_stripe(at.pair, at.stripe + 1)) {
        received.count = max(min(received.end(), sent.end()) - received.first, 0);  // the others go no further
    }
    __device__ Letter* mail(Index f) const { return b + f * blocks; }
    __device__ Column& along(Index f) const { return *reinterpret_cast<Column*>(a + f * padded_a); }
};

// A helper's share of a chunk: groups of features, for which E is in shared memory.
__device__ void add_gradients(const Source& source, const Place& at, const Gradients& gradients, const Steps& steps, int chunk,
                              bool first_visit, const Plane& flow, Letterbox (&boxes)[GROUP]) {
    int first_step = steps.first + chunk * STEPS, first_in = first_step - (LANES - 1);
    int helper = int(threadIdx.x) / WARP - 1;
    for (Index first = helper * GROUP; first < source.D; first += HELPERS * GROUP) {
        Inboxes inboxes[GROUP];
        if (MAIL)
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (first + f < source.D) inboxes[f].look(at, first_in, gradients.received, gradients.mail(first + f));
        Features<GROUP> features;
        Sums sums{};
        features.take_rows(source, at, first);
        if (!first_visit)
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (first + f < source.D) sums.down[f] = gradients.in_flight[(first + f) * WARP];
        features.take_columns(source, at, first_step + STEPS - 1 - at.lane, first);
#pragma unroll
        for (int f = 0; f < GROUP; ++f)
            if (!first_visit && at.span.count > 0 && first + f < source.D) sums.along[f] = gradients.along(first + f);
        if (MAIL) {
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (first + f < source.D) inboxes[f].wait(at, first_in, gradients.received, gradients.mail(first + f), boxes[f]);
            __syncwarp();
        }
#pragma unroll 1
        for (int t = STEPS - 1; t >= 0; --t) {
            int block = first_step + t - at.lane;
#pragma unroll
            for (int f = 0; f < GROUP; ++f) sums.down[f] = from_lane_below(at, sums.down[f], boxes[f], t);
            if (at.span.holds(block)) {
                Block E;
                flow.get(t, E);
                sums.add(features, E);
            }
            features.take_columns(source, at, block - 1, first);
            if (at.lane == 0 && gradients.sent.holds(block)) {
                Letter* to = gradients.mail(first) + block;
#pragma unroll
                for (int f = 0; f < GROUP; ++f, to += gradients.blocks)
                    if (first + f < source.D) send(sums.down[f], at.stripe, to);
            }
        }
#pragma unroll
        for (int f = 0; f < GROUP; ++f) {
            if (first + f >= source.D) break;
            gradients.in_flight[(first + f) * WARP] = sums.down[f];
            if (at.span.count > 0) gradients.along(first + f) = sums.along[f];
        }
        __syncwarp();
    }
}

// What lies outside of the blocks that lanes visit: no path, no flow.
__device__ void fill_outside(const Place& at, Index N, Index M, C_T* gradient) {
    for (int lane = 0; lane < WARP; ++lane) {
        int row = __shfl_sync(FULL_MASK, at.row, lane), n = __shfl_sync(FULL_MASK, at.pair.n, lane);
        int usable = __shfl_sync(FULL_MASK, at.pair.usable, lane), index = __shfl_sync(FULL_MASK, at.index, lane);
        int from = __shfl_sync(FULL_MASK, at.span.first, lane) * COLUMNS, to = __shfl_sync(FULL_MASK, at.span.end(), lane) * COLUMNS;
        if (n == 0 || (from == 0 && to >= M)) continue;
        C_T fill = narrow<C_T>(usable ? Real(0) : not_a_number<Real>());
        for (Index i = row; i < min(Index(row + ROWS), N); ++i)
            for (Index j = threadIdx.x % WARP; j < M; j += WARP)
                if (j < from || j >= to) gradient[(index * N + i) * M + j] = fill;
    }
}

// E of a block into the gradient [B, N, M]. Of a pair whose value is NaN it is NaN wherever a path may go.
__device__ __forceinline__ void write_alignment(const Place& at, int block, const Block& E, Real value, Index N, Index M, C_T* gradient) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            int i = at.row + r, j = block * COLUMNS + k;
            if (i >= N || j >= M) continue;
            bool here = at.pair.inside(i, j);
            Real e = value != value && (here || !at.pair.usable) ? value : here ? E.at[r][k] : Real(0);
            gradient[(at.index * N + i) * M + j] = narrow<C_T>(e);
        }
}

// Of sum_b grad_values[b] values[b]: the sums of the gradients of a and b (OUTPUT SERIES), the gradient of C
// (ALIGNMENT), or the entropies that make d value / d gamma (ENTROPY). A pair whose value is no finite
// number sends nothing back.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BACKWARD)
soft_dtw_backward(Index B, Index groups, Index stripes, const Pair* pairs /* [B] */,
                  const Real* a /* packed [batch_a, D, padded_a] */, const Real* b /* packed [batch_b, D, padded_b] */,
                  Index batch_a, Index batch_b, Index D, Index padded_a, Index padded_b,
                  const C_T* C /* [B, N, M] */, Index C_stride_batch, Index C_stride_row, Index C_stride_column,
                  int* spoilt /* [B] */, double factor, RowLetter* mail /* see letters_of */, Index mail_blocks,
                  const Real* lanes /* [stripes, groups, chunks, LANE_WORDS, 32] */, Index chunks,
                  const Real* grad_values /* [B], or null for ones */, Index grad_values_stride, const Real* values /* [B] */,
                  Letter* mail_back /* [B, blocks] */, Index blocks,
                  Real* sums_a /* [B, D, padded_a] */, Letter* sums_b /* [B, D, blocks] */,
                  Real* in_flight /* [stripes * groups, D, 32, COLUMNS] */,
                  C_T* grad_C /* [B, N, M] */, Index N, Index M, Real* entropies /* [stripes, B] */) {
    constexpr bool ADDS = OUTPUT == SERIES && HELPERS == 0;  // the sweeping warp adds up the gradients
    __shared__ Chunk chunks_shared[HELPERS > 0 ? 2 : 1];
    __shared__ Letterbox box, boxes[HELPERS > 0 ? HELPERS : 1][GROUP];
    bool sweeps = threadIdx.x < WARP;
    Index task = gridDim.x - 1 - blockIdx.x;  // of the forward: its stripes in reverse
    Place at(pairs, B, int(stripes), int(task / groups), int(task % groups));
    Source source = source_of(at, a, b, batch_a, batch_b, D, padded_a, padded_b, C, C_stride_batch, C_stride_row,
                              C_stride_column, spoilt, factor);
    Steps steps(at);
    const RowLetter* letters_in = letters_of(at.stripe - 1, mail, B, mail_blocks, true, at, at.row - ROWS);
    RowLetter inbox;
    Held held;
    held.take_rows(source, at);
    bool hard = at.pair.gamma == 0;
    int last_row = at.pair.n - 1 - at.row, last_column = (at.pair.m - 1) % COLUMNS;
    int last_block = last_row >= 0 && last_row < ROWS ? (at.pair.m - 1) / COLUMNS : -1;
    Real value = values[at.index];
    Real seed = value - value != 0 ? Real(0) : grad_values ? grad_values[at.index * grad_values_stride] : Real(1);
    Real entropy = 0;
    Gradients gradients(at, D, padded_a, blocks, task, sums_a, sums_b, in_flight);
    Sums sums{};
    Flow flow{};
    mail_back += at.index * blocks;
    // The span of the last lane, for all lanes of the group: they take its letters.
    Span from_below = {__shfl_sync(FULL_MASK, at.from_below.first, LANES - 1, LANES),
                       __shfl_sync(FULL_MASK, at.from_below.count, LANES - 1, LANES)};

    Lane lane, next;
    auto start = [&](int chunk) {
        bring_back(lanes + (task * chunks + chunk) * LANE_WORDS * WARP + threadIdx.x % WARP, next);
        int block = steps.first + chunk * STEPS - at.lane;
        inbox.clear();
        if (MAIL && at.from_above.holds(block)) inbox.look(letters_in + block);
    };

    if (OUTPUT == ALIGNMENT && sweeps) fill_outside(at, N, M, grad_C);
    int first_chunk = steps.chunks() - 1;
    if (first_chunk >= 0 && sweeps) start(first_chunk);
    if (HELPERS > 0 && !sweeps) prepare_costs(source, at, steps, first_chunk, chunks_shared[first_chunk & 1].planes[COSTS]);
    // Helpers are one chunk behind with the gradients, and one ahead with the costs.
    for (int chunk = first_chunk; chunk >= (HELPERS > 0 && OUTPUT == SERIES ? -1 : 0); --chunk) {
        Chunk& shared = chunks_shared[HELPERS > 0 ? chunk & 1 : 0];
        int first_step = steps.first + chunk * STEPS, first_in = first_step - (LANES - 1);
        if (HELPERS > 0) __syncthreads();
        if (HELPERS > 0 && !sweeps) {
            Chunk& other = chunks_shared[(chunk + 1) & 1];
            if (chunk > 1) prefetch_columns(source, at, steps, chunk - 2, LANES - 1);
            if (chunk > 0) prepare_costs(source, at, steps, chunk - 1, other.planes[COSTS]);
            if (OUTPUT == SERIES && chunk < first_chunk)
                add_gradients(source, at, gradients, steps, chunk + 1, chunk + 1 == first_chunk, other.planes[FLOW],
                              boxes[threadIdx.x / WARP - 1]);
            continue;
        }
        if (chunk < 0) break;

        // the weights, forward through the chunk
        lane = next;
        held.take_columns(source, at, first_step - at.lane);
        Inboxes flows, columns[GROUP];
        if (MAIL) {
            flows.look(at, first_in, from_below, mail_back);
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (ADDS) columns[f].look(at, first_in, gradients.received, gradients.mail(f));
        }
#pragma unroll 1
        for (int t = 0; t < STEPS; ++t) {
            int block = first_step + t - at.lane;
            bool inside = at.span.holds(block);
            Row above;
            Real base_above;
            Block cost, R, extra;
            Weights weights;
            take_above(lane, at, block, letters_in, inbox, above, base_above);
            if (inside && HELPERS > 0) shared.planes[COSTS].get(t, cost);
            else if (inside) held_costs(source, held, at, block, cost);
            held.take_columns(source, at, block + 1);
            if (!inside) {
                stand_by(lane, above, base_above);
                continue;
            }
            rebase(lane, above, base_above);
            advance(lane, above, cost, [&](Real diagonal, Real up, Real left, Real c, int r, int k) {
                return recurrence(diagonal, up, left, c, hard, r, k, weights, extra);
            }, R);
            shared.planes[DIAGONAL].put(t, weights.diagonal);
            shared.planes[UP].put(t, weights.up);
            shared.planes[LEFT].put(t, weights.left);
            if (SLOPES)  // the cost is scale * root, and the slope needs 1 / root
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int k = 0; k < COLUMNS; ++k)
                        extra.at[r][k] = cost.at[r][k] > 0 ? source.scale * reciprocal(cost.at[r][k]) : Real(0);
            if (PLANES == 4) shared.planes[EXTRA].put(t, extra);
        }

        // E, backward through it; what the next chunk starts from comes meanwhile
        if (chunk > 0) start(chunk - 1);
        held.take_columns(source, at, first_step + STEPS - 1 - at.lane);
        if (MAIL) {
            flows.wait(at, first_in, from_below, mail_back, box);
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (ADDS) columns[f].wait(at, first_in, gradients.received, gradients.mail(f), boxes[0][f]);
            __syncwarp();
        }
#pragma unroll 1
        for (int t = STEPS - 1; t >= 0; --t) {
            int block = first_step + t - at.lane;
            Row below = from_lane_below(at, flow.message, box, t);
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (ADDS) sums.down[f] = from_lane_below(at, sums.down[f], boxes[0][f], t);
            if (at.span.holds(block)) {
                Weights weights;
                Block E, extra;
                shared.planes[DIAGONAL].get(t, weights.diagonal);
                shared.planes[UP].get(t, weights.up);
                shared.planes[LEFT].get(t, weights.left);
                if (PLANES == 4) shared.planes[EXTRA].get(t, extra);
                if (block == last_block)
                    flow_back(flow, below, weights, E,
                              [&](int r, int k) { return r == last_row && k == last_column ? seed : Real(0); });
                else
                    flow_back(flow, below, weights, E, [](int, int) { return Real(0); });
                if (OUTPUT == ALIGNMENT) write_alignment(at, block, E, value, N, M, grad_C);
                if (PLANES == 4)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int k = 0; k < COLUMNS; ++k) {
                            E.at[r][k] *= extra.at[r][k];
                            if (OUTPUT == ENTROPY) entropy += E.at[r][k];
                        }
                if (OUTPUT == SERIES && HELPERS > 0) shared.planes[FLOW].put(t, E);
                if (ADDS) sums.add(reinterpret_cast<const Features<GROUP>&>(held), E);
            } else {
                flow.message = Row{};
                flow.message.at[COLUMNS - 1] = flow.diagonal;
                flow.diagonal = 0;
            }
            held.take_columns(source, at, block - 1);
            if (MAIL && at.to_above.holds(block)) send(flow.message, at.stripe, mail_back + block);
            if (ADDS && at.lane == 0 && gradients.sent.holds(block))
#pragma unroll
                for (int f = 0; f < GROUP; ++f) send(sums.down[f], at.stripe, gradients.mail(f) + block);
        }
        if (MAIL) __syncwarp();  // all have read the letterboxes
    }
    if (ADDS && at.span.count > 0)
#pragma unroll
        for (int f = 0; f < GROUP; ++f) gradients.along(f) = sums.along[f];
    if (OUTPUT == ENTROPY && sweeps) {
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2) entropy += __shfl_down_sync(FULL_MASK, entropy, other, LANES);
        if (at.lane == 0 && at.pair.n > 0) entropies[at.stripe * B + at.index] = entropy;
    }
}

#endif
