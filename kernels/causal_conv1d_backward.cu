// Causal depthwise convolution over (B, D, L), backward.
//
//     v, u as in causal_conv1d.cu,   g[t] = grad_y[t] act'(v[t]), 0 outside of 0..L-1
//     grad_u[p] = sum_k weight[k] g[p+W-1-k] + grad_final_state[p-(L-S)]
//     grad_x[p] = grad_u[p] for p >= 0,   grad_initial_state[S+p] = grad_u[p] for p < 0
//     grad_weight[k] = sum_{b,t} g[t] u[t-W+1+k],   grad_bias = sum_{b,t} g[t]
// and the same for each sequence of a batch item, if it has several.
//
// Work: see causal_conv1d.cuh. ALONG, a group walks from right to left, since grad_x of a tile takes g
// of the tile on its right. Both ways, g is also computed of W - 1 positions beyond a segment or a
// run. The states' gradients are shared out among all threads.
// Sums over b and t are taken in a fixed order: within a lane, a group, a block, then over all of
// these by causal_conv1d_partials.cu, so that gradients are the same bits every time.
//
// Launch and macros: as causal_conv1d.cu.

#include "causal_conv1d.cuh"

constexpr int SUMS = WIDTH + 1;  // gradients of a channel: weights, then the bias

struct Gradients {
    Tensor<const X_T> y;
    Tensor<const STATE_T> final_state;  // [count, D, S] or null
    Tensor<X_T> x;
    Tensor<STATE_T> initial_state;      // [count, D, S] or null
    Real* partials;                     // [parts, D, W + 1]
};

// What the final states of a batch item hand back to inputs; a sequence ends at `end`.
struct FromState {
    Tensor<const STATE_T> gradient;
    const Index* sources;  // INDEXED: of the batch item
    Index S, least;        // INDEXED: the first position of which the state has something
    __device__ FromState(const Call& call, const Gradients& grad, Index batch)
        : gradient(grad.final_state), sources(nullptr), S(call.S), least(NOTHING_KEPT) {
        if (SEQUENCES != INDEXED || !FINAL_STATE) return;
        sources = call.sources + batch * S;
        for (Index s = 0; s < S; ++s) least = min(least, sources[s]);
    }
    __device__ __forceinline__ bool reaches(Index position, Index end) const {
        return FINAL_STATE && position >= (SEQUENCES == INDEXED ? least : end - S);
    }
    __device__ __forceinline__ Real at(Index position, Index end, Index sequence, Index channel) const {
        if (!reaches(position, end)) return 0;
        Row<const STATE_T> row = gradient.row(sequence, channel);
        if (SEQUENCES != INDEXED) return position < end ? widen<Real>(row[position - (end - S)]) : Real(0);
        for (Index s = 0; s < S; ++s)
            if (sources[s] == position) return widen<Real>(row[s]);
        return 0;
    }
};

// g of a position that exists.
__device__ __forceinline__ Real through_activation(const Weights& filter, const Real* window, Real grad_y) {
    return grad_y * activation_slope<SILU, QUICK>(filter.apply(window));
}

// Adds what a position has, if it counts: what does not is no term of a sum, be it infinite.
__device__ __forceinline__ void add(Real (&totals)[SUMS], Real g, const Real* window, bool counts) {
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
        Real more = k < WIDTH ? totals[k] + g * window[k] : totals[k] + g;
        totals[k] = counts ? more : totals[k];
    }
}

// ---- ALONG

// g of a pack. plain: all of its positions exist and see their inputs.
template <bool plain>
__device__ __forceinline__ void differentiate(const Span& exist, const Weights& filter, const Real (&u)[BEFORE + PACK],
                                              const Real (&grad_y)[PACK], const Id* indices, Real (&g)[PACK + BEFORE],
                                              Real (&totals)[SUMS]) {
    constexpr bool hide = SEQUENCES == INDEXED && !plain;
#pragma unroll
    for (int k = 0; k < PACK; ++k) {
        Real seen[WIDTH];
        if (hide) keep_seen(indices + k, u + k, seen);
        const Real* window = hide ? seen : u + k;
        g[k] = through_activation(filter, window, grad_y[k]);
        bool exists = plain || (exist.has(k) && (!hide || indices[BEFORE + k] >= 0));
        add(totals, g[k], window, exists);
        if (!exists) g[k] = 0;
    }
}

// grad_x of a pack, from g of its positions and of those after them. plain: they exist and see it.
template <bool plain>
__device__ __forceinline__ void gather(const Span& exist, const Weights& filter, const Real (&g)[PACK + BEFORE],
                                       const Id* indices, Real (&sums)[PACK]) {
    constexpr bool hide = SEQUENCES == INDEXED && !plain;
#pragma unroll
    for (int k = 0; k < PACK; ++k) {
        Real sum = 0;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            int t = k + BEFORE - j;
            bool sees = plain || (t < exist.to && (!hide || indices[t] == indices[k]));
            Real more = sum + filter.weight[j] * g[t];
            sum = sees ? more : sum;
        }
        sums[k] = hide && indices[k] < 0 ? Real(0) : sum;
    }
}

struct Along {
    const Call& call;
    Strip strip;
    Inputs inputs;
    int lane;
    Reader<BEFORE> reader;
    Reader<0> outer;
    Line<X_T> results;
    FromState from_state;
    Weights filter[1];
    Real right[PACK], totals[SUMS];  // right: the lane's g in the tile on the right

    __device__ __forceinline__ Along(const Call& call, const Gradients& grad, int length, int segments)
        : call(call), strip(call, grad.x, length, segments, BEFORE),
          inputs(call.inputs(strip.batch, strip.batch, strip.channel)), lane(threadIdx.x % LANES),
          reader{{call.x, strip, lane}}, outer{{grad.y, strip, lane}}, results(grad.x, strip, lane),
          from_state(call, grad, strip.batch), right{}, totals{} {}

    __device__ __forceinline__ int first(int tile) const { return tile * TILE + lane * PACK; }  // of the lane's pack

    __device__ __forceinline__ void fetch(int tile, Place* places) const {
        if (strip.inside(tile)) fetch_both<true>(tile, places);
        else if (tile >= 0) fetch_both<false>(tile, places);
        end_of_copies();
    }
    template <bool inside> __device__ __forceinline__ void fetch_both(int tile, Place* places) const {
        reader.template fetch<inside>(strip, tile, first(tile), places);
        outer.template fetch<inside>(strip, tile, first(tile), places + reader.packs * THREADS);
    }

    // g and grad_x of a tile, after those of the tile on the right. inside: see Strip.
    template <bool inside> __device__ __forceinline__ void step(int tile, const Place* places) {
        int first = this->first(tile);
        Span exist = strip.span(first);
        Real u[BEFORE + PACK], grad_y[PACK], g[PACK + BEFORE] = {};
        reader.widen_into(places, u);
        outer.widen_into(places + reader.packs * THREADS, grad_y);
        if (!inside) read_state(strip, inputs, first, u);
        Indices<BEFORE + PACK + BEFORE> indices;
        const Id* own_indices = indices.at + BEFORE;
        if (SEQUENCES == INDEXED) indices.template read<inside>(call, strip.batch, strip.base + first - BEFORE);
        bool plain = inside && (SEQUENCES != INDEXED || indices.agree());
        if (plain) differentiate<true>(exist, filter[0], u, grad_y, indices.at, g, totals);
        else if (exist.has_any(PACK)) differentiate<false>(exist, filter[0], u, grad_y, indices.at, g, totals);

        from_the_right(g);
#pragma unroll
        for (int k = 0; k < PACK; ++k) right[k] = g[k];
        if (!inside && first >= strip.size) return;
        Real sums[PACK];
        if (plain) gather<true>(exist, filter[0], g, own_indices, sums);
        else gather<false>(exist, filter[0], g, own_indices, sums);
        if (from_state.reaches(strip.base + first + PACK - 1, call.L)) {
#pragma unroll
            for (int k = 0; k < PACK; ++k)
                sums[k] += from_state.at(strip.base + first + k, call.L, strip.batch, strip.channel);
        }
        write<inside>(results, tile, exist, sums);
    }

    // Adds to the g of a pack those of the positions after it, from the lanes there: at the end of a
    // tile from those at the beginning of the tile on the right.
    __device__ __forceinline__ void from_the_right(Real (&g)[PACK + BEFORE]) const {
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) {
            int lanes = 1 + k / PACK;  // so many lanes on
            Real mine = lane >= lanes ? g[k % PACK] : right[k % PACK];
            g[PACK + k] = __shfl_sync(FULL_MASK, mine, lane + lanes, LANES);  // modulo LANES
        }
    }
};

