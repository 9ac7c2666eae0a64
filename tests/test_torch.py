"""cuseq.torch: the gradients that autograd sees, SoftDTWLoss, states, CUDA graphs."""

import numpy as np
import pytest

import cuseq
from tests import frameworks
from tests.frameworks import TORCH_CPU, TORCH_CUDA, over
from tests.oracles import soft_dtw as dtw_oracle
from tests.samples import normal
from tests.tolerances import assert_close

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("cuseq.torch")

every_device = over([TORCH_CPU, TORCH_CUDA])


def plain(place, *shape, seed=0, dtype="float64"):
    """A random tensor, no view of another."""
    return place.array(normal(*shape, seed=seed, dtype=dtype)).clone()


def followed(place, *shape, seed=0, dtype="float64"):
    """A random tensor that autograd follows."""
    return plain(place, *shape, seed=seed, dtype=dtype).requires_grad_()


def conv_tensors(place, B=2, D=3, L=7, W=4, S=3, make=followed):
    """x, weight, bias, initial_state."""
    return (
        make(place, B, D, L),
        make(place, D, W, seed=1),
        make(place, D, seed=2),
        make(place, B, D, S, seed=3),
    )


OPTIONS = [  # of soft-DTW, for 3 pairs of series of lengths 6 and 5
    {"cost": "euclidean"},
    {"cost": "cityblock"},
    {"cost": "cosine"},
    {"bandwidth": 1},
    {"bandwidth": [0, 2, 9]},
    {"lengths_a": [6, 1, 4]},
    {"lengths_a": [3, 6, 4], "lengths_b": [5, 2, 1]},
    {"gamma": [0.3, 1.0, 5.0]},
    {"cost": "euclidean", "bandwidth": [0, 2, 1], "gamma": [2.0, 0.5, 1.0], "lengths_b": [2, 3, 5]},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def as_tensors(place, options):
    """Options by pair as tensors of this place."""
    return {
        name: place.array(np.array(x)) if isinstance(x, list) else x for name, x in options.items()
    }


def gradcheck(function, *inputs):
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)


# Derivatives:


@every_device
@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (3, 1)], ids=str)
def test_soft_dtw_divergence(place, options, batches):
    """Values and gradients are the core's; equal series have none."""
    options = {"gamma": 0.7} | options
    a, b = followed(place, batches[0], 6, 2), followed(place, batches[1], 5, 2, seed=1)
    values = adapter.soft_dtw_divergence(a, b, **options)
    gradients = torch.autograd.grad(values.sum(), (a, b))
    core = cuseq.soft_dtw_divergence_value_and_grad(a.detach(), b.detach(), **options)
    wanted, by_core = core
    torch.testing.assert_close(values.detach(), wanted)
    for got, expected in zip(gradients, by_core, strict=True):
        torch.testing.assert_close(got, expected)
    options.pop("lengths_b", None), options.pop("lengths_a", None)
    assert not adapter.soft_dtw_divergence(a, a, **(options if batches[0] == 3 else {})).any()


@every_device
def test_soft_dtw_divergence_of_one_pair(place):
    a, b = followed(place, 6), followed(place, 5, seed=1)
    value = adapter.soft_dtw_divergence(a, b, gamma=0.7)
    assert value.shape == ()
    torch.testing.assert_close(
        value.detach(), cuseq.soft_dtw_divergence(a.detach(), b.detach(), gamma=0.7)
    )


@every_device
@pytest.mark.parametrize("a, b", [((2, 4, 2), (2, 5, 2)), ((1, 3, 1), (3, 2, 1)), ((4,), (3,))])
def test_soft_dtw_derivative(place, a, b):
    gradcheck(
        lambda a, b: adapter.soft_dtw(a, b, gamma=0.7),
        followed(place, *a),
        followed(place, *b, seed=1),
    )


@every_device
@every_option
@pytest.mark.parametrize("batch_a", [3, 1])
def test_soft_dtw_derivative_with_options(place, options, batch_a):
    options = {"gamma": 0.7} | options
    a, b = followed(place, batch_a, 6, 2), followed(place, 3, 5, 2, seed=1)
    gradcheck(lambda a, b: adapter.soft_dtw(a, b, **options), a, b)


