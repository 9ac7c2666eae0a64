"""cuseq.causal_conv1d_varlen, with states and backward, against the oracle and one by one."""

import math
from functools import cache
from itertools import accumulate, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuseq
from tests import frameworks
from tests.frameworks import (
    CUPY,
    assert_same_bits,
    every_cuda_place,
    every_place,
    every_place_and_dtype,
    over,
    run,
)
from tests.oracles import causal_conv1d as oracle
from tests.samples import normal
from tests.strategies import layouts
from tests.test_causal_conv1d import (
    MIXED,
    assert_fifty_agree,
    check_gradients,
    check_values,
    scale_of,
)
from tests.test_oracles import assert_gradients
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("error")


# (lengths, D, W, width): width is that of the initial states, None without them
SIZES = [
    ((), 3, 4, 3),
    ((), 3, 4, None),
    ((0,), 3, 4, 3),
    ((0, 0, 0), 2, 4, None),
    ((1,), 1, 1, None),
    ((1, 1, 1), 3, 4, 5),
    ((0, 5, 0, 0, 3, 2, 1, 0), 2, 4, 3),
    ((3, 0, 7), 2, 2, None),
    ((2, 9, 1), 33, 5, 8),
    ((4,), 0, 4, 3),
    ((15, 17, 1, 31), 31, 4, None),
    ((64, 1, 63, 0, 65), 3, 3, 2),
    ((127, 129), 2, 4, 4),
    ((3, 1000, 2), 2, 4, 3),
    ((40, 2), 3, 32, 40),
    ((20,), 130, 4, 3),
    ((1, 2, 3, 4, 5, 6, 7, 8), 64, 8, None),
]


def packing(lengths, dtype="int64"):
    """cu_seqlens of sequences of these lengths."""
    return np.array([0, *accumulate(lengths)], dtype)


def arguments(lengths, D, W, width, dtypes=("float64",) * 4, bias=True):
    """x (T, D), weight, bias and initial_state by name; `dtypes` are theirs in this order."""
    x, weight, bias_dtype, state = dtypes
    states = None if width is None else normal(len(lengths), D, width, seed=3, dtype=state)
    return {
        "x": normal(sum(lengths), D, dtype=x),
        "weight": normal(D, W, seed=1, dtype=weight),
        "bias": normal(D, seed=2, dtype=bias_dtype) if bias else None,
        "initial_state": states,
    }


def incoming(given_arrays, lengths):
    """Gradients by y and by the final state."""
    x, weight, _, state = given_arrays.values()
    width = weight.shape[1] - 1 if state is None else state.shape[2]
    state_dtype = (x if state is None else state).dtype.name
    return {
        "grad_y": normal(*x.shape, seed=4, dtype=x.dtype.name),
        "grad_final_state": normal(len(lengths), x.shape[1], width, seed=5, dtype=state_dtype),
    }


@cache
def random_case(size, dtypes, activation):
    """Arguments, the gradients that come in, and the oracle's answers."""
    given_arrays = arguments(*size, dtypes)
    outer = incoming(given_arrays, size[0])
    return given_arrays, outer, by_oracle(given_arrays, outer, packing(size[0]), activation)


def by_oracle(given_arrays, outer, cu_seqlens, activation):
    """(y, final_state), gradients by name."""
    x, weight, bias, state = given_arrays.values()
    rest = weight, cu_seqlens, bias, state, activation
    forward = oracle.forward_packed(x, *rest)
    return forward, oracle.gradients_packed(outer["grad_y"], x, *rest, outer["grad_final_state"])


def call_all(place, given_arrays, outer, cu_seqlens, activation=None):
    """y, final_state and gradients of the three functions; both forwards give the same y."""
    x, weight, bias, state = given_arrays.values()
    inputs = x, weight, bias
    options = {"cu_seqlens": cu_seqlens, "activation": activation, "initial_state": state}
    y = run(place, cuseq.causal_conv1d_varlen, *inputs, **options)
    again, final_state = run(place, cuseq.causal_conv1d_varlen_with_state, *inputs, **options)
    assert frameworks.same_bits(y, again)
    gradients = run(
        place,
        cuseq.causal_conv1d_varlen_backward,
        outer["grad_y"],
        *inputs,
        grad_final_state=outer["grad_final_state"],
        **options,
    )
    return y, final_state, gradients


