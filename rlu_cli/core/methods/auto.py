"""Which method ``auto`` stands for."""

from __future__ import annotations

from rlu_cli.core.methods.base import Method
from rlu_cli.core.methods.gls import GLS, ResidualModel, foreseen_error
from rlu_cli.core.methods.regression import REGRESSION, out_of_scope
from rlu_cli.core.methods.rlu import RLU
from rlu_cli.core.residuals import MOST_CLASSES, ResidualMoments
from rlu_cli.core.types import LocalTraining

AUTO = "auto"

_FEWEST_SAMPLES = 10
"""Of fewer auxiliary samples a class on average, the covariances say too little."""


_EXACT = 0.5
"""Samples that `gls` may expect to get wrong of a client before a regression is worth its seconds."""


def best_method(
    training: LocalTraining,
    *,
    has_bias: bool,
    residuals: ResidualMoments | None,
    has_samples: bool,
    can_replay: bool,
) -> Method:
    """`regression` for one step of a trained model, else `gls` where it has all that it needs, else `rlu`.

    Measured, each is at least as good there as the next, and the first two have error bars; see "Error bars"
    in the docs. A model is trained enough where `gls` expects of itself to miss a sample.

    Parameters
    ----------
    has_bias : whether the output layer has one
    residuals : single auxiliary samples' moments under the global model, None where they aren't known
    has_samples : whether the samples' own logits are known too
    can_replay : whether the client's training can be replayed, which several steps need, within seconds
    """
    if residuals is None or not has_bias:
        return RLU
    counts = residuals.counts
    if counts.sum() < _FEWEST_SAMPLES * len(counts) or len(counts) > MOST_CLASSES:
        return RLU
    if training.steps > 1:
        return GLS if can_replay else RLU
    if not has_samples or out_of_scope(counts, training) is not None:
        return GLS
    missed = training.samples * foreseen_error(ResidualModel([(1.0, residuals)], training))
    return GLS if missed <= _EXACT else REGRESSION