@every_device
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv1d_derivative(place, layout, activation):
    x, weight, bias, state = conv_tensors(place)
    x = (x if layout == "bdl" else x.transpose(1, 2)).detach().requires_grad_()

    def function(x, weight, bias, state):
        return adapter.causal_conv1d(
            x, weight, bias, activation=activation, layout=layout, initial_state=state
        )

    gradcheck(function, x, weight, bias, state)
    gradcheck(lambda x, weight: function(x, weight, None, None), x, weight)


SEQ_IDX = [[-1, 0, 0, 3, 3, 0, 0], [4, 4, 4, 4, 4, 4, -2]]


@every_device
@pytest.mark.parametrize("L", [7, 3])
def test_causal_conv1d_derivative_by_index(place, L):
    index = [row[:L] for row in SEQ_IDX]
    for seq_idx in index, place.array(np.array(index)):

        def function(x, weight, bias, state, seq_idx=seq_idx):
            options = {"activation": "silu", "seq_idx": seq_idx, "initial_state": state}
            y, final_state = adapter.causal_conv1d_with_state(x, weight, bias, **options)
            return y, final_state, adapter.causal_conv1d(x, weight, bias, **options)

        gradcheck(function, *conv_tensors(place, L=L, S=4))
        gradcheck(lambda x, weight: function(x, weight, None, None), *conv_tensors(place, L=L)[:2])


@every_device
@pytest.mark.parametrize("ends", [[0, 2, 2, 7], [0, 0, 7]], ids=str)
def test_causal_conv1d_varlen_derivative(place, ends):
    _, weight, bias, state = conv_tensors(place, B=len(ends) - 1, S=4)
    x = followed(place, 7, 3)
    for cu_seqlens in ends, place.array(np.array(ends, np.int32)):

        def function(x, weight, bias, state, cu_seqlens=cu_seqlens):
            options = {"activation": "silu", "cu_seqlens": cu_seqlens, "initial_state": state}
            y, final_state = adapter.causal_conv1d_varlen_with_state(x, weight, bias, **options)
            return y, final_state, adapter.causal_conv1d_varlen(x, weight, bias, **options)

        gradcheck(function, x, weight, bias, state)
        gradcheck(lambda x, weight: function(x, weight, None, None), x, weight)


@every_device
def test_indices_that_change_before_the_backward(place):
    x, weight, bias, state = conv_tensors(place)
    index = place.array(np.array(SEQ_IDX))
    y = adapter.causal_conv1d(x, weight, bias, seq_idx=index, initial_state=state)
    index.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_device
@pytest.mark.parametrize("L", [2, 6])
def test_causal_conv1d_derivative_through_the_final_state(place, L):
    def function(x, weight, bias, state):
        return adapter.causal_conv1d_with_state(
            x, weight, bias, activation="silu", initial_state=state
        )

    gradcheck(function, *conv_tensors(place, L=L, S=4))
    gradcheck(lambda *tensors: function(*tensors)[1], *conv_tensors(place, L=L, S=4))


@every_device
def test_a_filter_of_conv1d(place):
    """A weight (D, 1, W), as torch.nn.Conv1d has, gets its gradient in that shape."""
    x, weight, bias, _ = conv_tensors(place)
    reference = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=3, groups=3)[..., :7]
    wanted = torch.autograd.grad(reference.square().sum(), (x, weight, bias))
    y = adapter.causal_conv1d(x, weight[:, None], bias)
    got = torch.autograd.grad(y.square().sum(), (x, weight, bias))
    torch.testing.assert_close(y, reference)
    torch.testing.assert_close(got, wanted)


@every_device
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_update_derivative(place, layout):
    x, weight, bias, state = conv_tensors(place, L=2, S=4)
    x = (x if layout == "bdl" else x.transpose(1, 2)).detach().requires_grad_()

    def function(x, state, weight, bias):
        state = state.clone()
        y = adapter.causal_conv1d_update(x, state, weight, bias, activation="silu", layout=layout)
        return y, state

    gradcheck(function, x, state, weight, bias)


