"""`import cuseq` is light, dependencies go one way, and every public name explains itself."""

import ast
import importlib
import inspect
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import cuseq

ROOT = Path(__file__).resolve().parents[1]

# What each room may import of the project: adapters -> ops -> runtime and host.
ROOMS = {"ops": {"ops", "host", "runtime"}, "host": {"host"}, "runtime": {"runtime"}}
SOURCES = [
    pytest.param(path, id=path.relative_to(ROOT).as_posix())
    for room in ROOMS
    for path in sorted((ROOT / "cuseq" / room).rglob("*.py"))
]

IMPORT = """
import json, sys, time
start = time.process_time()  # other processes may be busy
import numpy
middle = time.process_time()
import cuseq
seconds = time.process_time() - middle
of_numpy = middle - start
print(json.dumps({"seconds": seconds, "of_numpy": of_numpy, "modules": sorted(sys.modules)}))
"""


@pytest.fixture(scope="module")
def fresh_imports():
    """Five fresh processes that import NumPy and cuseq: seconds of each, and sys.modules after."""
    command = [sys.executable, "-c", IMPORT]
    return [
        json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
        for _ in range(5)
    ]


@pytest.mark.parametrize("heavy", ["cupy", "torch", "jax", "ml_dtypes", "matplotlib"])
def test_import_loads_nothing_heavy(fresh_imports, heavy):
    assert heavy not in fresh_imports[0]["modules"]


def test_plot_names_what_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "cuseq.plot", raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module("cuseq.plot")
    expected = "expected matplotlib, which draws, got none installed; pip install cuseq[plot]"
    assert str(caught.value) == f"matplotlib: {expected}"


def test_import_is_fast(fresh_imports):
    """Quicker than NumPy's, on any machine: it takes half as long."""
    assert statistics.median(run["seconds"] / run["of_numpy"] for run in fresh_imports) < 0.9


def imported(path, inside_functions):
    """Dotted names that a source file imports, with or without the imports inside functions.

    Relative ones are resolved: "from ..host import soft_dtw" in cuseq/ops/soft_dtw.py gives
    "cuseq.host.soft_dtw".
    """
    package = path.relative_to(ROOT).parent.parts
    names = set()
    nodes = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*base, *filter(None, [node.module])))
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize("path", SOURCES)
def test_core_imports_no_framework(path):
    roots = {name.partition(".")[0] for name in imported(path, inside_functions=False)}
    assert not roots & {"torch", "jax"}


@pytest.mark.parametrize("path", SOURCES)
def test_dependency_goes_one_way(path):
    room = path.relative_to(ROOT / "cuseq").parts[0]
    parts = [name.split(".") for name in imported(path, inside_functions=True)]
    wrong = {".".join(p) for p in parts if p[0] == "cuseq" and not ROOMS[room] & set(p[1:2])}
    assert not wrong, f"cuseq/{room} imports {wrong}"


def test_imports_are_read_rightly(tmp_path, monkeypatch):
    """The reader sees relative, nested and lazy imports; else the tests above prove nothing."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "cuseq" / "ops" / "example.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import numpy as np\nfrom . import a\nfrom ..host import b\nfrom ..host.c import d\n"
        "try:\n    import torch.nn\nexcept ImportError:\n    pass\n"
        "def f():\n    from jax import numpy\n"
    )
    eager = {"numpy", "cuseq.ops.a", "cuseq.host.b", "cuseq.host.c.d", "torch.nn"}
    assert imported(path, inside_functions=False) == eager
    assert imported(path, inside_functions=True) == eager | {"jax.numpy"}


@pytest.mark.parametrize("name", [n for n in cuseq.__all__ if not n.startswith("__")])
def test_public_name_has_an_example(name):
    assert ">>> " in (inspect.getdoc(getattr(cuseq, name)) or "")
