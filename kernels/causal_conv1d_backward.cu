// Causal depthwise convolution over (B, D, L), backward.
//
//     v, u as in causal_conv1d.cu,   g[t] = grad_y[t] act'(v[t]), 0 outside of 0..L-1
//     grad_u[p] = sum_k weight[k] g[p+W-1-k] + grad_final_state[p-(L-S)]
//     grad_x[p] = grad_u[p] for p >= 0,   grad_initial_state[S+p] = grad_u[p] for p < 0
//     grad_weight[k] = sum_{b,t} g[t] u[t-W+1+k],   grad_bias = sum_{b,t} g[t]
// and the same for each sequence of a batch item, if it has several.
//
// Work: see causal_conv1d.cuh. ALONG, a group of lanes walks over its segment from the right to the
// left, and hands g from lane to lane and from tile to tile; ACROSS, a lane goes W - 1 positions
// beyond its run. The states' gradients are shared out among all threads.
// Sums over b and t are taken in a fixed order: within a lane, a group, a block, then over all of
// these by causal_conv1d_sum_partials, so that gradients are the same bits every time.
//
// Launch and macros: as causal_conv1d.cu.

#include "causal_conv1d.cuh"

constexpr int AHEAD = 2;         // positions whose packs are read at once, ACROSS
constexpr int SUMS = WIDTH + 1;  // gradients of a channel: weights, then the bias
// Blocks of threads for which a multiprocessor's registers have to suffice.
constexpr int RESIDENT = WIDTH > 4 || sizeof(Real) == 8 ? 1 : ACROSS ? (SEQUENCES == WHOLE ? 3 : 2) : SEQUENCES == WHOLE ? 6 : 4;

struct Gradients {
    Tensor<const X_T> y;
    Tensor<const STATE_T> final_state;  // [count, D, S] or null
    Tensor<X_T> x;
    Tensor<STATE_T> initial_state;      // [count, D, S] or null
    Real* partials;                     // [parts, D, W + 1]
};

// What the final state of a sequence hands back to an input of it; `end` is where the sequence ends.
struct FromState {
    Row<const STATE_T> gradient;
    const int* sources;  // INDEXED: of the batch item
    Index S, first;      // the first position of which the state has something
    __device__ FromState(const Call& call, const Gradients& grad, Index batch, Index sequence, Index channel, Index end)
        : gradient{nullptr, 0}, sources(nullptr), S(call.S), first(end - call.S) {
        if (!grad.final_state.data) return;
        gradient = grad.final_state.row(sequence, channel);
        if (SEQUENCES == INDEXED) {
            sources = call.sources + batch * S;
            first = NOTHING_KEPT;
            for (Index s = 0; s < S; ++s) first = min(first, Index(sources[s]));
        }
    }
    __device__ __forceinline__ Real at(Index position) const {
        if (!gradient.data || position < first) return 0;
        if (SEQUENCES != INDEXED) return position < first + S ? widen<Real>(gradient[position - first]) : Real(0);
        for (Index s = 0; s < S; ++s)
            if (sources[s] == position) return widen<Real>(gradient[s]);
        return 0;
    }
};

// g of a position, from its inputs.
__device__ __forceinline__ Real through_activation(const Weights& filter, const Real* window, Real grad_y, bool exists,
                                                   bool silu) {
    return exists ? grad_y * activation_slope<QUICK>(filter.apply(window), silu) : Real(0);
}