@every_device
def test_update_derivative_through_a_chain_of_steps(place):
    """Step by step, gradients are those of the whole signal; a 2-d x is one token."""
    x, weight, bias, state = conv_tensors(place, L=5)

    def steps(x, weight, bias, state):
        state = state.clone()
        outputs = [
            adapter.causal_conv1d_update(x[..., t], state, weight, bias, activation="silu")
            for t in range(x.shape[2])
        ]
        return torch.stack(outputs, dim=2), state

    def whole(x, weight, bias, state):
        return adapter.causal_conv1d_with_state(
            x, weight, bias, activation="silu", initial_state=state
        )

    gradcheck(steps, x, weight, bias, state)
    tensors = x, weight, bias, state
    got, wanted = steps(*tensors), whole(*tensors)
    torch.testing.assert_close(got, wanted)
    losses = [y.square().sum() + state.square().sum() for y, state in (got, wanted)]
    got, wanted = (torch.autograd.grad(loss, tensors) for loss in losses)
    torch.testing.assert_close(got, wanted)


@every_device
def test_a_detached_state_ends_the_chain(place):
    x, weight, bias, _ = conv_tensors(place, L=1)
    state = plain(place, 2, 3, 3)
    adapter.causal_conv1d_update(x, state, weight, bias)
    assert state.requires_grad
    state = state.detach()
    y = adapter.causal_conv1d_update(plain(place, 2, 3, 1, seed=5), state, weight, bias)
    assert torch.autograd.grad(y.sum(), x, allow_unused=True) == (None,)


# What comes in and goes out of the graph:


@every_device
def test_values_are_those_of_the_core(place):
    a, b = followed(place, 3, 34, 2), followed(place, 3, 20, 2, seed=1)
    values, gradients = cuseq.soft_dtw_value_and_grad(a.detach(), b.detach(), gamma=0.3)
    ours = adapter.soft_dtw(a, b, gamma=0.3)
    assert torch.equal(ours, values)
    assert torch.equal(adapter.soft_dtw(a.detach(), b.detach(), gamma=0.3), values)
    for got, wanted in zip(torch.autograd.grad(ours.sum(), (a, b)), gradients, strict=True):
        assert torch.equal(got, wanted)

    tensors = conv_tensors(place)
    x, weight, bias, state = [tensor.detach() for tensor in tensors]
    wanted = cuseq.causal_conv1d_with_state(x, weight, bias, initial_state=state)
    got = adapter.causal_conv1d_with_state(*tensors[:3], initial_state=tensors[3])
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
    y = adapter.causal_conv1d(*tensors[:3], initial_state=tensors[3])
    assert torch.equal(y, wanted[0])
    ones = torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape)  # as sum() passes them
    wanted = cuseq.causal_conv1d_backward(ones, x, weight, bias, initial_state=state)
    got = torch.autograd.grad(y.sum(), tensors)
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


@every_device
@every_option
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("batch_b", [3, 1])
def test_options_are_those_of_the_core(place, options, dtype, batch_b):
    """As lists and as tensors, with gradients and without, by the function and by the loss."""
    a, b = (
        followed(place, 3, 6, 2, dtype=dtype),
        followed(place, batch_b, 5, 2, seed=1, dtype=dtype),
    )
    wanted, gradients = cuseq.soft_dtw_value_and_grad(a.detach(), b.detach(), **options)
    assert torch.isfinite(wanted).all() and all(gradient.any() for gradient in gradients)
    with torch.no_grad():
        assert torch.equal(adapter.soft_dtw(a, b, **options), wanted)
    of_call = {f"lengths_{'xy'['ab'.index(k[-1])]}": x for k, x in options.items() if "len" in k}
    of_loss = {name: x for name, x in options.items() if "len" not in name}
    loss = adapter.SoftDTWLoss(**of_loss, reduction="none")
    for values in (
        adapter.soft_dtw(a, b, **options),
        adapter.soft_dtw(a, b, **as_tensors(place, options)),
        loss(a, b, **of_call),
        loss(a, b, **as_tensors(place, of_call)),
    ):
        assert torch.equal(values, wanted)
        for got, gradient in zip(torch.autograd.grad(values.sum(), (a, b)), gradients, strict=True):
            assert torch.equal(got, gradient)


