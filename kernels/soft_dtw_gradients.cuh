#pragma once
// Sums of gradients over the cells of a table: along a lane's rows for grad_a; for grad_b down the
// columns, from lane to lane and, by mail, from stripe to stripe.
//
// Compiled with: REAL, COST, C_T, FEATURES, ROWS, LANES, HELPERS, STEPS, MAIL, HARD (see soft_dtw.cu);
// GROUP (features whose gradients a warp adds up at a time).

#include "soft_dtw_recurrence.cuh"

constexpr int LETTERS = (STEPS + LANES - 1) / LANES;  // of a chunk, that a lane takes for its stripe
constexpr int BOXES = MAIL || HELPERS > 0 ? PAIRS : 1;

struct Letterbox {  // of each pair, about the steps of a chunk: what came from below, or goes to the stripe above
    Row at[STEPS][BOXES];
};

// The letters that a stripe's last lane is to find in its letterbox; each lane of the group takes some.
struct Inboxes {
    Letter letters[LETTERS];
    // those about the blocks of `span`; the first step is about block `first`
    __device__ __forceinline__ void look(const Place& at, int first, Span span, const Letter* mail) {
#pragma unroll
        for (int n = 0; n < LETTERS; ++n) {
            int t = n * LANES + at.lane;
            letters[n].clear();
            if (t < STEPS && span.holds(first + t)) letters[n].look(mail + first + t);
        }
    }
    // whether any number that came is not 0
    __device__ __forceinline__ bool wait(const Place& at, int first, Span span, const Letter* mail, Letterbox& box) {
        bool any = false;
#pragma unroll
        for (int n = 0; n < LETTERS; ++n) {
            int t = n * LANES + at.lane;
            Row row{};
            if (t < STEPS && span.holds(first + t)) {
                letters[n].wait(mail + first + t, at.stripe + 1);
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) {
                    letters[n].get(k, row.at[k]);
                    any |= row.at[k] != 0;
                }
            }
            if (t < STEPS) box.at[t][threadIdx.x % WARP / LANES] = row;
        }
        return any;
    }
};

// `row` of the lane below; of the last lane, what came from the stripe below.
__device__ __forceinline__ Row from_lane_below(const Place& at, const Row& row, const Letterbox& box, int t) {
    Row below;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) below.at[k] = __shfl_down_sync(FULL_MASK, row.at[k], 1, LANES);
    if (at.lane == LANES - 1) below = MAIL ? box.at[t][threadIdx.x % WARP / LANES] : Row{};
    return below;
}

__device__ __forceinline__ void send(const Row& row, int stripe, Letter* to) {
    Letter letter;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k) letter.put(k, row.at[k], stripe);
    letter.send(to);
}

// Blocks in which a stripe has cells.
__device__ Span blocks_of_stripe(const Pair& pair, int stripe) {
    int top = stripe * HEIGHT, bottom = min(top + HEIGHT, pair.n) - 1;
    if (top >= pair.n) return {0, 0};
    int first = blocks_of(pair, top).first;
    return {first, blocks_of(pair, bottom / ROWS * ROWS).end() - first};
}

struct Gradients {  // where sums of gradients are kept, here those of the lane
    Real* a;         // [B, D, padded_a]
    Letter* b;       // [B, D, blocks]: mail, from stripe to stripe
    Row* in_flight;  // [stripes * groups, D, 32], of several rounds: sums of columns on their way from lane to lane
    Index padded_a, blocks;
    Span sent, received;  // blocks about which the stripe writes, and those about which the one below does
    __device__ Gradients(const Place& at, Index D, Index padded_a, Index blocks, Index task, Real* a, Letter* b,
                         Real* in_flight)
        : a(a + at.index * D * padded_a + at.row), b(b + at.index * D * blocks),
          in_flight(reinterpret_cast<Row*>(in_flight) + task * D * WARP + threadIdx.x % WARP), padded_a(padded_a),
          blocks(blocks), sent(blocks_of_stripe(at.pair, at.stripe)),
          received(blocks_of_stripe(at.pair, at.stripe + 1)) {
        received.count = max(min(received.end(), sent.end()) - received.first, 0);  // the others go no further
    }
    __device__ Letter* mail(Index f) const { return b + f * blocks; }
    __device__ Column& along(Index f) const { return *reinterpret_cast<Column*>(a + f * padded_a); }
};

