"""The soft-DTW kernels on the CPU, through the public functions, against the oracle.

Arrays lie on the device, and options by pair too: there nobody checks them before the kernels do.
"""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cuseq
from cuseq.ops import soft_dtw
from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops import soft_dtw_from_cost as from_cost
from cuseq.ops.soft_dtw_plan import ALIGNMENT, ENTROPY, GIVEN, SERIES, Problem, plan
from cuseq.runtime import kernels
from tests import cpu_runner
from tests.cpu_runner import SANITIZED, shuffled
from tests.cpu_runner.device import (
    LIMITS,
    OnDevice,
    installed,
    normal,
    on_device,
    reversed_axes,
    sliced,
    transposed,
)
from tests.oracles import soft_dtw as oracle
from tests.samples import DTYPES, dtype_of
from tests.tolerances import assert_close

# Devices for which the plan chooses groups of up to 8 lanes, and helpers where there are more than
# four features; or groups of up to 32 lanes and helpers always.
NARROW, HELPED = LIMITS._replace(multiprocessors=0), LIMITS._replace(multiprocessors=10**6)
OPTIONS = {"gamma": 1.0, "bandwidth": None, "lengths_a": None, "lengths_b": None}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
series_or_costs = pytest.mark.parametrize("given", ["series", "costs"])


def wide(B, N):
    """A device for groups of up to 32 lanes, with helpers for more than four features."""
    return LIMITS._replace(multiprocessors=B * N / 1000)


# ---- what the functions return, by name, in each way that leads to it


def gradients(arrays, grad_values, options):
    """Of series or of costs, by the public functions and by those for adapters."""
    of_series = len(arrays) == 2
    name, module = ("soft_dtw", soft_dtw) if of_series else ("soft_dtw_from_cost", from_cost)
    names = ["values", "grad_a", "grad_b"] if of_series else ["values", "grad_cost"]
    if grad_values is None:
        yield {"values": getattr(cuseq, name)(*arrays, **options)}
        values, found = getattr(cuseq, f"{name}_value_and_grad")(*arrays, **options)
        yield dict(zip(names, [values, *(found if of_series else [found])], strict=True))
    options = OPTIONS | ({"cost": "sqeuclidean"} if of_series else {}) | options
    values, kept = module.forward_keeping(*arrays, **options)
    outer = on_device(np.ones_like(values)) if grad_values is None else grad_values
    for _ in range(2):  # what is kept serves again
        found = module.backward(outer, *arrays, values, kept, **options)
        yield dict(zip(names, [values, *(found if of_series else [found])], strict=True))


def alignments(arrays, grad_values, options):
    """Of series; of costs it is the gradient."""
    if len(arrays) == 2:
        yield {"alignment": cuseq.soft_dtw_alignment(*arrays, **options)}


def gamma_gradients(arrays, grad_values, options):
    name = "soft_dtw" if len(arrays) == 2 else "soft_dtw_from_cost"
    values, grad_gamma = getattr(cuseq, f"{name}_value_and_grad_gamma")(*arrays, **options)
    yield {"values": values, "grad_gamma": grad_gamma}


EVERYTHING = gradients, alignments, gamma_gradients


def run(
    *arrays,
    limits=NARROW,
    place=on_device,
    seeds=(1,),
    ways=(gradients,),
    grad_values=None,
    **options,
):
    """What `ways` return for series a and b or for costs C, by name.

    Each way and in every order of the threads it is the same bits, and no input is written.
    """

    def placed(x):
        return on_device(x) if type(x) is np.ndarray else x

    arrays = [place(x) for x in arrays]
    options = {name: placed(x) for name, x in options.items()}
    grad_values = placed(grad_values)
    inputs = [x for x in (*arrays, *options.values(), grad_values) if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in inputs]
    found = {}
    for seed in seeds:
        with installed(limits), shuffled(seed), sections_apart():
            for way in ways:
                for result in way(arrays, grad_values, options):
                    for name, x in result.items():
                        assert same_bits(x, found.setdefault(name, np.asarray(x))), name
    assert [x.tobytes() for x in inputs] == before
    return found


@contextmanager
def sections_apart():
    """Nobody writes between the sections of the working memory, which lie apart here."""
    gaps = []

    class Memory(engine.Memory):
        def __init__(self, sections, like, array=None):
            apart = {}
            for name, size in sections.items():
                apart |= {name: size, f"behind {name}": 512}
            super().__init__(apart, like, array)
            for name, size in sections.items():
                first, last = self[name] + size, self[f"behind {name}"] + 512
                gap = self.array.owner[first - self.array.pointer : last - self.array.pointer]
                if array is None:
                    gap.fill(255)  # as a letter is cleared
                gaps.append((name, gap))

    with mock.patch.object(engine, "Memory", Memory):
        yield
    for name, gap in gaps:
        assert (gap == 255).all(), f"behind {name}"