__device__ void backward_along(const Call& call, const Gradients& grad, int length, int segments) {
    __shared__ Room<Reader<BEFORE>::packs + Reader<0>::packs> room;
    Along along(call, grad, length, segments);
    const Strip& strip = along.strip;
    // With the first tile of the next segment, of which g is wanted alone.
    int last = strip.base + length < call.L ? strip.tiles : strip.tiles - 1;
    for (int tile = last; tile > last - STAGES; --tile) along.fetch(tile, room.of(tile));
    call.load(strip.channel, along.filter);
    for (int tile = last; tile >= 0; --tile) {
        wait_for_copies<STAGES - 1>();
        if (strip.inside(tile)) {
            along.step<true>(tile, room.of(tile));
        } else {
            along.step<false>(tile, room.of(tile));
            if (tile == strip.tiles)
#pragma unroll
                for (int k = 0; k < SUMS; ++k) along.totals[k] = 0;
        }
        along.fetch(tile - STAGES, room.of(tile));
    }
    Real* partials = grad.partials + ((strip.batch * segments + strip.segment) * call.D + strip.channel) * SUMS;
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
            along.totals[k] += __shfl_down_sync(FULL_MASK, along.totals[k], other, LANES);
        if (strip.exists && along.lane == 0) partials[k] = along.totals[k];
    }
}

// ---- ACROSS

// A walk, which goes W - 1 positions beyond its run, for g of these.
struct Across {
    const Call& call;
    const Gradients& grad;
    Walk walk;
    int exist;  // positions of the walk and after it, from its first one on
    FromState from_state;
    Current current;
    Column<const X_T> ahead, outer_ahead;
    Column<X_T> results;
    Weights filters[PACK];
    Real windows[PACK][WIDTH], g[PACK][WIDTH];
    Real (&totals)[PACK][SUMS];
    Indices<BEFORE + AHEAD> indices;  // of the positions of a step and of those before; PACKED: their sequences

    __device__ __forceinline__ Across(const Call& call, const Gradients& grad, const Walk& walk,
                                      Real (&totals)[PACK][SUMS])
        : call(call), grad(grad), walk(walk), exist(int(min(call.L - walk.first, Index(FAR)))),
          from_state(call, grad, walk.batch), current(call, walk.batch, walk.first),
          ahead(call.x, walk, walk.first), outer_ahead(grad.y, walk, walk.first),
          results(grad.x, walk, walk.first - BEFORE), g{}, totals(totals), indices{} {}

    __device__ __forceinline__ void load() {
        call.load(walk.channel, filters);
        read_before(call, walk, current, walk.first, windows);
    }

    // The inputs of a step, and the gradients of its results.
    __device__ __forceinline__ void fetch(int first, Place* places) {
        int end = min(walk.size + BEFORE, exist);
        bool all = first + AHEAD <= end;
#pragma unroll
        for (int r = 0; r < AHEAD; ++r) {
            ahead.fetch(places + 2 * r * THREADS, all || first + r < end);
            outer_ahead.fetch(places + (2 * r + 1) * THREADS, all || first + r < end);
        }
        end_of_copies();
    }

    // Whether the positions of a step are the run's own, with all that they see, and those that they
    // see of their sequence.
    __device__ __forceinline__ bool inside(int first) {
        bool own = first >= BEFORE && first + AHEAD <= walk.size;
        if (SEQUENCES == INDEXED) {
            Index seen = walk.first + first - BEFORE;
            if (own) indices.template read<true>(call, walk.batch, seen);
            else indices.template read<false>(call, walk.batch, seen);
            own = own && indices.agree();
        }
        Index position = walk.first + first;
        bool one = current.exists && position - BEFORE >= current.start && position + AHEAD <= current.end;
        return own && (SEQUENCES != PACKED || one);
    }

