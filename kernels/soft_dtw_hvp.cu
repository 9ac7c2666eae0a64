// The Hessian of soft-DTW values times a direction: how their gradients change along it.
//
// With R and the softmin weights P of each cell as in soft_dtw.cu, and a dot for the derivative along
// the direction,
//     R'[i,j] = C'[i,j] + sum_k P_k R'_k,   P'_k = P_k (sum_l P_l R'_l - R'_k) / gamma     forward,
//     E[p] = sum P E[cell],   E'[p] = sum P' E[cell] + P E'[cell]                          backward,
// over the predecessors k of a cell, and over the cells that p is a predecessor of. Then
//     product_a[i] = sum_j E'[i,j] dC/da[i] + E[i,j] (dC/da[i])',   product_b likewise.
//
// All in double, whatever the series: second derivatives grow with 1 / gamma.
//
// Launches, one after the other: points of both series, costs (or given ones), tables, sums and finish
// of both series. Tables: a block a pair, which goes through the anti-diagonals. The others: threads, or
// warps, that are counted from 0 on.
// Compiled with: X_T (type of series, costs and directions), REAL (of weights of the values), COST (as in
// soft_dtw_table.cuh, 4 for "cosine").

#include "soft_dtw.cuh"

constexpr int THREADS = 256, OF_TABLES = 512;
enum Metric { SQUARES, ROOT, ABSOLUTES, GIVEN, ANGLE };
#define FOR_EACH(k, count) \
    for (Index k = Index(blockIdx.x) * blockDim.x + threadIdx.x; k < (count); k += Index(gridDim.x) * blockDim.x)

// ---- points and their derivatives along the direction; for ANGLE of length 1: u = x / |x|

// norms: |x| and u.v, for ANGLE
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_hvp_points(Index batch, Index length, Index D,
                    const X_T* x, Index x_stride_batch, Index x_stride_row, Index x_stride_feature,
                    const X_T* v /* or null, for 0 */, Index v_stride_batch, Index v_stride_row, Index v_stride_feature,
                    double* points /* [batch, length, D] */, double* tangents, double* norms /* [batch, length, 2] */) {
    FOR_EACH(row, batch * length) {
        const X_T* point = x + row / length * x_stride_batch + row % length * x_stride_row;
        const X_T* step = v ? v + row / length * v_stride_batch + row % length * v_stride_row : nullptr;
        auto moved = [&](Index f) { return step ? widen<double>(step[f * v_stride_feature]) : 0.0; };
        double largest = 0, squares = 0, along = 0;
        for (Index f = 0; f < D; ++f) largest = max(largest, fabs(widen<double>(point[f * x_stride_feature])));
        for (Index f = 0; f < D; ++f) {
            double ratio = widen<double>(point[f * x_stride_feature]) / largest;
            squares += ratio * ratio;
        }
        double norm = COST == ANGLE ? largest * sqrt(squares) : 1;
        for (Index f = 0; f < D; ++f) along += widen<double>(point[f * x_stride_feature]) / norm * moved(f);
        for (Index f = 0; f < D; ++f) {
            double u = widen<double>(point[f * x_stride_feature]) / norm;
            points[row * D + f] = u;
            tangents[row * D + f] = COST == ANGLE ? (moved(f) - u * along) / norm : moved(f);
        }
        norms[row * 2] = norm;
        norms[row * 2 + 1] = along;
    }
}

// ---- costs

// C and C' [B, N, M]: of cells that no path may cross, infinity and 0.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_hvp_costs(Index B, Index N, Index M, Index D, const Pair* pairs,
                   const double* points_a, const double* tangents_a, const double* points_b, const double* tangents_b,
                   double* C, double* C_dot) {
    FOR_EACH(cell, B * N * M) {
        Pair pair = pairs[cell / (N * M)];
        Index i = cell / M % N, j = cell % M;
        C[cell] = infinity();
        C_dot[cell] = 0;
        if (!pair.inside(int(i), int(j))) continue;
        const double *x = points_a + (pair.a * N + i) * D, *v = tangents_a + (pair.a * N + i) * D;
        const double *y = points_b + (pair.b * M + j) * D, *w = tangents_b + (pair.b * M + j) * D;
        double sum = 0, moved = 0;
        for (Index f = 0; f < D; ++f) {
            double difference = x[f] - y[f], step = v[f] - w[f];
            if (difference != difference && x[f] == x[f] && y[f] == y[f]) difference = infinity();  // of two
            sum += COST == ABSOLUTES ? fabs(difference) : difference * difference;
            moved += COST == ABSOLUTES ? (difference > 0) * step - (difference < 0) * step : difference * step;
        }
        if (COST == ROOT) {
            sum = sqrt(sum);
            moved = sum > 0 ? moved / sum : 0;
        }
        if (COST == ANGLE && D == 0) sum = not_a_number<double>();
        C[cell] = COST == ANGLE ? sum / 2 : sum;
        C_dot[cell] = COST == SQUARES ? 2 * moved : moved;
    }
}

