"""cuseq.jax under vmap, scan, cond, checkpoint and several devices, and a training step."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import cuseq
from tests import frameworks
from tests.frameworks import JAX_CPU, JAX_CUDA, over, same_bits
from tests.samples import normal

jax = pytest.importorskip("jax")
adapter = pytest.importorskip("cuseq.jax")
jnp, callback = jax.numpy, pytest.importorskip("cuseq.jax.callback")

ROOT = Path(__file__).resolve().parents[1]
every_device = over([JAX_CPU, JAX_CUDA])


@pytest.fixture
def calls(monkeypatch):
    """The functions that XLA has called, by name."""
    names, call = [], callback._Call.__call__

    def counted(self, *args):
        names.append(self._run.func.__name__)
        return call(self, *args)

    monkeypatch.setattr(callback._Call, "__call__", counted)
    return names


def close(got, wanted, tolerance=1e-11):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)
        assert np.abs(y).max(initial=0.0) > 0 or not y.size


def one_by_one(function, axes, arrays):
    """What vmap is to give: of each sample, stacked."""
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)

    def sample(k):
        pairs = zip(arrays, axes, strict=True)
        return [x if axis is None else jnp.take(x, k, axis) for x, axis in pairs]

    results = [function(*sample(k)) for k in range(size)]
    return jax.tree.map(lambda *each: jnp.stack(each), *results)


def summed(gradients, axes):
    """Gradients of a sum over samples: of what all samples share, the sum."""
    pairs = zip(gradients, axes, strict=True)
    return [x.sum(0) if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in pairs]


def mapped_in_some_way(count):
    """Axes for vmap, the first one or none of each argument: one, two, all but one, or all."""
    ways = itertools.product((0, None), repeat=count)
    return [way for way in ways if way.count(0) in (1, 2, count - 1, count)]


def alone_or_together(count):
    """As `mapped_in_some_way`, of fewer ways."""
    return [way for way in mapped_in_some_way(count) if way.count(0) != 2]


# vmap:

K = 4  # samples


def of_series(a, b, gamma):
    return adapter.soft_dtw(a, b, gamma=gamma, bandwidth=3)


@every_device
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("axes", mapped_in_some_way(3), ids=str)
def test_mapped_series(place, axes, batched, calls):
    """One call of XLA's for all samples, forward and with gradients."""
    arrays = [normal(K, 3, 6, 2), normal(K, 3, 5, 2, seed=1), np.array([0.5, 1.0, 0.0, 2.0])]
    if not batched:
        arrays[:2] = (x[:, 0] for x in arrays[:2])
    arrays = [place.array(x if axis == 0 else x[0]) for x, axis in zip(arrays, axes, strict=True)]
    wanted = one_by_one(of_series, axes, arrays)
    calls.clear()
    close(jax.jit(jax.vmap(of_series, axes))(*arrays), wanted)
    assert calls == ["_run"]

    def total(a, b, gamma):
        return of_series(a, b, gamma).sum()

    gradient = jax.grad(total, (0, 1))
    wanted = one_by_one(gradient, axes, arrays)
    calls.clear()
    close(jax.jit(jax.vmap(gradient, axes))(*arrays), wanted)
    assert calls == ["_run"]

    def total_of_all(*arrays):
        return jax.vmap(of_series, axes)(*arrays).sum()

    close(jax.grad(total_of_all, (0, 1))(*arrays), summed(wanted, axes[:2]))


@every_device
def test_mapped_options_and_costs(place, calls):
    C = place.array(np.abs(normal(K, 3, 6, 5)))
    lengths = place.array(np.array([[6, 1, 2], [3, 3, 3], [6, 6, 6], [1, 2, 3]]))
    limits = place.array(np.array([1, 2, 5, 0]))

    def values(C, lengths, limit):
        return adapter.soft_dtw_from_cost(C, lengths_a=lengths, bandwidth=limit, gamma=0.3)

    for axes in (0, 0, 0), (None, 0, 0), (0, None, None), (1, 1, 0):
        arrays = [
            x[0] if axis is None else jnp.moveaxis(x, 0, axis)
            for x, axis in zip((C, lengths, limits), axes, strict=True)
        ]
        wanted = one_by_one(values, axes, arrays)
        calls.clear()
        close(jax.vmap(values, axes)(*arrays), wanted)
        assert calls == ["_run"]
    E = jax.vmap(partial(adapter.soft_dtw_alignment, gamma=0.3))(C, C)
    wanted = [cuseq.soft_dtw_alignment(c, c, gamma=0.3) for c in C]
    assert same_bits(np.array(E), np.array(jnp.stack(wanted)))


