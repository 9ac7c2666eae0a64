#pragma once
// What forward and backward of the causal convolution share: a call's tensors, the inputs of a
// sequence, and how warps share the work out.
//
// ALONG: neighbouring lanes have neighbouring positions. A group of LANES lanes takes a row, one
// channel of one batch item; a lane has a pack of PACK positions of each tile of LANES * PACK.
// ACROSS: neighbouring lanes have neighbouring channels, a pack of PACK each. A group of LANES
// lanes walks over RUN positions one by one.
//
// Compiled with: X_T, WEIGHT_T, BIAS_T, STATE_T, REAL, WIDTH; ACROSS (0 or 1), PACK, LANES, WARPS;
// ADJACENT (1: the elements of a pack lie next to each other in every tensor like x);
// SEQUENCES (below), INDEX_T.

#include "common.cuh"
#include "convolution.cuh"

typedef REAL Real;

// SEQUENCES
#define WHOLE 0    // each batch item is one
#define INDEXED 1  // positions have an index [B, L]: those with the same one see each other, negative ones are padding
#define PACKED 2   // one batch item, with the positions [count + 1] where sequences start

constexpr int THREADS = WARP * WARPS;
constexpr int GROUPS = WARP / LANES;      // of a warp
constexpr int BEFORE = WIDTH - 1;         // inputs of a position before its own
constexpr bool QUICK = sizeof(X_T) == 2;  // see sigmoid

typedef Filter<Real, WIDTH> Weights;
typedef Pack<X_T, PACK> Elements;
typedef INDEX_T Id;  // of a sequence

// The inputs of one channel of a sequence: x from start to end - 1, and the state before.
struct Inputs {
    Row<const X_T> x;
    Row<const STATE_T> state;  // newest last
    Index start, end, width;   // width 0: without a state
    __device__ __forceinline__ Real at(Index position) const {
        if (position >= start) return position < end ? widen<Real>(x[position]) : Real(0);
        return position >= start - width ? widen<Real>(state[width + position - start]) : Real(0);
    }
};

struct Call {  // what both directions read
    Tensor<const X_T> x;            // [B, D, L]
    const WEIGHT_T* weight;         // [D, W]
    Index weight_d, weight_k;
    const BIAS_T* bias;             // [D] or null
    Index bias_d;
    Tensor<const STATE_T> initial;  // [count, D, S] or null
    const INDEX_T* index;           // INDEXED: [B, L]; PACKED: [count + 1]
    Index index_b, index_l;
    const int* sources;             // INDEXED, with final states: [B, S], see causal_conv1d_sources
    Index B, D, L, S, count;        // states have S columns; as many as sequences: B, or those packed
    bool silu;

    __device__ __forceinline__ Weights filter(Index channel) const {
        Weights filter;
        filter.load(weight, weight_d, weight_k, bias, bias_d, channel);
        return filter;
    }
    __device__ __forceinline__ Index starts(Index sequence) const { return Index(index[sequence * index_l]); }
    // PACKED: whether a sequence is one of positions that there are.
    __device__ __forceinline__ bool is_valid(Index sequence) const {
        return SEQUENCES != PACKED || (starts(sequence) >= 0 && starts(sequence) <= starts(sequence + 1) &&
                                       starts(sequence + 1) <= L);
    }
    __device__ __forceinline__ Inputs inputs(Index batch, Index sequence, Index channel) const {
        bool packed = SEQUENCES == PACKED;
        Inputs inputs{x.row(batch, channel), {nullptr, 0}, packed ? starts(sequence) : 0,
                      packed ? starts(sequence + 1) : L, 0};
        if (initial.data) inputs.state = initial.row(sequence, channel), inputs.width = S;
        return inputs;
    }
    // INDEXED: the index of a position; inputs before position 0 have its index.
    __device__ __forceinline__ Id index_of(Index batch, Index position) const {
        return index[batch * index_b + min(max(position, Index(0)), L - 1) * index_l];
    }
    // PACKED: the sequence that a position is in, or the first one behind it.
    __device__ Index sequence_of(Index position) const {
        Index first = 0, last = count;  // the answer is one of first .. last
        while (first < last) {
            Index middle = (first + last) / 2;
            if (starts(middle + 1) <= position) first = middle + 1;
            else last = middle;
        }
        return first;
    }
};