def check(place, given_arrays, outer, expected, cu_seqlens, activation):
    """All results against the oracle's."""
    y, final_state, gradients = call_all(place, given_arrays, outer, cu_seqlens, activation)
    check_values((y, final_state), given_arrays, expected[0])
    check_gradients(gradients, given_arrays, expected[1])


@every_place_and_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(place, dtype, size):
    """Activation and the dtype of cu_seqlens alternate over the sizes."""
    number = SIZES.index(size)
    activation, index = (None, "silu")[number % 2], ("int32", "int64")[number // 2 % 2]
    case = random_case(size, (dtype,) * 4, activation)
    check(place, *case, packing(size[0], index), activation)


@every_place
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8, 32])
def test_widths_and_activations(place, activation, index, W):
    size = (0, 5, 1, 0, 2, 11, 0), 3, W, W
    case = random_case(size, ("float32",) * 4, activation)
    check(place, *case, packing(size[0], index), activation)


@every_place
@pytest.mark.parametrize("dtypes", MIXED, ids=" ".join)
def test_dtypes_are_independent(place, dtypes):
    for dtype in dtypes:
        if dtype not in place.dtypes:
            pytest.skip(f"{place}: NumPy's DLPack has no {dtype}")
    size = (5, 0, 2, 12), 3, 4, 4
    check(place, *random_case(size, dtypes, "silu"), packing(size[0]), "silu")


@every_place
def test_x_alone(place):
    """No bias, no states, and a weight of Conv1d's shape."""
    lengths = 7, 0, 2, 9
    given_arrays, cu_seqlens = arguments(lengths, 3, 4, None, bias=False), packing(lengths)
    x, weight, _, _ = given_arrays.values()
    expected, _ = oracle.forward_packed(x, weight, cu_seqlens)
    wanted = oracle.gradients_packed(np.ones_like(x), x, weight, cu_seqlens)
    for shape in ((3, 4), (3, 1, 4)):
        inputs, options = (x, weight.reshape(shape)), {"cu_seqlens": cu_seqlens}
        y = run(place, cuseq.causal_conv1d_varlen, *inputs, **options)
        assert_close(y, expected, "causal_conv1d.y")
        gradients = run(
            place, cuseq.causal_conv1d_varlen_backward, np.ones_like(x), *inputs, **options
        )
        assert gradients.weight.shape == shape
        gradients = gradients._replace(weight=gradients.weight.reshape(3, 4))
        check_gradients(gradients, given_arrays, wanted)


@every_place
@given(st.data())
def test_strides(place, data):
    """All arrays lie in memory as they like."""
    lengths = data.draw(st.lists(st.integers(0, 9), max_size=5))
    D, W = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    width = W - 1 + data.draw(st.integers(0, 2))
    activation = data.draw(st.sampled_from([None, "silu"]))
    given_arrays = arguments(lengths, D, W, width, ("float32",) * 4)
    outer = incoming(given_arrays, lengths)
    for arrays in (given_arrays, outer):
        for name, array in arrays.items():
            arrays[name] = data.draw(layouts(array.ndim, place.strides), label=name).of(array)
    lie = data.draw(layouts(1, place.strides, repeats=False), label="cu_seqlens")
    cu_seqlens = lie.of(packing(lengths))
    expected = by_oracle(given_arrays, outer, cu_seqlens, activation)
    check(place, given_arrays, outer, expected, cu_seqlens, activation)


@every_place
def test_forms_of_cu_seqlens(place):
    """An array of x's library, of NumPy, and sequences say the same."""
    lengths = 3, 0, 8
    given_arrays, outer, _ = random_case((lengths, 3, 4, 3), ("float32",) * 4, None)
    here = packing(lengths)
    there = [place.array(here), place.array(here.astype(np.int32))]
    forms = [*there, here, here.tolist(), tuple(here.tolist())]
    assert_same_bits([call_all(place, given_arrays, outer, form) for form in forms])


