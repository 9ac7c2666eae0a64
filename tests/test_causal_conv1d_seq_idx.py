"""seq_idx of cuseq.causal_conv1d, with states and backward, against the oracle."""

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuseq
from tests import frameworks
from tests.frameworks import (
    CUPY,
    assert_same_bits,
    every_place,
    every_place_and_dtype,
    over,
    run,
)
from tests.oracles import causal_conv1d as oracle
from tests.samples import ROWS, normal
from tests.strategies import layouts, sizes
from tests.test_causal_conv1d import (
    MIXED,
    arguments,
    assert_fifty_agree,
    check_gradients,
    check_values,
    incoming,
    joined,
    scale_of,
    seen,
    turned,
)
from tests.test_oracles import assert_gradients
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("error")


# (B, D, L, W, S): S is the width of the initial state, None without one
SIZES = [
    (2, 3, 0, 4, 3),
    (3, 3, 1, 1, None),
    (3, 2, 1, 4, 3),
    (2, 1, 3, 4, None),
    (3, 2, 5, 4, 6),
    (2, 31, 15, 2, None),
    (2, 33, 17, 4, 5),
    (1, 32, 64, 3, 2),
    (2, 5, 65, 2, 3),
    (1, 4, 128, 4, None),
    (2, 1, 129, 3, 2),
    (1, 2, 2051, 4, 4),
    (1, 130, 20, 4, 3),
    (2, 3, 40, 32, 40),
    (0, 3, 8, 4, 3),
    (2, 0, 8, 4, None),
]


def random_rows(B, L, dtype="int64", seed=7):
    """Runs of 1 to 9 positions, of a few indices, a third of them padding."""
    random = np.random.default_rng(seed)
    rows = [
        np.repeat(random.choice([-1, -4, 0, 1, 2, 300], L + 1), random.integers(1, 10, L + 1))[:L]
        for _ in range(B)
    ]
    return np.array(rows, dtype).reshape(B, L)


def by_oracle(given_arrays, outer, seq_idx, activation):
    """(y, final_state), gradients by name."""
    x, weight, bias, state = given_arrays.values()
    rest = weight, seq_idx, bias, state, activation
    forward = oracle.forward_by_index(x, *rest)
    return forward, oracle.gradients_by_index(outer["grad_y"], x, *rest, outer["grad_final_state"])


@cache
def case_of_rows(W, S, dtypes, activation):
    """Arguments for ROWS, the gradients that come in, and the oracle's answers."""
    given_arrays = arguments(len(ROWS), 2, ROWS.shape[1], W, S, dtypes)
    outer = incoming(given_arrays)
    return given_arrays, outer, by_oracle(given_arrays, outer, ROWS, activation)


def call_both(place, given_arrays, outer, seq_idx, layout="bdl", lay=turned, **options):
    """y, final_state and gradients of the three functions; both forwards give the same y."""
    x, weight, bias, state = given_arrays.values()
    inputs = lay(x, layout), weight, bias
    options = {"layout": layout, "seq_idx": seq_idx, "initial_state": state, **options}
    y = run(place, cuseq.causal_conv1d, *inputs, **options)
    again, final_state = run(place, cuseq.causal_conv1d_with_state, *inputs, **options)
    assert frameworks.same_bits(y, again)
    gradients = run(
        place,
        cuseq.causal_conv1d_backward,
        lay(outer["grad_y"], layout),
        *inputs,
        grad_final_state=outer["grad_final_state"],
        **options,
    )
    return y, final_state, gradients


def check(place, given_arrays, outer, expected, seq_idx, activation, layout="bdl", lay=turned):
    """All results against the oracle's."""
    y, final_state, gradients = call_both(
        place, given_arrays, outer, seq_idx, layout, lay, activation=activation
    )
    check_values((y, final_state), given_arrays, expected[0], layout)
    check_gradients(gradients, given_arrays, expected[1], layout)


@every_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W, S", [(1, None), (1, 2), (2, 1), (4, None), (4, 3), (4, 15), (5, 6)])
def test_rows(place, layout, index, activation, W, S):
    case = case_of_rows(W, S, ("float32",) * 4, activation)
    check(place, *case, ROWS.astype(index), activation, layout)


