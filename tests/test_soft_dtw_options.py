"""The options of soft-DTW on every framework, against the oracle.

Costs, given costs, alignments, bands, lengths, gamma by pair, hard DTW, the derivative by gamma,
and what NaN and infinity do to each.
"""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuseq
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
    same_bits,
)
from tests.oracles import soft_dtw as oracle
from tests.samples import dtype_of, normal
from tests.strategies import layouts, sizes
from tests.test_soft_dtw import (
    OF_COSTS,
    OF_SERIES,
    Answers,
    by_numpy,
    by_oracle,
    check,
    check_all,
    run_all,
    run_both,
)
from tests.tolerances import assert_close

COSTS = ["sqeuclidean", "euclidean", "cityblock", "cosine"]
every_cost = pytest.mark.parametrize("cost", COSTS)
series_or_costs = pytest.mark.parametrize("given", ["series", "costs"])


def assert_others_have_the_same_bits(answers, clean, pair):
    """A pair is none of the others' business."""
    for got, was in zip(frameworks.leaves(answers), frameworks.leaves(clean), strict=True):
        others = np.arange(len(got)) != pair
        assert same_bits(got[others], was[others])


def assert_infinite_alone(place, C, cells, cost, gamma):
    """Check that this cost in cells of sample 1 makes its value infinite, and only its."""
    clean = run_all(place, C, gamma=gamma)
    C[1][cells] = cost
    answers = run_all(place, C, gamma=gamma)
    assert_others_have_the_same_bits(answers, clean, 1)
    assert answers.values[1] == math.inf
    assert not answers.E[1].any() and answers.grad_gamma[1] == 0


def arrays_of(given, B=3, N=34, M=20, dtype="float64"):
    """Series a and b of two features, or costs."""
    if given == "costs":
        return (normal(B, N, M, dtype=dtype, offset=1.0),)
    return normal(B, N, 2, dtype=dtype), normal(B, M, 2, seed=1, dtype=dtype)


# Costs:


@cache
def cost_case(cost, scale, dtype):
    a = normal(2, 17, 3, dtype=dtype, scale=scale)
    b = normal(2, 37, 3, seed=1, dtype=dtype, scale=scale)
    return a, b, by_oracle(a, b, gamma=0.5, cost=cost)


@every_place_and_dtype
@pytest.mark.parametrize("cost, scale", [*((cost, 1.0) for cost in COSTS), ("cosine", 1000.0)])
def test_costs(place, dtype, cost, scale):
    a, b, expected = cost_case(cost, scale, dtype)
    check_all(run_all(place, a, b, gamma=0.5, cost=cost), expected)


@every_place
@every_cost
@pytest.mark.parametrize("D", [1, 9])
def test_series_that_meet_point_for_point(place, cost, D):
    """Where points coincide no cost pulls, and the root of "euclidean" has no slope."""
    a = normal(2, 20, D, dtype="float32")
    expected = by_oracle(a, a, gamma=0.25, cost=cost)
    check_all(run_all(place, a, a.copy(), gamma=0.25, cost=cost), expected)


@every_place
@pytest.mark.parametrize("cost", COSTS[:3])
def test_points_that_are_all_the_same(place, cost):
    a, b = np.full((1, 5, 3), 0.1), np.full((1, 7, 3), 0.1)
    values, gradients = run_both(place, a, b, gamma=2.0, cost=cost)
    assert_close(values, [-2 * math.log(oracle.delannoy(4, 6))], "soft_dtw.values")
    assert not any(gradient.any() for gradient in gradients)


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_cosine_has_no_scale(place, dtype):
    """Powers of two change no bit of a direction; gradients scale inversely."""
    a, b = normal(2, 9, 3, dtype=dtype), normal(2, 6, 3, seed=1, dtype=dtype)
    expected = by_oracle(a, b, gamma=0.5, cost="cosine")
    c = a.dtype.type(2.0**40)
    values, (grad_a, grad_b) = run_both(place, c * a, b / c, gamma=0.5, cost="cosine")
    check((values, (c * grad_a, grad_b / c)), expected)


