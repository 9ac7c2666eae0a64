"""Causal depthwise convolution, the streaming step: new inputs against a state of the past."""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from cuseq.host import causal_conv1d_update as host
from cuseq.ops.convolution import NOTHING, as_bdl, borrow_filter, check_options, check_state
from cuseq.ops.convolution_plan import SIZES, at_once, rows_at_once
from cuseq.runtime import arrays, checks
from cuseq.runtime.arrays import HOST
from cuseq.runtime.kernels import C_TYPES
from cuseq.runtime.replay import replayed

FILE = "causal_conv1d_update.cu"
THREADS = 128
MOST_COLUMNS = 8  # of a state, in registers
MOST_CHANNELS, MOST_BYTES = 4, 32  # of a thread; of their states, which lie apart among lanes
THREADS_TO_FILL = 2**15  # a device, before threads have several channels


class Problem(NamedTuple):
    """A call in host numbers: B rows of T inputs, a pool of P states of width S."""

    B: int
    D: int
    T: int
    W: int
    P: int
    S: int
    dtypes: tuple  # of x, weight, bias, state, cache_seqlens, state_indices
    silu: bool
    channels: int  # of x and y, that can be read and written at once
    weights: int  # of all channels together, that can be read at once
    columns: int  # of all states of a row together, that can be read and written at once
    device: int


class Plan(NamedTuple):
    """How kernels/causal_conv1d_update.cu runs a problem."""

    macros: tuple
    grid: int
    block: int


@replayed
def causal_conv1d_update(
    x,
    state,
    weight,
    bias=None,
    *,
    activation=None,
    layout="bdl",
    cache_seqlens=None,
    state_indices=None,
):
    """Convolve new inputs with the state of the inputs before them; the state is updated in place.

    ``y[b,d,t] = act(bias[d] + sum_k weight[d,k] u[b,d,t-W+1+k])`` with u = x for t >= 0 and the
    state before. Step by step this gives what `causal_conv1d` gives for the whole signal.

    Args:
        x: (B, D), or (B, D, T), or (B, T, D) with layout="bld"; float64, float32, float16 or
            bfloat16, in host memory or on a CUDA device.
        state: (B, D, S) with S >= W - 1, or a pool (P, D, S) with state_indices, of any of these
            dtypes and any strides; written. Without cache_seqlens it holds the last S inputs,
            newest last.
        weight: (D, W) or (D, 1, W), 1 <= W <= 32, of any of these dtypes.
        bias: (D,) or None.
        activation: None, "silu" or its other name "swish".
        layout: "bdl" or "bld", what the axes of x and y are.
        cache_seqlens: (B,) int32 or int64, or a sequence: the number of inputs that each row has
            seen. It makes the state a ring buffer: input number n is kept at n % S. The caller
            advances it by T.
        state_indices: (B,) int32 or int64, or a sequence: the row of the pool of each batch item.
            A negative one skips the item: y = 0 and no state is touched. No two may be equal.

    Returns:
        y in the shape and dtype of x, as the kind of array that x is.

    Raises:
        ValueError: for shapes or options that do not fit, a state that can not be written, index
            values out of range (where they are on the host; on a device such a row gives NaN and
            touches no state), or a tensor that autograd follows.
        TypeError: for dtypes that do not fit, for what is no array, and for a JAX state, which is
            immutable.

    Source: A. Gu and T. Dao, "Mamba: linear-time sequence modeling with selective state spaces",
    2023.

    >>> import numpy as np, cuseq
    >>> state, weight = np.zeros((1, 1, 1)), np.array([[10.0, 1.0]])
    >>> for value in 1.0, 2.0, 3.0:
    ...     y = cuseq.causal_conv1d_update(np.array([[value]]), state, weight)
    >>> y, state
    (array([[23.]]), array([[[3.]]]))
    """
    call = borrow(x, state, weight, bias, activation, layout, cache_seqlens, state_indices)
    return arrays.give_back(update(call), x)


class Call(NamedTuple):
    """What was borrowed, None for what there is not."""

    given: arrays.Array  # x as the caller has it
    layout: str  # of it
    arrays: tuple  # x as (B, D, T), state, weight as (D, W), bias, cache_seqlens, state_indices
    silu: bool


def borrow(x, state, weight, bias, activation, layout, cache_seqlens, state_indices):
    """The call of the public function, here and in adapters; everything wrong raises here."""
    operator = "causal_conv1d_update"
    check_options(activation, layout)
    given = arrays.borrow("x", x, operator)
    checks.floating("x", given)
    tokens = _as_bdt(given, layout)
    weight, bias, _ = borrow_filter(operator, tokens, weight, bias)
    pool = arrays.borrow("state", state, operator)
    rows = tokens.shape[0] if state_indices is None else None
    check_state("state", pool, tokens, rows, weight.shape[1])
    _check_writable(pool, state)
    P = pool.shape[0]
    seqlens = _index("cache_seqlens", cache_seqlens, tokens, (0, 2**63), "a count from 0 on")
    indices = _index("state_indices", state_indices, tokens, (-(2**63), P), f"a row below P = {P}")
    borrowed = tokens, pool, weight, bias, seqlens, indices
    return Call(given, layout, borrowed, activation is not None)


