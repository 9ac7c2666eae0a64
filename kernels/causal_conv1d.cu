// Causal depthwise convolution over (B, D, L), forward.
//
//     v[b,d,t] = bias[d] + sum_k weight[d,k] u[b,d,t-W+1+k],   y = act(v),   act = identity or SiLU
//     u[b,d,p] = x[b,d,p] for p >= 0, initial_state[b,d,S+p] for p < 0 (0 without a state)
//     final_state[b,d,s] = u[b,d,L-S+s]
// and the same for each sequence of a batch item, if it has several.
//
// Work: see causal_conv1d.cuh. Every thread walks over packs of its own; besides, all of them share
// the final states out.
// Launch: ALONG: grid (ceil(B D / GROUPS / WARPS * segments)); ACROSS: grid (B * ceil(D / (LANES PACK)) * walks);
// block (32 * WARPS).
// Macros: see causal_conv1d.cuh.

#include "causal_conv1d.cuh"

constexpr int AHEAD = 4;  // positions whose packs are read at once, ACROSS
// Blocks of threads for which a multiprocessor's registers have to suffice.
constexpr int RESIDENT = WIDTH > 4 || sizeof(Real) == 8 ? 1 : ACROSS ? (SEQUENCES == WHOLE ? 4 : 3) : 8;

__device__ void forward_along(const Call& call, const Tensor<X_T>& y, Index segment_length, Index segments) {
    Strip strip(call, y, segment_length, segments);
    if (!strip.exists) return;
    Inputs inputs = call.inputs(strip.batch, strip.batch, strip.channel);
    Row<X_T> results = y.row(strip.batch, strip.channel);
    Weights filter = call.filter(strip.channel);
    for (Index first = strip.first; first < strip.end; first += LANES * PACK) {
        Real u[SLOTS * PACK], v[PACK];
        read<SLOTS>(inputs, first - OWN, u);
        Indices<BEFORE + PACK> indices;
        if (SEQUENCES == INDEXED) indices.read(call, strip.batch, first - BEFORE);
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            Real seen[WIDTH];
            if (SEQUENCES == INDEXED) keep_seen(indices.at + k, u + OWN - BEFORE + k, seen);
            v[k] = activate<QUICK>(filter.apply(SEQUENCES == INDEXED ? seen : u + OWN - BEFORE + k), call.silu);
            if (SEQUENCES == INDEXED && indices.at[BEFORE + k] < 0) v[k] = 0;
        }
        write(results, first, call.L, v);
    }
}

__device__ void forward_across(const Call& call, const Tensor<X_T>& y, Index run, Index walks) {
    Walk walk(call, run, walks);
    if (!walk.exists) return;
    Weights filters[PACK];
#pragma unroll
    for (int c = 0; c < PACK; ++c) filters[c] = call.filter(walk.channel + c);
    Current current(call, walk.batch, walk.first);
    Real windows[PACK][WIDTH];
    read_before(call, walk, current, walk.first, windows);
    Indices<WIDTH> indices;
    if (SEQUENCES == INDEXED) indices.read(call, walk.batch, walk.first - WIDTH);
    for (Index first = walk.first; first < walk.end; first += AHEAD) {
        Elements packs[AHEAD];
#pragma unroll
        for (int r = 0; r < AHEAD; ++r)
            if (first + r < walk.end) read_channels(call.x, walk.batch, walk.channel, first + r, packs[r]);
#pragma unroll
        for (int r = 0; r < AHEAD; ++r) {
            Index t = first + r;
            if (t >= walk.end) break;
            if (SEQUENCES == PACKED && t >= current.end) {
                current = Current(call, walk.batch, t);
                read_before(call, walk, current, t, windows);
            }
            if (SEQUENCES == INDEXED) push(indices.at, call.index_of(walk.batch, t));
            Elements results;
#pragma unroll
            for (int c = 0; c < PACK; ++c) {
                push(windows[c], widen<Real>(packs[r].at[c]));
                Real seen[WIDTH];
                if (SEQUENCES == INDEXED) keep_seen(indices.at, windows[c], seen);
                Real v = activate<QUICK>(filters[c].apply(SEQUENCES == INDEXED ? seen : windows[c]), call.silu);
                if (SEQUENCES == INDEXED && indices.at[BEFORE] < 0) v = 0;
                if (SEQUENCES == PACKED && !current.exists) v = not_a_number<Real>();
                results.at[c] = narrow<X_T>(v);
            }
            write_channels(y, walk.batch, walk.channel, t, results);
        }
    }
}

// The last inputs of each sequence, where they are not too few with those of the initial state.
__device__ void keep_last(const Call& call, const Tensor<STATE_T>& final_state) {
    Index threads = Index(gridDim.x) * THREADS;
    for (Index k = Index(blockIdx.x) * THREADS + threadIdx.x; k < call.count * call.D; k += threads) {
        Index sequence = k / call.D, channel = k % call.D, batch = SEQUENCES == PACKED ? 0 : sequence;
        bool valid = call.is_valid(sequence);
        Inputs inputs = call.inputs(batch, sequence, channel);
        Row<STATE_T> last = final_state.row(sequence, channel);
        for (Index s = 0; s < call.S; ++s) {
            Index position = inputs.end - call.S + s;
            if (SEQUENCES == INDEXED) position = call.sources[batch * call.S + s];
            bool nothing = SEQUENCES == INDEXED && position == NOTHING_KEPT;
            last[s] = narrow<STATE_T>(!valid ? not_a_number<Real>() : nothing ? Real(0) : inputs.at(position));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
causal_conv1d_forward(const X_T* x /* [B, D, L] */, Index x_b, Index x_d, Index x_l,
                      const WEIGHT_T* weight /* [D, W] */, Index weight_d, Index weight_k,
                      const BIAS_T* bias /* [D] or null */, Index bias_d,
                      const STATE_T* initial_state /* [count, D, S] or null */, Index initial_b, Index initial_d,
                      Index initial_s, const INDEX_T* index /* [B, L] or [count + 1] or null */, Index index_b,
                      Index index_l, const int* sources /* [B, S] or null */, Index B, Index D, Index L, Index S,
                      Index count, Index silu, X_T* y /* [B, D, L] */, Index y_b, Index y_d, Index y_l,
                      STATE_T* final_state /* [count, D, S] or null */, Index final_b, Index final_d, Index final_s,
                      Index length /* of a segment, or a run */, Index parts /* segments, or walks */) {
    Call call{{x, x_b, x_d, x_l}, weight, weight_d, weight_k, bias, bias_d,
              {initial_state, initial_b, initial_d, initial_s}, index, index_b, index_l, sources, B, D, L, S, count,
              silu != 0};
    Tensor<X_T> results{y, y_b, y_d, y_l};
    if (ACROSS) forward_across(call, results, length, parts);
    else forward_along(call, results, length, parts);
    if (final_state) keep_last(call, {final_state, final_b, final_d, final_s});
}
