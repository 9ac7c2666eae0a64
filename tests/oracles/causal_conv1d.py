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