@every_place
def test_a_zero_vector_has_no_cosine(place):
    a, b = arrays_of("series")
    options = {"cost": "cosine", "lengths_b": [20, 18, 19]}
    clean = run_all(place, a, b, **options)
    b[1, 18:] = 0  # beyond its length
    assert_same_bits([run_all(place, a, b, **options), clean])
    b[1, 5] = 0
    answers = run_all(place, a, b, **options)
    check_all(answers, by_oracle(a, b, **options))
    assert np.isnan(answers.values).tolist() == [False, True, False]
    assert_others_have_the_same_bits(answers, clean, 1)


# Given costs and alignments:


@cache
def given_case(B, N, M, dtype):
    C = normal(B, N, M, dtype=dtype, offset=0.5)  # some are negative
    return C, by_oracle(C, gamma=0.5)


@every_place_and_dtype
@pytest.mark.parametrize(
    "size", [(1, 1, 1), (2, 3, 5), (3, 17, 37), (2, 33, 4), (1, 5, 129), (1, 129, 3)], ids=str
)
def test_given_costs(place, dtype, size):
    C, expected = given_case(*size, dtype)
    check_all(run_all(place, C, gamma=0.5), expected)


@every_place
def test_given_costs_of_two_axes(place):
    C = normal(6, 9)
    answers = run_all(place, C)
    assert answers.values.shape == () and answers.E.shape == (6, 9)
    expected = by_oracle(C[None])
    check_all(in_batches(answers, expected), expected)


def in_batches(answers, expected):
    """The answers for arrays without a batch axis, with one."""
    values, gradients, E, again, grad_gamma = answers
    shaped = zip(gradients, expected.gradients, strict=True)
    gradients = tuple(gradient.reshape(wanted.shape) for gradient, wanted in shaped)
    E = E.reshape(expected.E.shape)
    return Answers(values.reshape(-1), gradients, E, again.reshape(-1), grad_gamma.reshape(-1))


@every_place
@given(st.data())
def test_strides_of_given_costs(place, data):
    B, N, M = data.draw(st.integers(0, 3)), data.draw(sizes(33)), data.draw(sizes(17))
    lie = data.draw(layouts(3, place.strides))
    C = lie.of(normal(B, N, M, dtype=data.draw(st.sampled_from(place.dtypes))))
    check_all(run_all(place, C, offset=lie.offset), by_numpy(C))


@every_place
@series_or_costs
def test_no_pairs_with_options(place, given):
    arrays = arrays_of(given, B=0)
    options = {"gamma": [], "bandwidth": [], "lengths_a": [], "lengths_b": []}
    answers = run_all(place, *arrays, **options)
    assert answers.values.shape == (0,) and answers.E.shape == (0, 34, 20)


@every_place
@every_cost
@pytest.mark.parametrize(
    "a_shape, b_shape, shape",
    [
        ((5, 2), (4, 2), (5, 4)),
        ((5, 3), (1, 4, 3), (1, 5, 4)),
        ((5, 3), (3, 4, 3), (3, 5, 4)),
        ((3, 5, 3), (1, 4, 3), (3, 5, 4)),
    ],
)
def test_alignments_of_series_of_two_and_three_axes(place, cost, a_shape, b_shape, shape):
    """A series that meets a batch has an alignment with each, and one gradient."""
    a, b = normal(*a_shape), normal(*b_shape, seed=1)
    answers = run_all(place, a, b, cost=cost)
    assert answers.E.shape == shape
    expected = by_oracle(a.reshape(-1, *a_shape[-2:]), b.reshape(-1, *b_shape[-2:]), cost=cost)
    check_all(in_batches(answers, expected), expected)


@every_place
def test_alignment_of_series_of_one_axis(place):
    a, b = normal(5), normal(4, seed=1)
    E = run(place, cuseq.soft_dtw_alignment, a, b)
    assert_close(E, by_oracle(a[None, :, None], b[None, :, None]).E[0], "soft_dtw.alignment")


