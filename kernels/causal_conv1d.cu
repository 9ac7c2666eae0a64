// Causal depthwise convolution over (B, D, L), forward and backward.
//
//     v[b,d,t] = bias[d] + sum_k weight[d,k] u[b,d,t-W+1+k],   y = act(v),   act = identity or SiLU
//     u[b,d,p] = x[b,d,p] for p >= 0, initial_state[b,d,S+p] for p < 0 (0 without a state)
//     final_state[b,d,s] = u[b,d,L-S+s]
//     g = grad_y act'(v)
//     grad_u[p] = sum_k weight[k] g[p+W-1-k] + grad_final_state[p-(L-S)],  g = 0 outside 0..L-1
//     grad_weight[k] = sum_{b,t} g[t] u[t-W+1+k],   grad_bias = sum_{b,t} g[t]
//
// Work. A thread walks over RUN consecutive positions of one channel with the last W inputs in
// registers. A warp is LANES_D channels by 32 / LANES_D runs: LANES_D = 1 reads along the length
// (layout bdl), LANES_D = 32 across the channels (layout bld). A block of WARPS warps walks over a
// segment of the length. Runs that are INSIDE, away from both ends, skip every check of bounds.
// Sums over b and t are taken in a fixed order: within a thread, a block, then over the blocks by
// causal_conv1d_sum_partials, so that gradients are the same bits every time.
//
// Launch: grid (B * ceil(D / LANES_D) * segments), block (32 * WARPS).
// Compiled with: X_T, WEIGHT_T, BIAS_T, STATE_T, REAL, WIDTH, LANES_D, RUN, WARPS, and UNIT: 1 where
// the positions of x, y and their gradients all lie next to each other.

#include "common.cuh"
#include "convolution.cuh"

typedef REAL Real;

constexpr int LANES_T = WARP / LANES_D;
constexpr int STRIDE = WARPS * LANES_T * RUN;  // positions of a block between two of a thread's runs
constexpr int SUMS = WIDTH + 1;                // gradients of a channel: weights, then the bias

struct Place {  // what a thread works on
    Index batch, channel, first, end;  // positions first..end-1 of the length, in steps of STRIDE
    int warp, lane, lane_d, lane_t;
    Index segment, segments;

    // Segments divide the positions begin..L-1.
    __device__ Place(Index D, Index begin, Index L, Index segment_length, Index segments_)
        : warp(threadIdx.x / WARP), lane(threadIdx.x % WARP), segments(segments_) {
        lane_d = lane % LANES_D;
        lane_t = lane / LANES_D;
        unsigned tiles = (D + LANES_D - 1) / LANES_D, rows = blockIdx.x / unsigned(segments);
        segment = blockIdx.x % unsigned(segments);
        channel = Index(rows % tiles) * LANES_D + lane_d;
        batch = rows / tiles;
        Index start = begin + segment * segment_length;
        end = min(start + segment_length, L);
        first = start + (warp * LANES_T + lane_t) * RUN;
    }
};

typedef Row<const X_T, UNIT> ConstRow;
typedef Row<X_T, UNIT> MutableRow;

// u: a row of x continued into the past by its row of the state
struct Input {
    ConstRow x;
    Row<const STATE_T> state;
    Index length, state_width;  // 0 without a state
    template <bool INSIDE = false> __device__ __forceinline__ Real at(Index position) const {
        if (INSIDE) return widen<Real>(x[position]);
        if (position >= 0) return position < length ? widen<Real>(x[position]) : Real(0);
        return position >= -state_width ? widen<Real>(state[state_width + position]) : Real(0);
    }
};

template <bool INSIDE>
__device__ __forceinline__ void forward_run(const Input& input, const Filter<Real, WIDTH>& filter, bool silu,
                                            Index first, Index end, MutableRow y) {
    Real window[WIDTH];
#pragma unroll
    for (int k = 1; k < WIDTH; ++k) window[k] = input.at<INSIDE>(first - WIDTH + k);
#pragma unroll
    for (int r = 0; r < RUN; ++r) {
        Index t = first + r;
        if (!INSIDE && t >= end) break;
        push(window, input.at<INSIDE>(t));
        y[t] = narrow<X_T>(activate(filter.apply(window), silu));
    }
}

