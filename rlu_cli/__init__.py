"""Audit federated-learning rounds: recover how many samples of each class a client trained on.

The core is importable: ``from rlu_cli import recover_labels``. Names are loaded when first used,
so that importing the package (and ``rlu --help``) costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlu_cli.core.confidence import coefficient_matrix, monte_carlo_confidence
    from rlu_cli.core.metrics import score_counts
    from rlu_cli.core.moments import logit_moments, model_statistics
    from rlu_cli.core.recover import recover_labels
    from rlu_cli.core.simplex import simplex_least_squares
    from rlu_cli.core.types import (
        Head,
        HeadUpdate,
        LocalTraining,
        LogitMoments,
        ModelStatistics,
        Observation,
        Recovery,
    )

_HOMES = {
    "Head": "types",
    "HeadUpdate": "types",
    "LocalTraining": "types",
    "LogitMoments": "types",
    "ModelStatistics": "types",
    "Observation": "types",
    "Recovery": "types",
    "coefficient_matrix": "confidence",
    "logit_moments": "moments",
    "model_statistics": "moments",
    "monte_carlo_confidence": "confidence",
    "recover_labels": "recover",
    "score_counts": "metrics",
    "simplex_least_squares": "simplex",
}

__all__ = [
    "Head",
    "HeadUpdate",
    "LocalTraining",
    "LogitMoments",
    "ModelStatistics",
    "Observation",
    "Recovery",
    "__version__",
    "coefficient_matrix",
    "logit_moments",
    "model_statistics",
    "monte_carlo_confidence",
    "recover_labels",
    "score_counts",
    "simplex_least_squares",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rlu_cli.core.{_HOMES[name]}"), name)
