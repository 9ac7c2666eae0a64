"""Packed sequences by the causal convolution's kernels on the CPU, against the oracle."""

import math
from itertools import accumulate

import numpy as np
import pytest

import cuseq
from tests.cpu_runner import shuffled
from tests.cpu_runner.device import (
    LIMITS,
    installed,
    normal,
    on_device,
    reversed_axes,
    shifted,
    sliced,
    transposed,
)
from tests.oracles import causal_conv1d as oracle
from tests.tolerances import assert_close

FILLED = LIMITS._replace(multiprocessors=0)  # the longest runs there are
MANY = LIMITS._replace(multiprocessors=100)  # the shortest, of 16 positions


def packing(lengths, dtype="int32"):
    """cu_seqlens of sequences of these lengths."""
    return np.array([0, *accumulate(lengths)], dtype)


def arguments(lengths, D, W, width=None, dtype="float32", index="int32", bias=True):
    """x (T, D), weight, bias, initial_state and cu_seqlens by name."""
    states = None if width is None else normal(len(lengths), D, width, seed=3, dtype=dtype)
    return {
        "x": normal(sum(lengths), D, dtype=dtype),
        "weight": normal(D, W, seed=1, dtype=dtype),
        "bias": normal(D, seed=2, dtype=dtype) if bias else None,
        "initial_state": states,
        "cu_seqlens": packing(lengths, index),
    }


def outer_of(x, weight, bias, initial_state, cu_seqlens):
    """grad_y (T, D) and grad_final_state (S, D, width) for these arguments."""
    width = weight.shape[1] - 1 if initial_state is None else initial_state.shape[2]
    states = len(cu_seqlens) - 1, x.shape[1], width
    return normal(*x.shape, seed=4, dtype=x.dtype.name), normal(*states, seed=5, dtype=x.dtype.name)


def run(given, activation=None, limits=MANY, seeds=(1,), outer=None, places=()):
    """y, final_state and gradients by name: the same bits in every order.

    `places` has the place of single arrays by their names.
    """
    grad_y, grad_final_state = outer or outer_of(**given)
    outer = {"grad_y": grad_y, "grad_final_state": grad_final_state}
    on_gpu = {
        name: None if x is None else dict(places).get(name, on_device)(x)
        for name, x in (given | outer).items()
    }
    grad_y, grad_final_state = (on_gpu.pop(name) for name in outer)
    results = []
    for seed in seeds:
        with installed(limits), shuffled(seed):
            y, final_state = cuseq.causal_conv1d_varlen_with_state(**on_gpu, activation=activation)
            if len(seeds) > 1:  # a variant more to compile
                alone = cuseq.causal_conv1d_varlen(**on_gpu, activation=activation)
                assert alone.tobytes() == y.tobytes()
            gradients = cuseq.causal_conv1d_varlen_backward(
                grad_y, **on_gpu, activation=activation, grad_final_state=grad_final_state
            )
        found = {"y": y, "final_state": final_state}
        for name, gradient in gradients._asdict().items():
            assert (gradient is None) == (given[name] is None)
            if gradient is not None:
                found[f"grad_{name}"] = gradient
        results.append({name: np.asarray(x) for name, x in found.items()})
    for other in results[1:]:
        assert all(other[name].tobytes() == x.tobytes() for name, x in results[0].items())
    return results[0]


def check(given, activation=None, outer=None, **how):
    """`run` against the oracle."""
    outer = outer or outer_of(**given)
    y, final_state = oracle.forward_packed(**given, activation=activation)
    gradients = oracle.gradients_packed(
        outer[0], **given, activation=activation, grad_final_state=outer[1]
    )
    expected = {"y": y, "final_state": final_state}
    expected |= {f"grad_{name}": gradient for name, gradient in gradients.items()}
    for name, got in run(given, activation, outer=outer, **how).items():
        assert_close(got, expected[name], f"causal_conv1d.{name}")


LENGTHS = [
    (),
    (0,),
    (0, 0, 0),
    (1,),
    (1, 1, 1, 1, 1, 1, 1),  # all shorter than the filter
    (0, 5, 0, 0, 3, 2, 1, 0),
    (3, 0, 7),
    (15, 17, 1, 31),
    (64, 1, 63, 0, 65),
    (16, 16, 0, 32, 0, 16),  # they begin where runs begin
    (13, 3, 1, 14, 1, 2, 30),  # and W - 1 or less before that or behind it
    (100, 2, 130),
]