extern "C" __global__ void __launch_bounds__(WARP * WARPS)
causal_conv1d_forward(const X_T* x /* [B, D, L] */, Index x_b, Index x_d, Index x_l,
                      const WEIGHT_T* weight /* [D, W] */, Index weight_d, Index weight_k,
                      const BIAS_T* bias /* [D] or null */, Index bias_d,
                      const STATE_T* initial_state /* [B, D, S] or null */, Index initial_b, Index initial_d, Index initial_s,
                      X_T* y /* [B, D, L] */, Index y_b, Index y_d, Index y_l,
                      STATE_T* final_state /* [B, D, S] or null */, Index final_b, Index final_d, Index final_s,
                      Index D, Index L, Index S, Index silu, Index segment_length, Index segments) {
    Place at(D, 0, L, segment_length, segments);
    if (at.channel >= D) return;
    Tensor<const X_T> inputs{x, x_b, x_d, x_l};
    Tensor<const STATE_T> states{initial_state, initial_b, initial_d, initial_s};
    Input input{inputs.row<UNIT>(at.batch, at.channel), states.row(at.batch, at.channel), L, initial_state ? S : 0};
    MutableRow output = Tensor<X_T>{y, y_b, y_d, y_l}.row<UNIT>(at.batch, at.channel);
    Filter<Real, WIDTH> filter;
    filter.load(weight, weight_d, weight_k, bias, bias_d, at.channel);

    for (Index first = at.first; first < at.end; first += STRIDE) {
        bool inside = first >= WIDTH - 1 && first + RUN <= at.end;
        if (inside) forward_run<true>(input, filter, silu, first, at.end, output);
        else forward_run<false>(input, filter, silu, first, at.end, output);
    }
    if (final_state && at.segment == segments - 1) {
        Row<STATE_T> last = Tensor<STATE_T>{final_state, final_b, final_d, final_s}.row(at.batch, at.channel);
        for (Index s = at.warp * LANES_T + at.lane_t; s < S; s += WARPS * LANES_T)
            last[s] = narrow<STATE_T>(input.at(L - S + s));
    }
}

// Sums over the lanes of a warp that have the same channel; lane_t = 0 has the result.
__device__ __forceinline__ Real sum_over_runs(Real v) {
#pragma unroll
    for (int offset = WARP / 2; offset >= LANES_D; offset /= 2) v += __shfl_down_sync(FULL_MASK, v, offset);
    return v;
}

// Where the gradients of a row come from and go to.
struct Gradients {
    ConstRow y;
    Row<const STATE_T> final_state;
    MutableRow x;
    Row<STATE_T> initial_state;
};

template <bool INSIDE>
__device__ __forceinline__ void backward_run(const Input& input, const Filter<Real, WIDTH>& filter, bool silu,
                                             Index first, Index end, Index L, Index S, const Gradients& grad,
                                             Real (&total)[SUMS]) {
    Real window[WIDTH], g[WIDTH];  // inputs p..p+W-1 and gradients g of the same positions
#pragma unroll
    for (int k = 1; k < WIDTH; ++k) window[k] = input.at<INSIDE>(first - WIDTH + k);
#pragma unroll
    for (int r = 1 - WIDTH; r < RUN; ++r) {
        Index p = first + r, t = p + WIDTH - 1;
        if (!INSIDE && p >= end) break;
        push(window, input.at<INSIDE>(t));
        bool exists = INSIDE || (t >= 0 && t < L);
        Real g_t = exists ? widen<Real>(grad.y[t]) * activation_slope(filter.apply(window), silu) : Real(0);
        push(g, g_t);
        bool own = r + WIDTH - 1 < RUN;  // a position's share of the sums is taken by its own run
        if (own && exists && (INSIDE || t < end)) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) total[k] += g_t * window[k];
            total[WIDTH] += g_t;
        }
        if (r < 0) continue;
        Real sum = 0;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) sum += filter.weight[k] * g[WIDTH - 1 - k];
        if (!INSIDE && grad.final_state.data && p >= L - S) sum += widen<Real>(grad.final_state[p - (L - S)]);
        if (INSIDE || p >= 0) grad.x[p] = narrow<X_T>(sum);
        else grad.initial_state[S + p] = narrow<STATE_T>(sum);
    }
}

