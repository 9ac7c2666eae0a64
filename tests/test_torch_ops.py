"""cuseq.torch under compilers, exporters, function transforms, checkpoints and hooks."""

import copy
from functools import partial

import pytest

from cuseq.runtime import kernels
from tests.frameworks import TORCH_CPU, TORCH_CUDA, over
from tests.samples import normal

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("cuseq.torch")

every_device = over([TORCH_CPU, TORCH_CUDA])
SEQUENCES, STARTS, LENGTHS = [[0, 0, 0, 0, 1, 1, 1, -1, 2]] * 3, [0, 2, 2, 9], [4, 9, 2]
NONE, NUMBERS = (None,) * 4, (0.5, None, None, None)  # gamma 0.5, and none of the other options


def sample(place, *shape, seed=0):
    return place.array(normal(*shape, seed=seed)).clone()


def convolution(place):
    """x (3, 4, 9), weight, bias and a state that is wider than the filter needs."""
    shapes = (3, 4, 9), (4, 4), (4,), (3, 4, 5)
    return [sample(place, *shape, seed=seed) for seed, shape in enumerate(shapes)]


def series(place):
    return sample(place, 3, 6, 2), sample(place, 3, 5, 2, seed=1)


def by_row(x, weight, bias, state):
    """A number that depends on all of them, through y and the final state."""
    options = {"activation": "silu", "initial_state": state}
    y, after = adapter.causal_conv1d_with_state(x, weight, bias, **options)
    return y.square().sum() + after.sin().sum()


def by_column(x, weight, bias, state, seq_idx=SEQUENCES):
    y = adapter.causal_conv1d(
        x.transpose(1, 2), weight, bias, layout="bld", initial_state=state, seq_idx=seq_idx
    )
    return y.square().sum()


def packed(x, weight, bias, state, cu_seqlens=STARTS):
    y, after = adapter.causal_conv1d_varlen_with_state(
        x[0].T, weight, bias, cu_seqlens=cu_seqlens, initial_state=state
    )
    return y.square().sum() + after.sin().sum()


def of_series(x, weight, bias, state, lengths=LENGTHS):
    a, b = x.transpose(1, 2), state.transpose(1, 2) + bias
    C = (a @ weight @ b.transpose(1, 2)).square()
    return (
        adapter.soft_dtw(a, b, gamma=0.5).sum()
        + adapter.soft_dtw_from_cost(C).square().sum()
        + adapter.soft_dtw_divergence(a, b, lengths_a=lengths).square().sum()
    )


FUNCTIONS = by_row, by_column, packed, of_series
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def gradients(function, tensors):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def assert_same(got, wanted):
    """What one path computes is what another one computes, but for the order of sums around it."""
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        assert x.abs().max() > 0


# What an op is


def calls(place):
    """The torch ops with arguments that differ in what there is."""
    ops = torch.ops.cuseq
    x, weight, bias, state = convolution(place)
    index = place.array(normal(3, 9)).sign().long()
    tokens, transposed = x[0].T.contiguous(), x.transpose(1, 2)
    starts = torch.tensor([0, 2, 2, 9], device=x.device)
    a, b = series(place)
    costs = sample(place, 3, 6, 5)
    yield ops.causal_conv1d, (x, weight, bias, state, index, "silu", "bdl")
    yield ops.causal_conv1d, (transposed, weight, None, None, None, None, "bld")
    yield ops.causal_conv1d_with_state, (x, weight, bias, state, None, "silu", "bdl")
    yield ops.causal_conv1d_with_state, (transposed, weight, None, None, index, None, "bld")
    yield ops.causal_conv1d_backward, (x, state, x, weight, bias, state, index, "silu", "bdl")
    yield (
        ops.causal_conv1d_backward,
        (transposed, None, transposed, weight, None, None, None, None, "bld"),
    )
    filters = tokens, weight, bias
    yield ops.causal_conv1d_varlen, (*filters, None, starts, "silu")
    yield ops.causal_conv1d_varlen_with_state, (*filters, None, starts, "silu")
    yield ops.causal_conv1d_varlen_with_state, (*filters, state, starts, None)
    yield ops.causal_conv1d_varlen_backward, (tokens, state, *filters, state, starts, "silu")
    yield (
        ops.causal_conv1d_update,
        (x[:, :, 0], state.clone(), *filters[1:], None, None, None, "bdl"),
    )
    yield ops.soft_dtw, (a, b[:1], *NONE, "euclidean", *NUMBERS)
    yield ops.soft_dtw, (a[0], b[0], *NONE, "sqeuclidean", *NUMBERS)
    yield ops.soft_dtw_keeping, (a, b, *NONE, "sqeuclidean", *NUMBERS)
    values, kept = ops.soft_dtw_keeping(a, b, *NONE, "sqeuclidean", *NUMBERS)
    yield ops.soft_dtw_backward, (values, values, kept, a, b, *NONE, "sqeuclidean", *NUMBERS)
    outer = values.sin()
    yield ops.soft_dtw_hessian, (outer, a.sin(), b.sin(), a, b, *NONE, "cosine", *NUMBERS)
    yield ops.soft_dtw_from_cost_hessian, (outer, costs.sin(), costs, *NONE, *NUMBERS)
    yield ops.soft_dtw_from_cost, (costs, *NONE, *NUMBERS)
    values, kept = ops.soft_dtw_from_cost_keeping(costs, *NONE, *NUMBERS)
    yield ops.soft_dtw_from_cost_backward, (values, values, kept, costs, *NONE, *NUMBERS)


