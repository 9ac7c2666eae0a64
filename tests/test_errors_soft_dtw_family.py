"""Wrong arguments of what is built on soft-DTW; the form of an error is that of test_errors.py."""

import re

import numpy as np
import pytest

import cuseq
from tests.frameworks import every_place
from tests.samples import normal

OF_PAIRS, OF_COLLECTIONS = (
    ["dtw", "dtw_path"],
    ["soft_dtw_cdist", "soft_dtw_cdist_value_and_grad", "soft_dtw_divergence_cdist"],
)
OF_QUERIES = ["soft_dtw_subsequence", "soft_dtw_subsequence_match"]
OF_SECOND_ORDER = ["soft_dtw_hvp", "soft_dtw_from_cost_hvp"]
OF_MEMBERS = ["soft_dtw_barycenter", "soft_dtw_barycenter_with_history"]
FAMILY = [*OF_PAIRS, *OF_COLLECTIONS, *OF_QUERIES, *OF_SECOND_ORDER, *OF_MEMBERS]


def refused(place, error, argument, name, arrays, **options):
    """Check the error of a call on NumPy arrays, brought to a place, as the options that are."""

    def brought(x):
        return place.array(x) if isinstance(x, np.ndarray) else x

    with pytest.raises(error) as caught:
        getattr(cuseq, name)(*map(brought, arrays), **{k: brought(x) for k, x in options.items()})
    message = str(caught.value)
    assert type(caught.value) is error
    assert re.fullmatch(rf"{re.escape(argument)}: expected .+, got .+; .+", message), message


def over(names):
    return pytest.mark.parametrize("name", names)


@every_place
@over(OF_PAIRS + OF_QUERIES)
def test_pairs_of_series(place, name):
    first, second = ("a", "b") if name in OF_PAIRS else ("query", "series")
    good = normal(2, 4, 3), normal(2, 5, 3)
    refused(place, ValueError, first, name, (np.zeros(()), good[1]))
    refused(place, ValueError, first, name, (normal(2, 0, 3), good[1]))
    refused(place, ValueError, second, name, (good[0], normal(2, 5, 2)))
    refused(place, ValueError, second, name, (good[0], normal(3, 5, 3)))
    refused(place, TypeError, first, name, (np.zeros((2, 4, 3), np.int32), good[1]))
    refused(place, TypeError, second, name, (good[0], good[1].astype(np.float32)))
    refused(place, ValueError, "cost", name, good, cost="squared")
    for argument, most in ((f"lengths_{first}", 4), (f"lengths_{second}", 5)):
        for wrong in ([1, most + 1], [0, 1], [1, 1, 1], most + 1, 0):
            refused(place, ValueError, argument, name, good, **{argument: wrong})
        refused(place, TypeError, argument, name, good, **{argument: [1.0, 2.0]})
    if name in OF_PAIRS:
        refused(place, ValueError, "bandwidth", name, good, bandwidth=-1)
    else:
        refused(place, ValueError, "gamma", name, good, gamma=-1.0)


@every_place
@over(OF_COLLECTIONS)
def test_collections(place, name):
    good = normal(3, 4, 2), normal(2, 5, 2)
    refused(place, ValueError, "A", name, (normal(4),))
    refused(place, ValueError, "A", name, (normal(1, 2, 3, 4), good[1]))
    refused(place, ValueError, "A", name, (normal(3, 0, 2),))
    refused(place, ValueError, "B", name, (good[0], normal(4)))
    refused(place, ValueError, "B", name, (good[0], normal(2, 5, 3)))
    refused(place, TypeError, "A", name, (np.zeros((3, 4), np.int64),))
    refused(place, TypeError, "B", name, (good[0], good[1].astype(np.float32)))
    refused(place, ValueError, "cost", name, good, cost="squared")
    for gamma in (-1.0, np.nan, np.ones(3)):  # one for all pairs
        refused(place, ValueError, "gamma", name, good, gamma=gamma)
    for bandwidth in (-1, [1, 2, 3]):
        refused(place, ValueError, "bandwidth", name, good, bandwidth=bandwidth)
    for argument, wrong in (("lengths_a", [1, 2]), ("lengths_a", [1, 2, 5]), ("lengths_b", [0, 1])):
        refused(place, ValueError, argument, name, good, **{argument: wrong})
    refused(place, ValueError, "lengths_b", name, good[:1], lengths_b=[1, 2, 3])


