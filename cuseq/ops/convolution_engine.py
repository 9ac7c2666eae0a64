"""The engine of the causal convolutions: a call's problem, its plan, its launches.

    y, final_state = forward(call, with_state=True)
    gradients = backward(call, grad_y, grad_final_state)

On a CUDA device a forward is one launch and a backward two; states of sequences by index take one
more. In host memory the same functions run cuseq.host.causal_conv1d and causal_conv1d_varlen.
"""

from typing import NamedTuple

from cuseq.host import causal_conv1d as host
from cuseq.host import causal_conv1d_varlen as host_varlen
from cuseq.ops.convolution import NOTHING
from cuseq.ops.convolution_plan import (
    INDEXED,
    PACKED,
    WARP,
    Problem,
    at_once,
    packs_along,
    plan,
    rows_at_once,
)
from cuseq.runtime import arrays, kernels
from cuseq.runtime.arrays import HOST, Array
from cuseq.runtime.kernels import C_TYPES

FORWARD, BACKWARD = "causal_conv1d.cu", "causal_conv1d_backward.cu"
SOURCES, PARTIALS = "causal_conv1d_sources.cu", "causal_conv1d_partials.cu"
SLICES = 8  # of partial sums, in PARTIALS


class Gradients(NamedTuple):
    """Gradients by the name of what they belong to; None where the call had no such argument."""

    x: object
    weight: object
    bias: object
    initial_state: object


class Call(NamedTuple):
    """What a public function borrowed, with x seen as (B, D, L) and weight as (D, W)."""

    x: Array
    weight: Array
    bias: Array | None
    initial_state: Array | None
    index: Array | None  # seq_idx (B, L) or cu_seqlens (count + 1,)
    silu: bool
    sequences: int  # WHOLE, INDEXED or PACKED
    states: tuple  # shape of states, (count, D, S)
    state_dtype: str
    given: Array  # x as the caller has it
    axes: tuple  # of the caller's x that are seen as B, D, L
    weight_shape: tuple  # as the caller has it

    def like_x(self, like):
        """An array for what has x's shape, and the same seen as (B, D, L).

        It lies in memory as x does; for packed sequences as the kernels walk, always across.
        """
        if self.sequences == PACKED:
            array = arrays.empty(self.given.shape, self.given.dtype, like)
        else:
            array = arrays.empty_like(self.given, like)
        return array, array.seen_as(*self.axes)

    @property
    def borrowed(self):
        """What a launch reads, None for what there is not."""
        return self.x, self.weight, self.bias, self.initial_state, self.index

    def problem(self, *tensors, final_state):
        """For the kernels; `tensors` are those that are accessed as x is."""
        x, bias = self.x, self.bias
        B, D, L = x.shape
        dtypes = x.dtype, self.weight.dtype, bias.dtype if bias else "float32", self.state_dtype
        across = self.sequences == PACKED or 0 < abs(x.strides[1]) < abs(x.strides[2])
        if across:
            packs = min(at_once(tensor.seen_as(0, 2, 1)) for tensor in (x, *tensors))
        else:
            packs = packs_along((x, *tensors))
        return Problem(
            *(B, D, L, self.weight.shape[1], dtypes, self.sequences),
            self.index.dtype if self.index else "int32",
            *(self.silu, self.initial_state is not None, final_state is not None),
            *(across, packs, rows_at_once(self.weight), x.device),
        )


def forward(call, with_state):
    """y, and the final states or None."""
    y, y_seen = call.like_x(call.x)
    final_state = arrays.empty(call.states, call.state_dtype, call.x) if with_state else None
    if call.x.device == HOST:
        _forward_on_host(call, y_seen, final_state)
    elif y.size or (final_state and final_state.size):
        how = plan(
            call.problem(y_seen, final_state=final_state), kernels.device_limits(call.x.device)
        )
        with arrays.launching(*call.borrowed) as launch:
            sources = _sources(launch, call, with_state)  # named, so that it is not freed yet
            args = (
                *_shared_args(call, sources),
                *y_seen.flat,
                *(final_state.flat if final_state else NOTHING),
                *(how.length, how.parts),
            )
            launch(FORWARD, "causal_conv1d_forward", how.macros, max(how.grid, 1), how.block, args)
    return y, final_state


