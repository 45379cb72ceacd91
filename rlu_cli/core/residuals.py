"""What single samples of a class do to the bias: mean and spread, from the auxiliary samples themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlu_cli.core.moments import logit_moments, softmax
from rlu_cli.core.types import Activations, FloatArray, IntArray, LogitMoments

_FEWEST_SAMPLES = 10
"""Auxiliary samples a class on average below which the covariances say too little."""

MOST_CLASSES = 200
"""Classes up to which the moments are kept beside other statistics: they are as large as those of the logits,
and with more classes what is made of them takes longer than seconds a client."""

MOST_SAMPLED = 20
"""Classes up to which single samples' logits are kept too, for the methods that simulate clients."""


class ResidualMoments(LogitMoments):
    """Moments of r = onehot(y) − softmax(q), by class y: one sample's share of −∇b.

    mean : shape (N, N), mean[n, j] = E[r_j | class n], that is 1{n = j} − S[n, j] over the samples
    factor, counts : as in `LogitMoments`

    Where the weight is looked at too (`residual_views`), they are 2N wide.
    """


Replay = Callable[[FloatArray, int], "ResidualMoments | None"]
"""From proportions, shape (N,), and the number of a draw to moments of the residuals averaged over a replayed
training on such a mix, weighted by ρ; None where it diverges."""


@dataclass(frozen=True)
class ResidualPath:
    """Residual moments on the client's way from the global to the local model.

    start, end : of the two models, ``end`` None where the local one was not measured
    replay : the client's training again, None where it can't be replayed
    samples : the global model's logits of the single samples, for the methods that simulate clients
    along : direction of the embedding, shape (L,), along which the weight is looked at as well; then all
        moments are of both `residual_views`. For updates with known noise
    """

    start: ResidualMoments
    end: ResidualMoments | None = None
    replay: Replay | None = None
    samples: Activations | None = None
    along: FloatArray | None = None


def too_few(counts: IntArray) -> bool:
    """Whether auxiliary samples say too little of how single ones differ: few of a class, or many classes."""
    return bool(counts.sum() < _FEWEST_SAMPLES * len(counts)) or len(counts) > MOST_CLASSES


def residuals(logits: NDArray[np.floating], labels: IntArray) -> FloatArray:
    """onehot(y) − softmax(q), shape (M, N)."""
    found = -softmax(logits.astype(np.float64))
    found[np.arange(len(labels)), labels] += 1.0
    return found


def residual_views(samples: Activations, along: FloatArray | None) -> FloatArray:
    """r of single samples, shape (M, N), or with a direction v of the embedding r and r (e·v), (M, 2N).

    One sample's share of −∇b, and of −∇W v.

    Parameters
    ----------
    along : v, shape (L,)
    """
    found = residuals(samples.logits, samples.labels)
    if along is None:
        return found
    assert samples.embeddings is not None
    return np.concatenate((found, found * (samples.embeddings @ along)[:, None]), axis=1)


def residual_moments(values: FloatArray, labels: IntArray, *, views: int = 1) -> ResidualMoments:
    """Moments by class of residuals, shape (M, N), or of their averages over several models.

    Parameters
    ----------
    values : of ``views`` views side by side, shape (M, views · N)

    Raises
    ------
    MismatchError
        A class without samples, or numbers that are not finite.
    """
    found = logit_moments(values, labels, values.shape[1] // views)
    return ResidualMoments(found.mean, found.factor, found.counts)
