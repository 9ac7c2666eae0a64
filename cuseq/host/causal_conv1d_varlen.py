"""Causal depthwise convolution of packed sequences in NumPy.

Sequence s is the rows cu_seqlens[s] to cu_seqlens[s + 1] - 1 of x (T, D), and each is convolved as
a batch of one, from its own state. Gradients of weight and bias add up over the sequences in
float64.
"""

import numpy as np

from cuseq.host import causal_conv1d as host


def forward(x, weight, bias, cu_seqlens, initial_state, silu, y, final_state):
    """Write y (T, D), and final_state (S, D, width) where one is given.

    x (T, D), weight (D, W), bias (D,) or None, cu_seqlens (S + 1,) integers from 0 to T that do
    not fall, initial_state (S, D, width) with width >= W - 1 or None. silu as in
    `causal_conv1d.forward`.
    """
    for s, rows in enumerate(_sequences(cu_seqlens)):
        host.forward(
            _alone(x, rows),
            weight,
            bias,
            _one(initial_state, s),
            silu,
            _alone(y, rows),
            _one(final_state, s),
        )


@np.errstate(all="ignore")
def backward(
    grad_y,
    x,
    weight,
    bias,
    cu_seqlens,
    initial_state,
    silu,
    grad_final_state,
    grad_x,
    grad_weight,
    grad_bias,
    grad_initial_state,
):
    """Write the gradients of sum(grad_y y) + sum(grad_final_state final_state).

    grad_y (T, D); grad_final_state (S, D, width) or None; the rest as in `forward`. Written:
    grad_x (T, D), grad_weight (D, W), and grad_bias (D,) and grad_initial_state (S, D, width)
    unless they are None.
    """
    weight_sum, bias_sum = np.zeros(weight.shape), np.zeros(len(weight))
    of_weight, of_bias = np.empty(weight.shape), np.empty(len(weight))
    for s, rows in enumerate(_sequences(cu_seqlens)):
        host.backward(
            _alone(grad_y, rows),
            _alone(x, rows),
            weight,
            bias,
            _one(initial_state, s),
            silu,
            _one(grad_final_state, s),
            _alone(grad_x, rows),
            of_weight,
            of_bias,
            _one(grad_initial_state, s),
        )
        weight_sum += of_weight
        bias_sum += of_bias
    grad_weight[...] = weight_sum
    if grad_bias is not None:
        grad_bias[...] = bias_sum


def _sequences(cu_seqlens):
    """The rows of each sequence, as slices."""
    return (slice(start, end) for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False))


def _alone(x, rows):
    """These rows of x (T, D) as a batch of one, (1, D, rows)."""
    return x[rows].T[None]


def _one(states, s):
    """The state of sequence s as a batch of one, or None."""
    return None if states is None else states[s : s + 1]
