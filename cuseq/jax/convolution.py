"""JAX: the causal convolutions under jit, vmap and differentiation."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cuseq.jax.arguments import array, options
from cuseq.jax.batching import fold, one_by_one, operation, unfold
from cuseq.jax.callback import callback, described, result
from cuseq.ops import causal_conv1d as by_row
from cuseq.ops import causal_conv1d_update as step
from cuseq.ops import causal_conv1d_varlen as packed
from cuseq.ops import convolution_engine as engine
from cuseq.ops.convolution import borrow_outer
from cuseq.runtime.checks import sentence


class Call(NamedTuple):
    """What is known when a program is traced."""

    operator: str
    borrow: object  # how the core borrows its arrays
    plain: tuple  # arguments that are no arrays, as pairs, None for those that are not given
    with_state: bool = False


# ---- what XLA calls


def _run_forward(call, **given):
    engine.forward(_borrowed(call, given), call.with_state)


def _run_backward(call, grad_y, grad_final_state=None, **given):
    borrowed = _borrowed(call, given)
    engine.backward(borrowed, *borrow_outer(call.operator, borrowed, grad_y, grad_final_state, ""))


def _borrowed(call, given):
    return call.borrow(call.operator, **given, **dict(call.plain))


def _run_update(call, **given):
    step.update(step.borrow(**given, **dict(call.plain)))


# ---- operations on arrays by name, and their batching. Channels are independent of each other, so
# a mapped axis is more channels; or more rows, where all samples have one filter, and no gradients
# of it are wanted. Samples with sequences of their own and filters of their own go one by one.

INDICES = {"seq_idx", "cu_seqlens", "cache_seqlens", "state_indices"}
WITH_ROWS = {"x", "y", "initial_state", "final_state", "state", *INDICES}
DIFFERENTIABLE = "x", "weight", "bias", "initial_state"


def _forward(call, given):
    """(y,), or (y, final_state)."""
    returned = ("y", "final_state") if call.with_state else ("y",)

    def compute(given):
        results = {"y": _like(given["x"]), "final_state": _final_state(given)}
        return callback(
            _run_forward, [results[name] for name in returned], given, (("call", call),)
        )

    return _operation(call, compute, returned, "cu_seqlens" not in given)(given)


def _backward(call, given):
    """Gradients by those of DIFFERENTIABLE that are given."""
    returned = [name for name in DIFFERENTIABLE if name in given]

    def compute(given):
        results = [_like(given[name]) for name in returned]
        return callback(_run_backward, results, given, (("call", call),))

    return _operation(call, compute, returned, False)(given)


def _update(call, given):
    """(y, state), of which state is in the memory of the one given if that was donated."""

    def compute(given):
        results = [_like(given["x"]), _like(given["state"])]
        return callback(_run_update, results, given, (("call", call),), updated="state")

    return _operation(call, compute, ("y", "state"), True)(given)


def _like(x):
    return result(x.shape, x.dtype)


def _final_state(given):
    if "initial_state" in given:
        return _like(given["initial_state"])
    x, (D, W) = given["x"], given["weight"].shape
    count = given["cu_seqlens"].shape[0] - 1 if "cu_seqlens" in given else x.shape[0]
    return result((count, D, W - 1), x.dtype)


def _operation(call, compute, returned, rows):
    """`compute` as an operation whose results have the names `returned`.

    `rows` says whether a mapped axis may be more rows.
    """

    def batched(again, size, mapped, given):
        one_filter = not (mapped["weight"] or mapped.get("bias"))
        if rows and one_filter:
            axes = {name: 0 if name in WITH_ROWS else None for name in (*given, *returned)}
            if "state_indices" in given:
                given = {**given, "state_indices": _in_one_pool(size, mapped["state"], **given)}
                mapped = {**mapped, "state_indices": True}
        elif any(mapped[name] for name in INDICES & {*given}):
            return one_by_one(again, mapped, given)
        else:
            axes = {name: _axis_of_channels(call, name) for name in (*given, *returned)}
        results = again(fold(size, mapped, given, axes))
        return unfold(size, results, [axes[name] for name in returned])

    return operation(call.operator, compute, batched)


def _axis_of_channels(call, name):
    if name in INDICES:
        return None
    if name in ("weight", "bias"):
        return 0
    return 2 if name in ("x", "y", "grad_y") and ("layout", "bld") in call.plain else 1


def _in_one_pool(size, mapped, state, state_indices, **others):
    """Rows (size, B) of all samples' pools, one after the other, for rows of each one's own.

    What is no row of its own pool is none of them all.
    """
    P = state.shape[1 if mapped else 0]
    firsts = P * jnp.arange(size, dtype=state_indices.dtype)[:, None]
    rows = jnp.where(state_indices < P, state_indices + firsts, size * P)
    return jnp.where(state_indices < 0, -1, rows)


# ---- derivatives


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(call, given):
    return _forward(call, given)


def _keep(call, given):
    return _forward(call, given), given


def _gradients(call, given, outer):
    outer = dict(zip(("grad_y", "grad_final_state"), outer, strict=False))
    names = [name for name in DIFFERENTIABLE if name in given]
    gradients = dict(zip(names, _backward(call, given | outer), strict=True))
    return ({name: gradients.get(name) for name in given},)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _advance(call, given):
    return _update(call, given)


def _keep_step(call, given):
    for name in sorted(INDICES & {*given}):
        remedy = f"leave {name} out, or apply jax.lax.stop_gradient to the arguments"
        raise NotImplementedError(sentence(name, "None for a derivative", "indices", remedy))
    return _update(call, given), given


def _gradients_of_step(call, given, outer):
    """A step is a convolution of a short signal with the state before it."""
    plain = tuple((name, x) for name, x in call.plain if name not in INDICES)
    whole = Call("causal_conv1d", by_row.borrow, (*plain, ("seq_idx", None)), True)
    names = {"state": "initial_state"}
    (gradients,) = _gradients(whole, {names.get(name, name): x for name, x in given.items()}, outer)
    return ({name: gradients[names.get(name, name)] for name in given},)


_convolve.defvjp(_keep, _gradients)
_advance.defvjp(_keep_step, _gradients_of_step)


# ---- functions


def causal_conv1d(
    x, weight, bias=None, *, activation=None, layout="bdl", seq_idx=None, initial_state=None
):
    """Causal depthwise convolution, differentiable by x, weight, bias and initial_state.

    It runs in programs of jit, grad, value_and_grad, vmap (one call for all samples, as more rows
    or channels), scan, cond and checkpoint, on CUDA devices and the CPU; derivatives are of first
    order, in reverse mode. Arguments, values and errors as `cuseq.causal_conv1d`.

    >>> import jax, jax.numpy as jnp, cuseq.jax
    >>> x, weight = jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), jnp.array([[10.0, 1.0]])
    >>> print(jax.jit(cuseq.jax.causal_conv1d)(x, weight))
    [[[ 1. 12. 23. 34.]]]
    >>> print(jax.grad(lambda weight: cuseq.jax.causal_conv1d(x, weight).sum())(weight))
    [[ 6. 10.]]
    """
    call, given = _by_row(x, weight, bias, activation, layout, seq_idx, initial_state)
    (y,) = _convolve(call, given)
    return y


def causal_conv1d_with_state(
    x, weight, bias=None, *, activation=None, layout="bdl", seq_idx=None, initial_state=None
):
    """Causal depthwise convolution with the state to go on from: (y, final_state).

    It runs in programs as `causal_conv1d` does and is differentiable through final_state as well.
    Arguments, values and errors as `cuseq.causal_conv1d_with_state`.

    >>> import jax.numpy as jnp, cuseq.jax
    >>> x, weight = jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), jnp.array([[10.0, 1.0]])
    >>> y, state = cuseq.jax.causal_conv1d_with_state(x[..., :2], weight)
    >>> print(cuseq.jax.causal_conv1d(x[..., 2:], weight, initial_state=state))
    [[[23. 34.]]]
    """
    call, given = _by_row(x, weight, bias, activation, layout, seq_idx, initial_state)
    return _convolve(call._replace(with_state=True), given)


def causal_conv1d_varlen(x, weight, bias=None, *, cu_seqlens, activation=None, initial_state=None):
    """Causal depthwise convolution of packed sequences, differentiable as `causal_conv1d` is.

    It runs in programs as that does. Arguments, values and errors as `cuseq.causal_conv1d_varlen`;
    on the CPU a traced cu_seqlens is checked when the program runs.

    >>> import jax.numpy as jnp, cuseq.jax
    >>> x, weight = jnp.array([[1.0], [2.0], [3.0], [4.0]]), jnp.array([[10.0, 1.0]])
    >>> print(cuseq.jax.causal_conv1d_varlen(x, weight, cu_seqlens=[0, 3, 4])[:, 0])
    [ 1. 12. 23.  4.]
    """
    call, given = _packed(x, weight, bias, cu_seqlens, activation, initial_state)
    (y,) = _convolve(call, given)
    return y


def causal_conv1d_varlen_with_state(
    x, weight, bias=None, *, cu_seqlens, activation=None, initial_state=None
):
    """Causal depthwise convolution of packed sequences with their states: (y, final_state).

    It runs in programs as `causal_conv1d` does and is differentiable through final_state as well.
    Arguments, values and errors as `cuseq.causal_conv1d_varlen_with_state`.

    >>> import jax.numpy as jnp, cuseq.jax
    >>> x, weight = jnp.array([[1.0], [2.0], [3.0], [4.0]]), jnp.array([[10.0, 1.0]])
    >>> y, state = cuseq.jax.causal_conv1d_varlen_with_state(x, weight, cu_seqlens=[0, 3, 4])
    >>> print(state[:, 0, 0])
    [3. 4.]
    """
    call, given = _packed(x, weight, bias, cu_seqlens, activation, initial_state)
    return _convolve(call._replace(with_state=True), given)


def causal_conv1d_update(
    x,
    state,
    weight,
    bias=None,
    *,
    activation=None,
    layout="bdl",
    cache_seqlens=None,
    state_indices=None,
):
    """Convolve new inputs with the state of those before them: (y, new_state).

    The new state takes the memory of the state where a program donates that (``donate_argnums``) or
    a scan carries it; a state that is used again is copied. It runs in programs as `causal_conv1d`
    does and is differentiable by x, state, weight and bias, but not with cache_seqlens or
    state_indices in this release. Arguments, values and errors as `cuseq.causal_conv1d_update`.

    >>> import jax, jax.numpy as jnp, cuseq.jax
    >>> step = jax.jit(cuseq.jax.causal_conv1d_update, donate_argnums=1)
    >>> state, weight = jnp.zeros((1, 1, 1)), jnp.array([[10.0, 1.0]])
    >>> for value in 1.0, 2.0, 3.0:
    ...     y, state = step(jnp.array([[value]]), state, weight)
    >>> print(y, state)
    [[23.]] [[[3.]]]
    """
    given, plain = _arrays(x=x, state=state, weight=weight, bias=bias)
    plain |= {"activation": activation, "layout": layout}
    chosen = options(cache_seqlens=cache_seqlens, state_indices=state_indices)
    step.borrow(**_described(given), **plain, **chosen.checked)
    call = Call("causal_conv1d_update", None, (*plain.items(), *chosen.plain))
    given = _with_flat_filter(given) | chosen.arrays
    if given["x"].ndim == 2:
        given["x"] = jnp.expand_dims(given["x"], 1 if layout == "bld" else 2)
    y, new_state = _advance(call, given)
    return y.reshape(x.shape), new_state


def _by_row(x, weight, bias, activation, layout, seq_idx, initial_state):
    """The call and its arrays by name; everything wrong raises here."""
    given, plain = _arrays(x=x, weight=weight, bias=bias, initial_state=initial_state)
    plain |= {"activation": activation, "layout": layout}
    return _call("causal_conv1d", by_row.borrow, given, plain, options(seq_idx=seq_idx))


def _packed(x, weight, bias, cu_seqlens, activation, initial_state):
    """As `_by_row`, for packed sequences."""
    given, plain = _arrays(x=x, weight=weight, bias=bias, initial_state=initial_state)
    plain |= {"activation": activation}
    chosen = options(cu_seqlens=cu_seqlens)
    return _call("causal_conv1d_varlen", packed.borrow, given, plain, chosen)


def _call(operator, borrow, given, plain, chosen):
    borrow(operator, **_described(given), **plain, **chosen.checked)
    call = Call(operator, borrow, (*plain.items(), *chosen.plain))
    return call, _with_flat_filter(given) | chosen.arrays


def _arrays(**given):
    """Those that are given, which have to be arrays; and the others, by name."""
    arrays = {name: array(name, x) for name, x in given.items() if x is not None}
    return arrays, {name: None for name in given if name not in arrays}


def _described(given):
    return {name: described(x) for name, x in given.items()}


def _with_flat_filter(given):
    """weight (D, W) in place of (D, 1, W)."""
    weight = given["weight"]
    return {**given, "weight": weight.reshape(weight.shape[0], weight.shape[-1])}