@every_place_and_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(place, dtype, size):
    """Layout, index and activation alternate over the sizes."""
    number = SIZES.index(size)
    layout, activation = ("bdl", "bld")[number % 2], (None, "silu")[number // 2 % 2]
    given_arrays, outer, expected, seq_idx = random_case(size, dtype, activation)
    seq_idx = seq_idx.astype(("int32", "int64")[number // 4 % 2])
    check(place, given_arrays, outer, expected, seq_idx, activation, layout)


# Where sequences or padding begin: around packs of 4 or 8 positions, and tiles of 128 or 256
ENDS = [7, 8, 9, 12, 16, 20, 127, 128, 129, 132, 252, 255, 256, 257, 264, 300]
EDGES = {
    "sequences": range(len(ENDS)),
    "padding and sequences": [-1, 2] * 8,
    "sequences and padding": [2, -1] * 8,
    "sequences that come again": [0, 1] * 8,
}


@cache
def case_of_edges(dtype, kind):
    given_arrays = arguments(1, 3, ENDS[-1], 4, 5, (dtype,) * 4)
    outer = incoming(given_arrays)
    seq_idx = np.repeat(EDGES[kind], np.diff(ENDS, prepend=0))[None].astype(np.int32)
    return given_arrays, outer, by_oracle(given_arrays, outer, seq_idx, "silu"), seq_idx


@every_place
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("kind", EDGES)
def test_sequences_that_begin_at_edges_of_packs_and_tiles(place, dtype, layout, kind):
    if dtype not in place.dtypes:
        pytest.skip(f"{place}: NumPy's DLPack has no {dtype}")
    check(place, *case_of_edges(dtype, kind), "silu", layout)


@cache
def random_case(size, dtype, activation):
    given_arrays = arguments(*size, (dtype,) * 4)
    outer, seq_idx = incoming(given_arrays), random_rows(size[0], size[2])
    return given_arrays, outer, by_oracle(given_arrays, outer, seq_idx, activation), seq_idx


@every_place
@pytest.mark.parametrize("dtypes", MIXED, ids=" ".join)
def test_dtypes_are_independent(place, dtypes):
    for dtype in dtypes:
        if dtype not in place.dtypes:
            pytest.skip(f"{place}: NumPy's DLPack has no {dtype}")
    check(place, *case_of_rows(4, 4, dtypes, "silu"), ROWS, "silu")


@every_place
@pytest.mark.parametrize("bias", [False, True])
def test_without_states_and_their_gradients(place, bias):
    given_arrays = arguments(len(ROWS), 2, ROWS.shape[1], 4, None, bias=bias)
    x, weight, bias, _ = given_arrays.values()
    grad_y = normal(*x.shape, seed=4)
    wanted = oracle.gradients_by_index(grad_y, x, weight, ROWS, bias)
    gradients = run(place, cuseq.causal_conv1d_backward, grad_y, x, weight, bias, seq_idx=ROWS)
    check_gradients(gradients, given_arrays, wanted)


@every_place
@given(st.data())
def test_strides(place, data):
    """All arrays, seq_idx too, lie in memory as they like."""
    B, D, L = data.draw(st.integers(0, 3)), data.draw(sizes(5)), data.draw(sizes(33))
    W, extra = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 2))
    layout = data.draw(st.sampled_from(["bdl", "bld"]))
    index = data.draw(st.sampled_from(["int32", "int64"]))
    given_arrays = arguments(B, D, L, W, W - 1 + extra, ("float32",) * 4)
    outer, seq_idx = incoming(given_arrays), random_rows(B, L, index)
    for arrays in (given_arrays, outer):
        for name, array in arrays.items():
            arrays[name] = data.draw(layouts(array.ndim, place.strides), label=name).of(array)
    seq_idx = data.draw(layouts(2, place.strides), label="seq_idx").of(seq_idx)
    expected = by_oracle(given_arrays, outer, seq_idx, "silu")
    check(place, given_arrays, outer, expected, seq_idx, "silu", layout, seen)


@every_place
def test_forms_of_seq_idx(place):
    """An array of x's library, of NumPy, and nested sequences say the same."""
    given_arrays, outer, _ = case_of_rows(4, 3, ("float32",) * 4, "silu")
    there = [place.array(ROWS), place.array(ROWS.astype(np.int32))]
    forms = [*there, ROWS, ROWS.tolist(), tuple(map(tuple, ROWS.tolist()))]
    assert_same_bits([call_both(place, given_arrays, outer, form) for form in forms])


@every_place
@pytest.mark.parametrize("L", [0, 1, 9])
@pytest.mark.parametrize("index", [0, 7])
def test_one_index_changes_nothing(place, L, index):
    given_arrays = arguments(2, 3, L, 4, 5, ("float32",) * 4)
    outer, seq_idx = incoming(given_arrays), [[index] * L] * 2
    options = {"activation": "silu"}
    found = [call_both(place, given_arrays, outer, form, **options) for form in (seq_idx, None)]
    assert_same_bits(found)


@every_place_and_dtype
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_padding_holds_does_not_matter(place, dtype, layout, wrong):
    """Nor does the initial state of a row that begins with it and is not all padding."""
    given_arrays, outer, _ = case_of_rows(4, 5, (dtype,) * 4, "silu")
    spoiled = {name: array.copy() for name, array in given_arrays.items()}
    spoiled_outer = {name: array.copy() for name, array in outer.items()}
    for array in spoiled["x"], spoiled_outer["grad_y"]:
        array.transpose(0, 2, 1)[ROWS < 0] = wrong
    unread = (ROWS[:, 0] < 0) & (ROWS >= 0).any(axis=1)
    spoiled["initial_state"][unread] = wrong
    options = {"seq_idx": ROWS, "layout": layout, "activation": "silu"}
    y, final_state, gradients = call_both(place, given_arrays, outer, **options)
    assert_same_bits(
        [(y, final_state, gradients), call_both(place, spoiled, spoiled_outer, **options)]
    )
    assert not turned(y, layout).transpose(0, 2, 1)[ROWS < 0].any()
    assert not turned(gradients.x, layout).transpose(0, 2, 1)[ROWS < 0].any()
    assert not gradients.initial_state[unread].any()


def test_what_is_not_seen_is_no_term():
    """Nor one times 0, which would be NaN of what is infinite: so it is in NumPy."""
    given_arrays = arguments(1, 2, 11, 4, None)
    outer, seq_idx = incoming(given_arrays), [range(11)]
    given_arrays["weight"][:, 0] = math.inf
    y, _, gradients = call_both(frameworks.NUMPY, given_arrays, outer, seq_idx)
    assert np.isfinite(y[..., 1:]).all()  # position 0 sees a state of zeros
    assert np.isfinite(gradients.x).all()
    outer["grad_y"][0, 1, 4] = math.inf
    _, _, gradients = call_both(frameworks.NUMPY, given_arrays, outer, seq_idx)
    assert not gradients.weight[:, :3].any()


@every_place_and_dtype
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_nan_stays_in_its_sequence(place, dtype, layout):
    given_arrays = arguments(1, 2, 9, 4, 3, (dtype,) * 4)
    outer, seq_idx = incoming(given_arrays), [[0, 0, 0, 1, 1, 1, 2, 2, 2]]
    options = {"seq_idx": seq_idx, "layout": layout, "activation": "silu"}
    clean = call_both(place, given_arrays, outer, **options)
    given_arrays["x"][0, 1, 4] = math.nan
    y, final_state, gradients = call_both(place, given_arrays, outer, **options)
    for got, before in (y, clean[0]), (gradients.x, clean[2].x):
        got, before = turned(got, layout), turned(before, layout)
        assert np.isnan(got[0, 1, 4:6]).all()
        got[0, 1, 3:6] = before[0, 1, 3:6]
        assert frameworks.same_bits(got, before)
    assert frameworks.same_bits(final_state, clean[1])
    assert frameworks.same_bits(gradients.initial_state, clean[2].initial_state)
    assert np.isnan(gradients.weight).any(axis=1).tolist() == [False, True]


@every_place
def test_padding_behind_leaves_the_state_alone(place):
    """A ragged batch that is padded on the right ends in the states of its sequences."""
    given_arrays = arguments(4, 3, 8, 4, 3, ("float32",) * 4)
    x, weight, bias, state = given_arrays.values()
    lengths = [8, 5, 1, 0]
    seq_idx = np.where(np.arange(8) < np.array(lengths)[:, None], 0, -1)
    options = {"seq_idx": seq_idx, "initial_state": state}
    _, final_state = run(place, cuseq.causal_conv1d_with_state, x, weight, bias, **options)
    for row, length in enumerate(lengths):
        one = x[row : row + 1, :, :length].copy()
        options = {"initial_state": state[row : row + 1].copy()}
        _, alone = run(place, cuseq.causal_conv1d_with_state, one, weight, bias, **options)
        assert frameworks.same_bits(final_state[row : row + 1], alone)


@every_place
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    W=st.sampled_from([1, 4]),
    extra=st.integers(0, 3),
)
def test_pieces_through_the_state_equal_the_whole(place, lengths, cuts, W, extra):
    """A row of whole sequences may be cut anywhere: a piece that begins a sequence has no state.

    Gradients go back through the states, of which those that are not passed on have none.
    """
    seq_idx = np.repeat(np.arange(len(lengths)), lengths)[None]
    L = seq_idx.shape[1]
    given_arrays = arguments(1, 2, L, W, W - 1 + extra, ("float32",) * 4)
    x, weight, bias, state = given_arrays.values()
    outer = incoming(given_arrays)
    expected, wanted = by_oracle(given_arrays, outer, seq_idx, "silu")
    edges = sorted({0, L, *(cut for cut in cuts if cut < L)})
    parts = [slice(start, end) for start, end in zip(edges, edges[1:], strict=False)]
    is_new = [n > 0 and seq_idx[0, n] != seq_idx[0, n - 1] for n in edges[:-1]]

    def options(part):
        return {"activation": "silu", "seq_idx": seq_idx[:, part].copy()}

    outputs, states = [], []
    for part, new in zip(parts, is_new, strict=True):
        states.append(np.zeros_like(state) if new else state)
        inputs = x[..., part].copy(), weight, bias
        y, state = run(
            place,
            cuseq.causal_conv1d_with_state,
            *inputs,
            initial_state=states[-1],
            **options(part),
        )
        outputs.append(y)
    check_values((np.concatenate(outputs, axis=2), state), given_arrays, expected)

    from_later, found = outer["grad_final_state"], []
    for part, new, state in reversed(list(zip(parts, is_new, states, strict=True))):
        gradients = run(
            place,
            cuseq.causal_conv1d_backward,
            outer["grad_y"][..., part].copy(),
            x[..., part].copy(),
            weight,
            bias,
            initial_state=state,
            grad_final_state=from_later,
            **options(part),
        )
        found.insert(0, gradients)
        from_later = np.zeros_like(from_later) if new else gradients.initial_state
    check_gradients(joined(found, "bdl"), given_arrays, wanted)


