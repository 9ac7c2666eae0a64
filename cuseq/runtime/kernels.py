"""Kernels: a .cu file and macros, compiled once a device, launched on the caller's stream.

CuPy compiles with NVRTC at the first launch and keeps the result on disk. Its disk cache looks at
the source text and the options but not into included files, so the text of our headers is put into
the source; `#line` keeps the compiler's messages pointing at the file and line as they are in
kernels/.
"""

import ctypes
import re
import threading
from collections import deque
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from cuseq.runtime.checks import sentence
from cuseq.runtime.replay import Pointer, recording

C_TYPES = {
    "float64": "double",
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "int64": "long long",
    "int32": "int",
}
MOST_BLOCKS = 2**31 - 1  # of a grid along x
SHARED_BY_DEFAULT = 48 * 1024  # bytes; a kernel has to be told of more
_INCLUDE = re.compile(r'^\s*#include\s+"([^"]+)"\s*$')
_in_flight = deque()  # (event, owners) of launches on memory that no stream-ordered pool guards
_in_flight_lock = threading.Lock()


class DeviceLimits(NamedTuple):
    """What a plan may know of a device."""

    multiprocessors: int
    shared: int  # bytes of shared memory that a block of threads may have


@cache
def source(file):
    """The text of kernels/`file` with the text of our own headers in place of their includes."""
    return "\n".join(_lines(file, set())) + "\n"


def _lines(file, included):
    """The lines of a source file, a header's where it is first included (as #pragma once)."""
    lines = [f'#line 1 "kernels/{file}"']
    for number, line in enumerate(_folder().joinpath(file).read_text("utf-8").splitlines(), 1):
        header = (_INCLUDE.match(line) or [None, None])[1]
        if header is None:
            lines.append(line.replace("#pragma once", ""))
        elif header in included:
            lines.append("")
        else:
            included.add(header)
            lines += [*_lines(header, included), f'#line {number + 1} "kernels/{file}"']
    return lines


def options(macros):
    """Compiler options of a variant: `macros` is a tuple of (name, value)."""
    return ("--std=c++17", *(f"-D{name}={value}" for name, value in macros))


@cache
def device_limits(device):
    """Read off a CUDA device once."""
    read = _cupy().cuda.Device(device).attributes
    return DeviceLimits(read["MultiProcessorCount"], read["MaxSharedMemoryPerBlockOptin"])


def launch(device, stream, file, function, macros, grid, block, args, shared=0):
    """Launch `function` of kernels/`file` on a stream (its address) of a device.

    `grid` and `block` are numbers of blocks and threads. `args` are ints, each 8 bytes (a pointer
    or a long long), and NumPy scalars, each of its own size. `shared` is the size of DYNAMIC_SHARED
    in bytes. Compiles at the first launch of a variant on a device.
    """
    if grid > MOST_BLOCKS:
        raise ValueError(
            sentence(function, f"work for up to {MOST_BLOCKS} blocks", grid, "split the batch")
        )
    with _cupy().cuda.Device(device):
        address = _function(device, file, function, macros, shared)
        launched = Launch(address, grid, block, args, shared)
        launched(stream)
    if recording():
        recording().launched(launched)


class Launch:
    """A compiled function with its grid and arguments, for launches on the current device.

    Called with addresses of arrays, it takes these in place of those that its arguments were in.
    """

    def __init__(self, function, grid, block, args, shared):
        self._numbers = (ctypes.c_longlong * len(args))(*map(_bits, args))
        self._moving = [(k, x.slot, x.offset) for k, x in enumerate(args) if type(x) is Pointer]
        size, first = ctypes.sizeof(ctypes.c_longlong), ctypes.addressof(self._numbers)
        places = range(first, first + size * len(args), size)
        self._places = (ctypes.c_void_p * len(args))(*places)
        self._shape = function, grid, 1, 1, block, 1, 1, shared
        self._args = ctypes.addressof(self._places), 0
        self._launch = _cupy().cuda.driver.launchKernel

    def __call__(self, stream, addresses=None):
        if addresses:
            for k, slot, offset in self._moving:
                self._numbers[k] = addresses[slot] + offset
        self._launch(*self._shape, stream, *self._args)


def _bits(arg):
    """A kernel's argument as an integer with the same first bytes."""
    return arg if isinstance(arg, int) else int(arg.view(f"i{arg.itemsize}"))


def order_after(stream, other, device):
    """Let `stream` wait, on the device, for the work queued on `other`."""
    cupy = _cupy()
    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(_Stream(other))
        cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)


def copy(destination, source, size, stream, device):
    """Copy bytes between the host and a device, behind the work on a stream; wait for it."""
    runtime = _cupy().cuda.runtime
    with _cupy().cuda.Device(device):
        runtime.memcpyAsync(destination, source, size, runtime.memcpyDefault, stream)
        runtime.streamSynchronize(stream)


def wait(stream, device):
    """Until the work queued on a stream is done."""
    with _cupy().cuda.Device(device):
        _cupy().cuda.runtime.streamSynchronize(stream)


def is_capturing(stream):
    """Whether what is queued on a stream goes into a CUDA graph; the legacy one's can not."""
    return stream > 1 and _cupy().cuda.runtime.streamIsCapturing(stream)


def hold(owners, stream, device):
    """Keep `owners` alive until the work queued on `stream` has passed, without waiting for it.

    A library that frees memory on a stream of its own (JAX) must not get it back while a kernel
    on another stream still reads it. Of a graph that is captured the caller keeps the arrays.
    """
    if is_capturing(stream):
        return
    cupy = _cupy()
    with cupy.cuda.Device(device):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(_Stream(stream))
    with _in_flight_lock:
        _in_flight.append((event, owners))
        while _in_flight and _in_flight[0][0].done:
            _in_flight.popleft()


class _Stream(NamedTuple):
    ptr: int


@cache
def _cupy():
    try:
        import cupy
    except ImportError as missing:
        raise ImportError(
            "cupy: expected CuPy, which compiles the kernels for arrays on a CUDA device, got none"
            " installed; pip install cuseq[cuda13], or cuseq[cuda12] for a driver of CUDA 12"
        ) from missing
    return cupy


@cache
def _function(device, file, function, macros, shared):
    """The address of a compiled function on a device, which is the current one."""
    kernel = _module(file, macros).get_function(function)
    if shared > SHARED_BY_DEFAULT:
        kernel.max_dynamic_shared_size_bytes = shared
    return kernel.kernel.ptr


@cache
def _module(file, macros):
    cupy = _cupy()
    return cupy.RawModule(code=source(file), options=options(macros))


@cache
def _folder():
    """kernels/ beside the package, as a wheel has it, or in the checkout above it."""
    installed = files("cuseq").joinpath("kernels")
    return installed if installed.is_dir() else files("cuseq").joinpath("../kernels")
