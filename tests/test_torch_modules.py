"""The modules of cuseq.torch: SoftDTWLoss with every cost and as a divergence, CausalConv1d."""

import copy
import pickle

import numpy as np
import pytest

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


def copies(module):
    return [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]


# SoftDTWLoss:


def squares(x, y):
    """The cost "sqeuclidean" as a callable."""
    return (x[:, :, None] - y[:, None]).square().sum(dim=3)


def angles(x, y):
    """The cost "cosine" as a callable, which has no slope where a point is 0."""
    lengths = x.square().sum(2).sqrt()[:, :, None] * y.square().sum(2).sqrt()[:, None]
    return 1 - x @ y.mT / lengths


class Metric(torch.nn.Module):
    """Squared distance after a linear map that is learned."""

    def __init__(self, features):
        super().__init__()
        self.linear = torch.nn.Linear(features, 4, bias=False, dtype=torch.float64)

    def forward(self, x, y):
        return squares(self.linear(x), self.linear(y))


def expected_loss(x, y, gamma, weights, *, normalize, lengths_x=None, lengths_y=None, **options):
    """values (B,), grad_x and grad_y of sum(weights values), from the oracle of soft-DTW."""

    def batch(a, b, lengths_a, lengths_b):
        return dtw_oracle.batch(
            a, b, gamma, weights, lengths_a=lengths_a, lengths_b=lengths_b, **options
        )

    B = len(weights)
    both = [np.broadcast_to(series, (B, *series.shape[1:])) for series in (x, y)]
    lengths = lengths_x, lengths_y
    values, *gradients = batch(*both, *lengths)
    if normalize:
        for series, length, gradient in zip(both, lengths, gradients, strict=True):
            of_itself, first, second = batch(series, series, length, length)
            values = values - of_itself / 2
            gradient -= (first + second) / 2
    for side, series in enumerate((x, y)):
        if len(series) == 1:
            gradients[side] = gradients[side].sum(axis=0, keepdims=True)
    return values, *gradients


OPTIONS = [  # for 3 pairs of series of lengths 6 and 5
    {},
    {"bandwidth": 1},
    {"bandwidth": [0, 2, 9]},
    {"gamma": 0},
    {"gamma": [0.3, 1.0, 5.0]},
    {"lengths_x": [6, 1, 4]},
    {"lengths_y": [2, 5, 3]},
    {"gamma": [2.0, 0.5, 1.0], "bandwidth": 1, "lengths_x": [3, 6, 4], "lengths_y": [5, 2, 1]},
]


@every_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cost", ["sqeuclidean", "cosine", squares])
@pytest.mark.parametrize("batches", [(3, 3), (3, 1), (1, 3)], ids=str)
def test_values_and_gradients(place, options, normalize, cost, batches):
    """As the oracle says, with lengths and options by sample as lists and as tensors."""
    x, y = normal(batches[0], 6, 2), normal(batches[1], 5, 2, seed=1)
    weights = np.array([0.5, -2.0, 3.0])
    name = cost if isinstance(cost, str) else "sqeuclidean"
    answer = {"gamma": 0.7, "cost": name, "normalize": normalize} | options
    wanted = expected_loss(x, y, answer.pop("gamma"), weights, **answer)
    for form in (list, lambda values: place.array(np.array(values))):
        given = {k: form(v) if isinstance(v, list) else v for k, v in options.items()}
        lengths = {k: given.pop(k) for k in ("lengths_x", "lengths_y") if k in given}
        of_loss = {"gamma": 0.7, "cost": cost, "normalize": normalize, "reduction": "none"} | given
        tensors = [place.array(series).requires_grad_() for series in (x, y)]
        values = adapter.SoftDTWLoss(**of_loss)(*tensors, **lengths)
        gradients = torch.autograd.grad(values, tensors, place.array(weights))
        names = "values", "grad_x", "grad_y"
        for got, expected, what in zip((values, *gradients), wanted, names, strict=True):
            assert_close(place.numpy(got), expected, f"soft_dtw.{what}", scale=10.0)


@every_device
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cost", ["euclidean", squares, torch.cdist])
def test_derivative(place, normalize, cost):
    loss = adapter.SoftDTWLoss(0.7, cost=cost, bandwidth=2, normalize=normalize)
    x, y = followed(place, 2, 4, 2), followed(place, 1, 5, 2, seed=1)
    assert torch.autograd.gradcheck(
        lambda x, y: loss(x, y, [3, 4], [5, 2]), (x, y), nondet_tol=1e-12
    )


