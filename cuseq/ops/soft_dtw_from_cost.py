"""Soft-DTW of a given cost matrix."""

from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw import borrow_cost, borrow_for_backward
from cuseq.ops.soft_dtw_plan import ALIGNMENT, ENTROPY
from cuseq.runtime import arrays
from cuseq.runtime.replay import replayed


@replayed
def soft_dtw_from_cost(C, *, gamma=1.0, bandwidth=None, lengths_a=None, lengths_b=None):
    """Soft-DTW value of each cost matrix.

    ``R[i,j] = C[i,j] + softmin(R[i-1,j-1], R[i-1,j], R[i,j-1])``, as `cuseq.soft_dtw` with the
    costs as they are given.

    Args:
        C: costs of shape (N, M) or (B, N, M), float64, float32, float16 or bfloat16, of any library
            and with any strides; costs may be negative. +inf forbids a cell; -inf counts as NaN.
        gamma, bandwidth, lengths_a, lengths_b: as `cuseq.soft_dtw` takes them. Beyond the lengths
            and outside of the band no cost matters.

    Returns:
        Values of shape (B,), or () for a single matrix: float64 for float64 costs, else float32.
        NaN gives NaN for its sample alone; +inf where no path is left.

    Raises: ValueError and TypeError as `cuseq.soft_dtw`.

    >>> import numpy as np, cuseq
    >>> print(cuseq.soft_dtw_from_cost(np.array([[1.0, 5.0], [5.0, 2.0]]), gamma=0.0))
    3.0
    """
    call = borrow_cost("soft_dtw_from_cost", C, gamma, bandwidth, lengths_a, lengths_b)
    values, _ = engine.forward(call)
    return arrays.give_back(values, C)


@replayed
def soft_dtw_from_cost_value_and_grad(
    C, *, gamma=1.0, bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW values, and the gradient of their sum by the costs: the expected alignment.

    Args: as `soft_dtw_from_cost`.

    Returns:
        values, grad_C: grad_C of the shape and dtype of C. It is exactly 0 for forbidden cells,
        outside of the band, beyond the lengths, and for a sample whose value is infinite.

    Raises: as `soft_dtw_from_cost`.

    >>> import numpy as np, cuseq
    >>> value, grad_C = cuseq.soft_dtw_from_cost_value_and_grad(np.zeros((2, 2)))
    >>> np.round(grad_C, 4)
    array([[1.    , 0.3333],
           [0.3333, 1.    ]])
    """
    call = borrow_cost("soft_dtw_from_cost", C, gamma, bandwidth, lengths_a, lengths_b)
    values, (grad_C,) = engine.value_and_gradients(call, ALIGNMENT)
    return arrays.give_back(values, C), arrays.give_back(grad_C, C)


@replayed
def soft_dtw_from_cost_value_and_grad_gamma(
    C, *, gamma=1.0, bandwidth=None, lengths_a=None, lengths_b=None
):
    """Soft-DTW values, and the derivative of each by its gamma: minus the alignment's entropy.

    Args: as `soft_dtw_from_cost`.

    Returns:
        values, grad_gamma: both of shape (B,), or () for a single matrix, whatever gamma's shape.

    Raises: as `soft_dtw_from_cost`.

    >>> import numpy as np, cuseq
    >>> value, slope = cuseq.soft_dtw_from_cost_value_and_grad_gamma(np.zeros((2, 2)), gamma=0.5)
    >>> print(f"{slope:.6f}")  # three paths, all alike: -log 3
    -1.098612
    """
    call = borrow_cost("soft_dtw_from_cost", C, gamma, bandwidth, lengths_a, lengths_b)
    values, (grad_gamma,) = engine.value_and_gradients(call, ENTROPY)
    return arrays.give_back(values, C), arrays.give_back(grad_gamma, C)


def forward_keeping(C, **options):
    """For adapters: values as `soft_dtw_from_cost` returns them, and what `backward` wants.

    That is an opaque array of the caller's kind, None on the host. `options` are all it takes.
    """
    call = borrow_cost("soft_dtw_from_cost", C, **options)
    values, kept = engine.forward(call, ALIGNMENT)
    return arrays.give_back(values, C), kept and arrays.give_back(kept, C)


def kept_size(C, **options):
    """For adapters: bytes of what `forward_keeping` keeps on a CUDA device."""
    return engine.kept_size(borrow_cost("soft_dtw_from_cost", C, **options), ALIGNMENT)


def backward(grad_values, C, values, kept, **options):
    """For adapters: the gradient of ``sum(grad_values * values)`` by C."""
    call = borrow_cost("soft_dtw_from_cost", C, **options)
    given = borrow_for_backward("soft_dtw_from_cost", call, "C", grad_values, values, kept)
    (grad_C,) = engine.backward(call, *given, ALIGNMENT)
    return arrays.give_back(grad_C, C)
