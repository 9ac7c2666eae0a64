"""Every public function on every kind of array; DLPack in its versions; CuPy's streams and graphs.

What a function computes is tested in files of its own; here, that it computes the same for every
framework, on the caller's memory and stream, and waits for nothing.
"""

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest

import cuseq
from cuseq.runtime import arrays
from tests import frameworks
from tests.frameworks import (
    CUPY,
    DLPACK_CUDA,
    JAX_CPU,
    JAX_CUDA,
    NUMPY,
    TORCH_CUDA,
    OnlyDLPack,
    every_cuda_place,
    every_place_and_dtype,
    home_of_state,
    leaves,
    over,
    same_bits,
)
from tests.samples import DTYPES, normal
from tests.tolerances import assert_close


class Case(NamedTuple):
    """A call of a public function: shapes of arrays by name, options, what its results are."""

    shapes: dict
    options: dict
    results: tuple

    def arrays(self, dtype="float64", seed=0):
        shapes = enumerate(self.shapes.items())
        return {name: normal(*shape, seed=seed + k, dtype=dtype) for k, (name, shape) in shapes}


SERIES, COSTS = {"a": (3, 6, 2), "b": (3, 5, 2)}, {"C": (3, 6, 5)}
FILTER = {"x": (2, 3, 9), "weight": (3, 4), "bias": (3,)}
STATES = {"initial_state": (2, 3, 5)}
OUTER = {"grad_y": (2, 3, 9), "grad_final_state": (2, 3, 5)}
PACKED = {"x": (9, 3), "weight": (3, 4), "bias": (3,)}
STARTS = {"cu_seqlens": np.array([0, 4, 9])}
OF_SERIES = {
    "gamma": np.array([1.0, 2.0, 0.5]),
    "bandwidth": 4,
    "lengths_a": np.array([6, 3, 5]),
    "lengths_b": np.array([5, 5, 1]),
}
OF_PATHS = {name: option for name, option in OF_SERIES.items() if name != "gamma"}
COLLECTIONS = {"A": (3, 6, 2), "B": (2, 5, 2)}
OF_COLLECTIONS = {"lengths_a": np.array([6, 3, 5]), "lengths_b": np.array([5, 1]), "gamma": 2.0}
QUERIES = {"query": (3, 4, 2), "series": (3, 9, 2)}
OF_QUERIES = {
    "gamma": np.array([1.0, 2.0, 0.5]),
    "lengths_query": np.array([4, 1, 3]),
    "lengths_series": np.array([9, 7, 2]),
}
WAITS = {"soft_dtw_barycenter", "soft_dtw_barycenter_with_history"}  # for a minimiser on the host
INDEX = {"seq_idx": np.array([[0, 0, 0, 1, 1, -1, 2, 2, 2]] * 2), "activation": "silu"}
GRADIENTS = "grad_x", "grad_weight", "grad_bias"
CASES = {
    "soft_dtw": Case(SERIES, OF_SERIES, ("values",)),
    "soft_dtw_alignment": Case(SERIES, OF_SERIES, ("alignment",)),
    "soft_dtw_value_and_grad": Case(SERIES, OF_SERIES, ("values", "grad_a", "grad_b")),
    "soft_dtw_value_and_grad_gamma": Case(SERIES, OF_SERIES, ("values", "grad_gamma")),
    "soft_dtw_from_cost": Case(COSTS, OF_SERIES, ("values",)),
    "soft_dtw_from_cost_value_and_grad": Case(COSTS, OF_SERIES, ("values", "grad_cost")),
    "soft_dtw_from_cost_value_and_grad_gamma": Case(COSTS, OF_SERIES, ("values", "grad_gamma")),
    "soft_dtw_divergence": Case(SERIES, OF_SERIES, ("values",)),
    "soft_dtw_divergence_value_and_grad": Case(SERIES, OF_SERIES, ("values", "grad_a", "grad_b")),
    "soft_dtw_cdist": Case(COLLECTIONS, OF_COLLECTIONS, ("values",)),
    "soft_dtw_cdist_value_and_grad": Case(
        COLLECTIONS, OF_COLLECTIONS, ("values", "grad_a", "grad_b")
    ),
    "soft_dtw_divergence_cdist": Case({"A": (4, 6, 2)}, {"gamma": 2.0}, ("values",)),
    "soft_dtw_hvp": Case(
        SERIES | {"v_a": (3, 6, 2), "v_b": (3, 5, 2)}, OF_SERIES, ("grad_a", "grad_b")
    ),
    "soft_dtw_from_cost_hvp": Case(COSTS | {"v": (3, 6, 5)}, OF_SERIES, ("grad_cost",)),
    "soft_dtw_subsequence": Case(QUERIES, OF_QUERIES, ("values",)),
    "soft_dtw_subsequence_match": Case(QUERIES, OF_QUERIES, ("values", "match")),
    "dtw": Case(SERIES, OF_PATHS, ("values",)),
    "dtw_path": Case(SERIES, OF_PATHS, ("values", "path")),
    "causal_conv1d": Case(FILTER, INDEX, ("y",)),
    "causal_conv1d_with_state": Case(FILTER | STATES, INDEX, ("y", "final_state")),
    "causal_conv1d_backward": Case(
        OUTER | FILTER | STATES, {"activation": "silu"}, (*GRADIENTS, "grad_initial_state")
    ),
    "causal_conv1d_varlen": Case(PACKED, STARTS, ("y",)),
    "causal_conv1d_varlen_with_state": Case(PACKED | STATES, STARTS, ("y", "final_state")),
    "causal_conv1d_varlen_backward": Case({"grad_y": (9, 3)} | PACKED, STARTS, GRADIENTS),
    "causal_conv1d_update": Case(
        {"x": (2, 3), "state": (4, 3, 5), "weight": (3, 4), "bias": (3,)},
        {"cache_seqlens": np.array([3, 8]), "state_indices": np.array([3, 1])},
        ("y", "state"),
    ),
}
each_function = pytest.mark.parametrize("name", CASES)


