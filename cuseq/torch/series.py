"""PyTorch: the soft-DTW family, as torch ops, with autograd."""

from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from cuseq.ops import soft_dtw as alignment
from cuseq.ops import soft_dtw_from_cost as from_cost
from cuseq.ops import soft_dtw_hvp as second_order
from cuseq.ops.soft_dtw_divergence import composed
from cuseq.runtime import checks
from cuseq.runtime.arrays import Array
from cuseq.torch.library import (
    autocast_dtype,
    cast,
    define,
    last_derivative,
    needs_grad,
    no_forward_mode,
    tensor,
    through,
)
from cuseq.torch.shortcut import alone, apply

# ---- options: of each a tensor of one a pair, or a number for all of them

NAMES = "gamma", "bandwidth", "lengths_a", "lengths_b"
TENSORS = "Tensor? gamma, Tensor? bandwidth, Tensor? lengths_a, Tensor? lengths_b"
NUMBERS = "float? one_gamma, int? one_bandwidth, int? length_a, int? length_b"
MOST = 2**62  # that a torch op takes as an integer
REAL, INTEGRAL = (float, Real), (int, Integral)  # the common ones first, which is faster


def _tensors_and_numbers(options, first):
    """Options as torch ops take them; None if one of them is nothing that they take.

    Sequences are on the host, where their values are checked, but in a compiled call on the device
    of the `first` tensor, as a CUDA graph has it.
    """
    tensors, ones = [], []
    for name, value in zip(NAMES, options, strict=True):
        kinds = REAL if name == "gamma" else INTEGRAL
        if isinstance(value, (list, tuple, range)):
            try:
                dtype = torch.float64 if kinds is REAL else None
                device = first.device if is_compiling() else None
                value = torch.as_tensor(value, dtype=dtype, device=device)
            except (TypeError, ValueError):
                return None
        if value is None or isinstance(value, torch.Tensor):
            tensors.append(value)
            ones.append(None)
        elif isinstance(value, kinds) and not isinstance(value, bool):
            tensors.append(None)
            ones.append(float(value) if kinds is REAL else int(min(value, MOST)))
        else:
            return None
    return tensors, ones


# ---- torch ops: values alone, with what is kept for a backward, and backward. Their arguments are
# those of a backward, the series or costs, options that are tensors, the name of a cost, and those
# that are numbers.


class Operator(NamedTuple):
    """An operator of the core, and how many tensors its torch ops take besides options."""

    name: str
    core: object  # with forward_keeping and backward
    directional: object  # its change along a direction, and that of its gradients
    count: int

    def split(self, args):
        """Tensors and options by name."""
        series, end = args[: self.count], self.count + len(NAMES)
        pairs = zip(NAMES, args[self.count : end], args[-len(NAMES) :], strict=True)
        options = {name: one if each is None else each for name, each, one in pairs}
        if len(args) > end + len(NAMES):
            options["cost"] = args[end]
        return series, options

    def values(self, *args):
        series, options = self.split(args)
        return getattr(self.core, self.name)(*series, **options)

    def keeping(self, *args):
        """Values, and what is kept: None on the host, where nothing is."""
        series, options = self.split(args)
        return self.core.forward_keeping(*series, **options)

    def backward(self, grad_values, values, kept, *args):
        series, options = self.split(args)
        kept = kept if kept.is_cuda else None
        return self.core.backward(grad_values, *series, values, kept, **options)

    def hessian(self, grad_values, *args):
        """How values, and the gradients of sum(grad_values * values), change along a direction."""
        directions, rest = args[: self.count], args[self.count :]
        series, options = self.split(rest)
        return self.directional(grad_values, *directions, *series, **options)

    def fake_values(self, *args):
        series, _ = self.split(args)
        dtype = torch.float64 if series[0].dtype == torch.float64 else torch.float32
        if self.count == 1:
            return series[0].new_empty(series[0].shape[:-2], dtype=dtype)
        batches = [x.shape[0] for x in series if x.ndim == 3]
        return series[0].new_empty(([n for n in batches if n != 1] or batches)[:1], dtype=dtype)

    def fake_keeping(self, *args):
        values = self.fake_values(*args)
        if not args[0].is_cuda:
            return values, args[0].new_empty(0)
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if all(isinstance(n, int) for x in tensors for n in x.shape):
            series, options = self.split([_without_memory(x, args[0]) for x in args])
            size = self.core.kept_size(*series, **options)
        else:  # a compiler leaves sizes open
            size = torch.library.get_ctx().new_dynamic_size()
        return values, args[0].new_empty(size, dtype=torch.uint8)

    def fake_backward(self, grad_values, values, kept, *args):
        grads = tuple(x.new_empty(x.shape) for x in args[: self.count])
        return grads if self.count > 1 else grads[0]

    def fake_hessian(self, grad_values, *args):
        rest = args[self.count :]
        return self.fake_values(*rest), *(x.new_empty(x.shape) for x in rest[: self.count])


def _without_memory(x, first):
    """A fake tensor on the device of the `first` one as the core borrows it; others as they are."""
    if not isinstance(x, torch.Tensor):
        return x
    dtype, device = str(x.dtype).removeprefix("torch."), first.device.index
    return Array(0, tuple(x.shape), x.stride(), dtype, device, x, None)


class Ops(NamedTuple):
    """The torch ops of an operator."""

    operator: Operator
    values: object
    keeping: object
    backward: object
    hessian: object


