"""The causal convolution's kernels on the CPU, through the public functions, against the oracle."""

import math
from unittest import mock

import numpy as np
import pytest

import cuseq
from cuseq.ops import causal_conv1d
from tests.cpu_runner import shuffled
from tests.cpu_runner.device import (
    LIMITS,
    installed,
    normal,
    on_device,
    reversed_axes,
    sliced,
    transposed,
)
from tests.oracles import causal_conv1d as oracle
from tests.tolerances import assert_close

FILLED = LIMITS._replace(multiprocessors=0)  # each row is one segment
MANY = LIMITS._replace(multiprocessors=100)  # the shortest segments there are


def arguments(B, D, L, W, S=None, dtypes=("float32",) * 4, bias=True):
    """x (B, D, L), weight (D, W), bias (D,) or None, state (B, D, S) or None, by name."""
    x, weight, of_bias, of_state = dtypes
    return {
        "x": normal(B, D, L, dtype=x),
        "weight": normal(D, W, seed=1, dtype=weight),
        "bias": normal(D, seed=2, dtype=of_bias) if bias else None,
        "initial_state": None if S is None else normal(B, D, S, seed=3, dtype=of_state),
    }


def outer_of(x, weight, bias, initial_state):
    """grad_y (B, D, L) and grad_final_state (B, D, S) for these arguments."""
    S = weight.shape[1] - 1 if initial_state is None else initial_state.shape[2]
    state = x if initial_state is None else initial_state
    return (
        normal(*x.shape, seed=4, dtype=x.dtype.name),
        normal(*x.shape[:2], S, seed=5, dtype=state.dtype.name),
    )


def run(
    given,
    activation,
    layout="bdl",
    place=on_device,
    limits=FILLED,
    seeds=(1,),
    outer=None,
    places=(),
):
    """y, final_state and gradients by name, in (B, D, L): the same bits in every order.

    `places` has the place of single arrays by their names.
    """
    grad_y, grad_final_state = outer or outer_of(**given)

    def placed(x, name):
        if x is None:
            return None
        x = np.ascontiguousarray(turned(x, layout)) if name in ("x", "grad_y") else x
        return dict(places).get(name, place)(x)

    on_gpu = {name: placed(x, name) for name, x in given.items()}
    outer = placed(grad_y, "grad_y"), placed(grad_final_state, "grad_final_state")
    inputs = [x for x in (*on_gpu.values(), *outer) if x is not None]
    before = [x.tobytes() for x in inputs]
    how = {"activation": activation, "layout": layout}
    results = []
    for seed in seeds:
        with installed(limits), shuffled(seed):
            y, final_state = cuseq.causal_conv1d_with_state(**on_gpu, **how)
            assert cuseq.causal_conv1d(**on_gpu, **how).tobytes() == y.tobytes()
            gradients = cuseq.causal_conv1d_backward(
                outer[0], **on_gpu, **how, grad_final_state=outer[1]
            )
        assert y.flags.c_contiguous and gradients.x.flags.c_contiguous
        found = {"y": turned(y, layout), "final_state": final_state}
        for name, gradient in gradients._asdict().items():
            assert (gradient is None) == (given[name] is None)
            if gradient is not None:
                found[f"grad_{name}"] = turned(gradient, layout) if name == "x" else gradient
        results.append({name: np.asarray(x) for name, x in found.items()})
    for other in results[1:]:
        for name, x in results[0].items():
            assert x.tobytes() == other[name].tobytes(), name
    assert [x.tobytes() for x in inputs] == before
    return results[0]


def turned(x, layout):
    """Between (B, D, L) and the axes of a layout."""
    return x if layout == "bdl" else x.transpose(0, 2, 1)


def check(given, activation=None, outer=None, **how):
    """`run` against the oracle."""
    outer = outer or outer_of(**given)
    y, final_state = oracle.forward(**given, activation=activation)
    expected = {"y": y, "final_state": final_state}
    gradients = oracle.gradients(
        outer[0], **given, activation=activation, grad_final_state=outer[1]
    )
    expected |= {f"grad_{name}": gradient for name, gradient in gradients.items()}
    for name, got in run(given, activation, outer=outer, **how).items():
        assert_close(got, expected[name], f"causal_conv1d.{name}")