@every_device
@pytest.mark.parametrize("cost", ["sqeuclidean", "euclidean", squares])
def test_the_divergence_of_equal_series_is_0_with_slope_0(place, cost):
    x = followed(place, 3, 6, 2)
    loss = adapter.SoftDTWLoss(0.5, cost=cost, normalize=True, reduction="sum")
    value = loss(x, x.detach().clone(), [6, 2, 4], [6, 2, 4])
    assert value == 0
    value.backward()
    torch.testing.assert_close(x.grad, torch.zeros_like(x), rtol=0, atol=1e-12)


@every_device
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cost", ["sqeuclidean", squares])
def test_shapes_of_series(place, normalize, cost):
    """() for a single pair; one series meets a batch."""
    loss = adapter.SoftDTWLoss(0.5, cost=cost, normalize=normalize, reduction="none")
    x, y = plain(place, 3, 6, 1), plain(place, 3, 5, 1, seed=1)
    wanted = loss(x, y)
    assert wanted.shape == (3,)
    for one, other in [(x[1], y[1]), (x[1, :, 0], y[1, :, 0]), (x[1], y[1, :, 0])]:
        single = loss(one, other)
        assert single.shape == ()
        torch.testing.assert_close(single, wanted[1])
    torch.testing.assert_close(loss(x, y[1]), loss(x, y[1].expand(3, 5, 1)))
    assert loss(x[:1], y[1, :, 0]).shape == (1,)
    assert loss(x[:0], y[:0]).shape == loss(x[:0], y[:1]).shape == (0,)


@every_device
@pytest.mark.parametrize(
    "options", [{"normalize": True}, {"cost": squares}], ids=["divergence", "callable"]
)
def test_reductions(place, options):
    x, y = followed(place, 3, 5, 2), plain(place, 3, 4, 2, seed=1)
    values, mean, total = (
        adapter.SoftDTWLoss(0.2, reduction=reduction, **options)(x, y)
        for reduction in ("none", "mean", "sum")
    )
    assert values.shape == (3,)
    assert torch.equal(mean, values.mean()) and torch.equal(total, values.sum())
    (of_mean,), (of_total,) = (torch.autograd.grad(loss, x) for loss in (mean, total))
    assert of_total.any()
    torch.testing.assert_close(3 * of_mean, of_total)


@every_device
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cost", ["sqeuclidean", squares, angles])
def test_what_lies_beyond_a_length_does_not_matter(place, normalize, cost):
    loss = adapter.SoftDTWLoss(cost=cost, normalize=normalize)
    lengths_x, lengths_y = [6, 2, 4], [3, 5, 1]
    results = []
    for filler in (0.0, np.nan):
        x, y = normal(3, 6, 2), normal(3, 5, 2, seed=1)
        for series, lengths in ((x, lengths_x), (y, lengths_y)):
            for row, length in zip(series, lengths, strict=True):
                row[length:] = filler
        x, y = (place.array(series).requires_grad_() for series in (x, y))
        value = loss(x, y, lengths_x, lengths_y)
        results.append((value, *torch.autograd.grad(value, (x, y))))
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all() and torch.equal(one, other)
    for gradient, lengths in zip(results[0][1:], (lengths_x, lengths_y), strict=True):
        for row, length in zip(gradient, lengths, strict=True):
            assert row[:length].any() and not row[length:].any()


@every_device
@pytest.mark.parametrize("cost", ["sqeuclidean", squares])
def test_a_target_has_no_gradient(place, cost):
    x, y = followed(place, 2, 5, 2), plain(place, 2, 4, 2, seed=1)
    loss = adapter.SoftDTWLoss(cost=cost, normalize=True)
    loss(x, y).backward()
    assert y.grad is None
    (wanted,) = torch.autograd.grad(loss(x, y.requires_grad_()), x)
    assert torch.equal(x.grad, wanted)
    with torch.no_grad():
        assert not loss(x, y).requires_grad


@every_device
@pytest.mark.parametrize("options, rows", [({}, 1), ({"bandwidth": [0, 2, 9]}, 3)])
def test_what_a_callable_is_called_with(place, options, rows):
    """Whole batches; a series of batch 1 meets itself once, unless samples have options."""
    calls = []

    def cost(x, y):
        calls.append((tuple(x.shape), tuple(y.shape)))
        return squares(x, y)

    x, y = plain(place, 3, 6, 2), plain(place, 1, 5, 2, seed=1)
    adapter.SoftDTWLoss(cost=cost, normalize=True, **options)(x, y)
    of_y = rows, 5, 2
    assert calls == [((3, 6, 2), (3, 5, 2)), ((3, 6, 2), (3, 6, 2)), (of_y, of_y)]


