"""RLG: revealing labels from gradients by linear separation (Dang et al. 2021)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem, never, on_simplex
from rlu_cli.core.schemes import pace
from rlu_cli.core.types import Estimate, FloatArray, Note

_SEPARATED = 0.5
"""Least −r·c_i of a class that occurs; a true one reaches 1/√2, see `solve`."""


def solve(problem: Problem) -> Estimate:
    """The classes that a hyperplane separates from all others share the labels evenly.

        ∇Wᵀ = Eᵀ Gᵀ / B,  G[j, i] = s_j(x_i) − 1{y_i = j}:   some r has r·∇Wᵀ = G[:, i] for every sample i
        ∇Wᵀ = P Q C (SVD, first k right singular vectors: C is k × N)
        class j occurs   ⇔   there is r with r·c_j < 0 and r·c_j' ≥ 0 for all j' ≠ j

    A linear program for every class maximises −r·c_j with |r| ≤ 1. C has orthonormal rows, so the r of a
    sample, normalised, gives G[y, i]/‖G[:, i]‖ ≤ −1/√2, as −G[y, i] is the sum of the other entries: a
    class with less than 0.5 doesn't occur.

    Assumptions: fewer samples than min(N, L), so that their embeddings are independent and N points in k
    dimensions can't all be separated, and at least two absent classes. No activation is assumed, and a sum
    over steps is a product of the same kind. Repeated labels are no obstacle, but how often each class
    occurs stays unknown.

    k is the number of samples, or the rank of ∇W above the rounding error of float32 checkpoints where that
    is lower: directions of pure rounding separate anything. The authors' code filters the classes with a
    perceptron, restricts the program to the 199 largest columns and, for one network, adds the classes that
    GradInversion finds; none of that is needed here.

    Source: Dang, Thakkar, Ramaswamy, Mathews, Chin & Beaufays, Revealing and Protecting Labels in Distributed
    Training, NeurIPS 2021.

    Uses ∇W and the global W (its rounding error); no auxiliary data.
    """
    N, L = problem.gradient.weight.shape
    C = _label_space(problem)
    if len(C) >= N - 1:  # all of the space where Σ_j c_j = 0: r = C(1/N − 1_j) separates any j
        present = np.ones(N)
    else:
        present = np.array([_separates(C, j) for j in range(N)], dtype=np.float64)
    z, notes = on_simplex(present)
    found = int(present.sum())
    if found < problem.total < min(N, L):
        note = Note(
            "assumes-unique-labels",
            f"rlg tells which classes occur, not how often: {problem.total} samples have left a trace in "
            f"{found} of them, which share the labels evenly",
        )
        notes = (*notes, note)
    if problem.total >= min(N, L):
        note = Note(
            "assumes-few-samples",
            f"rlg assumes fewer samples than classes and embedding values ({N} and {L}), and the client saw "
            f"{problem.total}",
        )
        notes = (*notes, note)
    return Estimate(z, {"rank": len(C)}, notes)


def _label_space(problem: Problem) -> FloatArray:
    """C, the first k right singular vectors of ∇Wᵀ, shape (k, N)."""
    weight = problem.gradient.weight
    _, values, C = np.linalg.svd(weight.T, full_matrices=False)
    steps = pace(problem.observation.training)
    entry = float(np.finfo(np.float32).eps / 2 * np.abs(problem.observation.head.weight).max()) / abs(steps)
    noise = entry * float(np.sqrt(weight.shape).sum())  # spectral norm of independent errors
    floor = max(noise, float(values[0]) * max(weight.shape) * float(np.finfo(np.float64).eps))
    rank = int(np.count_nonzero(values > floor))
    return np.asarray(C[: max(1, min(problem.total, rank))])


def _separates(C: FloatArray, j: int) -> bool:
    """Whether r with |r| ≤ 1 has r·c_j ≤ −0.5 and r·c_j' ≥ 0 for all other columns."""
    if np.abs(C[:, j]).sum() < _SEPARATED:  # the most that any r could reach
        return False
    from scipy.optimize import linprog

    others = np.delete(C, j, axis=1).T
    found = linprog(C[:, j], A_ub=-others, b_ub=np.zeros(len(others)), bounds=(-1, 1), method="highs")
    return bool(found.status == 0 and -found.fun >= _SEPARATED)


RLG = Method(
    name="rlg",
    summary="the classes that are linearly separable in the row space of the weight gradient",
    reference="Dang et al., Revealing and Protecting Labels in Distributed Training, NeurIPS 2021",
    solve=solve,
    needs_end=never,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=False,
        any_activation=True,
        several_steps=True,
        trained_model=True,
    ),
)
