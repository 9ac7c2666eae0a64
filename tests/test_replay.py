"""Calls that are replayed from the recording of an earlier one, on a device that is the host."""

import threading

import numpy as np
import pytest

import cuseq
from cuseq.runtime import arrays, checks, replay
from tests.cpu_runner import COMPILER
from tests.cpu_runner.device import installed, normal, on_device, shifted, transposed
from tests.frameworks import same_bits

pytestmark = pytest.mark.skipif(not COMPILER, reason="g++ is not installed")


@pytest.fixture(autouse=True)
def device():
    with installed():
        yield


@pytest.fixture
def runs(monkeypatch):
    """Names of the arrays that are borrowed, which a call does that runs in full."""
    borrowed, borrow = [], arrays.borrow

    def borrowing(name, x, operator):
        borrowed.append(name)
        return borrow(name, x, operator)

    monkeypatch.setattr(arrays, "borrow", borrowing)
    return borrowed


def filters(place=on_device, seed=0, shape=(2, 3, 7)):
    """x, weight and bias."""
    shapes = shape, (shape[1], 4), shape[1:2]
    return [place(normal(*shape, seed=seed + k)) for k, shape in enumerate(shapes)]


def convolve(arrays, **options):
    return np.asarray(cuseq.causal_conv1d(*arrays, **options))


def assert_same(results, others):
    assert type(results) is type(others)
    if isinstance(results, tuple):
        for result, other in zip(results, others, strict=True):
            assert_same(result, other)
    elif results is not None:
        assert type(results) is type(others) and results.strides == others.strides
        assert same_bits(np.asarray(results), np.asarray(others))


SERIES = (3, 5, 2), (3, 6, 2)
LENGTHS = {"lengths_a": np.array([5, 2, 1]), "lengths_b": np.array([1, 6, 3])}
STATE = {"initial_state": normal(2, 3, 5, seed=9)}
INDEX = {"seq_idx": np.array([[0, 0, 0, 1, 1, -1, 2]] * 2)}
SHAPES = (2, 3, 7), (3, 4), (3,)
PACKED = (9, 3), (3, 4), (3,)
STARTS = {"cu_seqlens": np.array([0, 4, 4, 9])}
CALLS = [
    (cuseq.causal_conv1d, SHAPES, {"activation": "silu"}),
    (cuseq.causal_conv1d, SHAPES[:2], INDEX),
    (cuseq.causal_conv1d_with_state, SHAPES, STATE | INDEX),
    (cuseq.causal_conv1d_backward, (SHAPES[0], *SHAPES), STATE | {"activation": "silu"}),
    (cuseq.causal_conv1d_backward, (SHAPES[0], *SHAPES[:2]), INDEX),
    (cuseq.causal_conv1d_varlen_with_state, PACKED, STARTS),
    (cuseq.causal_conv1d_varlen_backward, (PACKED[0], *PACKED), STARTS),
    (cuseq.causal_conv1d_update, ((2, 3), (2, 3, 5), *SHAPES[1:]), {"activation": "silu"}),
    (cuseq.causal_conv1d_update, ((2, 3), (2, 3, 5), *SHAPES[1:]), {"cache_seqlens": [3, 4]}),
    (cuseq.soft_dtw, SERIES, {"gamma": 0.5}),
    (cuseq.soft_dtw, SERIES, LENGTHS | {"bandwidth": np.array([1, 2, 0])}),
    (cuseq.soft_dtw_value_and_grad, SERIES, {"gamma": np.array([1.0, 0.0, 2.0])}),
    (cuseq.soft_dtw_alignment, SERIES, {"cost": "euclidean", "bandwidth": 2}),
    (cuseq.soft_dtw_value_and_grad_gamma, SERIES, LENGTHS),
    (cuseq.soft_dtw_from_cost_value_and_grad, ((3, 4, 5),), {}),
]
each_call = pytest.mark.parametrize(
    ("operator", "shapes", "options"),
    CALLS,
    ids=[f"{k}-{operator.__name__}" for k, (operator, *_) in enumerate(CALLS)],
)


@each_call
def test_a_call_is_replayed_on_other_arrays(operator, shapes, options, runs):
    def call(seed, function):
        given = [on_device(normal(*shape, seed=seed + k)) for k, shape in enumerate(shapes)]
        named = {
            name: on_device(x) if isinstance(x, (np.ndarray, list)) else x
            for name, x in ((name, as_array(x)) for name, x in options.items())
        }
        return function(*given, **named), given

    def as_array(x):
        return np.array(x) if isinstance(x, list) else x

    wanted = {seed: call(seed, operator.__wrapped__) for seed in (1, 2)}
    operator_of_its_own = replay.replayed(operator.__wrapped__)
    first = call(1, operator_of_its_own)
    runs.clear()
    second, first_again = call(2, operator_of_its_own), call(1, operator_of_its_own)
    assert not runs, "ran in full"
    for got, seed in (first, 1), (second, 2), (first_again, 1):
        assert_same(got[0], wanted[seed][0])
        for x, y in zip(got[1], wanted[seed][1], strict=True):  # a state is written
            assert same_bits(np.asarray(x), np.asarray(y))


def test_an_array_that_was_given_twice_may_be_two(runs):
    operator = replay.replayed(cuseq.soft_dtw.__wrapped__)
    a, b = (on_device(normal(2, 4, 3, seed=seed)) for seed in (0, 1))
    operator(a, a)
    runs.clear()
    got = operator(a, b)
    assert not runs
    assert_same(got, cuseq.soft_dtw.__wrapped__(a, b))


