"""Plans are pure functions of a problem and the device's limits: this needs no device."""

import math

import numpy as np
import pytest

from cuseq.ops import (
    causal_conv1d,
    causal_conv1d_update,
    causal_conv1d_varlen,
    convolution_plan,
    soft_dtw,
)
from cuseq.ops.convolution import as_bdl
from cuseq.ops.convolution_plan import INDEXED, PACKED, WHOLE
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
from cuseq.runtime import arrays, kernels
from cuseq.runtime.kernels import DeviceLimits
from tests import samples

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


ALONG, ACROSS = False, True
PACKS = {"float64": 2, "float32": 4, "float16": 8, "bfloat16": 8}  # elements of 16 bytes
SIZES = [(1, 1), (2, 33), (7, 12), (64, 2048), (1000, 130)]


def conv_problem(
    B, D, L, across=ALONG, pack=1, W=4, dtypes=("float32",) * 4, sequences=WHOLE, index="int32"
):
    return convolution_plan.Problem(B, D, L, W, dtypes, sequences, index, across, pack, 0)


def conv_plan(*sizes, backward=False, **options):
    """The plan, and its macros by name."""
    how = convolution_plan.plan(conv_problem(*sizes, **options), H200, backward)
    return how, dict(how.macros)


def tiles_of(how, macros, L):
    """Of how many positions a tile is, and how many tiles a row has wherever its packs start."""
    tile = macros["LANES"] * macros["PACK"]
    return tile, -(-(L + macros["PACK"] - 1) // tile)


def test_macros_of_a_convolution():
    how, along = conv_plan(2, 40, 1000)
    names = "ACROSS", "PACK", "LANES", "WARPS", "ADJACENT", "SEQUENCES", "INDEX_T"
    assert [along[name] for name in names] == [0, 4, 32, 4, 1, WHOLE, "int"]
    assert how.block == 32 * along["WARPS"]
    apart = along | {"ADJACENT": 0}
    assert conv_plan(2, 40, 1000, pack=0)[1] == apart
    across = along | {"ACROSS": 1, "LANES": 16}
    assert conv_plan(2, 40, 1000, across=ACROSS, pack=4)[1] == across | {"PACK": 4}
    assert conv_plan(2, 40, 1000, across=ACROSS)[1] == across | {"PACK": 1, "LANES": 32}
    by_index = {"sequences": INDEXED, "index": "int64"}
    expected = {"SEQUENCES": INDEXED, "INDEX_T": "long long"}
    assert conv_plan(2, 40, 1000, **by_index)[1] == along | expected


def test_types_of_a_convolution():
    dtypes = ("bfloat16", "float32", "float16", "float64")
    _, macros = conv_plan(2, 3, 9, dtypes=dtypes, W=5)
    assert (macros["X_T"], macros["WEIGHT_T"]) == ("__nv_bfloat16", "float")
    assert (macros["BIAS_T"], macros["STATE_T"]) == ("__half", "double")
    assert (macros["REAL"], macros["WIDTH"], macros["PACK"]) == ("double", 5, 8)


@pytest.mark.parametrize("dtype", PACKS)
@pytest.mark.parametrize("B, D", SIZES)
@pytest.mark.parametrize("W", [1, 4, 32])
def test_tiles_along_a_row(dtype, B, D, W):
    """They cover it wherever its packs start, and a tile has what the filter reaches back to."""
    for L in LENGTHS:
        how, macros = conv_plan(B, D, L, W=W, dtypes=(dtype,) * 4)
        pack, lanes = macros["PACK"], macros["LANES"]
        tile, tiles = tiles_of(how, macros, L)
        assert pack == PACKS[dtype] and lanes in (1, 2, 4, 8, 16, 32)
        assert tile >= W - 1
        assert lanes == 32 or tile >= L  # so that it is one tile, or two of a row that is shifted
        assert lanes == 1 or lanes // 2 * pack < max(L, W - 1)
        assert how.length % tile == 0
        assert how.parts * how.length >= L + pack - 1
        assert (how.parts - 1) * how.length < L + pack - 1
        rows = -(-B * D // (32 // lanes))  # warps of a segment
        assert how.grid == -(-rows * how.parts // macros["WARPS"])
        assert how.parts == 1 or how.length >= convolution_plan.TILES * tile


@pytest.mark.parametrize("B, D", [(1, 1), (2, 33), (7, 12), (16, 64)])
def test_segments_along_a_row_fill_the_device_and_no_more(B, D):
    """As far as the row is long enough."""
    most = H200.multiprocessors * convolution_plan.WARPS_TO_FILL
    for L in (100_000, 10_000_000):
        how, macros = conv_plan(B, D, L)
        tile, tiles = tiles_of(how, macros, L)
        assert B * D * how.parts <= most
        assert B * D * how.parts > most / 2 or how.length <= (convolution_plan.TILES + 1) * tile
    assert conv_plan(64, 2048, 100_000)[0].parts == 1


@pytest.mark.parametrize("real", ["float32", "float64"])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 8, 9, 16, 32])
@pytest.mark.parametrize("pack", [1, 2, 4, 8])
@pytest.mark.parametrize("backward", [False, True])
def test_weights_of_a_pack_of_channels_are_in_registers(real, W, pack, backward):
    numbers = (convolution_plan.NUMBERS_FORWARD, convolution_plan.NUMBERS_BACKWARD)[backward]
    numbers = numbers // 2 if real == "float64" else numbers
    dtypes = ("float16", real, "float32", "float32")
    options = {"across": ACROSS, "pack": pack, "W": W, "dtypes": dtypes, "backward": backward}
    _, macros = conv_plan(2, 640, 1000, **options)
    assert pack % macros["PACK"] == 0
    assert macros["PACK"] == 1 or macros["PACK"] * W <= numbers
    assert macros["PACK"] == pack or 2 * macros["PACK"] * W > numbers


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "B, D, pack", [(*sizes, 1) for sizes in SIZES] + [(7, 12, 4), (64, 2048, 8), (1000, 130, 2)]
)
def test_runs_across_the_channels(backward, B, D, pack):
    """They cover the length, no block of them is empty, and the forward reads 4 positions ahead."""
    for L in LENGTHS:
        how, macros = conv_plan(B, D, L, across=ACROSS, pack=pack, backward=backward)
        lanes, tile = macros["LANES"], macros["LANES"] * macros["PACK"]
        tiles, runs = -(-D // tile), macros["WARPS"] * (32 // lanes)
        assert lanes == 32 or (tiles == 1 and lanes // 2 * macros["PACK"] < D)
        assert how.length % 4 == 0
        assert convolution_plan.SHORTEST_RUN <= how.length <= convolution_plan.LONGEST_RUN
        assert how.parts * runs * how.length >= L
        assert (how.parts - 1) * runs * how.length < L
        assert how.grid == B * tiles * how.parts


@pytest.mark.parametrize(
    "B, D, L, run", [(1, 32, 5000, 16), (1, 4096, 4096, 124), (8, 64, 100_000, 376), (1, 1, 9, 16)]
)
def test_runs_get_longer_where_the_device_is_full(B, D, L, run):
    """Positions, channels and all, shared out among the warps that fill it."""
    how, _ = conv_plan(B, D, L, across=ACROSS)
    assert how.length == min(run, convolution_plan.LONGEST_RUN)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("across", [ALONG, ACROSS])
@pytest.mark.parametrize("B, D, L", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0)])
def test_plan_of_an_empty_convolution(B, D, L, across, backward):
    how, _ = conv_plan(B, D, L, across=across, backward=backward)
    assert how.parts == 1 and how.length > 0
    assert (how.grid > 0) == (B * D > 0)


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


