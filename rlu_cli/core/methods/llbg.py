"""LLBG: label leakage from bias gradients, with the impact that theory gives (Gat & Sharif 2024)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem, never
from rlu_cli.core.methods.greedy import greedy_counts
from rlu_cli.core.trained import is_trained
from rlu_cli.core.types import Estimate


def solve(problem: Problem) -> Estimate:
    """Each label pulls its class's bias gradient down by its own impact.

        z_j (1 − c_j) ≈ 1/N − ∇b_j,    I_j = −(1 − c_j) / total,    c_j = S[j, j]  (0 for untrained models)

    followed by `greedy_counts` on ∇b; the offset 1/N is the same for all classes and changes nothing.

    c is the model's confidence in the right class. The authors let the user choose between 0 for untrained
    models, a constant, and averages over auxiliary data; here it is 0 while the mean own confidence is below
    2/N (0.75 of two classes), and the auxiliary averages from there on. (With a uniform softmax
    z_j = 1/N − ∇b_j exactly.)

    Assumptions: samples of other classes push every class up by 1/N in all. No activation is assumed.

    Source: Gat & Sharif, Harmful Bias: A General Label-Leakage Attack on Federated Learning from Bias
    Gradients, AISec 2024.

    Uses ∇b and the diagonal of the global model's S.
    """
    N, total = problem.num_classes, problem.total
    start = problem.observation.start
    confidence = np.diag(start.confidence) if is_trained(start) else np.zeros(N)
    counts = greedy_counts(-problem.u, -(1 - confidence) / total, total, offset=1 / N)
    return Estimate(counts / total)


LLBG = Method(
    name="llbg",
    summary="greedy counts from the bias gradient, impact from the model's confidence in each class",
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
        trained_model=True,
    ),
    needs_bias=True,
    uses_auxiliary=True,
)
