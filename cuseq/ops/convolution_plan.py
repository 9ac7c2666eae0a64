"""The plan of a causal convolution: how kernels run a problem, by it and the device alone."""

from functools import lru_cache
from typing import NamedTuple

from cuseq.runtime.kernels import C_TYPES

WARP = 32
WARPS = 4  # of a block
PACK_BYTES = 16  # that a lane reads at once
NUMBERS_FORWARD, NUMBERS_BACKWARD = 32, 16  # weights of a pack of channels in registers, ACROSS
WARPS_TO_FILL = 32  # a multiprocessor, as far as there is work for so many
SHORTEST_RUN, LONGEST_RUN = 16, 128  # positions that a lane walks over, ACROSS
TILES = 4  # of a segment, at least, ALONG

WHOLE, INDEXED, PACKED = range(3)  # SEQUENCES of the kernels
SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element


class Problem(NamedTuple):
    """A call in host numbers: x (B, D, L), filters of width W."""

    B: int
    D: int
    L: int
    W: int
    dtypes: tuple  # of x, weight, bias, state
    sequences: int
    index_dtype: str
    across: bool  # channels lie closer in memory than positions
    pack: int  # ACROSS: channels that can be read at once; ALONG: 0 where positions are apart
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
    to fill the device.
    """
    B, D, L, W, dtypes, sequences, index_dtype, across, pack, _ = problem
    warps = limits.multiprocessors * WARPS_TO_FILL
    if across:
        adjacent = True
        numbers = NUMBERS_BACKWARD if backward else NUMBERS_FORWARD
        numbers = numbers // 2 if problem.real == "float64" else numbers
        pack = min(pack, _power_of_2_below(max(numbers // W, 1)))
        lanes = _power_of_2_above(min(WARP, -(-D // pack)))
        tiles, groups = -(-D // (pack * lanes)), WARPS * WARP // lanes
        run = L * B * tiles * lanes // max(warps * WARP, 1)
        length = max(SHORTEST_RUN, min(run, LONGEST_RUN)) // 4 * 4
        parts = max(1, -(-L // (length * groups)))
        grid = B * tiles * parts
    else:
        adjacent, pack = pack > 0, PACK_BYTES // SIZES[dtypes[0]]
        lanes = _power_of_2_above(min(WARP, max(-(-L // pack), -(-(W - 1) // pack), 1)))
        tile, rows = lanes * pack, -(-B * D * lanes // WARP)
        tiles = max(1, -(-(L + pack - 1) // tile))  # the first pack may begin before the row
        segments = max(1, min(tiles // TILES, warps // max(rows, 1)))
        length = tile * -(-tiles // segments)
        parts = -(-tiles * tile // length)
        grid = -(-rows * parts // WARPS)
    types = zip(("X_T", "WEIGHT_T", "BIAS_T", "STATE_T"), dtypes, strict=True)
    macros = (
        *((name, C_TYPES[dtype]) for name, dtype in types),
        ("REAL", C_TYPES[problem.real]),
        ("WIDTH", W),
        ("ACROSS", int(across)),
        ("PACK", pack),
        ("LANES", lanes),
        ("WARPS", WARPS),
        ("ADJACENT", int(adjacent)),
        ("SEQUENCES", sequences),
        ("INDEX_T", C_TYPES[index_dtype]),
    )
    return Plan(macros, grid, WARP * WARPS, length, parts)


def _power_of_2_above(n):
    """The least power of 2 that is n or more."""
    return 1 << (n - 1).bit_length()


def _power_of_2_below(n):
    """The greatest power of 2 that is n or less."""
    return 1 << (n.bit_length() - 1)