def same_bits(x, y):
    return x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes()


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert same_bits(x, wanted[name]), name


def assert_others_are_the_same(found, wanted, pair=1):
    """A pair is none of the others' business."""
    for name, x in found.items():
        others = np.arange(len(x)) != pair
        assert same_bits(x[others], wanted[name][others]), name


class Expected(NamedTuple):
    answers: dict  # by name, in float64
    gamma: np.ndarray  # (B,)
    used: np.ndarray  # (B, N, M) bool: the cells within lengths and bands
    likely: float  # the largest |cost| on likely paths, over gamma


def expect(*arrays, gamma=1.0, **options):
    """The oracle's answers."""
    values, of_arrays, E, grad_gamma, used, likely = oracle.answer(*arrays, gamma=gamma, **options)
    names = ["grad_a", "grad_b"] if len(arrays) == 2 else ["grad_cost"]
    answers = dict(zip(names, of_arrays, strict=True))
    answers |= {"values": values, "alignment": E, "grad_gamma": grad_gamma}
    gamma = np.broadcast_to(np.asarray(gamma, np.float64), len(values))
    return Expected(answers, gamma, used, likely)


def check(*arrays, limits=NARROW, seeds=(1,), ways=(gradients,), **options):
    """`run` against the oracle. What lies outside of lengths and bands is exactly 0."""
    found = run(*arrays, limits=limits, seeds=seeds, ways=ways, **options)
    expected = expect(*arrays, **options)
    assert_close_to(found, expected)
    return found


def assert_close_to(found, expected):
    values, gamma = expected.answers["values"], expected.gamma
    finite, soft = np.isfinite(values), np.isfinite(values) & (gamma > 0)
    total = np.abs(values[soft] / gamma[soft]).max(initial=0.0)
    # The oracle's own weights are good to eps |R| / gamma.
    of_float64 = found["values"].dtype == np.float64
    for name, got in found.items():
        wanted = expected.answers[name]
        scale, exponent = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0), 0.0
        if name == "values":
            scale = (np.abs(values) + gamma)[finite].max(initial=0.0)
        else:
            exponent = total if of_float64 else expected.likely
        if name == "grad_gamma":  # the oracle takes R - <E, C>
            scale = sum(expected.used.shape[1:])
            exponent *= max(1.0, expected.likely) if of_float64 else 1
        if got.dtype == np.float16:
            scale = max(scale, 3e-3)  # half a step among its subnormals is 1e-5 of this
        assert_close(got, wanted, f"soft_dtw.{name}", scale=scale, exponent=exponent)
        if name in ("alignment", "grad_cost"):
            assert not got[~expected.used].any()


# ---- the shapes of plans


class Shape(NamedTuple):
    """What the plan chooses for series of these sizes."""

    limits: object  # or a function of (B, N)
    rows: int
    lanes: int
    helpers: int
    D: int
    cost: str
    sizes: tuple  # (B, N, M): whole and ragged warps, blocks, chunks and stripes

    def plans(self, dtype):
        """(arguments of `plan`, plan) of each size."""
        for B, N, M in self.sizes:
            limits = self.limits(B, N) if callable(self.limits) else self.limits
            problem = Problem(B, N, M, self.D, B, B, dtype, self.cost, False, M, 0)
            args = problem, SERIES, True, limits
            yield args, plan(*args)


