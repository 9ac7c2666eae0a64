"""The kernel files and their loader: what it hands to CuPy, and that every variant compiles.

Compiling needs NVRTC and no GPU. The tests marked gpu launch a small kernel of their own.
"""

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle, product
from multiprocessing import get_context
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from cuseq.ops import (
    causal_conv1d_update,
    convolution_engine,
    convolution_plan,
    dtw,
    soft_dtw_engine,
    soft_dtw_hvp,
    soft_dtw_plan,
    soft_dtw_subsequence,
)
from cuseq.ops.convolution_plan import ALIGNED, APART, FLUSH, INDEXED, PACKED, SHIFTED, WHOLE
from cuseq.runtime import kernels
from cuseq.runtime.checks import FLOATING
from cuseq.runtime.replay import Pointer
from tests import frameworks

SOFT_DTW = soft_dtw_engine.PREPARATION, soft_dtw_engine.FORWARD, soft_dtw_engine.BACKWARD
CONVOLUTION = convolution_engine.FORWARD, convolution_engine.BACKWARD
SOURCES, PARTIALS = convolution_engine.SOURCES, convolution_engine.PARTIALS
FAMILY = dtw.FILE, soft_dtw_hvp.FILE, soft_dtw_subsequence.FILE
FILES = *SOFT_DTW, *FAMILY, *CONVOLUTION, SOURCES, PARTIALS, causal_conv1d_update.FILE


def forget():
    for function in vars(kernels).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@pytest.fixture
def fresh():
    """A loader that has loaded nothing yet, and forgets what the test loads."""
    forget()
    yield
    forget()


@pytest.fixture
def folder(fresh, tmp_path, monkeypatch):
    """An empty folder in the place of kernels/."""
    monkeypatch.setattr(kernels, "_folder", lambda: tmp_path)
    return tmp_path


def write(folder, **files):
    """Files by their name, in which _ stands for the dot."""
    for name, text in files.items():
        (folder / ".".join(name.rsplit("_", 1))).write_text(dedent(text))


# ---- the source that the compiler sees


def origins(text):
    """(file, line number, line) of each line, as `#line` tells a compiler."""
    file = number = None
    for line in text.splitlines():
        if directive := re.match(r'#line (\d+) "(.*)"', line):
            number, file = int(directive[1]), directive[2]
        else:
            yield file, number, line
            number += 1


@pytest.mark.parametrize("file", FILES)
def test_each_line_of_the_source_is_where_it_says(file):
    seen = set()
    for path, number, line in origins(kernels.source(file)):
        original = (kernels._folder() / Path(path).name).read_text("utf-8").splitlines()
        if line.strip():
            assert line == original[number - 1], f"{path}:{number}"
        assert (path, number) not in seen, f"{path}:{number} is there twice"
        seen.add((path, number))
    assert {path for path, _ in seen} >= {f"kernels/{file}", "kernels/common.cuh"}
    assert not re.search(r'^\s*#include\s+"', kernels.source(file), re.MULTILINE)


def test_a_header_that_headers_include_is_put_in(folder):
    write(
        folder,
        outer_cu='#include "middle.cuh"\nint outer;\n',
        middle_cuh='#pragma once\n#include "inner.cuh"\nint middle;\n',
        inner_cuh="#pragma once\nint inner;\n",
    )
    places = {line: (path, number) for path, number, line in origins(kernels.source("outer.cu"))}
    assert places["int inner;"] == ("kernels/inner.cuh", 2)
    assert places["int middle;"] == ("kernels/middle.cuh", 3)
    assert places["int outer;"] == ("kernels/outer.cu", 2)


# ---- what CuPy is asked for


class CuPy:
    """Stands in for CuPy and takes down what is asked of it; kernels have `count` arguments."""

    count = 0

    def __init__(self):
        self.modules, self.functions, self.kernels = [], [], []
        self.launches, self.entered = [], []
        driver = SimpleNamespace(launchKernel=self.launch)
        self.cuda = SimpleNamespace(Device=self.device, driver=driver)

    def device(self, number):
        recorder = self

        class Device:
            def __enter__(self):
                recorder.entered.append(number)

            def __exit__(self, *error):
                recorder.entered.pop()

        return Device()

    def RawModule(self, *, code, options):
        self.modules.append((code, options))
        return SimpleNamespace(get_function=self.get_function)

    def get_function(self, name):
        address = len(self.functions)
        self.functions.append(name)
        kernel = SimpleNamespace(ptr=address)
        self.kernels.append(SimpleNamespace(kernel=kernel, max_dynamic_shared_size_bytes=48 * 1024))
        return self.kernels[-1]

    def launch(self, address, *numbers):
        *shape, shared, stream, args, extra = numbers
        assert shared <= self.kernels[address].max_dynamic_shared_size_bytes and extra == 0
        places = ctypes.cast(args, ctypes.POINTER(ctypes.c_void_p))
        args = tuple(ctypes.c_longlong.from_address(places[k]).value for k in range(self.count))
        device = self.entered[-1] if self.entered else None
        self.launches.append((self.functions[address], *shape, shared, stream, args, device))


