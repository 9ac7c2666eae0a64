"""cuseq.compat: other projects' names, argument order, results and meaning, against plain loops."""

import inspect
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cuseq.compat
from tests.frameworks import TORCH_CPU, TORCH_CUDA, over
from tests.oracles import causal_conv1d as conv_oracle
from tests.oracles import causal_conv1d_update as update_oracle
from tests.samples import DTYPES, ROWS, normal
from tests.tolerances import assert_close

torch = pytest.importorskip("torch")
conv = pytest.importorskip("cuseq.compat.causal_conv1d")
soft = pytest.importorskip("cuseq.compat.soft_dtw_cuda")

ROOT = Path(__file__).resolve().parents[1]
every_device = over([TORCH_CPU, TORCH_CUDA])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_memory = pytest.mark.parametrize("memory", ["length last", "channels last", "neither"])
YES_OR_NO = [False, True]


def tensor(place, *shape, seed=0, dtype="float64", memory="length last"):
    """A random tensor (..., D, L) that no other shares; `memory` says how it lies."""
    values = place.array(normal(*shape, seed=seed, dtype=dtype)).clone()
    if memory == "length last":
        return values
    values = values.transpose(-2, -1).contiguous()
    if memory == "neither":  # but closer to channels last
        values = values.repeat_interleave(2, dim=-1)[..., ::2]
    return values.transpose(-2, -1)


def is_channels_last(x):
    return x.transpose(-2, -1).is_contiguous()


def exact(x, follow=True):
    """A float64 copy for a reference, which autograd follows."""
    return None if x is None else x.detach().double().clone().requires_grad_(follow)


def convolution(x, weight, bias=None, initial_states=None, activation=None, seq_idx=None):
    """y and the final states (without seq_idx), term by term, by operations that torch follows."""
    (B, D, L), W = x.shape, weight.shape[1]
    past = x.new_zeros(B, D, W - 1) if initial_states is None else initial_states
    signal = torch.cat([past, x], dim=2)
    index = x.new_zeros(B, L, dtype=torch.int64) if seq_idx is None else seq_idx.long()
    before = index[:, :1]
    if initial_states is None and seq_idx is not None:
        before = torch.full_like(before, -(2**40))  # of nobody
    index = torch.cat([before.expand(B, W - 1), index], dim=1)
    outputs = []
    for t in range(L):
        v = x.new_zeros(B, D) if bias is None else bias.expand(B, D)
        for k in range(W):
            sees = index[:, t + k] == index[:, t + W - 1]
            v = v + weight[:, k] * signal[..., t + k] * sees[:, None]
        y = v / (1 + torch.exp(-v)) if activation else v
        outputs.append(y * (index[:, t + W - 1] >= 0)[:, None])
    return torch.stack(outputs, dim=2), signal[..., L:]


def assert_gradients(place, outputs, inputs, wanted_outputs, wanted_inputs):
    """Compare the gradients, by name, of outputs weighed by random numbers."""
    outer = [place.array(normal(*y.shape, seed=7 + i)).to(y.dtype) for i, y in enumerate(outputs)]
    names = [name for name, x in inputs.items() if x is not None]
    got = torch.autograd.grad(outputs, [inputs[name] for name in names], outer)
    wanted = torch.autograd.grad(
        wanted_outputs,
        [wanted_inputs[name] for name in names],
        [gradient.double() for gradient in outer],
        materialize_grads=True,
    )
    for name, gradient, exact_gradient in zip(names, got, wanted, strict=True):
        assert gradient.dtype == inputs[name].dtype
        what = f"causal_conv1d.grad_{name}"
        assert_close(place.numpy(gradient), place.numpy(exact_gradient), what)


def assert_value(place, got, wanted, what="causal_conv1d.value"):
    assert_close(place.numpy(got), place.numpy(wanted), what)


# Names, order and defaults:


@pytest.mark.parametrize(
    "function, signature",
    [
        (
            "causal_conv1d_fn",
            "(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,"
            " final_states_out=None, activation=None)",
        ),
        (
            "causal_conv1d_varlen_fn",
            "(x, weight, bias=None, cu_seqlens=None, initial_states=None,"
            " return_final_states=False, final_states_out=None, activation=None)",
        ),
        (
            "causal_conv1d_update",
            "(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,"
            " conv_state_indices=None)",
        ),
        ("causal_conv1d_varlen_states", "(x, cu_seqlens, state_len)"),
        (
            "causal_conv1d_fwd_function",
            "(x, weight, bias, seq_idx, initial_states, final_states_out, silu_activation)",
        ),
        (
            "causal_conv1d_bwd_function",
            "(x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx,"
            " return_dinitial_states, silu_activation)",
        ),
        (
            "causal_conv1d_update_function",
            "(x, conv_state, weight, bias, silu_activation, cache_seqlens, conv_state_indices)",
        ),
    ],
)
def test_signature(function, signature):
    assert str(inspect.signature(getattr(conv, function))) == signature


def test_signature_of_soft_dtw():
    assert str(inspect.signature(soft.SoftDTW)) == (
        "(use_cuda, gamma=1.0, normalize=False, bandwidth=None, dist_func=None)"
    )
    assert list(inspect.signature(soft.SoftDTW(False).forward).parameters) == ["X", "Y"]