@every_device
def test_ops_are_what_they_say(place):
    """Schemas, results without data and dynamic shapes, as torch checks them."""
    seen = set()
    for op, args in calls(place):
        torch.library.opcheck(op.default, args)
        seen.add(str(op))
    assert len(seen) == 14


@pytest.mark.parametrize("place_of_lengths", ["cpu", "cuda:0"])
def test_what_is_kept_on_a_device_that_is_not_there(monkeypatch, place_of_lengths):
    """A compiler knows its size without a device, from what is known of the series alone."""
    from torch._subclasses import FakeTensorMode

    limits = kernels.DeviceLimits(multiprocessors=132, shared=227 * 1024)
    monkeypatch.setattr(kernels, "device_limits", lambda device: limits)
    with FakeTensorMode():
        a, b = torch.empty(3, 6, 2, device="cuda:0"), torch.empty(1, 5, 2, device="cuda:0")
        C = torch.empty(3, 6, 5, device="cuda:0")
        lengths = torch.empty(3, dtype=torch.int64, device=place_of_lengths)
        options, numbers = (None, None, lengths, None), (0.5, None, None, None)
        ops = torch.ops.cuseq
        for values, kept in (
            ops.soft_dtw_keeping(a, b, *options, "sqeuclidean", *numbers),
            ops.soft_dtw_from_cost_keeping(C, *options, *numbers),
        ):
            assert values.shape == (3,) and values.device == kept.device == a.device
            assert kept.dtype == torch.uint8 and kept.shape[0] > 0


# Compilers


