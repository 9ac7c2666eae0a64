// Soft-DTW: what comes before and after the sweep over the tables.
//
// soft_dtw_prepare writes, for the sweep,
//     pairs          each pair's lengths, band and gamma, checked: what is out of range is not usable
//     packed a, b    the series as [batch, D, length], halved, in Real: neighbouring lanes read
//                    neighbouring rows, and no difference of halves overflows. For "cosine" each
//                    row has length 1 (halved). NaN and infinity become 0; first_of says where they are.
//     mail           cleared
// soft_dtw_finish brings sums of gradients, laid out as the packed series, into the dtype and layout
// of the series, or adds them to what other calls have found.
//
// Launch: blocks of 256 threads, one warp a tile of 32 rows of a series.
// Compiled with: X_T (type of a and b), RESULT_T (of their gradients), REAL, COSINE (0 or 1).

#include "soft_dtw.cuh"

constexpr int THREADS = 256, WARPS = THREADS / WARP;
constexpr int WIDEST_BAND = 1 << 30;

enum Kind { ONE_FOR_ALL, INT32, INT64, FLOAT64, FLOAT32, FLOAT16, BFLOAT16 };

// An entry of an array of any of these types.
template <class T> __device__ T entry(const void* data, Index k, Index kind, T one_for_all) {
    switch (kind) {
        case INT32: return T(static_cast<const int*>(data)[k]);
        case INT64: return T(static_cast<const Index*>(data)[k]);
        case FLOAT64: return T(static_cast<const double*>(data)[k]);
        case FLOAT32: return T(static_cast<const float*>(data)[k]);
        case FLOAT16: return T(__half2float(static_cast<const __half*>(data)[k]));
        case BFLOAT16: return T(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[k]));
        default: return one_for_all;
    }
}

// `band` below 0 stands for none where it is one for all pairs.
__device__ Pair checked(Index n, Index m, Index N, Index M, double gamma, Index band, bool banded) {
    bool usable = n >= 1 && n <= N && m >= 1 && m <= M && gamma >= 0 && gamma <= 1.7976931348623157e308 &&
                  (!banded || band >= 0);
    if (!usable) return {1, 1, 0, 0, 1.0};
    Index widest = WIDEST_BAND;
    if (!banded) return {int(n), int(m), WIDEST_BAND, WIDEST_BAND, gamma, 0, 1};
    band = min(band, widest);
    return {int(n), int(m), int(min(band + max(n - m, Index(0)), widest)), int(min(band + max(m - n, Index(0)), widest)),
            gamma, 0, 1};
}

// Mail that nobody has sent yet.
extern "C" __global__ void __launch_bounds__(THREADS) soft_dtw_clear(Word* mail, Index words) {
    Index threads = Index(gridDim.x) * THREADS;
    for (Index k = Index(blockIdx.x) * THREADS + threadIdx.x; k < words; k += threads) mail[k] = NOTHING_SENT;
}

struct Series {  // time series with their strides, in elements
    const X_T* data /* [batch, length, D] */;
    Index stride_batch, stride_row, stride_feature, batch, length, D;
    __device__ Index tiles() const { return (length + TILE - 1) / TILE; }
    __device__ const X_T* at(Index k, Index row) const { return data + k * stride_batch + row * stride_row; }
};

struct Norm {  // of a row: largest * rest, for squares of the entries may overflow
    Real largest, rest;
};

__device__ Norm norm_of(const Series& series, const X_T* row) {
    Real largest = 0, squares = 0;
    for (Index f = 0; f < series.D; ++f) largest = max(largest, Real(fabs(widen<Real>(row[f * series.stride_feature]))));
    for (Index f = 0; f < series.D; ++f) {
        Real ratio = widen<Real>(row[f * series.stride_feature]) / largest;
        squares += ratio * ratio;
    }
    return {largest, sqrt(squares)};
}

