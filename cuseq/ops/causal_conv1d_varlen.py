"""Causal depthwise convolution of packed sequences: forward, with states, backward."""

from cuseq.ops import convolution_engine as engine
from cuseq.ops.convolution import (
    borrow_filter,
    borrow_initial_state,
    borrow_outer,
    check_options,
)
from cuseq.ops.convolution_engine import Call, Gradients
from cuseq.ops.convolution_plan import PACKED
from cuseq.runtime import arrays, checks
from cuseq.runtime.replay import replayed

AXES = None, 1, 0  # of x (T, D), seen as (1, D, T)


@replayed
def causal_conv1d_varlen(x, weight, bias=None, *, cu_seqlens, activation=None, initial_state=None):
    """Causal depthwise convolution of sequences of unequal lengths that are packed end to end.

    Sequence s is ``x[cu_seqlens[s]:cu_seqlens[s+1]]``, and with t counted from its start
    ``y[t,d] = act(bias[d] + sum_k weight[d,k] x[t-W+1+k,d])``, with x before the start taken from
    the state of the sequence, newest last, and zeros without one. No sequence sees another.

    Args:
        x: (T, D), the sequences one after the other; float64, float32, float16 or bfloat16, from
            any library, any strides, in host memory or on a CUDA device.
        weight: (D, W) or (D, 1, W), 1 <= W <= 32, of any of these dtypes.
        bias: (D,) or None, of any of these dtypes.
        cu_seqlens: (S + 1,) int32 or int64, or a sequence: where the S sequences begin, and T. The
            first is 0, the last T, none is below the one before. A sequence may be empty. Where it
            is on a CUDA device, rows of x that no such sequence has get NaN instead of an error.
        activation: None, "silu" or its other name "swish".
        initial_state: (S, D, width) with width >= W - 1, the inputs before the first of each
            sequence, newest last, of any of these dtypes, or None.

    Returns:
        y (T, D) in the dtype of x, as the kind of array that x is. 16-bit inputs are computed in
        float32.

    Raises:
        ValueError: for shapes or options that do not fit, cu_seqlens that are none (where they are
            on the host), arrays on different devices, or a tensor that autograd follows.
        TypeError: for dtypes that do not fit, and for what is no array.

    Source: A. Gu and T. Dao, "Mamba: linear-time sequence modeling with selective state spaces",
    2023, section 3.4.

    >>> import numpy as np, cuseq
    >>> x = np.array([[1.0], [2.0], [3.0], [4.0]])
    >>> cuseq.causal_conv1d_varlen(x, np.array([[10.0, 1.0]]), cu_seqlens=[0, 3, 4]).T
    array([[ 1., 12., 23.,  4.]])
    """
    operator = "causal_conv1d_varlen"
    call = borrow(operator, x, weight, bias, cu_seqlens, activation, initial_state)
    y, _ = engine.forward(call, with_state=False)
    return arrays.give_back(y, x)


@replayed
def causal_conv1d_varlen_with_state(
    x, weight, bias=None, *, cu_seqlens, activation=None, initial_state=None
):
    """Causal depthwise convolution of packed sequences that also returns the states to go on from.

    ``final_state[s,d]`` are the last inputs of sequence s, newest last, reaching back into its
    initial state where it is shorter than that: an empty sequence keeps its state.

    Args: as `causal_conv1d_varlen`.

    Returns:
        y, final_state: y as `causal_conv1d_varlen` returns it; final_state (S, D, width), as wide
        as the initial state and of its dtype, or without one W - 1 wide and of x's dtype.

    Raises: as `causal_conv1d_varlen`.

    >>> import numpy as np, cuseq
    >>> x, weight = np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([[10.0, 1.0]])
    >>> y, state = cuseq.causal_conv1d_varlen_with_state(x, weight, cu_seqlens=[0, 3, 4])
    >>> state
    array([[[3.]],
           [[4.]]])
    """
    operator = "causal_conv1d_varlen_with_state"
    call = borrow(operator, x, weight, bias, cu_seqlens, activation, initial_state)
    y, final_state = engine.forward(call, with_state=True)
    return arrays.give_back(y, x), arrays.give_back(final_state, x)


