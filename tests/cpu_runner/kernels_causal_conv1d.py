"""The causal convolution's kernels on the CPU, through the public functions, against the oracle."""

import math
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

import cuseq
from cuseq.ops import convolution_engine
from tests import samples
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


def random_rows(B, L, dtype="int32"):
    """Runs of 1 to 40 positions, of a few indices, some of them padding."""
    random = np.random.default_rng(7)
    rows = [
        np.repeat(random.choice([-1, -4, 0, 1, 2], L), random.choice([1, 2, 5, 40], L))[:L]
        for _ in range(B)
    ]
    return np.array(rows, dtype).reshape(B, L)


def outer_of(x, weight, bias, initial_state, seq_idx=None):
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
            if len(seeds) > 1:  # a variant more to compile
                assert cuseq.causal_conv1d(**on_gpu, **how).tobytes() == y.tobytes()
            gradients = cuseq.causal_conv1d_backward(
                outer[0], **on_gpu, **how, grad_final_state=outer[1]
            )
        assert y.strides == gradients.x.strides == strides_like(on_gpu["x"])
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


def strides_like(x):
    """Of a new array whose last two axes lie in memory in the order of those of x."""
    *outer, rows, columns = x.shape
    if min(rows, columns) > 1 and 0 < abs(x.strides[-2]) < abs(x.strides[-1]):
        return np.empty((*outer, columns, rows), x.dtype).swapaxes(-2, -1).strides
    return np.empty(x.shape, x.dtype).strides


def swapped(x):
    """On the device, the last two axes exchanged in memory."""
    return on_device(x.swapaxes(-2, -1).copy().swapaxes(-2, -1) if x.ndim > 1 else x)


@contextmanager
def planning():
    """A list that every plan of a convolution joins as (problem, plan, its macros by name)."""
    made, plan = [], convolution_engine.plan

    def remember(problem, *limits, **options):
        how = plan(problem, *limits, **options)
        made.append((problem, how, dict(how.macros)))
        return how

    with mock.patch.object(convolution_engine, "plan", remember):
        yield made


def turned(x, layout):
    """Between (B, D, L) and the axes of a layout."""
    return x if layout == "bdl" else x.transpose(0, 2, 1)


def check(given, activation=None, outer=None, **how):
    """`run` against the oracle."""
    outer = outer or outer_of(**given)
    forward, backward = oracle.forward, oracle.gradients
    if "seq_idx" in given:
        forward, backward = oracle.forward_by_index, oracle.gradients_by_index
    y, final_state = forward(**given, activation=activation)
    expected = {"y": y, "final_state": final_state}
    gradients = backward(outer[0], **given, activation=activation, grad_final_state=outer[1])
    expected |= {f"grad_{name}": gradient for name, gradient in gradients.items()}
    for name, got in run(given, activation, outer=outer, **how).items():
        assert_close(got, expected[name], f"causal_conv1d.{name}")


SHORT, LONG = (0, 1, 3, 4), (61, 63, 64, 65, 126, 129, 513, 1100)  # the last in two segments


@pytest.mark.parametrize(
    "W, D, layout, place, lengths, pack",  # pack: of channels, None along the length
    [
        (1, 1, "bdl", on_device, (300,), None),
        (2, 3, "bdl", on_device, (129, 515), None),
        (3, 2, "bdl", on_device, (127, 128), None),
        (4, 3, "bdl", on_device, SHORT + LONG, None),
        (4, 3, "bdl", sliced, (65, 129, 300), None),
        (8, 1, "bdl", on_device, (128, 300), None),
        (32, 2, "bdl", on_device, (14, 25, 32, 130, 300), None),
        (1, 33, "bld", on_device, (0, 1, 2, 15, 16, 17, 63, 64, 65, 130), 1),
        (2, 2, "bld", on_device, (1, 2, 3, 15, 17, 65), 2),
        (3, 3, "bld", on_device, (2, 3, 4, 16, 33, 65, 600), 1),
        (4, 12, "bld", on_device, (*SHORT, 15, 17, 31, 65, 130), 4),
        (4, 1, "bld", sliced, SHORT + LONG, 1),
        (4, 8, "bdl", swapped, (9, 65), 4),
        (4, 3, "bld", swapped, (65, 300), None),
        (8, 8, "bld", on_device, (7, 8, 9, 16, 65), 4),
        (32, 12, "bld", on_device, (5, 31, 32, 33, 65), 4),
    ],
)
def test_lengths(W, D, layout, place, lengths, pack):
    for n, L in enumerate(lengths):
        S = (None, W - 1, W + 2)[n % 3]
        given = arguments(1 + n % 2, D, L, W, S)
        how = {"layout": layout, "place": place, "limits": (MANY, FILLED)[(n + len(lengths)) % 2]}
        with planning() as plans:
            check(given, (None, "silu")[W % 2], **how)
        problem, *_ = plans[0]
        assert L <= 1 or problem.across == (pack is not None)
        assert L <= 1 or pack in (None, problem.packs)


