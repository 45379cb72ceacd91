"""ZLG+: ZLG with softmax and embedding sum measured on auxiliary data (Geng et al. 2021)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Method, Problem, never, on_simplex
from rlu_cli.core.methods.zlg import ABLE, row_sum_proportions
from rlu_cli.core.types import Estimate, FloatArray, ModelStatistics


def pooled(statistics: ModelStatistics, method: str) -> tuple[FloatArray, float]:
    """p̄ = E[softmax], shape (N,), and Ō = E[Σ_l e_l] over all auxiliary samples, of whatever class."""
    means, _ = statistics.embeddings_for(method)
    counts = statistics.moments.counts
    weights = counts / counts.sum()
    return weights @ statistics.confidence, float(weights @ means.sum(axis=1))


def solve(problem: Problem) -> Estimate:
    """One softmax and one embedding sum for all samples.

        z_j = p̄_j − Σ_l ∇W[j, l] / Ō,    p̄_j = E[s_j],    Ō = E[Σ_l e_l]

    over all auxiliary samples, on the global model. Negative values become 0, then largest remainder.

    Assumptions: one step; all classes share p̄ and Ō (an untrained model); Ō well away from 0 (e ≥ 0).
    p̄ is the mean over all classes, as Geng et al. define it; the RLU paper's experiments took each class's
    own confidence instead, which ruins it on trained models.

    Source: Geng et al., Towards General Deep Leakage in Federated Learning, 2021.

    Uses ∇W and the global model's S and mean embeddings.
    """
    confidence, embedding_sum = pooled(problem.observation.start, "zlg+")
    z, notes = on_simplex(row_sum_proportions(problem.row_sums, confidence, embedding_sum))
    return Estimate(np.asarray(z), {"embedding_sum": embedding_sum}, notes)


ZLG_PLUS = Method(
    name="zlg+",
    summary="zlg with the mean softmax and the mean embedding sum of auxiliary data",
    reference="Geng et al., Towards General Deep Leakage in Federated Learning, arXiv 2110.09074, 2021",
    solve=solve,
    needs_end=never,
    capabilities=ABLE,
    uses_auxiliary=True,
)