@pytest.fixture
def cupy(fresh, monkeypatch):
    recorder = CuPy()
    monkeypatch.setitem(sys.modules, "cupy", recorder)
    return recorder


def test_a_launch_goes_to_its_stream_on_its_device(cupy):
    cupy.count = 2
    kernels.launch(3, 77, "soft_dtw.cu", "soft_dtw_forward", (("WARPS", 1),), 5, 32, (1, -2))
    assert cupy.launches == [("soft_dtw_forward", 5, 1, 1, 32, 1, 1, 0, 77, (1, -2), 3)]
    assert cupy.entered == []


def test_arguments_are_ints_and_numbers_of_numpy(cupy):
    cupy.count = 5
    args = 2**62, np.float64(-0.5), np.int32(-7), np.uint32(2**32 - 1), np.float32(1.5)
    kernels.launch(0, 0, "soft_dtw.cu", "soft_dtw_forward", (), 1, 32, args)
    given = np.array(cupy.launches[0][-2], np.int64)
    assert given[0] == 2**62
    assert given[1:2].view(np.float64) == -0.5
    assert given[2:3].view(np.int32)[0] == -7
    assert given[3:4].view(np.uint32)[0] == 2**32 - 1
    assert given[4:].view(np.float32)[0] == 1.5


def test_a_launch_again_takes_other_addresses(cupy):
    cupy.count = 3
    args = Pointer(100, 1), 5, Pointer(200, 0) + 16
    launch = kernels.Launch(*(kernels._function(0, "soft_dtw.cu", "f", (), 0), 1, 32, args, 0))
    launch(77)
    launch(78, [1000, 2000])
    assert [call[-3:-1] for call in cupy.launches] == [(77, (100, 5, 216)), (78, (2000, 5, 1016))]


def test_a_kernel_is_told_of_shared_memory(cupy):
    for shared in (100, 48 * 1024, 48 * 1024 + 1, 227 * 1024):
        kernels.launch(0, 0, "soft_dtw.cu", "soft_dtw_forward", (), 1, 32, (), shared)
    assert [launch[7] for launch in cupy.launches] == [100, 49152, 49153, 232448]


def test_macros_become_options_in_their_order(cupy):
    macros = ("X_T", "__half"), ("REAL", "float"), ("A", 1)
    kernels.launch(0, 0, "soft_dtw.cu", "soft_dtw_forward", macros, 1, 32, ())
    options = "--std=c++17", "-DX_T=__half", "-DREAL=float", "-DA=1"
    assert cupy.modules == [(kernels.source("soft_dtw.cu"), options)]


def test_a_variant_is_one_module_and_a_function_is_looked_up_once(cupy):
    calls = [
        (file, function, (("WARPS", warps),))
        for file, function in [
            ("soft_dtw.cu", "f"),
            ("soft_dtw.cu", "g"),
            ("causal_conv1d.cu", "f"),
        ]
        for warps in (1, 2)
    ]
    for call in calls * 3:
        kernels.launch(0, 0, *call, 1, 32, ())
    assert len(cupy.launches) == 18
    assert len(cupy.functions) == 6
    assert len(cupy.modules) == len(set(cupy.modules)) == 4


# ---- compiling without a GPU


