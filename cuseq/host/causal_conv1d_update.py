"""The streaming step of the causal depthwise convolution in NumPy.

    y[b, d, t] = act(bias[d] + sum_k weight[d, k] x[b, d, t - W + 1 + k])

x before the start comes from the row of the pool that belongs to batch item b, and x is then
stored in that row. A row of S columns holds the inputs newest last and is shifted; or, with
cache_seqlens c, it is a ring: input t goes to column (c + t) mod S, and the inputs before the
start lie at (c - 1) mod S, (c - 2) mod S, ...
Inputs of this call are read as they are, though storing rounds them to the state's dtype.
"""

import numpy as np

from cuseq.host.causal_conv1d import apply_silu, compute_dtype, convolve


@np.errstate(all="ignore")
def update(x, state, weight, bias, silu, cache_seqlens, state_indices, y):
    """Write y (B, D, T) and update the rows of state (P, D, S) in place.

    x (B, D, T), weight (D, W), bias (D,) or None, S >= W - 1; cache_seqlens (B,) integers >= 0,
    or None to shift; state_indices (B,) integers, the row of each item, or None for rows 0 to
    B - 1. An item with a negative index is skipped: its y is 0 and no row changes.
    """
    W = weight.shape[1]
    B = len(x)
    if state_indices is None:
        items, rows = slice(None), np.arange(B)
    else:
        items = np.flatnonzero(state_indices >= 0)
        rows = state_indices[items].astype(np.int64)
    dtype = compute_dtype(x, state, weight, bias)
    x_items, old = x[items].astype(dtype), state[rows].astype(dtype)
    if cache_seqlens is not None:
        old = _unrolled(old, cache_seqlens[items])

    S, T = state.shape[2], x.shape[2]
    signal = np.concatenate((old, x_items), axis=2)
    v = convolve(signal[..., S - (W - 1) :], weight, bias)
    y[...] = 0
    y[items] = apply_silu(v) if silu else v
    if cache_seqlens is None:
        state[rows] = signal[..., T:]
    else:
        _write_ring(state, rows, cache_seqlens[items], x_items)


def _unrolled(ring, cache_seqlens):
    """The ring (B, D, S) with the newest input last: column s is slot (c - S + s) mod S."""
    slots = _slots(cache_seqlens, np.arange(ring.shape[2]), ring.shape[2])
    return np.take_along_axis(ring, slots, axis=2)


def _write_ring(state, rows, cache_seqlens, x):
    """Store x (B, D, T) at slots (c + t) mod S; of more than S inputs the last S remain."""
    (_, D, T), S = x.shape, state.shape[2]
    kept = np.arange(max(0, T - S), T)
    slots = _slots(cache_seqlens, kept, S)
    state[rows[:, None, None], np.arange(D)[:, None], slots] = x[..., kept]


def _slots(cache_seqlens, t, S):
    """(c + t) mod S for every item and every t, (B, 1, len(t))."""
    return ((cache_seqlens.astype(np.int64)[:, None] + t) % S)[:, None, :]