@every_place
@given(
    st.lists(st.integers(-2, 2), min_size=0, max_size=9),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([None, "silu"]),
)
def test_any_row(place, row, W, extra, activation):
    given_arrays = arguments(1, 2, len(row), W, W - 1 + extra, ("float32",) * 4)
    outer, seq_idx = incoming(given_arrays), np.array([row], np.int32)
    expected = by_oracle(given_arrays, outer, seq_idx, activation)
    check(place, given_arrays, outer, expected, seq_idx, activation)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W, S", [(1, 1), (4, 3), (4, 13)])
def test_gradients_by_central_differences(W, S, activation):
    """Of the functions themselves, with no oracle between."""
    given_arrays = arguments(len(ROWS), 1, ROWS.shape[1], W, S)
    x, weight, bias, state = given_arrays.values()
    outer = incoming(given_arrays)
    options = {"activation": activation, "seq_idx": ROWS, "initial_state": state}

    def objective():
        y, final_state = cuseq.causal_conv1d_with_state(x, weight, bias, **options)
        return (outer["grad_y"] * y).sum() + (outer["grad_final_state"] * final_state).sum()

    gradients = cuseq.causal_conv1d_backward(
        outer["grad_y"], x, weight, bias, grad_final_state=outer["grad_final_state"], **options
    )
    assert_gradients(gradients._asdict(), objective, given_arrays)


