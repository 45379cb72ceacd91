"""Class-conditional moments of the logits on the auxiliary data (paper, Assumption 3.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.confidence import monte_carlo_confidence
from rlu_cli.core.responses import class_response, empty_responses
from rlu_cli.core.types import FloatArray, IntArray, LogitMoments, ModelStatistics
from rlu_cli.errors import MismatchError

_LARGEST_LOGIT = 1e12
"""Far beyond any model that can still be called one; squares and sums stay finite in float32."""


def logit_moments(logits: NDArray[np.floating], labels: IntArray, num_classes: int) -> LogitMoments:
    """Mean and factored covariance of the logits of each class.

        μ_n = (1/K_n) Σ_{i: y_i = n} q_i,     Σ̄_n = F_nᵀ F_n = X_nᵀ X_n / (K_n − 1)

    with X_n the K_n centred logit rows. F_n is X_n/√(K_n − 1) itself while K_n ≤ N and its
    triangular QR factor above, so no N×N×N array is ever made and sampling costs min(K_n, N)
    normal numbers, not N. A class with one sample has zero covariance.

    Parameters
    ----------
    logits : shape (M, N), or other values of as many samples, shape (M, V)
    labels : shape (M,), values in [0, N)

    Raises
    ------
    MismatchError
        A class without samples, or logits that are not finite.
    """
    largest = float(np.abs(logits).max(initial=0.0))
    if not largest <= _LARGEST_LOGIT:
        found = f"one of size {largest:.1g}" if np.isfinite(largest) else "NaN or infinity"
        raise MismatchError(
            f"expected finite logits on the auxiliary images, at most {_LARGEST_LOGIT:g}, found {found}: "
            "the checkpoint's weights, the normalisation or the architecture is wrong"
        )
    if len(labels) != len(logits) or (len(labels) and not 0 <= labels.min() <= labels.max() < num_classes):
        raise ValueError(f"expected a label in [0, {num_classes}) for each of {len(logits)} rows of logits")
    counts = np.bincount(labels, minlength=num_classes).astype(np.int64)
    if np.any(counts == 0):
        missing = np.flatnonzero(counts == 0)[:5].tolist()
        raise MismatchError(
            f"expected auxiliary samples of all {num_classes} classes, found none of class index "
            f"{', '.join(map(str, missing))}: add at least two images of each"
        )
    width = logits.shape[1]
    rank = int(min(counts.max(), width))
    mean = np.empty((num_classes, width))
    factor = np.zeros((num_classes, rank, width))
    for n, members in enumerate(_by_class(labels, num_classes)):
        rows = logits[members].astype(np.float64)
        mean[n] = rows.mean(axis=0)
        if len(rows) < 2:
            continue
        centred = (rows - mean[n]) / np.sqrt(len(rows) - 1)
        reduced = centred if len(rows) <= rank else np.linalg.qr(centred, mode="r")
        factor[n, : len(reduced)] = reduced
    return LogitMoments(mean, factor, counts)


def softmax(logits: FloatArray) -> FloatArray:
    """softmax over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def model_statistics(
    logits: NDArray[np.floating],
    embeddings: NDArray[np.floating] | None,
    labels: IntArray,
    num_classes: int,
    *,
    samples: int = 10_000,
    seed: int = 0,
    device: str = "cpu",
) -> ModelStatistics:
    """Everything the methods need to know of one model, from its auxiliary logits and embeddings.

    Parameters
    ----------
    logits : shape (M, N)
    embeddings : shape (M, L), or None where they are unknown
    labels : shape (M,)
    samples, seed, device : see `monte_carlo_confidence`
    """
    moments = logit_moments(logits, labels, num_classes)
    confidence = monte_carlo_confidence(moments, samples=samples, seed=seed, device=device)
    by_class = _by_class(labels, num_classes)
    right = logits.argmax(axis=1) == labels
    embedding_mean = gradient_sum = responses = None
    if embeddings is not None:
        embedding_mean = np.stack([embeddings[rows].mean(axis=0, dtype=np.float64) for rows in by_class])
        gradient_sum = np.empty((num_classes, num_classes))
        responses = empty_responses(num_classes, embeddings.shape[1])
        for n, rows in enumerate(by_class):
            residuals = softmax(logits[rows].astype(np.float64))
            residuals[:, n] -= 1.0
            gradient_sum[n] = embeddings[rows].sum(axis=1, dtype=np.float64) @ residuals / len(rows)
            responses.mean[:, n], responses.spread[n] = class_response(-residuals, embeddings[rows])
    return ModelStatistics(
        moments=moments,
        confidence=confidence.mean,
        standard_error=confidence.standard_error,
        embedding_mean=embedding_mean,
        gradient_sum=gradient_sum,
        accuracy=np.array([right[rows].mean() for rows in by_class]),
        responses=responses,
    )


def _by_class(labels: IntArray, num_classes: int) -> list[IntArray]:
    """Which rows are of each class, in their order."""
    ends = np.cumsum(np.bincount(labels, minlength=num_classes))[:-1]
    return np.split(np.argsort(labels, kind="stable"), ends)
