"""Soft-DTW of subsequences, with its kernels on the CPU, against the host."""

import numpy as np
import pytest

import cuseq
from tests.cpu_runner.device import installed, normal, on_device, reversed_axes, sliced
from tests.cpu_runner.kernels_soft_dtw_family import check


@pytest.fixture(autouse=True)
def device():
    with installed():
        yield


SIZES = [(1, 1, 1), (3, 7, 9), (31, 64, 2), (130, 33, 1), (40, 5, 20)]
FUNCTIONS = ["soft_dtw_subsequence", "soft_dtw_subsequence_match"]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(name, size):
    N, M, D = size
    check(name, (normal(3, N, D), normal(3, M, D, seed=1)), {"gamma": 0.5})


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("place", [on_device, sliced, reversed_axes])
@pytest.mark.parametrize("cost", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
def test_options(name, place, cost):
    query, series = normal(1, 6, 2), normal(4, 11, 2, seed=1)
    options = {
        "cost": cost,
        "gamma": np.array([0.5, 0.0, 2.0, 1.0]),
        "lengths_query": np.array([6, 1, 4, 6]),
        "lengths_series": np.array([5, 11, 1, 3]),
    }
    check(name, (query, series), options, place)
    series[1, 10, 0], series[2, 5, 1] = np.nan, np.inf  # one within its length, one behind
    check(name, (query, series), options, place)


def test_what_lies_before_a_match_takes_no_digits_of_it():
    query, series = normal(1, 9, 2), 300 + normal(1, 40, 2, seed=1)
    series[0, 22:31] = query[0]
    wanted = cuseq.soft_dtw_subsequence(query, series, gamma=0.1)[0, 30]
    got = cuseq.soft_dtw_subsequence(on_device(query), on_device(series), gamma=0.1)
    assert abs(np.asarray(got)[0, 30] - wanted) < 1e-5


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(name, dtype):
    given = normal(2, 6, 2, dtype=dtype), normal(2, 9, 2, seed=1, dtype=dtype)
    check(name, given, {"gamma": 0.3}, tolerance=1e-12 if dtype == "float64" else 2e-5)
