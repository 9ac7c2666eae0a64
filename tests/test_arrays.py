"""Borrow, allocate, give back: the memory stays where it is, and the kind of array as well."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import cuseq
from cuseq.runtime import arrays, kernels
from tests import frameworks
from tests.frameworks import (
    CUPY,
    DLPACK_CUDA,
    JAX_CPU,
    JAX_CUDA,
    NUMPY,
    TORCH_CPU,
    TORCH_CUDA,
    OnlyDLPack,
    every_cuda_place,
    every_place,
    every_place_and_dtype,
    over,
)
from tests.oracles import soft_dtw as oracle
from tests.samples import normal

ROOT = Path(__file__).resolve().parents[1]


def device_of(place):
    return arrays.HOST if place.device == "host" else 0


@every_place_and_dtype
def test_borrowing_copies_nothing(place, dtype):
    x = place.array(normal(2, 3, 4, dtype=dtype))
    array = arrays.borrow("x", x, "f")
    assert array.pointer == place.pointer(x)
    assert (array.shape, array.strides) == ((2, 3, 4), (12, 4, 1))
    assert (array.dtype, array.device) == (dtype, device_of(place))
    assert array.size == 24
    assert all(type(number) is int for number in (array.pointer, *array.shape, *array.strides))
    if place.device == "host":
        assert frameworks.same_bits(np.array(array.numpy()), normal(2, 3, 4, dtype=dtype))
        assert array.numpy().ctypes.data == array.pointer


@every_place
@pytest.mark.parametrize(
    "view, strides, first",
    [
        (lambda x: x.transpose(2, 0, 1), (1, 30, 6), 0),
        (lambda x: x[:, 1::2, 3:], (30, 12, 1), 9),
        (lambda x: np.broadcast_to(x[:, :1], x.shape), (30, 0, 1), 0),
        (lambda x: x[::-1, :, ::-2], (-30, 6, -2), 35),
    ],
    ids=["transposed", "sliced", "broadcast", "reversed"],
)
def test_strides_count_elements(place, view, strides, first):
    x = view(normal(2, 5, 6))
    if place.strides == "contiguous" or (place.strides == "positive" and min(strides) < 0):
        pytest.skip(f"{place} has no such strides")
    own = place.array(x, offset=3)
    array = arrays.borrow("x", own, "f")
    assert array.strides == strides
    assert array.pointer == place.pointer(own)
    if place.device == "host":
        assert frameworks.same_bits(np.array(array.numpy()), np.array(x))


def test_a_view_points_behind_the_start_of_its_memory():
    for x in (normal(9)[3:], np.asarray(normal(9)[::-1])):
        assert arrays.borrow("x", x, "f").pointer == x.ctypes.data


@over([TORCH_CPU, TORCH_CUDA, CUPY])
def test_a_slice_points_behind_the_start_of_its_memory(place):
    x = place.array(normal(9))
    assert arrays.borrow("x", x[3:], "f").pointer == place.pointer(x) + 24


@every_place_and_dtype
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3)])
def test_allocating_and_giving_back(place, dtype, shape):
    like = place.array(normal(4))
    first = arrays.borrow("x", like, "f")
    array = arrays.empty(shape, dtype, first)
    assert (array.shape, array.dtype, array.device) == (shape, dtype, first.device)
    assert array.library is first.library
    result = arrays.give_back(array, like)
    place.assert_own(result)
    assert tuple(result.shape) == shape
    assert str(result.dtype).removeprefix("torch.") == dtype


@every_place
def test_a_result_of_no_axes_is_an_array(place):
    a, b = normal(5), normal(4, seed=1)
    value = cuseq.soft_dtw(place.array(a), place.array(b))
    place.assert_own(value)
    assert tuple(value.shape) == ()
    expected = oracle.value(oracle.cost(a[:, None], b[:, None]), 1.0)
    assert float(value) == pytest.approx(expected, rel=1e-12)


@every_place
def test_other_axes_see_the_same_memory(place):
    array = arrays.borrow("x", place.array(normal(2, 3)), "f").seen_as(1, None, 0)
    assert (array.shape, array.strides) == ((3, 1, 2), (1, 0, 3))
    if place.device == "host":
        assert frameworks.same_bits(np.array(array.numpy()), normal(2, 3).T[:, None])


class OwnLibrary:
    """A library with arrays of its own and the array API's from_dlpack."""

    class Array(OnlyDLPack):
        def __array_namespace__(self, *, api_version=None):
            return OwnLibrary

    @classmethod
    def from_dlpack(cls, x):
        return cls.Array(x)


