"""Kernel ridge regression from clients' class features to label proportions, with honest errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlu_cli.core.types import FloatArray

_GAMMAS = (0.003, 0.01, 0.03)
_RIDGES = (0.03, 0.1, 0.3, 1.0)
"""Widths and regularisation that are compared."""

_FARTHEST = 4.0
"""Standard deviations to which a feature counts."""

_NEAREST, _SHARE = 60, 0.125
"""Left-out predictions, and the share of all, that say how far one of their size is off."""

_LIKE = 40
"""Left-out predictions that say whether there is any sample: where few are, small differences count."""

_EDGE = 0.025


@dataclass(frozen=True)
class ClassPrediction:
    """Of one client, each of shape (N,).

    proportions : z, on the simplex
    low, high : between which the middle 95 % lie of the proportions for which as much was predicted
    presence : share of those that are not zero
    """

    proportions: FloatArray
    low: FloatArray
    high: FloatArray
    presence: FloatArray


class KernelRegression:
    """√z_n as a function of the features of class n, learnt from clients whose z is known.

        √z(x) ≈ c + Σ_i α_i k(x, x_i),    k(x, x') = exp(−γ ‖x − x'‖²),    α = (K + λ I)⁻¹ (√z − c)

    with one row x_i a client and class: the standardised features and the class's indicator. Roots, because
    they make the errors of small and of large proportions alike. γ and λ are those with the least error on
    clients left out, which needs no further fit: without the rows of client b the error there is
    ((K + λI)⁻¹_bb)⁻¹ α_b. The same errors, of the left-out proportions nearest to the one predicted, give the
    bounds and the presence. Of n errors the next one exceeds the k-th largest with probability k/(n + 1),
    so for 2.5 % the bounds are at k = 0.025 (n + 1), between the order statistics.

    Parameters
    ----------
    features : shape (R, N, F)
    proportions : shape (R, N)
    like : a regression from much the same clients, whose γ and λ are taken

    Source: kernel ridge regression (Saunders et al. 1998); block leave-one-out by the inverse; bounds as in
    the jackknife+ (Barber et al. 2021), conditioned on the prediction.
    """

    def __init__(
        self, features: FloatArray, proportions: FloatArray, *, like: KernelRegression | None = None
    ) -> None:
        clients, N, F = features.shape
        rows = features.reshape(-1, F)
        self._mean = rows.mean(axis=0)
        spread = rows.std(axis=0)
        self._scale = np.where(spread > 1e-9 * np.abs(self._mean), spread, np.inf)
        self._rows = np.concatenate([self._inputs(client) for client in features])
        roots = np.sqrt(proportions).ravel()
        self._offset = float(roots.mean())
        distance = _squared_distances(self._rows, self._rows)
        best, self._gamma, self._ridge = np.inf, 0.0, 0.0
        for gamma in _GAMMAS if like is None else (like._gamma,):
            kernel = np.exp(-gamma * distance)
            for ridge in _RIDGES if like is None else (like._ridge,):
                weights, errors = _left_out(kernel, roots - self._offset, ridge, N)
                error = float(np.abs(errors).mean())
                if error < best:
                    best, self._gamma, self._ridge, self._weights = error, gamma, ridge, weights
                    predicted = roots - errors
        self._known = np.sqrt(_on_simplex(predicted.reshape(clients, N)).ravel())
        self._true = roots
        self._strangest = max(self._strangeness(client) for client in features)
        self.error = 0.5 * float(np.abs(self._known**2 - roots**2).reshape(clients, N).sum(axis=1).mean())

    def strangeness(self, features: FloatArray) -> float:
        """Mean square of the standardised features, over the largest among the clients that were learnt from.

        Parameters
        ----------
        features : shape (N, F)
        """
        return self._strangeness(features) / self._strangest

    def __call__(self, features: FloatArray) -> ClassPrediction:
        """For one client's features, shape (N, F)."""
        kernel = np.exp(-self._gamma * _squared_distances(self._inputs(features), self._rows))
        z = _on_simplex((kernel @ self._weights + self._offset)[None])[0]
        taken = min(len(self._true), max(_NEAREST, int(_SHARE * len(self._true))))
        edge = max(0.0, (_EDGE * (taken + 1) - 1) / (taken - 1))
        low, high, presence = np.empty_like(z), np.empty_like(z), np.empty_like(z)
        for n, root in enumerate(np.sqrt(z)):
            near = np.argsort(np.abs(self._known - root), kind="stable")[:taken]
            like = near[:_LIKE]
            edges = root + np.quantile(self._true[near] - self._known[near], [edge, 1 - edge])
            low[n], high[n] = np.square(np.clip(edges, 0.0, 1.0))
            presence[n] = np.mean(self._true[like] > 0)
        return ClassPrediction(z, np.minimum(low, z), np.maximum(high, z), presence)

    def _inputs(self, features: FloatArray) -> FloatArray:
        scaled = np.clip((features - self._mean) / self._scale, -_FARTHEST, _FARTHEST)
        return np.column_stack((scaled, np.eye(len(features))))

    def _strangeness(self, features: FloatArray) -> float:
        return float(np.mean(np.square((features - self._mean) / self._scale)))


def _squared_distances(a: FloatArray, b: FloatArray) -> FloatArray:
    """‖a_i − b_j‖², shape (len(a), len(b))."""
    found = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1) - 2 * a @ b.T
    return np.asarray(np.maximum(found, 0.0))


def _left_out(
    kernel: FloatArray, targets: FloatArray, ridge: float, block: int
) -> tuple[FloatArray, FloatArray]:
    """α, and the errors at each block of rows when the others alone are learnt from."""
    inverse = np.linalg.inv(kernel + ridge * np.eye(len(kernel)))
    weights = inverse @ targets
    blocks = inverse.reshape(len(kernel) // block, block, -1, block)
    own = np.stack([blocks[b, :, b] for b in range(len(blocks))])
    errors = np.linalg.solve(own, weights.reshape(-1, block)[:, :, None])[:, :, 0]
    return weights, np.asarray(errors.ravel(), dtype=np.float64)


def _on_simplex(roots: FloatArray) -> FloatArray:
    """Squares of the positive ones, each row scaled to sum 1; equal ones where none is positive."""
    squares = np.square(np.maximum(roots, 0.0))
    total = squares.sum(axis=1, keepdims=True)
    equal = np.full_like(squares, 1.0 / squares.shape[1])
    return np.where(total > 0, squares / np.where(total > 0, total, 1.0), equal)
