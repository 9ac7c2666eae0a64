"""Soft-DTW values between all series of two collections, in NumPy, row by row.

    D[i, j] = s(A[i], B[j])

Of a collection with itself the part on and above the diagonal is computed, and mirrored.
"""

from typing import NamedTuple

import numpy as np

from cuseq.host import soft_dtw


class Collections(NamedTuple):
    """What is compared, and how."""

    A: np.ndarray  # (n, N, D)
    B: np.ndarray | None  # (m, M, D), or None for A
    cost: str
    gamma: float
    bandwidth: int | None
    lengths_a: np.ndarray | None  # (n,)
    lengths_b: np.ndarray | None  # (m,)

    def pairs_of_row(self, i):
        return len(self.A) - i if self.B is None else len(self.B)

    def row(self, i):
        """The pairs of A[i], and where they begin: with itself if there is no B."""
        others, lengths, first = self.B, self.lengths_b, 0
        if others is None:
            others, lengths, first = self.A, self.lengths_a, i
        count = len(others) - first

        def each(value, dtype=np.int64):
            return None if value is None else np.full(count, value, dtype)

        of_i = None if self.lengths_a is None else self.lengths_a[i]
        return soft_dtw.Pairs(
            self.A[i : i + 1],
            others[first:],
            None,
            self.cost,
            each(self.gamma, np.float64),
            each(self.bandwidth),
            each(of_i),
            None if lengths is None else lengths[first:],
        ), first


def values(collections, D, shown):
    """Write D (n, m); ``shown(rows, pairs of a row)`` yields the rows."""
    for i in shown(range(len(D)), collections.pairs_of_row):
        pairs, first = collections.row(i)
        soft_dtw.forward(pairs, D[i, first:])
        if collections.B is None:
            D[first:, i] = D[i, first:]


def gradients(grad_values, collections, D, grad_A, grad_B, shown):
    """Write D (n, m), and the gradients of sum(grad_values D) to grad_A and grad_B.

    grad_values (n, m), or None for ones. grad_B is None where there is no B; `shown` as for values.
    """
    sum_a = np.zeros(grad_A.shape)
    sum_b = sum_a if grad_B is None else np.zeros(grad_B.shape)
    outer = np.ones(D.shape) if grad_values is None else grad_values.astype(np.float64)
    for i in shown(range(len(D)), collections.pairs_of_row):
        pairs, first = collections.row(i)
        weights = outer[i, first:].copy()
        if collections.B is None:  # each pair once, for D[i, j] and D[j, i]
            weights[1:] += outer[first + 1 :, i]
        of_i, of_others = np.zeros(pairs.a.shape), np.zeros(pairs.b.shape)
        soft_dtw.backward(weights, pairs, D[i, first:], of_i, of_others)
        sum_a[i] += of_i[0]
        sum_b[first:] += of_others
        if collections.B is None:
            D[first:, i] = D[i, first:]
    grad_A[...] = sum_a
    if grad_B is not None:
        grad_B[...] = sum_b