@every_device
def test_two_mapped_axes(place, calls):
    """As a matrix of all pairs of two collections."""
    a, b = place.array(normal(4, 6, 2)), place.array(normal(3, 5, 2, seed=1))
    pairs = jax.vmap(jax.vmap(adapter.soft_dtw, (None, 0)), (0, None))
    matrix = jax.jit(pairs)(a, b)
    assert matrix.shape == (4, 3) and calls == ["_run"]
    for i, j in itertools.product(range(4), range(3)):
        assert float(matrix[i, j]) == float(cuseq.soft_dtw(a[i], b[j]))


@every_device
@pytest.mark.parametrize("shape", [(0, 3, 6, 2), (2, 0, 6, 2)], ids=str)
def test_no_samples(place, shape):
    a = place.array(normal(*shape))
    values = jax.vmap(adapter.soft_dtw)(a, a)
    assert values.shape == shape[:2]
    gradient = jax.grad(lambda a: jax.vmap(adapter.soft_dtw)(a, a).sum())(a)
    assert gradient.shape == shape
    weight = place.array(normal(6, 4))
    assert jax.vmap(adapter.causal_conv1d, (0, None))(a, weight).shape == shape


FILTERS = "x", "weight", "bias", "initial_state", "seq_idx"


def filtered(layout, x, weight, bias, state, seq_idx):
    return adapter.causal_conv1d_with_state(
        *(x, weight, bias),
        activation="silu",
        layout=layout,
        initial_state=state,
        seq_idx=seq_idx,
    )


@every_device
@pytest.mark.parametrize("axes", mapped_in_some_way(5), ids=str)
def test_mapped_convolutions(place, axes, calls):
    """One call for all samples unless these have sequences and filters of their own.

    The layouts alternate over which arguments are mapped.
    """
    layout = ("bdl", "bld")[mapped_in_some_way(5).index(axes) % 2]
    x = normal(K, 2, 3, 7)
    x = x if layout == "bdl" else x.swapaxes(2, 3)
    rest = normal(K, 3, 4, seed=1), normal(K, 3, seed=2), normal(K, 2, 3, 5, seed=3)
    index = np.random.default_rng(0).integers(-1, 2, (K, 2, 7))
    arrays = [
        place.array(x if axis == 0 else x[0])
        for x, axis in zip((x, *rest, index), axes, strict=True)
    ]
    function = partial(filtered, layout)
    wanted = one_by_one(function, axes, arrays)
    calls.clear()
    close(jax.jit(jax.vmap(function, axes))(*arrays), wanted)
    own_filters, own_sequences = 0 in axes[1:3], axes[4] == 0
    assert len(calls) == (K if own_sequences and own_filters else 1)

    def total(*arrays):
        y, state = function(*arrays)
        return jnp.square(y).sum() + jnp.sin(state).sum()

    gradient = jax.grad(total, (0, 1, 2, 3))
    wanted = one_by_one(gradient, axes, arrays)
    calls.clear()
    close(jax.jit(jax.vmap(gradient, axes))(*arrays), wanted)
    assert calls.count("_run_backward") == (K if own_sequences else 1)

    def total_of_all(*arrays):
        return jax.vmap(total, axes)(*arrays).sum()

    close(jax.jit(jax.grad(total_of_all, (0, 1, 2, 3)))(*arrays), summed(wanted, axes[:4]))


