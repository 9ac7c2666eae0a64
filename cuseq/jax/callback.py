"""Functions of the core as callbacks of XLA: on its buffers and its stream, inside jitted programs.

    values, = callback(run, (result,), {"a": a, "b": b}, (("gamma", 0.1),))

has XLA call ``run(a=..., b=..., gamma=0.1)`` with its buffers as borrowed arrays of the library
`Lent`. That library allocates a result by handing out the buffer that XLA has for it, so results
are declared in the order in which the core asks for them. Working memory on a device is CuPy's, on
XLA's stream. There a call whose like was seen before is replayed (cuseq.runtime.replay).
"""

import threading
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from jax import ShapeDtypeStruct
from jax.experimental.buffer_callback import buffer_callback

from cuseq.runtime import arrays, replay
from cuseq.runtime.arrays import HOST, Array
from cuseq.runtime.replay import Pointer


def described(x):
    """A JAX array, traced or not, as the core borrows it to check a call: without its memory.

    It counts as one on a device, whose values are not read.
    """
    return Array(0, tuple(x.shape), _row_by_row(x.shape), np.dtype(x.dtype).name, 0, None, Lent)


def callback(run, results, given, options, updated=None):
    """Results, as `results` (ShapeDtypeStruct) says, of ``run(**given, **options)``.

    Args:
        run: a function of this package's modules on borrowed arrays; it returns nothing.
        results: in the order in which run allocates them.
        given: JAX arrays by name.
        options: pairs of names and values, hashable.
        updated: the name of an array that run writes, which is the last result.
    """
    names = tuple(given)
    place = None if updated is None else names.index(updated)
    signature = tuple((x.shape, np.dtype(x.dtype)) for x in (*given.values(), *results))
    call = buffer_callback(
        _call(run, names, options, place, signature),
        tuple(results),
        input_output_aliases={} if place is None else {place: len(results) - 1},
    )
    return call(*given.values())


@lru_cache(maxsize=4096)
def _call(run, names, options, place, signature):
    """One object for calls that are alike, by which JAX knows a program that it has compiled."""
    return _Call(partial(run, **dict(options)), names, place, signature)


class _Call:
    """What XLA calls with its buffers."""

    def __init__(self, run, names, place, signature):
        self._run, self._names, self._place = run, names, place
        self._layouts = [(shape, _row_by_row(shape), dtype.name) for shape, dtype in signature]
        self._recordings = replay.Recordings()

    def __call__(self, context, results, *given):
        buffers = *given, *results
        kind, device = buffers[0].__dlpack_device__()
        if kind == arrays.DLPack.CPU:
            views = [np.asarray(buffer) for buffer in buffers]
            self._run_on([view.ctypes.data for view in views], HOST, views)
            return
        addresses = [buffer.__cuda_array_interface__["data"][0] for buffer in buffers]
        key = device, *[address % replay.ALIGNMENT for address in addresses]
        _thread.stream = context.stream
        known = self._recordings.known.get(key)
        if known:
            known.again(addresses)
            return
        new = replay.Recording(dict(enumerate(buffers)), Lent, device)
        pointers = [Pointer(address, slot) for slot, address in enumerate(addresses)]
        with replay.recorded(new):
            self._run_on(pointers, device, buffers)
        if new.ends_with(None):
            self._recordings.add(key, new)

    def _run_on(self, pointers, device, owners):
        """The first of the arrays are given, the others are for results."""
        lent = [
            Array(pointer, *layout, device, owner, Lent)
            for pointer, layout, owner in zip(pointers, self._layouts, owners, strict=True)
        ]
        count = len(self._names)
        given, results = lent[:count], lent[count:]
        if self._place is not None:  # XLA has put a copy there unless the caller donated it
            given[self._place] = results.pop()
        _thread.results = iter(results)
        self._run(**dict(zip(self._names, given, strict=True)))


class _Thread(threading.local):
    """What XLA lends to the callback that runs in this thread."""

    stream = 0
    results = ()  # an iterator


_thread = _Thread()


class _Stream(NamedTuple):
    """XLA's stream, as CuPy takes one from elsewhere."""

    address: int

    def __cuda_stream__(self):
        return 0, self.address


class Scratch(arrays.CuPy):
    """Working memory of CuPy's pool on XLA's stream: it is used again behind what uses it now."""

    @staticmethod
    def empty(shape, dtype, device, transposed=False):
        with _on_xlas_stream(device):
            return arrays.CuPy.empty(shape, dtype, device)._replace(library=Scratch)

    @staticmethod
    def stream(device):
        return _thread.stream

    @staticmethod
    def allocator(array):
        allocate = arrays.CuPy.allocator(array)

        def on_xlas_stream():
            with _on_xlas_stream(array.device):
                return allocate()

        return on_xlas_stream


@contextmanager
def _on_xlas_stream(device):
    import cupy

    with cupy.cuda.Device(device), _of_cupy(device, _thread.stream):
        yield


@lru_cache
def _of_cupy(device, stream):
    import cupy

    return cupy.cuda.Stream.from_external(_Stream(stream))


class Lent:
    """The library of XLA's buffers, in a callback."""

    of_scratch = Scratch
    stream = Scratch.stream
    current_device = arrays.CuPy.current_device
    on_device = arrays.CuPy.on_device
    address = arrays.CuPy.address  # of working memory

    @staticmethod
    def empty(shape, dtype, device, transposed=False):
        result = next(_thread.results)
        if (result.shape, result.dtype) != (shape, dtype):
            asked, lent = f"{dtype} {shape}", f"{result.dtype} {result.shape}"
            raise RuntimeError(f"results: expected {lent}, as declared, got {asked}; report this")
        return result

    @staticmethod
    def upload(values, device):
        return described(values)

    @staticmethod
    def host_view(owner):
        return owner


def _row_by_row(shape):
    """Strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def result(shape, dtype):
    """What a callback is to return."""
    return ShapeDtypeStruct(tuple(shape), arrays.numpy_dtype(dtype))
