"""ZLG+ interpolated over the local steps (Dimitrov et al. 2022)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem, on_simplex
from rlu_cli.core.methods.zlg import row_sum_proportions
from rlu_cli.core.methods.zlg_plus import pooled
from rlu_cli.core.types import Estimate, Note


def solve(problem: Problem) -> Estimate:
    """ZLG+ averaged over the way from the global to the local model.

        p̄^k = (1 − k/m) p̄ + (k/m) p̄',    Ō^k = (1 − k/m) Ō + (k/m) Ō',    k = 0..m − 1
        z_j = (1/m) Σ_k (p̄^k_j − Σ_l ∇W[j, l] / Ō^k)

    with p̄, Ō of the global and p̄', Ō' of the local model.

    Assumptions: those of ZLG+ at every step, and softmax and embedding that move evenly. One step is ZLG+.
    The authors measure on noise, as ZLG does; here it is the auxiliary data.

    Source: Dimitrov, Balunović, Konstantinov & Vechev, Data Leakage in Federated Averaging, TMLR 2022.

    Uses ∇W and both models' S and mean embeddings.
    """
    observation = problem.observation
    m = observation.training.steps
    first = last = pooled(observation.start, "dimitrov")
    notes: tuple[Note, ...] = ()
    if observation.end is not None:
        last = pooled(observation.end, "dimitrov")
    elif m > 1:
        message = "the local model's statistics are missing, so the global model's stand for all steps"
        notes = (Note("local-statistics-missing", message),)
    steps = []
    for position in np.arange(m) / m:
        confidence, embedding_sum = (
            (1 - position) * a + position * b for a, b in zip(first, last, strict=True)
        )
        steps.append(row_sum_proportions(problem.row_sums, np.asarray(confidence), float(embedding_sum)))
    z, failed = on_simplex(np.mean(steps, axis=0))
    return Estimate(z, warnings=(*notes, *failed))


DIMITROV = Method(
    name="dimitrov",
    summary="zlg+ averaged over softmax and embedding sums interpolated from the global to the local model",
    reference="Dimitrov et al., Data Leakage in Federated Averaging, TMLR 2022",
    solve=solve,
    needs_end=lambda training: training.steps > 1,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=True,
        any_activation=False,
        several_steps=True,
        trained_model=False,
    ),
    uses_auxiliary=True,
)
