#pragma once
// What forward and backward of the causal convolution share: a call's tensors, the inputs of a
// sequence, and how warps share the work out.
//
// ALONG: neighbouring lanes have neighbouring positions. A group of LANES lanes, of one warp, takes a
// segment of a row, one channel of one batch item; a lane has a pack of PACK positions of each tile.
// ACROSS: neighbouring lanes have neighbouring channels, a pack of PACK each. A group of LANES
// lanes, of one block, walks over a run of positions one by one.
//
// Compiled with: X_T, WEIGHT_T, BIAS_T, STATE_T, REAL, WIDTH; SILU, INITIAL_STATE, FINAL_STATE (0 or 1:
// what a call has); ACROSS (0 or 1), PACK, LANES, WARPS; RESIDENT, blocks of threads for which a
// multiprocessor's registers have to suffice; STAGES, a power of 2, steps that are on their way to
// shared memory at a time, each a tile, or (ACROSS) AHEAD positions; PACKS (ALONG: below);
// WEIGHTS_AT_ONCE, as many of a lane's weights lie in one aligned place; SEQUENCES (below), INDEX_T.

#include "common.cuh"
#include "convolution.cuh"

typedef REAL Real;

// SEQUENCES
#define WHOLE 0    // each batch item is one
#define INDEXED 1  // positions have an index [B, L]: those with the same one see each other, negative ones are padding
#define PACKED 2   // one batch item, with the positions [count + 1] where sequences start

// PACKS, ALONG
#define APART 0    // positions do not lie next to each other in each tensor like x
#define SHIFTED 1  // they do; inputs are not aligned as results are
#define ALIGNED 2  // they do, and all rows of a channel are aligned alike

