"""The bias update's own error model, and the proportions that explain it best under that model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from rlu_cli.core.residuals import ResidualMoments
from rlu_cli.core.schemes import batch_variance, impulse_response
from rlu_cli.core.simplex import SimplexSolution, SimplexSolver, simplex_least_squares
from rlu_cli.core.types import FloatArray, IntArray, LocalTraining

_SWEEPS = 4
"""Alternations of weights and solution; the weights settle in two or three."""

_POOLED = 0.1
"""Share of the classes' common covariance in each one's own: 100 samples say little of rare residuals."""

_FLOOR = 1e-3
"""Least variance in any direction, as a share of the mean variance."""

_ASTRAY = 0.1
"""Standard deviation of where between its two ends the client's gradients were taken."""

_DRAWS = 400
_LEVEL = 0.95

_EXACT = 0.5
"""Samples that it may expect to get wrong of a client before a method that takes seconds is worth them."""


@dataclass(frozen=True)
class ResidualModel:
    """u = mean z + ε, ε ~ N(0, covariance(z)), in the N − 1 directions that the residuals have.

    parts : mean, factor and weight of each model on the client's way that the moments come from
    noise : standard deviation of the known noise on each view of the update, see `observed_views`
    """

    parts: Sequence[tuple[float, ResidualMoments]]
    training: LocalTraining
    replays: bool = False
    noise: tuple[float, ...] = (0.0,)

    @cached_property
    def _kept(self) -> IntArray:
        """The columns of the moments without the last class of each view."""
        N = len(self.parts[0][1].counts)
        return np.concatenate([view * N + np.arange(N - 1) for view in range(len(self.noise))])

    @cached_property
    def mean(self) -> FloatArray:
        """E[r | class], shape (N − 1, N), one class a column; of two views 2(N − 1) rows."""
        total = sum(weight * part.mean for weight, part in self.parts)
        return np.asarray(total.T[self._kept])  # type: ignore[union-attr]

    @cached_property
    def _sampling(self) -> tuple[float, float]:
        """1/n_eff, and v of `covariance`."""
        rho, steps = impulse_response(self.training), self.training.steps
        uneven = float(np.sum((rho / rho.sum() - 1 / steps) ** 2)) * steps / self.training.samples
        return batch_variance(self.training), uneven

    def covariance(self, z: FloatArray) -> FloatArray:
        """Of u given the counts of each class, shape (N − 1, N − 1).

            Σ_n C_n (z_n/n_eff + z_n²/K_n)  +  v · M (diag z − z zᵀ) Mᵀ  +  (σ_α)² d dᵀ

        The samples of a class differ (C_n), those of the client as well as the K_n auxiliary ones that M
        comes from. Of the client's, n_eff = B (Σρ)²/Σρ² count, no more than there are different ones. Steps
        of unequal weight see unequal mixes: v = Σ_τ (ρ^τ/Σρ − 1/m)²/B, zero for plain SGD. Moments from two
        ends leave the place between them uncertain: d = (M_end − M_start) z, σ_α = 0.1. For R replays this
        last term is (1 + 1/R) times the covariance of their M z, as the client's own way is one more.
        Known noise of standard deviation σ adds σ² (I − 11ᵀ/N) to its view.
        """
        training, N = self.training, len(z)
        alike, uneven = self._sampling
        z = np.maximum(z, 1.0 / (2 * training.samples))
        size = len(self._kept)
        kept = np.zeros((size, size))
        for weight, part in self.parts:
            own = z * alike + z**2 / part.counts
            scale = weight * ((1 - _POOLED) * own + _POOLED * own.mean())
            rows = (part.factor[:, :, self._kept] * np.sqrt(scale)[:, None, None]).reshape(-1, size)
            kept += rows.T @ rows
        M = self.mean
        ways = np.stack([part.mean.T[self._kept] @ z for _, part in self.parts])
        if self.replays and len(ways) > 1:
            apart = np.cov(ways.T)
            if any(self.noise):
                apart = 0.5 * apart + 0.5 * float(np.trace(apart) / np.trace(kept)) * kept
            kept += (1 + 1 / len(ways)) * apart
        elif len(ways) == 2:
            kept += _ASTRAY**2 * np.outer(ways[1] - ways[0], ways[1] - ways[0])
        kept += uneven * ((M * z) @ M.T - np.outer(M @ z, M @ z))
        kept += max(_FLOOR * float(np.trace(kept)) / size, 1e-16) * np.eye(size)
        return kept + np.kron(np.diag(np.square(self.noise)), np.eye(N - 1) - 1.0 / N)


@dataclass(frozen=True)
class Fit:
    """The proportions that explain u best under an error model.

    design : Σ^(−1/2) M, shape (N − 1, N) a view
    chi_squared : (u − M z)ᵀ Σ⁻¹ (u − M z)
    freedom : equations less the proportions that are not zero, their sum being known
    """

    model: ResidualModel
    solution: SimplexSolution
    design: FloatArray
    chi_squared: float
    freedom: int

    @property
    def birge(self) -> float:
        """√((1 + χ²)/(1 + freedom)), at least 1: by how much errors seem larger than the model has them."""
        return float(np.sqrt(max(1.0, (1.0 + self.chi_squared) / (1.0 + self.freedom))))


def fit(model: ResidualModel, u: FloatArray) -> Fit:
    """The generalised least-squares proportions for u, shape (N − 1,) a view."""
    M = model.mean
    z = np.full(M.shape[1], 1.0 / M.shape[1])
    for _ in range(_SWEEPS):
        root = np.linalg.cholesky(model.covariance(z))
        white = _solved(np.asarray(root), np.column_stack((M, u)))
        solution = simplex_least_squares(white[:, :-1], white[:, -1])
        z = solution.z
    freedom = len(u) + 1 - int(np.count_nonzero(z > 0))
    return Fit(model, solution, white[:, :-1], solution.residual**2, freedom)


def is_exact(residuals: ResidualMoments, training: LocalTraining) -> bool:
    """Whether one step's client gets hardly any label wrong: the model barely tells classes apart."""
    return training.samples * foreseen_error(ResidualModel([(1.0, residuals)], training)) <= _EXACT


def foreseen_error(model: ResidualModel) -> float:
    """E ½‖ẑ − z‖₁ at equal proportions z, as far as the error model goes, the bounds of z left aside."""
    N = model.mean.shape[1]
    return float(np.sum(deviations(model, np.full(N, 1.0 / N))) / np.sqrt(2 * np.pi))


def deviations(model: ResidualModel, z: FloatArray) -> FloatArray:
    """Standard deviations of ẑ where z is right, shape (N,), the bounds of z left aside.

    Cov ẑ = T (Tᵀ Mᵀ Σ(z)⁻¹ M T)⁻¹ Tᵀ,     T a basis of {Σ_n z_n = 0}
    """
    N = model.mean.shape[1]
    root = np.linalg.cholesky(model.covariance(z))
    T = np.linalg.svd(np.ones((1, N)))[2][1:].T
    design = _solved(np.asarray(root), model.mean @ T)
    spread = T @ np.linalg.pinv(design)
    return np.asarray(np.sqrt(np.sum(spread**2, axis=1)))


def _solved(root: FloatArray, columns: FloatArray) -> FloatArray:
    """root⁻¹ columns for a lower triangular root."""
    solved = torch.linalg.solve_triangular(*map(torch.from_numpy, (root, columns)), upper=False)
    return np.asarray(solved.numpy())


def solutions_of_like_updates(found: Fit, *, seed: int) -> FloatArray:
    """Proportions (draws, N) for updates that scatter about M z as the error model says u does.

    Where χ² exceeds its mean, all errors are taken to be larger by Birge's ratio (`Fit.birge`).
    """
    centre = found.design @ found.solution.z
    noise = found.birge * np.random.default_rng(seed).standard_normal((_DRAWS, len(centre)))
    solver = SimplexSolver(found.design)
    return np.stack([solver.solve(centre + row).z for row in noise])


def middle(draws: FloatArray) -> FloatArray:
    """Between which the middle 95 % of each column lie, shape (2, N)."""
    edge = (1 - _LEVEL) / 2
    return np.asarray(np.quantile(draws, [edge, 1 - edge], axis=0))