def why_no_nvrtc():
    """Why nothing can be compiled here, or None."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        return f"NVRTC is not there: {error}"
    return None


needs_nvrtc = pytest.mark.skipif(bool(why_no_nvrtc()), reason=str(why_no_nvrtc()))


def known_archs():
    """The architectures that this NVRTC compiles for, as numbers."""
    from cupy.cuda import nvrtc

    if hasattr(nvrtc, "getSupportedArchs"):
        return nvrtc.getSupportedArchs()
    version = nvrtc.getVersion()
    oldest = 75 if version >= (13, 0) else 50
    newest = 120 if version >= (12, 8) else 90
    return range(oldest, newest + 1)


def compiled(text, macros, arch):
    """A cubin (None if that failed) and the log, with what CuPy would compile with."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import nvrtc

    options = assemble_cupy_compiler_options(kernels.options(macros))
    options += ("-ftz=true", "--device-as-default-execution-space")
    program = nvrtc.createProgram(text, "variant.cu", [], [])
    try:
        nvrtc.compileProgram(program, (*options, f"-arch={arch}", "--ptxas-options=-v"))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        return None, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


@needs_nvrtc
@pytest.mark.parametrize("file", ["planted.cu", "planted.cuh"])
def test_the_compiler_names_file_and_line_of_an_error(folder, file):
    nonsense = {name: "nonsense;" * (name == file) for name in ("planted.cu", "planted.cuh")}
    header = f"#pragma once\n// a header\n\n{nonsense['planted.cuh']}\n"
    kernel = f'// a kernel\n#include "planted.cuh"\n\n{nonsense["planted.cu"]}\n'
    write(folder, planted_cuh=header, planted_cu=kernel)
    cubin, log = compiled(kernels.source("planted.cu"), (), f"sm_{max(known_archs())}")
    assert cubin is None and f"kernels/{file}(4): error" in log


ARCHS = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
COVERED = "sm_90"  # every variant of the spread; on the others the usual ones and the largest
WIDTHS = [1, 2, 3, 4, 5, 8, 16, 32]
LIMITS = kernels.DeviceLimits(multiprocessors=132, shared=227 * 1024)
# Whether channels lie closer than positions, how packs lie or how much of one can be read at once,
# and how much of a pack of weights can
ALONG, FLUSHED = (False, ALIGNED, 1), (False, FLUSH, 1)
SHIFTS, STRIDED = (False, SHIFTED, 0.5), (False, APART, 0)
ACROSS, HALF, ODD = (True, 1, 1), (True, 0.5, 0.5), (True, 0, 0)
KINDS = (INDEXED, "int32"), (INDEXED, "int64"), (PACKED, "int32"), (PACKED, "int64")
# SILU, INITIAL_STATE and FINAL_STATE: all of them, then what has each pair of values of any two
EVERYTHING = True, True, True
OPTIONS = EVERYTHING, (True, False, False), (False, True, False), (False, False, True)
FLOAT32 = ("float32",) * 4
OWN_DTYPES = [  # of x, weight, bias, state: each in each role
    ("float64", "float32", "float16", "bfloat16"),
    ("float32", "float16", "bfloat16", "float64"),
    ("float16", "bfloat16", "float64", "float32"),
    ("bfloat16", "float64", "float32", "float16"),
    ("float16", "float32", "float32", "bfloat16"),
    ("bfloat16", "float32", "float16", "float32"),
]


# (B, N, D): many and few pairs, short and long, of few and many features
MANY, MANY_SHORT, SOME, FEW = (5000, 300, 2), (20_000, 100, 3), (300, 256, 2), (250, 300, 3)
MIDDLE = [(150, 500, 2), (600, 100, 3), (900, 50, 3), (1, 1, 1), (1, 1, 500)]
ONE, WIDE, DEEP, BROAD = (1, 1000, 1), (1, 1000, 9), (1, 1000, 16), (40, 1000, 64)
TINY = [(100_000, N, 2) for N in (1, 5, 9, 17, 33, 65)]
OUTPUTS = soft_dtw_plan.SERIES, soft_dtw_plan.ALIGNMENT, soft_dtw_plan.ENTROPY


def soft_dtw_variants(
    sizes, dtypes=("float32",), costs=("sqeuclidean",), outputs=OUTPUTS[:1], hard=False
):
    """The kernels of a value, and of the backward for each output."""
    for B, N, D in sizes:
        for dtype in dtypes:
            for cost in costs:
                features = 0 if cost == soft_dtw_plan.GIVEN else D
                problem = soft_dtw_plan.Problem(
                    B, N, 300, features, B, B, dtype, cost, hard, 300, 0
                )
                plan = soft_dtw_plan.plan(problem, OUTPUTS[0], True, LIMITS)
                yield SOFT_DTW[0], soft_dtw_engine.series_macros(problem, dtype)
                yield SOFT_DTW[1], plan.forward_sweep
                for output in outputs:
                    plan = soft_dtw_plan.plan(problem, output, True, LIMITS)
                    yield SOFT_DTW[2], plan.backward_sweep