@every_place
@series_or_costs
def test_options_of_a_single_pair(place, given):
    batch = arrays_of(given, B=1)
    options = {"gamma": [0.5], "bandwidth": [2], "lengths_a": [30], "lengths_b": [17]}
    expected = by_oracle(*batch, **options)
    answers = run_all(place, *[x[0] for x in batch], **options)
    assert answers.values.shape == () and answers.E.shape == (34, 20)
    check_all(in_batches(answers, expected), expected)


# Bands:

# Without end: what is added to them must not wrap around.
HUGE = [2**31 - 1, 2**32 + 1, 2**63 - 1]


@cache
def band_case(N, M, *radii):
    """float32 series; their float64 copies are the same numbers."""
    a = normal(len(radii), N, 1, dtype="float32")
    b = normal(len(radii), M, 1, dtype="float32", seed=1)
    return a, b, by_oracle(a, b, bandwidth=list(radii))


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "N, M",
    [
        (1, 1),
        (1, 4),
        (4, 3),
        (4, 4),
        (5, 3),
        (3, 5),
        (31, 33),
        (32, 32),
        (33, 31),
        (5, 70),
        (130, 40),
    ],
)
def test_bands(place, dtype, N, M):
    radii = 0, 1, 3, N - 1, HUGE[0]
    a, b, expected = band_case(N, M, *radii)
    answers = run_all(place, a.astype(dtype), b.astype(dtype), bandwidth=list(radii))
    check_all(answers, expected)


@every_place
@pytest.mark.parametrize("N, M", [(127, 129), (128, 128), (129, 127)])
def test_bands_of_long_series(place, N, M):
    a, b, expected = band_case(N, M, 0, 3, 40)
    check_all(run_all(place, a, b, bandwidth=[0, 3, 40]), expected)


@every_place
@series_or_costs
@pytest.mark.parametrize("radius", [0, 3, np.int32(5), *HUGE, 2**70])
@pytest.mark.parametrize("lengths_a", [None, (20, 7, 1)])
def test_one_radius_serves_all_pairs(place, given, radius, lengths_a):
    arrays, expected = radius_case(given, int(radius), lengths_a)
    check_all(run_all(place, *arrays, bandwidth=radius, lengths_a=lengths_a), expected)


@cache
def radius_case(given, radius, lengths_a):
    arrays = arrays_of(given, N=20, M=24)
    return arrays, by_oracle(*arrays, bandwidth=radius, lengths_a=lengths_a)


@every_place
@pytest.mark.parametrize("outside", [math.nan, math.inf, -math.inf])
def test_what_a_given_cost_holds_outside_of_its_band_never_matters(place, outside):
    (C,) = arrays_of("costs")
    options = {"bandwidth": [0, 2, 5], "lengths_a": [34, 20, 9], "lengths_b": [20, 20, 17]}
    clean, expected = run_all(place, C, **options), by_oracle(C, **options)
    check_all(clean, expected)
    C[~expected.used] = outside
    assert_same_bits([run_all(place, C, **options), clean])


# Lengths:

LENGTHS = {"lengths_a": [1, 33, 20, 32], "lengths_b": [40, 1, 31, 17]}


def padded_series(dtype, padding):
    """Series with `padding` beyond their LENGTHS."""
    a, b = normal(4, 33, 2, dtype=dtype), normal(4, 40, 2, seed=1, dtype=dtype)
    for x, lengths in zip((a, b), LENGTHS.values(), strict=True):
        for series, length in zip(x, lengths, strict=True):
            series[length:] = padding
    return a, b


@cache
def length_case(dtype):
    a, b = padded_series(dtype, math.nan)
    return a, b, by_oracle(a, b, **LENGTHS)


@every_place_and_dtype
def test_lengths(place, dtype):
    a, b, expected = length_case(dtype)
    check_all(run_all(place, a, b, **LENGTHS), expected)


