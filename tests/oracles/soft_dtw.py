"""Soft-DTW from its definition, in float64.

    R[i, j] = C[i, j] + softmin(R[i-1, j-1], R[i-1, j], R[i, j-1]),   value = R[N-1, M-1]
    E[i, j] = d value / d C[i, j]

The softmin of gamma = 0 is the minimum. C (N, M): +inf forbids a cell; NaN or -inf spoils the
sample, whose value and E are NaN. Arrays of any dtype are read as float64.
"""

import math
from typing import NamedTuple

import numpy as np

FLOAT32_INFINITY = 2.0**128 - 2.0**103  # what rounds to it


def cost(a, b, kind="sqeuclidean"):
    """C (N, M) of a (N, D) and b (M, D)."""
    points = rows(b)
    C = [[point_cost(x, y, kind) for y in points] for x in rows(a)]
    return np.array(C, dtype=float).reshape(len(a), len(b))


def point_cost(x, y, kind):
    """Cost of meeting y at x, lists of D floats: inf for an infinite coordinate, unless NaN."""
    if any(math.isnan(v) for v in x + y):
        return math.nan
    if kind == "cosine" and not (any(x) and any(y)):
        return math.nan
    if any(math.isinf(v) for v in x + y):
        return math.inf
    if kind == "cosine":
        x, y = unit(x), unit(y)
    differences = [p - q for p, q in zip(x, y, strict=True)]
    if kind == "cityblock":
        return sum(abs(v) for v in differences)
    squares = sum(v * v for v in differences)
    return {"sqeuclidean": squares, "euclidean": math.sqrt(squares), "cosine": squares / 2}[kind]


def point_slope(x, y, kind):
    """d cost / d x, a list of D floats; d cost / d y is the same of (y, x)."""
    differences = [p - q for p, q in zip(x, y, strict=True)]
    if kind == "sqeuclidean":
        return [2 * v for v in differences]
    if kind == "euclidean":
        distance = point_cost(x, y, kind)
        return [v / distance if distance > 0 else 0.0 for v in differences]
    if kind == "cityblock":
        return [math.copysign(1, v) if v else 0.0 for v in differences]
    u, v, norm = unit(x), unit(y), math.hypot(*x)
    cosine = sum(p * q for p, q in zip(u, v, strict=True))
    return [(cosine * p - q) / norm for p, q in zip(u, v, strict=True)]


def unit(x):
    """x / |x|, without overflow."""
    largest = max(abs(v) for v in x)
    scaled = [v / largest for v in x]
    return [v / math.hypot(*scaled) for v in scaled]


def rows(series):
    """The points of a series (N, D) as lists of floats."""
    return np.asarray(series).astype(np.float64).tolist()


def inside(n, m, bandwidth):
    """Whether each cell of (n, m) lies in the band of radius `bandwidth`; None is no band."""
    if bandwidth is None:
        return np.ones((n, m), bool)
    lower, upper = bandwidth + max(n - m, 0), bandwidth + max(m - n, 0)
    cells = [[i - j <= lower and j - i <= upper for j in range(m)] for i in range(n)]
    return np.array(cells).reshape(n, m)


def softmin(r, gamma):
    """-gamma log sum exp(-r / gamma) of a list, where +inf counts for nothing; min for gamma 0."""
    smallest = min(r)
    if math.isinf(smallest) or gamma == 0:
        return smallest
    return smallest - gamma * math.log(sum(math.exp((smallest - x) / gamma) for x in r))


def recurrence(C, gamma):
    """R (N, M), and S (N, M) with S[i, j] = R[i, j] - C[i, j], the softmin into the cell."""
    N, M = C.shape
    R, S = [[math.inf] * M for _ in range(N)], [[0.0] * M for _ in range(N)]
    for i in range(N):
        for j in range(M):
            if i > 0 or j > 0:
                diagonal = R[i - 1][j - 1] if i > 0 and j > 0 else math.inf
                up = R[i - 1][j] if i > 0 else math.inf
                left = R[i][j - 1] if j > 0 else math.inf
                S[i][j] = softmin([diagonal, up, left], gamma)
            R[i][j] = float(C[i, j]) + S[i][j]
    return np.array(R), np.array(S)


def value(C, gamma):
    """The soft-DTW of a cost matrix."""
    if is_spoiled(C):
        return math.nan
    R, _ = recurrence(C, gamma)
    return float(R[-1, -1])


def is_spoiled(C):
    return bool((np.isnan(C) | (C == -math.inf)).any())


def of_subsequences(C, gamma):
    """(M, M): the values of all subsequences of columns, by their first and their last column."""
    M = C.shape[1]
    values = np.full((M, M), math.inf)
    for first in range(M):
        for last in range(first, M):
            values[first, last] = value(C[:, first : last + 1], gamma)
    return values


def alignment(C, gamma):
    """E (N, M): E of a cell is what its three successors pass back; 0 where no path is left.

    Successor n passes exp(-(R[cell] - S[n]) / gamma), the cell's share of the softmin into n,
    which is good to about eps |R| / gamma. For gamma = 0 see `cheapest_path`.
    """
    N, M = C.shape
    if is_spoiled(C):
        return np.full((N, M), math.nan)
    R, S = recurrence(C, gamma)
    E = np.zeros((N, M))
    if math.isinf(R[-1, -1]):
        return E
    if gamma == 0:
        for cell in cheapest_path(R):
            E[cell] = 1
        return E
    E[-1, -1] = 1
    for i in reversed(range(N)):
        for j in reversed(range(M)):
            for p, q in [(i + 1, j + 1), (i + 1, j), (i, j + 1)]:
                if p < N and q < M and not math.isinf(R[i, j]):
                    E[i, j] += E[p, q] * math.exp((S[p, q] - R[i, j]) / gamma)
    return E


def cheapest_path(R):
    """Back from the last cell to the predecessor of the least R: the diagonal before up before left
    where they are equal."""
    i, j = R.shape[0] - 1, R.shape[1] - 1
    path = [(i, j)]
    while (i, j) != (0, 0):
        before = [(p, q) for p, q in [(i - 1, j - 1), (i - 1, j), (i, j - 1)] if p >= 0 and q >= 0]
        i, j = min(before, key=lambda cell: R[cell])  # the first of equals
        path.append((i, j))
    return path


def gamma_gradient(C, gamma):
    """d value / d gamma; 0 for gamma = 0 and where no path is left. Good to eps |R| / gamma."""
    R = value(C, gamma)
    if math.isnan(R):
        return R
    if math.isinf(R) or gamma == 0:
        return 0.0
    E = alignment(C, gamma)
    return (R - float((E * np.where(E > 0, C, 0)).sum())) / gamma


def gradients(a, b, E, kind="sqeuclidean"):
    """d value / d a (N, D) and d value / d b (M, D), from E = d value / d C."""
    grad_a, grad_b = np.zeros(a.shape), np.zeros(b.shape)
    for i, x in enumerate(rows(a)):
        for j, y in enumerate(rows(b)):
            if math.isnan(E[i, j]):
                grad_a[i] = grad_b[j] = math.nan
            elif E[i, j] != 0:
                grad_a[i] += E[i, j] * np.array(point_slope(x, y, kind))
                grad_b[j] += E[i, j] * np.array(point_slope(y, x, kind))
    return grad_a, grad_b


def batch(
    a,
    b,
    gamma,
    grad_values=None,
    *,
    cost="sqeuclidean",
    bandwidth=None,
    lengths_a=None,
    lengths_b=None,
):
    """values (B,), grad_a, grad_b of a (B or 1, N, D) and b (B or 1, M, D), pair by pair.

    gamma and bandwidth: a number, or one a pair. The gradients are those of
    sum_b grad_values[b] values[b] (ones without it), and are summed over the batch where a series
    of batch 1 meets several.
    """
    C = costs_of_pairs(a, b, cost, bandwidth=bandwidth, lengths_a=lengths_a, lengths_b=lengths_b)
    values, E = values_and_alignments(C, gamma, grad_values, a.dtype)
    grad_a, grad_b = np.zeros(a.shape), np.zeros(b.shape)
    for pair in range(len(C)):
        n, m = C[pair].shape
        of_a = (pair if len(a) > 1 else 0), slice(n)
        of_b = (pair if len(b) > 1 else 0), slice(m)
        pair_a, pair_b = gradients(a[of_a], b[of_b], E[pair], cost)
        grad_a[of_a] += pair_a
        grad_b[of_b] += pair_b
    return values, grad_a, grad_b


def batch_from_cost(C, gamma, grad_values=None, *, bandwidth=None, lengths_a=None, lengths_b=None):
    """values (B,) and grad_C (B, N, M) of costs C (B, N, M); the rest as for `batch`."""
    in_use = used_costs(C, bandwidth=bandwidth, lengths_a=lengths_a, lengths_b=lengths_b)
    values, E = values_and_alignments(in_use, gamma, grad_values, C.dtype)
    grad_C = np.zeros(C.shape)
    for pair, radius, *_ in per_pair(C, C, bandwidth):
        n, m = in_use[pair].shape
        grad_C[pair, :n, :m] = np.where(inside(n, m, radius), E[pair], 0)
    return values, grad_C


def costs_of_pairs(a, b, kind="sqeuclidean", *, bandwidth=None, lengths_a=None, lengths_b=None):
    """For each pair its C (n, m) within its lengths, +inf outside of its band."""
    costs = []
    for pair, radius, n, m in per_pair(a, b, bandwidth, lengths_a, lengths_b):
        C = cost(a[pair if len(a) > 1 else 0, :n], b[pair if len(b) > 1 else 0, :m], kind)
        costs.append(np.where(inside(*C.shape, radius), C, math.inf))
    return costs


def used_costs(C, *, bandwidth=None, lengths_a=None, lengths_b=None):
    """What `costs_of_pairs` gives, of given costs C (B, N, M)."""
    costs = []
    for pair, radius, n, m in per_pair(C, C, bandwidth, lengths_a, lengths_b):
        cut = C[pair, :n, :m].astype(np.float64)
        costs.append(np.where(inside(*cut.shape, radius), cut, math.inf))
    return costs


def per_pair(a, b, *options):
    """(pair, option, option, ...) of each pair: an option is None, a number, or one a pair."""
    B = len(b) if len(a) == 1 else len(a)
    of_pairs = [[None] * B if x is None else np.broadcast_to(x, B).tolist() for x in options]
    return zip(range(B), *of_pairs, strict=True)


class Answer(NamedTuple):
    """Everything of a batch of pairs, and what rounding errors grow with."""

    values: np.ndarray  # (B,)
    gradients: tuple  # grad_a and grad_b, or grad_C alone
    E: np.ndarray  # (B, N, M)
    grad_gamma: np.ndarray  # (B,)
    used: np.ndarray  # (B, N, M) bool: the cells within lengths and bands
    likely: float  # the largest |cost| on likely paths, over gamma


def answer(*arrays, gamma=1.0, grad_values=None, **options):
    """For a (B or 1, N, D) and b (B or 1, M, D), or for given costs C (B, N, M).

    E and grad_gamma are those of the values, gradients those of sum(grad_values * values).
    """
    if len(arrays) == 2:
        values, *gradients = batch(*arrays, gamma, grad_values, **options)
        kind = options.pop("cost", "sqeuclidean")
        costs = costs_of_pairs(*arrays, kind, **options)
        shape = len(costs), arrays[0].shape[1], arrays[1].shape[1]
    else:
        values, *gradients = batch_from_cost(*arrays, gamma, grad_values, **options)
        costs, shape = used_costs(*arrays, **options), arrays[0].shape
    _, alignments = values_and_alignments(costs, gamma, None, arrays[0].dtype)
    E, used, grad_gamma, likely = np.zeros(shape), np.zeros(shape, bool), np.zeros(shape[0]), 0.0
    for pair, radius, of_pair in per_pair(costs, costs, options.get("bandwidth"), gamma):
        C, cells = costs[pair], (pair, *map(slice, costs[pair].shape))
        used[cells] = inside(*C.shape, radius)
        E[cells] = np.where(used[cells], alignments[pair], 0)
        if not np.isinf(values[pair]):
            grad_gamma[pair] = gamma_gradient(C, of_pair)
        if of_pair > 0:
            on_paths = np.abs(C[alignments[pair] > 1e-3]).max(initial=0.0)
            likely = max(likely, on_paths / of_pair)
    return Answer(values, tuple(gradients), E, grad_gamma, used, likely)


def values_and_alignments(costs, gamma, grad_values, dtype):
    """values (B,) and a list of grad_values[b] d value / d C of a list of costs.

    A value beyond float32 is infinite and has no gradient, where the dtype is not float64.
    """
    values, gradients = np.zeros(len(costs)), []
    weights = np.ones(len(costs)) if grad_values is None else grad_values
    for pair, of_pair, weight in per_pair(costs, costs, gamma, weights):
        values[pair] = value(costs[pair], of_pair)
        if dtype != np.float64 and abs(values[pair]) >= FLOAT32_INFINITY:
            values[pair] = math.copysign(math.inf, values[pair])
        if math.isinf(values[pair]):
            gradients.append(np.zeros(costs[pair].shape))
        else:
            gradients.append(float(weight) * alignment(costs[pair], of_pair))
    return values, gradients


def paths(N, M):
    """Every path from (0, 0) to (N-1, M-1) by steps (1, 1), (1, 0), (0, 1): lists of cells."""
    if N < 1 or M < 1:
        return []
    if N == 1 and M == 1:
        return [[(0, 0)]]
    shorter = paths(N - 1, M - 1) + paths(N - 1, M) + paths(N, M - 1)
    return [path + [(N - 1, M - 1)] for path in shorter]


def brute_force(C, gamma, allowed=None):
    """Value and E of a small finite C over all paths: a path weighs exp(-cost / gamma).

    allowed (N, M): the cells that a path may enter, all of them without it.
    """
    all_paths = [
        path for path in paths(*C.shape) if allowed is None or all(allowed[cell] for cell in path)
    ]
    costs = [sum(C[cell] for cell in path) for path in all_paths]
    cheapest = min(costs)
    weights = [math.exp((cheapest - path_cost) / gamma) for path_cost in costs]
    total = sum(weights)
    E = np.zeros(C.shape)
    for path, weight in zip(all_paths, weights, strict=True):
        for cell in path:
            E[cell] += weight / total
    return cheapest - gamma * math.log(total), E


def delannoy(n, m):
    """The number of paths from (0, 0) to (n, m)."""
    if n == 0 or m == 0:
        return 1
    row = [1] * (m + 1)
    for _ in range(n):
        following = [1]
        for j in range(1, m + 1):
            following.append(row[j - 1] + row[j] + following[j - 1])
        row = following
    return row[m]