@over([NUMPY, CUPY])
def test_a_library_with_a_namespace_gets_its_own_kind_back(place):
    a, b = (OwnLibrary.Array(place.array(normal(5, 2, seed=seed))) for seed in range(2))
    values, gradients = cuseq.soft_dtw_value_and_grad(a, b)
    for result in (values, *gradients):
        assert type(result) is OwnLibrary.Array
        place.assert_own(result.array)


@over([NUMPY, CUPY])
def test_dlpack_alone_is_borrowed_at_its_address(place):
    inner = place.array(normal(5, 2))
    array = arrays.borrow("x", OnlyDLPack(inner), "f")
    assert array.pointer == place.pointer(inner)
    assert array.device == device_of(place)


def test_an_export_that_calls_itself_read_only_serves_as_an_input():
    class WithoutVersions(OnlyDLPack):
        def __dlpack__(self, stream=None):
            return self.array.__dlpack__()

    a, b = normal(5), normal(4, seed=1)
    assert cuseq.soft_dtw(WithoutVersions(a), WithoutVersions(b)) == cuseq.soft_dtw(a, b)


def test_dlpack_on_the_host_knows_no_bfloat16():
    """NumPy, through which such an array is borrowed, does not; the sentence names a way out."""
    torch = pytest.importorskip("torch")
    for x in (torch.ones(3, dtype=torch.bfloat16), np.ones(3, ml_dtypes.bfloat16)):
        with pytest.raises(TypeError, match=r"^a: expected .+, got .+; .+"):
            cuseq.soft_dtw(OnlyDLPack(x), OnlyDLPack(x))


def test_subclasses_of_numpy_arrays(tmp_path):
    class Named(np.ndarray):
        pass

    x = normal(5, 2)
    mapped = np.memmap(tmp_path / "x", np.float64, "w+", shape=x.shape)
    mapped[...] = x
    for same in (x.view(Named), mapped, np.asfortranarray(x), x.view(np.recarray)):
        assert arrays.borrow("x", same, "f").pointer == same.ctypes.data
        value = cuseq.soft_dtw(same, x)
        assert type(value) is np.ndarray
        assert value == cuseq.soft_dtw(x, x)


