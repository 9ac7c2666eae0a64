"""cuseq.jax: values and gradients of jitted functions against the oracles, and what is refused."""

import re
from functools import partial

import numpy as np
import pytest

import cuseq
from tests.frameworks import JAX_CPU, JAX_CUDA, over, same_bits
from tests.oracles import causal_conv1d as convolution_oracle
from tests.oracles import causal_conv1d_update as update_oracle
from tests.samples import DTYPES, normal
from tests.test_causal_conv1d import (
    NAMES,
    arguments,
    by_oracle,
    check_gradients,
    check_values,
    incoming,
    turned,
)
from tests.test_causal_conv1d_update import arguments as update_arguments
from tests.test_soft_dtw import by_oracle as series_by_oracle
from tests.test_soft_dtw import check, exponent_of, random_case
from tests.tolerances import assert_close

jax = pytest.importorskip("jax")
adapter = pytest.importorskip("cuseq.jax")
jnp = jax.numpy

every_device = over([JAX_CPU, JAX_CUDA])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def brought(place, arrays):
    """NumPy arrays, in a list or by name, as arrays of this place; others as they are."""
    if isinstance(arrays, dict):
        return {name: brought(place, x) for name, x in arrays.items()}
    if isinstance(arrays, (list, tuple)):
        return [brought(place, x) for x in arrays]
    return place.array(arrays) if isinstance(arrays, np.ndarray) else arrays


def taken(place, results):
    """JAX arrays as NumPy's, after a look at where they are."""

    def one(x):
        place.assert_own(x)
        return place.numpy(x)

    return jax.tree.map(one, results)


def with_gradients(function, names=None):
    """A jitted function: values, and the gradients of their sum by the arrays of these names."""

    def total(differentiable, others):
        values = function(**differentiable, **others)
        return values.sum(), values

    def both(**arrays):
        wanted = {name: x for name, x in arrays.items() if names is None or name in names}
        others = {name: x for name, x in arrays.items() if name not in wanted}
        gradients, values = jax.grad(total, has_aux=True)(wanted, others)
        return values, gradients

    return jax.jit(both)


# The soft-DTW family:


@every_device
@every_dtype
@pytest.mark.parametrize(
    "size", [(1, 1, 1, 1), (3, 2, 1, 4), (2, 17, 33, 3), (5, 32, 6, 1)], ids=str
)
def test_soft_dtw(place, dtype, size):
    a, b, expected = random_case(*size, dtype)
    function = with_gradients(adapter.soft_dtw)
    values, gradients = taken(place, function(**brought(place, {"a": a, "b": b})))
    check((values, (gradients["a"], gradients["b"])), expected)
    assert values.dtype == ("float64" if dtype == "float64" else "float32")
    assert all(gradient.dtype == a.dtype for gradient in gradients.values())


OPTIONS = [  # for 3 pairs of series of lengths 6 and 5
    {"cost": "euclidean"},
    {"cost": "cosine", "gamma": 0.0},
    {"cost": "cityblock", "bandwidth": 1},
    {"bandwidth": np.array([0, 2, 9])},
    {"lengths_a": np.array([6, 1, 4], np.int32), "lengths_b": 3},
    {"gamma": np.array([0.3, 1.0, 5.0])},
    {"gamma": np.array([2.0, 0.5, 1.0], np.float32), "lengths_b": np.array([2, 3, 5])},
]


@every_device
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (3, 1)], ids=str)
def test_soft_dtw_divergence(place, options, batches):
    """Values and gradients are the core's; equal series have none."""
    a, b = normal(batches[0], 6, 2), normal(batches[1], 5, 2, seed=1)
    function = with_gradients(partial(adapter.soft_dtw_divergence, **options), ("a", "b"))
    values, gradients = taken(place, function(**brought(place, {"a": a, "b": b})))
    wanted, (grad_a, grad_b) = cuseq.soft_dtw_divergence_value_and_grad(a, b, **options)
    for got, expected in ((values, wanted), (gradients["a"], grad_a), (gradients["b"], grad_b)):
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-10)
    if batches == (3, 3) and not any("lengths" in name for name in options):
        assert not function(**brought(place, {"a": a, "b": a}))[0].any()