@every_device
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0), (0, None, 0)])
def test_mapped_packed_convolutions(place, axes):
    starts = np.array([[0, 2, 2, 7], [0, 7, 7, 7], [0, 0, 0, 7], [0, 1, 5, 7]])
    given = normal(K, 7, 3), normal(K, 3, 4, seed=1), starts
    arrays = [place.array(x if axis == 0 else x[0]) for x, axis in zip(given, axes, strict=True)]

    def total(x, weight, cu_seqlens):
        y, state = adapter.causal_conv1d_varlen_with_state(x, weight, cu_seqlens=cu_seqlens)
        return jnp.square(y).sum() + jnp.sin(state).sum()

    function = jax.value_and_grad(total, (0, 1))
    close(jax.jit(jax.vmap(function, axes))(*arrays), one_by_one(function, axes, arrays))


STEPS = "x", "state", "weight", "cache_seqlens", "state_indices"


@every_device
@pytest.mark.parametrize("indices", [(), (3,), (4,), (3, 4)], ids=str)
@pytest.mark.parametrize("axes", alone_or_together(5), ids=str)
def test_mapped_steps(place, axes, indices, calls):
    rows = np.array([[0, 2], [3, -1], [1, 0], [-5, 3]])
    given = (
        *(normal(K, 2, 3), normal(K, 4 if 4 in indices else 2, 3, 4, seed=1)),
        *(normal(K, 3, 3, seed=2), np.arange(2 * K).reshape(K, 2), rows),
    )
    arrays = [place.array(x if axis == 0 else x[0]) for x, axis in zip(given, axes, strict=True)]
    there = [k for k in range(5) if k < 3 or k in indices]
    if all(axes[k] is None for k in there):
        pytest.skip("nothing is mapped")
    names, arrays, axes = ([those[k] for k in there] for those in (STEPS, arrays, axes))

    def update(*arrays):
        return adapter.causal_conv1d_update(**dict(zip(names, arrays, strict=True)))

    wanted = one_by_one(update, axes, arrays)
    calls.clear()
    close(jax.jit(jax.vmap(update, axes))(*arrays), wanted)
    assert len(calls) == (K if axes[2] == 0 and 0 in axes[3:] else 1)


@over([JAX_CUDA])
def test_a_row_of_no_pool_is_none_of_another_sample(place):
    """On a device, where such a row gives NaN and touches no state."""
    x, state, weight = (place.array(normal(*s)) for s in ((2, 1, 3), (2, 1, 3, 4), (3, 4)))
    rows = place.array(np.array([[1], [0]]))

    def update(x, state, rows):
        return adapter.causal_conv1d_update(x, state, weight, state_indices=rows)

    y, after = jax.vmap(update)(x, state, rows)
    assert np.isnan(y[0]).all() and np.isfinite(y[1]).all()
    assert same_bits(np.array(after[0]), np.array(state[0]))


# Control flow:


@every_device
def test_scan_of_steps_is_the_convolution(place):
    """Also its gradients, through the state that is carried."""
    shapes = (2, 3, 9), (3, 4), (3,), (2, 3, 5)
    x, weight, bias, state = (place.array(normal(*s, seed=k)) for k, s in enumerate(shapes))

    def by_steps(x, weight, bias, state):
        def step(state, token):
            y, state = adapter.causal_conv1d_update(token, state, weight, bias, activation="silu")
            return state, y

        state, y = jax.lax.scan(step, state, jnp.moveaxis(x, 2, 0))
        return jnp.moveaxis(y, 0, 2), state

    def whole(x, weight, bias, state):
        return adapter.causal_conv1d_with_state(
            x, weight, bias, activation="silu", initial_state=state
        )

    def total(function, *arrays):
        y, state = function(*arrays)
        return jnp.square(y).sum() + jnp.sin(state).sum()

    arrays = x, weight, bias, state
    close(jax.jit(by_steps)(*arrays), whole(*arrays))
    got, wanted = (
        jax.jit(jax.grad(partial(total, function), (0, 1, 2, 3)))(*arrays)
        for function in (by_steps, whole)
    )
    close(got, wanted)


