"""JAX: the soft-DTW family under jit, vmap and differentiation.

The derivative of a value is a linear function of gradients that the core computes together with it,
so that one rule serves reverse and forward mode.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from cuseq.jax.arguments import array, options
from cuseq.jax.batching import fold, operation, unfold
from cuseq.jax.callback import callback, described, result
from cuseq.ops import soft_dtw as of_series
from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw_divergence import composed
from cuseq.ops.soft_dtw_plan import ALIGNMENT, ENTROPY, SERIES, VALUES


class Call(NamedTuple):
    """What is known when a program is traced."""

    operator: str
    borrow: object  # how the core borrows its arrays
    output: int  # of the engine: the gradients by its series or costs
    plain: tuple  # options that are no arrays, as pairs


# ---- operations on series (B, N, D) and (B, M, D), or costs (B, N, M), and on options that are
# arrays, of one a sample or one for all, by name


def _run(call, output, **given):
    """What XLA calls."""
    borrowed = call.borrow(call.operator, **given, **dict(call.plain))
    if output == VALUES:
        engine.forward(borrowed)
    else:
        engine.value_and_gradients(borrowed, output)


def _results(output, given):
    """What the engine allocates, in its order."""
    differentiable = [given[name] for name in ("a", "b", "C") if name in given]
    first = differentiable[0]
    N, M = first.shape[1:] if "C" in given else (x.shape[1] for x in differentiable)
    B = first.shape[0]
    shapes = {
        VALUES: [],
        SERIES: [x.shape for x in differentiable],
        ALIGNMENT: [(B, N, M)],
        ENTROPY: [(B,)],
    }
    return [result(shape, first.dtype) for shape in [(B,), *shapes[output]]]


def _compute(call, output, given):
    """Values, and what the engine has for the output."""

    def compute(given):
        results = _results(output, given)
        return callback(_run, results, given, (("call", call), ("output", output)))

    def batched(again, size, mapped, given):
        given = dict(given)
        B = max(x.shape[mapped[name]] for name, x in given.items() if x.ndim > mapped[name])
        for name, x in given.items():
            if mapped[name] and x.ndim == 1:  # one for all of a mapped sample
                given[name] = jnp.repeat(x[:, None], B, axis=1)
        axes = {name: 0 if x.ndim else None for name, x in given.items()}
        results = again(fold(size, mapped, given, axes))
        return unfold(size, results, [0] * len(results))

    return operation(call.operator, compute, batched)(given)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values(call, given):
    return _compute(call, VALUES, given)[0]


@partial(_values.defjvp, symbolic_zeros=True)
def _derivative(call, primals, tangents):
    (given,), (steps,) = primals, tangents
    moving = [
        name
        for name in ("a", "b", "C", "gamma")
        if name in steps and not isinstance(steps[name], SymbolicZero)
    ]
    values, gradients = None, {}
    if moving[:1] != ["gamma"]:
        values, *found = _compute(call, call.output, given)
        gradients = dict(zip(("C",) if "C" in given else ("a", "b"), found, strict=True))
    if moving[-1:] == ["gamma"]:
        values, gradients["gamma"] = _compute(call, ENTROPY, given)
    step = jnp.zeros_like(values)
    for name in moving:
        moved = gradients[name] * steps[name].astype(values.dtype)
        step += moved.sum(tuple(range(1, moved.ndim)))
    return values, step


# ---- functions


def soft_dtw(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW value of each pair of time series, differentiable by a, b and gamma.

    It runs in programs of jit, grad, value_and_grad, jvp, vmap (one call for all samples), scan,
    cond and checkpoint, on CUDA devices and the CPU; derivatives are of first order. Arguments,
    values and errors as `cuseq.soft_dtw`. Options that are numbers are fixed when a program is
    traced, arrays may be traced; on the CPU the values of traced ones are checked when it runs. A
    batch of 1 that meets another batch is repeated.

    >>> import jax, jax.numpy as jnp, cuseq.jax
    >>> a, b = jnp.array([1.0, 2.0, 3.0]), jnp.array([3.0, 4.0, -3.0])
    >>> value, grad = jax.jit(jax.value_and_grad(cuseq.jax.soft_dtw))(a, b)
    >>> print(f"{value:.4f}", jnp.round(grad))
    41.1876 [-4. -2. 10.]
    """
    call, given, shape = _of_series(a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    return _values(call, given).reshape(shape)


def soft_dtw_alignment(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Expected alignment of each pair of time series: E[i,j] = d value / d C[i,j].

    It runs in programs as `soft_dtw` does, without a derivative. Arguments, values and errors as
    `cuseq.soft_dtw_alignment`.

    >>> import jax, jax.numpy as jnp, cuseq.jax
    >>> a, b = jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 3.0])
    >>> print(cuseq.jax.soft_dtw_alignment(a, b, gamma=0.0))
    [[1. 0.]
     [0. 1.]
     [0. 1.]]
    """
    call, given, shape = _of_series(a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    _, E = _compute(call._replace(operator="soft_dtw_alignment"), ALIGNMENT, given)
    return E.reshape(*shape, *E.shape[1:])


def soft_dtw_divergence(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW divergence of each pair of time series, differentiable by a, b and gamma.

    It runs in programs as `soft_dtw` does, of which it is three calls. Arguments, values and errors
    as `cuseq.soft_dtw_divergence`.

    >>> import jax, jax.numpy as jnp, cuseq.jax
    >>> a, b = jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 2.0, 4.0])
    >>> print(jnp.round(jax.grad(cuseq.jax.soft_dtw_divergence)(a, b), 2))
    [ 0.07  0.45 -1.86]
    """

    def values(a, b, lengths_a, lengths_b):
        lengths = {"lengths_a": lengths_a, "lengths_b": lengths_b}
        return soft_dtw(a, b, gamma=gamma, cost=cost, bandwidth=bandwidth, **lengths)

    return composed(values, _repeated, a, b, (gamma, bandwidth), lengths_a, lengths_b)


