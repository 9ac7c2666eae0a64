"""Soft-DTW barycenters: the series that is nearest to those of a collection."""

import numbers
from typing import NamedTuple

import numpy as np

from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw import borrow, check_one_for_all, integer_option
from cuseq.ops.soft_dtw_cdist import AXES
from cuseq.ops.soft_dtw_plan import SERIES
from cuseq.runtime import arrays, checks
from cuseq.runtime.arrays import HOST

OPERATOR = "soft_dtw_barycenter"


class History(NamedTuple):
    """A barycenter, and how it was found."""

    barycenter: object  # (N, D)
    objectives: np.ndarray  # float64, at the start and after each step
    converged: bool  # the tolerance was met within the steps


def soft_dtw_barycenter(
    X,
    *,
    weights=None,
    init="mean",
    gamma=1.0,
    cost="sqeuclidean",
    bandwidth=None,
    lengths=None,
    tol=1e-5,
    max_iter=100,
):
    """The minimiser z of ``sum_i weights[i] s(z, X[i])``, with s the soft-DTW value.

    SciPy's L-BFGS-B takes the steps, on the host, and the values and gradients come from where X
    is; so this waits for the device, once an evaluation. The objective is not convex: where it
    ends depends on where it starts.

    Args:
        X: n series (n, N, D), or (n, N) of one feature, of any library, in host memory or on a CUDA
            device.
        weights: (n,) numbers of at least 0, a sequence or an array. None is 1 / n for each.
        init: "mean", the weighted mean of the series, each stretched linearly to N points; the
            number of a member; or a series of shape (length, D) or (length,), of any length, which
            is that of the result.
        gamma, cost, bandwidth: as `soft_dtw`, one number for all; gamma above 0.
        lengths: how long each series is, integers (n,); what lies beyond does not matter.
        tol: it ends when the largest entry of the gradient is below tol times that at the start, or
            when a step improves the objective by less than tol times its size.
        max_iter: the most steps; 0 gives the start.

    Returns:
        (N, D), or (N,) for series (n, N), in the dtype of X, as the kind of array that X is.
        16-bit series are averaged in float32. `soft_dtw_barycenter_with_history` also returns the
        objectives.

    Raises:
        ValueError: as `soft_dtw`, and for an objective that is not finite, weights that are
            negative or all 0, an init of another number of features, or a tol or max_iter below 0.
        ImportError: without SciPy.

    Source: M. Cuturi and M. Blondel, "Soft-DTW: a differentiable loss function for time-series",
    ICML 2017, section 4.

    >>> import numpy as np, cuseq
    >>> X = np.array([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    >>> cuseq.soft_dtw_barycenter(X, gamma=0.01).round(2) + 0.0
    array([0., 1., 0., 0.])
    """
    return soft_dtw_barycenter_with_history(
        X,
        weights=weights,
        init=init,
        gamma=gamma,
        cost=cost,
        bandwidth=bandwidth,
        lengths=lengths,
        tol=tol,
        max_iter=max_iter,
    ).barycenter


def soft_dtw_barycenter_with_history(
    X,
    *,
    weights=None,
    init="mean",
    gamma=1.0,
    cost="sqeuclidean",
    bandwidth=None,
    lengths=None,
    tol=1e-5,
    max_iter=100,
):
    """`soft_dtw_barycenter` with the objective at the start and after each step.

    Args: as `soft_dtw_barycenter`.

    Returns: History(barycenter, objectives, converged).

    Raises: as `soft_dtw_barycenter`.

    >>> import numpy as np, cuseq
    >>> X = np.array([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]])
    >>> history = cuseq.soft_dtw_barycenter_with_history(X, gamma=0.01)
    >>> bool(history.objectives[-1] < history.objectives[0]), history.converged
    (True, True)
    """
    minimize = _scipys_minimize()
    given = arrays.borrow("X", X, OPERATOR)
    checks.floating("X", given)
    if len(given.shape) not in AXES or 0 in given.shape[:2]:
        expected = "shape (n, N) or (n, N, D) with n and N above 0"
        raise ValueError(checks.sentence("X", expected, given.shape, "pass a series or more"))
    check_one_for_all("gamma", gamma, OPERATOR)
    check_one_for_all("bandwidth", bandwidth, OPERATOR)
    _check_steps(tol, max_iter)
    series = given.seen_as(*AXES[len(given.shape)])
    n, N, _ = series.shape
    integer_option("lengths", lengths, n, (1, N), given, OPERATOR)
    members = arrays.read(series)
    weights = _weights(weights, len(members))
    start = _start(init, members.astype(np.float64), weights, lengths)
    objective = _Objective(series, members, weights, len(start), (gamma, cost, bandwidth, lengths))

    objectives = [objective(start.ravel())[0]]
    if max_iter == 0:  # which SciPy takes for 1
        return History(_given_back(X, given, start), np.array(objectives), False)
    found = minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        callback=lambda intermediate_result: objectives.append(intermediate_result.fun),
        options={"maxiter": max_iter, "ftol": tol, "gtol": tol * objective.steepest},
    )
    z = found.x.reshape(start.shape)
    return History(_given_back(X, given, z), np.array(objectives), found.status == 0)