@every_device
def test_a_state_that_is_carried_stays_where_it_is(place):
    """A ring in a loop of a hundred steps: what the loop leaves is right, step by step."""
    weight, state = place.array(normal(3, 4)), jnp.zeros((1, 3, 4))
    signal = place.array(normal(1, 3, 100))
    state = jax.device_put(state, next(iter(signal.devices())))

    def step(carried, token):
        state, count = carried
        y, state = adapter.causal_conv1d_update(token, state, weight, cache_seqlens=count)
        return (state, count + 1), y

    carried = state, jnp.zeros(1, int)
    _, y = jax.jit(partial(jax.lax.scan, step))(carried, jnp.moveaxis(signal, 2, 0))
    close(jnp.moveaxis(y, 0, 2), adapter.causal_conv1d(signal, weight))


@every_device
def test_cond_and_while(place):
    a, b = place.array(normal(2, 5, 3)), place.array(normal(2, 4, 3, seed=1))

    @jax.jit
    def either(flag, a):
        costs = "euclidean", "cityblock"
        branches = [lambda a, cost=cost: adapter.soft_dtw(a, b, cost=cost).sum() for cost in costs]
        return jax.lax.cond(flag, *branches, a)

    for flag, cost in (True, "euclidean"), (False, "cityblock"):
        value, grad = jax.value_and_grad(either, 1)(flag, a)
        wanted, (grad_a, _) = cuseq.soft_dtw_value_and_grad(a, b, cost=cost)
        close((value, grad), (wanted.sum(), grad_a))

    def descend(carried):
        k, a = carried
        return k + 1, a - 0.1 * jax.grad(lambda a: adapter.soft_dtw(a, b).sum())(a)

    _, after = jax.lax.while_loop(lambda carried: carried[0] < 20, descend, (0, a))
    assert (cuseq.soft_dtw(after, b) < cuseq.soft_dtw(a, b) - 1).all()


@every_device
@pytest.mark.parametrize("name", ["jit", "checkpoint"])
def test_programs_within_programs(place, name):
    transform = getattr(jax, name)
    shapes = (2, 3, 9), (3, 4), (2, 9, 3)
    x, weight, target = (place.array(normal(*s, seed=k)) for k, s in enumerate(shapes))

    def loss(x, weight):
        y = adapter.causal_conv1d(jnp.sin(x), weight, activation="silu")
        return adapter.soft_dtw(y.swapaxes(1, 2), target).sum()

    wanted = jax.grad(loss, (0, 1))(x, weight)
    close(jax.jit(jax.grad(transform(loss), (0, 1)))(x, weight), wanted)


@every_device
def test_linearize_and_vjp_of_auxiliary_results(place):
    x, weight = place.array(normal(2, 3, 9)), place.array(normal(3, 4))
    (y, state), pull = jax.vjp(adapter.causal_conv1d_with_state, x, weight)
    for outer in (jnp.ones_like(y), jnp.zeros_like(state)), (0 * y, jnp.ones_like(state)):
        grads = cuseq.causal_conv1d_backward(outer[0], x, weight, grad_final_state=outer[1])
        for got, wanted in zip(pull(outer), grads, strict=False):
            assert same_bits(np.array(got), np.array(wanted))


# Programs:


@every_device
def test_a_function_is_traced_and_compiled_once(place):
    """Other numbers of the same shapes, and another jit of the same call, find what is there."""
    a, b = place.array(normal(2, 5, 3)), place.array(normal(2, 4, 3, seed=1))
    adapter.soft_dtw(a, b, gamma=0.25)
    before = callback._call.cache_info()
    for _ in range(3):
        adapter.soft_dtw(a + 1, b, gamma=0.25)
        jax.jit(lambda a: adapter.soft_dtw(a, b, gamma=0.25))(a)
    after = callback._call.cache_info()
    assert after.misses == before.misses and after.hits > before.hits


@every_device
def test_calls_whose_results_nobody_wants_are_left_out(place, calls):
    a = place.array(normal(2, 5, 3))

    @jax.jit
    def nothing_of(a):
        adapter.soft_dtw(a, a)
        return a + 1

    nothing_of(a).block_until_ready()
    assert not calls


