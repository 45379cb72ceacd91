"""The mean embedding that an update implies, and what it is compared with."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.types import FloatArray, Head, HeadUpdate, ModelStatistics


def implied_embedding(update: HeadUpdate) -> FloatArray | None:
    """ē of the client's samples, from ΔW ≈ Δb ēᵀ, by least squares over all classes.

        ē_l = argmin_e Σ_j (ΔW[j, l] − Δb_j e)² = Σ_j Δb_j ΔW[j, l] / Σ_j Δb_j²

    The paper's ē_l = ΔW[j, l] / Δb_j (Eq. expectation_of_bias_multiple) leaves j free and breaks where
    Δb_j ≈ 0. Shape (L,); None for a head without bias or an update of zero.
    """
    if update.bias is None:
        return None
    power = float(update.bias @ update.bias)
    return None if power == 0.0 else update.bias @ update.weight / power


def weight_direction(embedding_mean: FloatArray) -> FloatArray:
    """v = ē/‖ē‖², shape (L,): ΔW v is Δb where all embeddings are ē, with noise smaller by ‖ē‖.

    Parameters
    ----------
    embedding_mean : ē of each class, shape (N, L)
    """
    centre = embedding_mean.mean(axis=0)
    return np.asarray(centre / max(float(centre @ centre), np.finfo(float).tiny))


def embedding_match(
    update: HeadUpdate,
    proportions: FloatArray,
    u: FloatArray,
    confidence: FloatArray,
    embedding_mean: FloatArray | None,
) -> float | None:
    """Cosine between the embedding that the update implies and the one the aux data predicts for it.

    The update weighs the embedding of each sample by u·(onehot(y) − s); for class n that is on average
    z_n (u·A_n) with A_n = 1_n − S[n]. Weighing the aux class means ē_n the same way compares like with
    like:

        cos(ē_implied, Σ_n z_n (u·A_n) ē_n)

    Near 1 where architecture, activation, normalisation and class mapping are right. None where there
    is nothing to compare.

    Parameters
    ----------
    update : ΔW + h, Δb + h: a drift has no embedding
    proportions : z, shape (N,)
    u : (Δb + h)/(ηΣρ), shape (N,)
    confidence : S, shape (N, N), and embedding_mean : ē_n, shape (N, L), averaged over the training;
        the latter None where it is unknown
    """
    implied = implied_embedding(update)
    if implied is None or embedding_mean is None:
        return None
    weights = proportions * (u - confidence @ u)
    predicted = weights @ embedding_mean
    norms = float(np.linalg.norm(implied) * np.linalg.norm(predicted))
    return float(implied @ predicted / norms) if norms > 0 else None


def embedding_gram(statistics: ModelStatistics, *, has_bias: bool) -> FloatArray:
    """How one class's gradient moves another's logits: G[n', n] = ē_n'·ē_n + 1 (the 1 is the bias's)."""
    means, _ = statistics.embeddings_for("the posterior search")
    return np.asarray(means @ means.T + (1.0 if has_bias else 0.0))


def subtract_heads(local: Head, reference: Head) -> HeadUpdate:
    """local − global of both tensors of the head."""
    bias = None if local.bias is None or reference.bias is None else local.bias - reference.bias
    return HeadUpdate(local.weight - reference.weight, bias)