__device__ void backward_along(const Call& call, const Gradients& grad, Index segment_length, Index segments) {
    constexpr Index TILE = LANES * PACK;
    Strip strip(call, grad.x, segment_length, segments);
    Index lane = threadIdx.x % LANES, segment = (Index(blockIdx.x) * WARPS + threadIdx.x / WARP) % segments;
    Inputs inputs = call.inputs(strip.batch, strip.batch, strip.channel);
    Inputs outer{grad.y.row(strip.batch, strip.channel), {nullptr, 0}, 0, call.L, 0};
    Row<X_T> results = grad.x.row(strip.batch, strip.channel);
    FromState from_state(call, grad, strip.batch, strip.batch, strip.channel, call.L);
    Weights filter = call.filter(strip.channel);
    Real total[SUMS] = {}, right[PACK] = {};  // right: g of the tile on the right
    Index tiles = (min(segment_length, call.L + PACK - 1 - segment * segment_length) + TILE - 1) / TILE;
    bool beyond = segment < segments - 1;  // g of the first positions of the next segment is needed
    for (Index tile = tiles - !beyond; tile >= 0; --tile) {
        Index first = strip.first + tile * TILE;
        bool reaches = strip.exists && first < call.L, own = reaches && tile < tiles;
        Real g[PACK] = {};
        Indices<BEFORE + PACK + BEFORE> indices;
        if (own || (reaches && lane * PACK < BEFORE)) {
            Real u[SLOTS * PACK], grad_y[PACK];
            read<SLOTS>(inputs, first - OWN, u);
            read<1>(outer, first, grad_y);
            if (SEQUENCES == INDEXED) indices.read(call, strip.batch, first - BEFORE);
#pragma unroll
            for (int k = 0; k < PACK; ++k) {
                const Real* window = u + OWN - BEFORE + k;
                Real seen[WIDTH];
                if (SEQUENCES == INDEXED) keep_seen(indices.at + k, window, seen);
                if (SEQUENCES == INDEXED) window = seen;
                bool exists = first + k >= 0 && first + k < call.L;
                if (SEQUENCES == INDEXED) exists = exists && indices.at[BEFORE + k] >= 0;
                g[k] = through_activation(filter, window, grad_y[k], exists, call.silu);
                if (!own || !exists) continue;
#pragma unroll
                for (int j = 0; j < WIDTH; ++j) total[j] += g[k] * window[j];
                total[WIDTH] += g[k];
            }
        }
        Real after[PACK + BEFORE];  // g of the pack's positions and of those after them
#pragma unroll
        for (int k = 0; k < PACK; ++k) after[k] = g[k];
#pragma unroll
        for (int k = 0; k < BEFORE; ++k) {
            int lanes = 1 + k / PACK;  // so many lanes on; beyond the last one in the tile on the right
            Real mine = lane >= lanes ? g[k % PACK] : right[k % PACK];
            after[PACK + k] = __shfl_sync(FULL_MASK, mine, int(lane + lanes) % LANES, LANES);
        }
#pragma unroll
        for (int k = 0; k < PACK; ++k) right[k] = g[k];
        if (!own) continue;
        Real sums[PACK];
#pragma unroll
        for (int k = 0; k < PACK; ++k) {
            sums[k] = from_state.at(first + k);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) {
                int t = k + BEFORE - j;
                bool seen = SEQUENCES != INDEXED || indices.at[BEFORE + t] == indices.at[BEFORE + k];
                sums[k] += seen ? filter.weight[j] * after[t] : Real(0);
            }
            if (SEQUENCES == INDEXED && indices.at[BEFORE + k] < 0) sums[k] = 0;
        }
        write(results, first, call.L, sums);
    }
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
            total[k] += __shfl_down_sync(FULL_MASK, total[k], other, LANES);
        if (strip.exists && lane == 0)
            grad.partials[((strip.batch * segments + segment) * call.D + strip.channel) * SUMS + k] = total[k];
    }
}

