"""The places where a test's arrays may live: a framework and a device.

A test over `every_place` runs on NumPy, PyTorch, JAX and a bare DLPack array in host memory, and on
CuPy, PyTorch, JAX and a bare DLPack array on a CUDA device. What is absent is skipped by name.
"""

import importlib
from contextlib import contextmanager
from functools import cache, partial

import ml_dtypes
import numpy as np
import pytest

from tests.samples import DTYPES, dtype_of


def module(name):
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@cache
def cuda_available():
    cupy = module("cupy")
    return cupy is not None and cupy.cuda.is_available()


class OnlyDLPack:
    """An array of a library that nobody knows: DLPack is all it has."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Place:
    """A framework and a device. `strides` says what its arrays may have."""

    module_name = "numpy"
    strides = "any"  # or "positive" (0 included), or "contiguous"
    dtypes = DTYPES

    def __init__(self, name, device="host"):
        self.name, self.device = name, device

    def __repr__(self):
        return self.name

    @property
    def library(self):
        return importlib.import_module(self.module_name)

    def missing(self):
        """Why this place can not be used here, or None."""
        return None if module(self.module_name) else f"{self.module_name} is not installed"

    def array(self, x, offset=0):
        """A copy of a NumPy array with its strides, as far as the framework has them.

        It begins `offset` elements into its memory, whose other elements are NaN.
        """
        memory, start = spread(x, offset)
        return strided(memory[start:], x)

    def numpy(self, x):
        """A NumPy copy of an array of this place, or of a result."""
        return np.array(x)

    def pointer(self, x):
        return x.ctypes.data

    def assert_own(self, x):
        """Check that a result is of this place's kind and on its device."""
        assert type(x) is np.ndarray


