"""Causal depthwise convolution: forward, with states, backward."""

from cuseq.ops import convolution_engine as engine
from cuseq.ops.convolution import (
    AXES,
    borrow_filter,
    borrow_initial_state,
    borrow_outer,
    check_options,
)
from cuseq.ops.convolution_engine import Call, Gradients
from cuseq.ops.convolution_plan import INDEXED, WHOLE
from cuseq.runtime import arrays, checks
from cuseq.runtime.replay import replayed


@replayed
def causal_conv1d(
    x, weight, bias=None, *, activation=None, layout="bdl", seq_idx=None, initial_state=None
):
    """Causal depthwise convolution along the length, the short convolution of Mamba-like models.

    ``y[b,d,t] = act(bias[d] + sum_k weight[d,k] x[b,d,t-W+1+k])``, with x before the start taken
    from the state, newest last, and zeros without one.

    Args:
        x: (B, D, L), or (B, L, D) with layout="bld"; float64, float32, float16 or bfloat16, from
            any library, in host memory or on a CUDA device, any strides.
        weight: (D, W) or (D, 1, W), 1 <= W <= 32, of any of these dtypes.
        bias: (D,) or None, of any of these dtypes.
        activation: None, "silu" or its other name "swish".
        layout: "bdl" or "bld", what the axes of x and y are; strides do not matter for it.
        seq_idx: (B, L) in either layout, int32 or int64, from any library or as nested sequences,
            or None: the sequence that each position belongs to. A position sees only inputs of its
            own sequence; a negative index is padding, with y = 0, which nobody sees, NaN included.
        initial_state: (B, D, S) with S >= W - 1, the inputs before the first, newest last, or None.
            With seq_idx it belongs to the sequence of position 0.

    Returns:
        y in the shape, layout and dtype of x, as the kind of array that x is. Where x's last two
        axes are transposed in memory so are y's, unless x is JAX's or known by DLPack alone. 16-bit
        inputs are computed in float32.

    Raises:
        ValueError: for shapes or options that do not fit, arrays on different devices, or a tensor
            that autograd follows.
        TypeError: for dtypes that are not floating, and for what is no array.

    Source: A. Gu and T. Dao, "Mamba: linear-time sequence modeling with selective state spaces",
    2023, section 3.4.

    >>> import numpy as np, cuseq
    >>> x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    >>> cuseq.causal_conv1d(x, np.array([[10.0, 1.0]]))
    array([[[ 1., 12., 23., 34.]]])
    >>> cuseq.causal_conv1d(x, np.array([[10.0, 1.0]]), seq_idx=[[0, 0, 1, 1]])
    array([[[ 1., 12.,  3., 34.]]])
    """
    call = borrow("causal_conv1d", x, weight, bias, activation, layout, seq_idx, initial_state)
    y, _ = engine.forward(call, with_state=False)
    return arrays.give_back(y, x)


@replayed
def causal_conv1d_with_state(
    x, weight, bias=None, *, activation=None, layout="bdl", seq_idx=None, initial_state=None
):
    """Causal depthwise convolution that also returns the state to go on from.

    ``final_state[b,d,s]`` is input L - S + s, reaching back into the initial state where x is
    shorter than the state, so that a signal may be cut anywhere and convolved piece by piece.
    With seq_idx it holds the last inputs of the sequence of the last position that is no padding,
    back to where another sequence ends: padding is left out, and zeros stand before the first of
    them, or the initial state where that belongs to the same sequence. A row that is all padding
    keeps the initial state.

    Args: as `causal_conv1d`.

    Returns:
        y, final_state: y as `causal_conv1d` returns it; final_state (B, D, S), as wide as the
        initial state and of its dtype, or without one W - 1 wide and of x's dtype.

    Raises: as `causal_conv1d`.

    >>> import numpy as np, cuseq
    >>> x, weight = np.array([[[1.0, 2.0, 3.0, 4.0]]]), np.array([[10.0, 1.0]])
    >>> y, state = cuseq.causal_conv1d_with_state(x[..., :2], weight)
    >>> y, state
    (array([[[ 1., 12.]]]), array([[[2.]]]))
    >>> cuseq.causal_conv1d(x[..., 2:], weight, initial_state=state)
    array([[[23., 34.]]])
    """
    operator = "causal_conv1d_with_state"
    call = borrow(operator, x, weight, bias, activation, layout, seq_idx, initial_state)
    y, final_state = engine.forward(call, with_state=True)
    return arrays.give_back(y, x), arrays.give_back(final_state, x)


