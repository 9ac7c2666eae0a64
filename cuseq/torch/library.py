"""torch.ops.cuseq: what compilers, exporters and function transforms are told of an operator."""

import contextlib
from functools import partial

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _are_functorch_transforms_active, _is_any_autocast_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from cuseq.runtime import checks
from cuseq.runtime.replay import replayed
from cuseq.torch.shortcut import Op

LIBRARY = torch.library.Library("cuseq", "DEF")


def define(schema, function, fake, vmap=None):
    """A torch op of this schema, as an `Op`, without autograd, which is the caller's.

    Args:
        schema: as torch.library takes it, ``name(Tensor x, ...) -> Tensor``. Its tensors come first
            and have the names by which `function` borrows them.
        function: what it does, on any device. A None among its results is, of the torch op, a
            tensor without elements.
        fake: the same with results that are allocated alone.
        vmap: the batching rule, taking the op first, then what torch.library.register_vmap says.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.cuseq, name).default
    function = replayed(function, [argument.name for argument in op._schema.arguments])

    def without_none(*args):
        results = function(*args)
        if not isinstance(results, tuple):
            return results
        return tuple(args[0].new_empty(0) if result is None else result for result in results)

    LIBRARY.impl(name, without_none, "CompositeExplicitAutograd")
    torch.library.register_fake(op, fake, lib=LIBRARY)
    torch.library.register_vmap(op, partial(vmap or one_by_one, op), lib=LIBRARY)
    return Op(op, function.find)


def one_by_one(op, info, in_dims, *args):
    """The batching rule of what is done one after the other."""
    results = []
    for k in range(info.batch_size):
        pairs = zip(args, in_dims, strict=True)
        results.append(op(*(x if dim is None else x.select(dim, k) for x, dim in pairs)))
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    results = tuple(map(torch.stack, zip(*results, strict=True)))
    return results, (0,) * len(results)


def needs_grad(*tensors):
    """Whether autograd follows one of these tensors."""
    if is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                return True
    return False


def through(function, in_transforms, followed):
    """The autograd function that a call goes through, if autograd follows it, or None.

    That is `in_transforms`, set up apart, under torch.func's transforms and in forward mode.
    """
    if not is_compiling() and (
        forward_ad._current_level >= 0 or _are_functorch_transforms_active()
    ):
        return in_transforms
    return function if followed else None


def tensor(name, x):
    """x, which has to be a tensor."""
    if not isinstance(x, torch.Tensor):
        remedy = f"pass torch.as_tensor({name})"
        raise TypeError(checks.sentence(name, "a torch.Tensor", type(x).__name__, remedy))
    return x


def indices(name, x, first):
    """Integers as a tensor: what is no tensor on the host, where values are checked.

    In a compiled call it is on the device of the `first` tensor, as a CUDA graph has it.
    """
    if x is None or isinstance(x, torch.Tensor):
        return x
    try:
        integers = torch.as_tensor(x, device=first.device if is_compiling() else None)
    except (TypeError, ValueError) as wrong:
        expected = "integers in rows of one length"
        raise type(wrong)(checks.sentence(name, expected, "others", f"convert {name}")) from wrong
    return integers if integers.numel() else integers.to(torch.int64)


@staticmethod
def no_forward_mode(ctx, *tangents):
    """The jvp of an autograd function."""
    raise NotImplementedError(
        checks.sentence(
            ctx.name,
            "derivatives in reverse mode",
            "forward mode",
            "use torch.func.grad, vjp or jacrev",
        )
    )


class NoMoreDerivatives(torch.autograd.Function):
    """An op that computes the last derivative there is; to differentiate it again raises."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name, op, options, *tensors):
        return op(tensors, options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            checks.sentence(
                ctx.name,
                "a derivative that this release has",
                "one of a higher order",
                "differentiate less often, or detach what was differentiated",
            )
        )


def last_derivative(name, op, tensors, options):
    """An op's result, which can not be differentiated again."""
    if is_grad_enabled():
        return NoMoreDerivatives.apply(name, op, options, *tensors)
    return op(tensors, options)


# ---- autocast


def autocast_dtype(x):
    """The dtype of autocast on the device of x, or None where it is off."""
    if not is_compiling() and not _is_any_autocast_enabled():
        return None
    kind = x.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def no_autocast(x):
    """Autocast switched off on the device of x."""
    if autocast_dtype(x):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()


def cast(dtype, *tensors):
    """The tensors in the dtype, but float64 and what is not floating, which autocast leaves."""
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )
