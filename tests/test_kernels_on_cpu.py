"""The tests of the kernels on the CPU, in processes of their own with the sanitizers preloaded.

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
def test_kernels_on_the_cpu_under_sanitizers(tmp_path):
    files = sorted(ROOT.glob("tests/cpu_runner/kernels_*.py"))
    assert files, "tests/cpu_runner: expected files kernels_*.py, got none"
    # A report goes straight to stderr and ends the process: with -v the last line names the test.
    options = ["-v", "--capture=sys", "--noconftest", "-p", "no:cacheprovider"]
    running = []
    for file in files:  # all at the same time: most of it is compiling, one variant after the other
        output = tmp_path / file.with_suffix(".txt").name
        with output.open("w") as stream:
            child = subprocess.Popen(
                [sys.executable, "-u", "-m", "pytest", *options, str(file)],
                cwd=ROOT,
                env=sanitized_environment(),
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        running.append((child, output))
    for child, _ in running:
        child.wait()
    for child, output in running:
        text = output.read_text()
        if child.returncode:
            pytest.fail("\n".join(text.splitlines()[-120:]), pytrace=False)
        assert re.search(r"\b[1-9]\d* passed\b", text), text[-2000:]
