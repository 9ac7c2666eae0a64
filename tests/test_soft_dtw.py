"""cuseq.soft_dtw and soft_dtw_value_and_grad on every framework, against the oracle.

The options are in test_soft_dtw_options.py, accuracy and large sizes in test_soft_dtw_accuracy.py;
the comparisons here serve them too.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuseq
from tests import frameworks
from tests.frameworks import (
    CUPY,
    NUMPY,
    TORCH_CUDA,
    assert_same_bits,
    every_place,
    every_place_and_dtype,
    over,
    run,
)
from tests.oracles import soft_dtw as oracle
from tests.samples import normal
from tests.strategies import layouts, sizes
from tests.tolerances import assert_close

OF_SERIES = cuseq.soft_dtw, cuseq.soft_dtw_value_and_grad, cuseq.soft_dtw_value_and_grad_gamma
OF_COSTS = (
    cuseq.soft_dtw_from_cost,
    cuseq.soft_dtw_from_cost_value_and_grad,
    cuseq.soft_dtw_from_cost_value_and_grad_gamma,
)
# (B, N, M, D) around blocks of 4 x 4 cells, stripes of 32, 64 and 128 rows, and warps of pairs
SIZES = [
    (1, 1, 1, 1),
    (3, 1, 2, 3),
    (3, 2, 1, 4),
    (2, 3, 5, 2),
    (1, 4, 4, 7),
    (2, 5, 3, 1),
    (1, 15, 17, 5),
    (1, 16, 16, 8),
    (3, 17, 15, 9),
    (1, 31, 33, 1),
    (1, 32, 32, 3),
    (1, 33, 31, 4),
    (3, 32, 1, 1),
    (1, 1, 65, 3),
    (1, 63, 48, 2),
    (1, 65, 49, 3),
    (1, 2, 64, 1),
    (1, 127, 5, 2),
    (2, 128, 4, 1),
    (1, 129, 3, 3),
    (1, 4, 129, 2),
    (2, 64, 5, 1),
    (3, 65, 3, 2),
    (4, 33, 9, 8),
    (5, 32, 6, 3),
    (9, 17, 5, 1),
    (33, 3, 5, 2),
    (41, 5, 3, 1),
]


class Expected(NamedTuple):
    """The float64 answer of a batch of pairs, and what its rounding errors grow with."""

    values: np.ndarray  # (B,)
    gradients: tuple  # grad_a and grad_b, or grad_C alone
    E: np.ndarray  # (B, N, M)
    grad_gamma: np.ndarray  # (B,)
    used: np.ndarray  # (B, N, M) bool: the cells within lengths and bands
    scale: float  # of the values: the largest |value| + gamma
    total: float  # the largest |value| over gamma
    likely: float  # the largest |cost| on likely paths, over gamma


def by_oracle(*arrays, gamma=1.0, **options):
    """The answer for a (B or 1, N, D) and b (B or 1, M, D), or for given costs C (B, N, M)."""
    *answer, likely = oracle.answer(*arrays, gamma=gamma, **options)
    values = answer[0]
    gamma = np.broadcast_to(np.asarray(gamma, np.float64), len(values))
    return Expected(*answer, *size_of_values(values, gamma), likely)


def by_numpy(*arrays, gamma=1.0):
    """The answer of NumPy in float64, itself checked by the oracle, for what takes that too long.

    For series it is that of the cost "sqeuclidean"; gamma is a number above 0.
    """
    arrays = [x.astype(np.float64) for x in arrays]
    values, *gradients, E, _, grad_gamma = frameworks.leaves(run_all(NUMPY, *arrays, gamma=gamma))
    pair, i, j = np.nonzero(E > 1e-3)
    if len(arrays) == 2:
        x, y = arrays
        differences = x[pair % len(x), i] - y[pair % len(y), j]
        exponents = (differences**2).sum(axis=1) / gamma
    else:
        exponents = np.abs(arrays[0][pair, i, j]) / gamma
    answer = values, gradients, E, grad_gamma, np.ones(E.shape, bool)
    size = size_of_values(values, np.full(len(values), gamma))
    return Expected(*answer, *size, exponents.max(initial=0.0))


def size_of_values(values, gamma):
    """The largest |value| + gamma, and |value| / gamma where gamma is above 0."""
    values, gamma = values[np.isfinite(values)], gamma[np.isfinite(values)]
    soft = gamma > 0
    total = np.abs(values[soft] / gamma[soft]).max(initial=0.0)
    return (np.abs(values) + gamma).max(initial=0.0), total


@cache
def random_case(B, N, M, D, dtype, gamma=1.0, offset=0.0):
    a = normal(B, N, D, dtype=dtype, offset=offset)
    b = normal(B, M, D, seed=1, dtype=dtype, offset=offset)
    return a, b, by_oracle(a, b, gamma=gamma)


def check(results, expected):
    """Compare (values, gradients), gradients (grad_a, grad_b) or (grad_C,), with the answer."""
    values, gradients = results
    exponent = exponent_of(values.dtype, expected)
    assert_close(values, expected.values, "soft_dtw.values", scale=expected.scale)
    names = ["grad_a", "grad_b"] if len(gradients) == 2 else ["grad_cost"]
    for name, gradient, wanted in zip(names, gradients, expected.gradients, strict=True):
        scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
        if gradient.dtype == np.float16:
            scale = max(scale, 3e-3)  # half a step among its subnormals is 1e-5 of this
        assert_close(gradient, wanted, f"soft_dtw.{name}", scale=scale, exponent=exponent)


def exponent_of(dtype, expected):
    """The largest exponent of an answer; the oracle's own weights are good to eps |R| / gamma."""
    return expected.total if dtype == np.float64 else expected.likely


