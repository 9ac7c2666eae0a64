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
