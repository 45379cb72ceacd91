"""RLU: recovering labels from local updates (Chen & Vikalo, ICML 2024), corrected."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np

from rlu_cli.core.embedding import embedding_gram
from rlu_cli.core.methods.base import Capabilities, Method, Problem, solution_notes, swing_notes
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.search import MeanSimulator, SearchResult, posterior_search
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
    return solve_together([problem])[0]


def solve_together(problems: Sequence[Problem]) -> list[Estimate]:
    """`solve` of several clients; those that trained alike from one model are searched at once."""
    found = _searched(problems)
    return [_estimate(problem, found.get(index)) for index, problem in enumerate(problems)]


def _estimate(problem: Problem, searched: SearchResult | None) -> Estimate:
    """The least-squares proportions, unless the search came nearer to the local model than they do."""
    observation, solution = problem.observation, problem.path.solution
    proportions = solution.z
    diagnostics: dict[str, float | bool | int | None] = {
        "residual": solution.residual,
        "duality_gap": solution.gap,
        "solver_certified": solution.certified,
        "path_position": problem.path.position,
    }
    if searched is not None:
        diagnostics["search_mismatch"] = searched.mismatch
        diagnostics["search_initial_mismatch"] = searched.initial_mismatch
        diagnostics["search_moves"] = searched.moves
        if searched.moves:
            proportions = np.asarray(searched.counts / problem.total)
    complete = observation.training.steps == 1 or observation.end is not None
    swing = diagnostics["swing"] = problem.swing(proportions)
    notes = (*solution_notes(solution, known_to_the_end=complete), *swing_notes(swing))
    return Estimate(proportions, diagnostics, notes)


def searches(observation: Observation) -> bool:
    """Whether the posterior search looks at such a client."""
    several = observation.training.steps > 1 and observation.end is not None
    return several and observation.search_iterations > 0


def _searched(problems: Sequence[Problem]) -> dict[int, SearchResult]:
    """Alg. 2, started from the least-squares counts, of the clients that it is for."""
    groups: dict[object, list[int]] = {}
    for index, problem in enumerate(problems):
        if searches(problem.observation):
            alike = problem.observation.start, _alike(problem.observation)
            groups.setdefault(alike, []).append(index)
    found: dict[int, SearchResult] = {}
    for members in groups.values():
        first = problems[members[0]].observation
        results = posterior_search(
            _simulator(first),
            np.stack([_final_mean(problems[index].observation) for index in members]),
            np.stack([round_to_total(problems[i].path.solution.z, problems[i].total) for i in members]),
            first.search_iterations,
            constant=np.stack([_constant(problems[index].observation) for index in members]),
        )
        found |= zip(members, results, strict=True)
    return found


def _final_mean(observation: Observation) -> FloatArray:
    assert observation.end is not None
    return observation.end.moments.mean


def _constant(observation: Observation) -> FloatArray:
    """How the scheme's constant gradient moves the mean logits, shape (N, N)."""
    k = observation.constant_gradient
    if k is None:
        return np.zeros_like(observation.start.moments.mean)
    moved = observation.start.embeddings_for("the posterior search")[0] @ k.weight.T
    return np.asarray(moved if k.bias is None else moved + k.bias)


def _alike(observation: Observation) -> object:
    """What clients of one global model share who are searched at once."""
    return (
        observation.training,
        observation.head.bias is not None,
        observation.samples,
        observation.seed,
        observation.device,
        observation.search_iterations,
    )


def _simulator(observation: Observation) -> MeanSimulator:
    start, key = observation.start, _alike(observation)
    known, simulator = _simulators.get(start, (None, None))
    if simulator is None or known != key:
        simulator = MeanSimulator(
            start.moments,
            embedding_gram(start, has_bias=observation.head.bias is not None),
            observation.training,
            samples=observation.samples,
            seed=observation.seed,
            device=observation.device,
            keep=observation.kept_bytes,
        )
        _simulators[start] = (key, simulator)
    return simulator


RLU = Method(
    name="rlu",
    summary="least squares on the bias update with Monte Carlo erroneous confidence",
    reference="Chen & Vikalo, Recovering Labels from Local Updates in Federated Learning, ICML 2024",
    solve=solve,
    solve_together=solve_together,
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
