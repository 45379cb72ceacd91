"""Which method ``auto`` stands for."""

from __future__ import annotations

from rlu_cli.core.methods.base import Method
from rlu_cli.core.methods.gls import GLS
from rlu_cli.core.methods.rlu import RLU
from rlu_cli.core.methods.surrogate import SURROGATE
from rlu_cli.core.residuals import MOST_CLASSES
from rlu_cli.core.types import IntArray, LocalTraining

AUTO = "auto"

_FEWEST_SAMPLES = 10
"""Of fewer auxiliary samples a class on average, the covariances say too little."""


def best_method(
    training: LocalTraining, *, has_bias: bool, counts: IntArray | None, can_replay: bool
) -> Method:
    """`gls` where it has all that it needs, else `rlu`; `surrogate` for optimisers other than SGD.

    Measured, gls is at least as good as rlu there, and it has error bars; see "Error bars" in the docs.

    Parameters
    ----------
    has_bias : whether the output layer has one
    counts : auxiliary samples of each class that residual moments are known of, None where they aren't
    can_replay : whether the client's training can be replayed, which several steps need, within seconds
    """
    if training.optimizer != "sgd":
        return SURROGATE
    if counts is None or not has_bias:
        return RLU
    enough = counts.sum() >= _FEWEST_SAMPLES * len(counts) and len(counts) <= MOST_CLASSES
    return GLS if enough and (training.steps == 1 or can_replay) else RLU