# Seven helpers take 42 features at a time, three in float64 9: some series have more.
SHAPES = [
    Shape(NARROW, 4, 8, 0, 2, "sqeuclidean", ((5, 70, 20), (1, 33, 1), (4, 64, 7), (2, 97, 33))),
    Shape(HELPED, 4, 32, 3, 5, "sqeuclidean", ((2, 257, 9), (1, 129, 1), (1, 160, 70))),
    Shape(NARROW, 4, 1, 0, 2, "sqeuclidean", ((1, 1, 1), (33, 3, 9), (32, 4, 4), (5, 2, 1))),
    Shape(NARROW, 4, 2, 0, 3, "euclidean", ((17, 7, 9), (16, 8, 5), (1, 5, 70))),
    Shape(NARROW, 4, 4, 0, 4, "cityblock", ((9, 13, 6), (8, 16, 1), (3, 9, 18))),
    Shape(NARROW, 4, 8, 3, 16, "euclidean", ((5, 66, 20), (1, 40, 3))),
    Shape(NARROW, 4, 8, 7, 44, "cityblock", ((3, 40, 9), (1, 65, 1))),
    Shape(NARROW, 8, 8, 0, 2, "sqeuclidean", ((5, 133, 20), (1, 128, 1), (2, 200, 9))),
    Shape(wide, 8, 16, 0, 1, "euclidean", ((3, 128, 9),)),
    Shape(wide, 4, 32, 0, 3, "sqeuclidean", ((2, 140, 20), (1, 257, 6))),
    Shape(wide, 8, 32, 0, 2, "cityblock", ((2, 257, 9), (1, 300, 2))),
    Shape(HELPED, 4, 1, 3, 2, "cityblock", ((33, 4, 6), (1, 1, 1), (2, 1, 9))),
    Shape(HELPED, 4, 2, 7, 17, "sqeuclidean", ((17, 5, 9), (1, 8, 2))),
    Shape(HELPED, 4, 4, 3, 9, "euclidean", ((9, 16, 5), (1, 9, 33))),
    Shape(HELPED, 4, 8, 7, 20, "euclidean", ((5, 17, 5), (4, 32, 4), (3, 31, 9))),
    Shape(HELPED, 4, 16, 3, 2, "sqeuclidean", ((3, 64, 9), (1, 34, 1))),
    Shape(HELPED, 4, 32, 7, 43, "sqeuclidean", ((2, 130, 9), (1, 256, 5))),
]
OF_DTYPES = [("float32", shape) for shape in SHAPES] + [("float64", shape) for shape in SHAPES[:2]]
# limits, B, N, M, D for every output and option: groups of 8 and of 32 lanes, lanes of 4 and of 8
# rows, without and with helpers; several stripes and ragged warps.
GENERAL = [(NARROW, 6, 67, 41, 2), (NARROW, 5, 131, 21, 2), (HELPED, 3, 133, 30, 5)]
PLAIN_COSTS = [(NARROW, 17, 7, 9), (HELPED, 2, 140, 6)]


@pytest.fixture(scope="module")
def compiled_two_at_a_time():
    """Most of what the tests run, which would else be compiled one after the other."""
    wanted = [args for dtype, shape in OF_DTYPES for args, _ in shape.plans(dtype)]
    for limits, B, N, M, D in GENERAL:
        problem = Problem(B, N, M, D, B, B, "float32", "sqeuclidean", True, M, 0)
        wanted += [(problem, output, True, limits) for output in (SERIES, ALIGNMENT, ENTROPY)]
    for dtype, output in [*((dtype, ALIGNMENT) for dtype in DTYPES), ("float32", ENTROPY)]:
        problem = Problem(3, 34, 20, 0, 3, 3, dtype, GIVEN, True, 20, 0)
        wanted.append((problem, output, True, NARROW))
    for limits, B, N, M in PLAIN_COSTS:
        problem = Problem(B, N, M, 0, B, B, "float32", GIVEN, False, M, 0)
        wanted.append((problem, ALIGNMENT, True, limits))
    variants = []
    for args in wanted:
        how = plan(*args)
        forward, backward = how.forward_sweep, how.backward_sweep
        variants.append((engine.FORWARD, "soft_dtw_forward", forward, how.forward_shared))
        variants.append((engine.BACKWARD, "soft_dtw_backward", backward, how.backward_shared))
    cpu_runner._fibers()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda variant: cpu_runner._kernel(*variant), dict.fromkeys(variants)))


