"""cuseq.soft_dtw_hvp on every framework, against differences of the oracle's gradients."""

import numpy as np
import pytest

import cuseq
from tests.frameworks import every_place, every_place_and_dtype, run
from tests.samples import normal
from tests.test_soft_dtw import by_oracle
from tests.tolerances import U16, U32, UB16

STEP = 1e-5
# A product is as good as its dtype, beside the difference's h^2 f''' / 6, about 1e-9 here, and
# rounding of the oracle's E over h, about 1e-10; inputs of 16 bits are exact in float64.
ALLOWED = {"float64": 1e-7, "float32": 1e-7 + 8 * U32, "float16": 2 * U16, "bfloat16": 2 * UB16}


def differences(arrays, directions, **options):
    """How the oracle's gradients change along the directions."""
    x, v = ([array.astype(np.float64) for array in those] for those in (arrays, directions))
    ahead, behind = (
        by_oracle(*(a + s * b for a, b in zip(x, v, strict=True)), **options).gradients
        for s in (STEP, -STEP)
    )
    return [(p - q) / (2 * STEP) for p, q in zip(ahead, behind, strict=True)]


def close(got, wanted):
    for x, expected in zip(got, wanted, strict=True):
        scale = max(np.abs(expected).max(initial=0.0), 1.0)
        np.testing.assert_allclose(
            x.astype(np.float64), expected, rtol=0, atol=ALLOWED[x.dtype.name] * scale
        )


@every_place_and_dtype
@pytest.mark.parametrize("batches", [(2, 2), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("size", [(6, 5, 2), (1, 4, 1), (9, 3, 3)], ids=str)
def test_sizes(place, dtype, batches, size):
    N, M, D = size
    shapes = (batches[0], N, D), (batches[1], M, D)
    arrays = [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    directions = [normal(*shape, seed=seed + 2, dtype=dtype) for seed, shape in enumerate(shapes)]
    products = run(place, cuseq.soft_dtw_hvp, *arrays, *directions, gamma=0.7)
    assert all(x.dtype == arrays[0].dtype for x in products)
    close(products, differences(arrays, directions, gamma=0.7))


@every_place
@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0.7, "cost": "euclidean"},
        {"gamma": 0.7, "cost": "cityblock"},
        {"gamma": 0.3, "cost": "cosine"},
        {"gamma": 0.7, "bandwidth": 1},
        {"gamma": 0.0},
        {"gamma": np.array([0.3, 1.0, 5.0]), "lengths_a": np.array([6, 1, 4])},
        {"gamma": 0.7, "cost": "euclidean", "lengths_b": np.array([1, 5, 2])},
    ],
    ids=str,
)
def test_options(place, options):
    shapes = (3, 6, 2), (3, 5, 2)
    arrays = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    directions = [normal(*shape, seed=seed + 2) for seed, shape in enumerate(shapes)]
    wanted = differences(arrays, directions, **options)
    close(run(place, cuseq.soft_dtw_hvp, *arrays, *directions, **options), wanted)
    zero = np.zeros(shapes[0])
    one_sided = run(place, cuseq.soft_dtw_hvp, *arrays, None, directions[1], **options)
    close(one_sided, differences(arrays, [zero, directions[1]], **options))


@every_place_and_dtype
@pytest.mark.parametrize("options", [{"gamma": 0.5}, {"gamma": 1.0, "bandwidth": 1}], ids=str)
def test_given_costs(place, dtype, options):
    C, v = np.abs(normal(2, 6, 5, dtype=dtype)), normal(2, 6, 5, seed=1, dtype=dtype)
    product = run(place, cuseq.soft_dtw_from_cost_hvp, C, v, **options)
    close([product], differences([C], [v], **options))


@every_place
def test_symmetry(place):
    """u H v is v H u."""
    a, b, v, w, x, y = (normal(1, n, 2, seed=n + k) for k in range(3) for n in (7, 5))
    of_v = run(place, cuseq.soft_dtw_hvp, a, b, v, w, gamma=0.4)
    of_x = run(place, cuseq.soft_dtw_hvp, a, b, x, y, gamma=0.4)
    one = (of_v[0] * x).sum() + (of_v[1] * y).sum()
    assert one == pytest.approx((of_x[0] * v).sum() + (of_x[1] * w).sum())


@every_place
def test_what_is_not_a_number_stays_in_its_sample(place):
    a, b, v = normal(3, 6, 2), normal(3, 5, 2, seed=1), normal(3, 6, 2, seed=2)
    a[0, 1, 0], a[1, 2, 1] = np.nan, np.inf
    for product in run(place, cuseq.soft_dtw_hvp, a, b, v, None):
        assert np.isnan(product[0]).all() and not product[1].any()
        assert np.isfinite(product[2]).all()


@every_place
def test_series_of_fewer_axes(place):
    a, b, v, w = (normal(n, seed=n) for n in (6, 5, 6, 5))
    products = run(place, cuseq.soft_dtw_hvp, a, b, v, w)
    wide = run(place, cuseq.soft_dtw_hvp, *(x[None, :, None] for x in (a, b, v, w)))
    for product, other in zip(products, wide, strict=True):
        assert (product == other[0, :, 0]).all()
    assert run(place, cuseq.soft_dtw_from_cost_hvp, normal(4, 3), normal(4, 3)).shape == (4, 3)
