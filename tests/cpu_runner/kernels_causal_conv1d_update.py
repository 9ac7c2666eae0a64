"""The kernel of the streaming step on the CPU, through the public function, against the oracle."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

import cuseq
from cuseq.ops import causal_conv1d_update
from tests.cpu_runner import shuffled
from tests.cpu_runner.device import (
    installed,
    normal,
    on_device,
    reversed_axes,
    shifted,
    sliced,
    transposed,
)
from tests.oracles import causal_conv1d_update as oracle
from tests.tolerances import assert_close

B, D = 3, 5
SEQLENS = [0, 5, 11]
INDICES = [2, -1, 0]  # of a pool of four


def arguments(W, S, T, *, pooled=False, D=D, dtypes=("float32",) * 4, bias=True):
    """x (B, D, T), state (B or 4, D, S), weight (D, W), bias (D,) or None, by name."""
    x, weight, of_bias, of_state = dtypes
    return {
        "x": normal(B, D, T, dtype=x),
        "state": normal(4 if pooled else B, D, S, seed=1, dtype=of_state),
        "weight": normal(D, W, seed=2, dtype=weight),
        "bias": normal(D, seed=3, dtype=of_bias) if bias else None,
    }


def run(
    given, activation, layout="bdl", place=on_device, seqlens=None, indices=None, of_state=None
):
    """y (B, D, T) and the state after it: the same bits in two orders of the threads.

    `of_state`: the place of the state, if it is not that of the others.
    """
    x = given["x"] if layout == "bdl" else np.ascontiguousarray(given["x"].transpose(0, 2, 1))
    inputs = [x, given["weight"], given["bias"]]
    x, weight, bias = (None if array is None else place(array) for array in inputs)
    read = [array for array in (x, weight, bias, seqlens, indices) if array is not None]
    before = [np.asarray(array).tobytes() for array in read]
    results = []
    for seed in (1, 2):
        state = (of_state or place)(given["state"])
        around = count_around(state)
        with installed(), shuffled(seed):
            y = cuseq.causal_conv1d_update(
                x,
                state,
                weight,
                bias,
                activation=activation,
                layout=layout,
                cache_seqlens=seqlens,
                state_indices=indices,
            )
        assert count_around(state) == around
        results.append((y if layout == "bdl" else y.transpose(0, 2, 1), state))
    for got, again in zip(*results, strict=True):
        assert got.tobytes() == again.tobytes()
    assert [np.asarray(array).tobytes() for array in read] == before
    return tuple(np.asarray(array) for array in results[0])


def count_around(x):
    """How many elements of its memory lie between those of x, which nothing has written."""
    memory = x
    while getattr(memory, "base", None) is not None:
        memory = memory.base
    return np.isnan(memory).sum() - np.isnan(x).sum()


def check(given, activation=None, seqlens=None, indices=None, **how):
    """`run` against the oracle."""
    y, state = run(given, activation, seqlens=seqlens, indices=indices, **how)
    wanted = oracle.update(
        **given, activation=activation, cache_seqlens=seqlens, state_indices=indices
    )
    assert_close(y, wanted[0], "causal_conv1d_update.y")
    assert_close(state, wanted[1], "causal_conv1d_update.state")


@pytest.mark.parametrize("seqlens", [None, SEQLENS], ids=["shifted", "ring"])
@pytest.mark.parametrize("indices", [None, INDICES], ids=["rows", "pool"])
@pytest.mark.parametrize("T", [0, 1, 3, 9])
@pytest.mark.parametrize("W, S", [(1, 0), (1, 2), (2, 1), (4, 3), (4, 7), (32, 31), (32, 40)])
def test_sizes(W, S, T, indices, seqlens):
    given = arguments(W, S, T, pooled=indices is not None, bias=T != 3)
    for layout, activation in [("bdl", "silu"), ("bld", None)]:
        check(given, activation, seqlens, indices, layout=layout)


@pytest.mark.parametrize("channels", [1, 127, 128, 129])
def test_channels(channels):
    check(arguments(4, 3, 2, D=channels), "swish")


@contextmanager
def threads_with_many_channels():
    """A list that the macros of every plan join; threads have as many channels as they may."""
    made, plan = [], causal_conv1d_update.plan.__wrapped__

    def remember(problem):
        how = plan(problem)
        made.append(dict(how.macros))
        return how

    limits = {"THREADS_TO_FILL": 1, "MOST_BYTES": 2**10}
    with mock.patch.multiple(causal_conv1d_update, plan=remember, **limits):
        yield made


@pytest.mark.parametrize(
    "dtype, S, of_state, D, layout, channels, columns",
    [
        ("float32", 4, on_device, 5, "bdl", 1, 4),
        ("float32", 3, on_device, 5, "bdl", 1, 1),
        ("float32", 6, on_device, 5, "bdl", 1, 2),
        ("float16", 8, on_device, 5, "bdl", 1, 8),
        ("float32", 4, shifted(2, 2), 5, "bdl", 1, 2),  # at odd offsets, and with rows apart
        ("float32", 4, shifted(0, 4), 5, "bdl", 1, 4),
        ("float16", 8, shifted(3, 5), 5, "bdl", 1, 1),
        ("float16", 8, sliced, 6, "bld", 2, 1),
        ("float32", 3, on_device, 4, "bld", 4, 4),  # of several channels
        ("float32", 3, shifted(1, 4), 4, "bld", 4, 1),
        ("float16", 8, on_device, 8, "bld", 4, 8),
        ("float64", 4, on_device, 6, "bld", 2, 2),
        ("float32", 9, on_device, 4, "bld", 4, 1),  # not in registers
    ],
)
def test_what_a_thread_has_at_once(dtype, S, of_state, D, layout, channels, columns):
    """Channels of x and y, columns of states and weights, where they lie in one aligned place."""
    for T, seqlens in [(1, None), (3, None), (9, None), (9, SEQLENS)]:
        given = arguments(4, S, T, D=D, dtypes=[dtype] * 4)
        with threads_with_many_channels() as plans:
            check(given, "silu", seqlens, layout=layout, of_state=of_state)
        for macros in plans:
            assert (macros["PACK"], macros["COLUMNS_AT_ONCE"]) == (channels, columns)


@pytest.mark.parametrize("seqlens", [None, SEQLENS], ids=["shifted", "ring"])
@pytest.mark.parametrize(
    "dtypes",  # of x, weight, bias, state
    [
        ("float64",) * 4,
        ("float16",) * 4,
        ("bfloat16",) * 4,
        ("float64", "float32", "float16", "bfloat16"),
        ("bfloat16", "float32", "float32", "float16"),
        ("float16", "bfloat16", "bfloat16", "float32"),
    ],
)
def test_dtypes(dtypes, seqlens):
    check(arguments(4, 5, 3, dtypes=dtypes), "silu", seqlens)


@pytest.mark.parametrize("seqlens", [None, SEQLENS], ids=["shifted", "ring"])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("place", [transposed, sliced, reversed_axes])
def test_strides(place, layout, seqlens):
    """Every array of the call has them, the state too."""
    check(arguments(4, 5, 3), "silu", seqlens, layout=layout, place=place)


def test_x_without_an_axis_of_time():
    given = arguments(4, 3, 1)
    y, state = run(given, "silu")
    flat, flat_state = run(given | {"x": given["x"][:, :, 0]}, "silu")
    assert flat.shape == (B, D) and flat.tobytes() == y.tobytes()
    assert flat_state.tobytes() == state.tobytes()


def test_step_by_step_is_all_at_once():
    for seqlens in (None, [4, 0, 7]):
        given = arguments(4, 5, 9)
        whole, last_state = run(given, "silu", seqlens=seqlens)
        state, steps = given["state"], []
        for t in range(9):
            now = None if seqlens is None else [n + t for n in seqlens]
            token = {"x": given["x"][:, :, t : t + 1], "state": state}
            y, state = run(given | token, "silu", seqlens=now)
            steps.append(y)
        assert np.concatenate(steps, axis=2).tobytes() == whole.tobytes()
        assert state.tobytes() == last_state.tobytes()


# ---- index arrays on the device, whose values the host never sees


@pytest.mark.parametrize("place", [on_device, reversed_axes])
@pytest.mark.parametrize(
    "of_seqlens, of_indices",
    [("int32", "int32"), ("int64", "int64"), ("int32", "int64"), ("int64", "int32")],
)
def test_index_arrays(of_seqlens, of_indices, place):
    """Of either type, with strides; entries out of range give NaN and touch no state."""
    given = arguments(4, 3, 2, pooled=True)
    largest = np.iinfo(of_seqlens).max, np.iinfo(of_indices).max
    seqlens = [
        [0, 5, 11],
        [-1, 5, -(2**31)],
        [largest[0], largest[0] - 1, 3],
        [-1, 5, 11],
    ]
    indices = [
        [3, 4, 0],
        [3, 1, 0],
        [1, -(2**31), 2],
        [-1, largest[1], -5],
    ]
    nan_rows = [[1], [0, 2], [], [1]]
    for lengths, rows, spoilt in zip(seqlens, indices, nan_rows, strict=True):
        y, state = run(
            given,
            "silu",
            seqlens=place(np.array(lengths, of_seqlens)),
            indices=place(np.array(rows, of_indices)),
        )
        skipped = [-1 if b in spoilt else row for b, row in enumerate(rows)]
        wanted, wanted_state = oracle.update(
            **given, activation="silu", cache_seqlens=lengths, state_indices=skipped
        )
        wanted[spoilt] = np.nan
        assert_close(y, wanted, "causal_conv1d_update.y")
        assert_close(state, wanted_state, "causal_conv1d_update.state")


def test_index_arrays_with_steps():
    given = arguments(4, 5, 2, pooled=True)
    spread = {"seqlens": np.array(SEQLENS, np.int32), "indices": np.array(INDICES, np.int32)}
    wanted = run(given, "silu", **{name: on_device(x) for name, x in spread.items()})
    for name, x in spread.items():
        wide = on_device(np.full(7, 10**9, np.int32))
        wide[1::2] = x
        spread[name] = wide[1::2]
    for got, expected in zip(run(given, "silu", **spread), wanted, strict=True):
        assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_one_length_for_all_rows(dtype):
    """A stride of 0."""
    given = arguments(4, 5, 2)
    one = on_device(np.broadcast_to(np.array(7, dtype), B))
    for got, expected in zip(
        run(given, None, seqlens=one), run(given, None, seqlens=[7] * B), strict=True
    ):
        assert got.tobytes() == expected.tobytes()


def test_an_empty_pool():
    given = arguments(4, 3, 2)
    given["state"] = given["state"][:0]
    y, _ = run(given, None, indices=on_device(np.array([0, -1, 3], np.int32)))
    assert np.isnan(y[[0, 2]]).all() and not y[1].any()
    assert run(arguments(1, 0, 2), None)[1].shape == (B, D, 0)