@every_device
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_soft_dtw_with_options(place, options, traced):
    """Arrays among the options are traced, or known when the program is."""
    a, b = normal(3, 6, 2), normal(3, 5, 2, seed=1)
    expected = series_by_oracle(a, b, **options)
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    fixed = {name: x for name, x in options.items() if not traced or name not in arrays}
    given = {"a": a, "b": b} | (arrays if traced else {})
    function = with_gradients(partial(adapter.soft_dtw, **fixed), ("a", "b"))
    values, gradients = taken(place, function(**brought(place, given)))
    check((values, (gradients["a"], gradients["b"])), expected)
    options = brought(place, given | fixed)
    E = taken(place, jax.jit(lambda: adapter.soft_dtw_alignment(**options))())
    assert_close(E, expected.E, "soft_dtw.alignment", exponent=exponent_of(E.dtype, expected))


@every_device
@pytest.mark.parametrize(
    "a_shape, b_shape",
    [((5,), (4,)), ((5, 3), (4, 3)), ((5, 3), (1, 4, 3)), ((1, 5), (2, 4, 5)), ((3, 5, 1), (4,))],
)
def test_series_of_one_two_and_three_axes(place, a_shape, b_shape):
    """The same bits as the core's, but for gradients of a series that meets a whole batch."""
    a, b = brought(place, (normal(*a_shape), normal(*b_shape, seed=1)))
    values, gradients = with_gradients(adapter.soft_dtw)(a=a, b=b)
    wanted, grads = cuseq.soft_dtw_value_and_grad(a, b)
    assert same_bits(np.array(values), np.array(wanted))
    for gradient, grad in zip(gradients.values(), grads, strict=True):
        assert gradient.shape == grad.shape
        np.testing.assert_allclose(gradient, grad, rtol=1e-12, atol=1e-12)
    E = jax.jit(adapter.soft_dtw_alignment)(a, b)
    assert same_bits(np.array(E), np.array(cuseq.soft_dtw_alignment(a, b)))


@every_device
@every_dtype
@pytest.mark.parametrize("shape", [(3, 4, 5), (6, 2), (1, 1, 1)], ids=str)
def test_soft_dtw_from_cost(place, dtype, shape):
    C = np.abs(normal(*shape, dtype=dtype))
    expected = series_by_oracle(C.reshape(-1, *shape[-2:]), gamma=0.5)
    function = with_gradients(partial(adapter.soft_dtw_from_cost, gamma=0.5))
    values, gradients = taken(place, function(C=place.array(C)))
    assert values.shape == shape[:-2] and gradients["C"].dtype == C.dtype
    check((values.reshape(-1), (gradients["C"].reshape(-1, *shape[-2:]),)), expected)


@every_device
@pytest.mark.parametrize("gamma", [np.float64(0.7), np.array([0.7, 0.2, 3.0])], ids=str)
def test_the_gradient_by_gamma(place, gamma):
    """Alone, and with those by the series."""
    a, b = brought(place, (normal(3, 6, 2), normal(3, 5, 2, seed=1)))
    _, slopes = cuseq.soft_dtw_value_and_grad_gamma(a, b, gamma=brought(place, gamma))
    _, (grad_a, _) = cuseq.soft_dtw_value_and_grad(a, b, gamma=brought(place, gamma))
    gamma = jnp.asarray(gamma)
    alone = with_gradients(partial(adapter.soft_dtw, a, b), ("gamma",))(gamma=gamma)[1]
    both = with_gradients(adapter.soft_dtw, ("a", "gamma"))(a=a, b=b, gamma=gamma)[1]
    wanted = np.array(slopes) if gamma.ndim else np.array(slopes).sum()
    for gradients in alone, both:
        np.testing.assert_allclose(gradients["gamma"], wanted, rtol=1e-12)
    assert same_bits(np.array(both["a"]), np.array(grad_a))


