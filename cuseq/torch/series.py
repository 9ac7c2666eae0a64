"""PyTorch: the soft-DTW family with autograd."""

import torch

from cuseq.ops import soft_dtw as alignment
from cuseq.ops import soft_dtw_from_cost as from_cost
from cuseq.runtime import checks
from cuseq.torch.autograd import needs_grad, refuse_second_derivative


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
        refuse_second_derivative("soft_dtw")
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
        refuse_second_derivative("soft_dtw_from_cost")
        C, values, kept, *_ = ctx.saved_tensors
        return from_cost.backward(grad_values, C, values, kept, **ctx.options), None


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
    if needs_grad(a, b):
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
    if needs_grad(C):
        return _SoftDTWFromCost.apply(C, options)
    return from_cost.soft_dtw_from_cost(C, **options)


def _refuse_gradient_of_gamma(gamma):
    if needs_grad(gamma):
        raise NotImplementedError(
            checks.sentence(
                "gamma",
                "a gamma that autograd does not follow",
                "one with requires_grad=True",
                "pass gamma.detach(); cuseq.soft_dtw_value_and_grad_gamma has its derivative",
            )
        )
