"""Ridge regression against its normal equations, and what it leaves out against refits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlu_cli.core.ridge import Ridge, fit_ridge
from rlu_cli.core.types import FloatArray


def data(seed: int, samples: int, features: int, *, noise: float = 0.3) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(samples, features)) * np.exp(rng.normal(size=features)) + rng.normal(size=features)
    Y = X @ rng.normal(size=(features, 3)) / features + 1.0 + noise * rng.normal(size=(samples, 3))
    return X, Y


def penalty_of(found: Ridge, X: FloatArray, Y: FloatArray) -> float:
    """λ from the stationarity of the penalised squares: Xᵀ (Y − ŷ) = λ β."""
    Z = (X - found.centre) / found.scale
    gradient = Z.T @ (Y - found.intercept - Z @ found.slopes)
    return float(np.sum(gradient * found.slopes) / np.sum(found.slopes**2))


def refitted(Z: FloatArray, Y: FloatArray, penalty: float, at: FloatArray) -> FloatArray:
    """With an intercept that is not penalised, by the normal equations."""
    A = np.column_stack((np.ones(len(Z)), Z))
    P = penalty * np.eye(A.shape[1])
    P[0, 0] = 0
    return np.asarray(np.concatenate(([1.0], at)) @ np.linalg.solve(A.T @ A + P, A.T @ Y))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 25), st.integers(1, 30))
def test_what_is_left_out_is_what_refits_say(seed: int, samples: int, features: int) -> None:
    X, Y = data(seed, samples, features)
    found = fit_ridge(X, Y)
    penalty, Z = penalty_of(found, X, Y), (X - found.centre) / found.scale
    np.testing.assert_allclose(found(X[0]), refitted(Z, Y, penalty, Z[0]), rtol=1e-6, atol=1e-9)
    for i in (0, samples - 1):
        others = np.arange(samples) != i
        by_refit = refitted(Z[others], Y[others], penalty, Z[i])
        np.testing.assert_allclose(found.left_out[i], by_refit, rtol=1e-5, atol=1e-7)


def test_the_penalty_follows_the_noise() -> None:
    penalties = [
        penalty_of(fit_ridge(*data(1, 60, 20, noise=noise)), *data(1, 60, 20, noise=noise))
        for noise in (0.01, 3.0)
    ]
    assert penalties[0] < 0.1 * penalties[1]


def test_a_feature_that_never_changes_says_nothing() -> None:
    X, Y = data(2, 30, 4)
    still = np.column_stack((X, np.full(30, 7.0)))
    assert fit_ridge(still, Y)(still[3]) == pytest.approx(fit_ridge(X, Y)(X[3]))
