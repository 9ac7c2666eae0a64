"""Soft-DTW in NumPy.

    R[i, j] = C[i, j] + softmin(R[i-1, j-1], R[i-1, j], R[i, j-1]),   value = R[n-1, m-1]
    softmin(r) = -gamma log sum exp(-r / gamma),   the minimum for gamma = 0

for a pair of lengths n and m. R[-1, -1] = 0, and every other cell outside the table or the band is
infinite. With the three softmin weights P of each cell and their entropy H = -sum P log P, the
expected alignment E = d value / d C flows from the last cell back, and -d R / d gamma forward:

    E[predecessor] += P E[cell],   T[cell] = H + sum P T[predecessor],   d value / d gamma = -T

The cells of an anti-diagonal d = i + j do not depend on each other: each step computes one
diagonal of every pair of a slab. All arithmetic is in float64, whatever the dtypes.

A NaN (a cost of -inf is one) within the lengths and the band of a pair makes its value and its
gradients NaN. A pair with no finite path has the value +inf, and a pair whose value is infinite in
its dtype has gradient 0. Gradients beyond the lengths or the band are 0, whatever lies there.
"""

from functools import reduce
from typing import NamedTuple

import numpy as np

from cuseq.host import costs
from cuseq.host.slabs import fill_outside, of_slab, slabs


class Pairs(NamedTuple):
    """The pairs of a call: B pairs of series of lengths up to N and M, or their costs.

    a, b and C have any of the four float dtypes and any strides.
    """

    a: np.ndarray | None  # (B or 1, N, D), or None where the costs are given
    b: np.ndarray | None  # (B or 1, M, D)
    C: np.ndarray | None  # (B, N, M)
    cost: str  # "sqeuclidean", "euclidean", "cityblock" or "cosine"; not read where C is given
    gamma: np.ndarray  # (B,) float64, >= 0
    bandwidth: np.ndarray | None  # (B,) int64, >= 0
    lengths_a: np.ndarray | None  # (B,) int64, 1 to N
    lengths_b: np.ndarray | None  # (B,) int64, 1 to M

    @property
    def sizes(self):
        """N, M and D; a given cost has no features."""
        if self.C is not None:
            return *self.C.shape[1:], 0
        return self.a.shape[1], *self.b.shape[1:]


@np.errstate(all="ignore")
def forward(pairs, values):
    """Write the values (B,), in memory O(B (N + M)) beyond the inputs."""
    for chosen, slab in slabs(pairs):
        in_float64 = np.empty(len(slab.gamma))
        for _ in _sweep(slab, in_float64, weights=False):
            pass
        values[chosen] = in_float64


@np.errstate(all="ignore")
def backward(grad_values, pairs, values, grad_a, grad_b):
    """Write the values, and the gradients of sum_b grad_values[b] values[b] to grad_a and grad_b.

    grad_values (B,), or None for ones; grad_a and grad_b have the shapes of a and b, and a
    gradient is summed over the batch where its series was broadcast.
    """
    sum_a, sum_b = np.zeros(grad_a.shape), np.zeros(grad_b.shape)
    for chosen, slab in slabs(pairs, keeps_weights=True):
        alignments = _alignments(slab, chosen, grad_values, values)
        pair_a, pair_b = _gradients(slab, alignments)
        if pairs.cost == "cosine":
            pair_a = costs.through_normalisation(of_slab(pairs.a, chosen), pair_a)
            pair_b = costs.through_normalisation(of_slab(pairs.b, chosen), pair_b)
        _give(sum_a, chosen, pair_a)
        _give(sum_b, chosen, pair_b)
    grad_a[...] = sum_a
    grad_b[...] = sum_b


@np.errstate(all="ignore")
def alignment(grad_values, pairs, values, E):
    """Write the values, and grad_values[b] d values[b] / d C[b] to E (B, N, M)."""
    E[...] = 0
    for chosen, slab in slabs(pairs, keeps_weights=True):
        E_slab = E[chosen]
        for d, cells in _alignments(slab, chosen, grad_values, values):
            i = np.arange(*slab.rows[d])
            E_slab[:, i, d - i] = cells


