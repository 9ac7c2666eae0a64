"""Causal depthwise convolution in NumPy.

    y[b, d, t] = act(bias[d] + sum_k weight[d, k] x[b, d, t - W + 1 + k])
    final_state[b, d, s] = x[b, d, L - S + s]

x before the start comes from initial_state (B, D, S), newest last (x[-1] is column S - 1), and is
zero without one. Both formulas read one signal, the state followed by x: (B, D, S + L).
Arithmetic is in float64 if x, weight, bias or the state is, else in float32; the gradients that
sum over batch and length are added up in float64.
"""

import numpy as np


@np.errstate(all="ignore")
def forward(x, weight, bias, initial_state, silu, y, final_state):
    """Write y (B, D, L), and final_state (B, D, S) where one is given.

    x (B, D, L), weight (D, W), bias (D,) or None, initial_state (B, D, S) with S >= W - 1 or
    None: dtypes and strides independent. silu: whether y passes through v / (1 + exp(-v)).
    """
    W, L = weight.shape[1], x.shape[2]
    S = _state_width(W, initial_state, final_state)
    dtype = compute_dtype(x, weight, bias, initial_state)
    signal = _signal(x, initial_state, S, dtype)
    v = convolve(signal[..., S - (W - 1) :], weight, bias)
    y[...] = apply_silu(v) if silu else v
    if final_state is not None:
        final_state[...] = signal[..., L:]


@np.errstate(all="ignore")
def backward(
    grad_y,
    x,
    weight,
    bias,
    initial_state,
    silu,
    grad_final_state,
    grad_x,
    grad_weight,
    grad_bias,
    grad_initial_state,
):
    """Write the gradients of sum(grad_y y) + sum(grad_final_state final_state).

    grad_y (B, D, L); grad_final_state (B, D, S) or None; the rest as in `forward`. Written:
    grad_x (B, D, L), grad_weight (D, W), and grad_bias (D,) and grad_initial_state (B, D, S)
    unless they are None.
    """
    W, L = weight.shape[1], x.shape[2]
    S = _state_width(W, initial_state, grad_final_state)
    dtype = compute_dtype(x, weight, bias, initial_state)
    signal = _signal(x, initial_state, S, dtype)
    g = grad_y.astype(dtype)
    if silu:
        v = convolve(signal[..., S - (W - 1) :], weight, bias)
        sigma = 1 / (1 + np.exp(-v))
        g *= sigma * (1 + v * (1 - sigma))

    grad_signal = np.zeros_like(signal)
    for k in range(W):
        read = slice(S - (W - 1) + k, S - (W - 1) + k + L)
        grad_signal[..., read] += weight[:, k, None].astype(dtype) * g
        grad_weight[:, k] = np.einsum("bdt,bdt->d", g, signal[..., read], dtype=np.float64)
    if grad_final_state is not None:
        grad_signal[..., L:] += grad_final_state.astype(dtype)

    grad_x[...] = grad_signal[..., S:]
    if grad_bias is not None:
        grad_bias[...] = g.sum(axis=(0, 2), dtype=np.float64)
    if grad_initial_state is not None:
        grad_initial_state[...] = grad_signal[..., :S]


def convolve(signal, weight, bias):
    """bias[d] + sum_k weight[d, k] signal[b, d, t + k], (B, D, L) for signal (B, D, W - 1 + L)."""
    W = weight.shape[1]
    B, D, L = signal.shape[0], signal.shape[1], signal.shape[2] - (W - 1)
    out = np.zeros((B, D, L), signal.dtype)
    if bias is not None:
        out += bias[:, None].astype(signal.dtype)
    for k in range(W):
        out += weight[:, k, None].astype(signal.dtype) * signal[..., k : k + L]
    return out


def apply_silu(v):
    """v / (1 + exp(-v)): where exp overflows the quotient is 0, as it should be."""
    return v / (1 + np.exp(-v))


def compute_dtype(*arrays):
    """float64 if any of the arrays that are not None is float64, else float32."""
    is_double = [array is not None and array.dtype == np.float64 for array in arrays]
    return np.float64 if any(is_double) else np.float32


def _state_width(W, *states):
    """S of the first state that is given, or W - 1."""
    return next((state.shape[2] for state in states if state is not None), W - 1)


def _signal(x, initial_state, S, dtype):
    """The state (zeros without one) followed by x: (B, D, S + L)."""
    B, D, L = x.shape
    signal = np.zeros((B, D, S + L), dtype)
    signal[..., S:] = x
    if initial_state is not None:
        signal[..., :S] = initial_state
    return signal
