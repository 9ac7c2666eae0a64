#pragma once
// One block of the recurrence R, and how a lane gets to it: what it carries along its rows, what it
// takes from the lane or the stripe above.
//
// Compiled with: REAL, COST, C_T, FEATURES, ROWS, LANES, HELPERS, STEPS, MAIL, HARD (see soft_dtw.cu).

#include "soft_dtw_table.cuh"

constexpr int LANE_WORDS = ROWS + COLUMNS + 2;  // of a Lane
typedef Message<COLUMNS + 1> RowLetter;         // R of a block's last row, and their base

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

__device__ __forceinline__ float log2_of(float v) { return __log2f(v); }
__device__ __forceinline__ double log2_of(double v) { return log2(v); }

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

template <int n> __device__ __forceinline__ Real least_of(Reals<n> v) {  // n is a power of 2
#pragma unroll
    for (int half = n / 2; half > 0; half /= 2)
#pragma unroll
        for (int k = 0; k < half; ++k) v.at[k] = min(v.at[k], v.at[k + half]);
    return v.at[0];
}

// A whole number near v: the digits behind the point find no room beside such a large number.
__device__ __forceinline__ Real whole(Real v) {
    constexpr Real large = sizeof(Real) == 8 ? Real(6755399441055744.0) : Real(12582912);  // 1.5 * 2^52, 2^23
    return v + large - large;
}

// Moves the base of the lane, and of the row above, to the least R that the next block starts from.
__device__ __forceinline__ void rebase(Lane& lane, Row& above, Real base_above) {
    Real least = min(least_of(above) + (base_above - lane.base), min(least_of(lane.left), lane.corner));
    Real base = lane.base + (least < NO_PATH ? whole(least) : Real(0));
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
__device__ RowLetter* letters_of(int stripe, RowLetter* mail, Index B, Index blocks, bool kept, const Place& at,
                                 int last_row) {
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
