// Causal depthwise convolution over (B, D, L), forward.
//
//     v[b,d,t] = bias[d] + sum_k weight[d,k] u[b,d,t-W+1+k],   y = act(v),   act = identity or SiLU
//     u[b,d,p] = x[b,d,p] for p >= 0, initial_state[b,d,S+p] for p < 0 (0 without a state)
//     final_state[b,d,s] = u[b,d,L-S+s]
// and the same for each sequence of a batch item, if it has several.
//
// Work: see causal_conv1d.cuh. Every thread walks over packs of its own; besides, all of them share
// the final states out.
// Launch: grid ALONG (ceil(ceil(B D LANES / 32) segments / WARPS)), ACROSS (B * walks * ceil(D / (LANES PACK)));
// block (32 * WARPS).

#include "causal_conv1d.cuh"

// y of a pack. hide: some of its positions do not see all the inputs before them.
template <bool hide>
__device__ __forceinline__ void convolve(const Weights& filter, const Real (&u)[BEFORE + PACK], const Id* indices,
                                         Real (&y)[PACK]) {
#pragma unroll
    for (int k = 0; k < PACK; ++k) {
        Real seen[WIDTH];
        if (hide) keep_seen(indices + k, u + k, seen);
        y[k] = activate<SILU, QUICK>(filter.apply(hide ? seen : u + k));
        if (hide && indices[BEFORE + k] < 0) y[k] = 0;
    }
}

struct Along {
    const Call& call;
    Strip strip;
    Inputs inputs;
    int lane;
    Reader<BEFORE> reader;
    Line<X_T> results;
    Weights filter[1];

    __device__ __forceinline__ Along(const Call& call, const Tensor<X_T>& y, int length, int segments)
        : call(call), strip(call, y, length, segments, 0),
          inputs(call.inputs(strip.batch, strip.batch, strip.channel)), lane(threadIdx.x % LANES),
          reader{{call.x, strip, lane}}, results(y, strip, lane) {}

    __device__ __forceinline__ int first(int tile) const { return tile * TILE + lane * PACK; }  // of the lane's pack

    __device__ __forceinline__ void fetch(int tile, Place* places) const {
        if (strip.inside(tile)) reader.template fetch<true>(strip, tile, first(tile), places);
        else if (tile < strip.tiles) reader.template fetch<false>(strip, tile, first(tile), places);
        end_of_copies();
    }

    // y of a tile. inside: see Strip.
    template <bool inside> __device__ __forceinline__ void step(int tile, const Place* places) const {
        int first = this->first(tile);
        if (!inside && first >= strip.size) return;
        Real u[BEFORE + PACK], v[PACK];
        reader.widen_into(places, u);
        if (!inside) read_state(strip, inputs, first, u);
        Indices<BEFORE + PACK> indices;
        if (SEQUENCES == INDEXED) indices.template read<inside>(call, strip.batch, strip.base + first - BEFORE);
        if (SEQUENCES == INDEXED && !indices.agree()) convolve<true>(filter[0], u, indices.at, v);
        else convolve<false>(filter[0], u, indices.at, v);
        write<inside>(results, tile, strip.span(first), v);
    }
};

__device__ void forward_along(const Call& call, const Tensor<X_T>& y, int length, int segments) {
    __shared__ Room<Reader<BEFORE>::packs> room;
    Along along(call, y, length, segments);
    for (int tile = 0; tile < STAGES; ++tile) along.fetch(tile, room.of(tile));
    call.load(along.strip.channel, along.filter);
    for (int tile = 0; tile < along.strip.tiles; ++tile) {
        wait_for_copies<STAGES - 1>();
        if (along.strip.inside(tile)) along.step<true>(tile, room.of(tile));
        else along.step<false>(tile, room.of(tile));
        along.fetch(tile + STAGES, room.of(tile));
    }
}

struct Across {
    const Call& call;
    Walk walk;
    Column<const X_T> ahead;
    Column<X_T> results;
    Weights filters[PACK];
    Current current;
    Real windows[PACK][WIDTH];
    Indices<BEFORE + AHEAD> indices;  // INDEXED: of the positions of a step, and of those before