def family_variants(dtypes, costs=("sqeuclidean",)):
    """What is built on the sweeps: paths, second derivatives, subsequences, sums of gradients."""
    for dtype in dtypes:
        problem = soft_dtw_plan.Problem(*(*SOME[:2], 300, 2, 1, 1, dtype, costs[0], True, 300, 0))
        types = (
            ("X_T", kernels.C_TYPES[dtype]),
            ("REAL", kernels.C_TYPES[problem.real]),
        )
        yield dtw.FILE, types[1:]
        yield soft_dtw_subsequence.FILE, types
        yield SOFT_DTW[0], soft_dtw_engine.series_macros(problem, problem.real)
        for cost in costs:
            yield soft_dtw_hvp.FILE, (*types, ("COST", soft_dtw_hvp.COSTS[cost]))
        for output in soft_dtw_plan.LAST_ROW, soft_dtw_plan.MATCHES:
            yield SOFT_DTW[1], soft_dtw_plan.plan(problem, output, False, LIMITS).forward_sweep


def conv_variants(
    dtypes,
    widths,
    orders,
    kinds=((WHOLE, "int32"),),
    sizes=((5000, 5000),),
    options=(EVERYTHING,),
):
    """`orders`, `kinds` and `options` are some of those above, `sizes` D and L."""
    x_pack, weight_pack = (
        convolution_plan.PACK_BYTES // convolution_plan.SIZES[dtype] for dtype in dtypes[:2]
    )
    spread = product(widths, orders, kinds, sizes, options)
    for W, (across, packs, of_weights), (sequences, index), (D, L), option in spread:
        if sequences == PACKED and not across:
            continue
        packs = max(int(packs * x_pack), 1) if across else packs
        weights = max(int(of_weights * weight_pack), 1)
        problem = convolution_plan.Problem(
            *(2, D, L, W, dtypes, sequences, index, *option, across, packs, weights, 0)
        )
        for file, backward in zip(CONVOLUTION, (False, True), strict=True):
            plan = convolution_plan.plan(problem, LIMITS, backward)
            yield file, plan.macros
        yield PARTIALS, plan.of_partials
        if sequences == INDEXED:
            yield SOURCES, (("INDEX_T", kernels.C_TYPES[index]),)


def update_variants(
    dtypes, widths, index_dtypes=("int32", "int32"), packs=(1,), silu=True, columns=None
):
    """`packs`: how many channels, weights, columns are read at once; `columns`: W or so many."""
    rows = causal_conv1d_update.THREADS_TO_FILL
    for W, pack in product(widths, packs):
        sizes = rows, 64, 1, W, rows, W if columns is None else columns
        problem = causal_conv1d_update.Problem(
            *sizes, (*dtypes, *index_dtypes), silu, pack, pack, pack, 0
        )
        yield causal_conv1d_update.FILE, causal_conv1d_update.plan(problem).macros