@every_place
@every_cost
def test_what_lies_beyond_a_length_never_matters(place, cost):
    answers = [
        run_all(place, *padded_series("float32", padding), cost=cost, **LENGTHS)
        for padding in (0.0, math.nan, math.inf, 1e30)
    ]
    assert np.isfinite(answers[0].values).all()
    assert_same_bits(answers)


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_length_is_a_cut(place, dtype):
    a, b, expected = length_case(dtype)
    answers = run_all(place, a, b, **LENGTHS)
    for pair, (n, m) in enumerate(zip(*LENGTHS.values(), strict=True)):
        cut = run_all(place, a[pair, :n].copy(), b[pair, :m].copy())
        of_pair = expected._replace(
            values=cut.values[None].astype(np.float64),
            gradients=tuple(gradient[None].astype(np.float64) for gradient in cut.gradients),
        )
        grad_a, grad_b = answers.gradients
        gradients = grad_a[pair, None, :n], grad_b[pair, None, :m]
        check((answers.values[pair, None], gradients), of_pair)


@every_place
@pytest.mark.parametrize("shared", ["a", "b"])
def test_lengths_of_a_series_that_meets_a_batch(place, shared):
    """Each pair has its own part of the shared series, whose gradient is summed."""
    one, many = normal(1, 33, 2), normal(3, 20, 2, seed=1)
    one[0, 30:] = math.nan  # beyond each length
    lengths = {"one": [30, 7, 1], "many": [20, 4, 19]}
    a, b = (one, many) if shared == "a" else (many, one)
    of_a, of_b = ("one", "many") if shared == "a" else ("many", "one")
    options = {"lengths_a": lengths[of_a], "lengths_b": lengths[of_b], "bandwidth": [3, 1, 40]}
    check_all(run_all(place, a, b, **options), by_oracle(a, b, **options))


@every_place
def test_nan_of_a_shared_series_reaches_the_pairs_that_use_it(place):
    a, b = normal(1, 33, 2), normal(3, 20, 2, seed=1)
    a[0, 10] = math.nan
    options = {"lengths_a": [10, 20, 10]}
    answers = run_all(place, a, b, **options)
    check_all(answers, by_oracle(a, b, **options))
    assert np.isnan(answers.values).tolist() == [False, True, False]
    assert np.isnan(answers.gradients[0][0]).all(axis=1).tolist() == [True] * 20 + [False] * 13


# All options at once:

GAMMAS = st.sampled_from([0.0, 0.1, 1.0, 10.0])
RADII = st.one_of(st.integers(0, 6), st.sampled_from([20, *HUGE]))


@st.composite
def problems(draw):
    """(arrays, options): NaN lies wherever it must not matter."""
    B, N, M, D = draw(st.integers(1, 3)), draw(sizes(33)), draw(sizes(33)), draw(st.integers(2, 9))
    dtype = draw(st.sampled_from(["float64", "float32"]))

    def one_or_each(values):
        return st.one_of(values, st.lists(values, min_size=B, max_size=B))

    options = {
        "gamma": draw(one_or_each(GAMMAS)),
        "bandwidth": draw(st.none() | one_or_each(RADII)),
        "lengths_a": draw(st.none() | st.lists(st.integers(1, N), min_size=B, max_size=B)),
        "lengths_b": draw(st.none() | st.lists(st.integers(1, M), min_size=B, max_size=B)),
    }
    if draw(st.booleans()):
        C = normal(B, N, M, dtype=dtype)
        used = by_oracle(C, **options).used
        return (np.where(used, C, np.array(math.nan, dtype)),), options
    options["cost"] = draw(st.sampled_from(COSTS))
    a, b = normal(B, N, D, dtype=dtype), normal(B, M, D, seed=1, dtype=dtype)
    for x, lengths in ((a, options["lengths_a"]), (b, options["lengths_b"])):
        for pair, length in enumerate(lengths or []):
            x[pair, length:] = math.nan
    return (a, b), options


@every_place
@given(problems())
def test_all_options_at_once(place, problem):
    arrays, options = problem
    check_all(run_all(place, *arrays, **options), by_oracle(*arrays, **options))