@every_device
@pytest.mark.parametrize("dtype", frameworks.DTYPES)
def test_gradients_have_the_dtype_of_their_tensors(place, dtype):
    a, b = followed(place, 2, 5, 3, dtype=dtype), followed(place, 2, 4, 3, seed=1, dtype=dtype)
    adapter.soft_dtw(a, b).sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (a.dtype, b.dtype)
    x = followed(place, 2, 3, 7, dtype=dtype)
    weight = followed(place, 3, 4, seed=1, dtype="float32")
    state = followed(place, 2, 3, 3, seed=3, dtype="bfloat16")
    y, final_state = adapter.causal_conv1d_with_state(x, weight, initial_state=state)
    (y.float().sum() + final_state.float().sum()).backward()
    assert [t.grad.dtype for t in (x, weight, state)] == [t.dtype for t in (x, weight, state)]


def incoming(kind, y):
    """A gradient for y with strides that autograd or a user may bring."""
    if kind == "broadcast":
        return torch.ones((), dtype=y.dtype, device=y.device).expand_as(y)
    values = torch.arange(1.0, y.numel() + 1, dtype=y.dtype, device=y.device)
    if kind == "transposed":
        return values.view(y.shape[::-1]).permute(*reversed(range(y.ndim)))
    return values.repeat_interleave(2)[::2].as_strided(
        y.shape, [2 * stride for stride in torch.empty(y.shape).stride()]
    )


@every_device
@pytest.mark.parametrize("kind", ["broadcast", "transposed", "sliced"])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_strides_of_incoming_gradients(place, kind, layout):
    a, b = followed(place, 3, 5, 2), followed(place, 3, 4, 2, seed=1)
    x, weight, bias, state = conv_tensors(place, D=5, L=5)
    options = {"activation": "silu", "layout": layout, "initial_state": state}
    for outputs, tensors in [
        ((adapter.soft_dtw(a, b),), (a, b)),
        (adapter.causal_conv1d_with_state(x, weight[:5], bias, **options), (x, weight, state)),
    ]:
        odd = [incoming(kind, y) for y in outputs]
        even = [gradient.clone(memory_format=torch.contiguous_format) for gradient in odd]
        got = torch.autograd.grad(outputs, tensors, odd, retain_graph=True)
        wanted = torch.autograd.grad(outputs, tensors, even)
        torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


@every_device
def test_the_gradient_weighs_each_pair(place):
    a, b = normal(3, 5, 2), normal(1, 4, 2, seed=1)
    weights = np.array([0.5, -2.0, 3.0])
    tensors = [place.array(x).requires_grad_() for x in (a, b)]
    options = {"cost": "euclidean", "bandwidth": [1, 0, 4], "lengths_a": [5, 3, 1]}
    for given in ({}, options):
        values = adapter.soft_dtw(*tensors, **given)
        gradients = torch.autograd.grad(values, tensors, place.array(weights))
        _, *expected = dtw_oracle.batch(a, b, 1.0, weights, **given)
        for got, wanted, name in zip(gradients, expected, ["grad_a", "grad_b"], strict=True):
            assert_close(place.numpy(got), wanted, f"soft_dtw.{name}")


