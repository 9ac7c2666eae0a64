"""The causal convolution's kernels on the CPU, with sequences by index, against the oracle."""

import math

import numpy as np
import pytest

from tests.cpu_runner.device import reversed_axes, shifted, sliced, transposed
from tests.cpu_runner.kernels_causal_conv1d import (
    FILLED,
    MANY,
    arguments,
    check,
    outer_of,
    random_rows,
    run,
)
from tests.samples import ROWS
from tests.tolerances import assert_close


def of_rows(W, S, index="int32", D=2):
    """Arguments for ROWS."""
    return arguments(len(ROWS), D, ROWS.shape[1], W, S) | {"seq_idx": ROWS.astype(index)}


@pytest.mark.parametrize(
    "layout, W, S, index",
    [
        ("bdl", 4, None, "int32"),
        ("bdl", 4, 3, "int32"),
        ("bdl", 4, 15, "int32"),
        ("bld", 4, None, "int64"),
        ("bld", 4, 3, "int64"),
        ("bld", 4, 15, "int64"),
        ("bdl", 1, 2, "int64"),
        ("bdl", 1, None, "int64"),
        ("bld", 2, 1, "int32"),
        ("bld", 2, 4, "int32"),
        ("bdl", 8, 9, "int32"),
    ],
)
def test_sequences_by_index(layout, W, S, index):
    check(of_rows(W, S, index), "silu", layout=layout, seeds=(0, 1), limits=MANY)


@pytest.mark.parametrize(
    "layout, dtype, D, L",
    [  # more than a tile or a walk, and than a segment or a block of walks
        ("bdl", "float64", 2, 800),
        ("bdl", "float32", 2, 300),
        ("bdl", "bfloat16", 1, 530),
        ("bld", "float64", 6, 100),
        ("bld", "float32", 33, 140),
        ("bld", "float16", 24, 100),
    ],
)
@pytest.mark.parametrize("limits", [FILLED, MANY])
def test_sequences_by_index_in_long_rows(layout, dtype, D, L, limits):
    given = arguments(2, D, L, 4, 5, [dtype] * 4) | {"seq_idx": random_rows(2, L)}
    check(given, "silu", layout=layout, limits=limits, seeds=(0, 1))


@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("S", [None, 3, 6])
@pytest.mark.parametrize("L", [0, 1])
def test_sequences_by_index_of_hardly_any_positions(layout, S, L):
    rows = np.array([[4], [-1], [0]], np.int32)[:, :L]
    check(arguments(3, 2, L, 4, S) | {"seq_idx": rows}, "silu", layout=layout)


@pytest.mark.parametrize("layout, index", [("bdl", "int32"), ("bld", "int64")])
def test_strides_of_seq_idx(layout, index):
    given = of_rows(4, 3, index)
    contiguous = run(given, "silu", layout)
    for place in (transposed, sliced, reversed_axes, shifted(3, 1)):
        got = run(given, "silu", layout, places={"seq_idx": place})
        assert all(got[name].tobytes() == x.tobytes() for name, x in contiguous.items())
    for n in (2, 5):
        given["seq_idx"] = np.broadcast_to(ROWS[n].astype(index), ROWS.shape)
        check(given, "silu", layout=layout)


@pytest.mark.parametrize("layout, index", [("bdl", "int32"), ("bld", "int64")])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_padding_holds_does_not_matter(layout, index, wrong):
    """Nor does the initial state of a row that begins with it and is not all padding."""
    given = of_rows(4, 5, index)
    outer = outer_of(**given)
    clean = run(given, "silu", layout, outer=outer)
    for array in given["x"], outer[0]:
        array.transpose(0, 2, 1)[ROWS < 0] = wrong
    given["initial_state"][(ROWS[:, 0] < 0) & (ROWS >= 0).any(axis=1)] = wrong
    for name, got in run(given, "silu", layout, outer=outer).items():
        assert got.tobytes() == clean[name].tobytes(), name
    for name in ("y", "grad_x"):
        assert not clean[name].transpose(0, 2, 1)[ROWS < 0].any()


@pytest.mark.parametrize("layout, index", [("bdl", "int32"), ("bld", "int64")])
def test_sequences_by_index_without_a_gradient_by_the_final_state(layout, index):
    given = of_rows(4, 3, index)
    grad_y, grad_final_state = outer_of(**given)
    zeros = run(given, "silu", layout, outer=(grad_y, np.zeros_like(grad_final_state)))
    for name, got in run(given, "silu", layout, outer=(grad_y, None)).items():
        assert got.tobytes() == zeros[name].tobytes()


@pytest.mark.parametrize("layout, index", [("bdl", "int32"), ("bld", "int64")])
def test_one_index_changes_nothing(layout, index):
    given = arguments(2, 2, 11, 4, 5)
    whole = run(given, "silu", layout)
    given["seq_idx"] = np.full((2, 11), 7, index)
    for name, got in run(given, "silu", layout).items():
        assert_close(got, whole[name].astype(np.float64), f"causal_conv1d.{name}")