def run_both(place, *arrays, offset=0, **options):
    """(values, gradients) of the function for both; that for values alone must give the same."""
    of_values, of_both, _ = OF_SERIES if len(arrays) == 2 else OF_COSTS
    values = run(place, of_values, *arrays, offset=offset, **options)
    results = run(place, of_both, *arrays, offset=offset, **options)
    gradients = results[1] if len(arrays) == 2 else results[1:]
    assert frameworks.same_bits(values, results[0])
    assert values.dtype == (np.float64 if arrays[0].dtype == np.float64 else np.float32)
    for gradient, x in zip(gradients, arrays, strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
    return values, gradients


class Answers(NamedTuple):
    """What all functions return for the same arrays and options."""

    values: np.ndarray
    gradients: tuple  # grad_a and grad_b, or grad_C alone
    E: np.ndarray  # grad_C where costs are given
    values_beside_grad_gamma: np.ndarray
    grad_gamma: np.ndarray


def run_all(place, *arrays, offset=0, **options):
    """Run each function of series a and b or of given costs C."""
    values, gradients = run_both(place, *arrays, offset=offset, **options)
    E = gradients[0]
    if len(arrays) == 2:
        E = run(place, cuseq.soft_dtw_alignment, *arrays, offset=offset, **options)
        assert E.dtype == values.dtype
        assert E.shape[: values.ndim] == values.shape and E.ndim == values.ndim + 2
    by_gamma = (OF_SERIES if len(arrays) == 2 else OF_COSTS)[2]
    again, grad_gamma = run(place, by_gamma, *arrays, offset=offset, **options)
    assert again.dtype == grad_gamma.dtype == values.dtype
    assert again.shape == grad_gamma.shape == values.shape
    return Answers(values, gradients, E, again, grad_gamma)


def check_all(answers, expected):
    """Compare with the answer; outside of lengths and bands all must be 0 exactly."""
    check(answers[:2], expected)
    exponent = exponent_of(answers.values.dtype, expected)
    N, M = expected.E.shape[1:]
    assert_close(
        answers.values_beside_grad_gamma, expected.values, "soft_dtw.values", scale=expected.scale
    )
    assert_close(answers.E, expected.E, "soft_dtw.alignment", exponent=exponent)
    # A path has up to N + M cells, each of an entropy up to ln 3. The oracle takes R - <E, C>, in
    # which an error of E weighs as much as a cost.
    if answers.values.dtype == np.float64:
        exponent *= max(1.0, expected.likely)
    got, wanted = answers.grad_gamma, expected.grad_gamma
    assert_close(got, wanted, "soft_dtw.grad_gamma", scale=N + M, exponent=exponent)
    assert not answers.E[~expected.used].any()
    if len(answers.gradients) == 2:
        for gradient, axis in zip(answers.gradients, (2, 1), strict=True):
            rows = expected.used.any(axis=axis)
            rows = rows if len(gradient) == len(rows) else rows.any(axis=0, keepdims=True)
            assert not gradient[~rows].any()


@every_place_and_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(place, dtype, size):
    a, b, expected = random_case(*size, dtype)
    check_all(run_all(place, a, b), expected)


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gamma", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_gammas_and_offsets(place, dtype, gamma, offset):
    a, b, expected = random_case(2, 20, 34, 2, dtype, gamma, offset)
    check_all(run_all(place, a, b, gamma=gamma), expected)


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
    expected = by_oracle(*batches)
    results = (
        values.reshape(-1),
        [gradient.reshape(batch.shape) for gradient, batch in zip(gradients, batches, strict=True)],
    )
    check(results, expected)


@every_place_and_dtype
@pytest.mark.parametrize("batches", [(1, 3), (3, 1), (1, 1)], ids=str)
def test_a_batch_of_one_meets_the_other_batch(place, dtype, batches):
    a, b = normal(batches[0], 6, 2, dtype=dtype), normal(batches[1], 35, 2, seed=1, dtype=dtype)
    check(run_both(place, a, b), by_oracle(a, b))


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
    values, gradients = run_both(place, normal(2, 3, 0), normal(2, 40, 0), gamma=2.0)
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
    expected = by_numpy(a, b)
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


# On a CUDA device:


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