@replayed
def causal_conv1d_varlen_backward(
    grad_y,
    x,
    weight,
    bias=None,
    *,
    cu_seqlens,
    activation=None,
    initial_state=None,
    grad_final_state=None,
):
    """Gradients of ``sum(grad_y * y) + sum(grad_final_state * final_state)``.

    The formulas of `causal_conv1d_backward` for each sequence; those of weight and bias are summed
    over all of them, in a fixed order: the same bits every time.

    Args:
        grad_y: gradient by y, of x's shape and dtype.
        grad_final_state: gradient by the final state, of its shape and dtype, or None.
        The others as `causal_conv1d_varlen`, the same as in the forward.

    Returns:
        Gradients(x, weight, bias, initial_state), each in the shape and dtype of its argument and
        as the kind of array that grad_y is; None for a bias or an initial state that is None.

    Raises: as `causal_conv1d_varlen`.

    >>> import numpy as np, cuseq
    >>> x, weight = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0, 1.0]])
    >>> gradients = cuseq.causal_conv1d_varlen_backward(
    ...     np.ones_like(x), x, weight, cu_seqlens=[0, 2, 3]
    ... )
    >>> gradients.x.T, gradients.weight
    (array([[11., 1., 1.]]), array([[1., 6.]]))
    """
    operator = "causal_conv1d_varlen"  # whose counterpart in cuseq.torch has this backward
    outer = arrays.borrow("grad_y", grad_y, operator)
    call = borrow(operator, x, weight, bias, cu_seqlens, activation, initial_state)
    outer, outer_state = borrow_outer(operator, call, outer, grad_final_state, "(S, D, width)")
    gradients = engine.backward(call, outer, outer_state)
    return Gradients(*(g and arrays.give_back(g, grad_y) for g in gradients))


def borrow(operator, x, weight, bias, cu_seqlens, activation, initial_state):
    """The call of a public function, here and in adapters; everything wrong raises here."""
    check_options(activation)
    given = arrays.borrow("x", x, operator)
    checks.floating("x", given)
    if len(given.shape) != 2:
        remedy = "put the sequences of a batch one after the other"
        raise ValueError(checks.sentence("x", "shape (T, D)", given.shape, remedy))
    x = given.seen_as(*AXES)
    weight, bias, weight_shape = borrow_filter(operator, x, weight, bias)
    seqlens = _borrow_seqlens(operator, given, cu_seqlens)
    rows, W = seqlens.shape[0] - 1, weight.shape[1]
    state, states, state_dtype = borrow_initial_state(operator, initial_state, x, rows, W)
    return Call(
        *(x, weight, bias, state, seqlens, activation is not None),
        *(PACKED, states, state_dtype, given, AXES, weight_shape),
    )


def _borrow_seqlens(operator, x, cu_seqlens):
    """cu_seqlens (S + 1,) on x's device; what the host can see is checked."""
    name, T = "cu_seqlens", x.shape[0]
    array, on_host = arrays.index_array(name, cu_seqlens, x, operator)
    if len(array.shape) != 1 or array.shape[0] == 0:
        remedy = "pass 0 and then the end of each sequence"
        raise ValueError(checks.sentence(name, "shape (S + 1,)", array.shape, remedy))
    checks.same_device(name, array, "x", x)
    if on_host is None:
        return array
    if on_host[0] != 0:
        remedy = "begin with 0, where the first sequence begins"
        raise ValueError(checks.sentence(name, "0 first", int(on_host[0]), remedy))
    if on_host[-1] != T:
        remedy = "end with the number of rows of x"
        raise ValueError(checks.sentence(name, f"T = {T} last", int(on_host[-1]), remedy))
    falls = (on_host[1:] < on_host[:-1]).nonzero()[0]
    if falls.size:
        before, after = (int(value) for value in on_host[falls[0] : falls[0] + 2])
        expected, got = "entries that do not fall", f"{after} after {before}"
        raise ValueError(checks.sentence(name, expected, got, "correct these entries"))
    return array