@every_device
def test_pairs_that_are_not_finite(place):
    """Their gradients are NaN or 0, whatever weighs them; those of others stay what they are."""
    a, b = normal(4, 6, 2), normal(4, 5, 2, seed=1)
    lengths, weights = [6, 6, 6, 5], np.array([2.0, -3.0, 0.5, 4.0])
    a[1, 2, 0], a[2, 0, 1], a[3, 5] = np.nan, np.inf, np.nan
    tensors = [place.array(x).requires_grad_() for x in (a, b)]
    values = adapter.soft_dtw(*tensors, lengths_a=lengths)
    values.backward(place.array(weights))
    wanted, *expected = dtw_oracle.batch(a, b, 1.0, weights, lengths_a=lengths)
    assert_close(place.numpy(values), wanted, "soft_dtw.values")
    for tensor, gradient, name in zip(tensors, expected, ["grad_a", "grad_b"], strict=True):
        assert_close(place.numpy(tensor.grad), gradient, f"soft_dtw.{name}")
    assert not tensors[0].grad[2].any() and not tensors[0].grad[3, 5].any()


@every_device
def test_a_gamma_that_autograd_follows_is_refused(place):
    """There is no derivative by gamma here, and none is dropped in silence."""
    a, b, gamma = followed(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1), torch.ones(2)
    gamma = gamma.to(a.device).requires_grad_()
    for series in (a, a.detach()):
        with pytest.raises((ValueError, NotImplementedError), match=r"^gamma: expected .+; .+"):
            adapter.soft_dtw(series, b, gamma=gamma)


@every_device
def test_only_what_needs_a_gradient_gets_one(place):
    a, b = plain(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1)
    for one, other in ((a, b), (b, a)):
        one = one.clone().requires_grad_()
        adapter.soft_dtw(*((one, other) if other is b else (other, one))).sum().backward()
        assert one.grad is not None and other.grad is None
    names = ["x", "weight", "bias", "initial_state"]
    all_tensors = dict(zip(names, conv_tensors(place), strict=True))
    y = adapter.causal_conv1d(**all_tensors)
    wanted = dict(
        zip(names, torch.autograd.grad(y.sum(), tuple(all_tensors.values())), strict=True)
    )
    for name in names:
        tensors = {key: tensor.detach() for key, tensor in all_tensors.items()}
        tensors[name].requires_grad_()
        adapter.causal_conv1d(**tensors).sum().backward()
        for other in names:
            gradient = tensors[other].grad
            assert gradient is None if other != name else torch.equal(gradient, wanted[name])


@every_device
def test_final_state_alone_and_output_alone(place):
    """An output that nothing uses has no gradient, which counts as zeros."""
    tensors = conv_tensors(place, L=2)
    y, final_state = adapter.causal_conv1d_with_state(*tensors[:3], initial_state=tensors[3])
    grad_x, grad_weight, *_ = torch.autograd.grad(final_state.sum(), tensors)
    assert torch.equal(grad_x, torch.ones_like(grad_x)) and not grad_weight.any()


@every_device
def test_nothing_is_followed_where_nothing_needs_it(place):
    a, b = followed(place, 2, 5, 2), followed(place, 2, 4, 2, seed=1)
    x, weight, bias, state = conv_tensors(place)
    with torch.no_grad():
        results = [
            adapter.soft_dtw(a, b),
            adapter.causal_conv1d(x, weight, bias, initial_state=state),
            *adapter.causal_conv1d_with_state(x, weight, bias, initial_state=state),
            adapter.SoftDTWLoss()(a, b),
            adapter.causal_conv1d_update(x, state, weight, bias),
        ]
    assert not any(result.requires_grad for result in results)
    assert not adapter.soft_dtw(a.detach(), b.detach()).requires_grad


