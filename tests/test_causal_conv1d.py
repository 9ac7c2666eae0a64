"""cuseq.causal_conv1d, with states and backward, on every framework, against the oracle."""

import math
from functools import cache
from itertools import accumulate, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuseq
from cuseq.host import causal_conv1d as host
from tests import frameworks
from tests.frameworks import (
    CUPY,
    NUMPY,
    TORCH_CUDA,
    assert_same_bits,
    every_place,
    every_place_and_dtype,
    every_strided_place,
    over,
    run,
)
from tests.oracles import causal_conv1d as oracle
from tests.samples import dtype_of, normal
from tests.strategies import Layout, layouts, sizes
from tests.test_oracles import assert_gradients
from tests.tolerances import assert_close

# (B, D, L, W, S): S is the width of the initial state, None without one
SIZES = [
    (1, 1, 0, 4, 3),
    (3, 3, 1, 1, None),
    (3, 3, 1, 1, 0),
    (2, 1, 3, 4, None),
    (1, 3, 4, 4, 3),
    (3, 2, 5, 4, 6),
    (2, 31, 15, 2, None),
    (1, 32, 16, 3, 2),
    (2, 33, 17, 4, 5),
    (1, 64, 63, 4, None),
    (1, 3, 64, 8, 7),
    (2, 5, 65, 2, 3),
    (1, 3, 127, 4, None),
    (1, 4, 128, 4, 3),
    (2, 1, 129, 3, 2),
    (1, 2, 2051, 4, 4),
    (1, 130, 20, 4, 3),
    (1, 3, 31, 32, None),
    (1, 2, 32, 32, 31),
    (2, 3, 40, 32, 40),
    (1, 2, 2, 3, 9),
    (0, 3, 8, 4, 3),
    (2, 0, 8, 4, None),
]
# Around a pack of 4 float32 or 8 bfloat16, around a warp of such packs, and far from both; channels
# that are less than a pack, a few packs, or more than a warp of them.
EDGES = [
    (2, 3, 7, 4, 3),
    (1, 12, 8, 4, 3),
    (2, 1, 9, 4, 4),
    (2, 64, 9, 4, 3),
    (1, 4128, 9, 4, 3),
    (1, 12, 127, 4, 3),
    (1, 3, 128, 4, 3),
    (2, 1, 129, 4, 6),
    (2, 3, 255, 4, 3),
    (1, 12, 256, 4, 3),
    (1, 3, 257, 4, 3),
    (1, 12, 1000, 4, 3),
    (1, 3, 1001, 4, 5),
    (1, 3, 4099, 4, 3),
]
NAMES = "x", "weight", "bias", "initial_state"


def arguments(B, D, L, W, S, dtypes=("float64",) * 4, bias=True):
    """x (B, D, L), weight, bias and initial_state as a dict; `dtypes` are theirs in this order."""
    x, weight, bias_dtype, state = dtypes
    return {
        "x": normal(B, D, L, dtype=x),
        "weight": normal(D, W, seed=1, dtype=weight),
        "bias": normal(D, seed=2, dtype=bias_dtype) if bias else None,
        "initial_state": None if S is None else normal(B, D, S, seed=3, dtype=state),
    }


@cache
def random_case(size, dtypes, activation):
    """Arguments, the gradients that come in, and the oracle's answers."""
    given_arrays = arguments(*size, dtypes)
    outer = incoming(given_arrays)
    return given_arrays, outer, *by_oracle(given_arrays, outer, activation)


def incoming(given_arrays):
    """Gradients by y and by the final state."""
    x, weight, _, state = given_arrays.values()
    B, D, _ = x.shape
    kept = x if state is None else state
    S = weight.shape[1] - 1 if state is None else state.shape[2]
    return {
        "grad_y": normal(*x.shape, seed=4, dtype=x.dtype.name),
        "grad_final_state": normal(B, D, S, seed=5, dtype=kept.dtype.name),
    }


def by_oracle(given_arrays, outer, activation):
    """(y, final_state), gradients by name."""
    x, weight, bias, state = given_arrays.values()
    rest = weight, bias, state, activation
    return oracle.forward(x, *rest), oracle.gradients(
        outer["grad_y"], x, *rest, outer["grad_final_state"]
    )


def turned(x, layout):
    """(B, D, L) in the axes of `layout`, in new memory."""
    return seen(x, layout).copy()


def seen(x, layout):
    """A view of (B, D, L) in the axes of `layout`, or of the latter as the former."""
    return x if layout == "bdl" else x.transpose(0, 2, 1)


def check_forward(place, given_arrays, expected, activation, layout, lay=turned, offset=0):
    """y and final_state against the answer; both functions must give the same y."""
    x, weight, bias, state = given_arrays.values()
    inputs = lay(x, layout), weight, bias
    options = {"activation": activation, "layout": layout, "initial_state": state}
    y = run(place, cuseq.causal_conv1d, *inputs, offset=offset, **options)
    again, final_state = run(place, cuseq.causal_conv1d_with_state, *inputs, **options)
    assert frameworks.same_bits(y, again)
    check_values((y, final_state), given_arrays, expected, layout)


def check_values(results, given_arrays, expected, layout="bdl"):
    y, final_state = results
    x, _, _, state = given_arrays.values()
    assert y.dtype == x.dtype
    assert final_state.dtype == (x if state is None else state).dtype
    assert_close(y, turned(expected[0], layout), "causal_conv1d.y", scale=scale_of(expected[0]))
    assert_close(final_state, expected[1], "causal_conv1d.final_state")


def check_with_state(place, given_arrays, expected, activation, layout, lay=turned, offset=0):
    """As `check_forward` by the one function that returns both."""
    x, weight, bias, state = given_arrays.values()
    results = run(
        place,
        cuseq.causal_conv1d_with_state,
        lay(x, layout),
        weight,
        bias,
        activation=activation,
        layout=layout,
        initial_state=state,
        offset=offset,
    )
    check_values(results, given_arrays, expected, layout)


def check_backward(place, given_arrays, outer, expected, activation, layout, lay=turned, offset=0):
    x, weight, bias, state = given_arrays.values()
    gradients = run(
        place,
        cuseq.causal_conv1d_backward,
        lay(outer["grad_y"], layout),
        lay(x, layout),
        weight,
        bias,
        activation=activation,
        layout=layout,
        initial_state=state,
        grad_final_state=outer["grad_final_state"],
        offset=offset,
    )
    check_gradients(gradients, given_arrays, expected, layout)


def check_gradients(gradients, given_arrays, expected, layout="bdl"):
    x, weight, *_ = given_arrays.values()
    positions = x.size // max(len(weight), 1)
    for name in NAMES:
        given_array, gradient = given_arrays[name], getattr(gradients, name)
        if given_array is None:
            assert gradient is None
            continue
        assert gradient.dtype == given_array.dtype
        wanted = turned(expected[name], layout) if name == "x" else expected[name]
        # A sum over batch and length may cancel: it is as good as a random sum of its terms.
        terms = positions if name in ("weight", "bias") else 1
        scale = max(scale_of(wanted), math.sqrt(terms))
        assert_close(gradient, wanted, f"causal_conv1d.grad_{name}", scale=scale)


def scale_of(expected):
    """The largest number, or 1: a single output may cancel as well."""
    return max(np.abs(expected[np.isfinite(expected)]).max(initial=0.0), 1.0)


