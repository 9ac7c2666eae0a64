"""Causal depthwise convolution: forward, with states, backward."""

from functools import lru_cache
from typing import NamedTuple

from cuseq.host import causal_conv1d as host
from cuseq.ops.convolution import NOTHING, as_bdl, borrow_filter, check_options, check_state
from cuseq.runtime import arrays, checks, kernels
from cuseq.runtime.arrays import HOST, Array
from cuseq.runtime.kernels import C_TYPES, MOST_BLOCKS

FILE = "causal_conv1d.cu"
WARP = 32
WARPS = 4  # of a block
RUN_FORWARD, RUN_BACKWARD = 2, 4  # positions a thread walks over where a warp reads along them
RUN_ACROSS = 8  # the same where it reads across the channels
BLOCKS_TO_FILL = 64  # on one multiprocessor
SUM_THREADS = 128


class Problem(NamedTuple):
    """A call in host numbers: x (B, D, L), filters of width W, states of width S."""

    B: int
    D: int
    L: int
    W: int
    S: int
    dtypes: tuple  # of x, weight, bias, state
    across: bool  # channels lie closer in memory than positions
    unit: bool  # positions lie next to each other, in every tensor of the call
    device: int

    @property
    def real(self):
        """The dtype that is computed in."""
        return "float64" if "float64" in self.dtypes else "float32"


class Plan(NamedTuple):
    """How kernels/causal_conv1d.cu runs a problem."""

    macros: tuple
    grid: int
    block: int
    segment_length: int
    segments: int


class Gradients(NamedTuple):
    """Gradients by the name of what they belong to; None where the call had no such argument."""

    x: object
    weight: object
    bias: object
    initial_state: object


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
            Host memory only in this release.
        initial_state: (B, D, S) with S >= W - 1, the inputs before the first, newest last, or None.
            With seq_idx it belongs to the sequence of position 0.

    Returns:
        y in the shape, layout and dtype of x, as the kind of array that x is. 16-bit inputs are
        computed in float32.

    Raises:
        ValueError: for shapes or options that do not fit, arrays on different devices, or a tensor
            that autograd follows.
        TypeError: for dtypes that are not floating, and for what is no array.
        NotImplementedError: for seq_idx on a CUDA device, which this release does not have.

    Source: A. Gu and T. Dao, "Mamba: linear-time sequence modeling with selective state spaces",
    2023, section 3.4.

    >>> import numpy as np, cuseq
    >>> x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    >>> cuseq.causal_conv1d(x, np.array([[10.0, 1.0]]))
    array([[[ 1., 12., 23., 34.]]])
    >>> cuseq.causal_conv1d(x, np.array([[10.0, 1.0]]), seq_idx=[[0, 0, 1, 1]])
    array([[[ 1., 12.,  3., 34.]]])
    """
    call = _borrow("causal_conv1d", x, weight, bias, activation, layout, seq_idx, initial_state)
    y, _ = _forward(call, with_state=False)
    return arrays.give_back(y, x)


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
    call = _borrow(operator, x, weight, bias, activation, layout, seq_idx, initial_state)
    y, final_state = _forward(call, with_state=True)
    return arrays.give_back(y, x), arrays.give_back(final_state, x)


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
        as the kind of array that grad_y is; None for a bias or an initial state that is None.

    Raises: as `causal_conv1d`.

    >>> import numpy as np, cuseq
    >>> x, weight = np.array([[[1.0, 2.0, 3.0]]]), np.array([[10.0, 1.0]])
    >>> gradients = cuseq.causal_conv1d_backward(np.ones_like(x), x, weight)
    >>> gradients.x, gradients.weight
    (array([[[11., 11.,  1.]]]), array([[3., 6.]]))
    """
    operator = "causal_conv1d"  # whose counterpart in cuseq.torch has this backward
    outer = arrays.borrow("grad_y", grad_y, operator)
    call = _borrow(operator, x, weight, bias, activation, layout, seq_idx, initial_state)
    checks.shape("grad_y", outer, arrays.borrow("x", x, operator).shape, "of x", "pass one a y")
    checks.same_dtype("grad_y", outer, "x", call.x.dtype)
    checks.same_device("x", call.x, "grad_y", outer)
    outer_state = None
    if grad_final_state is not None:
        outer_state = arrays.borrow("grad_final_state", grad_final_state, operator)
        B, D, _, _, S, dtypes, *_ = call.problem
        name = "grad_final_state"
        checks.shape(name, outer_state, (B, D, S), "(B, D, S)", "pass one a final state")
        checks.same_dtype(name, outer_state, "the state", dtypes[3])
        checks.same_device(name, outer_state, "grad_y", outer)
    gradients = _backward(call, as_bdl(outer, layout), outer_state)
    return Gradients(*(g and arrays.give_back(g, grad_y) for g in gradients))


