"""The oracles against what does not depend on them: all paths, closed forms, printed answers."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.oracles import causal_conv1d, causal_conv1d_update, soft_dtw
from tests.tolerances import assert_close

PUBLISHED = json.loads((Path(__file__).parent / "oracles" / "published.json").read_text())
SIZES = [(1, 1), (1, 4), (5, 1), (2, 2), (3, 5), (5, 4)]
GAMMAS = [0.1, 1.0, 10.0]
STEP = 1e-5


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def central_differences(f, x):
    """d f / d x by (f(x + h) - f(x - h)) / (2 h), an element at a time; f reads x itself."""
    quotients = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        kept = x[place]
        x[place] = kept + STEP
        above = f()
        x[place] = kept - STEP
        below = f()
        x[place] = kept
        quotients[place] = (above - below) / (2 * STEP)
    return quotients


@pytest.mark.parametrize("N, M", SIZES)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_soft_dtw_sums_over_all_paths(N, M, gamma):
    C = normal(N, M) ** 2
    value, E = soft_dtw.brute_force(C, gamma)
    assert_close(soft_dtw.value(C, gamma), value, "soft_dtw.value", scale=C.sum() + gamma)
    assert_close(soft_dtw.alignment(C, gamma), E, "soft_dtw.alignment", exponent=C.sum() / gamma)


@pytest.mark.parametrize("N, M", [(0, 0), (1, 4), (3, 3), (4, 2)])
def test_delannoy_counts_the_paths(N, M):
    assert soft_dtw.delannoy(N, M) == len(soft_dtw.paths(N + 1, M + 1))


@pytest.mark.parametrize("N, M", [*SIZES, (30, 20)])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_soft_dtw_of_no_cost_counts_paths(N, M, gamma):
    expected = -gamma * math.log(soft_dtw.delannoy(N - 1, M - 1))
    assert_close(soft_dtw.value(np.zeros((N, M)), gamma), expected, "soft_dtw.value")


@pytest.mark.parametrize("N, M", [*SIZES, (12, 9)])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_every_path_crosses_two_neighbouring_diagonals(N, M, gamma):
    """A path meets diagonal d, or steps over it from d - 1 to d + 1."""
    C = normal(N, M) ** 2
    E = soft_dtw.alignment(C, gamma)
    R, S = soft_dtw.recurrence(C, gamma)
    tight = {"exponent": C.sum() / gamma}
    assert (E >= 0).all()
    assert_close(E[0, 0], 1.0, "soft_dtw.alignment", **tight)
    assert_close(E[-1, -1], 1.0, "soft_dtw.alignment", **tight)
    for d in range(N + M - 1):
        crossing = sum(E[i, d - i] for i in range(N) if 0 <= d - i < M)
        for i in range(1, N):
            j = d + 1 - i
            if 1 <= j < M:
                crossing += E[i, j] * math.exp((S[i, j] - R[i - 1, j - 1]) / gamma)
        assert_close(crossing, 1.0, "soft_dtw.alignment", **tight)


@pytest.mark.parametrize("N, M", SIZES)
def test_soft_dtw_symmetries(N, M):
    C, gamma = normal(N, M) ** 2, 0.5
    value, E = soft_dtw.value(C, gamma), soft_dtw.alignment(C, gamma)
    tight = {"scale": C.sum() + gamma}
    scaled = soft_dtw.value(3 * C, 3 * gamma)
    assert_close(scaled, 3 * value, "soft_dtw.value", **tight)
    assert_close(soft_dtw.value(C.T, gamma), value, "soft_dtw.value", **tight)
    assert_close(soft_dtw.value(C[::-1, ::-1], gamma), value, "soft_dtw.value", **tight)
    exponent = C.sum() / gamma
    assert_close(soft_dtw.alignment(3 * C, 3 * gamma), E, "soft_dtw.alignment", exponent=exponent)
    assert_close(soft_dtw.alignment(C.T, gamma).T, E, "soft_dtw.alignment", exponent=exponent)
    backwards = soft_dtw.alignment(C[::-1, ::-1], gamma)
    assert_close(backwards[::-1, ::-1], E, "soft_dtw.alignment", exponent=exponent)


@pytest.mark.parametrize("N, M", SIZES)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_soft_dtw_lies_below_dtw_by_at_most_the_number_of_paths(N, M, gamma):
    C = normal(N, M) ** 2
    dtw = min(sum(C[cell] for cell in path) for path in soft_dtw.paths(N, M))
    value = soft_dtw.value(C, gamma)
    entropy = gamma * math.log(soft_dtw.delannoy(N - 1, M - 1))
    rounding = 1e-14 * (dtw + entropy)
    assert dtw - entropy - rounding <= value <= dtw + rounding


@pytest.mark.parametrize("gamma", GAMMAS)
def test_slope_in_gamma_is_minus_the_entropy_of_the_paths(gamma):
    C = normal(3, 4) ** 2
    costs = np.array([sum(C[cell] for cell in path) for path in soft_dtw.paths(3, 4)])
    P = np.exp((costs.min() - costs) / gamma)
    P /= P.sum()
    entropy = -(P * np.log(P, out=np.zeros_like(P), where=P > 0)).sum()
    slope = soft_dtw.gamma_gradient(C, gamma)
    assert_close(slope, -entropy, "soft_dtw.grad_gamma", scale=C.sum() / gamma)
    above, below = soft_dtw.value(C, gamma + STEP), soft_dtw.value(C, gamma - STEP)
    scale = max(1.0, gamma**-2)  # of the third derivative
    quotient = (above - below) / (2 * STEP)
    assert_close(quotient, slope, "central_difference.grad_gamma", scale=scale)


def test_an_infinite_cost_forbids_its_cell():
    C = normal(4, 4) ** 2
    C[1, 1] = C[2, 3] = math.inf
    value, E = soft_dtw.value(C, 1.0), soft_dtw.alignment(C, 1.0)
    costs = [sum(C[cell] for cell in path) for path in soft_dtw.paths(4, 4)]
    assert_close(value, -math.log(sum(math.exp(-cost) for cost in costs)), "soft_dtw.value")
    assert E[1, 1] == E[2, 3] == 0
    assert np.isfinite(E).all()
    C[0, 0] = math.inf
    assert soft_dtw.value(C, 1.0) == math.inf
    assert not soft_dtw.alignment(C, 1.0).any()


@pytest.mark.parametrize("N, M", SIZES)
def test_hard_dtw_is_one_cheapest_path(N, M):
    C = normal(N, M)
    costs = {tuple(path): sum(C[cell] for cell in path) for path in soft_dtw.paths(N, M)}
    cheapest = min(costs, key=costs.get)
    assert_close(soft_dtw.value(C, 0), costs[cheapest], "soft_dtw.value", scale=np.abs(C).sum())
    assert list(map(tuple, np.argwhere(soft_dtw.alignment(C, 0)))) == sorted(cheapest)
    assert soft_dtw.gamma_gradient(C, 0) == 0


def test_ties_of_hard_dtw_go_to_the_diagonal_then_up():
    assert soft_dtw.alignment(np.zeros((3, 3)), 0).tolist() == np.eye(3).tolist()
    assert soft_dtw.alignment(np.zeros((2, 4)), 0).tolist() == [[1, 1, 1, 0], [0, 0, 0, 1]]
    C = np.zeros((3, 3))
    C[1, 1] = 1
    assert soft_dtw.alignment(C, 0).tolist() == [[1, 1, 0], [0, 0, 1], [0, 0, 1]]


X, Y = [3.0, 0.0, -1.0], [1.0, -2.0, -1.0]
BY_HAND = {
    "sqeuclidean": 8,
    "euclidean": math.sqrt(8),
    "cityblock": 4,
    "cosine": 1 - 4 / math.sqrt(10 * 6),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_costs_by_hand(kind):
    C = soft_dtw.cost(np.array([X, Y]), np.array([Y, X, X]), kind)
    there = BY_HAND[kind]
    assert_close(C, [[there, 0, 0], [0, there, there]], "soft_dtw.cost")
    scaled = soft_dtw.cost(1000 * np.array([X]), np.array([Y]), "cosine")
    assert_close(scaled, [[BY_HAND["cosine"]]], "soft_dtw.cost")


@pytest.mark.parametrize("kind", BY_HAND)
def test_infinite_points_cost_infinity_and_nan_points_nan(kind):
    spoiled = np.array([[math.inf, 1], [-math.inf, 1], [math.nan, math.inf]])
    C = soft_dtw.cost(np.array([[1.0, 2.0], [math.inf, 1], [1, math.nan]]), spoiled, kind)
    np.testing.assert_array_equal(C[:2], [[math.inf, math.inf, math.nan]] * 2)
    assert np.isnan(C[2]).all()


def test_the_cosine_of_a_zero_vector_is_nan():
    C = soft_dtw.cost(np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0, 2.0], [0, 0]]), "cosine")
    np.testing.assert_array_equal(C, [[math.nan, math.nan], [1, math.nan]])
    values, grad_a, grad_b = soft_dtw.batch(
        np.zeros((1, 2, 1)), np.ones((1, 3, 1)), 1.0, cost="cosine"
    )
    assert np.isnan(values).all() and np.isnan(grad_a).all() and np.isnan(grad_b).all()


@pytest.mark.parametrize("N, M, D", [(1, 1, 1), (1, 3, 2), (4, 3, 1), (5, 6, 3)])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("cost", BY_HAND)
def test_soft_dtw_gradients_by_central_differences(N, M, D, gamma, cost):
    a, b = normal(2, N, D, seed=1), normal(1, M, D, seed=2)
    grad_values = normal(2, seed=3)

    def objective():
        return grad_values @ soft_dtw.batch(a, b, gamma, cost=cost)[0]

    _, grad_a, grad_b = soft_dtw.batch(a, b, gamma, grad_values, cost=cost)
    for name, x, grad in [("grad_a", a, grad_a), ("grad_b", b, grad_b)]:
        scale = max(1.0, np.abs(grad).max() / gamma)
        quotients = central_differences(objective, x)
        assert_close(quotients, grad, f"central_difference.{name}", scale=scale)


def test_bands_by_hand():
    assert soft_dtw.inside(3, 3, 0).tolist() == np.eye(3, dtype=bool).tolist()
    band = ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]
    assert soft_dtw.inside(5, 5, 1).tolist() == [[cell == "x" for cell in row] for row in band]
    wider = ["xxx.", ".xxx"]
    assert soft_dtw.inside(2, 4, 0).tolist() == [[cell == "x" for cell in row] for row in wider]
    assert soft_dtw.inside(4, 2, 0).tolist() == soft_dtw.inside(2, 4, 0).T.tolist()
    assert soft_dtw.inside(1, 3, 0).all() and soft_dtw.inside(4, 4, 3).all()
    assert soft_dtw.inside(2, 2, None).all()


@pytest.mark.parametrize("N, M", SIZES)
@pytest.mark.parametrize("radius", [0, 1, 4])
@pytest.mark.parametrize("gamma", [0, 0.5])
def test_a_band_keeps_the_paths_inside_of_it(N, M, radius, gamma):
    C = normal(1, N, M) ** 2
    values, grad_C = soft_dtw.batch_from_cost(C, gamma, bandwidth=radius)
    allowed = soft_dtw.inside(N, M, radius)
    value, E = soft_dtw.brute_force(C[0], gamma or 1e-5, allowed)
    assert_close(values, [value], "soft_dtw.values", scale=C.sum() + gamma)
    assert_close(grad_C, [E], "soft_dtw.alignment", exponent=C.sum() / (gamma or 1))


@pytest.mark.parametrize("cost", BY_HAND)
def test_lengths_cut_the_series(cost):
    a, b = normal(3, 5, 2), normal(3, 6, 2, seed=1)
    gamma, bandwidth, grad_values = [0.5, 0, 2.0], [1, 2, 0], normal(3, seed=2)
    lengths = {"lengths_a": [5, 2, 1], "lengths_b": [3, 6, 1]}
    a[1, 2:] = a[2, 1:] = b[0, 3:] = b[2, 1:] = math.nan
    values, grad_a, grad_b = soft_dtw.batch(
        a, b, gamma, grad_values, cost=cost, bandwidth=bandwidth, **lengths
    )
    for pair, (n, m) in enumerate(zip(*lengths.values(), strict=True)):
        alone = soft_dtw.batch(
            a[pair : pair + 1, :n],
            b[pair : pair + 1, :m],
            gamma[pair],
            grad_values[pair : pair + 1],
            cost=cost,
            bandwidth=bandwidth[pair],
        )
        assert values[pair] == alone[0]
        np.testing.assert_array_equal(grad_a[pair, :n], alone[1][0])
        np.testing.assert_array_equal(grad_b[pair, :m], alone[2][0])
        assert not grad_a[pair, n:].any() and not grad_b[pair, m:].any()


def test_soft_dtw_gradients_of_given_costs_by_central_differences():
    C, grad_values = normal(3, 4, 5), normal(3, seed=1)
    options = {"bandwidth": [0, 1, 9], "lengths_a": [4, 3, 4], "lengths_b": [5, 5, 2]}

    def objective():
        return grad_values @ soft_dtw.batch_from_cost(C, [0.5, 1, 2], **options)[0]

    _, grad_C = soft_dtw.batch_from_cost(C, [0.5, 1, 2], grad_values, **options)
    assert_close(central_differences(objective, C), grad_C, "central_difference.grad_C", scale=4.0)


def test_given_costs_that_are_not_finite():
    """NaN spoils its sample where it is read, -inf is NaN, +inf forbids its cell."""
    C = np.zeros((6, 3, 3))
    C[0, 0, 2] = math.nan  # outside of the band
    C[1, 2, 2] = -math.inf  # beyond the length
    C[2, 0, 1] = math.nan
    C[3, 1, 0] = -math.inf
    C[4, 1, 1] = math.inf
    C[5, 1, :] = C[5, 0, 2] = math.inf
    lengths = [3, 2, 3, 3, 3, 3]
    values, grad_C = soft_dtw.batch_from_cost(
        C, 1.0, bandwidth=1, lengths_a=lengths, lengths_b=lengths
    )
    assert np.isnan(values).tolist() == [False, False, True, True, False, False]
    assert values[5] == math.inf
    band = soft_dtw.inside(3, 3, 1)
    assert np.isfinite(grad_C[[0, 1, 4]]).all()
    assert np.isnan(grad_C[2:4, band]).all() and not grad_C[2:4, ~band].any()
    assert grad_C[4, 1, 1] == 0 and not grad_C[5].any()


def test_soft_dtw_beyond_the_dtype_is_infinite():
    a, b = np.array([[[1e20]], [[1]]]), np.zeros((2, 1, 1))
    values, grad_a, _ = soft_dtw.batch(a, b, 1.0)
    assert_close(values, [1e40, 1], "soft_dtw.values")
    assert grad_a.tolist() == [[[2e20]], [[2]]]
    values, grad_a, _ = soft_dtw.batch(a.astype(np.float32), b.astype(np.float32), 1.0)
    assert values.tolist() == [math.inf, 1]
    assert grad_a.tolist() == [[[0]], [[2]]]


def test_infinite_points_and_nan_points_of_a_batch():
    a, b = normal(4, 3, 2), normal(4, 3, 2, seed=1)
    a[1, 1, 0] = b[1, 2, 0] = math.inf
    a[2, 1, 0], b[2, 2, 0] = math.inf, math.nan
    a[3, 0, 0] = math.inf
    values, *gradients = soft_dtw.batch(a, b, 1.0, lengths_a=[3, 3, 3, 1])
    np.testing.assert_array_equal(values[1:], [math.inf, math.nan, math.inf])
    for grad in gradients:
        assert not grad[[1, 3]].any() and np.isnan(grad[2]).all() and np.isfinite(grad[0]).all()


def column(values):
    return np.array(values, dtype=float).reshape(-1, 1)


def as_printed(number):
    """Half a unit of the last printed decimal, and float64 rounding of the literal."""
    decimals = len(repr(number).partition(".")[2])
    return 0.501 * 10.0**-decimals


@pytest.mark.parametrize("entry", PUBLISHED["values"], ids=lambda entry: str(entry["value"]))
def test_published_values(entry):
    a, b, gamma = column(entry["a"]), column(entry["b"]), entry["gamma"]
    C = soft_dtw.cost(a, b)
    limit = entry.get("atol", as_printed(entry["value"]))
    assert abs(soft_dtw.value(C, gamma) - entry["value"]) <= limit
    if "grad_a" in entry:
        grad_a, _ = soft_dtw.gradients(a, b, soft_dtw.alignment(C, gamma))
        for got, printed in zip(grad_a[:, 0], entry["grad_a"], strict=True):
            assert abs(got - printed) <= as_printed(printed)


def test_published_divergence():
    [entry] = PUBLISHED["divergence"]
    a, b = column(entry["a"]), column(entry["b"])
    aa, ab, bb = [
        soft_dtw.value(soft_dtw.cost(x, y), entry["gamma"]) for x, y in [(a, a), (a, b), (b, b)]
    ]
    assert abs(ab - (aa + bb) / 2 - entry["value"]) <= as_printed(entry["value"])


def test_published_alignment():
    entry = PUBLISHED["alignment"]
    C = soft_dtw.cost(column(entry["a"]), column(entry["b"]))
    E = soft_dtw.alignment(C, entry["gamma"])
    np.testing.assert_allclose(E, entry["E"], rtol=entry["rtol"])


def test_published_cosines():
    entry = PUBLISHED["cosines"]
    t = np.arange(100)
    X, Y, Z = column(np.cos(t)), column(0.5 * np.cos(t + 1)), column(2 * np.cos(t + 1))
    for name, other in [("XX", X), ("XY", Y), ("XZ", Z)]:
        value = soft_dtw.value(soft_dtw.cost(X, other), entry["gamma"])
        assert abs(value - entry[name]) <= as_printed(entry[name])


def test_published_zeros_and_ones():
    entry = PUBLISHED["zeros_ones"]
    C = soft_dtw.cost(np.zeros((10, 8)), np.ones((12, 8)))
    value = soft_dtw.value(C, entry["gamma"])
    assert abs(value - entry["value"]) <= as_printed(entry["value"])


def test_causal_conv1d_by_hand():
    """Two taps on (1, 2, 3) with 10 before them: 2 x[t] - x[t - 1] + 0.5."""
    x, weight, bias = np.array([[[1.0, 2, 3]]]), np.array([[-1.0, 2]]), np.array([0.5])
    y, final_state = causal_conv1d.forward(x, weight, bias, np.array([[[9.0, 10]]]))
    assert y.tolist() == [[[-7.5, 3.5, 4.5]]]
    assert final_state.tolist() == [[[2, 3]]]
    y, final_state = causal_conv1d.forward(x, weight)
    assert y.tolist() == [[[2, 3, 4]]]
    assert final_state.tolist() == [[[3]]]
    y, _ = causal_conv1d.forward(x, weight, activation="silu")
    expected = [[[v / (1 + math.exp(-v)) for v in (2, 3, 4)]]]
    assert_close(y, expected, "causal_conv1d.y")


def test_causal_conv1d_is_a_convolution():
    x, weight = normal(1, 1, 20), normal(1, 4, seed=1)
    y, _ = causal_conv1d.forward(x, weight)
    expected = np.convolve(x[0, 0], weight[0, ::-1])[:20]
    assert_close(y[0, 0], expected, "causal_conv1d.y")


def assert_gradients(gradients, objective, arguments):
    """Check gradients by name against central differences of the objective."""
    for name, argument in arguments.items():
        quotients = central_differences(objective, argument)
        assert_close(quotients, gradients[name], f"central_difference.grad_{name}", scale=10.0)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("L, W, S", [(0, 3, 2), (1, 1, 0), (2, 4, 3), (5, 2, 4), (6, 4, 3)])
def test_causal_conv1d_gradients_by_central_differences(L, W, S, activation):
    x, weight, bias = normal(2, 3, L), normal(3, W, seed=1), normal(3, seed=2)
    initial_state = normal(2, 3, S, seed=3)
    grad_y, grad_final_state = normal(2, 3, L, seed=4), normal(2, 3, S, seed=5)

    def objective():
        y, final_state = causal_conv1d.forward(x, weight, bias, initial_state, activation)
        return (grad_y * y).sum() + (grad_final_state * final_state).sum()

    gradients = causal_conv1d.gradients(
        grad_y, x, weight, bias, initial_state, activation, grad_final_state
    )
    arguments = {"x": x, "weight": weight, "bias": bias, "initial_state": initial_state}
    assert_gradients(gradients, objective, arguments)


ROWS_OF_INDICES = [
    [0, 0, 0, 0, 0, 0],
    [4, 4, 1, 7, 7, 7],
    [0, 0, 1, 0, 0, 2],
    [-1, -1, 3, 3, -5, 3],
    [2, -1, 2, 2, -1, -1],
    [5, 5, 2, -1, 2, -1],
    [-1, -1, -1, -1, -1, -1],
]


def test_causal_conv1d_by_index_by_hand():
    """Three taps of 100, 10, 1 on digits, with 8 and 9 before them: y shows what was seen."""
    x, weight = np.array([[[1.0, 2, 3, 4, 5, 6]]]), np.array([[100.0, 10, 1]])
    state = np.array([[[8.0, 9]]])
    wanted = {
        (0, 0, 0, 0, 0, 0): ([891, 912, 123, 234, 345, 456], [5, 6]),
        (4, 4, 1, 7, 7, 7): ([891, 912, 3, 4, 45, 456], [5, 6]),
        (0, 0, 1, 0, 0, 2): ([891, 912, 3, 204, 45, 6], [0, 6]),
        (-1, -1, 3, 3, -5, 3): ([0, 0, 3, 34, 0, 406], [4, 6]),
        (2, -1, 2, 2, -1, -1): ([891, 0, 103, 34, 0, 0], [3, 4]),
        (5, 5, 2, -1, 2, -1): ([891, 912, 3, 0, 305, 0], [3, 5]),
        (-1, 0, -1, -1, -1, -1): ([0, 2, 0, 0, 0, 0], [0, 2]),
        (0, -1, -1, -1, -1, -1): ([891, 0, 0, 0, 0, 0], [9, 1]),
        (0, -1, -1, -1, -1, 1): ([891, 0, 0, 0, 0, 6], [0, 6]),
        (-1, -1, -1, -1, -1, -1): ([0, 0, 0, 0, 0, 0], [8, 9]),
    }
    for indices, (y, final_state) in wanted.items():
        got = causal_conv1d.forward_by_index(x, weight, [indices], initial_state=state)
        assert got[0].tolist() == [[y]], indices
        assert got[1].tolist() == [[final_state]], indices


@pytest.mark.parametrize("L, W, S", [(0, 3, 2), (1, 1, 0), (2, 4, 3), (5, 2, 4)])
def test_one_index_is_one_sequence(L, W, S):
    x, weight, bias = normal(2, 3, L), normal(3, W, seed=1), normal(3, seed=2)
    rest = bias, normal(2, 3, S, seed=3), "silu"
    y, final_state = causal_conv1d.forward_by_index(x, weight, np.full((2, L), 7), *rest)
    wanted_y, wanted_state = causal_conv1d.forward(x, weight, *rest)
    assert_close(y, wanted_y, "causal_conv1d.y")
    assert (final_state == wanted_state).all()


def test_sequences_by_index_are_each_alone():
    x, weight, bias = normal(1, 2, 11), normal(2, 4, seed=1), normal(2, seed=2)
    seq_idx = [[0] * 4 + [3] + [1] * 6]
    y, final_state = causal_conv1d.forward_by_index(x, weight, seq_idx, bias)
    ends = [0, 4, 5, 11]
    alone = [
        causal_conv1d.forward(x[..., start:end], weight, bias)
        for start, end in zip(ends, ends[1:], strict=False)
    ]
    assert_close(y, np.concatenate([part for part, _ in alone], axis=2), "causal_conv1d.y")
    assert (final_state == alone[-1][1]).all()
    packed_y, states = causal_conv1d.forward_packed(x[0].T, weight, ends, bias)
    assert_close(packed_y.T[None], y, "causal_conv1d.y")
    assert (states == np.concatenate([state for _, state in alone])).all()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W, S", [(1, 0), (2, 3), (4, 3), (4, 8)])
def test_causal_conv1d_gradients_by_index_by_central_differences(W, S, activation):
    B, L = len(ROWS_OF_INDICES), len(ROWS_OF_INDICES[0])
    x, weight, bias = normal(B, 2, L), normal(2, W, seed=1), normal(2, seed=2)
    state, grad_y = normal(B, 2, S, seed=3), normal(B, 2, L, seed=4)
    grad_final_state = normal(B, 2, S, seed=5)
    rest = ROWS_OF_INDICES, bias, state, activation

    def objective():
        y, final_state = causal_conv1d.forward_by_index(x, weight, *rest)
        return (grad_y * y).sum() + (grad_final_state * final_state).sum()

    gradients = causal_conv1d.gradients_by_index(grad_y, x, weight, *rest, grad_final_state)
    arguments = {"x": x, "weight": weight, "bias": bias, "initial_state": state}
    assert_gradients(gradients, objective, arguments)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 3, 4, 4, 9, 9]], ids=str)
@pytest.mark.parametrize("W, S", [(1, 0), (2, 3), (4, 3)])
def test_causal_conv1d_gradients_of_packed_sequences(W, S, cu_seqlens, activation):
    count, T = len(cu_seqlens) - 1, cu_seqlens[-1]
    x, weight, bias = normal(T, 2), normal(2, W, seed=1), normal(2, seed=2)
    state, grad_y = normal(count, 2, S, seed=3), normal(T, 2, seed=4)
    grad_final_state = normal(count, 2, S, seed=5)
    rest = cu_seqlens, bias, state, activation

    def objective():
        y, final_state = causal_conv1d.forward_packed(x, weight, *rest)
        return (grad_y * y).sum() + (grad_final_state * final_state).sum()

    gradients = causal_conv1d.gradients_packed(grad_y, x, weight, *rest, grad_final_state)
    arguments = {"x": x, "weight": weight, "bias": bias, "initial_state": state}
    assert_gradients(gradients, objective, arguments)


@pytest.mark.parametrize("W, S", [(1, 0), (1, 2), (4, 3), (3, 5)])
def test_a_ring_equals_shifting(W, S):
    """A ring whose newest slot is S - 1 is a shifting row turned by the tokens since."""
    x, weight, state = normal(2, 3, 7), normal(3, W, seed=1), normal(2, 3, S, seed=2)
    shifted_y, shifted = causal_conv1d_update.update(x, state, weight)
    ring_y, ring = causal_conv1d_update.update(x, state, weight, cache_seqlens=[2 * S, 5 * S])
    assert (ring_y == shifted_y).all()
    assert (np.roll(ring, -7 % max(S, 1), axis=2) == shifted).all()


def test_update_goes_on_where_forward_stopped():
    x, weight, bias = normal(2, 3, 9), normal(3, 4, seed=1), normal(3, seed=2)
    whole, final_state = causal_conv1d.forward(x, weight, bias, activation="silu")
    head, state = causal_conv1d.forward(x[..., :5], weight, bias, activation="silu")
    tail, state = causal_conv1d_update.update(x[..., 5:], state, weight, bias, "silu")
    assert_close(np.concatenate((head, tail), axis=2), whole, "causal_conv1d.y")
    assert (state == final_state).all()


def test_update_skips_negative_indices():
    x, weight, pool = normal(3, 2, 2), normal(2, 3, seed=1), normal(5, 2, 2, seed=2)
    y, after = causal_conv1d_update.update(x, pool, weight, state_indices=[4, -1, 0])
    assert not y[1].any()
    assert (after[[1, 2, 3]] == pool[[1, 2, 3]]).all()
    assert (after[4] == x[0]).all()
    assert (after[0] == x[2]).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_assert_close_sees_what_is_wrong(dtype):
    expected = np.array([[1.0, -2.0], [math.nan, math.inf]])
    actual = expected.astype(dtype)
    assert_close(actual, expected, "causal_conv1d.y")
    assert_close(
        np.full(1, math.inf, dtype), [1e306 if dtype != "float64" else math.inf], "causal_conv1d.y"
    )
    for place, wrong in [((0, 1), -2.1), ((0, 1), math.nan), ((0, 1), -math.inf)] + [
        ((1, 0), 0.0),
        ((1, 1), math.nan),
        ((1, 1), -math.inf),
        ((1, 1), 5.0),
    ]:
        spoiled = actual.copy()
        spoiled[place] = wrong
        with pytest.raises(
            AssertionError, match=rf"causal_conv1d.y .*{dtype}.* at \({place[0]}, {place[1]}\)"
        ):
            assert_close(spoiled, expected, "causal_conv1d.y")
    with pytest.raises(AssertionError, match="expected shape"):
        assert_close(actual[0], expected, "causal_conv1d.y")


def test_assert_close_wants_values_of_soft_dtw_in_float32_at_least():
    with pytest.raises(AssertionError, match="float16"):
        assert_close(np.ones(1, np.float16), [1.0], "soft_dtw.value")