@every_device
@pytest.mark.parametrize("normalize", [False, True])
def test_a_cost_that_is_learned(place, normalize):
    x, y = plain(place, 2, 5, 3), plain(place, 2, 4, 3, seed=1)
    loss = adapter.SoftDTWLoss(0.5, cost=Metric(3), normalize=normalize).to(x.device)
    assert [name for name, _ in loss.named_parameters()] == ["cost.linear.weight"]

    def value(weight):
        return torch.func.functional_call(loss, {"cost.linear.weight": weight}, (x, y))

    assert torch.autograd.gradcheck(value, loss.cost.linear.weight)


def test_a_callable_may_take_series_of_other_features_and_dtypes():
    """As a cost of classes has: scores (B, N, K) against labels (B, M)."""

    def cost(x, y):
        return -x.log_softmax(dim=2).gather(2, y.mT.expand(-1, x.shape[1], -1))

    x, y = torch.from_numpy(normal(2, 5, 3)).requires_grad_(), torch.tensor([[0, 2], [1, 1]])
    value = adapter.SoftDTWLoss(cost=cost, reduction="sum")(x, y[..., None])
    C = -x.log_softmax(dim=2)[torch.arange(2)[:, None, None], torch.arange(5)[:, None], y[:, None]]
    torch.testing.assert_close(value, adapter.soft_dtw_from_cost(C).sum())
    value.backward()
    assert x.grad.any()


def cost_of_other_device(x, y):
    return squares(x, y).to("meta")


@pytest.mark.parametrize(
    "error, got, cost",
    [
        (TypeError, "ndarray", lambda x, y: squares(x, y).numpy()),
        (TypeError, "NoneType", lambda x, y: None),
        (TypeError, r"one of dtype torch\.int64", lambda x, y: squares(x, y).long()),
        (TypeError, r"one of dtype torch\.complex128", lambda x, y: squares(x, y) + 0j),
        (ValueError, r"one of shape \(2, 4, 5\)", lambda x, y: squares(y, x)),
        (ValueError, r"one of shape \(5, 4\)", lambda x, y: squares(x, y)[0]),
        (ValueError, r"one of shape \(1, 5, 4\)", lambda x, y: squares(x, y)[:1]),
        (ValueError, r"one of shape \(\)", lambda x, y: squares(x, y).sum()),
        (ValueError, "one on meta", cost_of_other_device),
    ],
)
def test_a_callable_that_returns_no_cost(error, got, cost):
    x, y = torch.zeros(2, 5, 1, dtype=torch.float64), torch.zeros(1, 4, 1, dtype=torch.float64)
    expected = (
        r"a callable that returns a floating torch\.Tensor of shape \(B, N, M\) = \(2, 5, 4\)"
    )
    with pytest.raises(error, match=rf"^cost: expected {expected}.*, got {got}; return .+"):
        adapter.SoftDTWLoss(cost=cost)(x, y)


@pytest.mark.parametrize("cost", ["sqeuclidean", squares])
@pytest.mark.parametrize("normalize", [False, True])
def test_wrong_calls_of_the_loss(cost, normalize):
    loss = adapter.SoftDTWLoss(cost=cost, normalize=normalize)
    x = torch.zeros(2, 3, 1)
    for error, argument, call in [
        (TypeError, "x", ([[0.0]], x)),
        (TypeError, "y", (x, x.numpy())),
        (ValueError, "x", (x[None], x)),
        (ValueError, "y", (x, x[0, 0, 0])),
        (ValueError, "y", (x, torch.zeros(3, 3, 1))),
        (ValueError, "lengths_[xa]", (x, x, [1, 2, 3])),
        (ValueError, "lengths_[xa]", (x, x, [0, 2])),
        (ValueError, "lengths_[yb]", (x, x, None, [1, 4])),
        (TypeError, "lengths_[yb]", (x, x, None, [1.0, 2.0])),
    ]:
        with pytest.raises(error, match=rf"^{argument}: expected .+, got .+; .+"):
            loss(*call)


@pytest.mark.parametrize(
    "error, argument, options",
    [
        (ValueError, "cost", {"cost": "other"}),
        (ValueError, "cost", {"cost": None}),
        (TypeError, "normalize", {"normalize": "yes"}),
        (TypeError, "normalize", {"normalize": 1}),
        (ValueError, "reduction", {"reduction": "max"}),
    ],
)
def test_wrong_options_of_the_loss(error, argument, options):
    with pytest.raises(error, match=rf"^{argument}: expected .+, got .+; .+"):
        adapter.SoftDTWLoss(**options)


