"""From an observed round to label counts: what every method shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlu_cli.core.checks import (
    check_classes,
    check_embedding,
    check_heads,
    check_misfit,
    check_moved,
    check_range,
    check_size,
    check_update,
)
from rlu_cli.core.coarse import check_coarse, coarsening
from rlu_cli.core.embedding import embedding_match, subtract_heads
from rlu_cli.core.gradients import mean_gradient, normalised_update, without_drift
from rlu_cli.core.methods import AUTO, Method, best_method, get_method
from rlu_cli.core.methods.assumptions import assumption_notes
from rlu_cli.core.methods.base import Problem, check_optimizer
from rlu_cli.core.methods.disaggregation import out_of_reach
from rlu_cli.core.misfit import misfit, motion
from rlu_cli.core.noise import normalised_noise
from rlu_cli.core.rounding import round_to_total, whole_bounds
from rlu_cli.core.schemes import check_training, pace
from rlu_cli.core.trained import own_confidence
from rlu_cli.core.types import (
    Estimate,
    Head,
    HeadUpdate,
    Note,
    Observation,
    Recovery,
)
from rlu_cli.core.unit_direction import stands_for_bias
from rlu_cli.core.update_size import size_error
from rlu_cli.core.whole_counts import check_whole, off_whole
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
    return recover_together([observation], method=method)[0]


def recover_together(observations: Sequence[Observation], *, method: str = "auto") -> list[Recovery]:
    """`recover_labels` of several clients, who share what work their method lets them share.

    Each gets the numbers that it gets alone, but for the last digits of the posterior search's mismatch.
    """
    prepared = [_prepared(observation, method) for observation in observations]
    estimates: dict[int, Estimate] = {}
    for one in dict.fromkeys(client.method for client in prepared):
        which = [index for index, client in enumerate(prepared) if client.method is one]
        estimates |= zip(which, one.estimates([prepared[index].problem for index in which]), strict=True)
    return [client.recovery(estimates[index]) for index, client in enumerate(prepared)]


@dataclass(frozen=True)
class _Prepared:
    """A client's problem, and what its update looks like before any method has seen it.

    update : what the gradients made of the head; None where the optimiser isn't linear in them, and no
        check applies that takes the update for their sum
    noise : standard deviation of what is known to lie on u, or to be missing
    """

    method: Method
    problem: Problem
    update: HeadUpdate | None
    noise: float
    diagnostics: dict[str, float | bool | int | None]
    notes: Sequence[Note]

    def recovery(self, estimate: Estimate) -> Recovery:
        """With the method's answer."""
        if self.update is None:
            return self._without_linear_checks(estimate)
        observation, problem = self.problem.observation, self.problem
        path = problem.path
        match = embedding_match(self.update, path.solution.z, problem.u, path.confidence, path.embedding_mean)
        update, divided = self.update, estimate.divided_by or 1.0
        if divided != 1.0:  # before what the scheme adds is taken off
            update = without_drift(replace(observation, update=observation.update.divided(divided)))
        unexplained = misfit(
            update,
            observation.training,
            observation.start,
            observation.end,
            path.position,
            self.noise / divided,
            scaled=observation.scaled,
            variance=estimate.batch_variance,
            shared=observation.shared,
        )
        moved = motion(observation.start, observation.end)
        coarse = coarsening(observation)
        size = off = None
        if not (observation.scaled or estimate.any_size or coarse.any):
            size = size_error(observation, estimate.proportions, moved or 0.0)
            off = off_whole(observation)
        elif estimate.settled is not None:  # single samples told the size, and least squares the counts
            settled = observation.update.divided(estimate.settled)
            off = off_whole(replace(observation, update=settled, scaled=False), exact=True)
        return self._recovery(
            estimate,
            diagnostics={
                "embedding_match": match,
                "misfit": unexplained,
                "motion": moved,
                **self.diagnostics,
            },
            warnings=(
                *self.notes,
                *check_coarse(coarse),
                *check_size(size),
                *check_whole(off),
                *check_misfit(unexplained, moved),
                *check_embedding(match, unexplained, moved),
                *assumption_notes(self.method, problem),
            ),
        )

    def _without_linear_checks(self, estimate: Estimate) -> Recovery:
        observation = self.problem.observation
        update = observation.update
        moved = update.weight if update.bias is None else update.bias
        return self._recovery(
            estimate,
            diagnostics={
                **dict.fromkeys(_OF_GRADIENTS),
                "motion": motion(observation.start, observation.end),
                "update_norm": float(np.linalg.norm(moved)),
                "update_noise": normalised_noise(observation),
            },
            warnings=check_coarse(coarsening(observation)),
        )

    def _recovery(
        self,
        estimate: Estimate,
        *,
        diagnostics: dict[str, float | bool | int | None],
        warnings: Sequence[Note],
    ) -> Recovery:
        """Without bounds where they mean nothing: of an update of another size than training made it."""
        observation = self.problem.observation
        total = observation.training.samples
        found = (*observation.notes, *warnings, *self._clipped_unawares(estimate))
        codes = {note.code for note in found}  # a check and a method may find the same
        said = codes | {note.code for note in estimate.warnings}
        sized = estimate.any_size or not (observation.scaled or "update-misscaled" in said)
        bounded = sized and "counts-not-whole" not in said
        counts = round_to_total(estimate.proportions, total)
        low = high = widths = None
        if bounded and estimate.low is not None and estimate.high is not None:
            low, high = whole_bounds(estimate.low, estimate.high, counts)
            sure = np.rint(estimate.low) == np.rint(estimate.high)  # both say the same whole number
            widths = np.where(sure, 0.0, estimate.high - estimate.low)
        return Recovery(
            method=self.method.name,
            total=total,
            counts=counts,
            estimate=total * estimate.proportions,
            low=low,
            high=high,
            presence=estimate.presence if bounded else None,
            diagnostics={
                "residual": None,
                "aux_accuracy": observation.start.overall_accuracy,
                "own_confidence": own_confidence(observation.start),
                **diagnostics,
                **estimate.diagnostics,
                **({} if estimate.divided_by is None else {"update_divided_by": estimate.divided_by}),
            },
            warnings=(*found, *(note for note in estimate.warnings if note.code not in codes)),
            widths=widths,
        )

    def _clipped_unawares(self, estimate: Estimate) -> tuple[Note, ...]:
        """A warning where a method that knows of clipping had to leave the answer to one that doesn't."""
        if self.problem.observation.clipping is None or estimate.any_size:
            return ()
        message = (
            "the update was clipped, and the method that answers doesn't know by how much: the counts are "
            "too even, and there are no bounds"
        )
        return (Note("update-clipped", message),)


