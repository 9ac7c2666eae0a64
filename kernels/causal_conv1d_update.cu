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
// Work: a thread has PACK neighbouring channels of a row; T is small. A state of few columns is held
// in registers, so that its columns are read and written side by side, not one after the other.
// Launch: grid (B * ceil(D / PACK / THREADS)), block (THREADS).
// Compiled with: X_T, WEIGHT_T, BIAS_T, STATE_T, SEQLENS_T, INDEX_T, REAL, WIDTH, SILU (0 or 1),
// THREADS; PACK, which divides D, channels of x and y that lie in one aligned place; COLUMNS: S where
// it is small, else 0; COLUMNS_AT_ONCE and WEIGHTS_AT_ONCE, as many of a thread's columns and weights
// lie in one aligned place.

#include "common.cuh"
#include "convolution.cuh"

typedef REAL Real;
typedef Pack<X_T, PACK> Elements;

constexpr bool QUICK = sizeof(X_T) == 2;  // see sigmoid

struct Step {  // of a thread's channels
    Row<const X_T> x;  // of the first one; the others lie next to it
    Row<X_T> y;
    STATE_T* state;  // of the first one
    Index state_d, state_s;
    Filter<Real, WIDTH> filters[PACK];
    Index T, S;

    __device__ __forceinline__ STATE_T& column(int c, Index s) const { return state[c * state_d + s * state_s]; }

    // The outputs; `keep(newest, t)` takes the new inputs. `windows` have those before.
    template <class Keep> __device__ __forceinline__ void run(Real (&windows)[PACK][WIDTH], Keep keep) const {
        for (Index t = 0; t < T; ++t) {
            Elements x_t, y_t;
            x_t.read(&x[t]);
#pragma unroll
            for (int c = 0; c < PACK; ++c) {
                push(windows[c], widen<Real>(x_t.at[c]));
                y_t.at[c] = narrow<X_T>(activate<SILU, QUICK>(filters[c].apply(windows[c])));
            }
            y_t.write(&y[t]);
            keep(x_t, t);
        }
    }
};

__device__ __forceinline__ STATE_T as_kept(X_T input) { return narrow<STATE_T>(widen<Real>(input)); }

// The state is a ring, where x[0] belongs at `next`.
__device__ __forceinline__ void step_ring(const Step& step, Index next) {
    Real windows[PACK][WIDTH];
#pragma unroll
    for (int k = 1; k < WIDTH; ++k) {
        Index s = next - (WIDTH - k);
#pragma unroll
        for (int c = 0; c < PACK; ++c) windows[c][k] = widen<Real>(step.column(c, s < 0 ? s + step.S : s));
    }
    step.run(windows, [&](const Elements& newest, Index) {
        if (step.S == 0) return;
#pragma unroll
        for (int c = 0; c < PACK; ++c) step.column(c, next) = as_kept(newest.at[c]);
        next = next + 1 < step.S ? next + 1 : 0;
    });
}

// The state is shifted, in registers.
__device__ __forceinline__ void step_columns(const Step& step) {
    STATE_T columns[PACK][COLUMNS > 0 ? COLUMNS : 1];
    Pack<STATE_T, COLUMNS_AT_ONCE> some;
#pragma unroll
    for (int i = 0; i < PACK * COLUMNS; i += COLUMNS_AT_ONCE) {
        some.read_written(&step.column(i / COLUMNS, i % COLUMNS));
#pragma unroll
        for (int k = 0; k < COLUMNS_AT_ONCE; ++k) columns[(i + k) / COLUMNS][(i + k) % COLUMNS] = some.at[k];
    }
    Real windows[PACK][WIDTH];
#pragma unroll
    for (int c = 0; c < PACK; ++c)
#pragma unroll
        for (int k = 1; k < WIDTH; ++k) windows[c][k] = widen<Real>(columns[c][COLUMNS - WIDTH + k]);
    step.run(windows, [&](const Elements& newest, Index) {
#pragma unroll
        for (int c = 0; c < PACK; ++c) push(columns[c], as_kept(newest.at[c]));
    });
#pragma unroll
    for (int i = 0; i < PACK * COLUMNS; i += COLUMNS_AT_ONCE) {
#pragma unroll
        for (int k = 0; k < COLUMNS_AT_ONCE; ++k) some.at[k] = columns[(i + k) / COLUMNS][(i + k) % COLUMNS];
        some.write(&step.column(i / COLUMNS, i % COLUMNS));
    }
}

// The state is shifted, in memory.
__device__ __forceinline__ void step_shift(const Step& step) {
    Real windows[PACK][WIDTH];
#pragma unroll
    for (int c = 0; c < PACK; ++c)
#pragma unroll
        for (int k = 1; k < WIDTH; ++k) windows[c][k] = widen<Real>(step.column(c, step.S - WIDTH + k));
    step.run(windows, [](const Elements&, Index) {});
    for (int c = 0; c < PACK; ++c)
        for (Index s = 0; s < step.S; ++s)  // upwards: a column is read before it is written
            step.column(c, s) = s + step.T < step.S ? step.column(c, s + step.T)
                                                    : as_kept((&step.x[s + step.T - step.S])[c]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
causal_conv1d_update(const X_T* x /* [B, D, T] */, Index x_b, Index x_d, Index x_t,
                     STATE_T* state /* [P, D, S] */, Index state_b, Index state_d, Index state_s,
                     const WEIGHT_T* weight /* [D, W] */, Index weight_d, Index weight_k,
                     const BIAS_T* bias /* [D] or null */, Index bias_d,
                     const SEQLENS_T* cache_seqlens /* [B] or null */, Index cache_seqlens_b,
                     const INDEX_T* state_indices /* [B] or null */, Index state_indices_b,
                     X_T* y /* [B, D, T] */, Index y_b, Index y_d, Index y_t,
                     Index D, Index T, Index P, Index S) {
    unsigned tiles = (D + THREADS * PACK - 1) / (THREADS * PACK);
    Index b = blockIdx.x / tiles, d = (Index(blockIdx.x % tiles) * THREADS + threadIdx.x) * PACK;
    if (d >= D) return;
    Index row = state_indices ? Index(state_indices[b * state_indices_b]) : b;
    bool ring = cache_seqlens != nullptr;
    SEQLENS_T past = ring ? cache_seqlens[b * cache_seqlens_b] : 0;
    Step step;
    step.x = Tensor<const X_T>{x, x_b, x_d, x_t}.row(b, d);
    step.y = Tensor<X_T>{y, y_b, y_d, y_t}.row(b, d);
    step.T = T, step.S = COLUMNS > 0 ? COLUMNS : S;
    if (row < 0 || row >= P || past < 0) {
        Elements nothing;
        for (int c = 0; c < PACK; ++c) nothing.at[c] = narrow<X_T>(row < 0 ? Real(0) : not_a_number<Real>());
        for (Index t = 0; t < T; ++t) nothing.write(&step.y[t]);
        return;
    }
    step.state = state + row * state_b + d * state_d, step.state_d = state_d, step.state_s = state_s;
    load_filters<WEIGHTS_AT_ONCE>(weight, weight_d, weight_k, bias, bias_d, d, step.filters);
    if (ring) step_ring(step, step.S > 0 ? Index(past) % step.S : 0);
    else if constexpr (COLUMNS > 0) step_columns(step);
    else step_shift(step);
}