class Call(NamedTuple):
    """The borrowed arrays of a call, x seen as (B, D, L), and its problem."""

    x: Array
    weight: Array
    weight_shape: tuple
    bias: Array
    initial_state: Array
    silu: bool
    layout: str
    problem: Problem
    seq_idx: Array


def _empty_like(x, layout):
    """An array for what has x's shape, contiguous in the caller's layout, seen as (B, D, L)."""
    B, D, L = x.shape
    shape = (B, D, L) if layout == "bdl" else (B, L, D)
    return arrays.empty(shape, x.dtype, x)


def _borrow(operator, x, weight, bias, activation, layout, seq_idx, initial_state):
    check_options(activation, layout)
    x = arrays.borrow("x", x, operator)
    checks.floating("x", x)
    if len(x.shape) != 3:
        axes = "(B, D, L)" if layout == "bdl" else "(B, L, D)"
        raise ValueError(checks.sentence("x", f"shape {axes}", x.shape, "add or flatten axes"))
    x = as_bdl(x, layout)
    weight, bias, weight_shape = borrow_filter(operator, x, weight, bias)
    W, S, state_dtype = weight.shape[1], weight.shape[1] - 1, x.dtype
    if initial_state is not None:
        initial_state = arrays.borrow("initial_state", initial_state, operator)
        check_state("initial_state", initial_state, x, x.shape[0], W)
        S, state_dtype = initial_state.shape[2], initial_state.dtype
    dtypes = x.dtype, weight.dtype, bias.dtype if bias else weight.dtype, state_dtype
    across = abs(x.strides[1]) < abs(x.strides[2])
    unit = layout == "bdl" and x.strides[2] == 1
    problem = Problem(*x.shape, W, S, dtypes, across, unit, x.device)
    silu, index = activation is not None, _borrow_index(operator, x, seq_idx)
    return Call(x, weight, weight_shape, bias, initial_state, silu, layout, problem, index)


def _borrow_index(operator, x, seq_idx):
    """seq_idx (B, L) borrowed, or None."""
    if seq_idx is None:
        return None
    index, _ = arrays.index_array("seq_idx", seq_idx, x, operator)
    B, _, L = x.shape
    checks.shape("seq_idx", index, (B, L), "(B, L)", "pass one index a position, in either layout")
    checks.same_device("seq_idx", index, "x", x)
    if x.device != HOST:
        checks.not_yet("seq_idx", seq_idx, None)
    return index


