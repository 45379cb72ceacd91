"""Monte Carlo erroneous confidence S, and the coefficient matrix A made from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlu_cli.core.types import FloatArray, LogitMoments

_BLOCK_BYTES = 32 * 2**20
"""Logits held at once: large enough for one efficient matrix product, small enough for any machine."""

_DRAW_CHUNK = 4096
"""ξ drawn at once, always whole: torch's normal numbers depend on how many are asked for at a time."""


@dataclass(frozen=True)
class Confidence:
    """S and its Monte Carlo standard error, each of shape (N, N); rows of ``mean`` sum to 1."""

    mean: FloatArray
    standard_error: FloatArray


class LogitSampler:
    """Draws q ~ N(μ_n, Σ̄_n) for every class, in blocks, without a covariance or a Cholesky factor.

        q = μ_n ± F_nᵀ ξ,   ξ ~ N(0, I_r)

    F_n of shape (r, N) is the factor of `LogitMoments`, so q has exactly the covariance Σ̄_n, singular
    or not. The same ξ serves all classes (common random numbers: one matrix product for all of them),
    and each ξ is used with both signs (antithetic: odd terms cancel, half the products).

    Iterating gives tensors of shape (2, c, N, N): sign, draw, class n, logit j. The draws are made on
    the CPU from ``seed`` alone, so every device, every block size and every pass sees the same ones.
    """

    def __init__(self, moments: LogitMoments, *, samples: int, seed: int, device: str = "cpu") -> None:
        if samples < 2:
            raise ValueError(f"expected at least 2 Monte Carlo samples, got {samples}")
        self.num_classes, self.rank, _ = moments.factor.shape
        self.pairs = (samples + 1) // 2
        self.device = torch.device(device)
        self.dtype = torch.float32
        self.seed = seed
        self.mean = torch.from_numpy(moments.mean).to(self.device, self.dtype)
        factor = moments.factor.transpose(1, 0, 2).reshape(self.rank, -1)  # (r, N·N)
        self.factor = torch.from_numpy(np.ascontiguousarray(factor)).to(self.device, self.dtype)
        per_pair = 2 * self.num_classes**2 * 4
        self.block = max(1, min(self.pairs, _BLOCK_BYTES // per_pair))

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        N = self.num_classes
        for first in range(0, self.pairs, _DRAW_CHUNK):
            draws = torch.randn(_DRAW_CHUNK, self.rank, generator=generator, dtype=self.dtype)
            for xi in torch.split(draws[: self.pairs - first], self.block):
                spread = (xi.to(self.device) @ self.factor).view(-1, N, N)
                yield torch.stack((self.mean + spread, self.mean - spread))


def monte_carlo_confidence(
    moments: LogitMoments, *, samples: int = 10_000, seed: int = 0, device: str = "cpu"
) -> Confidence:
    """Expected softmax of Gaussian logits, by Monte Carlo (paper, Eq. monte_carlo).

        S[n, j] = E[softmax(q)_j],   q ~ N(μ_n, Σ̄_n)

    The diagonal, a class's confidence in itself, is included, so S 1 = 1. Softmax is computed in
    float32 and accumulated in float64; memory is one block of logits, never N×M×N.

    Parameters
    ----------
    samples : M, rounded up to an even number (antithetic pairs)
    seed : of the draws; the same seed gives the same S
    device : "cpu", "cuda", "cuda:1", …

    Returns
    -------
    Confidence
        With the standard error of each entry, from the spread of the antithetic pairs' means.
    """
    sampler = LogitSampler(moments, samples=samples, seed=seed, device=device)
    N = sampler.num_classes
    # MPS has no float64; its sums stay in float32.
    wide = torch.float32 if sampler.device.type == "mps" else torch.float64
    # Sums of differences from a value nearby: squares of the values themselves would lose small variances.
    centre = torch.softmax(sampler.mean, dim=-1)
    total = torch.zeros(N, N, dtype=wide, device=sampler.device)
    squares = torch.zeros_like(total)
    for logits in sampler:
        spread = torch.softmax(logits, dim=-1).mean(dim=0) - centre  # (c, N, N)
        total += spread.sum(dim=0, dtype=wide)
        squares += spread.square().sum(dim=0, dtype=wide)
    shift = (total / sampler.pairs).cpu().numpy().astype(np.float64)
    second = (squares / sampler.pairs).cpu().numpy().astype(np.float64)
    mean = centre.cpu().numpy().astype(np.float64) + shift
    variance = np.maximum(second - shift**2, 0.0)
    return Confidence(
        mean=mean / mean.sum(axis=1, keepdims=True),
        standard_error=np.sqrt(variance / max(sampler.pairs - 1, 1)),
    )


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
