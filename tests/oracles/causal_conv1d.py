"""Causal depthwise convolution from its definition, in float64.

    y[b, d, t] = act(bias[d] + sum_k weight[d, k] x[b, d, t - W + 1 + k])

x before the start is the state (B, D, S), newest last, or zero. Input p reaches output
p + lag through weight[W - 1 - lag], lag = 0 ... W - 1. Arrays of any dtype are read as float64.
"""

import math

import numpy as np


def sigmoid(v):
    """1 / (1 + exp(-v)), which tanh reaches without overflow."""
    return 0.5 + 0.5 * math.tanh(v / 2)


def act(v, activation):
    """v, or v sigmoid(v) for "silu" (= "swish")."""
    return v * sigmoid(v) if activation in ("silu", "swish") else v


def slope(v, activation):
    """d act(v) / dv, with 1 - sigmoid(v) = sigmoid(-v)."""
    if activation in ("silu", "swish"):
        return sigmoid(v) + v * sigmoid(v) * sigmoid(-v)
    return 1.0


def inputs_of(x, state, S, b, d):
    """The S inputs before the start and those of x, oldest first, as a list."""
    past = [0.0] * S if state is None else [float(value) for value in state[b, d]]
    return past + [float(value) for value in x[b, d]]


def before_activation(inputs, weight, bias, L):
    """v[t] = bias + sum_k weight[k] input[t - W + 1 + k] of one channel, a list of length L."""
    W = len(weight)
    out = [0.0 if bias is None else float(bias)] * L
    for place, value in enumerate(inputs):
        p = place - (len(inputs) - L)
        for lag in range(W):
            if 0 <= p + lag < L:
                out[p + lag] += float(weight[W - 1 - lag]) * value
    return out


def forward(x, weight, bias=None, initial_state=None, activation=None):
    """y (B, D, L), and the state after it, as wide as initial_state or W - 1."""
    (B, D, L), W = x.shape, weight.shape[1]
    S = W - 1 if initial_state is None else initial_state.shape[2]
    y, final_state = np.zeros((B, D, L)), np.zeros((B, D, S))
    for b in range(B):
        for d in range(D):
            inputs = inputs_of(x, initial_state, S, b, d)
            v = before_activation(inputs, weight[d], None if bias is None else bias[d], L)
            y[b, d] = [act(value, activation) for value in v]
            for _ in range(L):
                inputs.pop(0)
            final_state[b, d] = inputs
    return y, final_state


def gradients(
    grad_y, x, weight, bias=None, initial_state=None, activation=None, grad_final_state=None
):
    """Gradients of sum(grad_y y) + sum(grad_final_state final_state) by name.

    "x" (B, D, L), "weight" (D, W), "bias" (D,), "initial_state" (B, D, S): the last two also where
    the argument is None and counts as zeros.
    """
    (B, D, L), W = x.shape, weight.shape[1]
    S = W - 1 if initial_state is None else initial_state.shape[2]
    grad_x, grad_state = np.zeros((B, D, L)), np.zeros((B, D, S))
    grad_weight, grad_bias = np.zeros((D, W)), np.zeros(D)
    for b in range(B):
        for d in range(D):
            inputs = inputs_of(x, initial_state, S, b, d)
            grad_inputs = [0.0] * (S + L)
            v = before_activation(inputs, weight[d], None if bias is None else bias[d], L)
            for t in range(L):
                grad_v = float(grad_y[b, d, t]) * slope(v[t], activation)
                grad_bias[d] += grad_v
                for k in range(W):
                    place = S + t - W + 1 + k
                    grad_weight[d, k] += grad_v * inputs[place]
                    grad_inputs[place] += grad_v * float(weight[d, k])
            if grad_final_state is not None:
                for s in range(S):
                    grad_inputs[L + s] += float(grad_final_state[b, d, s])
            grad_state[b, d] = grad_inputs[:S]
            grad_x[b, d] = grad_inputs[S:]
    return {"x": grad_x, "weight": grad_weight, "bias": grad_bias, "initial_state": grad_state}


def reads(seq_idx, t, p):
    """Whether position t reads input p under the indices (L,) of its row; p < 0 is the state."""
    return seq_idx[t] >= 0 and seq_idx[max(p, 0)] == seq_idx[t]


def carried(seq_idx, S):
    """The inputs p that a final state (S,) keeps, newest last; p < 0 is the state, None a zero."""
    kept, last = [], None
    for p in reversed(range(len(seq_idx))):
        if seq_idx[p] < 0:
            continue
        if last is None:
            last = seq_idx[p]
        if seq_idx[p] != last:
            break
        kept.append(p)
    else:
        if last is None or seq_idx[0] == last:
            kept += [-1 - s for s in range(S)]
    kept += [None] * S
    return kept[:S][::-1]


