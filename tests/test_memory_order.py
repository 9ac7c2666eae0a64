"""y and grad_x of the causal convolution lie in memory as x does, where the framework can."""

import numpy as np
import pytest

import cuseq
from cuseq.runtime import arrays
from tests import frameworks
from tests.frameworks import (
    CUPY,
    JAX_CPU,
    JAX_CUDA,
    NUMPY,
    TORCH_CPU,
    TORCH_CUDA,
    every_place,
    every_place_and_dtype,
    over,
)
from tests.samples import normal
from tests.tolerances import assert_close

KEEPS_ORDER = [NUMPY, TORCH_CPU, CUPY, TORCH_CUDA]
every_torch = over([TORCH_CPU, TORCH_CUDA])
both_layouts = pytest.mark.parametrize("layout", ["bdl", "bld"])
SHAPE = 2, 33, 18  # of x, in either layout


def transposed(x):
    """The same numbers, with the last two axes exchanged in memory."""
    return x.swapaxes(1, 2).copy().swapaxes(1, 2)


def arguments(x, layout):
    """Weight and bias for x."""
    D = x.shape[layout.index("d")]
    return normal(D, 4, seed=1, dtype="float32"), normal(D, seed=2, dtype="float32")


def results(place, grad_y, x, layout, place_of_gradient=None, **options):
    """y and grad_x as arrays of their place: everything but grad_y is of `place`."""
    options |= {"layout": layout, "activation": "silu"}
    x, *others = (place.array(array) for array in (x, *arguments(x, layout)))
    grad_y = (place_of_gradient or place).array(grad_y)
    y = cuseq.causal_conv1d(x, *others, **options)
    again, _ = cuseq.causal_conv1d_with_state(x, *others, **options)
    assert strides(again) == strides(y)
    return y, cuseq.causal_conv1d_backward(grad_y, x, *others, **options).x


def strides(x):
    """Strides in elements, of any framework's array."""
    return arrays.borrow("x", x, "f").strides


def strides_of(shape, is_transposed):
    """What `strides` says of new memory of this shape, its last two axes exchanged or not."""
    _, M, N = shape
    return (M * N, 1, M) if is_transposed else (M * N, N, 1)


@every_place_and_dtype
@both_layouts
@pytest.mark.parametrize("seq_idx", [None, [[0] * 10 + [1] * 5 + [-1] * 50, [0] * 65]])
def test_a_transposed_x_gives_transposed_results(place, dtype, layout, seq_idx):
    """In x's shape, with the values of a contiguous x; the strides of grad_y do not matter."""
    x, grad_y = (normal(*SHAPE, seed=seed, dtype=dtype) for seed in (0, 4))
    length = SHAPE[layout.index("l")]
    options = {"seq_idx": seq_idx and [row[:length] for row in seq_idx]}
    exact = grad_y.astype(np.float64), x.astype(np.float64)
    wanted = results(NUMPY, *exact, layout, **options)
    for outer in (grad_y, transposed(grad_y)):
        got = results(place, outer, transposed(x), layout, **options)
        for result, expected, name in zip(got, wanted, ["y", "grad_x"], strict=True):
            place.assert_own(result)
            assert strides(result) == strides_of(SHAPE, place in KEEPS_ORDER)
            assert place.numpy(result).dtype == x.dtype
            assert_close(place.numpy(result), expected, f"causal_conv1d.{name}")


VIEWS = {  # of an array of shape (2, 8, 6): (the view, whether its last axes are transposed)
    "contiguous": (lambda x: x, False),
    "sliced": (lambda x: x[:, ::2, 1::3], False),
    "reversed": (lambda x: x[:, ::-1, ::-1], False),
    "one row repeated": (lambda x: np.broadcast_to(x[:, :1], x.shape), False),
    "one column repeated": (lambda x: np.broadcast_to(x[:, :, :1], x.shape), False),
    "one number repeated": (lambda x: np.broadcast_to(x[:1, :1, :1], x.shape), False),
    "one column of many": (lambda x: x[:, :, :1].swapaxes(1, 2), False),
    "one row of many": (lambda x: x[:, :1].swapaxes(1, 2), False),
    "batch in between": (lambda x: x.transpose(1, 0, 2), False),
    "transposed and sliced": (lambda x: x.swapaxes(1, 2)[:, ::2, ::3], True),
    "transposed and reversed": (lambda x: x.swapaxes(1, 2)[:, ::-1, ::-1], True),
    "transposed and a batch repeated": (
        lambda x: np.broadcast_to(x[:1].swapaxes(1, 2), (3, 6, 8)),
        True,
    ),
    "transposed and batch in between": (lambda x: x.transpose(1, 2, 0), True),
}