@every_device
def test_forward_mode_of_soft_dtw(place):
    """Along a direction the slope is the gradient's part in it."""
    a, b = brought(place, (normal(3, 6, 2), normal(1, 5, 2, seed=1)))
    da, db = brought(place, (normal(3, 6, 2, seed=2), normal(1, 5, 2, seed=3)))
    values, slopes = jax.jvp(adapter.soft_dtw, (a, b), (da, db))
    for k in range(3):
        _, (grad_a, grad_b) = cuseq.soft_dtw_value_and_grad(a[k], b[0])
        wanted = (grad_a * da[k]).sum() + (grad_b * db[0]).sum()
        np.testing.assert_allclose(slopes[k], wanted, rtol=1e-12)
    assert same_bits(np.array(values), np.array(cuseq.soft_dtw(a, b)))
    jacobian = jax.jit(jax.jacfwd(adapter.soft_dtw))(a, b)
    np.testing.assert_allclose(jacobian, jax.jacrev(adapter.soft_dtw)(a, b), rtol=1e-12, atol=1e-12)


@every_device
def test_samples_that_are_spoilt(place):
    """NaN and inf stay within their sample, in gradients too."""
    a, b = normal(4, 6, 2), normal(4, 5, 2, seed=1)
    clean = with_gradients(adapter.soft_dtw)(**brought(place, {"a": a, "b": b}))
    a[1, 3, 0], a[2, 0, 1] = np.nan, np.inf
    values, gradients = with_gradients(adapter.soft_dtw)(**brought(place, {"a": a, "b": b}))
    assert np.isnan(values[1]) and np.isnan(gradients["a"][1]).all()
    assert np.isinf(values[2]) and not gradients["b"][2].any()
    for k in 0, 3:
        assert values[k] == clean[0][k]
        assert same_bits(np.array(gradients["a"][k]), np.array(clean[1]["a"][k]))


# The convolutions:

SIZES = [  # (B, D, L, W, S)
    (3, 3, 1, 1, None),
    (2, 1, 3, 4, None),
    (3, 2, 5, 4, 6),
    (2, 33, 17, 4, 5),
    (1, 3, 31, 32, None),
    (0, 3, 8, 4, 3),
    (1, 2, 0, 4, 3),
]


def gradients_of(function, outer, given):
    """(y, final_state), and the gradients by name of their sums weighted by `outer`."""

    def total(differentiable):
        y, final_state = function(**differentiable)
        weighted = (y * outer["grad_y"]).sum() + (final_state * outer["grad_final_state"]).sum()
        return weighted.astype("float32"), (y, final_state)

    gradients, results = jax.grad(total, has_aux=True)(given)
    return results, gradients


class Named(dict):
    """Gradients by name, None for what there is not."""

    def __getattr__(self, name):
        return self.get(name)