@every_place
def test_weights_of_a_collections_values(place):
    name, good = OF_COLLECTIONS[1], (normal(3, 4, 2), normal(2, 5, 2))
    refused(place, ValueError, "grad_values", name, good, grad_values=normal(2, 3))
    refused(place, TypeError, "grad_values", name, good, grad_values=np.ones((3, 2), np.float32))


@every_place
def test_directions(place):
    a, b, v_a, v_b = normal(2, 4, 3), normal(2, 5, 3), normal(2, 4, 3), normal(2, 5, 3)
    refused(place, ValueError, "v_a", "soft_dtw_hvp", (a, b, v_b, v_b))
    refused(place, ValueError, "v_b", "soft_dtw_hvp", (a, b, v_a, v_b[:1]))
    refused(place, TypeError, "v_b", "soft_dtw_hvp", (a, b, v_a, v_b.astype(np.float32)))
    refused(place, ValueError, "b", "soft_dtw_hvp", (a, b[:, :, :2]))
    refused(place, ValueError, "gamma", "soft_dtw_hvp", (a, b, v_a, v_b), gamma=-1.0)
    refused(place, ValueError, "v", "soft_dtw_from_cost_hvp", (a, b))
    refused(place, TypeError, "v", "soft_dtw_from_cost_hvp", (a, v_a.astype(np.float16)))
    refused(place, ValueError, "C", "soft_dtw_from_cost_hvp", (normal(4), normal(4)))


@every_place
@over(OF_MEMBERS)
@pytest.mark.parametrize(
    "options, argument",
    [
        ({"weights": [1.0, 2.0]}, "weights"),
        ({"weights": [1.0, -1.0, 1.0]}, "weights"),
        ({"weights": [0.0, 0.0, 0.0]}, "weights"),
        ({"init": "middle"}, "init"),
        ({"init": 3}, "init"),
        ({"init": np.zeros((5, 3))}, "init"),
        ({"gamma": np.ones(3)}, "gamma"),
        ({"gamma": -1.0}, "gamma"),
        ({"cost": "squared"}, "cost"),
        ({"lengths": [1, 2, 31]}, "lengths"),
        ({"lengths": [1, 2]}, "lengths"),
        ({"lengths": 0}, "lengths"),
        ({"tol": -1.0}, "tol"),
        ({"tol": float("nan")}, "tol"),
        ({"max_iter": -1}, "max_iter"),
    ],
    ids=str,
)
def test_members(place, name, options, argument):
    pytest.importorskip("scipy")
    refused(place, ValueError, argument, name, (normal(3, 30, 2),), **options)


@every_place
@over(OF_MEMBERS)
def test_shapes_and_dtypes_of_members(place, name):
    pytest.importorskip("scipy")
    for shape in ((4,), (0, 3, 2), (3, 0, 2), (1, 2, 3, 4)):
        refused(place, ValueError, "X", name, (np.zeros(shape),))
    refused(place, TypeError, "X", name, (np.zeros((2, 3), np.int64),))
    refused(place, TypeError, "lengths", name, (np.zeros((2, 3)),), lengths=[1.0, 2.0])
    for wrong in (None, 2.5, True):
        refused(place, TypeError, "max_iter", name, (np.zeros((2, 3)),), max_iter=wrong)
    for wrong in (None, "a", True):
        refused(place, TypeError, "tol", name, (np.zeros((2, 3)),), tol=wrong)