@pytest.mark.parametrize("options", [{"gamma": -1.0}, {"bandwidth": -1}], ids=str)
def test_options_that_a_callable_shares_are_checked(options):
    x = torch.zeros(2, 3, 1)
    (name,) = options
    with pytest.raises(ValueError, match=rf"^{name}: expected .+, got .+; .+"):
        adapter.SoftDTWLoss(cost=squares, **options)(x, x)


@every_device
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cost", ["sqeuclidean", squares])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_compiles_whole(place, normalize, cost, autocast):
    torch.compiler.reset()
    x = followed(place, 3, 6, 2, dtype="float32")
    y = followed(place, 1, 5, 2, seed=1, dtype="float32")
    loss = adapter.SoftDTWLoss(0.5, cost=cost, normalize=normalize)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        got, wanted = (function(x, y, [6, 2, 4]) for function in (compiled, loss))
    torch.testing.assert_close(got, wanted)
    gradients = (torch.autograd.grad(value, (x, y)) for value in (got, wanted))
    torch.testing.assert_close(*gradients)


def test_copies_of_the_loss():
    x, y = (torch.from_numpy(normal(2, n, 3, seed=n)) for n in (5, 4))
    for cost in ("cosine", squares, Metric(3)):
        loss = adapter.SoftDTWLoss([0.5, 2.0], cost=cost, bandwidth=1, normalize=True)
        assert all(torch.equal(other(x, y), loss(x, y)) for other in copies(loss))
    other = adapter.SoftDTWLoss([0.5, 2.0], cost=Metric(3), bandwidth=1, normalize=True)
    assert not torch.equal(other(x, y), loss(x, y))
    other.load_state_dict(loss.state_dict())
    assert torch.equal(other(x, y), loss(x, y))
    assert adapter.SoftDTWLoss(normalize=True).state_dict() == {}


def test_the_loss_as_text():
    assert (
        repr(adapter.SoftDTWLoss())
        == "SoftDTWLoss(gamma=1.0, cost='sqeuclidean', reduction='mean')"
    )
    loss = adapter.SoftDTWLoss(0.1, cost="cosine", bandwidth=3, normalize=True, reduction="sum")
    assert repr(loss) == (
        "SoftDTWLoss(gamma=0.1, cost='cosine', bandwidth=3, normalize=True, reduction='sum')"
    )
    assert "(cost): Metric(" in repr(adapter.SoftDTWLoss(cost=Metric(3)))


# SoftDTWLoss and autocast:


@every_device
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("cost", ["sqeuclidean", squares])
@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "float16")], ids=str)
def test_the_loss_under_autocast_is_computed_in_float32(place, normalize, cost, dtypes):
    x, y = (
        followed(place, 2, 5, 3, dtype=dtypes[0]),
        followed(place, 1, 4, 3, seed=1, dtype=dtypes[1]),
    )
    loss = adapter.SoftDTWLoss(0.5, cost=cost, normalize=normalize)
    with torch.autocast(x.device.type, torch.bfloat16):
        value = loss(x, y)
    gradients = torch.autograd.grad(value, (x, y))
    wanted = loss(x.float(), y.float())
    assert value.dtype == torch.float32 and torch.equal(value, wanted)
    for got, expected in zip(gradients, torch.autograd.grad(wanted, (x, y)), strict=True):
        assert torch.equal(got, expected)
    if cost is not squares:
        with pytest.raises(TypeError, match=r"^b: expected the dtype of a, .+; .+"):
            loss(x, y)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=False), pytest.raises(TypeError):
            loss(x, y)


@every_device
def test_a_callable_runs_without_autocast(place):
    """Products in bfloat16 would lose the differences of near points."""
    seen = []

    def cost(x, y):
        product = x @ y.mT
        seen.append((x.dtype, y.dtype, product.dtype))
        return x.square().sum(2)[:, :, None] + y.square().sum(2)[:, None] - 2 * product

    x, y = plain(place, 2, 5, 3, dtype="float32"), plain(place, 2, 4, 3, seed=1, dtype="bfloat16")
    with torch.autocast(x.device.type, torch.bfloat16):
        value = adapter.SoftDTWLoss(cost=cost)(x, y)
        assert (x @ y.float().mT).dtype == torch.bfloat16
    assert seen == [(torch.float32,) * 3]
    torch.testing.assert_close(value, adapter.SoftDTWLoss()(x, y.float()))


