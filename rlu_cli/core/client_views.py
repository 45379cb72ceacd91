"""What is looked at of one client's training, class by class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlu_cli.core.fits import Arrays, checked
from rlu_cli.core.progress import Progress
from rlu_cli.core.residuals import ResidualMoments
from rlu_cli.core.simplex import simplex_least_squares
from rlu_cli.core.types import FloatArray, Head, IntArray, LocalTraining, Treatment

_LEAST = 1e-6
"""Confidences below are not told apart by their logarithms."""

WEIGHT_FEATURES = slice(-10, None)
"""Of `class_features`, those that are as many times as large for a ∇W so many times as large."""


@dataclass(frozen=True)
class ModelMeans:
    """What a model makes of samples, averaged by their class n.

    logits : shape (N, N), E[q_j | class n]
    residuals : moments of r = onehot(y) − s over the samples themselves
    """

    logits: FloatArray
    residuals: ResidualMoments

    @property
    def confidence(self) -> FloatArray:
        """S without Monte Carlo, shape (N, N), E[s_j | class n]."""
        return np.asarray(np.eye(len(self.logits)) - self.residuals.mean)


@dataclass(frozen=True)
class ReplayedClient:
    """A training replayed on auxiliary samples, looked at on those that it did not see.

    proportions : z of the samples that it saw, shape (N,)
    change : ΔW and Δb
    start, end : the model before and after
    noise_std : standard deviation of the noise on each parameter's update
    """

    proportions: FloatArray
    change: Head
    start: ModelMeans
    end: ModelMeans
    noise_std: float = 0.0


@dataclass(frozen=True)
class ReplayPlan:
    """Training to be replayed: counts of each class among its different samples, and how it goes.

    draw : number of the random choice of its samples
    half : of each class's auxiliary samples that it draws from, 0 or 1, to be looked at on the other; None
        for most of them
    """

    counts: IntArray
    training: LocalTraining
    draw: int
    half: int | None = None


@dataclass(frozen=True)
class Replays:
    """What there is to learn from replayed clients.

    proportions : z, shape (R, N)
    features : of what each did, shape (R, …)
    shapes : `update_shape` of each one's update, of SGD's with the size of `signal_size`, shape (R, 2)
    halves : of the auxiliary samples that each drew from, shape (R,); None where all drew from most of them
    """

    proportions: FloatArray
    features: FloatArray
    shapes: FloatArray
    halves: IntArray | None = None

    def and_(self, others: Replays) -> Replays:
        """Both together."""
        return Replays(
            np.concatenate((self.proportions, others.proportions)),
            np.concatenate((self.features, others.features)),
            np.concatenate((self.shapes, others.shapes)),
            None
            if self.halves is None or others.halves is None
            else np.concatenate((self.halves, others.halves)),
        )

    def groups(self, rows: int, *, clients: int | None = None) -> list[IntArray]:
        """The rows that are left out together, of so many of each client: its own, or those of its half.

        Parameters
        ----------
        clients : the first of them that there are rows of, all by default
        """
        owners = np.arange(len(self.proportions)) if self.halves is None else self.halves
        each = np.repeat(owners[:clients], rows)
        return [np.flatnonzero(each == owner) for owner in np.unique(each)]

    def arrays(self) -> Arrays:
        """Of which `from_arrays` makes it again."""
        arrays = {"proportions": self.proportions, "features": self.features, "shapes": self.shapes}
        return arrays if self.halves is None else {**arrays, "halves": self.halves.astype(np.float64)}

    @classmethod
    def from_arrays(cls, arrays: Arrays, num_classes: int, shape: tuple[int, ...]) -> Replays:
        """From a file; ``shape`` is that of one client's features.

        Raises
        ------
        KeyError, ValueError
            The arrays aren't such.
        """
        proportions = checked(arrays, "proportions", (None, num_classes))
        if proportions.min() < 0 or not np.allclose(proportions.sum(axis=1), 1.0):
            raise ValueError("proportions don't lie on the simplex")
        number, halves = len(proportions), None
        if "halves" in arrays:
            found = checked(arrays, "halves", (number,))
            if not np.isin(found, (0, 1)).all():
                raise ValueError("halves are neither 0 nor 1")
            halves = found.astype(np.int64)
        return cls(
            proportions,
            checked(arrays, "features", (number, *shape)),
            checked(arrays, "shapes", (number, 2)),
            halves,
        )


class ReplayClients(Protocol):
    """Replays training on class mixes; None in place of those that diverge."""

    def __call__(self, plans: list[ReplayPlan], progress: Progress) -> list[ReplayedClient | None]: ...

    @property
    def treatment(self) -> Treatment:
        """What is done to their updates, as it was to the real one."""

    @property
    def own(self) -> str | None:
        """Tells them from those of other clients of the global model; None where all share them."""

    def cost(self, training: LocalTraining) -> float:
        """Floating-point operations of one replay."""


@dataclass(frozen=True)
class ClientView:
    """A client, real or replayed, as far as its features go.

    gradient : ∇W and ∇b, as in `Problem`
    start, end : of the global and the local model
    pace : η Σ_τ ρ^τ
    """

    gradient: Head
    start: ModelMeans
    end: ModelMeans
    pace: float


def class_features(
    client: ClientView, head: Head, embedding_mean: FloatArray, guesses: FloatArray
) -> FloatArray:
    """Numbers that say how much of each class a client trained on, shape (N, F), one class a row.

    The same function of every class, so that what is learnt of one class serves all:

    - first the guesses, and the proportions z that least squares find with S halfway between both models;
      their logarithms; ‖z‖² says how skewed the client is; the bias update −∇b that all come from, alone and
      in units of its steps
    - how the class's logit moved on its own samples and on the others', before and after each sample's
      mean shift is taken away
    - the class's mean confidence on its own samples, the others' and all, of both models and as the
      logarithm of their ratio: training on few classes draws all predictions to them
    - the weight update along each class's mean embedding and along the head's rows

    Parameters
    ----------
    head : the global model's
    embedding_mean : ē of each class under the global model, shape (N, L)
    guesses : other methods' proportions, shape (N, G)
    """
    assert client.gradient.bias is not None
    N = len(client.gradient.bias)
    u = -client.gradient.bias
    before, after = client.start.confidence, client.end.confidence
    z = simplex_least_squares(np.eye(N) - (before + after).T / 2, u).z
    moved = client.end.logits - client.start.logits
    centred = moved - moved.mean(axis=1, keepdims=True)
    along = -client.gradient.weight @ embedding_mean.T
    rows = -client.gradient.weight @ head.weight.T
    own, rest, everywhere = zip(*(_parts(c) for c in (before, after)), strict=True)
    columns = [
        *guesses.T,
        z,
        u,
        u * client.pace,
        np.log(z + 0.01),
        *np.log(guesses.T + 0.01),
        np.full(N, z @ z),
        np.full(N, np.log(client.pace)),
        np.diag(moved),
        np.diag(centred),
        _others(moved),
        _others(centred),
        centred.min(axis=0),
        centred.max(axis=0),
        np.full(N, np.abs(centred).mean()),
        *own,
        *everywhere,
        np.log(own[1]),
        np.log(rest[0]),
        rest[1],
        np.log(rest[1]),
        *(np.log(part[1] / part[0]) for part in (own, rest, everywhere)),
        *_around(along),
        along.mean(axis=1),
        np.diag(along) - _largest_other(along),
        *_around(rows),
        rows.min(axis=0),
        rows.min(axis=1),
    ]
    return np.column_stack(columns)


def _parts(confidence: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean confidence in each class of its own samples, of the others' and of all."""
    known = np.maximum(confidence, _LEAST)
    return np.diag(known), _others(known), known.mean(axis=0)


def _others(values: FloatArray) -> FloatArray:
    """Means of the columns without the diagonal, shape (N,)."""
    return np.asarray((values.sum(axis=0) - np.diag(values)) / (len(values) - 1))


def _around(values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The diagonal, and the means of the rows and of the columns without it."""
    return np.diag(values), _others(values.T), _others(values)


def _largest_other(values: FloatArray) -> FloatArray:
    """The largest number of each row beside the diagonal, shape (N,)."""
    return np.asarray(np.where(np.eye(len(values), dtype=bool), -np.inf, values).max(axis=1))
