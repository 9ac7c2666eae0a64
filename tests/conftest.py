"""What all tests share: skips without a CUDA device, poisoned outputs, Hypothesis' profile."""

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy and PyTorch need some too

from cuseq.runtime import arrays  # noqa: E402
from tests import frameworks  # noqa: E402

if jax := frameworks.module("jax"):
    jax.config.update("jax_enable_x64", True)  # else it has no float64

settings.register_profile(
    "cuseq",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=15,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("cuseq")


def pytest_collection_modifyitems(items):
    if not frameworks.cuda_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")


@pytest.fixture(autouse=True)
def first_device():
    """Device 0 has a context and is the current one.

    torch leaves a thread on the device it used where device 0 has no context, and JAX leaves it on
    the one it used last, of all that it found at its start.
    """
    if frameworks.cuda_available():
        cupy = frameworks.module("cupy")
        cupy.cuda.runtime.setDevice(0)
        cupy.zeros(1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill every output and scratch with NaN before it is used, so that a gap in it shows."""
    empty = arrays.empty

    def poisoned_empty(*args):
        array = empty(*args)
        frameworks.poison(array)
        return array

    monkeypatch.setattr(arrays, "empty", poisoned_empty)
    for library in arrays.CuPy, arrays.Scratch, arrays.Torch:
        monkeypatch.setattr(library, "allocator", poisoning(library, library.allocator))


def poisoning(library, allocator):
    """What allocates for a call that is replayed, and poisons."""

    def of(array):
        allocate = allocator(array)

        def poisoned_owner():
            owner = allocate()
            frameworks.poison(library.borrow("", owner, ""))
            return owner

        return poisoned_owner

    return staticmethod(of)
