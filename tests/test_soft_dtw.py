"""cuseq.soft_dtw and soft_dtw_value_and_grad on every framework, against the oracle."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuseq
from cuseq.host import soft_dtw as host
from cuseq.ops import soft_dtw as ops
from cuseq.runtime import kernels
from tests import frameworks
from tests.frameworks import (
    CUPY,
    TORCH_CUDA,
    assert_same_bits,
    every_cuda_place,
    every_place,
    every_place_and_dtype,
    over,
    run,
)
from tests.oracles import soft_dtw as oracle
from tests.samples import DTYPES, normal
from tests.strategies import layouts, sizes
from tests.tolerances import assert_close

# (B, N, M, D) around a tile of 32 rows and 16 columns
SIZES = [
    (1, 1, 1, 1),
    (3, 1, 2, 3),
    (3, 2, 1, 4),
    (1, 15, 17, 5),
    (1, 16, 16, 8),
    (3, 17, 15, 9),
    (1, 31, 33, 1),
    (1, 32, 32, 3),
    (1, 33, 31, 4),
    (3, 32, 1, 1),
    (1, 1, 65, 3),
    (1, 63, 48, 2),
    (1, 64, 16, 5),
    (1, 65, 49, 3),
    (1, 2, 64, 1),
]


class Expected(NamedTuple):
    values: np.ndarray  # (B,)
    grad_a: np.ndarray
    grad_b: np.ndarray
    exponent: float  # the largest cost along likely paths, over gamma


def by_oracle(a, b, gamma):
    """The float64 answer for a (B or 1, N, D) and b (B or 1, M, D)."""
    return Expected(*oracle.batch(a, b, gamma), largest_cost(a, b, gamma) / gamma)


def largest_cost(a, b, gamma):
    """Of the cells that likely paths cross, in any pair."""
    largest = 0.0
    for pair in range(max(len(a), len(b)) if len(a) and len(b) else 0):
        C = oracle.cost(a[pair % len(a)], b[pair % len(b)])
        likely = oracle.alignment(C, gamma) > 1e-3
        largest = max(largest, C[likely].max())
    return largest


def by_host(a, b, gamma):
    """The float64 answer of cuseq.host, itself checked by the oracle, for what is too large."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    B = max(len(a), len(b)) if len(a) and len(b) else 0
    values, grad_a, grad_b = np.zeros(B), np.zeros(a.shape), np.zeros(b.shape)
    host.backward(None, a, b, gamma, values, grad_a, grad_b)
    return Expected(values, grad_a, grad_b, largest_cost(a[:1], b[:1], gamma) / gamma)


@cache
def random_case(B, N, M, D, dtype, gamma=1.0, offset=0.0):
    a = normal(B, N, D, dtype=dtype, offset=offset)
    b = normal(B, M, D, seed=1, dtype=dtype, offset=offset)
    return a, b, by_oracle(a, b, gamma)


def check(results, expected, gamma=1.0):
    """Compare (values, (grad_a, grad_b)) with the answer."""
    values, (grad_a, grad_b) = results
    largest = np.abs(expected.values).max(initial=0.0)
    # The oracle's own weights are good to eps |R| / gamma.
    exponent = largest / gamma if values.dtype == np.float64 else expected.exponent
    assert_close(values, expected.values, "soft_dtw.values", scale=largest + gamma)
    assert_close(grad_a, expected.grad_a, "soft_dtw.grad_a", exponent=exponent)
    assert_close(grad_b, expected.grad_b, "soft_dtw.grad_b", exponent=exponent)


def run_both(place, a, b, gamma=1.0, offset=0):
    """(values, gradients) of soft_dtw_value_and_grad; soft_dtw must give the same values."""
    values = run(place, cuseq.soft_dtw, a, b, gamma=gamma, offset=offset)
    results = run(place, cuseq.soft_dtw_value_and_grad, a, b, gamma=gamma, offset=offset)
    assert frameworks.same_bits(values, results[0])
    assert values.dtype == (np.float64 if a.dtype == np.float64 else np.float32)
    assert results[1][0].dtype == a.dtype and results[1][1].dtype == b.dtype
    return results


@every_place_and_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(place, dtype, size):
    a, b, expected = random_case(*size, dtype)
    check(run_both(place, a, b), expected)


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gamma", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_gammas_and_offsets(place, dtype, gamma, offset):
    a, b, expected = random_case(2, 20, 34, 2, dtype, gamma, offset)
    check(run_both(place, a, b, gamma), expected, gamma)