    template <bool inside> __device__ __forceinline__ void step(int first, const Place* places) {
        constexpr bool mixed = SEQUENCES != WHOLE && !inside;
#pragma unroll
        for (int r = 0; r < AHEAD; ++r, results.next()) {
            int t = first + r;
            Elements newest, outer, sums;
            memcpy(&newest, places + 2 * r * THREADS, sizeof newest);
            memcpy(&outer, places + (2 * r + 1) * THREADS, sizeof outer);
            bool exists = inside || t < exist;
            if (SEQUENCES == PACKED && !inside) indices.at[BEFORE + r] = enter(t, exists);
            const Id* seen_from = indices.at + r;  // of position t - BEFORE, of which is grad_x
            exists = exists && (!mixed || seen_from[BEFORE] >= 0);
            bool nobodys = mixed && seen_from[0] < 0, kept = FINAL_STATE && (inside || t >= BEFORE) && !nobodys;
            Index sequence = walk.batch, end = call.L;
            if (SEQUENCES == PACKED && kept) {
                sequence = inside ? current.sequence : Index(seen_from[0]);
                end = inside ? current.end : call.starts(sequence + 1);
            }
            kept = kept && from_state.reaches(walk.first + t - BEFORE, end);
#pragma unroll
            for (int c = 0; c < PACK; ++c) {
                push(windows[c], newest.template value<Real>(c));
                Real seen[WIDTH];
                if (SEQUENCES == INDEXED && mixed) keep_seen(seen_from, windows[c], seen);
                const Real* window = SEQUENCES == INDEXED && mixed ? seen : windows[c];
                Real g_t = through_activation(filters[c], window, outer.template value<Real>(c));
                push(g[c], exists ? g_t : Real(0));
                add(totals[c], g_t, window, exists && (inside || t < walk.size));
                Real sum = 0;
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) {
                    bool sees = inside || t - k < exist;
                    if (mixed) sees = sees && seen_from[BEFORE - k] == seen_from[0];
                    Real more = sum + filters[c].weight[k] * g[c][BEFORE - k];
                    sum = sees ? more : sum;
                }
                if (nobodys) sum = SEQUENCES == INDEXED ? Real(0) : not_a_number<Real>();
                if (kept) sum += from_state.at(walk.first + t - BEFORE, end, sequence, walk.channel + c);
                sums.at[c] = narrow<X_T>(sum);
            }
            if (inside || (t >= BEFORE && t < walk.size + BEFORE)) sums.write(results.at);
        }
        if (SEQUENCES != PACKED) return;
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) indices.at[k] = inside ? Id(current.sequence) : indices.at[AHEAD + k];
    }

    // PACKED: the sequence of a position, after the one before; -1 if there is none.
    __device__ __forceinline__ Id enter(int t, bool exists) {
        Index position = walk.first + t;
        if (exists && position >= current.end) {
            current = Current(call, walk.batch, position);
            read_before(call, walk, current, position, windows);
        }
        return exists && current.exists ? Id(current.sequence) : Id(-1);
    }
};

__device__ void backward_across(const Call& call, const Gradients& grad, int run, int walks) {
    __shared__ union {
        Room<2 * AHEAD> room;
        Real totals[GROUPS][SUMS][TILE];  // of the block's walks
    } shared;
    Room<2 * AHEAD>& room = shared.room;
    Walk walk(call, run, walks);
    int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Real totals[PACK][SUMS] = {};
    if (walk.exists) {
        Across across(call, grad, walk, totals);
        for (int step = 0; step < STAGES; ++step) across.fetch(step * AHEAD, room.of(step));
        across.load();
        for (int step = 0, first = 0; first < walk.size + BEFORE; ++step, first += AHEAD) {
            wait_for_copies<STAGES - 1>();
            if (across.inside(first)) across.step<true>(first, room.of(step));
            else across.step<false>(first, room.of(step));
            across.fetch(first + STAGES * AHEAD, room.of(step));
        }
    }
    wait_for_copies<0>();
    __syncthreads();  // the room is empty
#pragma unroll
    for (int k = 0; k < SUMS; ++k)
#pragma unroll
        for (int c = 0; c < PACK; ++c) shared.totals[group][k][lane * PACK + c] = totals[c][k];
    __syncthreads();
    Index part = blockIdx.x / ((call.D + TILE - 1) / TILE), first_channel = walk.channel - lane * PACK;
    for (int i = threadIdx.x; i < TILE * SUMS; i += THREADS) {
        int k = i % SUMS, c = i / SUMS;
        Real sum = 0;
        for (int other = 0; other < GROUPS; ++other) sum += shared.totals[other][k][c];
        if (first_channel + c < call.D) grad.partials[(part * call.D + first_channel + c) * SUMS + k] = sum;
    }
}

