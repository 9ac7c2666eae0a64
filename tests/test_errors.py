"""Wrong arguments raise the right kind of error, in one form of sentence, before any work."""

import re

import ml_dtypes
import numpy as np
import pytest

import cuseq
from cuseq.host import causal_conv1d as host_conv
from cuseq.host import causal_conv1d_update as host_update
from cuseq.host import causal_conv1d_varlen as host_packed
from cuseq.host import soft_dtw as host_dtw
from cuseq.runtime import kernels
from tests import frameworks
from tests.frameworks import (
    JAX_CPU,
    JAX_CUDA,
    NUMPY,
    TORCH_CPU,
    TORCH_CUDA,
    every_cuda_place,
    every_host_place,
    every_place,
    home_of_state,
    over,
)
from tests.samples import normal
from tests.test_errors_soft_dtw_family import FAMILY


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def ran(*args):
        pytest.fail("work began before the arguments were checked")

    monkeypatch.setattr(kernels, "launch", ran)
    for module, functions in {
        host_dtw: ["forward", "backward", "alignment", "gamma_gradient"],
        host_conv: ["forward", "backward"],
        host_update: ["update"],
        host_packed: ["forward", "backward"],
    }.items():
        for function in functions:
            monkeypatch.setattr(module, function, ran)


def refused(error, argument, function, *arguments, **options):
    """The message of the error that a call must raise."""
    with pytest.raises(error) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert type(caught.value) is error
    assert re.fullmatch(rf"{re.escape(argument)}: expected .+, got .+; .+", message), message
    return message


OF_SERIES = [
    "soft_dtw",
    "soft_dtw_value_and_grad",
    "soft_dtw_alignment",
    "soft_dtw_value_and_grad_gamma",
    "soft_dtw_divergence",
    "soft_dtw_divergence_value_and_grad",
]
OF_COSTS = [
    "soft_dtw_from_cost",
    "soft_dtw_from_cost_value_and_grad",
    "soft_dtw_from_cost_value_and_grad_gamma",
]


def over_functions(names):
    """Parametrise a test over `function`."""
    return pytest.mark.parametrize("function", [getattr(cuseq, name) for name in names])


def two_pairs(function, place=NUMPY):
    """Arrays of B = 2, N = 3, M = 4 for a function of soft-DTW."""
    given = function.__name__ in OF_COSTS
    shapes = [(2, 3, 4)] if given else [(2, 3, 1), (2, 4, 1)]
    return [place.array(np.zeros(shape)) for shape in shapes]


def convolution(place, name, **changed):
    """A function and good arguments for it, but for the NumPy arrays in `changed`."""
    arrays = {
        "x": normal(2, 3, 9),
        "weight": normal(3, 4),
        "bias": normal(3),
        "initial_state": normal(2, 3, 3),
    }
    if name in PACKED:
        arrays |= {"x": normal(9, 3), "cu_seqlens": np.array([0, 5, 9])}
    if name == "causal_conv1d_update":
        arrays["state"] = arrays.pop("initial_state")
    if name in BACKWARDS:
        arrays = {"grad_y": normal(*arrays["x"].shape), **arrays}
    arrays.update(changed)
    brought = {k: place.array(x) if isinstance(x, np.ndarray) else x for k, x in arrays.items()}
    return getattr(cuseq, name), brought


def place_and_argument(place, name, argument):
    """JAX has no update, and the update calls its state otherwise."""
    if name == "causal_conv1d_update":
        return home_of_state(place), argument
    return place, "initial_state" if argument == "state" else argument


BY_ROW = ["causal_conv1d", "causal_conv1d_with_state", "causal_conv1d_backward"]
PACKED = [
    "causal_conv1d_varlen",
    "causal_conv1d_varlen_with_state",
    "causal_conv1d_varlen_backward",
]
BACKWARDS = BY_ROW[2], PACKED[2]
CONVOLUTIONS = [*BY_ROW, "causal_conv1d_update", *PACKED]
every_convolution = pytest.mark.parametrize("name", CONVOLUTIONS)
every_by_row = pytest.mark.parametrize("name", BY_ROW)
every_packed = pytest.mark.parametrize("name", PACKED)
every_backward = pytest.mark.parametrize("name", BACKWARDS)

