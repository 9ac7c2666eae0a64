"""The subsequence of a series that matches a query best, in NumPy."""

import numpy as np

from cuseq.host import soft_dtw


def match(pairs, best, match):
    """Write the least value of each pair to best (B,), and start and stop to match (B, 2).

    Both sequences backwards, from the end of the least value on, give the value of each start.
    """
    B, (N, M, _) = len(pairs.gamma), pairs.sizes
    values = np.empty((B, M), best.dtype)
    soft_dtw.ends(pairs, True, values)
    found = np.isfinite(values.min(axis=1, initial=np.inf))
    stops = np.where(found, values.argmin(axis=1) if M else 0, 0) + 1
    best[...] = values[np.arange(B), stops - 1]
    lengths = np.full(B, N) if pairs.lengths_a is None else pairs.lengths_a
    backwards = pairs._replace(
        a=_reversed(pairs.a, lengths),
        b=_reversed(pairs.b, stops),
        lengths_a=lengths,
        lengths_b=stops,
    )
    soft_dtw.ends(backwards, False, values)
    match[:, 0] = stops - 1 - values.argmin(axis=1)
    match[:, 1] = stops
    match[~found] = -1


def _reversed(series, lengths):
    """Of each series (B or 1, N, D) its first points, backwards, and zeros behind them."""
    backwards = np.zeros((len(lengths), *series.shape[1:]), series.dtype)
    for k, length in enumerate(lengths):
        backwards[k, :length] = series[k % len(series), :length][::-1]
    return backwards