FORMS = {  # an option by pair, and the dtypes that its arrays may have
    "bandwidth": ([4, 0, 7], ["int32", "int64"]),
    "lengths_a": ([34, 1, 20], ["int32", "int64"]),
    "lengths_b": ([3, 20, 19], ["int32", "int64"]),
    "gamma": ([0.0, 0.5, 2.0], ["float64", "float32", "float16"]),
}


@every_place
@series_or_costs
@pytest.mark.parametrize("option", FORMS)
def test_forms_of_an_option_by_pair(place, given, option):
    """A sequence, an array in host memory, or one of the place, with gaps where it has them."""
    arrays = arrays_of(given)
    numbers, dtypes = FORMS[option]
    wanted = run_all(place, *arrays, **{option: numbers})
    check_all(wanted, by_oracle(*arrays, **{option: numbers}))
    function = (OF_SERIES if given == "series" else OF_COSTS)[1]
    forms = [tuple(numbers)]
    for dtype in dtypes:
        with_gaps = np.repeat(np.array(numbers, dtype), 2)[::2]
        forms += [with_gaps, place.array(with_gaps)]
    if option == "gamma":
        forms += [np.array([0, 1, 2])]
        wanted_of_integers = run_both(place, *arrays, gamma=[0.0, 1.0, 2.0])
    for form in forms:
        results = function(*[place.array(x) for x in arrays], **{option: form})
        values, *gradients = frameworks.leaves(frameworks.taken(place, results))
        integers = option == "gamma" and getattr(form, "dtype", None) == np.int64
        expected = wanted_of_integers if integers else wanted[:2]
        for got, was in zip([values, *gradients], frameworks.leaves(expected), strict=True):
            assert same_bits(got, was)


# gamma by pair, and hard DTW:


@every_place_and_dtype
@series_or_costs
def test_gamma_by_pair(place, dtype, given):
    arrays, expected = gamma_case(given, dtype)
    check_all(run_all(place, *arrays, gamma=[0.0, 0.1, 1.0, 10.0]), expected)


@cache
def gamma_case(given, dtype):
    arrays = arrays_of(given, B=4, dtype=dtype)
    return arrays, by_oracle(*arrays, gamma=[0.0, 0.1, 1.0, 10.0])


@every_place_and_dtype
@pytest.mark.parametrize("size", [(1, 1), (4, 5), (33, 33), (17, 40), (40, 17)], ids=str)
def test_hard_dtw_of_costs_that_tie(place, dtype, size):
    """Costs of 0, 1 and 2 add up exactly, so that each of the many ties is one."""
    C, expected = tie_case(*size, dtype)
    answers = run_all(place, C, gamma=0)
    assert np.array_equal(answers.values, expected.values)
    assert np.array_equal(answers.E.astype(np.float64), expected.E)
    assert not answers.grad_gamma.any()


@cache
def tie_case(N, M, dtype):
    C = np.random.default_rng(0).integers(0, 3, (3, N, M)).astype(dtype_of(dtype))
    C[2] = 1  # the diagonal, then up
    return C, by_oracle(C, gamma=0)


@every_place
@pytest.mark.parametrize("cost", COSTS[:3])
@pytest.mark.parametrize("bandwidth", [None, 2])
def test_hard_dtw_of_series_that_tie(place, cost, bandwidth):
    a = np.random.default_rng(0).integers(0, 2, (3, 20, 1)).astype(np.float32)
    b = np.random.default_rng(1).integers(0, 2, (3, 37, 1)).astype(np.float32)
    b[0, :20] = a[0]
    options = {"gamma": 0.0, "cost": cost, "bandwidth": bandwidth}
    answers, expected = run_all(place, a, b, **options), by_oracle(a, b, **options)
    for got, wanted in zip(answers.gradients, expected.gradients, strict=True):
        assert np.array_equal(got, wanted)
    assert np.array_equal(answers.E, expected.E)
    assert np.array_equal(answers.values, expected.values)


