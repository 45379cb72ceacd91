"""iDLG: the label of one sample from the signs of its gradient (Zhao, Mopuri & Bilen 2020)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem, never
from rlu_cli.core.types import Estimate


def solve(problem: Problem) -> Estimate:
    """All labels are of the class with the smallest row sum.

        ∇W[j, :] = (s_j − 1{y = j}) e   ⇒   y = argmin_j Σ_l ∇W[j, l]

    Assumptions: one sample, one step, e ≥ 0 (then only the row of y is negative). The paper states it as
    the row whose inner product with all others is not positive; the sum is what is commonly run. For a
    batch, there is one answer all the same, and it gets every label.

    Source: Zhao, Mopuri & Bilen, iDLG: Improved Deep Leakage from Gradients, 2020.

    Uses ∇W alone; no auxiliary data.
    """
    z = np.zeros(problem.num_classes)
    z[int(np.argmin(problem.row_sums))] = 1.0
    return Estimate(z)


IDLG = Method(
    name="idlg",
    summary="the class whose row of the weight gradient has the smallest sum",
    reference="Zhao, Mopuri & Bilen, iDLG: Improved Deep Leakage from Gradients, arXiv 2001.02610, 2020",
    solve=solve,
    needs_end=never,
    capabilities=Capabilities(
        batch=False,
        repeating_labels=False,
        any_activation=False,
        several_steps=False,
        trained_model=True,
    ),
)