@every_device
def test_programs_in_threads(place):
    arrays = [place.array(normal(2, 5 + k % 3, 3, seed=k)) for k in range(12)]
    function = jax.jit(jax.value_and_grad(lambda a: adapter.soft_dtw(a, a[::-1]).sum()))
    wanted = [function(a) for a in arrays]
    with ThreadPoolExecutor(4) as pool:
        for got, expected in zip(pool.map(function, arrays * 5), wanted * 5, strict=True):
            for x, y in zip(got, expected, strict=True):
                assert same_bits(np.array(x), np.array(y))


SEVERAL_DEVICES = """
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import cuseq, cuseq.jax
devices = jax.devices()[:2]
assert len(devices) == 2, devices
rng = np.random.default_rng(0)
a, b = (rng.normal(size=(4, n, 2)).astype("float32") for n in (6, 5))
wanted, (grad_a, grad_b) = cuseq.soft_dtw_value_and_grad(a, b)
sharding = NamedSharding(Mesh(np.array(devices), "i"), P("i"))
x, y = jax.device_put(a, sharding), jax.device_put(b, sharding)
values = jax.jit(cuseq.jax.soft_dtw)(x, y)
np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)
loss = jax.value_and_grad(lambda a, b: cuseq.jax.soft_dtw(a, b).sum())
each = jax.pmap(loss, devices=devices)
_, grads = each(a.reshape(2, 2, 6, 2), b.reshape(2, 2, 5, 2))
np.testing.assert_allclose(grads.reshape(a.shape), grad_a, rtol=1e-4, atol=1e-4)
for device in devices:
    value = jax.jit(cuseq.jax.soft_dtw)(jax.device_put(a, device), jax.device_put(b, device))
    assert value.devices() == {device}
    np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)
print("same")
"""


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_several_devices(platform):
    """Two that are the CPU, or two CUDA devices: one each, shards, and one program over both."""
    environment = os.environ | {"JAX_PLATFORMS": platform}
    if platform == "cpu":
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    elif frameworks.module("cupy").cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    command = [sys.executable, "-c", SEVERAL_DEVICES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"


# Training:


@every_device
def test_a_training_step_converges_as_torchs_does(place):
    """A filter that maps noise to series; the same steps in PyTorch end at the same weights."""
    torch = pytest.importorskip("torch")
    import cuseq.torch

    x, target = normal(4, 3, 20, dtype="float32"), normal(4, 18, 3, seed=1, dtype="float32")
    weight, bias = normal(3, 4, seed=2, dtype="float32"), np.zeros(3, "float32")

    def loss(weight, bias, x, target):
        y = adapter.causal_conv1d(x, weight, bias)
        return adapter.soft_dtw(y.swapaxes(1, 2), target, gamma=0.5).mean()

    @jax.jit
    def step(parameters, x, target):
        value, gradients = jax.value_and_grad(loss, (0, 1))(*parameters, x, target)
        return [p - 0.003 * g for p, g in zip(parameters, gradients, strict=True)], value

    given = [place.array(x) for x in (x, target)]
    parameters, values = [place.array(x) for x in (weight, bias)], []
    for _ in range(40):
        parameters, value = step(parameters, *given)
        values.append(float(value))

    theirs = [torch.tensor(x, requires_grad=True) for x in (weight, bias)]
    optimizer = torch.optim.SGD(theirs, lr=0.003)
    for value in values:
        optimizer.zero_grad()
        y = cuseq.torch.causal_conv1d(torch.from_numpy(x), *theirs)
        series = torch.from_numpy(target)
        total = cuseq.torch.soft_dtw(y.swapaxes(1, 2), series, gamma=0.5).mean()
        total.backward()
        optimizer.step()
        assert value == pytest.approx(total.item(), rel=1e-4)
    assert values[-1] < values[0] - 5
    for own, other in zip(parameters, theirs, strict=True):
        np.testing.assert_allclose(own, other.detach(), rtol=1e-3, atol=1e-4)
