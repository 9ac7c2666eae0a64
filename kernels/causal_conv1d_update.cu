// The streaming step of the causal depthwise convolution: T new inputs against a state of the past.
//
//     y[b,d,t] = act(bias[d] + sum_k weight[d,k] u[t-W+1+k]),   u = x for t >= 0, the state before
//
// The state of row b is state[b], or state[state_indices[b]] of a pool. Without cache_seqlens it
// holds the last S inputs, newest last, and is shifted. With cache_seqlens it is a ring: input
// number n of the sequence is at n % S, and x[t] is number cache_seqlens[b] + t.
// A negative index skips the row: y = 0, no state touched. An index beyond the pool or a negative
// cache_seqlens gives NaN and touches no state.
//
// Work: one thread a channel of a row; T is small.
// Launch: grid (B * ceil(D / THREADS)), block (THREADS).
// Compiled with: X_T, WEIGHT_T, BIAS_T, STATE_T, SEQLENS_T, INDEX_T, REAL, WIDTH, THREADS.

#include "common.cuh"
#include "convolution.cuh"

typedef REAL Real;

extern "C" __global__ void __launch_bounds__(THREADS)
causal_conv1d_update(const X_T* x /* [B, D, T] */, Index x_b, Index x_d, Index x_t,
                     STATE_T* state /* [P, D, S] */, Index state_b, Index state_d, Index state_s,
                     const WEIGHT_T* weight /* [D, W] */, Index weight_d, Index weight_k,
                     const BIAS_T* bias /* [D] or null */, Index bias_d,
                     const SEQLENS_T* cache_seqlens /* [B] or null */, Index cache_seqlens_b,
                     const INDEX_T* state_indices /* [B] or null */, Index state_indices_b,
                     X_T* y /* [B, D, T] */, Index y_b, Index y_d, Index y_t,
                     Index D, Index T, Index P, Index S, Index silu) {
    unsigned tiles = (D + THREADS - 1) / THREADS;
    Index b = blockIdx.x / tiles, d = Index(blockIdx.x % tiles) * THREADS + threadIdx.x;
    if (d >= D) return;
    Row<const X_T> input = Tensor<const X_T>{x, x_b, x_d, x_t}.row(b, d);
    Row<X_T> output = Tensor<X_T>{y, y_b, y_d, y_t}.row(b, d);
    Index row = state_indices ? Index(state_indices[b * state_indices_b]) : b;
    bool ring = cache_seqlens != nullptr;
    SEQLENS_T past = ring ? cache_seqlens[b * cache_seqlens_b] : 0;

    if (row < 0 || row >= P || past < 0) {
        Real nothing = row < 0 ? Real(0) : not_a_number<Real>();
        for (Index t = 0; t < T; ++t) output[t] = narrow<X_T>(nothing);
        return;
    }
    Row<STATE_T> past_inputs = Tensor<STATE_T>{state, state_b, state_d, state_s}.row(row, d);
    Filter<Real, WIDTH> filter;
    filter.load(weight, weight_d, weight_k, bias, bias_d, d);
    Real window[WIDTH];
    int next = ring && S > 0 ? int(past % static_cast<SEQLENS_T>(S)) : int(S);  // where x[0] belongs
#pragma unroll
    for (int k = 1; k < WIDTH; ++k) {
        int s = next - (WIDTH - k);
        window[k] = widen<Real>(past_inputs[s < 0 ? s + S : s]);
    }
    for (Index t = 0; t < T; ++t) {
        X_T newest = input[t];
        push(window, widen<Real>(newest));
        output[t] = narrow<X_T>(activate<sizeof(X_T) == 2>(filter.apply(window), silu));
        if (!ring || S == 0) continue;
        past_inputs[next] = narrow<STATE_T>(widen<Real>(newest));
        next = next + 1 < S ? next + 1 : 0;
    }
    if (ring) return;
    for (Index s = 0; s < S; ++s)  // upwards: a place is read before it is written
        past_inputs[s] = s + T < S ? past_inputs[s + T]
                                       : narrow<STATE_T>(widen<Real>(input[s + T - S]));
}
