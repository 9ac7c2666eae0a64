"""The functions of causal-conv1d 1.7 on top of cuseq.torch.

x and y are (B, D, L) whatever their strides; where D is innermost in x's memory (channels last)
it is so in y's. Names, order and defaults of the arguments, shapes and results are those of
causal-conv1d. What it refuses and cuseq can do is accepted: the CPU, float64, widths up to 32, any
sizes and strides, seq_idx and states in either memory order and all together.
"""

import math

import torch

import cuseq
import cuseq.torch
from cuseq.runtime import checks
from cuseq.torch.library import autocast_dtype, needs_grad, no_autocast, tensor

_THEIR_NAMES = {  # of arguments in cuseq's errors
    "grad_y": "dout",
    "grad_final_state": "dfinal_states",
    "initial_state": "initial_states",
    "state": "conv_state",
    "state_indices": "conv_state_indices",
}
_BY_ROW = cuseq.torch.causal_conv1d, cuseq.torch.causal_conv1d_with_state
_PACKED = cuseq.torch.causal_conv1d_varlen, cuseq.torch.causal_conv1d_varlen_with_state


def causal_conv1d_fn(
    x,
    weight,
    bias=None,
    seq_idx=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """Causal depthwise convolution: y, or (y, final_states) with return_final_states.

    Differentiable by x, weight, bias and initial_states, and through final_states.

    Args:
        x: (B, D, L), float64, float32, float16 or bfloat16. Where neither D nor L has stride 1 it
            is copied.
        weight: (D, W), 1 <= W <= 32, of any of these dtypes.
        bias: (D,) or None, of any of these dtypes.
        seq_idx: (B, L) int32 or int64, or None: a position sees only inputs of its own sequence;
            y = 0 where it is negative.
        initial_states: (B, D, W - 1), the inputs before the first, newest last, or None.
        return_final_states: whether the last inputs are returned as well, (B, D, W - 1) with D
            innermost in memory. With seq_idx they are those of the last sequence.
        final_states_out: (B, D, W - 1) of x's dtype, or None: where the final states are written.
            What is returned lies in it; autograd follows what is returned alone. Without
            return_final_states it is left as it is.
        activation: None, "silu" or its other name "swish".

    Returns:
        y of x's shape and dtype, or y and final_states, both of x's dtype.

    Raises:
        ValueError: for shapes or options that do not fit, or tensors on different devices.
        TypeError: for dtypes that do not fit, and for what is no tensor.

    >>> import torch
    >>> from cuseq.compat.causal_conv1d import causal_conv1d_fn
    >>> x, weight = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]])
    >>> causal_conv1d_fn(x, weight, return_final_states=True)
    (tensor([[[ 1., 12., 23.]]]), tensor([[[3.]]]))
    """
    tensor("x", x)
    if x.ndim == 3 and x.stride(1) != 1 and x.stride(2) != 1:
        x = x.contiguous()  # and so is y, as with causal-conv1d
    options = {"seq_idx": seq_idx, "activation": activation, "initial_state": initial_states}
    return _convolve(_BY_ROW, x, weight, bias, options, return_final_states, final_states_out)


def causal_conv1d_varlen_fn(
    x,
    weight,
    bias=None,
    cu_seqlens=None,
    initial_states=None,
    return_final_states=False,
    final_states_out=None,
    activation=None,
):
    """Causal depthwise convolution of packed sequences: y, or (y, final_states).

    causal-conv1d has no such function. This one is `causal_conv1d_fn` with cu_seqlens for seq_idx:
    sequence s is ``x[cu_seqlens[s]:cu_seqlens[s+1]]``, and no sequence sees another.

    Args:
        x: (T, D), the sequences one after the other.
        cu_seqlens: (S + 1,) int32 or int64, from 0 to T; an empty sequence keeps its state.
        initial_states, final_states_out: (S, D, W - 1), one a sequence.
        The others as `causal_conv1d_fn`.

    Returns:
        y (T, D), or y and final_states (S, D, W - 1), of x's dtype.

    Raises: as `causal_conv1d_fn`.

    >>> import torch
    >>> from cuseq.compat.causal_conv1d import causal_conv1d_varlen_fn
    >>> x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0, 1.0]])
    >>> causal_conv1d_varlen_fn(x, weight, cu_seqlens=torch.tensor([0, 2, 3])).T
    tensor([[ 1., 12.,  3.]])
    """
    tensor("x", x)
    if cu_seqlens is None:
        raise TypeError(
            checks.sentence("cu_seqlens", "shape (S + 1,)", None, "pass where sequences begin")
        )
    options = {"cu_seqlens": cu_seqlens, "activation": activation, "initial_state": initial_states}
    return _convolve(_PACKED, x, weight, bias, options, return_final_states, final_states_out)


def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    cache_seqlens=None,
    conv_state_indices=None,
):
    """Convolve new inputs with the state of those before them; conv_state is updated in place.

    Autograd does not follow it, as in causal-conv1d, so that a state may be kept from call to call;
    `cuseq.torch.causal_conv1d_update` is differentiable.

    Args:
        x: (B, D) or (B, D, L), float64, float32, float16 or bfloat16.
        conv_state: (B, D, S) with S >= W - 1, or a pool (P, D, S) with conv_state_indices, of any
            of these dtypes; written. It holds the last S inputs, newest last.
        weight: (D, W), 1 <= W <= 32, of any of these dtypes.
        bias: (D,) or None.
        activation: None, "silu" or its other name "swish".
        cache_seqlens: (B,) int32 or int64, or None: how many inputs each row has seen. The state
            is then a ring buffer, written from column cache_seqlens % S on.
        conv_state_indices: (B,) int32 or int64, or None: the row of the pool of each batch item. A
            negative one skips the item: y = 0 and no state is touched.

    Returns:
        y of x's shape, dtype and memory order.

    Raises:
        ValueError: for shapes, options or indices that do not fit.
        TypeError: for dtypes that do not fit, and for what is no tensor.

    >>> import torch
    >>> from cuseq.compat.causal_conv1d import causal_conv1d_update
    >>> conv_state, weight = torch.zeros(1, 1, 1), torch.tensor([[10.0, 1.0]])
    >>> for value in 1.0, 2.0, 3.0:
    ...     y = causal_conv1d_update(torch.tensor([[value]]), conv_state, weight)
    >>> y, conv_state
    (tensor([[23.]]), tensor([[[3.]]]))
    """
    tensor("x", x)
    if needs_grad(x, conv_state, weight, bias):
        with torch.no_grad():
            return causal_conv1d_update(
                *(x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices)
            )
    channels_last = x.ndim == 3 and x.stride(1) < x.stride(2)
    y = _call(
        cuseq.torch.causal_conv1d_update,
        x.transpose(1, 2) if channels_last else x,
        conv_state,
        weight,
        bias,
        activation=activation,
        layout="bld" if channels_last else "bdl",
        cache_seqlens=cache_seqlens,
        state_indices=conv_state_indices,
    )
    return y.transpose(1, 2) if channels_last else y


