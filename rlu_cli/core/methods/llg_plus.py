"""LLG+: LLG with impact and offset measured on auxiliary data (Wainakh et al. 2022)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Method, Problem, never
from rlu_cli.core.methods.greedy import greedy_counts
from rlu_cli.core.methods.llg import ABLE
from rlu_cli.core.types import Estimate


def solve(problem: Problem) -> Estimate:
    """Impact and offset are the mean row sums of batches of one class.

        G[n, j] = E[(s_j − 1{n = j}) Σ_l e_l | class n]         (row sums of a batch of class n)
        I = (1 + 1/N) mean_n G[n, n] / total,    s_j = mean_{n ≠ j} G[n, j]
        g_j = Σ_l ∇W[j, l] ≈ N_j I + s_j

    followed by `greedy_counts`. G is taken over all auxiliary samples at once; the authors average ten random
    batches of each class, which has the same expectation.

    Assumptions: one step, e ≥ 0, and one impact for all classes. Where the softmax is uniform s is exact and
    I too small by 1/N²: exact up to some N² samples of a class.

    The authors' code sums the gradients of several local steps, yet takes impact and offset of a mean one;
    here both are of the mean.

    Source: Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PETS 2022.

    Uses ∇W and the global model's ``gradient_sum``.
    """
    N, total = problem.num_classes, problem.total
    _, G = problem.observation.start.embeddings_for("llg+")
    own = np.diag(G)
    impact = (1 + 1 / N) * float(own.mean()) / total
    offset = (G.sum(axis=0) - own) / (N - 1)
    counts = greedy_counts(problem.row_sums, impact, total, offset=offset)
    return Estimate(counts / total, {"impact": impact})


LLG_PLUS = Method(
    name="llg+",
    summary="llg with the impact of a label and the offset of a class measured on auxiliary data",
    reference="Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PETS 2022",
    solve=solve,
    needs_end=never,
    capabilities=ABLE,
    uses_auxiliary=True,
)
