"""Monte Carlo erroneous confidence S, and the coefficient matrix A made from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlu_cli.core.expectation import SoftmaxExpectation
from rlu_cli.core.types import FloatArray, LogitMoments


@dataclass(frozen=True)
class Confidence:
    """S and its Monte Carlo standard error, each of shape (N, N); rows of ``mean`` sum to 1."""

    mean: FloatArray
    standard_error: FloatArray


def monte_carlo_confidence(
    moments: LogitMoments, *, samples: int = 10_000, seed: int = 0, device: str = "cpu"
) -> Confidence:
    """Expected softmax of Gaussian logits, by Monte Carlo (paper, Eq. monte_carlo).

        S[n, j] = E[softmax(q)_j],   q ~ N(μ_n, Σ̄_n)

    The diagonal, a class's confidence in itself, is included, so S 1 = 1. Draws are in antithetic pairs and
    orthonormal frames (`paired_normals`); computed in float32, accumulated in float64; memory is a few
    megabytes of logits, never N×M×N.

    Parameters
    ----------
    samples : M, rounded up to whole frames of pairs
    seed : of the draws; the same seed gives the same S
    device : "cpu", "cuda", "cuda:1", …

    Returns
    -------
    Confidence
        The standard error is that of the frames' mean: with ten frames it is known to a quarter.
    """
    mean, error = SoftmaxExpectation(moments, samples=samples, seed=seed, device=device).unmoved()
    return Confidence(mean / mean.sum(axis=1, keepdims=True), error)


def coefficient_matrix(confidence: FloatArray) -> FloatArray:
    """A = I − Sᵀ: the expected u = Δb/η of a batch with label proportions z is A z.

        A[j, j] = Σ_{n ≠ j} S[j, n] = 1 − S[j, j],     A[j, n] = −S[n, j]  for n ≠ j

    The paper's text and Alg. 1 print the off-diagonal as a[n, j] = −S[n, j], the transpose, which
    contradicts its own Eq. eq_b; the two agree only while S is symmetric. Columns of A sum to zero
    (its rank is at most N − 1): never invert it. The diagonal is the sum of the off-diagonal row of S,
    which keeps its digits when S[j, j] is close to 1.

    Parameters
    ----------
    confidence : S, shape (N, N), rows sum to 1
    """
    erroneous = np.array(confidence, dtype=np.float64)
    np.fill_diagonal(erroneous, 0.0)
    return np.asarray(np.diag(erroneous.sum(axis=1)) - erroneous.T)
