"""cuseq.soft_dtw_subsequence and its match on every framework, by their definition.

The oracle has the value of every subsequence by itself; that of an end is the softmin over starts.
"""

import math

import numpy as np
import pytest

import cuseq
from tests.frameworks import every_place, every_place_and_dtype, run
from tests.oracles import soft_dtw as oracle
from tests.samples import normal
from tests.tolerances import assert_close

SIZES = [(1, 1, 1), (1, 5, 2), (4, 1, 3), (5, 7, 2), (3, 9, 1), (33, 6, 2), (5, 37, 1)]


def expected(query, series, gamma, cost="sqeuclidean", lengths_query=None, lengths_series=None):
    """values (B, M), best (B,) and match (B, 2) of (B, N, D) and (B, M, D)."""
    B, M = len(query), series.shape[1]
    n, m = (
        np.broadcast_to(x.shape[1] if given is None else given, B)
        for x, given in ((query, lengths_query), (series, lengths_series))
    )
    values, best, match = np.full((B, M), np.inf), np.empty(B), np.empty((B, 2), np.int64)
    for k, g in enumerate(np.broadcast_to(gamma, B).tolist()):
        each = oracle.of_subsequences(oracle.cost(query[k, : n[k]], series[k, : m[k]], cost), g)
        values[k, : m[k]] = [oracle.softmin(column.tolist(), g) for column in each.T]
        last = int(values[k].argmin())
        best[k] = values[k, last]
        starts = each[: last + 1, last]
        match[k] = max(np.flatnonzero(starts == starts.min())), last + 1
    return values, best, match


def check(place, query, series, **options):
    wanted, best, match = expected(query, series, **options)
    scale = np.abs(wanted[np.isfinite(wanted)]).max() + np.max(options["gamma"])
    values = run(place, cuseq.soft_dtw_subsequence, query, series, **options)
    assert_close(values, wanted, "soft_dtw.values", scale=scale)
    least, found = run(place, cuseq.soft_dtw_subsequence_match, query, series, **options)
    assert_close(least, best, "soft_dtw.values", scale=scale)
    assert found.dtype == np.int64 and (found == match).all()


@every_place_and_dtype
@pytest.mark.parametrize("gamma", [0.0, 0.7])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_matches(place, dtype, size, gamma):
    N, M, D = size
    query, series = normal(2, N, D, dtype=dtype), normal(2, M, D, seed=1, dtype=dtype)
    check(place, query, series, gamma=gamma)


@every_place
@pytest.mark.parametrize("cost", ["euclidean", "cityblock", "cosine"])
def test_options(place, cost):
    options = {
        "gamma": np.array([0.3, 0.0, 2.0]),
        "lengths_query": np.array([4, 1, 2]),
        "lengths_series": np.array([8, 5, 1]),
    }
    check(place, normal(3, 4, 2), normal(3, 8, 2, seed=1), cost=cost, **options)


@every_place
def test_a_query_that_is_there_is_found(place):
    """Amid other numbers, and with a batch of 1 that meets every series."""
    query, series = normal(1, 9, 2), 5 + normal(4, 40, 2, seed=1)
    for k, start in enumerate((0, 7, 20, 31)):
        series[k, start : start + 9] = query[0]
    values, match = run(place, cuseq.soft_dtw_subsequence_match, query, series, gamma=0.0)
    assert not values.any()
    assert match.tolist() == [[0, 9], [7, 16], [20, 29], [31, 40]]


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_what_lies_before_a_match_takes_no_digits_of_it(place, dtype):
    """Costs before it are a million times gamma; its own value is small."""
    query = normal(1, 9, 2, dtype=dtype)
    series = 300 + normal(1, 40, 2, seed=1, dtype=dtype)
    series[0, 22:31] = query[0] + normal(9, 2, seed=2, dtype=dtype) / 10
    C = oracle.cost(query[0], series[0])
    wanted = oracle.softmin([oracle.value(C[:, start:31], 0.1) for start in range(31)], 0.1)
    values = run(place, cuseq.soft_dtw_subsequence, query, series, gamma=0.1)
    assert_close(values[:, 30], np.array([wanted]), "soft_dtw.values", scale=abs(wanted) + 0.1)


@every_place
def test_of_equal_ones_the_first_end_and_the_last_start(place):
    query, series = np.array([1.0, 2.0]), np.array([1.0, 1.0, 2.0, 2.0, 1.0, 2.0])
    value, match = run(place, cuseq.soft_dtw_subsequence_match, query, series, gamma=0.0)
    assert value == 0 and match.tolist() == [1, 3]


@every_place
def test_a_whole_series_is_a_subsequence(place):
    """No end is worse than the subsequence that is all up to there."""
    query, series = normal(5, 2), normal(12, 2, seed=1)
    values = run(place, cuseq.soft_dtw_subsequence, query, series, gamma=0.5)
    assert values.shape == (12,)
    for end in range(12):
        assert values[end] <= oracle.value(oracle.cost(query, series[: end + 1]), 0.5) + 1e-9


@every_place
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_spoils_its_pair(place, bad):
    query, series = normal(4, 5, 2), normal(4, 9, 2, seed=1)
    query[0, 4, 1], series[1, 8, 0], series[2, 7, 0] = bad, bad, bad
    lengths = np.array([9, 9, 7, 9])  # of the third it lies behind
    options = {"lengths_series": lengths, "gamma": 0.5}
    values = run(place, cuseq.soft_dtw_subsequence, query, series, **options)
    assert np.isnan(values[:2]).all() and np.isfinite(values[2, :7]).all()
    assert np.isposinf(values[2, 7:]).all() and np.isfinite(values[3]).all()
    best, match = run(place, cuseq.soft_dtw_subsequence_match, query, series, **options)
    assert np.isnan(best[:2]).all() and (match[:2] == -1).all()
    assert np.isfinite(best[2:]).all() and (match[2:] >= 0).all()


@every_place
def test_no_pairs(place):
    query, series = normal(0, 3, 2), normal(0, 5, 2)
    assert run(place, cuseq.soft_dtw_subsequence, query, series).shape == (0, 5)
    values, match = run(place, cuseq.soft_dtw_subsequence_match, query, series)
    assert values.shape == (0,) and match.shape == (0, 2)
