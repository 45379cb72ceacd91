"""The labels of a few samples of a batch, given those of all others and what the few did to the head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlu_cli.core.synthetic_clients import FULLEST, SPARSEST
from rlu_cli.core.types import FloatArray, IntArray

_DRAWS = 20_000
_ENOUGH = 200.0
"""Draws made, and how many of them in effect a posterior is read from."""

_CONCENTRATIONS = np.geomspace(SPARSEST, FULLEST, 16)
"""Of the Dirichlet prior of class mixes, log-uniform."""

_UNEVEN = 0.5
"""Standard deviation of the logarithm of how much more often than by their residuals' sizes the samples of a
class remain: their inputs may be alike, or have few zeros."""

_TAIL = 0.025


@dataclass(frozen=True)
class Remaining:
    """Labels of the samples that remain.

    mean : expected counts, shape (N,)
    low, high : the middle 95 % of the counts
    presence : probability of any
    """

    mean: FloatArray
    low: IntArray
    high: IntArray
    presence: FloatArray


@dataclass(frozen=True)
class Lookalikes:
    """Auxiliary samples that stand for those that remain.

    residuals : onehot − s, shape (M, N)
    labels : shape (M,)
    missed : probability that such a sample is among those that remain, shape (M,)
    """

    residuals: FloatArray
    labels: IntArray
    missed: FloatArray

    def of_class(self, num_classes: int) -> FloatArray:
        """Probability that a sample of each class is among those that remain, shape (N,)."""
        counts = np.bincount(self.labels, minlength=num_classes)
        return np.bincount(self.labels, weights=self.missed, minlength=num_classes) / np.maximum(counts, 1)


def lookalikes(residuals: FloatArray, labels: IntArray, found: FloatArray, above_noise: int) -> Lookalikes:
    """Which auxiliary samples would have been told apart from a batch, as far as those that were say.

    A residual smaller than all that were found would not have been, and of larger ones as many as of those
    that are above the noise.

    Parameters
    ----------
    found : residuals of the samples that were told apart, shape (K, N)
    above_noise : how many samples are above it, K at least
    """
    sizes, least = np.linalg.norm(residuals, axis=1), np.linalg.norm(found, axis=1).min(initial=np.inf)
    share = (above_noise - len(found) + 0.5) / (above_noise + 1)
    return Lookalikes(residuals, labels, np.where(sizes < least, 1.0, share))


def remaining_labels(
    known: IntArray, count: int, sum_of_residuals: FloatArray, error: float, like: Lookalikes, *, seed: int
) -> Remaining:
    """The posterior of the counts of ``count`` labels, by importance sampling.

        p(k | F, t) ∝ ∫ p(π | F) Π_i π_{k_i} μ_{k_i} dπ · E[exp(−‖t − Σ_i r(x_i)‖²/(2 h²))]

    π is the class mix, of which F labels are known: Dirichlet, with a concentration that is log-uniform from
    0.1 to 3 before. μ_n is the probability that a sample of class n remains, known up to a log-normal factor,
    and x_i are auxiliary samples of classes k, by their own probabilities. h is ``error``, or as much larger
    as leaves 200 draws.

    Parameters
    ----------
    known : F, shape (N,)
    sum_of_residuals : t, Σ (onehot − s) over the samples that remain, shape (N,)
    error : standard deviation of each entry of t
    """
    N = len(known)
    if count == 0:
        nothing = np.zeros(N)
        return Remaining(nothing, nothing.astype(int), nothing.astype(int), nothing)
    rng = np.random.default_rng(seed)
    shares = _mix_posterior(known, rng) * np.exp(_UNEVEN * rng.standard_normal((_DRAWS, N)))
    shares *= like.of_class(N) / shares.sum(axis=1, keepdims=True)
    mass = shares.sum(axis=1, keepdims=True)
    below = np.cumsum(shares / mass, axis=1)[:, :-1]
    order = np.argsort(like.labels, kind="stable")
    up_to = np.cumsum(like.missed[order])
    ends = np.searchsorted(like.labels[order], np.arange(N + 1))
    edges = np.concatenate(([0.0], up_to))[ends]
    drawn = np.zeros((_DRAWS, N), dtype=np.int64)
    sums = np.zeros((_DRAWS, N))
    for _ in range(count):
        label = (rng.random((_DRAWS, 1)) > below).sum(axis=1)
        drawn[np.arange(_DRAWS), label] += 1
        place = edges[label] + rng.random(_DRAWS) * (edges[label + 1] - edges[label])
        place = np.clip(np.searchsorted(up_to, place, side="right"), ends[label], ends[label + 1] - 1)
        sums += like.residuals[order[place]]
    weights = _weights(((sums - sum_of_residuals) ** 2).sum(axis=1), count * np.log(mass[:, 0]), error)
    return Remaining(
        weights @ drawn,
        _quantile(drawn, weights, _TAIL),
        _quantile(drawn, weights, 1 - _TAIL),
        weights @ (drawn > 0),
    )


def _mix_posterior(known: IntArray, rng: np.random.Generator) -> FloatArray:
    """Class mixes given labels drawn from them, shape (draws, N)."""
    evidence = np.array([_log_evidence(known, alpha) for alpha in _CONCENTRATIONS])
    share = np.exp(evidence - evidence.max())
    times = rng.multinomial(_DRAWS, share / share.sum())
    drawn = [rng.dirichlet(known + alpha, n) for alpha, n in zip(_CONCENTRATIONS, times, strict=True)]
    return rng.permutation(np.concatenate(drawn))


def _log_evidence(known: IntArray, alpha: float) -> float:
    """log p(F | α) of the Dirichlet-multinomial, but for what doesn't hang on α."""
    steps = [np.log(alpha + np.arange(n)).sum() for n in known]
    return float(np.sum(steps) - np.log(len(known) * alpha + np.arange(known.sum())).sum())


def _weights(squares: FloatArray, log_prior: FloatArray, error: float) -> FloatArray:
    """Normalised, with as narrow a kernel as leaves enough draws, or none at all."""
    width = max(error, float(np.sqrt(squares.min())), 1e-12)
    widest = 10.0 * float(np.sqrt(squares.max()))
    while True:
        logs = log_prior - squares / (2 * width**2)
        weights: FloatArray = np.exp(logs - logs.max())
        weights /= weights.sum()
        if width > widest or 1.0 / np.sum(weights**2) >= _ENOUGH:
            return weights
        width *= 1.25


def _quantile(drawn: IntArray, weights: FloatArray, level: float) -> IntArray:
    """The least count of each class below or at which so much of the weight is, shape (N,)."""
    found = []
    for counts in drawn.T:
        below = np.cumsum(np.bincount(counts, weights=weights))
        found.append(int(np.searchsorted(below, level - 1e-12)))
    return np.array(found)
