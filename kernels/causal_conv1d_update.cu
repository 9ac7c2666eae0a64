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
// Work: one thread a channel of a row; T is small. A state of few columns is held in registers, so
// that its columns are read and written side by side, not one after the other.
// Launch: grid (B * ceil(D / THREADS)), block (THREADS).
// Compiled with: X_T, WEIGHT_T, BIAS_T, STATE_T, SEQLENS_T, INDEX_T, REAL, WIDTH, THREADS; COLUMNS:
// S where it is small, else 0.

#include "common.cuh"
#include "convolution.cuh"

typedef REAL Real;

constexpr bool QUICK = sizeof(X_T) == 2;  // see sigmoid

struct Step {  // of a channel of a row
    Row<const X_T> x;
    Row<X_T> y;
    Row<STATE_T> state;
    Filter<Real, WIDTH> filter;
    Index T, S;
    bool silu;
    // The outputs; `keep(x, t)` takes each new input. `window` has the inputs before.
    template <class Keep> __device__ __forceinline__ void run(Real (&window)[WIDTH], Keep keep) const {
        for (Index t = 0; t < T; ++t) {
            Real newest = widen<Real>(x[t]);
            push(window, newest);
            y[t] = narrow<X_T>(activate<QUICK>(filter.apply(window), silu));
            keep(narrow<STATE_T>(newest), t);
        }
    }
};

// The state is a ring, where x[0] belongs at `next`.
__device__ __forceinline__ void step_ring(const Step& step, Index next) {
    Real window[WIDTH];
#pragma unroll
    for (int k = 1; k < WIDTH; ++k) {
        Index column = next - (WIDTH - k);
        window[k] = widen<Real>(step.state[column < 0 ? column + step.S : column]);
    }
    step.run(window, [&](STATE_T newest, Index) {
        if (step.S == 0) return;
        step.state[next] = newest;
        next = next + 1 < step.S ? next + 1 : 0;
    });
}

// The state is shifted: in registers, if it is known how many columns it has.
__device__ __forceinline__ void step_shift(const Step& step) {
    Real window[WIDTH];
    constexpr int some = COLUMNS > 0 ? COLUMNS : 1;
    STATE_T columns[some];
#pragma unroll
    for (int s = 0; s < COLUMNS; ++s) columns[s] = step.state[s];
#pragma unroll
    for (int k = 1; k < WIDTH; ++k)
        window[k] = widen<Real>(COLUMNS > 0 ? columns[COLUMNS - WIDTH + k] : step.state[step.S - WIDTH + k]);
    step.run(window, [&](STATE_T newest, Index) {
        if (COLUMNS > 0) push(columns, newest);
    });
#pragma unroll
    for (int s = 0; s < COLUMNS; ++s) step.state[s] = columns[s];
    if (COLUMNS > 0) return;
    for (Index s = 0; s < step.S; ++s)  // upwards: a column is read before it is written
        step.state[s] = s + step.T < step.S ? step.state[s + step.T]
                                            : narrow<STATE_T>(widen<Real>(step.x[s + step.T - step.S]));
}

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
    Index row = state_indices ? Index(state_indices[b * state_indices_b]) : b;
    bool ring = cache_seqlens != nullptr;
    SEQLENS_T past = ring ? cache_seqlens[b * cache_seqlens_b] : 0;
    Step step;
    step.x = Tensor<const X_T>{x, x_b, x_d, x_t}.row(b, d);
    step.y = Tensor<X_T>{y, y_b, y_d, y_t}.row(b, d);
    step.T = T, step.S = COLUMNS > 0 ? COLUMNS : S, step.silu = silu != 0;
    if (row < 0 || row >= P || past < 0) {
        Real nothing = row < 0 ? Real(0) : not_a_number<Real>();
        for (Index t = 0; t < T; ++t) step.y[t] = narrow<X_T>(nothing);
        return;
    }
    step.state = Tensor<STATE_T>{state, state_b, state_d, state_s}.row(row, d);
    step.filter.load(weight, weight_d, weight_k, bias, bias_d, d);
    if (!ring) step_shift(step);
    else step_ring(step, step.S > 0 ? Index(past) % step.S : 0);
}