# causal_conv1d_fn:


@every_device
@every_dtype
@every_memory
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_fn(place, dtype, memory, activation):
    """Values, what is returned when, memory order and gradients; weights have their own dtype."""
    of_weight = "float64" if dtype == "float64" else "float32"
    widths = [(2, 1), (3, 9), (6, 17)] if dtype == "float32" else []
    for W, L in [(4, 1), (4, 2), (4, 9), *widths]:
        for with_bias, with_initial, with_final in itertools.product(YES_OR_NO, repeat=3):
            x = tensor(place, 2, 8, L, dtype=dtype, memory=memory)
            weight = tensor(place, 8, W, seed=1, dtype=of_weight)
            bias = tensor(place, 8, seed=2, dtype=of_weight) if with_bias else None
            memory_of_state = "channels last" if memory == "channels last" else "length last"
            state = tensor(place, 2, 8, W - 1, seed=3, dtype=dtype, memory=memory_of_state)
            inputs = {"x": x, "weight": weight, "bias": bias}
            inputs["initial_states"] = state if with_initial else None
            exacts = {name: exact(value) for name, value in inputs.items()}
            for value in filter(torch.is_tensor, inputs.values()):
                value.requires_grad_()
            result = conv.causal_conv1d_fn(
                **inputs, return_final_states=with_final, activation=activation
            )
            y, final_states = result if with_final else (result, None)
            wanted, wanted_states = convolution(**exacts, activation=activation)
            assert y.dtype == x.dtype
            assert is_channels_last(y) if memory == "channels last" else y.is_contiguous()
            assert_value(place, y, wanted)
            if with_final:
                assert final_states.dtype == x.dtype and is_channels_last(final_states)
                assert_value(place, final_states, wanted_states, "causal_conv1d.final_state")
                assert_gradients(place, (y, final_states), inputs, (wanted, wanted_states), exacts)
            else:
                assert_gradients(place, (y,), inputs, (wanted,), exacts)


@every_device
@every_memory
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_initial", YES_OR_NO)
def test_fn_by_index(place, memory, activation, dtype, with_initial):
    B, L = ROWS.shape
    seq_idx = place.array(ROWS.astype(np.int32))
    x = tensor(place, B, 8, L, dtype=dtype, memory=memory)
    inputs = {
        "x": x,
        "weight": tensor(place, 8, 4, seed=1, dtype="float32"),
        "bias": tensor(place, 8, seed=2, dtype="float32"),
        "initial_states": tensor(place, B, 8, 3, seed=3, dtype=dtype) if with_initial else None,
    }
    exacts = {name: exact(value) for name, value in inputs.items()}
    for value in filter(torch.is_tensor, inputs.values()):
        value.requires_grad_()
    y = conv.causal_conv1d_fn(**inputs, seq_idx=seq_idx, activation=activation)
    wanted, _ = convolution(**exacts, seq_idx=seq_idx, activation=activation)
    assert_value(place, y, wanted)
    assert not y.transpose(1, 2)[seq_idx < 0].any()
    assert_gradients(place, (y,), inputs, (wanted,), exacts)


@every_device
def test_fn_by_index_with_final_states(place):
    """The peer refuses it; here these are the last inputs of the last sequence."""
    x, weight = normal(len(ROWS), 2, ROWS.shape[1]), normal(2, 4, seed=1)
    _, wanted = conv_oracle.forward_by_index(x, weight, ROWS)
    _, final_states = conv.causal_conv1d_fn(
        place.array(x), place.array(weight), seq_idx=place.array(ROWS), return_final_states=True
    )
    assert_close(place.numpy(final_states), wanted, "causal_conv1d.final_state")


@every_device
@pytest.mark.parametrize("with_initial", YES_OR_NO)
@pytest.mark.parametrize("follow", YES_OR_NO)
@pytest.mark.parametrize("packed", YES_OR_NO)
def test_final_states_out(place, with_initial, follow, packed):
    """It is written in place, what is returned lies in it, and only that is followed."""
    x = tensor(place, 6, 8) if packed else tensor(place, 2, 8, 3)
    initial_states = tensor(place, 2, 8, 3, seed=1) if with_initial else None
    weight = tensor(place, 8, 4, seed=2).requires_grad_(follow)
    x.requires_grad_(follow)
    out = torch.full((2, 8, 5), math.nan, dtype=x.dtype, device=x.device)
    room = out[..., 1:4]
    options = {"initial_states": initial_states, "final_states_out": room}
    function = conv.causal_conv1d_fn
    if packed:
        function = conv.causal_conv1d_varlen_fn
        options["cu_seqlens"] = torch.tensor([0, 3, 6], device=x.device)

    function(x, weight, **options)
    assert out.isnan().all()
    for times in 1.0, 2.0:  # the second one has the memory of the first
        given = times * x
        _, final_states = function(given, weight, **options, return_final_states=True)
        assert final_states.data_ptr() == room.data_ptr()
        assert final_states.stride() == room.stride()
        last = given.view(2, 3, 8).transpose(1, 2) if packed else given
        assert torch.equal(room, last) and torch.equal(final_states, last)
        assert out[..., 0].isnan().all() and out[..., 4].isnan().all()
        assert final_states.requires_grad == follow and not out.requires_grad
        if follow:
            outer = tensor(place, 2, 8, 3, seed=5)
            (gradient,) = torch.autograd.grad(final_states, x, outer)
            outer = outer.transpose(1, 2).reshape(6, 8) if packed else outer
            assert torch.equal(gradient, times * outer)


