"""The pairs that are computed at once, and the cells that each of them has.

A pair of lengths n and m has the cells 0 <= i < n, 0 <= j < m with i - j <= lower and
j - i <= upper, which leave a band around the diagonal that reaches both ends:

    lower = bandwidth + max(n - m, 0),   upper = bandwidth + max(m - n, 0)
"""

from typing import NamedTuple

import numpy as np

from cuseq.host import costs

SLAB_BYTES = 256 * 2**20


class Slab(NamedTuple):
    """B pairs that are computed at once."""

    a: np.ndarray | None  # (B or 1, N, D) points
    b: np.ndarray | None  # (B or 1, M, D) points
    C: np.ndarray | None  # (B, N, M) any dtype
    cost: str
    gamma: np.ndarray  # (B,)
    N: int
    n: np.ndarray  # (B,) lengths
    end: np.ndarray  # (B,) the diagonal of the last cell
    first: np.ndarray  # (diagonals, B or 1): each pair has the rows first <= i < last
    last: np.ndarray
    rows: list  # (lo, hi) of each diagonal: lo <= i < hi holds the rows of every pair


def slabs(pairs, keeps_weights=False):
    """Yield (slice of the batch, slab), each of at most SLAB_BYTES or of one pair.

    pairs: as soft_dtw.Pairs. keeps_weights: whether the three softmin weights of each cell are
    to be kept.
    """
    (N, M, D), B = pairs.sizes, len(pairs.gamma)
    n = np.full(B, N) if pairs.lengths_a is None else pairs.lengths_a
    m = np.full(B, M) if pairs.lengths_b is None else pairs.lengths_b
    # A radius of N + M reaches everything.
    radius = N + M if pairs.bandwidth is None else np.minimum(pairs.bandwidth, N + M)
    lower, upper = radius + np.maximum(n - m, 0), radius + np.maximum(m - n, 0)
    pair_bytes = 8 * (N + M) * (2 * D + 24)
    if keeps_weights:
        band = int(lower.max(initial=0) + upper.max(initial=0)) + 1
        pair_bytes += 24 * N * min(M, band) + 16 * (N + M) * D
    count = max(1, SLAB_BYTES // pair_bytes)
    for start in range(0, B, count):
        chosen = slice(start, start + count)
        yield chosen, _slab(pairs, chosen, n[chosen], m[chosen], lower[chosen], upper[chosen])


def _slab(pairs, chosen, n, m, lower, upper):
    """The slab of the chosen pairs, of which n, m, lower and upper are (B,)."""
    a = b = C = None
    if pairs.C is not None:
        C = pairs.C[chosen]
    else:
        a = costs.points(of_slab(pairs.a, chosen), pairs.cost, np.inf)
        b = costs.points(of_slab(pairs.b, chosen), pairs.cost, -np.inf)

    tables = np.stack((n, m, lower, upper))
    if (tables == tables[:, :1]).all():
        tables = tables[:, :1]
    first, last = _rows(*tables)
    rows = list(zip(first.min(axis=1).tolist(), last.max(axis=1).tolist(), strict=True))
    return Slab(
        a, b, C, pairs.cost, pairs.gamma[chosen], pairs.sizes[0], n, n + m - 2, first, last, rows
    )


def _rows(n, m, lower, upper):
    """(first, last), each (diagonals, B): the rows first <= i < last of each diagonal."""
    d = np.arange((n + m).max() - 1)[:, None]
    first = np.maximum(np.maximum(0, d - m + 1), -((upper - d) // 2))
    last = np.minimum(np.minimum(d + 1, n), (d + lower) // 2 + 1)
    return first, last


def of_slab(series, chosen):
    """The series of a slab; a batch of 1 serves every slab."""
    return series if len(series) == 1 else series[chosen]


def fill_outside(slab, d, x, value):
    """Set the cells of diagonal d, x (..., B, cells), that only other pairs of the slab have."""
    if slab.first.shape[1] > 1:
        i = np.arange(*slab.rows[d])
        x[..., (i < slab.first[d, :, None]) | (i >= slab.last[d, :, None])] = value