@every_device
def test_second_derivatives_of_convolutions_are_refused(place):
    x, weight, bias, state = conv_tensors(place)
    pool = plain(place, 2, 3, 3)
    for name, leaf, y in [
        ("causal_conv1d", x, adapter.causal_conv1d(x, weight, bias, initial_state=state)),
        ("causal_conv1d", x, adapter.causal_conv1d_update(x, pool, weight, bias)),
    ]:
        (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
        with pytest.raises(NotImplementedError, match=rf"^{name}\w*: expected .+, got .+; .+"):
            grad.sum().backward()


@every_device
def test_inputs_changed_before_the_backward_are_noticed(place):
    a, b = followed(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1)
    value = adapter.soft_dtw(a, b).sum()
    b += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@every_device
def test_options_changed_before_the_backward_change_nothing_unnoticed(place):
    a, b = followed(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1)
    numbers = {"gamma": [0.5, 2.0], "bandwidth": [1, 2], "lengths_a": [5, 3], "lengths_b": [2, 4]}
    wanted = torch.autograd.grad(adapter.soft_dtw(a, b, **numbers).sum(), a)[0]
    for name, new in {"gamma": 1, "bandwidth": 0, "lengths_a": 4, "lengths_b": 1}.items():
        options = as_tensors(place, numbers)
        value = adapter.soft_dtw(a, b, **options).sum()
        options[name].fill_(new)
        try:
            (got,) = torch.autograd.grad(value, a)
        except RuntimeError as noticed:
            assert "modified by an inplace operation" in str(noticed)
        else:
            assert torch.equal(got, wanted)


# The state:


@every_device
def test_a_state_is_updated_in_place(place):
    x, weight, bias, _ = conv_tensors(place, L=2, make=plain)
    before = normal(2, 3, 3, seed=3)
    wanted_y, wanted = cuseq.causal_conv1d_with_state(
        x, weight, bias, initial_state=place.array(before)
    )
    for weight_now in (weight, weight.clone().requires_grad_()):
        state = place.array(before).clone()
        memory = state.data_ptr()
        y = adapter.causal_conv1d_update(x, state, weight_now, bias)
        assert torch.equal(y.detach(), wanted_y)
        assert torch.equal(state.detach(), wanted)
        assert state.data_ptr() == memory
    with torch.no_grad():
        state = place.array(before)
        adapter.causal_conv1d_update(x, state, weight_now, bias)
        assert torch.equal(state, wanted) and not state.requires_grad


@every_device
@pytest.mark.parametrize("no_grad", [False, True])
def test_autograd_notices_that_a_state_was_updated(place, no_grad):
    """What another operation keeps of the state for its backward is no longer there."""
    x, weight, _, _ = conv_tensors(place, L=2, make=plain)
    state, factor = plain(place, 2, 3, 3), followed(place, 2, 3, 3)
    product = (state * factor).sum()
    with torch.set_grad_enabled(not no_grad):
        adapter.causal_conv1d_update(x, state, weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@every_device
def test_a_state_that_is_a_view(place):
    """One layer's part of a cache, seen through other strides."""
    x, weight, bias, _ = conv_tensors(place, L=2)
    cache = plain(place, 3, 2, 3, 3, seed=3)
    before = cache.clone()
    state = cache[1].transpose(1, 2)
    y = adapter.causal_conv1d_update(x, state, weight, bias)
    wanted_y, wanted = adapter.causal_conv1d_with_state(
        x, weight, bias, initial_state=before[1].transpose(1, 2)
    )
    torch.testing.assert_close(y, wanted_y)
    torch.testing.assert_close(cache[1].transpose(1, 2), wanted)
    assert torch.equal(cache[0], before[0]) and torch.equal(cache[2], before[2])
    got = torch.autograd.grad(cache.square().sum() + y.sum(), (x, weight))
    expected = torch.autograd.grad(wanted.square().sum() + wanted_y.sum(), (x, weight))
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])


@every_device
def test_a_pool_and_a_ring_have_no_derivative_yet(place):
    x, weight, bias, _ = conv_tensors(place, L=1)
    state = plain(place, 2, 3, 3)
    for name in ("cache_seqlens", "state_indices"):
        options = {name: [0, 1]}
        with pytest.raises(NotImplementedError, match=rf"^{name}: expected .+, got .+; .+"):
            adapter.causal_conv1d_update(x, state, weight, bias, **options)
        with torch.no_grad():
            y = adapter.causal_conv1d_update(x, state.clone(), weight, bias, **options)
        wanted = cuseq.causal_conv1d_update(
            x.detach(), state.clone(), weight.detach(), bias.detach(), **options
        )
        assert torch.equal(y, wanted)


# SoftDTWLoss:


@every_device
def test_reductions(place):
    a, b = followed(place, 3, 5, 2), plain(place, 3, 4, 2, seed=1)
    values = adapter.soft_dtw(a, b, gamma=0.2)
    none, mean, total = (
        adapter.SoftDTWLoss(0.2, reduction=reduction)(a, b) for reduction in ("none", "mean", "sum")
    )
    assert torch.equal(none, values)
    assert torch.equal(mean, values.mean())
    assert torch.equal(total, values.sum())
    for loss, weight in ((mean, 1 / 3), (total, 1.0)):
        got = torch.autograd.grad(loss, a, retain_graph=True)
        wanted = torch.autograd.grad(values, a, torch.full_like(values, weight), retain_graph=True)
        torch.testing.assert_close(got, wanted, rtol=1e-14, atol=0)


def test_the_loss_is_a_module():
    loss = adapter.SoftDTWLoss(gamma=0.5)
    assert isinstance(loss, torch.nn.Module) and not list(loss.parameters())
    assert repr(loss) == "SoftDTWLoss(gamma=0.5, cost='sqeuclidean', reduction='mean')"
    single = adapter.SoftDTWLoss()(torch.ones(5), torch.zeros(4))
    assert single.shape == ()


@pytest.mark.parametrize(
    "error, argument, options",
    [
        (ValueError, "gamma", {"gamma": -1.0}),
        (ValueError, "gamma", {"gamma": [1.0, -1.0]}),
        (TypeError, "gamma", {"gamma": "1"}),
        (ValueError, "cost", {"cost": "other"}),
        (ValueError, "bandwidth", {"bandwidth": -1}),
        (TypeError, "bandwidth", {"bandwidth": 1.5}),
        (ValueError, "reduction", {"reduction": "max"}),
    ],
)
def test_options_of_the_loss(error, argument, options):
    x = torch.zeros(2, 3, 1)
    with pytest.raises(error, match=rf"^{argument}: expected .+, got .+; .+"):
        adapter.SoftDTWLoss(**options)(x, x)


@pytest.mark.parametrize("argument", ["lengths_x", "lengths_y"])
@pytest.mark.parametrize(
    "lengths, error", [([2, 4], ValueError), ([0, 3], ValueError), ([1.0, 2.0], TypeError)]
)
def test_lengths_of_the_loss(argument, lengths, error):
    x = torch.zeros(2, 3, 1, requires_grad=True)
    for form in (lengths, torch.tensor(lengths)):
        with pytest.raises(error, match=r"^lengths_[abxy]: expected .+, got .+; .+"):
            adapter.SoftDTWLoss()(x, x, **{argument: form})


@every_device
def test_gamma_of_0_is_hard_dtw(place):
    a, b = followed(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1)
    loss = adapter.SoftDTWLoss(gamma=0, reduction="sum")(a, b)
    wanted, (grad_a, _) = cuseq.soft_dtw_value_and_grad(a.detach(), b, gamma=0)
    loss.backward()
    assert torch.equal(loss, wanted.sum()) and torch.equal(a.grad, grad_a)


@every_device
def test_errors_are_those_of_the_core(place):
    a = followed(place, 2, 5, 2)
    with pytest.raises(ValueError, match=r"^b: expected .+, got .+; .+"):
        adapter.soft_dtw(a, plain(place, 2, 5, 3))
    with pytest.raises(TypeError, match=r"^b: expected .+, got .+; .+"):
        adapter.soft_dtw(a, plain(place, 2, 5, 2, dtype="float32"))
    x, weight, _, _ = conv_tensors(place)
    with pytest.raises(ValueError, match=r"^bias: expected .+, got .+; .+"):
        adapter.causal_conv1d(x, weight, plain(place, 4))
    with pytest.raises(ValueError, match=r"^seq_idx: expected .+, got .+; .+"):
        adapter.causal_conv1d(x, weight, seq_idx=[[0] * 6] * 2)
    with pytest.raises(ValueError, match=r"^x: expected .+, got .+; .+"):
        adapter.causal_conv1d_update(x[None], plain(place, 2, 3, 3), weight)


# On a CUDA device:


