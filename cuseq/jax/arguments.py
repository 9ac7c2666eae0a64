"""JAX: what the functions of this package take, as the core checks it and as XLA takes it."""

from numbers import Number
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cuseq.jax.callback import described
from cuseq.runtime.checks import sentence


def array(name, x):
    """x, which has to be a JAX array, traced or not, or a NumPy array, which is brought to JAX."""
    if isinstance(x, np.ndarray):
        return _brought(name, x)
    if not isinstance(x, jax.Array):
        remedy = f"pass jax.numpy.asarray({name})"
        raise TypeError(sentence(name, "a JAX array", type(x).__name__, remedy))
    return x


class Options(NamedTuple):
    """Options by name: as the core checks them, and of these the arrays and the plain ones."""

    checked: dict
    arrays: dict
    plain: tuple  # pairs


def options(**given):
    """Options that may be a number, nothing, a sequence, or an array.

    A sequence or a NumPy array has its values checked while a function is traced.
    """
    given = {name: _whole(x) for name, x in given.items()}
    fixed = {name for name, x in given.items() if x is None or isinstance(x, (Number, str))}
    arrays = {
        name: x if isinstance(x, jax.Array) else _brought(name, np.asarray(x))
        for name, x in given.items()
        if name not in fixed
    }
    checked = {name: described(x) if isinstance(x, jax.Array) else x for name, x in given.items()}
    return Options(checked, arrays, tuple((name, given[name]) for name in given if name in fixed))


def _whole(x):
    """A sequence of traced numbers, as jit makes it of one of numbers, as an array."""
    traced = isinstance(x, (list, tuple)) and any(isinstance(n, jax.Array) for n in x)
    return jnp.stack(x) if traced else x


def _brought(name, x):
    """A NumPy array as a JAX array, of which JAX has 32 bits unless jax_enable_x64 is set."""
    brought = jnp.asarray(x)
    if x.size and x.dtype.kind in "iu" and brought.dtype != x.dtype:
        limits = np.iinfo(brought.dtype)
        for value in x.min(), x.max():
            if not limits.min <= value <= limits.max:
                remedy = "set jax_enable_x64, or correct this entry"
                raise ValueError(sentence(name, f"integers of {brought.dtype}", value, remedy))
    return brought
