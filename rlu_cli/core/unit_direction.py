"""Along which an update of a head without bias says what the bias's would."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.types import FloatArray, Head, ModelStatistics

SHARP = 0.25
"""Error up to which the direction stands for a bias: what one sample does is off by a quarter, and what many
do by far less."""

_ROWS = 3000
"""Samples that are enough to find it."""

_RIDGES = np.logspace(-12, 0, 25)
"""Regularisations that are compared, as shares of the largest eigenvalue."""


@dataclass(frozen=True)
class UnitDirection:
    """A direction v of the embedding with e·v ≈ 1 for every sample.

    direction : v, shape (L,)
    error : root mean square of e·v − 1 on samples that v was not found with
    """

    direction: FloatArray
    error: float


def unit_direction(embeddings: NDArray[np.floating]) -> UnitDirection | None:
    """The direction of the embedding along which all samples have the same length.

        v = argmin_v Σ_i (e_i·v − 1)² + λ ‖v‖²

    A sample adds r ⊗ e to −∇W and r to −∇b. Without b, −∇W v = Σ_i r_i (e_i·v) is the same sum as far as
    e·v is 1. λ is the one with the least leave-one-out error,

        ε² = (1/M) Σ_i ((e_i·v − 1)/(1 − h_i))²,     h = diag E (EᵀE + λI)⁻¹ Eᵀ

    None where all embeddings are 0 (a dead last layer): they have no length along any direction.

    Parameters
    ----------
    embeddings : of the auxiliary samples, shape (M, L)

    Source: ridge regression (Hoerl & Kennard 1970), chosen by PRESS (Allen 1974).
    """
    E = embeddings[:: -(-len(embeddings) // _ROWS)].astype(np.float64)
    wide = E.shape[1] > len(E)
    values, vectors = np.linalg.eigh(E @ E.T if wide else E.T @ E)
    kept = values > max(E.shape) * np.finfo(float).eps * values[-1]
    if not kept.any():
        return None
    values, vectors = values[kept], vectors[:, kept]
    # E = U √values Vᵀ, whichever of U and V is known
    U = vectors if wide else E @ vectors / np.sqrt(values)
    ones = U.sum(axis=0)
    best, share = np.inf, np.zeros_like(values)
    for ridge in _RIDGES * values[-1]:
        shrunk = values / (values + ridge)
        left = np.maximum(1.0 - np.square(U) @ shrunk, np.finfo(float).tiny)
        error = float(np.mean(np.square((U @ (shrunk * ones) - 1.0) / left)))
        if error < best:
            best, share = error, np.sqrt(values) / (values + ridge)
    weights = share * ones
    direction = E.T @ (vectors @ (weights / np.sqrt(values))) if wide else vectors @ weights
    return UnitDirection(np.asarray(direction), float(np.sqrt(best)))


def mean_lengths(head: Head, start: ModelStatistics, model: ModelStatistics) -> FloatArray:
    """E[e·v | class] under a model, shape (N,): how much of a class's share of −∇b shows along v.

    With a bias, all of it: 1.

    v is the global model's, and embeddings move as a model trains, all samples of a class much alike.
    """
    if head.bias is not None or start.unit is None or model.embedding_mean is None:
        return np.ones(start.num_classes)
    return np.asarray(model.embedding_mean @ start.unit.direction)


def stands_for_bias(head: Head, start: ModelStatistics, noise_std: float) -> bool:
    """Whether the head has a bias, or its weight's update says what the bias's would.

    Not where the update has noise, of which the direction, long as it is, would carry too much.
    """
    if head.bias is not None:
        return True
    return start.unit is not None and start.unit.error <= SHARP and noise_std == 0
