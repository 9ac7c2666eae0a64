"""The Hessian of soft-DTW values times a direction, in NumPy.

With a dot for the derivative along the direction,

    R'[i,j] = C'[i,j] + sum_k P_k R'_k,   P'_k = P_k (sum_l P_l R'_l - R'_k) / gamma
    E[p] = sum P E[cell],   E'[p] = sum P' E[cell] + P E'[cell]

and the gradient sum_j E[i,j] dC/da[i] changes by sum_j E'[i,j] dC/da[i] + E[i,j] (dC/da[i])'.
All arithmetic is in float64, one pair after the other.
"""

import numpy as np

from cuseq.host.costs import _normalised


@np.errstate(all="ignore")
def of_series(grad_values, pairs, v_a, v_b, value_dot, product_a, product_b):
    """Write the products, of the shapes of a and b, and how the values change to value_dot (B,).

    The products are of sum_k grad_values[k] values[k], grad_values None for ones. v_a and v_b:
    the direction, of the shapes of a and b.
    """
    a, b = (_Points(x, v, pairs.cost) for x, v in ((pairs.a, v_a), (pairs.b, v_b)))
    sums = [np.zeros((2, *x.shape)) for x in (pairs.a, pairs.b)]
    for k in range(len(pairs.gamma)):
        of_a, of_b = k if len(pairs.a) > 1 else 0, k if len(pairs.b) > 1 else 0
        n, m, inside = _reach(pairs, k)
        x, dx, y, dy = a.u[of_a, :n], a.du[of_a, :n], b.u[of_b, :m], b.du[of_b, :m]
        C, C_dot, slopes = _costs(pairs.cost, x, dx, y, dy)
        seed = 1.0 if grad_values is None else float(grad_values[k])
        value_dot[k], E, E_dot = _table(C, C_dot, inside, pairs.gamma[k], seed, value_dot.dtype)
        slope, slope_dot = slopes
        live = ((E != 0) | (E_dot != 0))[..., None]
        flow = np.where(live, E[..., None] * slope, 0)
        flow_dot = np.where(live, E_dot[..., None] * slope + E[..., None] * slope_dot, 0)
        for total, index, length, axis, sign in (
            (sums[0], of_a, n, 1, 1),
            (sums[1], of_b, m, 0, -1),
        ):
            total[0, index, :length] += sign * flow.sum(axis=axis)
            total[1, index, :length] += sign * flow_dot.sum(axis=axis)
    product_a[...] = a.finish(*sums[0])
    product_b[...] = b.finish(*sums[1])


@np.errstate(all="ignore")
def of_costs(grad_values, pairs, v, value_dot, product):
    """Write the product, as wide as C (B, N, M), and the values' change along v."""
    product[...] = 0
    for k in range(len(pairs.gamma)):
        n, m, inside = _reach(pairs, k)
        C = pairs.C[k, :n, :m].astype(np.float64)
        C[C == -np.inf] = np.nan
        C_dot = np.where(np.isinf(C), 0, v[k, :n, :m].astype(np.float64))
        seed = 1.0 if grad_values is None else float(grad_values[k])
        value_dot[k], _, E_dot = _table(C, C_dot, inside, pairs.gamma[k], seed, value_dot.dtype)
        product[k, :n, :m] = E_dot


def _reach(pairs, k):
    """Lengths of pair k, and which of its cells are inside the band."""
    N, M, _ = pairs.sizes
    n = N if pairs.lengths_a is None else int(pairs.lengths_a[k])
    m = M if pairs.lengths_b is None else int(pairs.lengths_b[k])
    radius = N + M if pairs.bandwidth is None else int(pairs.bandwidth[k])
    i, j = np.ogrid[:n, :m]
    return n, m, (i - j <= radius + max(n - m, 0)) & (j - i <= radius + max(m - n, 0))


class _Points:
    """Points and their change along the direction; for "cosine" those of u = x / |x|."""

    def __init__(self, x, v, cost):
        self.u, self.du = x.astype(np.float64), v.astype(np.float64)
        self._of_angle = cost == "cosine"
        if self._of_angle:
            largest, norm, self.u = _normalised(self.u)
            self._norm = largest * norm
            self._along = (self.u * self.du).sum(axis=-1, keepdims=True)
            self.du = (self.du - self.u * self._along) / self._norm

    def finish(self, s, s_dot):
        """The product, of sums over the table and their change."""
        if not self._of_angle:
            return s_dot
        inner = (self.u * s).sum(axis=-1, keepdims=True)
        inner_dot = (self.du * s + self.u * s_dot).sum(axis=-1, keepdims=True)
        whole = (s_dot - self.du * inner - self.u * inner_dot) / self._norm
        whole -= (s - self.u * inner) * self._along / self._norm**2
        none = ((s == 0) & (s_dot == 0)).all(axis=-1, keepdims=True)
        return np.where(none, 0, whole)


