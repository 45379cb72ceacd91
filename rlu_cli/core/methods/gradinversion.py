"""GradInversion's label step: the rows with the smallest entries (Yin et al. 2021)."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Capabilities, Method, Problem, never
from rlu_cli.core.types import Estimate, Note


def solve(problem: Problem) -> Estimate:
    """One label for each of the ``total`` classes whose row has the smallest minimum.

        v_j = min_l ∇W[j, l],    labels = the classes of the ``total`` smallest v

    Assumptions: unique labels, total ≤ N, one step, e ≥ 0 (a row is negative somewhere only if its class
    occurs). With more samples than classes the paper has no answer; here the classes with v_j < 0 then
    share the labels evenly.

    Source: Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021.

    Uses ∇W alone; no auxiliary data.
    """
    minima = problem.gradient.weight.min(axis=1)
    total, N = problem.total, problem.num_classes
    negative = int(np.count_nonzero(minima < 0))
    chosen = np.argsort(minima, kind="stable")[: total if total <= N else max(negative, 1)]
    z = np.zeros(N)
    z[chosen] = 1.0 / len(chosen)
    notes = []
    if negative < total <= N:
        message = (
            f"gradinversion assumes that no two samples share a label and names {total} classes, but "
            f"{total} samples have left a trace in {negative} of them: the others are guessed"
        )
        notes.append(Note("assumes-unique-labels", message))
    return Estimate(z, warnings=tuple(notes))


GRADINVERSION = Method(
    name="gradinversion",
    summary="one label for each of the classes with the smallest entries of the weight gradient",
    reference="Yin et al., See through Gradients: Image Batch Recovery via GradInversion, CVPR 2021",
    solve=solve,
    needs_end=never,
    capabilities=Capabilities(
        batch=True,
        repeating_labels=False,
        any_activation=False,
        several_steps=False,
        trained_model=True,
    ),
)