def test_memory_that_is_not_aligned():
    x = normal(5, 2)
    odd = np.frombuffer(b"_" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    assert not odd.flags.aligned
    assert cuseq.soft_dtw(odd, x) == cuseq.soft_dtw(x, x)


@over([TORCH_CPU, TORCH_CUDA])
def test_a_lazy_minus_sign_is_seen(place):
    torch = place.library
    numbers = torch.complex(place.array(normal(5, 2)), place.array(normal(5, 2, seed=1)))
    x = numbers.conj().imag
    assert x.is_neg()
    y = place.array(normal(4, 2, seed=2))
    assert torch.equal(cuseq.soft_dtw(x, y), cuseq.soft_dtw(x.resolve_neg(), y))
    assert torch.equal(x.resolve_neg(), -numbers.imag)


@over([TORCH_CPU, TORCH_CUDA])
def test_parameters(place):
    torch = place.library
    x = torch.nn.Parameter(place.array(normal(5, 2)))
    with torch.no_grad():
        value = cuseq.soft_dtw(x, x)
    with torch.inference_mode():
        assert torch.equal(cuseq.soft_dtw(x, x), value)
    frozen = torch.nn.Parameter(place.array(normal(5, 2)), requires_grad=False)
    assert torch.equal(cuseq.soft_dtw(frozen, frozen), value)
    assert type(value) is torch.Tensor and not value.requires_grad


@over([JAX_CPU, JAX_CUDA])
def test_results_of_jax_are_on_the_device_of_the_input(place):
    x = place.array(normal(5, 2, dtype="bfloat16"))
    values, (grad_a, _) = cuseq.soft_dtw_value_and_grad(x, x)
    assert values.devices() == grad_a.devices() == x.devices()
    assert grad_a.dtype == x.dtype
    assert place.library.numpy.isfinite(grad_a + 1).all()  # jax computes with it


def test_types_are_recognised_once(monkeypatch):
    class Mine(np.ndarray):
        pass

    x = normal(5).view(Mine)
    arrays.borrow("x", x, "f")
    monkeypatch.setattr(arrays, "_recognise", lambda *args: pytest.fail("looked again"))
    arrays.borrow("x", x, "f")


def test_an_array_is_recognised_without_its_library():
    """A host call imports none of the other libraries."""
    code = (
        "import sys, numpy, cuseq; x = numpy.zeros(3); cuseq.soft_dtw(x, x);"
        "print([name for name in ('cupy', 'torch', 'jax') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@every_place
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_index_arrays(place, dtype):
    first = arrays.borrow("x", place.array(normal(3)), "f")
    own = place.array(np.array([2, 0, 1], dtype))
    array, on_host = arrays.index_array("i", own, first, "f")
    assert array.pointer == place.pointer(own) and array.dtype == dtype
    if place.device == "host":
        assert on_host.tolist() == [2, 0, 1]
    else:
        assert on_host is None  # to look would be to wait


@every_place
@pytest.mark.parametrize("values", [[2, 0, 1], (2, 0, 1), range(3), [], np.array([2, 0, 1])])
def test_index_values_from_the_host_come_to_the_device(place, values):
    first = arrays.borrow("x", place.array(normal(3)), "f")
    array, on_host = arrays.index_array("i", values, first, "f")
    assert array.device == first.device
    assert on_host.tolist() == list(values)
    if isinstance(values, list) and not values:
        assert array.shape == (0,) and array.dtype == "int64"


# On a CUDA device, where libraries have streams and pools of memory:


@every_cuda_place
def test_a_result_lies_in_the_memory_of_the_callers_library(place):
    x = place.array(normal(64, 2))
    if place.module_name == "torch":
        before = place.library.cuda.memory_allocated()
        result = cuseq.soft_dtw_value_and_grad(x, x)
        assert place.library.cuda.memory_allocated() > before
    else:
        kernels._in_flight.clear()
        pool = CUPY.library.get_default_memory_pool()
        before = pool.used_bytes()
        result = cuseq.soft_dtw_value_and_grad(x, x)
        assert pool.used_bytes() > before
    place.assert_own(result[0])


@over([DLPACK_CUDA, JAX_CUDA])
def test_foreign_arrays_are_held_until_the_work_is_through(place):
    x = place.array(normal(64, 2))
    kernels._in_flight.clear()
    cuseq.soft_dtw(x, x)
    assert [len(owners) for _, owners in kernels._in_flight] == [2]
    CUPY.library.cuda.Device().synchronize()
    cuseq.soft_dtw(x, x)
    assert len(kernels._in_flight) == 1  # the first ones were let go


@over([CUPY])
def test_order_after_makes_a_stream_wait_for_another(place):
    """The write is behind 300 ms of work on one stream, the read on another follows it."""
    cuda = place.library.cuda
    reader = cuda.Stream(non_blocking=True)
    x = place.array(np.zeros(3))
    ones = place.array(np.ones(3))
    cuda.Device().synchronize()
    with frameworks.busy_stream(place):
        frameworks.overwrite(place, x, ones)
        writer = cuda.get_current_stream().ptr
        kernels.order_after(reader.ptr, writer, 0)
        with reader:
            seen = x.copy()
    reader.synchronize()
    assert place.numpy(seen).tolist() == [1, 1, 1]


@over([TORCH_CUDA])
def test_streams_of_two_libraries_wait_for_each_other(place):
    """PyTorch's stream is busy before it writes its array; CuPy, whose call it is, waits."""
    numbers = [normal(40, 3), normal(50, 3, seed=1)]
    expected = CUPY.numpy(cuseq.soft_dtw(*[CUPY.array(x) for x in numbers]))
    ours, good = CUPY.array(numbers[0]), place.array(numbers[1])
    late = place.array(np.full_like(numbers[1], 7))
    cuseq.soft_dtw(ours, late)  # compiles
    CUPY.library.cuda.Device().synchronize()
    with frameworks.busy_stream(place):
        frameworks.overwrite(place, late, good)
        value = cuseq.soft_dtw(ours, late)
        late.fill_(7)  # behind the call on PyTorch's stream, which waits for the kernel
    assert frameworks.same_bits(CUPY.numpy(value), expected)
