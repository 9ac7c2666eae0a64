"""The NumPy convolutions against the oracles, on sizes, dtypes and layouts that tend to break."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuseq.host import causal_conv1d, causal_conv1d_update
from tests.oracles import causal_conv1d as conv_oracle
from tests.oracles import causal_conv1d_update as update_oracle
from tests.samples import DTYPES, dtype_of, normal
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("error")

LAYOUTS = ["contiguous", "transposed", "sliced", "reversed"]


def laid_out(array, layout):
    """The same numbers with other strides, between NaNs where the layout leaves gaps."""
    if layout == "transposed":
        return array.T.copy().T
    if layout == "sliced":
        wide = np.full([2 * n + 1 for n in array.shape], math.nan, array.dtype)
        inner = wide[tuple(slice(1, 2 * n + 1, 2) for n in array.shape)]
        inner[...] = array
        return inner
    if layout == "reversed":
        backwards = (slice(None, None, -1),) * array.ndim
        return array[backwards].copy()[backwards]
    return array.copy()


def read_only(array, layout="contiguous"):
    view = laid_out(array, layout)
    view.flags.writeable = False
    return view


def poisoned(shape, dtype, layout="contiguous"):
    """An output full of NaN, so that an element left unwritten shows."""
    return laid_out(np.full(shape, math.nan, dtype_of(dtype)), layout)


def conv_arguments(B, D, L, W, S, dtype="float64", with_bias=True, with_state=True):
    return {
        "x": normal(B, D, L, dtype=dtype),
        "weight": normal(D, W, seed=1, dtype=dtype),
        "bias": normal(D, seed=2, dtype=dtype) if with_bias else None,
        "initial_state": normal(B, D, S, seed=3, dtype=dtype) if with_state else None,
    }


def run_forward(arguments, activation, S, layout="contiguous", state_dtype=None):
    x = arguments["x"]
    y = poisoned(x.shape, x.dtype.name, layout)
    final_state = poisoned((*x.shape[:2], S), state_dtype or x.dtype.name, layout)
    inputs = [None if array is None else read_only(array, layout) for array in arguments.values()]
    causal_conv1d.forward(*inputs, activation == "silu", y, final_state)
    alone = poisoned(x.shape, x.dtype.name, layout)
    causal_conv1d.forward(*inputs, activation == "silu", alone, None)
    np.testing.assert_array_equal(alone, y)
    return y, final_state


def check_conv(arguments, activation=None, layout="contiguous", S=None):
    """forward, backward and final state against the oracle; S is the width without a state."""
    x, weight, bias, initial_state = arguments.values()
    S = S if initial_state is None else initial_state.shape[2]
    state_dtype = x.dtype.name if initial_state is None else initial_state.dtype.name
    y, final_state = run_forward(arguments, activation, S, layout, state_dtype)
    expected_y, expected_state = conv_oracle.forward(x, weight, bias, initial_state, activation)
    assert_close(y, expected_y, "causal_conv1d.y")
    assert_close(final_state, expected_state, "causal_conv1d.final_state")

    grad_y = normal(*x.shape, seed=4, dtype=x.dtype.name)
    grad_final_state = normal(*final_state.shape, seed=5, dtype=state_dtype)
    written = {
        f"grad_{name}": None if array is None else poisoned(array.shape, array.dtype.name, layout)
        for name, array in arguments.items()
    }
    inputs = [None if array is None else read_only(array, layout) for array in arguments.values()]
    causal_conv1d.backward(
        read_only(grad_y, layout),
        *inputs,
        activation == "silu",
        read_only(grad_final_state, layout),
        *written.values(),
    )
    expected = conv_oracle.gradients(
        grad_y, x, weight, bias, initial_state, activation, grad_final_state
    )
    for name, gradient in written.items():
        if gradient is not None:
            assert_close(gradient, expected[name.removeprefix("grad_")], f"causal_conv1d.{name}")


@pytest.mark.parametrize("W", [1, 2, 4, 7, 32])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_state", [False, True])
def test_conv_lengths(W, activation, with_state):
    for L in sorted({0, 1, W - 1, W, W + 1, 2 * W + 3}):
        arguments = conv_arguments(2, 2, L, W, W - 1, with_state=with_state)
        check_conv(arguments, activation, S=W - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_conv_dtypes_and_layouts(dtype, layout, activation):
    check_conv(conv_arguments(2, 3, 11, 4, 3, dtype), activation, layout)


@pytest.mark.parametrize("L", [0, 1, 3, 9])
@pytest.mark.parametrize("W, S", [(1, 3), (4, 4), (3, 8)])
def test_conv_wide_states(L, W, S):
    check_conv(conv_arguments(2, 2, L, W, S), "silu")


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 5)])
def test_conv_without_bias_and_state(shape):
    check_conv(conv_arguments(*shape, 4, 3, with_bias=False, with_state=False), "silu", S=3)


@pytest.mark.parametrize("dtypes", [("float16", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("wider", ["x", "weight", "bias", "initial_state"])
def test_conv_roles_have_their_own_dtype(dtypes, wider):
    narrow, wide = dtypes
    arguments = conv_arguments(2, 3, 9, 4, 3, narrow)
    arguments[wider] = arguments[wider].astype(wide) + dtype_of(wide).type(1e-3)
    check_conv(arguments, "silu")


def test_conv_reads_broadcast_strides():
    arguments = conv_arguments(2, 3, 8, 4, 3)
    arguments["x"] = np.broadcast_to(arguments["x"][:1, :, :1], (2, 3, 8))
    arguments["weight"] = np.broadcast_to(arguments["weight"][:1], (3, 4))
    check_conv(arguments, "silu")


def test_conv_gradient_without_final_state():
    x, weight, bias, state = conv_arguments(2, 3, 6, 4, 3).values()
    grad_y = np.broadcast_to(np.float64(1), x.shape)
    grad_x, grad_weight = poisoned(x.shape, "float64"), poisoned(weight.shape, "float64")
    causal_conv1d.backward(
        grad_y, x, weight, bias, state, False, None, grad_x, grad_weight, None, None
    )
    expected = conv_oracle.gradients(grad_y, x, weight, bias, state)
    assert_close(grad_x, expected["x"], "causal_conv1d.grad_x")
    assert_close(grad_weight, expected["weight"], "causal_conv1d.grad_weight")


def test_conv_gradients_of_parameters_add_up_in_float64():
    x, weight = np.ones((1, 1, 1003), np.float32), np.ones((1, 1), np.float32)
    grad_y = np.array([[[2.0**25, *[1] * 1001, -(2.0**25)]]], np.float32)
    grad_x, grad_weight = poisoned(x.shape, "float32"), poisoned((1, 1), "float32")
    grad_bias = poisoned((1,), "float32")
    causal_conv1d.backward(
        grad_y, x, weight, None, None, False, None, grad_x, grad_weight, grad_bias, None
    )
    assert grad_weight == grad_bias == 1001


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_large_inputs_is_quiet(dtype):
    x = np.array([[[-3e4, -800, -90, 0, 90, 800, 3e4]]], dtype_of(dtype))
    arguments = {"x": x, "weight": np.ones((1, 1), x.dtype), "bias": None, "initial_state": None}
    check_conv(arguments, "silu", S=0)


def test_conv_nan_reaches_only_its_window():
    arguments = conv_arguments(2, 2, 9, 4, 3)
    clean, _ = run_forward(arguments, "silu", 3)
    arguments["x"][1, 0, 4] = math.nan
    y, _ = run_forward(arguments, "silu", 3)
    assert np.isnan(y[1, 0, 4:8]).all()
    y[1, 0, 4:8] = clean[1, 0, 4:8]
    np.testing.assert_array_equal(y, clean)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.sampled_from([None, "silu"]),
)
def test_any_split_through_the_state_equals_the_whole(W, extra, pieces, activation):
    S, L = W - 1 + extra, sum(pieces)
    arguments = conv_arguments(2, 2, L, W, S)
    whole, final_state = run_forward(arguments, activation, S)
    state, outputs, start = arguments["initial_state"], [], 0
    for length in pieces:
        piece = arguments["x"][..., start : start + length]
        part = {**arguments, "x": piece, "initial_state": state}
        y, state = run_forward(part, activation, S)
        outputs.append(y)
        start += length
    assert_close(np.concatenate(outputs, axis=2), whole, "causal_conv1d.y")
    np.testing.assert_array_equal(state, final_state)


def update_arguments(B, D, T, P, W, S, dtype="float64", state_dtype="float64"):
    return {
        "x": normal(B, D, T, dtype=dtype),
        "state": normal(P, D, S, seed=3, dtype=state_dtype),
        "weight": normal(D, W, seed=1, dtype=dtype),
        "bias": normal(D, seed=2, dtype=dtype),
    }


def run_update(arguments, activation=None, cache_seqlens=None, state_indices=None, layout="sliced"):
    """y and the new pool; the pool that was passed in stays as it was."""
    x, state, weight, bias = arguments.values()
    y = poisoned(x.shape, x.dtype.name, layout)
    pool = laid_out(state, layout)
    causal_conv1d_update.update(
        read_only(x, layout),
        pool,
        read_only(weight, layout),
        None if bias is None else read_only(bias, layout),
        activation == "silu",
        cache_seqlens,
        state_indices,
        y,
    )
    return y, pool


def check_update(
    arguments, activation=None, cache_seqlens=None, state_indices=None, layout="sliced"
):
    y, pool = run_update(arguments, activation, cache_seqlens, state_indices, layout)
    expected = update_oracle.update(*arguments.values(), activation, cache_seqlens, state_indices)
    assert_close(y, expected[0], "causal_conv1d_update.y")
    assert_close(pool, expected[1], "causal_conv1d_update.state")


STARTS = {"shifted": None, "ring": np.array([0, 5, 2**31 - 2], np.int32)}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("W, S", [(1, 0), (1, 1), (2, 1), (4, 3), (4, 7), (32, 31)])
def test_update_sizes(start, W, S):
    for T in sorted({0, 1, 2, S, S + 1, 2 * S + 3}):
        check_update(update_arguments(3, 2, T, 3, W, S), "silu", STARTS[start])


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", ["float64", "float32", "bfloat16"])
def test_update_dtypes_and_layouts(start, layout, dtype, state_dtype):
    arguments = update_arguments(3, 2, 3, 3, 4, 5, dtype, state_dtype)
    check_update(arguments, None, STARTS[start], None, layout)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("indices", [[4, 0, 2], [-1, 3, -7], [-1, -1, -1]])
def test_update_picks_rows_of_the_pool(start, indices):
    arguments = update_arguments(3, 2, 3, 5, 4, 4)
    untouched = [row for row in range(5) if row not in indices]
    check_update(arguments, "silu", STARTS[start], np.array(indices))
    y, pool = run_update(arguments, "silu", STARTS[start], np.array(indices))
    np.testing.assert_array_equal(pool[untouched], arguments["state"][untouched])
    assert not y[np.array(indices) < 0].any()


def test_update_without_bias_uses_the_first_rows_of_a_larger_pool():
    check_update({**update_arguments(2, 3, 4, 6, 4, 3), "bias": None})


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 3),
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(0, 50),
)
def test_updates_by_shift_and_by_ring_equal_forward(W, extra, pieces, rounds):
    """Any split into steps, from any turn of the ring: one signal, one answer."""
    S, L = W - 1 + extra, sum(pieces)
    arguments = conv_arguments(2, 2, L, W, S)
    whole, final_state = run_forward(arguments, "silu", S)
    shifted, ring, start = arguments["initial_state"], None, 0
    ring = np.roll(shifted, rounds % max(S, 1), axis=2)
    for length in pieces:
        x = arguments["x"][..., start : start + length]
        step = {"x": x, "state": shifted, "weight": arguments["weight"], "bias": arguments["bias"]}
        y, shifted = run_update(step, "silu")
        assert_close(y, whole[..., start : start + length], "causal_conv1d_update.y")
        y, ring = run_update({**step, "state": ring}, "silu", np.full(2, rounds + start))
        assert_close(y, whole[..., start : start + length], "causal_conv1d_update.y")
        start += length
    np.testing.assert_array_equal(shifted, final_state)
    unrolled = np.roll(ring, -((rounds + L) % max(S, 1)), axis=2)
    np.testing.assert_array_equal(unrolled, final_state)


def test_update_overflows_quietly():
    arguments = {
        "x": np.array([[[-800.0, 1e5]]]),
        "state": np.zeros((1, 1, 1), np.float16),
        "weight": np.array([[0.0, 1.0]]),
        "bias": None,
    }
    check_update(arguments, "silu")
    check_update(arguments, "silu", np.array([7], np.uint64))


def test_update_reads_tokens_of_its_call_unrounded():
    """In bfloat16 the state would round 1 + 2^-10 to 1."""
    arguments = {
        "x": np.full((1, 1, 2), 1 + 2.0**-10),
        "state": np.zeros((1, 1, 1), ml_dtypes.bfloat16),
        "weight": np.array([[1.0, 0.0]]),
        "bias": None,
    }
    y, pool = run_update(arguments)
    assert y.tolist() == [[[0, 1 + 2.0**-10]]]
    assert pool.astype(float).tolist() == [[[1]]]
