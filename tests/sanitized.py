"""GPU tests under NVIDIA's compute-sanitizer, shared out among processes:

    python -m tests.sanitized memcheck 12 tests/test_causal_conv1d.py -k cupy

Tool, number of processes, and what pytest is to run. Each array of CuPy and JAX has an allocation
of its own, so that an access behind an array is one behind an allocation. Prints the last lines of
pytest and of the tool of each process, and exits with 1 unless all found nothing.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SHARE = "CUSEQ_TESTS_SHARE"  # "k/n": every n-th test from the k-th on


def pytest_configure():
    """As a plugin of pytest in such a process."""
    import cupy

    cupy.cuda.set_allocator(None)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    k, n = map(int, os.environ[SHARE].split("/"))
    items[:] = items[k::n]


def main(tool, count, *arguments):
    """Run the processes; whether all tests passed and the tool found nothing."""
    folder = Path(tempfile.mkdtemp())
    python = [sys.executable, "-m", "pytest", "-q", "-p", "tests.sanitized", "-m", "gpu"]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    running = []
    for k in range(int(count)):
        log, output = folder / f"{k}.log", folder / f"{k}.txt"
        command = ["compute-sanitizer", "--tool", tool, "--report-api-errors", "no"]
        command += ["--log-file", str(log), *python, *arguments]
        share = {SHARE: f"{k}/{count}"}
        with output.open("w") as file:
            process = subprocess.Popen(
                command, env=environment | share, stdout=file, stderr=subprocess.STDOUT
            )
        running.append((process, log, output))
    clean = True
    for process, log, output in running:
        process.wait()
        last, found = output.read_text().splitlines()[-1], log.read_text().splitlines()[-1]
        nothing = re.search(r"SUMMARY: 0 (errors|hazards)", found)
        if process.returncode not in (0, 5) or not nothing:  # 5: no test in this share
            clean = False
            print(output.read_text()[-4000:], log.read_text()[:4000], sep="\n")
        print(last, found, sep=" | ")
    return clean


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:]) else 1)