// Gradients of the inputs before each sequence.
__device__ void into_initial_states(const Call& call, const Gradients& grad) {
    Index threads = Index(gridDim.x) * THREADS;
    for (Index k = Index(blockIdx.x) * THREADS + threadIdx.x; k < call.count * call.D; k += threads) {
        Index sequence = k / call.D, channel = k % call.D, batch = SEQUENCES == PACKED ? 0 : sequence;
        Inputs inputs = call.inputs(batch, sequence, channel);
        Row<const X_T> outer = grad.y.row(batch, channel);
        Row<STATE_T> results = grad.initial_state.row(sequence, channel);
        if (!call.is_valid(sequence)) {
            for (Index s = 0; s < call.S; ++s) results[s] = narrow<STATE_T>(not_a_number<Real>());
            continue;
        }
        FromState from_state(call, grad, batch);
        Weights filters[1];
        call.load(channel, filters);
        const Weights& filter = filters[0];
        Real window[WIDTH], g[BEFORE + 1];
#pragma unroll
        for (int j = 1; j < WIDTH; ++j) window[j] = inputs.at(inputs.start - WIDTH + j);
        Indices<WIDTH> indices;
        if (SEQUENCES == INDEXED && call.L > 0) indices.template read<false>(call, batch, -WIDTH);
        bool padding = SEQUENCES == INDEXED && call.L > 0 && indices.at[0] < 0;
#pragma unroll
        for (int i = 0; i < BEFORE; ++i) {
            Index t = inputs.start + i;
            bool exists = t < inputs.end;
            push(window, inputs.at(t));
            Real seen[WIDTH];
            if (SEQUENCES == INDEXED && exists) {
                push(indices.at, call.index_of(batch, t));
                keep_seen(indices.at, window, seen);
                exists = indices.at[BEFORE] == call.index_of(batch, 0) && !padding;
            }
            Real grad_y = exists ? widen<Real>(outer[t]) : Real(0);
            g[i] = exists ? through_activation(filter, SEQUENCES == INDEXED ? seen : window, grad_y) : Real(0);
        }
        for (Index s = 0; s < call.S - BEFORE; ++s)
            results[s] = narrow<STATE_T>(from_state.at(inputs.start - call.S + s, inputs.end, sequence, channel));
#pragma unroll
        for (int back = 1; back <= BEFORE; ++back) {  // positions before the start
            Real sum = from_state.at(inputs.start - back, inputs.end, sequence, channel);
#pragma unroll
            for (int i = 0; i <= BEFORE - back; ++i) sum += filter.weight[BEFORE - back - i] * g[i];
            results[call.S - back] = narrow<STATE_T>(sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
causal_conv1d_backward(const X_T* x /* [B, D, L] */, Index x_b, Index x_d, Index x_l,
                       const WEIGHT_T* weight /* [D, W] */, Index weight_d, Index weight_k,
                       const BIAS_T* bias /* [D] or null */, Index bias_d,
                       const STATE_T* initial_state /* [count, D, S] or null */, Index initial_b, Index initial_d,
                       Index initial_s, const INDEX_T* index /* [B, L] or [count + 1] or null */, Index index_b,
                       Index index_l, const Index* sources /* [B, S] or null */, Index B, Index D, Index L, Index S,
                       Index count, const X_T* grad_y /* [B, D, L] */, Index grad_y_b, Index grad_y_d,
                       Index grad_y_l, const STATE_T* grad_final_state /* [count, D, S] or null */, Index final_b,
                       Index final_d, Index final_s, X_T* grad_x /* [B, D, L] */, Index grad_x_b, Index grad_x_d,
                       Index grad_x_l, STATE_T* grad_initial_state /* [count, D, S] or null */, Index grad_initial_b,
                       Index grad_initial_d, Index grad_initial_s, Real* partials /* [parts of all rows, D, W + 1] */,
                       Index length /* of a segment, or a run */, Index parts /* segments, or walks */) {
    Call call{{x, x_b, x_d, x_l}, weight, weight_d, weight_k, bias, bias_d,
              {initial_state, initial_b, initial_d, initial_s}, index, index_b, index_l, sources, B, D, L, S, count};
    Gradients grad{{grad_y, grad_y_b, grad_y_d, grad_y_l},
                   {grad_final_state, final_b, final_d, final_s},
                   {grad_x, grad_x_b, grad_x_d, grad_x_l},
                   {grad_initial_state, grad_initial_b, grad_initial_d, grad_initial_s},
                   partials};
    if (ACROSS) backward_across(call, grad, int(length), int(parts));
    else backward_along(call, grad, int(length), int(parts));
    if (INITIAL_STATE) into_initial_states(call, grad);
}
