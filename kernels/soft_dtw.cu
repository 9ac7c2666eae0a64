// Soft-DTW between two time series: the forward sweep over the table of a pair.
//
//     C[i,j] = cost(a[i], b[j])
//     R[i,j] = C[i,j] + softmin(R[i-1,j-1], R[i-1,j], R[i,j-1]),   R[-1,-1] = 0, else outside = inf
//     softmin(r) = -gamma log sum exp(-r / gamma),                 value = R[n-1,m-1]
//     (Cuturi & Blondel 2017, "Soft-DTW: a differentiable loss function for time-series")
// gamma = 0 is the hard minimum: the same sweep, where the least predecessor has all the weight.
// Of subsequences of b, the values of those that end in each column: all of the last row, where paths
// begin in the first column or in any: R[0,j] = C[0,j] + softmin(0, R[0,j-1]).
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
// With HELPERS, that many more warps prepare the costs of the next chunk of STEPS steps: for series
// with many features. For a backward the last row of each stripe is kept, and what a lane carries
// at the start of each chunk.
//
// Launch: grid (stripes * groups), stripe by stripe; block (32 * (1 + HELPERS)).
// Compiled with: REAL; COST; C_T (type of a given cost and of its gradient); FEATURES (D, where few
// features stay in registers, else 0); ROWS; LANES; HELPERS; STEPS; MAIL (0: one stripe holds every
// pair); HARD (1: gamma may be 0); ENDS (0: the value of the last cell; 1: of all the last row; 2: and paths
// begin in any column).

#include "soft_dtw_recurrence.cuh"

// Blocks of threads for which a multiprocessor's registers have to suffice.
constexpr int RESIDENT = HELPERS == 0 ? (ROWS == 4 ? 16 : 12) : HELPERS < 4 ? 4 : 1;

// R of a cell, where `up` is the last to be known. The large number comes last: R is rounded once.
__device__ __forceinline__ Real recurrence(Real diagonal, Real up, Real left, Real cost, bool hard) {
    Real low = min(diagonal, left), high = max(diagonal, left);
    Real least = min(low, up), middle = max(low, up);
    if (HARD && hard) return least + cost;
    return least + (cost - log2_of(1 + exp2(least - middle) + exp2(least - high)));
}

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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
soft_dtw_forward(Index B, Index groups, Index stripes, const Pair* pairs /* [B] */,
                 const Real* a /* packed [batch_a, D, padded_a] */, const Real* b /* packed [batch_b, D, padded_b] */,
                 Index D, Index padded_a, Index padded_b,
                 const C_T* C /* [B, N, M] */, Index C_stride_batch, Index C_stride_row, Index C_stride_column,
                 int* spoilt /* [B] */, double factor, RowLetter* mail /* see letters_of */, Index mail_blocks,
                 Real* lanes /* kept: [stripes, groups, chunks, LANE_WORDS, 32], else null */, Index chunks,
                 const FirstOf* first_of_a /* [batch_a, tiles] */, const FirstOf* first_of_b /* [batch_b, tiles] */,
                 Real* values /* each at its pair's place; with ENDS the row of M from there */, Index M) {
    DYNAMIC_SHARED(Plane, prepared);  // two, for helpers
    bool sweeps = threadIdx.x < WARP, kept = lanes != nullptr;
    Place at(pairs, B, int(stripes), int(blockIdx.x / groups), int(blockIdx.x % groups));
    Source source = source_of(at, a, b, D, padded_a, padded_b, C, C_stride_batch, C_stride_row, C_stride_column, spoilt,
                              factor);
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
    auto look = [&] {
        return out_of_numbers(at, first_of_a + at.pair.a * ((padded_a + TILE - 1) / TILE),
                              first_of_b + at.pair.b * ((padded_b + TILE - 1) / TILE), source.spoilt);
    };
    auto settled = [&](double value, int instead) {
        double unit = hard ? 1 : at.pair.gamma * LN_2;
        return instead < 0 ? not_a_number<Real>() : instead > 0 || value >= NO_PATH ? Real(infinity()) : Real(value * unit);
    };
    bool no_number = ENDS && sweeps && look();

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
            if (ENDS == 2 && at.row == 0) lane.corner = -lane.base;  // paths begin here, and R may fall
            rebase(lane, above, base_above);
            auto cell = [&](Real diagonal, Real up, Real left, Real c, int r, int) {
                if (ENDS == 2 && r == 0 && at.row == 0) diagonal = -lane.base, up = FORBIDDEN;
                return recurrence(diagonal, up, left, c, hard);
            };
            if (!ENDS && block == last_block) {
                Lane at_end = lane;
                advance(at_end, above, cost, cell, R);
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int k = 0; k < COLUMNS; ++k)
                        if (r == last_row && k == last_column) value = double(lane.base) + double(R.at[r][k]);
            }
            advance(lane, above, cost, cell, R);
            if (ENDS && ends) {
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int k = 0; k < COLUMNS; ++k)
                        if (r == last_row && block * COLUMNS + k < at.pair.m)
                            values[at.pair.place + block * COLUMNS + k] =
                                settled(double(lane.base) + double(R.at[r][k]), no_number ? -1 : 0);
            }
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
    if (ENDS) {  // behind the series nothing ends
        for (Index j = at.pair.m; ends && j < M; ++j)
            values[at.pair.place + j] = no_number ? not_a_number<Real>() : Real(infinity());
        return;
    }
    int instead = look();
    if (ends) values[at.pair.place] = settled(value, instead);
}
