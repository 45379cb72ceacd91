"""The probability of presence: against scikit-learn, and against how often classes are there."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from rlu_cli.core.presence import _OFFSET_RIDGE, PresenceModel, _columns
from rlu_cli.core.types import FloatArray

N = 5


def clients(count: int, *, seed: int) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Proportions as they are found, with errors in their roots, and which classes are there."""
    rng = np.random.default_rng(seed)
    alphas = np.exp(rng.uniform(np.log(0.1), np.log(3.0), count))
    counts = np.stack([rng.multinomial(100, rng.dirichlet(np.full(N, a))) for a in alphas])
    roots = np.maximum(np.sqrt(counts / 100) + 0.08 * rng.normal(size=counts.shape), 1e-4)
    found = np.square(roots)
    return found / found.sum(axis=1, keepdims=True), counts > 0


def test_the_probabilities_are_those_of_scikit_learns_ridge_logistic_regression() -> None:
    found, there = clients(300, seed=0)
    model = PresenceModel(found, there)
    x = _columns(found)
    x[:, 0] = 1 / np.sqrt(_OFFSET_RIDGE)  # the constant's own ridge
    oracle = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-10, max_iter=10_000)
    oracle.fit(x, there.ravel())
    np.testing.assert_allclose(model(found).ravel(), oracle.predict_proba(x)[:, 1], atol=1e-6)


def test_what_it_says_happens_about_as_often_and_errs_less_than_rounding() -> None:
    model = PresenceModel(*clients(1500, seed=0))
    found, there = clients(3000, seed=1)
    said = model(found)
    for low, high, off in ((0.0, 0.3, 0.04), (0.3, 0.85, 0.08), (0.85, 1.0, 0.01)):
        chosen = (said >= low) & (said < high)
        assert chosen.sum() > 1000
        assert np.mean(there[chosen]) == pytest.approx(said[chosen].mean(), abs=off)
    rounded = np.rint(100 * found) > 0
    assert np.mean((said > 0.5) == there) > np.mean(rounded == there)
    assert np.mean(np.square(said - there)) < 0.75 * np.mean(rounded != there)


def test_a_small_proportion_is_more_often_of_a_missing_class_in_a_client_that_has_few() -> None:
    model = PresenceModel(*clients(400, seed=0))
    even, skewed = np.array([[0.01, 0.3, 0.25, 0.24, 0.2]]), np.array([[0.01, 0.98, 0.004, 0.003, 0.003]])
    assert model(even)[0, 0] > model(skewed)[0, 0] + 0.1


@pytest.mark.parametrize("there", [False, True])
def test_where_all_or_none_are_there_it_is_sure_but_finite(there: bool) -> None:
    found, known = clients(200, seed=0)
    said = PresenceModel(found, np.full_like(known, there))(found)
    assert np.all((said > 0) & (said < 1))
    assert np.abs(said - there).max() < 0.05


def test_proportions_of_zero_are_answered_too() -> None:
    model = PresenceModel(*clients(200, seed=0))
    said = model(np.array([[1.0, 0.0, 0.0, 0.0, 0.0]]))
    assert np.all(np.isfinite(said))
    assert said[0, 0] > 0.95
    assert np.all(said[0, 1:] < 0.5)
