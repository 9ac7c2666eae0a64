"""The tests of the kernels on the CPU, in a process of their own with the sanitizers preloaded.

Those tests are tests/cpu_runner/kernels_*.py. They need NumPy only, and run without sanitizers, so
quicker and under a debugger, with `pytest tests/cpu_runner/kernels_*.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_runner import COMPILER, sanitized_environment

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(not COMPILER, reason="g++ is not installed")
def test_kernels_on_the_cpu_under_sanitizers():
    files = sorted(ROOT.glob("tests/cpu_runner/kernels_*.py"))
    # Given no file, the child would run the whole suite, and this test in it again.
    assert files, "tests/cpu_runner: expected files kernels_*.py, got none"
    # A report goes straight to stderr and ends the process: with -v the last line names the test.
    options = ["-v", "--capture=sys", "--noconftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-u", "-m", "pytest", *options, *map(str, files)],
        cwd=ROOT,
        env=sanitized_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        pytest.fail("\n".join(done.stdout.splitlines()[-120:]), pytrace=False)
    assert re.search(r"\b[1-9]\d* passed\b", done.stdout), done.stdout[-2000:]
