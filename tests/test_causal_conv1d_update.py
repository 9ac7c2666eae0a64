"""cuseq.causal_conv1d_update on every framework, against the oracle."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuseq
from tests import frameworks
from tests.frameworks import (
    CUPY,
    NUMPY,
    TORCH_CPU,
    TORCH_CUDA,
    assert_same_bits,
    every_cuda_place,
    every_place,
    every_place_and_dtype,
    home_of_state,
    over,
)
from tests.oracles import causal_conv1d_update as oracle
from tests.samples import normal
from tests.strategies import layouts
from tests.tolerances import assert_close

# (B, D, T, W, S) around a block of 128 channels
SIZES = [
    (1, 1, 1, 1, 0),
    (3, 3, 1, 4, 3),
    (2, 5, 2, 4, 4),
    (1, 3, 3, 4, 3),
    (2, 2, 4, 4, 3),
    (2, 2, 9, 4, 3),
    (3, 1, 7, 2, 9),
    (1, 127, 1, 4, 3),
    (2, 128, 1, 3, 2),
    (2, 129, 2, 4, 6),
    (1, 260, 1, 8, 7),
    (2, 3, 2, 32, 31),
    (2, 3, 40, 32, 33),
    (2, 3, 0, 4, 3),
    (0, 3, 2, 4, 3),
    (2, 0, 2, 4, 3),
]
STARTS = {"shifted": None, "ring": [0, 5, 2**31 - 2]}


def arguments(B, D, T, W, S, dtypes=("float64",) * 4, P=None):
    """x (B, D, T), state (P or B, D, S), weight, bias by name; `dtypes` are in this order."""
    x, state, weight, bias = dtypes
    return {
        "x": normal(B, D, T, dtype=x),
        "state": normal(B if P is None else P, D, S, seed=3, dtype=state),
        "weight": normal(D, W, seed=1, dtype=weight),
        "bias": normal(D, seed=2, dtype=bias),
    }


def run(place, given_arrays, offset=0, **options):
    """y, and the state after the call; x, weight and bias must stay as they are."""
    home, states = home_of_state(place), []

    def update(x, weight, bias, **options):
        states.append(home.array(given_arrays["state"], offset))
        return cuseq.causal_conv1d_update(x, states[-1], weight, bias, **options)

    x, _, weight, bias = given_arrays.values()
    y = frameworks.run(place, update, x, weight, bias, offset=offset, **options)
    return y, home.numpy(states[-1])


def check(place, given_arrays, activation=None, starts=None, indices=None, layout="bdl", offset=0):
    """y and state against the oracle."""
    x, state, weight, bias = given_arrays.values()
    turn = (lambda x: x) if layout == "bdl" else (lambda x: x.transpose(0, 2, 1))
    y, new_state = run(
        place,
        {**given_arrays, "x": turn(x)},
        offset,
        activation=activation,
        layout=layout,
        cache_seqlens=starts,
        state_indices=indices,
    )
    assert y.dtype == x.dtype
    wanted_y, wanted_state = oracle.update(x, state, weight, bias, activation, starts, indices)
    scale = max(np.abs(wanted_y).max(initial=0.0), 1.0)
    assert_close(turn(y), wanted_y, "causal_conv1d_update.y", scale=scale)
    assert_close(new_state, wanted_state, "causal_conv1d_update.state")


@every_place_and_dtype
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(place, dtype, start, size):
    """Layout and activation alternate over the sizes."""
    number, starts = SIZES.index(size), STARTS[start] and STARTS[start][: size[0]]
    layout, activation = ("bdl", "bld")[number % 2], (None, "silu")[number // 2 % 2]
    check(place, arguments(*size, (dtype,) * 4), activation, starts, None, layout)


@every_place
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float16", "float32", "float16", "float16"),
        ("float32", "bfloat16", "float16", "float64"),
        ("bfloat16", "float64", "float32", "bfloat16"),
        ("float64", "float16", "float32", "float16"),
    ],
    ids=" ".join,
)
def test_dtypes_are_independent(place, start, dtypes):
    for dtype in dtypes:
        if dtype not in place.dtypes:
            pytest.skip(f"{place}: NumPy's DLPack has no {dtype}")
    check(place, arguments(3, 2, 4, 4, 5, dtypes), "silu", STARTS[start])


@every_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_one_token_without_its_axis(place, layout):
    given_arrays = arguments(2, 3, 1, 4, 3)
    expected, _ = oracle.update(*given_arrays.values(), "swish")
    given_arrays["x"] = given_arrays["x"][..., 0]
    given_arrays["weight"] = given_arrays["weight"][:, None]
    y, _ = run(place, given_arrays, activation="swish", layout=layout)
    assert_close(y, expected[..., 0], "causal_conv1d_update.y")


@every_place
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("indices", [[4, 0, 2], [-1, 3, -7], [-1, -1, -1]], ids=str)
def test_rows_of_a_pool(place, start, indices):
    given_arrays = arguments(3, 2, 3, 4, 4, P=5)
    check(place, given_arrays, "silu", STARTS[start], indices)
    y, pool = run(place, given_arrays, cache_seqlens=STARTS[start], state_indices=indices)
    assert not y[np.array(indices) < 0].any()
    others = [row for row in range(5) if row not in indices]
    assert frameworks.same_bits(pool[others], given_arrays["state"][others])


@every_place
@pytest.mark.parametrize(
    "kind", ["tuple", "range", "int32", "int64", "strided", "reversed", "of the place"]
)
def test_kinds_of_index_arguments(place, kind):
    given_arrays = arguments(3, 2, 3, 4, 4)
    starts, indices = {
        "tuple": ((4, 3, 2), (2, 1, 0)),
        "range": (range(4, 1, -1), range(2, -1, -1)),
        "int32": (np.array([4, 3, 2], np.int32), np.array([2, 1, 0], np.int32)),
        "int64": (np.array([4, 3, 2]), np.array([2, 1, 0], np.int32)),
        "strided": (np.array([4, 9, 3, 9, 2])[::2], np.array([2, 9, 1, 9, 0])[::2]),
        "reversed": (np.array([2, 3, 4])[::-1], np.array([0, 1, 2])[::-1]),
        "of the place": (np.array([4, 3, 2], np.int32), np.array([2, 1, 0])),
    }[kind]
    expected = oracle.update(*given_arrays.values(), None, starts, indices)
    arrays = {name: place.array(x) for name, x in given_arrays.items() if name != "state"}
    arrays["state"] = home_of_state(place).array(given_arrays["state"])
    if kind == "of the place":
        starts, indices = place.array(starts), place.array(indices)
    y = cuseq.causal_conv1d_update(**arrays, cache_seqlens=starts, state_indices=indices)
    assert_close(frameworks.taken(place, y), expected[0], "causal_conv1d_update.y")
    state = home_of_state(place).numpy(arrays["state"])
    assert_close(state, expected[1], "causal_conv1d_update.state")


@every_place
@given(st.data())
def test_strides(place, data):
    B, D, T = (data.draw(st.integers(0, 4)) for _ in "BDT")
    W, extra = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 2))
    given_arrays, offset = arguments(B, D, T, W, W - 1 + extra), 0
    for name, array in given_arrays.items():
        strides = home_of_state(place).strides if name == "state" else place.strides
        lie = data.draw(layouts(array.ndim, strides, repeats=name != "state"), label=name)
        given_arrays[name], offset = lie.of(array), lie.offset
    starts = data.draw(st.none() | st.lists(st.integers(0, 50), min_size=B, max_size=B))
    layout = data.draw(st.sampled_from(["bdl", "bld"]))
    check(place, given_arrays, "silu", starts, None, layout, offset)


@over([NUMPY, TORCH_CPU, CUPY, TORCH_CUDA])
@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
def test_memory_around_the_state_stays(place, starts):
    given_arrays = arguments(3, 2, 5, 4, 4)
    around = np.full((5, 2, 9), 7.0)
    around[1:4, :, 3:7] = given_arrays["state"]
    wide = place.array(around)
    x, _, weight, bias = (place.array(array) for array in given_arrays.values())
    cuseq.causal_conv1d_update(x, wide[1:4, :, 3:7], weight, bias, cache_seqlens=starts)
    _, around[1:4, :, 3:7] = oracle.update(*given_arrays.values(), None, starts)
    assert frameworks.same_bits(place.numpy(wide), around)


@every_place
def test_nan_stays_in_its_row(place):
    given_arrays = arguments(3, 2, 3, 4, 3)
    clean, clean_state = run(place, given_arrays)
    given_arrays["state"][1, 0, 0] = math.nan
    y, state = run(place, given_arrays)
    assert np.isnan(y[1, 0]).tolist() == [True, False, False]
    y[1, 0, 0] = clean[1, 0, 0]
    assert frameworks.same_bits(y, clean) and frameworks.same_bits(state, clean_state)


@every_place
@given(
    steps=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    W=st.sampled_from([1, 4]),
    extra=st.sampled_from([0, 2]),
    seen=st.none() | st.lists(st.integers(0, 20), min_size=2, max_size=2),
    rows=st.none() | st.permutations(range(5)).map(lambda rows: rows[:2]),
    layout=st.sampled_from(["bdl", "bld"]),
)
@example(steps=[1] * 11, W=4, extra=0, seen=None, rows=None, layout="bdl")
@example(steps=[1] * 11, W=4, extra=2, seen=[7, 3], rows=[4, 1], layout="bld")
@example(steps=[4] * 4, W=4, extra=2, seen=[0, 5], rows=None, layout="bdl")
def test_steps_equal_the_whole(place, steps, W, extra, seen, rows, layout):
    """A signal by any number of tokens at a time, as causal_conv1d has it for all of it.

    The states are shifted, or rings that have `seen` so many tokens; in their own rows or a pool's.
    """
    B, D, L, S = 2, 3, sum(steps), W - 1 + extra
    given_arrays = arguments(B, D, L, W, S, ("float32",) * 4)
    x, first, weight, bias = given_arrays.values()
    whole, end = frameworks.run(
        place,
        cuseq.causal_conv1d_with_state,
        x.transpose(0, 2, 1).copy(),
        weight,
        bias,
        activation="silu",
        layout="bld",
        initial_state=first,
    )

    def rings(states, more):
        """From the newest input last to where a ring has it."""
        if seen is None:
            return states
        return np.array(
            [np.roll(state, n + more, axis=1) for state, n in zip(states, seen, strict=True)]
        )

    state = normal(B if rows is None else 5, D, S, seed=6, dtype="float32")
    used = list(range(B)) if rows is None else rows
    state[used] = rings(first, 0)
    wanted = state.copy()
    wanted[used] = rings(end, L)
    outputs, start = [], 0
    for T in steps:
        step = x[..., start : start + T]
        step = step.copy() if layout == "bdl" else step.transpose(0, 2, 1).copy()
        y, state = run(
            place,
            {**given_arrays, "x": step, "state": state},
            activation="silu",
            layout=layout,
            cache_seqlens=None if seen is None else [n + start for n in seen],
            state_indices=rows,
        )
        outputs.append(y if layout == "bld" else y.transpose(0, 2, 1))
        start += T
    y = np.concatenate(outputs, axis=1)
    scale = max(np.abs(whole).max(initial=0.0), 1.0)
    assert_close(y, whole, "causal_conv1d_update.y", scale=scale)
    assert frameworks.same_bits(state, wanted)


@every_place
def test_repeated_calls_give_the_same_bits(place):
    given_arrays = arguments(3, 130, 3, 4, 3, ("float32",) * 4)
    times = 50 if place.device == "cuda" else 5
    assert_same_bits([run(place, given_arrays, activation="silu") for _ in range(times)])


@every_place
@pytest.mark.parametrize("kind", [list, np.array])
@pytest.mark.parametrize("name, values", [("cache_seqlens", [3, -1]), ("state_indices", [0, 5])])
def test_index_values_that_the_host_sees_are_checked(place, kind, name, values):
    given_arrays = arguments(2, 3, 1, 4, 3, P=5)
    home = home_of_state(place)
    state = home.array(given_arrays["state"])
    x, _, weight, bias = (place.array(array) for array in given_arrays.values())
    options = {"state_indices": [0, 1], name: kind(values)}
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got {values[1]}; .+"):
        cuseq.causal_conv1d_update(x, state, weight, bias, **options)
    assert frameworks.same_bits(home.numpy(state), given_arrays["state"])


# On a CUDA device, where the host does not look at an index, and streams matter:


@every_cuda_place
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("ring", [False, True])
def test_index_values_out_of_range_on_the_device(place, dtype, ring):
    """A row beyond the pool, or a negative count, gives NaN and touches no state."""
    given_arrays = arguments(5, 130, 2, 4, 4, P=6)
    starts = np.array([3, 0, 7, 5, -1], dtype) if ring else None
    indices = np.array([4, 6, -1, 2**31 - 1, 0], dtype)
    y, pool = run(place, given_arrays, cache_seqlens=starts, state_indices=indices)
    wrong = [1, 3, 4] if ring else [1, 3]
    assert np.isnan(y[wrong]).all()
    assert not y[2].any()
    right = [row for row in range(5) if row not in wrong]
    given_arrays["x"] = given_arrays["x"][right]
    expected = oracle.update(
        *given_arrays.values(), None, None if starts is None else starts[right], indices[right]
    )
    assert_close(y[right], expected[0], "causal_conv1d_update.y")
    assert_close(pool, expected[1], "causal_conv1d_update.state")


@over([CUPY, TORCH_CUDA])
@pytest.mark.parametrize("starts", [None, [3, 0, 7, 5, 2, 1]], ids=STARTS)
def test_indices_out_of_the_pool_touch_nothing(place, starts):
    """Nor what lies beside the pool in memory, nor a row whose index is out of range by one."""
    P, indices = 6, np.array([6, 7, -1, -6, 2**31 - 1, -(2**31)])
    given_arrays = arguments(6, 130, 2, 4, 4, P=P)
    around = np.full((P + 12, 130, 4), 7.0)
    around[P : 2 * P] = given_arrays["state"]
    wide, indices_there = place.array(around), place.array(indices)
    x, _, weight, bias = (place.array(array) for array in given_arrays.values())
    y = cuseq.causal_conv1d_update(
        x, wide[P : 2 * P], weight, bias, cache_seqlens=starts, state_indices=indices_there
    )
    y = frameworks.taken(place, y)
    assert np.isnan(y[indices >= P]).all() and not y[indices < 0].any()
    assert frameworks.same_bits(place.numpy(wide), around)


@over([CUPY, TORCH_CUDA])
@pytest.mark.parametrize("ring", [False, True])
def test_follows_the_current_stream(place, ring):
    """The state is written on the stream as well: what is queued behind the call reads it."""
    given_arrays = arguments(3, 130, 2, 4, 4)
    indices = np.array([2, 0, 1])
    starts = np.array([4, 0, 9]) if ring else np.array([0, 0, 0])

    def update(x, state, weight, bias, starts, indices):
        options = {"cache_seqlens": starts if ring else None, "state_indices": indices}
        y = cuseq.causal_conv1d_update(x, state, weight, bias, **options)
        return y, state + 0

    frameworks.assert_follows_the_stream(place, update, *given_arrays.values(), starts, indices)


@frameworks.every_mixed_pair
def test_frameworks_mix_on_one_device(places):
    first, second = places
    given_arrays = arguments(3, 2, 3, 4, 4)
    x, state, weight, bias = given_arrays.values()
    pool = second.array(state)
    starts, indices = second.array(np.array([4, 3, 2])), first.array(np.array([2, 0, 1]))
    y = cuseq.causal_conv1d_update(
        first.array(x),
        pool,
        second.array(weight),
        first.array(bias),
        cache_seqlens=starts,
        state_indices=indices,
    )
    expected = oracle.update(*given_arrays.values(), None, [4, 3, 2], [2, 0, 1])
    assert_close(frameworks.taken(first, y), expected[0], "causal_conv1d_update.y")
    assert_close(second.numpy(pool), expected[1], "causal_conv1d_update.state")


@over([TORCH_CUDA])
def test_on_a_second_device(place):
    torch = place.library
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    given_arrays = arguments(3, 2, 3, 4, 4)
    tensors = [place.array(array).to("cuda:1") for array in given_arrays.values()]
    y = cuseq.causal_conv1d_update(*tensors, state_indices=[2, 0, 1])
    expected = oracle.update(*given_arrays.values(), None, None, [2, 0, 1])
    assert y.device == torch.device("cuda:1")
    assert_close(place.numpy(y), expected[0], "causal_conv1d_update.y")
    assert_close(place.numpy(tensors[1]), expected[1], "causal_conv1d_update.state")
