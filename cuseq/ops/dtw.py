"""Dynamic time warping: the hard minimum, and one optimal path."""

from cuseq.host import dtw_path as host
from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw import borrow
from cuseq.ops.soft_dtw_plan import ALIGNMENT
from cuseq.runtime import arrays
from cuseq.runtime.arrays import HOST
from cuseq.runtime.kernels import C_TYPES
from cuseq.runtime.replay import replayed

FILE, THREADS = "dtw_path.cu", 128


@replayed
def dtw(a, b, *, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None):
    """DTW value of each pair of time series: the cost of the cheapest path.

    ``R[i,j] = C[i,j] + min(R[i-1,j-1], R[i-1,j], R[i,j-1])``: `soft_dtw` with gamma 0. With
    "sqeuclidean" no root is taken; it is the square of what some call DTW.

    Args: as `soft_dtw`.

    Returns: values as `soft_dtw` returns them.

    Raises: as `soft_dtw`.

    Source: H. Sakoe and S. Chiba, "Dynamic programming algorithm optimization for spoken word
    recognition", IEEE Transactions on Acoustics, Speech, and Signal Processing, 1978.

    >>> import numpy as np, cuseq
    >>> print(cuseq.dtw(np.array([1.0, 2.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])))
    1.0
    """
    call = borrow("dtw", a, b, 0.0, cost, bandwidth, lengths_a, lengths_b)
    values, _ = engine.forward(call)
    return arrays.give_back(values, a)


@replayed
def dtw_path(a, b, *, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None):
    """DTW values, and a cheapest path through each table.

    Of several cheapest paths it is the one that, from the last cell back, takes the diagonal
    predecessor before the one above, and that before the one on the left.

    Args: as `soft_dtw`. On a CUDA device it takes memory for a number a cell.

    Returns:
        values, path: path int32 of shape (B, N + M - 1, 2), or (N + M - 1, 2) for a single pair:
        the cells (i, j) from (0, 0) on, with -1 behind the last one; all of it is -1 where the
        value is NaN or infinite.

    Raises: as `soft_dtw`.

    >>> import numpy as np, cuseq
    >>> value, path = cuseq.dtw_path(np.array([1.0, 2.0, 3.0]), np.array([1.0, 3.0]))
    >>> path[path[:, 0] >= 0].tolist()
    [[0, 0], [1, 0], [2, 1]]
    """
    call = borrow("dtw_path", a, b, 0.0, cost, bandwidth, lengths_a, lengths_b)
    problem, like = call.problem, call.like
    B, N, M = problem.B, problem.N, problem.M
    values, kept = arrays.empty(call.values_shape, problem.real, like), None
    path = arrays.empty((*call.values_shape, N + M - 1, 2), "int32", like)
    if problem.device != HOST:
        _, kept = engine.forward(call, ALIGNMENT, values=values)
    E = arrays.scratch((B, N, M), problem.real, like)
    engine.backward(call, None, values, kept, ALIGNMENT, results=(E,))
    if problem.device == HOST:
        host.path(E.numpy(), path.numpy().reshape(B, N + M - 1, 2))
    elif B:
        with arrays.launching(like) as launch:
            macros = (("REAL", C_TYPES[problem.real]),)
            args = B, N, M, E.pointer, path.pointer
            launch(FILE, "dtw_path", macros, -(-B // THREADS), THREADS, args)
    return arrays.give_back(values, a), arrays.give_back(path, a)