@over([TORCH_CUDA])
def test_long_series_and_signals_on_the_device_as_on_the_host(place):
    """Sizes of several stripes and segments, where the small ones of gradcheck have one."""

    def gradients(device):
        tensors = [
            normal(3, 70, 5),
            normal(3, 50, 5, seed=1),
            normal(2, 33, 3000, seed=2),
            normal(33, 4, seed=3),
            normal(33, seed=4),
            normal(2, 33, 3, seed=5),
        ]
        a, b, x, *others = [torch.tensor(t, device=device, requires_grad=True) for t in tensors]
        value = adapter.soft_dtw(a, b, gamma=0.1).sum()
        weight, bias, state = others
        y, final_state = adapter.causal_conv1d_with_state(
            x, weight, bias, activation="silu", initial_state=state
        )
        loss = value + y.square().sum() + final_state.sum()
        return [g.cpu() for g in torch.autograd.grad(loss, (a, b, x, *others))]

    torch.testing.assert_close(gradients("cuda"), gradients("cpu"), rtol=1e-10, atol=1e-10)


@over([TORCH_CUDA])
def test_backward_runs_on_the_stream_of_the_forward(place):
    a, b = normal(2, 40, 3), normal(2, 50, 3, seed=1)
    good = place.array(a)
    expected = cuseq.soft_dtw_value_and_grad(good, place.array(b))[1][0]
    for milliseconds in (1, 300):
        gradient = None  # its memory is there for the second round
        late = place.array(np.full_like(a, 7)).requires_grad_()
        other = place.array(b)
        torch.cuda.synchronize()
        with frameworks.busy_stream(place, milliseconds) as is_busy:
            with torch.no_grad():
                late.copy_(good)
            (gradient,) = torch.autograd.grad(adapter.soft_dtw(late, other).sum(), late)
            busy_afterwards = is_busy()
    assert busy_afterwards, "forward or backward waited for the device"
    assert torch.equal(gradient, expected)


def graph_cases(place):
    def soft_dtw(a, b):
        return adapter.soft_dtw(a, b, gamma=0.5)

    lengths = place.array(np.array([70, 1, 40], np.int32))
    radii, gammas = place.array(np.array([9, 0, 100])), place.array(np.array([0.1, 1.0, 0.0]))

    def soft_dtw_with_options(a, b):
        return adapter.soft_dtw(
            a, b, gamma=gammas, cost="euclidean", bandwidth=radii, lengths_a=lengths
        )

    def conv(x, weight, bias, state):
        return torch.cat(
            adapter.causal_conv1d_with_state(
                x, weight, bias, activation="silu", initial_state=state
            ),
            dim=2,
        )

    def update(x, weight, bias, state):
        state = state.clone()
        y = adapter.causal_conv1d_update(x, state, weight, bias)
        return torch.cat((y, state), dim=2)

    series = followed(place, 3, 70, 2), followed(place, 3, 50, 2, seed=1)
    return {
        "soft_dtw": (soft_dtw, series),
        "soft_dtw_with_options": (soft_dtw_with_options, series),
        "causal_conv1d": (conv, conv_tensors(place, D=33, L=300)),
        "causal_conv1d_update": (update, conv_tensors(place, D=33, L=2)),
    }


@over([TORCH_CUDA])
@pytest.mark.parametrize(
    "name", ["soft_dtw", "soft_dtw_with_options", "causal_conv1d", "causal_conv1d_update"]
)
def test_forward_and_backward_in_a_cuda_graph(place, name):
    """What waits for the device can not be captured; a replay computes with the new inputs."""
    function, tensors = graph_cases(place)[name]

    def both():
        y = function(*tensors)
        return (y.detach(), *torch.autograd.grad(y.square().sum(), tensors))

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(warm_up)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for seed in (7, 8):
        with torch.no_grad():
            for number, tensor in enumerate(tensors):
                tensor.copy_(place.array(normal(*tensor.shape, seed=10 * seed + number)))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [result.clone() for result in captured]
        for got, wanted in zip(replayed, both(), strict=True):
            assert torch.equal(got, wanted)