@every_place
@every_cost
def test_hard_dtw_of_equal_series_goes_along_the_diagonal(place, cost):
    a = normal(2, 35, 3, dtype="float32")
    answers = run_all(place, a, a.copy(), gamma=0.0, cost=cost)
    assert not answers.values.any()
    assert np.array_equal(answers.E, [np.eye(35)] * 2)


@every_place
@series_or_costs
def test_the_derivative_by_gamma_is_that_of_the_value(place, given):
    arrays = arrays_of(given, N=12, M=9)
    gamma, h = np.array([0.1, 1.0, 10.0]), 1e-5
    options = {"bandwidth": [4, 30, 2], "lengths_a": [12, 7, 11]}
    above, below = (run_both(place, *arrays, gamma=g, **options)[0] for g in (gamma + h, gamma - h))
    answers = run_all(place, *arrays, gamma=gamma, **options)
    assert_close(answers.grad_gamma, (above - below) / (2 * h), "central_difference.grad_gamma")


# NaN and infinity:


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
@pytest.mark.parametrize("cell", [(0, 0), (9, 9), (32, 17)])
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_nan_in_a_given_cost_stays_in_its_pair(place, dtype, wrong, cell, gamma):
    (C,) = arrays_of("costs", dtype=dtype)
    options = {"gamma": gamma, "bandwidth": [3, 2, 1], "lengths_a": [34, 33, 30]}
    options["lengths_b"] = [20, 18, 19]
    clean = run_all(place, C, **options)
    C[1][cell] = wrong
    answers = run_all(place, C, **options)
    assert_others_have_the_same_bits(answers, clean, 1)
    assert np.isnan(answers.values[1]) and np.isnan(answers.grad_gamma[1])
    inside = np.zeros((34, 20), bool)
    inside[:33, :18] = oracle.inside(33, 18, 2)
    assert np.array_equal(np.isnan(answers.E[1]), inside)
    assert not answers.E[1][~inside].any()


@every_place
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_nan_counts_where_no_path_comes(place, gamma):
    (C,) = arrays_of("costs")
    C[0, 5] = math.inf
    C[0, 20, 3] = math.nan
    C[1, 9:12, 11:14] = math.inf
    C[1, 10, 12] = math.nan
    C[2, 0, 0], C[2, 33, 19] = math.inf, math.nan
    answers = run_all(place, C, gamma=gamma)
    assert np.isnan(answers.values).all()
    assert np.isnan(answers.E).all() and np.isnan(answers.grad_gamma).all()


@every_place
@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("series, point", [("a", 0), ("a", 19), ("b", 16)])
def test_nan_in_a_series_with_lengths_and_bands(place, gamma, series, point):
    a, b = arrays_of("series")
    options = {"gamma": gamma, "bandwidth": 3, "lengths_a": [34, 20, 9], "lengths_b": [20, 17, 20]}
    clean = run_all(place, a, b, **options)
    (a if series == "a" else b)[1, point, 1] = math.nan
    answers = run_all(place, a, b, **options)
    assert_others_have_the_same_bits(answers, clean, 1)
    assert np.isnan(answers.values[1]) and np.isnan(answers.grad_gamma[1])
    inside = np.zeros((34, 20), bool)
    inside[:20, :17] = oracle.inside(20, 17, 3)
    assert np.array_equal(np.isnan(answers.E[1]), inside) and not answers.E[1][~inside].any()
    for gradient, length in zip(answers.gradients, (20, 17), strict=True):
        assert np.isnan(gradient[1, :length]).all() and not gradient[1, length:].any()


@every_place_and_dtype
@pytest.mark.parametrize(
    "cells, gamma",
    [(np.s_[5], 0.0), (np.s_[:, 19], 1.0), (np.s_[0, 0], 1.0), (np.s_[-1, -1], 0.0)],
    ids=str,
)
def test_no_path_is_left(place, dtype, cells, gamma):
    (C,) = arrays_of("costs", dtype=dtype)
    assert_infinite_alone(place, C, cells, math.inf, gamma)