@every_place_and_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(place, dtype, size):
    """Layout and activation alternate over the sizes."""
    number = SIZES.index(size)
    layout, activation = ("bdl", "bld")[number % 2], (None, "silu")[number // 2 % 2]
    given_arrays, outer, expected, gradients = random_case(size, (dtype,) * 4, activation)
    check_forward(place, given_arrays, expected, activation, layout)
    check_backward(place, given_arrays, outer, gradients, activation, layout)


@every_place
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("size", EDGES, ids=str)
def test_edges_of_packs_and_warps(place, dtype, layout, size):
    if dtype not in place.dtypes:
        pytest.skip(f"{place}: NumPy's DLPack has no {dtype}")
    given_arrays, outer, expected, gradients = random_case(size, (dtype,) * 4, "silu")
    check_with_state(place, given_arrays, expected, "silu", layout)
    check_backward(place, given_arrays, outer, gradients, "silu", layout)


@every_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("W", [1, 2, 3, 5, 8, 32])
def test_widths_layouts_and_activations(place, layout, activation, W):
    size = 2, 3, 19, W, W
    given_arrays, outer, expected, gradients = random_case(size, ("float32",) * 4, activation)
    check_forward(place, given_arrays, expected, activation, layout)
    check_backward(place, given_arrays, outer, gradients, activation, layout)


MIXED = [
    ("float16", "float32", "float32", "float32"),
    ("bfloat16", "float32", "float64", "bfloat16"),
    ("float32", "bfloat16", "float16", "float64"),
    ("float64", "float16", "float32", "bfloat16"),
    ("bfloat16", "float16", "bfloat16", "float32"),
]


@every_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("dtypes", MIXED, ids=" ".join)
def test_dtypes_are_independent(place, layout, dtypes):
    for dtype in dtypes:
        if dtype not in place.dtypes:
            pytest.skip(f"{place}: NumPy's DLPack has no {dtype}")
    given_arrays, outer, expected, gradients = random_case((2, 3, 19, 4, 4), dtypes, "silu")
    check_forward(place, given_arrays, expected, "silu", layout)
    check_backward(place, given_arrays, outer, gradients, "silu", layout)


@every_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_x_alone(place, layout):
    """No bias, no states, and a weight of Conv1d's shape."""
    given_arrays = arguments(2, 3, 18, 4, None, bias=False)
    x, weight = turned(given_arrays["x"], layout), given_arrays["weight"]
    expected, _ = oracle.forward(given_arrays["x"], weight)
    grad_y = np.ones_like(x)
    wanted = oracle.gradients(turned(grad_y, layout), given_arrays["x"], weight)
    for shape in ((3, 4), (3, 1, 4)):
        y = run(place, cuseq.causal_conv1d, x, weight.reshape(shape), layout=layout)
        assert_close(y, turned(expected, layout), "causal_conv1d.y")
        gradients = run(
            place, cuseq.causal_conv1d_backward, grad_y, x, weight.reshape(shape), layout=layout
        )
        assert gradients.bias is None and gradients.initial_state is None
        assert_close(gradients.x, turned(wanted["x"], layout), "causal_conv1d.grad_x")
        assert gradients.weight.shape == shape
        assert_close(gradients.weight.reshape(3, 4), wanted["weight"], "causal_conv1d.grad_weight")


@every_place
@given(st.data())
def test_strides(place, data):
    """The layout names the axes whatever the strides: all arrays lie in memory as they like."""
    B, D, L = data.draw(st.integers(0, 3)), data.draw(sizes(33)), data.draw(sizes(33))
    W, extra = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 2))
    layout = data.draw(st.sampled_from(["bdl", "bld"]))
    given_arrays = arguments(B, D, L, W, W - 1 + extra, ("float32",) * 4)
    outer, offset = incoming(given_arrays), 0
    for arrays in (given_arrays, outer):
        for name, array in arrays.items():
            lie = data.draw(layouts(array.ndim, place.strides), label=name)
            arrays[name], offset = lie.of(array), lie.offset
    expected = by_host(given_arrays, outer, "silu")
    check_forward(place, given_arrays, expected[0], "silu", layout, seen, offset)
    check_backward(place, given_arrays, outer, expected[1], "silu", layout, seen, offset)