@every_place
@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([None, "silu"]),
)
def test_packed_equals_one_by_one(place, lengths, W, extra, activation):
    """States to the bit, in host memory values too."""
    given_arrays = arguments(lengths, 3, W, W - 1 + extra, ("float32",) * 4)
    outer, ends = incoming(given_arrays, lengths), packing(lengths)
    x, weight, bias, state = given_arrays.values()
    y, final_state, gradients = call_all(place, given_arrays, outer, ends, activation)
    wanted = {name: np.zeros(array.shape) for name, array in given_arrays.items()}
    for s, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        rows, one = slice(start, end), slice(s, s + 1)
        options = {"layout": "bld", "activation": activation, "initial_state": state[one].copy()}
        inputs = x[None, rows].copy(), weight, bias
        alone, after = run(place, cuseq.causal_conv1d_with_state, *inputs, **options)
        assert_close(y[rows], alone[0], "causal_conv1d.y", scale=scale_of(alone))
        assert place.device == "cuda" or frameworks.same_bits(y[rows], alone[0])
        assert frameworks.same_bits(final_state[one], after)
        options["grad_final_state"] = outer["grad_final_state"][one].copy()
        grad_y = outer["grad_y"][None, rows].copy()
        of_one = run(place, cuseq.causal_conv1d_backward, grad_y, *inputs, **options)
        wanted["x"][rows], wanted["initial_state"][one] = of_one.x[0], of_one.initial_state
        wanted["weight"] += of_one.weight
        wanted["bias"] += of_one.bias
    check_gradients(gradients, given_arrays, wanted)


@every_place
@given(
    cuts=st.integers(1, 5).flatmap(
        lambda rounds: st.lists(st.lists(st.integers(0, 6), min_size=rounds, max_size=rounds))
    ),
    W=st.sampled_from([1, 4]),
    extra=st.integers(0, 3),
)
@example(cuts=[[1] * 7, [0, 2, 0, 1, 3, 0, 1]], W=4, extra=2)
def test_pieces_through_the_states_equal_the_whole(place, cuts, W, extra):
    """The first pieces of all sequences are packed, then the second ones, from states to states.

    Gradients go back through the states, from the last pieces to the first.
    """
    lengths = [sum(of_sequence) for of_sequence in cuts]
    given_arrays = arguments(lengths, 2, W, W - 1 + extra, ("float32",) * 4)
    x, weight, bias, state = given_arrays.values()
    outer = incoming(given_arrays, lengths)
    expected, wanted = by_oracle(given_arrays, outer, packing(lengths), "silu")
    rounds = list(zip(*cuts, strict=True))
    rows = np.concatenate([np.repeat(range(len(cut)), cut) for cut in cuts] or [[]])

    y, states = np.zeros_like(x), []
    for number, pieces in enumerate(rounds):
        states.append(state)
        options = {"activation": "silu", "cu_seqlens": packing(pieces), "initial_state": state}
        inputs = x[rows == number], weight, bias
        results = run(place, cuseq.causal_conv1d_varlen_with_state, *inputs, **options)
        y[rows == number], state = results
    check_values((y, state), given_arrays, expected)

    total = {name: np.zeros_like(array) for name, array in given_arrays.items()}
    total["initial_state"] = outer["grad_final_state"]
    for number, pieces in reversed(list(enumerate(rounds))):
        gradients = run(
            place,
            cuseq.causal_conv1d_varlen_backward,
            outer["grad_y"][rows == number],
            x[rows == number],
            weight,
            bias,
            activation="silu",
            cu_seqlens=packing(pieces),
            initial_state=states[number],
            grad_final_state=total["initial_state"],
        )
        total["x"][rows == number] = gradients.x
        total["weight"] += gradients.weight
        total["bias"] += gradients.bias
        total["initial_state"] = gradients.initial_state
    check_gradients(SimpleNamespace(**total), given_arrays, wanted)