@every_device
@every_dtype
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_causal_conv1d(place, dtype, size):
    """Layout and activation alternate over the sizes."""
    number = SIZES.index(size)
    layout, activation = ("bdl", "bld")[number % 2], (None, "silu")[number // 2 % 2]
    given, options = arguments(*size, (dtype,) * 4), {"activation": activation, "layout": layout}
    outer = incoming(given)
    expected, wanted = by_oracle(given, outer, activation)
    arrays = {name: x for name, x in given.items() if x is not None}
    arrays["x"], outer["grad_y"] = (turned(x, layout) for x in (given["x"], outer["grad_y"]))
    function = partial(adapter.causal_conv1d_with_state, **options)
    run = jax.jit(partial(gradients_of, function))
    results, gradients = taken(place, run(*brought(place, (outer, arrays))))
    check_values(results, given, expected, layout)
    check_gradients(Named(gradients), given, wanted, layout)
    y = jax.jit(partial(adapter.causal_conv1d, **options))(**brought(place, arrays))
    assert same_bits(place.numpy(y), results[0])


SEQ_IDX = np.array([[-1, 0, 0, 3, 3, 0, 0], [4, 4, 4, 4, 4, 4, -2]])


@every_device
@pytest.mark.parametrize("layout", ["bdl", "bld"])
@pytest.mark.parametrize("kind", ["traced", "known", "list"])
def test_causal_conv1d_by_index(place, layout, kind):
    given = arguments(2, 3, 7, 4, 5)
    outer = incoming(given)
    x, weight, bias, state = given.values()
    rest = SEQ_IDX, bias, state, "silu"
    expected = convolution_oracle.forward_by_index(x, weight, *rest)
    wanted = convolution_oracle.gradients_by_index(
        outer["grad_y"], x, weight, *rest, outer["grad_final_state"]
    )
    arrays = brought(place, {**given, "x": turned(x, layout)})
    outer = brought(place, {**outer, "grad_y": turned(outer["grad_y"], layout)})
    index = SEQ_IDX.tolist() if kind == "list" else place.array(SEQ_IDX)

    def run(arrays, seq_idx=index):
        options = {"activation": "silu", "layout": layout, "seq_idx": seq_idx}
        function = partial(adapter.causal_conv1d_with_state, **options)
        return gradients_of(function, outer, arrays)

    indices = (index,) if kind == "traced" else ()
    results, gradients = taken(place, jax.jit(run)(arrays, *indices))
    check_values(results, given, expected, layout)
    check_gradients(Named(gradients), given, wanted, layout)


@every_device
@pytest.mark.parametrize("ends", [[0, 2, 2, 7], [0, 0, 7], [0]], ids=str)
def test_causal_conv1d_varlen(place, ends):
    T, count = ends[-1], len(ends) - 1
    given = arguments(1, 3, T, 4, None) | {"initial_state": normal(count, 3, 5, seed=3)}
    x = given["x"][0].T
    outer = {"grad_y": normal(T, 3, seed=4), "grad_final_state": normal(count, 3, 5, seed=5)}
    _, weight, bias, state = given.values()
    rest = ends, bias, state, "silu"
    expected = convolution_oracle.forward_packed(x, weight, *rest)
    wanted = convolution_oracle.gradients_packed(
        outer["grad_y"], x, weight, *rest, outer["grad_final_state"]
    )
    given["x"] = x

    def run(arrays, outer, cu_seqlens=ends):
        options = {"activation": "silu", "cu_seqlens": cu_seqlens}
        function = partial(adapter.causal_conv1d_varlen_with_state, **options)
        y = adapter.causal_conv1d_varlen(**arrays, **options)
        return y, *gradients_of(function, outer, arrays)

    for indices in (), (np.array(ends, np.int32),):
        y, results, gradients = taken(
            place, jax.jit(run)(*brought(place, (given, outer, *indices)))
        )
        check_values(results, given, expected)
        check_gradients(Named(gradients), given, wanted)
        assert same_bits(y, results[0])


@every_device
def test_a_weight_as_of_conv1d_has_a_gradient_of_its_shape(place):
    x, weight = brought(place, (normal(2, 3, 9), normal(3, 1, 4, seed=1)))
    _, gradients = with_gradients(adapter.causal_conv1d)(x=x, weight=weight)
    _, flat = with_gradients(adapter.causal_conv1d)(x=x, weight=weight[:, 0])
    assert gradients["weight"].shape == (3, 1, 4)
    assert same_bits(np.array(gradients["weight"][:, 0]), np.array(flat["weight"]))


# The step:


@every_device
@every_dtype
@pytest.mark.parametrize("start", [None, [0, 5]])
@pytest.mark.parametrize("size", [(2, 3, 1, 4, 3), (2, 33, 3, 3, 4), (1, 3, 0, 4, 3)], ids=str)
def test_causal_conv1d_update(place, dtype, start, size):
    starts = None if start is None else np.array(start[: size[0]])
    x, state, weight, bias = update_arguments(*size, (dtype,) * 4).values()
    wanted = update_oracle.update(x, state, weight, bias, "silu", starts)
    update = jax.jit(partial(adapter.causal_conv1d_update, activation="silu"))
    given = brought(place, (x, state, weight, bias))
    y, after = taken(place, update(*given, cache_seqlens=brought(place, starts)))
    scale = max(np.abs(wanted[0]).max(initial=0.0), 1.0)
    assert_close(y, wanted[0], "causal_conv1d_update.y", scale=scale)
    assert_close(after, wanted[1], "causal_conv1d_update.state")
    assert same_bits(np.array(given[1]), state), "the state was written"


@every_device
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_rows_of_a_pool(place, layout):
    x, state, weight, bias = update_arguments(3, 5, 2, 4, 3, P=6).values()
    rows = np.array([4, -1, 0])
    wanted = update_oracle.update(x, state, weight, bias, None, None, rows)
    update = jax.jit(partial(adapter.causal_conv1d_update, layout=layout))
    given = brought(place, (turned(x, layout), state, weight, bias))
    for indices in rows.tolist(), place.array(rows):
        y, after = update(*given, state_indices=indices)
        assert_close(turned(np.array(y), layout), wanted[0], "causal_conv1d_update.y")
        assert_close(np.array(after), wanted[1], "causal_conv1d_update.state")


@every_device
@pytest.mark.parametrize("shape", [(2, 5), (2, 5, 1), (2, 1, 5)], ids=str)
def test_one_input_in_each_shape(place, shape):
    layout = "bld" if shape[1:] == (1, 5) else "bdl"
    x, state, weight, bias = brought(place, [*update_arguments(2, 5, 1, 4, 3).values()])
    wanted, _ = adapter.causal_conv1d_update(x, state, weight, bias)
    y, _ = adapter.causal_conv1d_update(x.reshape(shape), state, weight, bias, layout=layout)
    assert y.shape == shape and same_bits(np.array(y).ravel(), np.array(wanted).ravel())


@every_device
def test_a_donated_state_is_updated_in_its_memory(place):
    x, state, weight, bias = brought(place, [*update_arguments(2, 5, 1, 4, 3).values()])
    wanted = adapter.causal_conv1d_update(x, state, weight, bias)
    state = state + 0  # in memory of JAX's own, not NumPy's
    pointer = state.unsafe_buffer_pointer()
    step = jax.jit(adapter.causal_conv1d_update, donate_argnums=1)
    y, after = step(x, state, weight, bias)
    assert after.unsafe_buffer_pointer() == pointer and state.is_deleted()
    assert same_bits(np.array(after), np.array(wanted[1]))
    assert same_bits(np.array(y), np.array(wanted[0]))


@every_device
@pytest.mark.parametrize("layout", ["bdl", "bld"])
def test_the_gradient_of_a_step_is_that_of_a_convolution(place, layout):
    given = dict(zip(NAMES, brought(place, [*arguments(2, 3, 5, 4, 6).values()]), strict=True))
    given["x"] = given["x"] if layout == "bdl" else given["x"].swapaxes(1, 2)
    outer = {"grad_y": 1.0, "grad_final_state": 2.0}
    options = {"activation": "silu", "layout": layout}

    def update(initial_state, **others):
        return adapter.causal_conv1d_update(state=initial_state, **others, **options)

    whole = partial(adapter.causal_conv1d_with_state, **options)
    wanted, got = (jax.jit(partial(gradients_of, f, outer))(given) for f in (whole, update))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
        assert np.abs(x).max() > 0


# What is refused, in the house's form and while the program is traced:


def refused(kind, argument, function, *args, **options):
    with pytest.raises(kind) as caught:
        function(*args, **options)
    assert re.match(rf"{argument}: expected .+, got .+; .+", str(caught.value)), caught.value
    return str(caught.value)


@every_device
def test_second_derivatives_are_refused(place):
    a, weight = place.array(normal(2, 5, 3)), place.array(normal(5, 4))

    def series(a):
        return adapter.soft_dtw(a, a[::-1]).sum()

    def costs(C):
        return adapter.soft_dtw_from_cost(C).sum()

    def filtered(x):
        return adapter.causal_conv1d(x, weight).sum()

    for function, name in (
        (series, "soft_dtw"),
        (costs, "soft_dtw_from_cost"),
        (filtered, "causal_conv1d"),
    ):
        refused(NotImplementedError, name, jax.hessian(function), a)
        penalty = jax.grad(lambda a, f=function: jnp.square(jax.grad(f)(a)).sum())
        refused(NotImplementedError, name, jax.jit(penalty), a)

    def aligned(a):
        return adapter.soft_dtw_alignment(a, a[::-1]).sum()

    refused(NotImplementedError, "soft_dtw_alignment", jax.grad(aligned), a)
    jax.grad(lambda a: aligned(jax.lax.stop_gradient(a)) * a.sum())(a)


@every_device
def test_forward_mode_of_a_convolution_is_refused(place):
    x, weight = place.array(normal(2, 5, 3)), place.array(normal(5, 4))
    for function in adapter.causal_conv1d, jax.jit(adapter.causal_conv1d):
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda x, f=function: f(x, weight), (x,), (x,))