def forward_by_index(x, weight, seq_idx, bias=None, initial_state=None, activation=None):
    """As `forward` where position t sees only inputs whose index in seq_idx (B, L) is its own.

    The initial state has the index of position 0; a negative index is padding, with y = 0.
    """
    (B, D, L), W = x.shape, weight.shape[1]
    S = W - 1 if initial_state is None else initial_state.shape[2]
    y, final_state = np.zeros((B, D, L)), np.zeros((B, D, S))
    for b in range(B):
        for d in range(D):
            inputs = inputs_of(x, initial_state, S, b, d)
            for t in range(L):
                if seq_idx[b][t] >= 0:
                    v = before_activation_at(t, inputs, weight[d], bias, d, seq_idx[b])
                    y[b, d, t] = act(v, activation)
            for s, p in enumerate(carried(seq_idx[b], S)):
                final_state[b, d, s] = 0.0 if p is None else inputs[S + p]
    return y, final_state


def before_activation_at(t, inputs, weight, bias, d, seq_idx):
    """v[t] of channel d, over the inputs that position t reads."""
    W, S = len(weight), len(inputs) - len(seq_idx)
    v = 0.0 if bias is None else float(bias[d])
    for k in range(W):
        p = t - W + 1 + k
        if reads(seq_idx, t, p):
            v += float(weight[k]) * inputs[S + p]
    return v


def gradients_by_index(
    grad_y,
    x,
    weight,
    seq_idx,
    bias=None,
    initial_state=None,
    activation=None,
    grad_final_state=None,
):
    """As `gradients`, of `forward_by_index`."""
    (B, D, L), W = x.shape, weight.shape[1]
    S = W - 1 if initial_state is None else initial_state.shape[2]
    grad_x, grad_state = np.zeros((B, D, L)), np.zeros((B, D, S))
    grad_weight, grad_bias = np.zeros((D, W)), np.zeros(D)
    for b in range(B):
        for d in range(D):
            inputs = inputs_of(x, initial_state, S, b, d)
            grad_inputs = [0.0] * (S + L)
            for t in range(L):
                if seq_idx[b][t] < 0:
                    continue
                v = before_activation_at(t, inputs, weight[d], bias, d, seq_idx[b])
                grad_v = float(grad_y[b, d, t]) * slope(v, activation)
                grad_bias[d] += grad_v
                for k in range(W):
                    p = t - W + 1 + k
                    if reads(seq_idx[b], t, p):
                        grad_weight[d, k] += grad_v * inputs[S + p]
                        grad_inputs[S + p] += grad_v * float(weight[d, k])
            if grad_final_state is not None:
                for s, p in enumerate(carried(seq_idx[b], S)):
                    if p is not None:
                        grad_inputs[S + p] += float(grad_final_state[b, d, s])
            grad_state[b, d] = grad_inputs[:S]
            grad_x[b, d] = grad_inputs[S:]
    return {"x": grad_x, "weight": grad_weight, "bias": grad_bias, "initial_state": grad_state}


def forward_packed(x, weight, cu_seqlens, bias=None, initial_state=None, activation=None):
    """y (T, D) and the states (S, D, width) after the sequences, each convolved by itself.

    Sequence s is x[cu_seqlens[s] : cu_seqlens[s + 1]], of x (T, D).
    """
    count, D, W = len(cu_seqlens) - 1, x.shape[1], weight.shape[1]
    width = W - 1 if initial_state is None else initial_state.shape[2]
    y, final_state = np.zeros(x.shape), np.zeros((count, D, width))
    for s in range(count):
        start, end = int(cu_seqlens[s]), int(cu_seqlens[s + 1])
        state = None if initial_state is None else initial_state[s : s + 1]
        one = x[start:end].T[None]
        out, after = forward(one, weight, bias, state, activation)
        y[start:end], final_state[s] = out[0].T, after[0]
    return y, final_state


def gradients_packed(
    grad_y,
    x,
    weight,
    cu_seqlens,
    bias=None,
    initial_state=None,
    activation=None,
    grad_final_state=None,
):
    """As `gradients`, of `forward_packed`: those of weight and bias add up over the sequences."""
    count, (T, D), W = len(cu_seqlens) - 1, x.shape, weight.shape[1]
    width = W - 1 if initial_state is None else initial_state.shape[2]
    total = {"x": np.zeros((T, D)), "weight": np.zeros((D, W)), "bias": np.zeros(D)}
    total["initial_state"] = np.zeros((count, D, width))
    for s in range(count):
        start, end = int(cu_seqlens[s]), int(cu_seqlens[s + 1])
        state, outer_state = (
            None if array is None else array[s : s + 1]
            for array in (initial_state, grad_final_state)
        )
        outer, one = grad_y[start:end].T[None], x[start:end].T[None]
        found = gradients(outer, one, weight, bias, state, activation, outer_state)
        total["x"][start:end] = found["x"][0].T
        total["weight"] += found["weight"]
        total["bias"] += found["bias"]
        total["initial_state"][s] = found["initial_state"][0]
    return total