def _repeated(x, B):
    return jnp.broadcast_to(x, (B, *x.shape[1:]))


def soft_dtw_from_cost(C, *, gamma=1.0, bandwidth=None, lengths_a=None, lengths_b=None):
    """Soft-DTW value of each cost matrix, differentiable by C and gamma.

    It runs in programs as `soft_dtw` does. Arguments, values and errors as
    `cuseq.soft_dtw_from_cost`.

    >>> import jax, jax.numpy as jnp, cuseq.jax
    >>> print(jnp.round(jax.grad(cuseq.jax.soft_dtw_from_cost)(jnp.zeros((2, 2))), 4))
    [[1.     0.3333]
     [0.3333 1.    ]]
    """
    C = array("C", C)
    chosen = options(gamma=gamma, bandwidth=bandwidth, lengths_a=lengths_a, lengths_b=lengths_b)
    checked = of_series.borrow_cost("soft_dtw_from_cost", described(C), **chosen.checked)
    call = Call("soft_dtw_from_cost", of_series.borrow_cost, ALIGNMENT, chosen.plain)
    C = C.reshape(-1, *C.shape[-2:]).astype(checked.problem.real)
    return _values(call, {"C": C, **chosen.arrays}).reshape(checked.values_shape)


def _of_series(a, b, gamma, cost, bandwidth, lengths_a, lengths_b):
    """The call, its arrays by name, and the shape of its values; everything wrong raises here."""
    a, b = array("a", a), array("b", b)
    chosen = options(gamma=gamma, bandwidth=bandwidth, lengths_a=lengths_a, lengths_b=lengths_b)
    checked = of_series.borrow("soft_dtw", described(a), described(b), cost=cost, **chosen.checked)
    call = Call("soft_dtw", of_series.borrow, SERIES, (("cost", cost), *chosen.plain))
    B, N, M, D = checked.problem[:4]
    a, b = (
        jnp.broadcast_to(x.reshape(-1, length, D), (B, length, D)).astype(checked.problem.real)
        for x, length in ((a, N), (b, M))
    )
    return call, {"a": a, "b": b, **chosen.arrays}, checked.values_shape
