"""Soft-DTW between a query and the subsequences of a series."""

from cuseq.host import soft_dtw_subsequence as host
from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw import borrow
from cuseq.ops.soft_dtw_engine import Grid, Memory, Numbers
from cuseq.ops.soft_dtw_plan import LAST_ROW, MATCHES, WARP
from cuseq.runtime import arrays
from cuseq.runtime.arrays import HOST
from cuseq.runtime.kernels import C_TYPES
from cuseq.runtime.replay import replayed

NAMES = "query", "series"
FILE, THREADS = "soft_dtw_subsequence.cu", 256


@replayed
def soft_dtw_subsequence(
    query, series, *, gamma=1.0, cost="sqeuclidean", lengths_query=None, lengths_series=None
):
    """Soft-DTW of a query with the subsequences of a series, at every position where one may end.

    ``value[e] = -gamma log sum_s exp(-s(query, series[s : e + 1]) / gamma)``, with s the soft-DTW
    value: the softmin over all starts, the minimum for gamma 0. It is one sweep over the table, in
    which paths begin in any column.

    Args:
        query, series: (N,) and (M,), (N, D) and (M, D), or batches (B, N, D) and (B, M, D) of
            pairs, of which a batch of 1 meets all of the other one; else as `soft_dtw`.
        gamma, cost: as `soft_dtw`.
        lengths_query, lengths_series: as the lengths of `soft_dtw`.

    Returns:
        Values of shape (B, M), or (M,) for a single pair, as `soft_dtw` returns them. They are
        infinite beyond the length of a series; a NaN or an infinity in a pair makes all of its
        values NaN.

    Raises: as `soft_dtw`.

    Source: M. Mueller, "Information Retrieval for Music and Motion", 2007, section 4.4, for the
    hard minimum.

    >>> import numpy as np, cuseq
    >>> series = np.array([9.0, 1.0, 2.0, 3.0, 9.0])
    >>> cuseq.soft_dtw_subsequence(np.array([1.0, 2.0, 3.0]), series, gamma=0.0)
    array([149., 5., 1., 0., 36.])
    """
    operator = "soft_dtw_subsequence"
    call = _borrow(operator, query, series, gamma, cost, lengths_query, lengths_series)
    values, _ = engine.forward(call, MATCHES)
    return arrays.give_back(values, query)


@replayed
def soft_dtw_subsequence_match(
    query, series, *, gamma=1.0, cost="sqeuclidean", lengths_query=None, lengths_series=None
):
    """The subsequence of a series that matches a query best, by soft-DTW.

    It ends where `soft_dtw_subsequence` is least, and begins where the soft-DTW value of the query
    with what ends there is least; of equal ones at the first end and the last start.

    Args: as `soft_dtw_subsequence`.

    Returns:
        values, match: the value at that end, of shape (B,), or () for a single pair; and match
        int64 of shape (B, 2), or (2,): start and stop, so that the subsequence is
        ``series[start:stop]``. Both are -1 where the value is NaN or infinite.

    Raises: as `soft_dtw`.

    >>> import numpy as np, cuseq
    >>> query, series = np.array([1.0, 2.0, 3.0]), np.array([9.0, 1.0, 2.0, 3.0, 9.0])
    >>> value, match = cuseq.soft_dtw_subsequence_match(query, series, gamma=0.0)
    >>> print(value, match)
    0.0 [1 4]
    """
    operator = "soft_dtw_subsequence_match"
    call = _borrow(operator, query, series, gamma, cost, lengths_query, lengths_series)
    problem, like = call.problem, call.like
    shape = call.values_shape[:-1]
    best, match = arrays.empty(shape, problem.real, like), arrays.empty((*shape, 2), "int64", like)
    if problem.device == HOST:
        host.match(call.pairs(), best.numpy().reshape(-1), match.numpy().reshape(-1, 2))
    elif problem.B:
        _match_on_device(call, best, match)
    return arrays.give_back(best, query), arrays.give_back(match, query)


def _match_on_device(call, best, match):
    """What ends where the value is least begins where, seen from there, the value is least."""
    problem, like = call.problem, call.like
    B, N, M, D = problem[:4]
    values = arrays.scratch((B, M), problem.real, like)
    engine.forward(call, MATCHES, values=values)
    lengths, stops = (arrays.scratch((B,), "int64", like) for _ in range(2))
    backwards = [arrays.scratch((B, length, D), problem.dtype, like) for length in (N, M)]
    pairs = Memory({"pairs": 48 * B, "spoilt": 4 * B}, like)
    macros = ("X_T", C_TYPES[problem.dtype]), ("REAL", C_TYPES[problem.real])
    with arrays.launching(*call.on_device) as launch:
        engine.prepare_pairs(launch, call, pairs["pairs"], pairs["spoilt"])
        args = B, M, pairs["pairs"], values.pointer, lengths.pointer, stops.pointer, best.pointer
        _on_warps(launch, "soft_dtw_best_end", macros, B, args)
        for x, length, until, backward in zip(
            (call.a, call.b), (N, M), (lengths, stops), backwards, strict=True
        ):
            args = B, length, D, *x.flat, x.shape[0], until.pointer, backward.pointer
            _on_warps(launch, "soft_dtw_reverse", macros, B * length, args)
    again = call._replace(
        problem=problem._replace(batch_a=B, batch_b=B),
        a=backwards[0],
        b=backwards[1],
        lengths_a=Numbers(0, lengths),
        lengths_b=Numbers(0, stops),
    )
    engine.forward(again, LAST_ROW, values=values)
    with arrays.launching(*call.on_device) as launch:
        args = B, M, values.pointer, stops.pointer, match.pointer
        _on_warps(launch, "soft_dtw_best_start", macros, B, args)


def _on_warps(launch, function, macros, count, args):
    """Launch a function of kernels/soft_dtw_subsequence.cu with a warp for each of so many."""
    if count:
        launch(FILE, function, macros, -(-count * WARP // THREADS), THREADS, args)


def _borrow(operator, query, series, gamma, cost, lengths_query, lengths_series):
    options = gamma, cost, None, lengths_query, lengths_series
    call = borrow(operator, query, series, *options, names=NAMES)
    M = call.problem.M
    return call._replace(grid=Grid(1, M), values_shape=(*call.values_shape, M))