def variants(arch):
    """(file, macros) of what the plans choose over a spread of problems, each once."""
    found = []
    alike = [(dtype,) * 4 for dtype in FLOATING]
    if arch == COVERED:
        many_features = [
            (B, N, D) for B in (1, 10**5) for N in (1, 5, 9, 17, 33, 100) for D in (9, 64)
        ]
        found += soft_dtw_variants([*MIDDLE, *TINY, *many_features], outputs=())
        found += soft_dtw_variants([MANY, MANY_SHORT, SOME, FEW, ONE, BROAD, DEEP, TINY[2]])
        found += soft_dtw_variants([SOME, WIDE], costs=["euclidean", "cityblock"])
        found += soft_dtw_variants([SOME, WIDE], outputs=OUTPUTS)
        found += soft_dtw_variants([FEW, WIDE], hard=True)
        found += soft_dtw_variants([FEW, BROAD], FLOATING)
        found += family_variants(FLOATING)
        found += family_variants(FLOATING[1:2], list(soft_dtw_hvp.COSTS))
        given = [soft_dtw_plan.GIVEN]
        found += soft_dtw_variants([WIDE], FLOATING, given, outputs=OUTPUTS[1:2])
        for dtypes, widths in [(alike[0], [1, 16, 32]), (alike[1], WIDTHS)]:
            found += conv_variants(dtypes, widths, [ALONG, ACROSS])
            found += update_variants(dtypes, widths)
        for dtypes, widths in [(alike[0], [4, 16]), (alike[1], [1, 16]), (alike[2], [2, 4])]:
            found += conv_variants(dtypes, widths, [ALONG, ACROSS], KINDS[::2])
        found += conv_variants(alike[1], [32], [ACROSS], KINDS[:1])
        found += conv_variants(alike[1], [4], [ALONG, ACROSS], KINDS)
        found += conv_variants(alike[1], [4], [ALONG, ACROSS], KINDS[::2], options=OPTIONS[1:])
        found += conv_variants(alike[1], [4], [SHIFTS, STRIDED, HALF, ODD], KINDS[::2])
        found += conv_variants(alike[1], [4], [SHIFTS, STRIDED, HALF, ODD])
        for n in (1, 2, 4, 8, 16):  # lanes
            found += conv_variants(alike[1], [4], [ALONG, ODD], sizes=[(n, 4 * n - 3)])
        found += conv_variants(alike[2], [4], [SHIFTS])
        found += conv_variants(alike[3], [16], [ALONG, ACROSS])
        for dtypes, option in zip(OWN_DTYPES, cycle(OPTIONS[1:])):
            found += conv_variants(dtypes, [4], [ALONG, ACROSS], options=[option])
        found += conv_variants(alike[2], [4], [ALONG, ACROSS], options=OPTIONS[1:2])
        for integers in [("int32", "int64"), ("int64", "int32"), ("int64", "int64")]:
            found += update_variants(alike[1], [4], integers)
        found += update_variants(alike[1], [4], packs=(1, 2, 4), silu=False)
        found += update_variants(alike[1], [4], packs=(1, 2, 4), columns=9)
        found += update_variants(alike[2], [4, 8], packs=(4, 8))
    else:
        found += soft_dtw_variants([MANY, BROAD])
        found += family_variants(FLOATING[1:2])
        found += conv_variants(alike[1], [32], [ACROSS])
        found += conv_variants(alike[1], [4], [ALONG, ACROSS], KINDS[::2])
    for dtypes in alike:
        found += conv_variants(dtypes, [4], [ALONG, ACROSS])
        found += update_variants(dtypes, [4])
    return list(dict.fromkeys(found))


class Spill(NamedTuple):
    bytes: int  # that a thread may store
    reason: str


# What a compiler of no matter which version may choose for the sake of one more resident warp.
A_FEW = Spill(16, "fewer registers, paid with a few bytes")
NO_STATES = {"INITIAL_STATE": 0, "FINAL_STATE": 0}
SPILLS = [  # function, macros; the first that fits counts
    (
        "causal_conv1d_backward",
        {"REAL": "double", "WIDTH": 32, "ACROSS": 0},
        Spill(512, "weights, inputs, g and sums are 4 x 33 doubles, over 255 registers"),
    ),
    (
        "causal_conv1d_backward",
        {"REAL": "double", "WIDTH": 32},
        Spill(2048, "weights, window, g and sums are 4 x 32 doubles, over 255 registers"),
    ),
    (
        "causal_conv1d_backward",
        {"REAL": "double", "WIDTH": 16, "ACROSS": 1},
        Spill(80, "weights, window, g and sums are 4 x 16 doubles, beside 31 sequences"),
    ),
    ("causal_conv1d_backward", NO_STATES, A_FEW),
    (
        "causal_conv1d_backward",
        {"WIDTH": 4, "ACROSS": 0, "PACK": 8},
        Spill(96, "x, grad_y and g are 38 floats, beside addresses of states, in 72 registers"),
    ),
    (
        "causal_conv1d_backward",
        {"WIDTH": 4, "ACROSS": 1, "RESIDENT": 4},
        Spill(112, "weights, windows, g and sums are 4 x 18 floats, beside addresses of states"),
    ),
    (
        "causal_conv1d_forward",
        {"REAL": "double", "WIDTH": 32, "ACROSS": 0},
        Spill(320, "weights and inputs are 66 doubles, in 128 registers for four blocks"),
    ),
    (
        "causal_conv1d_forward",
        {"REAL": "double", "WIDTH": 16},
        Spill(160, "weights and windows are 33 doubles, beside a sequence's place and state"),
    ),
    ("causal_conv1d_forward", NO_STATES, A_FEW),
    (
        "causal_conv1d_forward",
        {"ACROSS": 0, "PACK": 8, "SEQUENCES": INDEXED},
        Spill(128, "weights, inputs, indices and results are 35 numbers, in 48 registers"),
    ),
    (
        "causal_conv1d_forward",
        {"ACROSS": 0, "PACK": 8},
        Spill(32, "weights, inputs and results are 24 floats, in 40 registers for eleven blocks"),
    ),
    (
        "causal_conv1d_forward",
        {"ACROSS": 0, "PACK": 4, "SEQUENCES": INDEXED},
        Spill(48, "weights, inputs, indices and results are 23 numbers, in 48 registers"),
    ),
    (
        "causal_conv1d_forward",
        {"ACROSS": 1, "PACK": 4, "SEQUENCES": PACKED},
        Spill(48, "weights and windows are 36 floats, beside a sequence's place and state"),
    ),
    (
        "soft_dtw_forward",
        {"REAL": "float", "HELPERS": 3},
        Spill(64, "four blocks of threads at a time have 128 registers a thread"),
    ),
    (
        "soft_dtw_forward",
        {"REAL": "double"},
        Spill(1536, "a block and its costs are 32 doubles, in 128 registers for more warps"),
    ),
    (
        "soft_dtw_backward",
        {"REAL": "double"},
        Spill(4096, "a block, its costs and three weights a cell are 80 doubles, 96 with slopes"),
    ),
    (
        "soft_dtw_backward",
        {"HELPERS": 3},
        Spill(128, "what a sweep and its helpers each hold, over the 255 registers that there are"),
    ),
    (
        "soft_dtw_backward",
        {"ROWS": 8},
        Spill(512, "a block, its costs and three weights a cell are 160 floats"),
    ),
    (
        "soft_dtw_backward",
        {"HELPERS": 7},
        Spill(256, "what a sweep and its helpers each hold, over the 255 registers that there are"),
    ),
]
PROPERTIES = re.compile(r"Function properties for (\w+)\s[^:]*?(\d+) bytes spill stores")


