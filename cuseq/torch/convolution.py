"""PyTorch: the causal convolutions, as torch ops, with autograd."""

from functools import partial
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from cuseq.ops import causal_conv1d as convolution
from cuseq.ops import causal_conv1d_update as step
from cuseq.ops import causal_conv1d_varlen as packed
from cuseq.ops.convolution import check_options
from cuseq.runtime import checks
from cuseq.torch.library import (
    autocast_dtype,
    cast,
    define,
    indices,
    last_derivative,
    needs_grad,
    no_forward_mode,
    one_by_one,
    tensor,
    through,
)
from cuseq.torch.shortcut import alone, apply

# ---- torch ops: forward alone, with the final state, backward; by row and packed


def _by_row(function, *args):
    """A function of the core, with what torch ops have: tensors, an index, options."""
    *tensors, seq_idx, activation, layout = args
    options = {"seq_idx": seq_idx, "activation": activation, "layout": layout}
    return function(*tensors, options)


def _packed(function, *args):
    *tensors, cu_seqlens, activation = args
    return function(*tensors, {"cu_seqlens": cu_seqlens, "activation": activation})


def _forward(core, x, weight, bias, initial_state, options):
    return core(x, weight, bias, initial_state=initial_state, **options)


def _backward(core, grad_y, grad_final_state, x, weight, bias, initial_state, options):
    states = {"initial_state": initial_state, "grad_final_state": grad_final_state}
    return tuple(core(grad_y, x, weight, bias, **states, **options))


def _like_x(x, layout="packed"):
    """Room for what lies in memory as x does, if it is not packed."""
    if layout == "packed" or not (min(x.shape[1:]) > 1 and 0 < x.stride(1) < x.stride(2)):
        return x.new_empty(x.shape)
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)


def _state(x, weight, initial_state, index, layout="packed"):
    """Room for final states."""
    if initial_state is not None:
        return initial_state.new_empty(initial_state.shape)
    count = index.shape[0] - 1 if layout == "packed" else x.shape[0]
    return x.new_empty(count, weight.shape[0], weight.shape[-1] - 1)


def _fake_forward(x, weight, bias, initial_state, index, activation, *layout):
    return _like_x(x, *layout)


def _fake_with_state(x, weight, bias, initial_state, index, activation, *layout):
    return _like_x(x, *layout), _state(x, weight, initial_state, index, *layout)


def _fake_backward(
    grad_y, grad_final_state, x, weight, bias, initial_state, index, activation, *layout
):
    others = (x.new_empty(0) if y is None else y.new_empty(y.shape) for y in (bias, initial_state))
    return _like_x(x, *layout), weight.new_empty(weight.shape), *others


# Channels are independent of each other, so a mapped dimension is more channels. These are the axes
# of channels: of x and y, and of weight, bias and states.


def _axis_of_x(args):
    """Of positions packed and by row in the layout "bld" the last one, in "bdl" the one before."""
    return 1 if args[-1] != "bld" else 2


def _more_channels(x, dim, size, axis):
    """Tensors along `dim`, or one for all of them, as one tensor of `size` times the channels."""
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.movedim(0, axis).flatten(axis, axis + 1)


