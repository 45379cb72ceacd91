"""Whether a client had any sample of a class, as a probability learnt from clients whose labels are known."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.types import FloatArray

_SMALLEST = 0.02
"""What is added to √z before its logarithm: proportions below its square are much alike."""

_RIDGE, _OFFSET_RIDGE = 1.0, 0.01
"""Of the slopes, and of the constant: finite too where all classes of all clients are there."""

_STEPS, _STEEP = 50, 1e-8
"""Newton's, at most; and the length of the gradient, over the number of classes seen, at which they end."""


class PresenceModel:
    """P(N_n > 0) given the proportions ẑ found of a client, by logistic regression.

        log P/(1 − P) = a + b·x(ẑ, n),     x = (l, l², √ẑ_n, H, H l),  l = log(√ẑ_n + 0.02)

    H is the entropy of ẑ over log N: in a client that has few classes, a small ẑ_n is more often of one that
    isn't there. a and b maximise Σ log P − ½‖b‖² − 0.005 a², with P of what was there; that is strictly
    concave, and Newton's steps, halved where they don't lead up, reach its only maximum. (SciPy's
    minimiser would be loaded for this alone, which takes longer than a small client.)

    Parameters
    ----------
    found : ẑ of clients that the estimator was not fitted to, on the simplex, shape (R, N)
    there : whether they had samples of the class, shape (R, N)

    Source: ridge logistic regression (le Cessie & van Houwelingen 1992).
    """

    def __init__(self, found: FloatArray, there: NDArray[np.bool_]) -> None:
        x, y = _columns(found), np.asarray(there, dtype=np.float64).ravel()
        ridge = np.full(x.shape[1], _RIDGE)
        ridge[0] = _OFFSET_RIDGE

        def value(w: FloatArray) -> float:
            s = x @ w
            return float(y @ s - np.logaddexp(0.0, s).sum() - 0.5 * w @ (ridge * w))

        w, best = np.zeros(x.shape[1]), value(np.zeros(x.shape[1]))
        for _ in range(_STEPS):
            p = _logistic(x @ w)
            gradient = x.T @ (y - p) - ridge * w
            if np.linalg.norm(gradient) < _STEEP * len(y):
                break
            way = np.linalg.solve(x.T @ ((p * (1 - p))[:, None] * x) + np.diag(ridge), gradient)
            while (now := value(w + way)) < best and np.linalg.norm(way) > _STEEP:
                way = way / 2
            w, best = w + way, now
        self._weights = w

    def __call__(self, found: FloatArray) -> FloatArray:
        """For clients' proportions, shape (R, N)."""
        return _logistic(_columns(found) @ self._weights).reshape(found.shape)


def _columns(found: FloatArray) -> FloatArray:
    """1 and x of each class of each client, shape (R · N, 6)."""
    N = found.shape[1]
    root = np.sqrt(found)
    entropy = -(found * np.log(np.maximum(found, np.finfo(float).tiny))).sum(axis=1) / np.log(N)
    small, H = np.log(root + _SMALLEST).ravel(), np.repeat(entropy, N)
    return np.column_stack((np.ones_like(small), small, small**2, root.ravel(), H, H * small))


def _logistic(s: FloatArray) -> FloatArray:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * s)))
