"""The plan of a soft-DTW: how the kernels run a problem. A pure function of it and the device."""

from functools import lru_cache
from typing import NamedTuple

from cuseq.runtime.kernels import C_TYPES

FLAGS = 16  # bytes of them in the shared memory of a backward
COLUMNS = 4  # of the block of cells that a lane does in a step
WARP = TILE = 32
FEW_HELPERS, MANY_HELPERS = 3, 7  # warps beside the one that sweeps
FEATURES_FOR_MANY = 17
FEATURES_AT_A_TIME = 6  # whose sums of gradients a helper has in registers; in float64 half of them
FEATURES_HELD = 4  # so many and fewer are held in registers, and need no helpers
FEATURES_FOR_8_ROWS = 2  # of a lane, for which registers suffice in float32
WARPS_TO_FILL = 12  # a multiprocessor with sweeps
# So few sweeps a multiprocessor has that helpers hasten them; long series are chains of sweeps that
# wait for each other, which leaves more room.
WARPS_FOR_HELPERS, WARPS_OF_LONG, LONG = 2, 4, 256
SHARED = 26 * 1024  # bytes for a sweep without helpers, so that many run at a time
NUMBERS_WITH_FEW_HELPERS = 11 * 1024  # in shared memory; with many helpers it is all there is

VALUES, SERIES, ALIGNMENT, ENTROPY = range(4)  # what a call is for, as OUTPUT of the kernels
LAST_ROW, MATCHES = 4, 5  # values in all the columns of the last row, as ENDS of the kernels
GIVEN = "given"  # the cost of a call with a cost matrix
METRICS = {"sqeuclidean": 0, "euclidean": 1, "cityblock": 2, "cosine": 0, GIVEN: 3}


class Problem(NamedTuple):
    """A call in host numbers: B pairs of series of lengths N and M with D features."""

    B: int
    N: int
    M: int
    D: int
    batch_a: int
    batch_b: int
    dtype: str
    cost: str
    hard: bool  # gamma is 0 for some sample, as far as the host knows
    width: int  # columns of a row that are inside the band, less one, at most
    device: int

    @property
    def real(self):
        """The dtype that is computed in; the values have it."""
        return "float64" if self.dtype == "float64" else "float32"


class Plan(NamedTuple):
    """How the kernels run a problem."""

    forward_sweep: tuple  # of soft_dtw.cu
    backward_sweep: tuple  # of soft_dtw_backward.cu
    stripes: int  # of a pair's rows
    groups: int  # of pairs, each as many as a warp takes
    grid: int  # blocks of threads of a sweep, stripe by stripe
    block: int  # threads of one
    forward_shared: int  # bytes of its shared memory
    backward_shared: int
    blocks: int  # of columns, in a row of the table
    mail_blocks: int  # that a stripe sends to the next one
    chunks: int  # of steps, in a stripe
    padded_a: int
    padded_b: int
    tiles: int  # of 32 rows, in all the series
    forward: dict  # section of the working memory: its bytes
    backward: dict