// The same for costs that are given; -infinity counts as NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_hvp_given(Index B, Index N, Index M, const Pair* pairs,
                   const X_T* given, Index stride_batch, Index stride_row, Index stride_column,
                   const X_T* direction, Index v_stride_batch, Index v_stride_row, Index v_stride_column,
                   double* C, double* C_dot) {
    FOR_EACH(cell, B * N * M) {
        Index k = cell / (N * M), i = cell / M % N, j = cell % M;
        bool inside = pairs[k].inside(int(i), int(j));
        double cost = infinity(), step = 0;
        if (inside) cost = widen<double>(given[k * stride_batch + i * stride_row + j * stride_column]);
        if (inside) step = widen<double>(direction[k * v_stride_batch + i * v_stride_row + j * v_stride_column]);
        C[cell] = cost == -infinity() ? not_a_number<double>() : cost;
        C_dot[cell] = cost == infinity() ? 0 : step;
    }
}

// ---- the table

struct alignas(16) Weights {  // of a cell: what comes from the diagonal, above and the left, and the derivatives
    double diagonal, up, left, diagonal_dot, up_dot, left_dot;
};

// R and R' first, then E and E', stand in the same two tables.
extern "C" __global__ void __launch_bounds__(OF_TABLES)
soft_dtw_hvp_tables(Index N, Index M, const Pair* pairs, const double* C, const double* C_dot /* [B, N, M] */,
                    const Real* grad_values /* [B], or null for ones */, Index grad_values_stride,
                    Weights* weights /* [B, N, M] */, double* E, double* E_dot /* [B, N, M] */,
                    Real* value_dot /* [B]: of the value along the direction; or null */) {
    Index k = blockIdx.x;
    Pair pair = pairs[k];
    C += k * N * M;
    C_dot += k * N * M;
    weights += k * N * M;
    E += k * N * M;
    E_dot += k * N * M;
    int n = pair.n, m = pair.m;
    bool hard = pair.gamma == 0;
    for (int d = 0; d < n + m - 1; ++d) {
        for (int i = max(0, d - m + 1) + threadIdx.x; i < min(n, d + 1); i += blockDim.x) {
            int j = d - i;
            Index here = i * M + j;
            bool corner = i > 0 && j > 0;
            double diagonal = corner ? E[here - M - 1] : d == 0 ? 0 : double(infinity());
            double up = i > 0 ? E[here - M] : infinity(), left = j > 0 ? E[here - 1] : infinity();
            double lowest = min(min(diagonal, up), left);
            if (diagonal != diagonal || up != up || left != left) lowest = not_a_number<double>();
            Weights w{};
            double R = C[here] + lowest, R_dot = 0;
            if (lowest - lowest == 0) {  // a number
                double diagonal_dot = corner ? E_dot[here - M - 1] : 0;
                double up_dot = i > 0 ? E_dot[here - M] : 0, left_dot = j > 0 ? E_dot[here - 1] : 0;
                if (hard) {
                    w.diagonal = diagonal == lowest;
                    w.up = !w.diagonal && up == lowest;
                    w.left = !w.diagonal && !w.up;
                } else {
                    w.diagonal = exp((lowest - diagonal) / pair.gamma);
                    w.up = exp((lowest - up) / pair.gamma);
                    w.left = exp((lowest - left) / pair.gamma);
                    double sum = w.diagonal + w.up + w.left;
                    w.diagonal /= sum;
                    w.up /= sum;
                    w.left /= sum;
                    R -= pair.gamma * log(sum);
                }
                double mean = w.diagonal * diagonal_dot + w.up * up_dot + w.left * left_dot;
                if (!hard) {
                    w.diagonal_dot = w.diagonal * ((mean - diagonal_dot) / pair.gamma);
                    w.up_dot = w.up * ((mean - up_dot) / pair.gamma);
                    w.left_dot = w.left * ((mean - left_dot) / pair.gamma);
                }
                R_dot = C_dot[here] + mean;
            }
            weights[here] = w;
            E[here] = R;
            E_dot[here] = R - R == 0 ? R_dot : 0;
        }
        __syncthreads();
    }
    Index end = Index(n - 1) * M + m - 1;
    double value = pair.usable ? E[end] : not_a_number<double>(), dot = E_dot[end];
    bool nan = value != value, number = Real(value) - Real(value) == 0;
    double seed = grad_values ? double(grad_values[k * grad_values_stride]) : 1;
    if (nan) seed = value;
    else if (!number) seed = 0;
    __syncthreads();
    if (threadIdx.x == 0 && value_dot) value_dot[k] = nan ? not_a_number<Real>() : number ? Real(dot) : Real(0);
    for (int d = n + m - 2; d >= 0; --d) {
        for (int i = max(0, d - m + 1) + threadIdx.x; i < min(n, d + 1); i += blockDim.x) {
            int j = d - i;
            Index here = i * M + j;
            double e = here == end ? seed : 0, e_dot = here == end && nan ? seed : 0;
            auto flows = [&](Index from, double weight, double weight_dot) {
                e += weight * E[from];
                e_dot += weight_dot * E[from] + weight * E_dot[from];
            };
            if (seed != 0 && i + 1 < n && j + 1 < m)
                flows(here + M + 1, weights[here + M + 1].diagonal, weights[here + M + 1].diagonal_dot);
            if (seed != 0 && i + 1 < n) flows(here + M, weights[here + M].up, weights[here + M].up_dot);
            if (seed != 0 && j + 1 < m) flows(here + 1, weights[here + 1].left, weights[here + 1].left_dot);
            bool inside = pair.inside(i, j);
            E[here] = inside ? e : 0;
            E_dot[here] = inside ? e_dot : 0;
        }
        __syncthreads();
    }
}

