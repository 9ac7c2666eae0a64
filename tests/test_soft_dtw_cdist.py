"""cuseq.soft_dtw_cdist and its relatives on every framework, against pairs one by one."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import cuseq
from cuseq.ops import soft_dtw_cdist as module
from tests.frameworks import assert_same_bits, every_place, every_place_and_dtype, run
from tests.samples import normal
from tests.test_soft_dtw import by_oracle, exponent_of
from tests.tolerances import assert_close

OPTIONS = [
    {},
    {"gamma": 0.5, "cost": "euclidean"},
    {"gamma": 0.5, "cost": "cosine", "bandwidth": 2},
    {"gamma": 0.0},
    {
        "gamma": 0.3,
        "lengths_a": np.array([6, 1, 4]),
        "lengths_b": np.array([5, 2, 1, 5]),
    },
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


@pytest.fixture(params=[4096, 5, 1])
def tile(request, monkeypatch):
    """How many pairs a tile has on a device."""
    monkeypatch.setattr(module, "MOST_PAIRS", request.param)


def of_all_pairs(A, B, lengths_a=None, lengths_b=None, **options):
    """The oracle's answer for A[i] and B[j] at pair i m + j."""
    n, m = len(A), len(B)
    a, b = np.repeat(A, m, axis=0), np.tile(B, (n, 1, 1))
    if lengths_a is not None:
        options["lengths_a"] = np.repeat(lengths_a, m)
    if lengths_b is not None:
        options["lengths_b"] = np.tile(lengths_b, n)
    return by_oracle(a, b, **options)


def check(D, gradients, expected, weights, shape):
    """Values, and gradients of their sum with these weights, against those of the pairs."""
    n, m = shape
    assert_close(D, expected.values.reshape(n, m), "soft_dtw.values", scale=expected.scale)
    exponent = exponent_of(D.dtype, expected)
    for name, got, of_pairs, axis in zip(
        ("a", "b"), gradients, expected.gradients, (1, 0), strict=True
    ):
        each = of_pairs.reshape(n, m, *of_pairs.shape[1:]) * weights[..., None, None]
        scale = np.abs(each).sum(axis=axis).max(initial=0.0)
        what = f"soft_dtw.grad_{name}"
        assert_close(got, each.sum(axis=axis), what, scale=scale, exponent=exponent)


def real_of(A):
    return "float64" if A.dtype == np.float64 else "float32"


@every_place_and_dtype
@pytest.mark.parametrize("size", [(3, 6, 4, 5, 2), (1, 1, 3, 7, 1), (2, 33, 5, 17, 3)], ids=str)
def test_two_collections(place, dtype, size, tile):
    n, N, m, M, D = size
    A, B = normal(n, N, D, dtype=dtype), normal(m, M, D, seed=1, dtype=dtype)
    weights = normal(n, m, seed=2, dtype=real_of(A))
    expected = of_all_pairs(A, B)
    values = run(place, cuseq.soft_dtw_cdist, A, B)
    both, gradients = run(place, cuseq.soft_dtw_cdist_value_and_grad, A, B, grad_values=weights)
    check(both, gradients, expected, weights, (n, m))
    assert_close(values, expected.values.reshape(n, m), "soft_dtw.values", scale=expected.scale)


@every_place
@every_option
def test_options(place, options, tile):
    A, B = normal(3, 6, 2), normal(4, 5, 2, seed=1)
    expected = of_all_pairs(A, B, **options)
    D, gradients = run(place, cuseq.soft_dtw_cdist_value_and_grad, A, B, **options)
    check(D, gradients, expected, np.ones((3, 4)), (3, 4))


@every_place_and_dtype
@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_collection_with_itself(place, dtype, n, tile):
    """As with a copy of it; and symmetric to the bit."""
    A = normal(n, 9, 2, dtype=dtype)
    lengths, weights = np.arange(n) % 9 + 1, normal(n, n, seed=2, dtype=real_of(A))
    expected = of_all_pairs(A, A, lengths, lengths)
    D, (gradient,) = run(
        *(place, cuseq.soft_dtw_cdist_value_and_grad, A),
        grad_values=weights,
        lengths_a=lengths,
    )
    alone = run(place, cuseq.soft_dtw_cdist, A, lengths_a=lengths)
    for values in D, alone:
        assert (values == values.T).all()
        assert_close(values, expected.values.reshape(n, n), "soft_dtw.values", scale=expected.scale)
    each = [
        g.reshape(n, n, *g.shape[1:]) * weights.astype(np.float64)[..., None, None]
        for g in expected.gradients
    ]
    wanted = each[0].sum(axis=1) + each[1].sum(axis=0)
    scale = sum(np.abs(g).sum(axis=k).max() for k, g in ((1, each[0]), (0, each[1])))
    exponent = exponent_of(D.dtype, expected)
    assert_close(gradient, wanted, "soft_dtw.grad_a", scale=scale, exponent=exponent)


