"""The engine of the soft-DTW family: a call's problem, its plan, its launches.

    values, kept = forward(call, SERIES)
    grad_a, grad_b = backward(call, None, values, kept, SERIES)

On a CUDA device a forward is two launches (kernels/soft_dtw_series.cu prepares the series,
kernels/soft_dtw.cu sweeps over the tables), a backward two or three. The working memory of each is
one allocation, cut into sections by the plan; `kept` is that of a forward. In host memory the same
functions run cuseq.host.soft_dtw, which keeps nothing.
"""

from typing import NamedTuple

import numpy as np

from cuseq.host import soft_dtw as host
from cuseq.ops.soft_dtw_plan import (
    ALIGNMENT,
    ENTROPY,
    GIVEN,
    LAST_ROW,
    MATCHES,
    SERIES,
    VALUES,
    WARP,
    Problem,
    plan,
)
from cuseq.runtime import arrays, kernels
from cuseq.runtime.arrays import HOST, Array
from cuseq.runtime.kernels import C_TYPES

FORWARD, BACKWARD = "soft_dtw.cu", "soft_dtw_backward.cu"
PREPARATION = "soft_dtw_series.cu"
THREADS = 256  # of a block in PREPARATION
MOST_TO_CLEAR = 4096  # blocks of threads; each goes on where the grid ends
NUMBER_KINDS = {"int32": 1, "int64": 2, "float64": 3, "float32": 4, "float16": 5, "bfloat16": 6}

# From sums over the halves of the series (unit vectors for cosine) to the cost, and to its slope.
COST_FACTORS = {"sqeuclidean": 4.0, "euclidean": 2.0, "cityblock": 2.0, "cosine": 2.0, GIVEN: 1.0}
SLOPE_FACTORS = {"sqeuclidean": 4.0, "euclidean": 1.0, "cityblock": 1.0, "cosine": 2.0}


class Numbers(NamedTuple):
    """An option: one number for all samples, or an array (B,) or () on the call's device."""

    one: int | float
    each: Array | None = None

    def host(self, B, dtype):
        """As a NumPy array (B,)."""
        values = self.one if self.each is None else self.each.numpy()
        return np.broadcast_to(values, B).astype(dtype)

    @property
    def args(self):
        """Pointer, stride and kind of the array, and the one number, as the kernels take them."""
        one = np.float64(self.one) if isinstance(self.one, float) else self.one
        if self.each is None:
            return 0, 0, 0, one
        stride = self.each.strides[0] if len(self.each.shape) and self.each.shape[0] > 1 else 0
        return self.each.pointer, stride, NUMBER_KINDS[self.each.dtype], one


class Grid(NamedTuple):
    """Which series meet: pair k has series k // every % batch of each batch; and where values go.

    The values of so many `columns` pairs are beside each other in a row of the result.
    """

    columns: int
    row_length: int
    first: int = 0
    every_a: int = 1
    every_b: int = 1
    lengths_by_series: bool = False  # not by pair

    def meets(self, problem):
        """every and batch of a, then of b."""
        return self.every_a, problem.batch_a, self.every_b, problem.batch_b


class Call(NamedTuple):
    """What a public function borrowed: series as (B, N, D) and (B, M, D), or costs (B, N, M)."""

    problem: Problem
    grid: Grid
    values_shape: tuple
    shapes: tuple  # of the caller's arrays
    a: Array | None
    b: Array | None
    C: Array | None
    gamma: Numbers
    bandwidth: Numbers | None
    lengths_a: Numbers | None
    lengths_b: Numbers | None

    @property
    def like(self):
        """The first array of the call."""
        return self.a or self.C

    @property
    def on_device(self):
        """Every borrowed array that a launch reads."""
        options = self.gamma, self.bandwidth, self.lengths_a, self.lengths_b
        return (*filter(None, (self.a, self.b, self.C)), *(x.each for x in options if x and x.each))

    def pairs(self):
        """For cuseq.host."""
        B = self.problem.B

        def each(option):
            return option and option.host(B, np.int64)

        return host.Pairs(
            self.a and self.a.numpy(),
            self.b and self.b.numpy(),
            self.C and self.C.numpy(),
            self.problem.cost,
            self.gamma.host(B, np.float64),
            each(self.bandwidth),
            each(self.lengths_a),
            each(self.lengths_b),
        )


class Memory:
    """One allocation and its sections, by name, as pointers."""

    def __init__(self, sections, like, array=None):
        ends, total = {}, 0
        for name, size in sections.items():
            ends[name] = total
            total += _as_aligned(size)
        self.array = array or arrays.scratch((total,), "uint8", like)
        self._pointers = {name: self.array.pointer + offset for name, offset in ends.items()}

    def __getitem__(self, name):
        return self._pointers[name]

    @staticmethod
    def size(sections):
        """Bytes of all sections."""
        return sum(map(_as_aligned, sections.values()))


