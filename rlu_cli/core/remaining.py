"""The labels of a few samples of a batch, given those of all others and what the few did to the head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlu_cli.core.types import FloatArray, IntArray

_DRAWS = 20_000
_ENOUGH = 200.0
"""Draws made, and how many of them in effect a posterior is read from."""

_CONCENTRATIONS = np.geomspace(0.1, 3.0, 16)
"""Of the Dirichlet prior of class mixes, log-uniform."""

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


def remaining_labels(
    known: IntArray,
    count: int,
    sum_of_residuals: FloatArray,
    error: float,
    residuals: FloatArray,
    labels: IntArray,
    *,
    seed: int,
) -> Remaining:
    """The posterior of the counts of ``count`` labels, by importance sampling.

        p(k | F, t) ∝ p(k | F) E[exp(−‖t − Σ_i r(x_i)‖²/(2 h²))],     x_i auxiliary samples of classes k

    p(k | F) is Dirichlet-multinomial: the class mix has a Dirichlet prior, whose concentration is log-uniform
    from 0.1 to 3, and F of its labels are known. h is ``error``, or as much larger as leaves 200 draws.

    Parameters
    ----------
    known : F, shape (N,)
    sum_of_residuals : t, Σ (onehot − s) over the samples that remain, shape (N,)
    error : standard deviation of each entry of t
    residuals, labels : onehot − s of auxiliary samples, shape (M, N), and their labels
    """
    N = len(known)
    if count == 0:
        nothing = np.zeros(N)
        return Remaining(nothing, nothing.astype(int), nothing.astype(int), nothing)
    rng = np.random.default_rng(seed)
    prior = _mix_posterior(known, rng)
    drawn = np.zeros((_DRAWS, N), dtype=np.int64)
    sums = np.zeros((_DRAWS, N))
    of_class = [np.flatnonzero(labels == n) for n in range(N)]
    starts = np.cumsum([0, *map(len, of_class)])
    members, sizes = np.concatenate(of_class), np.diff(starts)
    for _ in range(count):
        label = (rng.random((_DRAWS, 1)) > np.cumsum(prior, axis=1)[:, :-1]).sum(axis=1)
        drawn[np.arange(_DRAWS), label] += 1
        row = members[starts[label] + (rng.random(_DRAWS) * sizes[label]).astype(int)]
        sums += residuals[row]
    weights = _weights(((sums - sum_of_residuals) ** 2).sum(axis=1), error)
    return Remaining(
        weights @ drawn,
        _quantile(drawn, weights, _TAIL),
        _quantile(drawn, weights, 1 - _TAIL),
        weights @ (drawn > 0),
    )


def _mix_posterior(known: IntArray, rng: np.random.Generator) -> FloatArray:
    """Class mixes given labels drawn from them, shape (draws, N)."""
    from_each = []
    evidence = np.array([_log_evidence(known, alpha) for alpha in _CONCENTRATIONS])
    share = np.exp(evidence - evidence.max())
    for alpha, times in zip(_CONCENTRATIONS, rng.multinomial(_DRAWS, share / share.sum()), strict=True):
        from_each.append(rng.dirichlet(known + alpha, times))
    return rng.permutation(np.concatenate(from_each))


def _log_evidence(known: IntArray, alpha: float) -> float:
    """log p(F | α) of the Dirichlet-multinomial, but for what doesn't hang on α."""
    steps = [np.log(alpha + np.arange(n)).sum() for n in known]
    return float(np.sum(steps) - np.log(len(known) * alpha + np.arange(known.sum())).sum())


def _weights(squares: FloatArray, error: float) -> FloatArray:
    """Normalised, with as narrow a kernel as leaves enough draws."""
    width = max(error, float(np.sqrt(squares.min())), 1e-12)
    while True:
        weights: FloatArray = np.exp(-(squares - squares.min()) / (2 * width**2))
        weights /= weights.sum()
        if 1.0 / np.sum(weights**2) >= _ENOUGH:
            return weights
        width *= 1.25


def _quantile(drawn: IntArray, weights: FloatArray, level: float) -> IntArray:
    """The least count of each class below or at which so much of the weight is, shape (N,)."""
    found = []
    for counts in drawn.T:
        below = np.cumsum(np.bincount(counts, weights=weights))
        found.append(int(np.searchsorted(below, level - 1e-12)))
    return np.array(found)