// One tile of 32 rows: packed [batch, D, padded], first_of [batch, tiles].
__device__ void pack(const Series& series, Index unit, Index padded, Real* packed, FirstOf* first_of) {
    Index batch = unit / series.tiles(), tile = unit % series.tiles();
    Index row = tile * TILE + threadIdx.x % WARP;
    bool here = row < series.length;
    const X_T* data = series.at(batch, here ? row : 0);
    Norm norm{1, 1};
    if (COSINE) norm = norm_of(series, data);
    bool nan = here && norm.largest == 0, infinite = false;  // no direction
    packed += batch * series.D * padded + row;
    for (Index f = 0; f < series.D; ++f) {
        Real x = here ? widen<Real>(data[f * series.stride_feature]) : Real(0);
        Real half = (COSINE ? x / norm.largest / norm.rest : x) * Real(0.5);
        nan |= x != x;
        infinite |= fabs(x) == infinity();
        if (row < padded) packed[f * padded] = half - half == 0 ? half : Real(0);
    }
    unsigned nans = __ballot_sync(FULL_MASK, nan), infinities = __ballot_sync(FULL_MASK, infinite);
    if (threadIdx.x % WARP == 0)
        first_of[unit] = {nans ? int(tile * TILE) + __ffs(nans) - 1 : NONE,
                          infinities ? int(tile * TILE) + __ffs(infinities) - 1 : NONE};
}

extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_prepare(Index B, Index N, Index M, Index D,
                 Index every_a, Index batch_a, Index every_b, Index batch_b, Index columns, Index first, Index row_length,
                 Index by_series /* lengths are of series, not of pairs */,
                 const void* gamma, Index gamma_stride, Index gamma_kind, double one_gamma,
                 const void* band, Index band_stride, Index band_kind, Index one_band,
                 const void* lengths_a, Index lengths_a_stride, Index lengths_a_kind, Index one_length_a,
                 const void* lengths_b, Index lengths_b_stride, Index lengths_b_kind, Index one_length_b,
                 Index units /* tiles of all series: 0 where the cost is given */, const X_T* a /* [batch_a, N, D] */,
                 Index a_stride_batch, Index a_stride_row, Index a_stride_feature,
                 const X_T* b /* [batch_b, M, D] */, Index b_stride_batch, Index b_stride_row, Index b_stride_feature,
                 Index padded_a, Real* packed_a /* [batch_a, D, padded_a] */, FirstOf* first_of_a /* [batch_a, tiles] */,
                 Index padded_b, Real* packed_b, FirstOf* first_of_b,
                 Pair* pairs /* [B] */, int* spoilt /* [B]: cleared */, Word* mail /* [words] */, Index words) {
    Index thread = Index(blockIdx.x) * THREADS + threadIdx.x, threads = Index(gridDim.x) * THREADS;
    Grid grid{every_a, batch_a, every_b, batch_b, columns, first, row_length};
    for (Index k = thread; k < words; k += threads) mail[k] = NOTHING_SENT;
    for (Index k = thread; k < B; k += threads) {
        bool banded = band_kind != ONE_FOR_ALL || one_band >= 0;
        int of_a = grid.a(k), of_b = grid.b(k);
        Pair pair = checked(entry(lengths_a, (by_series ? of_a : k) * lengths_a_stride, lengths_a_kind, one_length_a),
                            entry(lengths_b, (by_series ? of_b : k) * lengths_b_stride, lengths_b_kind, one_length_b),
                            N, M, entry(gamma, k * gamma_stride, gamma_kind, one_gamma),
                            entry(band, k * band_stride, band_kind, one_band), banded);
        pair.place = grid.place(k);
        pair.a = of_a;
        pair.b = of_b;
        pairs[k] = pair;
        spoilt[k] = 0;
    }
    Series of_a{a, a_stride_batch, a_stride_row, a_stride_feature, batch_a, N, D};
    Series of_b{b, b_stride_batch, b_stride_row, b_stride_feature, batch_b, M, D};
    Index units_a = batch_a * of_a.tiles();
    for (Index unit = thread / WARP; unit < units; unit += threads / WARP) {
        if (unit < units_a) pack(of_a, unit, padded_a, packed_a, first_of_a);
        else pack(of_b, unit - units_a, padded_b, packed_b, first_of_b);
    }
}

