// Soft-DTW between two time series, forward and backward.
//
//     C[i,j] = sum_d (a[i,d] - b[j,d])^2
//     R[i,j] = C[i,j] + softmin(R[i-1,j-1], R[i-1,j], R[i,j-1]),   R[-1,-1] = 0, else outside = inf
//     softmin(r) = -gamma log sum exp(-r / gamma),                 value = R[N-1,M-1]
//     E[i,j] = d value / d C[i,j]:  E[N-1,M-1] = 1, and each cell hands E to its three
//              predecessors in proportion to their weights exp(-r/gamma) / sum exp(-r/gamma)
//     grad_a[i] = sum_j E[i,j] 2 (a[i] - b[j]),   grad_b[j] = -sum_i E[i,j] 2 (a[i] - b[j])
//     (Cuturi & Blondel 2017, "Soft-DTW: a differentiable loss function for time-series")
//
// Numbers. A cell keeps Z = exp(-R / gamma), which obeys a sum of products but leaves every float's
// range, as mantissa and exponent: Z = z 2^e, z in [1, 2), e an int. Then no digits go into the
// size of R: the weights are good to float's rounding however large R / gamma is, and a cell costs
// one exponential. "Impossible" is an exponent near -2^30, never inf - inf. Weights are taken from
// the cells themselves, never from differences of large R.
//
// Work. A block takes one pair of series with WARPS warps. A warp owns a stripe of 32 rows, a lane
// one row; at step s lane l is at column j = s - l, so the lane above has just finished the cell
// above, and a shuffle hands it over. A stripe is swept in chunks of STEPS steps. The last row of
// a stripe goes through global memory to the next one, whose warp runs LAG chunks behind, with one
// barrier a chunk. Stripe q belongs to warp q % WARPS, in round q / WARPS.
//
// For the backward the forward keeps the last row of every stripe and each lane's state at the
// start of every chunk; the backward walks stripes and chunks in reverse, recomputes a chunk's
// weights in registers, and sends E back along the same diagonals. Nothing of size N x M is kept.
//
// Launch: grid (B), block (32 * WARPS).
// Compiled with: X_T (type of a and b), REAL (float or double), WARPS, STEPS.

#include "common.cuh"

typedef REAL Real;

constexpr int LAG = 1 + (WARP - 1 + STEPS - 1) / STEPS;  // chunks a stripe must be ahead of the next
constexpr int WINDOW = WARP - 1 + STEPS;                 // columns that a chunk touches
constexpr int FEATURES = 4;                              // features of the series held at a time
constexpr int IMPOSSIBLE = -(1 << 30);                   // exponent of Z = 0
constexpr int OUT_OF_RANGE = -900000000;                 // below it no finite path is left: R = inf
constexpr double LN_2 = 0.69314718055994530942;

struct Cell {  // Z = z 2^e
    Real z;
    int e;
};

struct alignas(16) Lane {  // what a lane carries from one step to the next: R[i,j-1], R[i-1,j-1]
    Cell left, diagonal;
};

struct Weights {  // of the three predecessors; they add up to 1
    Real diagonal, up, left;
};

struct Flow {  // what a lane carries in the backward, from later columns to earlier ones
    Real left;      // E for its own next cell
    Real diagonal;  // E for the row above, one column further on
    Real message;   // E for the cell that the lane above takes next
};

struct Series {  // one time series with its strides, in elements
    const X_T* data /* [length, features] */;
    int length;
    Index features, stride_row, stride_feature;
    __device__ Real at(int row, Index feature) const {
        bool inside = row >= 0 && row < length && feature < features;
        return inside ? widen<Real>(data[row * stride_row + feature * stride_feature]) : Real(0);
    }
};

struct Place {  // the part of a pair that a warp is at; lane l, step t is cell (row, column(t))
    int lane, stripe, chunk;
    __device__ int row() const { return stripe * WARP + lane; }
    __device__ int first_column() const { return chunk * STEPS; }
    __device__ int column(int step) const { return first_column() + step - lane; }
};

struct Tile {  // what a warp shares among its lanes
    Real b[FEATURES][WINDOW];  // the columns of the chunk: lane l, step t reads [WARP - 1 - l + t]
    Cell above[STEPS];         // forward: the cells above lane 0
    Real below[STEPS];         // backward: E that comes to lane 31 from the stripe below
    Real column_sum[STEPS];    // backward: sums over the stripe's rows, finished by lane 0
};

