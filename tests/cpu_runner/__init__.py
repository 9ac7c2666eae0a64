"""Runs the project's CUDA C++ kernels on the CPU, compiled by g++, if possible under sanitizers.

    kernel = CpuKernel("soft_dtw.cu", "soft_dtw_forward", (("X_T", "float"), ("REAL", "float")))
    with shuffled(3):  # another order of blocks and threads
        kernel((batch,), (64,), (a, np.float64(gamma), out))

The source is compiled as it stands: cuda_on_cpu.h supplies what CUDA would. `launch` has the
signature of `cuseq.runtime.kernels.launch` and may take its place, so that a whole operator runs
with its kernels on host memory.

AddressSanitizer and UndefinedBehaviorSanitizer are on when libasan is preloaded, which has to be
done before Python starts: `subprocess.run(..., env=sanitized_environment())`. What they find ends
the process, with a report that names the line of the kernel.
"""

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from functools import cache
from math import prod
from pathlib import Path
from threading import get_native_id

import numpy as np

from cuseq.runtime import replay

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "kernels"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cuseq" / "cpu_runner"

COMPILER = shutil.which("g++")
SANITIZED = hasattr(ctypes.CDLL(None), "__asan_init")

# Most variants run for less time than they take to compile: -Og, and checks of addresses by a call
# instead of in line, halve that.
_SANITIZERS = (
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined "
    "--param asan-instrumentation-with-call-threshold=0"
)
_OPTIONS = (
    "-std=c++17 -Og -g1 -fPIC".split()
    + [f"-I{HERE}", f"-I{HERE / 'include'}"]
    + SANITIZED * _SANITIZERS.split()
)
_LIBRARY = *_OPTIONS, "-shared"

seed = 0  # the order of blocks and threads in the launches to come; 0 is the natural one


@contextmanager
def shuffled(new_seed):
    """Launches inside the `with` run blocks and threads in the order drawn from `new_seed`."""
    global seed
    old, seed = seed, new_seed
    try:
        yield
    finally:
        seed = old


class CpuKernel:
    """The `extern "C" __global__` function `function` of kernels/`file` (or of a file elsewhere).

    `macros` is a tuple of (name, value) pairs, `shared` the bytes of its DYNAMIC_SHARED. Calling it
    with grid, block and args (as CuPy takes them) runs it to the end; `seed` is by default that of
    the module. Raises RuntimeError where threads wait for each other for ever, TypeError or
    ValueError where an argument cannot be meant.
    """

    def __init__(self, file, function, macros=(), shared=0):
        self.function = function
        library = _load(KERNELS / file, function, tuple(macros), shared)
        self._in_order = "__nanosleep" in _text(KERNELS / file)
        self._launch = library.launch
        self._launch.restype = ctypes.c_char_p
        library.signature.restype = ctypes.c_char_p
        kinds_and_sizes = library.signature()
        count = len(kinds_and_sizes) // 2
        kinds, sizes = kinds_and_sizes[:count].decode(), kinds_and_sizes[count:]
        self.parameters = tuple(zip(kinds, sizes, strict=True))  # ("p", 8) is a pointer

    def __call__(self, grid, block, args, seed=None):
        grid, block = _three("grid", grid), _three("block", block)
        if prod(block) > 1024:
            raise ValueError(f"block: expected up to 1024 threads, got {prod(block)}")
        if len(args) != len(self.parameters):
            raise TypeError(f"args: {self.function} takes {len(self.parameters)}, got {len(args)}")
        values = [
            _bytes(f"args[{n}] of {self.function}", arg, *parameter)
            for n, (arg, parameter) in enumerate(zip(args, self.parameters, strict=True))
        ]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        order = ctypes.c_ulonglong(globals()["seed"] if seed is None else seed)
        failure = self._launch(grid, block, pointers, order, self._in_order)
        if failure:
            raise RuntimeError(f"{self.function}: {failure.decode()}")


def launch(device, stream, file, function, macros, grid, block, args, shared=0):
    """Takes the place of `cuseq.runtime.kernels.launch`: runs on host memory, at once."""
    kernel = _kernel(file, function, macros, shared)

    def again(stream, addresses):
        moved = [addresses[x.slot] + x.offset if isinstance(x, replay.Pointer) else x for x in args]
        kernel((grid,), (block,), moved)

    kernel((grid,), (block,), args)
    if replay.recording():
        replay.recording().launched(again)