DIFFERENT = {
    "shape": (filters(shape=(2, 3, 8)), {}),
    "memory": (filters(transposed), {}),
    "alignment": (filters(shifted(1, 3)), {}),
    "alignment of whole packs": (filters(shifted(4, 4)), {}),
    "dtype": ([on_device(x.astype("float64")) for x in filters()], {}),
    "none": (filters()[:2], {}),
    "one more": (filters(), {"initial_state": on_device(normal(2, 3, 3))}),
    "option": (filters(), {"activation": "silu"}),
    "axes": (filters(shape=(2, 3, 3)), {"layout": "bld"}),
    "host": ([np.asarray(x) for x in filters()], {}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_call_that_differs_runs_in_full(what, runs):
    operator = replay.replayed(cuseq.causal_conv1d.__wrapped__)
    operator(*filters())
    given, options = DIFFERENT[what]
    for repeated in range(2):
        runs.clear()
        got = operator(*given, **options)
        replayed = repeated and what != "host"
        assert bool(runs) != replayed
        assert_same(got, cuseq.causal_conv1d.__wrapped__(*given, **options))


def test_kinds_of_numbers_are_told_apart():
    operator = replay.replayed(cuseq.soft_dtw.__wrapped__)
    a, b = (on_device(normal(2, 4, 3, seed=seed)) for seed in (0, 1))
    operator(a, b, bandwidth=1)
    for wrong in 1.0, True:
        with pytest.raises(TypeError, match="bandwidth"):
            operator(a, b, bandwidth=wrong)


def test_an_error_is_raised_every_time():
    for _ in range(3):
        with pytest.raises(ValueError, match="^bias: expected shape"):
            cuseq.causal_conv1d(*filters()[:2], on_device(normal(4)))
    assert replay.recording() is None
    assert convolve(filters()).shape == (2, 3, 7)


def test_values_on_the_host_are_checked_every_time():
    x, weight, bias = filters()
    for starts in ([0, 3, 9], [0, 9, 9], [0, 3, 9]):
        tokens = on_device(normal(9, 3))
        got = cuseq.causal_conv1d_varlen(tokens, weight, bias, cu_seqlens=starts)
        whole = cuseq.causal_conv1d_varlen(
            np.asarray(tokens), np.asarray(weight), np.asarray(bias), cu_seqlens=starts
        )
        np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="cu_seqlens"):
        cuseq.causal_conv1d_varlen(on_device(normal(9, 3)), weight, bias, cu_seqlens=[0, 3, 8])


def test_each_thread_records_for_itself(runs):
    operator = replay.replayed(cuseq.causal_conv1d.__wrapped__)
    expected, got = operator(*filters()), []
    runs.clear()
    thread = threading.Thread(target=lambda: got.append(operator(*filters())))
    thread.start()
    thread.join()
    assert runs == ["x", "weight", "bias"]
    assert_same(got[0], expected)


def test_recordings_do_not_pile_up(monkeypatch, runs):
    monkeypatch.setattr(replay, "MOST", 3)
    operator = replay.replayed(cuseq.causal_conv1d.__wrapped__)
    for length in range(1, 9):
        operator(*filters(shape=(1, 1, length)))
    runs.clear()
    operator(*filters(shape=(1, 1, 8)))
    assert not runs
    operator(*filters(shape=(1, 1, 1)))
    assert runs


def test_a_recording_keeps_no_array_alive():
    """Results and scratch of the first call are freed with the caller's last reference."""
    import gc
    import weakref

    operator = replay.replayed(cuseq.soft_dtw_value_and_grad.__wrapped__)
    given = [on_device(normal(*shape)) for shape in SERIES]
    results = operator(*given)
    alive = [weakref.ref(x) for x in (*given, results[0], *results[1])]
    del given, results
    gc.collect()
    assert all(x() is None for x in alive)


def test_a_call_within_a_call_is_part_of_its_recording(runs):
    def twice(x, weight):
        return cuseq.causal_conv1d(x, weight), cuseq.causal_conv1d(x, weight, activation="silu")

    operator = replay.replayed(twice)
    x, weight, _ = filters(seed=3)
    operator(*filters()[:2])
    runs.clear()
    got = operator(x, weight)
    assert not runs
    assert_same(got, twice(x, weight))


def test_an_array_by_the_name_of_another_one_is_not_replayed(runs):
    def with_itself(a, b):
        return cuseq.soft_dtw(a, b), cuseq.soft_dtw(a, a)

    operator = replay.replayed(with_itself)
    a, b = (on_device(normal(2, 4, 3, seed=seed)) for seed in (0, 1))
    for _ in range(2):
        runs.clear()
        assert_same(operator(a, b), with_itself(a, b))
        assert runs[:4] == ["a", "b", "a", "b"]


def test_what_is_not_made_by_the_call_is_not_replayed(runs):
    operator = replay.replayed(lambda x: (arrays.borrow("x", x, ""), x)[1])
    x, _, _ = filters()
    for _ in range(2):
        runs.clear()
        assert operator(x) is x
        assert runs == ["x"]


def test_a_name_that_is_no_parameter_is_not_replayed(runs):
    def operator(y, weight):
        x = arrays.borrow("x", y, "")
        checks.floating("x", x)
        return arrays.empty(x.shape, x.dtype, x).owner

    operator = replay.replayed(operator)
    for _ in range(2):
        runs.clear()
        operator(*filters()[:2])
        assert runs == ["x"]