def _costs(cost, x, dx, y, dy):
    """C and C' (n, m), and the slopes by x and their change (n, m, D)."""
    difference, step = x[:, None] - y, dx[:, None] - dy
    both_infinite = np.isnan(difference) & ~np.isnan(x[:, None]) & ~np.isnan(y)
    difference = np.where(both_infinite, np.inf, difference)
    moved = (difference * step).sum(axis=-1)
    squares = (difference**2).sum(axis=-1)
    if cost == "cityblock":
        sign = np.sign(difference)
        return np.abs(difference).sum(axis=-1), (sign * step).sum(axis=-1), (sign, 0 * sign)
    if cost == "euclidean":
        distance = np.sqrt(squares)
        divisor = np.where(distance == 0, np.inf, distance)
        slope, C_dot = difference / divisor[..., None], moved / divisor
        slope_dot = (step - C_dot[..., None] * slope) / divisor[..., None]
        return distance, C_dot, (slope, slope_dot)
    if cost == "cosine":
        C = np.full(squares.shape, np.nan) if difference.shape[-1] == 0 else squares / 2
        return C, moved, (difference, step)
    return squares, 2 * moved, (2 * difference, 2 * step)


def _table(C, C_dot, inside, gamma, seed, dtype):
    """The value's change, and E and E' (n, m) of seed times the value."""
    n, m = C.shape
    R, R_dot = np.full((n + 1, m + 1), np.inf), np.zeros((n + 1, m + 1))
    P, P_dot = np.zeros((2, 3, n + 1, m + 1))
    R[0, 0] = 0
    for d in range(n + m - 1):
        i = np.arange(max(0, d - m + 1), min(n, d + 1)) + 1
        j = d + 2 - i
        before = np.stack([R[i - 1, j - 1], R[i - 1, j], R[i, j - 1]])
        before_dot = np.stack([R_dot[i - 1, j - 1], R_dot[i - 1, j], R_dot[i, j - 1]])
        lowest = before.min(axis=0)
        reached = np.isfinite(lowest)
        if gamma == 0:
            weights = (np.arange(3)[:, None] == before.argmin(axis=0)) * 1.0
            softmin, weights_dot = lowest, np.zeros(weights.shape)
        else:
            weights = np.exp((np.where(reached, lowest, 0) - before) / gamma)
            total = weights.sum(axis=0)
            softmin, weights = lowest - gamma * np.log(total), weights / total
            mean = (weights * before_dot).sum(axis=0)
            weights_dot = weights * ((mean - before_dot) / gamma)
        cell = np.where(inside[i - 1, j - 1], C[i - 1, j - 1], np.inf) + np.where(
            reached, softmin, lowest
        )
        moved = C_dot[i - 1, j - 1] + (weights * before_dot).sum(axis=0)
        R[i, j] = cell
        R_dot[i, j] = np.where(np.isfinite(cell), moved, 0)
        P[:, i, j], P_dot[:, i, j] = (
            np.where(reached, weights, 0),
            np.where(reached, weights_dot, 0),
        )
    value = R[n, m].astype(dtype)
    if np.isnan(value):
        return np.nan, np.full((n, m), np.nan), np.full((n, m), np.nan)
    E, E_dot = np.zeros((2, n + 2, m + 2))
    if not np.isfinite(value):
        return 0.0, E[1:-1, 1:-1], E_dot[1:-1, 1:-1]
    E[n, m] = seed
    for d in reversed(range(n + m - 1)):
        i = np.arange(max(0, d - m + 1), min(n, d + 1)) + 1
        j = d + 2 - i
        for k, (di, dj) in enumerate(((1, 1), (1, 0), (0, 1))):
            at = i - di, j - dj
            E_dot[at] += P_dot[k, i, j] * E[i, j] + P[k, i, j] * E_dot[i, j]
            E[at] += P[k, i, j] * E[i, j]
    return R_dot[n, m], np.where(inside, E[1:-1, 1:-1], 0), np.where(inside, E_dot[1:-1, 1:-1], 0)
