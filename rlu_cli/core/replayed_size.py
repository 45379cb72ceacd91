"""How large an update is beside replayed ones that point alike: whether its training values are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlu_cli.core.checks import MISSCALED
from rlu_cli.core.client_views import WEIGHT_FEATURES, Replays
from rlu_cli.core.kernel_regression import squared_distances
from rlu_cli.core.types import FloatArray, Note

_WIDTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Of the kernel, in root mean square distances of the clients."""

_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)

_FARTHEST = 5.0
"""Standard deviations of left-out clients' errors that a size may be off."""

_OUTSIDE = 40.0
"""Over the number of replays: by how much farther from its nearest one a client may be than they are, whose
spread is measured on themselves."""

_LEAST = 0.05
"""The least that standard deviation counts for, in logarithms."""

_COARSE = 6.0
"""Times what rounding, or leaving out, may have lost of an update by which it seems larger or smaller: up to
five among right clients."""


@dataclass(frozen=True)
class RelativeSize:
    """The size of an update over that of replayed ones that point as it does.

    logarithm : of the factor
    deviation : standard deviation of the logarithm among replayed clients
    damage : `Coarsening.error`, of which replayed clients have none
    """

    logarithm: float
    deviation: float
    damage: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether it is one that replayed clients have."""
        return abs(self.logarithm) <= _FARTHEST * max(self.deviation, _LEAST) + _COARSE * self.damage


class SizeModel:
    """The size of ∇W as a function of where it points, learnt from replayed clients.

        log ‖∇W‖ ≈ c + Σ_i α_i exp(−‖d − d_i‖²/(2 w²)),    d = x/‖x‖,  α = (K + λ I)⁻¹ (log ‖∇W‖ − c)

    with x what is looked at of a client's weight update (`WEIGHT_FEATURES`), which scales with it. What a
    class mix makes of an update's direction hangs together with what it makes of its size. So one that was
    clipped, or made at another rate or by more steps than was told, is too small or too large for where it
    points, whatever the mix. So is one of samples that the global model knows by heart. w and λ are those of
    the least error on clients left out.

    Source: kernel ridge regression, left-out errors by the inverse.
    """

    def __init__(self, replays: Replays) -> None:
        directions = _directions(replays.features)
        self._mean = directions.mean(axis=0)
        spread = directions.std(axis=0)
        self._scale = np.where(spread > 1e-9, spread, np.inf)
        self._known = (directions - self._mean) / self._scale
        sizes = replays.shapes[:, 0]
        self._offset = float(sizes.mean())
        distances = squared_distances(self._known, self._known)
        unit = float(distances.mean())
        best = np.inf
        for width in _WIDTHS:
            reach = 2 * width**2 * max(unit, np.finfo(float).tiny)
            values, vectors = np.linalg.eigh(np.exp(-distances / reach))
            for ridge in _RIDGES:
                shrunk = vectors / (np.maximum(values, 0.0) + ridge)
                weights = shrunk @ (vectors.T @ (sizes - self._offset))
                errors = weights / np.einsum("ij,ij->i", shrunk, vectors)
                deviation = float(np.sqrt(np.mean(errors**2)))
                if deviation < best:
                    best, self._weights, self._reach = deviation, weights, reach
        self._deviation = best
        np.fill_diagonal(distances, np.inf)
        self._farthest = (1 + _OUTSIDE / len(sizes)) * float(distances.min(axis=1).max())

    def __call__(self, features: FloatArray, size: float) -> RelativeSize | None:
        """Of one client; None where no replayed one is about as near as each of those has another.

        So it is where a client's labels are as the model guesses: little is left of its gradients but chance.

        Parameters
        ----------
        features : shape (N, F)
        size : logarithm of the root mean square of ∇W, as `update_shape` has it
        """
        place = (_directions(features[None]) - self._mean) / self._scale
        distances = squared_distances(place, self._known)
        if distances.min() > self._farthest:
            return None
        near = np.exp(-distances / self._reach)
        return RelativeSize(size - self._offset - float(near[0] @ self._weights), self._deviation)


def size_notes(found: RelativeSize) -> tuple[Note, ...]:
    """A warning of an update whose size no replayed one has that points alike."""
    if found.is_right:
        return ()
    half = 1.96 * found.deviation + _COARSE * found.damage
    factor, *edges = (math.exp(found.logarithm + side * half) for side in (0, -1, 1))
    return (
        Note(
            "update-misscaled",
            f"the output layer's update is {factor:.2g} times as large as those of replays that point "
            f"alike (95 %: {edges[0]:.2g} to {edges[1]:.2g}): the model knew the client's samples by heart, "
            f"or {MISSCALED}; there are no bounds",
        ),
    )


def _directions(features: FloatArray) -> FloatArray:
    """d of each client, shape (R, …), from features of shape (R, N, F)."""
    x = features[:, :, WEIGHT_FEATURES].reshape(len(features), -1)
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.maximum(lengths, np.finfo(float).tiny))