@pytest.mark.parametrize("width", [None, 3, 6])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths, width):
    number = LENGTHS.index(lengths)
    index, activation = ("int32", "int64")[number % 2], (None, "silu")[number // 2 % 2]
    given = arguments(lengths, 4, 4, width, index=index)
    check(given, activation, seeds=(0, 1))
    check(given, activation, limits=FILLED)


@pytest.mark.parametrize("W, width", [(1, None), (1, 2), (2, 1), (8, None), (8, 9), (32, 33)])
def test_widths(W, width):
    for lengths in (0, 5, 1, 0, 2, 11, 0), (15, 1, 17, 3), (64, 0, 65):
        check(arguments(lengths, 4, W, width, bias=width is None), "silu")


@pytest.mark.parametrize(
    "dtype, D",
    [("float64", 6), ("float64", 1), ("float32", 33), ("float16", 24), ("bfloat16", 10)],
)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_dtypes(dtype, D, activation):
    """Of channels that packs divide, or not."""
    check(arguments((3, 0, 29, 1, 40), D, 4, 5, dtype), activation, seeds=(0, 1))


@pytest.mark.parametrize("dtype, D", [("float16", 33), ("float32", 128)])
def test_runs_of_many_positions(dtype, D):
    """Several sequences in a run, and several runs in a sequence; states reach over runs."""
    given = arguments((5, 150, 0, 95, 1, 39), D, 4, 100, dtype)
    check(given, "silu", limits=FILLED, seeds=(0, 1))


@pytest.mark.parametrize("place", [transposed, sliced, reversed_axes])
def test_strides(place):
    """Every array of the call has them, cu_seqlens too."""
    given = arguments((3, 0, 29, 1), 4, 4, 5, index="int64")
    outer = outer_of(**given)
    names = *given, "grad_y", "grad_final_state"
    check(given, "silu", outer, places=dict.fromkeys(names, place))


def test_rows_that_begin_anywhere():
    """Channels that are read one by one, or by two, in x or in grad_y."""
    given = arguments((3, 0, 29, 1), 4, 4, 5)
    together = run(given, "silu")
    for x, grad_y in [((1, 3), (0, 4)), ((0, 4), (3, 1)), ((2, 0), (0, 2)), ((0, 1), (0, 0))]:
        got = run(given, "silu", places={"x": shifted(*x), "grad_y": shifted(*grad_y)})
        assert all(got[name].tobytes() == x.tobytes() for name, x in together.items())


def test_x_without_channels():
    found = run(arguments((3, 0, 2), 0, 4, 3))
    assert found["y"].shape == (5, 0) and found["grad_weight"].shape == (0, 4)


def test_without_a_gradient_by_the_final_state():
    given = arguments((3, 0, 29, 1), 4, 4, 5)
    grad_y, grad_final_state = outer_of(**given)
    zeros = run(given, "silu", outer=(grad_y, np.zeros_like(grad_final_state)))
    for name, got in run(given, "silu", outer=(grad_y, None)).items():
        assert got.tobytes() == zeros[name].tobytes()


def test_nan_stays_in_its_sequence():
    given = arguments((14, 5, 0, 40), 4, 4, 3)
    given["x"][15, 2] = given["initial_state"][0, 1, 2] = math.nan
    check(given, "silu")


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(
    "ends",
    [
        (10, 25, 45),  # the first is not 0
        (0, 25, 60),  # the last beyond T
        (0, 25, 35),  # or below it
        (-15, 25, 45),
        (0, 30, 20, 45),  # they fall
        (45, 0),
        (0, 20, 10),
        (0, 2**31 - 1, 45),
        (0, -(2**31), 45),
        (7, 7),
        (50, 60, 70),
        (-9, -3, -1),
    ],
    ids=str,
)
@pytest.mark.parametrize("limits", [FILLED, MANY])
def test_wrong_cu_seqlens_on_a_device(index, ends, limits):
    """NaN where no sequence is and in states of those that are none, and no access elsewhere.

    Where the entries fall, more positions may be NaN, for a sequence is found by bisection.
    """
    T, pairs = 45, list(zip(ends, ends[1:], strict=False))
    valid = np.array([0 <= start <= end <= T for start, end in pairs])
    given = arguments([0] * len(pairs), 4, 4, 3)
    given |= {"x": normal(T, 4), "cu_seqlens": np.array(ends, index)}
    found = run(given, "silu", limits, seeds=(0, 1))
    outside = np.ones(T, bool)
    for s in valid.nonzero()[0]:
        rows, one = slice(*pairs[s]), slice(s, s + 1)
        outside[rows] = False
        x, weight, bias, state, _ = given.values()
        y, final_state = oracle.forward(x[rows].T[None], weight, bias, state[one], "silu")
        assert_close(found["final_state"][one], final_state, "causal_conv1d.final_state")
        if list(ends) == sorted(ends):
            assert_close(found["y"][rows], y[0].T, "causal_conv1d.y")
            assert np.isfinite(found["grad_x"][rows]).all()
    for name in ("y", "grad_x"):
        assert np.isnan(found[name][outside]).all()
    for name in ("final_state", "grad_initial_state"):
        assert np.isnan(found[name][~valid]).all()
    assert np.isfinite(found["grad_initial_state"][valid]).all()
    assert np.isfinite(found["grad_weight"]).all() and np.isfinite(found["grad_bias"]).all()
