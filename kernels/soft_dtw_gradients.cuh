#pragma once
// Sums of gradients over the cells of a table: along a lane's rows for grad_a; for grad_b down the
// columns, from lane to lane and, by mail, from stripe to stripe.
//
// Compiled with: REAL, COST, C_T, FEATURES, ROWS, LANES, HELPERS, STEPS, MAIL, HARD (see soft_dtw.cu).

#include "soft_dtw_recurrence.cuh"

constexpr int GROUP = FEATURES > 0 ? FEATURES : 4;    // features whose gradients are added up at a time
constexpr int LETTERS = (STEPS + LANES - 1) / LANES;  // of a chunk, that a lane takes for its stripe
constexpr int BOXES = MAIL ? PAIRS : 1;

struct Letterbox {  // for the last lane of each pair: what came from the stripe below for the steps of a chunk
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
    __device__ __forceinline__ void wait(const Place& at, int first, Span span, const Letter* mail, Letterbox& box) {
#pragma unroll
        for (int n = 0; n < LETTERS; ++n) {
            int t = n * LANES + at.lane;
            Row row{};
            if (t < STEPS && span.holds(first + t)) {
                letters[n].wait(mail + first + t, at.stripe + 1);
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) letters[n].get(k, row.at[k]);
            }
            if (t < STEPS) box.at[t][threadIdx.x % WARP / LANES] = row;
        }
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
};

struct Gradients {  // where sums of gradients are kept, here those of the lane
    Real* a;         // [B, D, padded_a]
    Letter* b;       // [B, D, blocks]: mail, from stripe to stripe
    Row* in_flight;  // [stripes * groups, D, 32], of helpers: sums of columns on their way from lane to lane
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

// A helper's share of a chunk: groups of features, for which E is in shared memory.
__device__ void add_gradients(const Source& source, const Place& at, const Gradients& gradients, const Steps& steps,
                              int chunk,
                              bool first_visit, const Plane& flow, Letterbox (&boxes)[GROUP]) {
    int first_step = steps.first + chunk * STEPS, first_in = first_step - (LANES - 1);
    int helper = int(threadIdx.x) / WARP - 1;
    for (Index first = helper * GROUP; first < source.D; first += HELPERS * GROUP) {
        Inboxes inboxes[GROUP];
        if (MAIL)
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (first + f < source.D) inboxes[f].look(at, first_in, gradients.received, gradients.mail(first + f));
        Features<GROUP> features;
        Sums sums{};
        features.take_rows(source, at, first);
        if (!first_visit)
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (first + f < source.D) sums.down[f] = gradients.in_flight[(first + f) * WARP];
        features.take_columns(source, at, first_step + STEPS - 1 - at.lane, first);
#pragma unroll
        for (int f = 0; f < GROUP; ++f)
            if (!first_visit && at.span.count > 0 && first + f < source.D) sums.along[f] = gradients.along(first + f);
        if (MAIL) {
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (first + f < source.D)
                    inboxes[f].wait(at, first_in, gradients.received, gradients.mail(first + f), boxes[f]);
            __syncwarp();
        }
#pragma unroll 1
        for (int t = STEPS - 1; t >= 0; --t) {
            int block = first_step + t - at.lane;
#pragma unroll
            for (int f = 0; f < GROUP; ++f) sums.down[f] = from_lane_below(at, sums.down[f], boxes[f], t);
            if (at.span.holds(block)) {
                Block E;
                flow.get(t, E);
                sums.add(features, E);
            }
            features.take_columns(source, at, block - 1, first);
            if (at.lane == 0 && gradients.sent.holds(block)) {
                Letter* to = gradients.mail(first) + block;
#pragma unroll
                for (int f = 0; f < GROUP; ++f, to += gradients.blocks)
                    if (first + f < source.D) send(sums.down[f], at.stripe, to);
            }
        }
#pragma unroll
        for (int f = 0; f < GROUP; ++f) {
            if (first + f >= source.D) break;
            gradients.in_flight[(first + f) * WARP] = sums.down[f];
            if (at.span.count > 0) gradients.along(first + f) = sums.along[f];
        }
        __syncwarp();
    }
}