@every_place
@given(st.data())
def test_cells_that_no_path_may_cross(place, data):
    N, M = data.draw(sizes(33)), data.draw(sizes(33))
    C = normal(2, N, M, dtype="float32")
    share = data.draw(st.sampled_from([0.05, 0.3, 0.5]))
    forbidden = np.random.default_rng(data.draw(st.integers(0, 99))).random(C.shape) < share
    C[forbidden] = math.inf
    gamma = data.draw(GAMMAS)
    answers = run_all(place, C, gamma=gamma)
    check_all(answers, by_oracle(C, gamma=gamma))
    assert not answers.E[forbidden].any()


@every_place
@pytest.mark.parametrize("gamma", [0.0, 1e-3, 10.0])
def test_the_one_path_that_is_left(place, gamma):
    """Down, across and down the table; its cost is the value."""
    C = np.full((1, 40, 37), math.inf, np.float32)
    path = np.zeros(C.shape, bool)
    path[0, :30, 0] = path[0, 30, 1:36] = path[0, 31:, 36] = True
    C[path] = np.arange(path.sum())
    answers = run_all(place, C, gamma=gamma)
    assert np.abs(answers.E - path).max() <= 5e-6 and not answers.E[~path].any()
    assert_close(answers.values, [np.arange(path.sum()).sum()], "soft_dtw.values")
    assert abs(answers.grad_gamma[0]) <= 1e-4


@every_place
@every_cost
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_an_infinite_point_leaves_no_path(place, cost, gamma):
    """Whatever it meets, an infinity of the same sign too, unless a NaN is in the pair."""
    a, b = normal(5, 34, 2, dtype="float32"), normal(5, 20, 2, seed=1, dtype="float32")
    options = {"cost": cost, "gamma": gamma, "lengths_a": [34, 34, 34, 30, 34]}
    clean = run_all(place, a, b, **options)
    a[0, 3, 1] = math.inf
    a[1, 33] = b[1, 0] = -math.inf
    a[2, 8, 0], b[2, 5, 1] = math.inf, math.nan
    a[3, 30, 0] = math.inf  # beyond its length
    answers = run_all(place, a, b, **options)
    assert_same_bits([last_two(answers), last_two(clean)])
    assert answers.values[:2].tolist() == [math.inf] * 2 and not answers.grad_gamma[:2].any()
    for result in (*answers.gradients, answers.E):
        assert not result[:2].any() and np.isnan(result[2]).all()
    assert np.isnan(answers.values[2]) and np.isnan(answers.grad_gamma[2])


def last_two(results):
    return tuple(map(last_two, results)) if isinstance(results, tuple) else results[3:]


@every_place
@pytest.mark.parametrize("dtype, big", [("float64", 1e308), ("float32", 2e38)])
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_given_costs_that_overflow_as_they_add_up(place, dtype, big, gamma):
    (C,) = arrays_of("costs", N=3, M=3, dtype=dtype)
    assert_infinite_alone(place, C, np.s_[:], big, gamma)


# Symmetries of a cost:


@every_place
@given(st.data())
def test_symmetries(place, data):
    N, M = data.draw(sizes(33)), data.draw(sizes(33))
    C, gamma = normal(2, N, M, offset=0.5), data.draw(st.sampled_from([0.01, 1.0, 30.0]))
    bandwidth = data.draw(st.none() | st.integers(0, 8))
    plain = run_all(place, C, gamma=gamma, bandwidth=bandwidth)

    turned = run_all(place, C.transpose(0, 2, 1).copy(), gamma=gamma, bandwidth=bandwidth)
    assert_equal_up_to_rounding(turned, plain, turned.E.transpose(0, 2, 1), gamma)
    back = run_all(place, C[:, ::-1, ::-1].copy(), gamma=gamma, bandwidth=bandwidth)
    assert_equal_up_to_rounding(back, plain, back.E[:, ::-1, ::-1], gamma)
    factor = data.draw(st.sampled_from([1e-3, 3.0, 1e6]))
    larger = run_all(place, factor * C, gamma=factor * gamma, bandwidth=bandwidth)
    scaled = larger._replace(values=larger.values / factor)
    assert_equal_up_to_rounding(scaled, plain, larger.E, gamma)


