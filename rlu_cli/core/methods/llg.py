"""LLG: label leakage from gradients, from the gradient alone (Wainakh et al. 2022)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem, never
from rlu_cli.core.methods.greedy import greedy_counts
from rlu_cli.core.types import Estimate

ABLE = Capabilities(
    batch=True,
    repeating_labels=True,
    any_activation=False,
    several_steps=False,
    trained_model=True,
)
"""LLG and LLG+ rest on the same two properties."""


def solve(problem: Problem) -> Estimate:
    """Every label pulls its class's row sum down by the same impact.

        g_j = Σ_l ∇W[j, l] ≈ N_j I + s_j,    I = (1 + 1/N) Σ_{j: g_j < 0} g_j / total,    s = 0

    followed by `greedy_counts`. With the mean gradient over the steps, and all their samples as total, I is
    the impact on that mean.

    Assumptions: one step, e ≥ 0, and that the pull on absent classes is small: where many classes occur, I is
    too small by about (1 − present/N), which favours the frequent ones. Exact where all present classes are
    equally frequent and the softmax is uniform.

    Source: Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PETS 2022.

    Uses ∇W alone; no auxiliary data.
    """
    g = problem.row_sums
    impact = (1 + 1 / problem.num_classes) * float(np.minimum(g, 0.0).sum()) / problem.total
    return Estimate(greedy_counts(g, impact, problem.total) / problem.total, {"impact": impact})


LLG = Method(
    name="llg",
    summary="greedy counts from the weight gradient's row sums, impact from the negative ones",
    reference="Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PETS 2022",
    solve=solve,
    needs_end=never,
    capabilities=ABLE,
)
