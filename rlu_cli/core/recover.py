"""From an observed round to label counts: what every method shares."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlu_cli.core.checks import (
    check_embedding,
    check_heads,
    check_misfit,
    check_moved,
    check_size,
    check_update,
)
from rlu_cli.core.coarse import check_coarse, storage_resolution
from rlu_cli.core.embedding import embedding_match, subtract_heads
from rlu_cli.core.gradients import mean_gradient, normalised_update, without_drift
from rlu_cli.core.methods import AUTO, Method, best_method, get_method
from rlu_cli.core.methods.assumptions import assumption_notes, own_confidence
from rlu_cli.core.methods.base import Problem, check_optimizer
from rlu_cli.core.misfit import misfit, motion
from rlu_cli.core.noise import normalised_noise
from rlu_cli.core.rounding import round_to_total
from rlu_cli.core.schemes import check_training
from rlu_cli.core.types import (
    Estimate,
    Head,
    HeadUpdate,
    Observation,
    Recovery,
)
from rlu_cli.core.unit_direction import stands_for_bias
from rlu_cli.core.update_size import size_error
from rlu_cli.errors import MismatchError

_OF_GRADIENTS = (
    "embedding_match",
    "misfit",
    "update_max",
    "update_balance",
    "update_rounding",
)
"""Diagnostics that mean nothing where an update is no sum of gradients."""


def head_update(local: Head, reference: Head) -> HeadUpdate:
    """Δ = local − global of the head, refused where the two can't be compared or nothing moved.

    Raises
    ------
    MismatchError
        Shapes that differ, numbers that aren't finite, or an update of exactly zero.
    """
    check_heads(local, reference)
    update = subtract_heads(local, reference)
    check_moved(update)
    return update


def recover_labels(observation: Observation, *, method: str = "auto") -> Recovery:
    """Recover how many samples of each class a client trained on.

        counts ∈ ℕ^N,   Σ_n counts_n = samples seen (m·B, unless the training values say otherwise)

    Parameters
    ----------
    observation : the update, the global head, the training values and the models' statistics
    method : a name of `rlu_cli.core.methods.METHODS`, or ``auto``

    Raises
    ------
    MismatchError, UsageError
        Inputs that don't fit together, or training values out of range.
    """
    chosen = _automatic(observation) if method == AUTO else get_method(method)
    _check_shapes(observation)
    _check_bias(observation, chosen)
    if chosen.needs_residuals and observation.residuals is None:
        raise MismatchError(
            f"expected single samples' residuals, which {chosen.name} works on, found none: fill "
            "Observation.residuals, or choose another method"
        )
    if chosen.needs_update_replays and observation.replayed_update is None:
        raise MismatchError(
            f"expected training that can be replayed, which {chosen.name} works on, found none: pass --aux "
            "with the architecture, or choose another method (schemes with memory can't be replayed)"
        )
    check_training(observation.training)
    check_optimizer(chosen, observation.training)
    if observation.training.optimizer != "sgd":
        return _without_linear_checks(observation, chosen)
    update = without_drift(observation)
    u = normalised_update(observation, update)
    noise = normalised_noise(observation) if observation.noise_told else 0.0
    diagnostics, notes = check_update(
        u, observation.update, observation.head, rounding=observation.rounding, noise=noise
    )
    problem = Problem(observation, u, mean_gradient(observation, update))
    estimate = chosen.solve(problem)
    total = observation.training.samples
    path = problem.path
    match = embedding_match(update, path.solution.z, u, path.confidence, path.embedding_mean)
    unexplained = misfit(
        update, observation.training, observation.start, observation.end, path.position, noise
    )
    moved = motion(observation.start, observation.end)
    coarse = check_coarse(observation.update, resolution=storage_resolution(observation))
    size = None
    if not observation.scaled and not coarse:
        size = size_error(observation, estimate.proportions, moved or 0.0)
    if observation.scaled or size is not None:
        estimate = _without_bounds(estimate)
    return Recovery(
        method=chosen.name,
        total=total,
        counts=round_to_total(estimate.proportions, total),
        estimate=total * estimate.proportions,
        low=estimate.low,
        high=estimate.high,
        presence=estimate.presence,
        diagnostics={
            "residual": None,
            "aux_accuracy": observation.start.overall_accuracy,
            "own_confidence": own_confidence(observation.start),
            "embedding_match": match,
            "misfit": unexplained,
            "motion": moved,
            **diagnostics,
            **estimate.diagnostics,
        },
        warnings=(
            *notes,
            *coarse,
            *check_size(size),
            *check_misfit(unexplained, moved),
            *check_embedding(match, unexplained, moved),
            *assumption_notes(chosen, problem),
            *estimate.warnings,
        ),
    )


def _without_linear_checks(observation: Observation, method: Method) -> Recovery:
    """The recovery where no check applies that takes the update for a sum of gradients."""
    training, update = observation.training, observation.update
    estimate = method.solve(Problem(observation, normalised_update(observation), mean_gradient(observation)))
    if observation.scaled:
        estimate = _without_bounds(estimate)
    moved = update.weight if update.bias is None else update.bias
    return Recovery(
        method=method.name,
        total=training.samples,
        counts=round_to_total(estimate.proportions, training.samples),
        estimate=training.samples * estimate.proportions,
        low=estimate.low,
        high=estimate.high,
        presence=estimate.presence,
        diagnostics={
            "residual": None,
            **dict.fromkeys(_OF_GRADIENTS),
            "aux_accuracy": observation.start.overall_accuracy,
            "own_confidence": own_confidence(observation.start),
            "motion": motion(observation.start, observation.end),
            "update_norm": float(np.linalg.norm(moved)),
            "update_noise": normalised_noise(observation),
            **estimate.diagnostics,
        },
        warnings=(*check_coarse(update, resolution=storage_resolution(observation)), *estimate.warnings),
    )


def _without_bounds(estimate: Estimate) -> Estimate:
    """The counts alone: of an update of another size than training made it, bounds mean nothing."""
    return replace(estimate, low=None, high=None, presence=None)


def _automatic(observation: Observation) -> Method:
    path = observation.residuals
    return best_method(
        observation.training,
        has_bias=stands_for_bias(observation.head, observation.start, observation.noise_std),
        residuals=None if path is None else path.start,
        has_samples=path is not None and path.samples is not None,
        can_replay=path is not None and path.replay is not None,
        can_make_clients=observation.replayed_clients is not None,
    )


def _check_bias(observation: Observation, method: Method) -> None:
    head, start = observation.head, observation.start
    if not method.needs_bias or head.bias is not None:
        return
    why = "found one without"
    if method.or_unit:
        if stands_for_bias(head, start, observation.noise_std):
            return
        why += (
            ", whose update has noise"
            if observation.noise_std
            else ", and no direction of the embeddings in its place (they must be known, and vary little)"
        )
    raise MismatchError(
        f"expected an output layer with a bias, which {method.name} works on, {why}: choose another --method"
    )


def _check_shapes(observation: Observation) -> None:
    N, L = observation.head.num_classes, observation.head.embedding_size
    for name, statistics in (("global", observation.start), ("local", observation.end)):
        if statistics is None:
            continue
        means = statistics.embedding_mean
        found = (statistics.num_classes, L if means is None else means.shape[1])
        if found != (N, L):
            raise MismatchError(
                f"expected {name} statistics of {N} classes and {L} embedding values, "
                f"found {found[0]} and {found[1]}: they are of another network"
            )
