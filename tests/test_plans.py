"""Plans are pure functions of a problem and the device's limits: this needs no device."""

import math
from itertools import product
from unittest import mock

import numpy as np
import pytest

from cuseq.ops import (
    causal_conv1d,
    causal_conv1d_update,
    causal_conv1d_varlen,
    convolution_plan,
    soft_dtw,
    soft_dtw_from_cost,
)
from cuseq.ops.convolution import as_bdl
from cuseq.ops.convolution_plan import ALIGNED, APART, FLUSH, INDEXED, PACKED, SHIFTED, WHOLE
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
from tests.cpu_runner import device

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


NO_OPTIONS = {"gamma": 0.5, "bandwidth": None, "lengths_a": None, "lengths_b": None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gamma": np.ones(3)},
        {"bandwidth": 20, "gamma": 0.0},
        {"bandwidth": np.array([1, 2, 3])},
        {"bandwidth": 20, "lengths_a": np.array([1, 2, 300])},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_forward_keeps_has_a_size_that_is_known_before(options, dtype):
    """Also without memory, and with no series in it: for compilers."""

    def described(x):
        strides = tuple(stride // x.itemsize for stride in x.strides)
        return arrays.Array(0, x.shape, strides, x.dtype.name, 0, None, None)

    shapes = (3, 300, 2), (1, 500, 2), (3, 300, 500)
    a, b, C = (device.on_device(np.zeros(shape, dtype)) for shape in shapes)
    given = {
        name: device.on_device(x) if isinstance(x, np.ndarray) else x
        for name, x in (NO_OPTIONS | options).items()
    }
    without = {name: described(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    with device.installed(), mock.patch.object(kernels, "launch"):
        _, kept = soft_dtw.forward_keeping(a, b, cost="euclidean", **given)
        size = soft_dtw.kept_size(described(a), described(b), cost="euclidean", **without)
        assert kept.size == size > 0
        _, kept = soft_dtw_from_cost.forward_keeping(C, **given)
        assert kept.size == soft_dtw_from_cost.kept_size(described(C), **without) > 0


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
IDLE = H200._replace(multiprocessors=0)


def conv_problem(
    B,
    D,
    L,
    across=ALONG,
    packs=None,
    W=4,
    dtypes=("float32",) * 4,
    sequences=WHOLE,
    index="int32",
    options=(True, False, False),
    weights=1,
):
    """`options`: silu, initial_state, final_state."""
    packs = (1 if across else ALIGNED) if packs is None else packs
    return convolution_plan.Problem(
        *(B, D, L, W, dtypes, sequences, index, *options, across, packs, weights, 0)
    )


def conv_plan(*sizes, backward=False, limits=H200, **options):
    """The plan, and its macros by name."""
    how = convolution_plan.plan(conv_problem(*sizes, **options), limits, backward)
    return how, dict(how.macros)


def reach_of(macros, L, packs=ALIGNED):
    """How many positions packs of a row may take up: the first one may begin before it."""
    return L if packs == FLUSH else L + macros["PACK"] - 1


def test_macros_of_a_convolution():
    how, along = conv_plan(2, 40, 1000)
    names = "ACROSS", "PACK", "LANES", "WARPS", "PACKS", "SEQUENCES", "INDEX_T"
    assert [along[name] for name in names] == [0, 4, 32, 4, ALIGNED, WHOLE, "int"]
    assert how.block == 32 * along["WARPS"]

    def changed(**options):
        macros = conv_plan(2, 40, 1000, **options)[1]
        rest = "RESIDENT", "STAGES"
        return {name: x for name, x in macros.items() if x != along[name] and name not in rest}

    for packs in APART, SHIFTED:
        assert changed(packs=packs) == {"PACKS": packs}
    assert changed(packs=FLUSH) == {}
    assert changed(across=ACROSS, packs=4) == {"ACROSS": 1, "LANES": 16, "AHEAD": 8}
    assert changed(across=ACROSS) == {"ACROSS": 1, "PACK": 1, "AHEAD": 8}
    by_index = {"SEQUENCES": INDEXED, "INDEX_T": "long long"}
    assert changed(sequences=INDEXED, index="int64") == by_index
    for options in product((False, True), repeat=3):
        macros = conv_plan(2, 40, 1000, options=options)[1]
        names = "SILU", "INITIAL_STATE", "FINAL_STATE"
        assert [macros[name] for name in names] == [int(option) for option in options]


def test_types_of_a_convolution():
    dtypes = ("bfloat16", "float32", "float16", "float64")
    how, macros = conv_plan(2, 3, 9, dtypes=dtypes, W=5)
    assert (macros["X_T"], macros["WEIGHT_T"]) == ("__nv_bfloat16", "float")
    assert (macros["BIAS_T"], macros["STATE_T"]) == ("__half", "double")
    assert (macros["REAL"], macros["WIDTH"], macros["PACK"]) == ("double", 5, 8)
    names = "WEIGHT_T", "BIAS_T", "REAL", "WIDTH"
    assert how.of_partials == tuple((name, macros[name]) for name in names)


@pytest.mark.parametrize("across", [ALONG, ACROSS])
@pytest.mark.parametrize("backward", [False, True])
def test_blocks_for_which_registers_have_to_suffice(across, backward):
    """Fewer, the more a thread has to hold: weights, doubles, what it knows of positions."""
    few, some, many = convolution_plan.RESIDENT[across, backward]
    assert 2048 // (32 * convolution_plan.WARPS) >= few >= some >= many >= 1

    def resident(**options):
        options |= {"across": across, "backward": backward}
        return conv_plan(2, 640, 1000, **options)[1]["RESIDENT"]

    short, long = ("float16",) * 4, ("float32",) * 4
    for W in range(1, 33):
        light, heavy = (few, some) if W <= 4 else (some, some) if W <= 8 else (many, many)
        assert resident(W=W, dtypes=short) == light
        assert resident(W=W, dtypes=long) == (heavy if across else light)
        for sequences in (INDEXED, PACKED) if across else (INDEXED,):
            assert resident(W=W, dtypes=short, sequences=sequences) == heavy
        for packs in () if across else (APART, SHIFTED):
            assert resident(W=W, dtypes=short, packs=packs) == heavy
        assert across or resident(W=W, dtypes=short, packs=FLUSH) == light
        for dtype in PACKS:
            assert resident(W=W, dtypes=(dtype, *short[1:3], "float64")) == many


@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 6, 8, 12, 32])
@pytest.mark.parametrize("weights", [1, 2, 4, 8])
def test_weights_that_are_read_at_once(W, weights):
    """As many as divide a lane's weights, so that they begin where an aligned place does."""
    for across, packs in [(ALONG, ALIGNED), (ACROSS, 1), (ACROSS, 2), (ACROSS, 8)]:
        _, macros = conv_plan(2, 640, 1000, across=across, packs=packs, W=W, weights=weights)
        of_lane = W * macros["PACK"] if across else W
        most = max(n for n in (1, 2, 4, 8) if weights % n == of_lane % n == 0)
        assert macros["WEIGHTS_AT_ONCE"] == most


@pytest.mark.parametrize("dtype", PACKS)
@pytest.mark.parametrize("B, D", SIZES)
@pytest.mark.parametrize("W", [1, 4, 32])
@pytest.mark.parametrize("packs", [SHIFTED, ALIGNED, FLUSH])
def test_tiles_along_a_row(dtype, B, D, W, packs):
    """They cover it wherever its packs start, and a tile has what the filter reaches back to."""
    for L in LENGTHS:
        how, macros = conv_plan(B, D, L, W=W, dtypes=(dtype,) * 4, packs=packs)
        pack, lanes = macros["PACK"], macros["LANES"]
        tile, reach = lanes * pack, reach_of(macros, L, packs)
        assert pack == PACKS[dtype] and lanes in (1, 2, 4, 8, 16, 32)
        assert tile >= W - 1
        assert lanes == 32 or tile >= L  # so that it is one tile, or two of a row that is shifted
        assert lanes == 1 or lanes // 2 * pack < max(L, W - 1)
        assert how.length % tile == 0
        assert (how.parts - 1) * how.length < reach <= how.parts * how.length
        assert how.parts > 1 or how.length - tile < reach
        rows = -(-B * D // (32 // lanes))  # warps of a segment
        assert how.grid == -(-rows * how.parts // macros["WARPS"])
        assert how.parts == 1 or how.length >= convolution_plan.TILES * tile


@pytest.mark.parametrize("dtype", PACKS)
@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
def test_rows_of_whole_tiles_have_no_tile_more_if_they_are_flush(dtype, lanes):
    """Else their first pack may begin before them, by all but one of its positions."""
    pack = PACKS[dtype]
    tile = lanes * pack

    def tiles(L, packs):
        """Of a row that is one segment."""
        options = {"W": 1, "dtypes": (dtype,) * 4, "packs": packs, "limits": IDLE}
        how, macros = conv_plan(2, 3, L, **options)
        assert macros["LANES"] == lanes and how.parts == 1
        return how.length / tile

    for n in (1, 2, 5, 100) if lanes == 32 else (1,):
        assert tiles(n * tile, FLUSH) == n
        assert lanes < 32 or tiles(n * tile + 1, FLUSH) == n + 1
        for packs in (APART, SHIFTED, ALIGNED):
            assert tiles(n * tile - pack + 1, packs) == n
            assert tiles(n * tile - pack + 2, packs) == tiles(n * tile, packs) == n + 1


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("B, D", [(1, 1), (2, 33), (7, 12), (16, 64)])
def test_segments_along_a_row_fill_the_device_and_no_more(B, D, backward):
    """As far as the row is long enough."""
    warps = (convolution_plan.WARPS_FORWARD, convolution_plan.WARPS_BACKWARD)[backward]
    most = H200.multiprocessors * warps
    for L in (100_000, 10_000_000):
        how, macros = conv_plan(B, D, L, backward=backward)
        tile = macros["LANES"] * macros["PACK"]
        assert B * D * how.parts <= most
        assert B * D * how.parts > most / 2 or how.length <= (convolution_plan.TILES + 1) * tile
    assert conv_plan(most + 1, 1, 100_000, backward=backward)[0].parts == 1


@pytest.mark.parametrize("B", [1, 10**5])
@pytest.mark.parametrize("limits", [IDLE, H200])
@pytest.mark.parametrize("dtype, W", [("float64", 1), ("float32", 4), ("bfloat16", 32)])
def test_positions_of_a_segment_are_counted_in_32_bits(B, limits, dtype, W):
    """However long the row, and though warps enough have one each."""
    longest = convolution_plan.LONGEST_SEGMENT
    assert longest <= 2**29  # kernels take 2**30 for far away
    for L in (longest - 1, longest, longest + 1, 2**31, 2**33, 2**33 + 1, 2**36 - 5):
        for backward in (False, True):
            options = {"W": W, "dtypes": (dtype,) * 4, "limits": limits, "backward": backward}
            how, macros = conv_plan(B, 3, L, **options)
            assert how.length <= longest + 2 * macros["LANES"] * macros["PACK"]
            assert (how.parts - 1) * how.length < reach_of(macros, L) <= how.parts * how.length
            assert how.parts >= L // longest


@pytest.mark.parametrize("dtype", PACKS)
@pytest.mark.parametrize("real", ["float32", "float64"])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 8, 9, 15, 16, 17, 32])
@pytest.mark.parametrize("backward", [False, True])
def test_weights_of_a_pack_of_channels_are_in_registers(dtype, real, W, backward):
    """But for channels of 4 bytes, the least that is copied on the side."""
    dtypes = (dtype, real, "float32", "float32")
    numbers = (convolution_plan.NUMBERS_FORWARD, convolution_plan.NUMBERS_BACKWARD)[backward]
    numbers = numbers // 2 if "float64" in dtypes else numbers
    of_4_bytes = 1 if backward and W > 16 else max(PACKS[dtype] // 4, 1)
    for packs in (1, 2, 4, 8):
        if packs > PACKS[dtype]:
            continue
        options = {"across": ACROSS, "packs": packs, "W": W, "dtypes": dtypes}
        pack = conv_plan(2, 640, 1000, backward=backward, **options)[1]["PACK"]
        assert packs % pack == 0 and pack <= convolution_plan.MOST_CHANNELS
        assert pack <= of_4_bytes or pack * W <= numbers
        assert pack in (packs, convolution_plan.MOST_CHANNELS) or 2 * pack * W > numbers
        assert pack >= min(packs, of_4_bytes)


def wanted_run(backward, dtype, W):
    """Of how many positions the run of a lane is, where there are enough for all lanes."""
    of_2_bytes = convolution_plan.SIZES[dtype] == 2
    short = convolution_plan.RUN if of_2_bytes else convolution_plan.SHORT_RUN
    return (convolution_plan.LONG_RUN if W > 4 else short)[backward]


def walks_of(macros, B, D):
    """Runs of a block, blocks for the channels of all batch items, and blocks at a time."""
    columns = B * -(-D // (macros["LANES"] * macros["PACK"]))
    groups = macros["WARPS"] * 32 // macros["LANES"]
    return groups, columns, H200.multiprocessors * macros["RESIDENT"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype, W", [("float32", 4), ("float16", 4), ("float16", 5)])
@pytest.mark.parametrize(
    "B, D, packs", [(*sizes, 1) for sizes in SIZES] + [(7, 12, 4), (64, 2048, 8), (1000, 130, 2)]
)
def test_runs_across_the_channels(backward, dtype, W, B, D, packs):
    """They cover the length, no block of them is empty, and they are not too long."""
    options = {"across": ACROSS, "backward": backward, "dtypes": (dtype,) * 4, "W": W}
    for L in (*LENGTHS, 2**33 + 1):
        how, macros = conv_plan(B, D, L, packs=packs, **options)
        lanes, pack = macros["LANES"], macros["PACK"]
        groups, columns, room = walks_of(macros, B, D)
        assert lanes == 32 or (columns == B and lanes // 2 * pack < D)
        assert (how.parts - 1) * groups * how.length < L <= how.parts * groups * how.length
        assert how.grid == columns * how.parts
        # Twice as long where one block more for all channels is more than the device has room for
        longest = 2 * wanted_run(backward, dtype, W) + 4
        assert convolution_plan.SHORT_RUN[False] <= how.length <= longest


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype, W", [("float32", 4), ("float16", 4), ("float16", 5)])
@pytest.mark.parametrize("B, D", [(1, 32), (1, 4096), (2, 33), (7, 12), (64, 2048), (1000, 130)])
def test_blocks_of_runs_fill_the_device_a_whole_number_of_times(backward, dtype, W, B, D):
    """As often as runs of the wanted length do; runs any shorter would be too many blocks."""
    options = {"across": ACROSS, "backward": backward, "dtypes": (dtype,) * 4, "W": W}
    for L in (*LENGTHS, 4095, 4096, 4097, 10**6, 10**8):
        how, macros = conv_plan(B, D, L, **options)
        groups, columns, room = walks_of(macros, B, D)
        times = -(-L * columns // (wanted_run(backward, dtype, W) * groups * room))
        assert how.parts == 1 or how.grid <= times * room
        shorter = (how.length - 4) * groups
        shortest = how.length == convolution_plan.SHORT_RUN[False]
        assert shortest or columns * -(-L // shorter) > times * room


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype, W", list(product(("float32", "float16"), (1, 4, 5, 32))))
@pytest.mark.parametrize("times", [1, 2, 7])
def test_runs_of_the_wanted_length(backward, dtype, W, times):
    """They fill the device exactly; one position more takes a part of one time more."""
    options = {"across": ACROSS, "backward": backward, "dtypes": (dtype,) * 4, "W": W}
    groups, _, room = walks_of(conv_plan(1, 32, 1, **options)[1], 1, 32)
    run = wanted_run(backward, dtype, W)
    L = run * groups * room * times
    how, _ = conv_plan(1, 32, L, **options)
    assert (how.length, how.grid) == (run, times * room)
    more, _ = conv_plan(1, 32, L + 1, **options)
    assert more.length <= run and times * room < more.grid <= (times + 1) * room


def bytes_of_a_step(macros, size, backward):
    """Of shared memory for a block, as the kernels declare `Room`, where elements have a size."""
    place = 32 * macros["WARPS"] * macros["PACK"] * size
    if macros["ACROSS"]:
        return macros["AHEAD"] * (1 + backward) * place
    before = macros["WIDTH"] - 1
    enough = next(n for n in (1, 2, 4, 8) if n >= before or n == 8)
    part = macros["PACK"]
    if macros["PACKS"] != SHIFTED and enough <= part:
        part = max(enough, 4 // size)
    wholes = 2 if macros["PACKS"] == SHIFTED else 1
    return (-(-before // part) + wholes * (1 + backward)) * place


def shared_of(macros, size, size_of_real, backward):
    """Bytes of static shared memory of a block."""
    room = macros["STAGES"] * bytes_of_a_step(macros, size, backward)
    if not (macros["ACROSS"] and backward):
        return room
    channels = 32 * macros["WARPS"] * macros["PACK"]  # of all runs of the block
    return max(room, channels * (macros["WIDTH"] + 1) * size_of_real)


ORDERS = [
    *product(PACKS, [ALONG], [APART, SHIFTED, ALIGNED, FLUSH]),
    *((dtype, ACROSS, n) for dtype, n in product(PACKS, (1, 2, 4, 8)) if n <= PACKS[dtype]),
]


@pytest.mark.parametrize("dtype, across, packs", ORDERS)
@pytest.mark.parametrize("real", ["float32", "float64"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_block_has_shared_memory_enough(dtype, across, packs, real, backward):
    """No more than what a kernel may declare."""
    dtypes = dtype, real, "float32", "float32"
    sizes = convolution_plan.SIZES[dtype], 8 if "float64" in dtypes else 4
    options = {"across": across, "packs": packs, "dtypes": dtypes, "backward": backward}
    shapes = (1, 1, 1), (2, 33, 70), (2, 640, 3000), (2, 5000, 5000), (1, 32, 10**7)
    for W, shape in product(range(1, 33), shapes):
        _, macros = conv_plan(*shape, W=W, **options)
        assert 0 < shared_of(macros, *sizes, backward) <= 48 * 1024


@pytest.mark.parametrize("dtype, across, packs", ORDERS)
@pytest.mark.parametrize("backward", [False, True])
def test_steps_that_are_on_their_way_at_a_time(dtype, across, packs, backward):
    """As many as there is room for in each resident block, up to half of them all.

    ACROSS these are of a run of the wanted length, so that a new length compiles nothing new.
    """
    size, seen = convolution_plan.SIZES[dtype], set()
    fewer_blocks = backward and not across and size > 2
    options = {"across": across, "packs": packs, "dtypes": (dtype,) * 4, "backward": backward}
    widths, lengths = (1, 2, 4, 5, 9, 16, 17, 32), (*LENGTHS, 10**7)
    for kib, W, D, L in product((64, 99, 227), widths, (1, 33, 5000), lengths):
        limits = H200._replace(shared=kib * 1024)
        how, macros = conv_plan(2, D, L, W=W, limits=limits, **options)
        positions = macros["AHEAD"] if across else macros["LANES"] * macros["PACK"]
        length = wanted_run(backward, dtype, W) if across else how.length
        half, of_step = length // positions / 2, bytes_of_a_step(macros, size, backward)
        room = min(convolution_plan.ROOM[across, backward], kib * 1024 // macros["RESIDENT"])
        room *= 2 if fewer_blocks else 1
        most = min(half, room / of_step, convolution_plan.STAGES)
        assert macros["STAGES"] == max(n for n in (1, 2, 4, 8, 16) if n == 1 or n <= most)
        seen.add(macros["STAGES"])
    assert len(seen) > 1


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("packs", [1, 2, 4])
def test_positions_of_a_step(backward, packs):
    """ACROSS: the least multiple of W that is enough, up to W 16; ALONG a step is a tile."""
    for W in range(1, 33):
        options = {"W": W, "backward": backward}
        assert conv_plan(2, 640, 1000, **options)[1]["AHEAD"] == 1
        ahead = conv_plan(2, 640, 1000, ACROSS, packs, **options)[1]["AHEAD"]
        enough = 4 if backward and W <= 16 else 8
        assert ahead == (enough if W > 16 else min(n for n in range(W, 33, W) if n >= enough))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("across", [ALONG, ACROSS])
@pytest.mark.parametrize("limits", [IDLE, H200])
@pytest.mark.parametrize("B, D, L", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0, 0), (0, 3, 10**6)])
def test_plan_of_an_empty_convolution(B, D, L, across, limits, backward):
    how, macros = conv_plan(B, D, L, across=across, backward=backward, limits=limits)
    assert how.parts >= 1 and how.length > 0
    assert how.parts == 1 or L > 5
    assert (how.grid > 0) == (B * D > 0)
    assert macros["LANES"] in (1, 2, 4, 8, 16, 32)


def update_plan(B, D, S=3, W=4, silu=True, channels=1, weights=1, columns=1):
    """The plan, and its macros by name."""
    dtypes = ("float16", "float32", "float32", "bfloat16", "int64", "int32")
    sizes = B, D, 1, W, 9, S
    plan = causal_conv1d_update.plan(
        causal_conv1d_update.Problem(*sizes, dtypes, silu, channels, weights, columns, 0)
    )
    return plan, dict(plan.macros)


@pytest.mark.parametrize("D, blocks", [(1, 1), (127, 1), (128, 1), (129, 2), (1000, 8)])
@pytest.mark.parametrize("B", [0, 1, 7])
def test_plan_of_an_update(B, D, blocks):
    """One thread a channel of a row, where these are few."""
    plan, macros = update_plan(B, D, channels=math.gcd(D, 8))
    assert (plan.grid, plan.block) == (B * blocks, 128)
    assert macros["REAL"] == "float" and macros["WIDTH"] == 4 and macros["PACK"] == 1
    assert (macros["SEQLENS_T"], macros["INDEX_T"]) == ("long long", "int")
    for silu in (False, True):
        assert update_plan(B, D, silu=silu)[1]["SILU"] == int(silu)


@pytest.mark.parametrize("channels", [1, 2, 4, 8])
def test_a_thread_has_several_channels_where_rows_are_many(channels):
    """Threads enough are left then, and their states do not lie too far apart."""
    module, D = causal_conv1d_update, 1000

    def fits(pack, B, S):
        bytes_of_states = pack * S * 2
        at_once = channels % pack == 0 and pack <= module.MOST_CHANNELS
        enough = B * D >= module.THREADS_TO_FILL * pack
        return at_once and enough and bytes_of_states <= module.MOST_BYTES

    for B, S in product((*range(1, 10 * module.THREADS_TO_FILL // D, 7), 10**6), range(3, 33)):
        plan, macros = update_plan(B, D, S, channels=channels)
        pack = macros["PACK"]
        assert pack == max(n for n in (1, 2, 4, 8) if n == 1 or fits(n, B, S))
        assert plan.grid == B * -(-D // (128 * pack))


@pytest.mark.parametrize("S", [0, 1, 2, 3, 4, 7, 8, 9, 16, 1000])
def test_columns_of_a_state_are_in_registers_where_they_are_few(S):
    for columns, channels in product((1, 2, 4, 8), (1, 2, 4)):
        many = causal_conv1d_update.THREADS_TO_FILL
        macros = update_plan(many, 64, S, W=1, channels=channels, columns=columns)[1]
        in_registers = S if S <= causal_conv1d_update.MOST_COLUMNS else 0
        assert macros["COLUMNS"] == in_registers
        of_thread = in_registers * macros["PACK"]
        most = max(n for n in (1, 2, 4, 8) if columns % n == of_thread % n == 0)
        assert macros["COLUMNS_AT_ONCE"] == (most if in_registers else 1)


@pytest.mark.parametrize("W", [1, 2, 3, 4, 6, 32])
def test_weights_that_an_update_reads_at_once(W):
    for weights, channels in product((1, 2, 4, 8), (1, 2, 4)):
        many = causal_conv1d_update.THREADS_TO_FILL
        macros = update_plan(many, 64, W, W, channels=channels, weights=weights)[1]
        of_thread = W * macros["PACK"]
        most = max(n for n in (1, 2, 4, 8) if weights % n == of_thread % n == 0)
        assert macros["WEIGHTS_AT_ONCE"] == most


def test_plans_are_cached():
    assert dtw_plan(3, 40)[0] is dtw_plan(3, 40)[0]
    assert conv_plan(3, 4, 5)[0] is conv_plan(3, 4, 5)[0]


def test_a_new_length_compiles_nothing_new():
    """Sizes are no macros, but for a count of warps or lanes, and of steps at a time."""
    plans = [dtw_plan(9, N, M)[0] for N, M in zip(LENGTHS, reversed(LENGTHS), strict=True)]
    assert len({how.series for how in plans}) == 1
    assert len({how.backward_sweep for how in plans}) <= 10  # by lanes, stripes, rows, helpers
    longer = [dtw_plan(9, N, N)[0] for N in range(8000, 9000, 7)]
    assert len({how.backward_sweep for how in longer}) == 1
    for D, across, backward in product((40, 5000), (ALONG, ACROSS), (False, True)):
        macros = [conv_plan(2, D, L, across, backward=backward)[0].macros for L in range(1, 9000)]
        shapes = {(dict(x)["LANES"], dict(x)["STAGES"]) for x in macros}
        assert len(set(macros)) == len(shapes) <= 9
        assert len(set(macros[2048:])) == 1


def test_a_grid_fits_what_cuda_can_launch():
    """Even where each channel of each batch item is one short row."""
    assert dtw_plan(10**6, 50_000)[0].grid <= kernels.MOST_BLOCKS
    ways = {}, {"packs": APART}, {"packs": FLUSH}, {"W": 32}
    ways += {"across": ACROSS}, {"across": ACROSS, "packs": 4}
    for options in ways:
        for backward in (False, True):
            for sizes in (70_000, 70_000, 1), (2000, 2000, 1000), (1, 32, 2**36):
                how, macros = conv_plan(*sizes, backward=backward, **options)
                assert how.grid <= kernels.MOST_BLOCKS
                assert how.grid * macros["WARPS"] <= 2**32  # of which ALONG is the number of a warp
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


def views(n, dtype="float32"):
    """Arrays (2, 4, n) that lie in memory in many ways."""
    for offset, gap in product((0, 1, 2, 4, 8), repeat=2):
        yield aligned(2, 4, offset + n + gap, dtype=dtype)[..., offset : offset + n]
    for gap in (1, 2, 4, 8):  # behind each batch item
        yield aligned(2, 4 * n + gap, dtype=dtype)[:, : 4 * n].reshape(2, 4, n)
    wide = aligned(2, 4, 2 * n, dtype=dtype)
    yield wide[..., ::2]
    yield wide[..., n:0:-1]
    yield wide[::-1, ::-1, :n]
    yield aligned(2, n, 4, dtype=dtype).transpose(0, 2, 1)
    yield aligned(n, 4, 2, dtype=dtype).T
    for x in wide[:1, :, :n], wide[:, :1, :n], wide[:1, :1, :n], wide[..., :1], wide[:1, :1, 1:2]:
        yield np.broadcast_to(x, (2, 4, n))
    yield np.broadcast_to(aligned(2, 4, n + 1, dtype=dtype)[:, :1, 1:], (2, 4, n))


def parts(x):
    """With one batch item, row or column, or more."""
    for b, d, k in product((1, 2), (1, 3, 4), (1, x.shape[2])):
        yield x[:b, :d, :k]


def addresses(array):
    """Of the elements of a borrowed array, counted in elements."""
    index = np.indices(array.shape)
    steps = np.array(array.strides).reshape(-1, *[1] * len(array.shape))
    return array.pointer // convolution_plan.SIZES[array.dtype] + (index * steps).sum(axis=0)


def at_once_by_hand(array, axes):
    """How many elements of the last axes, taken as one, are neighbours in an aligned place."""
    places = addresses(array).reshape(-1, math.prod(array.shape[-axes:]))
    best = 1
    for n in (2, 4, 8):
        if n <= PACKS[array.dtype] and places.shape[1] % n == 0:
            packs = places.reshape(-1, n)
            if (packs == packs[:, :1] + np.arange(n)).all() and not (packs[:, 0] % n).any():
                best = n
    return best


@pytest.mark.parametrize("dtype", PACKS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8, 12, 16])
def test_elements_that_lie_in_one_aligned_place(dtype, n):
    """By offset, length and steps between rows; axes of one have no steps, and 0 is one too."""
    seen = set()
    for view in views(n, dtype):
        for part in parts(view):
            array = arrays.borrow("x", part, "")
            of_rows = convolution_plan.at_once(array), convolution_plan.rows_at_once(array)
            assert of_rows == (at_once_by_hand(array, 1), at_once_by_hand(array, 2))
            flat = arrays.borrow("x", part[0], "")
            of_rows = convolution_plan.at_once(flat), convolution_plan.rows_at_once(flat)
            assert of_rows == (at_once_by_hand(flat, 1), at_once_by_hand(flat, 2))
            seen.add(of_rows[0])
    assert seen == {k for k in (1, 2, 4, 8) if n % k == 0 and k <= PACKS[dtype]}


def test_elements_of_nothing_lie_anywhere():
    for shape in (0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0):
        array = arrays.borrow("x", np.zeros(shape, np.float32), "")
        assert convolution_plan.at_once(array) in (1, 2, 4)
        assert convolution_plan.rows_at_once(array) in (1, 2, 4)
        assert convolution_plan.packs_along((array, array)) in (APART, ALIGNED, FLUSH)


def packs_by_hand(tensors):
    """APART, SHIFTED, ALIGNED or FLUSH, by the address of every row."""
    if any(array.shape[-1] > 1 and array.strides[-1] != 1 for array in tensors):
        return APART
    first, *others = (addresses(array)[..., 0] % PACKS[array.dtype] for array in tensors)
    if any((rows != first).any() for rows in others):
        return SHIFTED
    return ALIGNED if first.any() else FLUSH


@pytest.mark.parametrize("dtype, n", [("float64", 6), ("float32", 8), ("bfloat16", 12)])
def test_rows_that_are_aligned_alike(dtype, n):
    """As many elements behind an aligned place in each tensor, if not the same in each row."""
    seen = []
    for x, y in product(list(views(n, dtype)), repeat=2):
        pairs = list(zip(parts(x), parts(y), strict=True))[:: 1 if y is x else 7]
        for pair in pairs:
            tensors = [arrays.borrow("x", part, "") for part in pair]
            seen.append(convolution_plan.packs_along(tensors))
            assert seen[-1] == packs_by_hand(tensors)
    assert {APART, SHIFTED, ALIGNED, FLUSH} == set(seen)


def test_rows_along_of_some_tensors():
    def packs(*tensors):
        return convolution_plan.packs_along([arrays.borrow("x", x, "") for x in tensors])

    x = aligned(2, 3, 8)
    wide, odd = aligned(2, 3, 20), aligned(2, 3, 17)
    for y in x, wide[..., :8], wide[..., 4:12], wide[..., :8][:, ::-1]:
        assert packs(x, y) == packs(y, x) == packs(y) == FLUSH
        assert packs(x[..., :5], y[..., :5]) == FLUSH  # wherever rows end
    for y in wide[..., 1:9], wide[..., 2:10], odd[..., :8], odd[..., 4:12]:
        assert packs(x, y) == packs(y, x) == SHIFTED
        assert packs(y) == packs(y, y) == ALIGNED
    for y in aligned(2, 3, 16)[..., ::2], x[..., ::-1], aligned(2, 8, 3).transpose(0, 2, 1):
        assert packs(x, y) == packs(y, x) == packs(y) == APART
    # With a common offset, and with rows that steps apart alike modulo a pack
    assert packs(wide[..., 1:9], wide[..., 5:13]) == ALIGNED
    assert packs(odd[..., :8], aligned(2, 3, 21)[..., 8:16]) == ALIGNED
    even = aligned(2, 52)[:, :51].reshape(2, 3, 17)  # but for its rows, which are 17 apart too
    assert packs(odd[..., :8], even[..., :8]) == SHIFTED
    assert packs(odd[:1, :, :8], even[1:, :, :8]) == ALIGNED
    assert packs(odd[:1, :1, :8], x[:1, :1]) == packs(even[:, :1, :8], x[:, :1]) == FLUSH
    # Rows of one element have no stride
    assert packs(x[..., :1], aligned(2, 3, 16)[..., ::8][..., :1]) == FLUSH
    assert packs(x[..., :1], aligned(2, 8, 3).transpose(0, 2, 1)[..., :1]) == SHIFTED
    assert packs(x, wide[..., :8], odd[..., :8]) == SHIFTED
    assert packs(x, odd[..., :8], wide[..., :16:2]) == APART


def problem_of(x, layout, *others, weight=None, final_state=None, **options):
    """As of a forward; `others` have x's axes and are accessed as x is."""
    channels = x.shape[1 if layout == "bdl" else 2]
    weight = np.zeros((channels, 3), np.float32) if weight is None else weight
    options = dict.fromkeys(("bias", "activation", "seq_idx", "initial_state")) | options
    arguments = [options[name] for name in ("bias", "activation")]
    more = [options[name] for name in ("seq_idx", "initial_state")]
    call = causal_conv1d.borrow("causal_conv1d", x, weight, *arguments, layout, *more)
    seen = [as_bdl(arrays.borrow("other", other, ""), layout) for other in others]
    return call.problem(*seen, final_state=final_state)


def test_what_a_call_has():
    x, state = aligned(2, 5, 7), np.zeros((2, 5, 2), np.float32)
    for activation, initial_state, final_state in product(
        (None, "silu", "swish"), (None, state), (None, state)
    ):
        problem = problem_of(
            x, "bdl", activation=activation, initial_state=initial_state, final_state=final_state
        )
        assert (problem.B, problem.D, problem.L, problem.W) == (2, 5, 7, 3)
        assert problem.silu == (activation is not None)
        assert problem.initial_state == (initial_state is not None)
        assert problem.final_state == (final_state is not None)


def test_the_closest_axis_follows_the_strides():
    """Whatever the layout is called: the axis with the smaller stride is the closest."""
    bdl, bld = aligned(2, 5, 7), aligned(2, 7, 5)
    assert not problem_of(bdl, "bdl").across
    assert problem_of(bld, "bld").across
    assert problem_of(bld.transpose(0, 2, 1), "bdl").across
    assert not problem_of(bdl.transpose(0, 2, 1), "bld").across
    assert not problem_of(bdl[..., ::-1], "bdl").across
    assert problem_of(bld[..., ::-1], "bld").across


def test_channels_that_are_the_same_do_not_lie_closest():
    """A step of 0 from one to another is not a small one: results do not lie so."""
    bdl, bld = aligned(2, 5, 8), aligned(2, 8, 5)
    for x, layout, packs in [
        (np.broadcast_to(bdl[:, :1], bdl.shape), "bdl", FLUSH),
        (np.broadcast_to(bld[..., :1], bld.shape), "bld", APART),
        (np.broadcast_to(bld[..., :1], bld.shape).transpose(0, 2, 1), "bdl", APART),
        (np.broadcast_to(bdl[..., :1], bdl.shape), "bdl", APART),  # positions are the same
        (np.broadcast_to(bdl[:1, :1, :1], bdl.shape), "bdl", APART),
    ]:
        y = bdl if layout == "bdl" else bdl.transpose(0, 2, 1)
        problem = problem_of(x, layout, y)
        assert not problem.across and problem.packs == packs


def test_positions_are_neighbours_in_every_tensor_or_read_one_by_one():
    bdl, bld = aligned(2, 5, 7), aligned(2, 7, 5)
    for x, layout, beside in [
        (bdl, "bdl", ALIGNED),
        (aligned(2, 10, 7)[:, ::2], "bdl", SHIFTED),
        (aligned(2, 5, 8)[..., 1:], "bdl", SHIFTED),
        (aligned(2, 5, 11)[..., 4:], "bdl", ALIGNED),
        (bdl.transpose(0, 2, 1), "bld", ALIGNED),
    ]:
        y = bdl if layout == "bdl" else bdl.transpose(0, 2, 1)
        assert problem_of(x, layout, x).packs == ALIGNED
        assert problem_of(x, layout, y, x).packs == beside
    flush = aligned(2, 5, 8)[..., :7]
    assert problem_of(flush, "bdl", flush).packs == FLUSH
    assert problem_of(flush, "bdl", bdl).packs == problem_of(bdl, "bdl", flush).packs == SHIFTED
    for x in bdl[..., ::2], bdl[..., ::-1], np.broadcast_to(bdl[..., :1], bdl.shape):
        assert problem_of(x, "bdl").packs == APART
    assert problem_of(bdl, "bdl", bdl, bld.transpose(0, 2, 1)).packs == APART
    assert problem_of(bdl, "bdl", bdl[..., ::-1]).packs == APART


@pytest.mark.parametrize("dtype", PACKS)
def test_channels_that_are_read_at_once(dtype):
    """As many as 16 bytes have, if they divide D and all that steps from one to another."""
    most = PACKS[dtype]
    for D, packs in [(8, 8), (16, 8), (2, 2), (4, 4), (12, 4), (6, 2), (7, 1), (24, 8)]:
        x = aligned(2, 7, D, dtype=dtype)
        for view, layout in (x, "bld"), (x.transpose(0, 2, 1), "bdl"):
            problem = problem_of(view, layout, view)
            assert problem.across and problem.packs == min(most, packs)
    for offset, packs in [(0, 8), (1, 1), (2, 2), (3, 1), (4, 4), (8, 8)]:
        x = aligned(2, 7, 16, dtype=dtype)[..., offset : offset + 8]
        assert problem_of(x, "bld").packs == min(most, packs)
    for row, packs in [(9, 1), (10, 2), (12, 4), (16, 8)]:
        x = aligned(2, 8, row, dtype=dtype)[..., :8]
        assert problem_of(x, "bld").packs == min(most, packs)
    for row, packs in [(57, 1), (58, 2), (60, 4)]:  # of a batch item
        x = aligned(2, row, dtype=dtype)[:, :56].reshape(2, 7, 8)
        assert problem_of(x, "bld").packs == min(most, packs)
        assert problem_of(x[:1], "bld").packs == most


def test_channels_of_views():
    x = aligned(2, 7, 16)
    for view, packs in [
        (x[..., ::2], 1),
        (x[..., ::-1], 1),
        (x[:, ::-1], 4),
        (x[::-1, ::3], 4),
        (np.broadcast_to(x[:1], x.shape), 4),
        (x[:, :1, 4:12], 4),
        (aligned(1, 1, 9)[..., :8], 4),  # with no step from one to another
    ]:
        problem = problem_of(view, "bld")
        assert problem.across and problem.packs == packs
    others = [(x, 4), (aligned(2, 7, 18)[..., :16], 2), (aligned(2, 7, 17)[..., 1:], 1)]
    for other, packs in others:
        assert problem_of(x, "bld", x, other).packs == packs
    assert problem_of(x, "bld", aligned(2, 16, 7).transpose(0, 2, 1)).packs == 1


def test_weights_of_a_call():
    """Those of all filters together where they are contiguous, else of one filter."""
    for D, W, weights in [(8, 4, 4), (8, 3, 4), (8, 1, 4), (6, 3, 2), (5, 3, 1), (1, 6, 2)]:
        x, flat = aligned(2, D, 7), aligned(D, W)
        for weight in flat, flat[:, None]:
            assert problem_of(x, "bdl", weight=weight).weights == weights
        assert problem_of(x, "bdl", weight=aligned(D * W + 1)[1:].reshape(D, W)).weights == 1
        assert problem_of(x, "bdl", weight=aligned(D, 2 * W)[:, ::2]).weights == 1
        for weight in (
            aligned(D, W + 1)[:, 1:],
            aligned(D, 2 * W)[:, W - 1 :: -1],
            np.broadcast_to(flat[:, :1], (D, W)),
            aligned(W, D).T,
        ):
            assert 1 in (D, W) or problem_of(x, "bdl", weight=weight).weights == 1
    x = aligned(2, 8, 7)
    for weight, weights in [
        (aligned(8, 12)[:, :4], 4),  # rows apart
        (aligned(8, 12)[:, :6], 2),
        (aligned(16, 4)[::2], 4),
        (aligned(8, 4)[::-1], 4),
        (aligned(8, 8)[:, 2:6], 2),
        (aligned(34)[2:].reshape(8, 4), 2),
        (np.broadcast_to(aligned(1, 4), (8, 4)), 4),
        (aligned(8, 4, dtype="bfloat16"), 8),
        (aligned(8, 8, dtype="bfloat16")[:, :4], 4),
        (aligned(8, 3, dtype="float64"), 2),
    ]:
        assert problem_of(x, "bdl", weight=weight).weights == weights


@pytest.mark.parametrize("strides", ["rows", "columns"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_packed_sequences_are_taken_across(strides, index):
    """Wherever x lies."""
    x = aligned(9, 8) if strides == "rows" else aligned(8, 9).T
    ends, weight = np.array([0, 4, 9], index), np.zeros((8, 3), np.float32)
    call = causal_conv1d_varlen.borrow("", x, weight, None, ends, None, None)
    problem = call.problem(final_state=None)
    assert (problem.B, problem.D, problem.L, problem.sequences) == (1, 8, 9, PACKED)
    assert (problem.across, problem.packs) == (True, 4 if strides == "rows" else 1)
    assert problem.index_dtype == index


@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_sequences_by_index_are_taken_as_x_lies(layout, index):
    x, seq_idx = aligned(2, 8, 8), np.zeros((2, 8), index)
    problem = problem_of(x, layout, seq_idx=seq_idx)
    assert (problem.across, problem.sequences) == (layout == "bld", INDEXED)
    assert problem.index_dtype == index
