"""cuseq.soft_dtw_divergence on every framework, against the oracle."""

import numpy as np
import pytest

import cuseq
from tests.frameworks import every_place, every_place_and_dtype, run
from tests.samples import normal
from tests.test_soft_dtw import by_oracle, exponent_of
from tests.tolerances import assert_close


class Divergence:
    """The oracle's answer: values, gradients, and what their errors grow with."""

    def __init__(self, a, b, gamma, lengths_a=None, lengths_b=None, **options):
        B = max(len(a), len(b))
        wide = [np.repeat(x, B // len(x), axis=0) for x in (a, b)]
        both, *own = [
            by_oracle(x, y, gamma=gamma, lengths_a=of_x, lengths_b=of_y, **options)
            for x, y, of_x, of_y in (
                (*wide, lengths_a, lengths_b),
                (wide[0], wide[0], lengths_a, lengths_a),
                (wide[1], wide[1], lengths_b, lengths_b),
            )
        ]
        self.values = both.values - (own[0].values + own[1].values) / 2
        self.gradients = []
        for side, x in enumerate((a, b)):
            whole = both.gradients[side] - own[side].gradients[side]
            self.gradients.append(whole.sum(axis=0, keepdims=True) if len(x) < B else whole)
        # what cancels is as large as the values and gradients of which it is the difference
        self.scale = max(answer.scale for answer in (both, *own))
        self.steepest = max(np.abs(g).max() for answer in (both, *own) for g in answer.gradients)
        self.steepest *= B
        self.answers = both, *own

    def check(self, values, gradients):
        dtype = values.dtype
        assert_close(values, self.values, "soft_dtw.values", scale=3 * self.scale)
        exponent = max(exponent_of(dtype, answer) for answer in self.answers)
        for name, got, wanted in zip(("a", "b"), gradients, self.gradients, strict=True):
            what = f"soft_dtw.grad_{name}"
            assert_close(got, wanted, what, scale=2 * self.steepest, exponent=exponent)


def run_both(place, a, b, **options):
    values, gradients = run(place, cuseq.soft_dtw_divergence_value_and_grad, a, b, **options)
    alone = run(place, cuseq.soft_dtw_divergence, a, b, **options)
    assert_close(
        alone, values.astype(np.float64), "soft_dtw.values", scale=np.abs(values).max() + 1
    )
    return values, gradients


@every_place_and_dtype
@pytest.mark.parametrize("batches", [(3, 3), (1, 3), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("lengths", [(6, 5), (1, 4), (33, 17)], ids=str)
def test_sizes(place, dtype, batches, lengths):
    a = normal(batches[0], lengths[0], 2, dtype=dtype)
    b = normal(batches[1], lengths[1], 2, seed=1, dtype=dtype)
    Divergence(a, b, 0.7).check(*run_both(place, a, b, gamma=0.7))


@every_place
@pytest.mark.parametrize("batch_a", [3, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"gamma": 0.5, "cost": "euclidean", "bandwidth": 1},
        {"gamma": np.array([0.5, 1.0, 2.0]), "cost": "cosine"},
        {"gamma": 0.5, "bandwidth": np.array([0, 2, 9])},
        {"gamma": 1.0, "lengths_a": np.array([6, 1, 4]), "lengths_b": np.array([5, 2, 1])},
    ],
    ids=str,
)
def test_options(place, batch_a, options):
    """By sample too, where a series that meets a whole batch has other values with itself."""
    a, b = normal(batch_a, 6, 2), normal(3, 5, 2, seed=1)
    Divergence(a, b, **options).check(*run_both(place, a, b, **options))


@every_place_and_dtype
def test_equal_series_have_none_to_the_bit(place, dtype):
    a = normal(2, 40, 3, dtype=dtype)
    values, gradients = run_both(place, a, a.copy(), gamma=0.3)
    assert not values.any() and not any(gradient.any() for gradient in gradients)


@every_place
@pytest.mark.parametrize("shapes", [((5,), (4,)), ((5, 2), (4, 2)), ((5, 2), (3, 4, 2))], ids=str)
def test_series_of_fewer_axes(place, shapes):
    a, b = normal(*shapes[0]), normal(*shapes[1], seed=1)
    values, gradients = run_both(place, a, b)
    assert values.shape == (() if len(shapes[1]) < 3 else (3,))
    assert [gradient.shape for gradient in gradients] == list(shapes)


@every_place
def test_what_is_not_a_number_stays_in_its_sample(place):
    a, b = normal(3, 6, 2), normal(3, 5, 2, seed=1)
    clean, _ = run_both(place, a, b)
    a[1, 2, 0] = np.nan
    values = run(place, cuseq.soft_dtw_divergence, a, b)
    assert np.isnan(values[1]) and values[0] == clean[0] and values[2] == clean[2]


@every_place
def test_no_pairs(place):
    values, gradients = run_both_empty(place)
    assert values.shape == (0,) and gradients[0].shape == (0, 6, 2)


def run_both_empty(place):
    a, b = normal(0, 6, 2), normal(0, 5, 2)
    return run(place, cuseq.soft_dtw_divergence_value_and_grad, a, b)