@every_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_repeated_calls_give_the_same_bits(place, layout):
    given_arrays = arguments(2, 33, 300, 4, 3, ("float32",) * 4)
    outer, seq_idx = incoming(given_arrays), random_rows(2, 300)
    assert_same_bits([call_both(place, given_arrays, outer, seq_idx, layout) for _ in range(3)])


@over([CUPY])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_fifty_calls_give_the_same_bits(place, layout):
    """Of several blocks a multiprocessor, and sums over all of them."""
    arrays = arguments(2, 130, 2051, 4, 3, ("float32",) * 4)
    outer = incoming(arrays)
    arrays["x"], outer["grad_y"] = turned(arrays["x"], layout), turned(outer["grad_y"], layout)
    arrays["seq_idx"] = random_rows(2, 2051)
    functions = cuseq.causal_conv1d_with_state, cuseq.causal_conv1d_backward
    assert_fifty_agree(place, functions, arrays, outer, activation="silu", layout=layout)


@frameworks.every_mixed_pair
def test_frameworks_mix_on_one_device(places):
    given_arrays, _, ((wanted_y, _), _) = case_of_rows(4, 3, ("float32",) * 4, "silu")
    first, second = places
    x, weight, bias, state = (first.array(array) for array in given_arrays.values())
    options = {"activation": "silu", "seq_idx": second.array(ROWS), "initial_state": state}
    y = frameworks.taken(first, cuseq.causal_conv1d(x, weight, bias, **options))
    assert_close(y, wanted_y, "causal_conv1d.y", scale=scale_of(wanted_y))