extern "C" __global__ void __launch_bounds__(WARP * WARPS)
causal_conv1d_backward(const X_T* grad_y /* [B, D, L] */, Index grad_y_b, Index grad_y_d, Index grad_y_l,
                       const X_T* x /* [B, D, L] */, Index x_b, Index x_d, Index x_l,
                       const WEIGHT_T* weight /* [D, W] */, Index weight_d, Index weight_k,
                       const BIAS_T* bias /* [D] or null */, Index bias_d,
                       const STATE_T* initial_state /* [B, D, S] or null */, Index initial_b, Index initial_d, Index initial_s,
                       const STATE_T* grad_final_state /* [B, D, S] or null */, Index final_b, Index final_d, Index final_s,
                       X_T* grad_x /* [B, D, L] */, Index grad_x_b, Index grad_x_d, Index grad_x_l,
                       STATE_T* grad_initial_state /* [B, D, S] or null */, Index grad_initial_b, Index grad_initial_d, Index grad_initial_s,
                       Real* partials /* [B * segments, D, W + 1] */,
                       Index D, Index L, Index S, Index silu, Index segment_length, Index segments) {
    __shared__ Real sums[WARPS][SUMS][LANES_D];
    Place at(D, grad_initial_state ? -S : 0, L, segment_length, segments);
    bool active = at.channel < D;
    Index channel = active ? at.channel : D - 1;  // idle lanes still take part in the sums, with 0
    Tensor<const X_T> inputs{x, x_b, x_d, x_l};
    Tensor<const STATE_T> states{initial_state, initial_b, initial_d, initial_s};
    Input input{inputs.row<UNIT>(at.batch, channel), states.row(at.batch, channel), L, initial_state ? S : 0};
    Gradients grad{
        Tensor<const X_T>{grad_y, grad_y_b, grad_y_d, grad_y_l}.row<UNIT>(at.batch, channel),
        Tensor<const STATE_T>{grad_final_state, final_b, final_d, final_s}.row(at.batch, channel),
        Tensor<X_T>{grad_x, grad_x_b, grad_x_d, grad_x_l}.row<UNIT>(at.batch, channel),
        Tensor<STATE_T>{grad_initial_state, grad_initial_b, grad_initial_d, grad_initial_s}.row(at.batch, channel)};
    Filter<Real, WIDTH> filter;
    filter.load(weight, weight_d, weight_k, bias, bias_d, channel);
    Real total[SUMS];
#pragma unroll
    for (int k = 0; k < SUMS; ++k) total[k] = 0;

    Index last_inside = min(at.end, L - (grad_final_state ? max(S, Index(WIDTH - 1)) : WIDTH - 1)) - RUN;
    for (Index first = at.first; active && first < at.end; first += STRIDE) {
        bool inside = first >= WIDTH - 1 && first <= last_inside;
        if (inside) backward_run<true>(input, filter, silu, first, at.end, L, S, grad, total);
        else backward_run<false>(input, filter, silu, first, at.end, L, S, grad, total);
    }

#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
        Real sum = sum_over_runs(total[k]);
        if (at.lane_t == 0) sums[at.warp][k][at.lane_d] = sum;
    }
    __syncthreads();
    partials += (at.batch * segments + at.segment) * D * SUMS;
    for (int i = threadIdx.x; i < SUMS * LANES_D; i += WARP * WARPS) {
        int k = i % SUMS, lane_d = i / SUMS;
        Real sum = 0;
        for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp][k][lane_d];
        Index d = at.channel - at.lane_d + lane_d;
        if (d < D) partials[d * SUMS + k] = sum;
    }
}

// Adds the blocks' sums in their order. Launch: one thread an element of [D, W + 1].
extern "C" __global__ void causal_conv1d_sum_partials(const Real* partials /* [count, D, W + 1] */, Index count, Index D,
                                                      WEIGHT_T* grad_weight /* [D, W] */,
                                                      BIAS_T* grad_bias /* [D] or null */) {
    Index i = Index(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= D * SUMS) return;
    double sum = 0;
    for (Index block = 0; block < count; ++block) sum += partials[block * D * SUMS + i];
    Index d = i / SUMS, k = i % SUMS;
    if (k < WIDTH) grad_weight[d * WIDTH + k] = narrow<WEIGHT_T>(sum);
    else if (grad_bias) grad_bias[d] = narrow<BIAS_T>(sum);
}
