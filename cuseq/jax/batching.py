"""JAX: rules for vmap, by which a mapped axis is more samples or more channels of one call."""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from cuseq.runtime.checks import sentence


def operation(name, compute, batched):
    """A function from JAX arrays by name to a tuple of results, as JAX's transformations take it.

    `batched(again, size, mapped, given)` computes it where those arrays of which `mapped` says so
    have one more axis in front, of that size, and returns results that all have it; `again` is this
    operation, to be called with it folded into another axis. To differentiate raises: derivatives
    are on top of this.
    """

    @custom_vmap
    def mapped(given):
        return compute(given)

    @mapped.def_vmap
    def rule(size, which, given):
        if size:
            results = batched(mapped, size, which[0], given)
        else:
            one = {name: _one(x) if which[0][name] else x for name, x in given.items()}
            shapes = jax.eval_shape(mapped, one)
            results = tuple(jnp.empty((0, *x.shape), x.dtype) for x in shapes)
        return results, (True,) * len(results)

    @jax.custom_jvp
    def once(given):
        return mapped(given)

    @once.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            sentence(
                name,
                "a first derivative in this release",
                "a second one",
                "differentiate once, or apply jax.lax.stop_gradient to the first derivative",
            )
        )

    return once


def _one(x):
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def fold(size, mapped, given, axes):
    """Arrays with the mapped axis made part of another one, which `axes` says by name.

    What is not mapped is repeated; an axis of None leaves an array, which is not mapped, as it is.
    """
    folded = {}
    for name, x in given.items():
        axis = axes[name]
        if axis is None:
            folded[name] = x
            continue
        if not mapped[name]:
            x = jnp.broadcast_to(x, (size, *x.shape))
        x = jnp.moveaxis(x, 0, axis)
        whole = size * x.shape[axis + 1]
        folded[name] = x.reshape(*x.shape[:axis], whole, *x.shape[axis + 2 :])
    return folded


def unfold(size, results, axes):
    """Results of folded arrays with the mapped axis in front."""
    unfolded = []
    for x, axis in zip(results, axes, strict=True):
        parts = size, x.shape[axis] // size
        x = x.reshape(*x.shape[:axis], *parts, *x.shape[axis + 1 :])
        unfolded.append(jnp.moveaxis(x, axis, 0))
    return tuple(unfolded)


def one_by_one(operation, mapped, given):
    """Results of one sample after the other."""
    each = {name: x for name, x in given.items() if mapped[name]}
    return jax.lax.map(lambda sample: operation({**given, **sample}), each)
