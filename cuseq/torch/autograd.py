"""What the operators' autograd shares."""

import torch

from cuseq.runtime import checks


def refuse_second_derivative(operator):
    if torch.is_grad_enabled():
        raise NotImplementedError(
            checks.sentence(
                operator,
                "a first derivative in this release",
                "a backward with create_graph=True",
                "leave create_graph out",
            )
        )


def needs_grad(*tensors):
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )
