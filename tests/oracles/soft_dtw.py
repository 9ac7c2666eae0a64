"""Soft-DTW from its definition, in float64.

    R[i, j] = C[i, j] + softmin(R[i-1, j-1], R[i-1, j], R[i, j-1]),   value = R[N-1, M-1]
    E[i, j] = d value / d C[i, j]

C (N, M) holds no NaN; +inf forbids a cell. Arrays of any dtype are read as float64.
"""

import math

import numpy as np


def cost(a, b):
    """C[i, j] = sum_d (a[i, d] - b[j, d])^2 of a (N, D) and b (M, D)."""
    C = np.zeros((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            for d in range(a.shape[1]):
                C[i, j] += (float(a[i, d]) - float(b[j, d])) ** 2
    return C


def softmin(r, gamma):
    """-gamma log sum exp(-r / gamma) of a list, where +inf counts for nothing."""
    smallest = min(r)
    if math.isinf(smallest):
        return math.inf
    return smallest - gamma * math.log(sum(math.exp((smallest - x) / gamma) for x in r))


def recurrence(C, gamma):
    """R (N, M), and S (N, M) with S[i, j] = R[i, j] - C[i, j], the softmin into the cell."""
    N, M = C.shape
    R, S = np.full((N, M), math.inf), np.zeros((N, M))
    for i in range(N):
        for j in range(M):
            if i > 0 or j > 0:
                diagonal = R[i - 1, j - 1] if i > 0 and j > 0 else math.inf
                up = R[i - 1, j] if i > 0 else math.inf
                left = R[i, j - 1] if j > 0 else math.inf
                S[i, j] = softmin([diagonal, up, left], gamma)
            R[i, j] = C[i, j] + S[i, j]
    return R, S


def value(C, gamma):
    """The soft-DTW of a cost matrix."""
    R, _ = recurrence(C, gamma)
    return float(R[-1, -1])


def alignment(C, gamma):
    """E (N, M): E of a cell is what its three successors pass back; 0 where no path is left.

    Successor n passes exp(-(R[cell] - S[n]) / gamma), the cell's share of the softmin into n,
    which is good to about eps |R| / gamma.
    """
    N, M = C.shape
    R, S = recurrence(C, gamma)
    E = np.zeros((N, M))
    if math.isinf(R[-1, -1]):
        return E
    E[-1, -1] = 1
    for i in reversed(range(N)):
        for j in reversed(range(M)):
            for p, q in [(i + 1, j + 1), (i + 1, j), (i, j + 1)]:
                if p < N and q < M and not math.isinf(R[i, j]):
                    E[i, j] += E[p, q] * math.exp((S[p, q] - R[i, j]) / gamma)
    return E


def gradients(a, b, E):
    """d value / d a (N, D) and d value / d b (M, D), from E = d value / d C."""
    grad_a, grad_b = np.zeros(a.shape), np.zeros(b.shape)
    for i in range(len(a)):
        for j in range(len(b)):
            for d in range(a.shape[1]):
                if E[i, j] != 0:
                    slope = 2 * (float(a[i, d]) - float(b[j, d]))
                    grad_a[i, d] += E[i, j] * slope
                    grad_b[j, d] -= E[i, j] * slope
    return grad_a, grad_b


def batch(a, b, gamma, grad_values=None):
    """values (B,), grad_a, grad_b of a (B or 1, N, D) and b (B or 1, M, D), pair by pair.

    The gradients are those of sum_b grad_values[b] values[b] (ones without it), and are summed
    over the batch where a series of batch 1 meets several.
    """
    B = len(b) if len(a) == 1 else len(a)
    values, grad_a, grad_b = np.zeros(B), np.zeros(a.shape), np.zeros(b.shape)
    for pair in range(B):
        of_a = pair if len(a) > 1 else 0
        of_b = pair if len(b) > 1 else 0
        C = cost(a[of_a], b[of_b])
        values[pair] = value(C, gamma)
        pair_a, pair_b = gradients(a[of_a], b[of_b], alignment(C, gamma))
        factor = 1.0 if grad_values is None else float(grad_values[pair])
        grad_a[of_a] += factor * pair_a
        grad_b[of_b] += factor * pair_b
    return values, grad_a, grad_b


def paths(N, M):
    """Every path from (0, 0) to (N-1, M-1) by steps (1, 1), (1, 0), (0, 1): lists of cells."""
    if N < 1 or M < 1:
        return []
    if N == 1 and M == 1:
        return [[(0, 0)]]
    shorter = paths(N - 1, M - 1) + paths(N - 1, M) + paths(N, M - 1)
    return [path + [(N - 1, M - 1)] for path in shorter]


def brute_force(C, gamma):
    """Value and E of a small finite C over all paths: a path weighs exp(-cost / gamma)."""
    all_paths = paths(*C.shape)
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