def spill_of(function, named):
    """What a function may spill with these macros, by name."""
    for name, macros, spill in SPILLS:
        if name == function and macros.items() <= named.items():
            return spill
    return A_FEW


def complaint(arch, file, macros):
    """What is wrong with the cubin of a variant, or None."""
    cubin, log = compiled(kernels.source(file), macros, arch)
    if not cubin:
        return f"{file} {macros} does not compile: {log}"
    named = dict(macros)
    spilt = {function: int(stores) for function, stores in PROPERTIES.findall(log)}
    if not spilt:
        return f"{file} {macros}: the log does not tell what is spilt: {log}"
    wrong = [
        f"{function} spills {stores} bytes"
        for function, stores in spilt.items()
        if stores > spill_of(function, named).bytes
    ]
    return f"{file} {macros}: {', '.join(wrong)}" if wrong else None


@pytest.fixture(scope="module")
def pool():
    """Two processes; they start afresh, for the frameworks' threads do not survive a fork."""
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        yield processes


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_compiles_and_keeps_to_its_registers(arch, pool):
    if int(arch.removeprefix("sm_")) not in known_archs():
        pytest.skip(f"this NVRTC does not compile for {arch}")
    files, macros = zip(*variants(arch), strict=True)
    complaints = pool.map(partial(complaint, arch), files, macros, chunksize=2)
    assert not [words for words in complaints if words]


# The macros of a file that go together, in groups; of the other files all do.
TOGETHER = dict.fromkeys(
    CONVOLUTION,
    [
        ("ACROSS", "PACK", "PACKS", "SEQUENCES", "RESIDENT"),
        ("ACROSS", "LANES"),
        ("ACROSS", "STAGES"),
        ("ACROSS", "AHEAD"),
        ("ACROSS", "WEIGHTS_AT_ONCE"),
        ("ACROSS", "SEQUENCES", "SILU", "INITIAL_STATE"),
        ("ACROSS", "SEQUENCES", "SILU", "FINAL_STATE"),
        ("ACROSS", "SEQUENCES", "INITIAL_STATE", "FINAL_STATE"),
    ],
) | {
    causal_conv1d_update.FILE: [
        (name,) for name in ("SILU", "PACK", "COLUMNS", "COLUMNS_AT_ONCE", "WEIGHTS_AT_ONCE")
    ]
}


