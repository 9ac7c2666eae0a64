"""cuseq.soft_dtw_barycenter on every framework."""

import numpy as np
import pytest

import cuseq
from tests.frameworks import every_place, every_place_and_dtype, run
from tests.samples import normal

pytest.importorskip("scipy")


def objective(z, X, weights=None, lengths=None, **options):
    z = z[None] if z.ndim == 2 else z[None, :, None]
    X = X if X.ndim == 3 else X[..., None]
    values = cuseq.soft_dtw(
        z.astype(np.float64), X.astype(np.float64), lengths_b=lengths, **options
    )
    return np.average(values, weights=weights)


def waves(n=4, N=30, dtype="float64"):
    """Waves that begin at different times, of two features."""
    t = np.linspace(0, 1, N)
    shifted = [np.exp(-(((t - 0.3 - 0.1 * k) / 0.1) ** 2)) for k in range(n)]
    return np.stack([np.stack([x, 2 * x], axis=1) for x in shifted]).astype(
        normal(1, dtype=dtype).dtype
    )


@every_place_and_dtype
def test_it_is_better_than_any_member_and_their_mean(place, dtype):
    X = waves(dtype=dtype)
    z = run(place, cuseq.soft_dtw_barycenter, X, gamma=0.1)
    assert z.shape == X.shape[1:] and z.dtype == X.dtype
    rounding = 0.05 if X.dtype.itemsize == 2 else 0.0  # of the result, to 16 bits
    others = [*X, X.mean(axis=0)]
    best = min(objective(other, X, gamma=0.1) for other in others)
    assert objective(z, X, gamma=0.1) < best - 0.02 + rounding


@every_place
def test_one_member_is_its_own(place):
    X = waves(1)
    z = run(place, cuseq.soft_dtw_barycenter, X, gamma=1e-3, init=0)
    np.testing.assert_allclose(z, X[0], atol=0.02)


@every_place
def test_weights_and_history(place):
    X, weights = waves(3), np.array([0.2, 0.0, 0.8])
    found = cuseq.soft_dtw_barycenter_with_history(
        place.array(X), weights=place.array(weights), gamma=0.1
    )
    z = place.numpy(found.barycenter)
    place.assert_own(found.barycenter)
    assert found.converged and (np.diff(found.objectives) <= 0).all()
    assert found.objectives[-1] == pytest.approx(objective(z, X, weights, gamma=0.1), rel=1e-6)
    alone = run(place, cuseq.soft_dtw_barycenter, X, weights=weights.tolist(), gamma=0.1)
    assert (alone == z).all()


@every_place
@pytest.mark.parametrize("init", ["mean", 1, "given"])
def test_ragged_members_and_where_it_starts(place, init):
    X, lengths = waves(3), [30, 20, 25]
    X[1, 20:], X[2, 25:] = np.nan, 1e9
    length = {"mean": 30, 1: 20, "given": 12}[init]
    start = place.array(normal(12, 2)) if init == "given" else init
    found = cuseq.soft_dtw_barycenter_with_history(
        place.array(X), lengths=lengths, init=start, gamma=0.1, max_iter=200
    )
    z = place.numpy(found.barycenter)
    assert z.shape == (length, 2) and np.isfinite(z).all()
    assert found.objectives[-1] < found.objectives[0]
    wanted = objective(z, X, lengths=lengths, gamma=0.1)
    assert found.objectives[-1] == pytest.approx(wanted, rel=1e-6)


@every_place
def test_series_of_one_feature(place):
    X = waves()[..., 0].copy()
    z = run(place, cuseq.soft_dtw_barycenter, X, gamma=0.1)
    assert z.shape == (30,)
    wide = run(place, cuseq.soft_dtw_barycenter, X[..., None], gamma=0.1)
    assert (z == wide[:, 0]).all()


def test_an_objective_that_is_not_finite():
    X = waves(3)
    X[1, 2] = np.nan
    with pytest.raises(ValueError, match="^X: expected a finite objective"):
        cuseq.soft_dtw_barycenter(X)


@every_place
def test_no_step_gives_the_start(place):
    """The weighted mean, a member, or what is given; its objective is all of the history."""
    X, weights = waves(3, 9), [1.0, 2.0, 3.0]
    options = {"max_iter": 0, "gamma": 0.1, "weights": weights}
    for init, wanted in (("mean", np.average(X, axis=0, weights=weights)), (1, X[1]), (X[2], X[2])):
        z, objectives, converged = cuseq.soft_dtw_barycenter_with_history(
            place.array(X), init=init, **options
        )
        np.testing.assert_allclose(place.numpy(z), wanted, rtol=1e-15)
        assert len(objectives) == 1 and not converged
        assert objectives[0] == pytest.approx(6 * objective(wanted, X, weights, gamma=0.1))