@lru_cache(maxsize=1024)
def plan(problem, output, keep, limits):
    """The plan of a problem for an output.

    Where pairs fill the device, a group of 8 lanes takes each: it wastes least while a stripe
    starts and ends. Where they do not, wide groups are quicker, for a pair has fewer stripes that
    wait for each other. Helpers prepare the costs of many features, and of few where there are few
    sweeps. A lane takes 4 rows of each stripe; of long series 8, if its registers suffice.
    """
    B, N, M, D, batch_a, batch_b, dtype, cost, hard, width, _ = problem
    size = 8 if problem.real == "float64" else 4
    warps = B * N / (WARP * 4)  # that sweep, at 4 rows a lane
    full = warps > limits.multiprocessors * WARPS_TO_FILL
    few = limits.multiprocessors * (WARPS_OF_LONG if N >= LONG else WARPS_FOR_HELPERS)
    if 0 < D <= FEATURES_HELD and warps > few:
        helpers = 0
    else:
        helpers = MANY_HELPERS if D >= FEATURES_FOR_MANY else FEW_HELPERS
    rows = 8 if 0 < D <= FEATURES_FOR_8_ROWS and not helpers and size == 4 and N >= 128 else 4
    lanes = 8 if full else WARP
    while lanes > 1 and lanes * rows // 2 >= N:
        lanes //= 2
    stripes, groups = -(-N // (lanes * rows)), -(-B * lanes // WARP)
    shares = max(helpers, 1)
    rounds = -(-D // (shares * FEATURES_AT_A_TIME * 4 // size)) if helpers else 1
    group = max(-(-D // (shares * max(rounds, 1))), 1)
    # Shared memory, for each step of a chunk: numbers of the cells, and letters about columns.
    plane = rows * COLUMNS * WARP * size
    planes = (4 if output == ENTROPY or cost == "euclidean" else 3) * (2 if helpers else 1)
    letters = (1 + shares * group) * (WARP // lanes if stripes > 1 or helpers else 1)
    step = plane * planes + letters * COLUMNS * size
    room = {0: SHARED, FEW_HELPERS: NUMBERS_WITH_FEW_HELPERS * size}.get(helpers, limits.shared)
    steps = max((min(room, limits.shared) - FLAGS) // step, 1)
    if helpers:
        steps = min(steps, helpers)  # each prepares the costs of one
    blocks = -(-M // COLUMNS)
    mail_blocks = min(blocks, (rows - 1 + width) // COLUMNS + 2) if keep else blocks
    visited = min(blocks, (lanes * rows - 1 + width) // COLUMNS + 2)
    chunks = -(-(visited + lanes) // steps)
    padded_a, padded_b = -(-N // rows) * rows, blocks * COLUMNS
    words = size // 4  # of mail, 8 bytes each, for a number
    sweep = (
        ("REAL", C_TYPES[problem.real]),
        ("COST", METRICS[cost]),
        ("C_T", C_TYPES[dtype if cost == GIVEN else problem.real]),
        ("FEATURES", 0 if helpers else D),
        ("ROWS", rows),
        ("LANES", lanes),
        ("HELPERS", helpers),
        ("STEPS", steps),
        ("MAIL", int(stripes > 1)),
        ("HARD", int(hard)),
    )
    return Plan(
        forward_sweep=(*sweep, ("ENDS", {LAST_ROW: 1, MATCHES: 2}.get(output, 0))),
        backward_sweep=(*sweep, ("OUTPUT", output), ("GROUP", group)),
        stripes=stripes,
        groups=groups,
        grid=stripes * groups,
        block=WARP * (1 + helpers),
        forward_shared=2 * steps * plane if helpers else 0,
        backward_shared=steps * step + FLAGS,
        blocks=blocks,
        mail_blocks=mail_blocks,
        chunks=chunks,
        padded_a=padded_a,
        padded_b=padded_b,
        tiles=0 if cost == GIVEN else batch_a * -(-N // TILE) + batch_b * -(-M // TILE),
        forward={
            "pairs": 48 * B,
            "spoilt": 4 * B,
            "first_of_a": 0 if cost == GIVEN else 8 * batch_a * -(-N // TILE),
            "first_of_b": 0 if cost == GIVEN else 8 * batch_b * -(-M // TILE),
            "packed_a": batch_a * D * padded_a * size,
            "packed_b": batch_b * D * padded_b * size,
            "mail": (stripes - 1 if keep else min(stripes - 1, 1))
            * (B * mail_blocks * -(-(COLUMNS + 1) * words // 2) * 16),
            "lanes": stripes * groups * chunks * (rows + COLUMNS + 2) * WARP * size if keep else 0,
        },
        backward={
            "mail_back": B * blocks * -(-COLUMNS * words // 2) * 16 if stripes > 1 else 0,
            "sums_b": B * D * blocks * -(-COLUMNS * words // 2) * 16 if output == SERIES else 0,
            "sums_a": B * D * padded_a * size if output == SERIES else 0,
            "in_flight": stripes * groups * D * WARP * COLUMNS * size
            if output == SERIES and rounds > 1
            else 0,
            "entropies": stripes * B * size if output == ENTROPY else 0,
        },
    )