@every_device
def test_autocast_leaves_float64(place):
    x, y = plain(place, 2, 5, 3), plain(place, 2, 4, 3, seed=1)
    conv = layer(place, 5, 3)
    loss = adapter.SoftDTWLoss(normalize=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        value, z = loss(x, y), conv(x)
    assert value.dtype == torch.float64 and torch.equal(value, loss(x, y))
    assert z.dtype == torch.float64 and torch.equal(z, conv(x))


# CausalConv1d:


def layer(place, dim, width, *args, dtype=torch.float64, seed=0, **options):
    """A layer on this place, the same for the same arguments."""
    device = plain(place, 1).device
    torch.manual_seed(seed)
    conv = adapter.CausalConv1d(dim, width, *args, **options)
    return conv.to(device=device, dtype=dtype)


def reference(conv, x, state=None):
    """y and final state in either layout, by torch's own convolution."""
    x = x if conv.layout == "bdl" else x.mT
    state = x.new_zeros(len(x), conv.dim, conv.width - 1) if state is None else state
    inputs = torch.cat((state, x), dim=2)
    y = torch.nn.functional.conv1d(inputs, conv.weight[:, None], conv.bias, groups=conv.dim)
    y = y if conv.activation is None else torch.nn.functional.silu(y)
    return y if conv.layout == "bdl" else y.mT, inputs[..., x.shape[2] :]


def signal(place, conv, B, L, **options):
    """x (B, D, L) or (B, L, D) that autograd follows."""
    shape = (B, conv.dim, L) if conv.layout == "bdl" else (B, L, conv.dim)
    return followed(place, *shape, **options)


def along(conv, x, start, end):
    """Positions start to end of x in the layer's layout."""
    return x[..., start:end] if conv.layout == "bdl" else x[:, start:end]


every_layout = pytest.mark.parametrize("layout", ["bdl", "bld"])


@every_device
@every_layout
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize(
    "width, L, bias", [(4, 9, True), (4, 2, False), (1, 5, True), (32, 40, True)]
)
def test_against_conv1d_of_torch(place, layout, activation, width, L, bias):
    """y, the final state and every gradient by its name."""
    conv = layer(place, 3, width, bias, activation, layout=layout)
    assert [name for name, _ in conv.named_parameters()] == ["weight", "bias"][: 1 + bias]
    x, state = signal(place, conv, 2, L), followed(place, 2, 3, width - 1, seed=1)
    for start in (None, state):
        leaves = {"x": x, **dict(conv.named_parameters())}
        if start is not None and width > 1:
            leaves["initial_state"] = start
        wanted = reference(conv, x, start)
        got = conv.with_state(x, initial_state=start)
        torch.testing.assert_close(got, wanted)
        assert torch.equal(conv(x, initial_state=start), got[0])
        gradients = [
            dict(
                zip(
                    leaves,
                    torch.autograd.grad(y.square().sum() + after.sin().sum(), leaves.values()),
                    strict=True,
                )
            )
            for y, after in (got, wanted)
        ]
        torch.testing.assert_close(*gradients)


@every_device
def test_derivative_of_the_layer(place):
    conv = layer(place, 3, 4)
    parameters = dict(conv.named_parameters())

    def function(x, *values):
        given = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(conv, given, (x,))

    inputs = signal(place, conv, 2, 5), *parameters.values()
    assert torch.autograd.gradcheck(function, inputs, nondet_tol=0.0)


@every_device
@every_layout
def test_sequences_by_index(place, layout):
    conv = layer(place, 3, 4, layout=layout)
    x = signal(place, conv, 1, 9)
    index = [[5, 5, 5, 2, 2, 2, 2, 2, 2]]
    y, state = conv.with_state(x, seq_idx=index)
    first, second = reference(conv, along(conv, x, 0, 3)), reference(conv, along(conv, x, 3, 9))
    axis = 2 if layout == "bdl" else 1
    torch.testing.assert_close(y, torch.cat((first[0], second[0]), dim=axis))
    torch.testing.assert_close(state, second[1])
    assert torch.equal(conv(x, seq_idx=index), y)


@every_device
@every_layout
@pytest.mark.parametrize("pieces", [[1] * 7, [3, 1, 2, 1], [7]], ids=str)
@pytest.mark.parametrize("prefill", [0, 2, 6])
def test_steps_are_the_whole_signal(place, layout, pieces, prefill):
    """From a state of zeros or that of a prompt, one token or several at once."""
    conv = layer(place, 3, 4, layout=layout)
    x = signal(place, conv, 2, prefill + 7)
    wanted, wanted_state = reference(conv, x)
    with torch.no_grad():
        if prefill:
            y, state = conv.with_state(along(conv, x, 0, prefill))
            torch.testing.assert_close(y, along(conv, wanted, 0, prefill))
        else:
            state = conv.initial_state(2)
        memory, position = state.data_ptr(), prefill
        for length in pieces:
            expected = along(conv, wanted, position, position + length)
            y = conv.step(along(conv, x, position, position + length), state)
            torch.testing.assert_close(y, expected)
            position += length
        torch.testing.assert_close(state, wanted_state)
        assert state.data_ptr() == memory


@every_device
@every_layout
def test_a_step_of_one_token_without_its_axis(place, layout):
    conv = layer(place, 3, 4, layout=layout)
    x, state = signal(place, conv, 2, 1), plain(place, 2, 3, 3, seed=1)
    wanted, wanted_state = reference(conv, x, state)
    y = conv.step(x.reshape(2, 3), state)
    torch.testing.assert_close(y, wanted.reshape(2, 3))
    torch.testing.assert_close(state, wanted_state)


@every_device
def test_gradients_through_steps(place):
    conv = layer(place, 3, 4)
    x, state = signal(place, conv, 2, 5), conv.initial_state(2)
    y = torch.stack([conv.step(x[..., t], state) for t in range(5)], dim=2)
    leaves = x, conv.weight, conv.bias
    got = torch.autograd.grad(y.square().sum(), leaves)
    wanted = torch.autograd.grad(reference(conv, x)[0].square().sum(), leaves)
    torch.testing.assert_close(got, wanted)


@every_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_an_initial_state(place, dtype):
    conv = layer(place, 3, 4, dtype=dtype)
    state = conv.initial_state(5)
    assert state.shape == (5, 3, 3) and not state.any() and not state.requires_grad
    assert (state.dtype, state.device) == (dtype, conv.weight.device)
    assert layer(place, 3, 1).initial_state(2).shape == (2, 3, 0)


@every_device
def test_device_and_dtype_of_parameters(place):
    device = plain(place, 1).device
    conv = adapter.CausalConv1d(3, 4, device=device, dtype=torch.bfloat16)
    for parameter in conv.parameters():
        assert (parameter.device, parameter.dtype) == (device, torch.bfloat16)
    assert adapter.CausalConv1d(3, 4).weight.dtype == torch.get_default_dtype()
    x = plain(place, 2, 3, 5, dtype="float32")  # whose dtype is independent of theirs
    y = conv(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, reference(conv.double(), x.double())[0].float())


@pytest.mark.parametrize("bias", [False, True])
def test_first_values_of_parameters(bias):
    """Those of torch's depthwise layer, from the same random numbers."""
    torch.manual_seed(3)
    conv = torch.nn.Conv1d(64, 64, 5, groups=64, bias=bias)
    torch.manual_seed(3)
    ours = adapter.CausalConv1d(64, 5, bias)
    assert conv.weight.std() > 0.1
    torch.testing.assert_close(ours.weight, conv.weight[:, 0])
    torch.testing.assert_close(ours.bias, conv.bias)
    before = ours.weight.clone()
    ours.reset_parameters()
    assert not torch.equal(ours.weight, before)


@every_device
@every_layout
def test_the_layer_under_autocast(place, layout):
    conv = layer(place, 3, 4, layout=layout, dtype=torch.float32)
    x = signal(place, conv, 2, 6, dtype="float32")
    wanted = conv(x.bfloat16())  # of which the filter keeps its dtype
    with torch.autocast(x.device.type, torch.bfloat16):
        y, state = conv.with_state(x)
        assert torch.equal(conv(x), y) and torch.equal(conv(x.bfloat16()), y)
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted)
    assert conv(x).dtype == torch.float32
    gradients = torch.autograd.grad(y.float().square().sum(), (x, conv.weight, conv.bias))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    (of_weight,) = torch.autograd.grad(wanted.float().square().sum(), conv.weight)
    assert torch.equal(gradients[1], of_weight)
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        for memory in (conv.initial_state(2), state.new_zeros(state.shape)):
            dtype = memory.dtype
            steps = [conv.step(along(conv, x, t, t + 1), memory) for t in range(6)]
            got = torch.cat(steps, dim=2 if layout == "bdl" else 1)
            assert got.dtype == torch.bfloat16 and memory.dtype == dtype
            torch.testing.assert_close(got, y)
            assert torch.equal(memory.to(state.dtype), state)