def by_host(given_arrays, outer, activation):
    """The float64 answers of cuseq.host, itself checked by the oracle, for what is too large."""
    x, weight, bias, state = (
        None if array is None else array.astype(np.float64) for array in given_arrays.values()
    )
    W = weight.shape[1]
    y, silu = np.zeros(x.shape), activation is not None
    final_state = np.zeros((*x.shape[:2], W - 1 if state is None else state.shape[2]))
    host.forward(x, weight, bias, state, silu, y, final_state)
    gradients = {
        name: None if array is None else np.zeros(array.shape)
        for name, array in given_arrays.items()
    }
    grad_y, grad_final_state = (array.astype(np.float64) for array in outer.values())
    host.backward(grad_y, x, weight, bias, state, silu, grad_final_state, *gradients.values())
    return (y, final_state), gradients


@every_place
def test_a_transposed_view_of_either_layout(place):
    given_arrays, outer, expected, gradients = random_case(
        (2, 40, 35, 4, 3), ("float32",) * 4, None
    )

    def lay(x, layout):
        return turned(x, "bld" if layout == "bdl" else "bdl").transpose(0, 2, 1)

    for layout in ("bdl", "bld"):
        check_forward(place, given_arrays, expected, None, layout, lay)
        check_backward(place, given_arrays, outer, gradients, None, layout, lay)


STRIDES = [("transposed", 0), *product(["sliced", "apart", "repeated", "backwards"], range(3))]


def laid(x, kind, axis):
    """The same numbers (repeated ones aside) with strides of a kind along an axis of x."""
    axis, axes = min(axis, x.ndim - 1), tuple(range(x.ndim))
    if kind == "sliced":  # from an array that is longer along this axis
        wide = np.zeros([n + 5 * (a == axis) for a, n in enumerate(x.shape)], x.dtype)
        part = wide[tuple(slice(n) for n in x.shape)]
        part[...] = x
        return part
    order = (*axes[:-2], *axes[:-3:-1]) if kind == "transposed" else axes
    step = {"transposed": 1, "apart": 2, "repeated": 0, "backwards": -1}[kind]
    return Layout(order, tuple(step if a == axis else 1 for a in axes), 0).of(x)


@cache
def laid_case(layout, kind, axis, only):
    """Arguments of which all, or one only, have these strides; and the oracle's answers."""
    given_arrays = arguments(2, 8, 41, 4, 5, ("float32",) * 4)
    outer = incoming(given_arrays)
    for arrays in (given_arrays, outer):
        for name, array in arrays.items():
            like_x = layout if name in ("x", "grad_y") else "bdl"
            array = turned(array, like_x)
            if only in (None, name):
                array = laid(array, kind, axis)
            arrays[name] = seen(array, like_x)
    return given_arrays, outer, *by_oracle(given_arrays, outer, "silu")


@every_strided_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("kind, axis", STRIDES)
def test_each_kind_of_strides(place, layout, kind, axis):
    """Of all arrays, or of one like x where the others are contiguous."""
    if kind == "backwards" and place.strides != "any":
        pytest.skip(f"{place}: it has no negative strides")
    offset = 3 if kind == "sliced" else 0
    for only in (None, "x", "grad_y"):
        given_arrays, outer, expected, gradients = laid_case(layout, kind, axis, only)
        check_with_state(place, given_arrays, expected, "silu", layout, seen, offset)
        check_backward(place, given_arrays, outer, gradients, "silu", layout, seen, offset)