@every_device
@pytest.mark.parametrize("into", YES_OR_NO)
def test_final_states_have_the_dtype_of_x(place, into):
    """Initial states of another dtype, which the peer refuses, get gradients in their own."""
    x, weight = tensor(place, 2, 8, 1, dtype="bfloat16"), tensor(place, 8, 4, seed=1)
    initial_states = tensor(place, 2, 8, 3, seed=2).requires_grad_()
    _, final_states = conv.causal_conv1d_fn(
        *(x, weight, None, None, initial_states, True),
        x.new_empty(2, 8, 3) if into else None,
    )
    assert final_states.dtype == x.dtype
    assert torch.equal(final_states, torch.cat([initial_states[..., 1:].to(x.dtype), x], dim=2))
    (gradient,) = torch.autograd.grad(final_states.sum(), initial_states)
    assert torch.equal(gradient, x.new_tensor([0, 1, 1]).double().expand(2, 8, 3))


@every_device
def test_wrong_final_states_out(place):
    x, weight = tensor(place, 2, 8, 5), tensor(place, 8, 4, seed=1)
    for room in (
        x.new_zeros(2, 8, 4),
        x.new_zeros(3, 2, 8, 3),  # to which the states could be broadcast
        x.new_zeros(2, 8, 3, dtype=torch.int64),
        x.new_zeros(2, 8, 3, dtype=torch.float32),
        x.new_zeros(2, 8, 3, device="meta"),
    ):
        for function in (
            lambda room: conv.causal_conv1d_fn(
                x, weight, return_final_states=True, final_states_out=room
            ),
            lambda room: conv.causal_conv1d_fwd_function(x, weight, None, None, None, room, False),
        ):
            with pytest.raises(ValueError, match=r"^final_states_out: expected .+, got .+; .+"):
                function(room)
        assert room.is_meta or not room.any()


@every_device
def test_autocast_does_not_change_the_dtype(place):
    x, weight = tensor(place, 2, 8, 5, dtype="float32"), tensor(place, 8, 4, dtype="float32")
    wanted = conv.causal_conv1d_fn(x, weight, return_final_states=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        got = conv.causal_conv1d_fn(x, weight, return_final_states=True)
    assert [value.dtype for value in got] == [torch.float32] * 2
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@every_device
@pytest.mark.parametrize("states", ["none", "returned", "written"])
def test_fn_compiles(place, states):
    """In one graph, and differentiated in it, as models that are compiled call it."""
    x = tensor(place, 2, 8, 5, memory="channels last").requires_grad_()
    weight = tensor(place, 8, 4, seed=1).requires_grad_()
    rooms = [x.new_zeros(2, 8, 3) for _ in range(2)] if states == "written" else [None] * 2

    def loss(x, weight, room):
        outputs = conv.causal_conv1d_fn(
            *(x, weight, None, None, None, states != "none", room), activation="silu"
        )
        return sum(y.square().sum() for y in ([outputs] if states == "none" else outputs))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    wanted, got = loss(x, weight, rooms[0]), compiled(x, weight, rooms[1])
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got, (x, weight)), torch.autograd.grad(wanted, (x, weight))
    )
    if states == "written":
        assert rooms[0].any() and torch.equal(*rooms)


@every_device
def test_update_compiles(place):
    x, weight = tensor(place, 2, 8, 1), tensor(place, 8, 4, seed=1).requires_grad_()
    states = [tensor(place, 2, 8, 4, seed=2) for _ in range(2)]
    compiled = torch.compile(conv.causal_conv1d_update, backend="aot_eager", fullgraph=True)
    wanted = conv.causal_conv1d_update(x, states[0], weight, None, "silu")
    torch.testing.assert_close(compiled(x, states[1], weight, None, "silu"), wanted)
    assert torch.equal(*states)


# causal_conv1d_update:


@every_device
@every_dtype
@pytest.mark.parametrize("memory", ["length last", "channels last"])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_update(place, dtype, memory, activation):
    """Against the loops: values, the state in place, pools, rings, skipped items."""
    of_weight = "float64" if dtype == "float64" else "float32"
    B, D, P = 3, 8, 5
    widths = [(2, 1, 3), (3, 6, 2), (6, 5, 1)] if dtype == "float32" else []
    for W, S, T in [(4, 3, 1), (4, 4, 1), (4, 5, 4), *widths]:
        for with_bias, ring, pool in itertools.product(YES_OR_NO, repeat=3):
            x = tensor(place, B, D, T, dtype=dtype, memory=memory)
            weight = tensor(place, D, W, seed=1, dtype=of_weight)
            bias = tensor(place, D, seed=2, dtype=of_weight) if with_bias else None
            state = tensor(place, P if pool else B, D, S, seed=3, dtype=dtype)
            cache_seqlens = np.array([0, 7, S], np.int32) if ring else None
            indices = np.array([4, -1, 0], np.int32) if pool else None
            before = place.numpy(state)
            arrays = [value is not None and place.numpy(value) for value in (x, weight, bias)]
            wanted, after = update_oracle.update(
                arrays[0],
                before,
                arrays[1],
                arrays[2] if with_bias else None,
                activation,
                cache_seqlens,
                indices,
            )
            y = conv.causal_conv1d_update(
                *(x, state, weight, bias, activation),
                None if cache_seqlens is None else place.array(cache_seqlens),
                None if indices is None else place.array(indices),
            )
            assert y.dtype == x.dtype
            if T > 1:
                assert is_channels_last(y) if memory == "channels last" else y.is_contiguous()
            assert_close(place.numpy(y), wanted, "causal_conv1d_update.value")
            assert_close(place.numpy(state), after, "causal_conv1d_update.state")
            if pool:
                assert not y[1].any()
                untouched = place.numpy(state)[1:4].tobytes()
                assert untouched == before[1:4].tobytes()