def _ops(operator, series, grads, directions, cost=""):
    name, arguments = operator.name, f"{series}, {TENSORS}, {cost}{NUMBERS}"
    given = f"Tensor grad_values, Tensor values, Tensor kept, {arguments}"
    return Ops(
        operator,
        define(f"{name}({arguments}) -> Tensor", operator.values, operator.fake_values),
        define(
            f"{name}_keeping({arguments}) -> (Tensor, Tensor)",
            operator.keeping,
            operator.fake_keeping,
        ),
        define(f"{name}_backward({given}) -> {grads}", operator.backward, operator.fake_backward),
        define(
            f"{name}_hessian(Tensor grad_values, {directions}, {arguments}) -> "
            f"({', '.join(['Tensor'] * (operator.count + 1))})",
            operator.hessian,
            operator.fake_hessian,
        ),
    )


SERIES = _ops(
    Operator("soft_dtw", alignment, second_order.series_directional, 2),
    "Tensor a, Tensor b",
    "(Tensor, Tensor)",
    "Tensor v_a, Tensor v_b",
    "str cost, ",
)
COSTS = _ops(
    Operator("soft_dtw_from_cost", from_cost, second_order.cost_directional, 1),
    "Tensor C",
    "Tensor",
    "Tensor v",
)

# ---- autograd


def _keep(ctx, ops, options, tensors, output):
    ctx.ops, ctx.options, ctx.name = ops, options, ops.operator.name
    # Options too: who changes one before the backward is told.
    ctx.save_for_backward(*output, *tensors)
    ctx.mark_non_differentiable(output[1])


class _SoftDTW(torch.autograd.Function):
    """Values, and what is kept, of the series or costs and of options that are tensors."""

    @staticmethod
    def forward(ctx, ops, options, *tensors):
        output = ops.keeping(tensors, options)
        _keep(ctx, ops, options, tensors, output)
        return output

    @staticmethod
    def backward(ctx, grad_values, _):
        tensors = grad_values, *ctx.saved_tensors
        if torch.is_grad_enabled():
            grads = _Gradients.apply(ctx.ops, ctx.options, *tensors)
        else:
            grads = ctx.ops.backward(tensors, ctx.options)
        grads = (grads,) if isinstance(grads, torch.Tensor) else grads
        return None, None, *grads, *(None for _ in NAMES)


class _Gradients(torch.autograd.Function):
    """Gradients by series or costs, to be differentiated once more."""

    generate_vmap_rule = True
    jvp = no_forward_mode

    @staticmethod
    def forward(ops, options, *tensors):
        return ops.backward(tensors, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.ops, ctx.options, grad_values, _, _, *arguments = inputs
        ctx.name = ctx.ops.operator.name
        ctx.save_for_backward(grad_values, *arguments)

    @staticmethod
    def backward(ctx, *directions):
        grad_values, *arguments = ctx.saved_tensors
        tensors = grad_values, *directions, *arguments
        value_dot, *products = last_derivative(ctx.name, ctx.ops.hessian, tensors, ctx.options)
        return None, None, value_dot, None, None, *products, *(None for _ in NAMES)


class _SoftDTWInTransforms(_SoftDTW):
    generate_vmap_rule = True
    jvp = no_forward_mode

    @staticmethod
    def forward(ops, options, *tensors):
        return ops.keeping(tensors, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ops, options, *tensors = inputs
        _keep(ctx, ops, options, tensors, output)


def _values(ops, series, cost, options):
    """Values, differentiable by the series. `cost`: its name, if the operator takes one.

    `options`: in the order of NAMES.
    """
    _refuse_gradient_of_gamma(options[0])
    split = _tensors_and_numbers(options, series[0])
    if split is None:  # the core says what is wrong
        named = dict(zip(("cost", *NAMES)[-len(cost + options) :], cost + options, strict=True))
        core = getattr(ops.operator.core, ops.operator.name)
        return core(*(x.detach() for x in series), **named)
    if autocast_dtype(series[0]):
        series = cast(torch.float32, *series)
    if is_compiling() and len(series) == 2 and series[0] is series[1]:
        series = series[0], series[1].view_as(series[1])  # compilers refuse one twice
    tensors, numbers = (*series, *split[0]), (*cost, *split[1])
    followed = needs_grad(*series)
    if followed and alone():
        return apply(_SoftDTW, ops, numbers, *tensors)[0]
    function = through(_SoftDTW, _SoftDTWInTransforms, followed)
    if function is not None:
        return function.apply(ops, numbers, *tensors)[0]
    return ops.values(tensors, numbers)


# ---- functions


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
    tensors = tensor("a", a), tensor("b", b)
    return _values(SERIES, tensors, (cost,), (gamma, bandwidth, lengths_a, lengths_b))


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
    return _values(COSTS, (tensor("C", C),), (), (gamma, bandwidth, lengths_a, lengths_b))


def soft_dtw_divergence(
    a, b, *, gamma=1.0, cost="sqeuclidean", bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW divergence of each pair of time series, differentiable by a and b.

    Arguments, values and errors as `cuseq.soft_dtw_divergence`; three times `soft_dtw`.

    >>> import torch, cuseq.torch
    >>> a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> cuseq.torch.soft_dtw_divergence(a, torch.tensor([1.0, 2.0, 4.0])).backward()
    >>> a.grad
    tensor([ 0.0700,  0.4475, -1.8625])
    """

    def values(a, b, lengths_a, lengths_b):
        lengths = {"lengths_a": lengths_a, "lengths_b": lengths_b}
        return soft_dtw(a, b, gamma=gamma, cost=cost, bandwidth=bandwidth, **lengths)

    return divergence(values, a, b, (gamma, bandwidth), lengths_a, lengths_b)


def divergence(values, a, b, options, lengths_a, lengths_b):
    """As `composed` of the core, of tensors."""
    return composed(values, _repeated, a, b, options, lengths_a, lengths_b)


def _repeated(x, B):
    return x.expand(B, -1, -1)


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
