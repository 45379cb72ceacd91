"""iLRG: instance-wise label restoration from gradients (Ma et al. 2023)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.embedding import implied_embedding
from rlu_cli.core.methods.base import Capabilities, Method, Problem, never, on_simplex
from rlu_cli.core.moments import softmax
from rlu_cli.core.types import Estimate, FloatArray, Head, HeadUpdate

_LARGEST = 1e10
"""Bound of a recovered embedding's entries, as in the authors' code, so that ∇b_j ≈ 0 stays finite."""


def solve(problem: Problem) -> Estimate:
    """Each class's embedding, from it the softmax, from that a linear system for the counts.

        ē_j = ∇W[j, :] / ∇b_j,    P[j] = softmax(W ē_j + b)
        Σ_j z_j = 1,    Σ_j P[j, i] z_j − z_i = ∇b_i   for all i

    solved by the pseudo-inverse: N + 1 equations for N unknowns. It is RLU's system with S replaced by
    what the update says of itself, and without the simplex.

    Assumptions: one step; samples of a class share their embedding; row j is mostly of class j, which fails
    for absent classes and once the model is trained. Where ∇b_j is exactly 0 the least-squares embedding of
    all rows takes the place of ē_j.

    Negative values become 0, then the counts are scaled to the total and rounded by largest remainder. The
    authors' code rounds each by itself, sets every count above the total to 0, and so reports counts of
    another sum; its optional correction of the sum mends counts that are too many but not too few.

    Source: Ma, Sun, Cui, Li, Guo & Liu, Instance-wise Batch Label Restoration via Gradients in Federated
    Learning, ICLR 2023.

    Uses ∇W, ∇b and the global W, b; no auxiliary data.
    """
    head, gradient = problem.observation.head, problem.gradient
    assert head.bias is not None and gradient.bias is not None
    N = problem.num_classes
    P = softmax(class_embeddings(gradient) @ head.weight.T + head.bias)
    system = np.vstack((np.ones((1, N)), P.T - np.eye(N)))
    raw = np.linalg.pinv(system) @ np.concatenate(([1.0], gradient.bias))
    z, notes = on_simplex(raw)
    return Estimate(z, {"negative_mass": float(-np.minimum(raw, 0.0).sum())}, notes)


def class_embeddings(gradient: Head) -> FloatArray:
    """ē_j = ∇W[j, :] / ∇b_j, shape (N, L), bounded; the embedding of all rows where ∇b_j is 0."""
    bias = gradient.bias
    assert bias is not None
    mean = implied_embedding(HeadUpdate(gradient.weight, bias))
    embeddings = np.zeros_like(gradient.weight)
    if mean is not None:
        embeddings[:] = mean
    moved = bias != 0
    with np.errstate(over="ignore"):
        embeddings[moved] = gradient.weight[moved] / bias[moved, None]
    return np.clip(embeddings, -_LARGEST, _LARGEST)


ILRG = Method(
    name="ilrg",
    summary="linear system of softmax values at the class embeddings that the gradient itself implies",
    reference=(
        "Ma et al., Instance-wise Batch Label Restoration via Gradients in Federated Learning, ICLR 2023"
    ),
    solve=solve,
    needs_end=never,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=False,
        trained_model=False,
    ),
    needs_bias=True,
)