@every_device
@pytest.mark.parametrize("columns", [3, 4])
def test_update_token_by_token(place, columns):
    """As a model generates: x (B, D) or (B, D, 1), a state of W - 1 or of W columns."""
    x, weight, bias = tensor(place, 2, 8, 6), tensor(place, 8, 4, seed=1), tensor(place, 8, seed=2)
    wanted = conv.causal_conv1d_fn(x, weight, bias, activation="silu")
    for keep in YES_OR_NO:
        state = x.new_zeros(2, 8, columns)
        for t in range(6):
            token = x[..., t : t + 1] if keep else x[..., t]
            y = conv.causal_conv1d_update(token, state, weight, bias, "silu")
            assert y.shape == token.shape
            assert_value(place, y.reshape(2, 8), wanted[..., t])
        assert torch.equal(state, x[..., -columns:])


@every_device
@pytest.mark.parametrize("pool", YES_OR_NO)
def test_update_is_apart_from_the_graph(place, pool):
    """As there: where weights require grad and no_grad is forgotten, the state stays as it is."""
    x, state = tensor(place, 2, 8, 1), tensor(place, 2, 8, 3, seed=1)
    weight = tensor(place, 8, 4, seed=2).requires_grad_()
    indices = torch.tensor([1, 0], device=x.device) if pool else None
    before = state.clone()
    y = conv.causal_conv1d_update(x, state, weight, conv_state_indices=indices)
    assert not y.requires_grad and not state.requires_grad
    rows = [1, 0] if pool else [0, 1]
    assert torch.equal(state[rows], torch.cat([before[rows, :, 1:], x], dim=2))


