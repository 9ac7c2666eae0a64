"""Soft-DTW: a differentiable alignment loss between time series."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cuseq.host import soft_dtw as host
from cuseq.runtime import arrays, checks, kernels
from cuseq.runtime.arrays import HOST, Array
from cuseq.runtime.kernels import C_TYPES

FILE = "soft_dtw.cu"
WARP = 32  # rows of a stripe
STEPS = 16  # columns a lane takes between two barriers
RESIDENT_WARPS = 16  # that keep one multiprocessor busy
ROUND_THREADS = 256
LONGEST = 2**30  # columns are counted in 32 bits


class Problem(NamedTuple):
    """A call in host numbers: B pairs of series of lengths N and M with D features."""

    B: int
    N: int
    M: int
    D: int
    dtype: str
    device: int

    @property
    def real(self):
        """The dtype that is computed in; the values have it."""
        return "float64" if self.dtype == "float64" else "float32"


class Plan(NamedTuple):
    """How kernels/soft_dtw.cu runs a problem."""

    macros: tuple
    grid: int
    block: int
    one_row: int  # bytes: a row of cells a pair, for a forward that keeps nothing
    kept_rows: int  # bytes
    kept_lanes: int  # bytes


def soft_dtw(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW value of each pair of time series.

    ``R[i,j] = C[i,j] + softmin(R[i-1,j-1], R[i-1,j], R[i,j-1])`` with
    ``softmin(r) = -gamma log sum exp(-r / gamma)`` and ``C[i,j] = |a[i] - b[j]|^2``; the value is
    the last R. It is below the DTW distance and approaches it as gamma goes to 0; it may be
    negative.

    Args:
        a: series of shape (N,), (N, D) or (B, N, D), float64, float32, float16 or bfloat16, from
            any library, in host memory or on a CUDA device.
        b: series of shape (M,), (M, D) or (B, M, D), of the same dtype and device. A batch of 1
            meets every series of the other batch.
        gamma: smoothing, a number above 0 in units of the cost.
        cost: "sqeuclidean", the squared Euclidean distance (not halved).
        bandwidth, lengths_a, lengths_b: not in this release; leave them None.

    Returns:
        Values of shape (B,), or () for a single pair, as the kind of array that `a` is: float64
        for float64 series, else float32. An empty batch gives an empty result. On a CUDA device
        a total cost beyond 6e8 gamma is out of range and gives inf.

    Raises:
        ValueError: for shapes that do not fit, an empty series, a gamma that is not above 0,
            arrays on different devices, or a tensor that autograd follows.
        TypeError: for dtypes that are not floating or differ, and for what is no array.
        NotImplementedError: for an option that this release does not have.

    Source: M. Cuturi and M. Blondel, "Soft-DTW: a differentiable loss function for time-series",
    ICML 2017.

    >>> import numpy as np, cuseq
    >>> a, b = np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])
    >>> print(f"{cuseq.soft_dtw(a, b, gamma=1.0):.6f}")
    -0.895444
    """
    gamma = check_options(gamma, cost, bandwidth, lengths_a, lengths_b)
    values, _ = _forward(_borrow("soft_dtw", a, b), gamma, keep=False)
    return arrays.give_back(values, a)


