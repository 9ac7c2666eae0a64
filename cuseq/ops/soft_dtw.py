"""Soft-DTW: a differentiable alignment loss between time series."""

import math
import numbers

from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw_engine import Call, Grid, Numbers
from cuseq.ops.soft_dtw_plan import ALIGNMENT, ENTROPY, GIVEN, SERIES, Problem
from cuseq.runtime import arrays, checks
from cuseq.runtime.replay import replayed

COSTS = ("sqeuclidean", "euclidean", "cityblock", "cosine")
LONGEST = 2**30  # rows and columns are counted in 32 bits


@replayed
def soft_dtw(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW value of each pair of time series.

    ``R[i,j] = C[i,j] + softmin(R[i-1,j-1], R[i-1,j], R[i,j-1])`` with
    ``softmin(r) = -gamma log sum exp(-r / gamma)`` and C[i,j] the cost of a[i] and b[j]; the value
    is the last R. It is below the DTW distance and approaches it as gamma goes to 0; it may be
    negative.

    Args:
        a: series of shape (N,), (N, D) or (B, N, D), float64, float32, float16 or bfloat16, from
            any library, in host memory or on a CUDA device.
        b: series of shape (M,), (M, D) or (B, M, D), of the same dtype and device. A batch of 1
            meets every series of the other batch.
        gamma: smoothing in units of the cost, a number or one a sample (B,); 0 is DTW, the hard
            minimum.
        cost: "sqeuclidean" (the squared Euclidean distance, not halved), "euclidean", "cityblock"
            or "cosine", as SciPy means them. "euclidean" and "cityblock" have slope 0 where points
            coincide. The cosine distance of a zero vector is NaN.
        bandwidth: radius of the Sakoe-Chiba band in steps, an integer or one a sample (B,): cell
            (i, j) is inside when |i - j| <= bandwidth; for series of different lengths the band is
            wider by the difference of their lengths, toward the longer side. Only blocks of cells
            inside are visited. None is no band.
        lengths_a, lengths_b: how long each series of a and b is, integers (B,); what lies beyond
            does not matter. None is N and M.

    Gamma, bandwidth and lengths may be Python sequences or arrays of any library. On a CUDA device
    they are not read by the host: a sample whose entry is out of range has value NaN.

    Returns:
        Values of shape (B,), or () for a single pair, as the kind of array that `a` is: float64
        for float64 series, else float32. An empty batch gives an empty result. NaN within a series
        gives NaN for its sample alone; an infinite entry, and a total cost that overflows or
        exceeds 1e27 gamma (1e279 in float64), gives inf.

    Raises:
        ValueError: for shapes that do not fit, an empty series, a gamma, bandwidth or length out of
            range, arrays on different devices, or a tensor that autograd follows.
        TypeError: for dtypes that are not floating or differ, and for what is no array.

    Source: M. Cuturi and M. Blondel, "Soft-DTW: a differentiable loss function for time-series",
    ICML 2017.

    >>> import numpy as np, cuseq
    >>> a, b = np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    >>> print(f"{cuseq.soft_dtw(a, b, gamma=1.0):.6f}")
    -0.895444
    >>> print(cuseq.soft_dtw(a, b, gamma=0.0))
    1.0
    """
    call = borrow("soft_dtw", a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    values, _ = engine.forward(call)
    return arrays.give_back(values, a)


@replayed
def soft_dtw_value_and_grad(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW values, and the gradients of their sum with respect to both batches of series.

    ``grad_a[i] = sum_j E[i,j] dC[i,j]/da[i]`` where E, the derivative of the value by the cost,
    is the expected alignment; grad_b likewise.

    Args: as `soft_dtw`.

    Returns:
        values, (grad_a, grad_b): values as `soft_dtw` returns them; each gradient has the shape and
        dtype of its series. A series that met a whole batch has the sum over the batch.
        A sample whose value is NaN has gradients NaN, one whose value is infinite has 0, and so has
        what lies beyond a length.

    Raises: as `soft_dtw`.

    >>> import numpy as np, cuseq
    >>> value, (grad_a, grad_b) = cuseq.soft_dtw_value_and_grad(
    ...     np.array([1.0, 2.0, 3.0]), np.array([3.0, 4.0, -3.0]), gamma=1.0)
    >>> np.round(grad_a, 5)
    array([-4.00006, -2.28523, 10.16433])
    """
    call = borrow("soft_dtw", a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    values, gradients = engine.value_and_gradients(call, SERIES)
    return arrays.give_back(values, a), tuple(arrays.give_back(grad, a) for grad in gradients)


@replayed
def soft_dtw_alignment(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Expected alignment of each pair of time series: E[i,j] = d value / d C[i,j].

    E[i,j] is the share of all paths, each weighted by exp(-cost / gamma), that crosses cell (i, j):
    between 0 and 1, and 1 in the first and the last cell. With gamma 0 it is 1 along one cheapest
    path (of equal predecessors the diagonal one, then the one above) and 0 elsewhere.

    Args: as `soft_dtw`.

    Returns:
        E of shape (B, N, M), or (N, M) for a single pair, in the dtype of the values. It is exactly
        0 outside of the band and beyond the lengths, and for a sample whose value is infinite.

    Raises: as `soft_dtw`.

    >>> import numpy as np, cuseq
    >>> cuseq.soft_dtw_alignment(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0]), gamma=0.0)
    array([[1., 0.],
           [0., 1.],
           [0., 1.]])
    """
    call = borrow("soft_dtw", a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    _, (E,) = engine.value_and_gradients(call, ALIGNMENT, drops_values=True)
    return arrays.give_back(E, a)


@replayed
def soft_dtw_value_and_grad_gamma(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW values, and the derivative of each by its gamma.

    ``d value / d gamma = (value - <E, C>) / gamma``, which is minus the entropy of the alignment;
    it is added up from the entropies of the cells' weights, so that nothing cancels. 0 at gamma 0.

    Args: as `soft_dtw`.

    Returns:
        values, grad_gamma: both of shape (B,), or () for a single pair, whatever gamma's shape.

    Raises: as `soft_dtw`.

    >>> import numpy as np, cuseq
    >>> value, slope = cuseq.soft_dtw_value_and_grad_gamma(np.zeros(2), np.zeros(2), gamma=0.5)
    >>> print(f"{slope:.6f}")  # three paths, all alike: -log 3
    -1.098612
    """
    call = borrow("soft_dtw", a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    values, (grad_gamma,) = engine.value_and_gradients(call, ENTROPY)
    return arrays.give_back(values, a), arrays.give_back(grad_gamma, a)


def forward_keeping(a, b, **options):
    """For adapters: values as `soft_dtw` returns them, and what `backward` wants of this forward.

    That is an opaque array of the caller's kind, None on the host. `options` are all of soft_dtw's.
    """
    values, kept = engine.forward(borrow("soft_dtw", a, b, **options), SERIES)
    return arrays.give_back(values, a), kept and arrays.give_back(kept, a)


def kept_size(a, b, **options):
    """For adapters: bytes of what `forward_keeping` keeps on a CUDA device."""
    return engine.kept_size(borrow("soft_dtw", a, b, **options), SERIES)


def backward(grad_values, a, b, values, kept, **options):
    """For adapters: (grad_a, grad_b) of ``sum(grad_values * values)``.

    grad_values has the shape and dtype of the values; values and kept are what `forward_keeping`
    returned for the same series and options.
    """
    call = borrow("soft_dtw", a, b, **options)
    given = borrow_for_backward("soft_dtw", call, "a", grad_values, values, kept)
    gradients = engine.backward(call, *given, SERIES)
    return tuple(arrays.give_back(grad, a) for grad in gradients)


# ---- borrowing


def borrow(operator, a, b, gamma, cost, bandwidth, lengths_a, lengths_b, names=("a", "b")):
    """The call of a public function on series; everything wrong raises here."""
    a, b = (arrays.borrow(name, x, operator) for name, x in zip(names, (a, b), strict=True))
    axes = {1: (None, 0, None), 2: (None, 0, 1), 3: (0, 1, 2)}
    a3, b3 = as_series(a, b, cost, axes, "(N,), (N, D) or (B, N, D)", names)
    batches = a3.shape[0], b3.shape[0]
    if batches[0] != batches[1] and 1 not in batches:
        raise ValueError(
            checks.sentence(
                names[1],
                f"a batch of {batches[0]} as {names[0]} has, or of 1",
                f"a batch of {batches[1]}",
                f"pair each series of {names[0]} with one of {names[1]}",
            )
        )
    B = batches[1] if batches[0] == 1 else batches[0]
    sizes = B, a3.shape[1], b3.shape[1], a3.shape[2], *batches
    single = len(a.shape) < 3 and len(b.shape) < 3
    options = gamma, bandwidth, lengths_a, lengths_b
    call = _call(operator, sizes, a, cost, options, names)
    return call._replace(values_shape=() if single else (B,), shapes=(a.shape, b.shape), a=a3, b=b3)


def borrow_cost(operator, C, gamma, bandwidth, lengths_a, lengths_b):
    """The call of a public function on a cost matrix; everything wrong raises here."""
    C = arrays.borrow("C", C, operator)
    checks.floating("C", C)
    if len(C.shape) not in (2, 3):
        raise ValueError(
            checks.sentence("C", "shape (N, M) or (B, N, M)", C.shape, "add or flatten axes")
        )
    C3 = C if len(C.shape) == 3 else C.seen_as(None, 0, 1)
    for axis in 1, 2:
        _check_length("C", C3.shape[axis])
    B, N, M = C3.shape
    call = _call(operator, (B, N, M, 0, B, B), C, GIVEN, (gamma, bandwidth, lengths_a, lengths_b))
    return call._replace(values_shape=C.shape[:-2], shapes=(C.shape,), C=C3)


def borrow_for_backward(operator, call, first_name, grad_values, values, kept):
    """What a backward takes besides its call, checked; `first_name` is that of the first array."""
    grad_values = arrays.borrow("grad_values", grad_values, operator)
    checks.shape("grad_values", grad_values, call.values_shape, "(B,) or ()", "pass one a value")
    checks.same_dtype("grad_values", grad_values, "the values", call.problem.real)
    checks.same_device("grad_values", grad_values, first_name, call.like)
    values = arrays.borrow("values", values, operator)
    return grad_values, values, None if kept is None else arrays.borrow("kept", kept, operator)


def _call(operator, sizes, first, cost, options, names=("a", "b")):
    """A call without its arrays: the problem and the options, checked."""
    B, N, M = sizes[:3]
    gamma, bandwidth, lengths_a, lengths_b = options
    gamma, hard = gamma_option(gamma, B, first, operator)
    of_a, of_b = (f"lengths_{name}" for name in names)
    lengths_a = integer_option(of_a, lengths_a, B, (1, N), first, operator)
    lengths_b = integer_option(of_b, lengths_b, B, (1, M), first, operator)
    bandwidth = integer_option("bandwidth", bandwidth, B, (0, math.inf), first, operator)
    width = M
    if bandwidth and bandwidth.each is None:
        bandwidth = Numbers(min(bandwidth.one, LONGEST))
        if not (lengths_a or lengths_b):
            width = min(M, 2 * bandwidth.one + abs(N - M))
    problem = Problem(*sizes, first.dtype, cost, hard, width, first.device)
    grid = Grid(B, B)
    return Call(problem, grid, (B,), (), None, None, None, gamma, bandwidth, lengths_a, lengths_b)


def as_series(a, b, cost, axes, letters, names=("a", "b")):
    """Borrowed a and b, checked, seen as (batch, length, features).

    `axes` are those of arrays of so many axes, `letters` their names in an error sentence.
    """
    of_a, of_b = names
    checks.floating(of_a, a)
    checks.floating(of_b, b)
    checks.same_dtype(of_b, b, of_a, a.dtype)
    checks.same_device(of_b, b, of_a, a)
    checks.one_of("cost", cost, COSTS)
    seen = []
    for name, x in zip(names, (a, b), strict=True):
        if len(x.shape) not in axes:
            remedy = "flatten what comes before the batch, or add an axis"
            raise ValueError(checks.sentence(name, f"shape {letters}", x.shape, remedy))
        seen.append(x.seen_as(*axes[len(x.shape)]))
        _check_length(name, seen[-1].shape[1])
    D, other = (x.shape[2] for x in seen)
    if D != other:
        raise ValueError(
            checks.sentence(
                of_b,
                f"D = {D} features as {of_a} has",
                f"D = {other} in shape {b.shape}",
                f"series have shape {letters}",
            )
        )
    return seen


def _check_length(name, length):
    if not 0 < length <= LONGEST:
        raise ValueError(
            checks.sentence(name, f"a length of 1 to {LONGEST}", length, "leave such series out")
        )


def check_one_for_all(name, option, operator):
    """Refuse an option by sample where there is one for all pairs."""
    shape = ()
    if isinstance(option, (list, tuple, range)):
        shape = (len(option),)
    elif not (option is None or isinstance(option, numbers.Number)):
        shape = arrays.borrow(name, option, operator).shape
    if shape != ():
        got, remedy = f"shape {shape}", "call once for each"
        raise ValueError(checks.sentence(name, "one number for all pairs", got, remedy))


def gamma_option(gamma, B, first, operator):
    """Numbers, and whether some may be 0."""
    if isinstance(gamma, numbers.Real) and not isinstance(gamma, bool):
        one = checks.gamma(gamma)
        return Numbers(one), one == 0
    each, on_host = arrays.real_array("gamma", gamma, first, operator)
    checks.per_sample("gamma", each, B)
    if on_host is None:
        return Numbers(0.0, each), True
    for value in (on_host.min(), on_host.max()) if on_host.size else ():  # NaN is both
        checks.gamma(value)
    return Numbers(0.0, each), bool((on_host == 0).any())


def integer_option(name, value, B, limits, first, operator):
    """An integer option as Numbers, or None."""
    if value is None:
        return None
    least, most = limits
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        checks.within(name, value, value, least, most)
        return Numbers(int(value))
    each, on_host = arrays.index_array(name, value, first, operator)
    checks.per_sample(name, each, B)
    if on_host is not None and on_host.size:
        checks.within(name, on_host.min(), on_host.max(), least, most)
    return Numbers(0, each)
