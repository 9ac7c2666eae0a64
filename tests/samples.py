"""Random arrays for the tests, of every dtype; it imports no framework."""

import ml_dtypes
import numpy as np

DTYPES = ["float64", "float32", "float16", "bfloat16"]


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def normal(*shape, seed=0, dtype="float64", scale=1.0, offset=0.0):
    """Random numbers, the same for the same arguments."""
    values = np.random.default_rng(seed).normal(offset, scale, size=shape)
    return values.astype(dtype_of(dtype))


# seq_idx, a kind of row each
ROWS = np.array(
    [
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # one sequence
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10],  # one element each
        [3, 3, 3, 3, 3, 0, 0, 0, 2, 2, 2],
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4],  # the last one shorter than any state
        [5, 5, 2, 5, 5, 5, 2, 2, 5, 2, 5],  # runs of one index that are apart
        [-1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1],  # padding in front
        [-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, -1, 0, 0, 0, -2, -3, 1, -1, 1],  # inside
        [0, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1],  # behind
        [2, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [-1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1],  # everywhere
        [-1, -1, -1, -1, -7, -1, -1, -1, -1, -1, -1],  # nothing but padding
        [2**31 - 1, 2**31 - 1, -(2**31), -(2**31), 7, 7, 7, -1, -1, 7, 7],
    ]
)
