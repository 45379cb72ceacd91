"""EBI: greedy counts from the bias gradient, with an empirical impact."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem, never
from rlu_cli.core.methods.greedy import greedy_counts
from rlu_cli.core.types import Estimate


def solve(problem: Problem) -> Estimate:
    """LLG on the bias: every label pulls its class's bias gradient down by the same impact.

        I = Σ_{j: ∇b_j < 0} ∇b_j / total,  followed by `greedy_counts` on ∇b

    Assumptions: that what the samples of other classes do to ∇b_j is negligible. It isn't, by about 1/N a
    sample: rare classes are missed. Exact where all present classes are equally frequent and the softmax is
    uniform. No activation is assumed, nor anything of the model.

    Source: Gat & Sharif, Harmful Bias: A General Label-Leakage Attack on Federated Learning from Bias
    Gradients, AISec 2024, as the baseline; it is `bias-corrected` of Geiping et al.'s breaching.

    Uses ∇b alone; no auxiliary data.
    """
    gradient = -problem.u
    impact = float(np.minimum(gradient, 0.0).sum()) / problem.total
    return Estimate(greedy_counts(gradient, impact, problem.total) / problem.total, {"impact": impact})


EBI = Method(
    name="ebi",
    summary="greedy counts from the bias gradient, impact from its negative values",
    reference=(
        "Gat & Sharif, Harmful Bias: A General Label-Leakage Attack on Federated Learning "
        "from Bias Gradients, AISec 2024"
    ),
    solve=solve,
    needs_end=never,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=True,
        several_steps=True,
        trained_model=False,
    ),
    needs_bias=True,
)