def test_the_spread_has_every_shape_that_plans_have():
    """The macros that shape the work, over many more problems."""
    rest = {"WIDTH", "REAL", "FEATURES", "COST", "COSINE", "HARD", "OUTPUT"}

    def shapes(found):
        for file, macros in found:
            shaping = [x for x in macros if not x[0].endswith("_T") and x[0] not in rest]
            for group in TOGETHER.get(file, [dict(shaping)]):
                assert {*group} <= {*dict(macros)}
                if file != soft_dtw_engine.BACKWARD:
                    yield file, *(x for x in shaping if x[0] in group)

    found = []
    for B in (1, 7, 150, 500, 20_000):
        for N in (1, 40, 70, 200, 500, 100_000):
            found += soft_dtw_variants([(B, N, D) for D in (1, 2, 3, 4, 5, 16, 17, 500)])
    orders = ALONG, FLUSHED, SHIFTS, STRIDED, ACROSS, HALF, ODD
    channels, lengths = (1, 2, 3, 7, 15, 30, 31, 32, 33, 64, 5000), (1, 31, 32, 100_000)
    kinds, sizes = [(WHOLE, "int32"), *KINDS], list(product(channels, lengths))
    options = list(product((False, True), repeat=3))
    found += conv_variants(FLOAT32, [4], orders, kinds, sizes)
    found += conv_variants(FLOAT32, [4], [ALONG, ACROSS], kinds, options=options)
    found += conv_variants(FLOAT32, WIDTHS, [ALONG, ACROSS])
    found += conv_variants(("float16",) * 4, [4], [ALONG, FLUSHED, ACROSS], sizes=sizes)
    for dtype, silu, S in product(FLOATING[1:3], (False, True), (4, 8, 9)):
        packs = 1, 2, 4, 16 // convolution_plan.SIZES[dtype]
        found += update_variants((dtype,) * 4, [4], packs=packs, silu=silu, columns=S)
    assert {*shapes(found)} <= {*shapes(variants(COVERED))}


# ---- on a device


@pytest.mark.gpu
def test_an_error_of_the_compiler_names_its_line(folder):
    from cupy.cuda.compiler import CompileException

    write(folder, broken_cu="// a kernel\n\nnonsense;\n")
    with pytest.raises(CompileException, match=r"kernels/broken\.cu\(3\): error"):
        kernels.launch(0, 0, "broken.cu", "broken", (), 1, 1, ())


@pytest.mark.gpu
def test_variants_and_functions_are_told_apart(folder):
    import cupy

    text = """\
        extern "C" __global__ void add(int* x) { *x += AMOUNT; }
        extern "C" __global__ void subtract(int* x) { *x -= AMOUNT; }
        """
    write(folder, count_cu=text)
    x = cupy.zeros(1, np.int32)
    for function, amount in [("add", 100), ("subtract", 10), ("add", 3), ("subtract", 1)]:
        kernels.launch(0, 0, "count.cu", function, (("AMOUNT", amount),), 1, 1, (x.data.ptr,))
    assert int(x[0]) == 92


@pytest.mark.gpu
def test_a_launch_is_on_the_stream_it_names(folder):
    import cupy

    write(folder, one_cu='extern "C" __global__ void one(int* x) { *x = 1; }\n')
    x, done = cupy.zeros(1, np.int32), np.empty(1, np.int32)
    kernels.launch(0, 0, "one.cu", "one", (), 1, 1, (x.data.ptr,))  # compiles
    x[...] = 0
    cupy.cuda.Device(0).synchronize()
    with frameworks.busy_stream(frameworks.CUPY) as is_busy:
        stream = cupy.cuda.get_current_stream()
        kernels.launch(0, stream.ptr, "one.cu", "one", (), 1, 1, (x.data.ptr,))
        done[...] = x.get(stream=cupy.cuda.Stream.null)
        assert is_busy() and done[0] == 0, "it did not wait for what its stream was busy with"
        stream.synchronize()
        assert x.get()[0] == 1


USE = """
import cupy, cuseq
x = cupy.ones((1, 1, 4), cupy.float32)
print(cuseq.causal_conv1d(x, x[0, :, :2]))
"""


@pytest.mark.gpu
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    """Whatever is compiled is written to CuPy's folder anew."""
    written = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", USE],
            env=os.environ | {"CUPY_CACHE_DIR": str(tmp_path)},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
        )
        assert "1. 2. 2. 2." in done.stdout, done.stderr
        written.append({path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()})
    assert written[0] and written[0] == written[1]
