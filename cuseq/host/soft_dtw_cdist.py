"""Soft-DTW values between all series of two collections, in NumPy, some pairs at a time.

    D[i, j] = s(A[i], B[j])

Of a collection with itself the part on and above the diagonal is computed, and mirrored.
"""

from typing import NamedTuple

import numpy as np

from cuseq.host import soft_dtw

PAIRS = 256  # at a time, if a row has no more: enough for NumPy to be quick


class Collections(NamedTuple):
    """What is compared, and how."""

    A: np.ndarray  # (n, N, D)
    B: np.ndarray | None  # (m, M, D), or None for A
    cost: str
    gamma: float
    bandwidth: int | None
    lengths_a: np.ndarray | None  # (n,)
    lengths_b: np.ndarray | None  # (m,)

    @property
    def others(self):
        """What A is compared with, and its lengths."""
        return (self.A, self.lengths_a) if self.B is None else (self.B, self.lengths_b)

    def parts(self):
        """Yield (i, j), indices of the series of some pairs, until all have been."""
        m, part, count = len(self.others[0]), [], 0
        for i in range(len(self.A)):
            j = np.arange(i if self.B is None else 0, m)
            part.append((np.full(len(j), i), j))
            count += len(j)
            if count >= PAIRS or i == len(self.A) - 1:
                yield tuple(map(np.concatenate, zip(*part, strict=True)))
                part, count = [], 0

    def pairs(self, i, j):
        """The pairs of A[i] with the others[j]."""
        others, lengths = self.others

        def each(value, dtype=np.int64):
            return None if value is None else np.full(len(i), value, dtype)

        return soft_dtw.Pairs(
            self.A[i],
            others[j],
            None,
            self.cost,
            each(self.gamma, np.float64),
            each(self.bandwidth),
            None if self.lengths_a is None else self.lengths_a[i],
            None if lengths is None else lengths[j],
        )


def values(collections, D, shown):
    """Write D (n, m); ``shown(parts, pairs of a part)`` yields the parts."""
    for i, j in shown(collections.parts(), pairs_of_part):
        of_pairs = np.empty(len(i), D.dtype)
        soft_dtw.forward(collections.pairs(i, j), of_pairs)
        _put(collections, D, i, j, of_pairs)


def gradients(grad_values, collections, D, grad_A, grad_B, shown):
    """Write D (n, m), and the gradients of sum(grad_values D) to grad_A and grad_B.

    grad_values (n, m), or None for ones. grad_B is None where there is no B; `shown` as for values.
    """
    sum_a = np.zeros(grad_A.shape)
    sum_b = sum_a if grad_B is None else np.zeros(grad_B.shape)
    outer = np.ones(D.shape) if grad_values is None else grad_values.astype(np.float64)
    for i, j in shown(collections.parts(), pairs_of_part):
        pairs, of_pairs, weights = collections.pairs(i, j), np.empty(len(i), D.dtype), outer[i, j]
        if collections.B is None:  # each pair once, for D[i, j] and D[j, i]
            weights = np.where(i == j, weights, weights + outer[j, i])
        of_a, of_b = np.zeros(pairs.a.shape), np.zeros(pairs.b.shape)
        soft_dtw.backward(weights, pairs, of_pairs, of_a, of_b)
        np.add.at(sum_a, i, of_a)
        np.add.at(sum_b, j, of_b)
        _put(collections, D, i, j, of_pairs)
    grad_A[...] = sum_a
    if grad_B is not None:
        grad_B[...] = sum_b


def pairs_of_part(part):
    return len(part[0])


def _put(collections, D, i, j, of_pairs):
    D[i, j] = of_pairs
    if collections.B is None:
        D[j, i] = of_pairs
