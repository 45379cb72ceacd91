"""Generalised least squares: the update's own error model decides what each class output is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from rlu_cli.core.methods.base import (
    SWING_LIMIT,
    Capabilities,
    Method,
    Problem,
    solution_notes,
    swing_notes,
)
from rlu_cli.core.noise import observed_views, rounding_alone
from rlu_cli.core.progress import Progress
from rlu_cli.core.residuals import Replay, ResidualMoments
from rlu_cli.core.schemes import batch_variance, impulse_response
from rlu_cli.core.simplex import SimplexSolution, SimplexSolver, simplex_least_squares
from rlu_cli.core.types import Estimate, FloatArray, IntArray, LocalTraining, Note
from rlu_cli.core.unit_direction import mean_lengths

_SWEEPS = 4
"""Alternations of weights and solution; the weights settle in two or three."""

_REPLAYS = 3
"""Replays that the last solution rests on; how they differ is an error of its own."""

_POOLED = 0.1
"""Share of the classes' common covariance in each one's own: 100 samples say little of rare residuals."""

_FLOOR = 1e-3
"""Least variance in any direction, as a share of the mean variance."""

_ASTRAY = 0.1
"""Standard deviation of where between its two ends the client's gradients were taken."""

BOUNDED_STEPS = 20
"""Steps up to which there are bounds: some 95 % hold at ten, but of clients that ran 157 only 60 %."""

_DRAWS = 400
_LEVEL = 0.95


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


def solve(problem: Problem) -> Estimate:
    """Label proportions from the bias update, weighed by how much its parts can be trusted.

        min_z (u − M z)ᵀ Σ(z)⁻¹ (u − M z)   over the simplex,     M[:, n] = E[r | class n],  r = onehot − s

    with Σ as `ResidualModel.covariance` says, iterated from equal proportions. M and the classes' own
    covariances come from the auxiliary samples themselves, without a Gaussian assumption. For several
    steps they are taken between the two models, where `solve_on_path` places the gradients; where the
    client can be replayed, that solution only begins: the moments are then averages over replayed training,
    from the global model on auxiliary samples mixed by the proportions found before, drawn towards the true
    local model. One replay corrects the mix; of the following ones the last solution takes the mean, and
    their differences for an error.

    The bounds are those of 95 % of the solutions for updates drawn again from the error model; of more than
    20 steps there are none, nor where the predictions swing (`Problem.swing`), since a replay is an error of
    its own that they would not know of, nor where a class has a single auxiliary sample.

    Assumptions: auxiliary samples like the client's; the client's optimiser known, for the replays.
    Uses Δb and single auxiliary samples' softmax values.
    Source: generalised least squares (Aitken 1936) on the RLU paper's Eq. eq_b and eq_b_multi.
    """
    path = problem.observation.residuals
    assert path is not None
    training = problem.observation.training
    observation = problem.observation
    single = training.steps == 1 and rounding_alone(observation) > 0
    exact = single and is_exact(path.start, training)
    u, noise = observed_views(observation, problem.u, problem.gradient, exact=exact)
    shown = mean_lengths(observation.head, observation.start, observation.start)
    parts: Sequence[tuple[float, ResidualMoments]] = [(1.0, _shown(path.start, shown))]
    if path.end is not None and observation.end is not None:
        position = problem.path.position
        later = mean_lengths(observation.head, observation.start, observation.end)
        parts = [(1 - position, _shown(path.start, shown)), (position, _shown(path.end, later))]
        shown = (1 - position) * shown + position * later
    found = fit(ResidualModel(parts, training, noise=noise), u)
    replayed: list[ResidualMoments] = []
    if path.replay is not None and training.steps > 1:
        first = path.replay(found.solution.z, 0)
        if first is not None:
            found = fit(ResidualModel([(1.0, _shown(first, shown))], training, noise=noise), u)
            z = found.solution.z
            mixes = [z] * _REPLAYS
            if any(noise):
                mixes = list(solutions_of_like_updates(found, seed=problem.observation.seed)[:_REPLAYS])
            replayed = list(_replayed(path.replay, mixes, problem.observation.progress))
    if replayed:
        mean = [(1 / len(replayed), _shown(m, shown)) for m in replayed]
        found = fit(ResidualModel(mean, training, replays=True, noise=noise), u)
    total, solution = training.samples, found.solution
    low = high = presence = None
    swing = problem.swing(solution.z)
    spread_known = bool(path.start.counts.min() > 1)
    if training.steps <= BOUNDED_STEPS and swing <= SWING_LIMIT and spread_known:
        draws = total * solutions_of_like_updates(found, seed=problem.observation.seed)
        low, high = middle(draws)
        if training.steps > 1:  # half a sample to either side, for what two models don't say of the way
            low, high = np.rint(low), np.rint(high)
        presence = np.mean(draws >= 0.5, axis=0)
    return Estimate(
        solution.z,
        {
            "residual": float(np.linalg.norm(found.model.mean @ solution.z - u)),
            "duality_gap": solution.gap,
            "solver_certified": solution.certified,
            "chi_squared": found.chi_squared,
            "freedom": found.freedom,
            "replays": len(replayed),
            "swing": swing,
        },
        (
            *solution_notes(solution, known_to_the_end=training.steps == 1 or path.end is not None),
            *swing_notes(swing),
        ),
        low=low,
        high=high,
        presence=presence,
    )


def _shown(moments: ResidualMoments, lengths: FloatArray) -> ResidualMoments:
    """Of what shows along the direction that stands for a bias: see `mean_lengths`."""
    if np.all(lengths == 1.0):
        return moments
    scaled = moments.factor * lengths[:, None, None]
    return ResidualMoments(moments.mean * lengths[:, None], scaled, moments.counts)


def solve_instead(problem: Problem, *notes: Note, **found: float) -> Estimate:
    """The answer for a method that has none here, with its notes and diagnostics."""
    estimate = solve(problem)
    return replace(
        estimate, diagnostics={**estimate.diagnostics, **found}, warnings=(*estimate.warnings, *notes)
    )


def _replayed(replay: Replay, mixes: Sequence[FloatArray], progress: Progress) -> Iterator[ResidualMoments]:
    """Moments along replays of these mixes; without those that diverge."""
    for draw, z in enumerate(mixes, start=1):
        progress(draw, 1 + len(mixes))  # the first has corrected the mix
        found = replay(z, draw)
        if found is not None:
            yield found


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


_EXACT = 0.5
"""Samples that it may expect to get wrong of a client before a method that takes seconds is worth them."""


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


GLS = Method(
    name="gls",
    summary="generalised least squares on the bias update along a replay of the training, with error bars",
    reference="generalised least squares (Aitken 1936) on the RLU paper's Eq. eq_b_multi",
    solve=solve,
    needs_end=lambda training: training.steps > 1,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=True,
        trained_model=True,
    ),
    needs_bias=True,
    or_unit=True,
    uses_auxiliary=True,
    needs_residuals=True,
)