@every_device
def test_update_is_noticed_by_who_saved_the_state(place):
    x, state = tensor(place, 2, 8, 1), tensor(place, 2, 8, 3, seed=1)
    factor = tensor(place, 2, 8, 3, seed=2).requires_grad_()
    product = factor * state
    conv.causal_conv1d_update(x, state, tensor(place, 8, 4, seed=3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# Packed sequences:

ENDS = [[0, 2, 2, 9, 10], [0, 10], [0, 0, 10, 10]]


@every_device
@every_dtype
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_varlen_fn(place, dtype, ends, activation):
    """Sequence by sequence; with initial and final states, and their gradients, or without."""
    of_weight = "float64" if dtype == "float64" else "float32"
    S = len(ends) - 1
    cu_seqlens = place.array(np.array(ends, np.int32))
    for with_bias, with_initial, with_final in itertools.product(YES_OR_NO, repeat=3):
        inputs = {
            "x": tensor(place, 10, 8, dtype=dtype),
            "weight": tensor(place, 8, 4, seed=1, dtype=of_weight),
            "bias": tensor(place, 8, seed=2, dtype=of_weight) if with_bias else None,
            "initial_states": tensor(place, S, 8, 3, seed=3, dtype=dtype) if with_initial else None,
        }
        exacts = {name: exact(value) for name, value in inputs.items()}
        for value in filter(torch.is_tensor, inputs.values()):
            value.requires_grad_()
        result = conv.causal_conv1d_varlen_fn(
            **inputs,
            cu_seqlens=cu_seqlens,
            return_final_states=with_final,
            activation=activation,
        )
        y, final_states = result if with_final else (result, None)

        pieces, states = [], []
        for s, (start, end) in enumerate(itertools.pairwise(ends)):
            past = exacts["initial_states"]
            past = exacts["x"].new_zeros(1, 8, 3) if past is None else past[s : s + 1]
            if end == start:
                states.append(past)
                continue
            signal = exacts["x"][start:end].T[None]
            piece, state = convolution(signal, exacts["weight"], exacts["bias"], past, activation)
            pieces.append(piece[0].T)
            states.append(state)
        wanted, wanted_states = torch.cat(pieces), torch.cat(states)
        assert y.dtype == inputs["x"].dtype
        assert_value(place, y, wanted)
        if with_final:
            assert is_channels_last(final_states)
            assert_value(place, final_states, wanted_states, "causal_conv1d.final_state")
            assert_gradients(place, (y, final_states), inputs, (wanted, wanted_states), exacts)
        else:
            assert_gradients(place, (y,), inputs, (wanted,), exacts)


@every_device
@every_dtype
@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("state_len", [0, 1, 3, 12])
def test_varlen_states(place, dtype, ends, state_len):
    x = tensor(place, 10, 8, dtype=dtype).requires_grad_()
    states = conv.causal_conv1d_varlen_states(x, place.array(np.array(ends)), state_len)
    wanted = torch.zeros(len(ends) - 1, 8, state_len, dtype=x.dtype, device=x.device)
    for s, (start, end) in enumerate(itertools.pairwise(ends)):
        for t in range(max(start, end - state_len), end):
            wanted[s, :, state_len - end + t] = x.detach()[t]
    assert states.dtype == x.dtype and torch.equal(states, wanted)
    assert is_channels_last(states) and not states.requires_grad


# The three functions below the interface:


@every_device
@every_memory
@pytest.mark.parametrize("silu", YES_OR_NO)
@pytest.mark.parametrize("by_index", YES_OR_NO)
def test_functions_for_forward_and_backward(place, memory, silu, by_index):
    """Called as mamba_ssm calls them: by position, dx given or not, in a buffer of others."""
    seq_idx = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, -1, -1]], device=tensor(place, 1).device)
    seq_idx = seq_idx.int() if by_index else None
    activation = "silu" if silu else None
    for with_bias, with_initial, with_final in itertools.product(YES_OR_NO, repeat=3):
        if by_index and with_final:
            continue
        x, weight = tensor(place, 2, 8, 5, memory=memory), tensor(place, 8, 4, seed=1)
        bias = tensor(place, 8, seed=2) if with_bias else None
        initial = tensor(place, 2, 8, 3, seed=3) if with_initial else None
        final = torch.full_like(tensor(place, 2, 8, 3), math.nan) if with_final else None
        y = conv.causal_conv1d_fwd_function(x, weight, bias, seq_idx, initial, final, silu)
        exacts = [exact(value) for value in (x, weight, bias, initial)]
        wanted, wanted_final = convolution(*exacts, activation, seq_idx)
        assert isinstance(y, torch.Tensor)
        assert y.is_contiguous() if memory == "length last" else is_channels_last(y)
        assert_value(place, y, wanted)
        if with_final:
            assert torch.equal(final, wanted_final)

        dout = tensor(place, 2, 8, 5, seed=5, memory=memory)
        dfinal = tensor(place, 2, 8, 3, seed=6) if with_final else None
        loss = (wanted * dout).sum() + ((wanted_final * dfinal).sum() if with_final else 0)
        followed = [value for value in exacts if value is not None]
        gradients = iter(torch.autograd.grad(loss, followed))
        expected = [None if value is None else next(gradients) for value in exacts]
        room = torch.full((2, 3, 8, 5), math.nan, dtype=x.dtype, device=x.device)
        for dx in None, room[:, 1], "dout":
            outer = dout.clone()
            dx = outer if isinstance(dx, str) else dx
            for wants_initial in YES_OR_NO if with_initial and dx is None else [with_initial]:
                got = conv.causal_conv1d_bwd_function(
                    *(x, weight, bias, outer, seq_idx, initial, dfinal, dx),
                    *(wants_initial, silu),
                )
                assert isinstance(got, tuple) and len(got) == 4
                assert dx is None or got[0] is dx
                if not wants_initial:
                    assert got[3] is None
                    got = (*got[:3], expected[3])
                names = "x", "weight", "bias", "initial_states"
                for name, gradient, wanted_gradient in zip(names, got, expected, strict=True):
                    assert (gradient is None) == (wanted_gradient is None)
                    if gradient is not None:
                        what = f"causal_conv1d.grad_{name}"
                        assert_value(place, gradient, wanted_gradient, what)
        assert room[:, ::2].isnan().all()


@every_device
def test_backward_function_by_states_that_were_not_given(place):
    """The gradient by initial states that are None is that by zeros."""
    x, weight, dout = (tensor(place, 2, 8, 2), tensor(place, 8, 4), tensor(place, 2, 8, 2, seed=1))
    zeros = x.new_zeros(2, 8, 3)
    wanted, got = (
        conv.causal_conv1d_bwd_function(
            x, weight, None, dout, None, initial, None, None, True, True
        )
        for initial in (zeros, None)
    )
    assert wanted[3].any() and torch.equal(got[3], wanted[3])


@every_device
@every_dtype
def test_backward_function_keeps_dtypes(place, dtype):
    x, dout = tensor(place, 2, 8, 5, dtype=dtype), tensor(place, 2, 8, 5, seed=1, dtype=dtype)
    weight, bias = (tensor(place, 8, 4, dtype="float32"), tensor(place, 8, dtype="float32"))
    initial = tensor(place, 2, 8, 3, seed=2, dtype=dtype)
    got = conv.causal_conv1d_bwd_function(
        x, weight, bias, dout, None, initial, None, None, True, True
    )
    assert [gradient.dtype for gradient in got] == [x.dtype, torch.float32, torch.float32, x.dtype]


@every_device
@pytest.mark.parametrize("shape", [(2, 8, 4), (3, 2, 8, 5)])
def test_wrong_dx(place, shape):
    x, weight = tensor(place, 2, 8, 5), tensor(place, 8, 4)
    with pytest.raises(ValueError, match=r"^dx: expected .+, got .+; .+"):
        conv.causal_conv1d_bwd_function(
            x, weight, None, x, None, None, None, x.new_empty(shape), False, False
        )


