"""README's Python blocks run as they are printed."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_readme_has_an_example_for_each_framework():
    first_lines = {block.splitlines()[0] for block in BLOCKS}
    assert first_lines == {
        "import cupy, cuseq",
        "import jax, cuseq.jax",
        "import jax, jax.numpy as jnp, cuseq.jax",
        "import numpy as np, cuseq",
        "import torch, cuseq.compat",
        "import torch, cuseq.torch",
    }


@pytest.mark.parametrize(
    "block",
    [pytest.param(block, marks=[pytest.mark.gpu] if "cupy" in block else []) for block in BLOCKS],
    ids=lambda block: block.splitlines()[0],
)
def test_readme_example_runs(block):
    pytest.importorskip(re.match(r"import (\w+)", block)[1])
    names = {}
    exec(block, names)
    assert "cuseq" in names
