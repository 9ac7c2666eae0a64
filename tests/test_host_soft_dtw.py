"""Soft-DTW in NumPy against its oracle: sizes, dtypes, layouts, options that tend to break."""

import math
import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest

from cuseq.host import slabs, soft_dtw
from tests.oracles import soft_dtw as oracle
from tests.samples import DTYPES, normal
from tests.test_host import LAYOUTS, poisoned, read_only
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("error")

COSTS = ["sqeuclidean", "euclidean", "cityblock", "cosine"]
SIZES = [(1, 1), (1, 5), (6, 1), (2, 2), (7, 11), (13, 4), (24, 24)]


class Results(NamedTuple):
    """What the functions write for one call; the gradients by what the call was given."""

    values: np.ndarray
    E: np.ndarray
    grad_gamma: np.ndarray
    gradients: list  # grad_a and grad_b


def integers(option, B):
    return None if option is None else np.broadcast_to(np.asarray(option, np.int64), B)


def run(
    given,
    gamma=1.0,
    grad_values=None,
    *,
    cost="sqeuclidean",
    bandwidth=None,
    lengths_a=None,
    lengths_b=None,
    layout="contiguous",
):
    """All four functions on `given`, (a, b) or (C,); each must write the same values."""
    given = [read_only(x, layout) for x in given]
    a, b, C = [*given, None] if len(given) == 2 else [None, None, *given]
    B = len(given[0]) if len(given[0]) != 1 else len(given[-1])
    options = [integers(x, B) for x in (bandwidth, lengths_a, lengths_b)]
    gamma = np.broadcast_to(np.asarray(gamma, np.float64), B)
    pairs = soft_dtw.Pairs(a, b, C, cost, gamma, *options)

    dtype = given[0].dtype.name
    real = "float64" if dtype == "float64" else "float32"
    values, *again = [poisoned((B,), real, layout) for _ in range(4)]
    E = poisoned((B, *pairs.sizes[:2]), dtype if C is not None else real, layout)
    grad_gamma = poisoned((B,), real, layout)
    soft_dtw.forward(pairs, values)
    soft_dtw.alignment(grad_values, pairs, again[0], E)
    soft_dtw.gamma_gradient(pairs, again[1], grad_gamma)
    gradients = []
    if C is None:
        gradients = [poisoned(x.shape, dtype, layout) for x in given]
        soft_dtw.backward(grad_values, pairs, again[2], *gradients)
    for other in again if C is None else again[:2]:
        np.testing.assert_array_equal(other, values)
    return Results(values, E, grad_gamma, gradients)


def check(
    given, gamma=1.0, grad_values=None, *, cost="sqeuclidean", layout="contiguous", **options
):
    """`run`, and each of its results against the oracle."""
    got = run(given, gamma, grad_values, cost=cost, layout=layout, **options)
    if len(given) == 2:
        costs = oracle.costs_of_pairs(*given, cost, **options)
        values, *gradients = oracle.batch(*given, gamma, grad_values, cost=cost, **options)
    else:
        costs, gradients = oracle.used_costs(*given, **options), []
        values, _ = oracle.batch_from_cost(*given, gamma, grad_values, **options)
    gammas = np.broadcast_to(gamma, len(costs))
    sizes = np.abs(values)
    sizes[~np.isfinite(values)] = 0
    # The oracle's own weights are good to eps |R| / gamma; its hard paths are exact.
    exponent = (sizes / np.where(gammas > 0, gammas, math.inf)).max(initial=0.0)
    scale = (sizes + gammas).max(initial=0.0)
    assert_close(got.values, values, "soft_dtw.values", scale=scale)
    for result, expected, name in zip(got.gradients, gradients, ["grad_a", "grad_b"], strict=False):
        assert_close(result, expected, f"soft_dtw.{name}", exponent=exponent)

    E = expected_alignments(costs, gammas, values, grad_values, got.E.shape, **options)
    assert_close(got.E, E, "soft_dtw.alignment", exponent=exponent)
    for result, C, of_pair, value in zip(got.grad_gamma, costs, gammas, values, strict=True):
        expected = 0.0 if math.isinf(value) else oracle.gamma_gradient(C, of_pair)
        terms = np.abs(C[np.isfinite(C)]).sum() / of_pair if of_pair else 0.0
        assert_close(result, expected, "soft_dtw.grad_gamma", scale=1 + terms, exponent=exponent)
    return got


