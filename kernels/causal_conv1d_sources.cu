// Causal depthwise convolution of sequences by index: of which inputs the final states are.
//
// The state of a batch item has the last S inputs of the sequence that its last position belongs to,
// padding aside: positions with the same index, back to the first one with another. Where that gets
// to position 0 it goes on into the initial state.
//
// Launch: grid (B), block (32): a warp looks at 32 positions at a time, from the end.
// Compiled with: INDEX_T.

#include "common.cuh"
#include "convolution.cuh"

extern "C" __global__ void __launch_bounds__(WARP)
causal_conv1d_sources(const INDEX_T* index /* [B, L] */, Index index_b, Index index_l, Index L, Index S,
                      Index has_state,
                      Index* sources /* [B, S]: a position, below 0 in the initial state, or NOTHING_KEPT */) {
    index += blockIdx.x * index_b;
    sources += blockIdx.x * S;
    Index left = S, own = -1;  // entries to be found, the newest last; the index of the last sequence
    bool ended = false;
    for (Index last = L - 1; last >= 0 && left > 0 && !ended; last -= WARP) {
        Index position = last - threadIdx.x;
        Index here = position >= 0 ? Index(index[position * index_l]) : Index(-1);
        unsigned real = __ballot_sync(FULL_MASK, here >= 0);
        if (own < 0 && real) own = __shfl_sync(FULL_MASK, here, __ffs(real) - 1);
        unsigned other = __ballot_sync(FULL_MASK, here >= 0 && here != own);
        unsigned until = other ? (1u << (__ffs(other) - 1)) - 1 : FULL_MASK;  // lanes before the first other one
        unsigned found = real & until, before = found & ((1u << threadIdx.x) - 1);
        Index place = left - 1 - __popc(before);
        if (found >> threadIdx.x & 1 && place >= 0) sources[place] = position;
        left -= __popc(found);
        ended = other != 0;
    }
    left = max(left, Index(0));
    bool reaches = has_state && !ended && (own < 0 || Index(index[0]) == own);  // back to the initial state
    for (Index s = threadIdx.x; s < left; s += WARP) sources[s] = reaches ? s - left : NOTHING_KEPT;
}
