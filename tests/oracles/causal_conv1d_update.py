"""The streaming step of the causal depthwise convolution, token by token, in float64."""

import numpy as np

from tests.oracles.causal_conv1d import act


def update(x, state, weight, bias=None, activation=None, cache_seqlens=None, state_indices=None):
    """y (B, D, T), and the pool (P, D, S) after it; the arguments are not written.

    x (B, D, T), state (P, D, S). Without cache_seqlens a row holds the newest input last and is
    shifted; with it, token t of item b is written at (cache_seqlens[b] + t) mod S. Item b has row
    state_indices[b] (b without them); a negative one skips the item.
    """
    B, D, T = x.shape
    y, pool = np.zeros((B, D, T)), state.astype(np.float64)
    for b in range(B):
        row = b if state_indices is None else int(state_indices[b])
        start = None if cache_seqlens is None else int(cache_seqlens[b])
        if row < 0:
            continue
        for d in range(D):
            memory = [float(value) for value in pool[row, d]]
            bias_d = 0.0 if bias is None else float(bias[d])
            for t in range(T):
                position = None if start is None else start + t
                v = step(float(x[b, d, t]), memory, weight[d], bias_d, position)
                y[b, d, t] = act(v, activation)
            pool[row, d] = memory
    return y, pool


def step(token, memory, weight, bias, position):
    """One output; `memory` receives the token, as a ring if it has a position, else shifted."""
    W, S = len(weight), len(memory)
    out = bias + float(weight[W - 1]) * token
    for lag in range(1, W):
        column = S - lag if position is None else (position - lag) % S
        out += float(weight[W - 1 - lag]) * memory[column]
    if position is None:
        memory.append(token)
        memory.pop(0)
    elif S > 0:
        memory[position % S] = token
    return out