def expected_alignments(costs, gammas, values, grad_values, shape, bandwidth=None, **_):
    """E (B, N, M): 0 beyond the lengths and the band, and where the value is infinite."""
    E = np.zeros(shape)
    for pair, radius in oracle.per_pair(costs, costs, bandwidth):
        n, m = costs[pair].shape
        if not math.isinf(values[pair]):
            weight = 1.0 if grad_values is None else float(grad_values[pair])
            of_pair = weight * oracle.alignment(costs[pair], gammas[pair])
            E[pair, :n, :m] = np.where(oracle.inside(n, m, radius), of_pair, 0)
    return E


@pytest.mark.parametrize("N, M", SIZES)
@pytest.mark.parametrize("cost", COSTS)
def test_sizes(N, M, cost):
    check((normal(3, N, 3), normal(3, M, 3, seed=1)), cost=cost)


@pytest.mark.parametrize("cost", COSTS)
def test_one_feature(cost):
    check((normal(2, 6, 1), normal(2, 5, 1, seed=1)), 0.1, cost=cost)


@pytest.mark.parametrize("N, M", SIZES)
def test_sizes_of_given_costs(N, M):
    check((normal(3, N, M),), grad_values=normal(3, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cost", COSTS)
def test_dtypes_and_layouts(dtype, layout, cost):
    a, b = normal(2, 6, 3, dtype=dtype), normal(2, 9, 3, seed=1, dtype=dtype)
    options = {"bandwidth": [1, 9], "lengths_a": [6, 4], "lengths_b": [9, 9]}
    check((a, b), 0.5, normal(2, seed=2), cost=cost, layout=layout)
    check((a, b), 0.5, normal(2, seed=2), cost=cost, layout=layout, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_and_layouts_of_given_costs(dtype, layout):
    C = normal(3, 6, 5, dtype=dtype)
    options = {"bandwidth": [2, 0, 9], "lengths_a": [4, 6, 6], "lengths_b": [5, 5, 1]}
    check((C,), 0.5, normal(3, seed=2), layout=layout)
    check((C,), 0.5, normal(3, seed=2), layout=layout, **options)


@pytest.mark.parametrize("gamma", [0, 1e-3, 1e-2, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("cost", COSTS[:3])
def test_gammas_and_offsets(gamma, cost):
    for offset in 0.0, 1000.0:
        a, b = normal(2, 15, 2, offset=offset), normal(2, 19, 2, seed=1, offset=offset)
        check((a, b), gamma, cost=cost)
        check((a.astype(np.float32), b.astype(np.float32)), gamma, cost=cost)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_cosine_has_no_scale(scale):
    """Not even where squares leave the range of float64."""
    a, b = normal(2, 5, 3), normal(2, 6, 3, seed=1)
    got, wanted = run((scale * a, b), 0.1, cost="cosine"), run((a, b), 0.1, cost="cosine")
    assert_close(got.values, wanted.values, "soft_dtw.values")
    assert_close(got.gradients[0] * scale, wanted.gradients[0], "soft_dtw.grad_a")
    assert_close(got.gradients[1], wanted.gradients[1], "soft_dtw.grad_b")


def test_cosine_of_nearly_parallel_points_keeps_its_digits():
    """At an angle t the cost is 2 sin(t / 2)^2, and its slope sin(t) / |x| across x."""
    t = 1e-5
    a, b = np.array([[[3.0, 0.0]]]), np.array([[[math.cos(t), math.sin(t)]]])
    got = run((a, b), cost="cosine")
    expected = 2 * math.sin(t / 2) ** 2
    assert abs(got.values[0] / expected - 1) < 1e-10
    assert abs(got.gradients[0][0, 0, 1] / (-math.sin(t) / 3) - 1) < 1e-10
    assert abs(got.gradients[0][0, 0, 0]) < 1e-20


@pytest.mark.parametrize("cost", COSTS[:3])
def test_coinciding_points_have_no_gradient(cost):
    a = normal(1, 4, 2)
    got = run((a, a.copy()), 0, cost=cost)
    assert got.values == 0
    assert got.E[0].tolist() == np.eye(4).tolist()
    assert not np.any(got.gradients)


@pytest.mark.parametrize("batch_a, batch_b", [(1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("cost", COSTS)
def test_a_batch_of_1_meets_every_series(batch_a, batch_b, cost):
    a, b, B = normal(batch_a, 5, 2), normal(batch_b, 7, 2, seed=1), max(batch_a, batch_b)
    check((a, b), 1.0, normal(B, seed=2), cost=cost)
    options = {"lengths_a": [5, 1, 3, 4][:B], "lengths_b": [2, 7, 6, 4][:B], "bandwidth": 2}
    check((a, b), [1, 0, 0.1, 2][:B], normal(B, seed=2), cost=cost, **options)


def test_broadcast_strides():
    a = np.broadcast_to(normal(1, 6, 1), (3, 6, 2))
    b = np.broadcast_to(normal(2, seed=1), (3, 4, 2))
    check((a, b), 1.0, np.broadcast_to(np.float64(0.5), 3))


def test_without_pairs_or_features():
    assert run((normal(0, 3, 2), normal(0, 4, 2))).values.shape == (0,)
    assert not run((normal(1, 3, 2), normal(0, 4, 2))).gradients[0].any()
    assert run((normal(0, 3, 4),)).E.shape == (0, 3, 4)
    expected = -2 * math.log(oracle.delannoy(2, 3))
    for cost in COSTS[:3]:
        values = run((normal(2, 3, 0), normal(2, 4, 0)), 2.0, cost=cost).values
        assert_close(values, [expected, expected], "soft_dtw.values")
    assert np.isnan(run((normal(2, 3, 0), normal(2, 4, 0)), cost="cosine").values).all()


@pytest.mark.parametrize("N, M", [(6, 6), (5, 9), (9, 5), (1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("gamma", [0, 0.5])
def test_bands(N, M, gamma):
    a, b = normal(3, N, 2), normal(3, M, 2, seed=1)
    for radius in 0, 1, N - 1, 2**63 - 1, [0, 1, 3]:
        check((a, b), gamma, bandwidth=radius)
        check((normal(3, N, M, seed=2),), gamma, normal(3, seed=3), bandwidth=radius)


def test_a_band_is_all_that_is_visited():
    N, r = 500, 10
    pairs = soft_dtw.Pairs(
        None, None, np.zeros((2, N, N)), "", np.ones(2), np.array([r, r - 1]), None, None
    )
    [(_, slab)] = slabs.slabs(pairs)
    visited = sum(hi - lo for lo, hi in slab.rows)
    assert visited == N * (2 * r + 1) - r * (r + 1)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("padding", [math.nan, math.inf, 0.0])
def test_lengths(cost, padding):
    a, b = normal(4, 6, 2), normal(4, 8, 2, seed=1)
    lengths_a, lengths_b = [6, 1, 4, 2], [1, 8, 5, 3]
    for pair, (n, m) in enumerate(zip(lengths_a, lengths_b, strict=True)):
        a[pair, n:], b[pair, m:] = padding, padding
    lengths = {"lengths_a": lengths_a, "lengths_b": lengths_b}
    check((a, b), [0.5, 0, 2, 1], normal(4, seed=2), cost=cost, **lengths)
    check((a, b), 0.5, cost=cost, bandwidth=[0, 1, 2, 0], **lengths)


def test_equal_lengths_of_all_pairs_and_lengths_of_one_series():
    a, b = normal(3, 6, 2), normal(3, 8, 2, seed=1)
    a[:, 4:] = math.nan
    check((a, b), lengths_a=4, lengths_b=7)
    check((a, b), lengths_a=[1, 4, 2])
    b[:, 3:] = math.nan
    check((a[:, :4], b), bandwidth=1, lengths_b=[3, 2, 1])


@pytest.mark.parametrize("cost", COSTS)
def test_a_gamma_for_each_pair(cost):
    a, b = normal(4, 7, 2), normal(4, 5, 2, seed=1)
    got = check((a, b), [0, 1.0, 1e-3, 0], normal(4, seed=2), cost=cost)
    assert got.grad_gamma[0] == got.grad_gamma[3] == 0


def test_ties_of_the_hard_path_go_to_the_diagonal_then_up():
    for N, M in [(3, 3), (2, 5), (5, 2)]:
        check((np.zeros((1, N, M)),), 0)
    for C in normal(40, 6, 7).round() ** 2, normal(40, 6, 7).round() ** 2 / 10:  # rounded sums
        check((C,), 0)
        check((C,), [0, 1] * 20, bandwidth=2)


@pytest.mark.parametrize("seed", range(30))
def test_any_mixture_of_options(seed):
    random = np.random.default_rng(seed)
    B, N, M, D = random.integers(1, [5, 10, 10, 4])
    lengths_a, lengths_b = random.integers(1, N + 1, B), random.integers(1, M + 1, B)
    a, b, C = random.normal(size=(B, N, D)), random.normal(size=(1, M, D)), normal(B, N, M)
    C[random.random(C.shape) < 0.1] = math.inf
    options = {
        "bandwidth": random.integers(0, 6, B) if seed % 3 else None,
        "lengths_a": lengths_a if seed % 2 else None,
        "lengths_b": lengths_b if seed % 5 else None,
    }
    gamma = random.choice([0, 0.1, 1.0, 10.0], B)
    check((a, b), gamma, random.normal(size=B), cost=COSTS[seed % 4], **options)
    check((C,), gamma, random.normal(size=B), **options)


def spoil(C, cells, value):
    for cell in cells:
        C[(..., *cell)] = value
    return C


@pytest.mark.parametrize("gamma", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_given_costs_outside_of_the_band_and_the_lengths_do_not_matter(gamma, value):
    clean = normal(3, 5, 6)
    options = {"bandwidth": 1, "lengths_a": [5, 5, 3], "lengths_b": [6, 6, 3]}
    C = spoil(clean.copy(), [(0, 3), (0, 5), (2, 0), (4, 2)], value)
    C[2, 3:] = C[2, :, 3:] = value
    got, wanted = check((C,), gamma, **options), run((clean,), gamma, **options)
    np.testing.assert_array_equal(got.values, wanted.values)
    np.testing.assert_array_equal(got.E, wanted.E)
    np.testing.assert_array_equal(got.grad_gamma, wanted.grad_gamma)


@pytest.mark.parametrize("gamma", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("cell", [(0, 0), (2, 1), (2, 3), (4, 4)])
def test_a_nan_of_given_costs_spoils_its_pair(gamma, value, cell):
    C = normal(3, 5, 5)
    clean = run((C,), gamma, bandwidth=[1, 2, 1])
    C[1][cell] = value
    got = check((C,), gamma, bandwidth=[1, 2, 1])
    for result, before in zip(got[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(result[[0, 2]], before[[0, 2]])
    assert np.isnan(got.values[1]) and np.isnan(got.grad_gamma[1])
    band = oracle.inside(5, 5, 2)
    assert np.isnan(got.E[1, band]).all() and not got.E[1, ~band].any()


@pytest.mark.parametrize("gamma", [0, 1.0])
def test_infinite_given_costs_forbid_their_cells(gamma):
    C = normal(4, 5, 5)
    C[0, 1:4, 1] = C[0, 0, 2] = math.inf
    C[1, 2] = math.inf  # no way through
    C[2, 0, 0] = math.inf
    C[3, 2], C[3, 4, 4] = math.inf, math.nan
    got = check((C,), gamma, normal(4, seed=1))
    assert not got.E[0, 1:4, 1].any() and np.isfinite(got.E[0]).all()
    assert (got.values[1:3] == math.inf).all() and not got.E[1:3].any()
    assert np.isnan(got.E[3]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cost", COSTS)
def test_nan_stays_in_its_pair(dtype, cost):
    a, b = normal(3, 6, 2, dtype=dtype), normal(3, 5, 2, seed=1, dtype=dtype)
    clean = run((a, b), 1.0, cost=cost)
    a[1, 3, 0] = math.nan
    got = run((a, b), 1.0, cost=cost)
    flat = zip([*got[:3], *got.gradients], [*clean[:3], *clean.gradients], strict=True)
    for result, wanted in flat:
        assert np.isnan(result[1]).all()
        np.testing.assert_array_equal(result[[0, 2]], wanted[[0, 2]])


@pytest.mark.parametrize("N, M", [(1, 1), (3, 1), (1, 3)])
@pytest.mark.parametrize("gamma", [0, 1.0])
def test_nan_in_a_last_point_spoils_every_gradient(N, M, gamma):
    a, b = normal(1, N, 2), normal(1, M, 2, seed=1)
    a[0, -1, 0] = math.nan
    got = run((a, b), gamma)
    assert all(np.isnan(result).all() for result in (*got[:3], *got.gradients))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("gamma", [0, 1.0])
def test_nan_spoils_within_the_lengths_and_the_band(cost, gamma):
    a, b = normal(2, 6, 2), normal(2, 6, 2, seed=1)
    a[0, 1] = b[0, 2]  # coincide
    a[0, 3, 1] = math.nan
    options = {"bandwidth": 1, "lengths_a": [4, 3], "lengths_b": [5, 6]}
    got = check((a, b), gamma, cost=cost, **options)
    assert np.isnan(got.gradients[0][0, :4]).all() and not got.gradients[0][0, 4:].any()
    assert np.isnan(got.gradients[1][0, :5]).all() and not got.gradients[1][0, 5:].any()
    assert np.isfinite(got.gradients[0][1]).all() and np.isfinite(got.values[1])


def test_nan_reaches_a_shared_series():
    a, b = normal(1, 4, 2), normal(3, 5, 2, seed=1)
    b[2, 0, 1] = math.nan
    got = run((a, b), lengths_a=[4, 4, 3])
    grad_a, grad_b = got.gradients
    assert np.isnan(got.values).tolist() == [False, False, True]
    assert np.isnan(grad_a[0, :3]).all() and np.isfinite(grad_a[0, 3]).all()
    assert np.isnan(grad_b).all(axis=(1, 2)).tolist() == [False, False, True]
    assert np.isfinite(grad_b[:2]).all()


@pytest.mark.parametrize("gamma", [0, 1.0])
def test_a_zero_vector_has_no_direction(gamma):
    a, b = normal(3, 4, 2), normal(3, 5, 2, seed=1)
    a[1, 2] = 0
    b[2, 3:] = 0  # beyond the length
    got = check((a, b), gamma, cost="cosine", lengths_b=[5, 5, 3])
    assert np.isnan(got.values).tolist() == [False, True, False]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("gamma", [0, 1.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_points_make_an_infinite_pair(cost, gamma, dtype):
    a, b = normal(5, 6, 2, dtype=dtype), normal(5, 5, 2, seed=1, dtype=dtype)
    a[0, 2, 1] = math.inf
    a[1, 2, 1] = b[1, 1, 1] = -math.inf
    a[2, :, 0] = b[2, :, 0] = math.inf  # wherever they meet
    a[3, 0, 0], b[3, 4, 0] = math.inf, math.nan
    got = check((a, b), gamma, cost=cost)
    assert (got.values[:3] == math.inf).all() and np.isnan(got.values[3])
    assert np.isfinite(got.values[4])
    for grad in (*got.gradients, got.E, got.grad_gamma):
        assert not grad[:3].any() and np.isnan(grad[3]).all() and np.isfinite(grad[4]).all()


def test_an_infinite_value_hides_what_grad_values_holds():
    a, b = normal(2, 3, 2), normal(2, 3, 2, seed=1)
    a[0] = math.inf
    got = run((a, b), 1.0, np.array([math.nan, 1.0]))
    assert not got.gradients[0][0].any() and not got.E[0].any()
    assert np.isfinite(got.gradients[0]).all()


@pytest.mark.parametrize("grad", [math.nan, math.inf])
def test_gradients_beyond_the_lengths_and_the_band_are_0_for_any_grad_values(grad):
    a, b, lengths = normal(3, 6, 2), normal(3, 6, 2, seed=1), [6, 2, 4]
    options = {"bandwidth": [0, 1, 5], "lengths_a": lengths, "lengths_b": lengths}
    got = run((a, b), [1, 0, 2], np.full(3, grad), **options)
    for pair, (n, radius) in enumerate(zip(lengths, options["bandwidth"], strict=True)):
        assert not np.isfinite(got.gradients[0][pair, :n]).any()
        assert not got.gradients[0][pair, n:].any() and not got.gradients[1][pair, n:].any()
        assert not got.E[pair, n:].any() and not got.E[pair, :, n:].any()
        assert not got.E[pair, :n, :n][~oracle.inside(n, n, radius)].any()


@pytest.mark.parametrize("cost", ["sqeuclidean", "cityblock"])
def test_a_total_beyond_float32_is_infinite(cost):
    big = 1e20 if cost == "sqeuclidean" else 2e38
    a, b = np.full((2, 2, 1), big, np.float32), np.zeros((2, 2, 1), np.float32)
    a[1] = 1
    got = check((a, b), cost=cost)
    assert got.values[0] == math.inf
    assert not got.gradients[0][0].any() and not got.E[0].any()
    got = check((np.full((2, 1, 3), [[[2e38]], [[1]]], np.float32),))
    assert got.values.tolist() == [math.inf, 3] and not got.E[0].any()


@pytest.mark.parametrize("big", [1e160, 1.7e308])
@pytest.mark.parametrize("cost", COSTS[:3])
def test_paths_go_round_infinite_cells(big, cost):
    """Costs of opposite series overflow off the diagonal, and even their differences may."""
    a = np.array([[[-big], [-big], [big]]])
    got = run((a, a.copy()), cost=cost)
    assert_close(got.values, [-math.log(3)], "soft_dtw.values")
    assert not np.any(got.gradients)


@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_the_slope_by_gamma_is_minus_the_entropy_of_the_paths(gamma):
    """Of paths counted one by one, with none of the oracle's cancellation."""
    C = normal(1, 3, 4) ** 2
    costs = np.array([sum(C[0][cell] for cell in path) for path in oracle.paths(3, 4)])
    P = np.exp((costs.min() - costs) / gamma)
    P /= P.sum()
    entropy = -(P * np.log(np.where(P > 0, P, 1))).sum()
    assert_close(run((C,), gamma).grad_gamma, [-entropy], "soft_dtw.grad_gamma")


def test_the_entropy_of_a_nearly_certain_path_keeps_its_digits():
    """Three paths of costs 0, x, x: p = exp(-x) each, far below the rounding of 1."""
    x = 60.0
    C = np.array([[[0, x], [x, 0]]])
    p = math.exp(-x)
    got = run((C,), 1.0).grad_gamma
    np.testing.assert_allclose(got, [-(2 * p * x + 2 * p)], rtol=1e-12)


@pytest.mark.parametrize("N, M", [(1, 6), (4, 4), (40, 30)])
def test_no_cost_at_all_counts_paths(N, M):
    got = run((np.zeros((2, N, M)),), [0.5, 2.0])
    entropy = math.log(oracle.delannoy(N - 1, M - 1))
    assert_close(got.values, [-0.5 * entropy, -2 * entropy], "soft_dtw.values")
    assert_close(got.grad_gamma, [-entropy, -entropy], "soft_dtw.grad_gamma")


@pytest.mark.parametrize("cost", COSTS)
def test_slabs_of_one_pair(monkeypatch, cost):
    a, b, C = normal(4, 5, 2), normal(1, 7, 2, seed=1), normal(4, 5, 7)
    options = {"bandwidth": [1, 0, 2, 9], "lengths_a": [5, 3, 1, 5], "cost": cost}
    gamma, grad_values = [1, 0, 0.1, 2], normal(4, seed=2)
    whole = [run(given, gamma, grad_values, **options) for given in [(a, b), (C,)]]
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    for given, wanted in zip([(a, b), (C,)], whole, strict=True):
        got = run(given, gamma, grad_values, **options)
        for result, expected in zip(got[:3], wanted[:3], strict=True):
            np.testing.assert_array_equal(result, expected)
        for result, expected in zip(got.gradients, wanted.gradients, strict=True):
            assert_close(result, expected, "soft_dtw.gradient", scale=np.abs(expected).max())


def test_forward_keeps_a_few_diagonals_only():
    """A thousandth of the cost, in float64."""
    C = np.zeros((1, 800, 800), np.float32)
    pairs = soft_dtw.Pairs(None, None, C, "", np.ones(1), None, None, None)
    for function in soft_dtw.forward, soft_dtw.gamma_gradient:
        outputs = (
            [np.empty(1), np.empty(1)] if function is soft_dtw.gamma_gradient else [np.empty(1)]
        )
        tracemalloc.start()
        function(pairs, *outputs)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 8 * 60 * (800 + 800)


def test_a_path_between_large_costs_keeps_its_digits():
    """Every other diagonal of a table costs 1e9 gamma and more; the path steps over it."""
    a = 1e5 * normal(1, 30, 2)
    b = a + normal(1, 30, 2, seed=1)
    got = run((a, b))
    assert_close(got.E, [np.eye(30)], "soft_dtw.alignment")
    assert_close(got.values, [((a - b) ** 2).sum()], "soft_dtw.values")


@pytest.mark.parametrize("gamma", [1e-3, 1.0])
@pytest.mark.parametrize("bandwidth", [None, 20])
def test_long_series_keep_their_digits(gamma, bandwidth):
    """Translating both series changes nothing, and neither does reversing them."""
    a, b = normal(1, 400, 1).cumsum(axis=1), normal(1, 370, 1, seed=1).cumsum(axis=1)
    got = run((a, b), gamma, bandwidth=bandwidth)
    grad_a, grad_b = got.gradients
    assert_close(grad_a.sum(), -grad_b.sum(), "soft_dtw.grad_sum", scale=np.abs(grad_a).sum())
    turned = run((a[:, ::-1], b[:, ::-1]), gamma, bandwidth=bandwidth)
    assert_close(turned.values, got.values, "soft_dtw.values")
    likely = {"exponent": ((a - b.transpose(0, 2, 1)) ** 2)[got.E > 1e-3].max() / gamma}
    assert_close(turned.gradients[0][:, ::-1], grad_a, "soft_dtw.grad_a", **likely)
    assert_close(turned.gradients[1][:, ::-1], grad_b, "soft_dtw.grad_b", **likely)
    assert_close(turned.E[:, ::-1, ::-1], got.E, "soft_dtw.alignment", **likely)
    assert_close(turned.grad_gamma, got.grad_gamma, "soft_dtw.grad_gamma")


def test_one_long_pair_under_a_band_equals_its_cells():
    """The oracle, which visits every cell, on what the band leaves of 300 x 320."""
    a, b = normal(1, 300, 1, dtype="float32"), normal(1, 320, 1, seed=1, dtype="float32")
    got = run((a, b), 0.1, bandwidth=5)
    values, grad_a, grad_b = oracle.batch(a, b, 0.1, bandwidth=5)
    assert_close(got.values, values, "soft_dtw.values")
    assert_close(got.gradients[0], grad_a, "soft_dtw.grad_a")
    assert_close(got.gradients[1], grad_b, "soft_dtw.grad_b")
