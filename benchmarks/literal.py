"""The paper's algorithms word for word, as one would first write them: what the speed is measured against."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from rlu_cli.core.types import FloatArray, IntArray, LocalTraining, LogitMoments

JITTER = 1e-4
"""Added to the diagonal: with K_n ≤ N samples the covariance is singular, and Cholesky fails."""


class LiteralConfidence:
    """S by one torch `MultivariateNormal` a class, M samples, softmax, mean (Eq. monte_carlo)."""

    def __init__(self, moments: LogitMoments, samples: int, device: str = "cpu") -> None:
        self.samples = samples
        self.mean = torch.from_numpy(moments.mean).float().to(device)
        self.factor = torch.from_numpy(moments.factor).float().to(device)

    def softmaxes(self, n: int, shift: Tensor | float = 0.0) -> Tensor:
        """softmax of M draws of class n's logits, shape (M, N)."""
        covariance = self.factor[n].T @ self.factor[n]
        covariance.diagonal().add_(JITTER)
        distribution = MultivariateNormal(self.mean[n] + shift, covariance, validate_args=False)
        return torch.softmax(distribution.sample((self.samples,)), dim=-1)

    def rows(self, classes: IntArray) -> Tensor:
        """S of some classes."""
        return torch.stack([self.softmaxes(int(n)).mean(dim=0) for n in classes])


def literal_final_means(
    literal: LiteralConfidence, gram: FloatArray, training: LocalTraining, counts: IntArray, steps: int
) -> FloatArray:
    """The first ``steps`` steps of plain SGD on the class-mean logits, all draws anew at each (Alg. 2)."""
    start = literal.mean.cpu().double().numpy()
    means, N = start.copy(), len(counts)
    for _ in range(steps):
        gradient = np.zeros((N, N))
        for n in range(N):
            shift = torch.from_numpy(means[n] - start[n]).float().to(literal.mean.device)
            S = literal.softmaxes(n, shift).mean(dim=0).cpu().double().numpy()
            S[n] -= 1.0
            gradient += np.outer(gram[:, n] * counts[n] / training.samples, S)
        means -= float(training.lr) * gradient  # type: ignore[arg-type]
    return means


def literal_search(
    literal: LiteralConfidence,
    gram: FloatArray,
    training: LocalTraining,
    final_mean: FloatArray,
    counts: IntArray,
    iterations: int,
) -> IntArray:
    """The best counts of ``iterations`` moves of ±m (Alg. 2 as it must be read)."""
    current, best, least = counts.copy(), counts, np.inf
    seen = {counts.tobytes()}
    for _ in range(iterations + 1):
        difference = literal_final_means(literal, gram, training, current, training.steps) - final_mean
        mismatch = float(np.sum(difference**2))
        if mismatch < least:
            best, least = current.copy(), mismatch
        over = difference.sum(axis=0)
        giver, taker = int(np.argmax(np.where(current > 0, over, -np.inf))), int(np.argmin(over))
        if over[giver] <= 0 or over[taker] >= 0 or giver == taker:
            break
        amount = min(training.steps, int(current[giver]))
        current[giver] -= amount
        current[taker] += amount
        if current.tobytes() in seen:
            break
        seen.add(current.tobytes())
    return best