@np.errstate(all="ignore")
def gamma_gradient(pairs, values, grad_gamma):
    """Write the values, and d values[b] / d gamma[b] to grad_gamma (B,): 0 where gamma is 0.

    In memory O(B (N + M)) beyond the inputs.
    """
    for chosen, slab in slabs(pairs):
        in_float64 = np.empty(len(slab.gamma))
        T = _entropies(slab, _sweep(slab, in_float64))
        values[chosen] = in_float64
        grad_gamma[chosen] = _settled(-T, values[chosen])


@np.errstate(all="ignore")
def ends(pairs, free_start, values):
    """Write the values of what ends in each column of the last row (B, M), inf beyond the lengths.

    `free_start`: paths begin in any column, not in the first one. All values of a sample with a NaN
    or an infinity are NaN.
    """
    values[...] = np.inf
    for chosen, slab in slabs(pairs):
        for d, R in _last_row(slab, free_start):
            j = d - slab.n + 1
            there = np.flatnonzero((j >= 0) & (d <= slab.end))
            values[chosen][there, j[there]] = R[there]
        values[chosen][_spoilt(pairs, chosen, slab)] = np.nan


def _last_row(slab, free_start):
    """Yield (d, R (B,) in the last row) of each diagonal."""
    rows = np.arange(len(slab.n)), slab.n
    for d, (_, base, R) in enumerate(_diagonals(slab, free_start, weights=False)):
        yield d, base + R[rows]


def _spoilt(pairs, chosen, slab):
    """Whether (B,) a pair has a NaN or an infinity within its lengths."""
    m = slab.end - slab.n + 2
    return reduce(
        np.logical_or,
        (
            (~np.isfinite(x).all(axis=-1) & (np.arange(x.shape[1]) < n[:, None])).any(axis=1)
            for x, n in ((slab.a, slab.n), (slab.b, m))
        ),
    )


def _sweep(slab, values, weights=True):
    """Yield the softmin weights (3, B, cells) of each diagonal; in the end `values` are written.

    Without `weights` it yields None for them.
    """
    for d, (P, base, R) in enumerate(_diagonals(slab, weights=weights)):
        ending = np.flatnonzero(slab.end == d)
        values[ending] = base[ending] + R[ending, slab.n[ending]]
        yield P


def _diagonals(slab, free_start=False, weights=True):
    """Yield (softmin weights P (3, B, cells), base (B,), R less the base) of each diagonal.

    Cell (i, d - i) of a diagonal lies at column i + 1 of its row of cells. The columns beside the
    rows lo <= i < hi that the diagonal needs are infinite: above them no diagonal of the pair has
    come yet, below them it is set so. R is kept relative to a base, the smallest R of the two
    newest diagonals: every path enters one of them, so cells near the best path stay small and
    exp(-R / gamma) keeps its digits. The hard minimum has no exponential and compares R as it is.
    With `free_start` paths begin in any column.
    """
    before, last, new = np.full((3, len(slab.gamma), slab.N + 1), np.inf)
    base = np.zeros(len(slab.gamma))
    hard = slab.gamma == 0
    for d, (lo, hi) in enumerate(slab.rows):
        if d == 0 or free_start:
            before[:, 0] = -base
        predecessors = np.stack((before[:, lo:hi], last[:, lo:hi], last[:, lo + 1 : hi + 1]))
        softmin, P = _softmin(predecessors, slab.gamma[:, None], hard, weights)
        R = _costs(slab, d) + softmin
        fill_outside(slab, d, R, np.inf)
        smallest = np.minimum(R.min(axis=1, initial=np.inf), last[:, lo : hi + 1].min(axis=1))
        if free_start and lo == 0:  # paths begin at 0 still, and R may fall
            smallest = np.minimum(smallest, -base)
        step = np.where(hard, 0, _finite_or_zero(smallest))[:, None]
        base += step[:, 0]
        last[:, lo : hi + 1] -= step
        new[:, lo + 1 : hi + 1] = R - step
        new[:, lo] = np.inf
        yield P, base, new
        before, last, new = last, new, before


def _softmin(r, gamma, hard, weights):
    """Softmin of r (3, B, cells) over axis 0, and its weights: +inf and 0 where all r are +inf.

    hard (B,): where gamma is 0, and all weight is on the first of the smallest. The weights are
    None where they are not wanted.
    """
    lowest = r.min(axis=0)
    if not weights and hard.all():
        return lowest, None
    P = np.exp((_finite_or_zero(lowest) - r) / gamma)
    total = P.sum(axis=0)
    softmin = lowest - gamma * np.log(total)
    if hard.any():
        softmin[hard] = lowest[hard]
    if not weights:
        return softmin, None
    P /= np.where(total == 0, 1, total)
    if hard.any():
        P[:, hard] = np.arange(3)[:, None, None] == r[:, hard].argmin(axis=0)
    return softmin, P


