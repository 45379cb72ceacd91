"""RLU: recovering labels from local updates (Chen & Vikalo, ICML 2024), corrected."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from rlu_cli.core.embedding import embedding_gram
from rlu_cli.core.methods.base import Capabilities, Method, Problem, solution_notes, swing_notes
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.search import MeanSimulator, posterior_search
from rlu_cli.core.types import Estimate, FloatArray, ModelStatistics, Observation

_simulators: WeakKeyDictionary[ModelStatistics, tuple[object, MeanSimulator]] = WeakKeyDictionary()
"""Of the client before, for the next one of the same global model that trained alike."""


def solve(problem: Problem) -> Estimate:
    """Label proportions from the bias update and the erroneous confidence.

        E[Δb + h] = (η/B) Σ_τ ρ^τ A^τ N^τ,   A^τ = I − (S^τ)ᵀ          (Eq. eq_b, eq_b_multi, Table 1)

    With all batches drawn from one class mix z this is u = Ā z with u = (Δb + h)/(ηΣρ) and
    Ā = Σ_τ ρ^τ A^τ / Σ_τ ρ^τ, solved by least squares on the simplex. S is known at both ends of
    training, S^1 from the global and S^{m+1} from the local model; in between it is interpolated, where
    the gradients were taken (`solve_on_path`; the paper's plain average is the limit for many steps of
    plain SGD with a constant gradient). With search iterations T > 0 the posterior
    search (Alg. 2) then refines the counts, and they are kept only where the simulated local model
    comes closer to the real one.
    """
    observation = problem.observation
    solution = problem.path.solution
    proportions = solution.z
    diagnostics: dict[str, float | bool | int | None] = {
        "residual": solution.residual,
        "duality_gap": solution.gap,
        "solver_certified": solution.certified,
        "path_position": problem.path.position,
    }
    if observation.search_iterations > 0 and observation.training.steps > 1 and observation.end is not None:
        proportions, searched = _search(observation, proportions)
        diagnostics.update(searched)
    complete = observation.training.steps == 1 or observation.end is not None
    swing = diagnostics["swing"] = problem.swing(proportions)
    notes = (*solution_notes(solution, known_to_the_end=complete), *swing_notes(swing))
    return Estimate(proportions, diagnostics, notes)


def _search(
    observation: Observation, proportions: FloatArray
) -> tuple[FloatArray, dict[str, float | bool | int | None]]:
    """Alg. 2, started from the least-squares counts; keeps the real-valued solution unless it loses."""
    assert observation.end is not None
    training = observation.training
    first = round_to_total(proportions, training.samples)
    constant: FloatArray | float = 0.0
    if observation.constant_gradient is not None:
        k = observation.constant_gradient
        constant = observation.start.embeddings_for("the posterior search")[0] @ k.weight.T
        if k.bias is not None:
            constant = constant + k.bias
    (result,) = posterior_search(
        _simulator(observation),
        observation.end.moments.mean[None],
        first[None],
        observation.search_iterations,
        constant=constant,
    )
    diagnostics: dict[str, float | bool | int | None] = {
        "search_mismatch": result.mismatch,
        "search_initial_mismatch": result.initial_mismatch,
        "search_moves": result.moves,
    }
    if result.moves == 0:
        return proportions, diagnostics
    return np.asarray(result.counts / training.samples), diagnostics


def _simulator(observation: Observation) -> MeanSimulator:
    start, has_bias = observation.start, observation.head.bias is not None
    key = (observation.training, has_bias, observation.samples, observation.seed, observation.device)
    known, simulator = _simulators.get(start, (None, None))
    if simulator is None or known != key:
        simulator = MeanSimulator(
            start.moments,
            embedding_gram(start, has_bias=has_bias),
            observation.training,
            samples=observation.samples,
            seed=observation.seed,
            device=observation.device,
        )
        _simulators[start] = (key, simulator)
    return simulator


RLU = Method(
    name="rlu",
    summary="least squares on the bias update with Monte Carlo erroneous confidence",
    reference="Chen & Vikalo, Recovering Labels from Local Updates in Federated Learning, ICML 2024",
    solve=solve,
    needs_end=lambda training: training.steps > 1,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=True,
        trained_model=True,
    ),
    uses_auxiliary=True,
)