// ---- ALONG: a lane's pack of positions, and as many packs before it as the filter reaches back

constexpr int SLOTS = 1 + (BEFORE + PACK - 1) / PACK;
constexpr int OWN = (SLOTS - 1) * PACK;  // of a lane's inputs, the first of its own pack

struct Strip {  // what a group of lanes walks over: a segment of a row
    Index batch, channel, first, end;  // the lane's first pack, and where the segment ends
    bool exists;
    // Packs are aligned as the rows of `aligned` are.
    __device__ Strip(const Call& call, const Tensor<X_T>& aligned, Index segment_length, Index segments) {
        Index warp = Index(blockIdx.x) * WARPS + threadIdx.x / WARP;
        Index row = warp / segments * GROUPS + threadIdx.x % WARP / LANES, segment = warp % segments;
        exists = row < call.B * call.D;
        row = exists ? row : 0;
        batch = row / call.D, channel = row % call.D;
        Index shift = ADJACENT ? Index(reinterpret_cast<size_t>(aligned.row(batch, channel).data) / sizeof(X_T) % PACK)
                               : 0;
        first = segment * segment_length - shift;
        end = min(first + segment_length, call.L);
        first += threadIdx.x % LANES * PACK;
    }
};

template <class T> __device__ __forceinline__ T element(const unsigned* words, int k) {
    T v;
    if (sizeof(T) == 2) {
        unsigned short bits = static_cast<unsigned short>(words[k / 2] >> k % 2 * 16);
        memcpy(&v, &bits, 2);
    } else {
        memcpy(&v, words + k * (sizeof(T) / 4), sizeof(T));
    }
    return v;
}

// `count` packs of elements from `first` on, where x is not aligned as packs are: from the packs of
// memory that they lie in.
template <int count>
__device__ __forceinline__ void read_shifted(const X_T* first, int offset, Real (&u)[count * PACK]) {
    constexpr int of_pack = PACK * sizeof(X_T) / 4, n = (count + 1) * of_pack;
    unsigned words[n + 2] = {};
#pragma unroll
    for (int k = 0; k <= count; ++k) {
        Elements pack;
        pack.read(first - offset + k * PACK);
        memcpy(words + k * of_pack, &pack, sizeof pack);
    }
    int bytes = offset * int(sizeof(X_T));
    if (bytes & 8)
#pragma unroll
        for (int w = 0; w < n; ++w) words[w] = words[w + 2];
    if (bytes & 4)
#pragma unroll
        for (int w = 0; w < n; ++w) words[w] = words[w + 1];
    if (bytes & 2)
#pragma unroll
        for (int w = 0; w < n; ++w) words[w] = words[w] >> 16 | words[w + 1] << 16;
#pragma unroll
    for (int k = 0; k < count * PACK; ++k) u[k] = widen<Real>(element<X_T>(words, k));
}

// `count` packs of a row from `first` on, which may lie partly outside of it.
template <int count>
__device__ __forceinline__ void read(const Inputs& inputs, Index first, Real (&u)[count * PACK]) {
    const X_T* from = inputs.x.data + first;
    int offset = ADJACENT ? int(reinterpret_cast<size_t>(from) / sizeof(X_T) % PACK) : 0;
    if constexpr (ADJACENT) {
        if (offset > 0 && first >= offset && first - offset + (count + 1) * PACK <= inputs.end) {
            read_shifted<count>(from, offset, u);
            return;
        }
    }
#pragma unroll
    for (int slot = 0; slot < count; ++slot) {
        Index position = first + slot * PACK;
        if (ADJACENT && offset == 0 && position >= 0 && position + PACK <= inputs.end) {
            Elements pack;
            pack.read(from + slot * PACK);
#pragma unroll
            for (int k = 0; k < PACK; ++k) u[slot * PACK + k] = widen<Real>(pack.at[k]);
        } else {  // at an end of the row; a loop with a shift has little code and few registers
            Real some[PACK];
#pragma unroll 1
            for (int k = 0; k < PACK; ++k) push(some, inputs.at(position + k));
#pragma unroll
            for (int k = 0; k < PACK; ++k) u[slot * PACK + k] = some[k];
        }
    }
}

