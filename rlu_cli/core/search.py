"""The posterior search over label counts (paper, Alg. 2), by shifting fixed draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlu_cli.core.confidence import LogitSampler
from rlu_cli.core.schemes import LinearRecursion
from rlu_cli.core.types import FloatArray, IntArray, LocalTraining, LogitMoments

_KEPT_BYTES = 2**30
"""exp(q) of all draws is kept up to this size and made again from the seed, block by block, above it."""

_SHIFT_LIMIT = 60.0
"""Spread of a shift up to which exp(q)·exp(shift) can't underflow float32; softmax anew above it."""


@dataclass(frozen=True)
class SearchResult:
    """The best counts met, and how well they explain the local model.

    counts : shape (N,), same sum as the first guess
    mismatch : ‖μ̂ − μ‖²_F of those counts, class by class, at the end of training
    initial_mismatch : that of the first guess
    moves : moves made before the best counts were met
    """

    counts: IntArray
    mismatch: float
    initial_mismatch: float
    moves: int


class MeanSimulator:
    """Simulates how the class-mean logits move while a client trains on given label counts.

    Each step with expected counts g = N/m moves the head by its expected gradient, and the head moves
    the mean logits of class n' by

        ∇μ_{n', j} = (1/B) Σ_n G[n', n] g_n (S[n, j] − δ_{nj}),    G[n', n] = ē_n'·ē_n + 1

    (the paper's Δμ = Δb·‖ē‖² forgets that the bias moves the logits too, and gives every class the same
    ē). These gradients go through the client's own recursion, so momentum, decay and pulls come for
    free. S along the way needs no new draws and no exponentials: with E = exp(q) of the first model's
    draws and w = exp(shift), softmax(q + shift) = E w / Σ_j E_j w_j. Classes with g_n = 0 cost nothing.

    Parameters
    ----------
    moments : of the global model
    gram : G, shape (N, N)
    training : the client's training values
    constant : the scheme's constant gradient, as it moves the mean logits, shape (N, N)
    """

    def __init__(
        self,
        moments: LogitMoments,
        gram: FloatArray,
        training: LocalTraining,
        *,
        constant: FloatArray | float = 0.0,
        samples: int = 10_000,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.moments = moments
        self.gram = gram
        self.training = training
        self.constant = constant
        self.sampler = LogitSampler(moments, samples=samples, seed=seed, device=device)
        size = 2 * self.sampler.pairs * self.sampler.num_classes**2 * 4
        self.kept = list(self._odds()) if size <= _KEPT_BYTES else None

    def _odds(self) -> Iterator[torch.Tensor]:
        """exp(q − max q) by blocks, shape (N, draws, N): class, draw, logit."""
        N = self.sampler.num_classes
        for logits in self.sampler:
            q = logits.reshape(-1, N, N)
            yield torch.exp(q - q.amax(dim=-1, keepdim=True)).transpose(0, 1).contiguous()

    def confidence(self, shift: FloatArray, active: IntArray) -> FloatArray:
        """S[active] after the mean logits have moved by ``shift``, both of shape (a, N)."""
        device, dtype = self.sampler.device, self.sampler.dtype
        shift = shift - shift.max(axis=1, keepdims=True)
        if shift.min() < -_SHIFT_LIMIT:
            return self._confidence_anew(shift, active)
        w = torch.from_numpy(np.exp(shift)).to(device, dtype)  # (a, N)
        rows = torch.from_numpy(active).to(device)
        total = torch.zeros(w.shape, dtype=torch.float64, device="cpu")
        draws = 0
        for odds in self.kept if self.kept is not None else self._odds():
            E = odds if len(active) == len(odds) else odds.index_select(0, rows)  # (a, c, N)
            mass = torch.bmm(E, w.unsqueeze(2))  # (a, c, 1)
            total += (torch.bmm(mass.reciprocal().transpose(1, 2), E).squeeze(1) * w).cpu().double()
            draws += E.shape[1]
        return np.asarray((total / draws).numpy())

    def _confidence_anew(self, shift: FloatArray, active: IntArray) -> FloatArray:
        """The same by plain softmax, for logits that have moved further than float32 exponents reach."""
        device, dtype = self.sampler.device, self.sampler.dtype
        moved = torch.from_numpy(shift).to(device, dtype)
        rows = torch.from_numpy(active).to(device)
        total = torch.zeros(moved.shape, dtype=torch.float64, device="cpu")
        for logits in self.sampler:
            q = logits.flatten(0, 1).index_select(1, rows)  # (2c, a, N)
            total += torch.softmax(q + moved, dim=-1).sum(dim=0).cpu().double()
        return np.asarray((total / (2 * self.sampler.pairs)).numpy())

    def final_means(self, counts: IntArray) -> FloatArray:
        """μ̂ of the model that training on ``counts`` would have produced, shape (N, N)."""
        g = counts / self.training.steps
        active = np.flatnonzero(counts)
        recursion = LinearRecursion(
            self.training, self.moments.mean.shape, initial=self.moments.mean, constant=self.constant
        )
        target = np.eye(len(counts))[active]
        reach = self.gram[:, active] * (g[active] / self.training.batch_size)  # (N, a)
        for _ in range(self.training.steps):
            S = self.confidence(recursion.displacement[active], active)
            recursion.step(reach @ (S - target))
        return np.asarray(self.moments.mean + recursion.displacement)


def posterior_search(
    simulator: MeanSimulator, final_mean: FloatArray, counts: IntArray, iterations: int
) -> SearchResult:
    """Move counts between classes until the simulated local model looks like the real one.

    Each iteration compares Σ_n μ̂_{n,j} with Σ_n μ_{n,j}: the class most overestimated (arg max of the
    positive differences) gives m samples, the one most underestimated (arg min of the negative ones;
    the paper prints arg max) gets them. Counts stay non-negative and keep their sum. Moves are coarse,
    so the iterate kept is the one with the smallest class-resolved mismatch ‖μ̂ − μ‖²_F, the first
    guess included, and the search ends when it comes back to counts it has seen.

    Parameters
    ----------
    final_mean : μ^{m+1} of the local model, shape (N, N)
    counts : the first guess, shape (N,)
    iterations : T, at most
    """
    counts = counts.copy()
    seen: set[bytes] = set()
    best, best_mismatch, best_move, initial = counts, np.inf, 0, np.nan
    for move in range(iterations + 1):
        difference = simulator.final_means(counts) - final_mean
        mismatch = float(np.sum(difference**2))
        if move == 0:
            initial = mismatch
        if mismatch < best_mismatch:
            best, best_mismatch, best_move = counts.copy(), mismatch, move
        seen.add(counts.tobytes())
        by_class = difference.sum(axis=0)
        giver = int(np.argmax(np.where(counts > 0, by_class, -np.inf)))
        taker = int(np.argmin(by_class))
        if by_class[giver] <= 0 or by_class[taker] >= 0 or giver == taker:
            break
        amount = min(simulator.training.steps, int(counts[giver]))
        counts[giver] -= amount
        counts[taker] += amount
        if counts.tobytes() in seen:
            break
    return SearchResult(best, best_mismatch, float(initial), best_move)