def _given_back(X, given, z):
    """z (length, D) as X's kind of array, of shape (length,) for series of one feature."""
    shape = len(z), *given.shape[2:]
    result = arrays.empty(shape, given.dtype, given)
    arrays.write(result, z.reshape(shape))
    return arrays.give_back(result, X)


def _check_steps(tol, max_iter):
    if isinstance(max_iter, bool) or not isinstance(max_iter, numbers.Integral):
        remedy = "pass a number of steps"
        got = type(max_iter).__name__
        raise TypeError(checks.sentence("max_iter", "an integer", got, remedy))
    checks.within("max_iter", max_iter, max_iter, 0, np.inf)
    if isinstance(tol, bool) or not isinstance(tol, numbers.Real):
        remedy = "pass a fraction, such as 1e-5"
        raise TypeError(checks.sentence("tol", "a number", type(tol).__name__, remedy))
    if not 0 <= tol < np.inf:
        remedy = "pass a fraction, such as 1e-5"
        raise ValueError(checks.sentence("tol", "a number of at least 0", tol, remedy))


def _scipys_minimize():
    try:
        from scipy.optimize import minimize
    except ImportError as missing:
        raise ImportError(
            "scipy: expected SciPy, which takes the steps of a barycenter, got none installed;"
            " pip install cuseq[barycenter]"
        ) from missing
    return minimize


class _Objective:
    """The weighted sum of values of z against the members, and its gradient, on the host."""

    def __init__(self, series, members, weights, length, options):
        self._weights, self._options = weights, options
        real = "float64" if series.dtype == "float64" else "float32"
        if series.dtype != real:
            wide = arrays.empty(series.shape, real, series)
            arrays.write(wide, members)
            series = wide
        self._series = series
        self._z = arrays.empty((1, length, series.shape[2]), real, series)
        self._outer = arrays.empty((len(weights),), real, series)
        arrays.write(self._outer, weights)
        self.steepest = 1.0

    def __call__(self, flat):
        arrays.write(self._z, flat.reshape(self._z.shape))
        *options, lengths = self._options
        call = borrow(OPERATOR, self._z, self._series, *options, None, lengths)
        if call.problem.device == HOST:
            values, kept = arrays.empty(call.values_shape, call.problem.real, self._z), None
        else:
            values, kept = engine.forward(call, SERIES)
        gradient, _ = engine.backward(call, self._outer, values, kept, SERIES)
        value = float(self._weights @ arrays.read(values).astype(np.float64))
        slope = arrays.read(gradient).astype(np.float64).ravel()
        if not (np.isfinite(value) and np.isfinite(slope).all()):
            remedy = "leave out series with NaN or infinity, or scale them down"
            raise ValueError(checks.sentence("X", "a finite objective", value, remedy))
        self.steepest = max(np.abs(slope).max(initial=0.0), np.finfo(np.float64).tiny)
        return value, slope


def _weights(weights, n):
    """(n,) float64, checked."""
    if weights is None:
        return np.full(n, 1 / n)
    weights = arrays.on_host("weights", weights, OPERATOR)
    if weights.shape != (n,):
        remedy = "pass one a series"
        raise ValueError(checks.sentence("weights", f"shape (n,) = ({n},)", weights.shape, remedy))
    if not ((weights >= 0).all() and 0 < weights.sum() < np.inf):
        got, remedy = weights.min(), "pass weights such as 1 / n"
        expected = "finite numbers of at least 0, not all 0"
        raise ValueError(checks.sentence("weights", expected, got, remedy))
    return weights.astype(np.float64)


def _start(init, members, weights, lengths):
    """(length, D) in float64; members (n, N, D)."""
    n, N, D = members.shape
    if isinstance(init, str):
        checks.one_of("init", init, ("mean",))
        stretched = [_stretched(x, N) for x in _cut(members, lengths)]
        return np.average(stretched, axis=0, weights=weights)
    if isinstance(init, numbers.Integral):
        checks.within("init", init, init, 0, n - 1)
        return _cut(members, lengths)[init]
    start = arrays.on_host("init", init, OPERATOR).astype(np.float64)
    start = start[:, None] if start.ndim == 1 else start
    if start.ndim != 2 or start.shape[1] != D or not len(start):
        expected, remedy = f"shape (length, D) with D = {D}", "pass one series, or 'mean'"
        raise ValueError(checks.sentence("init", expected, start.shape, remedy))
    return start


def _cut(members, lengths):
    """Each member as long as it is."""
    if lengths is None:
        return list(members)
    each = lengths
    if not isinstance(lengths, numbers.Integral):
        each = arrays.on_host("lengths", lengths, OPERATOR)
    each = np.broadcast_to(each, len(members))
    checks.within("lengths", each.min(), each.max(), 1, members.shape[1])  # of one on a device
    return [x[:length] for x, length in zip(members, each, strict=True)]


def _stretched(x, length):
    """x (N, D) at `length` points from its first to its last, by lines between its points."""
    points = np.linspace(0, len(x) - 1, length)
    return np.stack([np.interp(points, np.arange(len(x)), feature) for feature in x.T], axis=1)