// A pack of results; rows of results are aligned as packs are.
__device__ __forceinline__ void write(const Row<X_T>& row, Index first, Index L, Real (&v)[PACK]) {
    if (ADJACENT && first >= 0 && first + PACK <= L) {
        Elements pack;
#pragma unroll
        for (int k = 0; k < PACK; ++k) pack.at[k] = narrow<X_T>(v[k]);
        pack.write(row.data + first);
        return;
    }
#pragma unroll 1
    for (int k = 0; k < PACK; ++k) {
        if (first + k >= 0 && first + k < L) row[first + k] = narrow<X_T>(v[0]);
        push(v, v[0]);
    }
}

// INDEXED: the indices of `count` positions from `first` on.
template <int count> struct Indices {
    Id at[count];
    __device__ __forceinline__ void read(const Call& call, Index batch, Index first) {
#pragma unroll
        for (int k = 0; k < count; ++k) at[k] = call.index_of(batch, first + k);
    }
};

// The inputs of a position, the newest last, without those that it does not see.
__device__ __forceinline__ void keep_seen(const Id* indices, const Real* window, Real (&seen)[WIDTH]) {
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        bool sees = indices[k] == indices[BEFORE] && indices[BEFORE] >= 0;
        seen[k] = sees ? window[k] : Real(0);
    }
}

// ---- ACROSS: a lane's pack of channels, position by position

struct Walk {  // of a lane: its channels, and its positions first .. end - 1
    Index batch, channel, first, end;
    bool exists;
    __device__ Walk(const Call& call, Index run, Index walks) {
        Index tiles = (call.D + LANES * PACK - 1) / (LANES * PACK), block = blockIdx.x;
        Index walk = block % walks * (WARPS * GROUPS) + threadIdx.x / WARP * GROUPS + threadIdx.x % WARP / LANES;
        batch = block / walks / tiles;
        channel = (block / walks % tiles * LANES + threadIdx.x % LANES) * PACK;
        first = walk * run;
        end = min(first + run, call.L);
        exists = batch < call.B && channel < call.D && first < end;  // packs divide the channels
    }
};

__device__ __forceinline__ void read_channels(const Tensor<const X_T>& x, Index batch, Index channel, Index position,
                                              Elements& pack) {
    pack.read(x.data + batch * x.stride_batch + channel * x.stride_channel + position * x.stride_position);
}
__device__ __forceinline__ void write_channels(const Tensor<X_T>& y, Index batch, Index channel, Index position,
                                               const Elements& pack) {
    pack.write(y.data + batch * y.stride_batch + channel * y.stride_channel + position * y.stride_position);
}

// The sequence that a walk is in.
struct Current {
    Index sequence, start, end;
    bool exists;  // false: no sequence has this position
    __device__ Current(const Call& call, Index batch, Index position)
        : sequence(batch), start(0), end(call.L), exists(true) {
        if (SEQUENCES != PACKED) return;
        sequence = call.sequence_of(position);
        exists = sequence < call.count && call.starts(sequence) <= position && call.is_valid(sequence);
        start = exists ? call.starts(sequence) : position;
        end = exists ? call.starts(sequence + 1) : position + 1;
    }
};

// The inputs before a position of a walk.
__device__ __forceinline__ void read_before(const Call& call, const Walk& walk, const Current& current, Index position,
                                            Real (&windows)[PACK][WIDTH]) {
#pragma unroll
    for (int k = 1; k < WIDTH; ++k) {
        Index before = position - WIDTH + k;
        Elements pack{};
        if (current.exists && before >= current.start) read_channels(call.x, walk.batch, walk.channel, before, pack);
#pragma unroll
        for (int c = 0; c < PACK; ++c) windows[c][k] = widen<Real>(pack.at[c]);
        if (!call.initial.data || !current.exists || before >= current.start) continue;
        Index column = call.S + before - current.start;
#pragma unroll
        for (int c = 0; c < PACK; ++c)
            windows[c][k] = widen<Real>(call.initial.row(current.sequence, walk.channel + c)[column]);
    }
}
