"""A device that is the host: arrays for which cuseq takes its CUDA path, with kernels on the CPU.

`on_device(x)` is a NumPy array that cuseq borrows as an array on CUDA device 0; `installed()` lets
its launches run here. So everything of an operator is tested without a GPU: checks, plan, order of
the arguments, kernels. Every new array is filled with NaN, so what a kernel does not write shows.
"""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np

from cuseq.runtime import arrays, kernels, replay
from tests import cpu_runner, samples

normal = partial(samples.normal, dtype="float32")
LIMITS = kernels.DeviceLimits(multiprocessors=2, shared=227 * 1024)


def poison(dtype):
    """NaN, or the integer that is no index and no length."""
    return np.nan if dtype.kind in "fV" else np.iinfo(dtype).min


class DeviceArray(np.ndarray):
    """Host memory in the role of device memory."""


class OnDevice(arrays.NumPy):
    """The library of DeviceArray."""

    @staticmethod
    def borrow(name, x, operator):
        array = arrays.NumPy.borrow(name, x, operator)
        return array._replace(device=0, library=OnDevice)

    @staticmethod
    def describe(x, key, addresses):
        addresses.append(x.ctypes.data)
        key += x.shape, x.strides, x.dtype, addresses[-1] % replay.ALIGNMENT

    @staticmethod
    def empty(shape, dtype, device, transposed=False):
        if transposed:
            shape = *shape[:-2], shape[-1], shape[-2]
        x = np.empty(shape, arrays.numpy_dtype(dtype)).view(DeviceArray)
        if dtype == "uint8":  # scratch: NaN, and letters as if the second stripe had sent them
            x.view(np.int64).fill(2**33 - 1)
        else:
            x.fill(poison(x.dtype))
        return OnDevice.borrow("", x.swapaxes(-2, -1) if transposed else x, "")

    @staticmethod
    def allocator(array):
        transposed = len(array.shape) > 1 and array.strides[-2] < array.strides[-1]
        arguments = array.shape, array.dtype, array.device, transposed
        return lambda: OnDevice.empty(*arguments).owner

    @staticmethod
    def address(owner):
        return owner.ctypes.data

    @staticmethod
    def current_device():
        return 0

    @staticmethod
    def upload(values, device):
        return OnDevice.borrow("", on_device(values), "")

    @staticmethod
    def stream(device):
        return 0


def on_device(x):
    """A copy of `x` with its strides, 0 and negative ones too, in the role of a device's array.

    The copy ends where the array ends, so that AddressSanitizer sees an access behind it.
    """
    if x.size == 0:
        return np.empty(x.shape, x.dtype).view(DeviceArray)
    low = sum(stride * (n - 1) for n, stride in zip(x.shape, x.strides, strict=True) if stride < 0)
    high = sum(stride * (n - 1) for n, stride in zip(x.shape, x.strides, strict=True) if stride > 0)
    memory = np.empty((high - low) // x.itemsize + 1, x.dtype)
    memory.fill(poison(x.dtype))
    copy = np.lib.stride_tricks.as_strided(memory[-low // x.itemsize :], x.shape, x.strides)
    copy[...] = x
    return copy.view(DeviceArray)


def transposed(x):
    """On the device, in the order of Fortran."""
    return on_device(x.T.copy().T)


def sliced(x):
    """On the device, every second element between NaNs, not aligned beyond an element."""
    wide = on_device(np.full([2 * n + 1 for n in x.shape], poison(x.dtype), x.dtype))
    inner = wide[(slice(1, None, 2),) * x.ndim]
    inner[...] = x
    return inner


def reversed_axes(x):
    """On the device, every stride negative."""
    backwards = (slice(None, None, -1),) * x.ndim
    return on_device(x[backwards].copy()[backwards])


def shifted(offset, gap=0):
    """A place where rows begin so many elements after an aligned one, and have a gap behind."""

    def place(x):
        shape = *x.shape[:-1], offset + x.shape[-1] + gap
        inner = on_device(np.full(shape, poison(x.dtype), x.dtype))[..., offset : shape[-1] - gap]
        inner[...] = x
        return inner

    return place


@contextmanager
def installed(limits=LIMITS):
    """cuseq borrows DeviceArrays and launches on the CPU within this."""
    with (
        mock.patch.dict(arrays._library_of_type, {DeviceArray: OnDevice}),
        mock.patch.dict(replay.describers, {DeviceArray: OnDevice.describe}),
        mock.patch.object(kernels, "launch", cpu_runner.launch),
        mock.patch.object(kernels, "device_limits", lambda device: limits),
    ):
        yield