def update(call):
    """y as a borrowed array; the state is updated."""
    tokens, pool, weight, bias, seqlens, indices = call.arrays
    B, D, T = tokens.shape
    (P, _, S), W = pool.shape, weight.shape[1]
    y = arrays.empty(call.given.shape, call.given.dtype, call.given)
    y_seen = _as_bdt(y, call.layout)
    if y.device == HOST:
        views = [a and a.numpy() for a in (*call.arrays, y_seen)]
        host.update(*views[:4], call.silu, *views[4:])
    elif y.size:
        dtypes = (
            y.dtype,
            weight.dtype,
            bias.dtype if bias else weight.dtype,
            pool.dtype,
            seqlens.dtype if seqlens else "int32",
            indices.dtype if indices else "int32",
        )
        channels = min(at_once(tensor.seen_as(0, 2, 1)) for tensor in (tokens, y_seen))
        together = channels, rows_at_once(weight), rows_at_once(pool)
        how = plan(Problem(B, D, T, W, P, S, dtypes, call.silu, *together, y.device))
        args = (
            *tokens.flat,
            *pool.flat,
            *weight.flat,
            *(bias.flat if bias else NOTHING[:2]),
            *(seqlens.flat if seqlens else NOTHING[:2]),
            *(indices.flat if indices else NOTHING[:2]),
            *y_seen.flat,
            *(D, T, P, S),
        )
        with arrays.launching(*call.arrays) as launch:
            launch(FILE, "causal_conv1d_update", how.macros, how.grid, how.block, args)
    return y


def _as_bdt(x, layout):
    """(B, D) or (B, D, T) in either layout as (B, D, T)."""
    if len(x.shape) == 2:
        return x.seen_as(0, 1, None)
    if len(x.shape) == 3:
        return as_bdl(x, layout)
    axes = "(B, D) or " + ("(B, D, T)" if layout == "bdl" else "(B, T, D)")
    raise ValueError(checks.sentence("x", f"shape {axes}", x.shape, "add or flatten axes"))


def _check_writable(state, given):
    if issubclass(state.library, arrays.JAX):
        raise TypeError(
            checks.sentence(
                "state",
                "an array that can be updated in place",
                "a JAX array",
                "JAX arrays are immutable; cuseq.jax.causal_conv1d_update returns the new state",
            )
        )
    if issubclass(state.library, arrays.Torch) and state.owner is not given:
        raise ValueError(
            checks.sentence(
                "state",
                "a tensor without a lazy minus sign",
                "one whose is_neg() is True",
                "pass state.resolve_neg()",
            )
        )
    if state.device == HOST:
        read_only = not state.library.host_view(state.owner).flags.writeable
    else:
        read_only = issubclass(state.library, arrays.DLPack) and state.library.read_only(given)
    repeats = any(n > 1 and s == 0 for n, s in zip(state.shape, state.strides, strict=True))
    if state.size and (read_only or repeats):
        got = (
            "a read-only array" if read_only else f"strides {state.strides}, which repeat elements"
        )
        raise ValueError(
            checks.sentence("state", "an array that can be updated in place", got, "pass a copy")
        )


def _index(name, values, x, bounds, expected):
    """An index argument (B,) on x's device; what the host can see is checked."""
    if values is None:
        return None
    array, on_host = arrays.index_array(name, values, x, "causal_conv1d_update")
    checks.shape(name, array, x.shape[:1], "(B,)", "pass one a row of x")
    checks.same_device(name, array, "x", x)
    if on_host is not None:
        wrong = [int(v) for v in on_host if not bounds[0] <= v < bounds[1]]
        if wrong:
            raise ValueError(checks.sentence(name, expected, wrong[0], "correct this entry"))
    return array


@lru_cache(maxsize=1024)
def plan(problem):
    """The plan of a problem: a thread for one channel of a row, or a few where rows are many."""
    B, D, W = problem.B, problem.D, problem.W
    bytes_of_state = problem.S * SIZES[problem.dtypes[3]]
    pack = gcd(problem.channels, MOST_CHANNELS)
    while pack > 1 and (B * D < THREADS_TO_FILL * pack or pack * bytes_of_state > MOST_BYTES):
        pack //= 2
    columns = problem.S if problem.S <= MOST_COLUMNS else 0
    names = "X_T", "WEIGHT_T", "BIAS_T", "STATE_T", "SEQLENS_T", "INDEX_T"
    macros = (
        *((name, C_TYPES[dtype]) for name, dtype in zip(names, problem.dtypes, strict=True)),
        ("REAL", "double" if "float64" in problem.dtypes else "float"),
        ("WIDTH", W),
        ("SILU", int(problem.silu)),
        ("THREADS", THREADS),
        ("PACK", pack),
        ("COLUMNS", columns),
        ("COLUMNS_AT_ONCE", gcd(problem.columns, pack * columns) if columns else 1),
        ("WEIGHTS_AT_ONCE", gcd(problem.weights, pack * W)),
    )
    return Plan(macros, B * -(-D // (THREADS * pack)), THREADS)