@every_device
@pytest.mark.parametrize("silu", YES_OR_NO)
@pytest.mark.parametrize("ring", YES_OR_NO)
def test_update_function(place, silu, ring):
    x, weight, bias = tensor(place, 3, 8, 2), tensor(place, 8, 4, seed=1), tensor(place, 8, seed=2)
    state, seqlens, indices = normal(5, 8, 4, seed=3), np.array([3, 0, 9]), np.array([2, -1, 0])
    seqlens = seqlens if ring else None
    arrays = [place.numpy(value) for value in (x, weight, bias)]
    activation = "silu" if silu else None
    wanted, after = update_oracle.update(
        arrays[0], state, *arrays[1:], activation, seqlens, indices
    )
    state = place.array(state).clone()
    y = conv.causal_conv1d_update_function(
        *(x, state, weight, bias, silu),
        place.array(seqlens) if ring else None,
        place.array(indices),
    )
    assert_close(place.numpy(y), wanted, "causal_conv1d_update.value")
    assert_close(place.numpy(state), after, "causal_conv1d_update.state")


# Errors name the arguments as they are called there:


@every_device
def test_errors_name_their_arguments(place):
    x, weight = tensor(place, 2, 8, 5), tensor(place, 8, 4)
    wrong, packed, ends = x.new_zeros(2, 7, 3), tensor(place, 5, 8), [0, 5]

    def backward(dout=x, initial=None, dfinal=None):
        return conv.causal_conv1d_bwd_function(
            x, weight, None, dout, None, initial, dfinal, None, False, False
        )

    for name, kind, function in [
        ("x", TypeError, lambda: conv.causal_conv1d_fn(np.zeros((2, 8, 5)), weight)),
        ("x", ValueError, lambda: conv.causal_conv1d_fn(packed, weight)),
        ("x", TypeError, lambda: conv.causal_conv1d_fn(x.long(), weight)),
        ("weight", ValueError, lambda: conv.causal_conv1d_fn(x, weight[1:])),
        ("bias", ValueError, lambda: conv.causal_conv1d_fn(x, weight, weight[0])),
        ("activation", ValueError, lambda: conv.causal_conv1d_fn(x, weight, activation="relu")),
        ("seq_idx", ValueError, lambda: conv.causal_conv1d_fn(x, weight, seq_idx=x[0].long())),
        ("initial_states", ValueError, lambda: conv.causal_conv1d_fn(x, weight, None, None, wrong)),
        ("x", ValueError, lambda: conv.causal_conv1d_varlen_fn(x, weight, cu_seqlens=ends)),
        ("cu_seqlens", TypeError, lambda: conv.causal_conv1d_varlen_fn(packed, weight)),
        ("cu_seqlens", ValueError, lambda: conv.causal_conv1d_varlen_fn(packed, weight, None, [0])),
        ("cu_seqlens", ValueError, lambda: conv.causal_conv1d_varlen_states(packed, [0, 4], 3)),
        ("cu_seqlens", ValueError, lambda: conv.causal_conv1d_varlen_states(packed, [], 3)),
        ("state_len", ValueError, lambda: conv.causal_conv1d_varlen_states(packed, ends, -1)),
        ("x", TypeError, lambda: conv.causal_conv1d_update([[1.0]], wrong, weight)),
        ("conv_state", ValueError, lambda: conv.causal_conv1d_update(x, wrong, weight)),
        (
            "conv_state_indices",
            ValueError,
            lambda: conv.causal_conv1d_update(x, x, weight, None, None, None, [0, 2]),
        ),
        (
            "cache_seqlens",
            ValueError,
            lambda: conv.causal_conv1d_update(x, x, weight, None, None, [0]),
        ),
        ("dout", ValueError, lambda: backward(dout=x[:1])),
        ("dout", TypeError, lambda: backward(dout=None)),
        ("initial_states", ValueError, lambda: backward(initial=wrong)),
        ("dfinal_states", ValueError, lambda: backward(dfinal=wrong)),
    ]:
        with pytest.raises(kind, match=rf"^{name}: expected .+, got .+; .+"):
            function()


# SoftDTW:


def soft_dtw_by_cell(C, gamma, bandwidth):
    """Soft-DTW of one cost matrix, cell by cell, by operations that torch follows.

    A cell is left out where 0 < bandwidth < |i - j|. None where no path is left.
    """
    (N, M), R = C.shape, {(-1, -1): C.new_zeros(())}
    for i, j in itertools.product(range(N), range(M)):
        before = [R[cell] for cell in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if cell in R]
        if before and not 0 < bandwidth < abs(i - j):
            smoothed = -gamma * torch.logsumexp(torch.stack(before) / -gamma, dim=0)
            R[i, j] = C[i, j] + smoothed
    return R.get((N - 1, M - 1))


def squares(x, y):
    return ((x[:, :, None] - y[:, None]) ** 2).sum(3)


def roots(x, y):
    """A distance of a caller's own."""
    return (1 + squares(x, y)).sqrt()


def by_pairs(X, Y, distance, gamma, bandwidth):
    values = [soft_dtw_by_cell(C, gamma, bandwidth) for C in distance(X, Y)]
    return None if values[0] is None else torch.stack(values)


LENGTHS = [(6, 6), (4, 6), (6, 4), (5, 6), (1, 3), (1, 1)]


