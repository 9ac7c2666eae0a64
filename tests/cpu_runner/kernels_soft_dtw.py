"""The soft-DTW kernels on the CPU, through the public functions, against the oracle."""

import math
import sys

import ml_dtypes
import numpy as np
import pytest

import cuseq
from cuseq.ops import soft_dtw
from cuseq.runtime.kernels import DeviceLimits
from tests.cpu_runner import SANITIZED, shuffled
from tests.cpu_runner.device import (
    installed,
    normal,
    on_device,
    reversed_axes,
    sliced,
    transposed,
)
from tests.oracles import soft_dtw as oracle
from tests.samples import DTYPES, dtype_of
from tests.tolerances import assert_close

NAMES = "values", "grad_a", "grad_b"


def limits_for(a, b, warps):
    """Those of a device on which the plan gives each pair up to so many warps."""
    pairs = len(b) if len(a) == 1 else len(a)
    return DeviceLimits(multiprocessors=max(pairs, 1) * warps / soft_dtw.RESIDENT_WARPS)


def run(a, b, gamma=1.0, grad_values=None, *, warps=2, place=on_device, seeds=(1,)):
    """values, grad_a, grad_b: of every way in and every order of the threads the same bits."""
    on_gpu = [place(a), place(b)]
    before = [x.tobytes() for x in on_gpu]
    results = []
    for seed in seeds:
        with installed(limits_for(a, b, warps)), shuffled(seed):
            values, kept = soft_dtw.forward_keeping(*on_gpu, gamma=gamma)
            outer = on_device(np.ones_like(values)) if grad_values is None else grad_values
            gradients = soft_dtw.backward(outer, *on_gpu, values, kept, gamma=gamma)
            results.append((values, *gradients))
            results.append((cuseq.soft_dtw(*on_gpu, gamma=gamma), *gradients))
            if grad_values is None:
                values, gradients = cuseq.soft_dtw_value_and_grad(*on_gpu, gamma=gamma)
                results.append((values, *gradients))
    for other in results[1:]:
        for name, x, y in zip(NAMES, results[0], other, strict=True):
            assert x.tobytes() == y.tobytes(), name
    assert [x.tobytes() for x in on_gpu] == before
    return tuple(np.asarray(x) for x in results[0])


def check(a, b, gamma=1.0, grad_values=None, **how):
    """`run` against the oracle."""
    outer = None if grad_values is None else on_device(grad_values)
    actual = run(a, b, gamma, outer, **how)
    expected = oracle.batch(a, b, gamma, grad_values)
    largest = np.abs(expected[0]).max(initial=0.0)
    assert_close(actual[0], expected[0], "soft_dtw.values", scale=largest + gamma)
    # A cost counts by eps of its size over gamma; the oracle's weights by eps |R| / gamma.
    pairs = zip(*np.broadcast_arrays(a[:, :, None], b[:, None]), strict=True)
    costs = [(np.subtract(x, y, dtype=np.float64) ** 2).sum(axis=2) for x, y in pairs]
    exponent = max((likely_cost(C, gamma) for C in costs), default=0.0) / gamma
    if a.dtype == np.float64:
        exponent = largest / gamma
    for name, got, wanted in zip(NAMES[1:], actual[1:], expected[1:], strict=True):
        assert_close(got, wanted, f"soft_dtw.{name}", exponent=exponent)


def likely_cost(C, gamma):
    """The largest cost along the likely paths."""
    return C[oracle.alignment(C, gamma) > 1e-3].max(initial=0.0)


@pytest.mark.skipif(not SANITIZED, reason="outside of its own process others may import them")
def test_no_framework_is_imported():
    assert not {"cupy", "jax", "torch"} & sys.modules.keys()


