"""How exact soft-DTW is: the bound on float32, answers that are known exactly, laws, large sizes.

The bound of the contract: a float32 E is within 5e-6 + 4 eps c / gamma of float64's on the same
inputs, eps = 2^-23 and c the largest cost along the likely paths, whatever N and |R| / gamma are.
"""

import math
from functools import cache

import numpy as np
import pytest

import cuseq
from tests import frameworks
from tests.frameworks import CUPY, TORCH_CUDA, assert_same_bits, every_place, over, run
from tests.oracles import soft_dtw as oracle
from tests.samples import DTYPES, normal
from tests.test_soft_dtw import by_numpy, by_oracle, check_all, run_all, run_both
from tests.tolerances import assert_close

COSTS = ["sqeuclidean", "euclidean", "cityblock", "cosine"]
every_cost = pytest.mark.parametrize("cost", COSTS)


def bound(likely):
    """On the error of a float32 E, for c / gamma."""
    return 5e-6 + 4 * 2.0**-23 * likely


# The bound:


def ranges(N):
    """(gamma, scale of the data, offset, D) whose total cost stays below 5e8 gamma."""
    cases = [
        (gamma, scale, 0.0, D)
        for gamma in (1e-3, 0.1, 1.0, 10.0)
        for scale, D in ((1.0, 3), (30.0, 3), (1000.0, 1))
        if N * D * scale**2 <= 5e8 * gamma
    ]
    return cases + [(gamma, 1.0, 1000.0, D) for gamma in (1e-3, 0.1, 1.0, 10.0) for D in (1, 3, 64)]


def float32_series(N, scale, offset, D):
    a = normal(1, N, D, scale=scale, offset=offset, dtype="float32")
    return a, normal(1, N, D, seed=1, scale=scale, offset=offset, dtype="float32")


@cache
def oracle_of_ranges(gamma, *data):
    return by_oracle(*float32_series(64, *data), gamma=gamma)


@cache
def numpy_of_ranges(gamma, *data):
    return by_numpy(*float32_series(512, *data), gamma=gamma)


def assert_within_the_bound(place, a, b, gamma, expected):
    """float32 series against the float64 answer for the same numbers."""
    assert expected.total <= 5e8
    E = run(place, cuseq.soft_dtw_alignment, a, b, gamma=gamma)
    assert E.dtype == np.float32
    assert np.abs(E - expected.E).max() <= bound(expected.likely)
    values = run(place, cuseq.soft_dtw, a, b, gamma=gamma)
    assert_close(values, expected.values, "soft_dtw.values", scale=expected.scale)


@every_place
@pytest.mark.parametrize("gamma, scale, offset, D", ranges(64))
def test_bound_of_64_steps(place, gamma, scale, offset, D):
    a, b = float32_series(64, scale, offset, D)
    expected = oracle_of_ranges(gamma, scale, offset, D)
    assert_within_the_bound(place, a, b, gamma, expected)


@over([CUPY])
@pytest.mark.parametrize("gamma, scale, offset, D", ranges(512))
def test_bound_of_512_steps(place, gamma, scale, offset, D):
    """float64 on the device is checked too, for the answer of 4096 steps is taken from there."""
    a, b = float32_series(512, scale, offset, D)
    expected = numpy_of_ranges(gamma, scale, offset, D)
    assert_within_the_bound(place, a, b, gamma, expected)
    check_all(run_all(place, a.astype(np.float64), b.astype(np.float64), gamma=gamma), expected)


@over([CUPY])
@pytest.mark.parametrize("gamma, scale, offset, D", ranges(4096))
def test_bound_of_4096_steps(place, gamma, scale, offset, D):
    a, b = float32_series(4096, scale, offset, D)
    wide = a.astype(np.float64), b.astype(np.float64)
    values = run(place, cuseq.soft_dtw, *wide, gamma=gamma)
    E = run(place, cuseq.soft_dtw_alignment, *wide, gamma=gamma)
    i, j = np.nonzero(E[0] > 1e-3)
    likely = ((wide[0][0, i] - wide[1][0, j]) ** 2).sum(axis=1).max() / gamma
    error = np.abs(run(place, cuseq.soft_dtw_alignment, a, b, gamma=gamma) - E)
    assert error.max() <= bound(likely)
    got = run(place, cuseq.soft_dtw, a, b, gamma=gamma)
    assert_close(got, values, "soft_dtw.values", scale=np.abs(values).max() + gamma)