@every_device
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("bandwidth", [None, 0, -2, 0.5, 1, 1.5, 2, 3.0, 5, 99, math.inf])
@pytest.mark.parametrize("dist_func", [None, roots], ids=["default", "own"])
@pytest.mark.parametrize("normalize", YES_OR_NO)
def test_soft_dtw(place, lengths, bandwidth, dist_func, normalize):
    """Values and gradients, in each band that leaves a path, or an error where none is left."""
    N, M = lengths
    X, Y = tensor(place, 3, N, 2).requires_grad_(), tensor(place, 3, M, 2, seed=1).requires_grad_()
    module = soft.SoftDTW(True, 0.7, normalize, bandwidth, dist_func)
    x, y = exact(X), exact(Y)
    options = dist_func or squares, 0.7, bandwidth or 0
    wanted = by_pairs(x, y, *options)
    if wanted is None:
        with pytest.raises(ValueError, match=r"^bandwidth: expected .+, got .+; .+"):
            module(X, Y)
        return
    if normalize:
        wanted = wanted - (by_pairs(x, x, *options) + by_pairs(y, y, *options)) / 2
    values = module(X, Y)
    assert values.shape == (3,) and values.device == X.device
    terms = max(abs(by_pairs(a, b, *options)).max().item() for a, b in [(x, y), (x, x), (y, y)])
    assert_close(place.numpy(values), place.numpy(wanted), "soft_dtw.value", scale=terms)
    weights = tensor(place, 3, seed=4)
    got = torch.autograd.grad(values, (X, Y), weights)
    expected = torch.autograd.grad(wanted, (x, y), weights)
    scale = max(gradient.abs().max().item() for gradient in expected) + 1
    for name, gradient, exact_gradient in zip("XY", got, expected, strict=True):
        what = f"soft_dtw.grad_{name}"
        assert_close(place.numpy(gradient), place.numpy(exact_gradient), what, scale=scale)


@every_device
@every_dtype
@pytest.mark.parametrize("lengths", [(6, 6), (4, 6)], ids=str)
@pytest.mark.parametrize("bandwidth", [None, 2])
def test_soft_dtw_dtypes(place, dtype, lengths, bandwidth):
    X, Y = (tensor(place, 2, n, 3, seed=n, dtype=dtype).requires_grad_() for n in lengths)
    x, y = exact(X), exact(Y)
    values = soft.SoftDTW(False, gamma=0.5, bandwidth=bandwidth)(X, Y)
    wanted = by_pairs(x, y, squares, 0.5, bandwidth or 0)
    assert values.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    # The values cancel: costs of about 1 a cell against the logarithm of the number of paths.
    assert_close(place.numpy(values), place.numpy(wanted), "soft_dtw.value", scale=sum(lengths))
    got = torch.autograd.grad(values.sum(), (X, Y))
    expected = torch.autograd.grad(wanted.sum(), (x, y))
    for name, gradient, exact_gradient in zip("XY", got, expected, strict=True):
        assert gradient.dtype == X.dtype
        what = f"soft_dtw.grad_{name}"
        assert_close(place.numpy(gradient), place.numpy(exact_gradient), what)


@every_device
def test_soft_dtw_of_series_that_meet(place):
    """Where points coincide the gradient is 0, in a band of a rectangle too, which has costs."""
    X = tensor(place, 2, 1, 3).expand(2, 5, 3).clone().requires_grad_()
    Y = X[:, :4].detach()
    for bandwidth in None, 1:
        values = soft.SoftDTW(False, bandwidth=bandwidth)(X, Y)
        (gradient,) = torch.autograd.grad(values.sum(), X)
        assert torch.equal(gradient, torch.zeros_like(X))


@every_device
def test_soft_dtw_reads_its_attributes_in_the_call(place):
    X, Y = tensor(place, 2, 6, 2), tensor(place, 2, 6, 2, seed=1)
    module = soft.SoftDTW(use_cuda=False)
    assert (module.use_cuda, module.gamma, module.normalize, module.bandwidth) == (False, 1, 0, 0)
    before = module(X, Y)
    module.gamma, module.bandwidth, module.dist_func = 0.3, 2.0, roots
    assert not torch.equal(module(X, Y), before)
    assert torch.equal(module(X, Y), soft.SoftDTW(True, 0.3, False, 2, roots)(X, Y))


@every_device
@pytest.mark.parametrize("lengths, bandwidth", [((6, 6), None), ((6, 4), 2)], ids=str)
def test_soft_dtw_compiles(place, lengths, bandwidth):
    X, Y = (tensor(place, 2, n, 3, seed=n).requires_grad_() for n in lengths)
    module = soft.SoftDTW(True, normalize=True, bandwidth=bandwidth)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    wanted, got = module(X, Y), compiled(X, Y)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), (X, Y)), torch.autograd.grad(wanted.sum(), (X, Y))
    )


