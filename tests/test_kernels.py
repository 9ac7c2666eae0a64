"""The kernel files and their loader: what it hands to CuPy, and that every variant compiles.

Compiling needs NVRTC and no GPU. The tests marked gpu launch a small kernel of their own.
"""

import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from cuseq.ops import causal_conv1d, causal_conv1d_update, soft_dtw
from cuseq.runtime import kernels
from cuseq.runtime.checks import FLOATING
from tests import frameworks

FILES = soft_dtw.FILE, causal_conv1d.FILE, causal_conv1d_update.FILE


@pytest.fixture
def fresh(monkeypatch):
    """A loader that has loaded nothing yet, and forgets what the test loads."""
    loaded = kernels.source, kernels._module, kernels._kernel
    for function in loaded:
        function.cache_clear()
    yield
    for function in loaded:
        function.cache_clear()


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
    """Stands in for CuPy and takes down what is asked of it."""

    def __init__(self):
        self.modules, self.functions, self.launches, self.entered = [], [], [], []
        self.cuda = SimpleNamespace(Device=self.device)

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
        self.functions.append(name)

        def kernel(grid, block, args, *, stream):
            self.launches.append((name, grid, block, args, stream.ptr, self.entered[-1]))

        return kernel


@pytest.fixture
def cupy(fresh, monkeypatch):
    recorder = CuPy()
    monkeypatch.setitem(sys.modules, "cupy", recorder)
    return recorder


def test_a_launch_goes_to_its_stream_on_its_device(cupy):
    kernels.launch(3, 77, "soft_dtw.cu", "soft_dtw_forward", (("WARPS", 1),), 5, 32, (1, 2))
    assert cupy.launches == [("soft_dtw_forward", (5,), (32,), (1, 2), 77, 3)]
    assert cupy.entered == []


def test_macros_become_options_in_their_order(cupy):
    macros = ("X_T", "__half"), ("REAL", "float"), ("A", 1)
    kernels.launch(0, 0, "soft_dtw.cu", "soft_dtw_forward", macros, 1, 32, ())
    options = "--std=c++17", "-DX_T=__half", "-DREAL=float", "-DA=1"
    assert cupy.modules == [(kernels.source("soft_dtw.cu"), options)]


def test_a_variant_is_one_module_and_a_function_is_looked_up_once(cupy):
    calls = [
        (file, function, (("WARPS", warps),))
        for file, function in [("soft_dtw.cu", "f"), ("soft_dtw.cu", "g"), ("causal_conv1d.cu", "f")]
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
    write(
        folder,
        planted_cuh=f"""\
            #pragma once
            // a header

            {nonsense["planted.cuh"]}
            """,
        planted_cu=f"""\
            // a kernel
            #include "planted.cuh"

            {nonsense["planted.cu"]}
            """,
    )
    cubin, log = compiled(kernels.source("planted.cu"), (), f"sm_{max(known_archs())}")
    assert cubin is None and f"kernels/{file}(4): error" in log