class Torch(Place):
    module_name = "torch"
    strides = "positive"

    def array(self, x, offset=0):
        memory, start = spread(x, offset)
        device = "cpu" if self.device == "host" else "cuda"
        if x.dtype == ml_dtypes.bfloat16:
            flat = self.library.from_numpy(memory.view(np.int16)).view(self.library.bfloat16)
        else:
            flat = self.library.from_numpy(memory)
        steps = [stride // x.itemsize for stride in x.strides]
        return flat.to(device).as_strided(x.shape, steps, start)

    def numpy(self, x):
        x = x.detach().cpu()
        if x.dtype == self.library.bfloat16:
            return x.view(self.library.int16).numpy().view(ml_dtypes.bfloat16).copy()
        return x.numpy().copy()

    def pointer(self, x):
        return x.data_ptr()

    def assert_own(self, x):
        assert type(x) is self.library.Tensor
        assert x.device.type == ("cpu" if self.device == "host" else "cuda")


class JAX(Place):
    module_name = "jax"
    strides = "contiguous"

    def missing(self):
        absent = super().missing()
        if absent or self.device == "host" or not cuda_available():
            return absent
        try:
            self.library.devices("cuda")
        except RuntimeError:
            return "jax has no CUDA device"
        return None

    def array(self, x, offset=0):
        home = self.library.devices("cpu" if self.device == "host" else "cuda")[0]
        return self.library.device_put(np.array(x, order="C"), home)

    def numpy(self, x):
        return np.array(x)

    def pointer(self, x):
        return x.unsafe_buffer_pointer()

    def assert_own(self, x):
        assert isinstance(x, self.library.Array)
        platforms = {device.platform for device in x.devices()}
        assert platforms == {"cpu" if self.device == "host" else "gpu"}


class CuPy(Place):
    module_name = "cupy"

    def array(self, x, offset=0):
        memory, start = spread(x, offset)
        # bfloat16 travels as integers: how much CuPy knows of it differs between versions
        flat = self.library.asarray(memory.view(bits(x.dtype)))
        data = flat.data + start * x.itemsize
        return self.library.ndarray(x.shape, x.dtype, data, x.strides)

    def numpy(self, x):
        if x.dtype == ml_dtypes.bfloat16:
            return self.library.asnumpy(x.view(np.uint16)).view(ml_dtypes.bfloat16)
        return self.library.asnumpy(x)

    def pointer(self, x):
        return x.data.ptr

    def assert_own(self, x):
        assert type(x) is self.library.ndarray


class DLPack(Place):
    """Bare DLPack arrays over another place's; results come back as that place's own."""

    def __init__(self, name, inner, dtypes=DTYPES):
        super().__init__(name, inner.device)
        self.inner, self.dtypes = inner, dtypes
        self.module_name, self.strides = inner.module_name, inner.strides
        self.assert_own = inner.assert_own

    def array(self, x, offset=0):
        return OnlyDLPack(self.inner.array(x, offset))

    def numpy(self, x):
        return self.inner.numpy(x.array if isinstance(x, OnlyDLPack) else x)

    def pointer(self, x):
        return self.inner.pointer(x.array if isinstance(x, OnlyDLPack) else x)


NUMPY = Place("numpy")
TORCH_CPU, TORCH_CUDA = Torch("torch-cpu"), Torch("torch-cuda", "cuda")
JAX_CPU, JAX_CUDA = JAX("jax-cpu"), JAX("jax-cuda", "cuda")
CUPY = CuPy("cupy", "cuda")
# NumPy neither exports nor imports bfloat16 by DLPack.
DLPACK_HOST, DLPACK_CUDA = DLPack("dlpack-host", NUMPY, DTYPES[:3]), DLPack("dlpack-cuda", CUPY)
PLACES = [NUMPY, TORCH_CPU, JAX_CPU, DLPACK_HOST, CUPY, TORCH_CUDA, JAX_CUDA, DLPACK_CUDA]


def home_of_state(place):
    """Where a state that is to be updated lives: JAX arrays can not be."""
    return {JAX_CPU: NUMPY, JAX_CUDA: CUPY}.get(place, place)


def spread(x, offset=0):
    """A 1-d copy of all memory that x spans, NaN between its elements, and where x[0, ...] lies."""
    reach = [stride // x.itemsize * (n - 1) for n, stride in zip(x.shape, x.strides, strict=True)]
    if x.size == 0:
        reach = []
    start = offset - sum(step for step in reach if step < 0)
    memory = np.zeros(start + sum(step for step in reach if step > 0) + 1, x.dtype)
    if x.dtype.kind in "fV":  # bfloat16 is of kind V
        memory.fill(np.nan)
    strided(memory[start:], x)[...] = x
    return memory, start


def strided(memory, x):
    """The part of `memory` that has the shape and strides of x."""
    if x.size == 0:
        return np.empty(x.shape, x.dtype)
    return np.lib.stride_tricks.as_strided(memory, x.shape, x.strides)


def bits(dtype):
    """An integer dtype as wide as `dtype` where that is bfloat16, else `dtype`."""
    return np.dtype(np.uint16) if dtype == ml_dtypes.bfloat16 else dtype


def marks(place, dtype=None):
    """The marks of a test on this place; absence is a skip with its reason."""
    found = [pytest.mark.gpu] if place.device == "cuda" else []
    if place.missing():
        found.append(pytest.mark.skip(reason=f"{place}: {place.missing()}"))
    elif dtype is not None and dtype not in place.dtypes:
        found.append(pytest.mark.skip(reason=f"{place}: NumPy's DLPack has no {dtype}"))
    return found


def over(places):
    """Parametrise a test over `place`."""
    return pytest.mark.parametrize(
        "place", [pytest.param(place, marks=marks(place), id=place.name) for place in places]
    )


every_place = over(PLACES)
every_host_place = over([place for place in PLACES if place.device == "host"])
every_cuda_place = over([place for place in PLACES if place.device == "cuda"])
every_strided_place = over([place for place in PLACES if place.strides != "contiguous"])
every_mixed_pair = pytest.mark.parametrize(  # two frameworks on one device
    "places",
    [
        pytest.param(pair, marks=[mark for place in pair for mark in marks(place)])
        for pair in [(NUMPY, TORCH_CPU), (TORCH_CPU, NUMPY), (TORCH_CUDA, CUPY), (CUPY, TORCH_CUDA)]
    ],
    ids=str,
)
every_place_and_dtype = pytest.mark.parametrize(
    "place, dtype",
    [
        pytest.param(place, dtype, marks=marks(place, dtype), id=f"{place}-{dtype}")
        for place in PLACES
        for dtype in DTYPES
    ],
)


def run(place, function, *arguments, offset=0, **options):
    """Call `function` on this place: NumPy arrays go in as the place's, and come out as NumPy's.

    Checks that results are of the place's kind and that inputs are as they were; on a device also
    that a second call, which may be replayed from the first one, gives the same bits.
    """
    once = partial(_run, place, function, arguments, options, offset)
    results = once()
    if place.device != "host":
        assert_same_bits([results, once()])
    return results


def _run(place, function, arguments, options, offset):
    def brought(x):
        return place.array(x, offset) if isinstance(x, np.ndarray) else x

    arrays = [brought(x) for x in arguments]
    named = {name: brought(x) for name, x in options.items()}
    results = function(*arrays, **named)
    before = [*arguments, *options.values()]
    for was, given in zip(before, [*arrays, *named.values()], strict=True):
        if isinstance(was, np.ndarray):
            assert same_bits(place.numpy(given), was), "an input was written"
    return taken(place, results)


def taken(place, results):
    """Results as NumPy arrays, in the tuples that they came in."""
    if results is None:
        return None
    if isinstance(results, tuple):
        inner = [taken(place, result) for result in results]
        return type(results)(*inner) if hasattr(results, "_fields") else tuple(inner)
    place.assert_own(results)
    array = place.numpy(results)
    assert array.shape == tuple(results.shape)
    return array


def same_bits(x, y):
    """Equality that tells NaNs and the two zeros apart."""
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def assert_same_bits(results):
    """Check that results (arrays, or tuples of them) of repeated calls agree to the bit."""
    first, *others = [list(leaves(result)) for result in results]
    for other in others:
        assert all(same_bits(x, y) for x, y in zip(first, other, strict=True))


def leaves(results):
    if isinstance(results, tuple):
        for result in results:
            yield from leaves(result)
    elif results is not None:
        yield results


# NaN in the lower half, 1 in the upper one: a letter that looks as if the second stripe of a
# soft-DTW had sent it, to the third one or in the backward to the first.
POISON_OF_SCRATCH = 2**33 - 1


def poison(array):
    """Fill a borrowed array with NaN; scratch (uint8) with POISON_OF_SCRATCH."""
    owner = array.owner
    if array.size == 0:
        return
    if len(array.shape) > 1 and array.strides[-2] < array.strides[-1]:
        owner = owner.swapaxes(-2, -1)  # as it lies in memory
    if isinstance(owner, np.ndarray):
        owner.reshape(-1).view(np.uint8).fill(255)
    elif hasattr(owner, "data_ptr"):
        torch = importlib.import_module("torch")
        owner.view(-1).view(torch.uint8).fill_(255)
        if array.dtype == "uint8":
            owner.view(torch.int64).fill_(POISON_OF_SCRATCH)
    else:
        fill_on_device(array)


def fill_on_device(array):
    """Poison an array of CuPy, or a buffer that XLA lent, on the stream that its library uses."""
    stream = array.library.stream(array.device)
    pointer, nbytes = int(array.pointer), array.size * dtype_of(array.dtype).itemsize
    if array.dtype == "uint8":
        numbers = pointer, nbytes // 8, POISON_OF_SCRATCH
        _kernel("fill")((nbytes // 8 // 256 + 1,), (256,), numbers, stream=Pointer(stream))
    else:
        importlib.import_module("cupy").cuda.runtime.memsetAsync(pointer, 255, nbytes, stream)


@cache
def _kernel(name):
    text = """
    extern "C" __global__ void fill(long long* x, long long n, long long value) {
        long long k = blockIdx.x * 256ll + threadIdx.x;
        if (k < n) x[k] = value;
    }
    extern "C" __global__ void spin(long long nanoseconds) {
        long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        while (now - start < nanoseconds);
    }"""
    return importlib.import_module("cupy").RawKernel(text, name)


@cache
def side_stream(place):
    """A stream that is not the default one. There is one, for allocators keep memory by stream."""
    cuda = place.library.cuda
    return cuda.Stream() if place.module_name == "torch" else cuda.Stream(non_blocking=True)


@contextmanager
def busy_stream(place, milliseconds=300):
    """Make the side stream current, busy for a while; yields a function: "is it still busy?"."""
    stream = side_stream(place)
    if place.module_name == "torch":
        current, pointer = place.library.cuda.stream(stream), stream.cuda_stream
    else:
        current, pointer = stream, stream.ptr
    with current:
        _kernel("spin")((1,), (1,), (milliseconds * 1_000_000,), stream=Pointer(pointer))
        yield lambda: not (stream.query() if place.module_name == "torch" else stream.done)
    stream.synchronize()


class Pointer:
    """A stream by its address, as CuPy's kernels take one."""

    def __init__(self, ptr):
        self.ptr = ptr


def overwrite(place, x, values):
    """Queue a copy of `values` into x on the current stream; both are arrays of this place."""
    if place.module_name == "torch":
        x.copy_(values)
    else:
        x[...] = values


def assert_follows_the_stream(place, function, *inputs):
    """Check that `function` sees what was queued on the current stream before, and never waits.

    inputs: NumPy arrays, written behind work of 300 ms. The first of two rounds is for what happens
    once and may wait: compiling, allocating.
    """
    expected = taken(place, function(*[place.array(x) for x in inputs]))
    good = [place.array(x) for x in inputs]
    for milliseconds in (1, 300):
        results = None  # its memory is there for the second round
        late = [place.array(np.full_like(x, 7)) for x in inputs]
        importlib.import_module("cupy").cuda.Device().synchronize()
        with busy_stream(place, milliseconds) as is_busy:
            for x, values in zip(late, good, strict=True):
                overwrite(place, x, values)
            results = function(*late)
            busy_afterwards = is_busy()
    assert busy_afterwards, "the call waited for the device"
    assert_same_bits([taken(place, results), expected])
