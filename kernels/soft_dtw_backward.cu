// Soft-DTW, the backward sweep: E, and from it the gradients of the series, of the costs or of gamma.
//
//     E[i,j] = d value / d C[i,j]:  E[n-1,m-1] = 1, and each cell hands E to its three predecessors
//              in proportion to their weights exp(-r / gamma) / sum exp(-r / gamma)
//     grad_a[i] = sum_j E[i,j] dC[i,j]/da[i],   grad_b likewise
//     d value / d gamma = -sum_ij E[i,j] entropy(weights of i,j)
//
// soft_dtw.cu has kept the last row of each stripe and what a lane carried at the start of each
// chunk. This walks stripes and chunks in reverse, computes the weights of a chunk anew into shared
// memory, and sends E back the way that R came. Nothing of size N x M is kept. Away from the best paths
// E soon is too small for a float, and so 0: chunks into which no E flows are passed by.
//
// Launch and macros as soft_dtw.cu, and OUTPUT; GROUP (see soft_dtw_gradients.cuh).

#include "soft_dtw_gradients.cuh"

// OUTPUT of the backward
#define SERIES 1     // gradients of a and b
#define ALIGNMENT 2  // E
#define ENTROPY 3    // d value / d gamma

// Blocks of threads for which a multiprocessor's registers have to suffice.
constexpr int RESIDENT = HELPERS == 0 || HELPERS > 3 ? 1 : 2;
constexpr bool SLOPES = OUTPUT == SERIES && COST == ROOT;
constexpr int PLANES = SLOPES || OUTPUT == ENTROPY ? 4 : 3;
constexpr int COSTS = 0, FLOW = 1;                    // of helpers: what a plane holds before its weights, and after
constexpr int DIAGONAL = 0, UP = 1, LEFT = 2;         // planes of weights
constexpr int EXTRA = PLANES - 1;                     // slopes of ROOT, or entropies

struct Chunk {  // what is shared of a chunk
    Plane planes[PLANES];
};

struct Shared {
    Chunk chunks[HELPERS > 0 ? 2 : 1];
    Letterbox box, boxes[HELPERS > 0 ? HELPERS : 1][GROUP];  // for E, and for sums of gradients
    int dry[4];  // by the lowest bit of the chunk: no E flows in it
};

// Rounded well: an error of the fast one would go into the weights of every cell on a path.
__device__ __forceinline__ float reciprocal(float v) {
    float r = __fdividef(1.0f, v);
    return fmaf(r, fmaf(-v, r, 1.0f), r);
}
__device__ __forceinline__ double reciprocal(double v) { return 1 / v; }

struct Weights {  // of the predecessors of a block's cells; they add up to 1
    Block diagonal, up, left;
};

// R of cell (r, k) of a block, with its weights and, for OUTPUT ENTROPY, their entropy.
__device__ __forceinline__ Real recurrence(Real diagonal, Real up, Real left, Real cost, bool hard, int r, int k,
                                           Weights& weights, Block& entropy) {
    Real least = min(min(diagonal, left), up);
    Real d, u, l, logarithm = 0;
    if (HARD && hard) {
        d = Real(diagonal == least);
        u = d == 0 ? Real(up == least) : Real(0);
        l = 1 - d - u;
    } else {
        d = exp2(least - diagonal), u = exp2(least - up), l = exp2(least - left);
        Real sum = d + u + l, share = reciprocal(sum);
        logarithm = log2_of(sum);
        d *= share, u *= share, l *= share;
    }
    weights.diagonal.at[r][k] = d;
    weights.up.at[r][k] = u;
    weights.left.at[r][k] = l;
    if (OUTPUT == ENTROPY)  // -sum w ln w
        entropy.at[r][k] = Real(LN_2) * (logarithm + d * (diagonal - least) + u * (up - least) + l * (left - least));
    return least + (cost - logarithm);
}

struct Flow {  // what a lane carries in the backward, from later columns to earlier ones
    Column left;    // E for its own next column, from the block done
    Row message;    // E for the row above the block done
    Real diagonal;  // E for the corner above the block done
    __device__ bool any() const {
        bool some = diagonal != 0;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) some |= left.at[r] != 0;
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) some |= message.at[k] != 0;
        return some;
    }
};