@every_device
def test_soft_dtw_errors(place):
    X, Y = tensor(place, 2, 6, 3), tensor(place, 2, 4, 3)
    for name, kind, options, series in [
        ("X", ValueError, {}, (X[0], Y)),
        ("Y", ValueError, {}, (X, Y[0])),
        ("Y", ValueError, {}, (X, Y[:1])),
        ("Y", ValueError, {}, (X, Y[..., :2])),
        ("gamma", ValueError, {"gamma": -1.0}, (X, Y)),
        ("bandwidth", ValueError, {"bandwidth": 1}, (X, Y)),
        ("X", TypeError, {"bandwidth": 2}, (X.long(), Y.long())),
        ("Y", TypeError, {"bandwidth": 2}, (X, Y.float())),
        ("dist_func", ValueError, {"dist_func": lambda x, y: squares(y, x)}, (X, Y)),
    ]:
        with pytest.raises(kind, match=rf"^{name}: expected .+, got .+; .+"):
            soft.SoftDTW(False, **options)(*series)


# provide:

PROVIDED = """
import importlib.metadata, importlib.util, json, sys
import cuseq.compat
cuseq.compat.provide("causal_conv1d")
cuseq.compat.provide("causal_conv1d")
heavy = [name for name in ("torch", "cupy", "jax", "causal_conv1d") if name in sys.modules]
spec = importlib.util.find_spec("causal_conv1d")
versions = [importlib.metadata.version(name) for name in ("causal_conv1d", "causal-conv1d")]
project = importlib.metadata.packages_distributions()["causal_conv1d"]
others = importlib.metadata.version("numpy")

import causal_conv1d
attributes = [name for name in dir(causal_conv1d) if not name.startswith("__")]
from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn as fn
from causal_conv1d.causal_conv1d_interface import causal_conv1d_update as update
from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_fn, causal_conv1d_varlen_states
from causal_conv1d.cpp_functions import (
    causal_conv1d_bwd_function, causal_conv1d_fwd_function, causal_conv1d_update_function
)
from cuseq.compat import causal_conv1d as ours
functions = [
    causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_fn, causal_conv1d_varlen_states,
    causal_conv1d_bwd_function, causal_conv1d_fwd_function, causal_conv1d_update_function,
]
print(json.dumps({
    "heavy": heavy,
    "spec": [spec.name, spec.origin, spec.submodule_search_locations],
    "spec_after": importlib.util.find_spec("causal_conv1d.cpp_functions").name,
    "missing": importlib.util.find_spec("causal_conv1d.other") is None,
    "versions": [*versions, causal_conv1d.__version__],
    "project": project,
    "others": others,
    "attributes": attributes,
    "ours": [getattr(ours, f.__name__) is f for f in (*functions, fn, update)],
}))
"""


def fresh(script, *, path=ROOT, succeeds=True):
    """Standard output, or the last line of the error, of a script in a process of its own."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r})\n" + script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode == 0) == succeeds, done.stderr
    return done.stdout if succeeds else done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def another(tmp_path_factory):
    """A folder with another project's causal_conv1d."""
    folder = tmp_path_factory.mktemp("another")
    (folder / "causal_conv1d.py").write_text("causal_conv1d_fn = causal_conv1d_update = None\n")
    return folder


def test_provide():
    """Every way of asking for causal_conv1d gives ours, and nothing is imported before."""
    got = json.loads(fresh(PROVIDED))
    assert got["heavy"] == []
    assert got["spec"] == ["causal_conv1d", "cuseq.compat.causal_conv1d", []]
    assert got["spec_after"] == "causal_conv1d.cpp_functions"
    assert got["missing"]
    assert got["versions"] == ["1.7.0"] * 3
    assert got["project"] == ["causal-conv1d"]
    assert got["others"] == np.__version__
    assert set(got["attributes"]) == {
        "causal_conv1d_fn",
        "causal_conv1d_update",
        "causal_conv1d_varlen_fn",
        "causal_conv1d_varlen_states",
        "causal_conv1d_interface",
        "causal_conv1d_varlen",
        "cpp_functions",
    }
    assert got["ours"] == [True] * 9


def test_provide_comes_before_an_installed_one(another):
    script = (
        "import cuseq.compat; cuseq.compat.provide('causal_conv1d')\n"
        "from causal_conv1d import causal_conv1d_fn; print(causal_conv1d_fn.__module__)"
    )
    assert fresh(script, path=another).strip() == "cuseq.compat.causal_conv1d"


def test_provide_after_another_was_imported(another):
    script = (
        "import causal_conv1d, cuseq.compat\n"
        "try:\n    cuseq.compat.provide('causal_conv1d')\n"
        "except RuntimeError as error:\n    print(error)\n"
        "print(causal_conv1d.causal_conv1d_fn, len(sys.meta_path))"
    )
    before = fresh("print(len(sys.meta_path))").strip()
    error, after = fresh(script, path=another).splitlines()
    assert error.startswith("name: expected a module that is not imported yet, causal_conv1d, got")
    assert str(another) in error
    assert after == f"None {before}"


def test_without_provide_there_is_none():
    error = fresh("import cuseq.compat, causal_conv1d_of_nobody", succeeds=False)
    assert error == "ModuleNotFoundError: No module named 'causal_conv1d_of_nobody'"
    script = (
        "import cuseq.compat, sys; print(any('cuseq' in type(f).__module__ for f in sys.meta_path))"
    )
    assert fresh(script).strip() == "False"


@pytest.mark.parametrize("name", ["causal-conv1d", "soft_dtw_cuda", None, 3])
def test_provide_of_another_name(name):
    with pytest.raises(ValueError, match=r"^name: expected one of 'causal_conv1d', got .+; .+"):
        cuseq.compat.provide(name)