def causal_conv1d_varlen_states(x, cu_seqlens, state_len):
    """The last state_len inputs of each packed sequence, newest last, after zeros if it is shorter.

    Autograd does not follow it, as in causal-conv1d.

    Args:
        x: (T, D), the sequences one after the other.
        cu_seqlens: (S + 1,) int32 or int64, from 0 to T: where they begin, and T.
        state_len: an integer of at least 0.

    Returns:
        states (S, D, state_len) of x's dtype, with D innermost in memory.

    Raises: as `causal_conv1d_fn`.

    >>> import torch
    >>> from cuseq.compat.causal_conv1d import causal_conv1d_varlen_states
    >>> x, cu_seqlens = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 3, 4])
    >>> causal_conv1d_varlen_states(x, cu_seqlens, 2)
    tensor([[[2., 3.]],
            [[0., 4.]]])
    """
    tensor("x", x)
    checks.within("state_len", state_len, state_len, 0, math.inf)
    D, S = x.shape[-1], max(len(cu_seqlens) - 1, 0)
    with torch.no_grad():
        _, states = _call(
            cuseq.torch.causal_conv1d_varlen_with_state,
            x,
            x.new_zeros(D, 1),  # the convolution does not matter
            cu_seqlens=cu_seqlens,
            initial_state=x.new_zeros(S, D, state_len),
        )
    return _channels_last(states)


def causal_conv1d_fwd_function(
    x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation
):
    """Causal depthwise convolution: y, the final states written to final_states_out if it is given.

    Args:
        x, weight, bias, seq_idx, initial_states, final_states_out: as `causal_conv1d_fn`;
            all but x and weight may be None.
        silu_activation: whether the activation is SiLU, else there is none.

    Returns:
        y of x's shape, dtype and memory order.

    Raises: as `causal_conv1d_fn`.

    >>> import torch
    >>> from cuseq.compat.causal_conv1d import causal_conv1d_fwd_function
    >>> x, weight = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]])
    >>> final_states = torch.empty(1, 1, 1)
    >>> causal_conv1d_fwd_function(x, weight, None, None, None, final_states, False)
    tensor([[[ 1., 12., 23.]]])
    >>> final_states
    tensor([[[3.]]])
    """
    tensor("x", x)
    activation = _activation(silu_activation)
    options = {"seq_idx": seq_idx, "activation": activation, "initial_state": initial_states}
    writes = final_states_out is not None
    result = _convolve(_BY_ROW, x, weight, bias, options, writes, final_states_out)
    return result[0] if writes else result


