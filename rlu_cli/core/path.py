"""Where between the global and the local model the client's gradients were taken."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from rlu_cli.core.confidence import coefficient_matrix
from rlu_cli.core.schemes import path_position
from rlu_cli.core.simplex import SimplexSolution, SimplexSolver, simplex_least_squares
from rlu_cli.core.types import FloatArray, ModelStatistics, Observation

_STEADY = 1e-6
"""Change of the position below which it counts as found."""

_ROUNDS = 10
_DECAY_RANGE = (0.02, 50.0)
"""Ratios of the gradient at the two ends that are believed; noise alone can make it any number."""


_solvers: WeakKeyDictionary[ModelStatistics, SimplexSolver] = WeakKeyDictionary()
"""With A of a global model, for as long as its statistics live: one-step clients share it."""


@dataclass(frozen=True)
class PathSolution:
    """The least-squares label proportions, with S averaged over the client's way.

    position : ᾱ in [0, 1], 0 at the global and 1 at the local model
    decay : κ, how much of the gradient is left at the local model
    confidence : S̄, shape (N, N)
    embedding_mean : ē of each class, averaged alike, shape (N, L), None where it is unknown
    """

    solution: SimplexSolution
    position: float
    decay: float
    confidence: FloatArray
    embedding_mean: FloatArray | None


def solve_on_path(observation: Observation, u: FloatArray) -> PathSolution:
    """Solve u = Ā z on the simplex, with Ā = I − S̄ᵀ taken where the gradients were.

        S̄ = (1 − ᾱ) S_global + ᾱ S_local,     ᾱ = path_position(training, κ)
        κ = (u·A_local z) / (u·A_global z)

    S is known at the two ends only. How far along the client was at each step depends on how its gradient
    changed on the way: κ compares it at both ends, on the labels z themselves. So z and κ are found
    together, from κ = 1 (a constant gradient) on. One step uses S_global alone, and so does a missing
    local model.

    Parameters
    ----------
    u : (Δb + h)/(ηΣρ), shape (N,)
    """
    start, end = observation.start, observation.end
    if observation.training.steps == 1 or end is None:
        if start not in _solvers:
            _solvers[start] = SimplexSolver(coefficient_matrix(start.confidence))
        return PathSolution(_solvers[start].solve(u), 0.0, 1.0, start.confidence, start.embedding_mean)
    A_start, A_end = coefficient_matrix(start.confidence), coefficient_matrix(end.confidence)
    decay = 1.0
    position = path_position(observation.training)
    for _ in range(_ROUNDS):
        solution = simplex_least_squares((1 - position) * A_start + position * A_end, u)
        before, after = float(u @ A_start @ solution.z), float(u @ A_end @ solution.z)
        decay = float(np.clip(after / before, *_DECAY_RANGE)) if before > 0 else 1.0
        previous, position = position, path_position(observation.training, decay=decay)
        if abs(position - previous) < _STEADY:
            break
    means = None
    if start.embedding_mean is not None and end.embedding_mean is not None:
        means = (1 - previous) * start.embedding_mean + previous * end.embedding_mean
    return PathSolution(
        solution,
        previous,
        decay,
        (1 - previous) * start.confidence + previous * end.confidence,
        means,
    )
