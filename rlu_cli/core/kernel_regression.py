"""Kernel ridge regression from clients' class features to label proportions, with honest errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlu_cli.core.client_views import Replays
from rlu_cli.core.fits import Arrays, checked
from rlu_cli.core.presence import PresenceModel
from rlu_cli.core.types import FloatArray, IntArray

_GAMMAS = (0.003, 0.01, 0.03)
_RIDGES = (0.03, 0.1, 0.3, 1.0)
_SLOPES = (0.0, 1.0, 10.0, 100.0)
"""Widths, regularisation and weights of the first guess that are compared."""

_SEARCHED = 1000
"""Rows, whole clients, by which they are compared."""

_FARTHEST = 4.0
"""Standard deviations to which a feature counts."""

_NEAREST, _SHARE = 60, 0.125
"""Left-out predictions, and the share of all, that say how far one of their size is off."""

_LIKE = 40
"""Left-out predictions of clients near the one predicted that say it as well, where there are so many."""

_EDGE = 0.025
_TINY = 1e-12


@dataclass(frozen=True)
class ClassPrediction:
    """Of one client, each of shape (N,).

    proportions : z, on the simplex
    low, high : between which the middle 95 % lie of the proportions for which as much was predicted
    presence : probability that z is not zero
    """

    proportions: FloatArray
    low: FloatArray
    high: FloatArray
    presence: FloatArray


class KernelRegression:
    """√z_n as a function of the features of class n, learnt from clients whose z is known.

        √z(x) ≈ c + Σ_i α_i k(x, x_i),    k(x, x') = exp(−γ ‖x − x'‖²) + β Σ_j (√g_j − c)(√g'_j − c),
        α = (K + λ I)⁻¹ (√z − c)

    with one row x_i a client and class: the standardised features and the class's indicator. The first
    features are guesses g_j of z_n: where they are good, a line through them says more than neighbours do.
    Roots, because they make the errors of small and of large proportions alike. β, γ and λ are those with the
    least error on clients left out, which needs no further fit: without the rows of client b the error is
    ((K + λI)⁻¹_bb)⁻¹ α_b. Clients that drew from one half of the auxiliary samples are left out together, so
    that what is peculiar to these samples isn't learnt from the others. The same errors, of the left-out
    proportions nearest to the one predicted, give the bounds; where clients were added that are near the
    answer, each bound is half-way between that and what their errors alone make it: they are few and err
    alike, and the others have none near by to learn from. But where the others' errors leave open that a
    class is absent so do the bounds: those near the answer have a little of each. What left-out proportions
    say of which classes were there gives the presence (`PresenceModel`). A class that is likelier absent than
    there has no samples: that is the median of its count, which makes the least absolute error. Of n errors
    the next one exceeds the k-th largest with probability k/(n + 1), so for 2.5 % the bounds are at
    k = 0.025 (n + 1), between the order statistics.

    Where all clients drew from few images, what training makes of these is learnt, and others err more than
    those left out: by a variance ``unseen``, for which the errors are taken to be larger, all by one factor
    (`allowing_for_other_images`).

    Parameters
    ----------
    replays : features of shape (R, N, F); kept as they are
    guesses : how many of the features are guesses
    constants : γ, λ and β where they are known
    unseen : variance of √z's errors that images which no client drew add

    Source: kernel ridge regression (Saunders et al. 1998); block leave-one-out by the inverse; bounds as in
    the jackknife+ (Barber et al. 2021), conditioned on the prediction; means of quantiles (Ratcliff 1979).
    """

    def __init__(
        self,
        replays: Replays,
        *,
        guesses: int,
        constants: tuple[float, float, float] | None = None,
        unseen: float = 0.0,
    ) -> None:
        self.replays, features = replays, replays.features
        _, N, F = features.shape
        rows = features.reshape(-1, F)
        self._mean = rows.mean(axis=0)
        spread = rows.std(axis=0)
        self._scale = np.where(spread > 1e-9 * np.abs(self._mean), spread, np.inf)
        self._true = np.sqrt(replays.proportions).ravel()
        self._offset = float(self._true.mean())
        self._number = guesses
        self._rows, self._guesses = self._inputs(features), self._guessed(rows)
        self._gamma, self._ridge, self._slope = constants or self._compared(N)
        kernel = self._kernel(self._rows, self._guesses)
        self._inverse = _inverse(kernel + self._ridge * np.eye(len(kernel)))
        self._strangest = max(self._strangeness(client) for client in features)
        self._near = 0
        self._solve(N)
        self._unseen = unseen

    def arrays(self) -> Arrays:
        """Of which `from_arrays` makes it again."""
        constants = np.array([self._gamma, self._ridge, self._slope])
        return {**self.replays.arrays(), "constants": constants, "unseen": np.array([self._unseen])}

    @classmethod
    def from_arrays(cls, arrays: Arrays, num_classes: int, width: int, *, guesses: int) -> KernelRegression:
        """From a file, for ``width`` features of each class.

        Raises
        ------
        KeyError, ValueError
            The arrays aren't such.
        """
        gamma, ridge, slope = (float(value) for value in checked(arrays, "constants", (3,)))
        if gamma not in _GAMMAS or ridge not in _RIDGES or slope not in _SLOPES:
            raise ValueError("the constants are none that are compared")
        (unseen,) = (float(value) for value in checked(arrays, "unseen", (1,)))
        if unseen < 0:
            raise ValueError("a variance is negative")
        replays = Replays.from_arrays(arrays, num_classes, (num_classes, width))
        return cls(replays, guesses=guesses, constants=(gamma, ridge, slope), unseen=unseen)

    def with_more(self, replays: Replays) -> KernelRegression:
        """Learnt from more clients as well, with the same β, γ, λ, c and scale of the features.

        They are taken to be like those that will be predicted. Their errors don't give the bounds alone:
        those of clients around one mix are much alike, and each has the others to learn from.
        """
        features = replays.features
        _, N, F = features.shape
        inputs, guesses = self._inputs(features), self._guessed(features.reshape(-1, F))
        border = self._kernel(inputs, guesses).T
        more = copy.copy(self)
        more.replays = self.replays.and_(replays)
        more._rows = np.concatenate((self._rows, inputs))
        more._guesses = np.concatenate((self._guesses, guesses))
        more._true = np.concatenate((self._true, np.sqrt(replays.proportions).ravel()))
        corner = more._kernel(inputs, guesses)[:, len(self._rows) :] + self._ridge * np.eye(len(inputs))
        more._inverse = _bordered(self._inverse, border, corner)
        more._near = len(inputs)
        more._solve(N)
        return more

    def allowing_for_other_images(self, halved: Replays) -> KernelRegression:
        """With bounds for clients whose images are none of those that the replays drew from.

            unseen = (σ_half² − σ_both²)/4,     bounds wider by √(1 + unseen/σ²)

        σ are the root mean square errors of √z on ``halved`` clients, which drew from one half of the images
        or the other: σ_half where those of one half are left out together, σ_both where as many of both are;
        σ on this regression's own. What is peculiar to a half has twice the variance of what is peculiar to
        all images, and there it is that of both halves: that learnt from, and that predicted.
        """
        assert halved.halves is not None
        mixed = np.empty_like(halved.halves)
        for half in np.unique(halved.halves):
            own = np.flatnonzero(halved.halves == half)
            mixed[own] = np.arange(len(own)) % 2
        apart, together = (
            KernelRegression(
                replace(halved, halves=groups),
                guesses=self._number,
                constants=(self._gamma, self._ridge, self._slope),
            )._mean_square()
            for groups in (halved.halves, mixed)
        )
        more = copy.copy(self)
        more._unseen = max(0.0, apart - together) / 4
        return more

    def _mean_square(self) -> float:
        """Of √z's errors on clients left out."""
        return float(np.mean(np.square(self._true - self._known)))

    def _solve(self, N: int) -> None:
        """α, and what is predicted of each client by the others."""
        targets = self._true - self._offset
        self._weights = self._inverse @ targets
        errors, _ = left_out(self._inverse, self._weights, self.replays.groups(N))
        predicted = _on_simplex((self._true - errors).reshape(-1, N))
        self._known = np.sqrt(predicted).ravel()
        self._presence = PresenceModel(predicted, self._true.reshape(-1, N) > 0)
        found = _of_present(predicted, self._presence(predicted))
        self.error = 0.5 * float(np.abs(found - np.square(self._true).reshape(-1, N)).sum(axis=1).mean())

    @property
    def clients(self) -> int:
        """From how many it was learnt."""
        return len(self.replays.proportions)

    def strangeness(self, features: FloatArray) -> float:
        """Mean square of the standardised features, over the largest among the clients that were learnt from.

        Parameters
        ----------
        features : shape (N, F)
        """
        return self._strangeness(features) / self._strangest

    def __call__(self, features: FloatArray) -> ClassPrediction:
        """For one client's features, shape (N, F)."""
        kernel = self._kernel(self._inputs(features[None]), self._guessed(features))
        z = _on_simplex((kernel @ self._weights + self._offset)[None])[0]
        roots = np.sqrt(z)
        wider = math.sqrt(1 + self._unseen / max(self._mean_square(), _TINY))
        low, high = np.square(np.clip(roots + wider * self._errors_between(roots), 0.0, 1.0))
        presence = self._presence(z[None])
        z = _of_present(z[None], presence)[0]
        return ClassPrediction(z, np.minimum(low, z), np.maximum(high, z), presence[0])

    def _errors_between(self, roots: FloatArray) -> FloatArray:
        """Between which the middle 95 % of the errors lie where so much is predicted, shape (2, N)."""
        known, errors = self._known, self._true - self._known
        taken = min(len(known), max(_NEAREST, int(_SHARE * len(known))))
        found = _middle(known, errors, roots, taken)
        if self._near < _LIKE:
            return found
        halfway = 0.5 * (found + _middle(known[-self._near :], errors[-self._near :], roots, _LIKE))
        may_be_absent = roots + found[0] <= 0
        return np.stack((np.where(may_be_absent, found[0], halfway[0]), halfway[1]))

    def _compared(self, N: int) -> tuple[float, float, float]:
        """γ, λ and β of the least error."""
        some = slice(max(N, _SEARCHED // N * N))
        targets, guesses = self._true[some] - self._offset, self._guesses[some]
        distance = squared_distances(self._rows[some], self._rows[some])
        groups = self.replays.groups(N, clients=some.stop // N)
        best, found = np.inf, (0.0, 0.0, 0.0)
        for gamma in _GAMMAS:
            kernel = np.exp(-gamma * distance)
            for ridge in _RIDGES:
                inverse = _inverse(kernel + ridge * np.eye(len(kernel)))
                for slope in _SLOPES:
                    whole = _with_product(inverse, slope, guesses)
                    errors, _ = left_out(whole, whole @ targets, groups)
                    error = float(np.abs(errors).mean())
                    if error < best:
                        best, found = error, (gamma, ridge, slope)
        return found

    def _kernel(self, inputs: FloatArray, guesses: FloatArray) -> FloatArray:
        """k of these rows and the known ones."""
        near = np.exp(-self._gamma * squared_distances(inputs, self._rows))
        return np.asarray(near + self._slope * guesses @ self._guesses.T)

    def _inputs(self, features: FloatArray) -> FloatArray:
        """Of clients, shape (R, N, F), one class a row."""
        scaled = np.clip((features - self._mean) / self._scale, -_FARTHEST, _FARTHEST)
        clients, N, F = features.shape
        return np.column_stack((scaled.reshape(-1, F), np.tile(np.eye(N), (clients, 1))))

    def _guessed(self, rows: FloatArray) -> FloatArray:
        """√g − c, one guess a column."""
        return np.asarray(np.sqrt(np.clip(rows[:, : self._number], 0.0, 1.0)) - self._offset)

    def _strangeness(self, features: FloatArray) -> float:
        return float(np.mean(np.square((features - self._mean) / self._scale)))


def _middle(predicted: FloatArray, errors: FloatArray, values: FloatArray, count: int) -> FloatArray:
    """The middle 95 % of the errors of the ``count`` predictions nearest to each value, shape (2, N)."""
    edge = max(0.0, (_EDGE * (count + 1) - 1) / (count - 1))
    return np.stack(
        [np.quantile(errors[_nearest(predicted, value, count)], [edge, 1 - edge]) for value in values], axis=1
    )


def _nearest(values: FloatArray, value: float, count: int) -> IntArray:
    """Where the ``count`` values nearest to one are."""
    return np.argsort(np.abs(values - value), kind="stable")[:count]


def squared_distances(a: FloatArray, b: FloatArray) -> FloatArray:
    """‖a_i − b_j‖², shape (len(a), len(b))."""
    found = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1) - 2 * a @ b.T
    return np.asarray(np.maximum(found, 0.0))


def _inverse(A: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.inv(A), dtype=np.float64)


def _with_product(inverse: FloatArray, scale: float, V: FloatArray) -> FloatArray:
    """(A + scale · V Vᵀ)⁻¹ from A⁻¹, symmetric (Woodbury)."""
    if not scale or not V.shape[1]:
        return inverse
    W = inverse @ V
    small = np.eye(V.shape[1]) / scale + V.T @ W
    return np.asarray(inverse - W @ np.linalg.solve(small, W.T))


def _bordered(inverse: FloatArray, border: FloatArray, corner: FloatArray) -> FloatArray:
    """[[A, B], [Bᵀ, D]]⁻¹ from A⁻¹, for symmetric A and D (Schur complement)."""
    W = inverse @ border
    rest = np.linalg.inv(corner - border.T @ W)
    return np.block([[inverse + W @ rest @ W.T, -W @ rest], [-rest @ W.T, rest]])


def left_out(
    inverse: FloatArray, weights: FloatArray, groups: Sequence[IntArray]
) -> tuple[FloatArray, FloatArray]:
    """Errors at each group's rows when the others alone are learnt from, and what a Gaussian process has for
    their variance, over its own.

        (A⁻¹_gg)⁻¹ α_g,     diag (A⁻¹_gg)⁻¹

    Parameters
    ----------
    inverse, weights : A⁻¹ = (K + λ I)⁻¹ and α = A⁻¹ y
    groups : rows that are left out together
    """
    errors, variances = np.empty(len(weights)), np.empty(len(weights))
    for own in groups:
        rest = _inverse(inverse[np.ix_(own, own)])
        errors[own], variances[own] = rest @ weights[own], np.diag(rest)
    return errors, variances


def _of_present(z: FloatArray, presence: FloatArray) -> FloatArray:
    """Rows of sum 1 without the classes that are likelier absent than there, or as they are where all are."""
    return _of_sum_one(np.where(presence < 0.5, 0.0, z), z)


def _on_simplex(roots: FloatArray) -> FloatArray:
    """Squares of the positive ones, each row scaled to sum 1; equal ones where none is positive."""
    squares = np.square(np.maximum(roots, 0.0))
    return _of_sum_one(squares, np.full_like(squares, 1.0 / squares.shape[1]))


def _of_sum_one(values: FloatArray, otherwise: FloatArray) -> FloatArray:
    """Each row scaled to sum 1, those of zeros replaced."""
    total = values.sum(axis=1, keepdims=True)
    return np.where(total > 0, values / np.where(total > 0, total, 1.0), otherwise)