def test_every_public_function_is_here():
    assert set(CASES) | WAITS == set(cuseq.__all__)


def brought(place, case, numbers):
    """Arrays and options of a case; a state that is updated lives where it can."""
    given = {name: place.array(x) for name, x in numbers.items()}
    if "state" in given:
        given["state"] = home_of_state(place).array(numbers["state"])
    options = {
        name: place.array(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()
    }
    return given, options


def called(name, given, options):
    """All that a call gives: its results, with a state that it updated."""
    results = getattr(cuseq, name)(**given, **options)
    return (results, given["state"]) if "state" in given else results


def as_numpy(place, results):
    """The results one after the other; a state may be another framework's."""
    of_state = home_of_state(place)
    return [
        (of_state if k and of_state is not place and "state" == what else place).numpy(x)
        for k, (what, x) in enumerate(results)
    ]


def named(name, results):
    """(what it is, array), for each result."""
    return list(zip(CASES[name].results, leaves(results), strict=True))


def check(name, got, numbers):
    """Compare NumPy results with those of the host for the same numbers in float64."""
    case = CASES[name]
    exact = {key: x.astype(np.float64) for key, x in numbers.items()}
    wanted = leaves(called(name, exact, case.options))
    operator = "soft_dtw" if "dtw" in name else "causal_conv1d"
    exponent = 0.0
    if operator == "soft_dtw":  # costs over gamma
        a, b = (list(exact.values()) * 2)[:2]  # of a collection with itself both are A
        largest = np.abs(exact["C"]) if "C" in exact else of_all_points(a, b)
        exponent = largest.max() / np.min(case.options.get("gamma", math.inf))
    for what, x, expected in zip(case.results, got, wanted, strict=True):
        if x.dtype.kind == "i":
            assert (x == expected).all()
            continue
        # Sums over 2 times 9 positions, or over 11 cells of a path, that may cancel.
        scale = max(np.abs(expected).max(), math.sqrt(18))
        assert_close(x, expected, f"{operator}.{what}", scale=scale, exponent=exponent)


def of_all_points(a, b):
    """Costs of all points of all series."""
    x, y = (z.reshape(-1, z.shape[-1]) for z in (a, b))
    return ((x[:, None] - y) ** 2).sum(axis=-1)


@pytest.fixture
def pointers(monkeypatch):
    """Where what was borrowed lies, by name; and all that was allocated."""
    borrow, empty, borrowed, allocated = arrays.borrow, arrays.empty, {}, set()

    def borrowing(name, x, operator):
        array = borrow(name, x, operator)
        borrowed[name] = array.pointer
        return array

    def allocating(*args):
        array = empty(*args)
        allocated.add(array.pointer)
        return array

    monkeypatch.setattr(arrays, "borrow", borrowing)
    monkeypatch.setattr(arrays, "empty", allocating)
    return borrowed, allocated


@every_place_and_dtype
@each_function
def test_same_values_without_a_copy(place, dtype, name, pointers):
    """Of the caller's kind, from the caller's memory, which is as it was."""
    case, numbers = CASES[name], CASES[name].arrays(dtype)
    given, options = brought(place, case, numbers)
    results = named(name, called(name, given, options))
    borrowed, allocated = pointers
    for key, x in {**given, **options}.items():
        home = home_of_state(place) if key == "state" else place
        if not isinstance(x, (str, int, float)):
            if key != "gamma" or place.device == "cuda":  # on the host it is read as float64
                assert borrowed[key] == home.pointer(x), f"{key} was copied"
            if key != "state":
                wanted = numbers.get(key, case.options.get(key))
                assert same_bits(home.numpy(x), wanted), f"{key} was written"
    for what, x in results:
        if what != "state":
            place.assert_own(x)
            if place is not JAX_CPU:  # to which NumPy's memory is given, aligned or not
                assert place.pointer(x) in allocated, f"{what} was copied"
    check(name, as_numpy(place, results), numbers)


@every_cuda_place
@each_function
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_waits(place, name, dtype):
    """A call behind 100 ms of work returns while that is going on, the first and the replayed."""
    case = CASES[name]
    of_stream = TORCH_CUDA if place is TORCH_CUDA else CUPY
    if of_stream.missing():
        pytest.skip(f"{of_stream}: {of_stream.missing()}")
    given, options = brought(place, case, case.arrays(dtype))
    with frameworks.busy_stream(of_stream, 1):  # compiles, allocates
        called(name, given, options)
    for _ in range(2):
        numbers = case.arrays(dtype, seed=20)
        given, options = brought(place, case, numbers)
        CUPY.library.cuda.Device().synchronize()
        with frameworks.busy_stream(of_stream, 100) as is_busy:
            results = named(name, called(name, given, options))
            assert is_busy(), "the call waited for the device"
        check(name, as_numpy(place, results), numbers)


# Streams of JAX, whose work is queued by XLA:


def slowly(jax, x, matrix):
    """x, after some 100 ms of multiplying matrices."""
    tanh = jax.numpy.tanh
    matrix = jax.lax.fori_loop(0, 300, lambda _, m: tanh(m @ matrix), matrix)
    return x + 0 * matrix[0, 0]


@cache
def slow_work(place):
    """What to multiply, on the device of this place."""
    matrix = np.full((6000, 6000), 1e-4, np.float32)
    return place.library.device_put(matrix, place.library.devices("cuda")[0])


@over([JAX_CUDA])
@each_function
def test_a_slow_producer_of_jax(place, name):
    """The core takes arrays that XLA has yet to compute, and does not wait for them."""
    jax, case, matrix = place.library, CASES[name], slow_work(place)
    numbers = case.arrays("float32")
    given, options = brought(place, case, numbers)
    first, producer = next(iter(given)), jax.jit(partial(slowly, jax))
    producer(given[first], matrix).block_until_ready()
    called(name, given, options)
    given, options = brought(place, case, numbers)
    CUPY.library.cuda.Device().synchronize()
    late = producer(given[first], matrix)
    results = named(name, called(name, given | {first: late}, options))
    assert not late.is_ready(), "the call waited for the device"
    check(name, as_numpy(place, results), numbers)


@over([JAX_CUDA])
def test_a_slow_producer_in_a_program(place):
    """The kernels are queued on the stream of XLA, behind what it computes."""
    jax, matrix = place.library, slow_work(place)
    adapter = pytest.importorskip("cuseq.jax")
    a, x, weight = (
        place.array(normal(*s, dtype="float32")) for s in ((2, 9, 3), (2, 3, 9), (3, 4))
    )

    @jax.jit
    def program(a, x, matrix):
        a, x = slowly(jax, a, matrix), slowly(jax, x, matrix)
        y = adapter.causal_conv1d(x, weight)
        return adapter.soft_dtw(a, y.swapaxes(1, 2))

    wanted = cuseq.soft_dtw(a, cuseq.causal_conv1d(x, weight).swapaxes(1, 2))
    program(a, x, matrix).block_until_ready()
    values = program(a, x, matrix)
    assert not values.is_ready(), "the program waited for the device"
    np.testing.assert_allclose(values, wanted, rtol=1e-6)


@over([JAX_CUDA])
def test_jax_goes_on_with_results_that_are_late(place):
    """XLA waits for the stream on which the core works, which is busy."""
    a = place.array(normal(64, 30, 2, dtype="float32"))
    wanted = np.array(cuseq.soft_dtw(a, a[:, ::-1]))
    backwards = a[:, ::-1].block_until_ready()
    doubled = place.library.jit(lambda x: 2 * x)
    doubled(cuseq.soft_dtw(a, backwards)).block_until_ready()
    with frameworks.busy_stream(CUPY, 200) as is_busy:
        twice = doubled(cuseq.soft_dtw(a, backwards))
        assert is_busy()
    assert same_bits(np.array(twice), 2 * wanted)


# Pipelines of CuPy:


@over([CUPY])
@each_function
def test_a_graph_of_cupy(place, name):
    """Captured, and launched on other numbers; its working memory is nobody else's meanwhile."""
    cupy, case = place.library, CASES[name]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        given, options = brought(place, case, case.arrays("float32"))
        called(name, given, options)  # compiles, and leaves room in the pool
        stream.begin_capture()
        results = named(name, called(name, given, options))
        graph = stream.end_capture()
        others = [cupy.full(n, 7, np.int32) for n in (16, 64, 256, 1024, 4096) for _ in range(8)]
        for seed in 20, 40:
            numbers = case.arrays("float32", seed=seed)
            for key, x in numbers.items():
                given[key][...] = place.array(x)
            graph.launch(stream)
            stream.synchronize()
            check(name, as_numpy(place, results), numbers)
        assert all((other == 7).all() for other in others)


@over([CUPY])
def test_streams_in_threads(place):
    """Each thread has a stream of its own, that is busy in its own way."""
    cupy = place.library

    def work(k):
        numbers = {name: CASES[name].arrays("float32", seed=k) for name in CASES}
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(3):
                for name, case in CASES.items():
                    given, options = brought(place, case, numbers[name])
                    results = named(name, called(name, given, options))
                    stream.synchronize()
                    check(name, as_numpy(place, results), numbers[name])
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@over([CUPY])
def test_results_come_from_the_pool_that_is_current(place):
    pool = place.library.cuda.MemoryPool()
    a = place.array(normal(64, 30, 2))
    with place.library.cuda.using_allocator(pool.malloc):
        for _ in range(2):
            values = gradients = None  # what the round before made is free again
            before = pool.used_bytes()
            values, gradients = cuseq.soft_dtw_value_and_grad(a, a)
            assert pool.used_bytes() >= before + a.nbytes
    assert all(x.data.mem.device_id == 0 for x in (values, *gradients))


@over([CUPY])
@each_function
def test_another_device_than_the_current_one(place, name):
    cupy, case = place.library, CASES[name]
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs a second CUDA device")
    numbers = case.arrays("float32")
    with cupy.cuda.Device(1):
        given, options = brought(place, case, numbers)
    for _ in range(2):
        results = named(name, called(name, given, options))
        assert all(x.device.id == 1 for _, x in results)
        if "state" not in given:
            check(name, as_numpy(place, results), numbers)
    assert cupy.cuda.runtime.getDevice() == 0
    if len(given) > 1:
        here = given | {next(iter(given)): place.array(next(iter(numbers.values())))}
        with pytest.raises(ValueError, match="expected an array on the device of .+, got cuda:"):
            called(name, here, options)


# DLPack, in its versions, and what is like it:


class WithoutVersions(OnlyDLPack):
    """Its export takes no max_version, as before version 1.0."""

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(**({} if stream is None else {"stream": stream}))


class WithVersions(OnlyDLPack):
    """Its export is versioned, whatever is asked for."""

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**{**options, "max_version": (1, 0)})