def _fewer_channels(x, size, axis):
    """A result as tensors along `axis`; what there is none of stays without elements."""
    if x.ndim == 1 and not x.numel():
        return x.new_empty(*(1,) * axis, size, 0)
    return x.unflatten(axis, (size, x.shape[axis] // size))


def _as_channels(given, returned, op, info, in_dims, *args):
    """The batching rule. `given`, `returned`: axes of channels, "x" for that of x."""
    size, index = info.batch_size, len(given)
    if in_dims[index] is not None:  # sequences of their own
        return one_by_one(op, info, in_dims, *args)
    axes = {"x": _axis_of_x(args)}
    given, returned = ([axes.get(axis, axis) for axis in those] for those in (given, returned))
    folded = [
        x if x is None else _more_channels(x, dim, size, axis)
        for x, dim, axis in zip(args, in_dims, given, strict=False)
    ]
    results = op(*folded, *args[index:])
    if isinstance(results, torch.Tensor):
        return _fewer_channels(results, size, returned[0]), returned[0]
    return (
        tuple(_fewer_channels(x, size, axis) for x, axis in zip(results, returned, strict=True)),
        tuple(returned),
    )


FILTERS = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state"
OUTER = "Tensor grad_y, Tensor? grad_final_state"
AXES = "x", 0, 0, 1


class Operators(NamedTuple):
    """The torch ops of one operator."""

    name: str
    alone: object
    with_state: object
    backward: object


def _operators(name, call, index, cores):
    """Define them. `call`: how the core is called; `index`: of the schema, from seq_idx on."""
    forward, with_state, backward = cores

    def add(suffix, arguments, returned, core, run, fake, given, axes):
        return define(
            f"{name}{suffix}({arguments}, {index}) -> {returned}",
            partial(call, partial(run, core)),
            fake,
            partial(_as_channels, given, axes),
        )

    four = "(Tensor, Tensor, Tensor, Tensor)"
    both, outer = f"{OUTER}, {FILTERS}", ("x", 1, *AXES)
    state = "(Tensor, Tensor)"
    return Operators(
        name,
        add("", FILTERS, "Tensor", forward, _forward, _fake_forward, AXES, ("x",)),
        add("_with_state", FILTERS, state, with_state, _forward, _fake_with_state, AXES, ("x", 1)),
        add("_backward", both, four, backward, _backward, _fake_backward, outer, AXES),
    )


BY_ROW = _operators(
    "causal_conv1d",
    _by_row,
    "Tensor? seq_idx, str? activation, str layout",
    (
        convolution.causal_conv1d,
        convolution.causal_conv1d_with_state,
        convolution.causal_conv1d_backward,
    ),
)
PACKED = _operators(
    "causal_conv1d_varlen",
    _packed,
    "Tensor cu_seqlens, str? activation",
    (
        packed.causal_conv1d_varlen,
        packed.causal_conv1d_varlen_with_state,
        packed.causal_conv1d_varlen_backward,
    ),
)


def _update(x, state, weight, bias, cache_seqlens, state_indices, activation, layout):
    return step.causal_conv1d_update(
        x,
        state,
        weight,
        bias,
        activation=activation,
        layout=layout,
        cache_seqlens=cache_seqlens,
        state_indices=state_indices,
    )


def _update_each(op, info, in_dims, *args):
    if in_dims[1] is None:
        remedy = "map the state too, which is written"
        raise ValueError(checks.sentence("state", "one a mapped sample", "one for all", remedy))
    return one_by_one(op, info, in_dims, *args)


UPDATE = define(
    "causal_conv1d_update(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias,"
    " Tensor? cache_seqlens, Tensor? state_indices, str? activation, str layout) -> Tensor",
    _update,
    lambda x, *_: x.new_empty(x.shape),
    _update_each,
)

# ---- autograd


class Call(NamedTuple):
    """The ops of a call, forward and backward, and its options, which are no tensors."""

    name: str
    forward: object
    backward: object
    options: tuple


def _keep(ctx, call, *tensors):
    ctx.call, ctx.name = call, call.name
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


class _CausalConv1d(torch.autograd.Function):
    """y, or y and the final state, of x, weight, bias, initial_state and index."""

    @staticmethod
    def forward(ctx, call, *tensors):
        _keep(ctx, call, *tensors)
        return call.forward(tensors, call.options)

    @staticmethod
    def backward(ctx, grad_y, grad_final_state=None):
        x, _, bias, initial_state, _ = tensors = ctx.saved_tensors
        if grad_y is None:
            grad_y = torch.zeros_like(x)
        name, _, op, options = ctx.call
        given = grad_y, grad_final_state, *tensors
        grad_x, grad_weight, grad_bias, grad_state = last_derivative(name, op, given, options)
        return (
            *(None, grad_x, grad_weight),
            None if bias is None else grad_bias,
            None if initial_state is None else grad_state,
            None,
        )


class _CausalConv1dInTransforms(_CausalConv1d):
    generate_vmap_rule = True
    jvp = no_forward_mode

    @staticmethod
    def forward(call, *tensors):
        return call.forward(tensors, call.options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep(ctx, *inputs)


def _convolve(operators, with_state, tensors, options):
    """y, with the final state if that is wanted.

    `tensors` are x, weight, bias, initial_state and the index.
    """
    op = operators.with_state if with_state else operators.alone
    followed, nobody_else = needs_grad(*tensors), alone()
    if nobody_else and not followed:
        results = op.replay(tensors, options)
        if results is not None:
            return results
    check_options(*options)
    x, weight, bias, initial_state, index = tensors
    tensor("x", x)
    tensor("weight", weight)
    if bias is not None:
        tensor("bias", bias)
    if initial_state is not None:
        tensor("initial_state", initial_state)
    call = Call(operators.name, op, operators.backward, options)
    if nobody_else:
        return apply(_CausalConv1d, call, *tensors) if followed else op(tensors, options)
    tensors = _autocast(x), weight, bias, initial_state, index
    function = through(_CausalConv1d, _CausalConv1dInTransforms, followed)
    if function is None:
        return op(tensors, options)
    return function.apply(call, *tensors)


def _autocast(x):
    """x in autocast's dtype where that is on; a filter may have a dtype of its own."""
    dtype = autocast_dtype(x)
    return cast(dtype, x)[0] if dtype else x


# ---- functions


def causal_conv1d(
    x, weight, bias=None, *, activation=None, layout="bdl", seq_idx=None, initial_state=None
):
    """Causal depthwise convolution, differentiable by x, weight, bias and initial_state.

    Arguments, values and errors as `cuseq.causal_conv1d`.

    >>> import torch, cuseq.torch
    >>> x = torch.ones(2, 4, 10, requires_grad=True)
    >>> y = cuseq.torch.causal_conv1d(x, torch.ones(4, 3), activation="silu")
    >>> y.sum().backward()
    >>> x.grad.shape
    torch.Size([2, 4, 10])
    """
    tensors = x, weight, bias, initial_state, indices("seq_idx", seq_idx, x)
    return _convolve(BY_ROW, False, tensors, (activation, layout))


def causal_conv1d_with_state(
    x, weight, bias=None, *, activation=None, layout="bdl", seq_idx=None, initial_state=None
):
    """Causal depthwise convolution with the state to go on from: (y, final_state).

    Differentiable, through final_state as well. Arguments, values and errors as
    `cuseq.causal_conv1d_with_state`.

    >>> import torch, cuseq.torch
    >>> y, state = cuseq.torch.causal_conv1d_with_state(torch.ones(2, 4, 10), torch.ones(4, 3))
    >>> state.shape
    torch.Size([2, 4, 2])
    """
    tensors = x, weight, bias, initial_state, indices("seq_idx", seq_idx, x)
    return _convolve(BY_ROW, True, tensors, (activation, layout))


def causal_conv1d_varlen(x, weight, bias=None, *, cu_seqlens, activation=None, initial_state=None):
    """Causal depthwise convolution of packed sequences, differentiable as `causal_conv1d` is.

    Arguments, values and errors as `cuseq.causal_conv1d_varlen`.

    >>> import torch, cuseq.torch
    >>> x = torch.ones(10, 4, requires_grad=True)
    >>> y = cuseq.torch.causal_conv1d_varlen(x, torch.ones(4, 3), cu_seqlens=[0, 7, 10])
    >>> y.sum().backward()
    >>> x.grad[:, 0]
    tensor([3., 3., 3., 3., 3., 2., 1., 3., 2., 1.])
    """
    tensors = x, weight, bias, initial_state, indices("cu_seqlens", cu_seqlens, x)
    return _convolve(PACKED, False, tensors, (activation,))


def causal_conv1d_varlen_with_state(
    x, weight, bias=None, *, cu_seqlens, activation=None, initial_state=None
):
    """Causal depthwise convolution of packed sequences with their states: (y, final_state).

    Differentiable, through final_state as well. Arguments, values and errors as
    `cuseq.causal_conv1d_varlen_with_state`.

    >>> import torch, cuseq.torch
    >>> x, weight = torch.ones(10, 4), torch.ones(4, 3)
    >>> y, state = cuseq.torch.causal_conv1d_varlen_with_state(x, weight, cu_seqlens=[0, 7, 10])
    >>> state.shape
    torch.Size([2, 4, 2])
    """
    tensors = x, weight, bias, initial_state, indices("cu_seqlens", cu_seqlens, x)
    return _convolve(PACKED, True, tensors, (activation,))


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
    """Convolve new inputs with the state of those before them; the state is updated in place.

    Differentiable by x, weight, bias and the state as it was, and on through the updated state to
    later steps; detach the state to end that. With cache_seqlens or state_indices there is no
    derivative in this release. Arguments, values and errors as `cuseq.causal_conv1d_update`.

    >>> import torch, cuseq.torch
    >>> state = torch.zeros(2, 4, 2)
    >>> cuseq.torch.causal_conv1d_update(torch.ones(2, 4), state, torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    indices_of_rows = (
        indices("cache_seqlens", cache_seqlens, x),
        indices("state_indices", state_indices, x),
    )
    tensors, options = (x, state, weight, bias, *indices_of_rows), (activation, layout)
    followed = needs_grad(x, state, weight, bias)
    y = None if followed or not alone() else UPDATE.replay(tensors, options)
    if y is None:
        check_options(*options)
        tensor("x", x)
        tensor("state", state)
        tensor("weight", weight)
        tensors = _autocast(x), *tensors[1:]
        if followed:
            return _update_followed(*tensors, *options)
        y = UPDATE(tensors, options)
    if not is_compiling() and not state.is_inference():
        torch.autograd.graph.increment_version(state)  # for who saved it for a backward
    return y


def _update_followed(x, state, weight, bias, cache_seqlens, state_indices, activation, layout):
    """As `causal_conv1d_update`, for autograd to follow."""
    for name, value in ("cache_seqlens", cache_seqlens), ("state_indices", state_indices):
        if value is not None:
            raise NotImplementedError(
                checks.sentence(
                    name,
                    "None where autograd follows the call, in this release",
                    type(value).__name__,
                    "call it under torch.no_grad()",
                )
            )
    tokens = x.unsqueeze(2 if layout == "bdl" else 1) if x.ndim == 2 else x
    before, options = state.clone(), {"activation": activation, "layout": layout}
    y, after = causal_conv1d_with_state(tokens, weight, bias, initial_state=before, **options)
    state.copy_(after)
    return y.reshape(x.shape)
