"""Causal depthwise convolution in NumPy.

    y[b, d, t] = act(bias[d] + sum_k weight[d, k] x[b, d, t - W + 1 + k])
    final_state[b, d, s] = x[b, d, L - S + s]

x before the start comes from initial_state (B, D, S), newest last (x[-1] is column S - 1), and is
zero without one. Both formulas read one signal, the state followed by x: (B, D, S + L).
With seq_idx (B, L) a tap counts only where it reads an input of the sequence of its own position,
the state going with position 0; a position with a negative index is padding, which reads nothing
and is read by nobody. The final state is then what its sequence had before the end.
Arithmetic is in float64 if x, weight, bias or the state is, else in float32; the gradients that
sum over batch and length are added up in float64.
"""

import numpy as np


@np.errstate(all="ignore")
def forward(x, weight, bias, initial_state, silu, y, final_state, seq_idx=None):
    """Write y (B, D, L), and final_state (B, D, S) where one is given.

    x (B, D, L), weight (D, W), bias (D,) or None, initial_state (B, D, S) with S >= W - 1 or
    None: dtypes and strides independent. silu: whether y passes through v / (1 + exp(-v)).
    seq_idx (B, L) integers, or None for one sequence a row.
    """
    W, L = weight.shape[1], x.shape[2]
    S = _state_width(W, initial_state, final_state)
    dtype = compute_dtype(x, weight, bias, initial_state)
    signal = _signal(x, initial_state, S, dtype)
    seen = None if seq_idx is None else _seen(seq_idx, W)
    v = convolve(signal[..., S - (W - 1) :], weight, bias, seen)
    y[...] = _where(seen, -1, apply_silu(v) if silu else v)
    if final_state is None:
        return
    if seq_idx is None:
        final_state[...] = signal[..., L:]
        return
    final_state[...] = 0
    for row, columns in enumerate(_carried(seq_idx, S)):
        final_state[row, :, S - len(columns) :] = signal[row][:, columns]


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
    seq_idx=None,
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
    seen = None if seq_idx is None else _seen(seq_idx, W)
    g = grad_y.astype(dtype)
    if silu:
        v = convolve(signal[..., S - (W - 1) :], weight, bias, seen)
        sigma = 1 / (1 + np.exp(-v))
        g *= sigma * (1 + v * (1 - sigma))
    g = _where(seen, -1, g)

    grad_signal = np.zeros_like(signal)
    for k in range(W):
        read = slice(S - (W - 1) + k, S - (W - 1) + k + L)
        grad_signal[..., read] += _where(seen, k, weight[:, k, None].astype(dtype) * g)
        factors = _where(seen, k, g), _where(seen, k, signal[..., read])
        grad_weight[:, k] = np.einsum("bdt,bdt->d", *factors, dtype=np.float64)
    if grad_final_state is not None and seq_idx is None:
        grad_signal[..., L:] += grad_final_state.astype(dtype)
    elif grad_final_state is not None:
        for row, columns in enumerate(_carried(seq_idx, S)):
            from_state = grad_final_state[row, :, S - len(columns) :].astype(dtype)
            grad_signal[row][:, columns] += from_state

    grad_x[...] = grad_signal[..., S:]
    if grad_bias is not None:
        grad_bias[...] = g.sum(axis=(0, 2), dtype=np.float64)
    if grad_initial_state is not None:
        grad_initial_state[...] = grad_signal[..., :S]


def convolve(signal, weight, bias, seen=None):
    """bias[d] + sum_k weight[d, k] signal[b, d, t + k], (B, D, L) for signal (B, D, W - 1 + L).

    seen (W, B, 1, L) says which of the terms there are, None that all are.
    """
    W = weight.shape[1]
    B, D, L = signal.shape[0], signal.shape[1], signal.shape[2] - (W - 1)
    out = np.zeros((B, D, L), signal.dtype)
    if bias is not None:
        out += bias[:, None].astype(signal.dtype)
    for k in range(W):
        out += _where(seen, k, weight[:, k, None].astype(signal.dtype) * signal[..., k : k + L])
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


def _seen(seq_idx, W):
    """Whether tap k of position t reads an input of t's own sequence: (W, B, 1, L).

    What lies before the start belongs to position 0. The last tap reads t itself, so that its
    entry tells positions from padding.
    """
    L = seq_idx.shape[1]
    read = np.maximum(np.arange(W)[:, None] - (W - 1) + np.arange(L), 0)
    own = seq_idx[:, None]
    seen = (seq_idx[:, read] == own) & (own >= 0)
    return seen.transpose(1, 0, 2)[:, :, None]


def _where(seen, k, values):
    """values (B, D, L), 0 where tap k sees nothing: a product with 0 would let a NaN through."""
    return values if seen is None else np.where(seen[k], values, 0)


def _carried(seq_idx, S):
    """For each row the columns of the signal, S at most, that its final state keeps at its end.

    They are the inputs of the sequence that comes last, back to where another one ends, and the
    state before them where the row is all of this sequence from position 0 on, or all padding.
    """
    for row in seq_idx:
        real = np.flatnonzero(row >= 0)
        others = np.flatnonzero(row[real] != row[real[-1:]])
        own = real[others[-1] + 1 :] if others.size else real
        past = 0 if others.size or (real.size and real[0] > 0) else S
        columns = np.concatenate((np.arange(past), S + own))
        yield columns[max(len(columns) - S, 0) :]
