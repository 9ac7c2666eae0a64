"""cuseq.jax on a CUDA device that is the host: the buffers of XLA count as memory of a device.

Programs of the CPU call back; here their buffers say that they are on device 0, so that the kernels
run (on the CPU), results are XLA's buffers, and calls are recorded and replayed.
"""

import ctypes
from functools import partial

import numpy as np
import pytest

import cuseq
from cuseq.runtime import arrays
from tests import frameworks
from tests.cpu_runner import COMPILER
from tests.cpu_runner.device import OnDevice, installed, normal, on_device
from tests.frameworks import same_bits

jax = pytest.importorskip("jax")
adapter = pytest.importorskip("cuseq.jax")
callback = pytest.importorskip("cuseq.jax.callback")
jnp = jax.numpy

pytestmark = pytest.mark.skipif(not COMPILER, reason="g++ is not installed")


class Buffer:
    """A buffer of XLA in host memory in the role of one on device 0."""

    def __init__(self, buffer):
        memory = np.asarray(buffer)
        self.nbytes, self.pointer = memory.nbytes, memory.ctypes.data
        self.__cuda_array_interface__ = {"data": (self.pointer, False)}

    def __dlpack_device__(self):
        return arrays.DLPack.CUDA, 0


on_the_host = callback._Call.__call__


class Context:
    """Of a call by XLA."""

    stream = 0


@pytest.fixture(autouse=True)
def borrowed(monkeypatch):
    """Buffers are on a device; the names of what a call borrows, which it does in a run in full."""
    call, borrow, names = callback._Call.__call__, arrays.borrow, []

    def on_a_device(self, context, results, *given):
        results = [Buffer(x) for x in results]
        for buffer in results[: -1 if self._place is not None else None]:
            ctypes.memset(buffer.pointer, 255, buffer.nbytes)
        call(self, Context, results, *map(Buffer, given))

    def borrowing(name, x, operator):
        names.append(name)
        return borrow(name, x, operator)

    monkeypatch.setattr(callback._Call, "__call__", on_a_device)
    monkeypatch.setattr(callback.Lent, "of_scratch", OnDevice)
    for name in "current_device", "address":
        monkeypatch.setattr(callback.Lent, name, staticmethod(getattr(OnDevice, name)))
    monkeypatch.setattr(arrays, "borrow", borrowing)
    monkeypatch.setattr(frameworks, "fill_on_device", lambda array: None)  # done above
    callback._call.cache_clear()
    with installed():
        yield names
    callback._call.cache_clear()


# A function of cuseq.jax, the same of the core, shapes of arrays by name, and options.

SERIES = {"a": (3, 5, 2), "b": (3, 6, 2)}
FILTER = {"x": (2, 3, 7), "weight": (3, 4), "bias": (3,)}
INDEX = {"seq_idx": np.array([[0, 0, 0, 1, 1, -1, 2]] * 2)}
STEP = {"x": (2, 3), "state": (2, 3, 5), "weight": (3, 4), "bias": (3,)}
CALLS = [
    ("soft_dtw", SERIES, {"gamma": 0.5}),
    ("soft_dtw", SERIES, {"cost": "euclidean", "bandwidth": np.array([1, 2, 0])}),
    ("soft_dtw", SERIES, {"gamma": np.array([1.0, 0.0, 2.0]), "lengths_a": np.array([5, 2, 1])}),
    ("soft_dtw_alignment", SERIES, {"bandwidth": 2}),
    ("soft_dtw_from_cost", {"C": (3, 4, 5)}, {}),
    ("causal_conv1d", FILTER, {"activation": "silu"}),
    ("causal_conv1d", FILTER, INDEX),
    ("causal_conv1d_with_state", FILTER | {"initial_state": (2, 3, 5)}, {"activation": "silu"}),
    ("causal_conv1d_with_state", FILTER, {"layout": "bld"} | INDEX),
    ("causal_conv1d_varlen_with_state", {"x": (9, 3), "weight": (3, 4)}, {"cu_seqlens": [0, 4, 9]}),
    ("causal_conv1d_update", STEP, {"activation": "silu"}),
    ("causal_conv1d_update", STEP, {"cache_seqlens": np.array([3, 4])}),
]
each_call = pytest.mark.parametrize(
    ("name", "shapes", "options"), CALLS, ids=[f"{k}-{name}" for k, (name, *_) in enumerate(CALLS)]
)