def sanitized_environment():
    """os.environ for a Python process in which kernels run under the sanitizers."""
    # libstdc++ comes along because libasan looks for its exceptions once, at the start.
    libraries = [_run("g++", f"-print-file-name={name}") for name in ("libasan.so", "libstdc++.so")]
    if not all(os.path.isabs(library) for library in libraries):
        raise FileNotFoundError("libasan.so: expected beside g++, got none; install libasan")
    return os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        # Python keeps memory for ever. A report ends in SIGABRT, so that Python (with its
        # faulthandler, whose signal stack is too small for a report) prints where it was.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:detect_odr_violation=0:"
        "abort_on_error=1:handle_abort=0:handle_segv=2:use_sigaltstack=0:"
        "allocator_may_return_null=1:print_legend=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    }


_KINDS = {"b": "i", "i": "i", "u": "i", "f": "f"}  # of NumPy's scalars, in the words of Entry
_WORDS = {"p": "a pointer", "i": "an integer", "f": "a float", "s": "a struct"}


def _three(name, sizes):
    sizes = (*sizes, 1, 1)[:3]
    if min(sizes) < 1:
        raise ValueError(f"{name}: expected sizes of at least 1, got {sizes}")
    return (ctypes.c_uint * 3)(*sizes)


def _bytes(name, arg, kind, size):
    """The argument as an array that holds the bytes the kernel takes."""
    if isinstance(arg, np.ndarray):
        value, given = np.array(arg.ctypes.data, np.uint64), "p"
    elif isinstance(arg, int) and not isinstance(arg, bool):
        value, given = np.array(arg % 2**64, np.uint64), "ip"
    elif isinstance(arg, np.generic):
        value, given = np.array(arg), _KINDS.get(arg.dtype.kind, "s")
    else:
        raise TypeError(f"{name}: expected an int, a NumPy scalar or an array, got {type(arg)}")
    if kind not in given or value.nbytes != size:
        raise TypeError(f"{name}: expected {_WORDS[kind]} of {size} bytes, got {arg!r}")
    return value


_kernel = cache(CpuKernel)


def _text(path):
    """The text of a source and of the headers beside it that it includes."""
    headers = [
        path.parent / name for name in re.findall(r'#include "(\w+\.cuh)"', path.read_text())
    ]
    return "".join([path.read_text(), *map(_text, headers)])


@cache
def _load(path, function, macros, shared):
    _fibers()
    # The macros come after our own headers, which use such names as T themselves. The nameless
    # namespace keeps shared memory to its library: in inline functions and templates it would
    # otherwise have no redzone, and be that of another variant of the kernel.
    lines = ['#include "small_float.h"', f"#define SHARED_BYTES {shared}"]
    lines += [f"#define {name} {value}" for name, value in macros]
    lines += ["namespace {", f'#include "{path.name}"', "}", f"CUDA_ON_CPU_ENTRY({function})"]
    headers = [*HERE.glob("*.h"), *HERE.glob("include/*.h"), *path.parent.glob("*.cuh")]
    arguments = f"-I{_precompiled()}", *_LIBRARY, "-xc++", "-"
    text = "".join(line + "\n" for line in lines)
    library = _compile(f"{function}.so", arguments, path.parent, [path, *headers], text)
    return ctypes.PyDLL(library)


@cache
def _fibers():
    """The scheduler, whose symbols every kernel's library needs."""
    files = [HERE / "fibers.cpp", HERE / "cuda_on_cpu.h"]
    library = _compile("fibers.so", (*_LIBRARY, "fibers.cpp"), HERE, files)
    return ctypes.PyDLL(library, mode=ctypes.RTLD_GLOBAL)


@cache
def _precompiled():
    """A folder where g++ finds small_float.h, with cuda_on_cpu.h in it, in a form read quickly."""
    arguments = *_OPTIONS, "-xc++-header", "small_float.h"
    return Path(_compile("small_float.h.gch", arguments, HERE, HERE.glob("*.h"))).parent


def _compile(name, arguments, folder, files, text=""):
    """What g++ makes of `files`, and of `text` that includes them: once for its contents."""
    contents = [file.name.encode() + file.read_bytes() for file in sorted(files)]
    key = repr((_compiler_version(), arguments, text, contents)).encode()
    made = CACHE / hashlib.sha256(key).hexdigest()[:32] / name
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_name(f"{name}.{get_native_id()}")
        _run("g++", *arguments, "-o", str(unfinished), input=text, cwd=folder)
        unfinished.rename(made)  # at once, for others may be compiling the same
    return str(made)


@cache
def _compiler_version():
    return _run("g++", "-dumpfullversion")


def _run(*command, **options):
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return done.stdout.strip()
