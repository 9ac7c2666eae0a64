"""PyTorch: the soft-DTW family, as torch ops, with autograd."""

from numbers import Integral, Real
from typing import NamedTuple

import torch

from cuseq.ops import soft_dtw as alignment
from cuseq.ops import soft_dtw_from_cost as from_cost
from cuseq.runtime import checks
from cuseq.torch.library import (
    autocast_dtype,
    cast,
    define,
    first_derivative,
    needs_grad,
    no_forward_mode,
    tensor,
    through,
)

# ---- options: of each a number, or a tensor of one a pair

NAMES = "gamma", "bandwidth", "lengths_a", "lengths_b"
OPTIONS = (
    "float? one_gamma, Tensor? gamma, int? one_bandwidth, Tensor? bandwidth,"
    " int? length_a, Tensor? lengths_a, int? length_b, Tensor? lengths_b"
)
FLAT = 2 * len(NAMES)
MOST = 2**62  # that a torch op takes as an integer


def _flat(options):
    """Options as torch ops take them; None if one of them is nothing that they take."""
    flat = []
    for name, value in zip(NAMES, options, strict=True):
        kind = Real if name == "gamma" else Integral
        if isinstance(value, (list, tuple, range)):
            try:
                value = torch.as_tensor(value, dtype=torch.float64 if kind is Real else None)
            except (TypeError, ValueError):
                return None
        if value is None or isinstance(value, torch.Tensor):
            flat += None, value
        elif isinstance(value, kind) and not isinstance(value, bool):
            flat += float(value) if kind is Real else int(min(value, MOST)), None
        else:
            return None
    return flat


def _by_name(flat):
    """Options as the core takes them."""
    pairs = zip(NAMES, flat[::2], flat[1::2], strict=True)
    return {name: one if each is None else each for name, one, each in pairs}


# ---- torch ops: values alone, with what is kept for a backward, and backward. Their arguments are
# those of a backward, the series or costs, the name of a cost, and OPTIONS.


class Operator(NamedTuple):
    """An operator of the core, and how many tensors its torch ops take besides options."""

    name: str
    core: object  # with forward_keeping and backward
    count: int

    def split(self, args):
        """Tensors and options by name."""
        tensors, rest = args[: self.count], args[self.count : -FLAT]
        return tensors, dict(zip(("cost",), rest, strict=False)) | _by_name(args[-FLAT:])

    def values(self, *args):
        tensors, options = self.split(args)
        return getattr(self.core, self.name)(*tensors, **options)

    def keeping(self, *args):
        """Values, and what is kept: None on the host, where nothing is."""
        tensors, options = self.split(args)
        return self.core.forward_keeping(*tensors, **options)

    def backward(self, grad_values, values, kept, *args):
        tensors, options = self.split(args)
        kept = kept if kept.is_cuda else None
        return self.core.backward(grad_values, *tensors, values, kept, **options)

    def fake_values(self, *args):
        tensors, _ = self.split(args)
        dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        if self.count == 1:
            return tensors[0].new_empty(tensors[0].shape[:-2], dtype=dtype)
        batches = [x.shape[0] for x in tensors if x.ndim == 3]
        return tensors[0].new_empty(([n for n in batches if n != 1] or batches)[:1], dtype=dtype)

    def fake_keeping(self, *args):
        values = self.fake_values(*args)
        if not args[0].is_cuda:
            return values, args[0].new_empty(0)
        size = torch.library.get_ctx().new_dynamic_size()
        return values, args[0].new_empty(size, dtype=torch.uint8)

    def fake_backward(self, grad_values, values, kept, *args):
        grads = tuple(x.new_empty(x.shape) for x in args[: self.count])
        return grads if self.count > 1 else grads[0]


class Ops(NamedTuple):
    """The torch ops of an operator."""

    operator: Operator
    values: object
    keeping: object
    backward: object


def _ops(operator, tensors, grads, cost=""):
    name, arguments = operator.name, f"{tensors}, {cost}{OPTIONS}"
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
    )


SERIES = _ops(
    Operator("soft_dtw", alignment, 2), "Tensor a, Tensor b", "(Tensor, Tensor)", "str cost, "
)
COSTS = _ops(Operator("soft_dtw_from_cost", from_cost, 1), "Tensor C", "Tensor")

# ---- autograd


def _keep(ctx, inputs, output):
    ctx.ops, *args = inputs
    ctx.name = ctx.ops.operator.name
    # Tensors among the options too: who changes one before the backward is told.
    tensors = {k: x for k, x in enumerate(args) if isinstance(x, torch.Tensor)}
    ctx.places = tuple(tensors)
    ctx.args = [None if k in tensors else x for k, x in enumerate(args)]
    ctx.save_for_backward(*output, *tensors.values())
    ctx.mark_non_differentiable(output[1])


class _SoftDTW(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ops, *args):
        output = ops.keeping(*args)
        _keep(ctx, (ops, *args), output)
        return output

    @staticmethod
    def backward(ctx, grad_values, _):
        values, kept, *tensors = ctx.saved_tensors
        args = list(ctx.args)
        for place, x in zip(ctx.places, tensors, strict=True):
            args[place] = x
        grads = first_derivative(ctx.name, ctx.ops.backward, grad_values, values, kept, *args)
        grads = (grads,) if isinstance(grads, torch.Tensor) else grads
        count = len(grads)
        wanted = zip(grads, ctx.needs_input_grad[1 : count + 1], strict=True)
        grads = (grad if needed else None for grad, needed in wanted)
        return None, *grads, *(None for _ in args[count:])


class _SoftDTWInTransforms(_SoftDTW):
    generate_vmap_rule = True
    jvp = no_forward_mode

    @staticmethod
    def forward(ops, *args):
        return ops.keeping(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _keep(ctx, inputs, output)


def _values(ops, tensors, cost, options):
    """Values, differentiable by the tensors. `cost`: its name, if the operator takes one.

    `options`: in the order of NAMES.
    """
    _refuse_gradient_of_gamma(options[0])
    flat = _flat(options)
    if flat is None:  # the core says what is wrong
        named = dict(zip(("cost", *NAMES)[-len(cost + options) :], cost + options, strict=True))
        core = getattr(ops.operator.core, ops.operator.name)
        return core(*(x.detach() for x in tensors), **named)
    if autocast_dtype(tensors[0]):
        tensors = cast(torch.float32, *tensors)
    if len(tensors) == 2 and tensors[0] is tensors[1]:
        tensors = (
            tensors[0],
            tensors[1].view_as(tensors[1]),
        )  # for compilers, which refuse one twice
    args = *tensors, *cost, *flat
    function = through(_SoftDTW, _SoftDTWInTransforms, *tensors)
    if function is not None:
        return function.apply(ops, *args)[0]
    return ops.values(*args)


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
