// The subsequence of a series that matches a query best, from the values of all ends and of all starts.
//
// soft_dtw_best_end    the end of the least value; then soft_dtw_reverse turns the query, and the series up to
//                      that end, round, so that a sweep with paths that begin in the first column has, in
//                      column j, the value of the subsequence that begins j before the end
// soft_dtw_best_start  the start of the least of these
//
// Launch: blocks of 256 threads, a warp a pair, or a warp a row to reverse.
// Compiled with: X_T (type of the series), REAL (of the values).

#include "soft_dtw.cuh"

constexpr int THREADS = 256;

struct Least {  // a value and the first place where it stands
    Real value;
    Index place;
};

// The least of a row of values, by a warp; a NaN makes it NaN.
__device__ Least least_of(const Real* values, Index count) {
    Least least{Real(infinity()), NONE};
    bool nan = false;
    for (Index j = threadIdx.x % WARP; j < count; j += WARP) {
        nan |= values[j] != values[j];
        if (values[j] < least.value) least = {values[j], j};
    }
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
        Least theirs{__shfl_xor_sync(FULL_MASK, least.value, other), __shfl_xor_sync(FULL_MASK, least.place, other)};
        if (theirs.value < least.value || (theirs.value == least.value && theirs.place < least.place)) least = theirs;
    }
    if (__any_sync(FULL_MASK, nan)) least = {not_a_number<Real>(), NONE};
    return least;
}

// Which pair or row a warp has; the same for all its lanes.
__device__ Index unit_of_warp() { return (Index(blockIdx.x) * THREADS + threadIdx.x) / WARP; }

extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_best_end(Index B, Index M, const Pair* pairs /* [B] */, const Real* values /* [B, M] */,
                  Index* lengths /* [B]: of the queries */, Index* stops /* [B]: behind the ends, or -1 */,
                  Real* best /* [B] */) {
    Index k = unit_of_warp();
    if (k >= B) return;
    Least least = least_of(values + k * M, M);
    if (threadIdx.x % WARP) return;
    lengths[k] = pairs[k].n;
    stops[k] = least.place == NONE ? -1 : least.place + 1;
    best[k] = least.value;
}

// Rows until - 1, ..., 0 of each series; behind them zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_reverse(Index B, Index length, Index D,
                 const X_T* x /* [batch, length, D] */, Index stride_batch, Index stride_row, Index stride_feature,
                 Index batch, const Index* until /* [B] */, X_T* reversed /* [B, length, D] */) {
    Index unit = unit_of_warp();
    if (unit >= B * length) return;
    Index k = unit / length, row = until[k] - 1 - unit % length;
    for (Index f = threadIdx.x % WARP; f < D; f += WARP)
        reversed[unit * D + f] =
            row >= 0 ? x[k % batch * stride_batch + row * stride_row + f * stride_feature] : narrow<X_T>(Real(0));
}

extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_best_start(Index B, Index M, const Real* values /* [B, M], from the end backwards */, const Index* stops,
                    Index* match /* [B, 2]: start and stop, or -1 */) {
    Index k = unit_of_warp();
    if (k >= B) return;
    Least least = least_of(values + k * M, M);
    if (threadIdx.x % WARP) return;
    bool found = stops[k] >= 0 && least.place != NONE;
    match[k * 2] = found ? stops[k] - 1 - least.place : -1;
    match[k * 2 + 1] = found ? stops[k] : -1;
}