@every_place
@pytest.mark.parametrize(
    "a_shape, b_shape, values_shape",
    [
        ((5,), (4,), ()),
        ((5, 3), (4, 3), ()),
        ((5,), (4, 1), ()),
        ((5, 3), (1, 4, 3), (1,)),
        ((5, 3), (2, 4, 3), (2,)),
        ((2, 5, 1), (4,), (2,)),
    ],
)
def test_series_of_one_two_and_three_axes(place, a_shape, b_shape, values_shape):
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    values, gradients = run_both(place, a, b)
    assert values.shape == values_shape
    assert [gradient.shape for gradient in gradients] == [a_shape, b_shape]
    D = b_shape[-1] if len(b_shape) > 1 else 1
    batches = [x.reshape(-1, x.shape[-2] if x.ndim > 1 else len(x), D) for x in (a, b)]
    expected = by_oracle(*batches, 1.0)
    results = (
        values.reshape(-1),
        [gradient.reshape(batch.shape) for gradient, batch in zip(gradients, batches, strict=True)],
    )
    check(results, expected)


@every_place_and_dtype
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (1, 1)], ids=str)
def test_a_batch_of_one_meets_the_other_batch(place, dtype, batches):
    a, b = normal(batches[0], 6, 2, dtype=dtype), normal(batches[1], 35, 2, seed=1, dtype=dtype)
    check(run_both(place, a, b), by_oracle(a, b, 1.0))


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("batches", [(0, 0), (0, 1), (1, 0)], ids=str)
def test_no_pairs(place, dtype, batches):
    a, b = normal(batches[0], 6, 2, dtype=dtype), normal(batches[1], 4, 2, dtype=dtype)
    values, gradients = run_both(place, a, b)
    assert values.shape == (0,)
    for gradient, series in zip(gradients, (a, b), strict=True):
        assert gradient.shape == series.shape and not gradient.any()


@every_place
def test_no_features(place):
    values, gradients = run_both(place, normal(2, 3, 0), normal(2, 40, 0), 2.0)
    assert_close(values, [-2 * math.log(oracle.delannoy(2, 39))] * 2, "soft_dtw.values")
    assert [gradient.shape for gradient in gradients] == [(2, 3, 0), (2, 40, 0)]


@every_place_and_dtype
@pytest.mark.parametrize("series, point", [("a", 0), ("a", -1), ("b", 17), ("b", -1)])
def test_nan_stays_in_its_sample(place, dtype, series, point):
    a, b = normal(3, 34, 2, dtype=dtype), normal(3, 20, 2, seed=1, dtype=dtype)
    clean = run_both(place, a, b)
    (a if series == "a" else b)[1, point, 1] = math.nan
    values, gradients = run_both(place, a, b)
    for got, wanted in zip((values, *gradients), (clean[0], *clean[1]), strict=True):
        assert np.isnan(got[1]).all()
        assert frameworks.same_bits(got[[0, 2]], wanted[[0, 2]])


@every_place
def test_nan_reaches_a_shared_series(place):
    a, b = normal(1, 4, 2), normal(3, 5, 2, seed=1)
    b[2, 0, 1] = math.nan
    values, (grad_a, grad_b) = run_both(place, a, b)
    assert np.isnan(values).tolist() == [False, False, True]
    assert np.isnan(grad_a).all()
    assert np.isnan(grad_b).all(axis=(1, 2)).tolist() == [False, False, True]
    assert np.isfinite(grad_b[:2]).all()


@every_place_and_dtype
def test_an_infinite_value_has_no_gradient(place, dtype):
    a, b = normal(3, 34, 2, dtype=dtype), normal(3, 20, 2, seed=1, dtype=dtype)
    clean = run_both(place, a, b)
    a[0, 33, 1] = math.inf
    b[2, 3, 0] = -math.inf
    values, gradients = run_both(place, a, b)
    assert values[[0, 2]].tolist() == [math.inf] * 2
    for got, wanted in zip((values, *gradients), (clean[0], *clean[1]), strict=True):
        assert frameworks.same_bits(got[1], wanted[1])
    assert not any(gradient[[0, 2]].any() for gradient in gradients)


