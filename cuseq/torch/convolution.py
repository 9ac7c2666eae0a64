"""PyTorch: the causal convolutions with autograd."""

import torch

from cuseq.ops import causal_conv1d as convolution
from cuseq.ops import causal_conv1d_update as step
from cuseq.ops import causal_conv1d_varlen as packed
from cuseq.runtime import checks
from cuseq.torch.autograd import needs_grad, refuse_second_derivative

_BY_ROW = (
    "causal_conv1d",
    convolution.causal_conv1d_with_state,
    convolution.causal_conv1d_backward,
)
_PACKED = (
    "causal_conv1d_varlen",
    packed.causal_conv1d_varlen_with_state,
    packed.causal_conv1d_varlen_backward,
)


class _CausalConv1d(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operator, x, weight, bias, initial_state, options):
        _, with_state, _ = operator
        ctx.operator, ctx.options = operator, options
        indices = filter(torch.is_tensor, options.values())
        ctx.save_for_backward(x, weight, bias, initial_state, *indices)
        ctx.set_materialize_grads(False)
        return with_state(x, weight, bias, initial_state=initial_state, **options)

    @staticmethod
    def backward(ctx, grad_y, grad_final_state):
        name, _, backward = ctx.operator
        refuse_second_derivative(name)
        x, weight, bias, initial_state, *_ = ctx.saved_tensors
        grads = backward(
            torch.zeros_like(x) if grad_y is None else grad_y,
            x,
            weight,
            bias,
            initial_state=initial_state,
            grad_final_state=grad_final_state,
            **ctx.options,
        )
        return None, *grads, None


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
    options = {"activation": activation, "layout": layout, "seq_idx": seq_idx}
    if not needs_grad(x, weight, bias, initial_state):
        return convolution.causal_conv1d(x, weight, bias, initial_state=initial_state, **options)
    y, _ = causal_conv1d_with_state(x, weight, bias, initial_state=initial_state, **options)
    return y


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
    options = {"activation": activation, "layout": layout, "seq_idx": seq_idx}
    if needs_grad(x, weight, bias, initial_state):
        return _CausalConv1d.apply(_BY_ROW, x, weight, bias, initial_state, options)
    return convolution.causal_conv1d_with_state(
        x, weight, bias, initial_state=initial_state, **options
    )


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
    options = {"cu_seqlens": cu_seqlens, "activation": activation}
    if not needs_grad(x, weight, bias, initial_state):
        return packed.causal_conv1d_varlen(x, weight, bias, initial_state=initial_state, **options)
    y, _ = _CausalConv1d.apply(_PACKED, x, weight, bias, initial_state, options)
    return y


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
    options = {"cu_seqlens": cu_seqlens, "activation": activation}
    if needs_grad(x, weight, bias, initial_state):
        return _CausalConv1d.apply(_PACKED, x, weight, bias, initial_state, options)
    return packed.causal_conv1d_varlen_with_state(
        x, weight, bias, initial_state=initial_state, **options
    )


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
    options = {"activation": activation, "layout": layout}
    if not needs_grad(x, state, weight, bias):
        y = step.causal_conv1d_update(
            x,
            state,
            weight,
            bias,
            cache_seqlens=cache_seqlens,
            state_indices=state_indices,
            **options,
        )
        if not state.is_inference():  # who saved the state for a backward must notice the write
            torch.autograd.graph.increment_version(state)
        return y
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
    before = state.clone()
    y, after = causal_conv1d_with_state(tokens, weight, bias, initial_state=before, **options)
    state.copy_(after)
    return y.reshape(x.shape)
