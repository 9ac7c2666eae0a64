"""Plans are pure functions of a problem and the device's limits: this needs no device."""

import numpy as np
import pytest

from cuseq.ops import causal_conv1d, causal_conv1d_update, soft_dtw
from cuseq.ops.soft_dtw_plan import (
    ALIGNMENT,
    ENTROPY,
    GIVEN,
    METRICS,
    SERIES,
    VALUES,
    Problem,
    plan,
)
from cuseq.runtime import kernels
from cuseq.runtime.kernels import DeviceLimits

H200 = DeviceLimits(multiprocessors=132, shared=227 * 1024)
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2051, 100_000]


def dtw_problem(
    B, N, M=50, D=3, dtype="float32", cost="sqeuclidean", width=None, hard=False, batches=None
):
    width = M if width is None else width
    batch_a, batch_b = batches or (B, B)
    return Problem(B, N, M, D, batch_a, batch_b, dtype, cost, hard, width, 0)


def dtw_plan(*sizes, output=SERIES, keep=True, **options):
    """The plan of a soft-DTW, and the macros of its sweep by name."""
    how = plan(dtw_problem(*sizes, **options), output, keep, H200)
    return how, dict(how.backward_sweep)


@pytest.mark.parametrize(
    "N, lanes",
    [(1, 1), (4, 1), (5, 2), (8, 2), (9, 4), (17, 8), (33, 16), (64, 16), (65, 32), (10**4, 32)],
)
@pytest.mark.parametrize("B", [0, 1, 7])
def test_few_pairs_get_wide_groups_of_lanes(B, N, lanes):
    """As many as a pair has rows for, 4 each; a longer pair has several stripes."""
    how, macros = dtw_plan(B, N)
    assert (macros["LANES"], macros["ROWS"]) == (lanes, 4)
    assert how.stripes == -(-N // (4 * lanes))
    assert how.groups == -(-B * lanes // 32)
    assert how.grid == how.stripes * how.groups
    assert macros["MAIL"] == (how.stripes > 1)


@pytest.mark.parametrize("N, lanes", [(1, 1), (5, 2), (17, 8), (33, 8), (1000, 8)])
def test_many_pairs_get_narrow_groups_of_lanes(N, lanes):
    how, macros = dtw_plan(300_000, N)
    assert (macros["LANES"], macros["HELPERS"]) == (lanes, 0)
    assert how.groups == -(-300_000 * lanes // 32)


@pytest.mark.parametrize(
    "B, N, D, rows, helpers",
    [
        (1, 1000, 1, 4, 3),  # hardly any pairs
        (220, 300, 2, 4, 3),
        (230, 300, 2, 8, 0),
        (230, 300, 3, 4, 0),  # registers for 4 rows
        (330, 100, 2, 4, 3),
        (400, 100, 2, 4, 0),  # short series
        (230, 300, 4, 4, 0),
        (230, 300, 5, 4, 3),
        (230, 300, 16, 4, 3),
        (230, 300, 17, 4, 7),
        (230, 300, 500, 4, 7),
        (5000, 300, 9, 4, 3),
        (60, 300, 0, 4, 3),
    ],
)
def test_rows_of_a_lane_and_helpers_of_a_sweep(B, N, D, rows, helpers):
    how, macros = dtw_plan(B, N, 50, D)
    assert (macros["ROWS"], macros["HELPERS"]) == (rows, helpers)
    assert macros["FEATURES"] == (0 if helpers else D)
    assert how.block == 32 * (1 + helpers)


@pytest.mark.parametrize("dtype, most", [("float32", 6), ("float64", 3)])
def test_features_that_a_warp_adds_up_at_a_time(dtype, most):
    """All helpers have as many to do, in as few rounds as registers suffice for."""
    for D in (*range(1, 100), 500):
        how, macros = dtw_plan(1, 300, D=D, dtype=dtype)
        at_a_time = macros["HELPERS"] * macros["GROUP"]
        assert 1 <= macros["GROUP"] <= most
        rounds = -(-D // at_a_time)
        assert rounds == -(-D // (macros["HELPERS"] * most))
        assert rounds * at_a_time - D < rounds * macros["HELPERS"]
        assert (how.backward["in_flight"] > 0) == (rounds > 1)
    assert dtw_plan(5000, 300, D=3)[1]["GROUP"] == 3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("cost", METRICS)
@pytest.mark.parametrize("output", [SERIES, ALIGNMENT, ENTROPY])
@pytest.mark.parametrize("B", [1, 60, 300, 100_000])
@pytest.mark.parametrize("shared", [64 * 1024, 99 * 1024, 227 * 1024])
def test_shared_memory_of_a_sweep(dtype, cost, output, B, shared):
    """For the weights of a chunk, or of two with helpers, and for the letters about it."""
    limits = H200._replace(shared=shared)
    for N in (1, 7, 30, 60, 100, 500):
        for D in [0] if cost == GIVEN else [1, 2, 3, 4, 5, 16, 17, 100]:
            how = plan(dtw_problem(B, N, 50, D, dtype, cost), output, True, limits)
            macros = dict(how.backward_sweep)
            rows, steps, helpers = macros["ROWS"], macros["STEPS"], macros["HELPERS"]
            planes = 4 if output == ENTROPY or cost == "euclidean" else 3
            chunks = 2 if helpers else 1
            boxes = 1 + max(helpers, 1) * macros["GROUP"]
            pairs = 32 // macros["LANES"] if macros["MAIL"] or helpers else 1
            numbers = steps * 4 * (chunks * planes * rows * 32 + boxes * pairs)
            size = 8 if dtype == "float64" else 4
            assert steps >= 1 and how.backward_shared == numbers * size + 16 <= shared
            prepared = 2 * steps * rows * 4 * 32 * size if helpers else 0
            assert how.forward_shared == prepared
            assert helpers != 3 or how.backward_shared <= 11 * 1024 * size  # beside others
            assert helpers or how.backward_shared <= 26 * 1024


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_series_are_computed_in_float32(dtype):
    how, macros = dtw_plan(2, 100, dtype=dtype)
    assert macros["REAL"] == "float"
    assert how._replace(series=None) == dtw_plan(2, 100)[0]._replace(series=None)


def test_macros_of_costs():
    for cost, number, cosine in [
        ("sqeuclidean", 0, 0),
        ("euclidean", 1, 0),
        ("cityblock", 2, 0),
        ("cosine", 0, 1),
    ]:
        how, macros = dtw_plan(2, 100, cost=cost)
        assert (macros["COST"], dict(how.series)["COSINE"]) == (number, cosine)
        assert macros["C_T"] == "float"
    how, macros = dtw_plan(2, 100, 50, 0, "float16", GIVEN, output=ALIGNMENT)
    assert (macros["COST"], macros["C_T"], macros["REAL"]) == (3, "__half", "float")
    assert how.tiles == how.forward["packed_a"] == how.backward["sums_a"] == 0


def test_series_that_meet_a_batch_are_packed_once():
    alone, shared = dtw_plan(7, 100)[0], dtw_plan(7, 100, batches=(1, 7))[0]
    assert shared.forward["packed_a"] * 7 == alone.forward["packed_a"]
    assert shared.forward["packed_b"] == alone.forward["packed_b"]
    assert shared.tiles == 4 + 7 * 2
    assert shared.backward == alone.backward


def of_table(how):
    """Bytes that a forward keeps of the table."""
    return how.forward["mail"] + how.forward["lanes"]


@pytest.mark.parametrize("B", [1, 60, 5000])
@pytest.mark.parametrize("D", [1, 3, 9, 64])
@pytest.mark.parametrize(
    "dtype, output, cost, most",
    [
        ("float32", SERIES, "sqeuclidean", 1.5),
        ("float32", ALIGNMENT, "cityblock", 1.5),
        ("float32", SERIES, "euclidean", 2.6),
        ("float32", ENTROPY, "sqeuclidean", 2.6),
        ("float64", SERIES, "euclidean", 6.4),
        ("float64", ENTROPY, "cosine", 6.4),
    ],
)
def test_a_backward_keeps_little_of_the_table(B, D, dtype, output, cost, most):
    """Bytes a cell, where a number has 4 or 8."""
    N = 2048
    how, _ = dtw_plan(B, N, N, D, dtype, cost, output=output)
    assert of_table(how) <= most * B * N * N


@pytest.mark.parametrize("D", [1, 9])
@pytest.mark.parametrize("B", [1, 1000])
def test_a_forward_alone_is_linear_in_the_lengths(B, D):
    """Twice the lengths, twice the memory: the series, and one row of the table a pair."""
    one, two = (dtw_plan(B, N, N, D, output=VALUES, keep=False)[0] for N in (4096, 8192))
    assert one.forward["lanes"] == 0
    assert sum(two.forward.values()) < 2.01 * sum(one.forward.values())
    assert one.forward["mail"] <= B * 4096 * 12


@pytest.mark.parametrize("B", [1, 1000])
def test_a_band_keeps_what_is_inside(B):
    """Cells of the band; a stripe is there as a whole, with its height."""
    one, two = (dtw_plan(B, N, N, width=20)[0] for N in (4096, 8192))
    assert of_table(two) <= 2.01 * of_table(one)
    assert of_table(one) < of_table(dtw_plan(B, 4096, 4096)[0]) / 10
    assert one.chunks * dict(one.backward_sweep)["STEPS"] < 100


def blocks_of(N, M, radius, row, rows):
    """Blocks of 4 columns with cells of some rows in a band: the first, and behind the last."""
    if row >= N:
        return 0, 0
    lower, upper = radius + max(N - M, 0), radius + max(M - N, 0)
    last = min(min(row + rows, N) - 1 + upper, M - 1)
    return max(row - lower, 0) // 4, last // 4 + 1


@pytest.mark.parametrize("N, M", [(1, 1), (33, 7), (100, 100), (131, 200), (300, 280), (257, 1)])
@pytest.mark.parametrize("radius", [0, 1, 2, 3, 4, 7, 10, 1000])
@pytest.mark.parametrize(
    "B, D, dtype", [(1, 3, "float32"), (9000, 1, "float32"), (9000, 3, "float64")]
)
def test_what_is_kept_has_room(N, M, radius, B, D, dtype):
    """Chunks for a stripe's steps, from the first that a lane has to the last, and its letters."""
    how, macros = dtw_plan(B, N, M, D, dtype, width=min(M, 2 * radius + abs(N - M)))
    rows, lanes = macros["ROWS"], macros["LANES"]
    for stripe in range(how.stripes):
        tops = [(stripe * lanes + lane) * rows for lane in range(lanes)]
        spans = [blocks_of(N, M, radius, top, rows) for top in tops]
        # A lane also hears of the block before its first.
        first = min(max(one - 1, 0) + lane for lane, (one, end) in enumerate(spans) if end)
        last = max(end + lane for lane, (_, end) in enumerate(spans) if end)
        assert last - first <= how.chunks * macros["STEPS"]
        if stripe < how.stripes - 1:
            assert spans[-1][1] - spans[-1][0] <= how.mail_blocks


def test_working_memory_is_aligned_as_numbers_are():
    how, _ = dtw_plan(3, 33, 35, 3)
    for size in (*how.forward.values(), *how.backward.values()):
        assert size % 4 == 0


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
    assert dtw_plan(3, 40)[0] is dtw_plan(3, 40)[0]
    assert conv_plan(3, 4, 5)[0] is conv_plan(3, 4, 5)[0]


def test_a_new_length_compiles_nothing_new():
    """Sizes are no macros, but for a count of warps or lanes."""
    plans = [dtw_plan(9, N, M)[0] for N, M in zip(LENGTHS, reversed(LENGTHS), strict=True)]
    assert len({how.series for how in plans}) == 1
    assert len({how.backward_sweep for how in plans}) <= 10  # by lanes, stripes, rows, helpers
    longer = [dtw_plan(9, N, N)[0] for N in range(8000, 9000, 7)]
    assert len({how.backward_sweep for how in longer}) == 1
    assert len({conv_plan(2, 40, L)[0].macros for L in LENGTHS}) == 1


def test_a_grid_fits_what_cuda_can_launch():
    """Even where each channel of each batch item is one short row."""
    assert dtw_plan(10**6, 50_000)[0].grid <= kernels.MOST_BLOCKS
    assert conv_plan(70_000, 70_000, 1)[0].grid <= kernels.MOST_BLOCKS
    with pytest.raises(ValueError, match="^soft_dtw_forward: expected .*, got .*; split the batch"):
        kernels.launch(0, 0, "soft_dtw.cu", "soft_dtw_forward", (), 2**31, 32, ())


def problem_of_series(N=30, M=40, **options):
    a, b = np.zeros((3, N, 2), np.float32), np.zeros((3, M, 2), np.float32)
    defaults = {"gamma": 1.0, "cost": "sqeuclidean"}
    defaults |= dict.fromkeys(("bandwidth", "lengths_a", "lengths_b"))
    return soft_dtw.borrow("soft_dtw", a, b, **defaults | options).problem


@pytest.mark.parametrize(
    "gamma, hard", [(1, 0), (0, 1), ([1.0, 2.0, 3.0], 0), ([1.0, 0.0, 3.0], 1)]
)
def test_a_gamma_of_0_is_seen_on_the_host(gamma, hard):
    assert problem_of_series(gamma=gamma).hard == hard


def test_the_width_of_a_band():
    """Known where one radius serves whole series; else it may be as wide as the table."""
    assert problem_of_series().width == 40
    assert problem_of_series(bandwidth=3).width == 2 * 3 + 10
    assert problem_of_series(N=40, M=30, bandwidth=0).width == 10
    assert problem_of_series(bandwidth=2**70).width == 40
    assert problem_of_series(bandwidth=[3, 3, 3]).width == 40
    assert problem_of_series(bandwidth=3, lengths_b=[40, 1, 2]).width == 40


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