// Sums of E times the slopes of the cost, for a group of features.
struct Sums {
    Column along[GROUP];  // a lane's rows: for grad_a
    Row down[GROUP];      // the columns of the block just done, over this row and those below: for grad_b
    // one block, whose columns have been summed over the rows below
    __device__ __forceinline__ void add(const Features<GROUP>& features, const Block& E) {
#pragma unroll
        for (int f = 0; f < GROUP; ++f)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) {
                    Real slope = features.rows[f].at[r] - features.columns[f].at[k];
                    if (COST == ABSOLUTE) slope = Real(slope > 0) - Real(slope < 0);
                    along[f].at[r] += E.at[r][k] * slope;
                    down[f].at[k] += E.at[r][k] * slope;
                }
    }
    // The sums of the lane below, or of the stripe below, go on.
    __device__ __forceinline__ void take_from_below(const Place& at, const Letterbox (&boxes)[GROUP], int t) {
#pragma unroll
        for (int f = 0; f < GROUP; ++f) down[f] = from_lane_below(at, down[f], boxes[f], t);
    }
    __device__ __forceinline__ void send_up(const Place& at, const Gradients& gradients, int block) const {
        if (at.lane > 0 || !gradients.sent.holds(block)) return;
#pragma unroll
        for (int f = 0; f < GROUP; ++f) send(down[f], at.stripe, gradients.mail(f) + block);
    }
};

// What a helper gets and sends by mail about a chunk, shared out among the lanes of a pair: letter n is
// about feature n / STEPS of its group, and step n % STEPS.
constexpr int SOME = 3;  // letters of a lane that are under way together

__device__ __forceinline__ void receive(const Place& at, const Gradients& gradients, Index D, Index first,
                                        int first_block, Letterbox (&boxes)[GROUP]) {
#pragma unroll 1
    for (int next = at.lane; next < GROUP * STEPS; next += SOME * LANES) {
        Letter letters[SOME];
        const Letter* from[SOME];
#pragma unroll
        for (int some = 0; some < SOME; ++some) {
            int n = next + some * LANES, block = first_block + n % STEPS;
            Index f = first + n / STEPS;
            bool comes = n < GROUP * STEPS && f < D && gradients.received.holds(block);
            from[some] = comes ? gradients.mail(f) + block : nullptr;
            letters[some].clear();
            if (comes) letters[some].look(from[some]);
        }
#pragma unroll
        for (int some = 0; some < SOME; ++some) {
            int n = next + some * LANES;
            Row row{};
            if (from[some]) {
                letters[some].wait(from[some], at.stripe + 1);
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) letters[some].get(k, row.at[k]);
            }
            if (n < GROUP * STEPS) boxes[n / STEPS].at[n % STEPS][threadIdx.x % WARP / LANES] = row;
        }
    }
    __syncwarp();
}

__device__ __forceinline__ void send_all(const Place& at, const Gradients& gradients, Index D, Index first,
                                         int first_block, const Letterbox (&boxes)[GROUP]) {
    __syncwarp();
#pragma unroll 1
    for (int n = at.lane; n < GROUP * STEPS; n += LANES) {
        int block = first_block + n % STEPS;
        Index f = first + n / STEPS;
        if (f < D && gradients.sent.holds(block))
            send(boxes[n / STEPS].at[n % STEPS][threadIdx.x % WARP / LANES], at.stripe, gradients.mail(f) + block);
    }
}

// A helper's share of a chunk: groups of features, for which E is in shared memory. If it has one
// group only, its sums stay in registers from chunk to chunk.
__device__ __forceinline__ void add_gradients(const Source& source, const Place& at, const Gradients& gradients,
                                              const Steps& steps, int chunk, int first_chunk, bool dry,
                                              const Plane& flow, Letterbox (&boxes)[GROUP], Sums& sums) {
    int first_step = steps.first + chunk * STEPS;
    bool groups = source.D > HELPERS * GROUP;
    for (Index first = (threadIdx.x / WARP - 1) * GROUP; first < source.D; first += HELPERS * GROUP) {
        if (MAIL) receive(at, gradients, source.D, first, first_step - (LANES - 1), boxes);
        Source group = source.from(first);
        Features<GROUP> features;
        if (!dry) {
            features.take_rows(group, at);
            features.take_columns(group, at, first_step + STEPS - 1 - at.lane);
        }
        if (chunk == first_chunk) {
            sums = Sums{};
        } else if (groups) {
#pragma unroll
            for (int f = 0; f < GROUP; ++f) {
                if (first + f >= source.D) continue;
                sums.down[f] = gradients.in_flight[(first + f) * WARP];
                if (at.span.count > 0) sums.along[f] = gradients.along(first + f);
            }
        }
#pragma unroll 1
        for (int t = STEPS - 1; t >= 0; --t) {
            int block = first_step + t - at.lane;
            sums.take_from_below(at, boxes, t);
            if (!dry && at.span.holds(block)) {
                Block E;
                flow.get(t, E);
                sums.add(features, E);
            }
            if (!dry) features.take_columns(group, at, block - 1);
            __syncwarp();  // what came about this step has been read
            if (at.lane == 0)
#pragma unroll
                for (int f = 0; f < GROUP; ++f) boxes[f].at[t][threadIdx.x % WARP / LANES] = sums.down[f];
        }
        send_all(at, gradients, source.D, first, first_step, boxes);
#pragma unroll
        for (int f = 0; f < GROUP; ++f) {
            if (first + f >= source.D) continue;
            if (groups) gradients.in_flight[(first + f) * WARP] = sums.down[f];
            if ((groups || chunk == 0) && at.span.count > 0) gradients.along(first + f) = sums.along[f];
        }
        __syncwarp();
    }
}