def random_arrays(shapes, options, seed):
    arrays = {name: normal(*shape, seed=seed + k) for k, (name, shape) in enumerate(shapes.items())}
    if options.get("layout") == "bld":
        arrays["x"] = arrays["x"].swapaxes(1, 2).copy()
    return arrays


def by_the_core(name, arrays, options):
    """The core on arrays of the device; for the update the state as well."""
    arrays = {name: on_device(x) for name, x in arrays.items()}
    options = {name: on_device(np.array(x)) if np.ndim(x) else x for name, x in options.items()}
    results = getattr(cuseq, name).__wrapped__(**arrays, **options)
    return (results, arrays["state"]) if name == "causal_conv1d_update" else results


def assert_same(results, wanted):
    results, wanted = (x if isinstance(x, tuple) else (x,) for x in (results, wanted))
    for x, y in zip(results, wanted, strict=True):
        assert same_bits(np.array(x), np.asarray(y))


@each_call
def test_results_are_the_cores(name, shapes, options, borrowed):
    """On a first call, and on others, which are replayed."""
    program = jax.jit(partial(getattr(adapter, name), **options))
    for seed in 0, 10, 20, 10:
        arrays = random_arrays(shapes, options, seed)
        wanted = by_the_core(name, arrays, options)
        program(**arrays)  # traced by the first one
        borrowed.clear()
        assert_same(program(**arrays), wanted)
        assert not borrowed, "ran in full"


@each_call
def test_gradients_are_the_hosts(name, shapes, options, borrowed, monkeypatch):
    """Of a sum of squares, by all arrays, on a first call and on others."""
    if name == "soft_dtw_alignment" or "cache_seqlens" in options:
        pytest.skip("has no derivative")
    function = partial(getattr(adapter, name), **options)

    def total(arrays):
        return sum(jnp.square(x).sum() for x in jax.tree.leaves(function(**arrays)))

    program = jax.jit(jax.grad(total))
    given = [random_arrays(shapes, options, seed) for seed in (0, 10)]
    results = [program(arrays) for arrays in given]
    borrowed.clear()
    results += [program(arrays) for arrays in given]
    assert not borrowed, "ran in full"
    with monkeypatch.context() as host:
        host.setattr(callback._Call, "__call__", on_the_host)
        wanted = [program(arrays) for arrays in given]
    for got, expected in zip(results, wanted * 2, strict=True):
        for key, gradient in expected.items():
            scale = np.abs(gradient).max()
            np.testing.assert_allclose(got[key], gradient, rtol=1e-5, atol=1e-5 * scale)


def test_vmap_and_scan(borrowed):
    """Programs with several calls, whose working memory is that of others before."""
    a, b = normal(4, 3, 5, 2), normal(3, 6, 2, seed=1)
    values = jax.jit(jax.vmap(adapter.soft_dtw, (0, None)))(a, b)
    for k in range(4):
        assert_same(values[k], by_the_core("soft_dtw", {"a": a[k], "b": b}, {}))
    x, state, weight = normal(5, 2, 3), normal(2, 3, 3), normal(3, 4)

    def step(state, token):
        y, state = adapter.causal_conv1d_update(token, state, weight)
        return state, y

    after, y = jax.jit(partial(jax.lax.scan, step))(state, x)
    arrays = {"x": np.moveaxis(x, 0, 2).copy(), "weight": weight, "initial_state": state}
    wanted, wanted_state = by_the_core("causal_conv1d_with_state", arrays, {})
    np.testing.assert_allclose(jnp.moveaxis(y, 0, 2), wanted, rtol=1e-6, atol=1e-6)
    assert_same(after, wanted_state)


def test_results_that_were_not_declared_are_a_fault_of_ours():
    with pytest.raises(RuntimeError, match="results: expected float32 .3,., as declared"):
        callback._thread.results = iter([callback.described(jnp.zeros(3, "float32"))])
        callback.Lent.empty((4,), "float32", 0)
