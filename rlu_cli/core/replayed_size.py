"""How large an update is beside replayed ones that point alike: whether its training values are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rlu_cli.core.checks import MISSCALED, READ_AS_WHOLE, UNBOUNDED
from rlu_cli.core.client_views import WEIGHT_FEATURES, Replays
from rlu_cli.core.kernel_regression import left_out, squared_distances
from rlu_cli.core.types import FloatArray, Note

_WIDTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Of the kernel, in root mean square distances of the clients."""

_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)

_DOUBTED, _FARTHEST = 3.0, 4.0
"""Standard deviations from which a size is doubted, and taken to be wrong: up to 3.5 among 108 right clients,
1.06 root mean square."""

_LEAST = 0.05
"""The least that standard deviation counts for, in logarithms."""

_COARSE_DOUBTED, _COARSE = 4.0, 6.0
"""The same of what rounding, or leaving out, may have lost of an update: up to five times that among right
clients."""


@dataclass(frozen=True)
class RelativeSize:
    """The size of an update over that of replayed ones that point as it does.

    logarithm : of the factor
    deviation : standard deviation of the logarithm among replayed clients that point as near, and of noise
    damage : `Coarsening.error`, 0 where replayed clients lost as much
    repeats : logarithm of how much more of replayed updates may be chance, as their samples come again
    """

    logarithm: float
    deviation: float
    damage: float = 0.0
    repeats: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether it is one that replayed clients have."""
        return self._within(_FARTHEST, _COARSE)

    @property
    def is_doubted(self) -> bool:
        """Whether it is one that hardly any of them has, or none."""
        return not self._within(_DOUBTED, _COARSE_DOUBTED)

    @property
    def factor(self) -> float:
        """The likeliest: of as many repeats as there may be, half are taken to tell."""
        return math.exp(self.logarithm + self.repeats / 2)

    @property
    def error(self) -> float:
        """Standard deviation taken for the factor's logarithm: 95 % reach a size that may be right."""
        known = math.hypot(self.deviation, self.damage, self.repeats / 4)
        return max(known, abs(math.log(self.factor)) / 2) if self.is_right else known

    def _within(self, deviations: float, damages: float) -> bool:
        room = deviations * max(self.deviation, _LEAST) + damages * self.damage
        return -room - self.repeats <= self.logarithm <= room


class SizeModel:
    """The size of ∇W as a function of where it points, learnt from replayed clients.

        log ‖∇W‖ ~ Normal(c + kᵀ A⁻¹ (y − c), s² (1 + λ − kᵀ A⁻¹ k)),    A = K + λ I

    a Gaussian process: y holds the replayed clients' logarithms and c their mean, K and k the kernel
    exp(−‖d − d'‖²/(2 w²)) among them and with the client, d = x/‖x‖, x what is looked at of a weight update
    (`WEIGHT_FEATURES`), which scales with it. What a class mix makes of an update's direction hangs together
    with what it makes of its size. So one that was clipped, or made at another rate or by more steps than
    was told, is too small or too large for where it points, whatever the mix. So is one of samples that the
    global model knows by heart. Where a client's labels are as the model guesses, little is left of its
    gradients but chance, which points like no other client's: the variance says how little is known there.
    w, λ and s are those under which clients left out are likeliest, one by one, or those of one half of the
    auxiliary samples together.

    Source: Rasmussen & Williams 2006, (2.25), (2.26) and, for clients left out, (5.10) to (5.12).
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
        groups = replays.groups(1)
        best = np.inf
        for width in _WIDTHS:
            reach = 2 * width**2 * max(unit, np.finfo(float).tiny)
            values, vectors = np.linalg.eigh(np.exp(-distances / reach))
            for ridge in _RIDGES:
                inverse = vectors / (np.maximum(values, 0.0) + ridge) @ vectors.T
                weights = inverse @ (sizes - self._offset)
                errors, unknown = left_out(inverse, weights, groups)
                variance = max(float(np.mean(errors**2 / unknown)), np.finfo(float).tiny)
                surprise = math.log(variance) + float(np.mean(np.log(unknown)))
                if surprise < best:
                    best, self._weights, self._reach = surprise, weights, reach
                    self._inverse, self._ridge, self._variance = inverse, ridge, variance

    def __call__(self, features: FloatArray, size: float) -> RelativeSize:
        """Of one client.

        Parameters
        ----------
        features : shape (N, F)
        size : logarithm of the root mean square of ∇W, as `signal_size` has it
        """
        place = (_directions(features[None]) - self._mean) / self._scale
        near = np.exp(-squared_distances(place, self._known) / self._reach)[0]
        unknown = max(self._ridge, 1.0 + self._ridge - float(near @ self._inverse @ near))
        deviation = math.sqrt(self._variance * unknown)
        return RelativeSize(size - self._offset - float(near @ self._weights), deviation)


def signal_size(weight: FloatArray) -> tuple[float, float]:
    """How large a weight update is beside the noise on it, and how far noise makes that miss.

        ½ log(mean ΔW² − σ̂²),     σ̂² = mean_l (Σ_j ΔW[j, l])² / N

    and the standard deviation of the estimate, σ̂² √(2/L) over twice what is left: what samples do to a column
    sums to 0 over the classes, so its sum is noise of N numbers. Less than the error isn't told from nothing,
    and may miss by any factor.

    Parameters
    ----------
    weight : ∇W, shape (N, L), without drift
    """
    N, L = weight.shape
    tiny = np.finfo(np.float64).tiny
    largest = max(float(np.abs(weight).max()), float(tiny))  # so that no square overflows or vanishes
    scaled = weight / largest
    noise = float(np.mean(np.square(scaled.sum(axis=0)))) / N
    error = noise * math.sqrt(2 / L)
    left = float(np.mean(np.square(scaled))) - noise
    if left <= error:
        return math.log(largest) + 0.5 * math.log(max(error, float(tiny))), math.inf if noise else 0.0
    return math.log(largest) + 0.5 * math.log(left), 0.5 * error / left


def repeats(samples: int, auxiliary: int) -> float:
    """Logarithm of √(n/n′) where a client has more samples than there are auxiliary ones, else 0.

    What chance makes of a mean shrinks with the number of different samples, n′ of a replayed client at most.
    """
    return 0.5 * math.log(max(1.0, samples / auxiliary))


def size_notes(found: RelativeSize, *, read: bool) -> tuple[Note, ...]:
    """A warning of an update whose size no replayed one has that points alike, or hardly any.

    Parameters
    ----------
    read : whether it is read as if it had theirs; else what is but doubted isn't worth a word
    """
    if not found.is_doubted or (found.is_right and not read):
        return ()
    half = 2 * found.error
    factor, *edges = (found.factor * math.exp(room) for room in (0.0, -half, half))
    code, verb = ("size-doubted", "may be") if found.is_right else ("update-misscaled", "is")
    return (
        Note(
            code,
            f"the output layer's update {verb} {factor:.2g} times as large as those of replays that point "
            f"alike (95 %: {edges[0]:.2g} to {edges[1]:.2g}): the model knew the client's samples by heart, "
            f"or {MISSCALED}; {READ_AS_WHOLE if read else UNBOUNDED}",
        ),
    )


def _directions(features: FloatArray) -> FloatArray:
    """d of each client, shape (R, …), from features of shape (R, N, F)."""
    x = features[:, :, WEIGHT_FEATURES].reshape(len(features), -1)
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray(x / np.maximum(lengths, np.finfo(float).tiny))