# Shapes:


@every_place
@over_functions(OF_SERIES)
@pytest.mark.parametrize(
    "argument, a, b",
    [
        ("a", (), (4,)),
        ("b", (4,), ()),
        ("a", (1, 2, 3, 4), (3, 4)),
        ("b", (3, 4), (1, 2, 3, 4)),
        ("a", (0,), (4,)),
        ("a", (2, 0, 3), (2, 4, 3)),
        ("b", (2, 4, 3), (2, 0, 3)),
        ("b", (0, 4, 3), (0, 0, 3)),
        ("b", (5, 3), (5, 2)),
        ("b", (5,), (5, 2)),
        ("b", (2, 5, 3), (3, 5, 3)),
        ("b", (2, 5, 3), (0, 5, 3)),
    ],
)
def test_shapes_of_series(place, function, argument, a, b):
    refused(ValueError, argument, function, place.array(np.zeros(a)), place.array(np.zeros(b)))


@every_place
@over_functions(OF_COSTS)
@pytest.mark.parametrize("shape", [(), (4,), (1, 2, 3, 4), (0, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_shapes_of_given_costs(place, function, shape):
    refused(ValueError, "C", function, place.array(np.zeros(shape)))


@every_place
@over_functions(OF_SERIES + OF_COSTS)
@pytest.mark.parametrize("option", ["gamma", "bandwidth", "lengths_a", "lengths_b"])
@pytest.mark.parametrize("shape", [(3,), (1,), (0,), (2, 1), (1, 2)], ids=str)
def test_shapes_of_options_by_pair(place, function, option, shape):
    numbers = np.ones(shape, np.float64 if option == "gamma" else np.int64)
    for form in (place.array(numbers), numbers, numbers.tolist()):
        refused(ValueError, option, function, *two_pairs(function, place), **{option: form})


@every_place
@every_convolution
@pytest.mark.parametrize(
    "argument, shape",
    [
        ("x", (9,)),
        ("x", (2, 3, 9, 1)),
        ("weight", (3,)),
        ("weight", (4, 4)),
        ("weight", (3, 0)),
        ("weight", (3, 33)),
        ("weight", (3, 2, 4)),
        ("weight", (3, 1, 1, 4)),
        ("weight", (1, 4)),
        ("bias", (4,)),
        ("bias", (1,)),
        ("bias", (3, 1)),
        ("bias", ()),
        ("state", (2, 3, 2)),
        ("state", (2, 4, 3)),
        ("state", (3, 3, 3)),
        ("state", (3, 3)),
        ("state", (1, 3, 3)),
    ],
    ids=str,
)
def test_shapes_of_a_convolution(place, name, argument, shape):
    place, argument = place_and_argument(place, name, argument)
    function, arrays = convolution(place, name, **{argument: np.zeros(shape)})
    refused(ValueError, argument, function, **arrays)


@every_by_row
def test_x_has_three_axes(name):
    function, arrays = convolution(NUMPY, name, x=np.zeros((3, 9)))
    message = refused(ValueError, "x", function, **arrays)
    assert "(B, D, L)" in message
    assert "(B, L, D)" in refused(ValueError, "x", function, **arrays, layout="bld")


@every_packed
def test_packed_x_has_two_axes(name):
    function, arrays = convolution(NUMPY, name, x=np.zeros((1, 9, 3)))
    assert "(T, D)" in refused(ValueError, "x", function, **arrays)


def test_the_layout_says_where_the_channels_are():
    refused(ValueError, "weight", cuseq.causal_conv1d, normal(2, 9, 3), normal(3, 4))
    refused(ValueError, "weight", cuseq.causal_conv1d, normal(2, 3, 9), normal(3, 4), layout="bld")


@every_place
@every_backward
@pytest.mark.parametrize(
    "argument, shape",
    [
        ("grad_y", (2, 3, 8)),
        ("grad_y", (2, 3)),
        ("grad_final_state", (2, 3, 4)),
        ("grad_final_state", (1, 3, 3)),
    ],
)
def test_shapes_of_incoming_gradients(place, name, argument, shape):
    function, arrays = convolution(place, name, **{argument: np.zeros(shape)})
    refused(ValueError, argument, function, **arrays)


@every_place
@pytest.mark.parametrize("argument", ["cache_seqlens", "state_indices"])
@pytest.mark.parametrize("shape", [(), (3,), (1,), (2, 1)])
def test_shapes_of_index_arguments(place, argument, shape):
    function, arrays = convolution(home_of_state(place), "causal_conv1d_update")
    index = place.array(np.zeros(shape, np.int32))
    refused(ValueError, argument, function, **arrays, **{argument: index})


@every_place
@every_by_row
@pytest.mark.parametrize("shape", [(), (9,), (2,), (1, 9), (2, 8), (9, 2), (2, 3, 9)], ids=str)
def test_shapes_of_seq_idx(place, name, shape):
    function, arrays = convolution(place, name)
    index = place.array(np.zeros(shape, np.int32))
    assert "(B, L)" in refused(ValueError, "seq_idx", function, **arrays, seq_idx=index)


@every_by_row
def test_seq_idx_has_one_shape_in_both_layouts(name):
    arrays = {"x": normal(2, 9, 3), "initial_state": normal(2, 3, 3)}
    if name == "causal_conv1d_backward":
        arrays["grad_y"] = normal(2, 9, 3)
    function, arrays = convolution(NUMPY, name, **arrays)
    arrays["layout"] = "bld"
    refused(ValueError, "seq_idx", function, **arrays, seq_idx=np.zeros((2, 3), np.int32))
    with pytest.raises(pytest.fail.Exception, match="work began"):
        function(**arrays, seq_idx=np.zeros((2, 9), np.int32))


@every_place
@every_packed
@pytest.mark.parametrize("shape", [(), (0,), (3, 1), (1, 3)], ids=str)
def test_shapes_of_cu_seqlens(place, name, shape):
    ends = np.zeros(shape, np.int64)
    for form in (place.array(ends), ends, ends.tolist()):
        if shape == () and not hasattr(form, "shape"):
            continue  # a number is no array
        function, arrays = convolution(place, name, cu_seqlens=form)
        assert "(S + 1,)" in refused(ValueError, "cu_seqlens", function, **arrays)


# Dtypes:


@every_place
@over_functions(OF_SERIES)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64", "complex128"])
def test_dtypes_of_series(place, function, dtype):
    wrong, right = place.array(np.zeros(5, dtype)), place.array(np.zeros(5))
    assert dtype in refused(TypeError, "a", function, wrong, wrong)
    refused(TypeError, "a", function, wrong, right)
    refused(TypeError, "b", function, right, wrong)


@every_place
@over_functions(OF_SERIES)
def test_both_series_have_one_dtype(place, function):
    a, b = place.array(np.zeros(5, np.float32)), place.array(np.zeros(5))
    refused(TypeError, "b", function, a, b)
    refused(TypeError, "b", function, b, place.array(np.zeros(5, np.float16)))


@every_place
@over_functions(OF_COSTS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "bool", "complex64", "complex128"])
def test_dtypes_of_given_costs(place, function, dtype):
    assert dtype in refused(TypeError, "C", function, place.array(np.zeros((3, 4), dtype)))


@every_place
@over_functions(OF_SERIES + OF_COSTS)
@pytest.mark.parametrize("option", ["bandwidth", "lengths_a", "lengths_b"])
@pytest.mark.parametrize("dtype", ["int8", "uint64", "bool", "float32", "float64"])
def test_dtypes_of_integers_by_pair(place, function, option, dtype):
    numbers = np.ones(2, dtype)
    for form in (place.array(numbers), numbers):
        refused(TypeError, option, function, *two_pairs(function, place), **{option: form})


@every_place
@over_functions(OF_SERIES + OF_COSTS)
@pytest.mark.parametrize("dtype", ["bool", "complex64"])
def test_dtypes_of_gamma_by_pair(place, function, dtype):
    numbers = np.ones(2, dtype)
    for form in (place.array(numbers), numbers):
        refused(TypeError, "gamma", function, *two_pairs(function, place), gamma=form)


@every_cuda_place
def test_gamma_of_integers_on_the_device(place):
    gamma = place.array(np.ones(2, np.int64))
    refused(TypeError, "gamma", cuseq.soft_dtw, *two_pairs(cuseq.soft_dtw, place), gamma=gamma)


@every_place
@every_convolution
@pytest.mark.parametrize("argument", ["x", "weight", "bias", "state"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_dtypes_of_a_convolution(place, name, argument, dtype):
    place, argument = place_and_argument(place, name, argument)
    shapes = {"x": (2, 3, 9), "weight": (3, 4), "bias": (3,)}
    wrong = np.zeros(shapes.get(argument, (2, 3, 3)), dtype)
    function, arrays = convolution(place, name, **{argument: wrong})
    refused(TypeError, argument, function, **arrays)


@every_place
@every_backward
@pytest.mark.parametrize("argument", ["grad_y", "grad_final_state"])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_incoming_gradients_have_the_dtype_of_what_they_belong_to(place, name, argument, dtype):
    function, arrays = convolution(place, name)
    shape = (9, 3) if name in PACKED else (2, 3, 9)
    if argument == "grad_final_state":
        shape = 2, 3, 3
    arrays[argument] = place.array(np.zeros(shape, dtype))
    refused(TypeError, argument, function, **arrays)


@every_place
@pytest.mark.parametrize("argument", ["cache_seqlens", "state_indices"])
@pytest.mark.parametrize("dtype", ["int8", "uint64", "bool", "float32"])
def test_dtypes_of_index_arguments(place, argument, dtype):
    function, arrays = convolution(home_of_state(place), "causal_conv1d_update")
    for kind in (place.array, NUMPY.array, list):
        index = kind(np.zeros(2, dtype))
        if kind is list and dtype in ("int8", "uint64"):
            continue  # a list of integers is fine
        refused(TypeError, argument, function, **arrays, **{argument: index})


@every_place
@every_by_row
@pytest.mark.parametrize("dtype", ["int8", "uint64", "bool", "float32"])
def test_dtypes_of_seq_idx(place, name, dtype):
    function, arrays = convolution(place, name)
    wrong = np.zeros((2, 9), dtype)
    for form in (place.array(wrong), wrong):
        assert dtype in refused(TypeError, "seq_idx", function, **arrays, seq_idx=form)


@every_place
@every_packed
@pytest.mark.parametrize("dtype", ["int8", "uint64", "bool", "float32"])
def test_dtypes_of_cu_seqlens(place, name, dtype):
    wrong = np.array([0, 5, 9]).astype(dtype)
    for form in (place.array(wrong), wrong):
        function, arrays = convolution(place, name)
        arrays["cu_seqlens"] = form
        assert dtype in refused(TypeError, "cu_seqlens", function, **arrays)


# Values:


@pytest.mark.parametrize("argument", ["cache_seqlens", "state_indices"])
@pytest.mark.parametrize("wrong", [-1, -(2**40)])
def test_index_values(argument, wrong):
    function, arrays = convolution(NUMPY, "causal_conv1d_update", state=normal(5, 3, 3))
    options = {"cache_seqlens": [0, 7], "state_indices": [4, 0]}
    if argument == "state_indices":
        wrong = 4 - wrong
    options[argument] = [2, wrong]
    assert str(wrong) in refused(ValueError, argument, function, **arrays, **options)


@every_host_place
@every_packed
@pytest.mark.parametrize(
    "ends, said",
    [
        ([1, 5, 9], ["0 first", "got 1"]),
        ([-1, 5, 9], ["0 first", "got -1"]),
        ([9, 5, 0], ["0 first", "got 9"]),
        ([0, 5, 8], ["T = 9 last", "got 8"]),
        ([0, 5, 2**33 + 9], ["T = 9 last", f"got {2**33 + 9}"]),
        ([0], ["T = 9 last", "got 0"]),
        ([0, 10, 9], ["do not fall", "got 9 after 10"]),
        ([0, -(2**63), 9], ["do not fall", f"got {-(2**63)} after 0"]),
        ([0, 2**63 - 1, 3, 9], ["do not fall", f"got 3 after {2**63 - 1}"]),
    ],
    ids=str,
)
def test_values_of_cu_seqlens(place, name, ends, said):
    for form in (place.array(np.array(ends)), np.array(ends), ends, tuple(ends)):
        function, arrays = convolution(place, name)
        arrays["cu_seqlens"] = form
        message = refused(ValueError, "cu_seqlens", function, **arrays)
        assert all(part in message for part in said), message


@every_packed
@pytest.mark.parametrize("ends", [[0, 9], [0, 0, 9], [0, 9, 9, 9], range(10)], ids=str)
def test_cu_seqlens_that_are_fine(name, ends):
    function, arrays = convolution(NUMPY, name, cu_seqlens=ends, initial_state=None)
    with pytest.raises(pytest.fail.Exception, match="work began"):
        function(**arrays)


@over_functions(OF_SERIES + OF_COSTS)
@pytest.mark.parametrize(
    "gamma, error",
    [
        (-1.0, ValueError),
        (-1e-300, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (-float("inf"), ValueError),
        (10**400, ValueError),
        ("1.0", TypeError),
        (True, TypeError),
        (np.bool_(True), TypeError),
        (None, TypeError),
        (1j, TypeError),
        ({1.0, 2.0}, TypeError),
        ([1.0, -2.0], ValueError),
        ((float("nan"), 1.0), ValueError),
        ([1, float("inf")], ValueError),
        (np.array([1, -1]), ValueError),
        (np.array([-1.0, 1.0], np.float16), ValueError),
        ([[1.0], [1.0, 2.0]], ValueError),
        (["1.0", "2.0"], TypeError),
        ([True, False], TypeError),
        ([None, 1.0], TypeError),
        ([1j, 1.0], TypeError),
    ],
    ids=lambda x: repr(x)[:20],
)
def test_gamma(function, gamma, error):
    refused(error, "gamma", function, *two_pairs(function), gamma=gamma)


@over_functions(OF_SERIES + OF_COSTS)
@pytest.mark.parametrize("option", ["lengths_a", "lengths_b"])
@pytest.mark.parametrize("place_of_wrong", [0, 1])
@pytest.mark.parametrize("wrong", [0, -1, 5, 2**32 + 1, -(2**63)])
def test_lengths_out_of_range(function, option, place_of_wrong, wrong):
    lengths = [2, 2]
    lengths[place_of_wrong] = wrong if wrong != 5 else {"lengths_a": 4, "lengths_b": 5}[option]
    for form in (lengths, np.array(lengths)):
        message = refused(ValueError, option, function, *two_pairs(function), **{option: form})
        assert str(lengths[place_of_wrong]) in message


@over_functions(OF_SERIES + OF_COSTS)
@pytest.mark.parametrize("option", ["lengths_a", "lengths_b", "bandwidth"])
@pytest.mark.parametrize(
    "wrong, error",
    [
        ([1.0, 2.0], TypeError),
        ([True, False], TypeError),
        (2.0, TypeError),
        (np.float64(2.0), TypeError),
        (True, TypeError),
        (np.bool_(True), TypeError),
        ("12", TypeError),
        ({1, 2}, TypeError),
        ([None, 1], TypeError),
        ([[1], [1, 2]], ValueError),
        (-1, ValueError),
        (-(2**70), ValueError),
        (np.int32(-7), ValueError),
        ([3, -1], ValueError),
        (np.array([-(2**40), 3]), ValueError),
    ],
    ids=lambda x: repr(x)[:20],
)
def test_what_is_no_integer_by_pair(function, option, wrong, error):
    refused(error, option, function, *two_pairs(function), **{option: wrong})


@over_functions(OF_SERIES + OF_COSTS)
@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0},
        {"gamma": 1},
        {"gamma": np.float32(0.5)},
        {"gamma": np.int64(2)},
        {"gamma": (0, 1)},
        {"gamma": [0.0, 1e300]},
        {"gamma": np.ones(2, np.uint8)},
        {"gamma": range(2)},
        {"bandwidth": 0},
        {"bandwidth": np.int8(3)},
        {"bandwidth": (0, 2**62)},
        {"lengths_a": [1, 3]},
        {"lengths_b": np.array([4, 1], np.int32)},
    ],
    ids=str,
)
def test_options_that_are_fine(function, options):
    with pytest.raises(pytest.fail.Exception, match="work began"):
        function(*two_pairs(function), **options)


@over_functions(OF_SERIES)
@pytest.mark.parametrize("cost", ["sqeuclid", "", None, 2, abs, ["sqeuclidean"]], ids=str)
def test_names_of_costs(function, cost):
    refused(ValueError, "cost", function, np.zeros(3), np.zeros(4), cost=cost)


@every_convolution
@pytest.mark.parametrize(
    "option, value",
    [
        ("layout", "BDL"),
        ("layout", "dbl"),
        ("layout", None),
        ("activation", "relu"),
        ("activation", "SiLU"),
        ("activation", True),
        ("activation", np.array(["silu", "silu"])),
    ],
    ids=str,
)
def test_names_of_layouts_and_activations(name, option, value):
    if name in PACKED and option == "layout":
        return  # (T, D) is the only one
    function, arrays = convolution(NUMPY, name)
    refused(ValueError, option, function, **arrays, **{option: value})


# Kinds of arrays:

NO_ARRAYS = [[1.0, 2.0], (1.0,), 1.0, "series", None, object(), np.float64(1.0), {}]


@pytest.mark.parametrize("wrong", NO_ARRAYS, ids=lambda x: type(x).__name__)
def test_what_is_no_array(wrong):
    right = np.zeros(5)
    refused(TypeError, "a", cuseq.soft_dtw, wrong, right)
    refused(TypeError, "b", cuseq.soft_dtw, right, wrong)
    refused(TypeError, "C", cuseq.soft_dtw_from_cost, wrong)
    for name in CONVOLUTIONS:
        arguments = ["x", "weight"]
        if name == "causal_conv1d_update":
            arguments += ["state"]
        if name in BACKWARDS:
            arguments += ["grad_y"]
        if wrong is not None:
            arguments += ["bias"]
        for argument in arguments:
            function, arrays = convolution(NUMPY, name, **{argument: wrong})
            refused(TypeError, argument, function, **arrays)


@pytest.mark.parametrize("argument", ["cache_seqlens", "state_indices"])
def test_a_ragged_sequence_is_no_index_argument(argument):
    function, arrays = convolution(NUMPY, "causal_conv1d_update")
    refused(ValueError, argument, function, **arrays, **{argument: [[0], [1, 2]]})


@pytest.mark.parametrize("argument", ["cache_seqlens", "state_indices"])
@pytest.mark.parametrize("wrong", [3, 3.0, "ab", {0, 1}, [0.5, 1.0], [None, 1]], ids=str)
def test_what_is_no_index_argument(argument, wrong):
    function, arrays = convolution(NUMPY, "causal_conv1d_update")
    refused(TypeError, argument, function, **arrays, **{argument: wrong})


@every_by_row
@pytest.mark.parametrize(
    "wrong, error",
    [
        (3, TypeError),
        ("ab", TypeError),
        ({0, 1}, TypeError),
        ([[0.5] * 9] * 2, TypeError),
        ([[None] * 9] * 2, TypeError),
        ([[0] * 9, [1] * 8], ValueError),
        ([0] * 9, ValueError),
        ([], ValueError),
        ([[], []], ValueError),
    ],
    ids=lambda x: repr(x)[:20],
)
def test_what_is_no_seq_idx(name, wrong, error):
    function, arrays = convolution(NUMPY, name)
    refused(error, "seq_idx", function, **arrays, seq_idx=wrong)


@every_packed
@pytest.mark.parametrize(
    "wrong, error",
    [
        (None, TypeError),
        (9, TypeError),
        ("ab", TypeError),
        ({0, 9}, TypeError),
        ([0.0, 9.0], TypeError),
        ([None, 9], TypeError),
        ([], ValueError),
        ([[0], [5, 9]], ValueError),
    ],
    ids=str,
)
def test_what_are_no_cu_seqlens(name, wrong, error):
    function, arrays = convolution(NUMPY, name, cu_seqlens=wrong)
    refused(error, "cu_seqlens", function, **arrays)


@pytest.mark.parametrize(
    "wrong",
    [
        np.ma.array(np.zeros(5), mask=[0, 1, 0, 0, 0]),
        np.zeros(5, ">f8" if np.little_endian else "<f8"),
        np.zeros(5, object),
        np.zeros(5, "datetime64[s]"),
        np.zeros(5, "U3"),
        np.zeros(5, [("value", "f8")]),
        np.zeros(5, np.longdouble),
        np.zeros(5, ml_dtypes.float8_e5m2),
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}",
)
def test_arrays_of_numpy_that_are_not_plain(wrong):
    refused(TypeError, "a", cuseq.soft_dtw, wrong, np.zeros(5))
    refused(TypeError, "b", cuseq.soft_dtw, np.zeros(5), wrong)
    refused(TypeError, "C", cuseq.soft_dtw_from_cost, wrong)


def test_strides_of_no_whole_elements():
    fields = np.zeros(5, [("pad", "i4"), ("value", "f8")])
    refused(ValueError, "a", cuseq.soft_dtw, fields["value"], np.zeros(5))


@pytest.mark.parametrize("kind", [6, 10])
def test_devices_that_dlpack_names(kind):
    class Elsewhere:
        def __dlpack__(self, **options):
            pytest.fail("asked for memory elsewhere")

        def __dlpack_device__(self):
            return kind, 0

    refused(ValueError, "a", cuseq.soft_dtw, Elsewhere(), np.zeros(5))


@over([TORCH_CPU, TORCH_CUDA])
def test_tensors_that_autograd_follows(place):
    """The sentence names a function of cuseq.torch, and there is one of this name."""
    import cuseq.torch as adapter

    def named(message):
        name = re.search(r"cuseq\.torch\.(\w+)", message)[1]
        assert hasattr(adapter, name), name

    followed, plain = (place.array(np.zeros((1, 3, 1))) for _ in range(2))
    followed.requires_grad_()
    for name in OF_SERIES:
        function = getattr(cuseq, name)
        named(refused(ValueError, "a", function, followed, plain))
        named(refused(ValueError, "b", function, plain, followed))
    for name in OF_COSTS:
        named(refused(ValueError, "C", getattr(cuseq, name), followed))
    gamma = place.array(np.ones(1)).requires_grad_()
    refused(ValueError, "gamma", cuseq.soft_dtw, plain, plain, gamma=gamma)
    for name in CONVOLUTIONS:
        for argument in convolution(place, name)[1]:
            function, arrays = convolution(place, name)
            if argument == "cu_seqlens":
                continue  # autograd follows no integers
            arrays[argument].requires_grad_()
            named(refused(ValueError, argument, function, **arrays))
    parameter = place.library.nn.Parameter(place.array(np.zeros(3)))
    refused(ValueError, "a", cuseq.soft_dtw, parameter, place.array(np.zeros(3)))


@over([TORCH_CPU, TORCH_CUDA])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_plain_memory(place):
    torch, plain = place.library, place.array(np.zeros((5, 2)))
    refused(TypeError, "a", cuseq.soft_dtw, plain.to_sparse(), plain)
    refused(TypeError, "b", cuseq.soft_dtw, plain, plain.to_sparse_csr())
    refused(ValueError, "a", cuseq.soft_dtw, torch.zeros(5, 2, device="meta"), plain)


@over([TORCH_CPU, TORCH_CUDA])
def test_a_state_with_a_lazy_minus_sign(place):
    """Its numbers are not in its memory, so that an update of the memory would not be one."""
    torch = place.library
    numbers = torch.zeros(2, 3, 3, dtype=torch.complex128)
    state = numbers.to(place.array(np.zeros(1)).device).conj().imag
    assert state.is_neg()
    x, weight = place.array(normal(2, 3)), place.array(normal(3, 4))
    refused(ValueError, "state", cuseq.causal_conv1d_update, x, state, weight)


@over([JAX_CPU, JAX_CUDA])
def test_tracers(place):
    jax, a = place.library, place.array(np.zeros((5, 2)))
    x, weight = place.array(normal(2, 3, 9)), place.array(normal(3, 4))
    message = refused(TypeError, "a", jax.jit(lambda a: cuseq.soft_dtw(a, a)), a)
    assert "cuseq.jax" in message
    refused(TypeError, "b", jax.jit(lambda b: cuseq.soft_dtw(a, b)), a)
    refused(TypeError, "a", jax.grad(lambda a: cuseq.soft_dtw(a, a)), a)
    refused(TypeError, "a", jax.vmap(lambda a: cuseq.soft_dtw(a, a)), x)
    refused(TypeError, "C", jax.jit(cuseq.soft_dtw_from_cost), x)
    refused(TypeError, "gamma", jax.jit(lambda g: cuseq.soft_dtw(x, x, gamma=g)), x[:, 0, 0])
    refused(TypeError, "weight", jax.jit(lambda w: cuseq.causal_conv1d(x, w)), weight)


@over([JAX_CPU, JAX_CUDA])
def test_a_jax_array_is_no_state(place):
    function, arrays = convolution(place, "causal_conv1d_update")
    message = refused(TypeError, "state", function, **arrays)
    assert "cuseq.jax.causal_conv1d_update" in message


@pytest.mark.parametrize("layout", ["read-only", "broadcast", "broadcast channels"])
def test_states_that_can_not_be_updated(layout):
    state = normal(2, 3, 3)
    if layout == "read-only":
        state.flags.writeable = False
    elif layout == "broadcast":
        state = np.lib.stride_tricks.as_strided(state, state.shape, (0, *state.strides[1:]))
    else:
        state = np.lib.stride_tricks.as_strided(state, state.shape, (72, 0, 8))
    function, arrays = convolution(NUMPY, "causal_conv1d_update")
    refused(ValueError, "state", function, **{**arrays, "state": state})


@over([TORCH_CPU, TORCH_CUDA])
def test_an_expanded_tensor_is_no_state(place):
    function, arrays = convolution(place, "causal_conv1d_update")
    arrays["state"] = place.array(normal(1, 3, 3)).expand(2, 3, 3)
    refused(ValueError, "state", function, **arrays)


# Devices:


@every_cuda_place
def test_host_and_device_do_not_mix(place):
    """All arrays of a call live on one device, an index argument excepted: the call uploads it."""
    series = normal(5, 2)
    refused(ValueError, "b", cuseq.soft_dtw, place.array(series), series)
    refused(ValueError, "b", cuseq.soft_dtw, series, place.array(series))
    for name in CONVOLUTIONS:
        there, (function, here) = home_of_state(place), convolution(NUMPY, name)
        _, arrays = convolution(there, name)
        for argument in arrays.keys() - {"cu_seqlens"}:
            # What is compared with it is blamed where the first one is elsewhere.
            blamed = {"grad_y": "x", "x": "weight"}.get(argument, argument)
            refused(ValueError, blamed, function, **{**arrays, argument: here[argument]})


@every_cuda_place
def test_an_option_on_the_device_does_not_serve_host_arrays(place):
    function, arrays = convolution(NUMPY, "causal_conv1d_update")
    index = place.array(np.zeros(2, np.int64))
    refused(ValueError, "cache_seqlens", function, **arrays, cache_seqlens=index)
    function, arrays = convolution(NUMPY, "causal_conv1d")
    index = place.array(np.zeros((2, 9), np.int64))
    refused(ValueError, "seq_idx", function, **arrays, seq_idx=index)
    function, arrays = convolution(NUMPY, "causal_conv1d_varlen")
    arrays["cu_seqlens"] = place.array(np.array([0, 5, 9]))
    refused(ValueError, "cu_seqlens", function, **arrays)
    for name in OF_SERIES + OF_COSTS:
        function = getattr(cuseq, name)
        for option in ("gamma", "bandwidth", "lengths_a", "lengths_b"):
            dtype = np.float64 if option == "gamma" else np.int64
            there = {option: place.array(np.ones(2, dtype))}
            refused(ValueError, option, function, *two_pairs(function), **there)


def test_every_public_function_is_tested_here():
    functions = {*OF_SERIES, *OF_COSTS, *CONVOLUTIONS}
    assert functions | set(FAMILY) == set(cuseq.__all__)
    assert frameworks.DTYPES == list(cuseq.runtime.checks.FLOATING)
