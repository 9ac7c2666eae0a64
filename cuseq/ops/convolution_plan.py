"""The plan of a causal convolution: how kernels run a problem, by it and the device alone."""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from cuseq.runtime.kernels import C_TYPES

WARP = 32
WARPS = 4  # of a block
THREADS = WARP * WARPS
PACK_BYTES = 16  # that a lane reads at once
MOST_CHANNELS = 4  # of a lane, ACROSS
NUMBERS_FORWARD, NUMBERS_BACKWARD = 32, 16  # of 4 bytes: weights of all channels of a lane, ACROSS
WARPS_FORWARD, WARPS_BACKWARD = 256, 128  # a multiprocessor, ALONG, if there is work for so many
TILES = 4  # of a segment, at least, ALONG
# Positions that a lane walks over, ACROSS, by backward: few, so that what the device reads at a
# time lies close in memory; of elements of 2 bytes and with many weights more, since each walk has
# something to do first, and computing takes longer than reading.
SHORT_RUN, RUN, LONG_RUN = (16, 128), (32, 128), (256, 512)
STAGES = 8  # steps on their way to shared memory at a time, at most
# Bytes of shared memory for them, of a block, if there are more than one: by across and backward.
ROOM = {(False, False): 12288, (False, True): 24576, (True, False): 32768, (True, True): 32768}
# Blocks of threads that a multiprocessor's registers have to suffice for, by across and backward:
# for few weights and no more to know of a position, for up to 8 weights, for more.
RESIDENT = {
    (False, False): (11, 10, 4),
    (False, True): (7, 4, 2),
    (True, False): (4, 4, 3),
    (True, True): (4, 3, 2),
}
LONGEST_SEGMENT = 2**29  # positions, ALONG: counted in 32 bits

WHOLE, INDEXED, PACKED = range(3)  # SEQUENCES of the kernels
APART, SHIFTED, ALIGNED, FLUSH = range(4)  # PACKS of the kernels, where FLUSH is ALIGNED
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element


