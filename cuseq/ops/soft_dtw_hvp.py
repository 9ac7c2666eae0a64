"""Second derivatives of soft-DTW: the Hessian times a direction."""

from cuseq.host import soft_dtw_hvp as host
from cuseq.ops import soft_dtw_engine as engine
from cuseq.ops.soft_dtw import borrow, borrow_cost
from cuseq.ops.soft_dtw_engine import Memory
from cuseq.ops.soft_dtw_plan import GIVEN
from cuseq.runtime import arrays, checks, kernels
from cuseq.runtime.arrays import HOST
from cuseq.runtime.kernels import C_TYPES
from cuseq.runtime.replay import replayed

FILE, THREADS, OF_TABLES, WARP = "soft_dtw_hvp.cu", 256, 512, 32
COSTS = {"sqeuclidean": 0, "euclidean": 1, "cityblock": 2, GIVEN: 3, "cosine": 4}
NOTHING = 0, 0, 0, 0  # pointer and strides of a direction that is 0


@replayed
def soft_dtw_hvp(
    a,
    b,
    v_a=None,
    v_b=None,
    *,
    gamma=1.0,
    cost="sqeuclidean",
    bandwidth=None,
    lengths_a=None,
    lengths_b=None,
):
    """The Hessian of the sum of soft-DTW values times a direction (v_a, v_b).

    That is the derivative of ``soft_dtw_value_and_grad``'s gradients along the direction, computed
    in float64. With gamma 0 the path stands still, and only the slopes of the costs change.

    Args:
        v_a, v_b: a direction, of the shapes and dtypes of a and b; None for 0.
        The others as `soft_dtw`. On a CUDA device it takes memory for 12 float64 a cell.

    Returns:
        (product_a, product_b), of the shapes and dtypes of a and b. NaN for a sample whose value is
        NaN, 0 for one whose value is infinite.

    Raises: as `soft_dtw`.

    Source: differentiated from the recurrences of M. Cuturi and M. Blondel, "Soft-DTW: a
    differentiable loss function for time-series", ICML 2017.

    >>> import numpy as np, cuseq
    >>> a, b = np.array([1.0, 2.0, 3.0]), np.array([3.0, 4.0, -3.0])
    >>> product_a, _ = cuseq.soft_dtw_hvp(a, b, np.array([1.0, 0.0, 0.0]))
    >>> product_a.round(3)
    array([ 2., -0., -0.])
    """
    operator = "soft_dtw"
    call = borrow(operator, a, b, gamma, cost, bandwidth, lengths_a, lengths_b)
    v_a = _direction("v_a", v_a, call.shapes[0], call.a, operator)
    v_b = _direction("v_b", v_b, call.shapes[1], call.b, operator)
    value_dot = arrays.scratch(call.values_shape, call.problem.real, call.like)
    products = of_series(call, None, v_a, v_b, value_dot)
    return tuple(arrays.give_back(product, a) for product in products)


@replayed
def soft_dtw_from_cost_hvp(C, v, *, gamma=1.0, bandwidth=None, lengths_a=None, lengths_b=None):
    """How the expected alignment changes along a direction v: the Hessian by the costs times v.

    Args:
        v: a direction, of the shape and dtype of C.
        The others as `soft_dtw_from_cost`. It takes memory as `soft_dtw_hvp` does.

    Returns:
        The product, of the shape and dtype of C; NaN for a sample whose value is NaN.

    Raises: as `soft_dtw_from_cost`.

    >>> import numpy as np, cuseq
    >>> C, v = np.zeros((2, 2)), np.array([[0.0, 1.0], [0.0, 0.0]])
    >>> cuseq.soft_dtw_from_cost_hvp(C, v).round(4) + 0.0
    array([[ 0.    , -0.2222],
           [ 0.1111,  0.    ]])
    """
    operator = "soft_dtw_from_cost"
    call = borrow_cost(operator, C, gamma, bandwidth, lengths_a, lengths_b)
    v = _direction("v", v, call.shapes[0], call.C, operator)
    value_dot = arrays.scratch(call.values_shape, call.problem.real, call.like)
    product = of_costs(call, None, v, value_dot)
    return arrays.give_back(product, C)


