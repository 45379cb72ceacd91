"""Ridge regression whose penalty is chosen by leaving out one sample at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlu_cli.core.types import FloatArray

_PENALTIES = np.logspace(-3, 2, 21)
"""For each sample: a standardised feature's squares sum to as many."""


@dataclass(frozen=True)
class Ridge:
    """ŷ(x) = ȳ + ((x − x̄)/σ)ᵀ β, β = argmin ‖Y − ȳ − X β‖² + λ ‖β‖².

    left_out : ŷ of every sample by the fit to the others, shape (R, T); σ and λ stay
    """

    centre: FloatArray
    scale: FloatArray
    intercept: FloatArray
    slopes: FloatArray
    left_out: FloatArray

    def __call__(self, features: FloatArray) -> FloatArray:
        """ŷ, shape (T,) for features (F,)."""
        return np.asarray(self.intercept + ((features - self.centre) / self.scale) @ self.slopes)


def fit_ridge(features: FloatArray, targets: FloatArray) -> Ridge:
    """Fit targets (R, T) on features (R, F), with the λ whose left-out squared errors are least.

    With X = U diag(s) Vᵀ and h_i = 1/R + Σ_k U_ik² s_k²/(s_k² + λ), sample i left out is missed by
    (y_i − ŷ_i)/(1 − h_i), for all λ at the price of one decomposition (Allen 1974).
    """
    centre, intercept = features.mean(axis=0), targets.mean(axis=0)
    scale = features.std(axis=0)
    scale = np.maximum(scale, 1e-9 * max(float(scale.max()), 1e-300))
    U, s, Vt = np.linalg.svd((features - centre) / scale, full_matrices=False)
    Y = targets - intercept
    along = U.T @ Y
    best = None
    for penalty in _PENALTIES * len(Y):
        shrunk = s**2 / (s**2 + penalty)
        leverage = 1 / len(Y) + (U**2) @ shrunk
        missed = (Y - (U * shrunk) @ along) / np.maximum(1 - leverage, 1e-9)[:, None]
        error = float(np.sum(missed**2))
        if best is None or error < best[0]:
            slopes = Vt.T @ ((s / (s**2 + penalty))[:, None] * along)
            best = error, slopes, missed
    assert best is not None
    _, slopes, missed = best
    return Ridge(centre, scale, intercept, slopes, targets - missed)