@every_strided_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("offset", range(1, 8))
def test_any_alignment(place, layout, offset):
    """Of all arrays, and of each one alone, within the 8 elements of a pack."""
    if "bfloat16" not in place.dtypes:
        pytest.skip(f"{place}: NumPy's DLPack has no bfloat16")
    case = random_case((2, 16, 41, 4, 3), ("bfloat16",) * 4, "silu")
    given_arrays, outer, expected, wanted = case
    arrays = given_arrays | outer
    arrays |= {name: turned(arrays[name], layout) for name in ("x", "grad_y")}
    for moved in (arrays, *([name] for name in arrays)):
        there = {name: place.array(x, offset * (name in moved)) for name, x in arrays.items()}
        of_backward = {name: there.pop(name) for name in outer}
        options = {"activation": "silu", "layout": layout}
        results = cuseq.causal_conv1d_with_state(**there, **options)
        check_values(frameworks.taken(place, results), given_arrays, expected, layout)
        gradients = cuseq.causal_conv1d_backward(**there, **of_backward, **options)
        check_gradients(frameworks.taken(place, gradients), given_arrays, wanted, layout)


@every_place_and_dtype
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_nan_reaches_only_its_window(place, dtype, layout):
    given_arrays = arguments(2, 3, 20, 4, 3, (dtype,) * 4)
    x, weight, bias, state = given_arrays.values()
    options = {"layout": layout, "activation": "silu", "initial_state": state}
    clean = run(place, cuseq.causal_conv1d, turned(x, layout), weight, bias, **options)
    x[1, 2, 15] = math.nan
    y = run(place, cuseq.causal_conv1d, turned(x, layout), weight, bias, **options)
    y, clean = turned(y, layout), turned(clean, layout)
    assert np.isnan(y[1, 2, 15:19]).all()
    y[1, 2, 15:19] = clean[1, 2, 15:19]
    assert frameworks.same_bits(y, clean)

    gradients = run(
        place,
        cuseq.causal_conv1d_backward,
        turned(np.ones_like(x), layout),
        turned(x, layout),
        weight,
        bias,
        **options,
    )
    assert np.isnan(turned(gradients.x, layout)[1, 2, 12:19]).all()
    assert np.isfinite(turned(gradients.x, layout)[1, 2, :12]).all()
    assert np.isnan(gradients.weight).all(axis=1).tolist() == [False, False, True]
    assert np.isfinite(gradients.weight[:2]).all()
    assert np.isnan(gradients.bias).tolist() == [False, False, True]


@every_place_and_dtype
def test_silu_of_large_inputs(place, dtype):
    x = np.array([[[-3e4, -800, -90, 0, 90, 800, 3e4]]], dtype_of(dtype))
    given_arrays = {"x": x, "weight": np.ones((1, 1), x.dtype), "bias": None, "initial_state": None}
    outer = {"grad_y": np.ones_like(x), "grad_final_state": np.zeros((1, 1, 0), x.dtype)}
    expected = by_host(given_arrays, outer, "silu")
    check_forward(place, given_arrays, expected[0], "silu", "bdl")
    check_backward(place, given_arrays, outer, expected[1], "silu", "bdl")


@every_place
@given(
    pieces=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    W=st.sampled_from([1, 4]),
    extra=st.integers(0, 3),
    layout=st.sampled_from(["bdl", "bld"]),
)
@example(pieces=[1] * 11, W=4, extra=0, layout="bdl")
@example(pieces=[0, 2, 1, 0, 20], W=4, extra=7, layout="bld")
def test_pieces_through_the_state_equal_the_whole(place, pieces, W, extra, layout):
    """Values from piece to piece, and gradients back through the states from the last to the first.

    A piece may be shorter than the state, and the state wider than the filter needs.
    """
    size = 2, 2, sum(pieces), W, W - 1 + extra
    given_arrays, outer, expected, wanted = random_case(size, ("float32",) * 4, "silu")
    x, weight, bias, state = given_arrays.values()
    options = {"activation": "silu", "layout": layout}
    parts = [slice(end - n, end) for n, end in zip(pieces, accumulate(pieces), strict=True)]
    outputs, states = [], []
    for part in parts:
        states.append(state)
        inputs = turned(x[..., part], layout), weight, bias
        y, state = run(
            place, cuseq.causal_conv1d_with_state, *inputs, initial_state=state, **options
        )
        outputs.append(seen(y, layout))
    y = turned(np.concatenate(outputs, axis=2), layout)
    check_values((y, state), given_arrays, expected, layout)

    from_later, found = outer["grad_final_state"], []
    for part, state in zip(reversed(parts), reversed(states), strict=True):
        gradients = run(
            place,
            cuseq.causal_conv1d_backward,
            turned(outer["grad_y"][..., part], layout),
            turned(x[..., part], layout),
            weight,
            bias,
            initial_state=state,
            grad_final_state=from_later,
            **options,
        )
        found.insert(0, gradients)
        from_later = gradients.initial_state
    check_gradients(joined(found, layout), given_arrays, wanted, layout)