@every_device
def test_the_layer_compiles_whole(place):
    torch.compiler.reset()
    conv = layer(place, 3, 4)
    x, leaves = signal(place, conv, 2, 6), tuple(conv.parameters())
    y = torch.compile(conv, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(y, conv(x))
    gradients = (torch.autograd.grad(z.square().sum(), (x, *leaves)) for z in (y, conv(x)))
    torch.testing.assert_close(*gradients)


@every_device
def test_between_layers_under_autocast(place):
    """What comes before gives bfloat16, what comes behind and the loss take it."""
    device = plain(place, 1).device
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 8), adapter.CausalConv1d(8, 4, layout="bld"), torch.nn.Linear(8, 2)
    ).to(device)
    x, y = plain(place, 3, 9, 2, dtype="float32"), plain(place, 3, 7, 2, seed=1, dtype="float32")
    loss = adapter.SoftDTWLoss(0.5, normalize=True)
    wanted = loss(model(x), y)
    with torch.autocast(device.type, torch.bfloat16):
        z = model(x)
        value = loss(z, y)
    assert z.dtype == torch.bfloat16 and value.dtype == torch.float32
    torch.testing.assert_close(value, wanted, rtol=0.1, atol=0.1)
    value.backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


# State dicts, copies, and torch.nn.Conv1d:


