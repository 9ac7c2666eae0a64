"""PyTorch: the operators with autograd, and SoftDTWLoss. An adapter; the mathematics is in ops/.

    import torch, cuseq.torch
    loss = cuseq.torch.SoftDTWLoss(gamma=0.1)
    loss(prediction, target).backward()

with prediction (B, N, D) and target (B, M, D) on CUDA or the CPU.
"""

import torch

from cuseq.ops import causal_conv1d as convolution
from cuseq.ops import causal_conv1d_update as step
from cuseq.ops import causal_conv1d_varlen as packed
from cuseq.ops import soft_dtw as alignment
from cuseq.ops import soft_dtw_from_cost as from_cost
from cuseq.runtime import checks

__all__ = [
    "SoftDTWLoss",
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_varlen",
    "causal_conv1d_varlen_with_state",
    "causal_conv1d_with_state",
    "soft_dtw",
    "soft_dtw_from_cost",
]


class _SoftDTW(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, options):
        values, kept = alignment.forward_keeping(x, y, **options)
        # Tensors among the options too: who changes one before the backward is told.
        ctx.options = options
        ctx.save_for_backward(x, y, values, kept, *filter(torch.is_tensor, options.values()))
        return values

    @staticmethod
    def backward(ctx, grad_values):
        _refuse_second_derivative("soft_dtw")
        x, y, values, kept, *_ = ctx.saved_tensors
        grads = alignment.backward(grad_values, x, y, values, kept, **ctx.options)
        wanted = zip(grads, ctx.needs_input_grad, strict=False)
        return (*(grad if needed else None for grad, needed in wanted), None)


class _SoftDTWFromCost(torch.autograd.Function):
    @staticmethod
    def forward(ctx, C, options):
        values, kept = from_cost.forward_keeping(C, **options)
        ctx.options = options
        ctx.save_for_backward(C, values, kept, *filter(torch.is_tensor, options.values()))
        return values

    @staticmethod
    def backward(ctx, grad_values):
        _refuse_second_derivative("soft_dtw_from_cost")
        C, values, kept, *_ = ctx.saved_tensors
        return from_cost.backward(grad_values, C, values, kept, **ctx.options), None


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
        _refuse_second_derivative(name)
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


def _refuse_second_derivative(operator):
    if torch.is_grad_enabled():
        raise NotImplementedError(
            checks.sentence(
                operator,
                "a first derivative in this release",
                "a backward with create_graph=True",
                "leave create_graph out",
            )
        )


def _refuse_gradient_of_gamma(gamma):
    if _needs_grad(gamma):
        raise NotImplementedError(
            checks.sentence(
                "gamma",
                "a gamma that autograd does not follow",
                "one with requires_grad=True",
                "pass gamma.detach(); cuseq.soft_dtw_value_and_grad_gamma has its derivative",
            )
        )


def _needs_grad(*tensors):
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


def soft_dtw(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW value of each pair of time series, differentiable by a and b.

    Arguments, values and errors as `cuseq.soft_dtw`; a gamma that autograd follows raises. A
    forward on CUDA that is to be differentiated keeps for its backward the series in float32 and
    1 to 1.3 bytes a cell, with "euclidean" up to 2.6 and in float64 up to 6.4, of the cells in the
    band if there is one; on the CPU it keeps nothing.

    >>> import torch, cuseq.torch
    >>> a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> cuseq.torch.soft_dtw(a, torch.tensor([3.0, 4.0, -3.0])).backward()
    >>> a.grad
    tensor([-4.0001, -2.2852, 10.1643])
    """
    _refuse_gradient_of_gamma(gamma)
    options = {"gamma": gamma, "cost": cost, "bandwidth": bandwidth}
    options |= {"lengths_a": lengths_a, "lengths_b": lengths_b}
    if _needs_grad(a, b):
        return _SoftDTW.apply(a, b, options)
    return alignment.soft_dtw(a, b, **options)


def soft_dtw_from_cost(C, *, gamma=1.0, bandwidth=None, lengths_a=None, lengths_b=None):
    """Soft-DTW value of each cost matrix, differentiable by C.

    Arguments, values and errors as `cuseq.soft_dtw_from_cost`; a gamma that autograd follows
    raises.

    >>> import torch, cuseq.torch
    >>> C = torch.zeros(2, 2, requires_grad=True)
    >>> cuseq.torch.soft_dtw_from_cost(C).backward()
    >>> C.grad
    tensor([[1.0000, 0.3333],
            [0.3333, 1.0000]])
    """
    _refuse_gradient_of_gamma(gamma)
    options = {"gamma": gamma, "bandwidth": bandwidth}
    options |= {"lengths_a": lengths_a, "lengths_b": lengths_b}
    if _needs_grad(C):
        return _SoftDTWFromCost.apply(C, options)
    return from_cost.soft_dtw_from_cost(C, **options)


class SoftDTWLoss(torch.nn.Module):
    """Soft-DTW between two batches of time series as a loss.

    Args:
        gamma, cost, bandwidth: as `cuseq.soft_dtw` takes them.
        normalize: not in this release; leave it False.
        reduction: "mean" or "sum" over the batch, or "none" for one value a pair.

    Called as ``loss(x, y, lengths_x=None, lengths_y=None)`` with x (B, N, D) and y (B, M, D);
    shapes, dtypes, lengths and errors as `cuseq.soft_dtw`.

    >>> import torch, cuseq.torch
    >>> loss = cuseq.torch.SoftDTWLoss(gamma=0.1)
    >>> x = torch.zeros(8, 50, 3, requires_grad=True)
    >>> loss(x, torch.ones(8, 40, 3)).backward()
    >>> x.grad.shape
    torch.Size([8, 50, 3])
    """

    def __init__(
        self, gamma=1.0, *, cost="sqeuclidean", bandwidth=None, normalize=False, reduction="mean"
    ):
        super().__init__()
        checks.one_of("cost", cost, alignment.COSTS)
        checks.not_yet("normalize", normalize, False)
        checks.one_of("reduction", reduction, ("mean", "sum", "none"))
        self.gamma, self.cost, self.bandwidth = gamma, cost, bandwidth
        self.reduction = reduction

    def forward(self, x, y, lengths_x=None, lengths_y=None):
        values = soft_dtw(
            x,
            y,
            gamma=self.gamma,
            cost=self.cost,
            bandwidth=self.bandwidth,
            lengths_a=lengths_x,
            lengths_b=lengths_y,
        )
        return values if self.reduction == "none" else getattr(values, self.reduction)()

    def extra_repr(self):
        return f"gamma={self.gamma}, cost={self.cost!r}, reduction={self.reduction!r}"


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
    if not _needs_grad(x, weight, bias, initial_state):
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
    if _needs_grad(x, weight, bias, initial_state):
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
    if not _needs_grad(x, weight, bias, initial_state):
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
    if _needs_grad(x, weight, bias, initial_state):
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
    if not _needs_grad(x, state, weight, bias):
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