// ---- gradients

struct InMemory {  // sums of grad_a: [B, D, padded]
    const Real* sums;
    __device__ Real at(Index k) const { return sums[k]; }
};

struct InMail {  // sums of grad_b, as the last stripe sent them: [B, D, padded / COLUMNS] letters
    const Letter* sums;
    __device__ Real at(Index k) const {
        Real sum;
        sums[k / COLUMNS].get(int(k % COLUMNS), sum);
        return sum;
    }
};

// The sum of a row's gradient for feature f: over the pairs that its series met. A pair whose value
// is NaN adds NaN, one whose value is infinite nothing, nor does what lies beyond its length.
template <class Sums>
__device__ Real summed(const Series& series, Index every, const Pair* pairs, const Real* values, Sums sums,
                       Index padded, bool is_a, Index batch, Index B, Index row, Index f) {
    Real sum = 0;
    for (Index first = batch * every; first < B; first += every * series.batch)
        for (Index k = first; k < first + every; ++k) {
            Real value = values[pairs[k].place];
            bool within = !pairs[k].usable || row < (is_a ? pairs[k].n : pairs[k].m);
            if (within && value != value) sum += value;
            else if (within && value - value == 0) sum += sums.at((k * series.D + f) * padded + row);
        }
    return sum;
}

