"""Plans are pure functions of a problem and the device's limits: this needs no device."""

import numpy as np
import pytest

from cuseq.ops import causal_conv1d, causal_conv1d_update, soft_dtw
from cuseq.runtime.kernels import DeviceLimits

H200 = DeviceLimits(multiprocessors=132)
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2051, 100_000]


def dtw_plan(B, N, M=50, D=3, dtype="float32"):
    return soft_dtw.plan(soft_dtw.Problem(B, N, M, D, dtype, 0), H200)


@pytest.mark.parametrize(
    "B, N, warps",
    [
        (1, 1, 1),
        (1, 32, 1),
        (1, 33, 2),
        (1, 65, 4),
        (1, 256, 8),
        (1, 257, 16),
        (1, 100_000, 16),
        (132, 512, 16),
        (133, 512, 8),
        (264, 512, 8),
        (528, 512, 4),
        (1056, 512, 2),
        (1057, 512, 1),
        (10**6, 512, 1),
        (0, 512, 16),
    ],
)
def test_warps_of_a_soft_dtw_pair(B, N, warps):
    """As many as a pair has stripes of 32 rows, unless pairs fill the device by themselves."""
    plan = dtw_plan(B, N)
    assert plan.block == 32 * warps
    assert plan.grid == B
    assert dict(plan.macros) == {"X_T": "float", "REAL": "float", "WARPS": warps, "STEPS": 16}


def test_float64_pairs_have_at_most_8_warps():
    assert dtw_plan(1, 5000, dtype="float64").block == 32 * 8


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_series_are_computed_in_float32(dtype):
    plan = dtw_plan(2, 100, dtype=dtype)
    assert dict(plan.macros)["REAL"] == "float"
    assert plan[1:] == dtw_plan(2, 100)[1:]


@pytest.mark.parametrize("dtype, cell", [("float32", 8), ("float64", 16)])
@pytest.mark.parametrize("N, stripes", [(1, 1), (32, 1), (33, 2), (70, 3)])
@pytest.mark.parametrize("M, chunks", [(1, 2), (2, 3), (17, 3), (18, 4), (50, 6)])
def test_bytes_of_a_soft_dtw(dtype, cell, N, stripes, M, chunks):
    """A chunk is 16 steps; the last lane of 32 starts 31 steps after the first."""
    B = 5
    plan = dtw_plan(B, N, M, dtype=dtype)
    assert plan.one_row == B * M * cell
    assert plan.kept_rows == B * (stripes - 1) * M * cell
    assert plan.kept_lanes == B * stripes * chunks * 32 * 2 * cell


def test_a_long_soft_dtw_keeps_little_of_its_grid():
    plan = dtw_plan(1, 5000, 5000)
    assert plan.kept_rows + plan.kept_lanes < 1.4 * 5000 * 5000


def conv_problem(B, D, L, W=4, S=3, across=False):
    return causal_conv1d.Problem(B, D, L, W, S, ("float32",) * 4, across, 0)


def lanes_and_run(plan):
    macros = dict(plan.macros)
    return macros["LANES_D"], macros["RUN"], macros["WARPS"]