class ReadOnly(OnlyDLPack):
    """Its export says that it is not to be written."""

    def __dlpack__(self, **options):
        import ctypes

        capsule = self.array.__dlpack__(**{**options, "max_version": (1, 0)})
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        exported = get(capsule, b"dltensor_versioned")
        arrays._DLManagedTensorVersioned.from_address(exported).flags |= 1
        return capsule


@over([NUMPY, CUPY])
@each_function
@pytest.mark.parametrize("kind", [OnlyDLPack, WithoutVersions, WithVersions, ReadOnly])
def test_exports_of_any_version(place, name, kind):
    case, numbers = CASES[name], CASES[name].arrays("float32")
    given, options = brought(place, case, numbers)
    wrapped = {key: x if key == "state" else kind(x) for key, x in given.items()}
    options = {
        key: x if isinstance(x, (str, int, float)) else kind(x) for key, x in options.items()
    }
    results = getattr(cuseq, name)(**wrapped, **options)
    results = (results, given["state"]) if "state" in given else results
    check(name, as_numpy(place, named(name, results)), numbers)
    for what, x in named(name, results):
        assert what == "state" or place.assert_own(x) is None


@over([NUMPY, CUPY])
def test_a_state_known_by_dlpack_alone(place):
    """It is updated in place, unless its export says that it is not to be written."""
    x, state, weight = (place.array(normal(*s)) for s in ((2, 3), (2, 3, 4), (3, 4)))
    before = place.numpy(state)
    with pytest.raises(ValueError, match="^state: expected an array that can be updated in place"):
        cuseq.causal_conv1d_update(x, ReadOnly(state), weight)
    assert same_bits(place.numpy(state), before)
    wanted = place.array(before)
    cuseq.causal_conv1d_update(x, wanted, weight)
    cuseq.causal_conv1d_update(x, WithVersions(state), weight)
    assert same_bits(place.numpy(state), place.numpy(wanted))