@every_device
def test_gradients_with_indices_of_a_state_are_refused(place):
    x, state, weight, _ = brought(place, [*update_arguments(2, 5, 1, 4, 3).values()])
    for option in "cache_seqlens", "state_indices":

        def total(x, option=option):
            return adapter.causal_conv1d_update(x, state, weight, **{option: [1, 0]})[0].sum()

        refused(NotImplementedError, option, jax.jit(jax.grad(total)), x)


@every_device
def test_wrong_arguments_are_refused_while_a_program_is_traced(place):
    a, x, weight = brought(place, (normal(2, 5, 3), normal(2, 5, 9), normal(5, 4)))
    whole, state = a.astype(int), jnp.zeros((2, 5, 2))
    soft_dtw, conv = jax.jit(adapter.soft_dtw), jax.jit(adapter.causal_conv1d)
    refused(TypeError, "a", soft_dtw, whole, whole)
    refused(TypeError, "b", soft_dtw, a, a.astype("float32"))
    refused(ValueError, "b", soft_dtw, a, a[:, :, :2])
    refused(ValueError, "a", soft_dtw, a[:, :0], a)
    refused(ValueError, "gamma", adapter.soft_dtw, a, a, gamma=-1.0)
    refused(ValueError, "gamma", adapter.soft_dtw, a, a, gamma=[1.0, -1.0])
    refused(ValueError, "cost", adapter.soft_dtw, a, a, cost="manhattan")
    refused(ValueError, "lengths_a", adapter.soft_dtw, a, a, lengths_a=[6, 1])
    refused(ValueError, "lengths_b", adapter.soft_dtw, a, a, lengths_b=np.array([1, 2, 3]))
    refused(TypeError, "bandwidth", adapter.soft_dtw, a, a, bandwidth=[1.5, 2.0])
    refused(ValueError, "C", jax.jit(adapter.soft_dtw_from_cost), a[0, 0])
    refused(ValueError, "weight", conv, x, weight[:3])
    refused(ValueError, "bias", conv, x, weight, weight)
    refused(ValueError, "layout", adapter.causal_conv1d, x, weight, layout="ldb")
    refused(ValueError, "seq_idx", adapter.causal_conv1d, x, weight, seq_idx=[[0] * 9])
    refused(ValueError, "initial_state", adapter.causal_conv1d, x, weight, initial_state=state)
    refused(ValueError, "state", adapter.causal_conv1d_update, x[..., 0], state, weight)
    refused(
        *(ValueError, "cu_seqlens", adapter.causal_conv1d_varlen, x[0].T, weight),
        cu_seqlens=[0, 10],
    )
    refused(
        *(ValueError, "state_indices", adapter.causal_conv1d_update, x[..., 0], a[..., :3], weight),
        state_indices=[0, 7],
    )


