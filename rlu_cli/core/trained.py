"""Whether a model tells classes apart."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.types import ModelStatistics

_TRAINED = 2.0
"""Mean own confidence, relative to chance 1/N, from which a model counts as trained; halfway from chance to
certainty where that is less."""


def own_confidence(statistics: ModelStatistics) -> float:
    """mean_n S[n, n]: what the model gives the right class, 1/N by chance."""
    return float(np.mean(np.diag(statistics.confidence)))


def shows_training(confidence: float, num_classes: int) -> bool:
    """Whether a model with this `own_confidence` tells classes apart: more than 2/N, or (1 + 1/N)/2."""
    return confidence > min(_TRAINED / num_classes, (1 + 1 / num_classes) / 2)


def is_trained(statistics: ModelStatistics) -> bool:
    """`shows_training` of a model's own statistics."""
    return shows_training(own_confidence(statistics), statistics.num_classes)