def assert_equal_up_to_rounding(answers, plain, E, gamma):
    """Compare values, E and the derivative by gamma with those of a cost of float64."""
    total = np.abs(plain.values).max() / gamma
    assert_close(answers.values, plain.values, "soft_dtw.values", scale=(total + 1) * gamma)
    assert_close(E, plain.E, "soft_dtw.alignment", exponent=total)
    got, wanted = answers.grad_gamma, plain.grad_gamma
    assert_close(got, wanted, "soft_dtw.grad_gamma", scale=sum(E.shape[1:]), exponent=total)


# On a CUDA device, where options by pair can not be checked before:

OUT_OF_RANGE = [
    ("lengths_a", wrong, dtype)
    for wrong, dtype in [(0, "int32"), (35, "int32"), (-1, "int64"), (2**32 + 5, "int64")]
]
OUT_OF_RANGE += [("lengths_b", 0, "int64"), ("lengths_b", 21, "int32"), ("lengths_b", -4, "int32")]
OUT_OF_RANGE += [("bandwidth", -1, "int32"), ("bandwidth", -(2**40), "int64")]
OUT_OF_RANGE += [
    ("gamma", wrong, dtype)
    for wrong in (-1.0, math.nan, math.inf, -math.inf)
    for dtype in ("float32", "float64")
]


@every_cuda_place
@series_or_costs
@pytest.mark.parametrize("option, wrong, dtype", OUT_OF_RANGE)
def test_an_entry_out_of_range_makes_its_pair_nan(place, given, option, wrong, dtype):
    arrays = arrays_of(given, dtype="float32")
    numbers = np.array(FORMS[option][0], dtype)
    clean = run_all(place, *arrays, **{option: numbers})
    numbers[1] = wrong
    answers = run_all(place, *arrays, **{option: numbers})
    assert_others_have_the_same_bits(answers, clean, 1)
    assert np.isfinite(clean.values).all()
    for result in frameworks.leaves(answers):
        assert np.isnan(result[1]).all()


@every_cuda_place
def test_an_entry_out_of_range_reaches_a_shared_series(place):
    a, b = arrays_of("series", dtype="float32")
    answers = run_all(place, a[:1], b, lengths_a=np.array([34, 36, 30]))
    assert np.isnan(answers.values).tolist() == [False, True, False]
    assert np.isnan(answers.gradients[0]).all()
    assert np.isnan(answers.gradients[1]).all(axis=(1, 2)).tolist() == [False, True, False]


@over([CUPY, TORCH_CUDA])
@series_or_costs
def test_options_follow_the_current_stream(place, given):
    """Those on the device are read where they are, and those of the host do not wait for it."""

    def function(*inputs):
        *arrays, gamma, lengths, radii = inputs
        of_both = (OF_SERIES if given == "series" else OF_COSTS)[1]
        options = {"gamma": gamma, "bandwidth": radii, "lengths_a": lengths}
        return of_both(*arrays, lengths_b=[20, 13, 11], **options)

    gamma, lengths, radii = np.array([1.0, 0.5, 0.1]), np.array([34, 30, 1]), np.array([3, 2, 40])
    frameworks.assert_follows_the_stream(place, function, *arrays_of(given), gamma, lengths, radii)


@frameworks.every_mixed_pair
def test_options_of_another_framework(places):
    first, second = places
    a, b = arrays_of("series")
    options = {"gamma": np.array([0.0, 1.0, 0.1]), "bandwidth": np.array([3, 2, 40])}
    options["lengths_a"] = np.array([34, 20, 1], np.int32)
    brought = {name: second.array(x) for name, x in options.items()}
    results = cuseq.soft_dtw_value_and_grad(first.array(a), first.array(b), **brought)
    check(frameworks.taken(first, results), by_oracle(a, b, **options))
