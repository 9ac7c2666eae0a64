"""Costs between the points of two series, and their gradients.

With the difference x - y of points x and y, and sums over their D features:

    sqeuclidean   sum difference^2          slope by x   2 difference
    euclidean     sqrt(sum difference^2)                 difference / cost, 0 where both are 0
    cityblock     sum |difference|                       sign(difference)
    cosine        1 - x.y / (|x| |y|)

The cosine cost is computed as half the squared Euclidean distance of u = x / |x| and v = y / |y|,
which keeps the digits of nearly parallel points. Its slope by u is the difference u - v, and

    slope by x = (s - u (u.s)) / |x|   with s the slope by u.
"""

import numpy as np


def points(series, cost, infinity):
    """The series (B, N, D) in float64, as `of_differences` wants it: of length 1 for cosine.

    An infinite coordinate becomes `infinity`: +inf in one series and -inf in the other, so that
    its difference to whatever the other holds is infinite. A zero vector becomes NaN for cosine.
    """
    x = series.astype(np.float64)
    if cost == "cosine":
        largest, _, x = _normalised(x)
        return np.where(np.isinf(largest), infinity, x)
    x[np.isinf(x)] = infinity
    return x


def of_differences(cost, difference):
    """Costs (B, cells) of differences (B, cells, D)."""
    if cost == "cityblock":
        return np.abs(difference).sum(axis=-1)
    squares = np.einsum("bnd,bnd->bn", difference, difference)
    if cost == "euclidean":
        return np.sqrt(squares)
    if cost == "cosine":
        has_no_length = difference.shape[-1] == 0
        return np.full_like(squares, np.nan) if has_no_length else squares / 2
    return squares


def flow(cost, difference, E):
    """E (B, cells) times the slope of each cost by the first of its points: (B, cells, D).

    A cell whose E is 0 may be forbidden, and must hide a difference that overflowed.
    """
    E = E[..., None]
    if cost == "euclidean":
        distance = of_differences(cost, difference)[..., None]
        slopes = difference / np.where(distance == 0, 1, distance)
    elif cost == "cityblock":
        slopes = np.sign(difference)
    else:
        slopes = difference if cost == "cosine" else 2 * difference
    return np.where(E == 0, 0, E * slopes)


def through_normalisation(series, gradient):
    """The gradient (B, N, D) by the series, from that by its normalised points.

    A point without gradient keeps none: it may lie beyond the length, and hold anything.
    """
    largest, norm, u = _normalised(series.astype(np.float64))
    along = np.einsum("bnd,bnd->bn", u, gradient)[..., None]
    unused = (gradient == 0).all(axis=-1, keepdims=True)
    return np.where(unused, 0, (gradient - u * along) / norm / largest)


def _normalised(x):
    """The largest |coordinate| of each point, the norm of point / largest, and point / |point|."""
    largest = np.abs(x).max(axis=-1, keepdims=True, initial=0)
    x = x / largest
    norm = np.sqrt(np.einsum("bnd,bnd->bn", x, x))[..., None]
    return largest, norm, x / norm