@pytest.mark.parametrize("S, columns", [(3, 3), (8, 8), (9, 0), (1000, 0)])
def test_columns_of_a_state_are_in_registers_where_they_are_few(S, columns):
    problem = causal_conv1d_update.Problem(2, 3, 1, 4, 9, S, ("float32",) * 4 + ("int32",) * 2, 0)
    assert dict(causal_conv1d_update.plan(problem).macros)["COLUMNS"] == columns


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
    assert len({conv_plan(2, 40, L, across=ACROSS)[0].macros for L in LENGTHS}) == 1
    assert len({conv_plan(2, 40, L)[0].macros for L in range(1, 3000)}) == 6  # by lanes
    assert len({conv_plan(2, 40, L)[0].macros for L in range(128, 9000)}) == 1


def test_a_grid_fits_what_cuda_can_launch():
    """Even where each channel of each batch item is one short row."""
    assert dtw_plan(10**6, 50_000)[0].grid <= kernels.MOST_BLOCKS
    for options in {}, {"pack": 0}, {"W": 32}, {"across": ACROSS}, {"across": ACROSS, "pack": 4}:
        for backward in (False, True):
            for sizes in (70_000, 70_000, 1), (2000, 2000, 1000), (1, 32, 2**36):
                how, _ = conv_plan(*sizes, backward=backward, **options)
                assert how.grid <= kernels.MOST_BLOCKS
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


def aligned(*shape, dtype="float32"):
    """Zeros that start where a pack may."""
    count, dtype = math.prod(shape), samples.dtype_of(dtype)
    memory = np.zeros(count + 16, dtype)
    first = -memory.ctypes.data % 16 // dtype.itemsize
    return memory[first : first + count].reshape(shape)


def problem_of(x, layout, *others):
    """As of a forward; `others` have x's axes and are accessed as x is."""
    channels = x.shape[1 if layout == "bdl" else 2]
    weight = np.zeros((channels, 3), np.float32)
    call = causal_conv1d._borrow("causal_conv1d", x, weight, None, None, layout, None, None)
    seen = [as_bdl(arrays.borrow("other", other, ""), layout) for other in others]
    return call.problem(*seen)