def depthwise(dim=3, width=4, bias=True, dtype=torch.float64, **options):
    torch.manual_seed(1)
    options = {"groups": dim, "padding": width - 1} | options
    return torch.nn.Conv1d(dim, dim, width, bias=bias, dtype=dtype, **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_weights_of_conv1d_are_loaded(bias, assign):
    conv = depthwise(bias=bias)
    x = torch.from_numpy(normal(2, 3, 7))
    ours = adapter.CausalConv1d(3, 4, bias, None, dtype=torch.float64)
    weights = conv.state_dict()
    ours.load_state_dict(weights, assign=assign)
    torch.testing.assert_close(ours(x), conv(x)[..., :7])
    assert weights["weight"].shape == (3, 1, 4) and ours.weight.shape == (3, 4)

    nested = torch.nn.Sequential(torch.nn.Identity(), adapter.CausalConv1d(3, 4, bias, None))
    nested.double().load_state_dict(torch.nn.Sequential(torch.nn.Identity(), conv).state_dict())
    torch.testing.assert_close(nested(x), conv(x)[..., :7])


def test_state_dicts():
    conv = adapter.CausalConv1d(3, 4)
    assert {name: value.shape for name, value in conv.state_dict().items()} == {
        "weight": (3, 4),
        "bias": (3,),
    }
    for other in (adapter.CausalConv1d(3, 4), *copies(adapter.CausalConv1d(3, 4))):
        assert not torch.equal(other.weight, conv.weight)
        other.load_state_dict(conv.state_dict())
        assert torch.equal(other.weight, conv.weight) and torch.equal(other.bias, conv.bias)
        other.load_state_dict(depthwise(dtype=torch.float32).state_dict())
        assert torch.equal(other.weight, depthwise(dtype=torch.float32).weight[:, 0])


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 5), (3, 1, 5), (12,)], ids=str)
def test_weights_of_other_shapes_are_refused(shape):
    weights = {"weight": torch.zeros(shape), "bias": torch.zeros(3)}
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        adapter.CausalConv1d(3, 4).load_state_dict(weights)


def test_missing_weights_are_noticed():
    conv = adapter.CausalConv1d(3, 4)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight"'):
        conv.load_state_dict({"bias": torch.zeros(3)})
    assert conv.load_state_dict({}, strict=False).missing_keys == ["weight", "bias"]


@every_device
def test_copies_of_the_layer(place):
    conv = layer(place, 3, 4, False, None, layout="bld")
    x = signal(place, conv, 2, 6)
    for other in copies(conv):
        assert repr(other) == repr(conv) and torch.equal(other(x), conv(x))
        with torch.no_grad():
            other.weight.zero_()
        assert conv.weight.any()