@every_place
@pytest.mark.parametrize("dtype, big", [("float64", 1e200), ("float32", 1e20)])
def test_a_total_that_overflows_is_infinite(place, dtype, big):
    a, b = normal(2, 3, 1, dtype=dtype), normal(2, 33, 1, seed=1, dtype=dtype)
    a[1] = big
    values, gradients = run_both(place, a, b)
    assert values[1] == math.inf and np.isfinite(values[0])
    assert not any(gradient[1].any() for gradient in gradients)


@every_place
@given(st.data())
def test_strides(place, data):
    B, D = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5))
    N, M = data.draw(sizes(33)), data.draw(sizes(17))
    lie_a, lie_b = (data.draw(layouts(3, place.strides)) for _ in "ab")
    a = lie_a.of(normal(B, N, D, dtype="float32"))
    b = lie_b.of(normal(B, M, D, seed=1, dtype="float32"))
    expected = by_host(a, b, 1.0)
    check(run_both(place, a, b, offset=lie_a.offset), expected)


@every_place
def test_repeated_calls_give_the_same_bits(place):
    a, b = normal(7, 70, 3, dtype="float32"), normal(1, 50, 3, seed=1, dtype="float32")
    times = 20 if place.device == "cuda" else 5
    assert_same_bits([run_both(place, a, b) for _ in range(times)])


@frameworks.every_mixed_pair
def test_frameworks_mix_on_one_device(places):
    a, b, expected = random_case(1, 33, 31, 4, "float32")
    of_a, of_b = places
    results = cuseq.soft_dtw_value_and_grad(of_a.array(a), of_b.array(b))
    check(frameworks.taken(of_a, results), expected)


# On a CUDA device, where the plan and the streams matter:


@every_cuda_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_long_pair(place, dtype):
    gamma = 0.1
    a, b = normal(1, 512, 3, dtype=dtype), normal(1, 512, 3, seed=1, dtype=dtype)
    expected = long_pair(dtype, gamma)
    results = run_both(place, a, b, gamma)
    check(results, expected, gamma)
    for gradient, wanted in zip(results[1], expected[1:3], strict=True):
        assert np.abs(gradient - wanted).max() <= 1e-4


@cache
def long_pair(dtype, gamma):
    return by_oracle(normal(1, 512, 3, dtype=dtype), normal(1, 512, 3, seed=1, dtype=dtype), gamma)


@pytest.mark.gpu
@over([CUPY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(2, 3000, 70, 3), (2, 70, 3000, 1), (300, 40, 50, 2)], ids=str)
def test_long_series_and_many_pairs(place, dtype, size):
    B, N, M, D = size
    a, b = normal(B, N, D, dtype=dtype), normal(B, M, D, seed=1, dtype=dtype)
    check(run_both(place, a, b), by_host(a, b, 1.0))


@pytest.mark.gpu
@over([CUPY])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("warps", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("limited_by", ["stripes", "batch"])
def test_warps_of_a_pair(place, dtype, warps, limited_by):
    """As many warps as a pair has stripes, or fewer, which then take several stripes in turn."""
    if (dtype, warps) == ("float64", 16):
        pytest.skip("float64 takes 8 warps at most")
    limits = kernels.device_limits(0)
    if limited_by == "stripes":
        B, N = 2, 32 * warps - 5
    else:
        B, N = limits.multiprocessors * ops.RESIDENT_WARPS // warps, 32 * (warps + 1) + 1
    M = 21
    problem = ops.Problem(B, N, M, 2, dtype, 0)
    assert ops.plan(problem, limits).block == 32 * warps
    a, b = normal(B, N, 2, dtype=dtype), normal(B, M, 2, seed=1, dtype=dtype)
    check(run_both(place, a, b), by_host(a, b, 1.0))


@over([CUPY, TORCH_CUDA])
def test_follows_the_current_stream(place):
    frameworks.assert_follows_the_stream(
        place, cuseq.soft_dtw_value_and_grad, normal(2, 40, 3), normal(2, 50, 3, seed=1)
    )


@over([TORCH_CUDA])
def test_on_a_second_device(place):
    torch = place.library
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    a, b, expected = random_case(1, 33, 31, 4, "float32")
    here = [place.array(x).to("cuda:1") for x in (a, b)]
    results = cuseq.soft_dtw_value_and_grad(*here)
    assert results[0].device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    check(frameworks.taken(place, results), expected)