# Rows come in stripes of 32, columns in chunks of 16 that reach 31 columns back.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, N, M, D",
    [
        (1, 1, 1, 1),
        (3, 1, 2, 4),
        (1, 2, 1, 5),
        (1, 3, 70, 1),
        (2, 16, 31, 9),
        (1, 17, 32, 3),
        (1, 31, 33, 4),
        (1, 32, 16, 5),
        (3, 33, 17, 2),
        (1, 63, 20, 1),
        (1, 64, 5, 9),
        (1, 65, 18, 4),
        (1, 97, 20, 1),
    ],
)
def test_sizes(dtype, B, N, M, D):
    check(normal(B, N, D, dtype=dtype), normal(B, M, D, seed=1, dtype=dtype))


PIPELINES = [  # warps, N, M
    (1, 97, 5),  # four stripes one after the other
    (2, 160, 20),  # three rounds, the last one short
    (2, 97, 100),  # more chunks than it takes to start every warp
    (4, 97, 40),  # a stripe a warp
    (4, 65, 20),  # a warp without a stripe
    (8, 130, 3),
    (8, 321, 2),  # eleven stripes
    (16, 257, 3),
    (16, 545, 2),  # eighteen stripes
]


@pytest.mark.parametrize(
    "dtype, warps, N, M",
    [("float32", *sizes) for sizes in PIPELINES]
    + [("float64", *sizes) for sizes in PIPELINES if sizes[0] <= 8],
)
def test_pipelines_of_stripes(dtype, warps, N, M):
    a, b = normal(1, N, 1, dtype=dtype), normal(1, M, 1, seed=1, dtype=dtype)
    problem = soft_dtw.Problem(1, N, M, 1, dtype, 0)
    macros = dict(soft_dtw.plan(problem, limits_for(a, b, warps)).macros)
    assert macros["WARPS"] == warps
    check(a, b, warps=warps, seeds=(0, 1, 2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_the_same_in_any_order(dtype):
    """More stripes than warps, several chunks, features and pairs; the pipelines do the others."""
    run(
        normal(2, 97, 5, dtype=dtype),
        normal(2, 20, 5, seed=1, dtype=dtype),
        seeds=(0, 1, 2),
    )


@pytest.mark.parametrize("gamma", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize(
    "dtype, offset", [("float64", 1000.0), ("float32", 1000.0), ("float16", 0)]
)
def test_gammas_and_offsets(dtype, offset, gamma):
    a, b = (normal(1, n, 2, seed=n, dtype=dtype, offset=offset) for n in (34, 21))
    check(a, b, gamma)


@pytest.mark.parametrize("place", [transposed, sliced, reversed_axes])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype, place):
    a, b = normal(2, 33, 5, dtype=dtype), normal(2, 18, 5, seed=1, dtype=dtype)
    for got, wanted in zip(run(a, b, place=place), run(a, b), strict=True):
        assert got.tobytes() == wanted.tobytes()


def test_strides_of_0():
    a = np.broadcast_to(normal(1, 33, 1), (3, 33, 2))
    b = np.broadcast_to(normal(2, seed=1), (3, 4, 2))
    check(a, b, grad_values=np.broadcast_to(np.float32(0.5), 3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_a, batch_b", [(1, 3), (3, 1), (1, 1)])
def test_a_batch_of_1_meets_every_series(dtype, batch_a, batch_b):
    a, b = normal(batch_a, 33, 2, dtype=dtype), normal(batch_b, 7, 2, seed=1, dtype=dtype)
    real = "float64" if dtype == "float64" else "float32"
    check(a, b, grad_values=normal(max(batch_a, batch_b), seed=2, dtype=real), seeds=(0, 1, 2))


@pytest.mark.parametrize("place", [on_device, sliced, reversed_axes])
def test_strides_of_grad_values(place):
    a, b, outer = normal(3, 5, 1), normal(3, 6, 1, seed=1), normal(3, seed=2)
    actual, expected = run(a, b, 1.0, place(outer)), run(a, b, 1.0, on_device(outer))
    for got, wanted in zip(actual, expected, strict=True):
        assert got.tobytes() == wanted.tobytes()


def test_series_without_axes_to_spare():
    a, b = normal(1, 5, 1), normal(1, 6, 1, seed=1)
    values, grad_a, grad_b = run(a, b)
    for axes in [(0, slice(None), 0), (0,)]:
        with installed():
            value, gradients = cuseq.soft_dtw_value_and_grad(on_device(a[axes]), on_device(b[axes]))
        assert value.shape == () and value == values
        assert (gradients[0] == grad_a[axes]).all() and (gradients[1] == grad_b[axes]).all()


def test_without_pairs_or_features():
    for a, b in [(0, 0), (1, 0), (0, 1)]:
        values, grad_a, grad_b = run(normal(a, 3, 2), normal(b, 4, 2))
        assert values.shape == (0,)
        assert (grad_a.shape, grad_b.shape) == ((a, 3, 2), (b, 4, 2))
        assert not grad_a.any() and not grad_b.any()
    values, grad_a, grad_b = run(normal(2, 33, 0), normal(2, 4, 0), gamma=2.0)
    expected = -2 * math.log(oracle.delannoy(32, 3))
    assert_close(values, [expected, expected], "soft_dtw.values")


# ---- NaN and infinity


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoilt, place", [("a", 0), ("a", 32), ("b", 0), ("b", -1)])
def test_nan_stays_in_its_pair(dtype, spoilt, place):
    series = {"a": normal(3, 33, 2, dtype=dtype), "b": normal(3, 5, 2, seed=1, dtype=dtype)}
    clean = run(**series)
    series[spoilt][1, place, 1] = math.nan
    for got, wanted in zip(run(**series), clean, strict=True):
        assert np.isnan(got[1]).all()
        assert (got[[0, 2]] == wanted[[0, 2]]).all()


def test_nan_reaches_a_shared_series():
    a, b = normal(1, 33, 2), normal(3, 5, 2, seed=1)
    b[2, 0, 1] = math.nan
    values, grad_a, grad_b = run(a, b)
    assert np.isnan(values).tolist() == [False, False, True]
    assert np.isnan(grad_a).all()
    assert np.isnan(grad_b).all(axis=(1, 2)).tolist() == [False, False, True]
    assert np.isfinite(grad_b[:2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_total_has_no_gradient(dtype):
    a, b = normal(3, 33, 2, dtype=dtype), normal(3, 5, 2, seed=1, dtype=dtype)
    clean = run(a, b)
    a[0, 2, 1] = math.inf
    if dtype != "float16":  # whose squares do not leave float32
        a[2] = math.sqrt(float(ml_dtypes.finfo(a.dtype).max)) * 2
    for got, wanted, of_infinite in zip(run(a, b), clean, [math.inf, 0, 0], strict=True):
        assert (got[0] == of_infinite).all()
        assert (got[1] == wanted[1]).all()
        assert dtype == "float16" or (got[2] == of_infinite).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("share", [1e-19, 0.9])
def test_paths_go_round_infinite_costs(dtype, share):
    """Costs of opposite series overflow off the diagonal, and even their differences may."""
    big = float(ml_dtypes.finfo(dtype_of(dtype)).max) * share
    a = np.array([[[-big], [-big], [big]]], dtype_of(dtype))
    values, grad_a, grad_b = run(a, a.copy())
    assert_close(values, [-math.log(3)], "soft_dtw.values")
    assert not grad_a.any() and not grad_b.any()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_totals_within_the_exponents(dtype):
    """A hundred equal costs down one column, 5e8 gamma in all."""
    a = np.full((1, 100, 1), math.sqrt(5e8 / 100), dtype_of(dtype))
    check(a, np.zeros((1, 1, 1), dtype_of(dtype)))


@pytest.mark.parametrize("gamma", [1e-45, 1e-300])
def test_equal_series_at_a_tiny_gamma(gamma):
    a = normal(1, 5, 2)
    values, grad_a, grad_b = run(a, a.copy(), gamma)
    assert abs(values[0]) <= 5 * gamma
    assert not grad_a.any() and not grad_b.any()