// ---- products

// E' as the product for given costs.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_hvp_alignment(Index B, Index N, Index M, const Pair* pairs, const double* E_dot, X_T* product /* [B, N, M] */) {
    FOR_EACH(cell, B * N * M) {
        Pair pair = pairs[cell / (N * M)];
        bool inside = pair.inside(int(cell / M % N), int(cell % M));
        product[cell] = narrow<X_T>(!pair.usable ? not_a_number<double>() : inside ? E_dot[cell] : 0.0);
    }
}

// For each point of a series and each feature: the sum over the other series of E times the slope of the cost, and
// how it changes along the direction; over all pairs that the series met. One warp a sum.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_hvp_sums(Index B, Index N, Index M, Index D, Index of_a, Index batch, const Pair* pairs,
                  const double* points, const double* tangents, const double* other_points, const double* other_tangents,
                  const double* C, const double* C_dot, const double* E, const double* E_dot,
                  double* sums, double* sums_dot /* [batch, length, D] */) {
    Index length = of_a ? N : M, others = of_a ? M : N, unit = (Index(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    if (unit >= batch * length * D) return;
    Index f = unit % D, row = unit / D % length, series = unit / D / length;
    double x = points[unit], v = tangents[unit], sum = 0, sum_dot = 0;
    for (Index k = batch == B ? series : 0; k < (batch == B ? series + 1 : B); ++k) {
        Pair pair = pairs[k];
        if (!pair.usable) sum = sum_dot = not_a_number<double>();
        for (Index other = threadIdx.x % WARP; other < others; other += WARP) {
            Index i = of_a ? row : other, j = of_a ? other : row, cell = (k * N + i) * M + j;
            if (!pair.inside(int(i), int(j)) || (E[cell] == 0 && E_dot[cell] == 0)) continue;
            Index theirs = ((of_a ? pair.b : pair.a) * others + other) * D + f;
            double difference = x - other_points[theirs], step = v - other_tangents[theirs], slope, slope_dot;
            if (COST == ROOT) {
                double distance = C[cell];
                slope = distance > 0 ? difference / distance : 0;
                slope_dot = distance > 0 ? (step - C_dot[cell] * slope) / distance : 0;
            } else if (COST == ABSOLUTES) {
                slope = (difference > 0) - (difference < 0);
                slope_dot = 0;
            } else {
                slope = COST == SQUARES ? 2 * difference : difference;
                slope_dot = COST == SQUARES ? 2 * step : step;
            }
            sum += E[cell] * slope;
            sum_dot += E_dot[cell] * slope + E[cell] * slope_dot;
        }
    }
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
        sum += __shfl_down_sync(FULL_MASK, sum, other);
        sum_dot += __shfl_down_sync(FULL_MASK, sum_dot, other);
    }
    if (threadIdx.x % WARP) return;
    sums[unit] = sum;
    sums_dot[unit] = sum_dot;
}

// Into the dtype of the series; for ANGLE through u = x / |x|, of which the slope by x is (s - u (u.s)) / |x|.
extern "C" __global__ void __launch_bounds__(THREADS)
soft_dtw_hvp_finish(Index rows, Index D, const double* points, const double* tangents, const double* norms,
                    const double* sums, const double* sums_dot, X_T* product /* [rows, D] */) {
    FOR_EACH(row, rows) {
        const double *u = points + row * D, *u_dot = tangents + row * D, *s = sums + row * D, *s_dot = sums_dot + row * D;
        double norm = norms[row * 2], along = norms[row * 2 + 1], inner = 0, inner_dot = 0;
        bool none = true;
        for (Index f = 0; f < D; ++f) {
            inner += u[f] * s[f];
            inner_dot += u_dot[f] * s[f] + u[f] * s_dot[f];
            none &= s[f] == 0 && s_dot[f] == 0;
        }
        for (Index f = 0; f < D; ++f) {
            double whole = s_dot[f];
            if (COST == ANGLE)
                whole = none ? 0
                             : (s_dot[f] - u_dot[f] * inner - u[f] * inner_dot) / norm -
                                   (s[f] - u[f] * inner) * along / (norm * norm);
            product[row * D + f] = narrow<X_T>(whole);
        }
    }
}