def _entropies(slab, weights):
    """T (B,) of each pair's last cell; T lies at columns i + 1 as R does."""
    before, last, new = np.zeros((3, len(slab.gamma), slab.N + 1))
    of_pairs = np.empty(len(slab.gamma))
    for d, P in enumerate(weights):
        lo, hi = slab.rows[d]
        diagonal, up, left = P
        new[:, lo + 1 : hi + 1] = (
            _entropy(P)
            + diagonal * before[:, lo:hi]
            + up * last[:, lo:hi]
            + left * last[:, lo + 1 : hi + 1]
        )
        ending = np.flatnonzero(slab.end == d)
        of_pairs[ending] = new[ending, slab.n[ending]]
        before, last, new = last, new, before
    return of_pairs


def _entropy(P):
    """-sum P log P over axis 0; the largest is 1 less the others, of which log1p loses nothing."""
    others = np.sort(P, axis=0)[:2]
    rest = others.sum(axis=0)
    terms = others * np.log(np.where(others == 0, 1, others))
    return -terms.sum(axis=0) - (1 - rest) * np.log1p(-rest)


def _alignments(slab, chosen, grad_values, values):
    """Write the values of a slab; yield (d, E) with E (B, cells) of each diagonal, the last first.

    E lies at columns i + 1 as R does; a weight into a cell outside the table is 0.
    """
    B = len(slab.gamma)
    in_float64 = np.empty(B)
    weights = list(_sweep(slab, in_float64))
    values[chosen] = in_float64
    of_values = np.ones(B) if grad_values is None else grad_values[chosen].astype(np.float64)
    E_end = _settled(of_values, values[chosen])
    E, E_last, E_before = np.zeros((3, B, slab.N + 1))
    for d in reversed(range(len(weights))):
        lo, hi = slab.rows[d]
        ending = np.flatnonzero(slab.end == d)
        E[ending, slab.n[ending]] = E_end[ending]
        cells = E[:, lo + 1 : hi + 1]
        fill_outside(slab, d, cells, 0)
        yield d, cells
        diagonal, up, left = weights.pop() * cells
        E_before[:, lo:hi] += diagonal
        E_last[:, lo:hi] += up
        E_last[:, lo + 1 : hi + 1] += left
        cells[...] = 0
        E, E_last, E_before = E_last, E_before, E


def _settled(gradient, values):
    """gradient (B,), NaN where the value is NaN, 0 where it is infinite in its dtype."""
    return np.where(np.isnan(values), np.nan, np.where(np.isinf(values), 0, gradient))


def _gradients(slab, alignments):
    """Gradients (B, N, D) and (B, M, D) by the points of a slab."""
    B, (_, N, D), M = len(slab.gamma), slab.a.shape, slab.b.shape[1]
    grad_a, grad_b = np.zeros((B, N, D)), np.zeros((B, M, D))
    for d, E in alignments:
        lo, hi = slab.rows[d]
        flow = costs.flow(slab.cost, _differences(slab, d), E)
        grad_a[:, lo:hi] += flow
        grad_b[:, d - hi + 1 : d - lo + 1] -= flow[:, ::-1]
    return grad_a, grad_b


def _costs(slab, d):
    """C (B, cells) of diagonal d."""
    if slab.C is None:
        return costs.of_differences(slab.cost, _differences(slab, d))
    i = np.arange(*slab.rows[d])
    C = slab.C[:, i, d - i].astype(np.float64)
    C[C == -np.inf] = np.nan
    return C


def _differences(slab, d):
    """a[i] - b[d - i] for the cells of diagonal d, (B, cells, D)."""
    lo, hi = slab.rows[d]
    return slab.a[:, lo:hi] - slab.b[:, d - hi + 1 : d - lo + 1][:, ::-1]


def _give(gradient, chosen, of_pairs):
    """Store a slab's gradients, or add them up where the series is shared by all pairs."""
    if len(gradient) == 1:
        gradient[0] += of_pairs.sum(axis=0)
    else:
        gradient[chosen] = of_pairs


def _finite_or_zero(x):
    return np.where(np.isinf(x), 0, x)