def soft_dtw_value_and_grad(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW values, and the gradients of their sum with respect to both batches of series.

    ``grad_a[i] = sum_j E[i,j] 2 (a[i] - b[j])`` where E, the derivative of the value by the cost,
    is the expected alignment; grad_b likewise.

    Args: as `soft_dtw`.

    Returns:
        values, (grad_a, grad_b): values as `soft_dtw` returns them; each gradient has the shape and
        dtype of its series. A series that met a whole batch has the sum over the batch.
        A sample whose value is NaN has gradients NaN, one whose value is infinite has 0.

    Raises: as `soft_dtw`.

    >>> import numpy as np, cuseq
    >>> value, (grad_a, grad_b) = cuseq.soft_dtw_value_and_grad(
    ...     np.array([1.0, 2.0, 3.0]), np.array([3.0, 4.0, -3.0]), gamma=1.0)
    >>> np.round(grad_a, 5)
    array([-4.00006, -2.28523, 10.16433])
    """
    gamma = check_options(gamma, cost, bandwidth, lengths_a, lengths_b)
    call = _borrow("soft_dtw", a, b)
    if call.problem.device == HOST:  # its backward finds the values on the way
        values, kept = arrays.empty(call.values_shape, call.problem.real, call.a), None
    else:
        values, kept = _forward(call, gamma, keep=True)
    gradients = _backward(call, gamma, None, values, kept)
    return arrays.give_back(values, a), tuple(arrays.give_back(grad, a) for grad in gradients)


def forward_keeping(a, b, *, gamma):
    """For adapters: values as `soft_dtw` returns them, and what `backward` wants of this forward.

    Kept are (rows, lanes), opaque arrays of the caller's kind: the last of every 32 rows, and each
    lane's state at every 16th column. On the host both are None.
    """
    call = _borrow("soft_dtw", a, b)
    values, kept = _forward(call, checks.gamma(gamma), keep=True)
    return arrays.give_back(values, a), tuple(x and arrays.give_back(x, a) for x in kept)


def backward(grad_values, a, b, values, kept, *, gamma):
    """For adapters: (grad_a, grad_b) of ``sum(grad_values * values)``.

    grad_values has the shape and dtype of the values; values and kept are what `forward_keeping`
    returned for the same series and gamma.
    """
    call = _borrow("soft_dtw", a, b)
    grad_values = arrays.borrow("grad_values", grad_values, "soft_dtw")
    checks.shape("grad_values", grad_values, call.values_shape, "(B,) or ()", "pass one a value")
    checks.same_dtype("grad_values", grad_values, "the values", call.problem.real)
    checks.same_device("grad_values", grad_values, "a", call.a)
    values = arrays.borrow("values", values, "soft_dtw")
    kept = tuple(x if x is None else arrays.borrow("kept", x, "soft_dtw") for x in kept)
    gradients = _backward(call, checks.gamma(gamma), grad_values, values, kept)
    return tuple(arrays.give_back(grad, a) for grad in gradients)


class Call(NamedTuple):
    """The borrowed series of a call, seen as (B, N, D) and (B, M, D), and its problem."""

    a: Array
    b: Array
    a_shape: tuple
    b_shape: tuple
    values_shape: tuple
    problem: Problem


def check_options(gamma, cost, bandwidth, lengths_a, lengths_b):
    """Refuse what is not in this release; returns gamma as a float."""
    checks.one_of("cost", cost, ("sqeuclidean", "euclidean", "cityblock", "cosine"))
    checks.not_yet("cost", cost, "sqeuclidean")
    checks.not_yet("bandwidth", bandwidth, None)
    checks.not_yet("lengths_a", lengths_a, None)
    checks.not_yet("lengths_b", lengths_b, None)
    return checks.gamma(gamma)


def _borrow(operator, a, b):
    a, b = arrays.borrow("a", a, operator), arrays.borrow("b", b, operator)
    checks.floating("a", a)
    checks.floating("b", b)
    checks.same_dtype("b", b, "a", a.dtype)
    checks.same_device("b", b, "a", a)
    a3, b3 = _batch_of_series("a", a), _batch_of_series("b", b)
    if a3.shape[2] != b3.shape[2]:
        raise ValueError(
            checks.sentence(
                "b",
                f"D = {a3.shape[2]} features as a has",
                f"D = {b3.shape[2]} in shape {b.shape}",
                "series have shape (N,), (N, D) or (B, N, D)",
            )
        )
    batches = a3.shape[0], b3.shape[0]
    if batches[0] != batches[1] and 1 not in batches:
        raise ValueError(
            checks.sentence(
                "b",
                f"a batch of {batches[0]} as a has, or of 1",
                f"a batch of {batches[1]}",
                "pair each series of a with one of b",
            )
        )
    B = batches[1] if batches[0] == 1 else batches[0]
    problem = Problem(B, a3.shape[1], b3.shape[1], a3.shape[2], a.dtype, a.device)
    single = len(a.shape) < 3 and len(b.shape) < 3
    return Call(a3, b3, a.shape, b.shape, () if single else (B,), problem)


def _batch_of_series(name, x):
    """(N,), (N, D) and (B, N, D) as (B, N, D)."""
    axes = {1: (None, 0, None), 2: (None, 0, 1), 3: (0, 1, 2)}.get(len(x.shape))
    if axes is None:
        raise ValueError(
            checks.sentence(
                name,
                "shape (N,), (N, D) or (B, N, D)",
                x.shape,
                "flatten what comes before the batch, or add an axis",
            )
        )
    x = x.seen_as(*axes)
    if not 0 < x.shape[1] <= LONGEST:
        raise ValueError(
            checks.sentence(
                name, f"a length of 1 to {LONGEST}", x.shape[1], "leave such series out"
            )
        )
    return x


@lru_cache(maxsize=1024)
def plan(problem, limits):
    """The plan of a problem on a device with these limits.

    Few pairs get several warps each, as many as a pair has stripes of rows; many pairs one each.
    """
    B, N, M, _, dtype, _ = problem
    stripes, chunks = -(-N // WARP), -(-(M + WARP - 1) // STEPS)
    warps_to_fill = limits.multiprocessors * RESIDENT_WARPS // max(B, 1)
    most = 8 if dtype == "float64" else 16  # float64 takes twice the registers
    warps = 1
    while 2 * warps <= min(warps_to_fill, most) and warps < stripes:
        warps *= 2
    cell = 16 if dtype == "float64" else 8  # bytes
    return Plan(
        macros=(
            ("X_T", C_TYPES[dtype]),
            ("REAL", C_TYPES[problem.real]),
            ("WARPS", warps),
            ("STEPS", STEPS),
        ),
        grid=B,
        block=WARP * warps,
        one_row=B * M * cell,
        kept_rows=B * (stripes - 1) * M * cell,
        kept_lanes=B * stripes * chunks * WARP * 2 * cell,
    )


def _forward(call, gamma, keep):
    """Values, and (rows, lanes) for a backward: (None, None) where nothing is kept."""
    problem, like = call.problem, call.a
    values = arrays.empty(call.values_shape, problem.real, like)
    if problem.device == HOST:
        host.forward(call.a.numpy(), call.b.numpy(), gamma, values.numpy().reshape(-1))
        return values, (None, None)
    how = plan(problem, kernels.device_limits(problem.device))
    rows = arrays.empty((how.kept_rows if keep else how.one_row,), "uint8", like)
    lanes = arrays.empty((how.kept_lanes,), "uint8", like) if keep else None
    if problem.B:
        args = (
            *_pairs(call, gamma),
            values.pointer,
            rows.pointer,
            lanes.pointer if keep else 0,
        )
        with arrays.launching(call.a, call.b) as launch:
            launch(FILE, "soft_dtw_forward", how.macros, how.grid, how.block, args)
    return values, (rows, lanes) if keep else (None, None)


def _backward(call, gamma, grad_values, values, kept):
    """(grad_a, grad_b); on the host, which keeps nothing, the values are written as well."""
    problem, like = call.problem, call.a
    grad_a = arrays.empty(call.a_shape, problem.dtype, like)
    grad_b = arrays.empty(call.b_shape, problem.dtype, like)
    if problem.device == HOST:
        host.backward(
            None if grad_values is None else grad_values.numpy().reshape(-1),
            call.a.numpy(),
            call.b.numpy(),
            gamma,
            values.numpy().reshape(-1),
            grad_a.numpy().reshape(call.a.shape),
            grad_b.numpy().reshape(call.b.shape),
        )
        return grad_a, grad_b
    how = plan(problem, kernels.device_limits(problem.device))
    sums_a, sums_b = _sums(problem, grad_a, call.a), _sums(problem, grad_b, call.b)
    with arrays.launching(call.a, call.b, grad_values) as launch:
        if problem.B:
            handed_up = arrays.empty((problem.B * problem.M,), problem.real, like)
            args = (
                0 if grad_values is None else grad_values.pointer,
                0 if grad_values is None or not grad_values.shape else grad_values.strides[0],
                values.pointer,
                *_pairs(call, gamma),
                *(x.pointer for x in (*kept, handed_up, sums_a, sums_b)),
            )
            launch(FILE, "soft_dtw_backward", how.macros, how.grid, how.block, args)
        for grad, sums, series in ((grad_a, sums_a, call.a), (grad_b, sums_b, call.b)):
            if sums is not grad and grad.size:
                size = series.shape[1] * series.shape[2]
                args = sums.pointer, problem.B, size, int(series.shape[0] == 1), grad.pointer
                blocks = -(-grad.size // ROUND_THREADS)
                launch(FILE, "soft_dtw_round_gradient", how.macros, blocks, ROUND_THREADS, args)
    return grad_a, grad_b


def _pairs(call, gamma):
    """Both series, their sizes and gamma, as both kernels take them."""
    problem = call.problem
    args = []
    for series in (call.a, call.b):
        pointer, batch, row, feature = series.flat
        args += [pointer, batch if series.shape[0] > 1 else 0, row, feature]
    return (*args, problem.N, problem.M, problem.D, np.float64(gamma))


def _sums(problem, grad, series):
    """Where a gradient is added up: in place, unless it is to be rounded or summed over a batch."""
    if problem.dtype == problem.real and series.shape[0] == problem.B:
        return grad
    return arrays.empty((problem.B, *series.shape[1:]), problem.real, grad)
