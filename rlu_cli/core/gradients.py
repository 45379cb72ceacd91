"""What the gradients did to the head: the update without drift, over the sum of its steps."""

from __future__ import annotations

import numpy as np

from rlu_cli.core.embedding import weight_direction
from rlu_cli.core.schemes import drift, pace
from rlu_cli.core.types import FloatArray, Head, HeadUpdate, Observation


def without_drift(observation: Observation) -> HeadUpdate:
    """Δ + h of the whole head: what the samples' gradients did, without weight decay and constants.

    h is linear in the global value and in the scheme's constant gradient, so two numbers give it for
    all of W and b. Adam has no such h: its update is left as it is.
    """
    training, update, head = observation.training, observation.update, observation.head
    if training.optimizer != "sgd":
        return update
    decay = float(drift(training, initial=np.ones(())))
    pull = float(drift(training, initial=np.zeros(()), constant=1.0))
    weight = update.weight + decay * head.weight
    bias = None if update.bias is None or head.bias is None else update.bias + decay * head.bias
    constant = observation.constant_gradient
    if constant is not None:
        weight = weight + pull * constant.weight
        if bias is not None and constant.bias is not None:
            bias = bias + pull * constant.bias
    return HeadUpdate(weight, bias)


def normalised_update(observation: Observation, update: HeadUpdate | None = None) -> FloatArray:
    """u = (Δb + h) / (η Σ_τ ρ^τ), shape (N,): what a mean step of rate 1 would have done to the bias.

    Of Adam's, which isn't linear in the gradients, Δb / Σ_τ η_τ.

    For a head without bias, Δb + h is read off ΔW + h along the unit direction (`unit_direction`), or where
    that is unknown or the update has noise along the auxiliary mean embedding.

    Parameters
    ----------
    update : Δ + h, where it is known already
    """
    update = without_drift(observation) if update is None else update
    change = update.bias
    if change is None:
        change = update.weight @ _bias_direction(observation)
    return change / pace(observation.training)


def mean_gradient(observation: Observation, update: HeadUpdate | None = None) -> Head:
    """∇ = −(Δ + h) / (η Σ_τ ρ^τ) of W and b: the gradients of the steps, averaged with weights ρ.

    A head without bias gets the ∇b that `normalised_update` reads off its weight.

    Parameters
    ----------
    update : Δ + h, where it is known already
    """
    update = without_drift(observation) if update is None else update
    scale = -1.0 / pace(observation.training)
    return Head(scale * update.weight, -normalised_update(observation, update))


def _bias_direction(observation: Observation) -> FloatArray:
    """Along which the weight of a head without bias is looked at, shape (L,)."""
    start, end = observation.start, observation.end
    if start.unit is not None and observation.noise_std == 0:
        return start.unit.direction
    ends = (start,) if end is None else (start, end)
    purpose = "an output layer without a bias"
    return weight_direction(np.mean([end.embeddings_for(purpose)[0] for end in ends], axis=0))
