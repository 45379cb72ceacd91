"""What a method assumes and the observation contradicts."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.methods.base import Method, Problem
from rlu_cli.core.trained import is_trained, own_confidence
from rlu_cli.core.types import FloatArray, Note

_NEGATIVE_SLACK = 1e-6
"""Negative values of the mean embeddings, relative to the largest, that are rounding."""


def negative_share(embedding_mean: FloatArray) -> float:
    """Share of (class, unit) pairs whose mean embedding is negative; 0 after ReLU and sigmoid."""
    slack = _NEGATIVE_SLACK * float(np.abs(embedding_mean).max())
    return float(np.mean(embedding_mean < -slack))


def assumption_notes(method: Method, problem: Problem) -> tuple[Note, ...]:
    """A warning for each capability that the method lacks and this observation asks for."""
    able = method.capabilities
    if able is None:
        return ()
    notes: list[Note] = []
    training, start = problem.observation.training, problem.observation.start
    name, total, N = method.name, problem.total, problem.num_classes
    if not able.batch and total > 1:
        notes.append(Note("assumes-one-sample", f"{name} is made for one sample, and the client saw {total}"))
    elif not able.repeating_labels and total > N:
        notes.append(
            Note(
                "assumes-unique-labels",
                f"{name} assumes that no two samples share a label, but {total} samples of {N} classes do: "
                "it tells at best which classes occur, not how often",
            )
        )
    if not able.any_activation and start.embedding_mean is not None:
        share = negative_share(start.embedding_mean)
        if share > 0:
            notes.append(
                Note(
                    "assumes-nonnegative-embedding",
                    f"{name} assumes embeddings of at least 0 (ReLU, sigmoid), but {share:.0%} of the mean "
                    "auxiliary embeddings are negative",
                )
            )
    if not able.several_steps and training.steps > 1:
        notes.append(
            Note(
                "assumes-one-step",
                f"{name} assumes one gradient of the global model, and the client took {training.steps} "
                "steps: it is given their mean",
            )
        )
    if not able.trained_model and is_trained(start):
        notes.append(
            Note(
                "assumes-untrained-model",
                f"{name} assumes a model that can't tell the classes apart, but this one's mean confidence "
                f"in the right class is {own_confidence(start):.2f}",
            )
        )
    return tuple(notes)