    __device__ __forceinline__ Across(const Call& call, const Tensor<X_T>& y, const Walk& walk)
        : call(call), walk(walk), ahead(call.x, walk, walk.first), results(y, walk, walk.first),
          current(call, walk.batch, walk.first) {}

    __device__ __forceinline__ void load() {
        call.load(walk.channel, filters);
        read_before(call, walk, current, walk.first, windows);
    }

    // The inputs of a step.
    __device__ __forceinline__ void fetch(int first, Place* places) {
        bool all = first + AHEAD <= walk.size;
#pragma unroll
        for (int r = 0; r < AHEAD; ++r) ahead.fetch(places + r * THREADS, all || first + r < walk.size);
        end_of_copies();
    }

    // Whether the positions of a step are the run's own, and of one sequence with all that they see.
    __device__ __forceinline__ bool inside(int first) {
        bool own = first + AHEAD <= walk.size;
        if (SEQUENCES == INDEXED) {
            Index position = walk.first + first - BEFORE;
            own = own && position >= 0;
            if (own) indices.template read<true>(call, walk.batch, position);
            else indices.template read<false>(call, walk.batch, position);
            own = own && indices.agree();
        }
        return own && (SEQUENCES != PACKED || (current.exists && walk.first + first + AHEAD <= current.end));
    }

    template <bool inside> __device__ __forceinline__ void step(int first, const Place* places) {
#pragma unroll
        for (int r = 0; r < AHEAD; ++r, results.next()) {
            int t = first + r;
            Elements newest, y_t;
            memcpy(&newest, places + r * THREADS, sizeof newest);
            if (SEQUENCES == PACKED && !inside && t < walk.size && walk.first + t >= current.end) {
                current = Current(call, walk.batch, walk.first + t);
                read_before(call, walk, current, walk.first + t, windows);
            }
            constexpr bool hide = SEQUENCES == INDEXED && !inside;
#pragma unroll
            for (int c = 0; c < PACK; ++c) {
                push(windows[c], newest.template value<Real>(c));
                Real seen[WIDTH];
                if (hide) keep_seen(indices.at + r, windows[c], seen);
                Real v = activate<SILU, QUICK>(filters[c].apply(hide ? seen : windows[c]));
                if (hide && indices.at[BEFORE + r] < 0) v = 0;
                if (SEQUENCES == PACKED && !inside && !current.exists) v = not_a_number<Real>();
                y_t.at[c] = narrow<X_T>(v);
            }
            if (inside || t < walk.size) y_t.write(results.at);
        }
    }
};

__device__ void forward_across(const Call& call, const Tensor<X_T>& y, int run, int walks) {
    __shared__ Room<AHEAD> room;
    Walk walk(call, run, walks);
    if (!walk.exists) return;
    Across across(call, y, walk);
    for (int step = 0; step < STAGES; ++step) across.fetch(step * AHEAD, room.of(step));
    across.load();
    for (int step = 0, first = 0; first < walk.size; ++step, first += AHEAD) {
        wait_for_copies<STAGES - 1>();
        if (across.inside(first)) across.step<true>(first, room.of(step));
        else across.step<false>(first, room.of(step));
        across.fetch(first + STAGES * AHEAD, room.of(step));
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
                      Index index_l, const Index* sources /* [B, S] or null */, Index B, Index D, Index L, Index S,
                      Index count, X_T* y /* [B, D, L] */, Index y_b, Index y_d, Index y_l,
                      STATE_T* final_state /* [count, D, S] or null */, Index final_b, Index final_d, Index final_s,
                      Index length /* of a segment, or a run */, Index parts /* segments, or walks */) {
    Call call{{x, x_b, x_d, x_l}, weight, weight_d, weight_k, bias, bias_d,
              {initial_state, initial_b, initial_d, initial_s}, index, index_b, index_l, sources, B, D, L, S, count};
    Tensor<X_T> results{y, y_b, y_d, y_l};
    if (ACROSS) forward_across(call, results, int(length), int(parts));
    else forward_along(call, results, int(length), int(parts));
    if (FINAL_STATE) keep_last(call, {final_state, final_b, final_d, final_s});
}