// E of a block's cells: R's recurrence backwards. `seed(r, k)` comes from outside of the table.
template <class Seed>
__device__ __forceinline__ void flow_back(Flow& flow, Row below, const Weights& weights, Block& E, Seed seed) {
#pragma unroll
    for (int k = COLUMNS - 1; k >= 0; --k) {
        Real up = below.at[k], diagonal = 0;
#pragma unroll
        for (int r = ROWS - 1; r >= 0; --r) {
            Real e = E.at[r][k] = flow.left.at[r] + up + seed(r, k);
            flow.left.at[r] = weights.left.at[r][k] * e + diagonal;
            up = weights.up.at[r][k] * e;
            diagonal = weights.diagonal.at[r][k] * e;
        }
        flow.message.at[k] = up + flow.diagonal;
        flow.diagonal = diagonal;
    }
}

// What lies outside of the blocks that lanes visit: no path, no flow.
__device__ void fill_outside(const Place& at, Index N, Index M, C_T* gradient) {
    for (int lane = 0; lane < WARP; ++lane) {
        int row = __shfl_sync(FULL_MASK, at.row, lane), n = __shfl_sync(FULL_MASK, at.pair.n, lane);
        int usable = __shfl_sync(FULL_MASK, at.pair.usable, lane), index = __shfl_sync(FULL_MASK, at.index, lane);
        int from = __shfl_sync(FULL_MASK, at.span.first, lane) * COLUMNS,
            to = __shfl_sync(FULL_MASK, at.span.end(), lane) * COLUMNS;
        if (n == 0 || (from == 0 && to >= M)) continue;
        C_T fill = narrow<C_T>(usable ? Real(0) : not_a_number<Real>());
        for (Index i = row; i < min(Index(row + ROWS), N); ++i)
            for (Index j = threadIdx.x % WARP; j < M; j += WARP)
                if (j < from || j >= to) gradient[(index * N + i) * M + j] = fill;
    }
}

// E of a block into the gradient [B, N, M]. Of a pair whose value is NaN it is NaN wherever a path may go.
__device__ __forceinline__ void write_alignment(const Place& at, int block, const Block& E, Real value, Index N, Index M,
                                                C_T* gradient) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            int i = at.row + r, j = block * COLUMNS + k;
            if (i >= N || j >= M) continue;
            bool here = at.pair.inside(i, j);
            Real e = value != value && (here || !at.pair.usable) ? value : here ? E.at[r][k] : Real(0);
            gradient[(at.index * N + i) * M + j] = narrow<C_T>(e);
        }
}