def _direction(name, v, shape, like, operator):
    """A direction borrowed and checked, seen as the array that it is of; None for 0."""
    if v is None:
        return None
    v = arrays.borrow(name, v, operator)
    checks.shape(name, v, shape, "of what it changes", "pass a number for each")
    checks.same_dtype(name, v, "the series or costs", like.dtype)
    checks.same_device(name, v, "the first argument", like)
    # as series are seen, or costs
    axes = {1: (None, 0, None), 2: (None, 0, 1), 3: (0, 1, 2)}[len(shape)]
    return v.seen_as(*axes)


def series_directional(grad_values, v_a, v_b, a, b, **options):
    """For adapters: (value_dot, product_a, product_b), of ``sum(grad_values * values)``.

    value_dot is how the values change along (v_a, v_b); `options` are all of soft_dtw's.
    """
    call = borrow("soft_dtw", a, b, **options)
    outer = arrays.borrow("grad_values", grad_values, "soft_dtw")
    v_a = _direction("v_a", v_a, call.shapes[0], call.a, "soft_dtw")
    v_b = _direction("v_b", v_b, call.shapes[1], call.b, "soft_dtw")
    value_dot = arrays.empty(call.values_shape, call.problem.real, call.like)
    products = of_series(call, outer, v_a, v_b, value_dot)
    return tuple(arrays.give_back(x, a) for x in (value_dot, *products))


def cost_directional(grad_values, v, C, **options):
    """For adapters: (value_dot, product) as `series_directional`, by costs."""
    operator = "soft_dtw_from_cost"
    call = borrow_cost(operator, C, **options)
    outer = arrays.borrow("grad_values", grad_values, operator)
    v = _direction("v", v, call.shapes[0], call.C, operator)
    value_dot = arrays.empty(call.values_shape, call.problem.real, call.like)
    product = of_costs(call, outer, v, value_dot)
    return arrays.give_back(value_dot, C), arrays.give_back(product, C)


# ---- for all of them


def of_series(call, grad_values, v_a, v_b, value_dot):
    """(product_a, product_b); how the values change is written to value_dot.

    Of ``sum(grad_values * values)``, grad_values None for ones; v_a and v_b are seen as a and b.
    """
    problem = call.problem
    products = tuple(arrays.empty(shape, problem.dtype, call.like) for shape in call.shapes)
    if problem.device == HOST:
        directions = [
            x.numpy() * 0 if v is None else v.numpy()
            for x, v in zip((call.a, call.b), (v_a, v_b), strict=True)
        ]
        views = [
            product.numpy().reshape(x.shape)
            for x, product in zip((call.a, call.b), products, strict=True)
        ]
        outer = grad_values and grad_values.numpy().reshape(-1)
        flat = value_dot.numpy().reshape(-1)
        host.of_series(outer, call.pairs(), *directions, flat, *views)
        return products
    B, N, M, D = problem.B, problem.N, problem.M, problem.D
    sections = _tables(problem)
    for side, x in ("a", call.a), ("b", call.b):
        rows = x.shape[0] * x.shape[1]
        sections |= {f"{name}_{side}": 8 * rows * D for name in ("points", "tangents")}
        sections |= {f"{name}_{side}": 8 * rows * D for name in ("sums", "sums_dot")}
        sections[f"norms_{side}"] = 16 * rows
    memory = Memory(sections, call.like)
    given = [array for array in (grad_values, v_a, v_b) if array]
    with arrays.launching(*call.on_device, *given) as launch:
        run = _Run(launch, problem)
        for side, x, v in ("a", call.a, v_a), ("b", call.b, v_b):
            outputs = (memory[f"{name}_{side}"] for name in ("points", "tangents", "norms"))
            args = (*x.shape, *x.flat, *(v.flat if v else NOTHING), *outputs)
            run("soft_dtw_hvp_points", x.shape[0] * x.shape[1], args)
        if B:
            engine.prepare_pairs(launch, call, memory["pairs"], memory["spoilt"])
        points = [
            memory[f"{name}_{side}"] for side in ("a", "b") for name in ("points", "tangents")
        ]
        args = B, N, M, D, memory["pairs"], *points, memory["C"], memory["C_dot"]
        run("soft_dtw_hvp_costs", B * N * M, args)
        run.tables(call, grad_values, memory, value_dot)
        tables = [memory[name] for name in ("C", "C_dot", "E", "E_dot")]
        for of_a, side, other, x, product in (
            (1, "a", points, call.a, products[0]),
            (0, "b", points[2:] + points[:2], call.b, products[1]),
        ):
            batch, length, _ = x.shape
            sums = memory[f"sums_{side}"], memory[f"sums_dot_{side}"]
            args = B, N, M, D, of_a, batch, memory["pairs"], *other, *tables, *sums
            run("soft_dtw_hvp_sums", batch * length * D * WARP, args)
            args = batch * length, D, *other[:2], memory[f"norms_{side}"], *sums, product.pointer
            run("soft_dtw_hvp_finish", batch * length if D else 0, args)
    return products


