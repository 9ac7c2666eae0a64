"""cuseq.dtw and dtw_path on every framework, against the oracle."""

import numpy as np
import pytest

import cuseq
from tests.frameworks import every_place, every_place_and_dtype, run
from tests.oracles import soft_dtw as oracle
from tests.samples import normal
from tests.test_soft_dtw import by_oracle
from tests.tolerances import assert_close

SIZES = [(1, 1), (1, 6), (6, 1), (5, 7), (33, 20)]


def few_levels(*shape, seed=0, dtype="float64"):
    """Series of few levels, so that many paths are equally cheap."""
    return normal(*shape, seed=seed).round().astype(normal(1, dtype=dtype).dtype)


def cells(path):
    """The cells of one path, checked to begin at the first one and to take steps of 0 and 1."""
    there = path[:, 0] >= 0
    assert (path[~there] == -1).all() and there[: there.sum()].all()
    steps = np.diff(path[there], axis=0)
    assert (path[0] == 0).all() and np.isin(steps, (0, 1)).all() and (steps.sum(axis=1) > 0).all()
    return path[there]


@every_place_and_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_paths(place, dtype, size):
    """Of several cheapest paths the oracle's, which takes the diagonal first."""
    N, M = size
    a, b = few_levels(3, N, 2, dtype=dtype), few_levels(3, M, 2, seed=1, dtype=dtype)
    values, paths = run(place, cuseq.dtw_path, a, b)
    assert (run(place, cuseq.dtw, a, b) == values).all()
    assert paths.dtype == np.int32 and paths.shape == (3, N + M - 1, 2)
    expected = by_oracle(a, b, gamma=0.0)
    assert_close(values, expected.values, "soft_dtw.values", scale=expected.scale)
    for path, E in zip(paths, expected.E, strict=True):
        i, j = cells(path).T
        assert E[i, j].all() and len(i) == E.sum() and (i[-1], j[-1]) == (N - 1, M - 1)


@every_place
@pytest.mark.parametrize(
    "options",
    [
        {"cost": "cityblock", "bandwidth": 1},
        {"bandwidth": np.array([0, 3, 1])},
        {"lengths_a": np.array([5, 1, 3]), "lengths_b": np.array([1, 7, 6])},
    ],
    ids=str,
)
def test_options(place, options):
    a, b = few_levels(3, 5, 1), few_levels(3, 7, 1, seed=1)
    values, paths = run(place, cuseq.dtw_path, a, b, **options)
    expected = by_oracle(a, b, gamma=0.0, **options)
    assert_close(values, expected.values, "soft_dtw.values", scale=expected.scale)
    for path, E in zip(paths, expected.E, strict=True):
        i, j = cells(path).T
        assert E[i, j].all() and len(i) == E.sum()


@every_place
def test_a_path_costs_its_value(place):
    a, b = normal(9, 2), normal(12, 2, seed=1)
    value, path = run(place, cuseq.dtw_path, a, b)
    assert value.shape == () and path.shape == (20, 2)
    i, j = cells(path).T
    assert value == pytest.approx(oracle.cost(a, b)[i, j].sum())


@every_place
def test_no_path_and_no_pairs(place):
    a, b = normal(2, 4, 1), normal(2, 3, 1, seed=1)
    a[0, 2] = np.nan
    values, paths = run(place, cuseq.dtw_path, a, b)
    assert np.isnan(values[0]) and (paths[0] == -1).all() and (paths[1, 0] == 0).all()
    values, paths = run(place, cuseq.dtw_path, normal(0, 4, 1), normal(0, 3, 1))
    assert values.shape == (0,) and paths.shape == (0, 6, 2)
