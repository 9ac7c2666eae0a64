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


def test_slope_in_gamma_is_the_entropy():
    C, gamma = normal(5, 6) ** 2, 0.7
    E = soft_dtw.alignment(C, gamma)
    above, below = soft_dtw.value(C, gamma + STEP), soft_dtw.value(C, gamma - STEP)
    expected = (soft_dtw.value(C, gamma) - (E * C).sum()) / gamma
    assert_close((above - below) / (2 * STEP), expected, "central_difference.grad_gamma")


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


@pytest.mark.parametrize("N, M, D", [(1, 1, 1), (1, 3, 2), (4, 3, 1), (5, 6, 3)])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_soft_dtw_gradients_by_central_differences(N, M, D, gamma):
    a, b = normal(2, N, D, seed=1), normal(1, M, D, seed=2)
    grad_values = normal(2, seed=3)

    def objective():
        return grad_values @ soft_dtw.batch(a, b, gamma)[0]

    _, grad_a, grad_b = soft_dtw.batch(a, b, gamma, grad_values)
    for name, x, grad in [("grad_a", a, grad_a), ("grad_b", b, grad_b)]:
        scale = max(1.0, np.abs(grad).max() / gamma)
        quotients = central_differences(objective, x)
        assert_close(quotients, grad, f"central_difference.{name}", scale=scale)


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
    for name, argument in arguments.items():
        quotients = central_differences(objective, argument)
        assert_close(quotients, gradients[name], f"central_difference.grad_{name}", scale=10.0)


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