@every_place
@every_option
def test_divergences(place, options, tile):
    A, B = normal(3, 6, 2), normal(4, 5, 2, seed=1)
    A[2], B[0] = A[0], A[0, :5]
    D = run(place, cuseq.soft_dtw_divergence_cdist, A, B, **options)
    of_a = {name: x for name, x in options.items() if name != "lengths_b"}
    with_itself = run(place, cuseq.soft_dtw_divergence_cdist, A, **of_a)
    assert not with_itself.diagonal().any()
    for i in range(3):
        for j in range(4):
            pair = {
                name: x[[i if name == "lengths_a" else j]] if isinstance(x, np.ndarray) else x
                for name, x in options.items()
            }
            wanted = cuseq.soft_dtw_divergence(A[i : i + 1], B[j : j + 1], **pair)
            np.testing.assert_allclose(D[i, j], wanted[0], rtol=1e-11, atol=1e-11)


@every_place
def test_series_of_one_feature(place):
    A, B = normal(3, 6), normal(4, 5, seed=1)
    D, gradients = run(place, cuseq.soft_dtw_cdist_value_and_grad, A, B)
    wide, others = run(place, cuseq.soft_dtw_cdist_value_and_grad, A[..., None], B[..., None])
    assert (D == wide).all()
    for gradient, other in zip(gradients, others, strict=True):
        assert (gradient == other[..., 0]).all()


@every_place
@pytest.mark.parametrize("n, m", [(0, 3), (3, 0), (0, 0)])
def test_no_series(place, n, m):
    A, B = normal(n, 6, 2), normal(m, 5, 2)
    D, gradients = run(place, cuseq.soft_dtw_cdist_value_and_grad, A, B)
    assert D.shape == (n, m) and not any(gradient.any() for gradient in gradients)
    assert run(place, cuseq.soft_dtw_cdist, A).shape == (n, n)


@every_place
def test_a_series_that_is_not_a_number(place):
    A, B = normal(3, 6, 2), normal(2, 5, 2, seed=1)
    A[1, 3] = np.nan
    D, (grad_A, grad_B) = run(place, cuseq.soft_dtw_cdist_value_and_grad, A, B)
    assert np.isnan(D[1]).all() and np.isfinite(D[[0, 2]]).all()
    assert np.isnan(grad_A[1]).all() and np.isfinite(grad_A[[0, 2]]).all()
    assert np.isnan(grad_B).all()


class Bar:
    """What tqdm's is asked for."""

    made = None

    def __init__(self, total, unit):
        self.total, self.done = total, []
        Bar.made = self

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.closed = True

    def update(self, count):
        self.done.append(count)


@every_place
@pytest.mark.parametrize("name", ["soft_dtw_cdist", "soft_dtw_cdist_value_and_grad"])
def test_a_bar_shows_the_pairs_that_are_done(place, name, monkeypatch):
    monkeypatch.setattr(module, "MOST_PAIRS", 4)
    monkeypatch.setattr(module.host, "PAIRS", 4)
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(auto=sys.modules["tqdm.auto"]))
    function = getattr(cuseq, name)
    A, B = normal(5, 6, 2), normal(3, 7, 2, seed=1)
    with_bar = run(place, function, A, B, progress=True)
    assert Bar.made.closed and len(Bar.made.done) > 1
    assert sum(Bar.made.done) == Bar.made.total == 15
    assert_same_bits([with_bar, run(place, function, A, B)])
    run(place, function, A, progress=True)
    assert 15 <= sum(Bar.made.done) == Bar.made.total < 25  # half of the pairs, and some of a tile


def test_a_bar_needs_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"^tqdm: expected .+, got none installed; pip install"):
        cuseq.soft_dtw_cdist(normal(3, 4), progress=True)
    with pytest.raises(TypeError, match=r"^progress: expected True or False, got 'yes'; .+"):
        cuseq.soft_dtw_cdist(normal(3, 4), progress="yes")