// Features first .. last - 1 of a tile: all of them for "cosine", where gradients go through x / |x|.
template <class Sums>
__device__ void finish(const Series& series, Index every, const Pair* pairs, const Real* values, Sums sums,
                       Index padded, const Real* packed, bool is_a, Real factor, Index B, Index tile_of_batch,
                       Index first, Index last, bool adds, RESULT_T* gradient /* [batch, length, D] */) {
    Index batch = tile_of_batch / series.tiles();
    Index row = tile_of_batch % series.tiles() * TILE + threadIdx.x % WARP;
    if (!gradient || row >= series.length) return;
    Real along = 0, scale = factor;  // along: the part of the gradient along the unit row
    if (COSINE) {
        packed += batch * series.D * padded + row;
        for (Index f = first; f < last; ++f)
            along += 2 * packed[f * padded] * summed(series, every, pairs, values, sums, padded, is_a, batch, B, row, f);
        Norm norm = norm_of(series, series.at(batch, row));
        scale = scale / norm.largest / norm.rest;
    }
    for (Index f = first; f < last; ++f) {
        Real sum = summed(series, every, pairs, values, sums, padded, is_a, batch, B, row, f);
        if (COSINE) sum -= 2 * packed[f * padded] * along;
        RESULT_T& result = gradient[(batch * series.length + row) * series.D + f];
        result = narrow<RESULT_T>((adds ? widen<Real>(result) : Real(0)) + (sum == 0 ? Real(0) : scale * sum));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)  // else ptxas saves registers, and spills some
soft_dtw_finish(Index B, Index N, Index M, Index D, Index every_a, Index batch_a, Index every_b, Index batch_b,
                const Pair* pairs /* [B] */, const Real* values /* each at its pair's place */,
                const X_T* a, Index a_stride_batch, Index a_stride_row, Index a_stride_feature,
                const X_T* b, Index b_stride_batch, Index b_stride_row, Index b_stride_feature,
                Index padded_a, const Real* packed_a, Index padded_b, const Real* packed_b,
                const Real* sums_a /* [B, D, padded_a] */, const Letter* sums_b /* [B, D, padded_b / COLUMNS] */,
                double factor, Index features /* of a warp */, Index adds /* to what is in grad_a and grad_b */,
                RESULT_T* grad_a /* [batch_a, N, D], or null */, RESULT_T* grad_b /* [batch_b, M, D], or null */) {
    Series of_a{a, a_stride_batch, a_stride_row, a_stride_feature, batch_a, N, D};
    Series of_b{b, b_stride_batch, b_stride_row, b_stride_feature, batch_b, M, D};
    Index tiles_a = batch_a * of_a.tiles(), tiles = tiles_a + batch_b * of_b.tiles();
    Index groups = (D + features - 1) / features;
    Index unit = (Index(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    if (unit >= tiles * groups) return;
    Index tile = unit % tiles, first = unit / tiles * features, last = min(first + features, D);
    if (tile < tiles_a)
        finish(of_a, every_a, pairs, values, InMemory{sums_a}, padded_a, packed_a, true, Real(factor), B, tile, first,
               last, adds, grad_a);
    else
        finish(of_b, every_b, pairs, values, InMail{sums_b}, padded_b, packed_b, false, Real(-factor), B,
               tile - tiles_a, first, last, adds, grad_b);
}

// d value / d gamma: minus the entropies of the stripes, added up in their order. One thread a pair.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_finish_gamma(Index B, Index stripes, const Pair* pairs /* [B] */, const Real* values,
                      const Real* entropies /* [stripes, B] */, Real* gradient /* as the values, at its pair's place */) {
    Index k = Index(blockIdx.x) * THREADS + threadIdx.x;
    if (k >= B) return;
    Index place = pairs[k].place;
    Real sum = 0, value = values[place];
    for (Index stripe = 0; stripe < stripes; ++stripe) sum += entropies[stripe * B + k];
    gradient[place] = value != value ? value : value - value == 0 ? -sum : Real(0);
}

// ---- values of several calls

// The divergence: from the value of each pair half of those of its series with themselves. One thread a value.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_debias(Index count, Index every_a, Index batch_a, Index every_b, Index batch_b,
                const Real* own_a /* [batch_a] */, const Real* own_b /* [batch_b] */, Real* values /* [count] */) {
    Index k = Index(blockIdx.x) * THREADS + threadIdx.x;
    if (k < count) values[k] -= (own_a[k / every_a % batch_a] + own_b[k / every_b % batch_b]) / 2;
}

// A matrix [n, n] of which the part on and above the diagonal is known; the diagonal also goes into `own`.
extern "C" __global__ void __launch_bounds__(THREADS) soft_dtw_mirror(Index n, Real* matrix, Real* own /* [n], or null */) {
    Index k = Index(blockIdx.x) * THREADS + threadIdx.x, i = k / n, j = k % n;
    if (i >= n) return;
    if (i > j) matrix[k] = matrix[j * n + i];
    else if (i == j && own) own[i] = matrix[k];
}

// Sums in Real into the dtype of the series.
extern "C" __global__ void __launch_bounds__(THREADS) soft_dtw_narrow(Index count, const Real* sums, X_T* results) {
    Index k = Index(blockIdx.x) * THREADS + threadIdx.x;
    if (k < count) results[k] = narrow<X_T>(sums[k]);
}

// Weights of the values of all pairs, for a matrix [n, n] of which the part on and above the diagonal is computed:
// D[i, j] counts for D[j, i] too. `weights` may be null, for ones.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_fold(Index n, const Real* weights, Index stride_row, Index stride_column, Real* folded /* [n, n] */) {
    Index k = Index(blockIdx.x) * THREADS + threadIdx.x, i = k / n, j = k % n;
    if (i >= n) return;
    Real here = weights ? weights[i * stride_row + j * stride_column] : Real(1);
    Real there = weights ? weights[j * stride_row + i * stride_column] : Real(1);
    folded[k] = i < j ? here + there : i == j ? here : Real(0);
}

extern "C" __global__ void __launch_bounds__(THREADS) soft_dtw_zero(Index count, Real* sums) {
    Index k = Index(blockIdx.x) * THREADS + threadIdx.x;
    if (k < count) sums[k] = 0;
}