def test_what_is_no_array_of_jax_is_refused():
    a = jnp.zeros((3, 2))
    refused(TypeError, "a", adapter.soft_dtw, [[1.0, 2.0]], a)
    refused(TypeError, "b", adapter.soft_dtw, a, None)
    refused(TypeError, "x", adapter.causal_conv1d, 1.0, a)
    same = adapter.soft_dtw(np.zeros((3, 2)), a)  # NumPy's are brought
    assert same == cuseq.soft_dtw(np.zeros((3, 2)), np.zeros((3, 2)))


def test_wrong_values_of_traced_indices_are_refused_when_a_program_runs():
    """On the CPU; on a CUDA device nobody reads them, and such a sample is NaN."""
    place = JAX_CPU
    a = place.array(normal(2, 5, 3))
    with pytest.raises(Exception, match="lengths_a: expected 1 to 5, got 6; correct this entry"):
        jax.jit(adapter.soft_dtw)(a, a, lengths_a=place.array(np.array([6, 1]))).block_until_ready()


@over([JAX_CUDA])
def test_wrong_values_of_traced_indices_give_nan(place):
    a = place.array(normal(2, 5, 3))
    values = jax.jit(adapter.soft_dtw)(a, a, lengths_a=place.array(np.array([6, 5])))
    assert np.isnan(values[0]) and np.isfinite(values[1])


@pytest.fixture
def as_jax_comes():
    """Without 64 bits."""
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


def test_integers_that_jax_would_cut_off_are_refused(as_jax_comes):
    a = jnp.zeros((2, 5, 3))
    refused(ValueError, "bandwidth", adapter.soft_dtw, a, a, bandwidth=[2**40, 1])
    assert adapter.soft_dtw(a, a, bandwidth=2**40).shape == (2,)