@every_place
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_packed_equals_sequences_by_index(place, lengths, W):
    given_arrays = arguments(lengths, 3, W, None, ("float32",) * 4)
    x, weight, bias, _ = given_arrays.values()
    options = {"activation": "silu", "cu_seqlens": packing(lengths)}
    y, states = run(place, cuseq.causal_conv1d_varlen_with_state, x, weight, bias, **options)
    seq_idx = np.repeat(np.arange(len(lengths)), lengths)[None]
    options = {"activation": "silu", "layout": "bld", "seq_idx": seq_idx}
    by_index, state = run(
        place, cuseq.causal_conv1d_with_state, x[None].copy(), weight, bias, **options
    )
    assert_close(y, by_index[0], "causal_conv1d.y", scale=scale_of(by_index))
    assert frameworks.same_bits(states[-1], state[0])


@every_place
@pytest.mark.parametrize("width", [3, 6])
def test_an_empty_sequence_keeps_its_state(place, width):
    lengths = 0, 4, 0, 0, 1, 0
    given_arrays = arguments(lengths, 3, 4, width, ("float32",) * 4)
    outer, empty = incoming(given_arrays, lengths), [0, 2, 3, 5]
    _, final_state, gradients = call_all(place, given_arrays, outer, packing(lengths))
    state = given_arrays["initial_state"]
    assert frameworks.same_bits(final_state[empty], state[empty])
    from_outside = outer["grad_final_state"][empty]
    assert frameworks.same_bits(gradients.initial_state[empty], from_outside)
    assert frameworks.same_bits(final_state[4][:, :-1], state[4][:, 1:])
    assert frameworks.same_bits(final_state[4][:, -1], given_arrays["x"][4])


@every_place_and_dtype
def test_nan_stays_in_its_sequence(place, dtype):
    lengths = 3, 5, 2, 0, 4
    given_arrays = arguments(lengths, 2, 4, 3, (dtype,) * 4)
    outer, ends = incoming(given_arrays, lengths), packing(lengths)
    clean = call_all(place, given_arrays, outer, ends, "silu")
    given_arrays["x"][6, 1] = given_arrays["initial_state"][4, 0] = math.nan
    y, final_state, gradients = call_all(place, given_arrays, outer, ends, "silu")
    assert np.isnan(y[6:8, 1]).all() and np.isnan(y[10:13, 0]).all()
    assert np.isnan(final_state[1, 1, 1]) and np.isnan(gradients.x[3:8, 1]).any()
    assert np.isnan(gradients.weight).any(axis=1).all()
    for got, before in (y, clean[0]), (gradients.x, clean[2].x):
        got[3:8, 1], got[10:, 0] = before[3:8, 1], before[10:, 0]
        assert frameworks.same_bits(got, before)
    others = [0, 2, 3]
    assert frameworks.same_bits(final_state[others], clean[1][others])
    assert frameworks.same_bits(gradients.initial_state[others], clean[2].initial_state[others])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W, width", [(1, 0), (4, 3), (4, 6)])
def test_gradients_by_central_differences(W, width, activation):
    """Of the functions themselves, with no oracle between."""
    lengths = 0, 3, 1, 0, 5, 0
    given_arrays, cu_seqlens = arguments(lengths, 2, W, width), packing(lengths)
    x, weight, bias, state = given_arrays.values()
    outer = incoming(given_arrays, lengths)
    options = {"cu_seqlens": cu_seqlens, "activation": activation, "initial_state": state}

    def objective():
        y, final_state = cuseq.causal_conv1d_varlen_with_state(x, weight, bias, **options)
        return (outer["grad_y"] * y).sum() + (outer["grad_final_state"] * final_state).sum()

    gradients = cuseq.causal_conv1d_varlen_backward(
        outer["grad_y"], x, weight, bias, grad_final_state=outer["grad_final_state"], **options
    )
    assert_gradients(gradients._asdict(), objective, given_arrays)


def test_sums_over_sequences_are_taken_in_float64():
    x, weight = np.ones((1003, 1), np.float32), np.ones((1, 1), np.float32)
    grad_y = np.array([2.0**25, *[1] * 1001, -(2.0**25)], np.float32)[:, None]
    gradients = cuseq.causal_conv1d_varlen_backward(
        grad_y, x, weight, np.zeros(1, np.float32), cu_seqlens=range(1004)
    )
    assert gradients.weight == gradients.bias == 1001