@over(KEEPS_ORDER)
@both_layouts
@pytest.mark.parametrize("name", VIEWS)
def test_only_a_transposition_is_followed(place, layout, name):
    """Steps, repeats and axes of one element are not: results have memory of their own."""
    view, is_transposed = VIEWS[name]
    x = view(normal(2, 8, 6, dtype="float32"))
    if place.strides == "positive" and min(x.strides) < 0:
        pytest.skip(f"{place} has no such strides")
    grad_y = normal(*x.shape, seed=4, dtype="float32")
    wanted = results(place, grad_y, x.copy(), layout)
    got = results(place, grad_y, x, layout)
    for result, expected, what in zip(got, wanted, ["y", "grad_x"], strict=True):
        assert strides(result) == strides_of(x.shape, is_transposed)
        assert_close(place.numpy(result), place.numpy(expected), f"causal_conv1d.{what}")


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(pair, marks=[mark for place in pair for mark in frameworks.marks(place)])
        for pair in [
            (NUMPY, TORCH_CPU),
            (TORCH_CPU, NUMPY),
            (TORCH_CPU, JAX_CPU),
            (CUPY, TORCH_CUDA),
            (TORCH_CUDA, CUPY),
            (TORCH_CUDA, JAX_CUDA),
        ]
    ],
    ids=str,
)
def test_grad_x_is_of_grad_ys_kind_in_the_order_of_x(places):
    first, second = places
    x, grad_y = (normal(*SHAPE, seed=seed, dtype="float32") for seed in (0, 4))
    _, wanted = results(first, grad_y, x, "bdl")
    _, grad_x = results(first, grad_y, transposed(x), "bdl", second)
    second.assert_own(grad_x)
    assert strides(grad_x) == strides_of(SHAPE, second in KEEPS_ORDER)
    assert_close(second.numpy(grad_x), first.numpy(wanted), "causal_conv1d.grad_x")


@every_place
def test_packed_sequences_stay_row_by_row(place):
    x, weight = normal(9, 5), normal(5, 4, seed=1)
    options = {"cu_seqlens": [0, 3, 9]}
    for given in (x, x.T.copy().T):
        given, filters, grad_y = (place.array(array) for array in (given, weight, x))
        y = cuseq.causal_conv1d_varlen(given, filters, **options)
        gradients = cuseq.causal_conv1d_varlen_backward(grad_y, given, filters, **options)
        assert strides(y) == strides(gradients.x) == (5, 1)


@every_torch
@both_layouts
def test_autograd(place, layout):
    """x transposed as a leaf, and as a view of what autograd follows."""
    adapter = pytest.importorskip("cuseq.torch")
    numbers, weight = normal(*SHAPE), arguments(np.empty(SHAPE), layout)[0]
    outer, weight = place.array(normal(*SHAPE, seed=4)), place.array(weight)

    def gradient(leaf, x):
        y = adapter.causal_conv1d(x, weight, layout=layout)
        assert strides(y.detach()) == strides(x.detach())
        y.backward(outer)
        assert strides(leaf.grad) == strides(leaf.detach())
        return leaf.grad

    contiguous = place.array(numbers).requires_grad_()
    leaf = place.array(transposed(numbers)).requires_grad_()
    base = place.array(numbers.swapaxes(1, 2).copy()).requires_grad_()
    wanted = place.numpy(gradient(contiguous, contiguous))
    assert_close(place.numpy(gradient(leaf, leaf)), wanted, "causal_conv1d.grad_x")
    of_base = place.numpy(gradient(base, base.transpose(1, 2)))
    assert_close(of_base.swapaxes(1, 2), wanted, "causal_conv1d.grad_x")


@every_torch
def test_a_transposed_result_may_be_changed_in_place(place):
    """What follows a convolution may do so, a ReLU say; autograd forbids it of views."""
    adapter = pytest.importorskip("cuseq.torch")
    weight = place.array(normal(SHAPE[1], 4, seed=1))
    gradients = []
    for lay in (np.copy, transposed):
        x = place.array(lay(normal(*SHAPE))).requires_grad_()
        adapter.causal_conv1d(x, weight).relu_().sum().backward()
        gradients.append(place.numpy(x.grad))
    assert_close(gradients[1], gradients[0], "causal_conv1d.grad_x")
