"""Soft-DTW in NumPy.

    C[i, j] = sum_d (a[i, d] - b[j, d])^2
    R[i, j] = C[i, j] + softmin(R[i-1, j-1], R[i-1, j], R[i, j-1]),   value = R[N-1, M-1]
    softmin(r) = -gamma log sum exp(-r / gamma)

R[-1, -1] = 0, and every other cell outside the table is infinite. With the three softmin weights
P of each cell, the expected alignment E = d value / d C flows from the last cell back along them,
E[predecessor] += P E[cell], and

    grad_a[i] = sum_j E[i, j] 2 (a[i] - b[j]),   grad_b[j] = -sum_i E[i, j] 2 (a[i] - b[j]).

The cells of an anti-diagonal d = i + j do not depend on each other: each step computes one
diagonal of every pair of the batch. All arithmetic is in float64, whatever the dtypes.
"""

import numpy as np

SLAB_BYTES = 256 * 2**20


@np.errstate(all="ignore")
def forward(a, b, gamma, values):
    """Write the soft-DTW of each pair to `values`, in memory O(B (N + M)) beyond the inputs.

    a (B or 1, N, D), b (B or 1, M, D): any of the four float dtypes; gamma > 0; values (B,).
    A NaN in a pair gives NaN for that pair; a pair with no finite path gives +inf.
    """
    (_, N, D), M = a.shape, b.shape[1]
    series_and_diagonals = 8 * (N + M) * (2 * D + 16)
    for pairs in _slabs(len(values), series_and_diagonals):
        values[pairs] = _values(_take(a, pairs), _take(b, pairs), gamma)


@np.errstate(all="ignore")
def backward(grad_values, a, b, gamma, values, grad_a, grad_b):
    """Write the values, and the gradients of sum_b grad_values[b] values[b] to grad_a and grad_b.

    Arguments as in `forward`; grad_values (B,), or None for ones; grad_a and grad_b have the
    shapes of a and b, and a gradient is summed over the batch where its series was broadcast.
    A pair whose value is NaN has NaN gradients, a pair whose value is infinite has gradient 0.
    """
    (_, N, D), M = a.shape, b.shape[1]
    softmin_weights = 3 * 8 * N * M
    E_end = np.ones(len(values)) if grad_values is None else grad_values.astype(np.float64)
    sum_a, sum_b = np.zeros(grad_a.shape), np.zeros(grad_b.shape)
    for pairs in _slabs(len(values), softmin_weights + 8 * (N + M) * (4 * D + 16)):
        a64, b64 = _take(a, pairs), _take(b, pairs)
        weights = []
        values[pairs] = _values(a64, b64, gamma, weights)
        pair_a, pair_b = _gradients(E_end[pairs], a64, b64, weights)
        # Tested on the values as written: an overflow of their dtype is infinite to the caller.
        for gradient in pair_a, pair_b:
            gradient[np.isnan(values[pairs])] = np.nan
            gradient[np.isinf(values[pairs])] = 0
        _give(sum_a, pairs, pair_a)
        _give(sum_b, pairs, pair_b)
    grad_a[...] = sum_a
    grad_b[...] = sum_b


def _values(a, b, gamma, weights=None):
    """Values (B,) of the pairs of a slab; a list `weights` receives each diagonal's (3, B, cells).

    Cell (i, d - i) of a diagonal lies at column i + 1 of its row; the columns beside the cells are
    infinite: above them no diagonal has come yet, below them it is set so. R is kept relative to
    a base, the smallest R of the newest diagonal, so that cells near the best path stay small and
    exp(-R / gamma) keeps its digits.
    """
    B, N, M = max(len(a), len(b)), a.shape[1], b.shape[1]
    before, last, new = np.full((3, B, N + 1), np.inf)
    before[:, 0] = 0
    base = np.zeros(B)
    for d in range(N + M - 1):
        lo, hi = _rows(d, N, M)
        difference = _difference(a, b, d)
        R = np.einsum("bnd,bnd->bn", difference, difference)
        predecessors = np.stack((before[:, lo:hi], last[:, lo:hi], last[:, lo + 1 : hi + 1]))
        softmin, P = _softmin(predecessors, gamma)
        R = R + softmin
        if weights is not None:
            weights.append(P)
        step = _finite_or_zero(R.min(axis=1))
        base += step
        last[:, lo:hi] -= step[:, None]
        new[:, lo + 1 : hi + 1] = R - step[:, None]
        new[:, lo] = np.inf
        before, last, new = last, new, before
    return base + last[:, N]


def _softmin(r, gamma):
    """Softmin of r (3, B, cells) over axis 0, and its weights: +inf and 0 where all r are +inf."""
    lowest = r.min(axis=0)
    P = np.exp((_finite_or_zero(lowest) - r) / gamma)
    total = P.sum(axis=0)
    P /= np.where(total == 0, 1, total)
    return lowest - gamma * np.log(total), P


def _gradients(E_end, a, b, weights):
    """Gradients (B, N, D) and (B, M, D) of a slab's pairs, whose last cells have E = E_end (B,).

    E of a diagonal lies at columns i + 1 as R does; a weight into a cell outside the table is 0.
    """
    B, (_, N, D), M = len(E_end), a.shape, b.shape[1]
    grad_a, grad_b = np.zeros((B, N, D)), np.zeros((B, M, D))
    E, E_last, E_before = np.zeros((3, B, N + 1))
    E[:, N] = E_end
    for d in range(N + M - 2, -1, -1):
        lo, hi = _rows(d, N, M)
        cells = E[:, lo + 1 : hi + 1]
        # A weight of 0 forbids the cell, so it must hide a difference that overflowed.
        flow = np.where(cells[..., None] == 0, 0, 2 * cells[..., None] * _difference(a, b, d))
        grad_a[:, lo:hi] += flow
        grad_b[:, d - hi + 1 : d - lo + 1] -= flow[:, ::-1]
        diagonal, up, left = weights[d] * cells
        E_before[:, lo:hi] += diagonal
        E_last[:, lo:hi] += up
        E_last[:, lo + 1 : hi + 1] += left
        cells[...] = 0
        E, E_last, E_before = E_last, E_before, E
    return grad_a, grad_b


def _rows(d, N, M):
    """The rows lo <= i < hi that diagonal d crosses."""
    return max(0, d - M + 1), min(d + 1, N)


def _difference(a, b, d):
    """a[i] - b[d - i] for the cells of diagonal d, (B, cells, D)."""
    lo, hi = _rows(d, a.shape[1], b.shape[1])
    return a[:, lo:hi] - b[:, d - hi + 1 : d - lo + 1][:, ::-1]


def _finite_or_zero(x):
    return np.where(np.isinf(x), 0, x)


def _slabs(B, pair_bytes):
    """Slices of the batch that each need at most SLAB_BYTES, or hold one pair."""
    pairs = max(1, SLAB_BYTES // pair_bytes)
    return [slice(start, start + pairs) for start in range(0, B, pairs)]


def _take(series, pairs):
    """The series of a slab in float64; a batch of 1 serves every slab."""
    return (series if len(series) == 1 else series[pairs]).astype(np.float64)


def _give(gradient, pairs, of_pairs):
    """Store a slab's gradients, or add them up where the series is shared by all pairs."""
    if len(gradient) == 1:
        gradient[0] += of_pairs.sum(axis=0)
    else:
        gradient[pairs] = of_pairs