@pytest.mark.parametrize("dtype, shape", OF_DTYPES)
def test_shapes_of_plans(compiled_two_at_a_time, dtype, shape):
    """In any order of the threads the same bits."""
    for args, how in shape.plans(dtype):
        B, N, M = args[0][:3]
        a, b = normal(B, N, shape.D, dtype=dtype), normal(B, M, shape.D, seed=1, dtype=dtype)
        with mock.patch.object(engine, "plan", wraps=plan) as planned:
            options = {"cost": shape.cost, "gamma": float(shape.D)}
            check(a, b, limits=args[-1], seeds=(0, 1, 2), **options)
        assert planned.call_args.args == args
        wanted = {"ROWS": shape.rows, "LANES": shape.lanes, "HELPERS": shape.helpers}
        assert dict(how.forward_sweep) | wanted == dict(how.forward_sweep)
        assert how.stripes == -(-N // (shape.rows * shape.lanes))
        assert how.groups == -(-B * shape.lanes // 32)


def arrays_of(given, B=3, N=34, M=20, dtype="float32"):
    """Series a and b of two features, or costs, of which some are negative."""
    if given == "costs":
        return (normal(B, N, M, dtype=dtype, offset=0.5),)
    return normal(B, N, 2, dtype=dtype), normal(B, M, 2, seed=1, dtype=dtype)


@pytest.mark.skipif(not SANITIZED, reason="outside of its own process others may import them")
def test_no_framework_is_imported():
    assert not {"cupy", "jax", "torch"} & sys.modules.keys()


# ---- dtypes, costs, strides


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_16_bits_are_computed_in_float32(dtype, shape):
    B, N, M = shape.sizes[0]
    a, b = normal(B, N, shape.D, dtype=dtype), normal(B, M, shape.D, seed=1, dtype=dtype)
    found = run(a, b, limits=shape.limits, gamma=3.0)
    widened = run(a.astype(np.float32), b.astype(np.float32), limits=shape.limits, gamma=3.0)
    for name, x in widened.items():
        assert same_bits(found[name], x if name == "values" else x.astype(dtype_of(dtype)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("gamma", [1e-3, 0.1, 10.0])
def test_gammas_and_offsets(dtype, gamma):
    a, b = (normal(2, n, 2, seed=n, dtype=dtype, offset=1000.0) for n in (34, 21))
    check(a, b, gamma=gamma)


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_cosine(dtype, shape):
    (B, N, M), D = shape.sizes[0], shape.D
    a = normal(B, N, D, dtype=dtype, scale=1000.0)
    b = normal(B, M, D, seed=1, dtype=dtype, scale=1e-3)
    check(a, b, limits=shape.limits, cost="cosine", gamma=0.5)


@pytest.mark.parametrize(
    "limits, B, N, M, D, cost",
    [
        (NARROW, 5, 70, 120, 2, "sqeuclidean"),
        (NARROW, 5, 131, 90, 2, "sqeuclidean"),
        (HELPED, 3, 133, 120, 5, "sqeuclidean"),
        (NARROW, 3, 40, 150, 44, "cityblock"),
    ],
)
def test_chunks_into_which_no_gradient_flows(limits, B, N, M, D, cost):
    """Sharp paths, along the edges too; of pairs that share a warp, some of which take no part."""
    a, b = normal(B, N, D), normal(B, M, D, seed=1)
    a[1, : N - 3] = b[1, :1] + 0.3 * a[1, : N - 3]  # down the first column, along the last rows
    b[0, : M - 3] = a[0, :1] + 0.3 * b[0, : M - 3]  # along the first row
    outer = normal(B, seed=2)
    outer[2] = 0
    options = {"limits": limits, "cost": cost, "gamma": 1e-3}
    check(a, b, ways=[gradients], grad_values=outer, **options)
    clean = check(a, b, ways=[alignments, gamma_gradients], **options)
    assert (clean["alignment"] != 0).mean() < 0.1
    a[2, 5] = math.nan
    spoilt = run(a, b, ways=[alignments, gamma_gradients], **options)
    assert_others_are_the_same(spoilt, clean, pair=2)
    assert all(np.isnan(x[2]).all() for x in spoilt.values())


def test_a_zero_vector_has_no_cosine():
    a, b = arrays_of("series")
    options = {"cost": "cosine", "lengths_b": np.array([20, 18, 19])}
    clean = run(a, b, **options)
    b[1, 18:] = 0  # beyond its length
    assert_same(run(a, b, **options), clean)
    b[1, 5] = 0
    assert_others_are_the_same(check(a, b, **options), clean)


@pytest.mark.parametrize(
    "limits, N, D, cost",
    [
        (NARROW, 40, 2, "sqeuclidean"),
        (NARROW, 40, 2, "cosine"),
        (NARROW, 7, 3, "euclidean"),
        (HELPED, 16, 9, "euclidean"),
        (NARROW, 13, 4, "cityblock"),
        (HELPED, 4, 2, "cityblock"),
    ],
)
def test_series_that_meet_point_for_point(limits, N, D, cost):
    """Where points coincide no cost pulls, and the root of "euclidean" has no slope."""
    a = normal(2, N, D)
    check(a, a.copy(), limits=limits, cost=cost, gamma=0.25)
    a[:] = 0.1
    found = run(a, a.copy(), limits=limits, cost=cost, gamma=0.25)
    if cost != "cosine":  # whose points are rounded
        assert not found["grad_a"].any() and not found["grad_b"].any()


@every_dtype
@pytest.mark.parametrize("place", [transposed, sliced, reversed_axes])
def test_strides(dtype, place):
    for arrays, options in [
        (arrays_of("series", dtype=dtype), {}),
        (arrays_of("costs", dtype=dtype), OF_COSTS),
    ]:
        assert_same(run(*arrays, place=place, **options), run(*arrays, **options))


def test_strides_of_0():
    a = np.broadcast_to(normal(1, 34, 1), (3, 34, 2))
    b = np.broadcast_to(normal(2, seed=1), (3, 4, 2))
    check(a, b, grad_values=np.broadcast_to(np.float32(0.5), 3))
    check(np.broadcast_to(normal(1, 1, 20), (3, 34, 20)), **OF_COSTS)


@series_or_costs
@pytest.mark.parametrize("place", [on_device, sliced, reversed_axes])
def test_strides_of_grad_values(given, place):
    arrays, outer = arrays_of(given), normal(3, seed=2)
    options = OF_COSTS if given == "costs" else {}
    found = run(*arrays, grad_values=place(outer), **options)
    assert_same(found, check(*arrays, grad_values=outer, **options))


@every_dtype
@pytest.mark.parametrize("batch_a, batch_b", [(1, 5), (5, 1), (1, 1)])
def test_a_batch_of_1_meets_every_series(dtype, batch_a, batch_b):
    a, b = normal(batch_a, 34, 2, dtype=dtype), normal(batch_b, 7, 2, seed=1, dtype=dtype)
    real = "float64" if dtype == "float64" else "float32"
    check(a, b, grad_values=normal(max(batch_a, batch_b), seed=2, dtype=real), seeds=(0, 1, 2))


def test_arrays_without_axes_to_spare():
    a, b = normal(1, 34, 2), normal(1, 6, 2, seed=1)
    batch = run(a, b)
    single = run(a[0], b[0])
    assert single["values"].shape == () and single["values"] == batch["values"]
    for name in ("grad_a", "grad_b"):
        assert same_bits(single[name], batch[name][0])
    C = normal(1, 34, 20)
    batch, single = run(C, **OF_COSTS_OF_ONE), run(C[0], **OF_COSTS_OF_ONE)
    assert single["values"].shape == () and single["values"] == batch["values"]
    assert same_bits(single["grad_cost"], batch["grad_cost"][0])


def test_without_pairs_or_features():
    for a, b in [(0, 0), (1, 0), (0, 1)]:
        found = run(normal(a, 3, 2), normal(b, 4, 2), ways=EVERYTHING)
        assert found["values"].shape == found["grad_gamma"].shape == (0,)
        assert found["alignment"].shape == (0, 3, 4)
        assert (found["grad_a"].shape, found["grad_b"].shape) == ((a, 3, 2), (b, 4, 2))
        assert not found["grad_a"].any() and not found["grad_b"].any()
    assert run(normal(0, 3, 4), ways=EVERYTHING)["grad_cost"].shape == (0, 3, 4)
    found = run(normal(2, 129, 0), normal(2, 4, 0), limits=HELPED, gamma=2.0)
    expected = -2 * math.log(oracle.delannoy(128, 3))
    assert_close(found["values"], [expected, expected], "soft_dtw.values")


# ---- given costs. A gamma on the device may be 0: all of these share the kernels for that.

OF_COSTS = {"gamma": np.array([0.5, 0.0, 2.0]), "bandwidth": np.array([3, 100, 0])}
OF_COSTS_OF_ONE = {name: x[:1] for name, x in OF_COSTS.items()}


@every_dtype
def test_given_costs(dtype):
    """A NaN outside of the band does not matter."""
    (C,) = arrays_of("costs", dtype=dtype)
    expected = expect(C, **OF_COSTS)
    C[~expected.used] = math.nan
    check(C, **OF_COSTS, seeds=(0, 1, 2))


@pytest.mark.parametrize("limits, B, N, M", PLAIN_COSTS)
def test_given_costs_without_options(limits, B, N, M):
    check(*arrays_of("costs", B, N, M), limits=limits, seeds=(0, 1, 2))


def test_costs_of_infinity_forbid_cells():
    (C,) = arrays_of("costs")
    forbidden = np.random.default_rng(2).random(C.shape) < 0.2
    C[forbidden] = math.inf
    found = check(C, **OF_COSTS | {"bandwidth": np.array([30, 40, 15])})
    assert not found["grad_cost"][forbidden].any()


@pytest.mark.parametrize("cells", [np.s_[5], np.s_[:, 19], np.s_[0, 0], np.s_[-1, -1]], ids=str)
def test_no_path_is_left(cells):
    (C,) = arrays_of("costs")
    clean = run(C, **OF_COSTS, ways=EVERYTHING)
    C[1][cells] = math.inf
    found = run(C, **OF_COSTS, ways=EVERYTHING)
    assert_others_are_the_same(found, clean)
    assert found["values"][1] == math.inf
    assert not found["grad_cost"][1].any() and found["grad_gamma"][1] == 0


@pytest.mark.parametrize("pair", [0, 1])
@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
@pytest.mark.parametrize("cell", [(0, 0), (9, 8), (33, 19)])
def test_nan_in_a_given_cost_stays_in_its_pair(pair, wrong, cell):
    (C,) = arrays_of("costs")
    clean = run(C, **OF_COSTS, ways=EVERYTHING)
    C[pair][cell] = wrong
    found = check(C, **OF_COSTS, ways=EVERYTHING)
    assert_others_are_the_same(found, clean, pair)
    assert np.isnan(found["values"][pair])


def test_nan_counts_where_no_path_comes():
    (C,) = arrays_of("costs")
    C[:, 5] = math.inf
    C[0, 20, 9], C[1, 33, 0], C[2, 33, 19] = math.nan, math.nan, math.nan
    found = check(C, **OF_COSTS, ways=EVERYTHING)
    assert np.isnan(found["values"]).all()


# ---- options

general = pytest.mark.parametrize("limits, B, N, M, D", GENERAL)


def options_of(B, N, M):
    """Each of them by pair, on the device."""
    pick = np.random.default_rng(0)
    return {
        "gamma": np.array([1.0, 0.0, 3.0, 0.1, 10.0, 1.0])[:B],
        "bandwidth": np.array([5, 40, 0, 2**63 - 1, 1, 12])[:B],
        "lengths_a": np.array([N, 31, N - 1, 1, 64, 33], np.int32)[:B],
        "lengths_b": pick.integers(1, M + 1, B),
    }


def series_of(B, N, M, D, lengths_a, lengths_b, padding=math.nan):
    """Series a and b with `padding` beyond their lengths."""
    a, b = normal(B, N, D), normal(B, M, D, seed=1)
    for x, lengths in ((a, lengths_a), (b, lengths_b)):
        for series, length in zip(x, lengths, strict=True):
            series[length:] = padding
    return a, b


@general
def test_all_options_at_once(limits, B, N, M, D):
    options = options_of(B, N, M)
    a, b = series_of(B, N, M, D, options["lengths_a"], options["lengths_b"])
    check(a, b, limits=limits, ways=EVERYTHING, seeds=(0, 1, 2), **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_bands_and_lengths_in_every_shape(shape):
    """Stripes of which some have no row, some no letter to send; warps of unlike pairs."""
    args, _ = max(shape.plans("float32"), key=lambda planned: planned[0][0][:2])
    B, N, M = args[0][:3]
    pick = np.random.default_rng(B)
    lengths = {"lengths_a": pick.integers(1, N + 1, B), "lengths_b": pick.integers(1, M + 1, B)}
    lengths["lengths_a"][0], lengths["lengths_a"][-1] = N, 1
    options = lengths | {"bandwidth": pick.integers(0, 9, B), "cost": shape.cost}
    a, b = series_of(B, N, M, shape.D, **lengths)
    check(a, b, limits=args[-1], gamma=float(shape.D), **options)


@pytest.mark.parametrize("radius", [0, 1, 2, 3, 2**40])
@pytest.mark.parametrize("N, M", [(67, 67), (40, 75), (75, 40), (150, 139)])
def test_one_radius_for_all(radius, N, M):
    """The plan knows it, and sends less from stripe to stripe."""
    check(normal(2, N, 2), normal(2, M, 2, seed=1), bandwidth=radius)


def test_gamma_of_0_for_some():
    """Without a band."""
    check(normal(5, 67, 2), normal(5, 20, 2, seed=1), gamma=np.array([0.0, 1.0, 0.0, 2.0, 0.1]))


def test_hard_dtw_of_costs_that_tie():
    """Costs of 0, 1 and 2 add up exactly, so that each of the many ties is one."""
    C = np.random.default_rng(0).integers(0, 3, (3, 34, 20)).astype(np.float32)
    C[2] = 1  # the diagonal, then up
    options = {"gamma": np.zeros(3), "bandwidth": np.array([40, 3, 40])}
    found, expected = run(C, **options), expect(C, **options).answers
    assert (found["values"] == expected["values"]).all()
    assert (found["grad_cost"] == expected["grad_cost"]).all()


@general
def test_what_lies_beyond_a_length_never_matters(limits, B, N, M, D):
    options = options_of(B, N, M)
    results = [
        run(
            *series_of(B, N, M, D, options["lengths_a"], options["lengths_b"], padding),
            limits=limits,
            ways=EVERYTHING,
            **options,
        )
        for padding in (0.0, math.nan, math.inf, 1e30)
    ]
    for found in results[1:]:
        assert_same(found, results[0])


@pytest.mark.parametrize("shared", ["a", "b"])
def test_lengths_of_a_series_that_meets_a_batch(shared):
    """Each pair has its own part of it, and the gradients are summed."""
    one, many = normal(1, 40, 2), normal(5, 35, 2, seed=1)
    of_one, of_many = np.array([40, 1, 7, 33, 30]), np.array([35, 20, 1, 4, 33])
    a, b = (one, many) if shared == "a" else (many, one)
    of_a, of_b = (of_one, of_many) if shared == "a" else (of_many, of_one)
    check(a, b, lengths_a=of_a, lengths_b=of_b)


WRONG = [
    ("lengths_a", [0, 35, -1], "int32"),
    ("lengths_a", [0, 35, 2**32 + 5, -(2**63)], "int64"),
    ("lengths_b", [0, 21, 2**31 - 1], "int32"),
    ("lengths_b", [-4, 2**63 - 1], "int64"),
    ("bandwidth", [-1, -(2**31)], "int32"),
    ("bandwidth", [-1, -(2**40)], "int64"),
    *(("gamma", [-1, math.nan, math.inf, -math.inf], dtype) for dtype in DTYPES),
]


@series_or_costs
@pytest.mark.parametrize("option, wrong, dtype", WRONG)
def test_an_entry_out_of_range_makes_its_pair_nan(given, option, wrong, dtype):
    arrays = arrays_of(given)
    options = {"gamma": np.ones(3), "bandwidth": np.full(3, 9)}
    options[option] = np.array({"gamma": [0.5, 2, 1]}.get(option, [7, 3, 20]), dtype_of(dtype))
    clean = check(*arrays, ways=EVERYTHING, **options)
    for entry in wrong:
        options[option][1] = entry
        found = run(*arrays, ways=EVERYTHING, **options)
        assert_others_are_the_same(found, clean)
        assert all(np.isnan(x[1]).all() for x in found.values())


def test_an_entry_out_of_range_reaches_a_shared_series():
    a, b = normal(1, 34, 2), normal(3, 20, 2, seed=1)
    found = run(a, b, lengths_a=np.array([34, 36, 30]))
    assert np.isnan(found["values"]).tolist() == [False, True, False]
    assert np.isnan(found["grad_a"]).all()
    assert np.isnan(found["grad_b"]).all(axis=(1, 2)).tolist() == [False, True, False]


@series_or_costs
def test_strides_of_options(given):
    arrays, options = arrays_of(given), options_of(3, 34, 20)
    found = check(*arrays, **options)
    gaps = {name: np.repeat(x, 2)[::2] for name, x in options.items()}
    back = {name: x[::-1].copy()[::-1] for name, x in options.items()}
    assert_same(run(*arrays, **gaps), found)
    assert_same(run(*arrays, **back), found)
    options = {name: np.broadcast_to(x[:1], 3) for name, x in options.items()}
    check(*arrays, **options)


# ---- NaN and infinity in series


@every_dtype
@pytest.mark.parametrize("spoilt, place", [("a", 0), ("a", 33), ("b", 0), ("b", -1)])
def test_nan_stays_in_its_pair(dtype, spoilt, place):
    a, b = arrays_of("series", dtype=dtype)
    clean = run(a, b)
    (a if spoilt == "a" else b)[1, place, 1] = math.nan
    found = run(a, b)
    assert_others_are_the_same(found, clean)
    assert all(np.isnan(x[1]).all() for x in found.values())


@general
def test_nan_and_infinity_within_lengths_and_bands(limits, B, N, M, D):
    a, b, options = normal(B, N, D), normal(B, M, D, seed=1), options_of(B, N, M)
    clean = run(a, b, limits=limits, ways=EVERYTHING, **options)
    n, m = options["lengths_a"], options["lengths_b"]
    a[0, n[0] - 1, 1] = math.nan
    b[1, m[1] - 1, 0] = -math.inf
    a[2, n[2] - 1, 0], b[2, 0, 1] = math.inf, math.nan
    found = check(a, b, limits=limits, ways=EVERYTHING, **options)
    assert np.isnan(found["values"][[0, 2]]).all() and found["values"][1] == math.inf
    for name, x in found.items():
        assert same_bits(x[3:], clean[name][3:])


def test_nan_reaches_a_shared_series():
    a, b = normal(1, 34, 2), normal(3, 5, 2, seed=1)
    b[2, 0, 1] = math.nan
    found = run(a, b)
    assert np.isnan(found["values"]).tolist() == [False, False, True]
    assert np.isnan(found["grad_a"]).all()
    assert np.isnan(found["grad_b"]).all(axis=(1, 2)).tolist() == [False, False, True]


@every_dtype
def test_an_infinite_total_has_no_gradient(dtype):
    a, b = arrays_of("series", dtype=dtype)
    clean = run(a, b)
    a[0, 2, 1] = math.inf
    if dtype != "float16":  # whose squares do not leave float32
        a[2] = math.sqrt(float(ml_dtypes.finfo(a.dtype).max)) * 2
    for name, x in run(a, b).items():
        infinite = math.inf if name == "values" else 0
        assert (x[0] == infinite).all() and same_bits(x[1], clean[name][1])
        assert dtype == "float16" or (x[2] == infinite).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("share", [1e-19, 0.9])
def test_paths_go_round_infinite_costs(dtype, share):
    """Costs of opposite series overflow off the diagonal, and even their differences may."""
    big = float(ml_dtypes.finfo(dtype_of(dtype)).max) * share
    a = np.full((1, 34, 2), big).astype(dtype_of(dtype))
    a[:, :32] *= -1
    found = run(a, a.copy())
    paths = oracle.delannoy(31, 31) * oracle.delannoy(1, 1)
    assert_close(found["values"], [-math.log(paths)], "soft_dtw.values")
    assert not found["grad_a"].any() and not found["grad_b"].any()


# ---- the ends of the range, and memory


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_totals_within_the_range(dtype):
    """A hundred equal costs down one column, 5e8 gamma in all."""
    a = np.full((1, 100, 2), math.sqrt(5e8 / 200), dtype_of(dtype))
    check(a, np.zeros((1, 1, 2), a.dtype))


@pytest.mark.parametrize("gamma", [1e-45, 1e-300])
def test_equal_series_at_a_tiny_gamma(gamma):
    a = normal(1, 34, 2)
    found = run(a, a.copy(), gamma=gamma)
    assert abs(found["values"][0]) <= 80 * gamma
    assert not found["grad_a"].any() and not found["grad_b"].any()


def test_what_memory_held_before_does_not_matter():
    arrays = normal(5, 70, 2), normal(5, 20, 2, seed=1)
    clean = run(*arrays)

    def filled(shape, dtype, device, transposed=False):
        x = OnDevice.upload(np.zeros(shape, dtype_of(dtype)), device)
        x.owner.view(np.uint8).fill(0)
        return x

    with mock.patch.object(OnDevice, "empty", filled):
        assert_same(run(*arrays), clean)


def test_mail_is_cleared_before_a_sweep():
    """Blocks run one by one here, so that a result does not show what a letter was before.

    With one block to clear it, which has to go on where the grid ends.
    """
    memories, swept = [], []

    class Memory(engine.Memory):
        def __init__(self, sections, like, array=None):
            super().__init__(sections, like, array)
            memories.append((self, sections))
            if array is None:
                self.array.owner.fill(0)

    def launch(device, stream, file, function, *rest):
        mail = {"soft_dtw_forward": ["mail"], "soft_dtw_backward": ["mail_back", "sums_b"]}
        memory, sections = memories[-1]
        for name in mail.get(function, []):
            first = memory[name] - memory.array.pointer
            letters = memory.array.owner[first : first + sections[name]]
            assert letters.size and (letters == 255).all(), name
            swept.append(name)
        cpu_runner.launch(device, stream, file, function, *rest)

    a, b = on_device(normal(1, 70, 2)), on_device(normal(5, 70, 2, seed=1))
    with installed(NARROW), mock.patch.object(engine, "Memory", Memory):
        with (
            mock.patch.object(kernels, "launch", launch),
            mock.patch.object(engine, "MOST_TO_CLEAR", 1),
        ):
            cuseq.soft_dtw(a, b)
            cuseq.soft_dtw_value_and_grad(a, b)
    assert swept == ["mail", "mail", "mail_back", "sums_b"]