__device__ void backward_across(const Call& call, const Gradients& grad, Index run, Index walks) {
    Walk walk(call, run, walks);
    Real totals[PACK][SUMS] = {};
    if (walk.exists) {
        Weights filters[PACK];
#pragma unroll
        for (int c = 0; c < PACK; ++c) filters[c] = call.filter(walk.channel + c);
        Current current(call, walk.batch, walk.first);
        Real windows[PACK][WIDTH], g[PACK][WIDTH] = {};
        read_before(call, walk, current, walk.first, windows);
        Indices<WIDTH> indices;  // PACKED: the sequences of positions
        if (SEQUENCES == INDEXED) indices.read(call, walk.batch, walk.first - WIDTH);
        for (Index first = walk.first; first < walk.end + BEFORE; first += AHEAD) {
            Elements packs[AHEAD], outer[AHEAD];
#pragma unroll
            for (int r = 0; r < AHEAD; ++r) {
                packs[r] = outer[r] = Elements{};
                if (first + r >= min(walk.end + BEFORE, call.L)) continue;
                read_channels(call.x, walk.batch, walk.channel, first + r, packs[r]);
                read_channels(grad.y, walk.batch, walk.channel, first + r, outer[r]);
            }
#pragma unroll
            for (int r = 0; r < AHEAD; ++r) {
                Index t = first + r, p = t - BEFORE;
                if (t >= walk.end + BEFORE) break;
                bool exists = t < call.L;
                if (SEQUENCES == PACKED && exists && t >= current.end) {
                    current = Current(call, walk.batch, t);
                    read_before(call, walk, current, t, windows);
                }
                if (SEQUENCES == INDEXED) push(indices.at, call.index_of(walk.batch, t));
                if (SEQUENCES == PACKED) push(indices.at, exists && current.exists ? Id(current.sequence) : Id(-1));
                if (SEQUENCES != WHOLE) exists = exists && indices.at[BEFORE] >= 0;
                Elements results;
#pragma unroll
                for (int c = 0; c < PACK; ++c) {
                    push(windows[c], widen<Real>(packs[r].at[c]));
                    Real seen[WIDTH];
                    if (SEQUENCES == INDEXED) keep_seen(indices.at, windows[c], seen);
                    const Real* window = SEQUENCES == INDEXED ? seen : windows[c];
                    Real newest = through_activation(filters[c], window, widen<Real>(outer[r].at[c]), exists, call.silu);
                    push(g[c], newest);
                    if (exists && t < walk.end) {
#pragma unroll
                        for (int k = 0; k < WIDTH; ++k) totals[c][k] += newest * window[k];
                        totals[c][WIDTH] += newest;
                    }
                    Real sum = 0;
#pragma unroll
                    for (int k = 0; k < WIDTH; ++k) {
                        bool sees = SEQUENCES == WHOLE || indices.at[BEFORE - k] == indices.at[0];
                        sum += sees ? filters[c].weight[k] * g[c][BEFORE - k] : Real(0);
                    }
                    if (grad.final_state.data && p >= walk.first && (SEQUENCES == WHOLE || indices.at[0] >= 0)) {
                        Index sequence = SEQUENCES == PACKED ? indices.at[0] : walk.batch;
                        Index end = SEQUENCES == PACKED ? call.starts(sequence + 1) : call.L;
                        sum += FromState(call, grad, walk.batch, sequence, walk.channel + c, end).at(p);
                    }
                    if (SEQUENCES == INDEXED && indices.at[0] < 0) sum = 0;
                    if (SEQUENCES == PACKED && indices.at[0] < 0) sum = not_a_number<Real>();
                    results.at[c] = narrow<X_T>(sum);
                }
                if (p >= walk.first) write_channels(grad.x, walk.batch, walk.channel, p, results);
            }
        }
    }

    __shared__ Real shared[WARPS * GROUPS][LANES * PACK];
    int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    Index part = walk.batch * walks + blockIdx.x % walks, first_channel = walk.channel - lane * PACK;
#pragma unroll 1
    for (int k = 0; k < SUMS; ++k) {
#pragma unroll
        for (int c = 0; c < PACK; ++c) {
            Real total = 0;
#pragma unroll
            for (int same = 0; same < SUMS; ++same)
                if (same == k) total = totals[c][same];
            shared[group][lane * PACK + c] = total;
        }
        __syncthreads();
        for (int c = threadIdx.x; c < LANES * PACK; c += THREADS) {
            Real sum = 0;
            for (int other = 0; other < WARPS * GROUPS; ++other) sum += shared[other][c];
            Index channel = first_channel + c;
            if (walk.batch < call.B && channel < call.D) grad.partials[(part * call.D + channel) * SUMS + k] = sum;
        }
        __syncthreads();
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
        FromState from_state(call, grad, batch, sequence, channel, inputs.end);
        Weights filter = call.filter(channel);
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
            g[i] = through_activation(filter, SEQUENCES == INDEXED ? seen : window, exists ? widen<Real>(outer[t]) : Real(0),
                                      exists, call.silu);
        }
        for (Index s = 0; s < call.S - BEFORE; ++s)
            results[s] = narrow<STATE_T>(from_state.at(inputs.start - call.S + s));
#pragma unroll
        for (int back = 1; back <= BEFORE; ++back) {  // positions before the start
            Real sum = from_state.at(inputs.start - back);
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
                       Index index_l, const int* sources /* [B, S] or null */, Index B, Index D, Index L, Index S,
                       Index count, Index silu, const X_T* grad_y /* [B, D, L] */, Index grad_y_b, Index grad_y_d,
                       Index grad_y_l, const STATE_T* grad_final_state /* [count, D, S] or null */, Index final_b,
                       Index final_d, Index final_s, X_T* grad_x /* [B, D, L] */, Index grad_x_b, Index grad_x_d,
                       Index grad_x_l, STATE_T* grad_initial_state /* [count, D, S] or null */, Index grad_initial_b,
                       Index grad_initial_d, Index grad_initial_s, Real* partials /* [parts of all rows, D, W + 1] */,
                       Index length /* of a segment, or a run */, Index parts /* segments, or walks */) {
    Call call{{x, x_b, x_d, x_l}, weight, weight_d, weight_k, bias, bias_d,
              {initial_state, initial_b, initial_d, initial_s}, index, index_b, index_l, sources, B, D, L, S, count,
              silu != 0};
    Gradients grad{{grad_y, grad_y_b, grad_y_d, grad_y_l},
                   {grad_final_state, final_b, final_d, final_s},
                   {grad_x, grad_x_b, grad_x_d, grad_x_l},
                   {grad_initial_state, grad_initial_b, grad_initial_d, grad_initial_s},
                   partials};
    if (ACROSS) backward_across(call, grad, length, parts);
    else backward_along(call, grad, length, parts);
    if (grad_initial_state) into_initial_states(call, grad);
}

// Adds the sums of all parts in their order: slices of them first, then the slices.
// Launch: grid (ceil(D (W + 1) / 32)), block (32 * SLICES).
constexpr int SLICES = 8;
extern "C" __global__ void __launch_bounds__(WARP * SLICES)
causal_conv1d_sum_partials(const Real* partials /* [parts, D, W + 1] */, Index parts, Index D,
                           WEIGHT_T* grad_weight /* [D, W] */, BIAS_T* grad_bias /* [D] or null */) {
    __shared__ double slices[SLICES][WARP];
    Index i = Index(blockIdx.x) * WARP + threadIdx.x % WARP;
    int slice = threadIdx.x / WARP;
    double sum = 0;
    if (i < D * SUMS)
        for (Index part = slice; part < parts; part += SLICES) sum += partials[part * D * SUMS + i];
    slices[slice][threadIdx.x % WARP] = sum;
    __syncthreads();
    if (slice > 0 || i >= D * SUMS) return;
    for (int other = 1; other < SLICES; ++other) sum += slices[other][threadIdx.x];
    Index d = i / SUMS, k = i % SUMS;
    if (k < WIDTH) grad_weight[d * WIDTH + k] = narrow<WEIGHT_T>(sum);
    else if (grad_bias) grad_bias[d] = narrow<BIAS_T>(sum);
}
