"""What wheel and sdist hold, and that each way to install the package finds its kernels.

Everything is built from a copy, so nothing is written into the checkout, and without the network:
setuptools and pip of the running environment do the work.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from cuseq.runtime.kernels import source

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("cuseq", "examples", "kernels", "tests")
FILES = ("CHANGELOG.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg")

# Looked up, not imported: setuptools replaces distutils in a process that imports it.
try:
    SETUPTOOLS = int(metadata.version("setuptools").partition(".")[0])
    metadata.version("pip")
except metadata.PackageNotFoundError:
    SETUPTOOLS = 0
pytestmark = pytest.mark.skipif(
    SETUPTOOLS < 77, reason="needs pip and setuptools 77; the extra test brings setuptools"
)

# Soft-DTW of two single points is their squared distance, whatever gamma.
USE = """
import json, numpy, cuseq
from cuseq.runtime.kernels import source
value = cuseq.soft_dtw(numpy.array([[2.0]]), numpy.array([[5.0]]))
print(json.dumps([cuseq.__file__, source("soft_dtw.cu"), float(value)]))
"""


def run(*command, cwd=None):
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder):
    """Paths of all files below a folder, relative to it."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of the checkout without what building or testing leaves in it."""
    tree = tmp_path_factory.mktemp("tree")
    junk = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, ignore=junk)
    for file in FILES:
        shutil.copy(ROOT / file, tree)
    return tree


@pytest.fixture(scope="session")
def shipped(tree):
    """Paths of the files of the copy, read before any build adds its own."""
    return files(tree)


def build(kind, tree, out):
    """Path of the archive that setuptools' hook for the kind, "wheel" or "sdist", writes."""
    hook = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    return out / run(sys.executable, "-c", hook, cwd=tree).splitlines()[-1]


@pytest.fixture(scope="session")
def wheel(shipped, tree, tmp_path_factory):
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(shipped, tree, tmp_path_factory):
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


def environment(folder):
    """Python of a fresh environment that sees the running one's packages.

    The packages come by a .pth file, through which no further .pth file is read: an editable
    install of cuseq in the running environment stays out of sight.
    """
    venv.create(folder, symlinks=True)
    packages = [path for path in sys.path if path.endswith("-packages")]
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "running.pth").write_text("\n".join(packages) + "\n")
    return folder / "bin" / "python"


def test_wheel_holds_the_package_and_the_kernels_alone(wheel, shipped):
    expected = {name for name in shipped if name.startswith("cuseq/") and name.endswith(".py")}
    expected |= {f"cuseq/{name}" for name in shipped if name.endswith((".cu", ".cuh"))}
    assert "cuseq/kernels/soft_dtw.cu" in expected
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert wheel.name.endswith("-py3-none-any.whl")


def test_sdist_holds_the_checkout(sdist, shipped):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped <= names


@pytest.mark.parametrize("way", ["wheel", "sdist", "editable", "zip"])
def test_kernels_are_found(way, request, tree, tmp_path):
    """From a fresh process in each kind of installation, which must not see the checkout."""
    home = tree if way == "editable" else tmp_path / "venv"
    python = environment(tmp_path / "venv")
    use = USE
    if way == "zip":
        home = request.getfixturevalue("wheel")
        use = f"import sys; sys.path.insert(0, {str(home)!r})\n" + USE
    else:
        what = ["-e", tree] if way == "editable" else [request.getfixturevalue(way)]
        alone = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
        run(python, "-m", "pip", "install", "--quiet", *alone, *what, cwd=tmp_path)
    place, text, value = json.loads(run(python, "-I", "-c", use, cwd=tmp_path))
    assert Path(place).is_relative_to(home)
    assert text == source("soft_dtw.cu")
    assert '#include "' not in text
    assert value == 9.0
