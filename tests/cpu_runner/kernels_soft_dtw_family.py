"""What is built on the soft-DTW engine, with its kernels on the CPU, against the host."""

import numpy as np
import pytest

import cuseq
from cuseq.ops import soft_dtw_cdist as cdist
from tests.cpu_runner.device import installed, normal, on_device, reversed_axes, sliced


@pytest.fixture(autouse=True)
def device():
    with installed():
        yield


def there(x, place=on_device):
    """Arrays on the device, others as they are."""
    return place(x) if isinstance(x, np.ndarray) else x


def check(name, arrays, options, place=on_device, tolerance=2e-5):
    """A function on the device and on the host; NaN where that has NaN."""
    function = getattr(cuseq, name)
    wanted = function(*arrays, **options)
    got = function.__wrapped__(
        *(there(x, place) for x in arrays), **{key: there(x) for key, x in options.items()}
    )
    for x, y in zip(leaves(got), leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        scale = max(np.abs(y[np.isfinite(y)]).max(initial=0.0), 1.0)
        np.testing.assert_allclose(
            x.astype(np.float64), y.astype(np.float64), rtol=0, atol=tolerance * scale
        )
    return got


def leaves(results):
    if isinstance(results, tuple):
        for result in results:
            yield from leaves(result)
    else:
        yield results


each_place = pytest.mark.parametrize("place", [on_device, sliced, reversed_axes])
OPTIONS = [
    {"gamma": 0.5},
    {"gamma": 0.5, "cost": "cosine", "bandwidth": 1},
    {"gamma": 0.0, "lengths_a": np.array([6, 1, 4]), "lengths_b": np.array([5, 2, 1])},
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


@pytest.mark.parametrize("pairs", [4096, 4, 1])
@each_option
def test_collections(options, pairs, monkeypatch):
    monkeypatch.setattr(cdist, "MOST_PAIRS", pairs)
    A, B, weights = normal(3, 6, 2), normal(3, 5, 2, seed=1), normal(3, 3, seed=2)
    check("soft_dtw_cdist", (A, B), options)
    weighted = options | {"grad_values": weights}
    check("soft_dtw_cdist_value_and_grad", (A, B), weighted)
    check("soft_dtw_divergence_cdist", (A, B), options)
    of_a = {name: x for name, x in weighted.items() if name != "lengths_b"}
    D, _ = check("soft_dtw_cdist_value_and_grad", (A,), of_a)
    assert (np.asarray(D) == np.asarray(D).T).all()
    del of_a["grad_values"]
    D = check("soft_dtw_divergence_cdist", (A,), of_a)
    assert not np.asarray(D).diagonal().any()


@each_place
def test_collections_anywhere(place):
    A, B = normal(3, 40), normal(2, 35, seed=1)
    check("soft_dtw_cdist_value_and_grad", (A, B), {}, place)


@pytest.mark.parametrize("n, m", [(0, 2), (2, 0), (0, 0)])
def test_no_series(n, m):
    check("soft_dtw_cdist_value_and_grad", (normal(n, 4, 1), normal(m, 3, 1)), {})
    check("soft_dtw_cdist_value_and_grad", (normal(n, 4, 1),), {})


@each_option
@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 1e-2)])
def test_divergence(options, batches, dtype, tolerance):
    a = normal(batches[0], 6, 2, dtype=dtype)
    b = normal(batches[1], 5, 2, seed=1, dtype=dtype)
    check("soft_dtw_divergence_value_and_grad", (a, b), options, tolerance=tolerance)
    check("soft_dtw_divergence", (a, b), options)


def test_equal_series_have_no_divergence():
    a = normal(2, 40, 3)
    results = check("soft_dtw_divergence_value_and_grad", (a, a.copy()), {"gamma": 0.3})
    assert not any(np.asarray(x).any() for x in leaves(results))


@each_place
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (33, 20)], ids=str)
def test_paths(place, size):
    a, b = (normal(3, n, 1, seed=n).round() for n in size)
    check("dtw_path", (a, b), {}, place)
    a[1] = np.nan
    check("dtw_path", (a, b), {"bandwidth": 1}, place)


@each_place
@pytest.mark.parametrize("cost", ["sqeuclidean", "euclidean", "cityblock", "cosine"])
def test_second_order(place, cost):
    arrays = [normal(3, n, 2, seed=n + k) for k in (0, 9) for n in (6, 5)]
    options = {"cost": cost, "gamma": np.array([0.5, 0.0, 2.0])}
    check("soft_dtw_hvp", arrays, options, place, 1e-4)
    check("soft_dtw_hvp", (*arrays[:2], None, arrays[3]), options | OPTIONS[2], place, 1e-4)
    arrays[0][0, 2, 1] = np.nan
    check("soft_dtw_hvp", (arrays[0], arrays[1][:1], arrays[2], arrays[3][:1]), options)


@each_place
def test_second_order_by_costs(place):
    C, v = np.abs(normal(2, 34, 20)), normal(2, 34, 20, seed=1)
    C[0, 3, 4] = np.inf
    check("soft_dtw_from_cost_hvp", (C, v), {"gamma": 0.5, "bandwidth": 3}, place, 1e-4)