def test_the_closest_axis_follows_the_strides():
    """Whatever the layout is called: the axis with the smaller stride is the closest."""
    bdl, bld = aligned(2, 5, 7), aligned(2, 7, 5)
    assert not problem_of(bdl, "bdl").across
    assert problem_of(bld, "bld").across
    assert problem_of(bld.transpose(0, 2, 1), "bdl").across
    assert not problem_of(bdl.transpose(0, 2, 1), "bld").across
    assert not problem_of(bdl[..., ::-1], "bdl").across
    assert problem_of(bld[..., ::-1], "bld").across


def test_positions_are_neighbours_in_every_tensor_or_read_one_by_one():
    bdl, bld = aligned(2, 5, 7), aligned(2, 7, 5)
    for x, layout in [
        (bdl, "bdl"),
        (bdl[:, ::2], "bdl"),
        (bdl[..., 1:], "bdl"),  # packs are shifted then
        (np.broadcast_to(bdl[:, :1], bdl.shape), "bdl"),
        (bdl.transpose(0, 2, 1), "bld"),
    ]:
        assert problem_of(x, layout, x).pack == 1
    for x, layout in [
        (bdl[..., ::2], "bdl"),
        (bdl[..., ::-1], "bdl"),
        (np.broadcast_to(bdl[..., :1], bdl.shape), "bdl"),
    ]:
        assert problem_of(x, layout).pack == 0
    assert problem_of(bdl, "bdl", bdl, bdl[:, ::2]).pack == 1
    assert problem_of(bdl, "bdl", bdl, bld.transpose(0, 2, 1)).pack == 0
    assert problem_of(bdl, "bdl", bdl[..., ::-1]).pack == 0


@pytest.mark.parametrize("dtype", PACKS)
def test_channels_that_are_read_at_once(dtype):
    """As many as 16 bytes have, if they divide D and all that steps from one to another."""
    most = PACKS[dtype]
    for D, pack in [(8, 8), (16, 8), (2, 2), (4, 4), (12, 4), (6, 2), (7, 1), (24, 8)]:
        x = aligned(2, 7, D, dtype=dtype)
        for view, layout in (x, "bld"), (x.transpose(0, 2, 1), "bdl"):
            problem = problem_of(view, layout, view)
            assert problem.across and problem.pack == min(most, pack)
    for offset, pack in [(0, 8), (1, 1), (2, 2), (3, 1), (4, 4), (8, 8)]:
        x = aligned(2, 7, 16, dtype=dtype)[..., offset : offset + 8]
        assert problem_of(x, "bld").pack == min(most, pack)
    for row, pack in [(9, 1), (10, 2), (12, 4), (16, 8)]:
        x = aligned(2, 8, row, dtype=dtype)[..., :8]
        assert problem_of(x, "bld").pack == min(most, pack)
    for row, pack in [(57, 1), (58, 2), (60, 4)]:  # of a batch item
        x = aligned(2, row, dtype=dtype)[:, :56].reshape(2, 7, 8)
        assert problem_of(x, "bld").pack == min(most, pack)
        assert problem_of(x[:1], "bld").pack == most


def test_channels_of_views():
    x = aligned(2, 7, 16)
    for view, pack in [
        (x[..., ::2], 1),
        (x[..., ::-1], 1),
        (x[:, ::-1], 4),
        (x[::-1, ::3], 4),
        (np.broadcast_to(x[:1], x.shape), 4),
        (np.broadcast_to(x[..., :1], x.shape), 1),
        (x[:, :1, 4:12], 4),
        (aligned(1, 1, 9)[..., :8], 4),  # with no step from one to another
    ]:
        problem = problem_of(view, "bld")
        assert problem.across and problem.pack == pack
    for other, pack in [(x, 4), (aligned(2, 7, 18)[..., :16], 2), (aligned(2, 7, 17)[..., 1:], 1)]:
        assert problem_of(x, "bld", x, other).pack == pack
    assert problem_of(x, "bld", aligned(2, 16, 7).transpose(0, 2, 1)).pack == 1


@pytest.mark.parametrize("strides", ["rows", "columns"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_packed_sequences_are_taken_across(strides, index):
    """Wherever x lies."""
    x = aligned(9, 8) if strides == "rows" else aligned(8, 9).T
    ends, weight = np.array([0, 4, 9], index), np.zeros((8, 3), np.float32)
    call = causal_conv1d_varlen._borrow("", x, weight, None, ends, None, None)
    problem = call.problem()
    assert (problem.B, problem.D, problem.L, problem.sequences) == (1, 8, 9, PACKED)
    assert (problem.across, problem.pack) == (True, 4 if strides == "rows" else 1)
    assert problem.index_dtype == index


@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_sequences_by_index_are_taken_as_x_lies(layout, index):
    x, weight = aligned(2, 8, 8), np.zeros((8, 3), np.float32)
    seq_idx = np.zeros((2, 8), index)
    problem = causal_conv1d._borrow("", x, weight, None, None, layout, seq_idx, None).problem()
    assert (problem.across, problem.sequences) == (layout == "bld", INDEXED)
    assert problem.index_dtype == index