def _prepared(observation: Observation, method: str) -> _Prepared:
    """The client's problem, refused where its parts or the method don't fit."""
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
    check_range(observation)
    if observation.training.optimizer != "sgd":
        problem = Problem(observation, normalised_update(observation), mean_gradient(observation))
        return _Prepared(chosen, problem, None, 0.0, {}, ())
    update = without_drift(observation)
    u = normalised_update(observation, update)
    bias, coarse, scale = observation.update.bias, coarsening(observation), pace(observation.training)
    told = normalised_noise(observation) if observation.noise_told else 0.0
    noise = math.hypot(told, coarse.deviation / scale)
    lost = 0.0 if bias is None else coarse.most_lost(bias) / scale
    rounded = (coarse.bias_step or coarse.step) / 2 / scale
    diagnostics, notes = check_update(
        u,
        observation.update,
        observation.head,
        rounding=observation.rounding,
        noise=told,
        lost=lost,
        rounded=rounded,
    )
    problem = Problem(observation, u, mean_gradient(observation, update))
    return _Prepared(chosen, problem, update, noise, {**diagnostics}, notes)


def _automatic(observation: Observation) -> Method:
    path = observation.residuals
    return best_method(
        observation.training,
        has_bias=stands_for_bias(observation.head, observation.start, observation.noise_std),
        residuals=None if path is None else path.start,
        has_samples=path is not None and path.samples is not None,
        can_replay=path is not None and path.replay is not None,
        can_make_clients=observation.replayed_clients is not None,
        separable=lambda: out_of_reach(observation) is None,
        alone=observation.replayed_clients is not None and observation.replayed_clients.own is not None,
        scaled=observation.scaled,
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
    check_classes(N)
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