@over([CUPY, TORCH_CUDA])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_of_512_steps(place, dtype):
    a, b = (x.astype(dtype) for x in float32_series(512, 1.0, 0.0, 3))
    expected = numpy_of_ranges(0.1, 1.0, 0.0, 3)
    _, gradients = run_both(place, a, b, gamma=0.1)
    for gradient, wanted in zip(gradients, expected.gradients, strict=True):
        assert np.abs(gradient - wanted).max() <= 1e-4


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gamma", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("N, M", [(1, 500), (500, 1), (40, 40)])
def test_total_costs_up_to_5e8_gamma(place, dtype, gamma, N, M):
    """Where M = N, each step off the diagonal costs 1.25e7 gamma more; else there is one path."""
    steps = max(N, M)
    C = np.full((1, N, M), 5e8 / steps * gamma, dtype)
    values, (E,) = run_both(place, C, gamma=gamma)
    assert_close(values, [5e8 * gamma], "soft_dtw.values")
    assert np.abs(E[0] - (np.eye(40) if N == M else 1)).max() <= 5e-6


# Exact answers:


def paths_to(C, shift):
    """Z[i][j]: what all paths to cell (i, j) weigh together, in whole numbers over 2^shift.

    C: lists of whole numbers >= 0; a path weighs 2^-cost, that of its last cell included.
    """
    Z = []
    for i, row in enumerate(C):
        Z.append([])
        for j, c in enumerate(row):
            before = [(p, q) for p, q in [(i - 1, j - 1), (i - 1, j), (i, j - 1)] if min(p, q) >= 0]
            weight = sum(Z[p][q] for p, q in before) if before else 1 << shift
            Z[i].append(weight >> c)
    return Z


def exact(C):
    """value / gamma, E and d value / d gamma of whole numbers C (N, M) in units of gamma ln 2."""
    costs = C.astype(int).tolist()
    shift = max(map(max, costs)) * sum(C.shape)
    Z = paths_to(costs, shift)
    back = [row[::-1] for row in paths_to([row[::-1] for row in costs[::-1]], shift)[::-1]]
    total = Z[-1][-1]
    E = np.zeros(C.shape)
    for i, j in np.ndindex(E.shape):
        E[i, j] = (Z[i][j] * back[i][j] << costs[i][j]) / (total << shift)
    value = (shift - math.log2(total)) * math.log(2)
    return value, E, value - math.log(2) * (E * C).sum()


@cache
def exact_case(N, M, largest):
    """Series of whole numbers, their squared distances up to largest^2, and the exact answer."""
    random = np.random.default_rng(N)
    a, b = (random.integers(0, largest + 1, (1, n, 1)) for n in (N, M))
    C = (a - b.transpose(0, 2, 1)) ** 2
    return a, b, C, exact(C[0])


def check_exactly(place, dtype, N, M, largest):
    """Compare value, E and the derivative by gamma, of series and of given costs."""
    *arrays, (value, E, grad_gamma) = exact_case(N, M, largest)
    a, b, C = (x.astype(dtype) for x in arrays)
    gamma = 1 / math.log(2)
    relative = 1e-12 if dtype == "float64" else 1e-6
    allowed = 1e-12 if dtype == "float64" else bound(C.max() / gamma)
    for given in ((a, b), (C,)):
        answers = run_all(place, *given, gamma=gamma)
        error = abs(answers.values[0].astype(np.float64) - gamma * value)
        assert error <= relative * gamma * (abs(value) + 1)
        assert np.abs(answers.E[0] - E).max() <= allowed
        assert abs(answers.grad_gamma[0] - grad_gamma) <= allowed * (N + M)


EXACT_SIZES = [
    (1, 1, 2),
    (5, 4, 2),
    (31, 33, 1),
    (40, 24, 2),
    (20, 70, 2),
    (9, 130, 1),
    (50, 40, 0),
]


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("N, M, largest", EXACT_SIZES)
def test_weights_that_are_powers_of_two(place, dtype, N, M, largest):
    check_exactly(place, dtype, N, M, largest)


@over([CUPY])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("N, M, largest", [(512, 512, 0), (300, 700, 1)])
def test_weights_of_long_series_that_are_powers_of_two(place, dtype, N, M, largest):
    check_exactly(place, dtype, N, M, largest)


@every_place
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gamma", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("N, M", [(1, 1), (1, 9), (4, 4), (33, 65), (128, 128)])
def test_costs_of_nothing_count_the_paths(place, dtype, gamma, N, M):
    values = run(place, cuseq.soft_dtw_from_cost, np.zeros((N, M), dtype), gamma=gamma)
    wanted = -gamma * math.log(oracle.delannoy(N - 1, M - 1))
    assert abs(values - wanted) <= (1e-12 if dtype == "float64" else 1e-6) * abs(wanted)


# Laws:


@every_place
@every_cost
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0])
def test_laws_of_alignments(place, cost, dtype, gamma):
    """Each path has both ends, a cell of each row and column, and one or two of two diagonals."""
    N, M = 37, 44
    a, b = normal(2, N, 3, dtype=dtype), normal(2, M, 3, seed=1, dtype=dtype)
    values, _, E, _, grad_gamma = run_all(place, a, b, gamma=gamma, cost=cost)
    C = oracle.costs_of_pairs(a, b, cost)
    rounding = 1e-11 if dtype == "float64" else M * bound(np.max(C) / gamma)
    assert (E >= 0).all()
    assert np.abs(E[:, [0, -1], [0, -1]] - 1).max() <= rounding
    for axis in (1, 2):
        assert E.sum(axis=axis).min() >= 1 - rounding
    for pair in E:
        diagonals = np.array([np.trace(pair[::-1], k) for k in range(1 - N, M)])
        assert diagonals.max() <= 1 + rounding
        assert (diagonals[1:] + diagonals[:-1]).min() >= 1 - rounding
    if dtype == "float64":  # where R - <E, C> has digits left
        wanted = (values - (E * C).sum(axis=(1, 2))) / gamma
        assert np.abs(grad_gamma - wanted).max() <= rounding * (1 + np.max(C) / gamma)


@every_place
@every_cost
@pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0])
def test_the_value_lies_below_that_of_the_cheapest_path(place, cost, gamma):
    """By the logarithm of the number of paths at most."""
    a, b = normal(3, 20, 2), normal(3, 31, 2, seed=1)
    soft, hard = (run(place, cuseq.soft_dtw, a, b, gamma=g, cost=cost) for g in (gamma, 0.0))
    assert (soft <= hard).all()
    assert (soft >= hard - gamma * math.log(oracle.delannoy(19, 30))).all()


@every_place
@every_cost
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_cost_is_the_same_given_or_not(place, cost, dtype):
    a, b = normal(2, 35, 3, dtype=dtype), normal(2, 20, 3, seed=1, dtype=dtype)
    C = np.array(oracle.costs_of_pairs(a, b, cost))
    of_series, of_costs = run_all(place, a, b, cost=cost), run_all(place, C.astype(dtype))
    rounding = 1e-12 if dtype == "float64" else 2 * bound(C.max())
    largest = np.abs(of_costs.values).max()
    assert np.abs(of_series.values - of_costs.values).max() <= min(rounding, 1e-6) * largest
    assert np.abs(of_series.E - of_costs.E).max() <= rounding


@every_place
@every_cost
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_laws_of_gradients(place, cost, dtype):
    """Distances do not change as both series are moved, nor directions as one point is scaled."""
    a, b = normal(2, 35, 3, dtype=dtype), normal(2, 20, 3, seed=1, dtype=dtype)
    _, (grad_a, grad_b) = run_both(place, a, b, cost=cost, gamma=0.1)
    if cost == "cosine":
        forces = (a * grad_a).sum(axis=2), (b * grad_b).sum(axis=2)
    else:
        forces = (grad_a.sum(axis=1) + grad_b.sum(axis=1),)
    rounding = (1e-11 if dtype == "float64" else 1e-3) * np.abs(grad_a).max()
    assert np.abs(grad_a).max() > 0.1
    assert all(np.abs(force).max() <= rounding for force in forces)


# Large sizes, where NumPy in float64 is the answer:


@over([CUPY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size",
    [
        (2, 3, 5000, 2),
        (2, 5000, 3, 2),
        (1, 1, 5000, 3),
        (100_000, 5, 7, 2),
        (300, 40, 50, 2),
        (2, 3000, 70, 3),
        (2, 70, 3000, 1),
        *((3, 70, 90, D) for D in (1, 5, 8, 9, 16, 64, 100)),
    ],
    ids=str,
)
def test_large_sizes(place, dtype, size):
    B, N, M, D = size
    a, b = normal(B, N, D, dtype=dtype), normal(B, M, D, seed=1, dtype=dtype)
    check_all(run_all(place, a, b), by_numpy(a, b))


@over([CUPY])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(2, 3, 5000), (1, 5000, 1), (50_000, 5, 7), (2, 3000, 70)])
def test_large_given_costs(place, dtype, size):
    C = normal(*size, dtype=dtype, offset=1.0)
    check_all(run_all(place, C), by_numpy(C))


@over([CUPY, TORCH_CUDA])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "B, N, M, options",
    [
        (2, 2000, 1500, {}),
        (1, 3000, 3000, {"bandwidth": 100}),
        (3000, 20, 33, {}),
        (3000, 20, 33, {"gamma": 0.0}),
    ],
)
def test_repeated_calls_give_the_same_bits_where_many_blocks_run(place, dtype, B, N, M, options):
    """The shared series has a gradient that is summed over the batch."""
    a = place.array(normal(1, N, 3, dtype=dtype))
    b = place.array(normal(B, M, 3, seed=1, dtype=dtype))
    first = None
    for _ in range(20):
        results = (
            cuseq.soft_dtw_value_and_grad(a, b, **options),
            cuseq.soft_dtw_alignment(a, b, **options),
            cuseq.soft_dtw_value_and_grad_gamma(a, b, **options),
        )
        taken = frameworks.taken(place, results)
        first = first or taken
        assert_same_bits([first, taken])
