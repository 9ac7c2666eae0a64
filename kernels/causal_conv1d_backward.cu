// Causal depthwise convolution over (B, D, L), backward.
//
//     v, u as in causal_conv1d.cu,   g[t] = grad_y[t] act'(v[t]), 0 outside of 0..L-1
//     grad_u[p] = sum_k weight[k] g[p+W-1-k] + grad_final_state[p-(L-S)]
//     grad_x[p] = grad_u[p] for p >= 0,   grad_initial_state[S+p] = grad_u[p] for p < 0
//     grad_weight[k] = sum_{b,t} g[t] u[t-W+1+k],   grad_bias = sum_{b,t} g[t]
// and the same for each sequence of a batch item, if it has several.
//
// Work: see causal_conv1d.cuh. ALONG, grad_x of a tile comes after g of the tile on its right. Both
// ways, g is also computed of W - 1 positions beyond a segment or a run. The states' gradients are
// shared out among all threads.
// Sums over b and t are taken in a fixed order: within a lane, a group, a block, then over all of
// these by causal_conv1d_partials.cu, so that gradients are the same bits every time.
//
// Launch and macros: as causal_conv1d.cu.

#include "causal_conv1d.cuh"

constexpr int SUMS = WIDTH + 1;  // gradients of a channel: weights, then the bias
// ACROSS, packs are read so many positions ahead of their use, as in causal_conv1d.cu.
constexpr int AHEAD = WIDTH < 4 ? (4 + WIDTH - 1) / WIDTH * WIDTH : WIDTH < 8 ? WIDTH : 8;

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

// g of a pack. plain: all of its positions are the segment's own and see their inputs.
template <bool plain>
__device__ __forceinline__ void differentiate(const Span& exist, const Weights& filter, bool own,
                                              const Real (&u)[BEFORE + PACK], const Real (&grad_y)[PACK],
                                              const Id* indices, Real (&g)[PACK], Real (&totals)[SUMS]) {
#pragma unroll
    for (int k = 0; k < PACK; ++k) {
        Real seen[WIDTH];
        if (SEQUENCES == INDEXED && !plain) keep_seen(indices + k, u + k, seen);
        const Real* window = SEQUENCES == INDEXED && !plain ? seen : u + k;
        g[k] = through_activation(filter, window, grad_y[k]);
        bool exists = plain || (exist.has(k) && (SEQUENCES != INDEXED || indices[BEFORE + k] >= 0));
        add(totals, g[k], window, exists && (plain || own));
        if (!exists) g[k] = 0;
    }
}

// grad_x of a pack, from g of its positions and of those after them. plain: they exist and see it.
template <bool plain>
__device__ __forceinline__ void gather(const Span& exist, const Weights& filter, const Real (&g)[PACK + BEFORE],
                                       const Id* indices, Real (&sums)[PACK]) {
#pragma unroll
    for (int k = 0; k < PACK; ++k) {
        Real sum = 0;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            int t = k + BEFORE - j;
            bool sees = plain || exist.has(t);
            if (SEQUENCES == INDEXED && !plain) sees = sees && indices[t] == indices[k];
            Real more = sum + filter.weight[j] * g[t];
            sum = sees ? more : sum;
        }
        sums[k] = SEQUENCES == INDEXED && !plain && indices[k] < 0 ? Real(0) : sum;
    }
}

struct Along {
    const Call& call;
    Strip strip;
    Inputs inputs;
    Line<const X_T> line, outer;
    Line<X_T> results;
    FromState from_state;
    int lane, first;  // position of the lane's pack
    Weights filter[1];
    Real left[PACK], g_left[PACK], totals[SUMS];  // left: in the tile on the left

    __device__ __forceinline__ Along(const Call& call, const Gradients& grad, int length, int segments)
        : call(call), strip(call, grad.x, length, segments, (BEFORE + PACK - 1) / PACK * PACK),
          inputs(call.inputs(strip.batch, strip.batch, strip.channel)), line(call.x, strip), outer(grad.y, strip),
          results(grad.x, strip), from_state(call, grad, strip.batch), lane(threadIdx.x % LANES), first(lane * PACK),
          g_left{}, totals{} {
        call.load(strip.channel, filter);
        read_left(strip, inputs, first, left);
    }

    template <bool inside>
    __device__ __forceinline__ void fetch(Fetched (&packs)[BATCH], Fetched (&outer_packs)[BATCH]) const {
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            packs[b].fetch<inside>(strip, line, first + b * TILE);
            outer_packs[b].fetch<inside>(strip, outer, first + b * TILE);
        }
    }

    // g of a tile, and grad_x of the tile on its left. inside: all of both is the segment's own.
    template <bool inside> __device__ __forceinline__ void step(const Fetched& pack, const Fetched& outer_pack) {
        Real x_own[PACK], grad_y[PACK], u[BEFORE + PACK], g_own[PACK] = {}, g[PACK + BEFORE];
        pack.widen_into(line, x_own);
        outer_pack.widen_into(outer, grad_y);
        if (!inside) read_state(strip, inputs, first, x_own);
        from_the_left(x_own, left, lane, u);
#pragma unroll
        for (int k = 0; k < PACK; ++k) left[k] = u[BEFORE + k] = x_own[k];
        Indices<BEFORE + PACK> indices;
        if (SEQUENCES == INDEXED) indices.read(call, strip.batch, strip.base + first - BEFORE);
        Span exist = strip.span(first);
        bool own = inside || first < strip.size, alike = SEQUENCES != INDEXED || indices.agree();
        if (inside && alike) differentiate<true>(exist, filter[0], own, u, grad_y, indices.at, g_own, totals);
        else if (exist.has_any(PACK)) differentiate<false>(exist, filter[0], own, u, grad_y, indices.at, g_own, totals);

        from_the_right(g_left, g_own, lane, g + PACK);
#pragma unroll
        for (int k = 0; k < PACK; ++k) g[k] = g_left[k], g_left[k] = g_own[k];
        int done = first - TILE;  // of the tile on the left all is known
        first += TILE;
        if (done < 0 || (!inside && done >= strip.size)) return;
        Real sums[PACK];
        exist = strip.span(done);
        if (SEQUENCES == INDEXED) indices.read(call, strip.batch, strip.base + done), alike = indices.agree();
        if (inside && alike) gather<true>(exist, filter[0], g, indices.at, sums);
        else gather<false>(exist, filter[0], g, indices.at, sums);
        if (from_state.reaches(strip.base + done + PACK - 1, call.L)) {
#pragma unroll
            for (int k = 0; k < PACK; ++k)
                sums[k] += from_state.at(strip.base + done + k, call.L, strip.batch, strip.channel);
        }
        write<inside>(strip, results, done, sums);
    }
};