def of_costs(call, grad_values, v, value_dot):
    """The product as `of_series` has it, by given costs."""
    problem = call.problem
    product = arrays.empty(call.shapes[0], problem.dtype, call.like)
    if problem.device == HOST:
        outer = grad_values and grad_values.numpy().reshape(-1)
        view = product.numpy().reshape(call.C.shape)
        host.of_costs(outer, call.pairs(), v.numpy(), value_dot.numpy().reshape(-1), view)
        return product
    B, N, M = problem.B, problem.N, problem.M
    memory = Memory(_tables(problem), call.like)
    if B:
        with arrays.launching(*call.on_device, v, *filter(None, (grad_values,))) as launch:
            run = _Run(launch, problem)
            engine.prepare_pairs(launch, call, memory["pairs"], memory["spoilt"])
            args = (B, N, M, memory["pairs"], *call.C.flat, *v.flat, memory["C"], memory["C_dot"])
            run("soft_dtw_hvp_given", B * N * M, args)
            run.tables(call, grad_values, memory, value_dot)
            args = B, N, M, memory["pairs"], memory["E_dot"], product.pointer
            run("soft_dtw_hvp_alignment", B * N * M, args)
    return product


def _tables(problem):
    """Sections of working memory for the tables."""
    cells = problem.B * problem.N * problem.M
    numbers = {name: 8 * cells for name in ("C", "C_dot", "E", "E_dot")}
    return {"pairs": 48 * problem.B, "spoilt": 4 * problem.B, "weights": 48 * cells, **numbers}


class _Run:
    """Launches functions of kernels/soft_dtw_hvp.cu."""

    def __init__(self, launch, problem):
        self._launch, self._problem = launch, problem
        self._macros = (
            ("X_T", C_TYPES[problem.dtype]),
            ("REAL", C_TYPES[problem.real]),
            ("COST", COSTS[problem.cost]),
        )

    def __call__(self, function, threads, args):
        blocks = min(-(-threads // THREADS), kernels.MOST_BLOCKS)
        if blocks:
            self._launch(FILE, function, self._macros, blocks, THREADS, args)

    def tables(self, call, grad_values, memory, value_dot):
        B, N, M = self._problem[:3]
        outer = 0, 0
        if grad_values:
            outer = grad_values.pointer, *(grad_values.strides or (0,))
        tables = [memory[name] for name in ("weights", "E", "E_dot")]
        args = N, M, memory["pairs"], memory["C"], memory["C_dot"], *outer, *tables
        args += (value_dot.pointer,)
        threads = min(-(-min(N, M) // WARP) * WARP, OF_TABLES)
        if B:
            self._launch(FILE, "soft_dtw_hvp_tables", self._macros, B, threads, args)