@each_function
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_strict_array_api(name, dtype):
    strict = pytest.importorskip("array_api_strict")
    case, numbers = CASES[name], CASES[name].arrays(dtype)
    given = {key: x if key == "state" else strict.asarray(x) for key, x in numbers.items()}
    given |= {"state": numbers["state"].copy()} if "state" in numbers else {}
    results = named(name, called(name, given, case.options))
    for what, x in results:
        assert what == "state" or type(x) is type(strict.asarray(0.0))
    check(name, [np.asarray(x) for _, x in results], numbers)


class OnlyInterface:
    """An array that has `__cuda_array_interface__` alone."""

    def __init__(self, array, **more):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **more}


@over([CUPY])
@each_function
def test_the_cuda_array_interface_alone(place, name):
    case, numbers = CASES[name], CASES[name].arrays("float32")
    given, options = brought(place, case, numbers)
    given = {key: OnlyInterface(x) for key, x in given.items()}
    results = getattr(cuseq, name)(**given, **options)
    results = (results, given["state"].array) if "state" in given else results
    check(name, as_numpy(place, named(name, results)), numbers)


@over([CUPY])
def test_a_stream_of_the_cuda_array_interface(place):
    """Work is queued behind that of the stream that an array names, and does not wait for it."""
    a, b = place.array(normal(40, 3)), place.array(normal(50, 3, seed=1))
    wanted = place.numpy(cuseq.soft_dtw(a, b))
    late = place.array(np.full((40, 3), 7.0))
    cuseq.soft_dtw(OnlyInterface(late), b)
    place.library.cuda.Device().synchronize()
    with frameworks.busy_stream(place, 200) as is_busy:
        frameworks.overwrite(place, late, a)
        producer = place.library.cuda.get_current_stream().ptr
        with place.library.cuda.Stream(non_blocking=True):
            value = cuseq.soft_dtw(OnlyInterface(late, stream=producer, version=3), b)
            assert is_busy(), "the call waited for the device"
            assert same_bits(place.numpy(value), wanted)


