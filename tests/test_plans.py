"""Plans are pure functions of a problem and the device's limits: this needs no device."""

import numpy as np
import pytest

from cuseq.ops import causal_conv1d, causal_conv1d_update, soft_dtw
from cuseq.runtime import kernels
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


def conv_problem(B, D, L, across=False, unit=True, dtypes=("float32",) * 4, W=4):
    return causal_conv1d.Problem(
        B=B, D=D, L=L, W=W, S=3, dtypes=dtypes, across=across, unit=unit, device=0
    )


def conv_plan(*sizes, backward=False, before=0, **options):
    """The plan, and its macros by name."""
    plan = causal_conv1d.plan(conv_problem(*sizes, **options), H200, backward, before)
    return plan, dict(plan.macros)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("D, lanes", [(1, 1), (2, 2), (3, 4), (31, 32), (32, 32), (130, 32)])
def test_a_warp_reads_along_the_closest_axis(D, lanes, backward):
    plan, across = conv_plan(2, D, 100, across=True, unit=False, backward=backward)
    assert (across["LANES_D"], across["UNIT"]) == (lanes, 0)
    assert plan.block == 32 * across["WARPS"]
    _, along = conv_plan(2, D, 100, backward=backward)
    assert (along["LANES_D"], along["UNIT"]) == (1, 1)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("B, D", [(1, 1), (2, 33), (64, 2048), (1000, 130)])
@pytest.mark.parametrize("backward, before", [(False, 0), (True, 0), (True, 3)])
def test_segments_cover_the_length_and_none_is_empty(across, B, D, backward, before):
    for L in LENGTHS:
        plan, macros = conv_plan(B, D, L, across=across, backward=backward, before=before)
        lanes = macros["LANES_D"]
        assert plan.segment_length % (macros["WARPS"] * (32 // lanes) * macros["RUN"]) == 0
        assert (plan.segments - 1) * plan.segment_length < L + before
        assert plan.segments * plan.segment_length >= L + before
        assert plan.grid == B * -(-D // lanes) * plan.segments


def test_segments_fill_the_device_and_no_more():
    few, _ = conv_plan(1, 1, 100_000_000)
    many, _ = conv_plan(64, 2048, 100_000)
    assert 132 <= few.grid <= 132 * causal_conv1d.BLOCKS_TO_FILL
    assert many.segments == 1


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("B, D, L", [(0, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_plan_of_an_empty_convolution(B, D, L, across):
    plan, macros = conv_plan(B, D, L, across=across)
    assert plan.segments == 1 and plan.segment_length > 0
    assert plan.grid == B * -(-D // macros["LANES_D"])


def test_types_of_a_convolution():
    dtypes = ("bfloat16", "float32", "float16", "float64")
    _, macros = conv_plan(2, 3, 9, dtypes=dtypes, W=5)
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
    assert conv_plan(3, 4, 5)[0] is conv_plan(3, 4, 5)[0]


def test_a_new_length_compiles_nothing_new():
    """Sizes are no macros, but for a count of warps or lanes."""
    plans = [dtw_plan(1000, N, M) for N, M in zip(LENGTHS, reversed(LENGTHS), strict=True)]
    assert len({plan.macros for plan in plans}) <= 2
    assert len({conv_plan(2, 40, L)[0].macros for L in LENGTHS}) == 1


def test_a_grid_fits_what_cuda_can_launch():
    """Even where each channel of each batch item is one short row."""
    assert conv_plan(70_000, 70_000, 1)[0].grid <= kernels.MOST_BLOCKS
    with pytest.raises(ValueError, match="^soft_dtw_forward: expected .*, got .*; split the batch"):
        kernels.launch(0, 0, "soft_dtw.cu", "soft_dtw_forward", (), 2**31, 32, ())


def problem_of(x, layout):
    weight = np.zeros((x.shape[1 if layout == "bdl" else 2], 3), np.float32)
    call = causal_conv1d._borrow("causal_conv1d", x, weight, None, None, layout, None, None)
    return call.problem


def test_the_closest_axis_follows_the_strides():
    """Whatever the layout is called: the axis with the smaller stride is the closest."""
    bdl, bld = np.zeros((2, 5, 7), np.float32), np.zeros((2, 7, 5), np.float32)
    assert not problem_of(bdl, "bdl").across
    assert problem_of(bld, "bld").across
    assert problem_of(bld.transpose(0, 2, 1), "bdl").across
    assert not problem_of(bdl.transpose(0, 2, 1), "bld").across
    assert not problem_of(bdl[..., ::-1], "bdl").across


def test_unit_promises_that_positions_are_neighbours():
    """In y as well, which has its axes in the order of the layout."""
    bdl, bld = np.zeros((2, 5, 7), np.float32), np.zeros((2, 7, 5), np.float32)
    assert problem_of(bdl, "bdl").unit
    assert problem_of(bdl[:, ::2], "bdl").unit
    for x, layout in [
        (bld, "bld"),
        (bdl.transpose(0, 2, 1), "bld"),
        (bld.transpose(0, 2, 1), "bdl"),
        (bdl[..., ::2], "bdl"),
        (bdl[..., ::-1], "bdl"),
        (np.broadcast_to(bdl[..., :1], bdl.shape), "bdl"),
    ]:
        assert not problem_of(x, layout).unit