@replayed
def causal_conv1d_backward(
    grad_y,
    x,
    weight,
    bias=None,
    *,
    activation=None,
    layout="bdl",
    seq_idx=None,
    initial_state=None,
    grad_final_state=None,
):
    """Gradients of ``sum(grad_y * y) + sum(grad_final_state * final_state)``.

    With v the convolution before the activation and ``g = grad_y act'(v)``:
    ``grad_x[t] = sum_k weight[k] g[t+W-1-k]``, ``grad_weight[k] = sum_{b,t} g[t] x[t-W+1+k]``,
    ``grad_bias = sum_{b,t} g[t]``. Sums are taken in a fixed order: the same bits every time.
    With seq_idx they are over the pairs of positions that see each other; grad_x is 0 at padding,
    whose grad_y does not count, NaN included.

    Args:
        grad_y: gradient by y, of x's shape and dtype.
        grad_final_state: gradient by the final state, of its shape and dtype, or None.
        The others as `causal_conv1d`, the same as in the forward.

    Returns:
        Gradients(x, weight, bias, initial_state), each in the shape and dtype of its argument and
        as the kind of array that grad_y is; None for a bias or an initial state that is None. The
        gradient by x lies in memory as x does, whatever grad_y's strides, like y of the forward.

    Raises: as `causal_conv1d`.

    >>> import numpy as np, cuseq
    >>> x, weight = np.array([[[1.0, 2.0, 3.0]]]), np.array([[10.0, 1.0]])
    >>> gradients = cuseq.causal_conv1d_backward(np.ones_like(x), x, weight)
    >>> gradients.x, gradients.weight
    (array([[[11., 11.,  1.]]]), array([[3., 6.]]))
    """
    operator = "causal_conv1d"  # whose counterpart in cuseq.torch has this backward
    outer = arrays.borrow("grad_y", grad_y, operator)
    call = borrow(operator, x, weight, bias, activation, layout, seq_idx, initial_state)
    outer, outer_state = borrow_outer(operator, call, outer, grad_final_state, "(B, D, S)")
    gradients = engine.backward(call, outer, outer_state)
    return Gradients(*(g and arrays.give_back(g, grad_y) for g in gradients))


def borrow(operator, x, weight, bias, activation, layout, seq_idx, initial_state):
    """The call of a public function, here and in adapters; everything wrong raises here."""
    check_options(activation, layout)
    given = arrays.borrow("x", x, operator)
    checks.floating("x", given)
    if len(given.shape) != 3:
        axes = "(B, D, L)" if layout == "bdl" else "(B, L, D)"
        raise ValueError(checks.sentence("x", f"shape {axes}", given.shape, "add or flatten axes"))
    axes = AXES[layout]
    x = given.seen_as(*axes)
    weight, bias, weight_shape = borrow_filter(operator, x, weight, bias)
    B, W = x.shape[0], weight.shape[1]
    state, states, state_dtype = borrow_initial_state(operator, initial_state, x, B, W)
    index = _borrow_index(operator, x, seq_idx)
    return Call(
        *(x, weight, bias, state, index, activation is not None),
        *(INDEXED if index else WHOLE, states, state_dtype, given, axes, weight_shape),
    )


def _borrow_index(operator, x, seq_idx):
    """seq_idx (B, L) borrowed, or None."""
    if seq_idx is None:
        return None
    index, _ = arrays.index_array("seq_idx", seq_idx, x, operator)
    B, _, L = x.shape
    checks.shape("seq_idx", index, (B, L), "(B, L)", "pass one index a position, in either layout")
    checks.same_device("seq_idx", index, "x", x)
    return index
