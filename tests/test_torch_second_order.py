"""Second derivatives of soft-DTW as autograd and torch.func see them."""

import pytest

import cuseq
from tests.test_torch import adapter, every_device, every_option, followed, plain, torch


def squares(x, y):
    return (x[:, :, None] - y[:, None]).square().sum(-1)


def gradgradcheck(function, *inputs):
    assert torch.autograd.gradgradcheck(function, inputs, nondet_tol=0.0)


@every_device
@pytest.mark.parametrize("a, b", [((2, 4, 2), (2, 5, 2)), ((1, 3, 1), (3, 2, 1)), ((4,), (3,))])
def test_of_series(place, a, b):
    a, b = followed(place, *a), followed(place, *b, seed=1)
    gradgradcheck(lambda a, b: adapter.soft_dtw(a, b, gamma=0.7), a, b)


@every_device
@every_option
def test_with_options(place, options):
    options = {"gamma": 0.7} | options
    a, b = followed(place, 3, 6, 2), followed(place, 3, 5, 2, seed=1)
    gradgradcheck(lambda a, b: adapter.soft_dtw(a, b, **options), a, b)


@every_device
@pytest.mark.parametrize("options", [{}, {"bandwidth": 1}, {"lengths_a": [4, 2]}], ids=str)
def test_of_costs(place, options):
    C = plain(place, 2, 4, 5).abs().requires_grad_()
    gradgradcheck(lambda C: adapter.soft_dtw_from_cost(C, gamma=0.7, **options), C)


@every_device
@pytest.mark.parametrize("cost", ["sqeuclidean", squares], ids=["named", "callable"])
def test_of_the_loss(place, cost):
    """A callable cost is differentiated twice by torch."""
    x, y = followed(place, 2, 4, 2), followed(place, 2, 5, 2, seed=1)
    gradgradcheck(adapter.SoftDTWLoss(0.7, cost=cost), x, y)
    gradgradcheck(adapter.SoftDTWLoss(0.7, cost=cost, normalize=True), x, y)


@every_device
def test_is_the_cores_product(place):
    """Of a weighted sum of values, through create_graph."""
    a, b = followed(place, 3, 6, 2), followed(place, 3, 5, 2, seed=1)
    v, w = plain(place, 3, 6, 2, seed=2), plain(place, 3, 5, 2, seed=3)
    gradients = torch.autograd.grad(adapter.soft_dtw(a, b).sum(), (a, b), create_graph=True)
    along = (gradients[0] * v).sum() + (gradients[1] * w).sum()
    products = torch.autograd.grad(along, (a, b))
    for got, wanted in zip(products, cuseq.soft_dtw_hvp(a.detach(), b.detach(), v, w), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@every_device
def test_hessian_of_torch_func(place):
    """Of a pair, and of each pair of a batch; it is symmetric."""
    a, b = plain(place, 3, 4, 2), plain(place, 3, 5, 2, seed=1)

    def value(a, b):
        return adapter.soft_dtw(a, b, gamma=0.7)

    hessian = torch.func.jacrev(torch.func.jacrev(value))
    each = torch.stack([hessian(a[k], b[k]) for k in range(3)])
    torch.testing.assert_close(torch.func.vmap(hessian)(a, b), each)
    flat = each.reshape(3, 8, 8)
    torch.testing.assert_close(flat, flat.transpose(1, 2))
    reference = torch.autograd.functional.hessian(lambda x: value(x, b[0]), a[0])
    torch.testing.assert_close(each[0], reference)


@every_device
def test_a_third_derivative_is_refused(place):
    a, b = followed(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1)
    (first,) = torch.autograd.grad(adapter.soft_dtw(a, b).sum(), a, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), a, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^soft_dtw: expected .+, got .+; .+"):
        second.sum().backward()


@every_device
def test_a_penalty_on_the_gradient_can_be_descended(place):
    """What double backward is for: the gradient's norm as a loss."""
    a, b = followed(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1)

    def penalty():
        (gradient,) = torch.autograd.grad(adapter.soft_dtw(a, b).sum(), a, create_graph=True)
        return (gradient**2).sum()

    before = penalty()
    before.backward()
    with torch.no_grad():
        a -= 1e-3 * a.grad
    assert penalty() < before
