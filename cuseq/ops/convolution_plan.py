"""The plan of a causal convolution: how kernels run a problem, by it and the device alone."""

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from cuseq.runtime.kernels import C_TYPES

WARP = 32
WARPS = 4  # of a block
PACK_BYTES = 16  # that a lane reads at once
MOST_CHANNELS = 4  # of a lane, ACROSS
NUMBERS_FORWARD, NUMBERS_BACKWARD = 32, 16  # of 4 bytes: weights of all channels of a lane, ACROSS
WARPS_FORWARD, WARPS_BACKWARD = 256, 128  # a multiprocessor, ALONG, if there is work for so many
TILES = 4  # of a segment, at least, ALONG
# Positions that a lane walks over, ACROSS: many, since each walk has something to do first; few
# where bytes are the limit, so that what the device reads at a time lies close in memory.
SHORT_RUN, LONG_RUN = 16, 256
# Blocks of threads that a multiprocessor's registers have to suffice for, by across and backward:
# for few weights and no more to know of a position, for up to 8 weights, for more.
RESIDENT = {
    (False, False): (10, 8, 4),
    (False, True): (7, 4, 2),
    (True, False): (4, 4, 4),
    (True, True): (4, 3, 2),
}
LONGEST_SEGMENT = 2**29  # positions, ALONG: counted in 32 bits

WHOLE, INDEXED, PACKED = range(3)  # SEQUENCES of the kernels
APART, SHIFTED, ALIGNED = range(3)  # PACKS of the kernels
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
    return ALIGNED if len(offsets) == 1 else SHIFTED


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
    packs: int  # ACROSS: channels that can be read at once; ALONG: APART, SHIFTED or ALIGNED
    weights: int  # of all channels together, that can be read at once
    device: int

    @property
    def real(self):
        """The dtype that is computed in."""
        return "float64" if "float64" in self.dtypes else "float32"


class Plan(NamedTuple):
    """How the kernels run a problem."""

    macros: tuple
    grid: int
    block: int
    length: int  # of a segment (ALONG) or of a lane's run (ACROSS)
    parts: int  # segments of a row, or blocks of runs


@lru_cache(maxsize=1024)
def plan(problem, limits, backward=False):
    """The plan of a problem on a device with these limits.

    A warp reads along whichever axis lies closest in memory. The length is cut where that is needed
    to fill the device: ACROSS so that blocks, each of a few walks, fill it a whole number of times.
    """
    B, D, L, W, dtypes, *_ = problem
    across, packs, real = problem.across, problem.packs, problem.real
    demand = _demand(problem)
    resident = RESIDENT[across, backward][demand]
    if across:
        numbers = (NUMBERS_BACKWARD if backward else NUMBERS_FORWARD) * 4 // SIZES[real]
        pack = min(packs, MOST_CHANNELS, _power_of_2_below(max(numbers // W, 1)))
        lanes = _power_of_2_above(min(WARP, -(-D // pack)))
        columns, groups = B * -(-D // (pack * lanes)), WARPS * WARP // lanes
        room = max(limits.multiprocessors * resident, 1)  # blocks at a time
        run = LONG_RUN if backward or SIZES[dtypes[0]] == 2 else SHORT_RUN
        waves = -(-L * columns // (run * groups * room))
        parts = max(waves * room // max(columns, 1), 1)
        length = max(-(-L // (parts * groups * 4)) * 4, SHORT_RUN)
        parts = max(-(-L // (length * groups)), 1)
        batch, grid = 1, columns * parts
    else:
        pack = PACK_BYTES // SIZES[dtypes[0]]
        lanes = _power_of_2_above(min(WARP, max(-(-L // pack), -(-(W - 1) // pack), 1)))
        tile, rows = lanes * pack, -(-B * D * lanes // WARP)
        tiles = max(1, -(-(L + pack - 1) // tile))  # the first pack may begin before the row
        warps = limits.multiprocessors * (WARPS_BACKWARD if backward else WARPS_FORWARD)
        segments = max(1, min(tiles // TILES, warps // max(rows, 1)), -(-L // LONGEST_SEGMENT))
        length = tile * -(-tiles // segments)
        parts = -(-tiles * tile // length)
        batch = _power_of_2_below(min(tiles + backward, 2 if backward or demand else 4))
        grid = -(-rows * parts // WARPS)
    types = zip(("X_T", "WEIGHT_T", "BIAS_T", "STATE_T"), dtypes, strict=True)
    macros = (
        *((name, C_TYPES[dtype]) for name, dtype in types),
        ("REAL", C_TYPES[real]),
        ("WIDTH", W),
        ("SILU", int(problem.silu)),
        ("INITIAL_STATE", int(problem.initial_state)),
        ("FINAL_STATE", int(problem.final_state)),
        ("ACROSS", int(across)),
        ("PACK", pack),
        ("LANES", lanes),
        ("WARPS", WARPS),
        ("RESIDENT", resident),
        ("BATCH", batch),
        ("PACKS", ALIGNED if across else packs),
        ("WEIGHTS_AT_ONCE", gcd(problem.weights, W * pack if across else W)),
        ("SEQUENCES", problem.sequences),
        ("INDEX_T", C_TYPES[problem.index_dtype]),
    )
    return Plan(macros, grid, WARP * WARPS, length, parts)


def _demand(problem):
    """How many registers a thread wants: 0, 1 or 2, as in RESIDENT."""
    if problem.real == "float64" or problem.W > 8:
        return 2
    small = SIZES[problem.dtypes[0]] == 2 if problem.across else problem.packs == ALIGNED
    return 0 if small and problem.W <= 4 and problem.sequences == WHOLE else 1


def _power_of_2_above(n):
    """The least power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


def _power_of_2_below(n):
    """The greatest power of 2 that is n or less."""
    return 1 << (n.bit_length() - 1)