@every_place
def test_repeated_calls_give_the_same_bits(place):
    lengths = 100, 0, 7, 193
    given_arrays = arguments(lengths, 33, 4, 3, ("float32",) * 4)
    outer = incoming(given_arrays, lengths)
    assert_same_bits([call_all(place, given_arrays, outer, packing(lengths)) for _ in range(3)])


@frameworks.every_mixed_pair
def test_frameworks_mix_on_one_device(places):
    """Forward gives the kind of x, backward the kind of grad_y."""
    size = (5, 0, 2, 12), 3, 4, 4
    given_arrays, outer, (expected, gradients) = random_case(size, ("float32",) * 4, "silu")
    x, weight, bias, state = given_arrays.values()
    first, second = places
    options = {"activation": "silu", "initial_state": second.array(state)}
    options["cu_seqlens"] = second.array(packing(size[0]))
    others = first.array(weight), second.array(bias)
    results = cuseq.causal_conv1d_varlen_with_state(first.array(x), *others, **options)
    y, final_state = frameworks.taken(first, results)
    assert_close(y, expected[0], "causal_conv1d.y")
    assert_close(final_state, expected[1], "causal_conv1d.final_state")
    results = cuseq.causal_conv1d_varlen_backward(
        first.array(outer["grad_y"]),
        second.array(x),
        *others,
        grad_final_state=second.array(outer["grad_final_state"]),
        **options,
    )
    check_gradients(frameworks.taken(first, results), given_arrays, gradients)


# On a CUDA device, where the host does not look at cu_seqlens, and the plan matters:


@every_cuda_place
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize(
    "ends",
    [
        (10, 25, 45),  # the first is not 0
        (0, 25, 60),  # the last beyond T
        (0, 25, 35),  # or below it
        (-15, 25, 45),
        (0, 30, 20, 45),  # they fall
        (45, 0),
        (0, 2**31 - 1, 45),
        (0, -(2**31), 45),
        (50, 60, 70),
        (-9, -3, -1),
    ],
    ids=str,
)
def test_ends_out_of_range_on_the_device(place, index, ends):
    """NaN where no sequence is, and in states of those that are none; the others are as alone.

    Where ends fall, more positions may be NaN, for a sequence is found by bisection.
    """
    T, ranges = 45, list(pairwise(ends))
    valid = np.array([0 <= start <= end <= T for start, end in ranges])
    given_arrays = arguments([0] * len(ranges), 4, 4, 3, ("float32",) * 4)
    given_arrays["x"] = normal(T, 4, dtype="float32")
    x, weight, bias, state = given_arrays.values()
    outer = incoming(given_arrays, ranges)
    cu_seqlens = np.array(ends, index)
    y, final_state, gradients = call_all(place, given_arrays, outer, cu_seqlens, "silu")
    outside = np.ones(T, bool)
    for s in valid.nonzero()[0]:
        rows, one = slice(*ranges[s]), slice(s, s + 1)
        outside[rows] = False
        alone = oracle.forward(x[rows].T[None], weight, bias, state[one], "silu")
        assert_close(final_state[one], alone[1], "causal_conv1d.final_state")
        if list(ends) == sorted(ends):
            assert_close(y[rows], alone[0][0].T, "causal_conv1d.y", scale=scale_of(alone[0]))
            assert np.isfinite(gradients.x[rows]).all()
    for of_positions in (y, gradients.x):
        assert np.isnan(of_positions[outside]).all()
    for of_sequences in (final_state, gradients.initial_state):
        assert np.isnan(of_sequences[~valid]).all()
        assert np.isfinite(of_sequences[valid]).all()
    assert np.isfinite(gradients.weight).all() and np.isfinite(gradients.bias).all()


@over([CUPY])
def test_fifty_calls_give_the_same_bits(place):
    """Of several blocks a multiprocessor, and sums over all of them."""
    lengths = 1000, 0, 7, 1044, 1, 2051
    arrays = arguments(lengths, 130, 4, 3, ("float32",) * 4)
    outer = incoming(arrays, lengths)
    arrays["cu_seqlens"] = packing(lengths)
    functions = cuseq.causal_conv1d_varlen_with_state, cuseq.causal_conv1d_varlen_backward
    assert_fifty_agree(place, functions, arrays, outer, activation="silu")