def backward(call, grad_y, grad_final_state):
    """Gradients as borrowed arrays, by name; grad_y is seen as (B, D, L)."""
    D, W = call.weight.shape
    grad_x, grad_x_seen = call.like_x(grad_y)
    grad_weight = arrays.empty(call.weight_shape, call.weight.dtype, grad_y)
    grad_bias = arrays.empty((D,), call.bias.dtype, grad_y) if call.bias else None
    state = call.initial_state
    grad_initial = arrays.empty(state.shape, state.dtype, grad_y) if state else None
    gradients = Gradients(grad_x, grad_weight, grad_bias, grad_initial)
    if call.x.device == HOST:
        _backward_on_host(call, grad_y, grad_final_state, gradients._replace(x=grad_x_seen))
        return gradients
    problem = call.problem(grad_y, grad_x_seen, final_state=grad_final_state)
    how = plan(problem, kernels.device_limits(problem.device), backward=True)
    parts = problem.B * how.parts
    partials = arrays.scratch((parts, D, W + 1), problem.real, grad_y)
    with arrays.launching(grad_y, *call.borrowed, grad_final_state) as launch:
        if how.grid or (grad_initial and grad_initial.size):
            sources = _sources(launch, call, grad_final_state)
            args = (
                *_shared_args(call, sources),
                *grad_y.flat,
                *(grad_final_state.flat if grad_final_state else NOTHING),
                *grad_x_seen.flat,
                *(grad_initial.flat if grad_initial else NOTHING),
                partials.pointer,
                *(how.length, how.parts),
            )
            name = "causal_conv1d_backward"
            launch(BACKWARD, name, how.macros, max(how.grid, 1), how.block, args)
        if D:
            args = partials.pointer, parts, D, grad_weight.pointer
            args += (grad_bias.pointer if grad_bias else 0,)
            blocks = -(-D * (W + 1) // WARP)
            name = "causal_conv1d_partials"
            launch(PARTIALS, name, how.of_partials, blocks, WARP * SLICES, args)
    return gradients


def _sources(launch, call, wanted):
    """Of which inputs the final states are, where sequences are by index: (B, S); else None."""
    (B, _, S), L = call.states, call.x.shape[2]
    if call.sequences != INDEXED or not wanted or not B * S:
        return None
    sources = arrays.scratch((B, S), "int64", call.x)
    args = *call.index.flat, L, S, int(call.initial_state is not None), sources.pointer
    macros = (("INDEX_T", C_TYPES[call.index.dtype]),)
    launch(SOURCES, "causal_conv1d_sources", macros, B, WARP, args)
    return sources


def _shared_args(call, sources):
    """What forward and backward take."""
    B, D, L = call.x.shape
    count, _, S = call.states
    index = NOTHING[:3]
    if call.index:
        index = call.index.pointer, *((0,) if call.sequences == PACKED else ()), *call.index.strides
    return (
        *call.x.flat,
        *call.weight.flat,
        *(call.bias.flat if call.bias else NOTHING[:2]),
        *(call.initial_state.flat if call.initial_state else NOTHING),
        *index,
        sources.pointer if sources else 0,
        *(B, D, L, S, count),
    )


def _seen(call, x):
    """A NumPy view of an array that is seen as (B, D, L), as the host's functions take it."""
    return x.numpy()[0].T if call.sequences == PACKED else x.numpy()


def _forward_on_host(call, y, final_state):
    x, weight, bias, state, index = (array and array.numpy() for array in call.borrowed)
    outputs = _seen(call, y), final_state and final_state.numpy()
    if call.sequences == PACKED:
        host_varlen.forward(_seen(call, call.x), weight, bias, index, state, call.silu, *outputs)
    else:
        host.forward(x, weight, bias, state, call.silu, *outputs, index)


def _backward_on_host(call, grad_y, grad_final_state, gradients):
    x, weight, bias, state, index = (array and array.numpy() for array in call.borrowed)
    outer, outer_state = _seen(call, grad_y), grad_final_state and grad_final_state.numpy()
    outputs = (
        _seen(call, gradients.x),
        gradients.weight.numpy().reshape(weight.shape),
        *(gradient and gradient.numpy() for gradient in gradients[2:]),
    )
    if call.sequences == PACKED:
        inputs = _seen(call, call.x), weight, bias, index, state, call.silu
        host_varlen.backward(outer, *inputs, outer_state, *outputs)
    else:
        inputs = x, weight, bias, state, call.silu
        host.backward(outer, *inputs, outer_state, *outputs, index)