// Of sum_b grad_values[b] values[b]: the sums of the gradients of a and b (OUTPUT SERIES), the gradient of C
// (ALIGNMENT), or the entropies that make d value / d gamma (ENTROPY). A pair whose value is no finite
// number sends nothing back.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
soft_dtw_backward(Index B, Index groups, Index stripes, const Pair* pairs /* [B] */,
                  const Real* a /* packed [batch_a, D, padded_a] */, const Real* b /* packed [batch_b, D, padded_b] */,
                  Index D, Index padded_a, Index padded_b,
                  const C_T* C /* [B, N, M] */, Index C_stride_batch, Index C_stride_row, Index C_stride_column,
                  int* spoilt /* [B] */, double factor, RowLetter* mail /* see letters_of */, Index mail_blocks,
                  const Real* lanes /* [stripes, groups, chunks, LANE_WORDS, 32] */, Index chunks,
                  const Real* grad_values /* in rows, as the values are; or null for ones */, Index row_length,
                  Index grad_values_stride_row, Index grad_values_stride_column,
                  const Real* values /* each at its pair's place */,
                  Letter* mail_back /* [B, blocks] */, Index blocks,
                  Real* sums_a /* [B, D, padded_a] */, Letter* sums_b /* [B, D, blocks] */,
                  Real* in_flight /* [stripes * groups, D, 32, COLUMNS] */,
                  C_T* grad_C /* [B, N, M] */, Index N, Index M, Real* entropies /* [stripes, B] */) {
    constexpr bool ADDS = OUTPUT == SERIES && HELPERS == 0;  // the sweeping warp adds up the gradients
    DYNAMIC_SHARED(Shared, memory);
    auto& [chunks_shared, box, boxes, dry_chunks] = *memory;
    bool sweeps = threadIdx.x < WARP;
    Index task = gridDim.x - 1 - blockIdx.x;  // of the forward: its stripes in reverse
    Place at(pairs, B, int(stripes), int(task / groups), int(task % groups));
    Source source = source_of(at, a, b, D, padded_a, padded_b, C, C_stride_batch, C_stride_row, C_stride_column, spoilt,
                              factor);
    Steps steps(at);
    const RowLetter* letters_in = letters_of(at.stripe - 1, mail, B, mail_blocks, true, at, at.row - ROWS);
    RowLetter inbox;
    Held held;
    held.take_rows(source, at);
    bool hard = at.pair.gamma == 0;
    int last_row = at.pair.n - 1 - at.row, last_column = (at.pair.m - 1) % COLUMNS;
    int last_block = last_row >= 0 && last_row < ROWS ? (at.pair.m - 1) / COLUMNS : -1;
    Real value = values[at.pair.place], seed = 1;
    if (grad_values)
        seed = grad_values[at.pair.place / row_length * grad_values_stride_row +
                           at.pair.place % row_length * grad_values_stride_column];
    if (value - value != 0) seed = 0;
    Real entropy = 0;
    Gradients gradients(at, D, padded_a, blocks, task, sums_a, sums_b, in_flight);
    Sums sums{};
    Flow flow{};
    mail_back += at.index * blocks;
    // The span of the last lane, for all lanes of the group: they take its letters.
    Span from_below = {__shfl_sync(FULL_MASK, at.from_below.first, LANES - 1, LANES),
                       __shfl_sync(FULL_MASK, at.from_below.count, LANES - 1, LANES)};

    Lane lane, next;
    auto start = [&](int chunk) {
        bring_back(lanes + (task * chunks + chunk) * LANE_WORDS * WARP + threadIdx.x % WARP, next);
        int block = steps.first + chunk * STEPS - at.lane;
        inbox.clear();
        if (MAIL && at.from_above.holds(block)) inbox.look(letters_in + block);
    };

    if (OUTPUT == ALIGNMENT && sweeps) fill_outside(at, N, M, grad_C);
    int first_chunk = steps.chunks() - 1;
    if (first_chunk >= 0 && sweeps) start(first_chunk);
    bool dry = true;
    // Helpers are one chunk behind with the gradients. They are one ahead with the costs, unless the chunk is dry.
    for (int chunk = first_chunk; chunk >= (HELPERS > 0 && OUTPUT == SERIES ? -1 : 0); --chunk) {
        Chunk& shared = chunks_shared[HELPERS > 0 ? chunk & 1 : 0];
        int first_step = steps.first + chunk * STEPS, first_in = first_step - (LANES - 1);
        bool dry_before = dry;
        Inboxes flows, columns[GROUP];
        if (HELPERS > 0) __syncthreads();
        if (sweeps && chunk >= 0) {  // does any E flow in?
            if (MAIL) {
                flows.look(at, first_in, from_below, mail_back);
#pragma unroll
                for (int f = 0; f < GROUP; ++f)
                    if (ADDS) columns[f].look(at, first_in, gradients.received, gradients.mail(f));
            }
            bool seeded = last_block >= 0 && unsigned(last_block + at.lane - first_step) < STEPS && seed != 0;
            dry = !__any_sync(FULL_MASK, seeded || flow.any());
            if (MAIL && dry)
                dry = !__any_sync(FULL_MASK, flows.wait(at, first_in, from_below, mail_back, box));
        }
        if (HELPERS > 0) {
            if (threadIdx.x == 0) dry_chunks[chunk & 1] = dry;
            __syncthreads();
            dry = dry_chunks[chunk & 1];
            bool now = chunk >= 0 && !dry && dry_before;  // else they have been prepared
            if (now && !sweeps) prepare_costs(source, at, steps, chunk, shared.planes[COSTS]);
            if (now) __syncthreads();
        }
        if (HELPERS > 0 && !sweeps) {
            Chunk& other = chunks_shared[(chunk + 1) & 1];
            if (chunk > 1) prefetch_columns(source, at, steps, chunk - 2, LANES - 1);
            if (chunk > 0 && !dry) prepare_costs(source, at, steps, chunk - 1, other.planes[COSTS]);
            if (OUTPUT == SERIES && chunk < first_chunk)
                add_gradients(source, at, gradients, steps, chunk + 1, first_chunk, dry_before, other.planes[FLOW],
                              boxes[threadIdx.x / WARP - 1], sums);
            continue;
        }
        if (chunk < 0) break;
        if (dry) {  // the others' letters go on
            if (chunk > 0) start(chunk - 1);
            if (MAIL)
#pragma unroll
                for (int f = 0; f < GROUP; ++f)
                    if (ADDS) columns[f].wait(at, first_in, gradients.received, gradients.mail(f), boxes[0][f]);
            __syncwarp();
#pragma unroll 1
            for (int t = STEPS - 1; t >= 0; --t) {
                int block = first_step + t - at.lane;
                if (OUTPUT == ALIGNMENT && at.span.holds(block))
                    write_alignment(at, block, Block{}, value, N, M, grad_C);
                if (MAIL && at.to_above.holds(block)) send(Row{}, at.stripe, mail_back + block);
                if (ADDS) sums.take_from_below(at, boxes[0], t);
                if (ADDS) sums.send_up(at, gradients, block);
            }
            __syncwarp();
            continue;
        }

        // the weights, forward through the chunk
        lane = next;
        held.take_columns(source, at, first_step - at.lane);
#pragma unroll 1
        for (int t = 0; t < STEPS; ++t) {
            int block = first_step + t - at.lane;
            bool inside = at.span.holds(block);
            Row above;
            Real base_above;
            Block cost, R, extra;
            Weights weights;
            take_above(lane, at, block, letters_in, inbox, above, base_above);
            if (inside && HELPERS > 0) shared.planes[COSTS].get(t, cost);
            else if (inside) held_costs(source, held, at, block, cost);
            held.take_columns(source, at, block + 1);
            if (!inside) {
                stand_by(lane, above, base_above);
                continue;
            }
            rebase(lane, above, base_above);
            advance(lane, above, cost, [&](Real diagonal, Real up, Real left, Real c, int r, int k) {
                return recurrence(diagonal, up, left, c, hard, r, k, weights, extra);
            }, R);
            shared.planes[DIAGONAL].put(t, weights.diagonal);
            shared.planes[UP].put(t, weights.up);
            shared.planes[LEFT].put(t, weights.left);
            if (SLOPES)  // the cost is scale * root, and the slope needs 1 / root
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int k = 0; k < COLUMNS; ++k)
                        extra.at[r][k] = cost.at[r][k] > 0 ? source.scale * reciprocal(cost.at[r][k]) : Real(0);
            if (PLANES == 4) shared.planes[EXTRA].put(t, extra);
        }

        // E, backward through it; what the next chunk starts from comes meanwhile
        if (chunk > 0) start(chunk - 1);
        held.take_columns(source, at, first_step + STEPS - 1 - at.lane);
        if (MAIL) {
            flows.wait(at, first_in, from_below, mail_back, box);
#pragma unroll
            for (int f = 0; f < GROUP; ++f)
                if (ADDS) columns[f].wait(at, first_in, gradients.received, gradients.mail(f), boxes[0][f]);
            __syncwarp();
        }
#pragma unroll 1
        for (int t = STEPS - 1; t >= 0; --t) {
            int block = first_step + t - at.lane;
            Row below = from_lane_below(at, flow.message, box, t);
            if (ADDS) sums.take_from_below(at, boxes[0], t);
            if (at.span.holds(block)) {
                Weights weights;
                Block E, extra;
                shared.planes[DIAGONAL].get(t, weights.diagonal);
                shared.planes[UP].get(t, weights.up);
                shared.planes[LEFT].get(t, weights.left);
                if (PLANES == 4) shared.planes[EXTRA].get(t, extra);
                if (block == last_block)
                    flow_back(flow, below, weights, E,
                              [&](int r, int k) { return r == last_row && k == last_column ? seed : Real(0); });
                else
                    flow_back(flow, below, weights, E, [](int, int) { return Real(0); });
                if (OUTPUT == ALIGNMENT) write_alignment(at, block, E, value, N, M, grad_C);
                if (PLANES == 4)
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int k = 0; k < COLUMNS; ++k) {
                            E.at[r][k] *= extra.at[r][k];
                            if (OUTPUT == ENTROPY) entropy += E.at[r][k];
                        }
                if (OUTPUT == SERIES && HELPERS > 0) shared.planes[FLOW].put(t, E);
                if (ADDS) sums.add(reinterpret_cast<const Features<GROUP>&>(held), E);
            } else {
                flow.message = Row{};
                flow.message.at[COLUMNS - 1] = flow.diagonal;
                flow.diagonal = 0;
            }
            held.take_columns(source, at, block - 1);
            if (MAIL && at.to_above.holds(block)) send(flow.message, at.stripe, mail_back + block);
            if (ADDS) sums.send_up(at, gradients, block);
        }
        if (MAIL) __syncwarp();  // all have read the letterboxes
    }
    if (ADDS && at.span.count > 0)
#pragma unroll
        for (int f = 0; f < GROUP; ++f) gradients.along(f) = sums.along[f];
    if (OUTPUT == ENTROPY && sweeps) {
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2)
            entropy += __shfl_down_sync(FULL_MASK, entropy, other, LANES);
        if (at.lane == 0 && at.pair.n > 0) entropies[at.stripe * B + at.index] = entropy;
    }
}