// Which stripe and chunk a warp works on in each wave (the time between two barriers), counted in
// the order of the forward: each stripe LAG chunks behind the one above.
struct Schedule {
    int stripes, chunks, round;  // a round is what a stripe takes, with the wait for its turn
    int stripe, chunk;
    __device__ Schedule(int rows, int columns, int warp)
        : stripes((rows + WARP - 1) / WARP), chunks((columns + WINDOW - 1) / STEPS),
          round(WARPS == 1 ? chunks : max(chunks, LAG * WARPS)), stripe(warp), chunk(-LAG * warp) {}
    __device__ Index waves() const {
        int last = stripes - 1;
        return Index(last / WARPS) * round + LAG * (last % WARPS) + chunks;
    }
    __device__ bool working() const { return stripe < stripes && chunk >= 0 && chunk < chunks; }
    __device__ void end_of_wave() {
        if (++chunk == round) {
            chunk = 0;
            stripe += WARPS;
        }
        if (WARPS == 1) __syncwarp();
        else __syncthreads();
    }
};

// ---- mantissa and exponent

__device__ __forceinline__ float power_of_two(float, int k) { return __int_as_float((k + 127) << 23); }
__device__ __forceinline__ double power_of_two(double, int k) { return __hiloint2double((k + 1023) << 20, 0); }
__device__ __forceinline__ int exponent_of(float v) { return (__float_as_int(v) >> 23) - 127; }
__device__ __forceinline__ int exponent_of(double v) { return (__double2hiint(v) >> 20) - 1023; }
constexpr int LEAST = sizeof(Real) == 8 ? -1023 : -127;  // power_of_two(LEAST) is exactly 0

__device__ __forceinline__ Cell impossible() { return {Real(1), IMPOSSIBLE}; }

// z 2^(e - base) for e <= base: exactly 0 where it is far below
__device__ __forceinline__ Real aligned(Cell cell, int base) {
    return cell.z * power_of_two(Real(0), max(cell.e - base, LEAST));
}

// Z = exp(-C/gamma) (Z_diagonal + Z_up + Z_left), with log2_factor = -C log2(e) / gamma
__device__ __forceinline__ Cell recurrence(Cell diagonal, Cell up, Cell left, Real log2_factor,
                                           Weights* weights) {
    int base = max(max(diagonal.e, up.e), left.e);
    Real d = aligned(diagonal, base), u = aligned(up, base), l = aligned(left, base);
    Real sum = d + u + l;
    if (weights) {
        Real scale = Real(1) / sum;
        *weights = {d * scale, u * scale, l * scale};
    }
    Real exponent = max(log2_factor, Real(-1e9));  // keeps the integers below from overflowing
    Real whole = rint(exponent);
    Real z = sum * exp2(exponent - whole);
    int shift = exponent_of(z);
    return {z * power_of_two(Real(0), -shift), max(base + int(whole) + shift, IMPOSSIBLE)};
}

// -log2(e) / gamma, finite however small gamma is, so that a cost of 0 stays 0
__device__ Real log2_scale(double gamma) { return max(Real(-1 / (gamma * LN_2)), Real(-1e38)); }

// R = -gamma ln Z, the logarithm taken in double
__device__ Real soft_minimum(Cell cell, double gamma) {
    if (cell.e < OUT_OF_RANGE) return Real(infinity());
    return Real(-gamma * LN_2 * (double(cell.e) + log2(double(cell.z))));
}

// ---- the steps of a chunk

__device__ void load_columns(const Series& b, Place at, Index first_feature, Tile& tile) {
    __syncwarp();  // the lanes are done with what the tile held
#pragma unroll
    for (int f = 0; f < FEATURES; ++f)
        for (int w = at.lane; w < WINDOW; w += WARP)
            tile.b[f][w] = b.at(at.first_column() - (WARP - 1) + w, first_feature + f);
    __syncwarp();
}

__device__ __forceinline__ Index last_features(const Series& a) {
    return a.features == 0 ? 0 : (a.features - 1) / FEATURES * FEATURES;
}