def at_once(array):
    """How many neighbouring elements of an array's last axis lie in one aligned place."""
    n = array.shape[-1]
    if n > 1 and array.strides[-1] != 1:
        return 1
    return gcd(PACK_BYTES // SIZES[array.dtype], n, *_row_places(array))


def rows_at_once(array):
    """As `at_once`, across rows of the last axis where they lie next to each other."""
    *outer, rows, n = array.shape
    *steps, row, _ = array.strides
    if rows > 1 and n > 0 and row == n and (n == 1 or array.strides[-1] == 1):
        return at_once(array._replace(shape=(*outer, rows * n), strides=(*steps, 1)))
    return at_once(array)


def packs_along(tensors):
    """How the rows (along the last axis) of arrays of one shape and dtype lie: PACKS."""
    pack = PACK_BYTES // SIZES[tensors[0].dtype]
    if any(array.shape[-1] > 1 and array.strides[-1] != 1 for array in tensors):
        return APART
    offsets = {tuple(place % pack for place in _row_places(array)) for array in tensors}
    if len(offsets) > 1:
        return SHIFTED
    return ALIGNED if any(offsets.pop()) else FLUSH  # FLUSH: each row begins with a pack


def _row_places(array):
    """Where rows (along the last axis) begin: the first one's element, and strides to others."""
    outer = zip(array.shape[:-1], array.strides, strict=False)
    return array.pointer // SIZES[array.dtype], *(stride for n, stride in outer if n > 1)


class Problem(NamedTuple):
    """A call in host numbers: x (B, D, L), filters of width W."""

    B: int
    D: int
    L: int
    W: int
    dtypes: tuple  # of x, weight, bias, state
    sequences: int
    index_dtype: str
    silu: bool
    initial_state: bool
    final_state: bool  # or its gradient
    across: bool  # channels lie closer in memory than positions
    packs: int  # ACROSS: channels that can be read at once; ALONG: APART, SHIFTED, ALIGNED or FLUSH
    weights: int  # of all channels together, that can be read at once
    device: int

    @property
    def real(self):
        """The dtype that is computed in."""
        return "float64" if "float64" in self.dtypes else "float32"


class Plan(NamedTuple):
    """How the kernels run a problem."""

    macros: tuple
    of_partials: tuple  # macros of the kernel that adds partial sums of gradients
    grid: int
    block: int
    length: int  # of a segment (ALONG) or of a lane's run (ACROSS)
    parts: int  # segments of a row, or blocks of runs


@lru_cache(maxsize=1024)
def plan(problem, limits, backward=False):
    """The plan of a problem on a device with these limits.

    A warp reads along whichever axis lies closest in memory. The length is cut where that is needed
    to fill the device.
    """
    W, dtypes, across = problem.W, problem.dtypes, problem.across
    resident = RESIDENT[across, backward][_demand(problem)]
    share = _share_across if across else _share_along
    grid, length, parts, shape = share(problem, limits, resident, backward)
    x, weight, bias, state = (C_TYPES[dtype] for dtype in dtypes)
    of_partials = (
        ("WEIGHT_T", weight),
        ("BIAS_T", bias),
        ("REAL", C_TYPES[problem.real]),
        ("WIDTH", W),
    )
    macros = (
        ("X_T", x),
        ("STATE_T", state),
        *of_partials,
        ("SILU", int(problem.silu)),
        ("INITIAL_STATE", int(problem.initial_state)),
        ("FINAL_STATE", int(problem.final_state)),
        ("ACROSS", int(across)),
        *shape.items(),
        ("WARPS", WARPS),
        ("RESIDENT", resident),
        ("PACKS", ALIGNED if across else min(problem.packs, ALIGNED)),
        ("WEIGHTS_AT_ONCE", gcd(problem.weights, W * shape["PACK"] if across else W)),
        ("SEQUENCES", problem.sequences),
        ("INDEX_T", C_TYPES[problem.index_dtype]),
    )
    return Plan(macros, of_partials, grid, THREADS, length, parts)


def _share_along(problem, limits, resident, backward):
    """Grid, positions of a segment, segments of a row, and macros."""
    B, D, L, W, (dtype, *_), *_ = problem
    pack = PACK_BYTES // SIZES[dtype]
    lanes = _power_of_2_above(min(WARP, max(-(-L // pack), -(-(W - 1) // pack), 1)))
    tile, rows = lanes * pack, -(-B * D * lanes // WARP)
    before = 0 if problem.packs == FLUSH else pack - 1  # the first pack may begin before the row
    tiles = max(-(-(L + before) // tile), 1)
    warps = limits.multiprocessors * (WARPS_BACKWARD if backward else WARPS_FORWARD)
    segments = max(1, min(tiles // TILES, warps // max(rows, 1)), -(-L // LONGEST_SEGMENT))
    length = tile * -(-tiles // segments)
    parts = -(-tiles * tile // length)
    wholes = 2 if problem.packs == SHIFTED else 1  # in which a pack lies
    step = THREADS * PACK_BYTES * (-(-(W - 1) // pack) + wholes * (1 + backward))
    room = min(ROOM[False, backward], limits.shared // resident)
    if backward and SIZES[dtype] > 2:
        room *= 2  # fewer blocks at a time, of which what is read lies closer in memory
    stages = _stages(length // tile, room // step)
    shape = {"PACK": pack, "LANES": lanes, "STAGES": stages, "AHEAD": 1}
    return -(-rows * parts // WARPS), length, parts, shape


def _share_across(problem, limits, resident, backward):
    """Grid, positions of a run, blocks of runs, and macros. Blocks fill the device whole times."""
    B, D, L, W, (dtype, *_), *_ = problem
    size = SIZES[dtype]
    numbers = (NUMBERS_BACKWARD if backward else NUMBERS_FORWARD) * 4 // SIZES[problem.real]
    least = max(4 // size, 1)  # what is copied on the side has 4 bytes
    if backward and W > 16:
        least = 1  # there are no registers for more
    pack = min(problem.packs, MOST_CHANNELS, _power_of_2_below(max(numbers // W, least)))
    lanes = _power_of_2_above(min(WARP, -(-D // pack)))
    columns, groups = B * -(-D // (pack * lanes)), THREADS // lanes
    blocks = max(limits.multiprocessors * resident, 1)  # at a time
    run = (LONG_RUN if W > 4 else RUN if size == 2 else SHORT_RUN)[backward]
    waves = -(-L * columns // (run * groups * blocks))
    parts = max(waves * blocks // max(columns, 1), 1)
    length = max(-(-L // (parts * groups * 4)) * 4, SHORT_RUN[False])
    parts = max(-(-L // (length * groups)), 1)
    ahead = _positions_of_a_step(W, backward)
    step = THREADS * pack * size * ahead * (1 + backward)
    room = min(ROOM[True, backward], limits.shared // resident)
    stages = _stages(run // ahead, room // step)  # by no length that changes
    shape = {"PACK": pack, "LANES": lanes, "STAGES": stages, "AHEAD": ahead}
    return columns * parts, length, parts, shape


def _stages(steps, most):
    """How many steps are on their way to shared memory at a time, of so many steps."""
    return _power_of_2_below(max(min(steps // 2, most, STAGES), 1))


def _positions_of_a_step(W, backward):
    """ACROSS: up to W 16 a multiple, after which inputs are in the same registers again."""
    least = 4 if backward and W <= 16 else 8
    return least if W > 16 else max(-(-least // W) * W, W)


def _demand(problem):
    """How many registers a thread wants: 0, 1 or 2, as in RESIDENT."""
    if problem.real == "float64" or problem.W > 8:
        return 2
    small = SIZES[problem.dtypes[0]] == 2 if problem.across else problem.packs >= ALIGNED
    return 0 if small and problem.W <= 4 and problem.sequences == WHOLE else 1


def _power_of_2_above(n):
    """The least power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


def _power_of_2_below(n):
    """The greatest power of 2 that is n or less."""
    return 1 << (n.bit_length() - 1)