__device__ void backward_along(const Call& call, const Gradients& grad, int length, int segments) {
    Along along(call, grad, length, segments);
    const Strip& strip = along.strip;
    for (int tile = 0; tile <= strip.tiles && strip.tiles > 0; tile += BATCH) {
        Fetched packs[BATCH], outer_packs[BATCH];
        bool all = strip.inside(max(tile - 1, 0), tile + BATCH - 1);
        if (all) along.fetch<true>(packs, outer_packs);
        else along.fetch<false>(packs, outer_packs);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            if (all || strip.inside(max(tile + b - 1, 0), tile + b)) along.step<true>(packs[b], outer_packs[b]);
            else if (tile + b <= strip.tiles) along.step<false>(packs[b], outer_packs[b]);
        }
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
    Elements packs[AHEAD], outer_packs[AHEAD];
    Weights filters[PACK];
    Real windows[PACK][WIDTH], g[PACK][WIDTH], totals[PACK][SUMS];
    Indices<BEFORE + AHEAD> indices;  // of the positions of a step and of those before; PACKED: their sequences

    __device__ __forceinline__ Across(const Call& call, const Gradients& grad, const Walk& walk)
        : call(call), grad(grad), walk(walk), exist(int(min(call.L - walk.first, Index(FAR)))),
          from_state(call, grad, walk.batch), current(call, walk.batch, walk.first),
          ahead(call.x, walk, walk.first), outer_ahead(grad.y, walk, walk.first),
          results(grad.x, walk, walk.first - BEFORE), g{}, totals{}, indices{} {
#pragma unroll
        for (int r = 0; r < AHEAD; ++r) fetch<false>(r, r);
        call.load(walk.channel, filters);
        read_before(call, walk, current, walk.first, windows);
    }

    template <bool exists> __device__ __forceinline__ void fetch(int r, int t) {
        if (exists || t < min(walk.size + BEFORE, exist)) packs[r].read(ahead.at), outer_packs[r].read(outer_ahead.at);
        ahead.next(), outer_ahead.next();
    }

    // Whether the positions of a step are the run's own, with all that they see and as many after
    // them, and those that they see of their sequence.
    __device__ __forceinline__ bool inside(int first) {
        bool own = first >= BEFORE && first + 2 * AHEAD <= walk.size;
        if (SEQUENCES == INDEXED) {
            indices.read(call, walk.batch, walk.first + first - BEFORE);
            own = own && indices.agree();
        }
        Index position = walk.first + first;
        bool one = current.exists && position - BEFORE >= current.start && position + AHEAD <= current.end;
        return own && (SEQUENCES != PACKED || one);
    }

    // AHEAD positions.
    template <bool inside> __device__ __forceinline__ void step(int first) {
        constexpr bool mixed = SEQUENCES != WHOLE && !inside;
#pragma unroll
        for (int r = 0; r < AHEAD; ++r, results.next()) {
            int t = first + r;
            Elements newest = packs[r], outer = outer_packs[r], sums;
            fetch<inside>(r, t + AHEAD);
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
                push(windows[c], widen<Real>(newest.at[c]));
                Real seen[WIDTH];
                if (SEQUENCES == INDEXED && mixed) keep_seen(seen_from, windows[c], seen);
                const Real* window = SEQUENCES == INDEXED && mixed ? seen : windows[c];
                Real g_t = through_activation(filters[c], window, widen<Real>(outer.at[c]));
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
    __shared__ Real totals[GROUPS][SUMS][TILE];  // of the block's walks
    Walk walk(call, run, walks);
    int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (walk.exists) {
        Across across(call, grad, walk);
        for (int first = 0; first < walk.size + BEFORE; first += AHEAD) {
            if (across.inside(first)) across.step<true>(first);
            else across.step<false>(first);
        }
#pragma unroll
        for (int k = 0; k < SUMS; ++k)
#pragma unroll
            for (int c = 0; c < PACK; ++c) totals[group][k][lane * PACK + c] = across.totals[c][k];
    } else {
        for (int k = 0; k < SUMS; ++k)
            for (int c = 0; c < PACK; ++c) totals[group][k][lane * PACK + c] = 0;
    }
    __syncthreads();
    Index part = blockIdx.x / ((call.D + TILE - 1) / TILE), first_channel = walk.channel - lane * PACK;
    for (int i = threadIdx.x; i < TILE * SUMS; i += THREADS) {
        int k = i % SUMS, c = i / SUMS;
        Real sum = 0;
        for (int other = 0; other < GROUPS; ++other) sum += totals[other][k][c];
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
        if (SEQUENCES == INDEXED && call.L > 0) indices.read(call, batch, -WIDTH);
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