def joined(gradients, layout):
    """The gradients of a signal from those of its pieces, in their order."""
    along = 2 if layout == "bdl" else 1
    return gradients[0]._replace(
        x=np.concatenate([piece.x for piece in gradients], axis=along),
        weight=np.sum([piece.weight for piece in gradients], axis=0),
        bias=np.sum([piece.bias for piece in gradients], axis=0),
    )


@over([NUMPY, CUPY])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("L, W, S", [(7, 4, 3), (2, 4, 6)])
def test_gradients_by_central_differences(place, layout, activation, L, W, S):
    """Of the functions themselves, with no oracle between."""
    given_arrays = arguments(2, 2, L, W, S)
    given_arrays["x"] = turned(given_arrays["x"], layout)
    outer = incoming({**given_arrays, "x": seen(given_arrays["x"], layout)})
    outer["grad_y"] = turned(outer["grad_y"], layout)
    options = {"activation": activation, "layout": layout}

    def objective():
        y, final_state = run(place, cuseq.causal_conv1d_with_state, **given_arrays, **options)
        return (outer["grad_y"] * y).sum() + (outer["grad_final_state"] * final_state).sum()

    gradients = run(place, cuseq.causal_conv1d_backward, **outer, **given_arrays, **options)
    assert_gradients(gradients._asdict(), objective, given_arrays)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("size", [(3, 2, 1, 1, 0), (2, 3, 2, 4, 3), (1, 12, 257, 4, 5)], ids=str)
def test_the_oracle_agrees_with_conv1d_of_torch(size, activation):
    """Values and gradients in float64, from the state put before the signal."""
    torch = pytest.importorskip("torch")
    W = size[3]
    given_arrays, outer, expected, wanted = random_case(size, ("float64",) * 4, activation)
    leaves = {name: torch.tensor(x, requires_grad=True) for name, x in given_arrays.items()}
    x, weight, bias, state = leaves.values()
    signal = torch.cat((state, x), dim=2)
    final_state = signal[..., x.shape[2] :]
    y = torch.nn.functional.conv1d(
        signal[..., state.shape[2] - (W - 1) :], weight[:, None], bias, groups=len(weight)
    )
    if activation:
        y = torch.nn.functional.silu(y)
    torch.autograd.backward((y, final_state), [torch.tensor(grad) for grad in outer.values()])
    check_values((y.detach().numpy(), final_state.detach().numpy()), given_arrays, expected)
    gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
    check_gradients(SimpleNamespace(**gradients), given_arrays, wanted)


@every_place
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_repeated_calls_give_the_same_bits(place, layout):
    given_arrays, outer, *_ = random_case((2, 33, 300, 4, 3), ("float32",) * 4, None)
    x, weight, bias, state = given_arrays.values()

    def call():
        return run(
            place,
            cuseq.causal_conv1d_backward,
            turned(outer["grad_y"], layout),
            turned(x, layout),
            weight,
            bias,
            layout=layout,
            initial_state=state,
        )

    assert_same_bits([call() for _ in range(5)])