@over([CUPY])
def test_arrays_of_that_interface_that_are_refused(place):
    x, state, weight = (place.array(normal(*s)) for s in ((2, 3), (2, 3, 4), (3, 4)))
    pointer = state.__cuda_array_interface__["data"][0]
    read_only = OnlyInterface(state, data=(pointer, True))
    with pytest.raises(ValueError, match="^state: expected an array that can be updated in place"):
        cuseq.causal_conv1d_update(x, read_only, weight)
    with pytest.raises(TypeError, match="^x: expected a plain array, got a masked array"):
        cuseq.causal_conv1d(OnlyInterface(x, mask=x), weight)


@over([CUPY])
@each_function
def test_device_arrays_of_numba(place, name):
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("numba has no CUDA device")
    case, numbers = CASES[name], CASES[name].arrays("float32")
    given = {key: cuda.to_device(x) for key, x in numbers.items()}
    options = {
        key: cuda.to_device(x) if isinstance(x, np.ndarray) else x
        for key, x in case.options.items()
    }
    results = getattr(cuseq, name)(**given, **options)
    results = (results, CUPY.library.asarray(given["state"])) if "state" in given else results
    check(name, as_numpy(place, named(name, results)), numbers)


@over([DLPACK_CUDA])
def test_a_graph_over_arrays_known_by_dlpack_alone(place):
    cupy = CUPY.library
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a, b = (place.array(normal(3, 30, 2, seed=seed)) for seed in (0, 1))
        cuseq.soft_dtw_value_and_grad(a, b)
        stream.begin_capture()
        values, _ = cuseq.soft_dtw_value_and_grad(a, b)
        graph = stream.end_capture()
        a.array[...] = CUPY.array(normal(3, 30, 2, seed=2))
        graph.launch(stream)
        assert same_bits(CUPY.numpy(values), CUPY.numpy(cuseq.soft_dtw(a.array, b.array)))