def causal_conv1d_bwd_function(
    x,
    weight,
    bias,
    dout,
    seq_idx,
    initial_states,
    dfinal_states,
    dx,
    return_dinitial_states,
    silu_activation,
):
    """The gradients of the convolution: (dx, dweight, dbias, dinitial_states).

    Args:
        x, weight, bias, seq_idx, initial_states, silu_activation: as in the forward.
        dout: (B, D, L), the gradient by y, of x's dtype.
        dfinal_states: the gradient by the final states, of their shape and dtype, or None.
        dx: a tensor of x's shape and dtype that the gradient by x is written to, or None for a new
            one. It may be the memory of x or dout.
        return_dinitial_states: whether the gradient by the initial states is returned; where these
            are None, by zeros.

    Returns:
        dx, dweight, dbias, dinitial_states, of the shapes and dtypes of what they are gradients by.
        dbias is None without a bias, dinitial_states unless it is asked for.

    Raises: as `causal_conv1d_fn`; ValueError for a tensor that autograd follows.

    >>> import torch
    >>> from cuseq.compat.causal_conv1d import causal_conv1d_bwd_function
    >>> x, weight = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]])
    >>> causal_conv1d_bwd_function(
    ...     x, weight, None, torch.ones_like(x), None, None, None, None, False, False
    ... )
    (tensor([[[11., 11.,  1.]]]), tensor([[3., 6.]]), None, None)
    """
    tensor("x", x)
    tensor("dout", dout)
    if dx is not None:
        _check_out("dx", dx, x.shape, x)
    if return_dinitial_states and initial_states is None:
        initial_states = x.new_zeros(*x.shape[:2], weight.shape[-1] - 1)
    gradients = _call(
        cuseq.causal_conv1d_backward,
        dout,
        x,
        weight,
        bias,
        activation=_activation(silu_activation),
        seq_idx=seq_idx,
        initial_state=initial_states,
        grad_final_state=dfinal_states,
    )
    dinitial_states = gradients.initial_state if return_dinitial_states else None
    dx = gradients.x if dx is None else dx.copy_(gradients.x)
    return dx, gradients.weight, gradients.bias, dinitial_states


def causal_conv1d_update_function(
    x, conv_state, weight, bias, silu_activation, cache_seqlens, conv_state_indices
):
    """`causal_conv1d_update` with silu_activation, a bool, for its activation.

    >>> import torch
    >>> from cuseq.compat.causal_conv1d import causal_conv1d_update_function
    >>> x, conv_state, weight = torch.ones(1, 1, 3), torch.zeros(1, 1, 1), torch.ones(1, 2)
    >>> causal_conv1d_update_function(x, conv_state, weight, None, False, None, None)
    tensor([[[1., 2., 2.]]])
    """
    activation = _activation(silu_activation)
    return causal_conv1d_update(
        x, conv_state, weight, bias, activation, cache_seqlens, conv_state_indices
    )


class _Into(torch.autograd.Function):
    """Values written to a tensor: what is returned lies in it, and autograd follows that alone."""

    @staticmethod
    def forward(ctx, values, out):
        return out.copy_(values)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _convolve(functions, x, weight, bias, options, return_final_states, final_states_out):
    """y, or y and final_states, by a function of cuseq.torch or its counterpart with states."""
    convolution, with_state = functions
    if not return_final_states:
        return _call(convolution, x, weight, bias, **options)
    if final_states_out is not None:
        _check_out("final_states_out", final_states_out, _shape_of_states(x, weight, options), x)
    y, final_states = _call(with_state, x, weight, bias, **options)
    if final_states_out is None:
        return y, _channels_last(final_states.to(x.dtype))
    return y, _Into.apply(final_states, final_states_out)


def _shape_of_states(x, weight, options):
    if options["initial_state"] is not None:
        return options["initial_state"].shape
    rows = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else x.shape[0]
    return rows, weight.shape[0], weight.shape[-1] - 1


def _call(function, *tensors, **options):
    """The result of a function of cuseq, in the dtype of the first tensor: autocast does not count.

    Errors name the arguments as they are called here.
    """
    try:
        if autocast_dtype(tensors[0]):
            with no_autocast(tensors[0]):
                return function(*tensors, **options)
        return function(*tensors, **options)
    except (TypeError, ValueError) as error:
        name, colon, rest = str(error).partition(":")
        if name not in _THEIR_NAMES:
            raise
        raise type(error)(_THEIR_NAMES[name] + colon + rest) from None


def _activation(silu):
    return "silu" if silu else None


def _channels_last(states):
    """States (S, D, width) with D innermost in memory."""
    return states.transpose(1, 2).contiguous().transpose(1, 2)


def _check_out(name, out, shape, x):
    """Refuse a tensor to write to that is not of this shape and of x's dtype and device."""
    wanted = f"shape {tuple(shape)}, {x.dtype} on {x.device}"
    got = f"shape {tuple(out.shape)}, {out.dtype} on {out.device}"
    if got != wanted:
        raise ValueError(checks.sentence(name, wanted, got, "pass such a tensor, or None"))