def _as_aligned(size):
    """The room for a section, so that the next one is as aligned as an allocation."""
    return -(-size // 256) * 256


def kept_size(call, output):
    """Bytes of what a forward on a device keeps for a backward to this output."""
    problem = call.problem
    how = plan(problem, output, True, kernels.device_limits(problem.device))
    return Memory.size(how.forward)


def forward(call, output=VALUES, *, values=None, room=None):
    """(values, kept): kept is what `backward` wants for this output, None where nothing is kept.

    `values`: where they go, if that is not an array of their own. `room`: working memory that calls
    share which follow each other.
    """
    problem = call.problem
    values = values or arrays.empty(call.values_shape, problem.real, call.like)
    if problem.device == HOST:
        if output in (LAST_ROW, MATCHES):
            host.ends(call.pairs(), output == MATCHES, values.numpy().reshape(-1, problem.M))
        else:
            host.forward(call.pairs(), values.numpy().reshape(-1))
        return values, None
    keep = output in (SERIES, ALIGNMENT, ENTROPY)
    how = plan(problem, output, keep, kernels.device_limits(problem.device))
    memory = Memory(how.forward, call.like, room)
    if problem.B:
        with arrays.launching(*call.on_device) as launch:
            _prepare(launch, call, how, memory)
            args = (
                *_sweep_args(call, how, memory),
                *(memory["lanes"] if keep else 0, how.chunks),
                *(memory["first_of_a"], memory["first_of_b"], values.pointer, problem.M),
            )
            launch(
                *(FORWARD, "soft_dtw_forward", how.forward_sweep),
                *(how.grid, how.block, args, how.forward_shared),
            )
    return values, memory.array if keep else None


class Sums(NamedTuple):
    """Where gradients by series go on a device, if they are not arrays of their own."""

    of_a: Array | None
    of_b: Array | None
    adds: bool = False  # to what is there
    scale: float = 1.0


def backward(call, grad_values, values, kept, output, *, results=None, sums=None, room=None):
    """Gradients of sum(grad_values * values), grad_values None for ones; for ENTROPY without them.

    (grad_a, grad_b) for SERIES, (grad_C,) for ALIGNMENT, (d value / d gamma,) for ENTROPY:
    `results`, if they are not arrays of their own. `sums`, for SERIES, are written instead, one
    after the other; `room` is as `forward` takes it.
    """
    problem = call.problem
    results = () if sums else results or _results(call, output)
    if output == SERIES and not sums:
        sums = (Sums(*results),)
    if problem.device == HOST:
        _on_host(call, grad_values, values, results, output)
        return results
    how = plan(problem, output, True, kernels.device_limits(problem.device))
    memory, scratch = Memory(how.forward, call.like, kept), Memory(how.backward, call.like, room)
    with arrays.launching(*call.on_device, grad_values, values, kept) as launch:
        if problem.B and how.stripes > 1:
            words = (scratch["sums_a"] - scratch["mail_back"]) // 8
            blocks = min(-(-words // THREADS), MOST_TO_CLEAR)
            args = scratch["mail_back"], words
            macros = series_macros(problem, problem.dtype)
            launch(PREPARATION, "soft_dtw_clear", macros, blocks, THREADS, args)
        if problem.B:
            outer = (0, 1, 0, 0)
            if grad_values:
                strides = (0, 0, *grad_values.strides)[-2:]
                outer = grad_values.pointer, call.grid.row_length, *strides
            args = (
                *_sweep_args(call, how, memory),
                *(memory["lanes"], how.chunks, *outer, values.pointer),
                *(scratch["mail_back"], how.blocks, scratch["sums_a"], scratch["sums_b"]),
                *(scratch["in_flight"], 0 if sums else results[0].pointer, problem.N, problem.M),
                scratch["entropies"],
            )
            launch(
                *(BACKWARD, "soft_dtw_backward", how.backward_sweep),
                *(how.grid, how.block, args, how.backward_shared),
            )
        if output == ENTROPY and problem.B:
            args = problem.B, how.stripes, memory["pairs"], values.pointer, scratch["entropies"]
            args += (results[0].pointer,)
            run_on_each(launch, "soft_dtw_finish_gamma", call, problem.B, args)
        elif output == SERIES and how.tiles and problem.D:
            for those in sums:
                _finish(launch, call, how, memory, scratch, values, those)
    return results


def value_and_gradients(call, output, *, drops_values=False):
    """(values, results): the results as `backward` returns them, of the sum of the values.

    Who drops the values gets them in working memory.
    """
    allocate = arrays.scratch if drops_values else arrays.empty
    values, kept = allocate(call.values_shape, call.problem.real, call.like), None
    if call.problem.device != HOST:  # there a backward writes the values on its way
        values, kept = forward(call, output, values=values)
    return values, backward(call, None, values, kept, output)


def _results(call, output):
    """The arrays that a backward is to write."""
    problem, like = call.problem, call.like
    if output == SERIES:
        return tuple(arrays.empty(shape, problem.dtype, like) for shape in call.shapes)
    if output == ENTROPY:
        return (arrays.empty(call.values_shape, problem.real, like),)
    shape = (*call.values_shape, problem.N, problem.M)
    return (arrays.empty(shape, problem.dtype if call.C else problem.real, like),)


def _on_host(call, grad_values, values, results, output):
    problem, pairs = call.problem, call.pairs()
    outer = None if grad_values is None else grad_values.numpy().reshape(-1)
    values = values.numpy().reshape(-1)
    if output == SERIES:
        grad_a, grad_b = (
            result.numpy().reshape(series.shape)
            for result, series in zip(results, (call.a, call.b), strict=True)
        )
        host.backward(outer, pairs, values, grad_a, grad_b)
    elif output == ENTROPY:
        host.gamma_gradient(pairs, values, results[0].numpy().reshape(-1))
    else:
        E = results[0].numpy().reshape(problem.B, problem.N, problem.M)
        host.alignment(outer, pairs, values, E)


def prepare_pairs(launch, call, pairs, spoilt):
    """Check the options on a device, into [B] pairs and flags that are 0, and do nothing else."""
    B = call.problem.B
    args = *_pairs_args(call), *(0,) * 15, pairs, spoilt, 0, 0
    run_on_each(launch, "soft_dtw_prepare", call, B, args)


def _pairs_args(call):
    """Sizes, which series meet, and options."""
    problem = call.problem
    return (
        *(problem.B, problem.N, problem.M, problem.D),
        *call.grid.meets(problem),
        *(call.grid.columns, call.grid.first, call.grid.row_length),
        int(call.grid.lengths_by_series),
        *call.gamma.args,
        *(call.bandwidth or Numbers(-1)).args,
        *(call.lengths_a or Numbers(problem.N)).args,
        *(call.lengths_b or Numbers(problem.M)).args,
    )


def _prepare(launch, call, how, memory):
    """Check the options on the device, pack the series, clear the mail."""
    problem = call.problem
    words = (memory["lanes"] - memory["mail"]) // 8
    args = (
        *_pairs_args(call),
        *(how.tiles, *_series_args(call)),
        *(how.padded_a, memory["packed_a"], memory["first_of_a"]),
        *(how.padded_b, memory["packed_b"], memory["first_of_b"]),
        *(memory["pairs"], memory["spoilt"], memory["mail"], words),
    )
    to_clear = min(-(-max(words, problem.B) // THREADS), MOST_TO_CLEAR)
    blocks = min(max(-(-how.tiles * WARP // THREADS), to_clear), kernels.MOST_BLOCKS)
    macros = series_macros(problem, problem.dtype)
    launch(PREPARATION, "soft_dtw_prepare", macros, blocks, THREADS, args)


def _finish(launch, call, how, memory, scratch, values, sums):
    """Sums over the table into gradients as the caller wants them."""
    problem = call.problem
    alone = problem.batch_a == problem.batch_b == problem.B
    features = problem.D if problem.cost == "cosine" else min(problem.D, 8) if alone else 1
    args = (
        *(problem.B, problem.N, problem.M, problem.D, *call.grid.meets(problem)),
        *(memory["pairs"], values.pointer),
        *_series_args(call),
        *(how.padded_a, memory["packed_a"], how.padded_b, memory["packed_b"]),
        *(scratch["sums_a"], scratch["sums_b"]),
        *(np.float64(sums.scale * SLOPE_FACTORS[problem.cost]), features, int(sums.adds)),
        *(gradient.pointer if gradient else 0 for gradient in (sums.of_a, sums.of_b)),
    )
    blocks = -(-how.tiles * -(-problem.D // features) * WARP // THREADS)
    macros = series_macros(problem, (sums.of_a or sums.of_b).dtype)
    launch(PREPARATION, "soft_dtw_finish", macros, blocks, THREADS, args)


def run_on_each(launch, function, call, count, args):
    """Launch a function of kernels/soft_dtw_series.cu with a thread for each of so many numbers."""
    macros = series_macros(call.problem, call.problem.dtype)
    launch(PREPARATION, function, macros, -(-count // THREADS), THREADS, args)


def series_macros(problem, of_gradients):
    """Of kernels/soft_dtw_series.cu."""
    return (
        ("X_T", C_TYPES[problem.dtype]),
        ("RESULT_T", C_TYPES[of_gradients]),
        ("REAL", C_TYPES[problem.real]),
        ("COSINE", int(problem.cost == "cosine")),
    )


def _series_args(call):
    """Both series with their strides; zeros where the cost is given."""
    return (0,) * 8 if call.C else (*call.a.flat, *call.b.flat)


def _sweep_args(call, how, memory):
    """What both sweeps take."""
    problem = call.problem
    return (
        *(problem.B, how.groups, how.stripes, memory["pairs"]),
        *(memory["packed_a"], memory["packed_b"], problem.D),
        *(how.padded_a, how.padded_b),
        *(call.C.flat if call.C else (0, 0, 0, 0)),
        *(memory["spoilt"], np.float64(COST_FACTORS[problem.cost])),
        *(memory["mail"], how.mail_blocks),
    )