@every_device
@every_layout
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_from_conv1d(place, layout, activation, bias):
    conv = depthwise(bias=bias).to(plain(place, 1).device).eval()
    conv.weight.requires_grad_(False)
    ours = adapter.CausalConv1d.from_conv1d(conv, activation, layout=layout)
    x = signal(place, ours, 2, 7)
    wanted = conv(x if layout == "bdl" else x.mT)[..., :7]
    wanted = wanted if activation is None else torch.nn.functional.silu(wanted)
    torch.testing.assert_close(ours(x), wanted if layout == "bdl" else wanted.mT)
    assert ours.bias is None or ours.bias.requires_grad
    assert not ours.weight.requires_grad and not ours.training
    with torch.no_grad():
        ours.weight.zero_()
    assert conv.weight.any()


def test_from_conv1d_without_an_activation_of_its_own():
    assert adapter.CausalConv1d.from_conv1d(depthwise()).activation is None


def test_from_conv1d_with_weights_that_are_computed():
    conv = torch.nn.utils.parametrizations.weight_norm(depthwise())
    with torch.no_grad():
        conv.parametrizations.weight.original0.mul_(2)
    x = torch.from_numpy(normal(2, 3, 7))
    torch.testing.assert_close(adapter.CausalConv1d.from_conv1d(conv)(x), conv(x)[..., :7])


@pytest.mark.parametrize(
    "what, conv",
    [
        ("groups", torch.nn.Conv1d(4, 4, 3, groups=2)),
        ("groups", torch.nn.Conv1d(4, 4, 3)),
        ("out_channels", torch.nn.Conv1d(4, 8, 3, groups=4)),
        ("stride", depthwise(stride=2)),
        ("dilation", depthwise(dilation=2)),
        ("padding_mode", depthwise(padding_mode="circular")),
    ],
)
def test_from_conv1d_of_another_kind(what, conv):
    with pytest.raises(ValueError, match=rf"^conv: expected {what} = .+, got .+; .+"):
        adapter.CausalConv1d.from_conv1d(conv)


def test_from_conv1d_of_no_conv1d():
    for other in (torch.nn.Conv2d(3, 3, 4, groups=3), depthwise().weight):
        with pytest.raises(TypeError, match=r"^conv: expected a torch\.nn\.Conv1d, got .+; .+"):
            adapter.CausalConv1d.from_conv1d(other)
    with pytest.raises(ValueError, match=r"^width: expected 1 to 32, got 33; .+"):
        adapter.CausalConv1d.from_conv1d(depthwise(width=33))


# What the layer refuses:


@pytest.mark.parametrize(
    "error, argument, options",
    [
        (ValueError, "dim", {"dim": 0}),
        (TypeError, "dim", {"dim": 2.0}),
        (ValueError, "width", {"width": 0}),
        (ValueError, "width", {"width": 33}),
        (TypeError, "width", {"width": True}),
        (ValueError, "activation", {"activation": "relu"}),
        (ValueError, "layout", {"layout": "ldb"}),
    ],
)
def test_wrong_options_of_the_layer(error, argument, options):
    with pytest.raises(error, match=rf"^{argument}: expected .+, got .+; .+"):
        adapter.CausalConv1d(**{"dim": 3, "width": 4} | options)


def test_wrong_calls_of_the_layer():
    conv = adapter.CausalConv1d(3, 4)
    x = torch.zeros(2, 3, 5)
    for error, argument, call in [
        (TypeError, "x", lambda: conv(x.numpy())),
        (TypeError, "x", lambda: conv(x.long())),
        (TypeError, "x", lambda: conv.with_state(x.tolist())),
        (TypeError, "x", lambda: conv.step(x.numpy(), conv.initial_state(2))),
        (ValueError, "x", lambda: conv(x[0])),
        (ValueError, "weight", lambda: conv(x.mT)),
        (ValueError, "initial_state", lambda: conv(x, initial_state=x[:1])),
        (ValueError, "seq_idx", lambda: conv(x, seq_idx=[[0] * 4] * 2)),
    ]:
        with pytest.raises(error, match=rf"^{argument}: expected .+, got .+; .+"):
            call()
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(error, match=rf"^{argument}: "):
            call()
    with torch.no_grad(), pytest.raises(ValueError, match=r"^state: expected .+, got .+; .+"):
        conv.step(x, x[..., :2].clone())


def test_the_layer_as_text():
    conv = adapter.CausalConv1d(3, 4, bias=False, activation=None, layout="bld")
    assert repr(conv) == "CausalConv1d(3, 4, bias=False, activation=None, layout='bld')"
    assert repr(adapter.CausalConv1d(8, 2)) == (
        "CausalConv1d(8, 2, bias=True, activation='silu', layout='bdl')"
    )