@pytest.mark.parametrize("D, lanes", [(1, 1), (2, 2), (3, 4), (31, 32), (32, 32), (130, 32)])
def test_a_warp_reads_along_the_closest_axis(D, lanes):
    across = causal_conv1d.plan(conv_problem(2, D, 100, across=True), H200)
    along = causal_conv1d.plan(conv_problem(2, D, 100), H200)
    assert lanes_and_run(across) == (lanes, 16, 4)
    assert lanes_and_run(along) == (1, 1, 4)
    assert across.block == along.block == 128


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("B, D", [(1, 1), (2, 33), (64, 2048), (1000, 130)])
@pytest.mark.parametrize("before", [0, 3])
def test_segments_cover_the_length_and_none_is_empty(across, B, D, before):
    for L in LENGTHS:
        plan = causal_conv1d.plan(conv_problem(B, D, L, across=across), H200, before)
        lanes, run, warps = lanes_and_run(plan)
        assert plan.segment_length % (warps * (32 // lanes) * run) == 0
        assert (plan.segments - 1) * plan.segment_length < L + before
        assert plan.segments * plan.segment_length >= L + before
        tiles = -(-D // lanes)
        assert tiles * lanes >= D
        assert plan.grid == B * tiles * plan.segments


def test_segments_fill_the_device_and_no_more():
    few = causal_conv1d.plan(conv_problem(1, 1, 100_000_000), H200)
    many = causal_conv1d.plan(conv_problem(64, 2048, 100_000), H200)
    assert 132 <= few.grid <= 132 * causal_conv1d.BLOCKS_TO_FILL
    assert many.segments == 1


@pytest.mark.parametrize("B, D, L", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_plan_of_an_empty_convolution(B, D, L):
    for across in (False, True):
        plan = causal_conv1d.plan(conv_problem(B, D, L, across=across), H200)
        assert plan.segments == 1 and plan.segment_length > 0
        assert plan.grid == B * -(-D // lanes_and_run(plan)[0])


def test_types_of_a_convolution():
    problem = causal_conv1d.Problem(
        2, 3, 9, 5, 4, ("bfloat16", "float32", "float16", "float64"), False, 0
    )
    macros = dict(causal_conv1d.plan(problem, H200).macros)
    assert (macros["X_T"], macros["WEIGHT_T"]) == ("__nv_bfloat16", "float")
    assert (macros["BIAS_T"], macros["STATE_T"]) == ("__half", "double")
    assert (macros["REAL"], macros["WIDTH"]) == ("double", 5)


@pytest.mark.parametrize("D, blocks", [(1, 1), (127, 1), (128, 1), (129, 2), (1000, 8)])
@pytest.mark.parametrize("B", [0, 1, 7])
def test_plan_of_an_update(B, D, blocks):
    """One thread a channel of a row."""
    dtypes = ("float16", "float32", "float32", "bfloat16", "int64", "int32")
    plan = causal_conv1d_update.plan(causal_conv1d_update.Problem(B, D, 1, 4, 9, 3, dtypes, 0))
    assert (plan.grid, plan.block) == (B * blocks, 128)
    macros = dict(plan.macros)
    assert macros["REAL"] == "float" and macros["WIDTH"] == 4
    assert (macros["SEQLENS_T"], macros["INDEX_T"]) == ("long long", "int")


def test_plans_are_cached():
    assert dtw_plan(3, 40) is dtw_plan(3, 40)
    assert causal_conv1d.plan(conv_problem(3, 4, 5), H200) is causal_conv1d.plan(
        conv_problem(3, 4, 5), H200
    )


def test_a_new_length_compiles_nothing_new():
    """Sizes are no macros, but for a count of warps or lanes."""
    plans = [dtw_plan(1000, N, M) for N, M in zip(LENGTHS, reversed(LENGTHS), strict=True)]
    assert len({plan.macros for plan in plans}) <= 2
    convolutions = [causal_conv1d.plan(conv_problem(2, 40, L), H200) for L in LENGTHS]
    assert len({plan.macros for plan in convolutions}) == 1


def test_across_follows_the_strides():
    """Whatever the layout is called: the axis with the smaller stride is the closest."""
    x, weight = np.zeros((2, 5, 7), np.float32), np.zeros((5, 3), np.float32)
    turned = np.zeros((2, 7, 5), np.float32)

    def across(x, layout):
        call = causal_conv1d._borrow("causal_conv1d", x, weight, None, None, layout, None, None)
        return call.problem.across

    assert [across(x, "bdl"), across(turned, "bld")] == [False, True]
    assert [across(turned.transpose(0, 2, 1), "bdl"), across(x.transpose(0, 2, 1), "bld")] == [
        True,
        False,
    ]
    assert not across(x[..., ::-1], "bdl")