@lru_cache(maxsize=1024)
def plan(problem, limits, backward=False, positions_before=0):
    """The plan of a problem on a device with these limits.

    A warp reads along whichever axis lies closest in memory. The length is cut into as many
    segments as fill the device; `positions_before` counts the state's positions that a backward
    walks over as well.
    """
    B, D, L, W, _, dtypes, across, unit, _ = problem
    across = across or B * D > MOST_BLOCKS  # each block takes 32 channels then
    lanes_d = min(WARP, 1 << max(D - 1, 0).bit_length()) if across else 1
    run = RUN_ACROSS if across else RUN_BACKWARD if backward else RUN_FORWARD
    stride = WARPS * (WARP // lanes_d) * run
    rows = B * -(-D // lanes_d)
    strides = max(1, -(-(L + positions_before) // stride))
    segments = max(1, min(strides, limits.multiprocessors * BLOCKS_TO_FILL // max(rows, 1)))
    segment_length = stride * -(-strides // segments)
    segments = -(-strides * stride // segment_length)
    types = zip(("X_T", "WEIGHT_T", "BIAS_T", "STATE_T"), dtypes, strict=True)
    macros = (
        *((name, C_TYPES[dtype]) for name, dtype in types),
        ("REAL", C_TYPES[problem.real]),
        ("WIDTH", W),
        ("LANES_D", lanes_d),
        ("RUN", run),
        ("WARPS", WARPS),
        ("UNIT", int(unit)),
    )
    return Plan(macros, rows * segments, WARP * WARPS, segment_length, segments)


def _forward(call, with_state):
    """y, and the final state or None."""
    problem = call.problem
    B, D, L, _, S, dtypes, *_ = problem
    y = _empty_like(call.x, call.layout)
    final_state = arrays.empty((B, D, S), dtypes[3], call.x) if with_state else None
    y_seen = as_bdl(y, call.layout)
    if problem.device == HOST:
        inputs = (x and x.numpy() for x in (call.x, call.weight, call.bias, call.initial_state))
        outputs = y_seen.numpy(), final_state and final_state.numpy()
        host.forward(*inputs, call.silu, *outputs, call.seq_idx and call.seq_idx.numpy())
        return y, final_state
    if y.size or (final_state and final_state.size):
        how = plan(problem, kernels.device_limits(problem.device))
        args = (
            *call.x.flat,
            *call.weight.flat,
            *(call.bias.flat if call.bias else NOTHING[:2]),
            *(call.initial_state.flat if call.initial_state else NOTHING),
            *y_seen.flat,
            *(final_state.flat if final_state else NOTHING),
            *(D, L, S, int(call.silu), how.segment_length, how.segments),
        )
        with arrays.launching(call.x, call.weight, call.bias, call.initial_state) as launch:
            launch(FILE, "causal_conv1d_forward", how.macros, how.grid, how.block, args)
    return y, final_state


def _backward(call, grad_y, grad_final_state):
    """Gradients as borrowed arrays, by name."""
    problem = call.problem
    B, D, L, W, S, dtypes, *_ = problem
    grad_x = _empty_like(call.x._replace(library=grad_y.library), call.layout)
    grad_weight = arrays.empty(call.weight_shape, dtypes[1], grad_y)
    grad_bias = arrays.empty((D,), dtypes[2], grad_y) if call.bias else None
    grad_initial = arrays.empty((B, D, S), dtypes[3], grad_y) if call.initial_state else None
    gradients = Gradients(grad_x, grad_weight, grad_bias, grad_initial)
    grad_x_seen = as_bdl(grad_x, call.layout)
    inputs = call.x, call.weight, call.bias, call.initial_state
    if problem.device == HOST:
        host.backward(
            grad_y.numpy(),
            *(x and x.numpy() for x in inputs),
            call.silu,
            grad_final_state and grad_final_state.numpy(),
            grad_x_seen.numpy(),
            grad_weight.numpy().reshape(D, W),
            grad_bias and grad_bias.numpy(),
            grad_initial and grad_initial.numpy(),
            call.seq_idx and call.seq_idx.numpy(),
        )
        return gradients
    problem = problem._replace(unit=problem.unit and grad_y.strides[2] == 1)
    limits = kernels.device_limits(problem.device)
    how = plan(problem, limits, True, S if grad_initial else 0)
    partials = arrays.empty((B * how.segments, D, W + 1), problem.real, grad_y)
    with arrays.launching(grad_y, *inputs, grad_final_state) as launch:
        if how.grid:
            args = (
                *grad_y.flat,
                *call.x.flat,
                *call.weight.flat,
                *(call.bias.flat if call.bias else NOTHING[:2]),
                *(call.initial_state.flat if call.initial_state else NOTHING),
                *(grad_final_state.flat if grad_final_state else NOTHING),
                *grad_x_seen.flat,
                *(grad_initial.flat if grad_initial else NOTHING),
                partials.pointer,
                *(D, L, S, int(call.silu), how.segment_length, how.segments),
            )
            launch(FILE, "causal_conv1d_backward", how.macros, how.grid, how.block, args)
        if D:
            args = partials.pointer, B * how.segments, D, grad_weight.pointer
            args += (grad_bias.pointer if grad_bias else 0,)
            blocks = -(-D * (W + 1) // SUM_THREADS)
            launch(FILE, "causal_conv1d_sum_partials", how.macros, blocks, SUM_THREADS, args)
    return gradients