@pytest.mark.parametrize("dtype, L", [("float64", 800), ("float32", 1601), ("float16", 2103)])
@pytest.mark.parametrize("limits", [FILLED, MANY])
def test_segments(dtype, L, limits):
    """Of rows that begin anywhere; the gradient reaches from one into the one before."""
    check(arguments(1, 2, L, 4, 3, [dtype] * 4), "silu", limits=limits)


def long_rows(B, L, length):
    """seq_idx of sequences of this length, with some padding inside of one of them."""
    row = np.arange(L, dtype=np.int32) // length
    row[length // 2 : length // 2 + 2] = -1
    return np.array([row] * B).reshape(B, L)


@pytest.mark.parametrize("limits", [FILLED, MANY])
@pytest.mark.parametrize(
    "W, place, by_index",
    [(4, on_device, False), (4, shifted(1, 2), False), (32, sliced, False), (4, on_device, True)],
)
def test_rows_of_many_tiles(W, place, by_index, limits):
    """Places of tiles on their way are used again; states reach back over more than one tile."""
    L = 2301
    given = arguments(1, 2, L, W, 300)
    if by_index:
        given["seq_idx"] = long_rows(1, L, 900)
    with planning() as plans:
        check(given, "silu", limits=limits, places={"x": place})
    for _, how, macros in plans:
        assert macros["LANES"] == 32 and not macros["ACROSS"]
        assert min(how.length, L) > macros["STAGES"] * 32 * macros["PACK"]
        assert macros["STAGES"] > 1 or W == 32
        assert (how.parts > 1) == (limits is MANY)


@pytest.mark.parametrize(
    "dtype, W, D, by_index",
    [
        ("float16", 4, 128, False),  # packs of channels
        ("float16", 3, 33, True),
        ("bfloat16", 32, 33, False),
    ],
)
def test_runs_of_many_positions(dtype, W, D, by_index):
    """Places of steps on their way are used again; states reach over runs."""
    L = 290
    given = arguments(1, D, L, W, 100, [dtype] * 4)
    if by_index:
        given["seq_idx"] = long_rows(1, L, 110)
    with planning() as plans:
        check(given, "silu", layout="bld", seeds=(0, 1))
    for _, how, macros in plans:
        assert macros["ACROSS"] and macros["LANES"] == 32
        assert how.length / macros["AHEAD"] > macros["STAGES"]
        assert how.parts * 4 * how.length >= L > (how.parts - 1) * 4 * how.length  # by 4 warps


def test_weights_in_packs():
    """Of one filter, or across filters of neighbouring channels."""
    for layout, D, W, places in [
        ("bdl", 3, 4, {on_device: 4, shifted(0, 4): 4, shifted(2, 2): 2}),
        ("bld", 4, 3, {on_device: 4}),
        ("bld", 4, 4, {on_device: 4, shifted(0, 4): 4}),
    ]:
        given = arguments(2, D, 20, W, 3)
        for place, weights in places.items():
            with planning() as plans:
                check(given, "silu", layout=layout, places={"weight": place})
            assert {macros["WEIGHTS_AT_ONCE"] for *_, macros in plans} == {weights}


@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_rows_that_begin_anywhere(dtype, by_index):
    """x and grad_y are aligned differently, and y, whose rows are odd, by each row."""
    pack = {"float64": 2, "float32": 4}.get(dtype, 8)
    L = 32 * pack + 21
    given = arguments(1, 3, L, 4, 3, [dtype] * 4)
    if by_index:
        given["seq_idx"] = random_rows(1, L)
    aligned = run(given, "silu")
    for offset in range(pack + 1):
        places = {"x": shifted(offset, 1), "grad_y": shifted(pack - offset, offset % 3)}
        got = run(given, "silu", places=places)
        assert all(got[name].tobytes() == x.tobytes() for name, x in aligned.items())
    check(given, "silu", places=places)


@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("S", [None, 3, 4, 70])
@pytest.mark.parametrize("L", [0, 1, 2, 5, 66])
def test_states(layout, S, L):
    """None, as wide as the filter needs, wider, and wider than x is long."""
    check(arguments(2, 3, L, 4, S), "silu", layout=layout, limits=MANY)


@pytest.mark.parametrize(
    "dtype, D, pack",
    [
        ("bfloat16", 24, 8),
        ("float16", 20, 4),
        ("bfloat16", 10, 2),
        ("float16", 9, 1),
        ("float32", 12, 4),
        ("float32", 10, 2),
        ("float64", 6, 2),
        ("float64", 5, 1),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_channels_that_packs_divide(dtype, D, pack, activation):
    given = arguments(2, D, 37, 4, 3, [dtype] * 4)
    check(given, activation, layout="bld", limits=MANY)
    step = 16 // samples.dtype_of(dtype).itemsize // pack
    gap = -D % (step * pack)  # rows of x are packs apart, and not farther aligned
    check(given, activation, layout="bld", places={"x": shifted(0, gap)})


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
@pytest.mark.parametrize("layout, D, L", [("bdl", 3, 1100), ("bld", 33, 200)])
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