constexpr int THREADS = WARP * WARPS;
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
    __device__ __forceinline__ Real before_start(Index position) const {
        return position >= start - width ? widen<Real>(state[width + position - start]) : Real(0);
    }
    __device__ __forceinline__ Real at(Index position) const {
        if (position < start) return before_start(position);
        return position < end ? widen<Real>(x[position]) : Real(0);
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
    const Index* sources;           // INDEXED, with final states: [B, S], see causal_conv1d_sources
    Index B, D, L, S, count;        // states have S columns; as many as sequences: B, or those packed

    template <int n> __device__ __forceinline__ void load(Index channel, Weights (&filters)[n]) const {
        constexpr int at_once = n * WIDTH % WEIGHTS_AT_ONCE ? 1 : WEIGHTS_AT_ONCE;  // 1: fewer channels than a pack
        load_filters<at_once>(weight, weight_d, weight_k, bias, bias_d, channel, filters);
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
        if (INITIAL_STATE) inputs.state = initial.row(sequence, channel), inputs.width = S;
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

// INDEXED: the indices of `count` neighbouring positions.
template <int count> struct Indices {
    Id at[count];
    // exist: all of them do.
    template <bool exist> __device__ __forceinline__ void read(const Call& call, Index batch, Index first) {
        const Id* from = call.index + batch * call.index_b + first * call.index_l;
#pragma unroll
        for (int k = 0; k < count; ++k) at[k] = exist ? from[k * call.index_l] : call.index_of(batch, first + k);
    }
    // Whether all of these positions see each other.
    __device__ __forceinline__ bool agree() const {
        bool alike = at[0] >= 0;
#pragma unroll
        for (int k = 1; k < count; ++k) alike &= at[k] == at[0];
        return alike;
    }
};

// INDEXED: the inputs of a position, the newest last, without those that it does not see.
__device__ __forceinline__ void keep_seen(const Id* indices, const Real* window, Real (&seen)[WIDTH]) {
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
        bool sees = indices[k] == indices[BEFORE] && indices[BEFORE] >= 0;
        seen[k] = sees ? window[k] : Real(0);
    }
}

// Places in shared memory for what is on its way: so many packs a lane, of STAGES steps.
struct alignas(PACK * sizeof(X_T)) Place {
    unsigned char bytes[PACK * sizeof(X_T)];
};
template <int packs> struct Room {
    Place places[STAGES][packs][THREADS];  // a lane's packs of a step are THREADS places apart
    __device__ __forceinline__ Place* of(int step) { return &places[unsigned(step) % STAGES][0][threadIdx.x]; }
};

// ---- ALONG: a lane's pack of positions, with the inputs before it

constexpr int TILE = LANES * PACK;
constexpr int FAR = 1 << 30;  // a position beyond those of a strip
// Inputs before a pack are read by parts, of at least 4 bytes.
constexpr int LEAST = 4 / sizeof(X_T);
constexpr int ENOUGH = BEFORE <= 1 ? 1 : BEFORE <= 2 ? 2 : BEFORE <= 4 ? 4 : 8;
constexpr int PART = PACKS == SHIFTED || ENOUGH > PACK ? PACK : ENOUGH > LEAST ? ENOUGH : LEAST;
constexpr int PARTS = (BEFORE + PART - 1) / PART;

// Positions that exist, counted from one of them: from .. to - 1.
struct Span {
    int from, to;
    __device__ __forceinline__ bool has(int k) const { return k >= from && k < to; }
    __device__ __forceinline__ bool has_all(int count) const { return from <= 0 && count <= to; }
    __device__ __forceinline__ bool has_any(int count) const { return from < count && to > 0; }
};

// What a group of lanes walks over: a segment of a row, whose positions are counted from `base` on.
// Packs are aligned as the rows of results are; the first one of a row may begin before it.
struct Strip {
    Index batch, channel, base;
    int segment, tiles;  // as many tiles for each row, so that a warp stays together; none for L = 0
    int from, to, size;  // positions from .. to - 1 exist; the segment has 0 .. size - 1
    int inner_from, inner_to;  // tiles, see inside
    bool exists;
    // Results of a position take `after` positions after it, which exist beyond the segment as well.
    __device__ Strip(const Call& call, const Tensor<X_T>& results, int length, int segments, int after) {
        unsigned warp = blockIdx.x * WARPS + threadIdx.x / WARP;
        Index row = Index(warp / segments) * (WARP / LANES) + threadIdx.x % WARP / LANES;
        exists = row < call.B * call.D;
        row = exists ? row : 0;
        batch = row / call.D, channel = row % call.D;
        segment = warp % segments, base = Index(segment) * length;
        int positions = int(min(Index(length), call.L - base));
        if (PACKS != APART)
            base -= Index(reinterpret_cast<size_t>(results.row(batch, channel).data) / sizeof(X_T) % PACK);
        from = int(max(-base, Index(-FAR)));
        to = exists ? int(min(call.L - base, Index(length) + (after + PACK - 1) / PACK * PACK)) : from;
        size = min(length, to);
        tiles = (positions + TILE - 1) / TILE;
        tiles += __any_sync(FULL_MASK, size > max(from, tiles * TILE));  // for a pack that begins before its row
        bool from_start = from == 0 && !INITIAL_STATE && SEQUENCES != INDEXED;
        inner_from = from_start ? 0 : max(from + PARTS * PART + TILE - 1, 0) / TILE;
        inner_to = min(size, to - after) / TILE;
    }
    __device__ __forceinline__ Span span(int first) const { return {from - first, to - first}; }
    // Whether all that the warp has in a tile exists and is of a segment of its own, with what its
    // results take of positions after it, and all of what is read before it; or, without a state and
    // indices, nothing of that.
    __device__ __forceinline__ bool inside(int tile) const {
        bool own = tile >= inner_from && tile < inner_to;
        return LANES == WARP ? own : __all_sync(FULL_MASK, own);
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

// A strip of a tensor.
template <class T> struct Line {
    T* data;  // of the lane's pack in the first tile
    Index stride;
    int offset;  // SHIFTED: of data behind an aligned place
    __device__ Line(const Tensor<T>& tensor, const Strip& strip, int lane) {
        Row<T> row = tensor.row(strip.batch, strip.channel);
        stride = PACKS == APART ? row.stride : 1;
        data = row.data + (strip.base + lane * PACK) * stride;
        keep(data);
        offset = PACKS == SHIFTED ? int(reinterpret_cast<size_t>(data) / sizeof(T) % PACK) : 0;
    }
    __device__ __forceinline__ T* at(int tile) const { return data + tile * TILE * stride; }
};

constexpr int WHOLES = 1 + (PACKS == SHIFTED);  // in which a pack lies

// A lane's pack of a line, and `before` elements before it, tile by tile: so many packs of a room.
template <int before> struct Reader {
    static constexpr int parts = (before + PART - 1) / PART, packs = parts + WHOLES;
    Line<const X_T> line;

    template <bool inside>
    __device__ __forceinline__ void fetch(const Strip& strip, int tile, int first, Place* places) const {
        const X_T* at = line.at(tile) - line.offset;
        first -= line.offset;
#pragma unroll
        for (int i = 0; i < parts; ++i) {
            int k = (i - parts) * PART;
            fetch<inside, false, PART>(at + k * line.stride, strip.span(first + k), places + i * THREADS);
        }
#pragma unroll
        for (int i = 0; i < WHOLES; ++i) {
            int k = i * PACK;
            fetch<inside, inside, PACK>(at + k * line.stride, strip.span(first + k), places + (parts + i) * THREADS);
        }
    }
    // Some elements, 0 for what does not exist. exists: all of them do; else inside: all or none.
    template <bool inside, bool exists, int n>
    __device__ __forceinline__ void fetch(const X_T* from, const Span& exist, void* to) const {
        constexpr bool sure = PACKS == ALIGNED && exists, whole = PACKS == ALIGNED && inside;
        bool all = sure || exist.has_all(n);
        if (PACKS != APART && (whole || all || !exist.has_any(n))) {
            copy_aside<n * sizeof(X_T), before == 0>(to, from, all);
            return;
        }
        Pack<X_T, n> pack{};
#pragma unroll
        for (int k = 0; k < n; ++k)
            if (exist.has(k)) pack.at[k] = from[k * line.stride];
        memcpy(to, &pack, sizeof pack);
    }
    __device__ __forceinline__ void widen_into(const Place* places, Real (&u)[before + PACK]) const {
        constexpr int skipped = parts * PART - before;
        if constexpr (PACKS != SHIFTED) {
#pragma unroll
            for (int i = 0; i < parts; ++i) {
                Pack<X_T, PART> part;
                memcpy(&part, places + i * THREADS, sizeof part);
#pragma unroll
                for (int k = 0; k < PART; ++k)
                    if (i * PART + k >= skipped) u[i * PART + k - skipped] = part.template value<Real>(k);
            }
            Elements pack;
            memcpy(&pack, places + parts * THREADS, sizeof pack);
#pragma unroll
            for (int k = 0; k < PACK; ++k) u[before + k] = pack.template value<Real>(k);
        } else {  // by words, then by half a word
            constexpr int size = sizeof(Elements) / 4, used = packs * size;
            unsigned words[used + 2] = {};
#pragma unroll
            for (int i = 0; i < packs; ++i) memcpy(words + i * size, places + i * THREADS, sizeof(Elements));
            int bytes = line.offset * int(sizeof(X_T));
#pragma unroll
            for (int w = 0; w < used; ++w) words[w] = bytes & 8 ? words[w + 2] : words[w];
#pragma unroll
            for (int w = 0; w < used; ++w) words[w] = bytes & 4 ? words[w + 1] : words[w];
            if (sizeof(X_T) == 2)
#pragma unroll
                for (int w = 0; w < used; ++w) words[w] = __funnelshift_r(words[w], words[w + 1], bytes % 4 * 8);
#pragma unroll
            for (int k = 0; k < before + PACK; ++k) u[k] = widen<Real>(element<X_T>(words, skipped + k));
        }
    }
};

// Inputs that lie before a row, where it has an initial state; u: of the pack at `first`, and before it.
__device__ __forceinline__ void read_state(const Strip& strip, const Inputs& inputs, int first,
                                           Real (&u)[BEFORE + PACK]) {
    int start = strip.from - first + BEFORE;  // of the row, in u
    if (!INITIAL_STATE || start <= 0) return;
#pragma unroll
    for (int k = 0; k < BEFORE + PACK; ++k)
        if (k < start && k >= start - BEFORE) u[k] = inputs.before_start(Index(k - start));
}

// A pack of results.
template <bool inside>
__device__ __forceinline__ void write(const Line<X_T>& line, int tile, const Span& exist, const Real (&v)[PACK]) {
    X_T* to = line.at(tile);
    Elements pack;
#pragma unroll
    for (int k = 0; k < PACK; ++k) pack.at[k] = narrow<X_T>(v[k]);
    if (PACKS != APART && (inside || exist.has_all(PACK))) {
        pack.write(to);
    } else if (exist.has_any(PACK)) {
#pragma unroll
        for (int k = 0; k < PACK; ++k)
            if (exist.has(k)) to[k * line.stride] = pack.at[k];
    }
}

// ---- ACROSS: a lane's pack of channels, position by position

constexpr int GROUPS = THREADS / LANES;

struct Walk {  // of a lane: its channels, and its positions first .. first + size - 1
    Index batch, channel, first;
    int size;
    bool exists;
    __device__ Walk(const Call& call, int run, int walks) {
        Index tiles = (call.D + TILE - 1) / TILE, block = blockIdx.x / tiles;
        channel = (blockIdx.x % tiles * LANES + threadIdx.x % LANES) * PACK;
        first = (block % walks * GROUPS + threadIdx.x / LANES) * run;
        batch = block / walks;
        exists = batch < call.B && channel < call.D && first < call.L;  // packs divide the channels
        size = exists ? int(min(Index(run), call.L - first)) : 0;
    }
};

// The packs of a walk's channels, position by position.
template <class T> struct Column {
    T* at;
    Index stride;
    __device__ Column(const Tensor<T>& tensor, const Walk& walk, Index position) : stride(tensor.stride_position) {
        at = tensor.row(walk.batch, walk.channel).data + position * stride;
    }
    __device__ __forceinline__ void next() { at += stride; }
    __device__ __forceinline__ void fetch(void* place, bool exists) {
        copy_aside<sizeof(Elements), true>(place, at, exists);
        next();
    }
};

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
        if (current.exists && before >= current.start) pack.read(Column<const X_T>(call.x, walk, before).at);
#pragma unroll
        for (int c = 0; c < PACK; ++c) windows[c][k] = pack.template value<Real>(c);
        if (!INITIAL_STATE || !current.exists || before >= current.start) continue;
        Index column = call.S + before - current.start;
#pragma unroll
        for (int c = 0; c < PACK; ++c)
            windows[c][k] = widen<Real>(call.initial.row(current.sequence, walk.channel + c)[column]);
    }
}