@frameworks.every_mixed_pair
def test_frameworks_mix_on_one_device(places):
    """Forward gives the kind of x, backward the kind of grad_y."""
    size = 2, 3, 19, 4, 4
    given_arrays, outer, expected, gradients = random_case(size, ("float32",) * 4, "silu")
    x, weight, bias, state = given_arrays.values()
    first, second = places
    options = {"activation": "silu", "initial_state": second.array(state)}
    others = first.array(weight), second.array(bias)
    results = cuseq.causal_conv1d_with_state(first.array(x), *others, **options)
    for got, wanted, name in zip(
        frameworks.taken(first, results), expected, ["y", "final_state"], strict=True
    ):
        assert_close(got, wanted, f"causal_conv1d.{name}")
    results = cuseq.causal_conv1d_backward(
        first.array(outer["grad_y"]),
        second.array(x),
        *others,
        grad_final_state=second.array(outer["grad_final_state"]),
        **options,
    )
    check_gradients(frameworks.taken(first, results), given_arrays, gradients)


# On a CUDA device, where the plan and the streams matter:


@pytest.mark.gpu
@over([CUPY])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("size", [(1, 70, 20_000, 4, 3), (3, 2, 5000, 32, 40), (40, 700, 50, 2, 2)])
def test_long_and_wide(place, layout, dtype, size):
    """Enough positions for several segments, and enough channels for one."""
    given_arrays = arguments(*size, (dtype,) * 4)
    outer = incoming(given_arrays)
    expected = by_host(given_arrays, outer, "silu")
    check_forward(place, given_arrays, expected[0], "silu", layout)
    check_backward(place, given_arrays, outer, expected[1], "silu", layout)


@over([CUPY])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fifty_calls_give_the_same_bits(place, layout, dtype):
    """Of several blocks a multiprocessor, and sums over all of them."""
    arrays = arguments(2, 130, 4099, 4, 3, (dtype,) * 4)
    outer = incoming(arrays)
    arrays["x"], outer["grad_y"] = turned(arrays["x"], layout), turned(outer["grad_y"], layout)
    functions = cuseq.causal_conv1d_with_state, cuseq.causal_conv1d_backward
    assert_fifty_agree(place, functions, arrays, outer, activation="silu", layout=layout)


def assert_fifty_agree(place, functions, arrays, outer, **options):
    """Check that 50 calls of forward and backward with the same arrays give the same bits."""
    forward, backward = functions
    arrays, outer = (
        {name: place.array(x) for name, x in named.items()} for named in (arrays, outer)
    )

    def call():
        results = forward(**arrays, **options), backward(**outer, **arrays, **options)
        return frameworks.taken(place, results)

    first = call()
    for _ in range(49):
        assert_same_bits([first, call()])


@over([CUPY, TORCH_CUDA])
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_follows_the_current_stream(place, layout):
    given_arrays, outer, *_ = random_case((2, 33, 300, 4, 3), ("float32",) * 4, None)
    x, weight, bias, state = given_arrays.values()

    def both(grad_y, x, weight, bias, state):
        options = {"layout": layout, "initial_state": state}
        forward = cuseq.causal_conv1d_with_state(x, weight, bias, **options)
        return forward, cuseq.causal_conv1d_backward(grad_y, x, weight, bias, **options)

    frameworks.assert_follows_the_stream(
        place, both, turned(outer["grad_y"], layout), turned(x, layout), weight, bias, state
    )


@over([TORCH_CUDA])
def test_on_a_second_device(place):
    torch = place.library
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second CUDA device")
    size = 2, 3, 19, 4, 4
    given_arrays, _, expected, _ = random_case(size, ("float32",) * 4, "silu")
    x, weight, bias, state = (place.array(x).to("cuda:1") for x in given_arrays.values())
    results = cuseq.causal_conv1d_with_state(
        x, weight, bias, activation="silu", initial_state=state
    )
    assert {result.device for result in results} == {torch.device("cuda:1")}
    y, _ = frameworks.taken(place, results)
    assert_close(y, expected[0], "causal_conv1d.y")