@pytest.mark.parametrize(
    "W, D, layout, place, lanes",  # lanes of a warp across the channels, where x is not short
    [
        (1, 1, "bdl", on_device, 1),
        (2, 3, "bdl", on_device, 1),
        (3, 2, "bdl", on_device, 1),
        (4, 3, "bdl", on_device, 1),
        (4, 3, "bdl", sliced, 1),
        (8, 1, "bdl", on_device, 1),
        (32, 2, "bdl", on_device, 1),
        (1, 33, "bld", on_device, 32),
        (2, 2, "bld", on_device, 2),
        (3, 3, "bld", on_device, 4),
        (4, 40, "bld", on_device, 32),
        (4, 1, "bld", sliced, 1),  # and long runs, for channels lie closer
        (8, 8, "bdl", transposed, 8),
        (32, 12, "bld", on_device, 16),
        (4, 32, "bdl", transposed, 32),
    ],
)
def test_lengths(W, D, layout, place, lanes):
    lengths = {0, 1, W - 1, W, W + 1, 15, 17, 63, 64, 65, 129, 513 if D < 10 else 130}
    for n, L in enumerate(sorted(lengths)):
        S = (None, W - 1, W + 2)[n % 3]
        given = arguments(1 + n % 2, D, L, W, S, bias=n % 4 != 1)
        how = {"layout": layout, "place": place, "limits": (FILLED, MANY)[n // 2 % 2]}
        with mock.patch.object(causal_conv1d, "plan", wraps=causal_conv1d.plan) as planned:
            check(given, (None, "silu")[n % 2], **how)
        macros = dict(causal_conv1d.plan(*planned.call_args.args).macros)
        assert L <= 1 or lanes == 1 or macros["ACROSS"]


@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("S", [None, 3, 4, 70])
@pytest.mark.parametrize("L", [0, 1, 2, 5, 66])
def test_states(layout, S, L):
    """None, as wide as the filter needs, wider, and wider than x is long."""
    check(arguments(2, 3, L, 4, S), "silu", layout=layout, limits=MANY)


@pytest.mark.parametrize(
    "layout, dtype",
    [
        ("bdl", "float64"),
        ("bld", "float64"),
        ("bdl", "bfloat16"),
        ("bld", "float16"),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_dtypes(layout, dtype, activation):
    given = arguments(2, 40, 70, 4, 3, [dtype] * 4)
    check(given, activation, layout=layout, limits=MANY)


@pytest.mark.parametrize(
    "layout, dtypes",
    [  # of x, weight, bias, state: each dtype in each role, computed in float64 ...
        ("bdl", ("float64", "float32", "float16", "bfloat16")),
        ("bld", ("float32", "float16", "bfloat16", "float64")),
        ("bdl", ("float16", "bfloat16", "float64", "float32")),
        ("bld", ("bfloat16", "float64", "float32", "float16")),
        # ... and in float32
        ("bdl", ("float16", "float32", "bfloat16", "float32")),
        ("bld", ("float32", "bfloat16", "float32", "float16")),
    ],
)
def test_dtypes_of_their_own(layout, dtypes):
    check(arguments(1, 33, 20, 4, 5, dtypes), "silu", layout=layout)


@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("place", [transposed, sliced, reversed_axes])
def test_strides(layout, place):
    """Every array of the call has them."""
    given = arguments(2, 33, 20, 4, 5)
    contiguous = run(given, "silu", layout)
    for name, got in run(given, "silu", layout, place).items():
        assert_close(got, contiguous[name].astype(np.float64), f"causal_conv1d.{name}")


@pytest.mark.parametrize("odd_one", ["x", "grad_y"])
def test_strides_of_one_array(odd_one):
    """Where the others have positions that lie next to each other."""
    given = arguments(2, 3, 20, 4, 5)
    contiguous = run(given, "silu")
    for name, got in run(given, "silu", places={odd_one: sliced}).items():
        assert_close(got, contiguous[name].astype(np.float64), f"causal_conv1d.{name}")


def test_strides_of_0():
    given = {
        "x": np.broadcast_to(normal(1, 3, 1), (2, 3, 20)),
        "weight": np.broadcast_to(normal(4, seed=1), (3, 4)),
        "bias": np.broadcast_to(np.float32(0.5), 3),
        "initial_state": np.broadcast_to(normal(3, seed=2), (2, 3, 3)),
    }
    ones = np.broadcast_to(np.float32(1), (2, 3, 20)), np.broadcast_to(np.float32(1), (2, 3, 3))
    check(given, "silu", ones)


@pytest.mark.parametrize("limits", [FILLED, MANY])
@pytest.mark.parametrize("layout, D, L", [("bdl", 3, 600), ("bld", 33, 200)])
def test_results_are_the_same_in_any_order(layout, D, L, limits):
    given = arguments(2, D, L, 4, 3)
    check(given, "silu", layout=layout, limits=limits, seeds=(0, 1, 2))


def test_a_weight_with_the_axis_of_groups():
    given = arguments(1, 3, 20, 4, 3)
    flat = run(given, None)
    given["weight"] = given["weight"][:, None]
    outer = outer_of(**given | {"weight": given["weight"][:, 0]})
    for name, got in run(given, None, outer=outer).items():
        assert got.shape == (3, 1, 4) or name != "grad_weight"
        assert got.tobytes() == flat[name].tobytes()


@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_without_rows_or_channels(layout):
    for B, D in [(0, 3), (2, 0), (0, 0)]:
        found = run(arguments(B, D, 5, 4, 3), "silu", layout)
        assert found["y"].shape == (B, D, 5) and found["final_state"].shape == (B, D, 3)
        assert found["grad_weight"].shape == (D, 4) and not found["grad_weight"].any()
        assert found["grad_bias"].shape == (D,) and not found["grad_bias"].any()


@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_without_a_gradient_by_the_final_state(layout):
    given = arguments(2, 3, 20, 4, 5)
    grad_y, grad_final_state = outer_of(**given)
    zeros = run(given, "silu", layout, outer=(grad_y, np.zeros_like(grad_final_state)))
    for name, got in run(given, "silu", layout, outer=(grad_y, None)).items():
        assert got.tobytes() == zeros[name].tobytes()


@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("oldest", [math.nan, math.inf])
def test_a_wide_state_beyond_the_filter_does_not_matter(layout, oldest):
    """What no output sees may be anything; it reaches the final state of a short x alone."""
    given = arguments(2, 3, 5, 4, 6)
    given["initial_state"][..., :3] = oldest
    check(given, "silu", layout=layout)


@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_nan_stays_where_the_filter_takes_it(layout):
    given = arguments(2, 3, 140, 4)
    given["x"][1, 2, 63] = math.nan
    check(given, "silu", layout=layout, limits=MANY)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_silu_of_large_inputs(dtype):
    given = arguments(1, 1, 9, 1, None, [dtype] * 4, bias=False)
    given["x"][0, 0] = [-1e4, -800, -100, -20, 0, 20, 100, 800, 1e4]
    given["weight"][...] = 1
    check(given, "silu")
