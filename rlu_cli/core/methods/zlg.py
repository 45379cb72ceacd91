"""ZLG: counts from the weight gradient's row sums, zero-shot (Geng et al. 2021)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.embedding import implied_embedding
from rlu_cli.core.methods.base import Capabilities, Method, Problem, never, on_simplex
from rlu_cli.core.types import Estimate, FloatArray, HeadUpdate

ABLE = Capabilities(
    batch=True,
    repeating_labels=True,
    any_activation=False,
    several_steps=False,
    trained_model=False,
)
"""ZLG and ZLG+ rest on the same approximation."""


def row_sum_proportions(row_sums: FloatArray, confidence: FloatArray, embedding_sum: float) -> FloatArray:
    """Proportions where all samples share one softmax p̄ and one embedding sum Ō.

        Σ_l ∇W[j, l] ≈ Ō (p̄_j − z_j)   ⇒   z_j = p̄_j − Σ_l ∇W[j, l] / Ō

    Sums to 1, but may be negative. Shape (N,); NaN where Ō is 0.
    """
    if embedding_sum == 0.0:
        return np.full(len(confidence), np.nan)
    return confidence - row_sums / embedding_sum


def solve(problem: Problem) -> Estimate:
    """ZLG with what the update itself says of p̄ and Ō.

        z_j = p̄_j − Σ_l ∇W[j, l] / Ō,    p̄_j = 1/N,    Ō = Σ_l ē_l,    ē = ∇Wᵀ∇b / ‖∇b‖²

    The paper feeds the network N(0, 1) noise for p̄ and Ō. This method is meant to need neither network nor
    data beyond the two heads, so p̄ is an untrained model's uniform softmax, which is what noise gives there,
    and Ō comes from the embedding that the update implies: the client's own, on average, rather than noise's.
    Where ∇W ≈ ∇b ēᵀ this makes z_j ≈ 1/N − ∇b_j, whatever the activation.

    Assumptions: one step, an untrained model, Σ_l e_l away from 0 and the same for all classes.

    Source: Geng et al., Towards General Deep Leakage in Federated Learning, 2021.

    Uses ∇W and ∇b; no auxiliary data.
    """
    N = problem.num_classes
    gradient = problem.gradient
    embedding = implied_embedding(HeadUpdate(gradient.weight, gradient.bias))
    embedding_sum = 0.0 if embedding is None else float(embedding.sum())
    z, notes = on_simplex(row_sum_proportions(problem.row_sums, np.full(N, 1.0 / N), embedding_sum))
    return Estimate(z, {"embedding_sum": embedding_sum}, notes)


ZLG = Method(
    name="zlg",
    summary="weight gradient's row sums over the embedding sum that the update implies; uniform softmax",
    reference="Geng et al., Towards General Deep Leakage in Federated Learning, arXiv 2110.09074, 2021",
    solve=solve,
    needs_end=never,
    capabilities=ABLE,
    needs_bias=True,
)
