"""The soft-DTW divergence: soft-DTW less what series have with themselves."""

from numbers import Real
from typing import NamedTuple

import numpy as np

from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw import borrow
from cuseq.ops.soft_dtw_engine import Grid, Sums
from cuseq.ops.soft_dtw_plan import SERIES
from cuseq.runtime import arrays
from cuseq.runtime.arrays import HOST
from cuseq.runtime.replay import replayed


@replayed
def soft_dtw_divergence(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW divergence of each pair of time series: 0 for equal ones, as a distance is.

    ``d(a, b) = s(a, b) - (s(a, a) + s(b, b)) / 2`` with s the soft-DTW value. With "sqeuclidean"
    and gamma > 0 it is not below 0 (up to rounding) for series of all lengths that occur.

    Args: as `soft_dtw`. Where a batch of 1 meets another one, its value with itself is computed
        once, unless an option is given by sample.

    Returns:
        Values of shape (B,), or () for a single pair, as `soft_dtw` returns them. NaN where a value
        is infinite.

    Raises: as `soft_dtw`.

    Source: M. Blondel, A. Mensch and J.-P. Vert, "Differentiable divergences between time series",
    AISTATS 2021.

    >>> import numpy as np, cuseq
    >>> a, b = np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])
    >>> print(f"{cuseq.soft_dtw_divergence(a, b):.6f}", cuseq.soft_dtw_divergence(a, a))
    0.299329 0.0
    """
    operator = "soft_dtw_divergence"
    call = borrow(operator, a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    values, _ = engine.forward(call)
    own = []
    for itself in with_themselves(call):
        of_series, _ = engine.forward(itself, values=_own_values(itself))
        own.append(of_series)
    less_own(call, values, *own)
    return arrays.give_back(values, a)


@replayed
def soft_dtw_divergence_value_and_grad(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW divergences, and the gradients of their sum with respect to both batches of series.

    Args: as `soft_dtw_divergence`.

    Returns:
        values, (grad_a, grad_b): as `soft_dtw_value_and_grad` returns them. For equal series all
        are 0.

    Raises: as `soft_dtw`.

    >>> import numpy as np, cuseq
    >>> value, (grad_a, grad_b) = cuseq.soft_dtw_divergence_value_and_grad(
    ...     np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 4.0]))
    >>> np.round(grad_a, 4)
    array([ 0.07  ,  0.4475, -1.8625])
    """
    operator = "soft_dtw_divergence"
    call = borrow(operator, a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    compute = _gradients_on_host if call.problem.device == HOST else _gradients_on_device
    values, gradients = compute(call)
    return arrays.give_back(values, a), tuple(arrays.give_back(grad, a) for grad in gradients)


def composed(values, repeated, a, b, options, lengths_a, lengths_b):
    """For adapters: the divergence as three calls of ``values(a, b, lengths_a, lengths_b)``.

    A batch of 1 is compared with itself once, unless its lengths or `options` are by pair: then it
    goes in as ``repeated(series, B)``.
    """
    both, own = values(a, b, lengths_a, lengths_b), []
    for x, lengths in ((a, lengths_a), (b, lengths_b)):
        one_for_all = all(each is None or isinstance(each, Real) for each in (*options, lengths))
        if x.ndim == 3 and not one_for_all:
            x = repeated(x, both.shape[0])
        own.append(values(x, x, lengths, lengths))
    return both - (own[0] + own[1]) / 2


def with_themselves(call):
    """The calls of a with a and of b with b."""
    return _with_itself(call, call.a, call.lengths_a), _with_itself(call, call.b, call.lengths_b)


def _with_itself(call, x, lengths):
    """As many pairs as x has series, or one a pair of the call where options are by pair."""
    batch, N, _ = x.shape
    options = call.gamma, call.bandwidth, lengths
    by_pair = any(option and option.each and option.each.shape for option in options)
    B = call.problem.B if by_pair else batch
    one_band = call.bandwidth and call.bandwidth.each is None and not lengths
    problem = call.problem._replace(
        B=B,
        N=N,
        M=N,
        batch_a=batch,
        batch_b=batch,
        width=min(N, 2 * call.bandwidth.one) if one_band else N,
    )
    return call._replace(
        problem=problem,
        grid=Grid(B, B),
        values_shape=(B,),
        shapes=(x.shape, x.shape),
        a=x,
        b=x,
        lengths_a=lengths,
        lengths_b=lengths,
    )


def _own_values(itself):
    """Room for the values of series with themselves."""
    return arrays.scratch(itself.values_shape, itself.problem.real, itself.like)


def less_own(call, values, own_a, own_b):
    """From the value of each pair half of those of its series with themselves."""
    if values.device == HOST:
        flat = values.numpy().reshape(-1)
        with np.errstate(invalid="ignore"):
            flat -= (own_a.numpy() + own_b.numpy()) / 2
        return
    B = call.problem.B
    if B:
        with arrays.launching(call.like) as launch:
            grid = 1, own_a.size, 1, own_b.size
            args = B, *grid, own_a.pointer, own_b.pointer, values.pointer
            engine.run_on_each(launch, "soft_dtw_debias", call, B, args)


def _gradients_on_device(call):
    """(values, (grad_a, grad_b)).

    By symmetry half the gradient of s(a, a) is that by one of its arguments: of a as the first one
    and of b as the second, as in s(a, b), so that for equal series they cancel to the bit.
    """
    problem = call.problem
    results = [arrays.empty(shape, problem.dtype, call.like) for shape in call.shapes]
    sums = results
    if problem.dtype != problem.real:
        sums = [arrays.scratch(shape, problem.real, call.like) for shape in call.shapes]
    values, kept = engine.forward(call, SERIES)
    engine.backward(call, None, values, kept, SERIES, sums=(Sums(*sums),))
    own = []
    for side, itself in enumerate(with_themselves(call)):
        of_series = _own_values(itself)
        _, kept = engine.forward(itself, SERIES, values=of_series)
        one_sided = [sums[side] if k == side else None for k in (0, 1)]
        scale = -problem.B / max(itself.problem.B, 1)
        added = (Sums(*one_sided, adds=True, scale=scale),)
        engine.backward(itself, None, of_series, kept, SERIES, sums=added)
        own.append(of_series)
    less_own(call, values, *own)
    if sums is not results:
        narrow(call, sums, results)
    return values, results


def narrow(call, sums, results):
    """Sums in float32 into gradients of 16 bits."""
    with arrays.launching(call.like) as launch:
        for total, result in zip(sums, results, strict=True):
            if total.size:
                args = total.size, total.pointer, result.pointer
                engine.run_on_each(launch, "soft_dtw_narrow", call, total.size, args)


class _OnHost(NamedTuple):
    """Values, and gradients in float64."""

    values: object
    grad_a: np.ndarray
    grad_b: np.ndarray


def _on_host(call, values):
    gradients = [np.zeros(x.shape) for x in (call.a, call.b)]
    engine.host.backward(None, call.pairs(), values.numpy().reshape(-1), *gradients)
    return _OnHost(values, *gradients)


def _gradients_on_host(call):
    """As `_gradients_on_device`."""
    problem = call.problem
    both = _on_host(call, arrays.empty(call.values_shape, problem.real, call.like))
    of_a, of_b = (_on_host(itself, _own_values(itself)) for itself in with_themselves(call))
    less_own(call, both.values, of_a.values, of_b.values)
    results = []
    for shape, grad, own, own_grad in (
        (call.shapes[0], both.grad_a, of_a, of_a.grad_a),
        (call.shapes[1], both.grad_b, of_b, of_b.grad_b),
    ):
        result = arrays.empty(shape, problem.dtype, call.like)
        share = problem.B / max(own.values.size, 1)
        result.numpy()[...] = (grad - share * own_grad).reshape(shape)
        results.append(result)
    return both.values, results