// log2_factor[t] = -C[row, column(t)] log2(e) / gamma; leaves the last features in the tile
__device__ __forceinline__ void costs(const Series& a, const Series& b, Place at, Real scale, Tile& tile,
                                      Real (&log2_factor)[STEPS]) {
#pragma unroll
    for (int t = 0; t < STEPS; ++t) log2_factor[t] = 0;
    for (Index first = 0; first <= last_features(a); first += FEATURES) {
        load_columns(b, at, first, tile);
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) {
            Real a_f = a.at(at.row(), first + f);
#pragma unroll
            for (int t = 0; t < STEPS; ++t) {
                Real difference = a_f - tile.b[f][WARP - 1 - at.lane + t];
                log2_factor[t] += difference * difference;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < STEPS; ++t) log2_factor[t] *= scale;
}

// The cells above lane 0: the last row of the stripe above, impossible above the first row.
__device__ void load_above(const Cell* row_above, Place at, int columns, Tile& tile) {
    __syncwarp();
    for (int t = at.lane; t < STEPS; t += WARP) {
        int j = at.first_column() + t;
        tile.above[t] = row_above && j < columns ? row_above[j] : impossible();
    }
    __syncwarp();
}

// E that the stripe below hands to lane 31, nothing below the last row.
__device__ void load_below(const Real* row_handed_up, Place at, int columns, Tile& tile) {
    __syncwarp();
    for (int t = at.lane; t < STEPS; t += WARP) {
        int j = at.first_column() + t - (WARP - 1);
        tile.below[t] = row_handed_up && j >= 0 && j < columns ? row_handed_up[j] : Real(0);
    }
    __syncwarp();
}

__device__ Lane before_first_column(Place at) {
    bool origin = at.stripe == 0 && at.lane == 0;  // R[-1,-1] = 0: Z = 1
    return {impossible(), origin ? Cell{Real(1), 0} : impossible()};
}

// One step of every lane. Outside the columns a lane stands still: impossible before them, its
// last cell behind them.
__device__ __forceinline__ void advance(Lane& lane, Place at, int step, int columns, Real log2_factor,
                                        const Tile& tile, Weights* weights) {
    Cell up = {__shfl_up_sync(FULL_MASK, lane.left.z, 1), __shfl_up_sync(FULL_MASK, lane.left.e, 1)};
    if (at.lane == 0) up = tile.above[step];
    Cell cell = recurrence(lane.diagonal, up, lane.left, log2_factor, weights);
    int j = at.column(step);
    if (j >= 0 && j < columns) lane.left = cell;
    lane.diagonal = up;
}

// E of the chunk's cells, from the last step to the first.
__device__ __forceinline__ void alignment(Flow& flow, Place at, const Weights (&weights)[STEPS], const Tile& tile,
                                          int rows, int columns, Real seed, Real* row_handed_up,
                                          Real (&E)[STEPS]) {
#pragma unroll
    for (int t = STEPS - 1; t >= 0; --t) {
        Real from_below = __shfl_down_sync(FULL_MASK, flow.message, 1);
        if (at.lane == WARP - 1) from_below = tile.below[t];
        int j = at.column(t);
        E[t] = at.row() == rows - 1 && j == columns - 1 ? seed : from_below + flow.left;
        flow.message = weights[t].up * E[t] + flow.diagonal;
        flow.diagonal = weights[t].diagonal * E[t];
        flow.left = weights[t].left * E[t];
        if (at.lane == 0 && row_handed_up && j < columns) row_handed_up[j] = flow.message;
    }
}

// Adds the chunk's share to the gradients: 2 E (a - b), summed along the lane's row for grad_a, and
// along the column, over the lanes from the last row to the first, for grad_b.
__device__ __forceinline__ void gradients(const Series& a, const Series& b, Place at, Tile& tile,
                                          const Real (&E)[STEPS], bool first_visit,
                                          Real* grad_a /* [N, D] */, Real* grad_b /* [M, D] */) {
    for (Index first = last_features(a); first >= 0; first -= FEATURES) {
        if (first != last_features(a)) load_columns(b, at, first, tile);
#pragma unroll
        for (int f = 0; f < FEATURES; ++f) {
            Index feature = first + f;
            if (feature >= a.features) break;
            Real a_f = a.at(at.row(), feature), row_sum = 0, column_sum = 0;
#pragma unroll
            for (int t = STEPS - 1; t >= 0; --t) {
                Real from_below = __shfl_down_sync(FULL_MASK, column_sum, 1);
                Real share = 2 * E[t] * (a_f - tile.b[f][WARP - 1 - at.lane + t]);
                if (E[t] == 0) share = 0;  // even where the difference is infinite
                row_sum += share;
                column_sum = (at.lane == WARP - 1 ? Real(0) : from_below) + share;
                if (at.lane == 0) tile.column_sum[t] = column_sum;
            }
            if (at.row() < a.length) {
                Real* sum = &grad_a[at.row() * a.features + feature];
                *sum = first_visit ? row_sum : *sum + row_sum;
            }
            __syncwarp();
            // lane 0 finished its columns; the other lanes are amid theirs, and the next chunk goes on
            int j = at.column(0);
            if (at.lane > 0 && j >= 0 && j < b.length) grad_b[j * b.features + feature] -= column_sum;
            for (int t = at.lane; t < STEPS; t += WARP) {
                int k = at.first_column() + t;
                if (k < b.length) grad_b[k * b.features + feature] -= tile.column_sum[t];
            }
            __syncwarp();
        }
    }
}

// ---- kernels

extern "C" __global__ void __launch_bounds__(WARP * WARPS)
soft_dtw_forward(const X_T* a /* [B, N, D] */, Index a_stride_batch, Index a_stride_row, Index a_stride_feature,
                 const X_T* b /* [B, M, D] */, Index b_stride_batch, Index b_stride_row, Index b_stride_feature,
                 Index N, Index M, Index D, double gamma, Real* values /* [B] */,
                 Cell* rows /* kept: [B, stripes - 1, M], else [B, M] */,
                 Lane* lanes /* kept: [B, stripes, chunks, 32], else null */) {
    __shared__ Tile tiles[WARPS];
    __shared__ int not_a_number_seen;
    Index pair = blockIdx.x;
    int warp = threadIdx.x / WARP;
    Place at{int(threadIdx.x % WARP), 0, 0};
    Series a_series{a + pair * a_stride_batch, int(N), D, a_stride_row, a_stride_feature};
    Series b_series{b + pair * b_stride_batch, int(M), D, b_stride_row, b_stride_feature};
    Tile& tile = tiles[warp];
    Schedule schedule(N, M, warp);
    bool keep = lanes != nullptr;
    Index row_stride = keep ? M : 0;  // not kept, one row a pair serves every stripe in turn
    rows += pair * (keep ? (schedule.stripes - 1) * M : M);
    Real scale = log2_scale(gamma);
    Real log2_factor[STEPS];
    Lane lane;

    if (threadIdx.x == 0) not_a_number_seen = 0;
    __syncthreads();
    for (Index wave = schedule.waves(); wave > 0; --wave) {
        if (schedule.working()) {
            at.stripe = schedule.stripe;
            at.chunk = schedule.chunk;
            if (at.chunk == 0) lane = before_first_column(at);
            if (keep) lanes[((pair * schedule.stripes + at.stripe) * schedule.chunks + at.chunk) * WARP + at.lane] = lane;
            costs(a_series, b_series, at, scale, tile, log2_factor);
            load_above(at.stripe > 0 ? rows + (at.stripe - 1) * row_stride : nullptr, at, M, tile);
            Cell* row_below = at.stripe < schedule.stripes - 1 ? rows + at.stripe * row_stride : nullptr;
            Real total = 0;
#pragma unroll
            for (int t = 0; t < STEPS; ++t) {
                advance(lane, at, t, M, log2_factor[t], tile, nullptr);
                total += log2_factor[t];
                int j = at.column(t);
                if (at.lane == WARP - 1 && row_below && j >= 0 && j < M) row_below[j] = lane.left;
            }
            if (total != total) not_a_number_seen = 1;  // whoever writes it writes the same
        }
        schedule.end_of_wave();
    }
    bool has_last_stripe = warp == (schedule.stripes - 1) % WARPS;
    if (has_last_stripe && at.row() == N - 1)
        values[pair] = not_a_number_seen ? not_a_number<Real>() : soft_minimum(lane.left, gamma);
}

// Gradients of sum_b grad_values[b] values[b], in Real and for every pair (no sum over a broadcast
// batch). A sample whose value is NaN gets NaN, one whose value is infinite gets 0.
extern "C" __global__ void __launch_bounds__(WARP * WARPS)
soft_dtw_backward(const Real* grad_values /* [B], or null for ones */, Index grad_values_stride, const Real* values /* [B] */,
                  const X_T* a /* [B, N, D] */, Index a_stride_batch, Index a_stride_row, Index a_stride_feature,
                  const X_T* b /* [B, M, D] */, Index b_stride_batch, Index b_stride_row, Index b_stride_feature,
                  Index N, Index M, Index D, double gamma,
                  const Cell* rows /* [B, stripes - 1, M] */, const Lane* lanes /* [B, stripes, chunks, 32] */,
                  Real* handed_up /* scratch [B, M] */, Real* grad_a /* [B, N, D] */, Real* grad_b /* [B, M, D] */) {
    __shared__ Tile tiles[WARPS];
    Index pair = blockIdx.x;
    int warp = threadIdx.x / WARP;
    Place at{int(threadIdx.x % WARP), 0, 0};
    Series a_series{a + pair * a_stride_batch, int(N), D, a_stride_row, a_stride_feature};
    Series b_series{b + pair * b_stride_batch, int(M), D, b_stride_row, b_stride_feature};
    Tile& tile = tiles[warp];
    Schedule schedule(N, M, warp);
    rows += pair * (schedule.stripes - 1) * M;
    lanes += pair * schedule.stripes * schedule.chunks * WARP;
    handed_up += pair * M;
    grad_a += pair * N * D;
    grad_b += pair * M * D;
    Real scale = log2_scale(gamma);
    Real seed = grad_values ? grad_values[pair * grad_values_stride] : Real(1);
    Real log2_factor[STEPS], E[STEPS];
    Weights weights[STEPS];
    Flow flow;

    Real value = values[pair];
    bool finite = value - value == 0;
    Real start = value != value ? value : Real(0);
    for (Index k = threadIdx.x; k < M * D; k += WARP * WARPS) grad_b[k] = start;
    if (!finite) {
        for (Index k = threadIdx.x; k < N * D; k += WARP * WARPS) grad_a[k] = start;
        return;
    }
    __syncthreads();
    for (Index wave = schedule.waves(); wave > 0; --wave) {
        if (schedule.working()) {  // from the last stripe and chunk to the first
            at.stripe = schedule.stripes - 1 - schedule.stripe;
            at.chunk = schedule.chunks - 1 - schedule.chunk;
            bool last_chunk = at.chunk == schedule.chunks - 1;
            if (last_chunk) flow = {Real(0), Real(0), Real(0)};
            costs(a_series, b_series, at, scale, tile, log2_factor);
            load_above(at.stripe > 0 ? rows + (at.stripe - 1) * M : nullptr, at, M, tile);
            load_below(at.stripe < schedule.stripes - 1 ? handed_up : nullptr, at, M, tile);
            Lane lane = lanes[(Index(at.stripe) * schedule.chunks + at.chunk) * WARP + at.lane];
#pragma unroll
            for (int t = 0; t < STEPS; ++t) advance(lane, at, t, M, log2_factor[t], tile, &weights[t]);
            alignment(flow, at, weights, tile, N, M, seed, at.stripe > 0 ? handed_up : nullptr, E);
            gradients(a_series, b_series, at, tile, E, last_chunk, grad_a, grad_b);
        }
        schedule.end_of_wave();
    }
}

// The gradients in the dtype of the series, summed over the batch where one series served it all.
// Launch: one thread an element of `gradient`.
extern "C" __global__ void soft_dtw_round_gradient(const Real* per_pair /* [B, size] */, Index B, Index size,
                                                   Index summed /* 1: [size], 0: [B, size] */,
                                                   X_T* gradient) {
    Index k = Index(blockIdx.x) * blockDim.x + threadIdx.x;
    if (k >= (summed ? size : B * size)) return;
    Real sum = 0;
    if (summed)
        for (Index pair = 0; pair < B; ++pair) sum += per_pair[pair * size + k];
    else
        sum = per_pair[k];
    gradient[k] = narrow<X_T>(sum);
}