@every_device
@every_function
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_break(place, function, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    tensors = convolution(place)
    torch.testing.assert_close(compiled(*tensors), function(*tensors))
    assert_same(gradients(compiled, tensors), gradients(function, tensors))


@every_device
@pytest.mark.slow
@every_function
def test_compiled_by_inductor(place, function):
    torch._dynamo.reset()
    tensors = convolution(place)
    compiled = torch.compile(function, fullgraph=True)
    assert_same(gradients(compiled, tensors), gradients(function, tensors))


@every_device
def test_another_length_does_not_compile_again(place):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(by_row, fullgraph=True, dynamic=True, backend=counter)
    for L in (9, 12, 31):
        x, *others = convolution(place)
        tensors = torch.cat([x] * 4, dim=2)[..., :L], *others
        assert_same(gradients(compiled, tensors), gradients(by_row, tensors))
    assert counter.frame_count == 1


@every_device
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_update_writes_its_state(place, dynamic):
    torch._dynamo.reset()
    x, weight, bias, state = convolution(place)

    def generate(state):
        ys = [adapter.causal_conv1d_update(x[..., t], state, weight, bias) for t in range(3)]
        return torch.stack(ys) + state.sum()

    compiled = torch.compile(generate, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    states = state.clone(), state.clone()
    with torch.no_grad():
        torch.testing.assert_close(compiled(states[0]), generate(states[1]))
    assert torch.equal(*states) and not torch.equal(states[0], state)


@every_device
def test_exported(place):
    x, weight, bias, _ = convolution(place)
    a, b = series(place)

    class Model(torch.nn.Module):
        def forward(self, x, weight, bias, a, b):
            y = adapter.causal_conv1d(x, weight, bias, activation="silu")
            return y, adapter.soft_dtw(a, b, bandwidth=3)

    args = x, weight, bias, a, b
    exported = torch.export.export(Model(), args).module()
    assert_same(exported(*args), Model()(*args))


# Transforms


@every_device
@every_function
def test_grad(place, function):
    tensors = convolution(place)
    got = torch.func.grad(function, argnums=(0, 1, 2, 3))(*tensors)
    assert_same(got, gradients(function, tensors))


@every_device
@pytest.mark.parametrize("function", [by_row, by_column, packed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mapped", [(0,), (1,), (0, 1, 2, 3), (2, 3)])
def test_gradients_of_single_samples(place, function, mapped):
    """vmap of grad over some of the tensors, along any of their axes."""
    tensors = convolution(place)
    dims = tuple(k % 2 if k in mapped else None for k in range(4))
    tensors = [
        x if dim is None else torch.stack([x, x + 0.1, 0.5 * x], dim=dim)
        for x, dim in zip(tensors, dims, strict=True)
    ]
    each = torch.func.vmap(torch.func.grad(function, argnums=(0, 1, 2, 3)), in_dims=dims)
    wanted = []
    for k in range(3):
        pairs = zip(tensors, dims, strict=True)
        wanted.append(gradients(function, [x if d is None else x.select(d, k) for x, d in pairs]))
    assert_same(each(*tensors), [torch.stack(grads) for grads in zip(*wanted, strict=True)])


@every_device
def test_sequences_of_their_own_are_mapped(place):
    x, weight, _, _ = convolution(place)
    index = torch.tensor([SEQUENCES, [[5] * 9] * 3], device=x.device)
    got = torch.func.vmap(lambda index: adapter.causal_conv1d(x, weight, seq_idx=index))(index)
    assert_same(got, [adapter.causal_conv1d(x, weight, seq_idx=one) for one in index])


@every_device
def test_updates_are_mapped(place):
    x, weight, _, state = convolution(place)
    update = torch.func.vmap(lambda x, state: adapter.causal_conv1d_update(x, state, weight))
    tokens, states = torch.stack([x[..., 0], x[..., 1]]), torch.stack([state, 2 * state])
    alone = states.clone()
    wanted = [
        adapter.causal_conv1d_update(*pair, weight) for pair in zip(tokens, alone, strict=True)
    ]
    assert_same([update(tokens, states), states], [torch.stack(wanted), alone])
    with pytest.raises(ValueError, match="^state: expected .*, got one for all; .*"):
        torch.func.vmap(lambda x: adapter.causal_conv1d_update(x, state, weight))(tokens)


@every_device
def test_pairs_of_series_are_mapped(place):
    a, b = series(place)
    value = torch.func.vmap(lambda a, b: adapter.soft_dtw(a, b, gamma=0.5))
    torch.testing.assert_close(value(a, b), adapter.soft_dtw(a, b, gamma=0.5))
    grad = torch.func.vmap(torch.func.grad(lambda a, b: adapter.soft_dtw(a, b, gamma=0.5)))
    leaf = a.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(adapter.soft_dtw(leaf, b, gamma=0.5).sum(), leaf)
    assert_same([grad(a, b)], [wanted])


@every_device
def test_jacobians(place):
    x, weight, bias, _ = convolution(place)
    by_channel = torch.func.jacrev(lambda w: adapter.causal_conv1d(x, w, bias).sum(dim=(0, 2)))
    sums = torch.stack([x[..., : 9 - back].sum(dim=(0, 2)) for back in (3, 2, 1, 0)], dim=1)
    assert_same([by_channel(weight)], [torch.eye(4, device=x.device)[..., None] * sums])
    a, b = series(place)
    of_pairs = torch.func.jacrev(lambda a: adapter.soft_dtw(a, b, gamma=0.5))(a)
    assert of_pairs.shape == (3, *a.shape)
    for k, j in (0, 1), (2, 0):
        assert not of_pairs[k, j].any() and of_pairs[k, k].any()


def gradients_norm(function, y):
    return torch.func.grad(function)(y).square().sum()


@every_device
def test_what_has_no_derivative_says_so(place):
    """Beyond the first derivative of a convolution, the second of soft-DTW; and forward mode."""
    a, b = series(place)
    x, weight, *_ = convolution(place)
    for name, function, y in [
        ("soft_dtw", lambda a: adapter.soft_dtw(a, b).sum(), a),
        ("causal_conv1d", lambda x: adapter.causal_conv1d(x, weight).square().sum(), x),
    ]:
        with pytest.raises(NotImplementedError, match=f"^{name}: expected .*reverse.*, got .*; .*"):
            torch.func.jvp(function, (y,), (y,))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(y, y)
            with pytest.raises(NotImplementedError, match=f"^{name}: expected .*reverse.*; .*"):
                function(dual)
        for _ in range(2 if name == "soft_dtw" else 1):
            function = partial(gradients_norm, function)
        with pytest.raises(NotImplementedError, match=f"^{name}: expected .*, got .*order; .*"):
            torch.func.grad(function)(y)


# Autograd's other users


@every_device
@every_function
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(place, function, reentrant):
    from torch.utils.checkpoint import checkpoint

    def again(*tensors):
        return checkpoint(function, *tensors, use_reentrant=reentrant)

    tensors = convolution(place)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    again(*leaves).backward()
    assert_same([leaf.grad for leaf in leaves], gradients(function, tensors))


@every_device
@every_function
def test_saved_tensors_through_hooks(place, function):
    """What is saved may come back as a copy."""
    packs = []

    def pack(x):
        packs.append(x.shape)
        return copy.deepcopy(x.detach().cpu()), x.device

    tensors = convolution(place)
    wanted = gradients(function, tensors)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved[0].to(saved[1])):
        value = function(*leaves)
    assert_same(torch.autograd.grad(value, leaves), wanted)
    assert packs


@every_device
@every_function
def test_inference_mode(place, function):
    tensors = convolution(place)
    with torch.inference_mode():
        got = function(*tensors)
    torch.testing.assert_close(got.clone(), function(*tensors))
    assert got.is_inference()


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(place, dtype):
    """The convolution runs in autocast's dtype, but for float64; a filter keeps its own."""
    x, weight, bias, _ = (tensor.to(dtype) for tensor in convolution(place))
    with torch.autocast(x.device.type, torch.bfloat16):
        y = adapter.causal_conv1d(x, weight, bias)
        leaf = x.clone().requires_grad_()
        adapter.causal_conv1d(leaf, weight, bias).sum().backward()
    wanted = torch.bfloat16 if dtype == torch.float32 else dtype
    assert y.dtype == wanted and leaf.grad.dtype == dtype
    assert torch.equal(y, adapter.causal_conv1d(x.to(wanted), weight, bias))


@pytest.mark.gpu
@every_function
def test_a_step_in_a_cuda_graph(function):
    """Forward and backward, captured once and replayed on other numbers.

    A copy from the host can not be captured, so indices are on the device before.
    """
    indices = {
        by_column: ("seq_idx", SEQUENCES),
        packed: ("cu_seqlens", STARTS),
        of_series: ("lengths", LENGTHS),
    }
    if function in indices:
        name, index = indices[function]
        function = partial(function, **{name: torch.tensor(index, device="cuda")})
    tensors = convolution(TORCH_CUDA)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(function(*leaves), leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = torch.autograd.grad(function(*leaves), leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(0.7)
    graph.replay()
    assert_same(got, gradients(function, leaves))


@pytest.mark.gpu
@pytest.mark.slow
@every_function
def test_compiled_to_cuda_graphs(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    tensors = convolution(TORCH_CUDA)
    for _ in range(3):
        assert_same([x.clone() for x in gradients(compiled, tensors)], gradients(function, tensors))
