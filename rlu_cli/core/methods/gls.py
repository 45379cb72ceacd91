"""Generalised least squares: the update's own error model decides what each class output is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rlu_cli.core.error_model import ResidualModel, fit, is_exact, middle, solutions_of_like_updates
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
from rlu_cli.core.types import Estimate, FloatArray, Note
from rlu_cli.core.unit_direction import mean_lengths

_REPLAYS = 3
"""Replays that the last solution rests on; how they differ is an error of its own."""

BOUNDED_STEPS = 20
"""Steps up to which there are bounds: some 95 % hold at ten, but of clients that ran 157 only 60 %."""


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
